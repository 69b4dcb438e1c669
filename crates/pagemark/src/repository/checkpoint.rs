//! Reading a checkpoint.

use std::sync::Arc;

use super::manifest::{MANIFEST_VERSION, Undecodable};
use super::pack::read_record;
use super::record::{self, CheckpointInfo};
use super::table::Entry;
use super::{Inner, Manifest, Repository, check_job_name};
use crate::backend::Lease;
use crate::error::{Error, ErrorKind, Object};
use crate::store::{Piece, Visit};
use crate::{ContentId, Kind, PAGE_SIZE, Store};

/// A checkpoint that is being read. While it is open, [`Repository::prune`] does not remove the
/// checkpoint, in this process and in others.
pub struct Checkpoint {
    /// Its description.
    pub manifest: Manifest,
    reader: Reader,
    /// A lease on the commit record.
    _lease: Box<dyn Lease>,
}

/// Keeps a checkpoint from being pruned until it is dropped, in this process and in others.
pub struct CheckpointHold {
    _lease: Box<dyn Lease>,
}

impl Repository {
    /// Keeps a checkpoint from being pruned.
    ///
    /// # Errors
    /// [`ErrorKind::NoCheckpoint`], or that its record is damaged.
    pub fn hold(&self, job: &str, sequence: u64) -> Result<CheckpointHold, Error> {
        self.inner.pin(job, sequence).map(|(lease, _)| CheckpointHold { _lease: lease })
    }

    /// Opens a checkpoint to read it.
    ///
    /// # Errors
    /// [`ErrorKind::NoCheckpoint`], or that its record or its manifest is damaged.
    pub fn read(&self, job: &str, sequence: u64) -> Result<Checkpoint, Error> {
        let (lease, info) = self.inner.pin(job, sequence)?;
        let manifest = self.inner.read_manifest(job, &info)?;
        Ok(Checkpoint { manifest, reader: Reader(self.inner.clone()), _lease: lease })
    }
}

impl Checkpoint {
    /// True if other users can change the repository, which was opened with
    /// [`RepositoryOptions::trusted`](super::RepositoryOptions::trusted).
    pub fn is_exposed(&self) -> bool {
        self.reader.0.exposure.is_some()
    }

    /// The id under which the repository holds a page with this content, or would hold it.
    pub fn page_id(&self, content: &[u8; PAGE_SIZE]) -> ContentId {
        match content == &[0; PAGE_SIZE] {
            true => ContentId::ZERO,
            false => ContentId::of(&self.reader.0.format.key, content),
        }
    }

    /// The content, for a thread that outlives a borrow of this checkpoint. It does not keep the
    /// checkpoint from being pruned: this one must stay open as long.
    pub fn store(&self) -> impl Store + Send + Sync + use<> {
        Reader(self.reader.0.clone())
    }
}

impl Inner {
    /// Keeps a checkpoint from being pruned while the lease is held.
    pub(super) fn pin(&self, job: &str, sequence: u64) -> Result<(Box<dyn Lease>, CheckpointInfo), Error> {
        check_job_name(job)?;
        let missing = || {
            let object = Object::Checkpoint { job: job.into(), sequence };
            let repository = self.backend.location().display();
            Error::about(ErrorKind::NoCheckpoint, object, "").during(format!("{repository} has no"))
        };
        let Some(lease) = self.backend.lease_reader(&record::name(job, sequence))? else { return Err(missing()) };
        let info = record::read(&*self.backend, job, sequence, &self.format)?.ok_or_else(missing)?;
        Ok((lease, info))
    }

    pub(super) fn read_manifest(&self, job: &str, info: &CheckpointInfo) -> Result<Manifest, Error> {
        let bytes = self.get(info.manifest)?;
        let damaged = |reason: String| Error::damaged_content(info.manifest, reason);
        let mut manifest = Manifest::decode(&bytes).map_err(|error| match error {
            Undecodable::Newer { found } => {
                let known = u64::from(MANIFEST_VERSION);
                let operation = format!("the manifest of {job}@{} has the version {found}", info.sequence);
                Error::newer_format(found, known).during(operation)
            }
            Undecodable::Damaged(reason) => damaged(format!("it is no manifest: {reason}")),
        })?;
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
    /// True if this copy of a piece of content is intact.
    pub(super) fn is_whole(&self, copy: &Entry) -> Result<bool, Error> {
        let Some(pack) = self.0.open_pack(copy.pack)? else { return Ok(false) };
        match read_record(&*pack, &self.0.format.key, copy, &*self.0) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == ErrorKind::Damaged => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl Store for Reader {
    fn put(&mut self, _: Kind, _: &[u8]) -> Result<ContentId, Error> {
        Err(Error::read_only())
    }

    fn get(&self, kind: Kind, id: ContentId) -> Result<Vec<u8>, Error> {
        if kind == Kind::Page && id.is_zero() {
            return Ok(vec![0; PAGE_SIZE]);
        }
        self.0.get(id)
    }

    fn get_page(&self, id: ContentId, page: &mut [u8; PAGE_SIZE]) -> Result<(), Error> {
        if id.is_zero() {
            page.fill(0);
            return Ok(());
        }
        self.0.get_page(id, page)
    }

    fn get_many(&self, kind: Kind, ids: &[ContentId], visit: Visit<'_>) -> Result<(), Error> {
        if kind != Kind::Page || !ids.iter().any(|id| id.is_zero()) {
            return self.0.read_many(ids, visit);
        }
        let stored: Vec<usize> = (0..ids.len()).filter(|&position| !ids[position].is_zero()).collect();
        let zeros = (0..ids.len()).filter(|&position| ids[position].is_zero());
        let zeros: Vec<Piece> = zeros.map(|position| Piece { position, bytes: 0..PAGE_SIZE }).collect();
        if visit(&zeros, &[0; PAGE_SIZE]).is_break() {
            return Ok(());
        }
        let ids: Vec<ContentId> = stored.iter().map(|&position| ids[position]).collect();
        self.0.read_many(&ids, &|pieces, content| {
            let asked = |piece: &Piece| Piece { position: stored[piece.position], bytes: piece.bytes.clone() };
            visit(&pieces.iter().map(asked).collect::<Vec<_>>(), content)
        })
    }
}

/// Content can be read, not put.
impl Store for Checkpoint {
    fn put(&mut self, kind: Kind, content: &[u8]) -> Result<ContentId, Error> {
        self.reader.put(kind, content)
    }

    fn get(&self, kind: Kind, id: ContentId) -> Result<Vec<u8>, Error> {
        self.reader.get(kind, id)
    }

    fn get_page(&self, id: ContentId, page: &mut [u8; PAGE_SIZE]) -> Result<(), Error> {
        self.reader.get_page(id, page)
    }

    fn get_many(&self, kind: Kind, ids: &[ContentId], visit: Visit<'_>) -> Result<(), Error> {
        self.reader.get_many(kind, ids, visit)
    }
}
