//! Directories of files that are put back, and the entries in them, reached without following
//! symbolic links, in the name of a user of the job.
//!
//! A path may come to mean another file at any time. Each step therefore opens the directory of its
//! file anew, one name after the other, acts on the entry in that directory, and compares the inode
//! with that of the file that was examined. What is done to an inode is done to a descriptor of
//! it. Nothing stays open between the steps: there may be more files than a process may have open,
//! and a restored process could not have a lease on a file that is open.
//!
//! This is the only module here that opens, changes, makes or removes something by its name.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, openat, readlinkat};
use nix::sys::stat::{FchmodatFlags, Mode, fchmodat, mkdirat};
use nix::unistd::{Gid, Uid, UnlinkatFlags, fchownat, geteuid, linkat, symlinkat, unlinkat};
use pagemark_trace::error::{Error, ErrorKind, Object, Result};

use super::users::Actor;
use super::writers::{Inode, inode};

/// A directory, and the user in whose name it was reached.
#[derive(Debug)]
pub(super) struct Directory {
    handle: OwnedFd,
    path: PathBuf,
    actor: Actor,
}

/// Flags that name a file without opening it, and nothing through a symbolic link.
const HOLD: OFlag = OFlag::O_PATH.union(OFlag::O_NOFOLLOW).union(OFlag::O_CLOEXEC);
const HOLD_DIRECTORY: OFlag = HOLD.union(OFlag::O_DIRECTORY);

/// A path to what a descriptor refers to. It does not depend on any name.
pub(super) fn path_of(descriptor: impl AsFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", descriptor.as_fd().as_raw_fd()))
}

fn metadata(descriptor: impl AsFd) -> io::Result<Metadata> {
    File::from(descriptor.as_fd().try_clone_to_owned()?).metadata()
}

/// True if a file has permissions besides its mode, or if that is unknown.
fn has_acl(descriptor: BorrowedFd<'_>) -> bool {
    let Ok(path) = std::ffi::CString::new(path_of(descriptor).into_os_string().into_encoded_bytes()) else {
        return true;
    };
    let name = c"system.posix_acl_access";
    // SAFETY: the strings end with a zero and outlive the call, which writes nothing for a size of 0.
    let size = unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), std::ptr::null_mut(), 0) };
    let none = [Some(libc::ENODATA), Some(libc::EOPNOTSUPP)];
    size > 0 || (size < 0 && !none.contains(&io::Error::last_os_error().raw_os_error()))
}

/// Opens what a descriptor refers to.
fn reopen(descriptor: impl AsFd, write: bool, flags: i32) -> io::Result<File> {
    let flags = flags | libc::O_NONBLOCK | libc::O_NOCTTY;
    OpenOptions::new().read(true).write(write).custom_flags(flags).open(path_of(descriptor))
}

/// The names of an absolute path.
fn names(path: &Path) -> Vec<&OsStr> {
    path.components().filter_map(|part| if let Component::Normal(name) = part { Some(name) } else { None }).collect()
}

/// Where a walk ended.
struct Walked {
    handle: OwnedFd,
    /// Names that were passed.
    passed: usize,
    /// Why it did not go further.
    error: Option<Errno>,
}

/// Goes on from a directory, through `names` after the first `passed`.
fn walk(mut handle: OwnedFd, names: &[&OsStr], mut passed: usize) -> Walked {
    while let Some(name) = names.get(passed) {
        match openat(&handle, *name, HOLD_DIRECTORY, Mode::empty()) {
            Ok(next) => handle = next,
            Err(error) => return Walked { handle, passed, error: Some(error) },
        }
        passed += 1;
    }
    Walked { handle, passed, error: None }
}

fn top() -> io::Result<OwnedFd> {
    Ok(openat(AT_FDCWD, "/", HOLD_DIRECTORY, Mode::empty())?)
}

/// Goes through the first `count` of the names as this process, if no user of the job can change
/// any of those directories.
fn walk_guarded(actor: &Actor, names: &[&OsStr], count: usize) -> io::Result<OwnedFd> {
    let mut handle = top()?;
    for number in 0..count {
        check_guarded(actor, &handle)?;
        let walked = walk(handle, &names[..=number], number);
        walked.error.map_or(Ok(()), |error| Err(io::Error::from(error)))?;
        handle = walked.handle;
    }
    check_guarded(actor, &handle)?;
    Ok(handle)
}

