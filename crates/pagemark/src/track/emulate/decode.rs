//! What a store instruction writes, and how it is done through another address.

use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic, OpKind, Register};

/// The longest instruction, bytes.
pub const LONGEST: usize = 15;

/// What executes an instruction elsewhere: the instruction, and a return.
pub type Code = [u8; LONGEST + 1];

/// A decoded instruction.
#[derive(Clone, Copy, Debug)]
pub struct Store {
    /// Bytes of the instruction.
    pub length: u8,
    pub kind: Kind,
}

/// How it is emulated.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// One write to a memory operand. The instruction is executed as it is, except that its operand
    /// is addressed by `scratch`, a register that it does not use otherwise.
    Execute {
        operand: Operand,
        /// Bytes that it writes, at most.
        bytes: u8,
        /// It stores from a vector or mask register.
        uses_vectors: bool,
        scratch: usize,
        code: Code,
        code_length: u8,
    },
    /// `stos`, with the length of a unit in bytes.
    Fill { unit: u8, repeats: bool },
    /// `movs`, with the length of a unit in bytes.
    Copy { unit: u8, repeats: bool },
    /// Not emulated.
    Other,
}

/// An address: registers by their index in the kernel's register array.
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    pub base: Option<u8>,
    pub index: Option<u8>,
    pub scale: u8,
    /// For an address relative to the instruction pointer, the address itself.
    pub displacement: u64,
}

/// Decodes the instruction at `address`, of which `bytes` are the first. None if it is longer than
/// they are, or none at all. Allocates nothing once [`warm_up`] was called.
pub fn decode(bytes: &[u8], address: u64) -> Option<Store> {
    let mut decoder = Decoder::with_ip(64, bytes, address, DecoderOptions::NONE);
    let instruction = decoder.decode();
    if instruction.is_invalid() {
        return None;
    }
    let length = instruction.len();
    let kind = kind(&instruction, &bytes[..length]).unwrap_or(Kind::Other);
    Some(Store { length: length as u8, kind })
}

/// Builds the decoder's tables, which are made at its first use.
pub fn warm_up() {
    decode(&[0x90], 0);
}

fn kind(instruction: &Instruction, bytes: &[u8]) -> Option<Kind> {
    if matches!(instruction.memory_segment(), Register::FS | Register::GS) {
        return None;
    }
    let repeats = instruction.has_rep_prefix() || instruction.has_repne_prefix();
    if instruction.op0_kind() == OpKind::MemoryESRDI {
        let unit = instruction.memory_size().size() as u8;
        return match instruction.mnemonic() {
            Mnemonic::Stosb | Mnemonic::Stosw | Mnemonic::Stosd | Mnemonic::Stosq => Some(Kind::Fill { unit, repeats }),
            Mnemonic::Movsb | Mnemonic::Movsw | Mnemonic::Movsd | Mnemonic::Movsq
                if instruction.op1_kind() == OpKind::MemorySegRSI =>
            {
                Some(Kind::Copy { unit, repeats })
            }
            _ => None,
        };
    }
    if instruction.op0_kind() != OpKind::Memory || instruction.is_vsib() {
        return None;
    }
    let bytes_written = instruction.memory_size().size();
    let registers = (1..instruction.op_count()).filter(|&index| instruction.op_kind(index) == OpKind::Register);
    let registers: some::Registers = registers.map(|index| instruction.op_register(index)).collect();
    let is_vector = |register: &Register| register.is_vector_register() || register.is_k();
    let uses_vectors = registers.iter().any(is_vector) || instruction.op_mask() != Register::None;
    let all_known = registers
        .iter()
        .all(|register| is_vector(register) || (register.is_gpr() && register.full_register() != Register::RSP));
    let is_store = if uses_vectors { stores_vectors(instruction.mnemonic()) } else { stores_integers(instruction) };
    if !is_store || !all_known || !(1..=64).contains(&bytes_written) {
        return None;
    }
    // An instruction has at most two registers besides its operand's; those it uses without naming
    // are others than these.
    let is_used = |scratch: &Register| registers.iter().any(|register| register.full_register() == *scratch);
    let scratch = [Register::RSI, Register::RDI, Register::RBX].into_iter().find(|scratch| !is_used(scratch))?;
    if scratch == Register::RBX && matches!(instruction.mnemonic(), Mnemonic::Cmpxchg8b | Mnemonic::Cmpxchg16b) {
        return None;
    }
    let (code, code_length) = redirected(bytes, scratch.number() as u8)?;
    let operand = Operand {
        base: index_of(instruction.memory_base())?,
        index: index_of(instruction.memory_index())?,
        scale: instruction.memory_index_scale() as u8,
        displacement: instruction.memory_displacement64(),
    };
    let scratch = usize::from(index_of(scratch)??);
    Some(Kind::Execute { operand, bytes: bytes_written as u8, uses_vectors, scratch, code, code_length })
}

