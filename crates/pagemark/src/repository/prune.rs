//! Freeing space: old checkpoints are removed, then the content that only they had.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use super::checkpoint::Reader;
use super::format::{FileKind, INDEXES, PACKS, job_directory, pack_name};
use super::index::{BadTable, View};
use super::lock::Lock;
use super::pack::{NewPacks, read_record};
use super::record;
use super::table::{Entry, Table};
use super::{Inner, Progress, Repository, check_job_name, is_newer};
use crate::backend::{BackendError, ListKind, Object, check_name};
use crate::tree::NodeRecord;
use crate::{ContentId, Error, ErrorKind};

/// How long to wait for another prune that shows no progress.
const PATIENCE: Duration = Duration::from_secs(30);
/// A pack is rewritten once less than this part of it, in percent, is needed.
const MIN_LIVE_PERCENT: u64 = 75;
/// Packs below this size are put together once there are [`MAX_SMALL_PACKS`].
const SMALL_PACK_BYTES: u64 = 4 << 20;
const MAX_SMALL_PACKS: usize = 16;
/// Old packs are removed each time this much of them was rewritten: that bounds the space that a
/// prune needs.
const BATCH_BYTES: u64 = if cfg!(test) { 64 << 10 } else { 256 << 20 };

/// Which checkpoints of a job are kept: each that one of the two rules names, and always the
/// newest. Without a rule all are kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Retention {
    /// The number of newest checkpoints to keep.
    pub keep_last: Option<u32>,
    /// Keep the newest checkpoint of each period of this length, counted from 1970 UTC.
    pub keep_every: Option<Duration>,
}

/// The result of [`Repository::prune`].
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct PruneReport {
    /// The checkpoints that were removed: job and sequence.
    pub removed: Vec<(String, u64)>,
    /// Those that would have been, but are being read.
    pub in_use: Vec<(String, u64)>,
    /// Bytes that the repository became smaller.
    pub freed_bytes: u64,
    /// Content that checkpoints name and that is missing or damaged: see [`Repository::verify`].
    pub unreadable: Vec<ContentId>,
}

impl Retention {
    /// Of checkpoints in ascending order, given by when they were taken, which stay.
    fn keeps(&self, taken_unix_us: &[u64]) -> Vec<bool> {
        let count = taken_unix_us.len();
        if *self == Retention::default() {
            return vec![true; count];
        }
        let last = self.keep_last.unwrap_or(0).max(1) as usize;
        let mut periods = HashSet::new();
        let mut keeps = vec![false; count];
        for at in (0..count).rev() {
            let period_us = self.keep_every.map(|period| period.as_micros().max(1));
            let first_of_period =
                period_us.is_some_and(|period| periods.insert(u128::from(taken_unix_us[at]) / period));
            keeps[at] = at + last >= count || first_of_period;
        }
        keeps
    }
}

impl Repository {
    /// Removes the checkpoints, of one job or of all, that `retention` does not keep. Content stays
    /// until [`Repository::prune`], so this costs little.
    ///
    /// # Errors
    /// Another process kept writing, or a file could not be read or removed.
    pub fn expire(&self, retention: &Retention, job: Option<&str>) -> Result<PruneReport, Error> {
        let lock = self.inner.lock("removes checkpoints", PATIENCE)?;
        let mut report = PruneReport::default();
        self.inner.expire(retention, job, &mut report, &lock)?;
        Ok(report)
    }

