//! A process that lets the machine continue, and removes what QEMU was given, if this process dies
//! during a checkpoint.
//!
//! QEMU serves one client of its monitor at a time. The guard therefore holds this process's
//! connection, and uses it only when this process is gone.

use std::io::{self, PipeWriter, Write};
use std::os::fd::{AsRawFd, RawFd};

use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, fork};
use pagemark_process::helper::{self, DESCRIPTOR};

use crate::error::{Error, Result};

/// What the guard sends. QEMU drops a command whose sender disconnects, so the guard waits for the
/// reply to the last command, whatever it is.
const CONTINUE: &[u8] = b"{\"execute\": \"cont\"}\n";

/// Takes the file back that QEMU was given, with an id that the reply has too.
const REMOVE: &[u8] = b"{\"execute\": \"remove-fd\", \"arguments\": {\"fdset-id\": 28781}, \"id\": \"guard\"}\n";

/// Sent to the guard: the machine is about to be stopped; a checkpoint of a paused machine begins;
/// the checkpoint has ended.
const STOPS: u8 = b's';
const STAYS: u8 = b'p';
const ENDED: u8 = b'e';

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
        // SAFETY: the child makes only system calls, which is allowed in a child of a process with
        // threads, and ends by `_exit`.
        match unsafe { fork() }.map_err(|error| failed(error.into()))? {
            ForkResult::Parent { child } => Ok(Guard { orders: Some(write), pid: child }),
            ForkResult::Child => guard(monitor, read.as_raw_fd(), write.as_raw_fd()),
        }
    }

    /// Declares that a checkpoint begins. `stops` is true if it stops the machine.
    pub(crate) fn begin(&self, stops: bool) -> Result<()> {
        self.order(if stops { STOPS } else { STAYS })
    }

    /// Declares that the checkpoint has ended: the machine is as it was.
    pub(crate) fn end(&self) -> Result<()> {
        self.order(ENDED)
    }

    fn order(&self, order: u8) -> Result<()> {
        let Some(mut orders) = self.orders.as_ref() else { return Ok(()) };
        orders.write_all(&[order]).map_err(Error::system("reach the guard process"))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.orders = None;
        let _ = waitpid(self.pid, None);
    }
}

/// The child's life: reads orders until the pipe is closed.
fn guard(monitor: RawFd, orders: RawFd, other_end: RawFd) -> ! {
    // SAFETY: only system calls are made, nothing that owns a descriptor is used, and the process
    // ends by `_exit`.
    unsafe {
        // Also on kernels that cannot close all others at once.
        libc::close(other_end);
        helper::detach_from_caller(c"pagemark-vm", [monitor, orders]);
        let mut order = ENDED;
        loop {
            match libc::read(ORDERS, (&raw mut order).cast(), 1) {
                1 => {}
                -1 if *libc::__errno_location() == libc::EINTR => {}
                _ => break,
            }
        }
        if order == STOPS {
            libc::send(MONITOR, CONTINUE.as_ptr().cast(), CONTINUE.len(), libc::MSG_NOSIGNAL);
        }
        if order != ENDED {
            libc::send(MONITOR, REMOVE.as_ptr().cast(), REMOVE.len(), libc::MSG_NOSIGNAL);
            wait_for_reply();
        }
        libc::_exit(0)
    }
}

/// Reads until QEMU has replied to [`REMOVE`], or has ended. Makes only system calls.
fn wait_for_reply() {
    const MARK: &[u8] = b"\"guard\"";
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

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::machine::FILE_SET;

    #[test]
    fn the_commands_are_json_and_name_the_set() {
        let command: Value = serde_json::from_slice(REMOVE).unwrap();
        assert_eq!(command["arguments"]["fdset-id"], FILE_SET);
        assert_eq!(serde_json::from_slice::<Value>(CONTINUE).unwrap()["execute"], "cont");
    }
}
