//! A directory held by a descriptor, in which no symbolic link is followed.
//!
//! Whoever can write a directory can replace an entry by a link, at any instant. A path that is
//! resolved anew for each system call then leads to foreign files. [`Directory`] resolves every
//! name from its descriptor, and refuses a name that leads through a link.

use std::fmt;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::dir::{Dir, Type};
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, OpenHow, ResolveFlag, openat, openat2, renameat};
use nix::sys::stat::{FileStat, Mode, SFlag, fchmod, fstatat, mkdirat};
use nix::unistd::{UnlinkatFlags, geteuid, unlinkat};

/// Flags of a descriptor through which a directory is reached.
const REACH: OFlag = OFlag::O_PATH.union(OFlag::O_DIRECTORY).union(OFlag::O_CLOEXEC);
/// Flags of a descriptor through which a directory is listed or synced.
const READ: OFlag = OFlag::O_RDONLY.union(OFlag::O_DIRECTORY).union(OFlag::O_CLOEXEC);
/// A file may have become a FIFO or a terminal: opening one must neither block nor have effects.
const HARMLESS: OFlag = OFlag::O_NONBLOCK.union(OFlag::O_NOCTTY).union(OFlag::O_CLOEXEC);

/// Permission of the group and of all others to write.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// A directory.
#[derive(Clone, Debug)]
pub(super) struct Directory {
    handle: Arc<OwnedFd>,
    /// For messages.
    path: PathBuf,
}

/// An entry of a directory.
pub(super) struct Entry {
    pub name: String,
    pub kind: EntryKind,
}

/// The type of an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum EntryKind {
    File,
    Directory,
    /// A symbolic link, a FIFO, a socket or a device.
    Other,
}

impl Directory {
    /// Opens a directory by a path that the user named: links in it are followed.
    pub fn open(path: &Path) -> io::Result<Directory> {
        let handle = openat(AT_FDCWD, path, REACH, Mode::empty())?;
        Ok(Directory { handle: Arc::new(handle), path: path.to_owned() })
    }

    /// The path by which the directory was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of an entry, for messages.
    pub fn path_of(&self, name: &str) -> PathBuf {
        if name.is_empty() { self.path.clone() } else { self.path.join(name) }
    }

    /// A directory below this one; the empty name is this directory.
    pub fn directory(&self, name: &str) -> io::Result<Directory> {
        if name.is_empty() {
            return Ok(self.clone());
        }
        let handle = open_beneath(&*self.handle, name, REACH, Mode::empty())?;
        Ok(Directory { handle: Arc::new(handle), path: self.path_of(name) })
    }

    /// Opens a regular file below this directory for reading.
    pub fn file(&self, name: &str) -> io::Result<File> {
        self.open_regular(name, OFlag::O_RDONLY, Mode::empty())
    }

    /// Opens a regular file for reading and writing, and creates it for its owner alone if it is
    /// missing.
    pub fn file_to_write(&self, name: &str) -> io::Result<File> {
        self.open_regular(name, OFlag::O_RDWR | OFlag::O_CREAT, Mode::S_IRUSR | Mode::S_IWUSR)
    }

    /// Creates a file for its owner alone, to be appended to and read. It must not exist.
    pub fn create(&self, name: &str) -> io::Result<File> {
        let flags = OFlag::O_RDWR | OFlag::O_APPEND | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC;
        Ok(File::from(open_beneath(&*self.handle, name, flags, Mode::S_IRUSR | Mode::S_IWUSR)?))
    }

    fn open_regular(&self, name: &str, flags: OFlag, mode: Mode) -> io::Result<File> {
        let file = File::from(open_beneath(&*self.handle, name, flags | HARMLESS, mode)?);
        match file.metadata()?.is_file() {
            true => Ok(file),
            false => Err(io::Error::new(ErrorKind::InvalidInput, "it is not a regular file")),
        }
    }

