//! Files that are made for a QEMU in the directories of its user, with the rights of that user: by
//! the descriptor of the directory, so that no path is resolved twice.

use std::ffi::{OsStr, OsString};
use std::fs::{File, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{
    AT_FDCWD, FallocateFlags, FcntlArg, OFlag, OpenHow, ResolveFlag, fallocate, fcntl, open, openat, openat2,
};
use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect as connect_to, getsockopt, socket};
use nix::sys::stat::Mode;
use nix::unistd::{UnlinkatFlags, unlinkat};
use pagemark::ByteCount;
use pagemark_linux::proc;

use crate::qemu::owner::{Owner, act_as};

/// The bits of a mode that say who may read, write and execute a file.
const PERMISSIONS: u32 = 0o777;

/// A directory in which files are made, and with whose rights.
#[derive(Debug)]
pub(crate) struct UserDirectory {
    directory: OwnedFd,
    /// None for those of this process.
    owner: Option<Owner>,
}

/// A file that was made. It is removed by [`MadeFile::remove`].
#[derive(Debug)]
pub(crate) struct MadeFile {
    directory: UserDirectory,
    name: OsString,
}

impl UserDirectory {
    /// Opens a directory with the rights of `owner`.
    pub(crate) fn open(owner: Option<&Owner>, path: &Path) -> io::Result<UserDirectory> {
        let directory = act_as(owner, || open_place(path, OFlag::O_DIRECTORY))?;
        Ok(UserDirectory { directory, owner: owner.cloned() })
    }

    /// A directory that is open, used with the rights of this process.
    pub(crate) fn held(directory: OwnedFd) -> UserDirectory {
        UserDirectory { directory, owner: None }
    }

    /// The path of the directory now.
    pub(crate) fn path(&self) -> io::Result<PathBuf> {
        std::fs::read_link(proc::own_path(&format!("fd/{}", self.directory.as_raw_fd())))
    }

    /// Makes a file that nothing had the name of, for the owner alone.
    pub(crate) fn create(&self, name: &OsStr) -> io::Result<File> {
        let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let mode = Mode::S_IRUSR | Mode::S_IWUSR;
        act_as(self.owner.as_ref(), || Ok(openat(&self.directory, name, flags, mode)?)).map(File::from)
    }

    /// Gives a new file the mode, and the group, of another one, and its owner if root acts for
    /// itself. Of a file that is not the owner's, or has a group that the owner is not in,
    /// nothing is taken over: the new file stays one for the owner alone.
    pub(crate) fn take_over_rights(&self, file: &File, other: &Path) -> io::Result<()> {
        let owner = self.owner.as_ref();
        let place = act_as(owner, || open_place(other, OFlag::empty()));
        let other = match place {
            Ok(place) => File::from(place).metadata()?,
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied) => {
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        let own = file.metadata()?;
        let is_free = owner.is_none() && nix::unistd::geteuid().is_root();
        if !other.is_file() || !is_free && other.uid() != own.uid() {
            return Ok(());
        }
        let user = (other.uid() != own.uid()).then_some(other.uid());
        let group = (other.gid() != own.gid()).then_some(other.gid());
        if user.is_some() || group.is_some() {
            match act_as(owner, || fchown(file, user, group)) {
                Err(error) if !is_free && error.kind() == io::ErrorKind::PermissionDenied => return Ok(()),
                done => done?,
            }
        }
        // As the owner: who is not in the group of a file could otherwise get its rights.
        act_as(owner, || file.set_permissions(Permissions::from_mode(other.mode() & PERMISSIONS)))
    }

    pub(crate) fn try_clone(&self) -> io::Result<UserDirectory> {
        Ok(UserDirectory { directory: self.directory.try_clone()?, owner: self.owner.clone() })
    }

    /// Checks that the directory is this process's user's, and that nobody else can write to it.
    pub(crate) fn check_is_own(&self) -> io::Result<()> {
        let found = File::from(self.directory.try_clone()?).metadata()?;
        let is_own = found.uid() == nix::unistd::geteuid().as_raw() && found.mode() & 0o022 == 0;
        is_own.then_some(()).ok_or_else(|| io::Error::other("others can write to the directory"))
    }

    /// Lets all enter the directory, which then lists nothing to them.
    pub(crate) fn let_enter(&self) -> io::Result<()> {
        // A descriptor of a place is of no use for that.
        let path = proc::own_path(&format!("fd/{}", self.directory.as_raw_fd()));
        std::fs::set_permissions(path, Permissions::from_mode(0o711))
    }

    /// The file with this name, which was made here.
    pub(crate) fn made(self, name: OsString) -> MadeFile {
        MadeFile { directory: self, name }
    }
}

impl MadeFile {
    /// Removes the file, if it can be.
    pub(crate) fn remove(&self) {
        let UserDirectory { directory, owner } = &self.directory;
        let _ = act_as(owner.as_ref(), || Ok(unlinkat(directory, self.name.as_os_str(), UnlinkatFlags::NoRemoveDir)?));
    }
}

/// True if something has the path, as far as `owner` can see.
pub(crate) fn exists(owner: Option<&Owner>, path: &Path) -> bool {
    let found = act_as(owner, || open_place(path, OFlag::empty()));
    found.map_or_else(|error| error.kind() != io::ErrorKind::NotFound, |_| true)
}

/// Opens the regular file at `path` for reading, with the rights of `owner`. Nothing else is
/// opened: to open a device or a pipe can have an effect.
pub(crate) fn open_file(owner: Option<&Owner>, path: &Path) -> io::Result<File> {
    act_as(owner, || {
        let place = File::from(open_place(path, OFlag::empty())?);
        if !place.metadata()?.is_file() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        File::open(proc::own_path(&format!("fd/{}", place.as_raw_fd())))
    })
}

/// The device and the inode of a file.
pub(crate) type FileId = (u64, u64);

/// What a process can have for itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SharedFile {
    Regular,
    Fifo,
    /// Memory or a serial line of the host. Other devices, such as `/dev/null`, are for all.
    Device,
}

