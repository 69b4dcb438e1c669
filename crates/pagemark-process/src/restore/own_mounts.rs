//! Mounts that a container has made itself. Where they are read-only, files that were in them are
//! made in a copy of the mount that can be written, and that nobody else sees.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;

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
    /// of it came from outside.
    pub(super) fn has_made(&self, path: &Path) -> bool {
        let above = self.recorded.iter().filter(|entry| path.starts_with(point_of(entry)));
        // Of those at one place, the last one hides the others.
        let Some(mount) = above.max_by_key(|entry| point_of(entry).as_os_str().len()) else { return false };
        let is_from_outside = |entry: &MountEntry| entry.ext_key.is_some() || point_of(entry) == Path::new("/");
        !self.recorded.iter().any(|entry| entry.root_dev == mount.root_dev && is_from_outside(entry))
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

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

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
        let made = |path: &str| mounts.has_made(Path::new(path));
        assert!(made("/own/a/b") && made("/own/again/a"));
        for path in ["/a", "/owner/a", "/given/a", "/own/given/a", "/own/root/a"] {
            assert!(!made(path), "{path}");
        }
        let none = OwnMounts { mounts: &namespace, recorded: Vec::new() };
        assert!(!none.has_made(Path::new("/a")));
        assert!(none.writable(namespace.as_fd()).is_err(), "the namespace is none");
    }
}
