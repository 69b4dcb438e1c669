//! Files that a restore changes only with its user's consent: set-uid files, and files outside the
//! job's own directories.
//!
//! A restore by root can write any file of the machine. Which files it writes is in the checkpoint,
//! and a user who restores "the simulation" may not expect `/etc/crontab` among them.

use std::collections::HashSet;
use std::fmt;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use pagemark::Store;
use pagemark::repository::FileRecord;
use pagemark_trace::error::Result;

use super::data_tree::{Origin, TreeRecord};
use super::decode_path;
use super::directory::Entry;
use super::put_back_tree::TreePlan;
use super::users::{Actor, Users};
use super::writers::is_own_output;

/// A file that a restore would change, and should not change without consent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnusualFile {
    /// Its path.
    pub path: PathBuf,
    /// Why it is unusual.
    pub reason: UnusualReason,
}

/// Why a restore asks before it changes a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UnusualReason {
    /// Programs that execute the file get the rights of its owner or group.
    SetId {
        /// Its permission bits.
        mode: u32,
        /// Its owner.
        uid: u32,
        /// Its group.
        gid: u32,
    },
    /// The file is in none of the directories in which the processes worked.
    OutsideOwnDirectories,
}

impl fmt::Display for UnusualFile {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: ", self.path.display())?;
        match self.reason {
            UnusualReason::SetId { mode, uid, gid } => {
                write!(formatter, "set-uid or set-gid (mode {mode:04o}) of user {uid} and group {gid}")
            }
            UnusualReason::OutsideOwnDirectories => formatter.write_str("outside the job's own directories"),
        }
    }
}

/// Directories of the whole system: a job that works in one of them, or below, does not own it.
const SYSTEM_DIRECTORIES: [&str; 9] = ["/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/sbin", "/sys", "/usr"];

/// True if a job that works in this directory owns the files in and below it.
fn is_own(directory: &Path) -> bool {
    directory.is_absolute()
        && directory != Path::new("/")
        && !SYSTEM_DIRECTORIES.iter().any(|system| directory.starts_with(system))
}

/// The files among `records` that a restore would change and that are unusual.
/// `working_directories` are those of the processes at the checkpoint.
///
/// # Errors
/// [`ErrorKind::Store`](crate::ErrorKind::Store): the content of a file could not be read.
/// [`ErrorKind::System`](crate::ErrorKind::System): the present file could not be read.
pub fn unusual_files(
    records: &[FileRecord],
    working_directories: &[PathBuf],
    store: &dyn Store,
) -> Result<Vec<UnusualFile>> {
    let own: Vec<&PathBuf> = working_directories.iter().filter(|directory| is_own(directory)).collect();
    let mut unusual = Vec::new();
    for record in records {
        // A path that is not of the form is refused when the files are put back.
        let Some(path) = decode_path(&record.path) else { continue };
        let FileRecord { mode, uid, gid, .. } = *record;
        let reason = if mode & (libc::S_ISUID | libc::S_ISGID) != 0 {
            UnusualReason::SetId { mode: mode & 0o7777, uid, gid }
        } else if own.iter().any(|directory| path.starts_with(directory)) {
            continue;
        } else {
            UnusualReason::OutsideOwnDirectories
        };
        if !is_unchanged(&path, record, store)? {
            unusual.push(UnusualFile { path, reason });
        }
    }
    Ok(unusual)
}

/// What a restore would remove outside of the working directories, in trees that nobody named.
///
/// # Errors
/// What is there now cannot be listed, or the users of the job may not remove it.
pub(crate) fn unusual_removals(
    trees: &[TreeRecord],
    working_directories: &[PathBuf],
    files: &[FileRecord],
    users: &Users,
) -> Result<Vec<UnusualFile>> {
    let own: Vec<&PathBuf> = working_directories.iter().filter(|directory| is_own(directory)).collect();
    let files: HashSet<PathBuf> = files.iter().filter_map(|record| decode_path(&record.path)).collect();
    let named = trees.iter().filter(|tree| tree.origin == Origin::Named);
    let named: Vec<PathBuf> = named.filter_map(|tree| decode_path(&tree.path)).collect();
    let plan = TreePlan::new(trees, &files, users)?;
    let is_outside = |path: &&PathBuf| !own.iter().copied().chain(&named).any(|directory| path.starts_with(directory));
    let removed = plan.removed().filter(is_outside);
    let reason = UnusualReason::OutsideOwnDirectories;
    Ok(removed.map(|path| UnusualFile { path: path.clone(), reason }).collect())
}

