//! Objects as files of a local directory.
//!
//! An object's name is its path in the directory. It is staged under its name with `.tmp` at the
//! end and published by a rename. Directories have the mode 0700 and files 0600: memory holds
//! secrets. A lease is a `flock` on a file: on `locks/NAME`, on `lock` for the lease of this name,
//! and a reader's on the object. The kernel ends each with the process. A file in `locks` whose
//! name has a dot is removed before the lock of its only holder ends.
//!
//! The directory is held open, and every file is opened from its descriptor without following a
//! link. Everything but regular files and directories is ignored. A directory that others can
//! change is not refused here: [`LocalBackend::exposure`] reports it.

use std::fs::{DirBuilder, File, TryLockError};
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use nix::fcntl::{FcntlArg, OFlag, PosixFadviseAdvice, fcntl, posix_fadvise};
use pagemark_linux::this_process::OfThisProcess;

use super::directory::{Directory, EntryKind, Exposure, kind_of};
use super::{
    Backend, BackendError, Lease, LeaseMode, Leased, ListEntry, ListKind, NewObject, Object, ReadAt, Stamp,
    check_lease, check_name, directory_of,
};

/// Bytes that are written at once. Tests write often, to be able to fail often.
const BUFFER_BYTES: usize = if cfg!(test) { 32 << 10 } else { 1 << 20 };

/// Content that is written past the page cache begins at such an address. Each such write is a
/// whole buffer, which is a multiple of any disk's blocks.
const ALIGNMENT_BYTES: usize = 4096;

/// A directory that changed less than this ago may change again without a new time of modification.
const CLOCK_TICK: Duration = Duration::from_millis(100);

/// The lease whose file is in the directory itself, and stays.
const LOCK: &str = "lock";
/// The directory of the files that other leases are on.
const LOCKS: &str = "locks";
/// The end of the names of staged objects.
const STAGED: &str = ".tmp";

/// Objects as files of a local directory, which may be on a network file system that has `flock`.
pub struct LocalBackend {
    /// The absolute path of the directory.
    path: PathBuf,
    /// None if the directory did not exist.
    root: Option<Directory>,
    files: Files,
}

/// The calls that decide what is durable. Each test can turn them off, or see their order.
#[derive(Clone, Default)]
struct Files {
    /// The machine does not crash in tests: what it would lose, the wrapper that injects faults
    /// knows.
    #[cfg(test)]
    is_unsynced: bool,
    #[cfg(test)]
    calls: Option<Arc<std::sync::Mutex<Vec<String>>>>,
}

impl Files {
    #[cfg(test)]
    fn record(&self, call: &str, path: &Path) {
        if let Some(calls) = &self.calls {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            calls.lock().unwrap().push(format!("{call} {name}"));
        }
    }

    fn sync(&self, file: &File, path: &Path) -> Result<(), BackendError> {
        #[cfg(test)]
        {
            self.record("sync", path);
            if self.is_unsynced {
                return Ok(());
            }
        }
        file.sync_all().map_err(failed("sync", path))
    }

    fn sync_directory(&self, directory: &Directory) -> Result<(), BackendError> {
        #[cfg(test)]
        {
            self.record("sync directory", directory.path());
            if self.is_unsynced {
                return Ok(());
            }
        }
        directory.sync().map_err(failed("sync the directory", directory.path()))
    }

    fn rename(&self, directory: &Directory, from: &str, to: &str) -> Result<(), BackendError> {
        #[cfg(test)]
        self.record("rename", &directory.path_of(to));
        directory.rename(from, to).map_err(failed("rename", &directory.path_of(from)))
    }

    /// Creates a directory for its owner alone. False if there is one.
    fn create_directory(&self, directory: &Directory, name: &str) -> Result<bool, BackendError> {
        #[cfg(test)]
        self.record("create directory", &directory.path_of(name));
        match directory.create_directory(name) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(failed("create the directory", &directory.path_of(name))(error)),
        }
    }
}

