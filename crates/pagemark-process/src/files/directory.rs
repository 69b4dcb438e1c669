//! Directories of files that are put back, and the entries in them, reached without following
//! symbolic links.
//!
//! A path may come to mean another file at any time. Each step therefore opens the directory of its
//! file anew, acts on the entry in that directory, and compares the inode with that of the file
//! that was examined. Nothing stays open between the steps: there may be more files than a process
//! may have open, and a restored process could not have a lease on a file that is open.

use std::collections::{BTreeSet, VecDeque};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, lchown};
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, openat};
use nix::sys::stat::Mode;

use super::writers::{Inode, inode};
use crate::error::{Error, ErrorKind, Object, Result};

/// A directory.
#[derive(Debug)]
pub(super) struct Directory {
    handle: OwnedFd,
    path: PathBuf,
}

/// Flags that open a directory, and nothing through a symbolic link.
const OPEN_DIRECTORY: OFlag = OFlag::O_PATH.union(OFlag::O_DIRECTORY).union(OFlag::O_NOFOLLOW).union(OFlag::O_CLOEXEC);

impl Directory {
    /// Opens the directory `path`, or the last one above it that exists. Also returns the names of
    /// the directories that are missing below that.
    pub fn open(path: &Path) -> Result<(Directory, Vec<OsString>)> {
        let failed = |path: &Path, errno: Errno| super::io("open", path)(errno.into());
        let handle = openat(AT_FDCWD, "/", OPEN_DIRECTORY, Mode::empty());
        let handle = handle.map_err(|errno| failed(Path::new("/"), errno))?;
        let mut directory = Directory { handle, path: PathBuf::from("/") };
        let names = path.components();
        let names = names.filter_map(|part| if let Component::Normal(name) = part { Some(name) } else { None });
        let mut names: VecDeque<&OsStr> = names.collect();
        while let Some(name) = names.front() {
            match directory.enter(name) {
                Ok(()) => drop(names.pop_front()),
                Err(Errno::ENOENT) => break,
                Err(Errno::ENOTDIR | Errno::ELOOP) => {
                    let reason = "was a directory at the checkpoint and is a link or something else now: files below \
                                  it are not put back through it";
                    return Err(Error::about(ErrorKind::BadPath, Object::File(directory.path.join(name)), reason)
                        .help("put the directory back and try again"));
                }
                Err(errno) => return Err(failed(&directory.path.join(name), errno)),
            }
        }
        Ok((directory, names.into_iter().map(OsStr::to_os_string).collect()))
    }

    /// Moves to the directory `name` in this one.
    fn enter(&mut self, name: &OsStr) -> nix::Result<()> {
        self.handle = openat(&self.handle, name, OPEN_DIRECTORY, Mode::empty())?;
        self.path.push(name);
        Ok(())
    }

    /// Makes the directory `name` in this one, with that owner, and moves to it.
    pub fn make(&mut self, name: &OsStr, uid: u32, gid: u32) -> io::Result<()> {
        let at = self.at(name);
        fs::create_dir(&at)?;
        let made = fs::symlink_metadata(&at)?;
        if (made.uid(), made.gid()) != (uid, gid) {
            lchown(&at, Some(uid), Some(gid))?;
        }
        Ok(self.enter(name)?)
    }

    /// The path of this directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens this directory for reading.
    pub fn open_self(&self) -> io::Result<File> {
        File::open(self.at("."))
    }

    /// A path to a name in this directory.
    fn at(&self, name: impl AsRef<Path>) -> HeldPath<'_> {
        let path = PathBuf::from(format!("/proc/self/fd/{}", self.handle.as_raw_fd())).join(name);
        HeldPath { path, directory: PhantomData }
    }
}

/// A path through an open directory. It does not depend on the directories above that, and holds as
/// long as the directory is open.
pub(super) struct HeldPath<'a> {
    path: PathBuf,
    directory: PhantomData<&'a Directory>,
}

impl AsRef<Path> for HeldPath<'_> {
    fn as_ref(&self) -> &Path {
        &self.path
    }
}

impl AsFd for Directory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.handle.as_fd()
    }
}

/// A name in a directory. There may be no file of that name.
#[derive(Debug)]
pub(super) struct Entry {
    directory: Directory,
    name: OsString,
}

impl Entry {
    /// The entry at `path`, whose directory must exist.
    pub fn of(path: &Path) -> Result<Entry> {
        match Directory::open(path.parent().unwrap_or(Path::new("/")))? {
            (directory, missing) if missing.is_empty() => Ok(Entry::in_directory(directory, path)),
            _ => Err(super::io("open the directory of", path)(io::ErrorKind::NotFound.into())),
        }
    }

    /// The entry at `path`, whose directory is `directory`.
    pub fn in_directory(directory: Directory, path: &Path) -> Entry {
        Entry { directory, name: path.file_name().unwrap_or_default().to_os_string() }
    }

    /// The directory.
    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// A path to the file.
    pub fn path(&self) -> HeldPath<'_> {
        self.directory.at(&self.name)
    }

    /// Opens the file.
    pub fn open(&self, write: bool) -> io::Result<File> {
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
        OpenOptions::new().read(true).write(write).custom_flags(flags).open(self.path())
    }

    /// Opens the file, which must be `file`.
    pub fn open_same(&self, file: Inode, write: bool) -> io::Result<File> {
        let open = self.open(write)?;
        if inode(&open.metadata()?) == file { Ok(open) } else { Err(replaced()) }
    }

    /// Fails unless the file is `file`.
    pub fn check_same(&self, file: Inode) -> io::Result<()> {
        if self.is(file)? { Ok(()) } else { Err(replaced()) }
    }

    /// True if the file is `file`.
    pub fn is(&self, file: Inode) -> io::Result<bool> {
        Ok(self.present()?.is_some_and(|present| inode(&present) == file))
    }

    /// What has the name now; None if nothing has.
    pub fn present(&self) -> io::Result<Option<Metadata>> {
        match fs::symlink_metadata(self.path()) {
            Ok(present) => Ok(Some(present)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn replaced() -> io::Error {
    io::Error::other("another file is in its place now")
}

/// Directories whose entries were changed and are to be synced.
#[derive(Debug, Default)]
pub(super) struct UnsyncedDirectories(BTreeSet<PathBuf>);

impl UnsyncedDirectories {
    /// Adds a directory, once.
    pub fn add(&mut self, directory: &Directory) {
        if !self.0.contains(&directory.path) {
            self.0.insert(directory.path.clone());
        }
    }

    /// Makes the entries of all these directories durable. One that was removed since becomes so
    /// with the directory above it.
    pub fn sync(self) -> Result<()> {
        for path in self.0 {
            let (directory, missing) = Directory::open(&path)?;
            if missing.is_empty() {
                let synced = directory.open_self().and_then(|open| open.sync_all());
                synced.map_err(super::io("sync the directory", path))?;
            }
        }
        Ok(())
    }
}
