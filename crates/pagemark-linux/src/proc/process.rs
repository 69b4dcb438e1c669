//! A process, told from a later one that gets its id.

use std::io;

use nix::errno::Errno;
use serde::{Deserialize, Serialize};

use super::{Stat, live_thread};
use crate::pidfd;

/// A process. Its start time distinguishes it from a later process with the same id.
///
/// It has no descriptor of the process: a tree may have more processes than this one may open
/// files, and kernels before Linux 5.3 have none. [`ExitWatch`](crate::exit_watch::ExitWatch)
/// opens one where an exit is waited for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Process {
    /// Process id.
    pub pid: i32,
    /// When the process was started, clock ticks since boot.
    pub start_ticks: u64,
}

impl Process {
    /// The process that has the id now. It may be a zombie.
    ///
    /// # Errors
    /// An error that [`is_gone`](super::is_gone) matches: there is none.
    pub fn find(pid: i32) -> io::Result<Process> {
        Ok(Process { pid, start_ticks: Stat::read(pid)?.start_ticks })
    }

    /// The processes that have these ids now.
    pub fn find_all(pids: &[i32]) -> Vec<Process> {
        pids.iter().filter_map(|&pid| Process::find(pid).ok()).collect()
    }

    /// Its state. None once it is gone, whatever has its id then.
    pub fn stat(self) -> Option<Stat> {
        Stat::read(self.pid).ok().filter(|stat| stat.start_ticks == self.start_ticks)
    }

    /// True until its first thread has ended, waited for or not.
    pub fn runs(self) -> bool {
        self.stat().is_some_and(|stat| !stat.is_zombie())
    }

    /// Sends it a signal, and none to another process that has its id by now. Before Linux 5.3, a
    /// process that gets the id at this very moment may get the signal.
    ///
    /// # Errors
    /// `ESRCH`: it is gone. `EPERM`: it belongs to another user.
    pub fn signal(self, signal: libc::c_int) -> io::Result<()> {
        // Opened before the look at what it is of.
        let opened = pidfd::open(self.pid, 0);
        if self.stat().is_none() {
            return Err(Errno::ESRCH.into());
        }
        match opened {
            Ok(descriptor) => pidfd::send_signal(&descriptor, signal),
            // The kernel has none, or this process may open no more.
            // SAFETY: the call takes numbers alone.
            Err(_) => Errno::result(unsafe { libc::kill(self.pid, signal) }).map(drop).map_err(Into::into),
        }
    }

    /// A thread of it that has not exited, by which its memory can be reached, as [`live_thread`]
    /// finds it. None once it is gone, whatever has its id then.
    pub fn live_thread(self) -> Option<i32> {
        self.stat().and_then(|_| live_thread(self.pid))
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::super::is_gone;
    use super::*;

    #[test]
    fn another_process_with_the_id_is_not_taken_for_it() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let process = Process::find(child.id() as i32).unwrap();
        assert!(process.runs());
        assert_eq!(process.live_thread(), Some(process.pid));
        let earlier = Process { start_ticks: process.start_ticks - 1, ..process };
        assert!(!earlier.runs() && earlier.stat().is_none() && earlier.live_thread().is_none());
        assert!(is_gone(&earlier.signal(libc::SIGKILL).unwrap_err()));
        assert!(process.runs());
        process.signal(libc::SIGKILL).unwrap();
        while !process.stat().unwrap().is_zombie() {
            std::thread::yield_now();
        }
        assert!(!process.runs() && process.live_thread().is_none());
        child.wait().unwrap();
        assert!(process.stat().is_none());
        assert!(is_gone(&Process::find(process.pid).unwrap_err()) && is_gone(&process.signal(0).unwrap_err()));
    }
}
