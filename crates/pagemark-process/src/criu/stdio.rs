//! Standard streams that lead out of a process tree: how they are saved, and what they become at a
//! restore.
//!
//! CRIU opens a file again by its path. A terminal, or a pipe whose other end is in a process
//! outside the tree, cannot be created again: at a restore the processes get the restoring
//! command's own stream instead, of whatever kind that is. CRIU replaces a pipe only by a pipe and
//! a terminal only by a terminal. Therefore a stream that is to be replaced by another kind
//! becomes, in the images, a file with an invented path, because for a path CRIU takes any
//! descriptor.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsString;
use std::os::fd::RawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::pty::Winsize;
use pagemark_linux::proc::{self, Stat};
use pagemark_trace::error::Error;
use prost::Message;

use super::images::schema::{
    FILE_REGULAR, FdinfoEntry, FileEntry, RegFileEntry, TERMINAL_EXTERNAL, TtyInfoEntry, WinsizeEntry,
};
use super::images::{Image, ImageKind, read_all, with_bytes, with_varint, without};
use super::regular_files::images_of;

/// A terminal, or a pipe or socket that the tree has open as a standard stream, whose other end is
/// outside.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct Outside {
    /// CRIU's name of it: `tty[RDEV:DEV]`, `pipe[INODE]`, `unix[INODE]`.
    pub name: String,
    /// Lowest number under which a process of the tree has it open: 0, 1 or 2, except terminals.
    pub stream: RawFd,
}

/// Prefix of the invented path that stands for a stream of the restoring command in rewritten
/// images. No such file is ever opened.
const STAND_IN: &str = "pagemark/stream-";

/// True if this entry stands for a stream of the restoring command. One of a file with such a name
/// has a mode.
pub(crate) fn is_stand_in(file: &RegFileEntry) -> bool {
    file.mode.is_none() && file.name.strip_prefix('/').is_some_and(|name| name.starts_with(STAND_IN))
}

/// Finds the terminals of the processes that are outside of their tree. CRIU's arguments name them.
pub(crate) fn find_terminals(pids: &[i32]) -> Vec<Outside> {
    let mut terminals: BTreeMap<String, (RawFd, Option<u32>)> = BTreeMap::new();
    let mut own_terminals = Vec::new();
    // Processes that have `/dev/tty` open.
    let mut current: Vec<(i32, String, RawFd)> = Vec::new();
    let mut devices = BTreeMap::new();
    for &pid in pids {
        // A process that has exited meanwhile has no descriptors.
        for descriptor in proc::descriptors(pid).unwrap_or_default() {
            let number = descriptor.number;
            let Ok(metadata) = std::fs::metadata(descriptor.path()) else { continue };
            if metadata.file_type().is_char_device() {
                match Terminal::of(metadata.rdev()) {
                    Some(Terminal::Master) => {
                        own_terminals.extend(descriptor.info().ok().and_then(|info| info.number::<u64>("tty-index")));
                    }
                    Some(Terminal::Current) => {
                        current.push((pid, terminal_name(&metadata), number));
                    }
                    // A pseudo-terminal whose other end is outside cannot be opened again, whatever its number.
                    Some(Terminal::Other(index)) if number <= 2 || index.is_some() => {
                        let name = terminal_name(&metadata);
                        devices.insert(metadata.rdev(), index);
                        let stream = terminals.entry(name).or_insert((number, index));
                        stream.0 = stream.0.min(number);
                    }
                    _ => {}
                }
            }
        }
    }
    let is_outside = |index: &Option<u32>| !index.is_some_and(|index| own_terminals.contains(&u64::from(index)));
    let leads_outside = |pid: i32| {
        let terminal = Stat::read(pid).map_or(0, |stat| device_number(stat.terminal));
        devices.get(&terminal).is_some_and(is_outside)
    };
    // `/dev/tty` is the controlling terminal: CRIU restores it if that of one process is in the tree.
    let current = match current.iter().all(|(pid, ..)| leads_outside(*pid)) {
        true => current,
        false => Vec::new(),
    };
    let current: BTreeMap<String, RawFd> = current.into_iter().map(|(_, name, number)| (name, number)).collect();
    let current = current.into_iter().map(|(name, stream)| Outside { name, stream });
    let terminals = terminals
        .into_iter()
        .filter(|(_, (_, index))| is_outside(index))
        .map(|(name, (stream, _))| Outside { name, stream });
    terminals.chain(current).collect()
}

