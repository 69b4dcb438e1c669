//! Captures the memory of a target at one instant: collects, copies, freezes, and finishes the page
//! tree of each space.
//!
//! The strategies are those of PML, section 2.4: stop-and-copy collects and copies everything while
//! the target is frozen; pre-copy copies in rounds while the target runs, and freezes it for the
//! rest; copy-on-write keeps what is to be copied as it was in the freeze, and copies it when the
//! target runs again.

use std::collections::HashMap;
use std::io;
use std::time::{Duration, Instant, SystemTime};

use crate::repository::{FileRecord, SpaceRecord, StateRecord};
use crate::sys::flight::FlightBuffer;
use crate::sys::proc::system;
use crate::target::{Captured, CapturedSpace, Frozen, KeptCounts, SpaceId, Target, TargetError, TargetMemory};
use crate::{
    AddressRangeExt, ByteCount, ContentId, Error, ErrorKind, PAGE_SIZE, PageNumber, PageRange, PageTree, Range,
    RangeSet, Store, ranges,
};

/// How a checkpoint's memory is copied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Strategy {
    /// Everything is copied while the target is frozen.
    StopAndCopy,
    /// Rounds of copying while the target runs, then the rest while it is frozen.
    PreCopy {
        /// Rounds before the target is asked to freeze; at least one.
        max_rounds: u32,
        /// A round that finds no more pages than this is the last.
        enough_pages: u64,
    },
    /// Nothing is copied while the target is frozen. What is to be copied is kept as it was until
    /// it has been copied: a write to it waits for that. Only for targets that can keep pages:
    /// [`Frozen::keep`].
    CopyOnWrite,
}

impl Default for Strategy {
    fn default() -> Self {
        Strategy::PreCopy { max_rounds: 4, enough_pages: 1024 }
    }
}

/// Copied pages are held in memory until the target resumes: up to a quarter of the memory that the
/// machine has to spare, but at most this many bytes. A page that a later round copies again is
/// then hashed, compressed and stored only once, and a round takes no longer than its copying. More
/// than this gains little: the first checkpoint, which copies everything, stores each page anyway.
const MAX_IN_FLIGHT_BYTES: usize = 512 << 20;
/// The least limit that is chosen on a machine with little memory.
const MIN_IN_FLIGHT_BYTES: usize = 32 << 20;
/// Divisor of the available memory that gives the part for pages in flight.
const IN_FLIGHT_SHARE: usize = 4;

/// Bytes of one buffer for pages in flight.
const BUFFER_BYTES: usize = 128 << 20;
/// The most that a pre-copy round copies at once: what fits into one buffer.
const PART: ByteCount = ByteCount::new(BUFFER_BYTES as u64);

/// A round that finds at most this many pages is followed by a pause: copying them in the
/// freeze takes less time than another round, which walks the page tables.
const QUIET_PAGES: u64 = 64;

/// Calls without a round in the first pause of a freeze; each further pause is twice as long.
const FIRST_PAUSE: u32 = 3;

/// Bytes of the first buffer that are kept from one checkpoint to the next; the rest is lent to the
/// kernel.
const KEPT_BYTES: usize = 2 << 20;

/// Keeps, from one checkpoint of a target to the next, the content of each page of its memory.
///
/// The checkpointer knows targets and stores only by their traits. What it has collected is never
/// lost: until [`Checkpointer::committed`] is called, the pages of a failed checkpoint count as
/// written for the next one.
#[derive(Default)]
pub struct Checkpointer {
    spaces: HashMap<SpaceId, Space>,
    flight: Flight,
    /// The most bytes in flight while the target runs; None for a part of the available memory.
    /// See [`Checkpointer::limit_in_flight`].
    in_flight_bytes: Option<usize>,
}

/// The known memory of one space.
#[derive(Default)]
struct Space {
    /// What the store holds, uncommitted pages included.
    tree: PageTree,
    /// The tree at the last commit.
    committed: PageTree,
    /// Collected since the last commit.
    uncommitted: RangeSet,
    /// Collected but not yet copied.
    pending: RangeSet,
}

