//! Directories that belong to a job whole: every file in them, open or closed.
//!
//! A program such as PostgreSQL closes files between their uses, and creates, renames and removes
//! them. A checkpoint of its open files alone would be restored among files from the program's
//! future. The directories, regular files and symbolic links of a [`DataTree`] are therefore listed
//! at each checkpoint. A file counts as unchanged if its times and its size are; the content of the
//! others is read by the [`FileTracker`](super::FileTracker). A restore makes the directory as it
//! was.
//!
//! The tree ends at other file systems that are mounted in it, and symbolic links are not followed.
//! Sockets, pipes and devices do not belong to it.

use std::collections::HashMap;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use pagemark::repository::{Manifest, StateRecord};
use pagemark::{Blob, Store};
use pagemark_trace::error::{Error, ErrorKind, Object, Result};
use serde::{Deserialize, Serialize};

use super::directory::Directory;
use super::list::{OpenFile, hides_mapped_writes, unix_ns};
use super::path::encode_path;
use super::users::{Actor, Users};

/// Name of the record of the trees among the files of a checkpoint's state.
pub const TREES: &str = "pagemark-trees.json";

/// A directory that belongs to a job, with everything in it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DataTree {
    path: PathBuf,
}

/// Why a tree belongs to the job.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// Its user named it.
    #[default]
    Named,
    /// The job made it: there was nothing at its path before.
    Made,
    /// The job wrote, renamed or removed what was at its path.
    Written,
}

/// A tree as it was at a checkpoint, but for its regular files, which are among the files of the
/// checkpoint. A path at which the job has written is a tree, too: that of a single file or link,
/// or of nothing.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct TreeRecord {
    /// Absolute path of the tree, escaped as by [`encode_path`].
    pub path: String,
    /// Why it belongs to the job.
    #[serde(default)]
    pub origin: Origin,
    /// The directories, each after the one that it is in. The first is the tree itself, if it is a
    /// directory.
    pub directories: Vec<DirectoryRecord>,
    /// The symbolic links.
    pub links: Vec<LinkRecord>,
}

/// A directory of a tree.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DirectoryRecord {
    /// Absolute path, escaped.
    pub path: String,
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// A symbolic link of a tree.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LinkRecord {
    /// Absolute path, escaped.
    pub path: String,
    /// What it leads to, escaped.
    pub target: String,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// What is in a tree now.
#[derive(Default, Debug)]
pub(super) struct Listing {
    pub files: Vec<OpenFile>,
    pub record: TreeRecord,
    /// What none of the job's users may read. It is not listed otherwise.
    pub unreadable: Vec<PathBuf>,
}

impl DataTree {
    /// The tree at `path`, which must be a directory.
    ///
    /// # Errors
    /// [`ErrorKind::System`]: the directory cannot be found. [`ErrorKind::BadPath`]: it is none.
    pub fn new(path: &Path) -> Result<DataTree> {
        let path = path.canonicalize().map_err(super::io("find the directory", path))?;
        if !path.is_dir() {
            return Err(Error::about(ErrorKind::BadPath, Object::File(path), "is no directory"));
        }
        Ok(DataTree { path })
    }

    /// Its absolute path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Lists the tree: `open`, with the closed files of the tree, and the rest of the tree.
    ///
    /// # Errors
    /// [`ErrorKind::NotPermitted`]: something in it is readable for none of the users of the job.
    pub(crate) fn list_with(&self, open: Vec<OpenFile>, users: &Users) -> Result<(Vec<OpenFile>, TreeRecord)> {
        let Listing { files, record, unreadable } = list_tree(&self.path, users)?;
        if let Some(path) = unreadable.into_iter().next() {
            let reason = "is in a directory that belongs to the job, and none of the job's users may read it";
            return Err(Error::about(ErrorKind::NotPermitted, Object::File(path), reason)
                .help("give that user the permission, or move it out of the directory"));
        }
        Ok((with_closed(open, files), record))
    }
}

/// Lists the tree at `root`, in the name of its users. A running program may change it meanwhile:
/// what is gone is left out.
pub(super) fn list_tree(root: &Path, users: &Users) -> Result<Listing> {
    let mut listing = Listing::default();
    listing.record.path = encode_path(root);
    let device = users.find(root, |actor| {
        let directory = Directory::existing(actor, root)?;
        directory.map(|directory| directory.metadata()).transpose().map_err(super::io("examine", root))
    })?;
    let Some(device) = device.map(|root| root.dev()) else {
        return Err(super::io("examine", root)(io::ErrorKind::NotFound.into()));
    };
    let hides_writes = hides_mapped_writes(root);
    let mut directories = vec![root.to_owned()];
    while let Some(path) = directories.pop() {
        let found = users.find(&path, |actor| list_directory(actor, &path, device, hides_writes));
        match found {
            Ok(Some(found)) => {
                listing.record.directories.push(found.record);
                listing.files.extend(found.files);
                listing.record.links.extend(found.links);
                listing.unreadable.extend(found.unreadable);
                directories.extend(found.directories);
            }
            Ok(None) => {}
            Err(error) if error.kind() == ErrorKind::NotPermitted => listing.unreadable.push(path),
            Err(error) => return Err(error),
        }
    }
    // A directory comes before those in it, whatever the order of the walk.
    listing.record.directories.sort_by(|a, b| a.path.cmp(&b.path));
    listing.record.links.sort_by(|a, b| a.path.cmp(&b.path));
    listing.files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(listing)
}

