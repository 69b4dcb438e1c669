//! Reading a checkpoint.

use std::fs::File;
use std::sync::Arc;

use super::pack::read_record;
use super::record::{self, CheckpointInfo};
use super::storage::io_error;
use super::table::Entry;
use super::{Inner, Manifest, Repository, RepositoryError, check_job_name};
use crate::{ContentId, Kind, PAGE_SIZE, Store, StoreError};

/// A checkpoint that is being read. While it is held, [`Repository::prune`] leaves the checkpoint alone, in this process and in
/// others.
pub struct Checkpoint {
    /// What it consists of.
    pub manifest: Manifest,
    reader: Reader,
    /// The commit record, with a shared lock on it.
    _pin: File,
}

impl Repository {
    /// Opens a checkpoint to read it.
    ///
    /// # Errors
    /// [`RepositoryError::NoSuchCheckpoint`], or that its record or its manifest is damaged.
    pub fn read(&self, job: &str, sequence: u64) -> Result<Checkpoint, RepositoryError> {
        let (pin, info) = self.inner.pin(job, sequence)?;
        let manifest = self.inner.read_manifest(job, &info)?;
        Ok(Checkpoint { manifest, reader: Reader(self.inner.clone()), _pin: pin })
    }
}

impl Inner {
    /// Keeps a checkpoint from being pruned while the file is open.
    pub(super) fn pin(&self, job: &str, sequence: u64) -> Result<(File, CheckpointInfo), RepositoryError> {
        check_job_name(job)?;
        let path = self.job_path(job).join(record::name(sequence));
        let missing = || RepositoryError::NoSuchCheckpoint { job: job.into(), sequence, path: self.path.clone() };
        let (pin, info) = record::open(&path, job, sequence, &self.format)?.ok_or_else(missing)?;
        pin.lock_shared().map_err(|source| io_error("lock", &path, source))?;
        // Prune removes a record only while it alone has it locked.
        match record::is_removed(&pin).map_err(|source| io_error("read", &path, source))? {
            true => Err(missing()),
            false => Ok((pin, info)),
        }
    }

    pub(super) fn read_manifest(&self, job: &str, info: &CheckpointInfo) -> Result<Manifest, RepositoryError> {
        let bytes = self.get(info.manifest)?;
        let damaged = |reason: String| RepositoryError::Store(StoreError::Damaged { id: info.manifest, reason });
        let mut manifest: Manifest =
            serde_json::from_slice(&bytes).map_err(|error| damaged(format!("it is no manifest: {error}")))?;
        if manifest.job != job || manifest.sequence != info.sequence {
            return Err(damaged("it is another checkpoint's manifest".into()));
        }
        manifest.cost.written_bytes = info.written_bytes;
        Ok(manifest)
    }
}

/// The repository's content as a store that can be read.
pub(super) struct Reader(pub(super) Arc<Inner>);

impl Reader {
    /// True if this copy of a piece of content is as it was written.
    pub(super) fn is_whole(&self, copy: &Entry) -> Result<bool, StoreError> {
        let Some((file, path)) = self.0.open_pack(copy.pack)? else { return Ok(false) };
        match read_record(&(&*file, path.as_path()), &self.0.format.key, copy) {
            Ok(_) => Ok(true),
            Err(StoreError::Damaged { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl Store for Reader {
    fn put(&mut self, _: Kind, _: &[u8]) -> Result<ContentId, StoreError> {
        Err(StoreError::ReadOnly)
    }

    fn get(&self, kind: Kind, id: ContentId) -> Result<Vec<u8>, StoreError> {
        if kind == Kind::Page && id.is_zero() {
            return Ok(vec![0; PAGE_SIZE]);
        }
        self.0.get(id)
    }

    fn get_page(&self, id: ContentId, page: &mut [u8; PAGE_SIZE]) -> Result<(), StoreError> {
        if id.is_zero() {
            page.fill(0);
            return Ok(());
        }
        self.0.get_page(id, page)
    }
}

/// Content can be read, not put.
impl Store for Checkpoint {
    fn put(&mut self, kind: Kind, content: &[u8]) -> Result<ContentId, StoreError> {
        self.reader.put(kind, content)
    }

    fn get(&self, kind: Kind, id: ContentId) -> Result<Vec<u8>, StoreError> {
        self.reader.get(kind, id)
    }

    fn get_page(&self, id: ContentId, page: &mut [u8; PAGE_SIZE]) -> Result<(), StoreError> {
        self.reader.get_page(id, page)
    }
}
