//! Pages as what changed in another page, which is stored whole (its base).
//!
//! A chain has one link: a base is never itself a delta. So a page is read with at most one more
//! read, and a page that moves away from its base is stored whole again in time.
//!
//! Bases are taken from memory only. Packs are written past the page cache, so comparing with what
//! the disk holds would cost a read for each page. [`BaseCache`] keeps the pages that were written
//! in an interval before and were stored whole: the pages that a program writes again and again.

use pagemark_linux::proc::system;

use super::Inner;
use super::index::{BadTable, View};
use super::pack::{self, IdMap, ReadBase};
use super::table::Entry;
use crate::{ContentId, Error, ErrorKind, PAGE_SIZE};

/// Bytes of the id of the base, with which a delta begins.
pub(super) const BASE_ID_BYTES: usize = 16;
/// Bytes of the offset and the length before the bytes of a run.
const RUN_HEADER_BYTES: usize = 4;
/// What is compared at once: runs begin and end at multiples of this. Comparing single bytes would
/// take several times as long as it saves.
const WORD_BYTES: usize = 8;
/// Equal blocks are skipped.
const BLOCK_WORDS: usize = 8;
/// A page that becomes shorter than this by compression alone is no base: there is little to save.
pub(super) const MIN_BASE_BYTES: u32 = 256;
/// Consecutive pages without a short delta after which only every [`SAMPLE`]th page becomes a base.
const MANY_FAILURES: u32 = 64;
/// See [`MANY_FAILURES`].
const SAMPLE: u32 = 16;
/// The most memory for bases: a sixteenth of what the machine has to spare, but at most this.
const MAX_BYTES: usize = 1 << 30;
/// Divisor of the available memory that gives the part for bases.
const SHARE: usize = 16;

/// Appends the runs of bytes in which `page` differs from `base` to `delta`. False if they would
/// take more than `max_bytes`; `delta` is of no use then.
pub(super) fn encode(base: &[u8; PAGE_SIZE], page: &[u8; PAGE_SIZE], max_bytes: usize, delta: &mut Vec<u8>) -> bool {
    let end_bytes = delta.len() + max_bytes;
    let (old, new) = (base.as_chunks::<WORD_BYTES>().0, page.as_chunks::<WORD_BYTES>().0);
    let blocks = old.chunks(BLOCK_WORDS).zip(new.chunks(BLOCK_WORDS)).enumerate();
    // Where the length of the last run is, and the word behind the run.
    let mut last_run = (0, usize::MAX);
    for (block, (old, new)) in blocks.filter(|(_, (old, new))| old != new) {
        for (index, (old, new)) in old.iter().zip(new).enumerate() {
            if old == new {
                continue;
            }
            let word = block * BLOCK_WORDS + index;
            if last_run.1 != word {
                last_run.0 = delta.len() + 2;
                // The offset and the length are at most PAGE_SIZE.
                delta.extend_from_slice(&((word * WORD_BYTES) as u16).to_le_bytes());
                delta.extend_from_slice(&[0; 2]);
            }
            delta.extend_from_slice(new);
            last_run.1 = word + 1;
            if delta.len() > end_bytes {
                return false;
            }
            let run_bytes = (delta.len() - last_run.0 - 2) as u16;
            delta[last_run.0..last_run.0 + 2].copy_from_slice(&run_bytes.to_le_bytes());
        }
    }
    true
}

/// Changes `page`, which is the base, into the page that `runs` describe: a delta without the id of
/// its base.
///
/// # Errors
/// The reason why they are not the runs of a page.
pub(super) fn apply(mut runs: &[u8], page: &mut [u8; PAGE_SIZE]) -> Result<(), &'static str> {
    while let Some((header, rest)) = runs.split_first_chunk::<RUN_HEADER_BYTES>() {
        let start = usize::from(u16::from_le_bytes([header[0], header[1]]));
        let length = usize::from(u16::from_le_bytes([header[2], header[3]]));
        let (Some(changed), Some(bytes)) = (page.get_mut(start..start + length), rest.get(..length)) else {
            return Err("a change ends outside of the page or of the record");
        };
        changed.copy_from_slice(bytes);
        runs = &rest[length..];
    }
    if runs.is_empty() { Ok(()) } else { Err("it ends within a change") }
}

/// Bytes of memory for the bases of a repository.
pub(super) fn base_bytes() -> usize {
    (system::available_bytes().unwrap_or(0) as usize / SHARE).min(MAX_BYTES)
}

/// The id of a delta's base, and its runs. None if the delta is too short to have a base.
pub(super) fn split(delta: &[u8]) -> Option<(ContentId, &[u8])> {
    let (id, runs) = delta.split_first_chunk::<BASE_ID_BYTES>()?;
    Some((ContentId(*id), runs))
}

/// A page that is stored whole, and where.
pub(super) struct Base {
    pub(super) id: ContentId,
    /// The pack with its record. As long as that pack exists, the record does.
    pub(super) pack: u64,
    /// Bytes of its content as stored.
    pub(super) stored_bytes: u32,
    pub(super) page: Box<[u8; PAGE_SIZE]>,
}

