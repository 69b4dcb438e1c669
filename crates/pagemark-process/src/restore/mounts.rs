//! Sees to the mounts of a container, which CRIU makes by paths, with root's rights, and which a
//! user could have led elsewhere: before CRIU begins, what is to be mounted, and before the
//! processes run, what is mounted, and where.
//!
//! The kernel says of each mount which directory of which file system it shows, by a path that is
//! made of names alone. That of a directory of root's cannot become that of a user's.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::sys::stat::FileStat;
use nix::unistd::geteuid;
use pagemark_linux::access::Access;
use pagemark_linux::proc::Process;
use pagemark_linux::proc::mounts::Mount;
use pagemark_trace::PidsHere;
use pagemark_trace::error::{Error, Result};

use super::holders::Holders;
use super::images::RestoreOptions;
use super::opened::in_the_way;
use super::root::{read_notes, root_of};
use crate::criu::images::schema::{FileEntry, MOUNT_FROM_OUTSIDE, MountEntry};
use crate::criu::images::{ImageKind, read_all};
use crate::criu::mounted::{Mounted, in_mounts, mounts_in, namespaces};
use crate::criu::regular_files::{MOUNTS, has_image, images_of};
use crate::files::user::User;
use crate::files::walk::{Changer, Found, find, find_directory, own_root};

/// A directory of a file system.
type Place = (u64, PathBuf);

/// What a restore knows of the mounts of a container, and of those here.
struct Mounts<'a> {
    recorded: Vec<MountEntry>,
    /// What was mounted.
    noted: Vec<Mounted>,
    outside: Vec<Mount>,
    /// The path of the root directory.
    root: &'a Path,
    users: &'a [User],
    /// The users have a namespace of their own, in which they could make any mount themselves.
    has_own_users: bool,
    /// Paths that may lead anywhere.
    trusted: &'a [PathBuf],
}

/// Checks, before anything is done, the root directory that the processes of the images in
/// `directory` get, and what CRIU makes in order to mount it.
///
/// # Errors
/// A user decides which directory it is, or where CRIU makes something.
pub(super) fn check(directory: &Path, root: &Path, options: &RestoreOptions) -> Result<()> {
    let files: Vec<FileEntry> = read_all(&directory.join("files.img"), ImageKind::Files)?;
    let holders = Holders::read(directory, &files)?;
    let Some(mounts) = Mounts::read(directory, root, &holders, options)? else { return Ok(()) };
    let top = Path::new("/");
    let is_root = |entry: &&MountEntry| point_of(entry) == top;
    let had = mounts.recorded.iter().find(is_root).map(|entry| (device_of(entry), PathBuf::from(&entry.root)));
    let own_root = own_root().map_err(super::io("open /"))?;
    let found = find(own_root.as_fd(), root).map_err(|lost| lost.error(root))?;
    let is_it = place_of(&found, &mounts.outside) == had && mounts.is_noted(top, Some(&found.stat));
    if !is_it && !mounts.is_permitted(&found, root, top)? {
        return Err(swapped(top, root));
    }
    mounts.recorded.iter().filter(|entry| entry.deleted == Some(true)).try_for_each(|entry| mounts.check_removed(entry))
}

