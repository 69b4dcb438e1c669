//! Descriptors of processes.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::interface::Interface;

/// `pidfd_open`.
pub static OPEN: Interface =
    Interface::new("pidfd_open", "5.3", "the exit of a process is noticed up to 50 ms later", || {
        open(std::process::id() as i32, 0).map(drop)
    });

/// `pidfd_getfd`.
pub static GET_DESCRIPTOR: Interface = Interface::new(
    "pidfd_getfd",
    "5.6",
    "a program that has a lease on a file it writes can't be checkpointed, and sockets lose options in a restore",
    || {
        let this = open(std::process::id() as i32, 0)?;
        duplicate(std::process::id() as i32, this.as_raw_fd()).map(drop)
    },
);

/// `process_madvise` with `MADV_PAGEOUT`.
pub static MADVISE: Interface =
    Interface::new("process_madvise", "5.10", "memory that a checkpoint reads from swap stays in memory", || {
        let this = open(std::process::id() as i32, 0)?;
        // SAFETY: there is no memory that the advice is for.
        let result = unsafe {
            let no_vector = std::ptr::null::<libc::iovec>();
            libc::syscall(libc::SYS_process_madvise, this.as_raw_fd(), no_vector, 0, libc::MADV_PAGEOUT, 0)
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    });

/// A descriptor of a process, which becomes readable when it exits; with `PIDFD_THREAD` (that is
/// `O_EXCL`, Linux 6.9) among the flags, of a thread.
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

/// Sends a signal to the process of a descriptor, and to no other that has got its id.
///
/// # Errors
/// `ESRCH`: it has ended. `EPERM`: it belongs to another user.
pub fn send_signal(process: &OwnedFd, signal: libc::c_int) -> io::Result<()> {
    let no_details = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: the call takes numbers, and no address but a null one.
    let result = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, process.as_raw_fd(), signal, no_details, 0) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A copy of descriptor `number` of a process (`pidfd_getfd`, Linux 5.6). It shares the open file
/// with the process, with its position and flags; nothing is opened.
///
/// # Errors
/// `ESRCH`: there is no such process. `EBADF`: it has no such descriptor. `EPERM`: tracing it is
/// not permitted. `ENOSYS`: the kernel is too old.
pub fn duplicate(pid: i32, number: i32) -> io::Result<OwnedFd> {
    duplicate_of(&open(pid, 0)?, number)
}

/// Like [`duplicate`], of the process of a descriptor.
///
/// # Errors
/// Those of [`duplicate`].
pub fn duplicate_of(process: &OwnedFd, number: i32) -> io::Result<OwnedFd> {
    // SAFETY: the call takes numbers and touches no memory of ours.
    let descriptor = unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), number, 0) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor as libc::c_int) })
}
