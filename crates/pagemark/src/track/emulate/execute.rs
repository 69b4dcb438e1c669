//! Executing one instruction with the registers of an interrupted thread.

use std::arch::naked_asm;

use super::stores::Vectors;

/// Where the software keeps, in a signal frame, what the vector state consists of.
const SOFTWARE_BYTES: usize = 464;
const SOFTWARE_MAGIC: u32 = 0x4650_5853;

/// Components of the vector state that stores read: SSE, AVX, mask registers, and both parts of
/// AVX-512.
pub const VECTORS: u64 = 0b1110_0110;

/// Executes `code`, an instruction and a return, with the general registers (except the stack
/// pointer) and arithmetic flags from `registers`, and puts there what they are afterwards. If
/// `vectors` is not null, it points to a signal frame's vector state, which is loaded first.
/// Async-signal-safe.
///
/// # Safety
/// The code is an instruction that does nothing but read vector registers, change general registers
/// and arithmetic flags, and write memory that may be written; `vectors` is null or the parts
/// of a [`Vectors`].
pub unsafe fn execute(registers: &mut [libc::greg_t; 23], code: *const u8, vectors: (*const u8, u64)) {
    // SAFETY: the caller answers for the code. Whatever it does to vector registers is no concern
    // of Rust code around it: in the C calling convention they belong to the callee.
    unsafe { call_with(registers.as_mut_ptr(), code, vectors.0, vectors.1) }
}

/// The vector state in a signal's context. None if the kernel has not told which components of it
/// are there.
pub fn vector_state(context: &libc::ucontext_t) -> Option<Vectors> {
    // The field behind the registers, `fpregs`, which the crate libc does not name with musl.
    let behind = (&raw const context.uc_mcontext).cast::<*const u8>().wrapping_add(context.uc_mcontext.gregs.len());
    // SAFETY: the kernel has a pointer there, in the structure, which begins with the registers.
    let state = unsafe { behind.read() };
    if state.is_null() {
        return None;
    }
    // SAFETY: the kernel's state has at least the 512 bytes of the oldest format, in whose last 48
    // bytes the kernel describes what follows.
    let (magic, features) = unsafe {
        let told = state.add(SOFTWARE_BYTES);
        (told.cast::<u32>().read_unaligned(), told.add(8).cast::<u64>().read_unaligned())
    };
    // SAFETY: the kernel made the state, for the processor to load at the handler's return.
    (magic == SOFTWARE_MAGIC).then(|| unsafe { Vectors::new(state, features) })
}

/// Order of registers in the array: r8 … r15, rdi, rsi, rbp, rbx, rdx, rax, rcx, rsp, rip, flags.
#[unsafe(naked)]
unsafe extern "C" fn call_with(registers: *mut libc::greg_t, code: *const u8, vectors: *const u8, features: u64) {
    naked_asm!(
        "push rbx",
        "push rbp",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        // The state of the thread has another control word for vector operations.
        "sub rsp, 8",
        "stmxcsr [rsp]",
        "push rdi",
        "push rsi",
        "test rdx, rdx",
        "jz 2f",
        "mov r8, rdx",
        "mov eax, ecx",
        "xor edx, edx",
        "xrstor64 [r8]",
        "2:",
        "mov rax, [rdi + 136]",
        "and eax, 0x8d5",
        "push rax",
        "popfq",
        "mov r8, [rdi]",
        "mov r9, [rdi + 8]",
        "mov r10, [rdi + 16]",
        "mov r11, [rdi + 24]",
        "mov r12, [rdi + 32]",
        "mov r13, [rdi + 40]",
        "mov r14, [rdi + 48]",
        "mov r15, [rdi + 56]",
        "mov rsi, [rdi + 72]",
        "mov rbp, [rdi + 80]",
        "mov rbx, [rdi + 88]",
        "mov rdx, [rdi + 96]",
        "mov rax, [rdi + 104]",
        "mov rcx, [rdi + 112]",
        "mov rdi, [rdi + 64]",
        "call [rsp]",
        "push rdi",
        "mov rdi, [rsp + 16]",
        "mov [rdi], r8",
        "mov [rdi + 8], r9",
        "mov [rdi + 16], r10",
        "mov [rdi + 24], r11",
        "mov [rdi + 32], r12",
        "mov [rdi + 40], r13",
        "mov [rdi + 48], r14",
        "mov [rdi + 56], r15",
        "mov [rdi + 72], rsi",
        "mov [rdi + 80], rbp",
        "mov [rdi + 88], rbx",
        "mov [rdi + 96], rdx",
        "mov [rdi + 104], rax",
        "mov [rdi + 112], rcx",
        "pop qword ptr [rdi + 64]",
        "pushfq",
        "pop rax",
        "and eax, 0x8d5",
        "mov rcx, [rdi + 136]",
        "and rcx, -2262",
        "or rcx, rax",
        "mov [rdi + 136], rcx",
        "add rsp, 16",
        "ldmxcsr [rsp]",
        "add rsp, 8",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbp",
        "pop rbx",
        "ret",
    )
}
