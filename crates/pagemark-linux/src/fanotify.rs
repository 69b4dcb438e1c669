//! fanotify: which process changed which name of which directory, on whole file systems.
//!
//! An event has the process that made the change, the directory by a file handle, and the name in
//! it. Writes are not reported; that a file was closed that could be written is.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::interface::Interface;
use super::proc::mounts::Mount;

/// `fanotify_init` with `FAN_REPORT_DFID_NAME`, and `fanotify_mark` with `FAN_MARK_FILESYSTEM`.
pub static NAMES: Interface = Interface::new(
    "fanotify with names",
    "5.9",
    "files that a program has closed belong to its checkpoints in `--data` directories only",
    || match Fanotify::new()?.mark(Path::new("/")) {
        // The file system of `/` cannot be marked; others can.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENODEV | libc::EXDEV)) => Ok(()),
        marked => marked,
    },
);

/// Without `FAN_MODIFY`, for which each `write` of each program would pay: it took 1.6 µs instead
/// of 0.7 µs.
const WATCHED: u64 = libc::FAN_CLOSE_WRITE
    | libc::FAN_CREATE
    | libc::FAN_DELETE
    | libc::FAN_MOVED_FROM
    | libc::FAN_MOVED_TO
    | libc::FAN_ONDIR;

/// Size of the buffer for events, bytes. An event has at most some 400.
const BUFFER: usize = 64 << 10;

/// How long a directory is looked for where the kernel has no memory for it, or says so: longer
/// than any thread of another process waits for a processor.
const NO_MEMORY_LIMIT: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_micros(50);

/// A change of a name in a directory. Changes by one process that follow each other closely are one
/// event.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Event {
    /// The process that made the change; 0 if it is in a namespace of process ids that this process
    /// does not see.
    pub pid: i32,
    /// The directory.
    pub directory: DirectoryHandle,
    /// The name in it.
    pub name: OsString,
    /// True if the name is or was that of a directory.
    pub is_directory: bool,
    /// True if a file or directory was created under the name.
    pub is_created: bool,
    /// True if the name was removed, or another name was given to its file.
    pub is_gone: bool,
    /// True if a file or directory was renamed to the name.
    pub is_renamed_to: bool,
}

/// What the kernel calls a directory: it stays the same when the directory is renamed.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct DirectoryHandle {
    file_system: [u8; 8],
    /// `struct file_handle`.
    handle: Vec<u8>,
}

/// The events that were waiting.
#[derive(Default, Debug)]
pub struct Events {
    /// In the order of the changes of each name.
    pub events: Vec<Event>,
    /// True if the kernel has dropped events, because too many were waiting.
    pub overflowed: bool,
}

/// A group of marked file systems. None of them is held: each can be unmounted, and its mark is
/// gone then.
#[derive(Debug)]
pub struct Fanotify {
    group: File,
    /// A directory of each marked file system, as long as it is mounted there, and its device.
    marked: HashMap<[u8; 8], (PathBuf, u64)>,
}

impl Fanotify {
    /// A group without marks.
    ///
    /// # Errors
    /// `EPERM`: CAP_SYS_ADMIN is missing. `EINVAL`, `ENOSYS`: the kernel is too old or built
    /// without fanotify.
    pub fn new() -> io::Result<Fanotify> {
        let flags = libc::FAN_CLASS_NOTIF
            | libc::FAN_CLOEXEC
            | libc::FAN_NONBLOCK
            | libc::FAN_REPORT_DIR_FID
            | libc::FAN_REPORT_NAME;
        // SAFETY: the call takes numbers.
        let group = unsafe { libc::fanotify_init(flags, libc::O_RDONLY as libc::c_uint) };
        if group < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made this descriptor for us; nobody else owns it.
        Ok(Fanotify { group: unsafe { File::from_raw_fd(group) }, marked: HashMap::new() })
    }

    /// Has the changes of the file system reported that the directory `path` is on.
    ///
    /// # Errors
    /// `EPERM`: CAP_SYS_ADMIN is missing. `EOPNOTSUPP`, `ENODEV`, `EXDEV`: the file system has no
    /// file handles.
    pub fn mark(&mut self, path: &Path) -> io::Result<()> {
        let directory = open_directory(path)?;
        let (id, device) = (file_system_id(&directory)?, directory.metadata()?.dev());
        let flags = libc::FAN_MARK_ADD | libc::FAN_MARK_FILESYSTEM;
        // SAFETY: the descriptor is open, and no path is passed.
        let marked = unsafe {
            libc::fanotify_mark(self.group.as_raw_fd(), flags, WATCHED, directory.as_raw_fd(), std::ptr::null())
        };
        if marked != 0 {
            return Err(io::Error::last_os_error());
        }
        self.marked.insert(id, (path.to_owned(), device));
        Ok(())
    }

    /// True if a file system was marked.
    pub fn has_marks(&self) -> bool {
        !self.marked.is_empty()
    }

