//! Captures the memory of a target at one instant: collects, copies, freezes, and finishes the page
//! tree of each space.
//!
//! The strategies are those of PML, section 2.4: stop-and-copy collects and copies everything while
//! the target is frozen; pre-copy copies in rounds while the target runs, and freezes it for the
//! rest; copy-on-write keeps what is to be copied as it was in the freeze, and copies it when the
//! target runs again.

mod flight;
mod rounds;

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant, SystemTime};

use crate::repository::{FileRecord, SpaceRecord, StateRecord};
use crate::store::ChangedPage;
use crate::target::{Captured, CapturedSpace, Frozen, Keep, KeptCounts, SpaceId, Target, TargetError, TargetMemory};
use crate::{ByteCount, ContentId, Error, PAGE_SIZE, PageNumber, PageRange, PageTree, Range, RangeSet, Store, ranges};

use flight::Flight;
use rounds::{Pauses, Trials, pays};

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
    /// What of the other three freezes the target for the shortest time, decided in each freeze: a
    /// target that can keep pages keeps them if copying them takes longer. Rounds come first,
    /// except where the last ones left as much as that.
    Auto,
}

impl Strategy {
    const MAX_ROUNDS: u32 = 4;
    const ENOUGH_PAGES: u64 = 1024;

    /// The limits of [`Strategy::PreCopy`], if there are rounds.
    pub(crate) fn round_limits(self) -> Option<(u32, u64)> {
        match self {
            Strategy::PreCopy { max_rounds, enough_pages } => Some((max_rounds, enough_pages)),
            // The freeze decides about what two rounds leave.
            Strategy::Auto => Some((2, Self::ENOUGH_PAGES)),
            Strategy::StopAndCopy | Strategy::CopyOnWrite => None,
        }
    }
}

impl Default for Strategy {
    fn default() -> Self {
        Strategy::PreCopy { max_rounds: Self::MAX_ROUNDS, enough_pages: Self::ENOUGH_PAGES }
    }
}

/// The most that is copied at once while a target is being frozen. The target may be frozen at any
/// moment, and then it waits for the copy.
const PART_AHEAD: ByteCount = ByteCount::new(if cfg!(test) { 3 } else { 1024 } * PAGE_SIZE as u64);

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
    /// Pages that the last capture found written.
    last_dirty_pages: u64,
    /// Whether a capture with [`Strategy::Auto`] begins with rounds.
    trials: Trials,
    /// Why the target cannot keep pages with [`Strategy::Auto`].
    not_kept: Option<NotKept>,
}

/// Why a target cannot keep pages.
enum NotKept {
    /// No target of its kind can.
    Never,
    Failed(Error),
    /// As before, and the error was taken.
    Reported,
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

/// How far copying has come while a target is being frozen.
struct Ahead {
    /// When the next round is worth its cost.
    pauses: Pauses,
    /// What the last round has found and not copied yet, in parts.
    parts: VecDeque<(SpaceId, RangeSet)>,
    /// Number of rounds so far.
    rounds: u32,
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
    /// in that time. None: a quarter of the available memory, at least 4 MiB, and at most 2 GiB, or
    /// 64 MiB in the first capture.
    pub fn limit_in_flight(&mut self, bytes: Option<usize>) {
        self.in_flight_bytes = bytes;
    }

