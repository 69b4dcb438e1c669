//! A process that lets the machine continue, and removes what QEMU was given, if this process dies.
//!
//! QEMU serves one client of its monitor at a time. The guard therefore holds this process's
//! connection, and uses it only when this process is gone.

use std::io::{self, PipeWriter, Write};
use std::os::fd::{AsRawFd, RawFd};

use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::Pid;
use pagemark_linux::helper::{self, DESCRIPTOR};
use pagemark_trace::cgroups;

use crate::error::{Error, ErrorKind, Object, Result};

/// The most bytes of commands that a guard holds.
const MAX_SCRIPT_BYTES: usize = 64 << 10;

/// The id of the last command of each script. QEMU drops a command whose sender disconnects, so the
/// guard waits for the reply to the last command, whatever it is.
pub(crate) const LAST_ID: &str = "pagemark-guard";

/// The descriptors of the guard.
const MONITOR: RawFd = DESCRIPTOR;
const ORDERS: RawFd = DESCRIPTOR + 1;

/// The guard of one machine. Dropped, the guard process ends.
#[derive(Debug)]
pub(crate) struct Guard {
    /// None once it was closed.
    orders: Option<PipeWriter>,
    pid: Pid,
}

impl Guard {
    /// Starts a guard for the connection `monitor`.
    pub(crate) fn start(monitor: RawFd) -> Result<Guard> {
        let failed = |error: io::Error| Error::system("start a guard process")(error);
        // A program that this process starts must not hold the pipe: the guard waits for its end.
        let (read, write) = io::pipe().map_err(failed)?;
        // Who ends all of this process's control group must not end the guard too.
        let ways_out = cgroups::ways_out();
        // SAFETY: the guard makes only system calls.
        let started = unsafe {
            helper::start(|| {
                cgroups::take(&ways_out);
                guard(monitor, read.as_raw_fd(), write.as_raw_fd())
            })
        };
        let pid = started.map_err(|error| failed(error.into()))?;
        Ok(Guard { orders: Some(write), pid })
    }

    /// Gives the guard the commands that it sends if this process dies, in place of those that it
    /// had: each a line, the last with the id [`LAST_ID`], or none at all.
    pub(crate) fn hold(&self, script: &str) -> Result<()> {
        let Some(mut orders) = self.orders.as_ref() else { return Ok(()) };
        if script.len() > MAX_SCRIPT_BYTES {
            let reason = "has more disks than a guard process can look after";
            return Err(Error::about(ErrorKind::Unsupported, Object::None, format!("the machine {reason}")));
        }
        let failed = Error::system("reach the guard process");
        // Another child of this process may have the pipe for a moment, until it closes what it has not.
        let status = waitid(Id::Pid(self.pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT);
        if status != Ok(WaitStatus::StillAlive) {
            return Err(failed(io::ErrorKind::BrokenPipe.into()));
        }
        let mut message = (script.len() as u32).to_ne_bytes().to_vec();
        message.extend(script.as_bytes());
        orders.write_all(&message).map_err(failed)
    }
}

#[cfg(test)]
impl Guard {
    /// Kills the guard, as somebody else may.
    pub(crate) fn kill(&self) {
        use nix::sys::signal::{Signal, kill};
        kill(self.pid, Signal::SIGKILL).unwrap();
        waitid(Id::Pid(self.pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT).unwrap();
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.orders = None;
        let _ = waitpid(self.pid, None);
    }
}

/// The child's life: reads scripts until the pipe is closed, and sends the last complete one.
fn guard(monitor: RawFd, orders: RawFd, other_end: RawFd) -> ! {
    // Memory must not be allocated here.
    let mut scripts = [[0u8; MAX_SCRIPT_BYTES]; 2];
    let mut lengths = [0; 2];
    let mut held = 0;
    // SAFETY: only system calls are made, nothing that owns a descriptor is used, and the process
    // ends by `_exit`.
    unsafe {
        // Also on kernels that cannot close all others at once.
        libc::close(other_end);
        helper::detach_from_caller(c"pagemark-vm", [monitor, orders]);
        loop {
            let mut length = [0; 4];
            if !read_exact(&mut length) {
                break;
            }
            let (next, length) = (1 - held, u32::from_ne_bytes(length) as usize);
            // What was not sent completely was not begun either.
            let Some(script) = scripts[next].get_mut(..length) else { break };
            if !read_exact(script) {
                break;
            }
            (lengths[next], held) = (length, next);
        }
        let mut script = &scripts[held][..lengths[held]];
        let has_commands = !script.is_empty();
        while !script.is_empty() {
            let sent = libc::send(MONITOR, script.as_ptr().cast(), script.len(), libc::MSG_NOSIGNAL);
            match usize::try_from(sent) {
                Ok(sent) => script = script.get(sent..).unwrap_or_default(),
                Err(_) if *libc::__errno_location() == libc::EINTR => {}
                Err(_) => libc::_exit(1),
            }
        }
        if has_commands {
            wait_for_reply();
        }
        libc::_exit(0)
    }
}

/// Fills the buffer from the pipe; false if the pipe is closed before. Makes only system calls.
fn read_exact(mut buffer: &mut [u8]) -> bool {
    while !buffer.is_empty() {
        // SAFETY: the buffer has that length.
        let read = unsafe { libc::read(ORDERS, buffer.as_mut_ptr().cast(), buffer.len()) };
        match usize::try_from(read) {
            Ok(0) => return false,
            Ok(read) => buffer = buffer.get_mut(read..).unwrap_or_default(),
            // SAFETY: the number of this thread's last error.
            Err(_) if unsafe { *libc::__errno_location() } == libc::EINTR => {}
            Err(_) => return false,
        }
    }
    true
}

/// Reads until QEMU has replied to the last command, or has ended. Makes only system calls.
fn wait_for_reply() {
    const MARK: &[u8] = LAST_ID.as_bytes();
    let mut buffer = [0u8; 4096];
    let mut kept = 0;
    loop {
        // SAFETY: the buffer has that much room behind what is kept.
        let read = unsafe { libc::read(MONITOR, buffer[kept..].as_mut_ptr().cast(), buffer.len() - kept) };
        let Ok(read) = usize::try_from(read) else { return };
        let end = kept + read;
        if read == 0 || buffer[..end].windows(MARK.len()).any(|window| window == MARK) {
            return;
        }
        // The begin of the mark may have come.
        kept = end.min(MARK.len() - 1);
        buffer.copy_within(end - kept..end, 0);
    }
}