/// What is in one directory.
struct Found {
    record: DirectoryRecord,
    directories: Vec<PathBuf>,
    files: Vec<OpenFile>,
    links: Vec<LinkRecord>,
    unreadable: Vec<PathBuf>,
}

/// Lists a directory. None if it is gone.
fn list_directory(actor: &Actor, path: &Path, device: u64, hides_writes: bool) -> Result<Option<Found>> {
    let failed = || super::io("list", path);
    let Some(directory) = Directory::existing(actor, path)? else { return Ok(None) };
    let metadata = directory.metadata().map_err(failed())?;
    let (mode, uid, gid) = (metadata.mode() & 0o7777, metadata.uid(), metadata.gid());
    let record = DirectoryRecord { path: encode_path(path), mode, uid, gid };
    let mut found =
        Found { record, directories: Vec::new(), files: Vec::new(), links: Vec::new(), unreadable: Vec::new() };
    let Some(names) = unless_gone(directory.names()).map_err(failed())? else { return Ok(Some(found)) };
    let all = directory.hold_all(&names, |name, held| {
        let path = path.join(name);
        let seen_ns = unix_ns(SystemTime::now());
        let metadata = &held.metadata;
        if metadata.dev() != device {
        } else if metadata.is_dir() {
            found.directories.push(path);
        } else if metadata.is_file() && !held.could_read(actor) {
            found.unreadable.push(path);
        } else if metadata.is_file() {
            found.files.push(OpenFile::closed(path, metadata, seen_ns, hides_writes));
        } else if metadata.is_symlink() {
            found.links.push(link_record(&path, &held.read_link()?, metadata));
        }
        Ok(())
    });
    all.map_err(failed())?;
    Ok(Some(found))
}

/// The record of a symbolic link.
pub(super) fn link_record(path: &Path, target: &Path, metadata: &Metadata) -> LinkRecord {
    let (path, target) = (encode_path(path), encode_path(target));
    LinkRecord { path, target, uid: metadata.uid(), gid: metadata.gid() }
}

fn unless_gone<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Adds the closed files of `listed` to the open files `open`. A file that is open is one of those,
/// under each of its names.
pub(crate) fn with_closed(open: Vec<OpenFile>, listed: Vec<OpenFile>) -> Vec<OpenFile> {
    let by_inode: HashMap<_, _> = open.iter().map(|file| ((file.dev, file.inode), file.clone())).collect();
    let mut files: Vec<OpenFile> = listed
        .into_iter()
        .map(|file| match by_inode.get(&(file.dev, file.inode)) {
            Some(open) => OpenFile { path: file.path, ..open.clone() },
            None => file,
        })
        .collect();
    let names: std::collections::HashSet<PathBuf> = files.iter().map(|file| file.path.clone()).collect();
    files.extend(open.into_iter().filter(|file| !names.contains(&file.path)));
    files.sort_by(|a, b| a.path.cmp(&b.path));
    files
}

/// Stores the trees of a checkpoint.
pub(crate) fn record(trees: &[TreeRecord], store: &mut dyn Store) -> Result<StateRecord> {
    let failed = |source| Error::of(ErrorKind::Store, "store the list of the directories", Object::None, source);
    let text = serde_json::to_vec(trees).map_err(io::Error::from).map_err(super::io("describe", TREES))?;
    let content = Blob::write(store, &mut &text[..]).map_err(failed)?;
    Ok(StateRecord { name: TREES.into(), content })
}

/// The trees of a checkpoint; none if it has no record of them.
pub(crate) fn read(manifest: &Manifest, store: &dyn Store) -> Result<Vec<TreeRecord>> {
    let Some(record) = manifest.state.iter().find(|state| state.name == TREES) else { return Ok(Vec::new()) };
    let failed = |source| Error::of(ErrorKind::Store, "read the list of the directories", Object::None, source);
    let text = record.content.read_all(store).map_err(failed)?;
    serde_json::from_slice(&text).map_err(|error| {
        Error::about(ErrorKind::Damaged, Object::Recorded(TREES.into()), format!("is not as it was written: {error}"))
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_tree_is_listed_with_each_kind_of_entry() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().canonicalize().unwrap().join(name);
        fs::create_dir_all(at("a/b")).unwrap();
        fs::write(at("a/b/file"), b"content").unwrap();
        fs::write(at("zero"), b"").unwrap();
        symlink("a/b/file", at("link")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        let root = DataTree::new(directory.path()).unwrap();
        let listing = list_tree(root.path(), &Users::this_process()).unwrap();
        let names = |paths: Vec<&String>| {
            paths.iter().map(|path| path.rsplit('/').next().unwrap().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(
            names(listing.record.directories.iter().map(|directory| &directory.path).collect())[1..],
            ["a", "b"]
        );
        assert_eq!(listing.record.links.iter().map(|link| link.target.as_str()).collect::<Vec<_>>(), ["a/b/file"]);
        let files: Vec<_> = listing.files.iter().map(|file| (file.path.clone(), file.size)).collect();
        assert_eq!(files, [(at("a/b/file"), 7), (at("zero"), 0)]);
        assert_eq!(DataTree::new(&at("zero")).unwrap_err().kind(), ErrorKind::BadPath);
        assert!(DataTree::new(&at("none")).is_err());
    }
}
