//! Binds sockets of root's processes in directories that a user can change, with the rights of that
//! user: wherever the user leads the path meanwhile, nothing happens that the user could not do.
//!
//! The socket is a copy of the process's own descriptor, and what is bound is found by the socket.
//! So its owner and permissions are given to nothing else, and its name is removed only where the
//! name is its own. Where several users can change the directory, the restore is refused.

use std::ffi::OsString;
use std::fs::Permissions;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, RenameFlags, renameat2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use nix::sys::stat::{FileStat, Mode, fstat, fstatat, mkdirat, umask};
use nix::unistd::{Gid, Uid, UnlinkatFlags, chdir, chroot, fchdir, fchownat, unlinkat};
use pagemark_linux::pidfd;
use pagemark_linux::proc::{self, Process};
use pagemark_trace::error::{Error, Object, Result};
use pagemark_trace::identity::Identity;

use super::{Own, TRIED_NAMES, address, mask_of, path_in};
use crate::criu::images::schema::FilePermissionsEntry;
use crate::files::walk::{Changer, Found, Lost, find_directory, open_at, own_root};
use crate::restore::opened::in_the_way;

/// The group of a user of whom no process is there to be asked.
const NO_GROUP: u32 = 65534;

/// The call that opens the file that a socket is bound to.
const SIOCUNIXFILE: libc::Ioctl = 0x89e0;

type AddressCall = unsafe extern "C" fn(libc::c_int, *const libc::sockaddr, libc::socklen_t) -> libc::c_int;

/// The directory of a socket, and the user who can change it.
pub(super) struct Place {
    user: Identity,
    path: PathBuf,
    /// The root directory of the process.
    root: OwnedFd,
    /// The directory in which the path begins, if it is relative.
    begin: Option<PathBuf>,
    directory: OwnedFd,
    /// The directories below it that are gone.
    missing: Vec<OsString>,
    name: OsString,
    /// The file that the socket is bound to.
    bound: Option<OwnedFd>,
    undo: Vec<Undo>,
}

/// What is undone when the clients of a socket that has lost its path are connected.
enum Undo {
    Name,
    Directory(OwnedFd, OsString),
    Aside(OsString),
}

/// Fails for a path at which root cannot act in the name of one user, before anything is touched.
pub(super) fn check(path: &Path) -> Result<()> {
    let root = own_root().map_err(crate::restore::io("open /"))?;
    let help = "if all who can change the directory of the socket may be trusted, restore with --trust-path and its \
                path";
    match find_above(&root, path).map_err(|lost| lost.error(path).help(help))?.0.changer() {
        Ok(Changer::Several) => {
            let reason = "is the name of a socket of a process of root, in a directory that several users can change";
            Err(in_the_way(path, reason).help(help))
        }
        changer => changer.map(drop).map_err(crate::restore::io("examine the directory of a socket")),
    }
}

/// The directory of a path, or the last one above it that is there, and the names of those below
/// it that are missing.
fn find_above(root: &OwnedFd, path: &Path) -> std::result::Result<(Found, Vec<OsString>), Lost> {
    let parent = path.parent().unwrap_or(Path::new("/"));
    let missing = match find_directory(root.as_fd(), parent) {
        Err(Lost::Missing(missing)) => missing,
        found => return Ok((found?, Vec::new())),
    };
    let above = missing.parent().unwrap_or(Path::new("/"));
    // Behind a link of root's the paths differ.
    let Ok(names) = parent.strip_prefix(above) else { return Err(Lost::Missing(missing)) };
    let names = names.iter().map(OsString::from).collect();
    Ok((find_directory(root.as_fd(), above)?, names))
}

impl Place {
    /// The place of a socket of a process of root. None if no user can change it.
    pub(super) fn of_user(process: Process, own: &Own) -> Result<Option<Place>> {
        let path = own.path();
        let root = std::fs::File::open(proc::path(process.pid, "root"))
            .and_then(|root| Ok(open_at(root.as_fd(), std::ffi::OsStr::new("."))?))
            .map_err(Error::system("open the root directory of", Object::Process(process.pid)))?;
        let (found, missing) = find_above(&root, &path).map_err(|lost| lost.error(&path))?;
        let uid =
            match found.changer().map_err(Error::system("examine the directory of", Object::File(path.clone())))? {
                Changer::Nobody => return Ok(None),
                Changer::User(uid) => uid,
                Changer::Several => return Err(in_the_way(&path, "is in a directory that several users can change")),
            };
        let Some(name) = path.file_name() else { return Err(in_the_way(&path, "is no path of a socket")) };
        Ok(Some(Place {
            user: Identity { uid, gid: NO_GROUP, groups: Vec::new() },
            path: path.clone(),
            root,
            begin: own.directory.clone(),
            directory: found.file,
            missing,
            name: name.to_owned(),
            bound: None,
            undo: Vec::new(),
        }))
    }