fn check_guarded(actor: &Actor, handle: &OwnedFd) -> io::Result<()> {
    if actor.is_guarded(&metadata(handle)?, || has_acl(handle.as_fd())) {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::PermissionDenied, "a user of the job can change a directory on the way"))
}

impl Directory {
    /// Opens the directory `path`, or the last one above it that exists. Also returns the names of
    /// the directories that are missing below that.
    pub fn open(actor: &Actor, path: &Path) -> Result<(Directory, Vec<OsString>)> {
        let failed = |passed: usize, error: io::Error| {
            let at: PathBuf = Path::new("/").join(names(path).into_iter().take(passed + 1).collect::<PathBuf>());
            super::io("open", at)(error)
        };
        let names = names(path);
        let mut walked = Walked { handle: top().map_err(|error| failed(0, error))?, passed: 0, error: None };
        loop {
            let Walked { handle, passed, .. } = walked;
            walked = actor.run(|| Ok(walk(handle, &names, passed))).map_err(|error| failed(passed, error))?;
            if walked.error != Some(Errno::EACCES) || !matches!(actor, Actor::User(..)) {
                break;
            }
            let (passed, denied) = (walked.passed, io::Error::from(Errno::EACCES));
            let held = metadata(&walked.handle).map_err(|error| failed(passed, error))?;
            if !actor.owns(held.uid()) {
                // What no user can change leads where it led when a process of the job was there.
                let Ok(same) = walk_guarded(actor, &names, passed) else { return Err(failed(passed, denied)) };
                if inode(&metadata(&same).map_err(|error| failed(passed, error))?) != inode(&held) {
                    return Err(failed(passed, denied));
                }
            }
            walked = walk(walked.handle, &names[..=passed], passed);
            if walked.error.is_some() {
                break;
            }
        }
        let Walked { handle, passed, error } = walked;
        match error {
            None | Some(Errno::ENOENT) => {}
            Some(Errno::ENOTDIR | Errno::ELOOP) => {
                let at: PathBuf = Path::new("/").join(names[..=passed].iter().collect::<PathBuf>());
                let reason = "was a directory at the checkpoint and is a link or something else now: files below \
                              it are not put back through it";
                return Err(Error::about(ErrorKind::BadPath, Object::File(at), reason)
                    .help("put the directory back and try again"));
            }
            Some(errno) => return Err(failed(passed, errno.into())),
        }
        if matches!(actor, Actor::Guarded(_)) {
            walk_guarded(actor, &names, passed).map_err(|error| failed(passed, error))?;
        }
        let path = Path::new("/").join(names[..passed].iter().collect::<PathBuf>());
        let missing = names[passed..].iter().map(|name| (*name).to_owned()).collect();
        Ok((Directory { handle, path, actor: actor.clone() }, missing))
    }

