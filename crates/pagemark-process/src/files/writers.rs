//! Finds the processes that can write given files.

use std::collections::{HashMap, HashSet};
use std::fs::{self, Metadata};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

use nix::sys::stat::fstat;
use pagemark_linux::proc::{self, Mapping, Stat, descriptors, maps};

/// A file: its device and inode number.
pub(super) type Inode = (u64, u64);

/// The processes of a tree at the moment of a freeze.
#[derive(Clone, Debug)]
pub struct FrozenMembers {
    pids: Vec<i32>,
    /// When they were frozen, in clock ticks since boot.
    frozen_ticks: u64,
}

impl FrozenMembers {
    /// These are all processes of a tree, which is frozen now.
    pub fn now(pids: Vec<i32>) -> FrozenMembers {
        FrozenMembers { pids, frozen_ticks: proc::ticks_since_boot() }
    }

    /// True if a process could write nothing from outside of the tree before the freeze: it belongs
    /// to the tree, or was started after the freeze.
    fn cover(&self, pid: i32) -> bool {
        // The limit ends the search if the chain of parents changes meanwhile.
        let mut next = pid;
        for _ in 0..1024 {
            if self.pids.contains(&next) {
                return true;
            }
            match Stat::read(next) {
                // In the tick of the freeze, a process may have been started before the freeze or after it.
                Ok(stat) if next == pid && stat.start_ticks > self.frozen_ticks => return true,
                Ok(stat) if stat.parent_pid > 1 => next = stat.parent_pid,
                _ => return false,
            }
        }
        false
    }
}

/// A process that can write each of `files`, by a descriptor or a shared mapping, if there is one
/// that is not left out. Processes that may not be examined are left out too.
pub(super) fn writers(files: &HashSet<Inode>, is_left_out: impl Fn(i32) -> bool) -> io::Result<HashMap<Inode, i32>> {
    let mut found = HashMap::new();
    if files.is_empty() {
        return Ok(found);
    }
    for pid in proc::processes()? {
        let written: Vec<Inode> =
            opened_for_writing(pid, files).into_iter().chain(mapped_for_writing(pid, files)).collect();
        if !written.is_empty() && !is_left_out(pid) {
            written.into_iter().for_each(|file| _ = found.entry(file).or_insert(pid));
        }
    }
    Ok(found)
}

/// A process that could write each of `files` from outside of a tree when that was frozen, if there
/// is one.
pub(super) fn writers_outside(files: &HashSet<Inode>, tree: &FrozenMembers) -> io::Result<HashMap<Inode, i32>> {
    writers(files, |pid| tree.cover(pid))
}

fn opened_for_writing(pid: i32, files: &HashSet<Inode>) -> Vec<Inode> {
    let inodes = descriptors::numbers(pid).unwrap_or_default().into_iter().filter_map(|number| {
        let inode = inode(&fs::metadata(descriptors::path(pid, number)).ok()?);
        let descriptor = proc::descriptors::Descriptor { pid, number, link: Vec::new() };
        let writes =
            || descriptor.flags().ok().flatten().is_some_and(|flags| flags & libc::O_ACCMODE != libc::O_RDONLY);
        (files.contains(&inode) && writes()).then_some(inode)
    });
    inodes.collect()
}

fn mapped_for_writing(pid: i32, files: &HashSet<Inode>) -> Vec<Inode> {
    let is_candidate = |mapping: &Mapping| {
        mapping.writable && mapping.shared && files.iter().any(|(_, inode)| *inode == mapping.inode)
    };
    let mappings = maps::read(pid).unwrap_or_default().into_iter().filter(is_candidate);
    let inodes = mappings.filter_map(|mapping| {
        Some(inode(&fs::metadata(proc::mapped_file(pid, &mapping.range())).ok()?)).filter(|inode| files.contains(inode))
    });
    inodes.collect()
}

/// The device and inode number of a file.
pub(super) fn inode(metadata: &Metadata) -> Inode {
    (metadata.dev(), metadata.ino())
}

/// True if the standard output or the standard error of this process is this file.
pub(crate) fn is_own_output(file: &Metadata) -> bool {
    let is_same = |stream: std::os::fd::BorrowedFd<'_>| {
        fstat(stream).is_ok_and(|own| (own.st_dev, own.st_ino) == (file.dev(), file.ino()))
    };
    is_same(io::stdout().as_fd()) || is_same(io::stderr().as_fd())
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_process_that_can_write_is_found_and_a_reader_is_not() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let files = HashSet::from([inode(&file.as_file().metadata().unwrap())]);
        let own = std::process::id() as i32;
        let sleep = |stream: Stdio, input: bool| {
            let mut command = Command::new("sleep");
            command.arg("60");
            if input {
                command.stdin(stream)
            } else {
                command.stdout(stream)
            };
            command.spawn().unwrap()
        };
        let mut reader = sleep(fs::File::open(file.path()).unwrap().into(), true);
        let without = |pids: &[i32]| writers(&files, |pid| pids.contains(&pid)).unwrap();
        assert_eq!(without(&[own]), HashMap::new());
        let mut writer = sleep(fs::OpenOptions::new().append(true).open(file.path()).unwrap().into(), false);
        let found = without(&[own]);
        assert_eq!(found.into_values().collect::<Vec<_>>(), [writer.id() as i32]);
        assert!(without(&[own, writer.id() as i32]).is_empty());
        for child in [&mut reader, &mut writer] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    #[test]
    fn a_process_that_was_started_after_a_freeze_is_no_stranger() {
        let file = tempfile::NamedTempFile::new().unwrap().into_temp_path();
        let files = HashSet::from([inode(&file.metadata().unwrap())]);
        let own = std::process::id() as i32;
        let start = |script: &str| {
            let output = fs::OpenOptions::new().append(true).open(&file).unwrap();
            let mut command = Command::new("sh");
            command.args(["-c", script]).stdin(Stdio::piped()).stdout(output).spawn().unwrap()
        };
        let mut before = start("read line");
        let strangers = |tree: &FrozenMembers| writers_outside(&files, tree).unwrap().into_values().collect::<Vec<_>>();
        let start_ticks = |pid: u32| Stat::read(pid as i32).unwrap().start_ticks;
        let frozen_ticks = start_ticks(before.id());
        // This process is not in the tree: it would be the parent of all.
        let tree = FrozenMembers { pids: Vec::new(), frozen_ticks };
        let frozen = FrozenMembers::now(vec![before.id() as i32]);
        assert!(frozen.frozen_ticks >= frozen_ticks && frozen.frozen_ticks < frozen_ticks + 360_000, "{frozen:?}");
        assert_eq!(strangers(&tree), [before.id() as i32]);
        assert_eq!(strangers(&frozen), Vec::<i32>::new());
        before.kill().unwrap();
        before.wait().unwrap();
        let mut after = start("read line");
        while start_ticks(after.id()) <= frozen_ticks {
            after.kill().unwrap();
            after.wait().unwrap();
            after = start("read line");
        }
        assert_eq!(strangers(&tree), Vec::<i32>::new());
        // A child of a member in the tick of the freeze.
        let later = FrozenMembers { frozen_ticks: u64::MAX, ..tree };
        assert_eq!(strangers(&later), [after.id() as i32]);
        assert_eq!(strangers(&FrozenMembers { pids: vec![own], ..later }), Vec::<i32>::new());
        after.kill().unwrap();
        after.wait().unwrap();
    }
}