/// Compares the mounts of the processes below `process` that CRIU restores from the images in
/// `directory`, and that do not run yet, for whose users see `holders`, with those of the
/// checkpoint.
///
/// # Errors
/// A file or directory from outside is mounted that is another one, and that is not what the users'
/// rights lead to, or something is mounted at another place of the container.
pub(super) fn compare(directory: &Path, process: Process, holders: &Holders, options: &RestoreOptions) -> Result<()> {
    let Some(root) = root_of(&read_notes(directory)?, options.root.as_deref())? else { return Ok(()) };
    let Some(known) = Mounts::read(directory, &root, holders, options)? else { return Ok(()) };
    let mut permitted: Option<Vec<(PathBuf, Place)>> = None;
    let mut points: HashMap<PathBuf, usize> = HashMap::new();
    known.recorded.iter().for_each(|entry| *points.entry(point_of(entry)).or_default() += 1);
    let pids: Vec<i32> = [process.pid].into_iter().chain(PidsHere::of_container(process).of_all()).collect();
    let failed = || super::io("read the mounts of a container");
    for namespace in namespaces(&pids).map_err(failed())? {
        let mounts = mounts_in(&namespace).map_err(failed())?;
        let root = mounts.iter().rev().find(|mount| mount.point == Path::new("/"));
        let root = root.ok_or_else(|| Error::criu_failed("restore a container", "it has no root directory"))?;
        for mount in &mounts {
            let left = points.get_mut(&mount.point).filter(|left| **left > 0);
            *left.ok_or_else(|| misplaced(mount))? -= 1;
            let is_own = !known.outside.iter().any(|other| other.device == mount.device);
            if is_own || was_there(mount, root, &known.recorded) && known.is_same(mount, &namespace) {
                continue;
            }
            if permitted.is_none() {
                permitted = Some(known.permitted_places()?);
            }
            let place = (mount.device, mount.root.clone());
            let is_permitted = |(point, permitted): &(PathBuf, Place)| *point == mount.point && *permitted == place;
            if !permitted.iter().flatten().any(is_permitted) {
                return Err(known.swapped(mount));
            }
        }
    }
    Ok(())
}