/// True if it writes its first operand, whole, with no effect but on that, general registers and
/// arithmetic flags.
fn stores_integers(instruction: &Instruction) -> bool {
    use Mnemonic as M;
    match instruction.mnemonic() {
        M::Mov | M::Movnti | M::Movbe => instruction.op_count() == 2,
        // With a bit number in a register they may write elsewhere.
        M::Bts | M::Btr | M::Btc => instruction.op1_kind() != OpKind::Register,
        mnemonic => matches!(
            mnemonic,
            M::Add
                | M::Or
                | M::Adc
                | M::Sbb
                | M::And
                | M::Sub
                | M::Xor
                | M::Inc
                | M::Dec
                | M::Neg
                | M::Not
                | M::Xchg
                | M::Xadd
                | M::Cmpxchg
                | M::Cmpxchg8b
                | M::Cmpxchg16b
                | M::Rol
                | M::Ror
                | M::Rcl
                | M::Rcr
                | M::Shl
                | M::Shr
                | M::Sal
                | M::Sar
                | M::Shld
                | M::Shrd
                | M::Seta
                | M::Setae
                | M::Setb
                | M::Setbe
                | M::Sete
                | M::Setg
                | M::Setge
                | M::Setl
                | M::Setle
                | M::Setne
                | M::Setno
                | M::Setnp
                | M::Setns
                | M::Seto
                | M::Setp
                | M::Sets
        ),
    }
}

/// True if it only moves what vector and mask registers hold to its first operand, or less of it.
fn stores_vectors(mnemonic: Mnemonic) -> bool {
    use Mnemonic as M;
    matches!(
        mnemonic,
        M::Movss
            | M::Movsd
            | M::Movaps
            | M::Movapd
            | M::Movups
            | M::Movupd
            | M::Movdqa
            | M::Movdqu
            | M::Movd
            | M::Movq
            | M::Movlps
            | M::Movlpd
            | M::Movhps
            | M::Movhpd
            | M::Movntps
            | M::Movntpd
            | M::Movntdq
            | M::Pextrb
            | M::Pextrw
            | M::Pextrd
            | M::Pextrq
            | M::Extractps
            | M::Vmovss
            | M::Vmovsd
            | M::Vmovaps
            | M::Vmovapd
            | M::Vmovups
            | M::Vmovupd
            | M::Vmovdqa
            | M::Vmovdqu
            | M::Vmovd
            | M::Vmovq
            | M::Vmovlps
            | M::Vmovlpd
            | M::Vmovhps
            | M::Vmovhpd
            | M::Vmovntps
            | M::Vmovntpd
            | M::Vmovntdq
            | M::Vmovdqa32
            | M::Vmovdqa64
            | M::Vmovdqu8
            | M::Vmovdqu16
            | M::Vmovdqu32
            | M::Vmovdqu64
            | M::Vmovsh
            | M::Vmovw
            | M::Vpextrb
            | M::Vpextrw
            | M::Vpextrd
            | M::Vpextrq
            | M::Vextractps
            | M::Vextractf128
            | M::Vextracti128
            | M::Vextractf32x4
            | M::Vextractf32x8
            | M::Vextractf64x2
            | M::Vextractf64x4
            | M::Vextracti32x4
            | M::Vextracti32x8
            | M::Vextracti64x2
            | M::Vextracti64x4
            | M::Vmaskmovps
            | M::Vmaskmovpd
            | M::Vpmaskmovd
            | M::Vpmaskmovq
            | M::Vpmovdb
            | M::Vpmovdw
            | M::Vpmovqb
            | M::Vpmovqd
            | M::Vpmovqw
            | M::Vpmovwb
            | M::Kmovb
            | M::Kmovw
            | M::Kmovd
            | M::Kmovq
    )
}