/// Pages that are bases of deltas, each under the id of the content that its page had last.
///
/// The number of slots is limited. Where all are in use, a new base takes a slot at random: so a
/// program that writes more pages than there are slots in each interval still finds a part of them.
pub(super) struct BaseCache {
    slots: Vec<Option<(ContentId, Base)>>,
    free_slots: Vec<usize>,
    /// The slot of each content.
    slot_of: IdMap<usize>,
    max_slots: usize,
    random: u64,
    /// Pages since the last one of which a delta was short enough.
    failures: u32,
    /// Pages since the last one that was kept in spite of failures.
    left_out: u32,
}

impl BaseCache {
    /// A cache of at most this many bytes of pages.
    pub(super) fn new(max_bytes: usize) -> BaseCache {
        let max_slots = max_bytes / PAGE_SIZE;
        BaseCache {
            slots: Vec::new(),
            free_slots: Vec::new(),
            slot_of: IdMap::default(),
            max_slots,
            random: 1,
            failures: 0,
            left_out: 0,
        }
    }

    /// Records whether the delta of a page was short enough.
    pub(super) fn was_tried(&mut self, is_short: bool) {
        self.failures = if is_short { 0 } else { self.failures.saturating_add(1) };
    }

    /// True if a page that was stored whole is worth the copy. A program that rewrites whole pages
    /// pays for a few of them, which show when it changes less again.
    pub(super) fn wants_base(&mut self) -> bool {
        if self.failures < MANY_FAILURES {
            return true;
        }
        self.left_out = (self.left_out + 1) % SAMPLE;
        self.left_out == 0
    }

    /// Removes and returns the base of a page whose content was `last`.
    pub(super) fn take(&mut self, last: ContentId) -> Option<Base> {
        let slot = self.slot_of.remove(&last)?;
        self.free_slots.push(slot);
        self.slots[slot].take().map(|(_, base)| base)
    }

    /// The content of a page has changed from `last` to `now`, which was stored before: what the
    /// page has next is compared with the same base.
    pub(super) fn moved(&mut self, last: ContentId, now: ContentId) {
        if last != now
            && let Some(base) = self.take(last)
        {
            self.keep(now, base);
        }
    }

    /// Keeps the base of a page whose content is `now`. Two pages with the same content have one
    /// base.
    pub(super) fn keep(&mut self, now: ContentId, base: Base) {
        if self.max_slots == 0 || self.slot_of.contains_key(&now) {
            return;
        }
        let slot = match self.free_slots.pop() {
            Some(slot) => slot,
            None if self.slots.len() < self.max_slots => {
                self.slots.push(None);
                self.slots.len() - 1
            }
            None => self.random_slot(),
        };
        self.slot_of.insert(now, slot);
        if let Some((evicted, _)) = self.slots[slot].replace((now, base)) {
            self.slot_of.remove(&evicted);
        }
    }

    /// A slot by the next number of an xorshift generator.
    fn random_slot(&mut self) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        ((u128::from(self.random) * self.slots.len() as u128) >> 64) as usize
    }
}

