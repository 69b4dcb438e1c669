//! System calls that the monitor makes for the program.

use std::sync::atomic::AtomicU32;

use pagemark_linux::ptrace::SYSCALL_BYTES;

/// The errno with which Linux tells itself that a call is to be made again after a signal. It never
/// reaches a program.
pub const RESTART: i64 = -512;

/// A system call: its number and its six arguments, as in the registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Call {
    /// The number.
    pub number: u64,
    /// The arguments.
    pub arguments: [u64; 6],
}

// The handler of `sys::signals` compares the interrupted instruction with the two labels: a signal
// that comes between the test of the flag and the call makes the call return `RESTART`. So no
// signal waits for a call that blocks.
std::arch::global_asm!(
    ".pushsection .text.pagemark_kvm_call, \"ax\", @progbits",
    ".globl pagemark_kvm_call, pagemark_kvm_call_begin, pagemark_kvm_call_enter, pagemark_kvm_call_restart",
    ".type pagemark_kvm_call, @function",
    "pagemark_kvm_call:",
    "pagemark_kvm_call_begin:",
    "cmp dword ptr [rsi], 0",
    "jne pagemark_kvm_call_restart",
    "mov rax, [rdi]",
    "mov rsi, [rdi + 16]",
    "mov rdx, [rdi + 24]",
    "mov r10, [rdi + 32]",
    "mov r8, [rdi + 40]",
    "mov r9, [rdi + 48]",
    "mov rdi, [rdi + 8]",
    "pagemark_kvm_call_enter:",
    "syscall",
    "ret",
    "pagemark_kvm_call_restart:",
    "mov rax, -512",
    "ret",
    ".popsection",
);

unsafe extern "C" {
    fn pagemark_kvm_call(call: *const Call, pending: *const AtomicU32) -> i64;
    static pagemark_kvm_call_begin: u8;
    static pagemark_kvm_call_enter: u8;
    static pagemark_kvm_call_restart: u8;
}

/// Where execution goes on if a signal interrupts it at `instruction`: the call in hand is not
/// made, or not made again.
pub(super) fn after_signal(instruction: u64) -> u64 {
    let begin = &raw const pagemark_kvm_call_begin as u64;
    let enter = &raw const pagemark_kvm_call_enter as u64;
    if (begin..=enter).contains(&instruction) { &raw const pagemark_kvm_call_restart as u64 } else { instruction }
}

/// The instruction behind the `syscall` of a call that a signal interrupts, and the one where a
/// thread goes on if the call is not made.
pub(super) fn blocking() -> [u64; 2] {
    [&raw const pagemark_kvm_call_enter as u64 + SYSCALL_BYTES, &raw const pagemark_kvm_call_restart as u64]
}

/// Makes `call`, unless a signal is `pending`. Returns what the kernel returns, or [`RESTART`].
///
/// # Safety
/// The call must not change memory, descriptors or other state that this process relies on: its
/// pointers are into the program's memory or into buffers that the caller owns.
pub unsafe fn interruptible(call: &Call, pending: &AtomicU32) -> i64 {
    // SAFETY: by the contract of this function; the assembly changes only registers that a C
    // function may change.
    unsafe { pagemark_kvm_call(call, pending) }
}

/// Makes `call`, which does not block.
///
/// # Safety
/// Those of [`interruptible`].
pub unsafe fn immediate(number: i64, arguments: [u64; 6]) -> i64 {
    let [a, b, c, d, e, f] = arguments;
    let result: i64;
    // SAFETY: by the contract of this function.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
        );
    }
    result
}

/// Whether `id` is that of this process or of one of its threads.
pub fn is_of_this_process(id: u64) -> bool {
    // SAFETY: asks; signal 0 is none.
    unsafe {
        let process = libc::syscall(libc::SYS_getpid) as u64;
        immediate(libc::SYS_tgkill, [process, id, 0, 0, 0, 0]) == 0
    }
}

/// The errno of a result of a system call, if it is one.
pub fn errno(result: i64) -> Option<i32> {
    (-4095..0).contains(&result).then_some(-result as i32)
}
