//! Hands the files of a container over to CRIU, which would open them by their paths, with root's
//! rights: once its mounts are there, and before CRIU opens anything in them.
//!
//! A descriptor must be opened in the container's own mounts: one of a mount outside would lead out
//! of the container. So CRIU waits when it has made the mounts. The files are looked up then, below
//! the new root directory, and get descriptors of this process whose numbers the images already
//! have. For the time of the restore, the directory of these descriptors, `/proc/PID/fd`, is
//! mounted inside the container, over a directory of its `proc` that nobody can change. What CRIU
//! opens there is the file that was looked up, with the container's mount.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::mount::{MntFlags, umount2};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{UnixAddr, getsockname};
use pagemark_linux::pidfd;
use pagemark_linux::proc::{self, Process};
use pagemark_trace::error::{Error, Result};
use pagemark_trace::identity::Identity;

use super::gate::Gate;
use super::ghosts;
use super::holders::{Holder, Holders};
use super::made::Made;
use super::mounts::recorded;
use super::opened::{Images, check, in_the_way, look_up};
use super::own_mounts::OwnMounts;
use super::watches;
use crate::criu::descriptors::receive_descriptor;
use crate::criu::images::schema::{MOUNT_OF_PROCESSES, MountEntry, RegFileEntry};
use crate::criu::images::{ImageKind, read_all};
use crate::criu::mounted::in_mounts;
use crate::criu::regular_files::{MOUNTS, images_of};
use crate::files::user::User;
use crate::files::walk::{Found, find_directory, own_root};

/// CRIU's stage at which the mounts are there, and nothing is opened.
const MOUNTS_ARE_THERE: &str = "post-setup-namespaces";
/// CRIU's stage at which all is opened, and no process runs.
const ALL_IS_OPENED: &str = "post-restore";

/// The directory of `proc` over which the descriptors are mounted. It has only what modules of the
/// kernel say about themselves.
const COVERED: &str = "driver";

/// File systems of processes.
const PROC: i64 = 0x9fa0;

/// The name of the socket in which CRIU keeps descriptors begins so.
const STORE: &[u8] = b"/criu-fdstore-";

/// The call that returns the kind of a namespace.
const NS_GET_NSTYPE: libc::Ioctl = 0xb703;

/// Descriptors for the files get numbers from here on.
const LOWEST: i32 = 256;

/// Files that are handed over once the mounts are there.
pub(super) struct Inside {
    gate: Gate,
    /// Those mounts, while the descriptors are in them.
    mounts: Option<OwnedFd>,
    /// The directory in the container at which the descriptors are mounted.
    place: PathBuf,
    images: PathBuf,
    holders: Holders,
    /// The users of the processes who may not do here what root may.
    others: Vec<User>,
    trusted: Vec<PathBuf>,
    wanted: Vec<WantedFile>,
    /// What was made in it, which goes again if the restore fails.
    pub made: Made,
}

/// A file that gets the descriptor `slot`.
struct WantedFile {
    what: What,
    by: Vec<Holder>,
    slot: OwnedFd,
}

/// The file system and inode of a file that has no name, as CRIU has them.
type GhostInode = (Option<u32>, Option<u64>);

enum What {
    Open(RegFileEntry),
    /// A file that a process watches.
    Watched(PathBuf),
    /// A file without a name, with its number and the path that it had.
    Ghost(u32, PathBuf),
}

impl Inside {
    /// Changes the images so that CRIU finds the files by descriptors, at `place` in the container.
    pub(super) fn new(
        directory: &Path,
        place: PathBuf,
        images: &mut Images<'_>,
        mut holders: Holders,
        trusted: &[PathBuf],
    ) -> Result<Inside> {
        let others = holders.users.iter().filter(|user| !user.is_root).cloned().collect();
        // Root inside may use what is inside.
        holders.users.iter_mut().for_each(|user| user.is_root |= user.is_root_inside);
        let gate = Gate::at(&[MOUNTS_ARE_THERE, ALL_IS_OPENED]).map_err(|error| {
            let error = Error::criu_io("make a file in memory that may be executed")(error);
            error.help("sysctl vm.memfd_noexec=1 or lower allows it")
        })?;
        let mut inside = Inside {
            gate,
            mounts: None,
            place,
            images: directory.to_owned(),
            holders,
            others,
            trusted: trusted.to_vec(),
            wanted: Vec::new(),
            made: Made::default(),
        };
        inside.want_open(images)?;
        let ghosts = inside.want_ghosts(images)?;
        let holders = std::mem::take(&mut inside.holders);
        images.change_watches(&holders, &mut |inode, path, by| {
            if let Some((_, name)) = ghosts.iter().find(|(was, _)| *was == (Some(inode.0), Some(inode.1))) {
                return Ok(Some(name.clone()));
            }
            // Without a path it is found by its inode, and is the same.
            let Some(path) = path else { return Ok(None) };
            inside.want(What::Watched(path.to_owned()), by.to_vec()).map(Some)
        })?;
        inside.holders = holders;
        Ok(inside)
    }

