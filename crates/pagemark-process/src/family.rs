//! A process and all its descendants.

use std::collections::{HashSet, VecDeque};
use std::io;

use crate::proc::{self, Stat};

/// One process of a tree. The start time tells it from a later one with the same process id.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Member {
    /// Process id.
    pub pid: i32,
    /// The parent's process id.
    pub parent_pid: i32,
    /// When it was started, clock ticks since boot.
    pub start_ticks: u64,
}

/// The processes of a tree could not be listed.
#[derive(Debug, thiserror::Error)]
pub enum FamilyError {
    /// The root is gone.
    #[error("process {pid} has exited")]
    Gone {
        /// The root's process id.
        pid: i32,
    },
    /// `/proc` can't be read.
    #[error("listing the children of process {pid}: {source}")]
    System {
        /// Whose children.
        pid: i32,
        /// Why not.
        source: io::Error,
    },
}

/// Lists the processes of the tree below `root_pid`, the root first and each parent before its children. Zombies do not
/// belong to it: they have no memory. While the tree runs, children that are made meanwhile may be missed, and a process that is
/// orphaned meanwhile is no descendant any more; ask again.
///
/// # Errors
/// [`FamilyError`].
pub fn members(root_pid: i32) -> Result<Vec<Member>, FamilyError> {
    let root = member(root_pid)?.ok_or(FamilyError::Gone { pid: root_pid })?;
    let mut members = vec![root];
    let mut known = HashSet::from([root_pid]);
    let mut todo = VecDeque::from([root_pid]);
    while let Some(pid) = todo.pop_front() {
        let children = match proc::children(pid) {
            Ok(children) => children,
            Err(error) if is_gone(&error) => continue,
            Err(source) => return Err(FamilyError::System { pid, source }),
        };
        for child in children {
            if known.insert(child)
                && let Some(member) = member(child)?
            {
                members.push(member);
                todo.push_back(child);
            }
        }
    }
    Ok(members)
}

/// What has changed in a tree.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Change {
    /// Processes that are new.
    pub new: Vec<Member>,
    /// Processes that are gone.
    pub gone: Vec<Member>,
}

impl Change {
    /// Compares two lists.
    pub fn between(before: &[Member], now: &[Member]) -> Change {
        // A process that was given another parent is the same.
        let same = |a: &Member, b: &Member| (a.pid, a.start_ticks) == (b.pid, b.start_ticks);
        Change {
            new: now.iter().filter(|a| !before.iter().any(|b| same(a, b))).copied().collect(),
            gone: before.iter().filter(|a| !now.iter().any(|b| same(a, b))).copied().collect(),
        }
    }
}

/// A process that is alive, if it is.
fn member(pid: i32) -> Result<Option<Member>, FamilyError> {
    match Stat::read(pid) {
        // A main thread may exit before its process does.
        Ok(stat) if stat.is_zombie() && proc::threads(pid).map_or(true, |threads| threads.len() < 2) => Ok(None),
        Ok(stat) => Ok(Some(Member { pid, parent_pid: stat.parent_pid, start_ticks: stat.start_ticks })),
        Err(error) if is_gone(&error) => Ok(None),
        Err(source) => Err(FamilyError::System { pid, source }),
    }
}

fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn descendants_come_and_go() {
        let script = "sh -c 'sleep 60 & echo $!; wait' & sleep 60 & echo $!; wait";
        let mut shell = Command::new("sh").args(["-c", script]).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(shell.stdout.take().unwrap()).lines();
        let mut sleeps: Vec<i32> = (0..2).map(|_| lines.next().unwrap().unwrap().parse().unwrap()).collect();
        let root_pid = shell.id() as i32;
        let before = members(root_pid).unwrap();
        assert_eq!(before.len(), 4, "{before:?}");
        assert_eq!(before[0].pid, root_pid);
        for member in &before[1..] {
            let parent = before.iter().position(|other| other.pid == member.parent_pid).unwrap();
            assert!(parent < before.iter().position(|other| other == member).unwrap());
        }
        assert!(sleeps.iter().all(|pid| before.iter().any(|member| member.pid == *pid)));
        let pids: Vec<i32> = before.iter().map(|member| member.pid).collect();
        let gone = sleeps.remove(0);
        // SAFETY: a signal to a process that this test has started and that is still there.
        unsafe { libc::kill(gone, libc::SIGKILL) };
        while members(root_pid).unwrap().iter().any(|member| member.pid == gone) {
            std::thread::yield_now();
        }
        let change = Change::between(&before, &members(root_pid).unwrap());
        assert!(change.new.is_empty() && change.gone.iter().any(|member| member.pid == gone), "{change:?}");
        for pid in pids {
            // SAFETY: signals to processes that this test has started.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        shell.wait().unwrap();
        assert!(matches!(members(root_pid), Err(FamilyError::Gone { .. })));
    }
}