    /// Removes the checkpoints, of one job or of all, that `retention` does not keep, and all
    /// content that none needs any more. Readers continue; a checkpoint that a reader has open
    /// stays. Waits for writers that have begun before, as long as they go on; writers that want to
    /// begin meanwhile wait.
    ///
    /// Costs reading the page trees of all checkpoints that stay, each shared part once, and
    /// writing the packs anew that are largely not needed.
    ///
    /// # Errors
    /// Another process kept writing, or a file could not be read, written or removed; what was not
    /// removed then the next prune removes. A damaged checkpoint is no error.
    pub fn prune(
        &self,
        retention: &Retention,
        job: Option<&str>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<PruneReport, Error> {
        let lock = self.inner.lock_alone("prunes")?;
        self.prune_alone(retention, job, progress, &lock)
    }

    /// Like [`Repository::prune`], without waiting for writers longer than `budget`. None if they
    /// went on longer.
    pub(crate) fn prune_within(
        &self,
        budget: Duration,
        retention: &Retention,
        job: Option<&str>,
    ) -> Result<Option<PruneReport>, Error> {
        let Some(lock) = self.inner.lock_alone_within("prunes", budget)? else { return Ok(None) };
        self.prune_alone(retention, job, &mut |_| {}, &lock).map(Some)
    }

    fn prune_alone(
        &self,
        retention: &Retention,
        job: Option<&str>,
        progress: &mut dyn FnMut(Progress),
        lock: &Lock,
    ) -> Result<PruneReport, Error> {
        let inner = &self.inner;
        let before_bytes = inner.file_bytes()?;
        let mut report = PruneReport::default();
        inner.clean()?;
        inner.expire(retention, job, &mut report, lock)?;
        // Another process may have removed records, and died before that was durable.
        for job in inner.job_names()? {
            inner.backend.sync(&job_directory(&job))?;
        }
        loop {
            let (view, marks) = match inner.mark(&mut report, lock)? {
                Ok(marked) => marked,
                Err(BadTable(number)) => {
                    inner.reject(number);
                    continue;
                }
            };
            match inner.sweep(&view, &marks, progress, lock) {
                // The sweep did a part of its work; marking again finds the rest.
                Err(error) if inner.reject_unreadable(&error, &view) => {}
                swept => break swept?,
            }
        }
        report.freed_bytes = before_bytes.saturating_sub(inner.file_bytes()?);
        Ok(report)
    }
}

/// Packs that need not be kept as they are.
struct UnneededPacks {
    /// Nothing of them is needed.
    empty: Vec<u64>,
    /// Little of them is needed, or they are many and small.
    sparse: HashSet<u64>,
}

/// Which entries of a view's tables are needed: a bit each.
struct Marks {
    tables: Vec<Vec<u64>>,
}

impl Marks {
    fn for_view(view: &View) -> Marks {
        let words = |table: &Arc<Table>| vec![0; table.entry_count.div_ceil(64) as usize];
        Marks { tables: view.tables.iter().map(words).collect() }
    }

    /// True if it was not set.
    fn set(&mut self, table: usize, position: u64) -> bool {
        let word = &mut self.tables[table][(position / 64) as usize];
        let bit = 1 << (position % 64);
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }

    fn has(&self, table: usize, position: u64) -> bool {
        self.tables[table][(position / 64) as usize] & 1 << (position % 64) != 0
    }

    /// Calls `visit` with each needed entry.
    fn live(&self, view: &View, visit: &mut dyn FnMut(Entry)) -> Result<(), Error> {
        for (number, table) in view.tables.iter().enumerate() {
            for (position, entry) in table.entries().enumerate() {
                let entry = entry?;
                if self.has(number, position as u64) {
                    visit(entry);
                }
            }
        }
        Ok(())
    }
}

/// Visits everything that checkpoints name.
struct Marker<'a> {
    view: &'a View,
    marks: Marks,
    reader: Reader,
    unreadable: HashSet<ContentId>,
    lock: &'a Lock,
}

/// A table is damaged, or needed content cannot be found out.
enum MarkError {
    Table(BadTable),
    Failed(Error),
}

impl From<Error> for MarkError {
    fn from(error: Error) -> Self {
        MarkError::Failed(error)
    }
}