impl Space {
    /// Takes what is to be copied now, as whole pages. Here, and nowhere before, ranges of any
    /// granularity become the pages in which content is copied and stored.
    fn take_pending(&mut self) -> RangeSet {
        let pending = std::mem::take(&mut self.pending).into_whole_pages();
        self.uncommitted.extend(&pending);
        pending
    }
}

/// When a round is worth its cost while a target is being frozen.
struct Pauses {
    /// Calls that are still left out.
    calls_left: u32,
    /// Length of the next pause, calls.
    next_calls: u32,
}

impl Pauses {
    /// After a round that found this many pages.
    fn after(found_pages: u64) -> Pauses {
        let mut pauses = Pauses { calls_left: 0, next_calls: FIRST_PAUSE };
        pauses.round_found(found_pages);
        pauses
    }

    /// True if this call is left out.
    fn leaves_out_call(&mut self) -> bool {
        let is_pause = self.calls_left > 0;
        self.calls_left = self.calls_left.saturating_sub(1);
        is_pause
    }

    fn round_found(&mut self, found_pages: u64) {
        if found_pages <= QUIET_PAGES {
            self.calls_left = self.next_calls;
            self.next_calls = self.next_calls.saturating_mul(2);
        } else {
            self.next_calls = FIRST_PAUSE;
        }
    }
}

/// A target as it was at one instant. All content is in the store, but not yet committed.
#[derive(Clone, PartialEq, Debug)]
pub struct Capture {
    /// When the target was frozen.
    pub taken_at: SystemTime,
    /// The spaces, with the page tree of each.
    pub spaces: Vec<SpaceRecord>,
    /// Files, with their content at that instant.
    pub files: Vec<FileRecord>,
    /// State that the target's restorer understands.
    pub state: Vec<StateRecord>,
    /// Number of pages in which something was found written; a page that was copied several times
    /// counts once.
    pub dirty_pages: u64,
    /// Number of pages that were copied while the target was frozen.
    pub frozen_pages: u64,
    /// What became of the pages that were kept as they were in the freeze.
    pub kept: KeptCounts,
    /// Number of pre-copy rounds.
    pub rounds: u32,
    /// The most memory that copied pages took up until they were stored, bytes.
    pub peak_flight_bytes: u64,
    /// How long the target was frozen.
    pub downtime: Duration,
    /// The part of the downtime that was spent on collecting and copying memory.
    pub memory_downtime: Duration,
}

impl Checkpointer {
    /// A checkpointer whose first capture copies everything.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the content of a page tree that is committed for what a space holds. The next capture
    /// copies what the target finds written since.
    pub fn resume_space(&mut self, space: SpaceId, tree: PageTree) {
        self.spaces.insert(space, Space { committed: tree.clone(), tree, ..Space::default() });
    }

    /// Limits the memory that copied pages take up until they are stored. Pages that are copied
    /// while the target is being frozen, or is frozen, are added to that, because nothing is stored
    /// in that time. None: a quarter of the available memory, at least 32 and at most 512 MiB.
    pub fn limit_in_flight(&mut self, bytes: Option<usize>) {
        self.in_flight_bytes = bytes;
    }

