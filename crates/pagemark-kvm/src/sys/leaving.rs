//! A thread of this process takes the program's registers, and needs the monitor no more.

use std::ffi::CStr;
use std::io;
use std::sync::atomic::AtomicU32;

use super::host_call;
use crate::layout::PROGRAM_END;

/// `arch_prctl`: sets the base of GS.
const SET_GS: u64 = 0x1001;
/// `arch_prctl`: sets the base of FS.
const SET_FS: u64 = 0x1002;

/// The flag of `rseq` that ends it, and the signature that the C library has registered.
const UNREGISTER: u64 = 1;
const SIGNATURE: u64 = 0x5305_3053;
/// Bytes of `struct rseq`, as it was first, and of the head of a list of robust locks.
const RSEQ_BYTES: u64 = 32;
const ROBUST_HEAD_BYTES: u64 = 24;

/// Ends what the kernel does with the monitor's memory for the calling thread, and has it do for
/// the program what it would have done: `clear_tid` is the program's.
///
/// # Errors
/// The kernel goes on to use memory of the C library (`rseq`).
pub fn forget_monitor(clear_tid: u64) -> io::Result<()> {
    let call = |number: i64, arguments: [u64; 6]| {
        // SAFETY: registers memory of the program, or none, in place of the monitor's.
        host_call::errno(unsafe { host_call::immediate(number, arguments) })
    };
    if let Some((at, bytes)) = own_rseq() {
        let lens = [RSEQ_BYTES, bytes.next_multiple_of(RSEQ_BYTES)];
        let mut failed = None;
        let mut ends = |len| {
            failed = call(libc::SYS_rseq, [at, len, UNREGISTER, SIGNATURE, 0, 0]);
            failed.is_none()
        };
        if !lens.into_iter().any(&mut ends) {
            return Err(io::Error::from_raw_os_error(failed.unwrap_or(libc::EINVAL)));
        }
    }
    let (mut head, mut len) = (0u64, 0u64);
    call(libc::SYS_get_robust_list, [0, &raw mut head as u64, &raw mut len as u64, 0, 0, 0]);
    if head >= PROGRAM_END {
        call(libc::SYS_set_robust_list, [0, ROBUST_HEAD_BYTES, 0, 0, 0, 0]);
    }
    call(libc::SYS_set_tid_address, [clear_tid, 0, 0, 0, 0, 0]);
    Ok(())
}

/// Where the C library has registered the calling thread's `struct rseq`, and its length. glibc
/// says so since 2.35, and does not register before.
fn own_rseq() -> Option<(u64, u64)> {
    let symbol = |name: &CStr| {
        // SAFETY: looks for a name, which ends with zero.
        let at = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
        (!at.is_null()).then_some(at)
    };
    let (offset, bytes) = (symbol(c"__rseq_offset")?, symbol(c"__rseq_size")?);
    // SAFETY: variables of these types, which do not change.
    let (offset, bytes) = unsafe { (*offset.cast::<isize>(), *bytes.cast::<libc::c_uint>()) };
    let base: u64;
    // SAFETY: reads the address of the thread's own storage, which its first word has (System V ABI).
    unsafe { std::arch::asm!("mov {}, fs:0", out(reg) base, options(nostack, preserves_flags, readonly)) };
    (bytes > 0).then_some((base.wrapping_add_signed(offset as i64), u64::from(bytes)))
}

/// The calling thread gets the bases of FS and GS, adds itself to `left`, and takes its other
/// registers, its signal mask and its alternate stack from the signal frame at `frame`, as
/// `rt_sigreturn` does it.
///
/// # Safety
/// The frame is complete, and this thread is not needed in this process any more.
pub unsafe fn go_on(frame: u64, fs: u64, gs: u64, left: &AtomicU32) -> ! {
    // SAFETY: by the contract of this function. Nothing is done in between that needs the storage of
    // the thread.
    unsafe {
        std::arch::asm!(
            "syscall",
            "mov eax, {arch_prctl}",
            "mov edi, {set_fs}",
            "mov rsi, r12",
            "syscall",
            "lock inc dword ptr [r13]",
            // The kernel looks for the frame 8 bytes below: its return address has been taken.
            "lea rsp, [r14 + 8]",
            "mov eax, {rt_sigreturn}",
            "syscall",
            "ud2",
            arch_prctl = const libc::SYS_arch_prctl,
            set_fs = const SET_FS,
            rt_sigreturn = const libc::SYS_rt_sigreturn,
            in("rax") libc::SYS_arch_prctl,
            in("rdi") SET_GS,
            in("rsi") gs,
            in("r12") fs,
            in("r13") left.as_ptr(),
            in("r14") frame,
            options(noreturn),
        )
    }
}
