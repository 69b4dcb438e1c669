//! Noticing that a process has exited.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::pidfd;
use super::proc::Process;

/// Time between two looks at a process of which there is no descriptor.
const POLL: Duration = Duration::from_millis(50);

/// Notices the exit of a process. Its status is left to be waited for.
#[derive(Debug)]
pub struct ExitWatch(Watched);

#[derive(Debug)]
enum Watched {
    /// Readable once the process has exited.
    Descriptor(OwnedFd),
    /// Without `pidfd_open`.
    Process(Process),
}

impl ExitWatch {
    /// Watches a process.
    ///
    /// # Errors
    /// `ESRCH`: there is no such process any more. `EMFILE`.
    pub fn new(process: Process) -> io::Result<ExitWatch> {
        let watched = match pidfd::OPEN.is_there() {
            true => Watched::Descriptor(pidfd::open(process.pid, 0)?),
            false => Watched::Process(process),
        };
        match process.stat() {
            Some(_) => Ok(ExitWatch(watched)),
            None => Err(Errno::ESRCH.into()),
        }
    }

    /// True once the process has exited, waited for or not.
    pub fn has_exited(&self) -> bool {
        match &self.0 {
            Watched::Descriptor(descriptor) => is_readable(descriptor, PollTimeout::ZERO) == Ok(true),
            Watched::Process(process) => process.live_thread().is_none(),
        }
    }

    /// Waits until the process has exited.
    pub fn wait(&self) {
        match &self.0 {
            Watched::Descriptor(descriptor) => while is_readable(descriptor, PollTimeout::NONE) == Err(Errno::EINTR) {},
            Watched::Process(_) => {
                while !self.has_exited() {
                    std::thread::sleep(POLL);
                }
            }
        }
    }
}

fn is_readable(descriptor: &OwnedFd, timeout: PollTimeout) -> nix::Result<bool> {
    let mut exit = [PollFd::new(descriptor.as_fd(), PollFlags::POLLIN)];
    Ok(poll(&mut exit, timeout)? > 0)
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn an_exit_is_noticed_with_and_without_a_descriptor() {
        let start = || Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let mut children = [start(), start()];
        let pids = children.each_ref().map(|child| child.id() as i32);
        let processes = pids.map(|pid| Process::find(pid).unwrap());
        let watches = [ExitWatch::new(processes[0]).unwrap(), ExitWatch(Watched::Process(processes[1]))];
        for (watch, child) in watches.iter().zip(&mut children) {
            assert!(!watch.has_exited());
            drop(child.stdin.take());
            watch.wait();
            assert!(watch.has_exited());
            // Nobody else has waited for it.
            assert!(child.wait().unwrap().success());
            assert!(watch.has_exited());
        }
        // The id belongs to another process now.
        let earlier = Process { pid: std::process::id() as i32, start_ticks: 1 };
        assert!(ExitWatch(Watched::Process(earlier)).has_exited());
        assert!(ExitWatch::new(earlier).is_err());
    }
}
