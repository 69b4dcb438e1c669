//! A signal that the kernel sends to a process when the process here dies.
//!
//! The kernel sends this signal for a descriptor on which something happens (`O_ASYNC`): for each
//! end of a pair of sockets, when the other end is closed. The kernel closes both ends when the
//! last process that has them dies, one before the other. No process has to live for that, so the
//! signal is also sent where all of a control group is killed.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// `F_SETSIG`
const SET_SIGNAL: libc::c_int = 10;

/// The signal is sent if this process, and all that share its descriptors, die before this is
/// dropped. No function here allocates or locks.
#[derive(Debug)]
pub struct LastSignal {
    ends: [OwnedFd; 2],
}

impl LastSignal {
    /// Prepares a signal for a process. It is not sent before [`LastSignal::arm`]. The descriptors
    /// get numbers from `from` on: of a process that dies, the kernel closes the highest first.
    ///
    /// # Errors
    /// There are no descriptors left. `ESRCH`: the process is gone.
    pub fn new(pid: i32, signal: libc::c_int, from: libc::c_int) -> io::Result<LastSignal> {
        let mut pair = [-1; 2];
        // SAFETY: the kernel writes two descriptors to the array, which lives through the call.
        done(unsafe { libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0, pair.as_mut_ptr()) })?;
        // SAFETY: both descriptors were just made, and nothing else owns them.
        let made = pair.map(|end| unsafe { OwnedFd::from_raw_fd(end) });
        let moved = |end: &OwnedFd| {
            // SAFETY: takes numbers. The new descriptor is nobody else's.
            let copy = done(unsafe { libc::fcntl(end.as_raw_fd(), libc::F_DUPFD_CLOEXEC, from) })?;
            // SAFETY: as above.
            let copy = unsafe { OwnedFd::from_raw_fd(copy) };
            for (command, value) in [(libc::F_SETOWN, pid), (SET_SIGNAL, signal)] {
                // SAFETY: takes numbers.
                done(unsafe { libc::fcntl(copy.as_raw_fd(), command, value) })?;
            }
            Ok::<OwnedFd, io::Error>(copy)
        };
        Ok(LastSignal { ends: [moved(&made[0])?, moved(&made[1])?] })
    }

    /// From now on, the signal is sent if this process dies.
    ///
    /// # Errors
    /// The kernel has no memory for it.
    pub fn arm(&self) -> io::Result<()> {
        self.set_flags(libc::O_ASYNC)
    }

    /// Undoes [`LastSignal::arm`].
    fn disarm(&self) {
        // To remove it needs no memory.
        let _ = self.set_flags(0);
    }

    fn set_flags(&self, flags: libc::c_int) -> io::Result<()> {
        self.ends.iter().try_for_each(|end| {
            // SAFETY: takes numbers. The descriptor has no other flags.
            done(unsafe { libc::fcntl(end.as_raw_fd(), libc::F_SETFL, flags) }).map(drop)
        })
    }
}

impl Drop for LastSignal {
    fn drop(&mut self) {
        self.disarm();
    }
}

fn done(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Child, Command};

    use crate::proc::Status;
    use pagemark_testing::wait_until;

    use super::*;

    /// A process that waits.
    fn target() -> Child {
        Command::new("sleep").arg("1000").spawn().unwrap()
    }

    /// Forks a process that does `work`, and kills it when that has been done.
    fn kill_after(work: impl FnOnce()) {
        let (mut reader, writer) = io::pipe().unwrap();
        // SAFETY: the child makes system calls alone, and does not return from here.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            work();
            // SAFETY: as above.
            unsafe {
                libc::write(writer.as_raw_fd(), c"x".as_ptr().cast(), 1);
                libc::pause();
                libc::_exit(1);
            }
        }
        drop(writer);
        let mut byte = [0];
        io::Read::read_exact(&mut reader, &mut byte).unwrap();
        // SAFETY: a signal to our child, and a wait for it.
        unsafe {
            libc::kill(pid, libc::SIGKILL);
            libc::waitpid(pid, std::ptr::null_mut(), 0);
        }
    }

    fn is_stopped(pid: i32) -> bool {
        Status::read(pid).unwrap().state == 'T'
    }

    #[test]
    fn a_process_that_was_stopped_goes_on_when_the_one_that_stopped_it_is_killed() {
        let mut child = target();
        let pid = child.id() as i32;
        kill_after(|| {
            let last = LastSignal::new(pid, libc::SIGCONT, 100).unwrap();
            last.arm().unwrap();
            std::mem::forget(last);
            // SAFETY: a signal to a child of this test.
            unsafe { libc::kill(pid, libc::SIGSTOP) };
            while !is_stopped(pid) {}
        });
        wait_until("the process to go on", || !is_stopped(pid));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn the_signal_comes_only_if_it_is_armed_and_not_dropped() {
        let mut child = target();
        let pid = child.id() as i32;
        kill_after(|| {
            std::mem::forget(LastSignal::new(pid, libc::SIGKILL, 100).unwrap());
            let dropped = LastSignal::new(pid, libc::SIGKILL, 100).unwrap();
            dropped.arm().unwrap();
        });
        assert_eq!(child.try_wait().unwrap(), None);
        kill_after(|| {
            let last = LastSignal::new(pid, libc::SIGKILL, 100).unwrap();
            last.arm().unwrap();
            std::mem::forget(last);
        });
        assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL));
    }
}