    /// Captures the target at one instant. Afterwards the target runs, and `store` holds everything
    /// that was captured.
    ///
    /// Call [`Checkpointer::committed`] once the capture is safe, and [`Checkpointer::aborted`] if
    /// it failed or could not be committed.
    ///
    /// # Errors
    /// The target or the store failed. The target resumes.
    pub fn capture<T: Target>(
        &mut self,
        target: &mut T,
        store: &mut dyn Store,
        strategy: Strategy,
    ) -> Result<Capture, Error> {
        self.flight.limit_bytes = self.in_flight_bytes.unwrap_or_else(|| {
            let available_bytes = system::available_bytes().unwrap_or(0) as usize;
            (available_bytes / IN_FLIGHT_SHARE).clamp(MIN_IN_FLIGHT_BYTES, MAX_IN_FLIGHT_BYTES)
        });
        self.flight.peak_bytes = 0;
        target.precopy(store)?;
        let mut rounds = 0;
        let mut found_pages = 0;
        if let Strategy::PreCopy { max_rounds, enough_pages } = strategy {
            loop {
                found_pages = self.precopy_round(target, store)?;
                rounds += 1;
                if found_pages <= enough_pages || rounds >= max_rounds {
                    break;
                }
            }
        }
        self.flight.prepare();
        let mut pauses = Pauses::after(found_pages);
        let frozen = target.freeze(&mut |memory| {
            // The target may be frozen at any moment now, so nothing is stored to make room.
            let has_room = self.flight.total_bytes < self.flight.limit_bytes;
            let copies_ahead = matches!(strategy, Strategy::PreCopy { .. });
            if copies_ahead && has_room && !pauses.leaves_out_call() {
                pauses.round_found(self.copy_dirty(memory)?);
                rounds += 1;
            }
            Ok(())
        });
        let mut frozen = frozen.map_err(TargetError::into_error)?;
        let memory_begin = Instant::now();
        let frozen_pages = match strategy {
            Strategy::CopyOnWrite => {
                self.keep_dirty(&mut frozen)?;
                0
            }
            _ => self.copy_dirty(&mut frozen).map_err(TargetError::into_error)?,
        };
        let memory_downtime = memory_begin.elapsed();
        let mut captured = frozen.thaw().map_err(TargetError::into_error)?;

        if strategy == Strategy::CopyOnWrite {
            self.copy_pending(store, &mut |space, ranges, buffer| captured.read_kept(space, ranges, buffer))?;
        }
        let kept = captured.kept_counts();
        self.store_in_flight(store)?;
        let dirty_pages = self.spaces.values().map(|space| space.uncommitted.page_count()).sum();
        let spaces = captured.spaces();
        let spaces =
            spaces.into_iter().map(|space| self.finish_space(space, &captured, store)).collect::<Result<_, _>>()?;
        let (taken_at, downtime) = (captured.taken_at(), captured.downtime());
        let recorded = captured.record(store)?;
        Ok(Capture {
            taken_at,
            spaces,
            files: recorded.files,
            state: recorded.state,
            dirty_pages,
            frozen_pages,
            kept,
            rounds,
            peak_flight_bytes: self.flight.peak_bytes as u64,
            downtime,
            memory_downtime,
        })
    }

    /// Records that the capture is safely committed.
    pub fn committed(&mut self) {
        for space in self.spaces.values_mut() {
            space.committed = space.tree.clone();
            space.uncommitted = RangeSet::new();
        }
    }

    /// Records that the capture, or the commit of it, failed. The store no longer holds what was
    /// put, so everything that was collected since the last commit is copied again.
    pub fn aborted<T: Target>(&mut self, target: &mut T) {
        self.flight.clear();
        for space in self.spaces.values_mut() {
            space.tree = space.committed.clone();
            space.pending.extend(&std::mem::take(&mut space.uncommitted));
        }
        target.capture_failed();
    }

    /// Brings the page tree of a space to what the space held in the freeze, and saves it.
    fn finish_space<C: Captured>(
        &mut self,
        captured: CapturedSpace,
        target: &C,
        store: &mut dyn Store,
    ) -> Result<SpaceRecord, Error> {
        let CapturedSpace { space, id, label, kind, mappings, held_pages } = captured;
        let mut none = PageTree::new();
        let tree = self.spaces.get_mut(&space).map_or(&mut none, |space| &mut space.tree);
        if let Some(held_pages) = held_pages {
            keep_pages(tree, &held_pages);
        }
        target.saved_pages(space, &mut |page, content| {
            tree.set(page, store.put_changed(tree.get(page), content)?);
            Ok(())
        })?;
        Ok(SpaceRecord { id, label, kind, root: tree.save(store)?, pages: tree.page_count(), mappings })
    }

