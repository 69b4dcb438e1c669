//! Which memory an instruction accesses.

use iced_x86::{Decoder, DecoderOptions, InstructionInfoFactory, OpAccess, Register};
use kvm_bindings::kvm_regs;

/// The longest instruction, bytes.
pub const LONGEST: usize = 15;

/// A part of memory that an instruction accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operand {
    /// Its first address.
    pub address: u64,
    /// Its bytes.
    pub len: u64,
    /// Whether the instruction may write there.
    pub writes: bool,
}

/// What the instruction in `code` accesses with these registers and bases of FS and GS: first what
/// it reads alone. Addresses that are in vector registers are left out.
pub fn of(code: &[u8], registers: &kvm_regs, (fs, gs): (u64, u64)) -> Vec<Operand> {
    let mut decoder = Decoder::with_ip(64, code, registers.rip, DecoderOptions::NONE);
    let instruction = decoder.decode();
    if instruction.is_invalid() {
        return Vec::new();
    }
    let mut factory = InstructionInfoFactory::new();
    let value = |register: Register, _, _| match register {
        Register::FS => Some(fs),
        Register::GS => Some(gs),
        Register::CS | Register::DS | Register::ES | Register::SS => Some(0),
        register => general(register, registers),
    };
    let memory = factory.info(&instruction).used_memory();
    let operands = memory.iter().filter_map(|memory| {
        let writes = match memory.access() {
            OpAccess::Read | OpAccess::CondRead => false,
            OpAccess::None | OpAccess::NoMemAccess => return None,
            _ => true,
        };
        let len = (memory.memory_size().size() as u64).max(1);
        Some(Operand { address: memory.virtual_address(0, value)?, len, writes })
    });
    let mut operands: Vec<Operand> = operands.collect();
    operands.sort_by_key(|operand| operand.writes);
    operands
}

/// The value of a general register.
fn general(register: Register, registers: &kvm_regs) -> Option<u64> {
    let whole = match register.full_register() {
        Register::RAX => registers.rax,
        Register::RBX => registers.rbx,
        Register::RCX => registers.rcx,
        Register::RDX => registers.rdx,
        Register::RSI => registers.rsi,
        Register::RDI => registers.rdi,
        Register::RSP => registers.rsp,
        Register::RBP => registers.rbp,
        Register::R8 => registers.r8,
        Register::R9 => registers.r9,
        Register::R10 => registers.r10,
        Register::R11 => registers.r11,
        Register::R12 => registers.r12,
        Register::R13 => registers.r13,
        Register::R14 => registers.r14,
        Register::R15 => registers.r15,
        _ => return None,
    };
    Some(if register.is_gpr32() { whole & 0xffff_ffff } else { whole })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_are_found_in_the_order_of_the_processor() {
        let registers = kvm_regs {
            rip: 0x1000,
            rsi: 0x2000,
            rdi: 0x3000,
            rsp: 0x4000,
            rax: 0x1_0000_0010,
            rcx: 5,
            ..kvm_regs::default()
        };
        let found = |code: &[u8]| -> Vec<(u64, u64, bool)> {
            let all = of(code, &registers, (0x7000, 0x8000));
            all.into_iter().map(|operand| (operand.address, operand.len, operand.writes)).collect()
        };
        // movsb; rep movsq
        assert_eq!(found(&[0xa4]), [(0x2000, 1, false), (0x3000, 1, true)]);
        let repeated = found(&[0xf3, 0x48, 0xa5]);
        assert_eq!(
            repeated.iter().map(|operand| (operand.0, operand.2)).collect::<Vec<_>>(),
            [(0x2000, false), (0x3000, true)]
        );
        // push qword ptr [rsi + 8]
        assert_eq!(found(&[0xff, 0x76, 0x08]), [(0x2008, 8, false), (0x3ff8, 8, true)]);
        // inc dword ptr [rdi + rcx*4]; mov eax, [eax + 1]; mov rax, fs:[0x10]; mov al, [rip + 2]
        assert_eq!(found(&[0xff, 0x04, 0x8f]), [(0x3014, 4, true)]);
        assert_eq!(found(&[0x67, 0x8b, 0x40, 0x01]), [(0x11, 4, false)]);
        assert_eq!(found(&[0x64, 0x48, 0x8b, 0x04, 0x25, 0x10, 0, 0, 0]), [(0x7010, 8, false)]);
        assert_eq!(found(&[0x8a, 0x05, 2, 0, 0, 0]), [(0x1008, 1, false)]);
        // nop dword ptr [rax]; ret; no instruction
        assert_eq!(found(&[0x0f, 0x1f, 0x00]), []);
        assert_eq!(found(&[0xc3]), [(0x4000, 8, false)]);
        assert_eq!(found(&[0x06]), []);
        assert_eq!(found(&[]), []);
    }
}