/// For `map_err`: `operation` on `path` failed.
fn failed(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> BackendError {
    BackendError::new(operation, path.display().to_string())
}

/// True if an object or directory does not exist.
fn is_missing(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

/// None if the object or directory does not exist.
fn unless_missing<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if is_missing(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The last part of a name.
fn last_part_of(name: &str) -> &str {
    name.rsplit_once('/').map_or(name, |(_, last)| last)
}

impl LocalBackend {
    /// Objects in the directory `path`, which need not exist: then there are none. Links in `path`
    /// itself are followed.
    ///
    /// # Errors
    /// The current directory is needed and unknown, or the directory may not be opened.
    pub fn new(path: &Path) -> Result<LocalBackend, BackendError> {
        let path = std::path::absolute(path).map_err(failed("find", path))?;
        let root = unless_missing(Directory::open(&path)).map_err(failed("open", &path))?;
        Ok(LocalBackend { path, root, files: Files::default() })
    }

    /// Makes the directory `path`, with those above it, and makes it its owner's alone if that is
    /// this user.
    ///
    /// # Errors
    /// The file system failed, or others may use the directory and there is something in it.
    pub fn create_directory(path: &Path) -> Result<LocalBackend, BackendError> {
        let path = std::path::absolute(path).map_err(failed("find", path))?;
        DirBuilder::new().recursive(true).mode(0o700).create(&path).map_err(failed("create the directory", &path))?;
        let root = Directory::open(&path).map_err(failed("open", &path))?;
        root.keep_for_owner().map_err(failed("set the permissions of", &path))?;
        let backend = LocalBackend { path: path.clone(), root: Some(root), files: Files::default() };
        if let Some(parent) = path.parent() {
            let parent = Directory::open(parent).map_err(failed("open", parent))?;
            backend.files.sync_directory(&parent)?;
        }
        Ok(backend)
    }

    /// Who other than this user and root can change the directory or one of the entries `names`, as
    /// far as they exist. None if nobody can, or if the directory does not exist.
    ///
    /// # Errors
    /// The attributes could not be read.
    pub fn exposure(&self, names: &[&str]) -> Result<Option<Exposure>, BackendError> {
        let Some(root) = &self.root else { return Ok(None) };
        root.exposure(names).map_err(failed("read the attributes of", &self.path))
    }

    /// The names of all files and directories in the directory, whatever they are; none if it does
    /// not exist.
    ///
    /// # Errors
    /// The directory could not be read.
    pub fn names_in(path: &Path) -> Result<Vec<String>, BackendError> {
        let list = || -> io::Result<Vec<String>> {
            let name = |entry: io::Result<std::fs::DirEntry>| Ok(entry?.file_name().to_string_lossy().into_owned());
            std::fs::read_dir(path)?.map(name).collect()
        };
        match list() {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
            listed => listed.map_err(failed("list", path)),
        }
    }

    /// This backend without waiting for the disk.
    #[cfg(test)]
    pub(crate) fn unsynced(mut self) -> LocalBackend {
        self.files.is_unsynced = true;
        self
    }

    /// The directory itself.
    fn root(&self) -> io::Result<&Directory> {
        self.root.as_ref().ok_or_else(|| ErrorKind::NotFound.into())
    }

    fn directory(&self, name: &str) -> io::Result<Directory> {
        self.root()?.directory(name)
    }

    fn path(&self, name: &str) -> PathBuf {
        if name.is_empty() { self.path.clone() } else { self.path.join(name) }
    }

    fn checked_path(&self, operation: &'static str, name: &str) -> Result<PathBuf, BackendError> {
        check_name(name).map_err(BackendError::new(operation, format!("{name:?}")))?;
        Ok(self.path(name))
    }

    /// Opens the file of an object. None if there is none.
    fn open_file(&self, name: &str) -> Result<Option<File>, BackendError> {
        let path = self.checked_path("open", name)?;
        unless_missing(self.root().and_then(|root| root.file(name))).map_err(failed("open", &path))
    }

    /// Opens a directory, and creates it and those above it where they are missing.
    fn make_directory(&self, name: &str) -> Result<Directory, BackendError> {
        let path = self.path(name);
        match unless_missing(self.directory(name)).map_err(failed("open", &path))? {
            Some(directory) => return Ok(directory),
            None if name.is_empty() => return Err(failed("open", &path)(ErrorKind::NotFound.into())),
            None => {}
        }
        let above = self.make_directory(directory_of(name))?;
        if self.files.create_directory(&above, last_part_of(name))? {
            self.files.sync_directory(&above)?;
        }
        self.directory(name).map_err(failed("open", &path))
    }

    /// Removes the staged files of a directory and those below.
    fn discard_staged_in(&self, directory: &Directory) -> Result<(), BackendError> {
        for entry in directory.entries().map_err(failed("list", directory.path()))? {
            let path = directory.path_of(&entry.name);
            match (entry.kind, entry.name.ends_with(STAGED)) {
                (EntryKind::Directory, _) => {
                    if let Some(below) =
                        unless_missing(directory.directory(&entry.name)).map_err(failed("open", &path))?
                    {
                        self.discard_staged_in(&below)?;
                    }
                }
                (_, true) => directory.remove(&entry.name).map_err(failed("remove", &path))?,
                (_, false) => {}
            }
        }
        Ok(())
    }
}

impl Backend for LocalBackend {
    fn location(&self) -> &Path {
        &self.path
    }

    fn prepare(&self, directories: &[&str]) -> Result<(), BackendError> {
        directories.iter().try_for_each(|directory| self.make_directory(directory).map(drop))
    }

    fn list(&self, directory: &str) -> Result<Vec<ListEntry>, BackendError> {
        let listed = self.directory(directory).and_then(|opened| opened.entries());
        let listed = unless_missing(listed).map_err(failed("list", &self.path(directory)))?;
        let mut entries = Vec::new();
        for entry in listed.unwrap_or_default() {
            let is_own =
                entry.name.ends_with(STAGED) || (directory.is_empty() && [LOCK, LOCKS].contains(&&*entry.name));
            if is_own {
                continue;
            }
            let kind = match entry.kind {
                EntryKind::File => ListKind::Object,
                EntryKind::Directory => ListKind::Directory,
                EntryKind::Other => ListKind::Other,
            };
            entries.push(ListEntry { name: entry.name, kind });
        }
        Ok(entries)
    }

    fn stamp(&self, directory: &str) -> Option<Stamp> {
        // Before the metadata is read: a thread that is suspended between the two must not take a change of
        // just now for an old one, since the next change may have the same time.
        let asked_at = SystemTime::now();
        stamp_of(&self.directory(directory).ok()?.metadata().ok()?, asked_at)
    }

    fn bytes(&self, name: &str) -> Result<Option<u64>, BackendError> {
        let path = self.checked_path("read", name)?;
        let stat = self.directory(directory_of(name)).and_then(|directory| directory.stat(last_part_of(name)));
        let stat = unless_missing(stat).map_err(failed("read", &path))?;
        Ok(stat.filter(|stat| kind_of(stat) == EntryKind::File).map(|stat| stat.st_size as u64))
    }

    fn open(&self, name: &str) -> Result<Option<Arc<dyn Object>>, BackendError> {
        let path = self.path(name);
        Ok(self.open_file(name)?.map(|file| Arc::new(LocalObject { file, path }) as Arc<dyn Object>))
    }

    fn create(&self, name: &str) -> Result<Box<dyn NewObject>, BackendError> {
        self.checked_path("create", name)?;
        let directory = self.make_directory(directory_of(name))?;
        Ok(Box::new(NewFile::create(directory, last_part_of(name), self.files.clone())?))
    }

    fn remove(&self, name: &str) -> Result<(), BackendError> {
        let path = self.checked_path("remove", name)?;
        let removed = self.directory(directory_of(name)).and_then(|directory| directory.remove(last_part_of(name)));
        unless_missing(removed).map(drop).map_err(failed("remove", &path))
    }

    fn sync(&self, directory: &str) -> Result<(), BackendError> {
        // What was in a directory that is gone is gone as well.
        match unless_missing(self.directory(directory)).map_err(failed("open", &self.path(directory)))? {
            Some(directory) => self.files.sync_directory(&directory),
            None => Ok(()),
        }
    }

    fn discard_staged(&self) -> Result<(), BackendError> {
        self.discard_staged_in(self.root().map_err(failed("list", &self.path))?)
    }

    fn lease(&self, name: &str, mode: LeaseMode, owner: &str) -> Result<Leased, BackendError> {
        check_lease(name).map_err(BackendError::new("lock", format!("{name:?}")))?;
        let root = self.root().map_err(failed("open", &self.path))?;
        if !root.is_in_place().map_err(failed("find", &self.path))? {
            // What was written there would be lost, or not be found.
            return Err(failed("find", &self.path)(ErrorKind::StaleNetworkFileHandle.into()));
        }
        let directory = self.make_directory(if name == LOCK { "" } else { LOCKS })?;
        let path = directory.path_of(name);
        loop {
            let mut file = directory.file_to_write(name).map_err(failed("open", &path))?;
            let locked = match mode {
                LeaseMode::Alone => file.try_lock(),
                LeaseMode::Shared => file.try_lock_shared(),
            };
            match locked {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    let mut owner = String::new();
                    // The text only helps people: without it the lease is held all the same.
                    let _ = Read::take(&file, 1024).read_to_string(&mut owner);
                    let stamp = file.metadata().and_then(|metadata| metadata.modified()).ok();
                    let stamp = stamp.and_then(|stamp| stamp.duration_since(SystemTime::UNIX_EPOCH).ok());
                    return Ok(Leased::Held { owner, stamp: stamp.map_or(0, |stamp| stamp.as_nanos()) });
                }
                Err(TryLockError::Error(source)) => return Err(failed("lock", &path)(source)),
            }
            let names = file.metadata().map_err(failed("read", &path))?.nlink();
            if names == 0 {
                // The last holder has removed it since it was opened.
                continue;
            }
            // A file with a second name may be a foreign file: it is locked, and not written.
            if names == 1 {
                // On a full disk the file stays empty.
                let _ = file.set_len(0).and_then(|()| file.rewind()).and_then(|()| file.write_all(owner.as_bytes()));
            }
            // There may be many such names.
            let goes = mode == LeaseMode::Alone && name.contains('.');
            let removed = goes.then(|| (directory, name.to_owned()));
            let mut locked = LockedFile::new(file);
            locked.removed = removed;
            return Ok(Leased::Granted(Box::new(locked)));
        }
    }

    fn lease_reader(&self, name: &str) -> Result<Option<Box<dyn Lease>>, BackendError> {
        let path = self.path(name);
        let Some(file) = self.open_file(name)? else { return Ok(None) };
        file.lock_shared().map_err(failed("lock", &path))?;
        // It is removed only under an exclusive lock.
        let is_removed = file.metadata().map_err(failed("read", &path))?.nlink() == 0;
        Ok((!is_removed).then(|| Box::new(LockedFile::new(file)) as Box<dyn Lease>))
    }

    fn remove_unleased(&self, name: &str) -> Result<bool, BackendError> {
        let path = self.path(name);
        let Some(file) = self.open_file(name)? else { return Ok(true) };
        match file.try_lock() {
            Ok(()) => {
                let _locked = LockedFile::new(file);
                self.remove(name).map(|()| true)
            }
            Err(TryLockError::WouldBlock) => Ok(false),
            Err(TryLockError::Error(source)) => Err(failed("lock", &path)(source)),
        }
    }
}

/// A file with a lock on it, held until this is dropped, or the process ends.
///
/// The kernel releases a lock when the last descriptor of it is closed. A process that was forked
/// meanwhile has one too, so that the lock is released by a call.
struct LockedFile {
    file: File,
    /// The process that holds the lock. What it forks does not release it.
    process: OfThisProcess,
    /// The file, if it is removed before the lock is released.
    removed: Option<(Directory, String)>,
}

impl LockedFile {
    fn new(file: File) -> LockedFile {
        LockedFile { file, process: OfThisProcess::new(), removed: None }
    }
}

impl Drop for LockedFile {
    fn drop(&mut self) {
        if self.process.is_here() {
            if let Some((directory, name)) = &self.removed {
                // A process that waits for the lock of the removed file finds that, and opens a new file.
                let _ = directory.remove(name);
            }
            // If the call fails, the lock ends when the last descriptor is closed.
            let _ = self.file.unlock();
        }
    }
}

impl Lease for LockedFile {
    fn check(&self) -> Result<(), BackendError> {
        Ok(())
    }

    fn show_progress(&self) {
        // Without it, those who wait believe that this process does not go on, and say so.
        let _ = self.file.set_modified(SystemTime::now());
    }
}

struct LocalObject {
    file: File,
    /// For messages.
    path: PathBuf,
}

impl ReadAt for LocalObject {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), BackendError> {
        self.file.read_exact_at(buffer, offset).map_err(failed("read", &self.path))
    }
}

impl Object for LocalObject {
    fn bytes(&self) -> Result<u64, BackendError> {
        Ok(self.file.metadata().map_err(failed("read", &self.path))?.len())
    }

    fn read_ahead(&self, offset: u64, bytes: u64) {
        let advice = PosixFadviseAdvice::POSIX_FADV_WILLNEED;
        // File systems that do not read ahead read later.
        let _ = posix_fadvise(&self.file, offset as libc::off_t, bytes as libc::off_t, advice);
    }
}

/// How content reaches the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum WriteMode {
    /// Nothing was written yet.
    Undecided,
    /// Past the page cache: copying into it costs more than everything else that is done with a
    /// page, and it would displace what others need.
    Direct,
    /// Through the page cache: short files, what is read soon, the end of a file, and everything
    /// where the file system knows no direct writes.
    Cached,
}

