//! Signals of the program: actions, frames on its stack, and the return from them.
//!
//! The kernel keeps what it would keep without the machine: the thread's mask, pending signals, the
//! actions by default and ignored signals. Only for a signal that has a handler of the program does
//! this process have a handler of its own (`sys::signals`), which takes note of it.

use kvm_bindings::{kvm_regs, kvm_xsave};

use crate::sys::host_call::Call;
use crate::sys::program_memory::{self, Fault};
use crate::sys::signals::{self, Action, ArrivedSignal, INFO_BYTES};
use crate::thread::Thread;
use crate::vcpu::{USER_CODE, USER_DATA, Vcpu};

use super::{Outcome, Refusal};

const SIGNALS: u64 = 64;
const ALL: u64 = u64::MAX;
const ACTION_BYTES: usize = 32;
const SA_RESTORER: u64 = 0x0400_0000;

const SS_AUTODISARM: u32 = 1 << 31;
const SS_DISABLE: u32 = 2;
const SS_ONSTACK: u32 = 1;

/// Bytes below the stack pointer that belong to the function (System V ABI).
const RED_ZONE: u64 = 128;
/// The frame: the return address, `struct ucontext`, `siginfo_t`.
const CONTEXT_AT: usize = 8;
const REGISTERS_AT: usize = CONTEXT_AT + 40;
const MASK_AT: usize = REGISTERS_AT + 256;
const INFO_AT: usize = MASK_AT + 8;
const FRAME_BYTES: usize = INFO_AT + INFO_BYTES;
/// Within the saved registers: the address of the vector state.
const STATE_POINTER_AT: usize = REGISTERS_AT + 23 * 8;
/// `UC_FP_XSTATE`, `UC_SIGCONTEXT_SS`, `UC_STRICT_RESTORE_SS`.
const CONTEXT_FLAGS: u64 = 7;

/// Bytes of the legacy part of the vector state, and where Linux describes the rest in it.
const LEGACY_BYTES: usize = 512;
const DESCRIPTION_AT: usize = 464;
const MAGIC_1: u32 = 0x4650_5853;
const MAGIC_2: u32 = 0x4650_5845;

/// The alternate stack of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AlternateStack {
    start: u64,
    flags: u32,
    size: u64,
}

impl Default for AlternateStack {
    fn default() -> AlternateStack {
        AlternateStack { start: 0, flags: SS_DISABLE, size: 0 }
    }
}

impl AlternateStack {
    fn has(&self, stack: u64) -> bool {
        self.flags & SS_AUTODISARM == 0 && stack > self.start && stack - self.start <= self.size
    }

    fn bytes(&self, stack: u64) -> [u8; 24] {
        let flags = match self.size {
            0 => SS_DISABLE,
            _ if self.has(stack) => SS_ONSTACK | self.flags,
            _ => self.flags,
        };
        let mut bytes = [0; 24];
        bytes[..8].copy_from_slice(&self.start.to_le_bytes());
        bytes[8..12].copy_from_slice(&flags.to_le_bytes());
        bytes[16..].copy_from_slice(&self.size.to_le_bytes());
        bytes
    }

    fn set(&mut self, bytes: &[u8], stack: u64, least: u64) -> Result<(), i32> {
        if self.has(stack) {
            return Err(libc::EPERM);
        }
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap_or_default());
        let (start, flags, size) = (word(0), word(8) as u32, word(16));
        match flags & !SS_AUTODISARM {
            SS_DISABLE => *self = AlternateStack { start: 0, flags, size: 0 },
            0 | SS_ONSTACK if size < least => return Err(libc::ENOMEM),
            0 | SS_ONSTACK => *self = AlternateStack { start, flags: flags & SS_AUTODISARM, size },
            _ => return Err(libc::EINVAL),
        }
        Ok(())
    }
}

/// The signal mask that holds while `call` waits, if it has one.
pub fn mask_of(call: &Call) -> Option<u64> {
    let [first, _, _, fourth, fifth, sixth] = call.arguments;
    let at = match call.number as i64 {
        libc::SYS_rt_sigsuspend => first,
        libc::SYS_ppoll => fourth,
        libc::SYS_epoll_pwait | libc::SYS_epoll_pwait2 => fifth,
        // Its address, and its length.
        libc::SYS_pselect6 if sixth != 0 => program_memory::read_words(sixth, 1).ok()?[0],
        _ => 0,
    };
    if at == 0 {
        return None;
    }
    let unblockable = bit(libc::SIGKILL as u32) | bit(libc::SIGSTOP as u32);
    Some(program_memory::read_words(at, 1).ok()?[0] & !unblockable)
}

