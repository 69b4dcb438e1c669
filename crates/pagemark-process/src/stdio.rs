//! Standard streams that lead out of a process tree: how they are saved, and what they become at a restore.
//!
//! A file is opened again by its path, which CRIU does. A terminal, or a pipe whose other end is in a process outside the tree,
//! can't be made again: at a restore the processes get the restoring command's own stream in its place, whatever that is. CRIU puts
//! a pipe in the place of a pipe and a terminal in the place of a terminal only. So in its images, what is to be replaced by
//! something of another kind becomes a file with a made-up path, since for a path CRIU takes any descriptor it is handed.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::os::fd::RawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use prost::Message;

use crate::criu::images::{
    DescriptorEntry, FILE_REGULAR, FileEntry, Image, ImageKind, RegularEntry, TERMINAL_EXTERNAL, TerminalInfo,
    read_all, with_varint,
};
use crate::criu::{CriuError, ImageError};

/// A terminal or pipe that the tree has open as a standard stream, and whose other end is outside.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct Outside {
    /// As CRIU names it: `tty[RDEV:DEV]`, `pipe[INODE]`.
    pub name: String,
    /// Lowest number under which a process of the tree has it open: 0, 1 or 2.
    pub stream: RawFd,
}

/// Path of the file that stands for one of the restoring command's streams in rewritten images; nothing of that name is ever opened.
const STAND_IN: &str = "pagemark/stream-";

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

/// What one of the restoring command's streams is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Own {
    /// The descriptor to hand over.
    pub descriptor: RawFd,
    /// It is a terminal.
    pub is_terminal: bool,
}

/// Makes the images in `directory` such that the streams which led out of the tree become `own`. Returns CRIU's arguments for it.
pub(crate) fn redirect(directory: &Path, outside: &[Outside], own: [Own; 3]) -> Result<Vec<OsString>, CriuError> {
    let mut arguments = Vec::new();
    let mut hand_over = |descriptor: RawFd, name: &str| {
        arguments.extend(["--inherit-fd".into(), OsString::from(format!("fd[{descriptor}]:{name}"))]);
    };
    // A terminal in the place of a terminal keeps its settings, as full-screen programs need it.
    let own_terminal = own.iter().find(|own| own.is_terminal);
    let terminals = outside.iter().filter(|stream| stream.name.starts_with("tty["));
    if let Some(terminal) = own_terminal {
        terminals.for_each(|stream| hand_over(terminal.descriptor, &stream.name));
    }
    let pipes: Vec<u32> = outside
        .iter()
        .filter_map(|stream| stream.name.strip_prefix("pipe[")?.strip_suffix(']')?.parse::<u64>().ok())
        // CRIU keeps the lower half of an inode's number.
        .map(|inode| inode as u32)
        .collect();

    let path = directory.join("files.img");
    let mut files = Image::read(&path, ImageKind::Files)?;
    let mut replaced: BTreeMap<u32, u32> = BTreeMap::new();
    let external = external_terminals(directory)?;
    let mut tables = descriptor_tables(directory)?;
    for message in &mut files.messages {
        let decoded = FileEntry::decode(message.as_slice());
        let entry = decoded.map_err(|e| ImageError { path: path.clone(), reason: e.to_string() })?;
        let (flags, owner) = match (&entry.pipe, &entry.terminal) {
            (Some(pipe), _) if pipes.contains(&pipe.pipe_id) => (pipe.flags, pipe.owner.clone()),
            (_, Some(terminal)) if own_terminal.is_none() && external.contains(&terminal.info_id) => {
                (terminal.flags, terminal.owner.clone())
            }
            _ => continue,
        };
        let numbers: Vec<u32> = tables.iter().flat_map(|table| table.numbers_of(entry.id)).collect();
        // Who has one file as input and output wants to be read above all.
        let Some(number) = [1, 2, 0].into_iter().find(|number| numbers.contains(number)) else { continue };
        replaced.insert(entry.id, number);
        let name = format!("/{STAND_IN}{number}");
        let regular = RegularEntry { id: entry.id, flags, position: u64::MAX, owner, name };
        let entry = FileEntry { kind: FILE_REGULAR, id: entry.id, regular: Some(regular), ..Default::default() };
        *message = entry.encode_to_vec();
    }
    if replaced.is_empty() {
        return Ok(arguments);
    }
    for number in replaced.values().collect::<BTreeSet<_>>() {
        hand_over(own[*number as usize].descriptor, &format!("{STAND_IN}{number}"));
    }
    write_image(&path, &files)?;
    for table in &mut tables {
        table.make_regular(&replaced)?;
    }
    Ok(arguments)
}

fn write_image(path: &Path, image: &Image) -> Result<(), CriuError> {
    std::fs::write(path, image.encode()).map_err(CriuError::io(format!("write {}", path.display())))
}

/// Ids of the terminals whose other end is outside the tree.
fn external_terminals(directory: &Path) -> Result<Vec<u32>, CriuError> {
    let path = directory.join("tty-info.img");
    if !path.exists() {
        return Ok(Vec::new());
    }
    let terminals: Vec<TerminalInfo> = read_all(&path, ImageKind::Terminals)?;
    Ok(terminals.iter().filter(|info| info.kind == TERMINAL_EXTERNAL).map(|info| info.id).collect())
}

/// One `fdinfo-N.img`.
struct DescriptorTable {
    path: PathBuf,
    image: Image,
    entries: Vec<DescriptorEntry>,
}

impl DescriptorTable {
    fn numbers_of(&self, id: u32) -> impl Iterator<Item = u32> + '_ {
        self.entries.iter().filter(move |entry| entry.id == id).map(|entry| entry.number)
    }

    fn make_regular(&mut self, files: &BTreeMap<u32, u32>) -> Result<(), CriuError> {
        for (message, entry) in self.image.messages.iter_mut().zip(&self.entries) {
            if files.contains_key(&entry.id) {
                *message = with_varint(message, DescriptorEntry::KIND, u64::from(FILE_REGULAR));
            }
        }
        write_image(&self.path, &self.image)
    }
}

fn descriptor_tables(directory: &Path) -> Result<Vec<DescriptorTable>, CriuError> {
    let io = |error| CriuError::io(format!("read directory {}", directory.display()))(error);
    let mut tables = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("fdinfo-")) {
            let image = Image::read(&path, ImageKind::Descriptors)?;
            let entries = read_all(&path, ImageKind::Descriptors)?;
            tables.push(DescriptorTable { path, image, entries });
        }
    }
    Ok(tables)
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