    /// Collects from every space into its `pending` set, and forgets spaces that are gone.
    fn collect<E: TargetError>(&mut self, memory: &mut dyn TargetMemory<Error = E>) -> Result<(), E> {
        let present = memory.spaces()?;
        self.spaces.retain(|id, _| present.contains(id));
        for id in present {
            let space = self.spaces.entry(id).or_default();
            memory.collect(id, &mut space.pending)?;
        }
        Ok(())
    }

    /// Collects and copies while the target runs, and stores pages in flight where there is no room
    /// for more. Returns the number of pages found written.
    fn precopy_round<E: TargetError>(
        &mut self,
        memory: &mut dyn TargetMemory<Error = E>,
        store: &mut dyn Store,
    ) -> Result<u64, Error> {
        self.collect(memory).map_err(TargetError::into_error)?;
        self.copy_pending(store, &mut |space, ranges, buffer| memory.read(space, ranges, buffer))
    }

    /// Copies what was collected, and stores pages in flight where there is no room for more.
    /// Returns the number of pages copied.
    fn copy_pending<E: TargetError>(&mut self, store: &mut dyn Store, read: ReadPages<'_, E>) -> Result<u64, Error> {
        let mut copied_pages = 0;
        let limit = ByteCount::from(self.flight.limit_bytes).max(ByteCount::PAGE);
        for id in self.spaces.keys().copied().collect::<Vec<_>>() {
            let Some(space) = self.spaces.get_mut(&id) else { continue };
            let pending = space.take_pending();
            copied_pages += pending.page_count();
            for part in ranges::split(pending.iter(), PART.min(limit)).map(RangeSet::from_iter) {
                if self.flight.total_bytes + part.total_bytes().to_usize() > self.flight.limit_bytes {
                    self.store_in_flight(store)?;
                }
                self.flight.copy(read, id, part).map_err(TargetError::into_error)?;
            }
        }
        Ok(copied_pages)
    }

    /// Collects, and has the target keep what is to be copied.
    fn keep_dirty<F: Frozen>(&mut self, frozen: &mut F) -> Result<(), Error> {
        self.collect(frozen).map_err(TargetError::into_error)?;
        for (&id, space) in &mut self.spaces {
            let pages = space.pending.clone().into_whole_pages();
            if !frozen.keep(id, &pages).map_err(TargetError::into_error)? {
                return Err(Error::cannot_keep_pages());
            }
        }
        Ok(())
    }

    /// Collects and copies without storing anything, however much it is. Returns the number of
    /// pages copied.
    fn copy_dirty<E: TargetError>(&mut self, memory: &mut dyn TargetMemory<Error = E>) -> Result<u64, E> {
        self.collect(memory)?;
        let mut copied_pages = 0;
        for (&id, space) in &mut self.spaces {
            let pending = space.take_pending();
            copied_pages += pending.page_count();
            self.flight.copy(&mut |space, ranges, buffer| memory.read(space, ranges, buffer), id, pending)?;
        }
        Ok(copied_pages)
    }

    /// Puts the pages in flight into the store, and their ids into the page trees.
    fn store_in_flight(&mut self, store: &mut dyn Store) -> Result<(), Error> {
        self.flight.check()?;
        let mut stored: HashMap<SpaceId, RangeSet> = HashMap::new();
        // The last copy of a page counts.
        for mut copied in std::mem::take(&mut self.flight.copied).into_iter().rev() {
            let Some(space) = self.spaces.get_mut(&copied.space) else { continue };
            let stored = stored.entry(copied.space).or_default();
            let buffer = &mut self.flight.buffers[copied.buffer];
            let mut offset = copied.offset;
            for range in copied.ranges.iter() {
                let content = buffer.slice(offset..offset + range.byte_count().to_usize());
                offset += content.len();
                let mut superseded = stored.within(range.clone()).peekable();
                for (number, page) in range.pages().zip(content.as_chunks::<PAGE_SIZE>().0) {
                    let address = number.address();
                    while superseded.next_if(|later| later.end <= address).is_some() {}
                    if superseded.peek().is_some_and(|later| later.start <= address) {
                        continue;
                    }
                    let is_missing = !copied.missing.is_empty() && copied.missing.contains(address);
                    let id = match is_missing {
                        true => ContentId::ZERO,
                        false => store.put_changed(space.tree.get(number), page)?,
                    };
                    space.tree.set(number, id);
                }
            }
            stored.extend(&std::mem::take(&mut copied.ranges));
        }
        self.flight.clear();
        Ok(())
    }
}