    /// Removes a file or link that is directly in this directory.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        Ok(unlinkat(&*self.handle, name, UnlinkatFlags::NoRemoveDir)?)
    }

    /// Renames a file that is directly in this directory.
    pub fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(renameat(&*self.handle, from, &*self.handle, to)?)
    }

    /// Creates a directory for its owner alone.
    pub fn create_directory(&self, name: &str) -> io::Result<()> {
        Ok(mkdirat(&*self.handle, name, Mode::S_IRWXU)?)
    }

    /// Takes the permissions of others from this directory, if it is this user's. Nothing may be in
    /// it yet: then it is no other directory, to which a path may lead by now.
    pub fn keep_for_owner(&self) -> io::Result<()> {
        let metadata = self.metadata()?;
        let mode = Mode::from_bits_truncate(metadata.mode() & 0o7777);
        if mode == Mode::S_IRWXU || metadata.uid() != geteuid().as_raw() {
            return Ok(());
        }
        let readable = self.readable()?;
        let mut is_empty = true;
        for entry in Dir::from_fd(readable.try_clone()?.into())?.iter() {
            is_empty = is_empty && [&b"."[..], b".."].contains(&entry?.file_name().to_bytes());
        }
        match is_empty {
            true => Ok(fchmod(&readable, Mode::S_IRWXU)?),
            false => Err(io::Error::new(ErrorKind::DirectoryNotEmpty, "it is not empty, and others may use it")),
        }
    }

    /// Makes the entries durable.
    pub fn sync(&self) -> io::Result<()> {
        self.readable()?.sync_all()
    }

    /// The attributes of the directory itself.
    pub fn metadata(&self) -> io::Result<std::fs::Metadata> {
        // `fstat` takes a descriptor of the type O_PATH.
        File::from(self.handle.try_clone()?).metadata()
    }

    /// The attributes of an entry, which may be a link.
    pub fn stat(&self, name: &str) -> io::Result<FileStat> {
        Ok(fstatat(&*self.handle, name, AtFlags::AT_SYMLINK_NOFOLLOW)?)
    }

    /// The entries whose names are UTF-8, in any order.
    pub fn entries(&self) -> io::Result<Vec<Entry>> {
        let mut entries = Vec::new();
        for entry in Dir::from_fd(self.readable()?.into())?.iter() {
            let entry = entry?;
            let Ok(name) = entry.file_name().to_str() else { continue };
            if [".", ".."].contains(&name) {
                continue;
            }
            let kind = match entry.file_type() {
                Some(Type::File) => EntryKind::File,
                Some(Type::Directory) => EntryKind::Directory,
                Some(_) => EntryKind::Other,
                // Not every file system stores the type in the directory.
                None => match self.stat(name) {
                    Ok(stat) => kind_of(&stat),
                    Err(error) if error.kind() == ErrorKind::NotFound => continue,
                    Err(error) => return Err(error),
                },
            };
            entries.push(Entry { name: name.to_owned(), kind });
        }
        Ok(entries)
    }

    /// True if the path by which the directory was opened still leads to it.
    pub fn is_in_place(&self) -> io::Result<bool> {
        let own = self.metadata()?;
        match std::fs::metadata(&self.path) {
            Ok(found) => Ok((found.dev(), found.ino()) == (own.dev(), own.ino())),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Who other than this user and root can change the directory or one of the entries `names`, as
    /// far as they exist. None if nobody can.
    pub fn exposure(&self, names: &[&str]) -> io::Result<Option<Exposure>> {
        let own = self.metadata()?;
        if let Some(exposure) = Exposure::of(&self.path, own.uid(), own.mode()) {
            return Ok(Some(exposure));
        }
        for name in names {
            match self.stat(name) {
                // Links are not followed, and everybody may write a link's mode.
                Ok(stat) if kind_of(&stat) == EntryKind::Other => {}
                Ok(stat) => {
                    if let Some(exposure) = Exposure::of(&self.path_of(name), stat.st_uid, stat.st_mode) {
                        return Ok(Some(exposure));
                    }
                }
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    fn readable(&self) -> io::Result<File> {
        Ok(File::from(openat(&*self.handle, ".", READ, Mode::empty())?))
    }
}

/// A way in which other users can change a file or directory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Exposure {
    /// It belongs to a user that is neither this one nor root.
    ForeignOwner {
        /// The file or directory.
        path: PathBuf,
        /// Its owner.
        uid: u32,
    },
    /// Its mode lets its group or all users write it.
    WritableByOthers {
        /// The file or directory.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
}

impl Exposure {
    fn of(path: &Path, uid: u32, mode: u32) -> Option<Exposure> {
        let path = path.to_owned();
        if uid != 0 && uid != geteuid().as_raw() {
            return Some(Exposure::ForeignOwner { path, uid });
        }
        let mode = mode & 0o7777;
        (mode & WRITABLE_BY_OTHERS != 0).then_some(Exposure::WritableByOthers { path, mode })
    }
}

impl fmt::Display for Exposure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Exposure::ForeignOwner { path, uid } => write!(formatter, "{} belongs to user {uid}", path.display()),
            Exposure::WritableByOthers { path, mode } => {
                write!(formatter, "{} has the mode {mode:04o}", path.display())
            }
        }
    }
}

pub(super) fn kind_of(stat: &FileStat) -> EntryKind {
    match SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT {
        SFlag::S_IFREG => EntryKind::File,
        SFlag::S_IFDIR => EntryKind::Directory,
        _ => EntryKind::Other,
    }
}

/// Opens a file below a directory. A path that leads through a link, or is one, is refused.
///
/// `openat2` (Linux 5.6) does it in one call. Where the kernel lacks it, or a filter of system
/// calls forbids it, each part of the path is opened by itself.
fn open_beneath(directory: impl AsFd, path: &str, flags: OFlag, mode: Mode) -> io::Result<OwnedFd> {
    if path.split('/').any(|part| ["", ".", ".."].contains(&part)) {
        return Err(io::Error::new(ErrorKind::InvalidInput, "it is not a plain path"));
    }
    let opened = if has_openat2() {
        open_at_once(&directory, path, flags, mode)
    } else {
        open_by_parts(&directory, path, flags, mode)
    };
    opened.map_err(|errno| match errno {
        Errno::ELOOP => io::Error::new(
            ErrorKind::InvalidInput,
            "it is a symbolic link or is reached through one, and is not followed",
        ),
        errno => errno.into(),
    })
}

/// True if `openat2` works here.
fn has_openat2() -> bool {
    static IS_TRIED: AtomicBool = AtomicBool::new(false);
    static WORKS: AtomicBool = AtomicBool::new(false);
    // No thread waits for another one, which a forked child would not have.
    if !IS_TRIED.load(Ordering::Acquire) {
        let how = OpenHow::new().flags(REACH);
        // Container runtimes that do not know the call let it fail with EPERM.
        let works = !matches!(openat2(AT_FDCWD, "/", how), Err(Errno::ENOSYS | Errno::EPERM));
        WORKS.store(works, Ordering::Relaxed);
        IS_TRIED.store(true, Ordering::Release);
    }
    WORKS.load(Ordering::Relaxed)
}

fn open_at_once(directory: impl AsFd, path: &str, flags: OFlag, mode: Mode) -> nix::Result<OwnedFd> {
    let resolve = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_MAGICLINKS;
    openat2(&directory, path, OpenHow::new().flags(flags).mode(mode).resolve(resolve))
}

fn open_by_parts(directory: impl AsFd, path: &str, flags: OFlag, mode: Mode) -> nix::Result<OwnedFd> {
    let open = |directory: &dyn AsFd, part: &str, flags, mode| {
        let directory = directory.as_fd();
        match openat(directory, part, flags | OFlag::O_NOFOLLOW, mode) {
            // A link where a directory is expected.
            Err(Errno::ENOTDIR) => match fstatat(directory, part, AtFlags::AT_SYMLINK_NOFOLLOW) {
                Ok(stat) if stat.st_mode & libc::S_IFMT == libc::S_IFLNK => Err(Errno::ELOOP),
                _ => Err(Errno::ENOTDIR),
            },
            opened => opened,
        }
    };
    let Some((above, last)) = path.rsplit_once('/') else { return open(&directory, path, flags, mode) };
    let mut held: Option<OwnedFd> = None;
    for part in above.split('/') {
        let from: &dyn AsFd = match &held {
            Some(held) => held,
            None => &directory,
        };
        held = Some(open(from, part, REACH, Mode::empty())?);
    }
    match &held {
        Some(held) => open(held, last, flags, mode),
        None => open(&directory, last, flags, mode),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    type Open = fn(&OwnedFd, &str, OFlag, Mode) -> nix::Result<OwnedFd>;

    /// Both ways to open a file without following links.
    const WAYS: [(&str, Open); 2] = [
        ("at once", |directory, path, flags, mode| open_at_once(directory, path, flags, mode)),
        ("by parts", |directory, path, flags, mode| open_by_parts(directory, path, flags, mode)),
    ];

    #[test]
    fn links_are_followed_nowhere_in_a_path() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        fs::create_dir_all(root.join("inside/a/b")).unwrap();
        fs::write(root.join("inside/a/b/file"), "content").unwrap();
        fs::create_dir(root.join("outside")).unwrap();
        fs::write(root.join("outside/file"), "foreign").unwrap();
        symlink(root.join("outside"), root.join("inside/absolute")).unwrap();
        symlink("../outside", root.join("inside/relative")).unwrap();
        symlink("a", root.join("inside/to_inside")).unwrap();
        symlink("../../../outside/file", root.join("inside/a/b/link")).unwrap();
        let handle = OwnedFd::from(File::open(root.join("inside")).unwrap());
        for (name, open) in WAYS {
            if name == "at once" && !has_openat2() {
                pagemark_testing::skipped("the kernel has no openat2");
                continue;
            }
            let errno = |path: &str, flags| open(&handle, path, flags, Mode::empty()).err();
            assert_eq!(errno("a/b/file", OFlag::O_RDONLY), None, "{name}");
            assert_eq!(errno("a/b", REACH), None, "{name}");
            for path in ["absolute/file", "relative/file", "to_inside/b/file", "a/b/link"] {
                assert_eq!(errno(path, OFlag::O_RDONLY), Some(Errno::ELOOP), "{name}: {path}");
                assert_eq!(errno(path, OFlag::O_RDWR | OFlag::O_CREAT), Some(Errno::ELOOP), "{name}: {path}");
            }
            for path in ["absolute", "to_inside"] {
                assert_eq!(errno(path, REACH), Some(Errno::ELOOP), "{name}: {path}");
            }
            assert_eq!(errno("none/file", OFlag::O_RDONLY), Some(Errno::ENOENT), "{name}");
            assert_eq!(errno("a/b/file/below", OFlag::O_RDONLY), Some(Errno::ENOTDIR), "{name}");
        }
        assert_eq!(fs::read_to_string(root.join("outside/file")).unwrap(), "foreign");
        let inside = Directory::open(&root.join("inside")).unwrap();
        for path in ["..", "../outside/file", "a/../a", "/etc/passwd", "a//b", ""] {
            assert_eq!(inside.file(path).unwrap_err().kind(), ErrorKind::InvalidInput, "{path}");
        }
    }

    /// The same calls under a filter as of a kernel or container without `openat2`.
    #[test]
    fn opens_by_parts_as_at_once() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("a")).unwrap();
        let handle = OwnedFd::from(File::open(directory.path()).unwrap());
        for (name, open) in WAYS {
            if name == "at once" && !has_openat2() {
                continue;
            }
            let path = format!("a/{}", name.replace(' ', "-"));
            let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL;
            open(&handle, &path, flags, Mode::S_IRUSR).unwrap();
            assert_eq!(open(&handle, &path, flags, Mode::S_IRUSR).err(), Some(Errno::EEXIST), "{name}");
        }
    }
}