impl Marker<'_> {
    /// Marks one copy of a piece of content, and the base of that. True if it is there and was not
    /// marked before.
    fn mark(&mut self, id: ContentId) -> Result<bool, MarkError> {
        self.lock.show_progress();
        let Some(mut chosen) = self.view.find(id)?.map_err(MarkError::Table)? else {
            self.unreadable.insert(id);
            return Ok(false);
        };
        // Copies are rare: an interrupted prune leaves some. The one that stays must be intact.
        let mut next = chosen.table + 1;
        while let Some(other) = self.view.find_from(id, next)?.map_err(MarkError::Table)? {
            next = other.table + 1;
            if other.entry != chosen.entry && !self.reader.is_whole(&chosen.entry)? {
                chosen = other;
            }
        }
        let is_new = self.marks.set(chosen.table, chosen.position);
        if is_new && chosen.entry.is_delta {
            self.mark_base(&chosen.entry)?;
        }
        Ok(is_new)
    }

    /// Marks a copy of a delta's base that is stored whole.
    fn mark_base(&mut self, delta: &Entry) -> Result<(), MarkError> {
        let Some(base) = self.reader.0.base_of(delta)? else {
            self.unreadable.insert(delta.id);
            return Ok(());
        };
        let (mut chosen, mut next) = (None, 0);
        while let Some(copy) = self.view.find_whole_from(base, next)?.map_err(MarkError::Table)? {
            next = copy.table + 1;
            if chosen.is_none() || self.reader.is_whole(&copy.entry)? {
                chosen = Some(copy);
            }
        }
        match chosen {
            Some(copy) => drop(self.marks.set(copy.table, copy.position)),
            None => drop(self.unreadable.insert(base)),
        }
        Ok(())
    }

    fn mark_tree(&mut self, id: ContentId, level: Option<u8>) -> Result<(), MarkError> {
        if id.is_zero() || !self.mark(id)? {
            return Ok(());
        }
        let record = match level {
            None => NodeRecord::get_root(id, &self.reader),
            Some(level) => NodeRecord::get(id, level, &self.reader),
        };
        let record = match record {
            Ok(record) => record,
            Err(error) if matches!(error.kind(), ErrorKind::Damaged | ErrorKind::Missing) => {
                self.unreadable.insert(id);
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        };
        for child in record.children.into_iter().filter(|child| !child.is_zero()) {
            match record.level.checked_sub(1) {
                None => drop(self.mark(child)?),
                Some(level) => self.mark_tree(child, Some(level))?,
            }
        }
        Ok(())
    }
}

impl Inner {
    /// Bytes of all packs and index files.
    fn file_bytes(&self) -> Result<u64, BackendError> {
        let mut bytes = 0;
        for directory in [PACKS, INDEXES] {
            for entry in self.backend.list(directory)?.into_iter().filter(|entry| entry.kind == ListKind::Object) {
                // A name that is none of the repository's own may be one that no object can have.
                let name = format!("{directory}/{}", entry.name);
                bytes += if check_name(&name).is_ok() { self.backend.bytes(&name)?.unwrap_or(0) } else { 0 };
            }
        }
        Ok(bytes)
    }

    fn expire(
        &self,
        retention: &Retention,
        job: Option<&str>,
        report: &mut PruneReport,
        lock: &Lock,
    ) -> Result<(), Error> {
        let jobs = match job {
            Some(job) => check_job_name(job).map(|()| vec![job.to_owned()])?,
            None => self.job_names()?,
        };
        for job in jobs {
            let mut records = Vec::new();
            for sequence in self.sequences(&job)? {
                match record::read(&*self.backend, &job, sequence, &self.format) {
                    Ok(read) => records.extend(read),
                    // It names nothing any more, but stays for people to inspect.
                    Err(error) if error.kind() == ErrorKind::DamagedRecord => {}
                    Err(error) => return Err(error),
                }
            }
            let taken: Vec<u64> = records.iter().map(|info| info.taken_unix_us).collect();
            let keeps = retention.keeps(&taken);
            let mut removed_any = false;
            lock.check()?;
            for (info, _) in records.into_iter().zip(keeps).filter(|(_, keep)| !keep) {
                match self.backend.remove_unleased(&record::name(&job, info.sequence))? {
                    true => {
                        report.removed.push((job.clone(), info.sequence));
                        removed_any = true;
                    }
                    false => report.in_use.push((job.clone(), info.sequence)),
                }
            }
            // Content is removed only after the removal of the records that name it is durable.
            if removed_any {
                self.backend.sync(&job_directory(&job))?;
            }
        }
        Ok(())
    }

