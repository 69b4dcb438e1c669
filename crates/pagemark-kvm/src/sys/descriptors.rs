//! The monitor's file descriptors, above those that programs use.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::RawFd;
use std::sync::{Mutex, MutexGuard};

/// Descriptors of the monitor. The program cannot name them: for it they do not exist.
static OURS: Mutex<BTreeSet<RawFd>> = Mutex::new(BTreeSet::new());

fn ours() -> MutexGuard<'static, BTreeSet<RawFd>> {
    OURS.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// A duplicate of `fd` above the numbers that the kernel gives the program, closed by `exec`. The
/// caller owns it, and gives it back by [`forget`] when it is closed.
pub fn raise(fd: RawFd) -> io::Result<RawFd> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: fills the value.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let base = match limit.rlim_max {
        max if max >= 16_384 => max.min(65_536) - 8192,
        max => max / 2,
    };
    let raised = libc::rlimit { rlim_cur: limit.rlim_max, ..limit };
    // A number must be below the limit when it is made, but not later.
    // SAFETY: reads the value.
    if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raised) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: makes a new descriptor.
    let high = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, base as libc::c_int) };
    let error = io::Error::last_os_error();
    // SAFETY: reads the value.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) };
    if high < 0 {
        return Err(error);
    }
    ours().insert(high);
    Ok(high)
}

/// Whether `fd` is of the monitor.
pub fn is_ours(fd: RawFd) -> bool {
    ours().contains(&fd)
}

/// The monitor's descriptors within `first..=last`, ascending.
pub fn within(first: u32, last: u32) -> Vec<RawFd> {
    ours().iter().copied().filter(|&fd| (first..=last).contains(&(fd as u32))).collect()
}

/// `fd` is not the monitor's any more.
pub fn forget(fd: RawFd) {
    ours().remove(&fd);
}

/// The set of the monitor's descriptors, locked during a `fork`, so that the child finds it whole.
pub struct Locked(MutexGuard<'static, BTreeSet<RawFd>>);

/// Locks the set for a `fork`.
pub fn lock_for_fork() -> Locked {
    Locked(ours())
}

impl Locked {
    /// In the child: closes all descriptors of the monitor, which are copies of the parent's.
    ///
    /// # Safety
    /// Nothing may use or close them any more.
    pub unsafe fn close_all(mut self) {
        for fd in std::mem::take(&mut *self.0) {
            // SAFETY: by the contract of this function.
            unsafe { libc::close(fd) };
        }
    }
}
