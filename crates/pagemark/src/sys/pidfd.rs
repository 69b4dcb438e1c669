//! Descriptors of processes.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// A descriptor of a process, which becomes readable when it exits; with `PIDFD_THREAD` (that is `O_EXCL`, Linux 6.9) among the
/// flags, of a thread.
///
/// # Errors
/// `ESRCH`: there is none. `EINVAL` or `ENOENT`: it is a thread, and that was not asked for.
pub fn open(pid: i32, flags: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: the call takes numbers and touches no memory of ours.
    let descriptor = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, flags) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor as libc::c_int) })
}