    /// Binds the socket, as the user.
    pub(super) fn bind(&mut self, own: &Own, process: Process) -> Result<()> {
        let mask = mask_of(process)?;
        let failed = Error::system("bind a socket of", Object::Process(process.pid));
        self.bind_with(own, process, mask).map_err(failed)
    }

    fn bind_with(&mut self, own: &Own, process: Process, mask: u32) -> io::Result<()> {
        let socket = pidfd::duplicate(process.pid, own.number as i32)?;
        if own.is_removed {
            self.make_directories()?;
        }
        let address = address(&own.name);
        let bind = |place: &Place| place.inside(mask, || call(libc::bind, &socket, &address));
        match bind(self) {
            Err(error) if error.raw_os_error() == Some(libc::EADDRINUSE) => {
                if own.is_removed {
                    // What is there now is not this socket, and comes back.
                    self.put_aside(process)?;
                } else {
                    self.remove_socket()?;
                }
                bind(self)?;
            }
            bound => bound?,
        }
        let bound = file_of(&socket)?;
        let is_here = self.is_here(&fstat(&bound)?)?;
        self.bound = Some(bound);
        if !is_here {
            return Err(io::Error::other("its path was led elsewhere meanwhile"));
        }
        if own.is_removed {
            self.undo.push(Undo::Name);
        }
        Ok(())
    }

    /// Connects a socket of process `client` of root, which sends datagrams, as the user.
    pub(super) fn connect(&self, own: &Own, client: Process, number: u32) -> Result<()> {
        let connect = || -> io::Result<()> {
            let socket = pidfd::duplicate(client.pid, number as i32)?;
            let there = address(&own.name_from_root());
            self.inside(0o777, || call(libc::connect, &socket, &there))?;
            // A socket of the system's has another name, wherever the path leads.
            match peer_name(&socket)? == path_in(&own.name) {
                true => Ok(()),
                false => Err(io::Error::other("its path was led elsewhere meanwhile")),
            }
        };
        connect().map_err(Error::system("connect a socket of", Object::Process(client.pid)))
    }

    /// Gives the bound file its owner and permissions.
    pub(super) fn set_owner(&self, permissions: &FilePermissionsEntry) -> Result<()> {
        let Some(bound) = &self.bound else { return Ok(()) };
        let FilePermissionsEntry { uid, gid, mode, .. } = *permissions;
        let set = || -> io::Result<()> {
            let (owner, group) = (Uid::from_raw(uid), Gid::from_raw(gid));
            fchownat(bound, "", Some(owner), Some(group), AtFlags::AT_EMPTY_PATH)?;
            // The path leads to what is held.
            let held = format!("/proc/self/fd/{}", bound.as_raw_fd());
            std::fs::set_permissions(held, Permissions::from_mode(mode & 0o7777))
        };
        set().map_err(Error::system("set the owner of", Object::File(self.path.clone())))
    }

    /// Undoes what a socket needed that has lost its path.
    pub(super) fn undo(&mut self) -> Result<()> {
        let mut failure = None;
        while let Some(step) = self.undo.pop() {
            // The others are undone all the same.
            if let Err(error) = self.undo_one(step) {
                failure.get_or_insert(error);
            }
        }
        failure.map_or(Ok(()), Err).map_err(Error::system("undo changes at", Object::File(self.path.clone())))
    }

    fn undo_one(&self, step: Undo) -> io::Result<()> {
        match step {
            Undo::Name => match self.bound.as_ref().map(fstat).transpose()? {
                Some(bound) if self.is_here(&bound).unwrap_or(false) => {
                    self.as_user(|| unlinkat(&self.directory, &*self.name, UnlinkatFlags::NoRemoveDir))
                }
                _ => Ok(()),
            },
            Undo::Aside(aside) => self.rename(&aside, &self.name),
            Undo::Directory(above, name) => self.as_user(|| unlinkat(&above, &*name, UnlinkatFlags::RemoveDir)),
        }
    }

    fn as_user<T: Send>(&self, work: impl FnOnce() -> nix::Result<T> + Send) -> io::Result<T> {
        Ok(self.user.run(work)??)
    }

    /// True if the name is that of this file.
    fn is_here(&self, file: &FileStat) -> io::Result<bool> {
        let named = self.as_user(|| fstatat(&self.directory, &*self.name, AtFlags::AT_SYMLINK_NOFOLLOW))?;
        Ok((named.st_dev, named.st_ino) == (file.st_dev, file.st_ino))
    }