/// Deltas, which can be read only together with their bases.
impl Inner {
    /// The base of a delta; none if the delta is damaged or gone.
    pub(super) fn base_of(&self, delta: &Entry) -> Result<Option<ContentId>, Error> {
        let Some(pack) = self.open_pack(delta.pack)? else { return Ok(None) };
        match pack::read_base_id(&*pack, &self.format.key, delta) {
            Ok(base) => Ok(Some(base)),
            Err(error) if matches!(error.kind(), ErrorKind::Damaged | ErrorKind::NotFound) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Makes sure that the base of an entry is there, if the entry is a delta's.
    pub(super) fn check_base(&self, entry: &Entry) -> Result<(), Error> {
        if !entry.is_delta {
            return Ok(());
        }
        let damaged = || Error::damaged_content(entry.id, "its record is damaged");
        let base = self.base_of(entry)?.ok_or_else(damaged)?;
        self.read_base(base, &mut [0; PAGE_SIZE])
    }

    /// True if the base of an entry is in the view, or the entry needs none.
    pub(super) fn has_base_in(&self, view: &View, entry: &Entry) -> Result<Result<bool, BadTable>, Error> {
        if !entry.is_delta {
            return Ok(Ok(true));
        }
        match self.base_of(entry)? {
            Some(base) => Ok(view.find_whole_from(base, 0)?.map(|found| found.is_some())),
            None => Ok(Ok(false)),
        }
    }

    /// True if a copy of a piece of content is in the view which is whole, or whose base is there.
    /// A prune keeps the bases of deltas that a checkpoint needs, and not of others.
    pub(super) fn is_complete_in(&self, view: &View, id: ContentId) -> Result<Result<bool, BadTable>, Error> {
        let mut next = 0;
        loop {
            let found = match view.find_from(id, next)? {
                Ok(Some(found)) => found,
                Ok(None) => return Ok(Ok(false)),
                Err(bad) => return Ok(Err(bad)),
            };
            match self.has_base_in(view, &found.entry)? {
                Ok(false) => next = found.table + 1,
                known => return Ok(known),
            }
        }
    }
}

impl ReadBase for Inner {
    fn read_base(&self, id: ContentId, page: &mut [u8; PAGE_SIZE]) -> Result<(), Error> {
        self.fetch(id, |source, entry| match entry.is_delta {
            true => Err(Error::damaged_content(id, "it is stored only as the change of another page")),
            false => pack::read_page(source, &self.format.key, entry, page, self),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn page(seed: u8) -> [u8; PAGE_SIZE] {
        std::array::from_fn(|at| (at as u8).wrapping_mul(31).wrapping_add(seed))
    }

    fn base(seed: u8) -> Base {
        Base { id: ContentId([seed; 16]), pack: 1, stored_bytes: 4096, page: Box::new(page(seed)) }
    }

    proptest! {
        #[test]
        fn the_runs_of_a_page_make_it_from_its_base(
            writes in prop::collection::vec((0..PAGE_SIZE, 1..200_usize, any::<u8>()), 0..20),
            max_bytes in 0..PAGE_SIZE,
        ) {
            let base = page(1);
            let mut changed = base;
            for (at, length, byte) in writes {
                changed[at..(at + length).min(PAGE_SIZE)].fill(byte);
            }
            let mut delta = vec![7];
            let fits = encode(&base, &changed, PAGE_SIZE * 2, &mut delta);
            prop_assert!(fits && delta[0] == 7);
            let mut result = base;
            apply(&delta[1..], &mut result).unwrap();
            prop_assert!(result == changed);
            let mut short = Vec::new();
            prop_assert_eq!(encode(&base, &changed, max_bytes, &mut short), delta.len() - 1 <= max_bytes);
        }

        #[test]
        fn any_bytes_are_runs_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = apply(&bytes, &mut page(1));
        }
    }

    #[test]
    fn runs_outside_of_a_page_are_refused() {
        for runs in [&[0, 16, 1, 0, 5][..], &[255, 15, 2, 0, 5, 5], &[0, 0, 2, 0, 5], &[0, 0, 1], &[255; 8]] {
            assert!(apply(runs, &mut page(1)).is_err(), "{runs:?}");
        }
    }

    #[test]
    fn neighbouring_words_are_one_run() {
        let base = page(1);
        let mut changed = base;
        [63, 64, 88].into_iter().for_each(|at| changed[at] ^= 1);
        let mut delta = Vec::new();
        assert!(encode(&base, &changed, PAGE_SIZE, &mut delta));
        assert_eq!(delta.len(), 2 * RUN_HEADER_BYTES + 3 * WORD_BYTES);
        assert_eq!(delta[..RUN_HEADER_BYTES], [56, 0, 16, 0]);
    }

    #[test]
    fn a_base_follows_its_page() {
        let (first, second, third) = (ContentId([1; 16]), ContentId([2; 16]), ContentId([3; 16]));
        let mut cache = BaseCache::new(4 * PAGE_SIZE);
        cache.keep(first, base(1));
        cache.moved(first, first);
        cache.moved(first, second);
        cache.moved(third, first);
        assert!(cache.take(first).is_none());
        assert_eq!(cache.take(second).map(|base| base.id), Some(first));
    }

    #[test]
    fn after_many_failures_a_sample_of_pages_is_kept() {
        let mut cache = BaseCache::new(PAGE_SIZE);
        (0..MANY_FAILURES).for_each(|_| {
            assert!(cache.wants_base());
            cache.was_tried(false);
        });
        assert_eq!((0..10 * SAMPLE).filter(|_| cache.wants_base()).count(), 10);
        cache.was_tried(true);
        assert!((0..SAMPLE).all(|_| cache.wants_base()));
    }

    #[test]
    fn a_cache_keeps_no_more_than_its_limit() {
        let mut cache = BaseCache::new(4 * PAGE_SIZE);
        for number in 1..=100 {
            cache.keep(ContentId([number; 16]), base(number));
        }
        let kept: Vec<u8> = (1..=100).filter(|&number| cache.take(ContentId([number; 16])).is_some()).collect();
        assert_eq!(kept.len(), 4);
        // The slots are free again, and are taken before others are evicted.
        (1..=4).for_each(|number| cache.keep(ContentId([number; 16]), base(number)));
        for number in 1..=4 {
            assert_eq!(cache.take(ContentId([number; 16])).map(|base| base.id), Some(ContentId([number; 16])));
        }
        assert!(cache.take(ContentId([1; 16])).is_none());
        let mut none = BaseCache::new(0);
        none.keep(ContentId([1; 16]), base(1));
        assert!(none.take(ContentId([1; 16])).is_none());
    }
}
