//! Reading many pieces of content: in the order in which they are in the packs, on all processors.

use std::ops::{ControlFlow, Range};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use pagemark_linux::room;

use super::pack::{IdMap, RECORD_HEADER_BYTES, ReadBase, decode_base, decode_record};
use super::table::Entry;
use super::{Inner, delta, locked};
use crate::store::{Piece, Visit};
use crate::{ContentId, Error, PAGE_SIZE};

/// Maximum number of records in a batch, which a thread reads at once. Pages of a batch stay in the
/// cache of the processor until they are visited. Tests read several batches.
const BATCH_RECORDS: usize = if cfg!(test) { 4 } else { 64 };
/// Maximum of the bytes of a pack that a batch covers, unless the batch is a single record.
const BATCH_BYTES: u64 = 512 << 10;
/// Maximum of the content that a batch holds. Pages and nodes stay far below it; longer pieces are
/// read one by one, so that no pack makes the threads hold many of them.
const BATCH_CONTENT_BYTES: usize = 1 << 20;
/// Records with a longer gap between them are in different batches.
const MAX_GAP_BYTES: u64 = 32 << 10;
/// Batches that the storage reads ahead of the threads.
const BATCHES_AHEAD: usize = 24;
/// Maximum number of threads.
const MAX_THREADS: usize = 16;

/// A piece of content, and the positions in the list of the caller that name it.
struct Wanted {
    id: ContentId,
    /// Range of [`Plan::positions`].
    positions: Range<usize>,
}

/// The entry of a piece, and the index of the piece in [`Plan::wanted`].
type Located = (Entry, usize);

/// The order of the reads.
struct Plan {
    /// Positions in the list of the caller. Positions of equal ids are adjacent.
    positions: Vec<usize>,
    /// Each piece once, by ascending id.
    wanted: Vec<Wanted>,
    /// The pieces that were found, by pack and offset.
    located: Vec<Located>,
    /// Ranges of `located`, each within one pack.
    batches: Vec<Range<usize>>,
    /// Indexes into `wanted` of the pieces that were not found. A prune may be moving them.
    others: Vec<usize>,
}

impl Plan {
    fn new(inner: &Inner, ids: &[ContentId]) -> Result<Plan, Error> {
        let mut positions: Vec<usize> = (0..ids.len()).collect();
        positions.sort_unstable_by_key(|&position| (ids[position], position));
        let mut wanted: Vec<Wanted> = Vec::with_capacity(ids.len());
        for (at, &position) in positions.iter().enumerate() {
            match wanted.last_mut() {
                Some(last) if last.id == ids[position] => last.positions.end = at + 1,
                _ => wanted.push(Wanted { id: ids[position], positions: at..at + 1 }),
            }
        }
        let (mut located, others) = locate(inner, &wanted)?;
        located.sort_unstable_by_key(|(entry, _)| (entry.pack, entry.offset));
        let batches = batches_of(&located);
        Ok(Plan { positions, wanted, located, batches, others })
    }

    /// Number of units of work: the batches, and after them the pieces that were not found.
    fn job_count(&self) -> usize {
        self.batches.len() + self.others.len()
    }
}

/// Finds the entries of the wanted pieces. Also returns the indexes of the pieces that were not
/// found.
fn locate(inner: &Inner, wanted: &[Wanted]) -> Result<(Vec<Located>, Vec<usize>), Error> {
    let view = inner.view();
    let mut located = Vec::with_capacity(wanted.len());
    let mut others: Vec<usize> = (0..wanted.len()).collect();
    for table in &view.tables {
        let ids: Vec<ContentId> = others.iter().map(|&index| wanted[index].id).collect();
        let mut is_found = vec![false; ids.len()];
        let searched = table.find_all(&ids, &mut |at, entry| {
            if view.has_pack(entry.pack) {
                located.push((entry, others[at]));
                is_found[at] = true;
            }
        })?;
        if searched.is_err() {
            // What is missing then is found by other tables.
            inner.reject(table.number);
        }
        let mut is_found = is_found.into_iter();
        others.retain(|_| !is_found.next().unwrap_or_default());
        if others.is_empty() {
            break;
        }
    }
    Ok((located, others))
}

/// Divides entries, which are ordered by pack and offset, into batches.
fn batches_of(located: &[Located]) -> Vec<Range<usize>> {
    let mut batches: Vec<Range<usize>> = Vec::new();
    for (index, (entry, _)) in located.iter().enumerate() {
        let fits = |batch: &Range<usize>| {
            let (first, last) = (&located[batch.start].0, &located[batch.end - 1].0);
            first.pack == entry.pack
                && batch.len() < BATCH_RECORDS
                && u64::from(entry.offset) <= end_of(last) + MAX_GAP_BYTES
                && end_of(entry) - u64::from(first.offset) <= BATCH_BYTES
        };
        match batches.last_mut() {
            Some(batch) if fits(batch) => batch.end = index + 1,
            _ => batches.push(index..index + 1),
        }
    }
    batches
}

