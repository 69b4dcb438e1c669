//! Checkpoints: immutable packs of content and one small commit record each. See
//! `docs/reference/repository.md`.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let directory = tempfile::tempdir()?;
//! # let path = directory.path().join("repository");
//! use std::time::Duration;
//! use pagemark::repository::{Manifest, Repository, SpaceKind, SpaceRecord};
//! use pagemark::{ByteCount, Kind, PAGE_SIZE, PageNumber, PageTree, Store};
//!
//! let repository = Repository::create(&path)?;
//! let mut writer = repository.writer("the example", Duration::from_secs(1))?;
//! let mut tree = PageTree::new();
//! let page_number = PageNumber::new(7);
//! tree.set(page_number, writer.put(Kind::Page, &[1; PAGE_SIZE])?);
//! let root = tree.save(&mut writer)?;
//! # let mut manifest: Manifest = serde_json::from_str(r#"{"job": "example", "sequence": 0, "taken_unix_us": 0,
//! #   "command": [], "mechanism": "full", "kind": "region", "spaces": [], "files": [], "state": [], "cost": {"dirty_pages": 0,
//! #   "frozen_pages": 0, "rounds": 0, "downtime_us": 0, "memory_downtime_us": 0, "state_downtime_us": 0, "written_bytes": 0}}"#)?;
//! let (label, kind) = ("heap".into(), SpaceKind::Region { bytes: ByteCount::new(1 << 20) });
//! manifest.spaces.push(SpaceRecord { id: 1, label, kind, root, pages: tree.page_count(), mappings: vec![] });
//! let info = writer.commit(manifest)?;
//!
//! let checkpoint = repository.read("example", info.sequence)?;
//! let mut page = [0; PAGE_SIZE];
//! checkpoint.get_page(PageTree::load(root, &checkpoint)?.get(page_number), &mut page)?;
//! assert_eq!(page, [1; PAGE_SIZE]);
//! # Ok(())
//! # }
//! ```

mod bulk;
mod checkpoint;
mod config;
mod delta;
mod format;
mod index;
mod lock;
pub mod manifest;
mod options;
mod pack;
mod program;
mod prune;
mod record;
mod table;
mod verify;
mod writer;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub use checkpoint::{Checkpoint, CheckpointHold};
pub use lock::JobClaim;
pub use manifest::{
    Cost, FileRecord, MANIFEST_VERSION, Manifest, MappingException, MappingRecord, SpaceKind, SpaceRecord, StateRecord,
    TargetKind,
};
pub use options::RepositoryOptions;
pub use program::{ProcessRecord, ProgramRecord};
pub use prune::{PruneReport, Retention};
pub use record::CheckpointInfo;
pub use verify::{Damage, Part, Touched, VerifyReport};
pub use writer::Writer;

use crate::backend::{Backend, BackendError, Exposure, ListKind, Object};
use crate::{ContentId, Error, ErrorKind, PAGE_SIZE, error};
use config::Config;
use delta::BaseCache;
use format::{CHECKPOINTS, CONFIG, CONFIG_COPY, Format, INDEXES, PACKS, job_directory, pack_name, random};
use index::{BadTable, View};
use lock::Lock;
use table::Entry;

/// Packs that are kept open for reading.
const MAX_OPEN_PACKS: usize = 16;

/// Checkpoints in a directory, or on another [`Backend`]. Clones are the same repository.
#[derive(Clone)]
pub struct Repository {
    inner: Arc<Inner>,
}

/// Commit records by their numbers. A record that cannot be read has its own error.
pub type Records = Vec<(u64, Result<CheckpointInfo, Error>)>;

/// How far long work is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Progress {
    /// Bytes done with.
    pub done_bytes: u64,
    /// Bytes to be done with in all.
    pub total_bytes: u64,
}

struct Inner {
    backend: Arc<dyn Backend>,
    format: Format,
    /// How other users can change it.
    exposure: Option<Exposure>,
    /// Why the copy of `config` was read instead.
    config_damage: Option<String>,
    view: Mutex<Arc<View>>,
    /// Numbers of tables that turned out to be damaged.
    rejected: Mutex<HashSet<u64>>,
    /// The packs read last, the last in front.
    open_packs: Mutex<Vec<(u64, Arc<dyn Object>)>>,
    /// Pages of the last checkpoints of this process, of which the next ones store changes.
    bases: Mutex<BaseCache>,
}

