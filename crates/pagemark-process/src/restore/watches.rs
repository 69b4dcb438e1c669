//! What processes watch by inotify and fanotify. CRIU finds it by its path, with root's rights, and
//! follows links: the user of a process could so watch a directory of root's. What only root can
//! have changed is left to CRIU. Everything else is looked up as an open file is, must be readable
//! for the users of the processes, and CRIU finds it by a descriptor of this process.

use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

use pagemark_linux::access::Access;
use pagemark_trace::error::Result;

use super::holders::{Holder, Holders};
use super::opened::check;
use crate::criu::images::schema::{
    FanotifyFileEntry, FanotifyInodeEntry, FanotifyMarkEntry, FileEntry, FileHandleEntry, InotifyFileEntry,
    InotifyWatchEntry,
};
use crate::criu::images::{bytes_of, with_bytes, with_each};
use crate::files::walk::{Found, Lost, find};

/// The file system and the inode of a file, as CRIU has them.
pub(super) type Inode = (u32, u64);

/// Gives the path by which CRIU finds a watched file for those who watch it, if it is to be another
/// one: from the file, the path that CRIU has of it, and the watchers.
pub(super) type PathOf<'a> = dyn FnMut(Inode, Option<&Path>, &[Holder]) -> Result<Option<String>> + 'a;

/// The message of an open file with other paths of what it watches, or None if it stays.
///
/// # Errors
/// What `path_of` gives.
pub(super) fn changed(
    message: &[u8],
    entry: &FileEntry,
    holders: &Holders,
    path_of: &mut PathOf<'_>,
) -> Result<Option<Vec<u8>>> {
    let by: Vec<Holder> = holders.of(entry.id).iter().map(|holder| Holder { access: READ, ..*holder }).collect();
    let of_inotify = entry.ify.iter().flat_map(|inotify| &inotify.wd);
    let of_inotify = of_inotify.map(|watch| Some(((watch.s_dev, watch.i_ino), &watch.f_handle)));
    let of_fanotify = entry.ffy.iter().flat_map(|group| &group.mark);
    let of_fanotify = of_fanotify.map(|mark| mark.ie.as_ref().map(|file| ((mark.s_dev, file.i_ino), &file.f_handle)));
    let mut paths = Vec::new();
    for watched in of_inotify.chain(of_fanotify) {
        paths.push(match watched {
            Some((inode, handle)) => path_of(inode, handle.path.as_ref().map(Path::new), &by)?,
            None => None,
        });
    }
    if paths.iter().all(Option::is_none) {
        return Ok(None);
    }
    let mut paths = paths.into_iter();
    let mut next = || paths.next().flatten();
    let handle = |handle: &[u8], path: &str| with_bytes(handle, FileHandleEntry::PATH, path.as_bytes());
    let message = with_each(message, FileEntry::IFY, |inotify| {
        Some(vec![with_each(inotify, InotifyFileEntry::WD, |watch| {
            let path = next()?;
            let changed = handle(bytes_of(watch, InotifyWatchEntry::F_HANDLE)?, &path);
            Some(vec![with_bytes(watch, InotifyWatchEntry::F_HANDLE, &changed)])
        })])
    });
    Ok(Some(with_each(&message, FileEntry::FFY, |group| {
        Some(vec![with_each(group, FanotifyFileEntry::MARK, |mark| {
            let path = next()?;
            let file = bytes_of(mark, FanotifyMarkEntry::IE)?;
            let changed = handle(bytes_of(file, FanotifyInodeEntry::F_HANDLE)?, &path);
            let changed = with_bytes(file, FanotifyInodeEntry::F_HANDLE, &changed);
            Some(vec![with_bytes(mark, FanotifyMarkEntry::IE, &changed)])
        })])
    })))
}

/// Finds a file that is watched by its path, below `root`.
///
/// # Errors
/// The file is gone, is behind a link, or is not readable for the users of the processes, unless
/// its path is one of `trusted`.
pub(super) fn look_up(
    root: &OwnedFd,
    path: &Path,
    by: &[Holder],
    holders: &Holders,
    trusted: &[PathBuf],
) -> Result<Found> {
    let found = find(root.as_fd(), path).map_err(|lost| lost.error(path))?;
    if found.stat.st_mode & libc::S_IFMT == libc::S_IFLNK {
        return Err(Lost::Link(path.to_owned()).error(path));
    }
    if !found.is_roots_choice() && !trusted.iter().any(|trusted| trusted == path) {
        check(&found, path, by, holders)?;
    }
    Ok(found)
}

/// A watch needs the right to read.
const READ: Access = Access { reads: true, writes: false, executes: false };

/// The path of a descriptor of this process, for others.
pub(super) fn path_of(descriptor: RawFd) -> String {
    format!("/proc/{}/fd/{descriptor}", std::process::id())
}