    /// Reads the events that are waiting. Every change that has been made before is among them.
    ///
    /// # Errors
    /// The group cannot be read.
    pub fn read(&mut self) -> io::Result<Events> {
        let mut found = Events::default();
        let mut buffer = vec![0; BUFFER];
        loop {
            match self.group.read(&mut buffer) {
                Ok(0) => return Ok(found),
                Ok(length) => parse(&buffer[..length], &mut found),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(found),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// The present path of a directory. None if the directory is gone.
    ///
    /// # Errors
    /// `EPERM`: CAP_DAC_READ_SEARCH is missing.
    pub fn path(&self, directory: &DirectoryHandle) -> io::Result<Option<PathBuf>> {
        let Some(mount) = self.open_mount(&directory.file_system) else { return Ok(None) };
        let start = Instant::now();
        let opened = loop {
            match open_by_handle(&mount, directory) {
                Ok(opened) => break opened,
                Err(error) => match error.raw_os_error() {
                    Some(libc::ESTALE | libc::ENOENT) => return Ok(None),
                    // ext4 returns it, too, while another file is made with the inode of one that is gone.
                    Some(libc::ENOMEM) if start.elapsed() < NO_MEMORY_LIMIT => std::thread::sleep(PAUSE),
                    _ => return Err(error),
                },
            }
        };
        let path = fs::read_link(format!("/proc/self/fd/{}", opened.as_raw_fd()))?;
        let is_removed = path.as_os_str().as_bytes().ends_with(b" (deleted)") && fs::symlink_metadata(&path).is_err();
        Ok((path.is_absolute() && !is_removed).then_some(path))
    }
}

impl Fanotify {
    /// A directory of a marked file system. None if that is not mounted here any more.
    fn open_mount(&self, id: &[u8; 8]) -> Option<File> {
        let (path, device) = self.marked.get(id)?;
        let open = |path: &Path| {
            open_directory(path).ok().filter(|opened| file_system_id(opened).is_ok_and(|found| found == *id))
        };
        open(path).or_else(|| {
            // It was unmounted there, or something else was mounted above. A device of btrfs is that of a
            // subvolume.
            let mounts = Mount::of_this_process().unwrap_or_default();
            let may_be = |mount: &&Mount| mount.device == *device || mount.file_system == "btrfs";
            mounts.iter().filter(may_be).find_map(|mount| open(&mount.point))
        })
    }
}

impl AsFd for Fanotify {
    /// Readable while events are waiting.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.group.as_fd()
    }
}

fn open_directory(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY | libc::O_NONBLOCK).open(path)
}

/// Opens the directory that a handle names.
fn open_by_handle(mount: &File, directory: &DirectoryHandle) -> io::Result<OwnedFd> {
    let mut handle = directory.handle.clone();
    let flags = libc::O_PATH | libc::O_CLOEXEC;
    // SAFETY: the kernel reads the handle, whose length was checked when it was parsed.
    let opened = unsafe { libc::syscall(libc::SYS_open_by_handle_at, mount.as_raw_fd(), handle.as_mut_ptr(), flags) };
    if opened < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(opened as libc::c_int) })
}

