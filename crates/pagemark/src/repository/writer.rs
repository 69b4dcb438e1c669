//! Taking a checkpoint: content is put, then all of it is committed at once or not at all.

use std::sync::Arc;
use std::time::Duration;

use super::checkpoint::Reader;
use super::delta::{self, BASE_ID_BYTES, Base};
use super::format::{ANY_SPACES, DELTAS, INDEXES, index_name};
use super::index::{BadTable, View, numbers_in};
use super::lock::Lock;
use super::pack::NewPacks;
use super::record::{self, CheckpointInfo, NewRecord};
use super::table::Entry;
use super::{Inner, Manifest, Repository, check_job_name, locked};
use crate::backend::BackendError;
use crate::error::{Error, ErrorKind, Object};
use crate::id::pages::{is_zero_page, visit_ids};
use crate::store::ChangedPage;
use crate::{ContentId, Kind, PAGE_SIZE, Store};

/// The right to add one checkpoint. Content that is put becomes durable by [`Writer::commit`];
/// without it, dropping the writer leaves nothing behind.
///
/// After a failed [`Store::put`] the writer can only be dropped.
pub struct Writer {
    inner: Arc<Inner>,
    view: Arc<View>,
    packs: NewPacks,
    /// Where deltas are encoded.
    delta: Vec<u8>,
    lock: Lock,
}

impl Repository {
    /// Begins a checkpoint. Any number of writers, in this process and in others, write at once;
    /// only a prune is waited for, as long as it goes on: until it showed no progress for
    /// `patience`. Others who wait meanwhile see `owner` in the error.
    ///
    /// # Errors
    /// [`ErrorKind::InUse`] if a prune went on no more.
    pub fn writer(&self, owner: &str, patience: Duration) -> Result<Writer, Error> {
        if let Some(_alone) = self.inner.try_lock_alone(owner)? {
            self.inner.clean()?;
        }
        let lock = self.inner.lock(owner, patience)?;
        // A full disk fails later, where it matters.
        self.inner.repair_config_if_room()?;
        let view = self.inner.refresh()?;
        Ok(Writer { packs: self.inner.new_packs(), inner: self.inner.clone(), view, delta: Vec::new(), lock })
    }
}

impl Inner {
    pub(super) fn new_packs(&self) -> NewPacks {
        NewPacks::new(self.backend.clone(), self.format.clone())
    }

    /// Writes `config` and its copy again if one of them is damaged and there is room. A prune
    /// makes room.
    fn repair_config_if_room(&self) -> Result<(), Error> {
        match self.repair_config() {
            Err(error) if error.kind() == ErrorKind::NoRoom => Ok(()),
            repaired => repaired,
        }
    }

    /// Removes what dead writers left behind, and index files that are of no use; repairs `config`
    /// and its copy. Only for who writes alone: what living writers have staged, and an index file
    /// that takes the place of others, would go too.
    pub(super) fn clean(&self) -> Result<Arc<View>, Error> {
        self.backend.discard_staged()?;
        self.repair_config_if_room()?;
        let view = self.refresh()?;
        for number in numbers_in(&*self.backend, INDEXES, ".idx")? {
            if !view.tables.iter().any(|table| table.number == number) {
                self.backend.remove(&index_name(number))?;
            }
        }
        Ok(view)
    }

    /// The number of a job's next checkpoint.
    fn next_sequence(&self, job: &str) -> Result<u64, Error> {
        let Some(&last) = self.sequences(job)?.last() else { return Ok(1) };
        last.checked_add(1).ok_or_else(|| {
            let record = Object::Record(self.path_of(&record::name(job, last)));
            Error::damaged(ErrorKind::DamagedRecord, record, "no checkpoint can have a higher number")
        })
    }