/// Finds the pipes among the standard streams that lead out of a tree, in its images: a list from
/// before the freeze may lack a process that has the other end.
///
/// # Errors
/// An image cannot be read.
pub(super) fn find_pipes(directory: &Path) -> Result<Vec<Outside>, Error> {
    let files: Vec<FileEntry> = read_all(&directory.join("files.img"), ImageKind::Files)?;
    let ends: HashMap<u32, (u32, u32)> = files
        .into_iter()
        .filter_map(|file| Some((file.id, file.pipe?)))
        .map(|(id, pipe)| (id, (pipe.pipe_id, pipe.flags)))
        .collect();
    let mut pipes: BTreeMap<u32, PipeEnds> = BTreeMap::new();
    for entry in descriptor_tables(directory)?.iter().flat_map(|table| &table.entries) {
        if let Some((pipe, flags)) = ends.get(&entry.id) {
            pipes.entry(*pipe).or_default().add(entry.fd.cast_signed(), flags.cast_signed());
        }
    }
    let outside = pipes.into_iter().filter(|(_, ends)| !(ends.reader && ends.writer));
    let named =
        outside.filter_map(|(inode, ends)| Some(Outside { name: format!("pipe[{inode}]"), stream: ends.stream? }));
    Ok(named.collect())
}

/// CRIU's name of a terminal.
fn terminal_name(metadata: &std::fs::Metadata) -> String {
    format!("tty[{:x}:{:x}]", metadata.rdev(), metadata.dev())
}

/// A device number in the form of `st_rdev`, of one in the form of `/proc/PID/stat`.
fn device_number(encoded: u64) -> u64 {
    let (major, minor) = ((encoded >> 8) & 0xfff, (encoded & 0xff) | ((encoded >> 12) & 0xfff00));
    libc::makedev(major as u32, minor as u32)
}

/// The ends of a pipe that the tree has open.
#[derive(Default)]
struct PipeEnds {
    reader: bool,
    writer: bool,
    stream: Option<RawFd>,
}

impl PipeEnds {
    /// Adds a descriptor of a pipe's end that was opened with these flags.
    fn add(&mut self, number: RawFd, flags: i32) {
        match flags & libc::O_ACCMODE {
            libc::O_RDONLY => self.reader = true,
            libc::O_WRONLY => self.writer = true,
            _ => (self.reader, self.writer) = (true, true),
        }
        if number <= 2 {
            self.stream = Some(self.stream.map_or(number, |stream| stream.min(number)));
        }
    }
}

enum Terminal {
    /// The master of a pseudo-terminal.
    Master,
    /// `/dev/tty`: the controlling terminal of whoever opens it.
    Current,
    /// Another terminal, with the number of the pseudo-terminal if it is the slave of one.
    Other(Option<u32>),
}

impl Terminal {
    /// The kind of terminal that has a device number, by Linux's
    /// `Documentation/admin-guide/devices.txt`.
    fn of(rdev: u64) -> Option<Terminal> {
        match (libc::major(rdev), libc::minor(rdev)) {
            (5, 0) => Some(Terminal::Current),
            (5, 2) => Some(Terminal::Master),
            (major @ 136..=143, minor) => Some(Terminal::Other(Some((major - 136) * 256 + minor))),
            (4, _) | (5, 1) | (204, _) | (229, _) => Some(Terminal::Other(None)),
            _ => None,
        }
    }
}

/// CRIU's arguments at a dump, which only terminals need.
pub(crate) fn dump_arguments(outside: &[Outside]) -> Vec<OsString> {
    let terminals = outside.iter().filter(|stream| stream.name.starts_with("tty["));
    terminals.flat_map(|stream| ["--external".into(), OsString::from(&stream.name)]).collect()
}

/// A standard stream of the restoring command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Own {
    /// The descriptor that CRIU inherits.
    pub descriptor: RawFd,
    /// True if it is a terminal.
    pub is_terminal: bool,
}

/// True if a terminal outside was a standard stream.
pub(crate) fn has_terminal(outside: &[Outside]) -> bool {
    outside.iter().any(|stream| stream.name.starts_with("tty["))
}

/// The process group that had the terminal outside whose job the tree was, if its root was in
/// `session`. None if the tree was no job of such a terminal.
pub(crate) fn foreground(directory: &Path, session: u32) -> Result<Option<i32>, Error> {
    let terminal = job_terminal(directory, session)?;
    Ok(terminal.and_then(|info| i32::try_from(info.pgrp).ok()).filter(|group| *group > 0))
}

