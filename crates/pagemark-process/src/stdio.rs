//! Standard streams that lead out of a process tree: how they are saved, and what they become at a restore.
//!
//! A file is opened again by its path, which CRIU does. A terminal, or a pipe whose other end is in a process outside the tree,
//! can't be made again: at a restore the processes get the restoring command's own stream in its place.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::fd::RawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};

/// A terminal or pipe that the tree has open as a standard stream, and whose other end is outside.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct Outside {
    /// As CRIU names it: `tty[RDEV:DEV]`, `pipe[INODE]`.
    pub name: String,
    /// Lowest number under which a process of the tree has it open: 0, 1 or 2.
    pub stream: RawFd,
}

/// The process ids of the tree under `root`, the root first. Processes that come or go meanwhile may be missing.
pub(crate) fn tree(root: i32) -> std::io::Result<Vec<i32>> {
    let mut pids = vec![root];
    let mut next = 0;
    while let Some(&pid) = pids.get(next) {
        next += 1;
        let tasks = match std::fs::read_dir(format!("/proc/{pid}/task")) {
            Ok(tasks) => tasks,
            Err(error) if pid == root => return Err(error),
            Err(_) => continue,
        };
        for task in tasks.flatten() {
            let children = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
            pids.extend(children.split_whitespace().filter_map(|child| child.parse::<i32>().ok()));
        }
    }
    Ok(pids)
}

/// Finds the standard streams of the processes that lead out of their tree.
pub(crate) fn survey(pids: &[i32]) -> Vec<Outside> {
    let mut pipes: BTreeMap<u64, PipeEnds> = BTreeMap::new();
    let mut terminals: BTreeMap<String, (RawFd, Option<u32>)> = BTreeMap::new();
    let mut own_terminals = Vec::new();
    for &pid in pids {
        let Ok(entries) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { continue };
        for entry in entries.flatten() {
            let Some(number) = entry.file_name().to_str().and_then(|name| name.parse::<RawFd>().ok()) else { continue };
            let Ok(metadata) = std::fs::metadata(entry.path()) else { continue };
            let details = || std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).unwrap_or_default();
            let target = std::fs::read_link(entry.path()).unwrap_or_default();
            let target = target.to_string_lossy();
            if metadata.file_type().is_fifo() && target.starts_with("pipe:[") {
                pipes.entry(metadata.ino()).or_default().add(number, &details());
            } else if metadata.file_type().is_char_device() {
                match Terminal::of(metadata.rdev()) {
                    Some(Terminal::Master) => own_terminals.extend(field(&details(), "tty-index:")),
                    Some(Terminal::Other(index)) if number <= 2 => {
                        let name = format!("tty[{:x}:{:x}]", metadata.rdev(), metadata.dev());
                        let stream = terminals.entry(name).or_insert((number, index));
                        stream.0 = stream.0.min(number);
                    }
                    _ => {}
                }
            }
        }
    }
    let pipes = pipes
        .into_iter()
        .filter(|(_, ends)| !(ends.reader && ends.writer))
        .filter_map(|(inode, ends)| Some(Outside { name: format!("pipe[{inode}]"), stream: ends.stream? }));
    let terminals = terminals
        .into_iter()
        .filter(|(_, (_, index))| !index.is_some_and(|index| own_terminals.contains(&u64::from(index))))
        .map(|(name, (stream, _))| Outside { name, stream });
    pipes.chain(terminals).collect()
}

/// Which ends of a pipe the tree has.
#[derive(Default)]
struct PipeEnds {
    reader: bool,
    writer: bool,
    stream: Option<RawFd>,
}

impl PipeEnds {
    fn add(&mut self, number: RawFd, details: &str) {
        let flags = details.lines().find_map(|line| line.strip_prefix("flags:")).map(str::trim).unwrap_or_default();
        match i32::from_str_radix(flags, 8).unwrap_or_default() & libc::O_ACCMODE {
            libc::O_RDONLY => self.reader = true,
            libc::O_WRONLY => self.writer = true,
            _ => (self.reader, self.writer) = (true, true),
        }
        if number <= 2 {
            self.stream = Some(self.stream.map_or(number, |stream| stream.min(number)));
        }
    }
}

fn field(details: &str, name: &str) -> Option<u64> {
    details.lines().find_map(|line| line.strip_prefix(name)).and_then(|value| value.trim().parse().ok())
}

enum Terminal {
    /// The master of a pseudo-terminal.
    Master,
    /// Another terminal; for the slave of a pseudo-terminal its number.
    Other(Option<u32>),
}

impl Terminal {
    /// By the device numbers of Linux's `Documentation/admin-guide/devices.txt`.
    fn of(rdev: u64) -> Option<Terminal> {
        match (libc::major(rdev), libc::minor(rdev)) {
            (5, 2) => Some(Terminal::Master),
            (major @ 136..=143, minor) => Some(Terminal::Other(Some((major - 136) * 256 + minor))),
            (4, _) | (5, 1) | (204, _) | (229, _) => Some(Terminal::Other(None)),
            _ => None,
        }
    }
}

/// CRIU's arguments at a dump: it needs to be told of terminals only.
pub(crate) fn dump_arguments(outside: &[Outside]) -> Vec<OsString> {
    let terminals = outside.iter().filter(|stream| stream.name.starts_with("tty["));
    terminals.flat_map(|stream| ["--external".into(), OsString::from(&stream.name)]).collect()
}

/// CRIU's arguments at a restore: each stream becomes the descriptor that `descriptors` has for its number.
pub(crate) fn restore_arguments(outside: &[Outside], descriptors: [RawFd; 3]) -> Vec<OsString> {
    let argument = |stream: &Outside| {
        let descriptor = descriptors.get(stream.stream as usize).copied().unwrap_or(descriptors[0]);
        ["--inherit-fd".into(), OsString::from(format!("fd[{descriptor}]:{}", stream.name))]
    };
    outside.iter().flat_map(argument).collect()
}

/// For the time between fork and exec: begins a session of its own, and keeps `inherited` open over the exec. Makes system calls only.
pub(crate) fn own_session_with(inherited: &[RawFd]) -> std::io::Result<()> {
    nix::unistd::setsid()?;
    keep_open(inherited)
}

/// For the time between fork and exec: keeps `inherited` open over the exec. Makes system calls only.
pub(crate) fn keep_open(inherited: &[RawFd]) -> std::io::Result<()> {
    for &descriptor in inherited {
        // SAFETY: F_SETFD changes a flag of a descriptor of this process only, whatever number it is given.
        if unsafe { libc::fcntl(descriptor, libc::F_SETFD, 0) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
    }
    Ok(())
}
