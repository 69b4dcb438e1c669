//! Checkpoints on disk: immutable pack files and one small commit record each. See `docs/repository.md`.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let directory = tempfile::tempdir()?;
//! # let path = directory.path().join("repository");
//! use std::time::Duration;
//! use pagemark::repository::{Manifest, Repository, SpaceRecord};
//! use pagemark::{Kind, PAGE_SIZE, PageTree, Store};
//!
//! let repository = Repository::create(&path)?;
//! let mut writer = repository.writer("the example", Duration::from_secs(1))?;
//! let mut tree = PageTree::new();
//! tree.set(7, writer.put(Kind::Page, &[1; PAGE_SIZE])?);
//! let root = tree.save(&mut writer)?;
//! # let mut manifest: Manifest = serde_json::from_str(r#"{"job": "example", "sequence": 0, "taken_unix_us": 0,
//! #   "command": [], "mechanism": "full", "kind": "memory", "spaces": [], "files": [], "state": [], "cost": {"dirty_pages": 0,
//! #   "frozen_pages": 0, "rounds": 0, "downtime_us": 0, "memory_downtime_us": 0, "state_downtime_us": 0, "written_bytes": 0}}"#)?;
//! manifest.spaces.push(SpaceRecord { pid: 1, name: "one".into(), root, pages: tree.page_count(), mappings: vec![] });
//! let info = writer.commit(manifest)?;
//!
//! let checkpoint = repository.read("example", info.sequence)?;
//! let mut page = [0; PAGE_SIZE];
//! checkpoint.get_page(PageTree::load(root, &checkpoint)?.get(7), &mut page)?;
//! assert_eq!(page, [1; PAGE_SIZE]);
//! # Ok(())
//! # }
//! ```

mod checkpoint;
mod format;
mod index;
mod lock;
pub mod manifest;
mod pack;
mod prune;
mod record;
mod storage;
mod table;
mod verify;
mod writer;

use std::collections::HashSet;
use std::fs::{DirBuilder, File, Permissions};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use checkpoint::Checkpoint;
pub use manifest::{Cost, FileRecord, Manifest, MappingRecord, SpaceRecord, StateRecord, TargetKind};
pub use prune::{Policy, PruneReport};
pub use record::CheckpointInfo;
pub use verify::{Damage, Part, Touched, VerifyReport};
pub use writer::Writer;

use crate::{ContentId, PAGE_SIZE, StoreError};
use format::{FORMAT, Format, hash16, number_name, random};
use index::{BadTable, View};
use lock::Lock;
use pack::RecordSource;
use storage::{Storage, io_error};
use table::Entry;

/// Packs that are kept open for reading.
const MAX_OPEN_PACKS: usize = 16;

/// A directory of checkpoints. Clones are the same repository.
#[derive(Clone)]
pub struct Repository {
    inner: Arc<Inner>,
}

/// How far long work is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Progress {
    /// Bytes done with.
    pub done_bytes: u64,
    /// Bytes to be done with in all.
    pub total_bytes: u64,
}

struct Inner {
    path: PathBuf,
    format: Format,
    storage: Storage,
    view: Mutex<Arc<View>>,
    /// Numbers of tables that turned out to be damaged.
    rejected: Mutex<HashSet<u64>>,
    /// The packs read last, the last in front.
    open_packs: Mutex<Vec<(u64, Arc<File>)>>,
}

