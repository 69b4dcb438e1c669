//! Mounts that a container has made itself. Where they are read-only, files that were in them are
//! made in a copy of the mount that can be written, and that nobody else sees.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, OpenHow, ResolveFlag, openat2};

use super::mounts::point_of;
use crate::criu::images::schema::MountEntry;
use crate::criu::mounted::in_mounts;

/// The mounts of a container that is restored.
pub(super) struct OwnMounts<'a> {
    /// Their namespace.
    pub mounts: &'a OwnedFd,
    /// Those of the checkpoint.
    pub recorded: Vec<MountEntry>,
}

impl OwnMounts<'_> {
    /// True if the file system at `path` in the container was made for it by the restore: nothing
    /// of it came from outside. `directory` was found by the path. If that led to another mount,
    /// through a link of the container or below a mount that hides the recorded one, it is false.
    ///
    /// # Errors
    /// Of the kernel.
    pub(super) fn has_made(&self, path: &Path, directory: BorrowedFd<'_>) -> io::Result<bool> {
        let Some(point) = self.made_at(path) else { return Ok(false) };
        let resolve = ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_MAGICLINKS;
        let how = OpenHow::new().flags(OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC).resolve(resolve);
        let mount = match in_mounts(self.mounts, || Ok(openat2(AT_FDCWD, &point, how)?)) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::ELOOP | libc::ENOENT | libc::ENOTDIR)) => {
                return Ok(false);
            }
            opened => mount_of(opened?.as_fd())?,
        };
        Ok(mount.is_root && mount.id == mount_of(directory)?.id)
    }

    /// Where the mount at `path` is, if the restore has made it.
    fn made_at(&self, path: &Path) -> Option<PathBuf> {
        let above = self.recorded.iter().filter(|entry| path.starts_with(point_of(entry)));
        // Of those at one place, the last one hides the others.
        let mount = above.max_by_key(|entry| point_of(entry).as_os_str().len())?;
        let is_from_outside = |entry: &MountEntry| entry.ext_key.is_some() || point_of(entry) == Path::new("/");
        let has_outside = self.recorded.iter().any(|entry| entry.root_dev == mount.root_dev && is_from_outside(entry));
        (!has_outside).then(|| point_of(mount))
    }

    /// The same directory in a copy of its mount that can be written.
    pub(super) fn writable(&self, directory: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        let none = c"";
        let at = libc::AT_EMPTY_PATH as libc::c_uint;
        let flags = libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC | at;
        in_mounts(self.mounts, || {
            // SAFETY: the empty path ends with a zero byte and outlives the call.
            let copy = unsafe { libc::syscall(libc::SYS_open_tree, directory.as_raw_fd(), none.as_ptr(), flags) };
            // SAFETY: the descriptor was just made and nothing else owns it.
            let copy = unsafe { OwnedFd::from_raw_fd(Errno::result(copy)? as i32) };
            let change =
                libc::mount_attr { attr_set: 0, attr_clr: libc::MOUNT_ATTR_RDONLY, propagation: 0, userns_fd: 0 };
            // SAFETY: the path and the structure, whose size is given, outlive the call.
            let changed = unsafe {
                libc::syscall(
                    libc::SYS_mount_setattr,
                    copy.as_raw_fd(),
                    none.as_ptr(),
                    at,
                    &raw const change,
                    size_of_val(&change),
                )
            };
            Errno::result(changed)?;
            Ok(copy)
        })
    }
}

/// The mount in which a file was found.
struct FoundIn {
    id: u64,
    /// The file is the root directory of the mount.
    is_root: bool,
}

