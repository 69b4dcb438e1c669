//! The paths at which a job has written, created, renamed or removed something.

use std::collections::{BTreeMap, BTreeSet, btree_map};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use pagemark_linux::fanotify::Event;
use pagemark_trace::error::{ErrorKind, Object, Result};

use super::data_tree::{DataTree, Listing, Origin, TreeRecord, link_record, list_tree};
use super::directory::{Directory, Entry};
use super::list::{OpenFile, hides_mapped_writes, unix_ns};
use super::path::encode_path;
use super::users::Users;

/// Largest number of paths without a file that are kept. A program may use any number of names for
/// temporary files.
const MAX_ABSENT: usize = 10_000;

/// The paths of a job. A directory that the job made belongs to it with everything in it.
#[derive(Default, Debug)]
pub(super) struct WrittenPaths {
    paths: BTreeMap<PathBuf, State>,
    notices: Vec<String>,
    /// Paths that the users of the job may not read, of which a notice says so.
    unreadable: BTreeSet<PathBuf>,
}

#[derive(Clone, Copy, Debug)]
struct State {
    /// True if the job made the file or directory where nothing was before.
    is_made: bool,
    /// True if the job made a directory there.
    is_directory: bool,
    /// True if a process outside the job has written the file, or in the directory.
    has_other_writer: bool,
}

/// What a job has written, as it is now.
#[derive(Default, Debug)]
pub(crate) struct WrittenFiles {
    /// The regular files.
    pub files: Vec<OpenFile>,
    /// A record of each path: what is there besides regular files, or that nothing is there.
    pub trees: Vec<TreeRecord>,
}

impl WrittenPaths {
    pub fn is_empty(&self) -> bool {
        self.paths.is_empty()
    }

    /// Adds a change that the job has made at `path`.
    pub fn add(&mut self, path: PathBuf, event: &Event) {
        let is_there = event.is_created || event.is_renamed_to;
        // Other changes of a directory are changes in it, which have events of their own.
        if (event.is_directory && !is_there && !event.is_gone) || self.directory_of(&path).is_some() {
            return;
        }
        let is_made = event.is_created && !event.is_gone && !event.is_renamed_to;
        let state = State { is_made, is_directory: false, has_other_writer: false };
        let state = self.paths.entry(path).or_insert(state);
        state.is_directory |= event.is_directory && is_there;
    }

    /// Adds something that the job made.
    #[cfg(test)]
    pub fn add_made(&mut self, path: PathBuf, is_directory: bool) {
        self.paths.insert(path, State { is_made: true, is_directory, has_other_writer: false });
    }

    /// Adds a change that the process `pid` outside of the job has made at `path`.
    pub fn add_other_writer(&mut self, path: &Path, pid: i32) {
        let known = match self.directory_of(path) {
            Some(directory) => self.paths.get_mut(&directory),
            None => self.paths.get_mut(path),
        };
        if let Some(state) = known.filter(|state| !state.has_other_writer) {
            state.has_other_writer = true;
            let restored =
                if state.is_directory { "a restore changes it back" } else { "a restore leaves it as it is" };
            self.notices.push(format!(
                "{} was also written by {}, which is not checkpointed: {restored}",
                path.display(),
                Object::command(pid)
            ));
        }
    }