    fn want_open(&mut self, images: &mut Images<'_>) -> Result<()> {
        let mut names: HashMap<(String, u32), (String, usize)> = HashMap::new();
        for file in images.regular() {
            let by = self.holders.of(file.id).to_vec();
            let path = Path::new(&file.name);
            let is_left = by.is_empty()
                || file.ext == Some(true)
                || !path.is_absolute()
                || path == Path::new("/")
                || ["/proc", "/dev/pts"].iter().any(|made| path.starts_with(made))
                || images.is_remapped(file.id)
                || is_device(&file, path)
                || images.is_of_terminal(file.id);
            if is_left {
                continue;
            }
            let kind = file.mode.unwrap_or(0) & libc::S_IFMT;
            let key = (file.name.clone(), kind);
            let id = file.id;
            let name = match names.get(&key) {
                Some((name, at)) => {
                    self.wanted[*at].by.extend(by);
                    name.clone()
                }
                None => {
                    let name = self.want(What::Open(file), by)?;
                    names.insert(key, (name.clone(), self.wanted.len() - 1));
                    name
                }
            };
            images.open_at(id, &name);
        }
        Ok(())
    }

    fn want_ghosts(&mut self, images: &mut Images<'_>) -> Result<Vec<(GhostInode, String)>> {
        let mut all = Vec::new();
        for (ghost, ids) in images.ghosts() {
            let reg = images.reg(ids[0]).ok_or_else(|| Error::damaged("a file without a name has no entry"))?;
            let by: Vec<Holder> = ids.iter().flat_map(|id| self.holders.of(*id)).copied().collect();
            if by.is_empty() {
                continue;
            }
            let name = self.want(What::Ghost(ghost, PathBuf::from(&reg.name)), by)?;
            ids.iter().for_each(|id| images.open_at(*id, &name));
            images.forget_remap(ghost);
            all.push((ghosts::inode_of(&self.images, ghost)?, name));
        }
        Ok(all)
    }

    /// Sets a descriptor aside. Returns the path that it will have for CRIU.
    fn want(&mut self, what: What, by: Vec<Holder>) -> Result<String> {
        let failed = super::io("set a descriptor aside");
        let number = File::open("/dev/null").and_then(|null| Ok(fcntl(&null, FcntlArg::F_DUPFD_CLOEXEC(LOWEST))?));
        // SAFETY: the descriptor was just made and nothing else owns it.
        let slot = number.map(|number| unsafe { OwnedFd::from_raw_fd(number) }).map_err(failed)?;
        let name = self.place.join(slot.as_raw_fd().to_string()).to_string_lossy().into_owned();
        self.wanted.push(WantedFile { what, by, slot });
        Ok(name)
    }

    /// The script that CRIU executes.
    pub(super) fn script(&self) -> String {
        self.gate.path()
    }

    /// If CRIU waits, hands the files over, or takes the descriptors out of the container again.
    ///
    /// # Errors
    /// A file is missing or a link, or a user of a process may not use it.
    pub(super) fn step(&mut self) -> Result<()> {
        let mut reached = [PollFd::new(self.gate.reached(), PollFlags::POLLIN)];
        if !poll(&mut reached, PollTimeout::ZERO).is_ok_and(|count| count > 0) {
            return Ok(());
        }
        let root = self.gate.take_root().map_err(Error::criu_io("wait for CRIU"))?;
        let root = root.ok_or_else(|| Error::criu_failed("restore a container", "it reported no process"))?;
        match self.mounts.take() {
            None => self.hand_over(root)?,
            Some(mounts) => self.uncover(&mounts).map_err(super::io("take descriptors out of a container"))?,
        }
        self.gate.let_pass().map_err(Error::criu_io("let CRIU continue"))
    }

