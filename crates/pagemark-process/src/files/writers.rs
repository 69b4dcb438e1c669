//! Finds the processes that can write given files.

use std::collections::{HashMap, HashSet};
use std::fs::{self, Metadata};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

use nix::sys::stat::fstat;
use pagemark::sys::proc::{self, Mapping, descriptors, maps};

/// A file: its device and inode number.
pub(super) type Inode = (u64, u64);

/// A process that can write each of `files`, by a descriptor or a shared mapping, if there is one
/// other than those in `except`. Processes that may not be examined are left out.
pub(super) fn writers(files: &HashSet<Inode>, except: &[i32]) -> io::Result<HashMap<Inode, i32>> {
    let mut found = HashMap::new();
    if files.is_empty() {
        return Ok(found);
    }
    for pid in proc::processes()?.into_iter().filter(|pid| !except.contains(pid)) {
        for file in opened_for_writing(pid, files).into_iter().chain(mapped_for_writing(pid, files)) {
            found.entry(file).or_insert(pid);
        }
    }
    Ok(found)
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
        assert_eq!(writers(&files, &[own]).unwrap(), HashMap::new());
        let mut writer = sleep(fs::OpenOptions::new().append(true).open(file.path()).unwrap().into(), false);
        let found = writers(&files, &[own]).unwrap();
        assert_eq!(found.into_values().collect::<Vec<_>>(), [writer.id() as i32]);
        assert!(writers(&files, &[own, writer.id() as i32]).unwrap().is_empty());
        for child in [&mut reader, &mut writer] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}