    /// Merges tables if it is time to, and nobody else does. Content is found without it as well,
    /// only slower: if it fails, the next writer merges.
    fn merge_tables(&self, view: &View) {
        if !view.wants_merge() {
            return;
        }
        let Ok(Some(_lock)) = self.try_lock_tables() else { return };
        // Another writer may have merged some of them.
        let Ok(view) = self.refresh() else { return };
        match view.merged(&self.backend, &self.format) {
            Ok(Some(view)) => drop(self.set_view(view)),
            Ok(None) => {}
            // A damaged table is not used again: each pack has its own.
            Err(error) => drop(self.reject_unreadable(&error, &view)),
        }
    }

    /// If a table of the view turned out to be damaged, says so and is true.
    pub(super) fn reject_unreadable(&self, error: &Error, view: &View) -> bool {
        let (ErrorKind::DamagedTable, Object::Table(name)) = (error.kind(), error.object()) else { return false };
        match view.tables.iter().find(|table| table.name() == *name && !table.is_rebuilt()) {
            Some(table) => {
                self.reject(table.number);
                true
            }
            None => false,
        }
    }
}

impl Writer {
    /// Makes the checkpoint that `manifest` describes durable, and gives it the job's next sequence
    /// number; what `manifest` says of `sequence` and of `cost.written_bytes` does not matter.
    ///
    /// # Errors
    /// Then the checkpoints are as they were. Content that was published before the failure stays
    /// until the next prune.
    pub fn commit(mut self, mut manifest: Manifest) -> Result<CheckpointInfo, Error> {
        check_job_name(&manifest.job)?;
        if let Some(id) = manifest.duplicate_space() {
            let reason = format!("two spaces of a checkpoint of {} have the id {id}: each needs its own", manifest.job);
            return Err(Error::because(ErrorKind::DuplicateSpace, reason));
        }
        let roots = manifest.roots().collect::<Vec<_>>();
        for root in roots.into_iter().filter(|root| !root.is_zero()) {
            if !self.holds(root)? {
                return Err(Error::missing(root));
            }
        }
        if self.packs.has_deltas() {
            self.inner.require_format(DELTAS)?;
        } else if manifest.spaces.iter().any(|space| space.pid().is_none()) {
            self.inner.require_format(ANY_SPACES)?;
        }
        // What takes long is durable before others of this job have to wait.
        self.packs.sync()?;
        let records = self.inner.lock_records(&manifest.job)?;
        manifest.sequence = self.inner.next_sequence(&manifest.job)?;
        manifest.cost.written_bytes = 0;
        let failed = BackendError::new("encode the manifest of", manifest.job.clone());
        let json = manifest.encode().map_err(|error| failed(error.into()))?;
        let id = self.put(Kind::Manifest, &json)?;

        let written_bytes = self.packs.finish()?;
        let (sequence, taken_unix_us) = (manifest.sequence, manifest.taken_unix_us);
        let info = CheckpointInfo { sequence, taken_unix_us, written_bytes, manifest: id };
        let record = NewRecord::write(&*self.inner.backend, &manifest.job, &self.inner.format, info)?;
        // All that needs room is written: a full disk leaves nothing of the checkpoint.
        self.lock.check()?;
        let tables = self.packs.publish()?;
        self.lock.check()?;
        records.check()?;
        let info = record.publish()?;
        drop(records);

        let view = self.inner.set_view(self.view.with_packs(&tables));
        self.inner.merge_tables(&view);
        Ok(info)
    }

    /// Makes sure that the page with this id, which is not one of zeros, is there.
    fn put_page(&mut self, id: ContentId, page: &ChangedPage<'_>) -> Result<(), Error> {
        if self.holds(id)? {
            locked(&self.inner.bases).moved(page.last, id);
            Ok(())
        } else if page.last.is_zero() {
            // A page that was not written before will perhaps not be written again.
            self.packs.add(Kind::Page, id, page.content).map(drop)
        } else {
            self.add_changed(id, page.last, page.content)
        }
    }