/// The bases of a batch's deltas, which are read together. Neither the entries that lead to them
/// nor their content are checked, since the content of the pages that the deltas make is.
#[derive(Default)]
struct Bases {
    /// Where the page of each base is in `pages`.
    position_of: IdMap<usize>,
    pages: Vec<[u8; PAGE_SIZE]>,
    stored: Vec<u8>,
}

impl Bases {
    /// Reads the bases of the deltas of a batch, whose records are in `stored`. One that is not
    /// found, or cannot be read, is left out.
    fn read(&mut self, inner: &Inner, entries: &[Located], stored: &[u8]) -> Result<(), Error> {
        self.position_of.clear();
        self.pages.clear();
        let start = entries.first().map_or(0, |(first, _)| u64::from(first.offset));
        let deltas = entries.iter().filter(|(entry, _)| entry.is_delta);
        let view = inner.view();
        let mut located: Vec<Located> = deltas
            .filter_map(|(entry, _)| {
                let content = (u64::from(entry.offset) - start) as usize + RECORD_HEADER_BYTES;
                let (base, _) = delta::split(stored.get(content..(end_of(entry) - start) as usize)?)?;
                // A damaged entry can have any length.
                view.guess_whole(base).filter(|entry| entry.stored_bytes as usize <= PAGE_SIZE)
            })
            .map(|entry| (entry, 0))
            .collect();
        located.sort_unstable_by_key(|(entry, _)| (entry.pack, entry.offset));
        located.dedup();
        for batch in batches_of(&located) {
            let entries = &located[batch];
            let Some((stored, start)) = read_stored(inner, entries, &mut self.stored)? else { continue };
            for (entry, _) in entries {
                let mut page = [0; PAGE_SIZE];
                if record_of(entry, stored, start)
                    .is_some_and(|record| decode_base(record, &inner.format.key, entry, &mut page).is_ok())
                {
                    self.position_of.insert(entry.id, self.pages.len());
                    self.pages.push(page);
                }
            }
        }
        Ok(())
    }
}

impl ReadBase for Bases {
    fn read_base(&self, id: ContentId, page: &mut [u8; PAGE_SIZE]) -> Result<(), Error> {
        let position = self.position_of.get(&id).ok_or_else(|| Error::missing(id))?;
        *page = self.pages[*position];
        Ok(())
    }
}

/// Reads the part of a pack that has the records of entries, which are in ascending order. Returns
/// it and its offset in the pack; none if it cannot be read, or if it is longer than a batch,
/// because an entry is wrong or a record is long.
fn read_stored<'b>(
    inner: &Inner,
    entries: &[Located],
    buffer: &'b mut Vec<u8>,
) -> Result<Option<(&'b [u8], u64)>, Error> {
    let Some((first, _)) = entries.first() else { return Ok(None) };
    let start = u64::from(first.offset);
    let length = (end_of_all(entries) - start) as usize;
    if length > BATCH_BYTES as usize {
        return Ok(None);
    }
    if buffer.len() < length {
        buffer.resize(length, 0);
    }
    let stored = &mut buffer[..length];
    match inner.open_pack(first.pack)? {
        Some(pack) if pack.read_at(stored, start).is_ok() => Ok(Some((stored, start))),
        _ => Ok(None),
    }
}

/// The record of an entry, in a part of its pack that begins at an offset. None if an entry that is
/// wrong ends elsewhere.
fn record_of<'s>(entry: &Entry, stored: &'s [u8], start: u64) -> Option<&'s [u8]> {
    let begin = u64::from(entry.offset).checked_sub(start)?;
    stored.get(begin as usize..(end_of(entry) - start) as usize)
}

/// The offset at which the last record of a batch ends in its pack. That need not be the record
/// that begins last: entries that are wrong overlap.
fn end_of_all(entries: &[Located]) -> u64 {
    entries.iter().map(|(entry, _)| end_of(entry)).max().unwrap_or_default()
}

/// The offset at which a record ends in its pack.
fn end_of(entry: &Entry) -> u64 {
    u64::from(entry.offset) + RECORD_HEADER_BYTES as u64 + u64::from(entry.stored_bytes)
}