/// The index of a 64-bit register; `Some(None)` for no register, or the instruction pointer, whose
/// part is in the displacement. None for others.
fn index_of(register: Register) -> Option<Option<u8>> {
    let index = match register {
        Register::None | Register::RIP => return Some(None),
        Register::RAX => libc::REG_RAX,
        Register::RBX => libc::REG_RBX,
        Register::RCX => libc::REG_RCX,
        Register::RDX => libc::REG_RDX,
        Register::RSI => libc::REG_RSI,
        Register::RDI => libc::REG_RDI,
        Register::RBP => libc::REG_RBP,
        Register::RSP => libc::REG_RSP,
        Register::R8 => libc::REG_R8,
        Register::R9 => libc::REG_R9,
        Register::R10 => libc::REG_R10,
        Register::R11 => libc::REG_R11,
        Register::R12 => libc::REG_R12,
        Register::R13 => libc::REG_R13,
        Register::R14 => libc::REG_R14,
        Register::R15 => libc::REG_R15,
        _ => return None,
    };
    Some(Some(index as u8))
}

/// The same instruction with a memory operand that the low register `base` alone addresses, and a
/// return behind it. None for encodings that are not understood.
fn redirected(bytes: &[u8], base: u8) -> Option<(Code, u8)> {
    debug_assert!(base < 8 && base != 4 && base != 5, "these have another meaning in an operand");
    let mut out = [0u8; LONGEST + 1];
    let mut written = 0;
    let mut put = |byte: u8| {
        *out.get_mut(written)? = byte;
        written += 1;
        Some(())
    };
    let mut rest = bytes.iter().copied().peekable();
    // Prefixes, without those of segment and address size, which only concern the operand.
    while let Some(prefix) =
        rest.next_if(|byte| matches!(byte, 0x66 | 0xf2 | 0xf3 | 0xf0 | 0x2e | 0x36 | 0x3e | 0x26 | 0x67))
    {
        if matches!(prefix, 0x66 | 0xf2 | 0xf3 | 0xf0) {
            put(prefix)?;
        }
    }
    // REX, without the bits that extend the operand's registers.
    if let Some(rex) = rest.next_if(|byte| byte & 0xf0 == 0x40) {
        put(rex & !0b011)?;
    }
    let opcode = rest.next()?;
    put(opcode)?;
    match opcode {
        // Those bits again, inverted, in VEX and EVEX; then what else the prefix has, and the
        // opcode.
        0xc4 => {
            put(rest.next()? | 0x60)?;
            put(rest.next()?)?;
            put(rest.next()?)?;
        }
        0xc5 => {
            put(rest.next()?)?;
            put(rest.next()?)?;
        }
        0x62 => {
            put(rest.next()? | 0x60)?;
            put(rest.next()?)?;
            put(rest.next()?)?;
            put(rest.next()?)?;
        }
        0x0f => {
            let second = rest.next()?;
            put(second)?;
            if matches!(second, 0x38 | 0x3a) {
                put(rest.next()?)?;
            }
        }
        // An address without the byte that tells the operand.
        0xa0..=0xa3 => return None,
        _ => {}
    }
    let operand = rest.next()?;
    let (form, memory) = (operand >> 6, operand & 7);
    let displacement_bytes = match (form, memory) {
        (3, _) => return None,
        (0, 5) => 4,
        (0, 4) if rest.next()? & 7 == 5 => 4,
        (0, _) => 0,
        (1, 4) => {
            rest.next()?;
            1
        }
        (1, _) => 1,
        (_, 4) => {
            rest.next()?;
            4
        }
        _ => 4,
    };
    put(operand & 0b0011_1000 | base)?;
    for _ in 0..displacement_bytes {
        rest.next()?;
    }
    // What is left is an immediate value.
    for byte in rest {
        put(byte)?;
    }
    put(0xc3)?;
    Some((out, written as u8))
}

/// A few registers, without allocation.
mod some {
    use super::Register;

    #[derive(Default)]
    pub struct Registers {
        registers: [Register; 5],
        count: usize,
    }

    impl Registers {
        pub fn iter(&self) -> impl Iterator<Item = &Register> {
            self.registers[..self.count].iter()
        }
    }