/// Reads pages of a space, as [`TargetMemory::read`] does.
type ReadPages<'a, E> = &'a mut dyn FnMut(SpaceId, &[Range], &mut [u8]) -> Result<RangeSet, E>;

/// Removes from a tree all pages outside of `kept`, which ascends.
fn keep_pages(tree: &mut PageTree, kept: &[PageRange]) {
    let mut end = PageNumber::MIN;
    for run in kept {
        tree.clear(end..run.start);
        end = run.end;
    }
    tree.clear(end..PageNumber::MAX);
}

/// Pages that were copied from the target and are not yet in the store.
#[derive(Default)]
struct Flight {
    buffers: Vec<FlightBuffer>,
    /// The buffer that is being filled.
    current: usize,
    /// Bytes of the current buffer that are in use.
    used_bytes: usize,
    /// Bytes of all buffers that are in use.
    total_bytes: usize,
    /// The most bytes that were in use during this capture.
    peak_bytes: usize,
    /// Above this many bytes a pre-copy round stores what is in flight.
    limit_bytes: usize,
    /// In the order in which they were copied.
    copied: Vec<Copied>,
    /// The error number for which a copy was left out since the last check.
    left_out: Option<i32>,
}

/// One copy: the content of the ranges lies one after the other in a buffer.
struct Copied {
    space: SpaceId,
    ranges: RangeSet,
    /// Pages that could not be read, because they were no longer mapped.
    missing: RangeSet,
    buffer: usize,
    offset: usize,
}

impl Flight {
    /// Makes sure that some pages can be copied without a page fault, if there is memory.
    fn prepare(&mut self) {
        let Ok(buffer) = self.room(KEPT_BYTES) else { return };
        let used_bytes = self.used_bytes;
        self.buffers[buffer].populate(used_bytes..used_bytes + KEPT_BYTES);
    }

    /// The buffer with room for that many bytes after its used part.
    ///
    /// # Errors
    /// `ENOMEM`
    fn room(&mut self, bytes: usize) -> io::Result<usize> {
        while self.buffers.get(self.current).is_some_and(|buffer| buffer.length() - self.used_bytes < bytes) {
            self.current += 1;
            self.used_bytes = 0;
        }
        if self.current == self.buffers.len() {
            // Where address space is scarce, no more than is needed.
            let buffer = FlightBuffer::new(bytes.max(BUFFER_BYTES)).or_else(|_| FlightBuffer::new(bytes))?;
            self.buffers.push(buffer);
        }
        Ok(self.current)
    }

    /// Fails if a copy was left out for want of memory.
    fn check(&mut self) -> Result<(), Error> {
        match self.left_out.take() {
            Some(number) => {
                let error = io::Error::from_raw_os_error(number);
                Err(Error::because(ErrorKind::NoMemory, "no memory for the pages that are copied").caused_by(error))
            }
            None => Ok(()),
        }
    }