/// Content that waits to be written, at an aligned address.
#[derive(Default)]
struct Buffer {
    bytes: Vec<u8>,
    /// Where in `bytes` it begins.
    start: usize,
}

impl Buffer {
    fn content(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    /// Adds as much of `bytes` as there is room for, and returns the rest.
    fn fill<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        if self.bytes.capacity() == 0 {
            // It never grows, so that its address stays.
            self.bytes.reserve_exact(BUFFER_BYTES + ALIGNMENT_BYTES);
            self.start = self.bytes.as_ptr().align_offset(ALIGNMENT_BYTES).min(ALIGNMENT_BYTES);
            self.bytes.resize(self.start, 0);
        }
        let (now, later) = bytes.split_at(bytes.len().min(BUFFER_BYTES - self.content().len()));
        self.bytes.extend_from_slice(now);
        later
    }

    fn remove_first(&mut self, bytes: usize) {
        self.bytes.drain(self.start..self.start + bytes);
    }
}

/// A staged file.
struct NewFile {
    file: File,
    directory: Directory,
    /// Its name in the directory, under which it is published.
    name: String,
    /// Its name in the directory until then.
    staged_name: String,
    /// Its path until then, for messages.
    staged: PathBuf,
    files: Files,
    buffer: Buffer,
    flushed_bytes: u64,
    mode: WriteMode,
    is_synced: bool,
    is_published: bool,
}