impl Error {
    /// A repository or a manifest of a later version of Pagemark. The operation names it.
    fn newer_format(found: u64, known: u64) -> Error {
        let reason = format!("this version of Pagemark knows {known}");
        let error = Error::because(ErrorKind::NewerFormat { found, known }, reason);
        error.help("use the version that wrote it, or a later one")
    }
}

/// True if a later version of Pagemark wrote the manifest.
fn is_newer(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::NewerFormat { .. })
}

fn not_empty(path: &Path) -> Error {
    let reason = "holds something else than a repository: name a new or empty directory";
    Error::about(ErrorKind::NotEmpty, error::Object::Path(path.to_owned()), reason)
}

impl Repository {
    /// Makes a repository in a directory that is not there, or is empty. As
    /// [`RepositoryOptions::create`] with the default options.
    ///
    /// # Errors
    /// [`ErrorKind::Exists`], [`ErrorKind::NotEmpty`], [`ErrorKind::Exposed`], or
    /// that it could not be written.
    pub fn create(path: &Path) -> Result<Repository, Error> {
        RepositoryOptions::default().create(path)
    }

    /// Makes a repository on a backend that has no objects.
    ///
    /// # Errors
    /// [`ErrorKind::Exists`], [`ErrorKind::NotEmpty`], or that it could not be written.
    pub fn create_on(backend: Arc<dyn Backend>) -> Result<Repository, Error> {
        Self::create_with(backend, RepositoryOptions::default())
    }

    fn create_with(backend: Arc<dyn Backend>, options: RepositoryOptions) -> Result<Repository, Error> {
        let path = backend.location().to_owned();
        if !backend.list("")?.iter().all(|entry| is_own_name(&entry.name)) {
            return Err(not_empty(&path));
        }
        let _lock = Lock::alone(&*backend, "creates it", Duration::from_secs(10))?;
        if backend.bytes(CONFIG)?.is_some() || backend.bytes(CONFIG_COPY)?.is_some() {
            return Err(Error::about(ErrorKind::Exists, error::Object::Path(path), "is a repository already"));
        }
        backend.prepare(&[PACKS, INDEXES, CHECKPOINTS])?;
        let format = Format { key: random()?, id: random()? };
        config::create(&*backend, &format)?;
        Self::on_exposed(backend, None, options)
    }

    /// Opens the repository in a directory. As [`RepositoryOptions::open`] with the default
    /// options.
    ///
    /// # Errors
    /// [`ErrorKind::NotARepository`], [`ErrorKind::NewerFormat`],
    /// [`ErrorKind::Exposed`], or that it could not be read.
    pub fn open(path: &Path) -> Result<Repository, Error> {
        RepositoryOptions::default().open(path)
    }

    /// Opens the repository on a backend.
    ///
    /// # Errors
    /// Those of [`Repository::open`].
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::sync::Arc;
    /// use pagemark::backend::MemoryBackend;
    /// use pagemark::repository::Repository;
    ///
    /// let backend = Arc::new(MemoryBackend::new());
    /// Repository::create_on(backend.clone())?;
    /// assert!(Repository::on(backend)?.jobs()?.is_empty());
    /// # Ok(())
    /// # }
    /// ```
    pub fn on(backend: Arc<dyn Backend>) -> Result<Repository, Error> {
        Self::on_exposed(backend, None, RepositoryOptions::default())
    }

    /// Opens the repository on a backend that others can change as `exposure` says.
    fn on_exposed(
        backend: Arc<dyn Backend>,
        exposure: Option<Exposure>,
        options: RepositoryOptions,
    ) -> Result<Repository, Error> {
        let base_bytes = if options.stores_whole_pages() { 0 } else { delta::base_bytes() };
        let Config { format, damage, .. } = config::read(&*backend)?;
        let inner = Inner {
            backend,
            format,
            exposure,
            config_damage: damage,
            view: Mutex::default(),
            rejected: Mutex::default(),
            open_packs: Mutex::default(),
            bases: Mutex::new(BaseCache::new(base_bytes)),
        };
        inner.refresh()?;
        Ok(Repository { inner: Arc::new(inner) })
    }