    /// Copies pages. Without memory for them, [`Flight::check`] fails later: first, a frozen target
    /// resumes.
    fn copy<E>(&mut self, read: ReadPages<'_, E>, space: SpaceId, ranges: RangeSet) -> Result<(), E> {
        let bytes = ranges.total_bytes().to_usize();
        if bytes == 0 {
            return Ok(());
        }
        let buffer = match self.room(bytes) {
            Ok(buffer) => buffer,
            Err(error) => {
                self.left_out = Some(error.raw_os_error().unwrap_or(libc::ENOMEM));
                return Ok(());
            }
        };
        let offset = self.used_bytes;
        let list: Vec<Range> = ranges.iter().collect();
        let missing = read(space, &list, self.buffers[buffer].slice(offset..offset + bytes))?;
        self.used_bytes += bytes;
        self.total_bytes += bytes;
        self.peak_bytes = self.peak_bytes.max(self.total_bytes);
        self.copied.push(Copied { space, ranges, missing, buffer, offset });
        Ok(())
    }

    fn clear(&mut self) {
        self.copied.clear();
        self.left_out = None;
        // Buffers that this checkpoint did not need are likely not needed by the next one either.
        self.buffers.truncate(self.current + 1);
        self.current = 0;
        self.used_bytes = 0;
        self.total_bytes = 0;
        for (number, buffer) in self.buffers.iter_mut().enumerate() {
            buffer.lend_behind(if number == 0 { KEPT_BYTES } else { 0 });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use proptest::prelude::{prop, prop_assert, prop_assert_eq, proptest};

    use super::*;
    use crate::address::offsets;
    use crate::repository::TargetKind;
    use crate::store::MemoryStore;
    use crate::target::scripted::{
        CapturedMemory, Failed, PAGES, SAVED_PAGE, SAVED_VALUE, Scripted, act, captured_space,
    };
    use crate::target::{TargetDescription, WhileFreezing};
    use crate::{Kind, Mechanism};

    /// A store that fails at its nth page.
    struct Failing<'a> {
        store: &'a mut MemoryStore,
        puts_left: u32,
    }

    impl Store for Failing<'_> {
        fn put(&mut self, kind: Kind, content: &[u8]) -> Result<ContentId, Error> {
            self.puts_left = self.puts_left.checked_sub(1).ok_or_else(Error::read_only)?;
            self.store.put(kind, content)
        }

        fn get(&self, kind: Kind, id: ContentId) -> Result<Vec<u8>, Error> {
            self.store.get(kind, id)
        }

        fn get_page(&self, id: ContentId, page: &mut [u8; PAGE_SIZE]) -> Result<(), Error> {
            self.store.get_page(id, page)
        }
    }

    proptest! {
        #[test]
        fn a_capture_is_the_memory_at_the_freeze(
            script in prop::collection::vec(act(), 0..400),
            strategy in 0..3,
            failures in prop::collection::vec((0u32..40, 0u32..120), 6),
        ) {
            let strategy = match strategy {
                0 => Strategy::StopAndCopy,
                1 => Strategy::PreCopy { max_rounds: 3, enough_pages: 2 },
                _ => Strategy::CopyOnWrite,
            };
            let mut target = Scripted::new(script);
            let mut checkpointer = Checkpointer::new();
            let mut store = MemoryStore::new();
            for (puts_left, calls_left) in failures {
                (0..20).for_each(|_| target.run());
                // Every other checkpoint may fail in the store, and every third in the target.
                let puts_left = if puts_left % 2 == 0 { u32::MAX } else { puts_left };
                target.calls_left = if calls_left % 3 == 0 { calls_left } else { u32::MAX };
                target.is_failure_reported = false;
                let mut failing = Failing { store: &mut store, puts_left };
                // Nothing is called after the thaw that would let the script go on, so the target still holds what it held then.
                let captured = checkpointer.capture(&mut target, &mut failing, strategy);
                prop_assert!(!target.is_held, "the target was left frozen: {captured:?}");
                target.calls_left = u32::MAX;
                let Ok(captured) = captured else {
                    checkpointer.aborted(&mut target);
                    prop_assert!(target.is_failure_reported);
                    continue;
                };
                prop_assert_eq!(captured.spaces.len(), target.spaces.len());
                for record in &captured.spaces {
                    let tree = PageTree::load(record.root, &store).expect("the tree was saved");
                    for page in (0..PAGES).map(PageNumber::new) {
                        let mut content = [0; PAGE_SIZE];
                        store.get_page(tree.get(page), &mut content).expect("the page was put");
                        let space = record.id;
                        let value = target.memory.get(&(space, page)).copied();
                        let value = if page == SAVED_PAGE { value.map(|_| SAVED_VALUE) } else { value };
                        // What is no longer mapped was cut from the tree.
                        let value = value.unwrap_or(0);
                        prop_assert!(content.iter().all(|&byte| byte == value), "space {}, page {:?}", space, page);
                    }
                }
                checkpointer.committed();
            }
        }
    }

