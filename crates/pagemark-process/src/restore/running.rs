//! CRIU while it restores, and the processes that it has begun.

use std::fs::File;
use std::io::PipeReader;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::wait::waitpid;
use nix::unistd::{Pid, geteuid};
use pagemark_linux::proc::{self, Process, Status, tree};

use crate::terminal::Leader;

/// Pause between two checks whether CRIU has ended.
pub(super) const WAIT_POLL: Duration = Duration::from_millis(1);
/// How long processes are waited for that are stopped before they are killed, if they wait for a
/// disk: they stop later.
const DISK_WAIT: Duration = Duration::from_secs(1);
/// How long they are waited for if they only need a processor.
const STOP_LIMIT: Duration = Duration::from_secs(30);
/// How long a restore waits for the parents of exited processes. The init of some containers
/// waits for orphans every two seconds.
pub(super) const ZOMBIE_WAIT: Duration = Duration::from_secs(5);

/// CRIU while it restores.
pub(super) enum Running {
    /// A child.
    Criu(Child),
    /// A child of the leader of the session that the tree is in.
    Leader(Box<Leader>),
}

impl Running {
    pub(super) fn below_leader(child: Child, reports: PipeReader) -> std::io::Result<Running> {
        let mut leader = Leader::new(child, File::from(OwnedFd::from(reports)));
        leader.first_child()?;
        Ok(Running::Leader(Box::new(leader)))
    }

    /// The child of this process.
    pub(super) fn child(&mut self) -> &mut Child {
        match self {
            Running::Criu(child) => child,
            Running::Leader(leader) => leader.child(),
        }
    }

    /// The leader of the session, if there is one.
    pub(super) fn leader(&mut self) -> Option<i32> {
        match self {
            Running::Criu(_) => None,
            Running::Leader(leader) => Some(leader.child().id() as i32),
        }
    }

    /// The child of this process, until it was waited for.
    pub(super) fn process(&mut self) -> Option<Process> {
        Process::find(self.child().id() as i32).ok()
    }

    /// The child of this process and all its descendants.
    pub(super) fn below_child(&mut self) -> Vec<Process> {
        self.process().map(below).unwrap_or_default()
    }

    /// Whether CRIU has succeeded; None while it runs.
    pub(super) fn try_wait(&mut self) -> std::io::Result<Option<bool>> {
        match self {
            Running::Criu(child) => Ok(child.try_wait()?.map(|status| status.success())),
            Running::Leader(leader) => {
                let mut polled = [PollFd::new(leader.reports().as_fd(), PollFlags::POLLIN)];
                match poll(&mut polled, PollTimeout::ZERO) {
                    Ok(0) | Err(Errno::EINTR) => Ok(None),
                    Ok(_) => Ok(Some(leader.restorer_succeeded().unwrap_or(false))),
                    Err(error) => Err(error.into()),
                }
            }
        }
    }

    /// Kills CRIU, and what the leader of the session has begun.
    pub(super) fn end(&mut self) {
        if matches!(self, Running::Leader(_))
            && let Some(leader) = self.process()
        {
            wait_for_end(&kill_with_descendants(|| below(leader)));
        }
        let _ = self.child().kill();
        let _ = self.child().wait();
    }
}

/// A process and all its descendants; of a zombie, itself alone. None once it is gone.
pub(super) fn below(process: Process) -> Vec<Process> {
    let members = tree::members(process.pid).unwrap_or_default();
    if process.stat().is_none() {
        return Vec::new();
    }
    let descendants = members.iter().map(|member| member.process).filter(|member| *member != process);
    [process].into_iter().chain(descendants).collect()
}

/// The children of this process.
pub(super) fn own_children() -> Vec<Process> {
    Process::find_all(&proc::children(std::process::id() as i32).unwrap_or_default())
}

/// What a restore has begun as a child of this process.
pub(super) enum Begun {
    /// A root process with this id, which was free before.
    Process(i32),
    /// The first process of a container, which has any id.
    Container {
        /// The children that this process had before.
        others: Vec<Process>,
    },
}

impl Begun {
    /// The root process, if it was restored as a child of this process.
    pub(super) fn child(&self) -> Option<Process> {
        match self {
            Begun::Process(pid) => {
                let process = Process::find(*pid).ok()?;
                process.stat().filter(|stat| stat.parent_pid == std::process::id() as i32).map(|_| process)
            }
            Begun::Container { others } => own_children().into_iter().find(|child| {
                !others.contains(child) && Status::read(child.pid).is_ok_and(|status| status.is_first_of_container())
            }),
        }
    }