/// A repository could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum RepositoryError {
    /// The directory is no repository.
    #[error("{path} is no repository: it has no file `config`")]
    NotARepository {
        /// The directory.
        path: PathBuf,
    },
    /// There is a repository already.
    #[error("{path} is a repository already")]
    Exists {
        /// The directory.
        path: PathBuf,
    },
    /// The directory holds something else.
    #[error("{path} holds something else than a repository: name a new or empty directory")]
    NotEmpty {
        /// The directory.
        path: PathBuf,
    },
    /// Another repository took its place since it was opened.
    #[error("{path} is not the repository that was opened: it was replaced meanwhile")]
    Replaced {
        /// The directory.
        path: PathBuf,
    },
    /// A later version of Pagemark wrote it.
    #[error(
        "{path} has the format {found}, this version of Pagemark knows {known}: use the one that wrote it, or a later one"
    )]
    NewerFormat {
        /// The directory.
        path: PathBuf,
        /// Its format.
        found: u64,
        /// The newest that is known.
        known: u32,
    },
    /// The file `config` is not what was written. Without its key nothing can be checked.
    #[error(
        "{path} is damaged: {reason}. Put back a copy of it; the content of the repository cannot be checked without it"
    )]
    DamagedConfig {
        /// The file.
        path: PathBuf,
        /// How it was noticed.
        reason: String,
    },
    /// Somebody else writes.
    #[error("{path} is held by {holder}; waited {:.1} s for it. Try again when that is done", waited.as_secs_f64())]
    Locked {
        /// The lock file.
        path: PathBuf,
        /// The process and what it does.
        holder: String,
        /// For how long it was tried.
        waited: Duration,
    },
    /// Not a name for a job.
    #[error(
        "a job cannot be called {name:?}: a name has 1 to 64 letters, digits, `.`, `_` and `-`, and does not begin with `.`"
    )]
    BadJobName {
        /// What was given.
        name: String,
    },
    /// There is no such checkpoint, or no longer.
    #[error("there is no checkpoint {sequence} of the job {job} in {path}")]
    NoSuchCheckpoint {
        /// The job.
        job: String,
        /// The checkpoint.
        sequence: u64,
        /// The repository.
        path: PathBuf,
    },
    /// A commit record is not what was written.
    #[error("the commit record {path} is damaged: {reason}. Other checkpoints can be read")]
    DamagedRecord {
        /// The file.
        path: PathBuf,
        /// How it was noticed.
        reason: String,
    },
    /// Content could not be written or read.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl RepositoryError {
    /// True if there was no room: a full disk, or a quota that is used up.
    pub fn is_disk_full(&self) -> bool {
        matches!(self, RepositoryError::Store(error) if error.is_disk_full())
    }
}

/// The file `config`.
#[derive(Serialize, Deserialize)]
struct Config {
    format: u32,
    id: String,
    key: String,
    check: String,
}

/// What any format's `config` has.
#[derive(Deserialize)]
struct ConfigFormat {
    format: u64,
}

impl Repository {
    /// Makes a repository in a directory that is not there, or is empty.
    ///
    /// # Errors
    /// [`RepositoryError::Exists`], [`RepositoryError::NotEmpty`], or that it could not be written.
    pub fn create(path: &Path) -> Result<Repository, RepositoryError> {
        Self::create_on(path, Storage::default())
    }