    /// Finds everything that a checkpoint needs.
    fn mark(
        self: &Arc<Self>,
        report: &mut PruneReport,
        lock: &Lock,
    ) -> Result<Result<(Arc<View>, Marks), BadTable>, Error> {
        let view = self.refresh()?;
        let reader = Reader(self.clone());
        let marks = Marks::for_view(&view);
        let mut marker = Marker { view: &view, marks, reader, unreadable: HashSet::new(), lock };
        for job in self.job_names()? {
            for sequence in self.sequences(&job)? {
                let info = match record::read(&*self.backend, &job, sequence, &self.format) {
                    Ok(Some(info)) => info,
                    Ok(None) => continue,
                    Err(error) if error.kind() == ErrorKind::DamagedRecord => continue,
                    Err(error) => return Err(error),
                };
                let mut mark_checkpoint = || -> Result<(), MarkError> {
                    marker.mark(info.manifest)?;
                    let manifest = match self.read_manifest(&job, &info) {
                        Ok(manifest) => manifest,
                        // The content that a newer manifest names is needed, but unknown to this program.
                        Err(error) if is_newer(&error) || error.is_storage() => return Err(error.into()),
                        Err(_) => {
                            marker.unreadable.insert(info.manifest);
                            return Ok(());
                        }
                    };
                    manifest.roots().try_for_each(|root| marker.mark_tree(root, None))
                };
                match mark_checkpoint() {
                    Ok(()) => {}
                    Err(MarkError::Table(bad)) => return Ok(Err(bad)),
                    Err(MarkError::Failed(error)) => return Err(error),
                }
            }
        }
        report.unreadable = marker.unreadable.into_iter().collect();
        report.unreadable.sort_unstable();
        let marks = marker.marks;
        Ok(Ok((view, marks)))
    }

    /// Removes packs that are not needed, rewrites packs of which little is needed, and updates the
    /// index.
    fn sweep(
        self: &Arc<Self>,
        view: &View,
        marks: &Marks,
        progress: &mut dyn FnMut(Progress),
        lock: &Lock,
    ) -> Result<(), Error> {
        let UnneededPacks { empty, sparse } = self.unneeded_packs(view, marks)?;
        let mut moving = Vec::new();
        marks.live(view, &mut |entry| moving.extend(sparse.contains(&entry.pack).then_some(entry)))?;
        moving.sort_unstable_by_key(|entry| (entry.pack, entry.offset));
        let mut now = view.with_packs(&[]);
        // Only now: the tables at the ends of packs go with them.
        self.remove_packs(&empty, &mut now, lock)?;
        self.move_records(&moving, &mut now, progress, lock)?;
        if now.packs != view.packs {
            self.write_index(&mut now)?;
        }
        self.refresh()?;
        Ok(())
    }

    /// The packs that need not be kept as they are.
    fn unneeded_packs(&self, view: &View, marks: &Marks) -> Result<UnneededPacks, Error> {
        let mut live_bytes: HashMap<u64, u64> = HashMap::new();
        marks.live(view, &mut |entry| {
            *live_bytes.entry(entry.pack).or_default() +=
                u64::from(entry.stored_bytes) + super::pack::RECORD_HEADER_BYTES as u64;
        })?;
        let rebuilt: HashSet<u64> =
            view.tables.iter().filter(|table| table.is_rebuilt()).map(|table| table.number).collect();
        let (mut empty, mut sparse, mut small) = (Vec::new(), HashSet::new(), Vec::new());
        for &pack in &view.packs {
            // A pack that is gone already is as good as empty.
            let file_bytes = self.backend.bytes(&pack_name(pack))?.unwrap_or(0);
            match live_bytes.get(&pack) {
                None => empty.push(pack),
                Some(live) if rebuilt.contains(&pack) || live * 100 < file_bytes * MIN_LIVE_PERCENT => {
                    sparse.insert(pack);
                }
                Some(_) if file_bytes < SMALL_PACK_BYTES => small.push(pack),
                Some(_) => {}
            }
        }
        if sparse.len() + small.len() > MAX_SMALL_PACKS {
            sparse.extend(small);
        }
        Ok(UnneededPacks { empty, sparse })
    }