    /// Opens a repository, or makes one where there is none. As
    /// [`RepositoryOptions::open_or_create`] with the default options.
    ///
    /// # Errors
    /// Those of [`Repository::open`] and [`Repository::create`].
    pub fn open_or_create(path: &Path) -> Result<Repository, Error> {
        RepositoryOptions::default().open_or_create(path)
    }

    /// How other users can change the repository, which [`RepositoryOptions::trusted`] allowed.
    /// None if they cannot.
    pub fn exposure(&self) -> Option<&Exposure> {
        self.inner.exposure.as_ref()
    }

    /// Why the copy of `config` was read when the repository was opened; none if `config` was
    /// intact. The next writer writes `config` again.
    pub fn config_damage(&self) -> Option<&str> {
        self.inner.config_damage.as_deref()
    }

    /// Tells the repository from every other one, wherever it lies.
    pub fn id(&self) -> [u8; 16] {
        self.inner.format.id
    }

    /// The absolute path of the directory, or the location of another backend.
    pub fn path(&self) -> &Path {
        self.inner.backend.location()
    }

    /// The jobs that have checkpoints, by name.
    ///
    /// # Errors
    /// The directory could not be read.
    pub fn jobs(&self) -> Result<Vec<String>, Error> {
        let mut jobs = Vec::new();
        for job in self.inner.job_names()? {
            if !self.inner.sequences(&job)?.is_empty() {
                jobs.push(job);
            }
        }
        Ok(jobs)
    }

    /// The checkpoints of a job, in ascending order; none for a job that is not there. Only the
    /// commit records are read. A record that is damaged is left out, so that the others can be
    /// used; [`Repository::verify`] reports it.
    ///
    /// # Errors
    /// The directory or a record could not be read.
    pub fn checkpoints(&self, job: &str) -> Result<Vec<CheckpointInfo>, Error> {
        let mut checkpoints = Vec::new();
        for (_, record) in self.records(job)? {
            match record {
                Ok(info) => checkpoints.push(info),
                Err(error) if error.kind() == ErrorKind::DamagedRecord => {}
                Err(error) => return Err(error),
            }
        }
        Ok(checkpoints)
    }

    /// The number of the newest checkpoint of a job; none for a job that is not there. No record is
    /// read, so the checkpoint may turn out to be damaged.
    ///
    /// # Errors
    /// The directory could not be read.
    pub fn newest(&self, job: &str) -> Result<Option<u64>, Error> {
        check_job_name(job)?;
        Ok(self.inner.sequences(job)?.last().copied())
    }