impl<'a> Mounts<'a> {
    /// None if nobody but root can have changed anything, or nobody has more rights.
    fn read(
        directory: &Path,
        root: &'a Path,
        holders: &'a Holders,
        options: &'a RestoreOptions,
    ) -> Result<Option<Mounts<'a>>> {
        let users = &holders.users;
        if !geteuid().is_root() || users.iter().all(|user| user.is_root) {
            return Ok(None);
        }
        let outside = Mount::of_this_process().map_err(super::io("read the mounts"))?;
        let (has_own_users, trusted) = (has_image(directory, "userns-"), &options.trusted_paths);
        let (recorded, noted) = (recorded(directory)?, read_notes(directory)?.mounted);
        Ok(Some(Mounts { recorded, noted, outside, root, users, has_own_users, trusted }))
    }

    /// True if what is mounted at this place of the container may be another file than it was: it
    /// was a user's own, or nobody knows. The root directory tells set-uid programs who is root.
    fn may_be_another(&self, point: &Path) -> bool {
        let is_users = |mounted: &Mounted| self.users.iter().any(|user| user.identity.uid == mounted.user());
        let mut noted = self.noted.iter().filter(|mounted| mounted.is_at(point)).peekable();
        let is_known = noted.peek().is_some() || point == Path::new("/");
        self.has_own_users || if is_known { noted.any(is_users) } else { true }
    }

    /// True if this is, as far as is known, the file that was mounted at this place.
    fn is_noted(&self, point: &Path, stat: Option<&FileStat>) -> bool {
        let mut noted = self.noted.iter().filter(|mounted| mounted.is_at(point)).peekable();
        noted.peek().is_none()
            || self.may_be_another(point)
            || stat.is_some_and(|stat| noted.any(|mounted| mounted.is(stat)))
    }

    /// The same of what a restored process has mounted.
    fn is_same(&self, mount: &Mount, namespace: &OwnedFd) -> bool {
        let found = in_mounts(namespace, || Ok(find(own_root()?.as_fd(), &mount.point).ok().map(|found| found.stat)));
        self.is_noted(&mount.point, found.ok().flatten().as_ref())
    }

    /// True if what was found at a path outside may be mounted at this place: none of the users can
    /// have exchanged it, or it may be another one, and each of them may go there.
    fn is_permitted(&self, found: &Found, path: &Path, point: &Path) -> Result<bool> {
        if found.is_roots_choice() || self.trusted.iter().any(|trusted| trusted == path) {
            return Ok(true);
        }
        let may_go = self.may_be_another(point);
        let may = |user: &User| -> std::io::Result<bool> {
            Ok(user.is_root || found.is_out_of_reach_of(user)? || may_go && found.permits(user, Access::SEARCH)?)
        };
        let all: std::io::Result<Vec<bool>> = self.users.iter().map(may).collect();
        Ok(all.map_err(super::io(format!("examine {}", path.display())))?.into_iter().all(|may| may))
    }

    /// The places to which the paths outside lead now, without links of users, and which may be
    /// mounted, each with its place in the container.
    fn permitted_places(&self) -> Result<Vec<(PathBuf, Place)>> {
        let root = own_root().map_err(super::io("open /"))?;
        let sources = self
            .recorded
            .iter()
            .filter(|entry| is_from_outside(entry))
            .map(|entry| (point_of(entry), source_of(entry)));
        let mut places = Vec::new();
        for (point, path) in sources.chain([(PathBuf::from("/"), self.root)]) {
            let Ok(found) = find(root.as_fd(), path) else { continue };
            let is_permitted = self.is_permitted(&found, path, &point)?;
            if let (true, Some(place)) = (is_permitted, place_of(&found, &self.outside)) {
                places.push((point, place));
            }
        }
        Ok(places)
    }

    /// CRIU makes what was removed, mounts it, and removes it again, by its path, with root's
    /// rights. In a file system of the container's own, the path is not known here.
    fn check_removed(&self, entry: &MountEntry) -> Result<()> {
        let path = source_of(entry);
        if self.has_own_users || self.trusted.iter().any(|trusted| trusted == path) {
            return Ok(());
        }
        let above = path.parent().filter(|_| is_from_outside(entry) && path.is_absolute());
        let root = own_root().map_err(super::io("open /"))?;
        if let Some(Ok(above)) = above.map(|above| find_directory(root.as_fd(), above)) {
            let changer = above.changer().map_err(super::io(format!("examine {}", path.display())))?;
            if changer == Changer::Nobody {
                return Ok(());
            }
        }
        let point = point_of(entry);
        let reason = format!(
            "was removed, and is mounted at {} in the container: it would be made again where a user of the job may \
             have led the path",
            point.display()
        );
        let shown = if is_from_outside(entry) { path } else { Path::new(&entry.root) };
        Err(in_the_way(shown, reason)
            .help("have the container unmount it before a checkpoint, or restore with --trust-path and its path"))
    }

    fn swapped(&self, mount: &Mount) -> Error {
        let is_it = |entry: &&MountEntry| point_of(entry) == mount.point && is_from_outside(entry);
        let path = self.recorded.iter().find(is_it).map_or(mount.point.as_path(), source_of);
        swapped(&mount.point, if mount.point == Path::new("/") { self.root } else { path })
    }
}

fn swapped(point: &Path, path: &Path) -> Error {
    let reason = format!(
        "was to be mounted at {} in the container, and leads to another place than at the checkpoint, to which a user \
         of the job may have led it",
        point.display()
    );
    in_the_way(path, reason).help("if it is the right one, restore with --trust-path and its path")
}

/// CRIU has followed a link of a user to where it mounts something.
fn misplaced(mount: &Mount) -> Error {
    let reason = format!(
        "has a {} of the container mounted, which had no such mount at the checkpoint: a user of the job has changed \
         the way to another one",
        mount.file_system
    );
    in_the_way(&mount.point, reason).help("put the directories in which the container has mounts back as they were")
}

/// Where it is in the container.
pub(super) fn point_of(entry: &MountEntry) -> PathBuf {
    Path::new("/").join(entry.mountpoint.trim_start_matches('.').trim_start_matches('/'))
}

/// The mounts at the checkpoint.
pub(super) fn recorded(directory: &Path) -> Result<Vec<MountEntry>> {
    let sets = images_of(directory, MOUNTS)?.into_iter().map(|path| read_all(&path, ImageKind::Mounts));
    Ok(sets.collect::<Result<Vec<_>>>()?.concat())
}