/// The file, FIFO, or device for one process that has the path, as far as `owner` can see.
pub(crate) fn shared_file(owner: Option<&Owner>, path: &Path) -> Option<(FileId, SharedFile)> {
    const DEVICES: [&str; 3] = ["/dev/dax", "/dev/ttyS", "/dev/ttyUSB"];
    let place = act_as(owner, || open_place(path, OFlag::empty()));
    let found = place.and_then(|place| File::from(place).metadata()).ok()?;
    let kind = found.file_type();
    let is_device = || kind.is_char_device() && DEVICES.iter().any(|begin| path.to_string_lossy().starts_with(begin));
    let shared = match () {
        () if kind.is_file() => SharedFile::Regular,
        () if kind.is_fifo() => SharedFile::Fifo,
        () if is_device() => SharedFile::Device,
        () => return None,
    };
    Some(((found.dev(), found.ino()), shared))
}

/// True if a block device has the path, as far as `owner` can see.
pub(crate) fn is_device(owner: Option<&Owner>, path: &Path) -> bool {
    let place = act_as(owner, || open_place(path, OFlag::empty()));
    place.and_then(|place| File::from(place).metadata()).is_ok_and(|found| found.file_type().is_block_device())
}

/// Opens the block device at `path`, which nobody uses, with the rights of `owner`. None if nothing
/// has the path.
pub(crate) fn open_device(owner: Option<&Owner>, path: &Path) -> io::Result<Option<File>> {
    let opened = act_as(owner, || {
        let place = File::from(open_place(path, OFlag::empty())?);
        if !place.metadata()?.file_type().is_block_device() {
            return Ok(None);
        }
        // Exclusively: the kernel refuses what is mounted, or part of another device.
        let mut options = File::options();
        options.read(true).write(true).custom_flags(libc::O_EXCL);
        options.open(proc::own_path(&format!("fd/{}", place.as_raw_fd()))).map(Some)
    });
    match opened {
        Ok(Some(device)) => match is_locked_by_qemu(&device)? {
            true => Err(io::Error::new(io::ErrorKind::ResourceBusy, "a QEMU has it open")),
            false => Ok(Some(device)),
        },
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        // What else has the path is found when a file is made there.
        _ => Ok(None),
    }
}

/// The bytes of an image that QEMU locks, to say what it does to the image.
const QEMU_LOCKS: std::ops::Range<i64> = 100..300;