    /// Why the target cannot keep pages, though the strategy [`Strategy::Auto`] had it try to. Each
    /// reason is returned once.
    pub fn take_not_kept(&mut self) -> Option<Error> {
        match self.not_kept.replace(NotKept::Reported) {
            Some(NotKept::Failed(error)) => Some(error),
            other => {
                self.not_kept = other;
                None
            }
        }
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
        let is_first = self.spaces.is_empty();
        self.flight.limit_bytes = self.in_flight_bytes.unwrap_or_else(|| flight::default_limit(is_first));
        self.flight.peak_bytes = 0;
        target.precopy(store)?;
        let limits = strategy.round_limits().filter(|_| strategy != Strategy::Auto || self.trials.has_rounds());
        let (rounds, found_pages) = limits.map_or(Ok((0, 0)), |limits| self.precopy(target, store, limits))?;
        if strategy == Strategy::StopAndCopy {
            self.flight.prepare(ByteCount::of_pages(self.last_dirty_pages).to_usize());
        }
        let mut ahead = Ahead { pauses: Pauses::after(found_pages), parts: VecDeque::new(), rounds };
        let frozen = target.freeze(&mut |memory| match limits {
            Some(_) => self.copy_ahead(memory, &mut ahead),
            None => Ok(()),
        });
        let rounds = ahead.rounds;
        let mut frozen = frozen.map_err(TargetError::into_error)?;
        let memory_begin = Instant::now();
        for (id, part) in ahead.parts {
            if let Some(space) = self.spaces.get_mut(&id) {
                space.pending.extend(&part);
            }
        }
        let keeps = strategy == Strategy::CopyOnWrite || strategy == Strategy::Auto && self.not_kept.is_none();
        let frozen_pages = match keeps {
            true => self.keep_dirty(&mut frozen, strategy)?,
            false => self.copy_dirty(&mut frozen).map_err(TargetError::into_error)?,
        };
        self.trials.captured(self.spaces.values().any(|space| !space.pending.is_empty()));
        let memory_downtime = memory_begin.elapsed();
        let mut captured = frozen.thaw().map_err(TargetError::into_error)?;

        if keeps {
            self.copy_pending(store, &mut |space, ranges, buffer| captured.read_kept(space, ranges, buffer))?;
        }
        let kept = captured.kept_counts();
        captured.release_kept();
        self.store_in_flight(store)?;
        let dirty_pages = self.spaces.values().map(|space| space.uncommitted.page_count()).sum();
        self.last_dirty_pages = dirty_pages;
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

    /// Copies in rounds while the target runs, at most as many as the first limit says, until one
    /// finds no more pages than the second. Returns the number of rounds, and of the pages that the
    /// last one found.
    fn precopy<E: TargetError>(
        &mut self,
        memory: &mut dyn TargetMemory<Error = E>,
        store: &mut dyn Store,
        (max_rounds, enough_pages): (u32, u64),
    ) -> Result<(u32, u64), Error> {
        let (mut rounds, mut found_pages) = (0, 0);
        loop {
            let found_before = found_pages;
            found_pages = self.precopy_round(memory, store)?;
            rounds += 1;
            let is_last = found_pages <= enough_pages || rounds >= max_rounds;
            if is_last || rounds > 1 && !pays(found_before, found_pages) {
                break;
            }
        }
        // What the last round has found is likely written again until the freeze.
        let found_bytes = ByteCount::of_pages(found_pages).to_usize();
        if !self.flight.make_room(found_bytes) {
            self.store_in_flight(store)?;
        }
        // A part of it is copied twice: ahead of the freeze, and in it.
        self.flight.prepare(found_bytes + found_bytes / 2);
        Ok((rounds, found_pages))
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
            self.flight.supersede(id, &pending);
            for part in ranges::split(pending.iter(), flight::PART.min(limit)).map(RangeSet::from_iter) {
                if !self.flight.make_room(part.total_bytes().to_usize()) {
                    self.store_in_flight(store)?;
                }
                self.flight.copy(read, id, part).map_err(TargetError::into_error)?;
            }
        }
        Ok(copied_pages)
    }

    /// Collects, and has the target keep what is to be copied. Copies what it does not keep, and
    /// returns the number of these pages.
    fn keep_dirty<F: Frozen>(&mut self, frozen: &mut F, strategy: Strategy) -> Result<u64, Error> {
        self.collect(frozen).map_err(TargetError::into_error)?;
        let mut copied_pages = 0;
        let wanted = if strategy == Strategy::Auto { Keep::IfShorter } else { Keep::Always };
        for (&id, space) in &mut self.spaces {
            if space.pending.is_empty() {
                continue;
            }
            let pages = space.pending.clone().into_whole_pages();
            let to_copy = match frozen.keep(id, &pages, wanted) {
                Ok(Some(to_copy)) => to_copy.into_whole_pages(),
                Ok(None) if strategy == Strategy::Auto => {
                    self.not_kept = Some(NotKept::Never);
                    pages
                }
                Err(error) if strategy == Strategy::Auto => {
                    if !error.is_gone() {
                        self.not_kept = Some(NotKept::Failed(error.into_error()));
                    }
                    pages
                }
                Ok(None) => return Err(Error::cannot_keep_pages()),
                Err(error) => return Err(error.into_error()),
            };
            space.pending.subtract(&to_copy);
            space.uncommitted.extend(&to_copy);
            copied_pages += to_copy.page_count();
            let mut read = |space, ranges: &[Range], buffer: &mut [u8]| frozen.read(space, ranges, buffer);
            self.flight.copy_in_freeze(&mut read, id, &to_copy).map_err(TargetError::into_error)?;
        }
        Ok(copied_pages)
    }