impl NewFile {
    fn create(directory: Directory, name: &str, files: Files) -> Result<NewFile, BackendError> {
        let staged_name = format!("{name}{STAGED}");
        let staged = directory.path_of(&staged_name);
        let file = match directory.create(&staged_name) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                directory.remove(&staged_name).map_err(failed("remove", &staged))?;
                directory.create(&staged_name)
            }
            created => created,
        };
        Ok(NewFile {
            file: file.map_err(failed("create", &staged))?,
            directory,
            name: name.to_owned(),
            staged_name,
            staged,
            files,
            buffer: Buffer::default(),
            flushed_bytes: 0,
            mode: WriteMode::Undecided,
            is_synced: false,
            is_published: false,
        })
    }

    fn flush(&mut self) -> Result<(), BackendError> {
        self.set_mode(WriteMode::Cached)?;
        self.write(self.buffer.content().len())
    }

    /// Writes the first bytes of the buffer.
    fn write(&mut self, bytes: usize) -> Result<(), BackendError> {
        if bytes > 0 {
            self.is_synced = false;
            self.file.write_all(&self.buffer.content()[..bytes]).map_err(failed("write", &self.staged))?;
            self.flushed_bytes += bytes as u64;
            self.buffer.remove_first(bytes);
        }
        Ok(())
    }

    fn set_mode(&mut self, mode: WriteMode) -> Result<(), BackendError> {
        let changes = (mode == WriteMode::Direct) != (self.mode == WriteMode::Direct);
        self.mode = mode;
        if !changes {
            return Ok(());
        }
        let direct = if mode == WriteMode::Direct { OFlag::O_DIRECT } else { OFlag::empty() };
        match fcntl(&self.file, FcntlArg::F_SETFL(OFlag::O_APPEND | direct)) {
            Ok(_) => Ok(()),
            // The file system knows no direct writes.
            Err(nix::errno::Errno::EINVAL) => {
                self.mode = WriteMode::Cached;
                Ok(())
            }
            Err(error) => Err(failed("write", &self.staged)(error.into())),
        }
    }
}