/// True if a QEMU has the image open.
fn is_locked_by_qemu(image: &File) -> io::Result<bool> {
    let mut lock = libc::flock {
        l_type: libc::F_WRLCK as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: QEMU_LOCKS.start,
        l_len: QEMU_LOCKS.end - QEMU_LOCKS.start,
        l_pid: 0,
    };
    fcntl(image, FcntlArg::F_OFD_GETLK(&mut lock))?;
    Ok(i32::from(lock.l_type) != libc::F_UNLCK)
}

/// Has the first `bytes` of a block device read as zeros.
pub(crate) fn fill_with_zeros(device: &File, bytes: ByteCount) -> io::Result<()> {
    let length = i64::try_from(bytes.get()).map_err(io::Error::other)?;
    Ok(fallocate(device, FallocateFlags::FALLOC_FL_ZERO_RANGE, 0, length)?)
}

/// The process that listens on the socket at `path`, if it is known. Connects with the rights of
/// `owner`, and does not wait where other connections do.
///
/// # Errors
/// Nobody listens there.
pub(crate) fn listener(owner: Option<&Owner>, path: &Path) -> io::Result<Option<i32>> {
    act_as(owner, || {
        let place = open_place(path, OFlag::empty())?;
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
        let address = UnixAddr::new(&proc::own_path(&format!("fd/{}", place.as_raw_fd())))?;
        match connect_to(socket.as_raw_fd(), &address) {
            Err(Errno::EAGAIN) => return Ok(None),
            connected => connected?,
        }
        let pid = getsockopt(&socket, PeerCredentials)?.pid();
        // Of another namespace of processes.
        Ok((pid > 0).then_some(pid))
    })
}

/// Opens the place of a path. Links are followed as for the user with whose rights this is done,
/// but not those of `/proc` that lead to what a process has open.
fn open_place(path: &Path, flags: OFlag) -> io::Result<OwnedFd> {
    let flags = flags | OFlag::O_PATH | OFlag::O_CLOEXEC;
    match openat2(AT_FDCWD, path, OpenHow::new().flags(flags).resolve(ResolveFlag::RESOLVE_NO_MAGICLINKS)) {
        // Linux before 5.6, or a filter of system calls.
        Err(Errno::ENOSYS | Errno::EPERM) => open_without_links(path, flags),
        opened => Ok(opened?),
    }
}