    /// The commit records of a job, by their numbers, in ascending order; none for a job that is
    /// not there. A record that cannot be read has its own error, so that it hides no other.
    ///
    /// # Errors
    /// The directory could not be read.
    pub fn records(&self, job: &str) -> Result<Records, Error> {
        check_job_name(job)?;
        let mut records = Vec::new();
        for sequence in self.inner.sequences(job)? {
            // A record that was removed meanwhile is left out.
            let record = record::read(&*self.inner.backend, job, sequence, &self.inner.format).transpose();
            records.extend(record.map(|record| (sequence, record)));
        }
        Ok(records)
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The guarded values are consistent at every moment, also if a thread that held the mutex panicked.
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

    /// Reads what is there now, if it may have changed.
    fn refresh(&self) -> Result<Arc<View>, BackendError> {
        let rejected = locked(&self.rejected).clone();
        let old = self.view();
        if old.is_current(&*self.backend, &rejected) {
            return Ok(old);
        }
        Ok(self.set_view(View::read(&self.backend, &self.format, &old, &rejected)?))
    }

    /// Records that a table is damaged: from the next [`Inner::refresh`] on it is not used.
    fn reject(&self, table: u64) {
        locked(&self.rejected).insert(table);
    }

    /// Opens a pack; none if it is gone.
    fn open_pack(&self, number: u64) -> Result<Option<Arc<dyn Object>>, BackendError> {
        let mut packs = locked(&self.open_packs);
        if let Some(at) = packs.iter().position(|(other, _)| *other == number) {
            packs[..=at].rotate_right(1);
            return Ok(Some(packs[0].1.clone()));
        }
        let opened = self.backend.open(&pack_name(number))?;
        if let Some(pack) = &opened {
            packs.truncate(MAX_OPEN_PACKS - 1);
            packs.insert(0, (number, pack.clone()));
        }
        Ok(opened)
    }

    /// Keeps a pack that is gone open no longer.
    fn close_pack(&self, number: u64) {
        locked(&self.open_packs).retain(|(other, _)| *other != number);
    }

    /// Reads an intact copy of a piece of content. Packs may appear and vanish meanwhile: a prune
    /// moves content.
    fn fetch<T>(
        &self,
        id: ContentId,
        mut read: impl FnMut(&dyn Object, &Entry) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut view = self.view();
        loop {
            let mut failure = None;
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
                        let Some(pack) = self.open_pack(found.entry.pack)? else { continue };
                        match read(&*pack, &found.entry) {
                            Err(error) if error.kind() == ErrorKind::Damaged => failure = Some(error),
                            Err(error) if error.kind() == ErrorKind::NotFound => {
                                self.close_pack(found.entry.pack);
                            }
                            done => return done,
                        }
                    }
                }
            };
            let now = self.refresh()?;
            if is_searched && now.is_same(&view) {
                return Err(failure.unwrap_or_else(|| Error::missing(id)));
            }
            view = now;
        }
    }

    fn get(&self, id: ContentId) -> Result<Vec<u8>, Error> {
        self.fetch(id, |source, entry| Ok(pack::read_record(source, &self.format.key, entry, self)?.raw))
    }

    fn get_page(&self, id: ContentId, page: &mut [u8; PAGE_SIZE]) -> Result<(), Error> {
        self.fetch(id, |source, entry| pack::read_page(source, &self.format.key, entry, page, self))
    }

    /// True if some copy of a piece of content is there, and its base if it is a delta.
    fn holds(&self, id: ContentId) -> Result<bool, Error> {
        match self.is_complete_in(&self.view(), id)? {
            Ok(true) => Ok(true),
            // It may have moved.
            Ok(false) | Err(_) => match self.fetch(id, |_, entry| self.check_base(entry)) {
                Ok(()) => Ok(true),
                Err(error) if matches!(error.kind(), ErrorKind::Missing | ErrorKind::Damaged) => Ok(false),
                Err(error) => Err(error),
            },
        }
    }

    fn job_names(&self) -> Result<Vec<String>, BackendError> {
        let jobs = self.backend.list(CHECKPOINTS)?.into_iter().filter(|entry| entry.kind == ListKind::Directory);
        let mut names: Vec<_> = jobs.map(|entry| entry.name).filter(|name| check_job_name(name).is_ok()).collect();
        names.sort();
        Ok(names)
    }

    /// The sequence numbers of a job's commit records, in ascending order.
    fn sequences(&self, job: &str) -> Result<Vec<u64>, BackendError> {
        // What is there in place of a record is reported when it is read.
        let records = self.backend.list(&job_directory(job))?.into_iter();
        let mut sequences: Vec<_> = records.filter_map(|entry| record::parse_name(&entry.name)).collect();
        sequences.sort_unstable();
        Ok(sequences)
    }

    /// Where an object is, for messages.
    fn path_of(&self, name: &str) -> PathBuf {
        self.backend.location().join(name)
    }
}

/// True for the names in a repository's directory, which an interrupted creation may have left.
fn is_own_name(name: &str) -> bool {
    let staged = name.strip_suffix(".tmp").filter(|name| [CONFIG, CONFIG_COPY].contains(name));
    staged.is_some() || [CONFIG, CONFIG_COPY, PACKS, INDEXES, CHECKPOINTS, "lock", "locks"].contains(&name)
}

/// Checks that a job can have the name, which is part of file names.
///
/// # Errors
/// [`ErrorKind::InvalidName`]
pub fn check_job_name(name: &str) -> Result<(), Error> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    match (1..=64).contains(&name.len()) && !name.starts_with('.') && name.bytes().all(allowed) {
        true => Ok(()),
        false => {
            let name = error::Object::Name(name.chars().take(80).collect());
            let reason = "a name has 1 to 64 letters, digits, `.`, `_` and `-`, and does not begin with `.`";
            Err(Error::about(ErrorKind::InvalidName, name, reason).during("a job cannot be called"))
        }
    }
}

#[cfg(test)]
mod tests;
