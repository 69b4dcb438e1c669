//! The changes that putting files back makes, with what is needed to undo them.

use std::fs::{FileTimes, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use pagemark_trace::error::{Error, ErrorKind, Object, Result};

use super::asides::AsideDirectory;
use super::copy::{copy, rewrite};
use super::directory::{Entry, UnsyncedDirectories, set_attributes};
use super::users::Actor;
use super::writers::{Inode, inode};

/// A change of a file, a directory or a symbolic link.
#[derive(Debug)]
pub(super) struct Change {
    /// Its path.
    pub path: PathBuf,
    /// In whose name it was changed.
    pub actor: Actor,
    /// What was changed.
    pub kind: ChangeKind,
}

/// What was changed. `before` are the previous attributes.
#[derive(Debug)]
pub(super) enum ChangeKind {
    /// The file has other attributes.
    FileAttributes { before: Metadata },
    /// The file has other content and attributes; its previous content is in `copy`.
    Content { copy: String, before: Metadata },
    /// The file is new.
    CreatedFile { inode: Inode },
    /// The directory is new.
    CreatedDirectory,
    /// The symbolic link is new.
    CreatedLink { inode: Inode },
    /// The directory has other attributes.
    DirectoryAttributes { before: Metadata },
    /// The file was removed from the directory `parent`; it is still there as `kept`.
    RemovedFile { kept: String, parent: Inode, before: Metadata },
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
    /// [`ErrorKind::NotUndone`]. `aside` has the previous content.
    pub fn undo(self, aside: &AsideDirectory, unsynced: &mut UnsyncedDirectories) -> Result<()> {
        let Change { path, actor, kind } = self;
        let undone = Entry::of(&actor, &path).map_err(io::Error::other).and_then(|entry| {
            undo(&entry, kind, aside)?;
            unsynced.add(entry.directory());
            Ok(())
        });
        undone.map_err(|source| {
            Error::of(ErrorKind::NotUndone, "change back", Object::File(path), source)
                .help(format!("the previous content is in {}", aside.path().display()))
        })
    }
}

fn undo(entry: &Entry, kind: ChangeKind, aside: &AsideDirectory) -> io::Result<()> {
    let actor = entry.directory().actor();
    match kind {
        ChangeKind::FileAttributes { before } | ChangeKind::DirectoryAttributes { before } => {
            entry.set_attributes(inode(&before), before.uid(), before.gid(), before.mode())
        }
        ChangeKind::Content { copy, before } => {
            let file = entry.open_same(inode(&before), true)?;
            rewrite(&aside.open(&copy)?, &file)?;
            set_attributes(actor, &file, before.uid(), before.gid(), before.mode())?;
            if actor.owns(before.uid()) {
                file.set_times(FileTimes::new().set_modified(before.modified()?))?;
            }
            file.sync_all()
        }
        ChangeKind::CreatedFile { inode } | ChangeKind::CreatedLink { inode } => match entry.is(inode)? {
            true => entry.remove(inode),
            false => Ok(()),
        },
        ChangeKind::CreatedDirectory => match entry.remove_directory() {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
            removed => removed,
        },
        ChangeKind::RemovedFile { kept, parent, before } => {
            let held = aside.hold(&kept)?;
            if entry.link_again(&held, parent).is_ok() {
                return held.set_attributes(&Actor::This, before.uid(), before.gid(), before.mode());
            }
            // Content of one user must not become another user's.
            if !actor.owns(before.uid()) {
                return Err(io::ErrorKind::PermissionDenied.into());
            }
            let file = entry.create()?;
            copy(&aside.open(&kept)?, &file)?;
            file.set_times(FileTimes::new().set_modified(before.modified()?))?;
            set_attributes(actor, &file, before.uid(), before.gid(), before.mode())?;
            file.sync_all()
        }
        ChangeKind::RemovedLink { target, before } => entry.make_link(&target, before.uid(), before.gid()).map(drop),
        ChangeKind::RemovedDirectory { before } => entry.make_directory(before.uid(), before.gid(), before.mode()),
    }
}