    /// Opens the directory `path`, if it is there and is a directory.
    pub fn existing(actor: &Actor, path: &Path) -> Result<Option<Directory>> {
        match Directory::open(actor, path) {
            Ok((directory, missing)) if missing.is_empty() => Ok(Some(directory)),
            Ok(_) => Ok(None),
            Err(error) if error.kind() == ErrorKind::BadPath => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Makes the directory `name` in this one, with that owner, and moves to it.
    pub fn make(&mut self, name: &OsStr, uid: u32, gid: u32) -> io::Result<()> {
        self.change(|handle| Ok(mkdirat(handle, name, Mode::from_bits_truncate(0o777))?))?;
        let made = self.hold(name)?.ok_or(io::ErrorKind::NotFound)?;
        if !made.metadata.is_dir() {
            return Err(replaced());
        }
        let Held { descriptor, metadata } = made;
        self.handle = descriptor;
        self.path.push(name);
        // Root could give away another directory, which a user has put in its place.
        let is_new = || Ok::<_, io::Error>(metadata.uid() == geteuid().as_raw() && self.names()?.is_empty());
        if !matches!(self.actor, Actor::User(..)) && !is_new()? {
            return Err(replaced());
        }
        set_owner(&self.actor, &self.handle, &metadata, uid, gid)
    }

    /// The path of this directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The user in whose name it was reached.
    pub fn actor(&self) -> &Actor {
        &self.actor
    }

    /// Opens this directory to sync it, or to ask for the space on its file system.
    pub fn open_self(&self) -> io::Result<File> {
        File::open(path_of(&self.handle))
    }

    /// Its attributes.
    pub fn metadata(&self) -> io::Result<Metadata> {
        metadata(&self.handle)
    }

    /// True unless its mode forbids the actor to make files in it.
    pub fn could_write(&self) -> io::Result<bool> {
        Ok(self.actor.could_write(&self.metadata()?, || has_acl(self.handle.as_fd())))
    }

    /// The group that a new file in it gets, if that is not the one of who makes the file.
    pub fn group_of_new(&self) -> io::Result<Option<u32>> {
        let held = self.metadata()?;
        Ok((held.mode() & libc::S_ISGID != 0).then(|| held.gid()))
    }

    /// The names in it.
    pub fn names(&self) -> io::Result<Vec<OsString>> {
        let read = || -> io::Result<Vec<OsString>> {
            fs::read_dir(path_of(&self.handle))?.map(|entry| Ok(entry?.file_name())).collect()
        };
        match self.actor.run(read) {
            Err(error) if self.may_pass(&error)? => read(),
            result => result,
        }
    }

    /// What has a name in it now; None if nothing has.
    pub fn hold(&self, name: &OsStr) -> io::Result<Option<Held>> {
        let open = || Ok(openat(&self.handle, name, HOLD, Mode::empty())?);
        let opened = match self.actor.run(open) {
            Err(error) if self.may_pass(&error)? => open(),
            result => result,
        };
        match opened {
            Ok(descriptor) => Ok(Some(Held { metadata: metadata(&descriptor)?, descriptor })),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Calls `each` with what has these names now. What is gone is left out.
    pub fn hold_all(
        &self,
        names: &[OsString],
        mut each: impl FnMut(&OsStr, &Held) -> io::Result<()> + Send,
    ) -> io::Result<()> {
        let mut all = || {
            for name in names {
                match openat(&self.handle, &**name, HOLD, Mode::empty()) {
                    Ok(descriptor) => each(name, &Held { metadata: metadata(&descriptor)?, descriptor })?,
                    Err(Errno::ENOENT) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            Ok(())
        };
        // Nothing was found where the directory itself may not be searched.
        match self.actor.run(&mut all) {
            Err(error) if self.may_pass(&error)? => all(),
            result => result,
        }
    }

    /// True if the mode of this directory, which its owner could change, is all that forbade
    /// something.
    fn may_pass(&self, error: &io::Error) -> io::Result<bool> {
        let is_user = matches!(self.actor, Actor::User(..)) && error.raw_os_error() == Some(libc::EACCES);
        Ok(is_user && self.actor.owns(self.metadata()?.uid()))
    }

    /// Changes the entries of this directory in the name of the actor. Where the mode of the
    /// directory forbids it and the actor owns the directory, the mode permits it meanwhile.
    fn change<T: Send>(&self, work: impl Fn(&OwnedFd) -> io::Result<T> + Send + Sync) -> io::Result<T> {
        match self.actor.run(|| work(&self.handle)) {
            Err(error) if self.may_pass(&error)? => {
                let mode = self.metadata()?.mode() & 0o7777;
                set_mode(&self.actor, &self.handle, mode | 0o700)?;
                let result = self.actor.run(|| work(&self.handle));
                set_mode(&self.actor, &self.handle, mode)?;
                result
            }
            result => result,
        }
    }
}

impl AsFd for Directory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.handle.as_fd()
    }
}

/// A file, directory or link that is held, whatever becomes of its name. It is not open.
#[derive(Debug)]
pub(super) struct Held {
    descriptor: OwnedFd,
    /// Its attributes when it was found.
    pub metadata: Metadata,
}

impl Held {
    /// What a link below `/proc/PID/fd` or `/proc/PID/map_files` leads to.
    pub fn of_process(link: &Path) -> io::Result<Held> {
        let flags = OFlag::O_PATH | OFlag::O_CLOEXEC;
        let descriptor = openat(AT_FDCWD, link, flags, Mode::empty())?;
        Ok(Held { metadata: metadata(&descriptor)?, descriptor })
    }

    /// What has the name in a directory of this process.
    pub fn in_directory(directory: &File, name: &str) -> io::Result<Held> {
        let descriptor = openat(directory, name, HOLD, Mode::empty())?;
        Ok(Held { metadata: metadata(&descriptor)?, descriptor })
    }

    /// Opens it, if it is a regular file.
    pub fn open(&self, actor: &Actor, write: bool) -> io::Result<File> {
        if !self.metadata.is_file() {
            return Err(replaced());
        }
        let open = || reopen(&self.descriptor, write, 0);
        // An owner could give itself the permission.
        if actor.owns(self.metadata.uid()) { open() } else { actor.run(open) }
    }

    /// Opens it for reading, if it is a regular file. The access time is left unchanged if that is
    /// permitted.
    pub fn read(&self, actor: &Actor) -> io::Result<File> {
        if !self.metadata.is_file() {
            return Err(replaced());
        }
        let open = || reopen(&self.descriptor, false, libc::O_NOATIME).or_else(|_| reopen(&self.descriptor, false, 0));
        if actor.owns(self.metadata.uid()) { open() } else { actor.run(open) }
    }

    /// True unless its mode forbids the actor to read it.
    pub fn could_read(&self, actor: &Actor) -> bool {
        actor.could_read(&self.metadata, || has_acl(self.descriptor.as_fd()))
    }

    /// Where a symbolic link leads.
    pub fn read_link(&self) -> io::Result<PathBuf> {
        Ok(readlinkat(&self.descriptor, "")?.into())
    }

    /// Gives it a second name in a directory of this process.
    pub fn link_to(&self, directory: &File, name: &str) -> io::Result<()> {
        let flags = AtFlags::AT_SYMLINK_FOLLOW;
        Ok(linkat(AT_FDCWD, &path_of(&self.descriptor), directory, name, flags)?)
    }

    /// Sets owner and mode, as far as they differ.
    pub fn set_attributes(&self, actor: &Actor, uid: u32, gid: u32, mode: u32) -> io::Result<()> {
        set_attributes(actor, &self.descriptor, uid, gid, mode)
    }
}

impl AsFd for Held {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// Sets owner and mode of what a descriptor refers to, in the name of the actor, as far as they
/// differ: without privilege a user may set the mode of own files, but not their owner, even to the
/// same user.
pub(super) fn set_attributes(actor: &Actor, of: impl AsFd, uid: u32, gid: u32, mode: u32) -> io::Result<()> {
    let of = of.as_fd();
    set_owner(actor, of, &metadata(of)?, uid, gid)?;
    // A change of the owner may have changed the mode.
    if metadata(of)?.mode() & 0o7777 != mode & 0o7777 {
        set_mode(actor, of, mode & 0o7777)?;
        if metadata(of)?.mode() & 0o7777 != mode & 0o7777 {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "the user may not set that mode"));
        }
    }
    Ok(())
}

fn set_owner(actor: &Actor, of: impl AsFd, present: &Metadata, uid: u32, gid: u32) -> io::Result<()> {
    let of = of.as_fd();
    if (present.uid(), present.gid()) == (uid, gid) {
        return Ok(());
    }
    let user = (present.uid() != uid).then(|| Uid::from_raw(uid));
    let group = (present.gid() != gid).then(|| Gid::from_raw(gid));
    actor.run(|| Ok(fchownat(of, "", user, group, AtFlags::AT_EMPTY_PATH)?))
}

fn set_mode(actor: &Actor, of: impl AsFd, mode: u32) -> io::Result<()> {
    let path = path_of(of);
    // The path leads to the inode of the descriptor, which may be one that cannot be opened.
    actor.run(|| Ok(fchmodat(AT_FDCWD, &path, Mode::from_bits_truncate(mode), FchmodatFlags::FollowSymlink)?))
}

/// A name in a directory. There may be no file of that name.
#[derive(Debug)]
pub(super) struct Entry {
    directory: Directory,
    name: OsString,
}

impl Entry {
    /// The entry at `path`, whose directory must exist.
    pub fn of(actor: &Actor, path: &Path) -> Result<Entry> {
        match Directory::open(actor, path.parent().unwrap_or(Path::new("/")))? {
            (directory, missing) if missing.is_empty() => Ok(Entry::in_directory(directory, path)),
            _ => Err(super::io("open the directory of", path)(io::ErrorKind::NotFound.into())),
        }
    }

    /// The entry at `path`, if its directory is there and no link leads to it.
    pub fn existing(actor: &Actor, path: &Path) -> Result<Option<Entry>> {
        let directory = Directory::existing(actor, path.parent().unwrap_or(Path::new("/")))?;
        Ok(directory.map(|directory| Entry::in_directory(directory, path)))
    }

    /// The entry at `path`, whose directory is `directory`.
    pub fn in_directory(directory: Directory, path: &Path) -> Entry {
        Entry { directory, name: path.file_name().unwrap_or_default().to_os_string() }
    }

    /// The directory.
    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// Opens the file.
    pub fn open(&self, write: bool) -> io::Result<File> {
        self.held()?.open(self.directory.actor(), write)
    }

    /// Opens the file, which must be `file`.
    pub fn open_same(&self, file: Inode, write: bool) -> io::Result<File> {
        self.hold_same(file)?.open(self.directory.actor(), write)
    }

    /// Holds what has the name, which must be `file`.
    pub fn hold_same(&self, file: Inode) -> io::Result<Held> {
        let held = self.held()?;
        if inode(&held.metadata) == file { Ok(held) } else { Err(replaced()) }
    }

    fn held(&self) -> io::Result<Held> {
        self.hold()?.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Holds what has the name now; None if nothing has.
    pub fn hold(&self) -> io::Result<Option<Held>> {
        self.directory.hold(&self.name)
    }

    /// What has the name now; None if nothing has.
    pub fn present(&self) -> io::Result<Option<Metadata>> {
        Ok(self.hold()?.map(|held| held.metadata))
    }

    /// True if the file is `file`.
    pub fn is(&self, file: Inode) -> io::Result<bool> {
        Ok(self.present()?.is_some_and(|present| inode(&present) == file))
    }

    /// Sets owner and mode of what has the name, which must be `file`.
    pub fn set_attributes(&self, file: Inode, uid: u32, gid: u32, mode: u32) -> io::Result<()> {
        self.hold_same(file)?.set_attributes(self.directory.actor(), uid, gid, mode)
    }

    /// Makes the file, which must not exist, and opens it.
    pub fn create(&self) -> io::Result<File> {
        let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let mode = Mode::from_bits_truncate(0o600);
        self.directory.change(|handle| Ok(File::from(openat(handle, &*self.name, flags, mode)?)))
    }

    /// Makes the directory, with these attributes.
    pub fn make_directory(&self, uid: u32, gid: u32, mode: u32) -> io::Result<()> {
        self.directory.change(|handle| Ok(mkdirat(handle, &*self.name, Mode::from_bits_truncate(0o700))?))?;
        let made = self.held()?;
        if !made.metadata.is_dir() {
            return Err(replaced());
        }
        made.set_attributes(self.directory.actor(), uid, gid, mode)
    }

    /// Makes the symbolic link, with this owner. Returns its inode.
    pub fn make_link(&self, target: &Path, uid: u32, gid: u32) -> io::Result<Inode> {
        self.directory.change(|handle| Ok(symlinkat(target, handle, &*self.name)?))?;
        let made = self.held()?;
        if !made.metadata.is_symlink() {
            return Err(replaced());
        }
        set_owner(self.directory.actor(), &made, &made.metadata, uid, gid)?;
        Ok(inode(&made.metadata))
    }

    /// Removes the name of the file or link `file`.
    pub fn remove(&self, file: Inode) -> io::Result<()> {
        self.hold_same(file)?;
        self.directory.change(|handle| Ok(unlinkat(handle, &*self.name, UnlinkatFlags::NoRemoveDir)?))
    }

    /// Removes the directory, which must be empty.
    pub fn remove_directory(&self) -> io::Result<()> {
        self.directory.change(|handle| Ok(unlinkat(handle, &*self.name, UnlinkatFlags::RemoveDir)?))
    }

    /// Gives a file that was removed from the directory `parent` its name again. The file comes
    /// with its own attributes, so that this process may do it for a user.
    pub fn link_again(&self, kept: &Held, parent: Inode) -> io::Result<()> {
        if inode(&self.directory.metadata()?) != parent {
            return Err(replaced());
        }
        let flags = AtFlags::AT_SYMLINK_FOLLOW;
        Ok(linkat(AT_FDCWD, &path_of(kept), &self.directory, &*self.name, flags)?)
    }
}

pub(super) fn replaced() -> io::Error {
    io::Error::other("another file is in its place now")
}

/// Directories whose entries were changed and are to be synced.
#[derive(Debug, Default)]
pub(super) struct UnsyncedDirectories(BTreeMap<PathBuf, Actor>);

impl UnsyncedDirectories {
    /// Adds a directory, once.
    pub fn add(&mut self, directory: &Directory) {
        if !self.0.contains_key(&directory.path) {
            self.0.insert(directory.path.clone(), directory.actor.clone());
        }
    }

    /// Makes the entries of all these directories durable. One that was removed since becomes so
    /// with the directory above it.
    pub fn sync(self) -> Result<()> {
        for (path, actor) in self.0 {
            let (directory, missing) = Directory::open(&actor, &path)?;
            if missing.is_empty() {
                let synced = directory.open_self().and_then(|open| open.sync_all());
                synced.map_err(super::io("sync the directory", path))?;
            }
        }
        Ok(())
    }
}