    fn hand_over(&mut self, process: Process) -> Result<()> {
        let mounts = mounts_of(process).map_err(super::io("find the mounts of the container among what CRIU keeps"))?;
        let root = in_mounts(&mounts, own_root).map_err(super::io("open the root directory"))?;
        let own_mounts = OwnMounts { mounts: &mounts, recorded: recorded(&self.images)? };
        let (holders, made) = (&self.holders, &mut self.made);
        let users = &holders.users;
        for WantedFile { what, by, slot } in &mut self.wanted {
            let file = match what {
                What::Open(file) => {
                    let path = Path::new(&file.name);
                    let found = look_up(&root, file, by, users, made)?;
                    if !self.trusted.iter().any(|trusted| trusted == path) {
                        check(&found, path, by, holders)?;
                    }
                    found.file
                }
                What::Watched(path) => watches::look_up(&root, path, by, holders, &self.trusted)?.file,
                What::Ghost(ghost, path) => {
                    ghosts::make_anywhere(&self.images, *ghost, path, by, users, &root, &own_mounts)?.file
                }
            };
            // SAFETY: both descriptors are open, and this object owns the second one.
            Errno::result(unsafe { libc::dup3(file.as_raw_fd(), slot.as_raw_fd(), libc::O_CLOEXEC) })
                .map_err(|error| super::io("hand a descriptor over")(error.into()))?;
        }
        let place = find_directory(root.as_fd(), &self.place).map_err(|lost| lost.error(&self.place))?;
        let kind = nix::sys::statfs::fstatfs(&place.file).map_err(|error| super::io("examine proc")(error.into()))?;
        if kind.filesystem_type().0 as i64 != PROC {
            return Err(in_the_way(&self.place, "is no directory of the kernel in the container"));
        }
        let is_safe = is_out_of_reach(&place, &self.others).map_err(super::io("examine the way to proc"))?;
        if !is_safe {
            let reason = "is below a directory of the container that others than root can change";
            return Err(in_the_way(&self.place, reason)
                .help("let root alone write to the root directory of the container and to what is above its /proc"));
        }
        cover(&mounts, place.file.as_fd()).map_err(super::io("mount descriptors in a container"))?;
        self.mounts = Some(mounts);
        Ok(())
    }

    fn uncover(&self, mounts: &OwnedFd) -> io::Result<()> {
        let flags = MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW;
        in_mounts(mounts, || Ok(umount2(&self.place, flags)?))
    }
}

