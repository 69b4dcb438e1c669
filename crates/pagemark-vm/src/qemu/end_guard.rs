//! A process that kills a QEMU that is being prepared, or whose memory is not all there, if this
//! process dies.

use std::io::{self, PipeWriter, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use nix::sys::wait::waitpid;
use nix::unistd::Pid;
use pagemark_linux::helper::{self, DESCRIPTOR};
use pagemark_linux::pidfd;
use pagemark_trace::cgroups;

/// The descriptors of the guard process.
const ORDERS: RawFd = DESCRIPTOR;
const QEMU: RawFd = DESCRIPTOR + 1;

/// A process that kills QEMU if this process ends, or drops this value, before it is dismissed.
#[derive(Debug)]
pub(crate) struct EndGuard {
    /// None once it was closed.
    orders: Option<PipeWriter>,
    pid: Pid,
}

impl EndGuard {
    /// Starts a guard of the process `qemu`. It holds a copy of `held` until QEMU has ended, or it
    /// is dismissed.
    ///
    /// # Errors
    /// `ENOSYS` before Linux 5.3.
    pub(crate) fn start(qemu: i32, held: Option<OwnedFd>) -> io::Result<EndGuard> {
        let pidfd = pidfd::open(qemu, 0)?;
        let (read, orders) = io::pipe()?;
        // Who ends all of this process's control group must not end the guard too.
        let ways_out = cgroups::ways_out();
        // SAFETY: the guard makes only system calls.
        let pid = unsafe {
            helper::start(|| {
                cgroups::take(&ways_out);
                let held = held.as_ref().unwrap_or(&pidfd);
                guard(read.as_raw_fd(), pidfd.as_raw_fd(), held.as_raw_fd())
            })
        }?;
        Ok(EndGuard { orders: Some(orders), pid })
    }

    /// Ends the guard, and lets QEMU live.
    pub(crate) fn dismiss(mut self) {
        if let Some(orders) = &mut self.orders {
            // A guard that is gone kills nothing.
            let _ = orders.write_all(&[1]);
        }
    }
}

impl Drop for EndGuard {
    fn drop(&mut self) {
        self.orders = None;
        let _ = waitpid(self.pid, None);
    }
}

/// The life of the guard: waits until the pipe has a byte or is closed.
fn guard(orders: RawFd, qemu: RawFd, held: RawFd) -> ! {
    // SAFETY: only system calls are made, nothing that owns a descriptor is used, and the process ends
    // by `_exit`. The buffer lives through the call.
    unsafe {
        helper::detach_from_caller(c"pagemark-end", [orders, qemu, held]);
        let mut order = 0u8;
        let read = loop {
            let read = libc::read(ORDERS, std::ptr::from_mut(&mut order).cast(), 1);
            if read >= 0 || *libc::__errno_location() != libc::EINTR {
                break read;
            }
        };
        if read != 1 {
            libc::syscall(libc::SYS_pidfd_send_signal, QEMU, libc::SIGKILL, 0, 0);
            // What is held is closed only then.
            let mut ended = libc::pollfd { fd: QEMU, events: libc::POLLIN, revents: 0 };
            while libc::poll(&mut ended, 1, -1) < 0 && *libc::__errno_location() == libc::EINTR {}
        }
        libc::_exit(0)
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use nix::sys::signal::{Signal, kill};

    use super::*;

    fn qemu() -> Child {
        Command::new("sleep").arg("600").spawn().unwrap()
    }

    /// What ends all processes of a program must not leave a QEMU behind.
    #[test]
    fn a_guard_outlives_requests_to_end() {
        let mut child = qemu();
        let guard = EndGuard::start(child.id() as i32, None).unwrap();
        for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT] {
            kill(guard.pid, signal).unwrap();
        }
        drop(guard);
        // Without the guard it would sleep for ten minutes.
        assert!(!child.wait().unwrap().success());
    }

    #[test]
    fn a_guard_that_is_dismissed_kills_nothing() {
        let mut child = qemu();
        EndGuard::start(child.id() as i32, None).unwrap().dismiss();
        assert!(child.try_wait().unwrap().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