    /// Stores a page that is not there and that had the content `last` in an earlier checkpoint:
    /// what changed in it if that saves at least half, or else all of it.
    fn add_changed(&mut self, id: ContentId, last: ContentId, page: &[u8; PAGE_SIZE]) -> Result<(), Error> {
        let mut known = locked(&self.inner.bases).take(last);
        // Only content that is committed can be a base. A prune may have moved or removed it.
        if let Some(base) = known.take_if(|base| self.view.has_pack(base.pack)) {
            self.delta.clear();
            self.delta.extend_from_slice(&base.id.0);
            let max_bytes = (base.stored_bytes as usize / 2).saturating_sub(BASE_ID_BYTES);
            let is_short = delta::encode(&base.page, page, max_bytes, &mut self.delta);
            locked(&self.inner.bases).was_tried(is_short);
            if is_short {
                self.packs.add_delta(id, &self.delta)?;
                locked(&self.inner.bases).keep(id, base);
                return Ok(());
            }
            known = Some(base);
        }
        let Entry { pack, stored_bytes, .. } = self.packs.add(Kind::Page, id, page)?;
        let mut bases = locked(&self.inner.bases);
        if stored_bytes >= delta::MIN_BASE_BYTES && bases.wants_base() {
            // A base that is of no use any more makes room for the next one.
            let mut content = known.map_or_else(|| Box::new([0; PAGE_SIZE]), |base| base.page);
            content.copy_from_slice(page);
            bases.keep(id, Base { id, pack, stored_bytes, page: content });
        }
        Ok(())
    }

    /// True if the content is in the repository or was put.
    fn holds(&mut self, id: ContentId) -> Result<bool, Error> {
        self.lock.show_progress();
        if self.packs.contains(id)? {
            return Ok(true);
        }
        loop {
            match self.inner.is_complete_in(&self.view, id)? {
                Ok(is_complete) => return Ok(is_complete),
                Err(BadTable(number)) => {
                    self.inner.reject(number);
                    self.view = self.inner.refresh()?;
                }
            }
        }
    }
}

impl Store for Writer {
    fn put(&mut self, kind: Kind, content: &[u8]) -> Result<ContentId, Error> {
        if kind == Kind::Page && is_zero_page(content) {
            return Ok(ContentId::ZERO);
        }
        let id = ContentId::of(&self.inner.format.key, content);
        if !self.holds(id)? {
            self.packs.add(kind, id, content)?;
        }
        Ok(id)
    }

    fn put_changed(&mut self, last: ContentId, page: &[u8; PAGE_SIZE]) -> Result<ContentId, Error> {
        if is_zero_page(page) {
            return Ok(ContentId::ZERO);
        }
        let id = ContentId::of(&self.inner.format.key, page);
        self.put_page(id, &ChangedPage { last, content: page })?;
        Ok(id)
    }

    fn put_changed_pages(&mut self, pages: &[ChangedPage<'_>]) -> Result<Vec<ContentId>, Error> {
        let inner = self.inner.clone();
        let contents: Vec<_> = pages.iter().map(|page| page.content).collect();
        let mut ids = Vec::with_capacity(pages.len());
        visit_ids(&inner.format.key, &contents, &mut |part| {
            let pages = &pages[ids.len()..];
            let mut stored = part.iter().zip(pages).filter(|(id, _)| !id.is_zero());
            stored.try_for_each(|(&id, page)| self.put_page(id, page))?;
            ids.extend_from_slice(part);
            Ok::<(), Error>(())
        })?;
        Ok(ids)
    }

    fn get(&self, kind: Kind, id: ContentId) -> Result<Vec<u8>, Error> {
        match self.packs.read(id, &*self.inner)? {
            Some(record) => Ok(record.raw),
            None => Reader(self.inner.clone()).get(kind, id),
        }
    }

    fn get_page(&self, id: ContentId, page: &mut [u8; PAGE_SIZE]) -> Result<(), Error> {
        match self.packs.read(id, &*self.inner)? {
            Some(record) => {
                let length = record.raw.len();
                *page = record
                    .raw
                    .try_into()
                    .map_err(|_| Error::damaged_content(id, format!("a page of {length} bytes")))?;
                Ok(())
            }
            None => Reader(self.inner.clone()).get_page(id, page),
        }
    }
}