    /// Moves records, in the order of their packs, to new packs, and removes those that they were
    /// in.
    fn move_records(
        self: &Arc<Self>,
        moving: &[Entry],
        now: &mut View,
        progress: &mut dyn FnMut(Progress),
        lock: &Lock,
    ) -> Result<(), Error> {
        let total_bytes = moving.iter().map(|entry| u64::from(entry.stored_bytes)).sum();
        let (mut done_bytes, mut batch_bytes) = (0, 0);
        let mut packs = self.new_packs();
        let mut moved = Vec::new();
        for entries in moving.chunk_by(|a, b| a.pack == b.pack) {
            let name = pack_name(entries[0].pack);
            let gone = BackendError::new("open", self.path_of(&name).display().to_string());
            let pack = self.backend.open(&name)?.ok_or_else(|| gone(std::io::ErrorKind::NotFound.into()))?;
            if self.copy(entries, &*pack, &mut packs)? {
                moved.push(entries[0].pack);
            }
            let bytes = entries.iter().map(|entry| u64::from(entry.stored_bytes)).sum::<u64>();
            done_bytes += bytes;
            batch_bytes += bytes;
            progress(Progress { done_bytes, total_bytes });
            lock.show_progress();
            if batch_bytes >= BATCH_BYTES {
                self.replace_packs(std::mem::replace(&mut packs, self.new_packs()), &moved, now, lock)?;
                moved.clear();
                batch_bytes = 0;
            }
        }
        self.replace_packs(packs, &moved, now, lock)
    }

    /// Writes one index for the packs that are there now.
    fn write_index(&self, now: &mut View) -> Result<(), Error> {
        if now.packs.is_empty() {
            for table in now.tables.iter().filter(|table| table.kind == FileKind::Index) {
                self.backend.remove(&table.name())?;
            }
            return Ok(());
        }
        let group = now.tables.clone();
        now.merge(&group, &self.backend, &self.format)?;
        Ok(())
    }

    /// Copies records to new packs. False if one is damaged: then the pack stays.
    fn copy(&self, entries: &[Entry], pack: &dyn Object, packs: &mut NewPacks) -> Result<bool, Error> {
        let mut all = true;
        for entry in entries {
            match read_record(pack, &self.format.key, entry, self) {
                Ok(record) => packs.copy(&record)?,
                Err(error) if error.kind() == ErrorKind::Damaged => all = false,
                Err(error) => return Err(error),
            }
        }
        Ok(all)
    }

    fn replace_packs(&self, mut packs: NewPacks, moved: &[u64], now: &mut View, lock: &Lock) -> Result<(), Error> {
        let tables = packs.publish()?;
        *now = now.with_packs(&tables);
        Ok(self.remove_packs(moved, now, lock)?)
    }

    fn remove_packs(&self, packs: &[u64], now: &mut View, lock: &Lock) -> Result<(), BackendError> {
        if packs.is_empty() {
            return Ok(());
        }
        lock.check()?;
        for pack in packs {
            self.close_pack(*pack);
            self.backend.remove(&pack_name(*pack))?;
        }
        self.backend.sync(PACKS)?;
        let removed: HashSet<&u64> = packs.iter().collect();
        now.packs.retain(|pack| !removed.contains(pack));
        // The table at the end of a pack is gone with it.
        now.tables.retain(|table| table.kind != FileKind::Pack || !removed.contains(&table.number));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(retention: Retention, taken_s: &[u64]) -> Vec<u64> {
        let taken: Vec<u64> = taken_s.iter().map(|s| s * 1_000_000).collect();
        taken_s.iter().copied().zip(retention.keeps(&taken)).filter(|(_, keep)| *keep).map(|(taken, _)| taken).collect()
    }

    #[test]
    fn retention_keeps_the_last_and_the_newest_of_each_period() {
        let taken = [1, 5, 9, 11, 19, 35, 36];
        let every = Some(Duration::from_secs(10));
        assert_eq!(kept(Retention::default(), &taken), taken);
        assert_eq!(kept(Retention { keep_last: Some(2), keep_every: None }, &taken), [35, 36]);
        assert_eq!(kept(Retention { keep_last: None, keep_every: every }, &taken), [9, 19, 36]);
        assert_eq!(kept(Retention { keep_last: Some(3), keep_every: every }, &taken), [9, 19, 35, 36]);
        assert_eq!(kept(Retention { keep_last: Some(0), keep_every: None }, &taken), [36]);
        assert_eq!(kept(Retention { keep_last: None, keep_every: Some(Duration::ZERO) }, &taken), taken);
        assert_eq!(kept(Retention { keep_last: Some(u32::MAX), keep_every: None }, &taken), taken);
    }
}