/// What a `siginfo_t` of a fault says.
pub fn fault_info(number: u32, code: i32, address: u64) -> [u8; INFO_BYTES] {
    let mut info = [0; INFO_BYTES];
    info[..4].copy_from_slice(&number.to_le_bytes());
    info[8..12].copy_from_slice(&code.to_le_bytes());
    info[16..24].copy_from_slice(&address.to_le_bytes());
    info
}

fn bit(number: u32) -> u64 {
    1 << (number - 1)
}

/// Bytes of the vector state with `components`, in the layout of `XSAVE`.
fn state_bytes(components: u64) -> usize {
    let leaf = |index| std::arch::x86_64::__cpuid_count(0xd, index);
    let ends = (2..63).filter(|index| components >> index & 1 != 0).map(leaf).map(|leaf| leaf.eax + leaf.ebx);
    ends.max().unwrap_or(0).max(LEGACY_BYTES as u32 + 64) as usize
}

/// The vector state of `vcpu` as it lies in a frame.
pub fn save_state(vcpu: &Vcpu) -> Result<Vec<u8>, crate::error::Error> {
    let components = vcpu.vector_components();
    let len = state_bytes(components);
    let state = vcpu.vector_state()?;
    let mut bytes: Vec<u8> = state.region.iter().flat_map(|word| word.to_le_bytes()).take(len).collect();
    let description = &mut bytes[DESCRIPTION_AT..LEGACY_BYTES];
    description.fill(0);
    description[..4].copy_from_slice(&MAGIC_1.to_le_bytes());
    description[4..8].copy_from_slice(&(len as u32 + 4).to_le_bytes());
    description[8..16].copy_from_slice(&components.to_le_bytes());
    description[16..20].copy_from_slice(&(len as u32).to_le_bytes());
    bytes.extend(MAGIC_2.to_le_bytes());
    Ok(bytes)
}

/// The vector state that lies at `address`; the initial state if that is 0.
fn load_state(vcpu: &Vcpu, address: u64) -> Result<kvm_xsave, Fault> {
    let components = vcpu.vector_components();
    let len = state_bytes(components);
    let mut bytes = vec![0; len];
    if address != 0 {
        program_memory::read(address, &mut bytes[..LEGACY_BYTES])?;
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap_or_default());
        let is_extended = word(DESCRIPTION_AT) == MAGIC_1 && word(DESCRIPTION_AT + 16) as usize == len;
        let mut magic = [0; 4];
        if is_extended
            && program_memory::read(address + len as u64, &mut magic).is_ok()
            && u32::from_le_bytes(magic) == MAGIC_2
        {
            program_memory::read(address, &mut bytes)?;
            let used = u64::from_le_bytes(bytes[LEGACY_BYTES..LEGACY_BYTES + 8].try_into().unwrap_or_default());
            bytes[LEGACY_BYTES..LEGACY_BYTES + 64].fill(0);
            bytes[LEGACY_BYTES..LEGACY_BYTES + 8].copy_from_slice(&(used & components).to_le_bytes());
        } else {
            bytes[LEGACY_BYTES] = 3;
        }
        // Reserved bits of MXCSR would be refused.
        bytes[26] = 0;
        bytes[27] = 0;
    } else {
        bytes[..2].copy_from_slice(&0x37fu16.to_le_bytes());
        bytes[24..28].copy_from_slice(&0x1f80u32.to_le_bytes());
    }
    let mut state = kvm_xsave::default();
    for (word, bytes) in state.region.iter_mut().zip(bytes.chunks(4)) {
        *word = u32::from_le_bytes(bytes.try_into().unwrap_or_default());
    }
    Ok(state)
}

/// What a signal frame has of a thread.
pub struct Frame {
    /// The registers, but for the bases of segments.
    pub registers: kvm_regs,
    /// The signal mask.
    pub mask: u64,
    /// The alternate stack.
    pub alternate: AlternateStack,
    /// Where the vector state is.
    pub state_at: u64,
}

impl Frame {
    /// Bytes of a frame.
    pub const BYTES: usize = FRAME_BYTES;

