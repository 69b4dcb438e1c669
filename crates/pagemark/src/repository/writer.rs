//! Taking a checkpoint: content is put, then all of it is committed at once or not at all.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::checkpoint::Reader;
use super::index::{BadTable, View, numbers_in};
use super::lock::Lock;
use super::pack::NewPacks;
use super::record::{CheckpointInfo, NewRecord};
use super::storage::io_error;
use super::{Inner, Manifest, Repository, RepositoryError, check_job_name};
use crate::store::is_zero_page;
use crate::{ContentId, Kind, PAGE_SIZE, Store, StoreError};

/// The right to add one checkpoint. What is put becomes durable by [`Writer::commit`]; without it, dropping the writer
/// leaves nothing behind.
///
/// After a failed [`Store::put`] the writer can only be dropped.
pub struct Writer {
    inner: Arc<Inner>,
    view: Arc<View>,
    packs: NewPacks,
    _lock: Lock,
}

impl Repository {
    /// Waits until nobody else writes, at most for `wait`, and begins a checkpoint. `owner` is told to those who wait
    /// meanwhile.
    ///
    /// # Errors
    /// [`RepositoryError::Locked`] if another process kept writing.
    pub fn writer(&self, owner: &str, wait: Duration) -> Result<Writer, RepositoryError> {
        let lock = self.inner.lock(owner, wait)?;
        let view = self.inner.clean()?;
        Ok(Writer { packs: self.inner.new_packs(), inner: self.inner.clone(), view, _lock: lock })
    }
}

impl Inner {
    pub(super) fn lock(&self, owner: &str, wait: Duration) -> Result<Lock, RepositoryError> {
        let lock = Lock::acquire(&self.path.join("lock"), owner, wait)?;
        let now = super::read_config(&self.path)?;
        match now.id == self.format.id {
            true => Ok(lock),
            false => Err(RepositoryError::Replaced { path: self.path.clone() }),
        }
    }

    pub(super) fn new_packs(&self) -> NewPacks {
        NewPacks::new(self.path.join("packs"), self.format.clone(), self.storage.clone())
    }

    /// Removes what a writer that died left behind, and index files that are of no use. Only for who holds the lock.
    pub(super) fn clean(&self) -> Result<Arc<View>, RepositoryError> {
        let mut directories = vec![self.path.join("packs"), self.path.join("index")];
        directories.extend(self.job_names()?.into_iter().map(|job| self.job_path(&job)));
        for directory in directories {
            let list = || -> std::io::Result<Vec<PathBuf>> {
                let files =
                    std::fs::read_dir(&directory)?.map(|file| Ok(file?.path())).collect::<std::io::Result<Vec<_>>>()?;
                Ok(files.into_iter().filter(|path| path.extension().is_some_and(|ending| ending == "tmp")).collect())
            };
            for path in list().map_err(|source| io_error("list", &directory, source))? {
                self.storage.remove(&path)?;
            }
        }
        let view = self.refresh()?;
        for number in numbers_in(&self.path.join("index"), ".idx")? {
            if !view.tables.iter().any(|table| table.number == number) {
                self.storage
                    .remove(&self.path.join("index").join(format!("{}.idx", super::format::number_name(number))))?;
            }
        }
        Ok(view)
    }

    /// Merges tables if it is time to. Content is found without it as well, only slower: who cannot merge now
    /// leaves it to the next writer.
    fn merge_tables(&self, view: &View) {
        match view.merged(&self.path, &self.format, &self.storage) {
            Ok(Some(view)) => drop(self.set_view(view)),
            Ok(None) => {}
            // A damaged table is not used again: each pack has its own.
            Err(error) => drop(self.reject_unreadable(&error, view)),
        }
    }

    /// If a table of the view turned out to be damaged, says so and is true.
    pub(super) fn reject_unreadable(&self, error: &StoreError, view: &View) -> bool {
        let StoreError::Io { path, source, .. } = error else { return false };
        let table = view.tables.iter().find(|table| table.path() == path && !table.is_rebuilt());
        match table.filter(|_| source.kind() == std::io::ErrorKind::InvalidData) {
            Some(table) => {
                self.reject(table.number);
                true
            }
            None => false,
        }
    }
}

impl Writer {
    /// Makes the checkpoint that `manifest` describes durable, and gives it the job's next sequence number; what
    /// `manifest` says of `sequence` and of `cost.written_bytes` does not matter.
    ///
    /// # Errors
    /// Then the repository is as it was.
    pub fn commit(mut self, mut manifest: Manifest) -> Result<CheckpointInfo, RepositoryError> {
        check_job_name(&manifest.job)?;
        let roots = manifest.roots().collect::<Vec<_>>();
        for root in roots.into_iter().filter(|root| !root.is_zero()) {
            if !self.holds(root)? {
                return Err(StoreError::Missing { id: root }.into());
            }
        }
        let directory = self.inner.job_path(&manifest.job);
        if !directory.is_dir() {
            self.inner.storage.create_dir(&directory)?;
            self.inner.storage.sync_dir(&self.inner.path.join("checkpoints"))?;
        }
        manifest.sequence = self.inner.sequences(&manifest.job)?.last().map_or(1, |last| last + 1);
        manifest.cost.written_bytes = 0;
        let json = serde_json::to_vec(&manifest)
            .map_err(|error| io_error("encode the manifest for", &self.inner.path, error.into()))?;
        let id = self.put(Kind::Manifest, &json)?;

        let (tables, written_bytes) = self.packs.publish()?;
        let (sequence, taken_unix_us) = (manifest.sequence, manifest.taken_unix_us);
        let info = CheckpointInfo { sequence, taken_unix_us, written_bytes, manifest: id };
        let record = NewRecord::write(&directory, &manifest.job, &self.inner.format, &self.inner.storage, info)?;
        self.packs.keep();
        let info = record.publish()?;

        let view = self.inner.set_view(self.view.with_packs(&tables));
        self.inner.merge_tables(&view);
        Ok(info)
    }

    /// True if the content is in the repository or was put.
    fn holds(&mut self, id: ContentId) -> Result<bool, StoreError> {
        if self.packs.contains(id)? {
            return Ok(true);
        }
        loop {
            match self.view.find(id)? {
                Ok(found) => return Ok(found.is_some()),
                Err(BadTable(number)) => {
                    self.inner.reject(number);
                    self.view = self.inner.refresh()?;
                }
            }
        }
    }
}

impl Store for Writer {
    fn put(&mut self, kind: Kind, content: &[u8]) -> Result<ContentId, StoreError> {
        if kind == Kind::Page && is_zero_page(content) {
            return Ok(ContentId::ZERO);
        }
        let id = ContentId::of(&self.inner.format.key, content);
        if !self.holds(id)? {
            self.packs.add(kind, id, content)?;
        }
        Ok(id)
    }

    fn get(&self, kind: Kind, id: ContentId) -> Result<Vec<u8>, StoreError> {
        match self.packs.read(id)? {
            Some(record) => Ok(record.raw),
            None => Reader(self.inner.clone()).get(kind, id),
        }
    }

    fn get_page(&self, id: ContentId, page: &mut [u8; PAGE_SIZE]) -> Result<(), StoreError> {
        match self.packs.read(id)? {
            Some(record) => {
                let length = record.raw.len();
                *page = record
                    .raw
                    .try_into()
                    .map_err(|_| StoreError::Damaged { id, reason: format!("a page of {length} bytes") })?;
                Ok(())
            }
            None => Reader(self.inner.clone()).get_page(id, page),
        }
    }
}