fn job_terminal(directory: &Path, session: u32) -> Result<Option<TtyInfoEntry>, Error> {
    let mut terminals = terminals(directory)?.into_iter();
    Ok(terminals.find(|info| info.r#type == TERMINAL_EXTERNAL && info.sid == session && session != 0))
}

/// Changes the images in `directory` so that all terminals outside can become the terminal of the
/// restoring command, of a tree that was a job in `session`: it keeps its owner and its `size`, has
/// the mode of the tree's terminal, and the tree does not restore its session.
pub(crate) fn adopt_terminals(directory: &Path, session: u32, size: Option<Winsize>) -> Result<(), Error> {
    let path = directory.join(TERMINALS);
    let Some(mode) = job_terminal(directory, session)?.and_then(|info| info.termios) else { return Ok(()) };
    let mut image = Image::read(&path, ImageKind::Terminals)?;
    for message in &mut image.messages {
        let decoded = TtyInfoEntry::decode(message.as_slice());
        let entry = decoded.map_err(|e| Error::image(path.clone(), e.to_string()))?;
        if entry.r#type != TERMINAL_EXTERNAL {
            continue;
        }
        for field in [TtyInfoEntry::UID, TtyInfoEntry::GID] {
            *message = without(message, field);
        }
        for field in [TtyInfoEntry::SID, TtyInfoEntry::PGRP] {
            *message = with_varint(message, field, 0);
        }
        // A terminal that has hung up has no mode.
        if entry.termios.is_some() {
            *message = with_bytes(message, TtyInfoEntry::TERMIOS, &mode.encode_to_vec());
            if let Some(Winsize { ws_row, ws_col, ws_xpixel, ws_ypixel }) = size {
                let [ws_row, ws_col, ws_xpixel, ws_ypixel] = [ws_row, ws_col, ws_xpixel, ws_ypixel].map(u32::from);
                let size = WinsizeEntry { ws_row, ws_col, ws_xpixel, ws_ypixel };
                *message = with_bytes(message, TtyInfoEntry::WINSIZE, &size.encode_to_vec());
            }
        }
    }
    write_image(&path, &image)
}

/// Changes the images in `directory` so that the streams that led out of the tree become `own`.
/// Returns CRIU's arguments for that; `descriptor_for` makes the number of a descriptor of which
/// CRIU gets a copy of its own, because CRIU takes each descriptor that it inherits once.
pub(crate) fn redirect(
    directory: &Path,
    outside: &[Outside],
    own: [Own; 3],
    descriptor_for: &mut dyn FnMut(RawFd) -> std::io::Result<RawFd>,
) -> Result<Vec<OsString>, Error> {
    let mut arguments = Vec::new();
    let mut inherit = |descriptor: RawFd, name: &str| -> Result<(), Error> {
        let descriptor = descriptor_for(descriptor).map_err(Error::criu_io("duplicate a standard stream for CRIU"))?;
        arguments.extend(["--inherit-fd".into(), OsString::from(format!("fd[{descriptor}]:{name}"))]);
        Ok(())
    };
    // A terminal that replaces a terminal keeps its settings, which full-screen programs need.
    let own_terminal = own.iter().find(|own| own.is_terminal);
    let terminals = outside.iter().filter(|stream| stream.name.starts_with("tty["));
    if let Some(terminal) = own_terminal {
        for stream in terminals {
            inherit(terminal.descriptor, &stream.name)?;
        }
    }
    let inodes = |kind: &str| -> Vec<u32> {
        let inode = |name: &str| name.strip_prefix(kind)?.strip_prefix('[')?.strip_suffix(']')?.parse::<u64>().ok();
        // CRIU keeps the lower half of an inode number.
        outside.iter().filter_map(|stream| Some(inode(&stream.name)? as u32)).collect()
    };
    let (pipes, sockets) = (inodes("pipe"), inodes("unix"));

    let path = directory.join("files.img");
    let mut files = Image::read(&path, ImageKind::Files)?;
    let mut replaced: BTreeMap<u32, u32> = BTreeMap::new();
    let external = external_terminals(directory)?;
    let mut tables = descriptor_tables(directory)?;
    for message in &mut files.messages {
        let decoded = FileEntry::decode(message.as_slice());
        let entry = decoded.map_err(|e| Error::image(path.clone(), e.to_string()))?;
        let (flags, fown) = match (&entry.pipe, &entry.usk, &entry.tty) {
            (Some(pipe), ..) if pipes.contains(&pipe.pipe_id) => (pipe.flags, pipe.fown.clone()),
            (_, Some(socket), _) if sockets.contains(&socket.ino) => (socket.flags, socket.fown.clone()),
            (.., Some(terminal)) if own_terminal.is_none() && external.contains(&terminal.tty_info_id) => {
                (terminal.flags, terminal.fown.clone())
            }
            _ => continue,
        };
        let numbers: Vec<u32> = tables.iter().flat_map(|table| table.numbers_of(entry.id)).collect();
        // Of a file that is both input and output, the output matters more. Terminals have other numbers, too.
        let stream = [1, 2, 0].into_iter().find(|number| numbers.contains(number));
        let Some(number) = stream.or((entry.tty.is_some() && !numbers.is_empty()).then_some(0)) else { continue };
        replaced.insert(entry.id, number);
        let name = format!("/{STAND_IN}{number}");
        let regular = RegFileEntry { id: entry.id, flags, pos: u64::MAX, fown, name, ..Default::default() };
        let entry = FileEntry { r#type: FILE_REGULAR, id: entry.id, reg: Some(regular), ..Default::default() };
        *message = entry.encode_to_vec();
    }
    if replaced.is_empty() {
        return Ok(arguments);
    }
    for number in replaced.values().collect::<BTreeSet<_>>() {
        inherit(own[*number as usize].descriptor, &format!("{STAND_IN}{number}"))?;
    }
    write_image(&path, &files)?;
    for table in &mut tables {
        table.make_regular(&replaced)?;
    }
    Ok(arguments)
}

fn write_image(path: &Path, image: &Image) -> Result<(), Error> {
    std::fs::write(path, image.encode()).map_err(Error::criu_io(format!("write {}", path.display())))
}

/// The image of all terminals.
const TERMINALS: &str = "tty-info.img";

/// Reads the terminals.
fn terminals(directory: &Path) -> Result<Vec<TtyInfoEntry>, Error> {
    let path = directory.join(TERMINALS);
    if path.exists() { read_all(&path, ImageKind::Terminals) } else { Ok(Vec::new()) }
}

/// Reads the ids of the terminals whose other end is outside the tree.
fn external_terminals(directory: &Path) -> Result<Vec<u32>, Error> {
    Ok(terminals(directory)?.iter().filter(|info| info.r#type == TERMINAL_EXTERNAL).map(|info| info.id).collect())
}

/// An `fdinfo-N.img`.
pub(super) struct DescriptorTable {
    path: PathBuf,
    image: Image,
    entries: Vec<FdinfoEntry>,
}

impl DescriptorTable {
    /// The numbers of the descriptors of an open file.
    pub(super) fn numbers_of(&self, id: u32) -> impl Iterator<Item = u32> + '_ {
        self.entries.iter().filter(move |entry| entry.id == id).map(|entry| entry.fd)
    }

    fn make_regular(&mut self, files: &BTreeMap<u32, u32>) -> Result<(), Error> {
        for (message, entry) in self.image.messages.iter_mut().zip(&self.entries) {
            if files.contains_key(&entry.id) {
                *message = with_varint(message, FdinfoEntry::TYPE, FILE_REGULAR as u64);
            }
        }
        write_image(&self.path, &self.image)
    }
}

/// Reads the descriptors of all processes.
pub(super) fn descriptor_tables(directory: &Path) -> Result<Vec<DescriptorTable>, Error> {
    let table = |path: PathBuf| {
        let image = Image::read(&path, ImageKind::Descriptors)?;
        let entries = image.decoded(&path)?;
        Ok(DescriptorTable { path, image, entries })
    };
    images_of(directory, "fdinfo-")?.into_iter().map(table).collect()
}

/// Between fork and exec: begins a new session and keeps `inherited` open over the exec. Makes only
/// system calls.
pub(crate) fn begin_session_with(inherited: &[RawFd]) -> std::io::Result<()> {
    nix::unistd::setsid()?;
    keep_open(inherited)
}

/// Between fork and exec: keeps `inherited` open over the exec. Makes only system calls.
pub(crate) fn keep_open(inherited: &[RawFd]) -> std::io::Result<()> {
    for &descriptor in inherited {
        // SAFETY: F_SETFD changes a flag of a descriptor of this process only, whatever number it is given.
        if unsafe { libc::fcntl(descriptor, libc::F_SETFD, 0) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
    }
    Ok(())
}
