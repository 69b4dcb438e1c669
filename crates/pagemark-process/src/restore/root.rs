//! The root directory that the tree gets, and the files of a checkpoint below it.

use std::borrow::Cow;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};

use nix::unistd::geteuid;
use pagemark::Store;
use pagemark::repository::{FileRecord, Manifest};
use pagemark_trace::error::{Error, ErrorKind, Object};

use super::watches::path_of;
use crate::criu::notes::{NOTES, Notes};
use crate::files::walk::{Lost, find_directory, own_root};
use crate::files::{
    DirectoryRecord, LinkRecord, Origin, TreeRecord, UnusualFile, decode_path, encode_path, read_trees, read_users,
    unusual_files, unusual_removals,
};

/// The root directory of the tree, if it has mounts of its own: `wanted`, or else that of the
/// checkpoint. No link of a user is followed.
pub(super) fn root_of(notes: &Notes, wanted: Option<&Path>) -> Result<Option<PathBuf>, Error> {
    let Some(noted) = &notes.own_root else { return Ok(None) };
    let noted = || decode_path(noted).ok_or_else(|| Error::damaged("the path of its root directory is damaged"));
    let root = wanted.map_or_else(noted, |wanted| Ok(wanted.to_owned()))?;
    let missing = |root: PathBuf, reason: String| {
        let reason = format!("is not there, and the processes need it as their root directory: {reason}");
        Err(Error::about(ErrorKind::InTheWay, Object::File(root), reason)
            .help("mount the file system of the container there, or name another directory with --root"))
    };
    let found = match geteuid().is_root() {
        true => find_root(&root),
        // Whoever leads the path elsewhere has the rights of this process.
        false => root.canonicalize().map_err(|error| Lost::Failed(root.clone(), error)),
    };
    match found {
        Ok(root) => Ok(Some(root)),
        Err(lost @ Lost::Link(_)) => Err(lost.error(&root)),
        Err(Lost::Failed(_, error)) => missing(root, error.to_string()),
        Err(Lost::Missing(_)) => missing(root, io::Error::from_raw_os_error(libc::ENOENT).to_string()),
    }
}

/// The path of the directory that a path leads to, without links.
fn find_root(path: &Path) -> Result<PathBuf, Lost> {
    let failed = |error| Lost::Failed(path.to_owned(), error);
    let root = own_root().map_err(failed)?;
    let found = find_directory(root.as_fd(), &std::path::absolute(path).map_err(failed)?)?;
    std::fs::read_link(path_of(found.file.as_raw_fd())).map_err(failed)
}

/// The notes among the state of a checkpoint.
fn recorded_notes(manifest: &Manifest, store: &dyn Store) -> Result<Notes, Error> {
    let record = manifest.state.iter().find(|record| record.name == NOTES);
    let record = record.ok_or_else(|| Error::damaged(format!("its state lacks {NOTES}")))?;
    parse_notes(&record.content.read_all(store)?)
}

/// A root directory that takes the place of that of the checkpoint.
struct NewRoot<'a> {
    noted: PathBuf,
    wanted: &'a Path,
}

impl<'a> NewRoot<'a> {
    /// None if the tree has no root directory of its own, or gets the one that it had.
    fn of(notes: &Notes, wanted: Option<&'a Path>) -> Option<NewRoot<'a>> {
        let noted = decode_path(notes.own_root.as_deref()?)?;
        wanted.filter(|wanted| **wanted != noted).map(|wanted| NewRoot { noted, wanted })
    }

    /// The new path of what had this path, both as [`encode_path`] writes them.
    fn path_of(&self, path: &str) -> String {
        let below = decode_path(path).and_then(|path| Some(path.strip_prefix(&self.noted).ok()?.to_owned()));
        below.map_or_else(|| path.to_owned(), |below| encode_path(&self.wanted.join(below)))
    }
}

/// The files and the trees of a checkpoint, under the paths that they have below the root directory
/// that the tree of processes gets.
pub(super) fn files_below<'a>(
    manifest: &'a Manifest,
    store: &dyn Store,
    root: Option<&Path>,
) -> Result<(Cow<'a, [FileRecord]>, Vec<TreeRecord>), Error> {
    let trees = read_trees(manifest, store)?;
    let new_root = match root {
        Some(_) => NewRoot::of(&recorded_notes(manifest, store)?, root),
        None => None,
    };
    let Some(new_root) = new_root else { return Ok((Cow::Borrowed(&manifest.files), trees)) };
    let file = |record: &FileRecord| FileRecord { path: new_root.path_of(&record.path), ..record.clone() };
    let directory = |record: DirectoryRecord| DirectoryRecord { path: new_root.path_of(&record.path), ..record };
    let link = |record: LinkRecord| LinkRecord { path: new_root.path_of(&record.path), ..record };
    let trees = trees.into_iter().map(|tree| TreeRecord {
        path: new_root.path_of(&tree.path),
        directories: tree.directories.into_iter().map(directory).collect(),
        links: tree.links.into_iter().map(link).collect(),
        ..tree
    });
    Ok((manifest.files.iter().map(file).collect(), trees.collect()))
}

/// The files that a restore of the checkpoint would change and that are unusual. With
/// `working_directories_count` false, every file is outside the job's own directories.
pub(super) fn unusual_files_of(
    manifest: &Manifest,
    store: &dyn Store,
    root: Option<&Path>,
    working_directories_count: bool,
) -> Result<Vec<UnusualFile>, Error> {
    let mut directories = Vec::new();
    let (files, trees) = files_below(manifest, store, root)?;
    if working_directories_count {
        let notes = recorded_notes(manifest, store)?;
        let new_root = NewRoot::of(&notes, root);
        let here = |text: &String| new_root.as_ref().map_or_else(|| text.clone(), |root| root.path_of(text));
        directories.extend(notes.working_directories.iter().filter_map(|text| decode_path(&here(text))));
        // The user named these as the job's own when the checkpoint was taken.
        let named = trees.iter().filter(|tree| tree.origin == Origin::Named);
        directories.extend(named.filter_map(|tree| decode_path(&tree.path)));
    }
    let mut unusual = unusual_files(&files, &directories, store)?;
    let users = read_users(manifest, store)?;
    unusual.extend(unusual_removals(&trees, &directories, &files, &users.with_root())?);
    Ok(unusual)
}

fn parse_notes(text: &[u8]) -> Result<Notes, Error> {
    serde_json::from_slice(text)
        .map_err(|error| Error::damaged(format!("its state file {NOTES} is not as written: {error}")))
}

pub(super) fn read_notes(directory: &Path) -> Result<Notes, Error> {
    let path = directory.join(NOTES);
    let text = std::fs::read(&path).map_err(|error| Error::damaged(format!("its state lacks {NOTES} ({error})")))?;
    parse_notes(&text)
}