/// True if none of the users can exchange a directory on the way to `place`: root alone can write
/// to them, or a group of which they are not.
fn is_out_of_reach(place: &Found, users: &[User]) -> io::Result<bool> {
    if place.is_roots_choice() {
        return Ok(true);
    }
    // Where all are root, too, a directory that everybody can write is none that root has chosen.
    for user in users.iter().chain([&nobody()]) {
        if !place.is_out_of_reach_of(user)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// A user of no group.
fn nobody() -> User {
    const NOBODY: u32 = 65534;
    let identity = Identity { uid: NOBODY, gid: NOBODY, groups: Vec::new() };
    User { identity, is_root: false, is_root_inside: false }
}

/// A device of the container's, in a directory in which only root can make any.
fn is_device(file: &RegFileEntry, path: &Path) -> bool {
    let kind = file.mode.unwrap_or(0) & libc::S_IFMT;
    kind == libc::S_IFCHR && path.parent() == Some(Path::new("/dev"))
}

/// Where the descriptors are mounted in the container: in its file system of processes. None if it
/// has no such file system, or several sets of mounts.
pub(super) fn place(directory: &Path) -> Result<Option<PathBuf>> {
    let [set] = &*images_of(directory, MOUNTS)? else { return Ok(None) };
    let mounts: Vec<MountEntry> = read_all(set, ImageKind::Mounts)?;
    let is_of_processes =
        |mount: &&MountEntry| mount.fstype == MOUNT_OF_PROCESSES as u32 && mount.root == "/" && mount.mountpoint != "/";
    let found = mounts.iter().find(is_of_processes);
    Ok(found.map(|mount| Path::new("/").join(mount.mountpoint.trim_start_matches("./")).join(COVERED)))
}

/// Mounts the directory of the descriptors of this process over a directory in other mounts.
fn cover(mounts: &OwnedFd, directory: BorrowedFd<'_>) -> io::Result<()> {
    const CLONE: libc::c_uint = 1;
    const FROM_DESCRIPTOR: libc::c_uint = 0x4;
    const TO_DESCRIPTOR: libc::c_uint = 0x40;
    let own = c"/proc/self/fd";
    // SAFETY: the path ends with a zero byte and outlives the call.
    let tree =
        unsafe { libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, own.as_ptr(), CLONE | libc::O_CLOEXEC as u32) };
    let tree = Errno::result(tree)?;
    // SAFETY: the descriptor was just made and nothing else owns it.
    let tree = unsafe { OwnedFd::from_raw_fd(tree as i32) };
    let none = c"";
    in_mounts(mounts, || {
        // SAFETY: the empty paths end with a zero byte and outlive the call; both descriptors are open.
        let moved = unsafe {
            libc::syscall(
                libc::SYS_move_mount,
                tree.as_raw_fd(),
                none.as_ptr(),
                directory.as_raw_fd(),
                none.as_ptr(),
                FROM_DESCRIPTOR | TO_DESCRIPTOR,
            )
        };
        Errno::result(moved).map(drop).map_err(io::Error::from)
    })
}

/// The mount namespace that CRIU has made for the container. No process is in it yet: CRIU keeps a
/// descriptor of it in the queue of a socket, from which its processes take copies (`MSG_PEEK` at
/// the offset `SO_PEEK_OFF`, which each sets before). They all wait now.
fn mounts_of(process: Process) -> io::Result<OwnedFd> {
    let missing = || io::Error::new(io::ErrorKind::NotFound, "this CRIU keeps them in another way");
    let mut kept = None;
    for descriptor in proc::descriptors(process.pid)? {
        if !descriptor.link.starts_with(b"socket:") {
            continue;
        }
        let socket = pidfd::duplicate(process.pid, descriptor.number)?;
        let name = getsockname::<UnixAddr>(socket.as_raw_fd()).ok();
        if name.is_some_and(|name| name.as_abstract().is_some_and(|name| name.starts_with(STORE))) {
            kept = Some(UnixStream::from(socket));
        }
    }
    let socket = kept.ok_or_else(missing)?;
    let mut found = None;
    for offset in 0_i32.. {
        // SAFETY: the option is a number, which outlives the call.
        let set = unsafe {
            let (value, length) = ((&raw const offset).cast(), size_of::<i32>() as libc::socklen_t);
            libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEEK_OFF, value, length)
        };
        Errno::result(set)?;
        let file = match receive_descriptor(&socket, libc::MSG_PEEK | libc::MSG_DONTWAIT) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            file => file?,
        };
        // SAFETY: the call has no argument but the descriptor, and fails for what is no namespace.
        let kind = unsafe { libc::ioctl(file.as_raw_fd(), NS_GET_NSTYPE) };
        if kind == libc::CLONE_NEWNS && found.replace(file).is_some() {
            return Err(missing());
        }
    }
    found.ok_or_else(missing)
}

#[cfg(test)]
mod tests {
    use std::fs::{Permissions, create_dir, set_permissions};
    use std::os::unix::fs::{PermissionsExt, chown};

    use super::*;

    #[test]
    fn a_group_that_no_user_is_in_cannot_exchange_a_directory() {
        if !nix::unistd::geteuid().is_root() {
            return pagemark_testing::skipped("files of two users need root");
        }
        let directory = tempfile::tempdir().unwrap();
        create_dir(directory.path().join("proc")).unwrap();
        let of_group = |gid| {
            let identity = Identity { uid: 1000, gid: 1000, groups: vec![gid] };
            User { identity, is_root: false, is_root_inside: false }
        };
        for (group, mode, users, is_safe) in [
            (0, 0o755, vec![of_group(0)], true),
            (0, 0o775, vec![], true),
            (0, 0o775, vec![of_group(5)], true),
            (0, 0o775, vec![of_group(5), of_group(0)], false),
            (5, 0o775, vec![of_group(5)], false),
            (0, 0o777, vec![], false),
            (0, 0o757, vec![of_group(5)], false),
        ] {
            set_permissions(directory.path(), Permissions::from_mode(mode)).unwrap();
            chown(directory.path(), None, Some(group)).unwrap();
            let root = own_root().unwrap();
            let place = find_directory(root.as_fd(), &directory.path().join("proc")).unwrap();
            assert_eq!(is_out_of_reach(&place, &users).unwrap(), is_safe, "{mode:o} of group {group}");
        }
    }
}