/// True if the present file is as in the checkpoint, so that a restore does not touch it.
fn is_unchanged(path: &Path, record: &FileRecord, store: &dyn Store) -> Result<bool> {
    let Some(file) = open_regular(path) else { return Ok(false) };
    let metadata = file.metadata().map_err(super::io("look at", path))?;
    if record.is_shared || is_own_output(&metadata) {
        return Ok(true);
    }
    if (metadata.mode() & 0o7777, metadata.uid(), metadata.gid()) != (record.mode & 0o7777, record.uid, record.gid) {
        return Ok(false);
    }
    let content = record.content.reader(store).map_err(super::store(path))?;
    content.is_content_of(&file).map_err(super::content("read", path))
}

/// The present file. None if it is missing, cannot be read, is no regular file, or is behind a
/// link: then it is not as in the checkpoint.
fn open_regular(path: &Path) -> Option<File> {
    Entry::existing(&Actor::This, path).ok().flatten()?.open(false).ok()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use pagemark::{Blob, MemoryStore};

    use super::super::encode_path;
    use super::*;

    fn record(path: &Path, content: &[u8], mode: u32, store: &mut MemoryStore) -> FileRecord {
        let blob = Blob::write(store, &mut &*content).unwrap();
        let json = serde_json::json!({
            "path": encode_path(path), "size": 0, "root": "00000000000000000000000000000000", "mode": mode,
            "uid": nix::unistd::geteuid().as_raw(), "gid": nix::unistd::getegid().as_raw(), "modified_unix_ns": 0,
        });
        FileRecord { content: blob, ..serde_json::from_value(json).unwrap() }
    }

    #[test]
    fn only_files_in_working_directories_need_no_consent() {
        let mut store = MemoryStore::new();
        let mut reasons = |path: &str, mode: u32, directories: &[&str]| {
            let record = record(Path::new(path), b"then", mode, &mut store);
            let directories: Vec<PathBuf> = directories.iter().map(PathBuf::from).collect();
            let unusual = unusual_files(&[record], &directories, &store).unwrap();
            unusual.into_iter().map(|file| file.reason).collect::<Vec<_>>()
        };
        let outside = [UnusualReason::OutsideOwnDirectories];
        assert_eq!(reasons("/nonexistent/a/b/file", 0o600, &["/tmp", "/nonexistent/a"]), []);
        assert_eq!(reasons("/nonexistent/ab/file", 0o600, &["/nonexistent/a"]), outside);
        assert_eq!(reasons("/nonexistent/file", 0o600, &[]), outside);
        // A service works in /: nothing is its own for that.
        assert_eq!(reasons("/nonexistent/file", 0o600, &["/"]), outside);
        assert_eq!(reasons("/etc/pagemark-nonexistent/file", 0o600, &["/etc", "/etc/pagemark-nonexistent"]), outside);
        assert_eq!(reasons("/nonexistent/file", 0o600, &["nonexistent", ""]), outside);
        for mode in [0o4755, 0o2755, 0o6755] {
            assert!(matches!(
                reasons("/nonexistent/a/file", mode, &["/nonexistent/a"])[..],
                [UnusualReason::SetId { mode: found, .. }] if found == mode
            ));
        }
    }

    #[test]
    fn a_file_that_does_not_change_needs_no_consent() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let mut store = MemoryStore::new();
        fs::write(&path, b"then").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        let then = [record(&path, b"then", 0o640, &mut store)];
        let count = || unusual_files(&then, &[], &store).unwrap().len();
        assert_eq!(count(), 0);
        fs::write(&path, b"now").unwrap();
        assert_eq!(count(), 1);
        fs::write(&path, b"then").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(count(), 1);
        fs::rename(&path, directory.path().join("target")).unwrap();
        std::os::unix::fs::symlink("target", &path).unwrap();
        assert_eq!(count(), 1, "a link was followed");
        fs::remove_file(&path).unwrap();
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(count(), 1);
    }
}