impl ReadAt for NewFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), BackendError> {
        let flushed_bytes = buffer.len().min(self.flushed_bytes.saturating_sub(offset) as usize);
        let (flushed, buffered) = buffer.split_at_mut(flushed_bytes);
        if !flushed.is_empty() {
            // A direct read would need whole blocks as well.
            let cached = match self.mode {
                WriteMode::Direct => {
                    Some(self.directory.file(&self.staged_name).map_err(failed("read", &self.staged))?)
                }
                WriteMode::Undecided | WriteMode::Cached => None,
            };
            let file = cached.as_ref().unwrap_or(&self.file);
            file.read_exact_at(flushed, offset).map_err(failed("read", &self.staged))?;
        }
        let start = (offset.saturating_sub(self.flushed_bytes)) as usize;
        match self.buffer.content().get(start..start + buffered.len()) {
            Some(content) => buffered.copy_from_slice(content),
            None if buffered.is_empty() => {}
            None => return Err(failed("read", &self.staged)(ErrorKind::UnexpectedEof.into())),
        }
        Ok(())
    }
}

impl NewObject for NewFile {
    fn bytes(&self) -> u64 {
        self.flushed_bytes + self.buffer.content().len() as u64
    }

    fn append(&mut self, parts: &[&[u8]]) -> Result<(), BackendError> {
        for part in parts {
            let mut rest = self.buffer.fill(part);
            while !rest.is_empty() {
                if self.mode == WriteMode::Undecided {
                    self.set_mode(WriteMode::Direct)?;
                }
                self.write(BUFFER_BYTES)?;
                rest = self.buffer.fill(rest);
            }
        }
        Ok(())
    }

