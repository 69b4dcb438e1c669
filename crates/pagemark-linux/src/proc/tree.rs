//! `/proc/PID/task`: the threads and children of a process, and the tree of a process and its
//! descendants.

use std::collections::{HashSet, VecDeque};
use std::fs;
use std::io;

use super::{Process, Stat, Status, is_gone, stat};

/// A process of a tree.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Member {
    /// The process.
    pub process: Process,
    /// The parent's process id.
    pub parent_pid: i32,
}

/// Lists the threads of a process, in ascending order.
///
/// # Errors
/// `NotFound`: there is no such process.
pub fn threads(pid: i32) -> io::Result<Vec<i32>> {
    ids_in(fs::read_dir(super::path(pid, "task"))?)
}

/// Lists the ids of all processes, in ascending order.
///
/// # Errors
/// `/proc` is not mounted.
pub fn processes() -> io::Result<Vec<i32>> {
    ids_in(fs::read_dir("/proc")?)
}

fn ids_in(directory: fs::ReadDir) -> io::Result<Vec<i32>> {
    let mut ids: Vec<i32> = directory.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
    ids.sort_unstable();
    Ok(ids)
}

/// A thread of a process that has not exited: the main thread, unless that has. The memory of the
/// process can be accessed by this thread's id; under the id of a main thread that has exited the
/// kernel hides it. None if the process is gone or a zombie. The thread that KVM keeps in a process
/// does not count.
pub fn live_thread(pid: i32) -> Option<i32> {
    let is_live = |&thread: &i32| stat_of_own(thread).is_some_and(|stat| !stat.is_zombie());
    if is_live(&pid) { Some(pid) } else { threads(pid).ok()?.into_iter().find(is_live) }
}

/// True if a process has a thread that is not about to exit, besides the one that KVM may keep in
/// it.
pub fn executes_program(pid: i32) -> bool {
    let executes = |thread| stat_of_own(thread).is_some_and(|stat| !stat.is_exiting && !stat.is_zombie());
    threads(pid).is_ok_and(|threads| threads.into_iter().any(executes))
}

/// True if the first thread of a process has exited, and others execute the program on. Not true of
/// a process that is killed or exits, whose threads end one after the other.
pub fn has_exited_first(pid: i32) -> bool {
    Stat::read(pid).is_ok_and(|stat| stat.is_zombie()) && goes_on(pid) == Some(true)
}

/// True of a process that was killed or exits, and is not gone yet: it executes nothing more of its
/// program, but may have its files still.
pub fn is_ending(pid: i32) -> bool {
    goes_on(pid) == Some(false)
}

/// True if a thread of a process will execute the program. None if the process is gone.
fn goes_on(pid: i32) -> Option<bool> {
    const KILL: u64 = 1 << (libc::SIGKILL - 1);
    let executes = |thread| {
        let executes = stat_of_own(thread).is_some_and(|stat| !stat.is_exiting && !stat.is_zombie());
        executes && Status::read(thread).is_ok_and(|status| status.pending_signals & KILL == 0)
    };
    Some(threads(pid).ok()?.into_iter().any(executes))
}

/// What a thread is. None if it is gone, or that of KVM.
fn stat_of_own(thread: i32) -> Option<Stat> {
    let text = super::read(thread, "stat").ok()?;
    if stat::is_worker_of_kvm(&text) { None } else { Stat::parse(&text) }
}

/// Lists the children of a process, those of all its threads, in ascending order.
///
/// # Errors
/// `NotFound`: there is no such process. Otherwise `/proc` cannot be read.
pub fn children(pid: i32) -> io::Result<Vec<i32>> {
    let mut children = Vec::new();
    for thread in threads(pid)? {
        match super::read(pid, &format!("task/{thread}/children")) {
            Ok(list) => children.extend(parse_ids(&list)),
            // The thread is gone (its children now belong to another), or the kernel has no CONFIG_PROC_CHILDREN.
            Err(error) if is_gone(&error) => return children_by_parent(pid),
            Err(error) => return Err(error),
        }
    }
    children.sort_unstable();
    children.dedup();
    Ok(children)
}

/// Parses ids that are separated by spaces; other words are left out.
fn parse_ids(text: &[u8]) -> impl Iterator<Item = i32> {
    text.split(u8::is_ascii_whitespace).filter_map(|id| std::str::from_utf8(id).ok()?.parse().ok())
}