/// Like [`open_place`], but no link is followed at all.
fn open_without_links(path: &Path, flags: OFlag) -> io::Result<OwnedFd> {
    let step = OFlag::O_PATH | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW | OFlag::O_DIRECTORY;
    let start = if path.is_absolute() { "/" } else { "." };
    let mut place = open(start, step, Mode::empty())?;
    let mut components = path.components().filter(|part| !matches!(part, Component::RootDir | Component::CurDir));
    let mut next = components.next();
    while let Some(part) = next {
        next = components.next();
        let flags = if next.is_some() { step } else { flags | OFlag::O_NOFOLLOW };
        place = openat(place.as_fd(), part.as_os_str(), flags, Mode::empty())?;
    }
    if File::from(place.try_clone()?).metadata()?.is_symlink() {
        return Err(Errno::ELOOP.into());
    }
    Ok(place)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use nix::sys::socket::{Backlog, listen};

    use super::*;

    /// A user, and a directory that belongs to it.
    fn of_user() -> (Owner, tempfile::TempDir) {
        let owner = Owner { user: 4711, group: 4712, groups: vec![4713], bounding: None, no_new_privileges: true };
        let directory = tempfile::tempdir().unwrap();
        std::os::unix::fs::chown(directory.path(), Some(4711), Some(4712)).unwrap();
        (owner, directory)
    }

    fn ids(file: &File) -> (u32, u32, u32) {
        let metadata = file.metadata().unwrap();
        (metadata.uid(), metadata.gid(), metadata.mode() & 0o7777)
    }

    #[test]
    fn a_file_of_a_user_gets_no_rights_of_others() {
        if !nix::unistd::geteuid().is_root() {
            pagemark_testing::skip!("only root acts for others");
        }
        let (owner, directory) = of_user();
        let path = |name: &str| directory.path().join(name);
        let other = |name: &str, user: u32, group: u32, mode: u32| {
            fs::write(path(name), "").unwrap();
            std::os::unix::fs::chown(path(name), Some(user), Some(group)).unwrap();
            fs::set_permissions(path(name), Permissions::from_mode(mode)).unwrap();
        };
        other("of-root", 0, 0, 0o4755);
        other("own", 4711, 4713, 0o6664);
        other("of-strangers", 4711, 4799, 0o664);
        symlink(path("of-root"), path("link")).unwrap();
        symlink("/dev/null", path("device")).unwrap();
        let here = UserDirectory::open(Some(&owner), directory.path()).unwrap();
        for (number, (name, expected)) in [
            ("of-root", (4711, 4712, 0o600)),
            ("link", (4711, 4712, 0o600)),
            ("device", (4711, 4712, 0o600)),
            ("own", (4711, 4713, 0o664)),
            ("of-strangers", (4711, 4712, 0o600)),
            ("missing", (4711, 4712, 0o600)),
        ]
        .into_iter()
        .enumerate()
        {
            let new = here.create(OsStr::new(&format!("new{number}"))).unwrap();
            here.take_over_rights(&new, &path(name)).unwrap();
            assert_eq!(ids(&new), expected, "{name}");
        }
        let error = here.create(OsStr::new("link")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        // Root's own machine.
        let here = UserDirectory::open(None, directory.path()).unwrap();
        let new = here.create(OsStr::new("of-the-machine")).unwrap();
        here.take_over_rights(&new, &path("link")).unwrap();
        assert_eq!(ids(&new), (0, 0, 0o755));
    }

    #[test]
    fn nothing_is_made_or_removed_where_the_user_could_not() {
        if !nix::unistd::geteuid().is_root() {
            pagemark_testing::skip!("only root acts for others");
        }
        let (owner, directory) = of_user();
        let for_root_alone = Permissions::from_mode(0o700);
        let of_root = tempfile::Builder::new().permissions(for_root_alone).tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        symlink(of_root.path(), path("link")).unwrap();
        let error = UserDirectory::open(Some(&owner), &path("link"))
            .and_then(|link| link.create(OsStr::new("new")))
            .unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        // The directory is another one when the file is to be removed.
        fs::create_dir(path("images")).unwrap();
        std::os::unix::fs::chown(path("images"), Some(4711), Some(4712)).unwrap();
        let images = UserDirectory::open(Some(&owner), &path("images")).unwrap();
        images.create(OsStr::new("image")).unwrap();
        let image = images.made("image".into());
        fs::rename(path("images"), path("moved")).unwrap();
        symlink(of_root.path(), path("images")).unwrap();
        fs::write(of_root.path().join("image"), "of root").unwrap();
        image.remove();
        assert!(!path("moved/image").exists() && of_root.path().join("image").exists());
        assert!(open_file(Some(&owner), &path("images/image")).is_err());
    }

    #[test]
    fn what_a_process_has_open_is_reached_by_no_path() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("file"), "content").unwrap();
        let held = File::open(directory.path()).unwrap();
        let magic = proc::own_path(&format!("fd/{}", held.as_raw_fd()));
        assert_eq!(UserDirectory::open(None, &magic).unwrap_err().raw_os_error(), Some(libc::ELOOP));
        assert!(open_file(None, &magic.join("file")).is_err());
        assert!(open_without_links(&magic, OFlag::O_PATH | OFlag::O_CLOEXEC).is_err());
        assert!(open_without_links(&directory.path().join("file"), OFlag::O_PATH).is_ok());
    }

    #[test]
    fn only_regular_files_are_opened_and_only_listeners_found() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        nix::unistd::mkfifo(&path("pipe"), Mode::S_IRWXU).unwrap();
        let socket = UnixListener::bind(path("socket")).unwrap();
        fs::write(path("file"), "").unwrap();
        assert!(open_file(None, &path("file")).is_ok());
        assert!(open_file(None, &path("pipe")).is_err());
        assert_eq!(listener(None, &path("socket")).unwrap(), Some(std::process::id() as i32));
        assert!(listener(None, &path("file")).is_err());
        // Nobody accepts connections: in the end none is waited for any more.
        listen(&socket, Backlog::new(1).unwrap()).unwrap();
        let found: Vec<_> = (0..8).map(|_| listener(None, &path("socket")).unwrap()).collect();
        assert_eq!(found.last(), Some(&None));
        drop(socket);
        assert!(listener(None, &path("socket")).is_err());
    }
}