    #[test]
    fn rounds_go_on_only_while_they_find_pages() {
        // The calls in which a round is done, where a round finds the pages of a script.
        let rounds = |found_before: u64, found: &[u64], calls: u32| {
            let mut found = found.iter().copied();
            let mut pauses = Pauses::after(found_before);
            let is_round = |_: &u32| {
                let is_round = !pauses.leaves_out_call();
                if is_round {
                    pauses.round_found(found.next().unwrap_or(0));
                }
                is_round
            };
            (1..=calls).filter(is_round).collect::<Vec<_>>()
        };
        assert_eq!(rounds(1000, &[1000; 9], 5), [1, 2, 3, 4, 5]);
        assert_eq!(rounds(2, &[2, 2, 2], 25), [4, 11, 24]);
        // The target begins to write.
        assert_eq!(rounds(2, &[1000, 1000, 2, 1000], 11), [4, 5, 6, 10, 11]);
    }

    /// A target with one space of four pages, whose tracker reports 16 bytes across the border of
    /// two pages.
    struct ByteTracked {
        memory: Vec<u8>,
        dirty: RangeSet,
        /// Bytes that were read and not yet stored, now and at most.
        in_flight: Rc<Cell<(usize, usize)>>,
    }

    /// A store that counts what is stored as no longer in flight.
    struct Counting {
        store: MemoryStore,
        in_flight: Rc<Cell<(usize, usize)>>,
    }

    impl Store for Counting {
        fn put(&mut self, kind: Kind, content: &[u8]) -> Result<ContentId, Error> {
            let (now, most) = self.in_flight.get();
            let stored = if kind == Kind::Page { content.len() } else { 0 };
            // What the target records at the end was not read before.
            self.in_flight.set((now.saturating_sub(stored), most));
            self.store.put(kind, content)
        }

        fn get(&self, kind: Kind, id: ContentId) -> Result<Vec<u8>, Error> {
            self.store.get(kind, id)
        }

        fn get_page(&self, id: ContentId, page: &mut [u8; PAGE_SIZE]) -> Result<(), Error> {
            self.store.get_page(id, page)
        }
    }

    #[test]
    fn pages_in_flight_stay_within_the_limit_while_the_target_runs() {
        const LIMIT: usize = 1 << 20;
        let bytes = 40 * LIMIT + PAGE_SIZE;
        for strategy in [Strategy::default(), Strategy::StopAndCopy] {
            let in_flight = Rc::new(Cell::new((0, 0)));
            let mut target =
                ByteTracked { memory: vec![1; bytes], dirty: offsets(0..bytes).into(), in_flight: in_flight.clone() };
            let mut store = Counting { store: MemoryStore::new(), in_flight: in_flight.clone() };
            let mut checkpointer = Checkpointer::new();
            checkpointer.limit_in_flight(Some(LIMIT));
            let capture = checkpointer.capture(&mut target, &mut store, strategy).unwrap();
            let (left, most) = in_flight.get();
            assert_eq!(left, 0, "{strategy:?}");
            assert_eq!(capture.peak_flight_bytes, most as u64, "{strategy:?}");
            // What is copied in the freeze cannot be stored in it.
            let allowed = if strategy == Strategy::StopAndCopy { bytes } else { LIMIT };
            assert_eq!(most, allowed, "{strategy:?}");
        }
    }

    impl TargetMemory for ByteTracked {
        type Error = Failed;

