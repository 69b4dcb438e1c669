//! Noticing that a process has exited.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::pidfd;
use super::proc::{self, Stat};

/// Time between two looks at a process of which there is no descriptor.
const POLL: Duration = Duration::from_millis(50);

/// Notices the exit of a process. Its status is left to be waited for.
#[derive(Debug)]
pub struct ExitWatch(Watched);

#[derive(Debug)]
enum Watched {
    /// Readable once the process has exited.
    Descriptor(OwnedFd),
    /// Without `pidfd_open`: a process that has the id and was started at that time.
    Process { pid: i32, start_ticks: u64 },
}

impl ExitWatch {
    /// Watches a process, by its id.
    ///
    /// # Errors
    /// `ESRCH` or `ENOENT`: there is no such process. `EMFILE`.
    pub fn new(pid: i32) -> io::Result<ExitWatch> {
        if pidfd::OPEN.is_there() {
            return pidfd::open(pid, 0).map(Watched::Descriptor).map(ExitWatch);
        }
        let start_ticks = Stat::read(pid)?.start_ticks;
        Ok(ExitWatch(Watched::Process { pid, start_ticks }))
    }

    /// True once the process has exited, waited for or not.
    pub fn has_exited(&self) -> bool {
        match &self.0 {
            Watched::Descriptor(descriptor) => is_readable(descriptor, PollTimeout::ZERO) == Ok(true),
            Watched::Process { pid, start_ticks } => {
                let is_same = Stat::read(*pid).is_ok_and(|stat| stat.start_ticks == *start_ticks);
                !is_same || proc::live_thread(*pid).is_none()
            }
        }
    }

    /// Waits until the process has exited.
    pub fn wait(&self) {
        match &self.0 {
            Watched::Descriptor(descriptor) => while is_readable(descriptor, PollTimeout::NONE) == Err(Errno::EINTR) {},
            Watched::Process { .. } => {
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
        let start_ticks = Stat::read(pids[1]).unwrap().start_ticks;
        let watches = [ExitWatch::new(pids[0]).unwrap(), ExitWatch(Watched::Process { pid: pids[1], start_ticks })];
        for (watch, child) in watches.iter().zip(&mut children) {
            assert!(!watch.has_exited());
            drop(child.stdin.take());
            watch.wait();
            assert!(watch.has_exited());
            // Nobody else has waited for it.
            assert!(child.wait().unwrap().success());
            assert!(watch.has_exited());
        }
        assert!(ExitWatch::new(i32::MAX).is_err());
        // The id belongs to another process now.
        let other = ExitWatch(Watched::Process { pid: std::process::id() as i32, start_ticks: 1 });
        assert!(other.has_exited());
    }
}