    fn create_on(path: &Path, storage: Storage) -> Result<Repository, RepositoryError> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(path)
            .map_err(|source| io_error("create the directory", path, source))?;
        let list =
            || -> std::io::Result<Vec<_>> { std::fs::read_dir(path)?.map(|entry| Ok(entry?.file_name())).collect() };
        // What a creation that was interrupted left is no hindrance.
        let parts = ["lock", "packs", "index", "checkpoints", "config.tmp", "config"];
        let found = list().map_err(|source| io_error("list", path, source))?;
        if !found.iter().all(|name| parts.iter().any(|part| name == part)) {
            return Err(RepositoryError::NotEmpty { path: path.to_owned() });
        }
        std::fs::set_permissions(path, Permissions::from_mode(0o700))
            .map_err(|source| io_error("set the permissions of", path, source))?;
        let _lock = Lock::acquire(&path.join("lock"), "creates it", Duration::from_secs(10))?;
        if path.join("config").exists() {
            return Err(RepositoryError::Exists { path: path.to_owned() });
        }
        for part in ["packs", "index", "checkpoints"] {
            let directory = path.join(part);
            if !directory.is_dir() {
                storage.create_dir(&directory)?;
            }
        }
        let urandom = |source| io_error("read", Path::new("/dev/urandom"), source);
        let format = Format { key: random().map_err(urandom)?, id: random().map_err(urandom)? };
        write_config(path, &storage, &format)?;
        if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            storage.sync_dir(parent)?;
        }
        Self::open_on(path, storage.clone())
    }

    /// Opens a repository.
    ///
    /// # Errors
    /// [`RepositoryError::NotARepository`], [`RepositoryError::NewerFormat`], or that it could not be read.
    pub fn open(path: &Path) -> Result<Repository, RepositoryError> {
        Self::open_on(path, Storage::default())
    }

    fn open_on(path: &Path, storage: Storage) -> Result<Repository, RepositoryError> {
        let format = read_config(path)?;
        let path = std::path::absolute(path).map_err(|source| io_error("find", path, source))?;
        let inner = Inner {
            path,
            format,
            storage,
            view: Mutex::default(),
            rejected: Mutex::default(),
            open_packs: Mutex::default(),
        };
        inner.refresh()?;
        Ok(Repository { inner: Arc::new(inner) })
    }

    /// Opens a repository, or makes one where there is none.
    ///
    /// # Errors
    /// As [`Repository::open`] and [`Repository::create`].
    pub fn open_or_create(path: &Path) -> Result<Repository, RepositoryError> {
        match Self::open(path) {
            Err(RepositoryError::NotARepository { .. }) => match Self::create(path) {
                // Somebody else was faster.
                Err(RepositoryError::Exists { .. }) => Self::open(path),
                created => created,
            },
            opened => opened,
        }
    }

    /// The directory, absolute.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// The jobs that have checkpoints, by name.
    ///
    /// # Errors
    /// The directory could not be read.
    pub fn jobs(&self) -> Result<Vec<String>, RepositoryError> {
        let mut jobs = Vec::new();
        for job in self.inner.job_names()? {
            if !self.inner.sequences(&job)?.is_empty() {
                jobs.push(job);
            }
        }
        Ok(jobs)
    }

    /// The checkpoints of a job, in ascending order; none for a job that is not there. Only the commit records are read. A
    /// record that is damaged is left out, so that the others can be used; [`Repository::verify`] tells of it.
    ///
    /// # Errors
    /// The directory or a record could not be read.
    pub fn checkpoints(&self, job: &str) -> Result<Vec<CheckpointInfo>, RepositoryError> {
        check_job_name(job)?;
        let mut checkpoints = Vec::new();
        for sequence in self.inner.sequences(job)? {
            let path = self.inner.job_path(job).join(record::name(sequence));
            match record::open(&path, job, sequence, &self.inner.format) {
                Ok(found) => checkpoints.extend(found.map(|(_, info)| info)),
                Err(RepositoryError::DamagedRecord { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(checkpoints)
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What the mutexes guard is whole at every moment, also if a thread that held one panicked.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inner {
    fn view(&self) -> Arc<View> {
        locked(&self.view).clone()
    }

    fn set_view(&self, view: View) -> Arc<View> {
        let view = Arc::new(view);
        *locked(&self.view) = view.clone();
        view
    }

    /// Looks what is there now.
    fn refresh(&self) -> Result<Arc<View>, StoreError> {
        let rejected = locked(&self.rejected).clone();
        let old = self.view();
        if old.is_current(&self.path, &rejected) {
            return Ok(old);
        }
        Ok(self.set_view(View::read(&self.path, &self.format, &old, &rejected)?))
    }

    /// Says that a table is damaged: from the next [`Inner::refresh`] on it is not used.
    fn reject(&self, table: u64) {
        locked(&self.rejected).insert(table);
    }

    /// A pack to read from; none if it is gone.
    fn open_pack(&self, number: u64) -> Result<Option<(Arc<File>, PathBuf)>, StoreError> {
        let path = self.pack_path(number);
        let mut packs = locked(&self.open_packs);
        if let Some(at) = packs.iter().position(|(other, _)| *other == number) {
            packs[..=at].rotate_right(1);
            return Ok(Some((packs[0].1.clone(), path)));
        }
        match File::open(&path) {
            Ok(file) => {
                packs.truncate(MAX_OPEN_PACKS - 1);
                packs.insert(0, (number, Arc::new(file)));
                Ok(Some((packs[0].1.clone(), path)))
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(io_error("open", &path, source)),
        }
    }

    /// Reads a copy of a piece of content that is whole. Packs may come and go meanwhile: a prune moves what is needed.
    fn fetch<T>(
        &self,
        id: ContentId,
        mut read: impl FnMut(&dyn RecordSource, &Entry) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let mut view = self.view();
        loop {
            let mut failure = StoreError::Missing { id };
            let mut next_table = 0;
            let is_searched = loop {
                match view.find_from(id, next_table)? {
                    Ok(None) => break true,
                    Err(BadTable(number)) => {
                        self.reject(number);
                        break false;
                    }
                    Ok(Some(found)) => {
                        next_table = found.table + 1;
                        let Some((file, path)) = self.open_pack(found.entry.pack)? else { continue };
                        match read(&(&*file, path.as_path()), &found.entry) {
                            Err(error @ StoreError::Damaged { .. }) => failure = error,
                            done => return done,
                        }
                    }
                }
            };
            let now = self.refresh()?;
            if is_searched && now.is_same(&view) {
                return Err(failure);
            }
            view = now;
        }
    }

    fn get(&self, id: ContentId) -> Result<Vec<u8>, StoreError> {
        self.fetch(id, |source, entry| Ok(pack::read_record(source, &self.format.key, entry)?.raw))
    }

    fn get_page(&self, id: ContentId, page: &mut [u8; PAGE_SIZE]) -> Result<(), StoreError> {
        self.fetch(id, |source, entry| pack::read_page(source, &self.format.key, entry, page))
    }

    /// True if some copy of a piece of content is there.
    fn holds(&self, id: ContentId) -> Result<bool, StoreError> {
        match self.view().find(id)? {
            Ok(Some(_)) => Ok(true),
            // It may have moved.
            Ok(None) | Err(_) => match self.fetch(id, |_, _| Ok(())) {
                Ok(()) => Ok(true),
                Err(StoreError::Missing { .. }) => Ok(false),
                Err(error) => Err(error),
            },
        }
    }

    fn pack_path(&self, number: u64) -> PathBuf {
        self.path.join("packs").join(format!("{}.pack", number_name(number)))
    }

    fn job_path(&self, job: &str) -> PathBuf {
        self.path.join("checkpoints").join(job)
    }

    fn job_names(&self) -> Result<Vec<String>, StoreError> {
        let path = self.path.join("checkpoints");
        let list = || -> std::io::Result<Vec<String>> {
            let mut names = Vec::new();
            for entry in std::fs::read_dir(&path)? {
                let entry = entry?;
                if entry.file_type()?.is_dir() {
                    names.extend(entry.file_name().into_string().ok().filter(|name| check_job_name(name).is_ok()));
                }
            }
            names.sort();
            Ok(names)
        };
        list().map_err(|source| io_error("list", &path, source))
    }

    /// The sequence numbers of a job's commit records, in ascending order.
    fn sequences(&self, job: &str) -> Result<Vec<u64>, StoreError> {
        let path = self.job_path(job);
        let list = || -> std::io::Result<Vec<u64>> {
            let mut sequences = Vec::new();
            for entry in std::fs::read_dir(&path)? {
                sequences.extend(entry?.file_name().to_str().and_then(record::parse_name));
            }
            sequences.sort_unstable();
            Ok(sequences)
        };
        match list() {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
            listed => listed.map_err(|source| io_error("list", &path, source)),
        }
    }
}

/// Job names are file names.
fn check_job_name(name: &str) -> Result<(), RepositoryError> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    match (1..=64).contains(&name.len()) && !name.starts_with('.') && name.bytes().all(allowed) {
        true => Ok(()),
        false => Err(RepositoryError::BadJobName { name: name.chars().take(80).collect() }),
    }
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex<const BYTES: usize>(text: &str) -> Option<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    if text.len() != 2 * BYTES || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(bytes)
}

fn config_check(format: &Format) -> [u8; 16] {
    hash16(&format.key, &[b"pagemark config", &FORMAT.to_le_bytes(), &format.id])
}

fn write_config(path: &Path, storage: &Storage, format: &Format) -> Result<(), RepositoryError> {
    let (id, key, check) = (to_hex(&format.id), to_hex(&format.key), to_hex(&config_check(format)));
    let target = path.join("config");
    let text = serde_json::to_string_pretty(&Config { format: FORMAT, id, key, check })
        .map_err(|error| io_error("encode", &target, error.into()))?;
    let temporary = path.join("config.tmp");
    if temporary.exists() {
        storage.remove(&temporary)?;
    }
    let mut file = storage.create(&temporary)?;
    file.append(&[text.as_bytes(), b"\n"])?;
    file.sync()?;
    file.rename(&target)?;
    Ok(storage.sync_dir(path)?)
}

fn read_config(path: &Path) -> Result<Format, RepositoryError> {
    let file = path.join("config");
    let text = match std::fs::read(&file) {
        Ok(text) => text,
        Err(error) if matches!(error.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory) => {
            return Err(RepositoryError::NotARepository { path: path.to_owned() });
        }
        Err(source) => return Err(io_error("read", &file, source).into()),
    };
    let damaged = |reason: String| RepositoryError::DamagedConfig { path: file.clone(), reason };
    let ConfigFormat { format: found } = serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
    if found > u64::from(FORMAT) {
        return Err(RepositoryError::NewerFormat { path: path.to_owned(), found, known: FORMAT });
    }
    let config: Config = serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
    let format = from_hex(&config.key).zip(from_hex(&config.id)).map(|(key, id)| Format { key, id });
    format
        .filter(|format| config.format == FORMAT && from_hex(&config.check) == Some(config_check(format)))
        .ok_or_else(|| damaged("its check does not fit".into()))
}

#[cfg(test)]
mod tests;