    /// As the kernel writes it. `fault` is the thread's last one: error code, vector, address.
    pub fn bytes(&self, restorer: u64, fault: (u64, u64, u64), info: &[u8; INFO_BYTES]) -> [u8; FRAME_BYTES] {
        let mut frame = [0u8; FRAME_BYTES];
        let mut put = |at: usize, value: u64| frame[at..at + 8].copy_from_slice(&value.to_le_bytes());
        put(0, restorer);
        put(CONTEXT_AT, CONTEXT_FLAGS);
        let r = &self.registers;
        let saved = [
            r.r8, r.r9, r.r10, r.r11, r.r12, r.r13, r.r14, r.r15, r.rdi, r.rsi, r.rbp, r.rbx, r.rdx, r.rax, r.rcx,
            r.rsp, r.rip, r.rflags,
        ];
        for (index, value) in saved.into_iter().enumerate() {
            put(REGISTERS_AT + index * 8, value);
        }
        put(REGISTERS_AT + 18 * 8, u64::from(USER_CODE) | u64::from(USER_DATA) << 48);
        let (code, vector, address) = fault;
        put(REGISTERS_AT + 19 * 8, code);
        put(REGISTERS_AT + 20 * 8, vector);
        put(REGISTERS_AT + 21 * 8, self.mask);
        put(REGISTERS_AT + 22 * 8, address);
        put(STATE_POINTER_AT, self.state_at);
        put(MASK_AT, self.mask);
        frame[CONTEXT_AT + 16..CONTEXT_AT + 40].copy_from_slice(&self.alternate.bytes(r.rsp));
        frame[INFO_AT..].copy_from_slice(info);
        frame
    }
}

impl Thread {
    /// `rt_sigaction`.
    pub(super) fn rt_sigaction(&mut self, [number, new, old, size, ..]: [u64; 6]) -> Result<i64, Refusal> {
        if !(1..=SIGNALS).contains(&number) || size != 8 {
            return Err(libc::EINVAL.into());
        }
        let action = if new == 0 {
            None
        } else {
            let mut words = [0u8; ACTION_BYTES];
            program_memory::read(new, &mut words)?;
            let word = |at: usize| u64::from_le_bytes(words[at..at + 8].try_into().unwrap_or_default());
            Some(Action { handler: word(0), flags: word(8), restorer: word(16), mask: word(24) })
        };
        let before = self.process.set_action(number as u32, action)?;
        if old != 0 {
            self.write_words(old, &[before.handler, before.flags, before.restorer, before.mask])?;
        }
        Ok(0)
    }

    /// `sigaltstack`.
    pub(super) fn sigaltstack(&mut self, new: u64, old: u64) -> Result<i64, Refusal> {
        let stack = self.vcpu.registers().rsp;
        let before = self.alternate.bytes(stack);
        if new != 0 {
            let mut bytes = [0; 24];
            program_memory::read(new, &mut bytes)?;
            // Whether a frame has room is seen when there is one.
            self.alternate.set(&bytes, stack, libc::MINSIGSTKSZ as u64)?;
        }
        if old != 0 {
            self.write(old, &before)?;
        }
        Ok(0)
    }

    /// Delivers the signal that waits, if there is one.
    pub(crate) fn deliver(&mut self) {
        if let Some(arrived) = self.slot.take() {
            let mask = self.deliver_one(&arrived);
            signals::mask(Some(mask));
        }
    }

    /// Delivers `arrived`. Returns the mask with which the program goes on.
    fn deliver_one(&mut self, arrived: &ArrivedSignal) -> u64 {
        let action = self.process.action(arrived.number);
        let during = self.call_mask.take().unwrap_or(arrived.mask);
        if action.handler <= 1 {
            // The action has changed since: the kernel applies it.
            self.send_again(arrived);
            return arrived.mask;
        }
        self.enter_handler(arrived.number, &action, &arrived.info, (arrived.mask, during))
    }

    fn send_again(&self, arrived: &ArrivedSignal) {
        signals::send_to_self(arrived.number, &arrived.info);
    }

    /// The program has done what the processor does not allow: it gets `info`, or ends by the
    /// signal.
    pub(crate) fn force(&mut self, info: &[u8; INFO_BYTES]) {
        let number = u32::from_le_bytes(info[..4].try_into().unwrap_or_default());
        let blocked = signals::mask(Some(ALL));
        let waiting = self.slot.take();
        let mask = waiting.map_or(blocked, |arrived| arrived.mask);
        let action = self.process.action(number);
        if action.handler <= 1 || mask & bit(number) != 0 {
            signals::die(number, info);
        }
        let mut mask = self.enter_handler(number, &action, info, (mask, mask));
        if let Some(arrived) = waiting {
            if mask & bit(arrived.number) != 0 {
                self.send_again(&arrived);
            } else {
                mask = self.deliver_one(&ArrivedSignal { mask, ..arrived });
            }
        }
        signals::mask(Some(mask));
    }