/// Finds the children of a process by reading every process's parent.
fn children_by_parent(pid: i32) -> io::Result<Vec<i32>> {
    let is_child = |&other: &i32| Stat::read(other).is_ok_and(|stat| stat.parent_pid == pid);
    Ok(processes()?.into_iter().filter(is_child).collect())
}

/// Lists the processes of the tree below `root_pid`, the root first and each parent before its
/// children. Zombies do not belong to it: they have no memory. While the tree runs, children that
/// are made meanwhile may be missed, and a process that is orphaned meanwhile is no descendant any
/// more; list it again.
///
/// # Errors
/// An error that [`is_gone`] matches: the root has exited. Otherwise `/proc` cannot be read.
pub fn members(root_pid: i32) -> io::Result<Vec<Member>> {
    let root = member(root_pid)?.ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))?;
    let mut members = vec![root];
    let mut known = HashSet::from([root_pid]);
    let mut unvisited = VecDeque::from([root_pid]);
    while let Some(pid) = unvisited.pop_front() {
        let children = match children(pid) {
            Ok(children) => children,
            Err(error) if is_gone(&error) => continue,
            Err(error) => return Err(error),
        };
        for child in children {
            if known.insert(child)
                && let Some(member) = member(child)?
            {
                members.push(member);
                unvisited.push_back(child);
            }
        }
    }
    Ok(members)
}

/// A process that is alive. None if it is gone or a zombie.
fn member(pid: i32) -> io::Result<Option<Member>> {
    match Stat::read(pid) {
        // A main thread may exit before its process does.
        Ok(stat) if stat.is_zombie() && threads(pid).map_or(true, |threads| threads.len() < 2) => Ok(None),
        Ok(stat) => {
            Ok(Some(Member { process: Process { pid, start_ticks: stat.start_ticks }, parent_pid: stat.parent_pid }))
        }
        Err(error) if is_gone(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The difference between two lists of a tree's processes.
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
        // A process that was given another parent is the same process.
        let same = |a: &Member, b: &Member| a.process == b.process;
        Change {
            new: now.iter().filter(|a| !before.iter().any(|b| same(a, b))).copied().collect(),
            gone: before.iter().filter(|a| !now.iter().any(|b| same(a, b))).copied().collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_bytes_are_ids_or_left_out(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let _ = parse_ids(&bytes).count();
        }
    }

    #[test]
    fn children_are_found_with_and_without_lists_of_them() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let (pid, child_pid) = (std::process::id() as i32, child.id() as i32);
        let found = [children(pid), children_by_parent(pid)];
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(found.into_iter().all(|children| children.unwrap().contains(&child_pid)));
    }

    #[test]
    fn descendants_come_and_go() {
        let script = "sh -c 'sleep 60 & echo $!; wait' & sleep 60 & echo $!; wait";
        let mut shell = Command::new("sh").args(["-c", script]).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(shell.stdout.take().unwrap()).lines();
        let mut sleeps: Vec<i32> = (0..2).map(|_| lines.next().unwrap().unwrap().parse().unwrap()).collect();
        let root_pid = shell.id() as i32;
        let before = members(root_pid).unwrap();
        assert_eq!(before.len(), 4, "{before:?}");
        assert_eq!(before[0].process.pid, root_pid);
        for member in &before[1..] {
            let parent = before.iter().position(|other| other.process.pid == member.parent_pid).unwrap();
            assert!(parent < before.iter().position(|other| other == member).unwrap());
        }
        assert!(sleeps.iter().all(|pid| before.iter().any(|member| member.process.pid == *pid)));
        let pids: Vec<i32> = before.iter().map(|member| member.process.pid).collect();
        let gone = sleeps.remove(0);
        // SAFETY: a signal to a process that this test has started and that is still there.
        unsafe { libc::kill(gone, libc::SIGKILL) };
        while members(root_pid).unwrap().iter().any(|member| member.process.pid == gone) {
            std::thread::yield_now();
        }
        let change = Change::between(&before, &members(root_pid).unwrap());
        assert!(change.new.is_empty() && change.gone.iter().any(|member| member.process.pid == gone), "{change:?}");
        for pid in pids {
            // SAFETY: signals to processes that this test has started.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        shell.wait().unwrap();
        assert!(is_gone(&members(root_pid).unwrap_err()));
    }
}