    /// The root process and all its descendants, if it was restored as a child of this process.
    pub(super) fn below_child(&self) -> Vec<Process> {
        self.child().map(below).unwrap_or_default()
    }

    /// Kills what is left of a failed restore whose root is a child of this process, and waits for
    /// the end of the root, so that its id is free again.
    pub(super) fn end(&self) {
        let Some(root) = self.child() else { return };
        wait_for_end(&kill_with_descendants(|| below(root)));
        let _ = waitpid(Pid::from_raw(root.pid), None);
    }
}

/// Kills processes. One that is gone needs no end.
pub(super) fn kill_all(processes: &[Process]) {
    for process in processes {
        let _ = process.signal(libc::SIGKILL);
    }
}

/// Kills what a killed CRIU has left that restored from `images`, a directory that no other CRIU
/// has. While CRIU examines the kernel, it has children that stop themselves, until CRIU kills
/// them. They have the arguments of CRIU; their parent is another by now.
pub(super) fn end_examiners(images: &Path) {
    let is_of_criu = |arguments: Vec<Vec<u8>>| {
        arguments.windows(2).any(|pair| pair[0] == b"-D" && pair[1] == images.as_os_str().as_bytes())
    };
    let own = geteuid().as_raw();
    let is_left = |process: &Process| {
        let has_own_rights = Status::read(process.pid).is_ok_and(|status| status.effective_uid == own);
        has_own_rights && proc::arguments(process.pid).is_ok_and(is_of_criu)
    };
    let mut processes = Process::find_all(&proc::processes().unwrap_or_default());
    processes.retain(is_left);
    kill_all(&processes);
}

/// Kills the processes that `list` returns, and what they begin meanwhile. Returns all.
///
/// The children of a killed process get another parent and are in no list. So each process is
/// stopped first, until no new ones appear: one that has stopped begins no other.
pub(super) fn kill_with_descendants(list: impl Fn() -> Vec<Process>) -> Vec<Process> {
    let mut all = Vec::new();
    let begin = Instant::now();
    loop {
        let new: Vec<Process> = list().into_iter().filter(|process| !all.contains(process)).collect();
        if new.is_empty() || begin.elapsed() > STOP_LIMIT {
            all.extend(new);
            break;
        }
        for process in &new {
            let _ = process.signal(libc::SIGSTOP);
        }
        let runs = |process: &Process| {
            let has_stopped = |state| matches!(state, 'T' | 't') || state == 'D' && begin.elapsed() > DISK_WAIT;
            process.stat().is_some_and(|stat| !stat.is_zombie() && !has_stopped(stat.state))
        };
        while new.iter().any(runs) && begin.elapsed() < STOP_LIMIT {
            std::thread::sleep(WAIT_POLL);
        }
        all.extend(new);
    }
    kill_all(&all);
    all
}

/// Waits until processes that were killed run no more; the ids of zombies are free soon. The wait
/// has a limit: one that waits for a disk ends later.
pub(super) fn wait_for_end(processes: &[Process]) {
    let deadline = Instant::now() + ZOMBIE_WAIT;
    for process in processes {
        while process.runs() && Instant::now() < deadline {
            std::thread::sleep(WAIT_POLL);
        }
    }
}

/// The function of the kernel in which a process waits, in words.
pub(super) fn wait_of(process: Process) -> Option<String> {
    let stat = process.stat()?;
    let activity = proc::activity(process.pid)?;
    Some(format!("process {} ({}) is in {activity}", process.pid, stat.command))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn nothing_is_left_of_a_process_that_begins_others_all_the_time() {
        let argument = format!("1000.{}", std::process::id());
        let begins = format!("while :; do sleep {argument} & done");
        let left = || -> Vec<i32> {
            let is_one = |pid: &i32| {
                let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                line.contains(&argument)
            };
            proc::processes().unwrap().into_iter().filter(is_one).collect()
        };
        for _ in 0..5 {
            let mut shell = Command::new("sh");
            // What is left if this fails holds no output of the tests open.
            shell.args(["-c", &begins]).stdout(Stdio::null()).stderr(Stdio::null());
            let mut shell = shell.spawn().unwrap();
            while left().len() < 10 {
                std::thread::sleep(WAIT_POLL);
            }
            wait_for_end(&kill_with_descendants(|| Process::find(shell.id() as i32).map(below).unwrap_or_default()));
            shell.wait().unwrap();
            assert_eq!(left(), Vec::<i32>::new());
        }
    }
}