impl Inner {
    /// Reads `ids`, none of which is zero, and passes the content to `visit`.
    pub(super) fn read_many(&self, ids: &[ContentId], visit: Visit<'_>) -> Result<(), Error> {
        let plan = Plan::new(self, ids)?;
        let (next_job, failure, single) = (AtomicUsize::new(0), Mutex::default(), Mutex::default());
        let reading = Reading { inner: self, plan: &plan, visit, next_job, failure, single };
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let thread_count = processors.min(MAX_THREADS).min(plan.job_count());
        let helpers = thread_count.saturating_sub(1);
        let helpers = if room::for_threads(helpers).is_ok() { helpers } else { 0 };
        std::thread::scope(|scope| {
            for _ in 0..helpers {
                let thread = std::thread::Builder::new().name("pagemark-read".into());
                // Where no thread can be created, this thread does all the work.
                drop(thread.spawn_scoped(scope, || reading.work()));
            }
            reading.work();
        });
        reading.failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }
}

/// A read of many pieces, which several threads carry out.
struct Reading<'a> {
    inner: &'a Inner,
    plan: &'a Plan,
    visit: Visit<'a>,
    next_job: AtomicUsize,
    failure: Mutex<Option<Error>>,
    /// Held while a piece is read by itself. Such a piece may be as long as any, and only one at a
    /// time is in memory.
    single: Mutex<()>,
}

/// The buffers of a thread.
#[derive(Default)]
struct Buffers {
    stored: Vec<u8>,
    raw: Vec<u8>,
    bases: Bases,
}

impl Reading<'_> {
    /// Does units of work until there are no more, or one fails.
    fn work(&self) {
        let mut buffers = Buffers::default();
        loop {
            let job = self.next_job.fetch_add(1, Ordering::Relaxed);
            let batch_count = self.plan.batches.len();
            let done = if job < batch_count {
                self.read_ahead(job);
                self.read_batch(&self.plan.batches[job], &mut buffers)
            } else if let Some(&wanted) = self.plan.others.get(job - batch_count) {
                self.read_single(wanted)
            } else {
                return;
            };
            match done {
                Ok(ControlFlow::Continue(())) => continue,
                Ok(ControlFlow::Break(())) => {}
                Err(error) => drop(locked(&self.failure).get_or_insert(error)),
            }
            self.next_job.store(self.plan.job_count(), Ordering::Relaxed);
            return;
        }
    }

    /// Asks the storage to read what follows.
    fn read_ahead(&self, job: usize) {
        let ahead = if job == 0 { 0..BATCHES_AHEAD } else { job + BATCHES_AHEAD - 1..job + BATCHES_AHEAD };
        for batch in self.plan.batches.get(ahead.start..).unwrap_or_default().iter().take(ahead.len()) {
            let entries = &self.plan.located[batch.clone()];
            // A pack that cannot be opened is an error when it is read.
            if let Some((first, _)) = entries.first()
                && let Ok(Some(pack)) = self.inner.open_pack(first.pack)
            {
                let start = u64::from(first.offset);
                pack.read_ahead(start, end_of_all(entries) - start);
            }
        }
    }

    fn read_batch(&self, batch: &Range<usize>, buffers: &mut Buffers) -> Result<ControlFlow<()>, Error> {
        let entries = &self.plan.located[batch.clone()];
        let Buffers { stored, raw, bases } = buffers;
        let stored = read_stored(self.inner, entries, stored)?;
        if let Some((stored, _)) = stored {
            bases.read(self.inner, entries, stored)?;
        }
        let (mut pieces, mut failed) = (Vec::with_capacity(entries.len()), Vec::new());
        let mut used = 0;
        for (entry, wanted) in entries {
            let record = stored.and_then(|(stored, start)| record_of(entry, stored, start));
            let decoded = record.map(|record| {
                let place = used..BATCH_CONTENT_BYTES;
                decode_record(record, &self.inner.format.key, entry, raw, place, bases)
            });
            match decoded {
                Some(Ok(length)) => {
                    let positions = self.plan.wanted[*wanted].positions.clone();
                    for &position in &self.plan.positions[positions] {
                        pieces.push(Piece { position, bytes: used..used + length });
                    }
                    used += length;
                }
                // It may be too long for a batch, another copy may be intact, and a read of the
                // single piece has the right error.
                Some(Err(_)) | None => failed.push(*wanted),
            }
        }
        if !pieces.is_empty() && (self.visit)(&pieces, &raw[..used]).is_break() {
            return Ok(ControlFlow::Break(()));
        }
        for wanted in failed {
            if self.read_single(wanted)?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Reads one piece, wherever an intact copy is.
    fn read_single(&self, wanted: usize) -> Result<ControlFlow<()>, Error> {
        let _alone = locked(&self.single);
        let Wanted { id, positions } = &self.plan.wanted[wanted];
        let raw = self.inner.get(*id)?;
        let piece = |&position: &usize| Piece { position, bytes: 0..raw.len() };
        let pieces: Vec<Piece> = self.plan.positions[positions.clone()].iter().map(piece).collect();
        Ok((self.visit)(&pieces, &raw))
    }
}