    /// Makes the directories that are gone.
    fn make_directories(&mut self) -> io::Result<()> {
        for name in std::mem::take(&mut self.missing) {
            let made = self.as_user(|| {
                mkdirat(&self.directory, &*name, Mode::from_bits_truncate(0o755))?;
                open_at(self.directory.as_fd(), &name)
            })?;
            let found = fstat(&made)?;
            let above = std::mem::replace(&mut self.directory, made);
            self.undo.push(Undo::Directory(above, name));
            if (found.st_mode & libc::S_IFMT, found.st_uid) != (libc::S_IFDIR, self.user.uid) {
                return Err(io::Error::other("another directory is in place of a new one"));
            }
        }
        Ok(())
    }

    /// Renames what has the name.
    fn put_aside(&mut self, process: Process) -> io::Result<()> {
        for number in 0..TRIED_NAMES {
            let mut aside = self.name.clone();
            aside.push(format!(".pagemark-{}.{number}", process.pid));
            match self.rename(&self.name, &aside) {
                Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {}
                renamed => {
                    renamed?;
                    self.undo.push(Undo::Aside(aside));
                    return Ok(());
                }
            }
        }
        Err(io::Error::from_raw_os_error(libc::EEXIST))
    }

    fn rename(&self, from: &OsString, to: &OsString) -> io::Result<()> {
        let here = &self.directory;
        self.as_user(|| renameat2(here, &**from, here, &**to, RenameFlags::RENAME_NOREPLACE))
    }

    /// Removes the socket that has the name. What is no socket stays.
    fn remove_socket(&self) -> io::Result<()> {
        self.as_user(|| {
            let found = fstatat(&self.directory, &*self.name, AtFlags::AT_SYMLINK_NOFOLLOW)?;
            match found.st_mode & libc::S_IFMT == libc::S_IFSOCK {
                true => unlinkat(&self.directory, &*self.name, UnlinkatFlags::NoRemoveDir),
                false => Err(Errno::EADDRINUSE),
            }
        })
    }

    /// Does something as the user, in the root directory of the process and the directory in which
    /// the path begins. The threads have both for themselves.
    fn inside<T: Send>(&self, mask: u32, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("at-socket".into()).spawn_scoped(scope, || {
                unshare(CloneFlags::CLONE_FS)?;
                fchdir(&self.root)?;
                chroot(".")?;
                umask(Mode::from_bits_truncate(mask));
                self.user.run(|| {
                    self.begin.as_ref().map_or(Ok(()), chdir)?;
                    work()
                })?
            })?;
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

/// Fails unless a socket of process `client` was accepted, or waits to be, by process `listener`.
pub(super) fn check_listener(client: Process, number: u32, listener: Process) -> Result<()> {
    let connected = || -> io::Result<i32> {
        let socket = pidfd::duplicate(client.pid, number as i32)?;
        Ok(getsockopt(&socket, PeerCredentials)?.pid())
    };
    let failed = Error::system("find the peer of a socket of", Object::Process(client.pid));
    match connected() {
        Ok(pid) if pid == listener.pid => Ok(()),
        Ok(_) => Err(failed(io::Error::other("its path was led elsewhere meanwhile"))),
        Err(error) => Err(failed(error)),
    }
}

/// The file that a socket is bound to, whatever its path leads to now. It is opened for nothing.
pub(super) fn file_of(socket: &OwnedFd) -> io::Result<OwnedFd> {
    // SAFETY: the call has no argument but the descriptor.
    let number = Errno::result(unsafe { libc::ioctl(socket.as_raw_fd(), SIOCUNIXFILE) })?;
    // SAFETY: the descriptor was just made and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Binds a socket of this process.
pub(in crate::restore) fn bind(socket: &OwnedFd, name: &[u8]) -> io::Result<()> {
    call(libc::bind, socket, &address(name))
}

fn call(call: AddressCall, socket: &OwnedFd, address: &[u8]) -> io::Result<()> {
    // SAFETY: the call reads as many bytes as the address has.
    let result = unsafe { call(socket.as_raw_fd(), address.as_ptr().cast(), address.len() as libc::socklen_t) };
    Ok(Errno::result(result).map(drop)?)
}

/// The path of the socket that another one is connected with.
fn peer_name(socket: &OwnedFd) -> io::Result<Vec<u8>> {
    let mut address = vec![0; size_of::<libc::sockaddr_un>() + 1];
    let mut length = address.len() as libc::socklen_t;
    // SAFETY: the call writes at most as many bytes as `address` has, and one number.
    let result = unsafe { libc::getpeername(socket.as_raw_fd(), address.as_mut_ptr().cast(), &raw mut length) };
    Errno::result(result)?;
    address.truncate(length as usize);
    Ok(path_in(address.get(2..).unwrap_or_default()).to_vec())
}
