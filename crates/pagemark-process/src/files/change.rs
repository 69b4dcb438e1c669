//! The changes that putting files back makes, with what is needed to undo them.

use std::fs::{self, File, FileTimes, Metadata, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown, lchown, symlink};
use std::path::{Path, PathBuf};

use super::copy::{copy, rewrite};
use super::directory::{Entry, UnsyncedDirectories};
use super::writers::{Inode, inode};
use crate::error::{Error, ErrorKind, Object, Result};

/// A change of a file, a directory or a symbolic link.
#[derive(Debug)]
pub(super) struct Change {
    /// Its path.
    pub path: PathBuf,
    /// What was changed.
    pub kind: ChangeKind,
}

/// What was changed. `before` are the previous attributes.
#[derive(Debug)]
pub(super) enum ChangeKind {
    /// The file has other attributes.
    FileAttributes { before: Metadata },
    /// The file has other content and attributes; its previous content is in `copy`.
    Content { copy: PathBuf, before: Metadata },
    /// The file is new.
    CreatedFile { inode: Inode },
    /// The directory is new.
    CreatedDirectory,
    /// The symbolic link is new.
    CreatedLink { inode: Inode },
    /// The directory has other attributes.
    DirectoryAttributes { before: Metadata },
    /// The file was removed; it is still there as `kept`.
    RemovedFile { kept: PathBuf, before: Metadata },
    /// The symbolic link to `target` was removed.
    RemovedLink { target: PathBuf, before: Metadata },
    /// The empty directory was removed.
    RemovedDirectory { before: Metadata },
}

impl Change {
    /// Undoes the change. What another program has put in the place of a file is left alone.
    /// Directories whose entries change are added to `unsynced`.
    ///
    /// # Errors
    /// [`ErrorKind::NotUndone`]. `aside` is the directory with the previous content.
    pub fn undo(self, aside: &Path, unsynced: &mut UnsyncedDirectories) -> Result<()> {
        let Change { path, kind } = self;
        let undone = Entry::of(&path).map_err(io::Error::other).and_then(|entry| {
            undo(&entry, kind)?;
            unsynced.add(entry.directory());
            Ok(())
        });
        undone.map_err(|source| {
            Error::of(ErrorKind::NotUndone, "change back", Object::File(path), source)
                .help(format!("the previous content is in {}", aside.display()))
        })
    }
}

fn undo(entry: &Entry, kind: ChangeKind) -> io::Result<()> {
    let at = entry.path();
    match kind {
        ChangeKind::FileAttributes { before } => {
            let file = entry.open_same(inode(&before), false)?;
            set_file_attributes(&file, before.uid(), before.gid(), before.mode())
        }
        ChangeKind::Content { copy, before } => {
            let file = entry.open_same(inode(&before), true)?;
            rewrite(&File::open(copy)?, &file)?;
            set_file_attributes(&file, before.uid(), before.gid(), before.mode())?;
            file.set_times(FileTimes::new().set_modified(before.modified()?))?;
            file.sync_all()
        }
        ChangeKind::CreatedFile { inode } | ChangeKind::CreatedLink { inode } => match entry.is(inode)? {
            true => fs::remove_file(at),
            false => Ok(()),
        },
        ChangeKind::CreatedDirectory => match fs::remove_dir(at) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
            removed => removed,
        },
        ChangeKind::DirectoryAttributes { before } => {
            entry.check_same(inode(&before))?;
            set_attributes(&at, before.uid(), before.gid(), before.mode())
        }
        ChangeKind::RemovedFile { kept, before } => {
            if fs::hard_link(&kept, &at).is_err() {
                let file = File::create_new(&at)?;
                copy(&File::open(&kept)?, &file)?;
                file.set_times(FileTimes::new().set_modified(before.modified()?))?;
                file.sync_all()?;
            }
            set_attributes(&at, before.uid(), before.gid(), before.mode())
        }
        ChangeKind::RemovedLink { target, before } => {
            symlink(target, &at)?;
            lchown(&at, Some(before.uid()), Some(before.gid()))
        }
        ChangeKind::RemovedDirectory { before } => {
            fs::create_dir(&at)?;
            set_attributes(&at, before.uid(), before.gid(), before.mode())
        }
    }
}

/// Sets owner and mode of an open file.
pub(super) fn set_file_attributes(file: &File, uid: u32, gid: u32, mode: u32) -> io::Result<()> {
    let held = file.metadata()?;
    // Without privilege a user may set the mode of own files, but not their owner, even to the same
    // user.
    if (held.uid(), held.gid()) != (uid, gid) {
        fchown(file, Some(uid), Some(gid))?;
    }
    file.set_permissions(Permissions::from_mode(mode & 0o7777))
}

/// Sets owner and mode of what has a path. A directory cannot be opened for that: its mode may
/// forbid to read it.
pub(super) fn set_attributes(path: impl AsRef<Path>, uid: u32, gid: u32, mode: u32) -> io::Result<()> {
    let path = path.as_ref();
    let held = fs::symlink_metadata(path)?;
    if (held.uid(), held.gid()) != (uid, gid) {
        lchown(path, Some(uid), Some(gid))?;
    }
    fs::set_permissions(path, Permissions::from_mode(mode & 0o7777))
}