/// True if the same place was mounted at the checkpoint, or the same one below the root directory,
/// which may be another one.
fn was_there(mount: &Mount, root: &Mount, recorded: &[MountEntry]) -> bool {
    let old_root = recorded.iter().find(|entry| matches!(entry.mountpoint.as_str(), "/" | "./" | "."));
    recorded.iter().any(|entry| {
        let is_same = device_of(entry) == mount.device && Path::new(&entry.root) == mount.root;
        let is_below = || {
            let old_root = old_root.filter(|old| old.root_dev == entry.root_dev && mount.device == root.device)?;
            let old = Path::new(&entry.root).strip_prefix(&old_root.root).ok()?;
            Some(old == mount.root.strip_prefix(&root.root).ok()?)
        };
        is_same || is_below() == Some(true)
    })
}

fn is_from_outside(entry: &MountEntry) -> bool {
    entry.ext_key.as_deref() == Some(MOUNT_FROM_OUTSIDE)
}

/// The path of a mount from outside. CRIU writes more slashes than are needed.
fn source_of(entry: &MountEntry) -> &Path {
    let source = entry.source.trim_start_matches('/');
    Path::new(&entry.source[entry.source.len() - source.len() - usize::from(entry.source.starts_with('/'))..])
}

/// CRIU writes a device as the kernel keeps it.
fn device_of(entry: &MountEntry) -> u64 {
    libc::makedev(entry.root_dev >> 20, entry.root_dev & 0xf_ffff)
}

/// Which place of its file system an opened file is.
fn place_of(found: &Found, outside: &[Mount]) -> Option<Place> {
    let number = found.file.as_raw_fd();
    let path = std::fs::read_link(format!("/proc/self/fd/{number}")).ok()?;
    let info = std::io::read_to_string(File::open(format!("/proc/self/fdinfo/{number}")).ok()?).ok()?;
    let id: u32 = info.lines().find_map(|line| line.strip_prefix("mnt_id:"))?.trim().parse().ok()?;
    let mount = outside.iter().find(|mount| mount.id == id)?;
    Some((mount.device, mount.in_file_system(&path)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(device: u64, root: &str, point: &str) -> Mount {
        let (root, point) = (PathBuf::from(root), PathBuf::from(point));
        Mount { id: 1, device, root, point, file_system: "ext4".into(), options: String::new() }
    }

    fn entry(minor: u32, root: &str, mountpoint: &str) -> MountEntry {
        let (root, mountpoint) = (root.to_owned(), mountpoint.to_owned());
        MountEntry { root_dev: 8 << 20 | minor, root, mountpoint, ..MountEntry::default() }
    }

    #[test]
    fn a_mount_was_there_if_it_shows_the_same_place() {
        let device = |minor| libc::makedev(8, minor);
        let recorded = [entry(1, "/c/root", "./"), entry(1, "/c/root/var", "./srv"), entry(2, "/home/u/d", "./data")];
        let was = |found: &Mount, root: &Mount| was_there(found, root, &recorded);
        let root = mount(device(1), "/c/root", "/");
        assert!(was(&mount(device(2), "/home/u/d", "/elsewhere"), &root));
        assert!(was(&mount(device(1), "/c/root/var", "/srv"), &root));
        for (minor, place) in [(2, "/root/d"), (2, "/home/u"), (3, "/home/u/d"), (2, "/home/u/d/e"), (1, "/home/u/d")] {
            assert!(!was(&mount(device(minor), place, "/data"), &root), "{minor} {place}");
        }
        let outside = MountEntry { source: "//home/u/d".into(), ..MountEntry::default() };
        assert_eq!(source_of(&outside), Path::new("/home/u/d"));
        assert_eq!(source_of(&MountEntry::default()), Path::new(""));
        // On another root directory.
        let root = mount(device(5), "/copy", "/");
        assert!(was(&mount(device(5), "/copy/var", "/srv"), &root));
        assert!(!was(&mount(device(5), "/var", "/srv"), &root) && !was(&mount(device(6), "/copy/var", "/srv"), &root));
    }
}