    fn expect_reads(&mut self) -> Result<(), BackendError> {
        self.set_mode(WriteMode::Cached)
    }

    fn finish(&mut self) -> Result<Arc<dyn Object>, BackendError> {
        self.flush()?;
        self.buffer = Buffer::default();
        let file = self.file.try_clone().map_err(failed("open", &self.staged))?;
        Ok(Arc::new(LocalObject { file, path: self.directory.path_of(&self.name) }))
    }

    fn sync(&mut self) -> Result<(), BackendError> {
        self.flush()?;
        self.files.sync(&self.file, &self.directory.path_of(&self.name))?;
        self.is_synced = true;
        Ok(())
    }

    fn publish(mut self: Box<Self>) -> Result<(), BackendError> {
        self.flush()?;
        if !self.is_synced {
            self.sync()?;
        }
        self.files.rename(&self.directory, &self.staged_name, &self.name)?;
        self.is_published = true;
        Ok(())
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if !self.is_published {
            // What cannot be removed now, the next writer removes.
            let _ = self.directory.remove(&self.staged_name);
        }
    }
}

/// The stamp of a directory whose metadata was read at `asked_at` or later. None if a later change
/// may have the same time.
fn stamp_of(metadata: &std::fs::Metadata, asked_at: SystemTime) -> Option<Stamp> {
    asked_at.duration_since(metadata.modified().ok()?).ok().filter(|ago| *ago > CLOCK_TICK)?;
    let inode = u128::from(metadata.ino()) << 96;
    Some(Stamp(inode ^ (u128::from(metadata.mtime() as u64) << 32) ^ u128::from(metadata.mtime_nsec() as u32)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_directory_that_has_just_changed_has_no_stamp_however_late_that_is_noticed() {
        let directory = tempfile::tempdir().unwrap();
        let metadata = std::fs::metadata(directory.path()).unwrap();
        let changed_at = metadata.modified().unwrap();
        std::thread::sleep(CLOCK_TICK);
        assert_eq!(stamp_of(&metadata, changed_at), None);
        assert_eq!(stamp_of(&metadata, changed_at + CLOCK_TICK / 2), None);
        assert_eq!(stamp_of(&metadata, changed_at - CLOCK_TICK), None, "the clock was set back");
        assert!(stamp_of(&metadata, changed_at + CLOCK_TICK * 2).is_some());
    }

    fn new_file(directory: &Path, name: &str) -> NewFile {
        NewFile::create(Directory::open(directory).unwrap(), name, Files::default()).unwrap()
    }

    fn is_direct(file: &NewFile) -> bool {
        OFlag::from_bits_truncate(fcntl(&file.file, FcntlArg::F_GETFL).unwrap()).contains(OFlag::O_DIRECT)
    }

    #[test]
    fn conforms() {
        super::super::conformance::check(&mut || {
            let directory = tempfile::tempdir().unwrap();
            let backend = LocalBackend::create_directory(&directory.path().join("objects")).unwrap();
            (Arc::new(backend), Box::new(directory))
        });
    }

    #[test]
    fn what_was_appended_is_in_the_file_in_every_mode() {
        // Not in memory: not every kernel's tmpfs knows direct writes.
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let content: Vec<u8> = (0..5 * BUFFER_BYTES + 777).map(|at| (at / 3) as u8 ^ (at / 1000) as u8).collect();
        for (number, piece_bytes) in [1000, ALIGNMENT_BYTES, BUFFER_BYTES, 3 * BUFFER_BYTES + 5].into_iter().enumerate()
        {
            let path = directory.path().join(number.to_string());
            let mut file = new_file(directory.path(), &number.to_string());
            let (bulk, table) = content.split_at(4 * BUFFER_BYTES + 99);
            for piece in bulk.chunks(piece_bytes) {
                let (one, other) = piece.split_at(piece.len() / 3);
                file.append(&[one, other]).unwrap();
                let end = file.bytes() as usize;
                let begin = end.saturating_sub(BUFFER_BYTES + 50);
                let mut last = vec![0; end - begin];
                file.read_at(&mut last, begin as u64).unwrap();
                assert!(last == content[begin..end], "{piece_bytes}: read back at {end}");
            }
            let direct = is_direct(&file);
            assert_eq!(file.mode == WriteMode::Direct, direct);
            file.expect_reads().unwrap();
            assert!(!is_direct(&file));
            file.append(&[table]).unwrap();
            assert!(file.read_at(&mut [0; 10], file.bytes() - 9).is_err());
            assert_eq!(file.bytes() as usize, content.len());
            Box::new(file).publish().unwrap();
            assert!(std::fs::read(&path).unwrap() == content, "{piece_bytes}");
        }
    }

    #[test]
    fn a_short_file_goes_through_the_cache() {
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let mut file = new_file(directory.path(), "short");
        file.append(&[b"one", b" and two"]).unwrap();
        file.finish().unwrap();
        assert_eq!(file.mode, WriteMode::Cached);
        Box::new(file).publish().unwrap();
        assert_eq!(std::fs::read(directory.path().join("short")).unwrap(), b"one and two");
    }

    #[test]
    fn content_is_durable_before_its_name_and_a_directory_before_what_is_in_it() {
        let directory = tempfile::tempdir().unwrap();
        let mut backend = LocalBackend::create_directory(&directory.path().join("objects")).unwrap();
        backend.files.calls = Some(Arc::default());
        let calls = || std::mem::take(&mut *backend.files.calls.as_ref().unwrap().lock().unwrap());
        let mut object = backend.create("a/b/one").unwrap();
        assert_eq!(calls(), ["create directory a", "sync directory objects", "create directory b", "sync directory a"]);
        object.append(&[b"content"]).unwrap();
        object.publish().unwrap();
        backend.sync("a/b").unwrap();
        assert_eq!(calls(), ["sync one", "rename one", "sync directory b"]);
        let mut object = backend.create("a/b/two").unwrap();
        object.append(&[b"content"]).unwrap();
        object.sync().unwrap();
        object.publish().unwrap();
        assert_eq!(calls(), ["sync two", "rename two"]);
        // What is appended after a sync is made durable as well.
        let mut object = backend.create("a/b/three").unwrap();
        object.append(&[b"content"]).unwrap();
        object.sync().unwrap();
        object.append(&[b"more"]).unwrap();
        object.publish().unwrap();
        assert_eq!(calls(), ["sync three", "sync three", "rename three"]);
    }

    #[test]
    fn files_are_their_owners_alone_and_links_are_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("objects");
        let backend = LocalBackend::create_directory(&root).unwrap();
        let mut object = backend.create("a/one").unwrap();
        object.append(&[b"content"]).unwrap();
        object.publish().unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!([mode(&root), mode(&root.join("a")), mode(&root.join("a/one"))], [0o700, 0o700, 0o600]);
        std::os::unix::fs::symlink(root.join("a/one"), root.join("a/link")).unwrap();
        nix::unistd::mkfifo(&root.join("a/pipe"), nix::sys::stat::Mode::S_IRUSR).unwrap();
        for name in ["a/link", "a/pipe", "a"] {
            assert!(backend.open(name).is_err(), "{name}");
            assert!(backend.lease_reader(name).is_err(), "{name}");
            assert_eq!(backend.bytes(name).unwrap(), None, "{name}");
        }
        let mut listed = backend.list("a").unwrap();
        listed.sort();
        let entry = |name: &str, kind| ListEntry { name: name.into(), kind };
        let expected = [("link", ListKind::Other), ("one", ListKind::Object), ("pipe", ListKind::Other)];
        assert_eq!(listed, expected.map(|(name, kind)| entry(name, kind)));
    }

    #[test]
    fn a_directory_with_other_files_keeps_its_mode() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        for name in ["empty", "used"] {
            std::fs::create_dir(at(name)).unwrap();
            std::fs::set_permissions(at(name), std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        std::fs::write(at("used/file"), "").unwrap();
        // The path may lead to another directory than the one that was examined before.
        std::os::unix::fs::symlink(at("used"), at("link")).unwrap();
        let error = LocalBackend::create_directory(&at("link")).err().expect("it is not empty");
        assert!(error.to_string().contains("not empty"), "{error}");
        assert_eq!(mode(&at("used")), 0o755);
        LocalBackend::create_directory(&at("empty")).unwrap();
        assert_eq!(mode(&at("empty")), 0o700);
    }

    /// A process that was forked and has done this, and waits to be killed.
    fn forked(work: impl FnOnce()) -> nix::unistd::Pid {
        let (mut ours, mut theirs) = std::io::pipe().unwrap();
        // SAFETY: the work frees memory, which the allocator allows after a fork; else the child makes
        // only system calls until it is killed.
        match unsafe { nix::unistd::fork() }.unwrap() {
            nix::unistd::ForkResult::Child => {
                work();
                let _ = theirs.write_all(b"x");
                loop {
                    nix::unistd::pause();
                }
            }
            nix::unistd::ForkResult::Parent { child } => {
                ours.read_exact(&mut [0]).unwrap();
                child
            }
        }
    }

    #[test]
    fn a_forked_process_neither_keeps_nor_releases_a_lease() {
        let directory = tempfile::tempdir().unwrap();
        let backend = LocalBackend::create_directory(directory.path()).unwrap();
        let lease = |owner: &str| backend.lease(LOCK, LeaseMode::Alone, owner).unwrap();
        let is_held = || matches!(lease("another"), Leased::Held { .. });
        let Leased::Granted(lease) = lease("the test") else { panic!("it is held") };
        // One process keeps its copy of the lease, the other drops it.
        let mut lease = Some(lease);
        let children = [forked(|| {}), forked(|| drop(lease.take()))];
        let held_by_parent = is_held();
        drop(lease);
        let held_by_child = is_held();
        for child in children {
            nix::sys::signal::kill(child, nix::sys::signal::Signal::SIGKILL).unwrap();
            nix::sys::wait::waitpid(child, None).unwrap();
        }
        assert_eq!((held_by_parent, held_by_child), (true, false));
    }
}