fn mount_of(file: BorrowedFd<'_>) -> io::Result<FoundIn> {
    let mut found = MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: the path ends with a zero byte, and the kernel writes at most the structure.
    let status = unsafe {
        libc::statx(file.as_raw_fd(), c"".as_ptr(), libc::AT_EMPTY_PATH, libc::STATX_MNT_ID, found.as_mut_ptr())
    };
    Errno::result(status)?;
    // SAFETY: the structure is valid as zeros, and the kernel has filled it.
    let found = unsafe { found.assume_init() };
    if found.stx_mask & libc::STATX_MNT_ID == 0 {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let is_root = found.stx_attributes & libc::STATX_ATTR_MOUNT_ROOT as u64 != 0;
    Ok(FoundIn { id: found.stx_mnt_id, is_root })
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use nix::mount::{MsFlags, mount};
    use nix::sched::{CloneFlags, unshare};

    use super::*;

    fn entry(root_dev: u32, mountpoint: &str, ext_key: Option<&str>) -> MountEntry {
        let ext_key = ext_key.map(str::to_owned);
        MountEntry { root_dev, root: "/".into(), mountpoint: mountpoint.to_owned(), ext_key, ..MountEntry::default() }
    }

    #[test]
    fn mounts_of_outside_are_not_the_containers() {
        let namespace = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let recorded = vec![
            entry(1, "./", None),
            entry(2, "./own", None),
            entry(3, "./given", Some("key")),
            // A part of each, mounted once more.
            entry(2, "./own/again", None),
            entry(3, "./own/given", None),
            entry(1, "./own/root", None),
        ];
        let mounts = OwnMounts { mounts: &namespace, recorded };
        let made = |path: &str| mounts.made_at(Path::new(path)).is_some();
        assert!(made("/own/a/b") && made("/own/again/a"));
        for path in ["/a", "/owner/a", "/given/a", "/own/given/a", "/own/root/a"] {
            assert!(!made(path), "{path}");
        }
        let none = OwnMounts { mounts: &namespace, recorded: Vec::new() };
        assert!(!none.has_made(Path::new("/a"), namespace.as_fd()).unwrap());
        assert!(none.writable(namespace.as_fd()).is_err(), "the namespace is none");
    }

    #[test]
    fn a_path_that_leads_into_a_mount_of_outside_is_not_the_containers() {
        if !nix::unistd::geteuid().is_root() {
            return pagemark_testing::skipped("mounts need root");
        }
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        for name in ["own", "given", "given/hidden", "hiding/hidden"] {
            fs::create_dir_all(at(name)).unwrap();
        }
        let of = |name: &str, key| entry(if key { 3 } else { 2 }, at(name).to_str().unwrap(), key.then_some("key"));
        let recorded = [of("own", false), of("hiding/hidden", false), of("hiding", true), of("given", true)].to_vec();
        // Whether the file is found to be in a mount that the restore has made.
        let found = std::thread::scope(|scope| {
            let in_namespace = || -> io::Result<[bool; 4]> {
                unshare(CloneFlags::CLONE_FS | CloneFlags::CLONE_NEWNS)?;
                let none = None::<&str>;
                mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
                for name in ["own", "hiding/hidden"] {
                    mount(Some("tmpfs"), &at(name), Some("tmpfs"), MsFlags::empty(), none)?;
                }
                for name in ["given", "hiding"] {
                    mount(Some(&at("given")), &at(name), none, MsFlags::MS_BIND, none)?;
                    let read_only = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
                    mount(none, &at(name), none, read_only, none)?;
                }
                fs::create_dir(at("own/directory"))?;
                std::os::unix::fs::symlink(at("given"), at("own/link"))?;
                let namespace = File::open("/proc/thread-self/ns/mnt")?.into();
                let mounts = OwnMounts { mounts: &namespace, recorded };
                let has_made = |name| mounts.has_made(&at(name).join("file"), File::open(at(name))?.as_fd());
                Ok([has_made("own/directory")?, has_made("own")?, has_made("own/link")?, has_made("hiding/hidden")?])
            };
            scope.spawn(in_namespace).join().unwrap()
        });
        assert_eq!(found.unwrap(), [true, true, false, false]);
    }
}