    /// Copies a part of what was written while the target is being frozen. Nothing is stored to
    /// make room, because the target may be frozen at any moment.
    fn copy_ahead<E: TargetError>(
        &mut self,
        memory: &mut dyn TargetMemory<Error = E>,
        ahead: &mut Ahead,
    ) -> Result<(), E> {
        if ahead.parts.is_empty() && self.flight.has_room(PAGE_SIZE) && !ahead.pauses.leaves_out_call() {
            self.collect(memory)?;
            let mut found_pages = 0;
            for (&id, space) in &mut self.spaces {
                let pending = space.take_pending();
                found_pages += pending.page_count();
                let parts = ranges::split(pending.iter(), PART_AHEAD);
                ahead.parts.extend(parts.map(|part| (id, part.into_iter().collect())));
            }
            ahead.pauses.round_found(found_pages);
            ahead.rounds += 1;
        }
        let next_bytes = ahead.parts.front().map_or(0, |(_, part)| part.total_bytes().to_usize());
        if !self.flight.has_room(next_bytes) {
            return Ok(());
        }
        let Some((id, part)) = ahead.parts.pop_front() else { return Ok(()) };
        self.flight.copy(&mut |space, ranges, buffer| memory.read(space, ranges, buffer), id, part)
    }

    /// Collects and copies without storing anything, however much it is. Returns the number of
    /// pages copied.
    fn copy_dirty<E: TargetError>(&mut self, memory: &mut dyn TargetMemory<Error = E>) -> Result<u64, E> {
        self.collect(memory)?;
        let mut copied_pages = 0;
        for (&id, space) in &mut self.spaces {
            let pending = space.take_pending();
            copied_pages += pending.page_count();
            let mut read = |space, ranges: &[Range], buffer: &mut [u8]| memory.read(space, ranges, buffer);
            self.flight.copy_in_freeze(&mut read, id, &pending)?;
        }
        Ok(copied_pages)
    }

    /// Puts the pages in flight into the store, and their ids into the page trees.
    fn store_in_flight(&mut self, store: &mut dyn Store) -> Result<(), Error> {
        self.flight.check()?;
        let spaces = &mut self.spaces;
        self.flight.visit(&mut |space, copies| {
            let Some(space) = spaces.get_mut(&space) else { return Ok(()) };
            let mut changed = Vec::with_capacity(copies.len());
            for &(page, content) in copies {
                changed.extend(content.map(|content| ChangedPage { last: space.tree.get(page), content }));
            }
            let mut ids = store.put_changed_pages(&changed)?.into_iter();
            for &(page, content) in copies {
                let id = content.and_then(|_| ids.next()).unwrap_or(ContentId::ZERO);
                space.tree.set(page, id);
            }
            Ok(())
        })?;
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

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use pagemark_testing::assert_oracle;
    use proptest::prelude::{prop, prop_assert, prop_assert_eq, proptest};

    use super::*;
    use crate::AddressRangeExt;
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
            strategy in 0..4,
            failures in prop::collection::vec((0u32..40, 0u32..120), 6),
            limit_pages in prop::option::of(1..20usize),
        ) {
            let strategy = match strategy {
                0 => Strategy::StopAndCopy,
                1 => Strategy::PreCopy { max_rounds: 3, enough_pages: 2 },
                2 => Strategy::Auto,
                _ => Strategy::CopyOnWrite,
            };
            let mut target = Scripted::new(script);
            let mut checkpointer = Checkpointer::new();
            checkpointer.limit_in_flight(limit_pages.map(|pages| pages * PAGE_SIZE));
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
        target.dirty.insert(offsets(0..bytes));
        let mut auto = Checkpointer::new();
        let capture = auto.capture(&mut target, &mut store, Strategy::Auto).unwrap();
        assert_eq!((capture.dirty_pages, capture.rounds > 0), (4, true));
        assert!(auto.take_not_kept().is_none(), "no target of this kind can");
        auto.aborted(&mut target);
        target.dirty.insert(offsets(0..bytes));
        let capture = checkpointer.capture(&mut target, &mut store, Strategy::default()).unwrap();
        assert_eq!(capture.dirty_pages, 4);
    }

    #[test]
    fn pages_that_cannot_be_kept_are_copied_and_the_reason_is_returned_once() {
        let mut target = Scripted::new(Vec::new());
        let (mut checkpointer, mut store) = (Checkpointer::new(), MemoryStore::new());
        target.refuses_to_keep = true;
        for value in [11, 12] {
            let page = PageNumber::new(1);
            target.last_write = Some((0, page, value));
            let capture = checkpointer.capture(&mut target, &mut store, Strategy::Auto).unwrap();
            assert_eq!((capture.frozen_pages, capture.kept), (1, KeptCounts::default()));
            let mut content = [0; PAGE_SIZE];
            let tree = PageTree::load(capture.spaces[0].root, &store).unwrap();
            store.get_page(tree.get(page), &mut content).unwrap();
            assert_oracle!(content == [value; PAGE_SIZE], "the page of {value} is not in the checkpoint");
            checkpointer.committed();
            assert_eq!(checkpointer.take_not_kept().is_some(), value == 11);
        }
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
            assert_oracle!(restored == target.memory, "{strategy:?}: the write of 16 bytes is not in the checkpoint");
        }
    }
}