        fn spaces(&mut self) -> Result<Vec<SpaceId>, Failed> {
            Ok(vec![0])
        }

        fn collect(&mut self, _: SpaceId, dirty: &mut RangeSet) -> Result<(), Failed> {
            dirty.append(&mut self.dirty);
            Ok(())
        }

        fn read(&mut self, _: SpaceId, ranges: &[Range], buffer: &mut [u8]) -> Result<RangeSet, Failed> {
            let mut rest = buffer;
            for range in ranges {
                let part = rest.split_off_mut(..range.byte_count().to_usize()).expect("as long as the ranges");
                part.copy_from_slice(&self.memory[range.to_offsets()]);
            }
            assert!(rest.is_empty());
            let (now, most) = self.in_flight.get();
            let now = now + ranges.iter().map(|range| range.byte_count().to_usize()).sum::<usize>();
            self.in_flight.set((now, most.max(now)));
            Ok(RangeSet::new())
        }
    }

    impl Target for ByteTracked {
        type Frozen<'target> = &'target mut ByteTracked;

        fn description(&self) -> TargetDescription {
            TargetDescription {
                label: "four pages".into(),
                command: Vec::new(),
                kind: TargetKind::Region,
                mechanism: Mechanism::Full,
            }
        }

        fn precopy(&mut self, _: &mut dyn Store) -> Result<(), Error> {
            Ok(())
        }

        fn freeze(&mut self, _: WhileFreezing<'_, Failed>) -> Result<&mut ByteTracked, Failed> {
            Ok(self)
        }

        fn capture_failed(&mut self) {}
    }

    impl Frozen for &mut ByteTracked {
        type Captured = CapturedMemory;

        fn thaw(self) -> Result<CapturedMemory, Failed> {
            Ok(CapturedMemory::of(vec![captured_space(0, 4, None)]))
        }
    }

    #[test]
    fn a_target_that_cannot_keep_pages_is_refused_and_its_writes_belong_to_the_next_capture() {
        let bytes = 4 * PAGE_SIZE;
        let mut target =
            ByteTracked { memory: vec![1; bytes], dirty: offsets(0..bytes).into(), in_flight: Rc::default() };
        let (mut checkpointer, mut store) = (Checkpointer::new(), MemoryStore::new());
        let error = checkpointer.capture(&mut target, &mut store, Strategy::CopyOnWrite).unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::Unavailable);
        checkpointer.aborted(&mut target);
        let capture = checkpointer.capture(&mut target, &mut store, Strategy::default()).unwrap();
        assert_eq!(capture.dirty_pages, 4);
    }

    #[test]
    fn a_write_that_is_smaller_than_a_page_is_stored() {
        for strategy in [Strategy::StopAndCopy, Strategy::default()] {
            let all = offsets(0..4 * PAGE_SIZE);
            let memory = vec![1; 4 * PAGE_SIZE];
            let mut target = ByteTracked { memory, dirty: all.clone().into(), in_flight: Rc::default() };
            let (mut checkpointer, mut store) = (Checkpointer::new(), MemoryStore::new());
            let first = checkpointer.capture(&mut target, &mut store, strategy).unwrap();
            assert_eq!(first.dirty_pages, 4);
            checkpointer.committed();

            let written = 2 * PAGE_SIZE - 8..2 * PAGE_SIZE + 8;
            target.memory[written.clone()].fill(2);
            target.dirty.insert(offsets(written));
            let second = checkpointer.capture(&mut target, &mut store, strategy).unwrap();
            assert_eq!(second.dirty_pages, 2, "{strategy:?}");
            let tree = PageTree::load(second.spaces[0].root, &store).unwrap();
            let mut restored = vec![0; 4 * PAGE_SIZE];
            for (number, page) in (0..).map(PageNumber::new).zip(restored.as_chunks_mut::<PAGE_SIZE>().0) {
                store.get_page(tree.get(number), page).unwrap();
            }
            assert!(restored == target.memory, "{strategy:?}: the write of 16 bytes is not in the checkpoint");
        }
    }
}