    pub fn take_notices(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notices)
    }

    /// The directory that the job made and that `path` is in.
    fn directory_of(&self, path: &Path) -> Option<PathBuf> {
        let is_made = |directory: &&Path| self.paths.get(*directory).is_some_and(|state| state.is_directory);
        path.ancestors().skip(1).find(is_made).map(Path::to_owned)
    }

    /// Lists what is at the paths now, but for what is in `data`, in the name of the users of the
    /// job. Forgets paths without a file if there are too many. A path that leads through a link is
    /// one without a file: the job has written elsewhere.
    pub fn list(&mut self, data: &[DataTree], users: &Users) -> Result<WrittenFiles> {
        let mut listed = WrittenFiles::default();
        let (mut absent, mut unreadable) = (Vec::new(), Vec::new());
        for (path, state) in &self.paths {
            let is_inside = data.iter().any(|tree| path.starts_with(tree.path()));
            if is_inside || self.directory_of(path).is_some() {
                continue;
            }
            let origin = if state.is_made { Origin::Made } else { Origin::Written };
            let mut record = TreeRecord { path: encode_path(path), origin, ..TreeRecord::default() };
            let seen_ns = unix_ns(SystemTime::now());
            let found = users.find(path, |actor| {
                let Some(entry) = Entry::existing(actor, path)? else { return Ok(None) };
                let Some(held) = entry.hold().map_err(super::io("examine", path))? else { return Ok(None) };
                let is_readable = !held.metadata.is_file() || held.could_read(actor);
                if is_readable { Ok(Some(held)) } else { Err(super::io("read", path)(denied())) }
            });
            match found {
                Ok(Some(held)) if held.metadata.is_dir() && state.is_directory => {
                    let Listing { files, record: mut all, unreadable: left_out } = list_tree(path, users)?;
                    all.origin = origin;
                    record = all;
                    listed.files.extend(files);
                    unreadable.extend(left_out);
                }
                Ok(Some(held)) if held.metadata.is_file() => {
                    let file = OpenFile::closed(path.clone(), &held.metadata, seen_ns, hides_mapped_writes(path));
                    listed.files.push(OpenFile { has_other_writer: state.has_other_writer, ..file });
                }
                Ok(Some(held)) if held.metadata.is_symlink() => match held.read_link() {
                    Ok(target) => record.links.push(link_record(path, &target, &held.metadata)),
                    Err(_) => continue,
                },
                // Directories that were there before, sockets, pipes and devices do not belong to it.
                Ok(Some(_)) => continue,
                Ok(None) => absent.push(path.clone()),
                Err(error) if error.kind() == ErrorKind::NotPermitted => {
                    unreadable.push(path.clone());
                    continue;
                }
                Err(error) => return Err(error),
            }
            listed.trees.push(record);
        }
        for path in unreadable {
            let notice =
                format!("{} does not belong to checkpoints: none of the job's users may read it", path.display());
            if self.unreadable.insert(path) {
                self.notices.push(notice);
            }
        }
        if absent.len() > MAX_ABSENT {
            self.paths.retain(|path, _| absent.binary_search(path).is_err());
        }
        Ok(listed)
    }

    /// Searches the directories of the paths for what changed after `since_ns`, nanoseconds since
    /// 1970 UTC, because changes were missed. Directories where all users may write, and those that
    /// the users of the job may not read, are left out. Returns the number of files found.
    pub fn search(&mut self, since_ns: i64, users: &Users) -> usize {
        let mut directories: Vec<PathBuf> =
            self.paths.keys().filter_map(|path| path.parent().map(Path::to_owned)).collect();
        directories.dedup();
        let mut found = 0;
        for directory in directories {
            if self.directory_of(&directory.join("any")).is_some() {
                continue;
            }
            let changed = users.find(&directory, |actor| {
                let failed = || super::io("list", &directory);
                let Some(open) = Directory::existing(actor, &directory)? else { return Ok(Vec::new()) };
                let is_shared = open.metadata().map_err(failed())?.mode() & libc::S_ISVTX != 0;
                let names = if is_shared { Vec::new() } else { open.names().map_err(failed())? };
                let mut changed = Vec::new();
                let all = open.hold_all(&names, |name, held| {
                    let (path, metadata) = (directory.join(name), &held.metadata);
                    let changed_ns =
                        metadata.ctime().saturating_mul(1_000_000_000).saturating_add(metadata.ctime_nsec());
                    let is_made = metadata.created().is_ok_and(|created| unix_ns(created) >= since_ns);
                    if if metadata.is_dir() { is_made } else { changed_ns >= since_ns } {
                        let state = State { is_made, is_directory: metadata.is_dir(), has_other_writer: false };
                        changed.push((path, state));
                    }
                    Ok(())
                });
                all.map_err(failed()).map(|()| changed)
            });
            for (path, state) in changed.unwrap_or_default() {
                if let btree_map::Entry::Vacant(vacant) = self.paths.entry(path) {
                    vacant.insert(state);
                    found += 1;
                }
            }
        }
        found
    }
}

fn denied() -> std::io::Error {
    std::io::ErrorKind::PermissionDenied.into()
}