    /// Puts a frame on the program's stack, so that it goes on in its handler. The first mask is
    /// that with which it goes on behind the handler, the second that of what was interrupted.
    /// Returns the mask of the handler. If there is no room for the frame, the program gets
    /// `SIGSEGV`, or ends by it.
    fn enter_handler(
        &mut self,
        number: u32,
        action: &Action,
        info: &[u8; INFO_BYTES],
        (mask, during): (u64, u64),
    ) -> u64 {
        if action.flags & libc::SA_RESETHAND as u64 != 0 {
            let _ = self.process.set_action(number, Some(Action { handler: 0, ..*action }));
        }
        if self.push_frame(number, action, info, mask).is_err() {
            let fault = libc::SIGSEGV as u32;
            let (info, action) = (fault_info(fault, libc::SI_KERNEL, 0), self.process.action(fault));
            if number == fault || action.handler <= 1 || mask & bit(fault) != 0 {
                signals::die(fault, &info);
            }
            return self.enter_handler(fault, &action, &info, (mask, during));
        }
        let own = if action.flags & libc::SA_NODEFER as u64 != 0 { 0 } else { bit(number) };
        during | action.mask | own
    }

    fn push_frame(&mut self, number: u32, action: &Action, info: &[u8; INFO_BYTES], mask: u64) -> Result<(), Fault> {
        if action.flags & SA_RESTORER == 0 {
            return Err(Fault);
        }
        let state = {
            let _in_use = self.use_kvm();
            self.vcpu.forget_exception();
            save_state(&self.vcpu).map_err(|_| Fault)?
        };
        let alternate = self.alternate;
        let registers = self.vcpu.registers();
        let mut stack = registers.rsp.wrapping_sub(RED_ZONE);
        let uses_alternate = action.flags & libc::SA_ONSTACK as u64 != 0;
        let is_there = uses_alternate && alternate.size > 0;
        if is_there && !alternate.has(registers.rsp) {
            stack = alternate.start.wrapping_add(alternate.size);
        }
        let state_at = stack.wrapping_sub(state.len() as u64) & !63;
        let frame_at = (state_at.wrapping_sub(FRAME_BYTES as u64) & !15).wrapping_sub(8);
        if is_there && !(frame_at > alternate.start && frame_at - alternate.start <= alternate.size) {
            return Err(Fault);
        }

        let saved = Frame { registers: *registers, mask, alternate, state_at };
        let frame = saved.bytes(action.restorer, self.last_fault, info);
        self.write(state_at, &state)?;
        self.write(frame_at, &frame)?;

        let registers = self.vcpu.registers();
        registers.rsp = frame_at;
        registers.rip = action.handler;
        registers.rax = 0;
        registers.rdi = u64::from(number);
        registers.rsi = frame_at + INFO_AT as u64;
        registers.rdx = frame_at + CONTEXT_AT as u64;
        // TF, DF, RF.
        registers.rflags &= !(1 << 8 | 1 << 10 | 1 << 16);
        self.vcpu.commit();
        if alternate.flags & SS_AUTODISARM != 0 {
            self.alternate = AlternateStack::default();
        }
        Ok(())
    }

    /// `rt_sigreturn`.
    pub(super) fn rt_sigreturn(&mut self) -> Outcome {
        let mask = signals::mask(Some(ALL));
        if self.slot.waits() {
            // That signal comes first, as if it had come before the call.
            return Outcome::Restart;
        }
        match self.pop_frame() {
            Ok(mask) => _ = signals::mask(Some(mask)),
            Err(Fault) => {
                signals::mask(Some(mask));
                self.force(&fault_info(libc::SIGSEGV as u32, libc::SI_KERNEL, 0));
            }
        }
        Outcome::Resume
    }

    /// Takes the registers from the frame; returns its mask.
    fn pop_frame(&mut self) -> Result<u64, Fault> {
        let at = self.vcpu.registers().rsp.wrapping_sub(8);
        let mut frame = [0u8; FRAME_BYTES];
        program_memory::read(at, &mut frame[..INFO_AT])?;
        let word = |at: usize| u64::from_le_bytes(frame[at..at + 8].try_into().unwrap_or_default());
        let state = load_state(&self.vcpu, word(STATE_POINTER_AT))?;
        {
            let _in_use = self.use_kvm();
            self.vcpu.set_vector_state(&state).map_err(|_| Fault)?;
        }
        let saved: [u64; 18] = std::array::from_fn(|index| word(REGISTERS_AT + index * 8));
        let r = self.vcpu.registers();
        [
            r.r8, r.r9, r.r10, r.r11, r.r12, r.r13, r.r14, r.r15, r.rdi, r.rsi, r.rbp, r.rbx, r.rdx, r.rax, r.rcx,
            r.rsp, r.rip, r.rflags,
        ] = saved;
        let stack = r.rsp;
        // As in the kernel, a stack that cannot be set is left as it is.
        let _ = self.alternate.set(&frame[CONTEXT_AT + 16..CONTEXT_AT + 40], stack, 0);
        Ok(word(MASK_AT))
    }
}