/// The id of a file system, as events have it.
fn file_system_id(file: &File) -> io::Result<[u8; 8]> {
    // SAFETY: the structure is plain data, for which zeros are valid.
    let mut found: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one structure.
    if unsafe { libc::fstatfs(file.as_raw_fd(), &mut found) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fsid_t` is two 32-bit numbers.
    Ok(unsafe { std::mem::transmute::<libc::fsid_t, [u8; 8]>(found.f_fsid) })
}

/// Length of `struct fanotify_event_metadata`.
const METADATA: usize = 24;

/// `FAN_EVENT_INFO_TYPE_DFID_NAME`
const DIRECTORY_AND_NAME: u8 = 2;

/// Parses what the kernel returns from one read.
pub fn parse(mut bytes: &[u8], found: &mut Events) {
    while let Some(length) = number(bytes, 0).map(|length| length as usize)
        && let Some(event) = bytes.get(..length).filter(|event| event.len() >= METADATA)
    {
        bytes = &bytes[length..];
        let mask = u64::from(number(event, 8).unwrap_or(0)) | u64::from(number(event, 12).unwrap_or(0)) << 32;
        found.overflowed |= mask & libc::FAN_Q_OVERFLOW != 0;
        let records = event[6..8].try_into().map_or(METADATA, |length| usize::from(u16::from_ne_bytes(length)));
        let Some((directory, name)) = event.get(records..).and_then(directory_and_name) else { continue };
        found.events.push(Event {
            pid: number(event, 20).unwrap_or(0) as i32,
            directory,
            name,
            is_directory: mask & libc::FAN_ONDIR != 0,
            is_created: mask & libc::FAN_CREATE != 0,
            is_gone: mask & (libc::FAN_DELETE | libc::FAN_MOVED_FROM) != 0,
            is_renamed_to: mask & libc::FAN_MOVED_TO != 0,
        });
    }
}

fn directory_and_name(mut records: &[u8]) -> Option<(DirectoryHandle, OsString)> {
    loop {
        let length = usize::from(u16::from_ne_bytes(records.get(2..4)?.try_into().ok()?));
        let record = records.get(..length).filter(|_| length > 0)?;
        if record[0] != DIRECTORY_AND_NAME {
            records = &records[length..];
            continue;
        }
        let file_system = record.get(4..12)?.try_into().ok()?;
        let end = 20_usize.checked_add(number(record, 12)? as usize)?;
        let handle = record.get(12..end)?.to_vec();
        let name = record.get(end..)?.split(|&byte| byte == 0).next()?.to_vec();
        return Some((DirectoryHandle { file_system, handle }, OsString::from_vec(name)));
    }
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A directory whose file system is marked, or why there can be none.
    fn watched() -> Result<(tempfile::TempDir, Fanotify), String> {
        if let Some(error) = NAMES.refusal() {
            return Err(format!("no fanotify with names ({error})"));
        }
        let (directory, mut group) = (tempfile::tempdir().unwrap(), Fanotify::new().unwrap());
        match group.mark(directory.path()) {
            Ok(()) => Ok((directory, group)),
            Err(error) => Err(format!("the file system of {} has no marks ({error})", directory.path().display())),
        }
    }

    #[test]
    fn a_directory_is_gone_while_others_are_made_with_its_inode() {
        use std::sync::atomic::{AtomicBool, Ordering};

        let (directory, mut group) = match watched() {
            Ok(watched) => watched,
            Err(reason) => pagemark_testing::skip!("{reason}"),
        };
        let gone = directory.path().join("gone");
        fs::create_dir(&gone).unwrap();
        fs::write(gone.join("file"), b"content").unwrap();
        let events = group.read().unwrap().events;
        let handle = events.into_iter().find(|event| event.name == *"file").unwrap().directory;
        assert_eq!(group.path(&handle).unwrap(), Some(gone.clone()));
        fs::remove_dir_all(&gone).unwrap();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    fs::create_dir(&gone).unwrap();
                    fs::remove_dir(&gone).unwrap();
                }
            });
            let found: Vec<_> =
                (0..20_000).map(|_| group.path(&handle)).filter(|path| !matches!(path, Ok(None))).collect();
            is_over.store(true, Ordering::Relaxed);
            assert!(found.is_empty(), "{} times, at first {:?}", found.len(), found[0]);
        });
    }

    #[test]
    fn changes_are_reported_with_process_directory_and_name() {
        let (directory, mut group) = match watched() {
            Ok(watched) => watched,
            Err(reason) => pagemark_testing::skip!("{reason}"),
        };
        let at = |name: &str| directory.path().join(name);
        fs::write(at("written"), b"content").unwrap();
        fs::create_dir(at("made")).unwrap();
        symlink("nowhere", at("link")).unwrap();
        fs::write(at("removed"), b"content").unwrap();
        fs::remove_file(at("removed")).unwrap();
        fs::rename(at("written"), at("made/renamed")).unwrap();
        let events = group.read().unwrap();
        assert!(!events.overflowed);
        let own: Vec<&Event> = events.events.iter().filter(|event| event.pid == std::process::id() as i32).collect();
        let of = |path: PathBuf| {
            let is_at = |event: &&&Event| {
                group.path(&event.directory).unwrap().is_some_and(|directory| directory.join(&event.name) == path)
            };
            let events: Vec<_> = own.iter().filter(is_at).collect();
            assert!(!events.is_empty(), "no event of {} in {own:?}", path.display());
            let any = |part: fn(&Event) -> bool| events.iter().any(|event| part(event));
            [any(|e| e.is_created), any(|e| e.is_gone), any(|e| e.is_renamed_to), any(|e| e.is_directory)]
        };
        assert_eq!(of(at("written")), [true, true, false, false]);
        assert_eq!(of(at("made")), [true, false, false, true]);
        assert_eq!(of(at("link")), [true, false, false, false]);
        assert_eq!(of(at("removed")), [true, true, false, false]);
        assert_eq!(of(at("made/renamed")), [false, false, true, false]);
        let made = own.iter().find(|event| event.name == *"renamed").unwrap().directory.clone();
        fs::remove_dir_all(at("made")).unwrap();
        assert_eq!(group.path(&made).unwrap(), None);
    }

    #[test]
    fn any_bytes_are_parsed() {
        let mut random = pagemark_testing::SplitMix(3);
        for _ in 0..2000 {
            let mut bytes: Vec<u8> = (0..random.below(200)).map(|_| random.below(256) as u8).collect();
            // Lengths that fit now and then.
            if bytes.len() >= 8 {
                let length = (random.below(bytes.len() as u64 + 1) as u32).to_ne_bytes();
                bytes[..4].copy_from_slice(&length);
            }
            parse(&bytes, &mut Events::default());
        }
    }
}