    impl FromIterator<Register> for Registers {
        fn from_iter<I: IntoIterator<Item = Register>>(registers: I) -> Self {
            let mut some = Registers::default();
            for (place, register) in some.registers.iter_mut().zip(registers) {
                *place = register;
                some.count += 1;
            }
            some
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(bytes: &[u8]) -> Option<(Vec<u8>, u8)> {
        match decode(bytes, 0x1000)?.kind {
            Kind::Execute { code, code_length, bytes, .. } => Some((code[..code_length.into()].to_vec(), bytes)),
            _ => None,
        }
    }

    /// The instruction that was made writes to `[rsi]` or `[rdi]`, and is the same else.
    fn is_redirected(bytes: &[u8]) {
        let original = Decoder::with_ip(64, bytes, 0x1000, DecoderOptions::NONE).decode();
        let (code, _) = code(bytes).unwrap_or_else(|| panic!("{bytes:x?} is not emulated"));
        let made = Decoder::with_ip(64, &code, 0x1000, DecoderOptions::NONE).decode();
        assert_eq!(code.len(), made.len() + 1, "{code:x?}");
        assert_eq!((made.code(), made.op_count()), (original.code(), original.op_count()), "{bytes:x?} {code:x?}");
        assert!(matches!(made.memory_base(), Register::RSI | Register::RDI), "{code:x?}");
        assert_eq!((made.memory_index(), made.memory_displacement64()), (Register::None, 0), "{code:x?}");
        assert_eq!((made.op_mask(), made.has_lock_prefix()), (original.op_mask(), original.has_lock_prefix()));
        for index in 1..made.op_count() {
            assert_eq!(made.op_kind(index), original.op_kind(index));
            if made.op_kind(index) == OpKind::Register {
                assert_eq!(made.op_register(index), original.op_register(index), "{bytes:x?} {code:x?}");
                assert_ne!(made.op_register(index).full_register(), made.memory_base());
            } else {
                assert_eq!(made.immediate(index), original.immediate(index));
            }
        }
    }

    #[test]
    fn stores_are_redirected() {
        for bytes in [
            &[0x89, 0x07][..],                                 // mov [rdi], eax
            &[0x49, 0x89, 0x44, 0xcd, 0x10],                   // mov [r13 + rcx*8 + 16], rax
            &[0x48, 0x89, 0x3d, 1, 2, 3, 4],                   // mov [rip + …], rdi
            &[0x48, 0xc7, 0x84, 0x24, 8, 0, 0, 0, 1, 0, 0, 0], // mov qword [rsp + 8], 1
            &[0x40, 0x88, 0x37],                               // mov [rdi], sil
            &[0x88, 0x30],                                     // mov [rax], dh
            &[0x66, 0x41, 0x89, 0x14, 0x24],                   // mov [r12], dx
            &[0xf0, 0x49, 0x0f, 0xb1, 0x54, 0x24, 0x08],       // lock cmpxchg [r12 + 8], rdx
            &[0xf0, 0x48, 0x0f, 0xc7, 0x0f],                   // lock cmpxchg16b [rdi]
            &[0x48, 0x0f, 0xa5, 0x37],                         // shld [rdi], rsi, cl
            &[0x0f, 0x94, 0x45, 0xff],                         // sete [rbp - 1]
            &[0x0f, 0x11, 0x04, 0x25, 0, 0x10, 0, 0],          // movups [0x1000], xmm0
            &[0x66, 0x0f, 0x3a, 0x14, 0x07, 3],                // pextrb [rdi], xmm0, 3
            &[0xc5, 0xfe, 0x7f, 0x44, 0x8f, 0x20],             // vmovdqu [rdi + rcx*4 + 32], ymm0
            &[0xc4, 0x41, 0x7e, 0x7f, 0x3c, 0x24],             // vmovdqu [r12], ymm15
            &[0x62, 0xd1, 0x7c, 0x49, 0x11, 0x4c, 0x24, 0x01], // vmovups [r12 + 64] {k1}, zmm1
            &[0xc5, 0xf8, 0x91, 0x0f],                         // kmovw [rdi], k1
        ] {
            is_redirected(bytes);
        }
    }

    #[test]
    fn what_is_not_understood_is_not_emulated() {
        for bytes in [
            &[0x50][..],                                 // push rax
            &[0x64, 0x48, 0x89, 0x04, 0x25, 0, 0, 0, 0], // mov fs:[0], rax
            &[0x48, 0x89, 0x27],                         // mov [rdi], rsp
            &[0xdd, 0x1f],                               // fstp qword [rdi]
            &[0x0f, 0xae, 0x07],                         // fxsave [rdi]
            &[0x0f, 0xae, 0x1f],                         // stmxcsr [rdi]
            &[0x0f, 0x7f, 0x07],                         // movq [rdi], mm0
            &[0x48, 0x0f, 0xab, 0x07],                   // bts [rdi], rax
            &[0x8f, 0x07],                               // pop [rdi]
            &[0x8c, 0x1f],                               // mov [rdi], ds
            &[0x62, 0xf2, 0x7d, 0x49, 0xa0, 0x04, 0x8f], // vpscatterdd [rdi + zmm1*4] {k1}, zmm0
            &[0xa3, 0, 0, 0, 0, 0, 0, 0, 0],             // mov [0], eax
        ] {
            assert!(code(bytes).is_none(), "{bytes:x?}");
        }
        assert!(decode(&[0x48, 0x89], 0).is_none(), "half an instruction");
    }
}
