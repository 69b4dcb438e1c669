//! Processes that are forked from the caller's to act on others.

use std::ffi::CStr;
use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};

use nix::sys::signal::{SigSet, SigmaskHow};
use nix::unistd::{ForkResult, Pid, fork};

/// Number of the first descriptor that a helper has; the others follow it. All others are closed.
pub const DESCRIPTOR: RawFd = 0;

/// Where the kernel cannot close all descriptors at once, those below this number are closed.
const MAX_CLOSED: libc::rlim_t = 1 << 16;

/// Starts a process that does `work`, and ends with the status that it returns. All signals are
/// blocked in it from the begin: a request to end every process of this program does not end it,
/// since it has something left to do then.
///
/// # Errors
/// As `fork`.
///
/// # Safety
/// The process has a copy of the calling thread alone. In a process with threads, `work` takes no
/// lock of this program. It may allocate, which the C library allows after a fork. No value that it
/// borrows is dropped in it.
pub unsafe fn start(work: impl FnOnce() -> libc::c_int) -> nix::Result<Pid> {
    let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_SETMASK)?;
    // SAFETY: by the contract of this function.
    let forked = unsafe { fork() };
    if matches!(forked, Ok(ForkResult::Child)) {
        // A panic must not unwind into the copy of the caller.
        let status = catch_unwind(AssertUnwindSafe(work)).unwrap_or(libc::EXIT_FAILURE);
        // SAFETY: it only ends the process, without destructors and exit handlers.
        unsafe { libc::_exit(status) }
    }
    before.thread_set_mask()?;
    match forked? {
        ForkResult::Parent { child } => Ok(child),
        ForkResult::Child => unreachable!("it has ended"),
    }
}

/// Makes this process, which was just forked, independent of its caller: it gets a session of its
/// own, and what [`keep_only`] gives it.
///
/// # Safety
/// Those of [`keep_only`].
pub unsafe fn detach_from_caller<const N: usize>(name: &CStr, descriptors: [RawFd; N]) {
    // SAFETY: a plain system call on this process, and as for this function.
    unsafe {
        libc::setsid();
        keep_only(name, descriptors);
    }
}

/// Gives this process, which was just forked, a name, and keeps of its descriptors `descriptors`
/// alone, under the numbers from [`DESCRIPTOR`] on. Makes only system calls.
///
/// # Safety
/// No value of this process that is used or dropped later owns a descriptor: the process ends by
/// `_exit`.
pub unsafe fn keep_only<const N: usize>(name: &CStr, descriptors: [RawFd; N]) {
    let count = N as RawFd;
    // SAFETY: plain system calls on this process; the name lives through the call, and the caller uses
    // none of the descriptors that are closed.
    unsafe {
        libc::prctl(libc::PR_SET_NAME, name.as_ptr());
        // First out of the way of each other.
        let copies = descriptors.map(|descriptor| libc::fcntl(descriptor, libc::F_DUPFD, DESCRIPTOR + count));
        for (number, copy) in (DESCRIPTOR..).zip(copies) {
            libc::dup2(copy, number);
        }
        if libc::syscall(libc::SYS_close_range, DESCRIPTOR + count, libc::c_uint::MAX, 0) != 0 {
            // Before Linux 5.9.
            let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit);
            for number in DESCRIPTOR + count..limit.rlim_cur.min(MAX_CLOSED) as RawFd {
                libc::close(number);
            }
        }
    }
}
