//! Freeze, collect, save state, copy, thaw.
//!
//! The strategies are those of PML, section III: stop-and-copy collects and copies everything while the target
//! is frozen; pre-copy copies in rounds while it runs, and freezes it for what is left.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::sys::flight::{FlightBuffer, available_bytes};
use crate::target::{SpaceId, Target};
use crate::{ContentId, Kind, PAGE_SIZE, PageTree, Range, RangeSet, Store, StoreError, ranges};

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
}

impl Default for Strategy {
    fn default() -> Self {
        Strategy::PreCopy { max_rounds: 4, enough_pages: 1024 }
    }
}

/// How long to wait for the freeze before another pre-copy round begins.
const FREEZE_POLL: Duration = Duration::from_millis(16);

/// Pages that are copied are held in memory until the target runs again: at least up to so many bytes, and up to a quarter of what the
/// machine has to spare. What a later round copies once more is then hashed, compressed and stored only as it was last, and
/// rounds are as short as copying is.
const LEAST_IN_FLIGHT_BYTES: usize = 128 << 20;
/// The part of the memory that is available.
const IN_FLIGHT_SHARE: usize = 4;

/// Bytes of a piece of memory for pages in flight.
const BUFFER_BYTES: usize = 128 << 20;

/// Of which so many stay with us from one checkpoint to the next; the rest is lent to the kernel.
const KEPT_BYTES: usize = 2 << 20;

/// Keeps, from one checkpoint of a target to the next, what each page of its memory holds.
///
/// It knows targets and stores by their traits alone. What it collected is never lost: until [`Checkpointer::committed`]
/// is called, a failed checkpoint's pages count as written for the next one.
#[derive(Default)]
pub struct Checkpointer {
    spaces: HashMap<SpaceId, Space>,
    flight: Flight,
}

/// The memory of one space as far as it is known.
#[derive(Default)]
struct Space {
    /// As the store has it, uncommitted pages included.
    tree: PageTree,
    /// As it was committed last.
    committed: PageTree,
    /// Collected since the last commit.
    uncommitted: RangeSet,
    /// Collected but not yet copied.
    pending: RangeSet,
}

/// What a capture found, before it is committed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Capture {
    /// Pages found written, each counted once, however often it was copied.
    pub dirty_pages: u64,
    /// Pages copied while the target was frozen.
    pub frozen_pages: u64,
    /// Pre-copy rounds.
    pub rounds: u32,
    /// How long the target was frozen.
    pub downtime: Duration,
    /// The part of it spent on collecting and copying memory.
    pub memory_downtime: Duration,
}

/// A checkpoint could not be taken.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError<E: std::error::Error + 'static> {
    /// The target failed.
    #[error(transparent)]
    Target(E),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Checkpointer {
    /// One that has seen nothing: its first capture copies everything.
    pub fn new() -> Self {
        Self::default()
    }

    /// Captures the target's memory at one instant, at which the target's state is saved too. Afterwards the target runs, and
    /// [`Checkpointer::tree`] has what its memory held at that instant.
    ///
    /// # Errors
    /// The target or the store failed. The target runs on. Call [`Checkpointer::aborted`] before the next capture.
    pub fn capture<T: Target>(
        &mut self,
        target: &mut T,
        store: &mut dyn Store,
        strategy: Strategy,
    ) -> Result<Capture, CaptureError<T::Error>> {
        let mut capture = Capture::default();
        self.flight.limit_bytes = (available_bytes() / IN_FLIGHT_SHARE).max(LEAST_IN_FLIGHT_BYTES);
        if let Strategy::PreCopy { max_rounds, enough_pages } = strategy {
            loop {
                let found_pages = self.round(target, store)?;
                capture.rounds += 1;
                if found_pages <= enough_pages || capture.rounds >= max_rounds {
                    break;
                }
            }
        }
        self.flight.prepare();
        target.begin_freeze().map_err(CaptureError::Target)?;
        if let Err(error) = self.freeze_and_copy(target, strategy, &mut capture) {
            // Whatever failed, the store above all, the target must not stand still for it; the first error is the one to tell.
            let _ = target.thaw();
            return Err(error);
        }
        capture.downtime = target.thaw().map_err(CaptureError::Target)?;
        // At once: what is put meanwhile takes long, and nothing more is collected.
        target.relax().map_err(CaptureError::Target)?;

        self.land(store)?;
        capture.dirty_pages =
            self.spaces.values().map(|space| space.uncommitted.total_bytes()).sum::<u64>() / PAGE_SIZE as u64;
        Ok(capture)
    }

    /// What happens from the begin of the freeze to the thaw.
    fn freeze_and_copy<T: Target>(
        &mut self,
        target: &mut T,
        strategy: Strategy,
        capture: &mut Capture,
    ) -> Result<(), CaptureError<T::Error>> {
        while !target.wait_frozen(FREEZE_POLL).map_err(CaptureError::Target)? {
            // The target may be frozen at any moment now, so nothing is stored to make room.
            if strategy != Strategy::StopAndCopy && self.flight.total_bytes < self.flight.limit_bytes {
                self.copy_dirty(target).map_err(CaptureError::Target)?;
                capture.rounds += 1;
            }
        }
        target.save_state().map_err(CaptureError::Target)?;

        let memory_begin = Instant::now();
        let copied = self.copy_dirty(target);
        capture.memory_downtime = memory_begin.elapsed();
        capture.frozen_pages = copied.map_err(CaptureError::Target)?;
        Ok(())
    }

    /// What a space held at the last capture. None for a space that was not there.
    pub fn tree(&mut self, space: SpaceId) -> Option<&mut PageTree> {
        self.spaces.get_mut(&space).map(|space| &mut space.tree)
    }

    /// Says that the capture is safely committed.
    pub fn committed(&mut self) {
        for space in self.spaces.values_mut() {
            space.committed = space.tree.clone();
            space.uncommitted = RangeSet::new();
        }
    }

    /// Says that the capture, or the commit of it, failed: the store no longer holds what was put, so that everything
    /// collected since the last commit is to be copied again.
    pub fn aborted(&mut self) {
        self.flight.clear();
        for space in self.spaces.values_mut() {
            space.tree = space.committed.clone();
            space.pending.extend(&std::mem::take(&mut space.uncommitted));
        }
    }

    /// Collects from every space into its `pending` set, and forgets spaces that are gone.
    fn collect<T: Target>(&mut self, target: &mut T) -> Result<(), T::Error> {
        let present = target.spaces()?;
        self.spaces.retain(|id, _| present.contains(id));
        for id in present {
            let space = self.spaces.entry(id).or_default();
            target.collect(id, &mut space.pending)?;
        }
        Ok(())
    }

    /// One pre-copy round: collects and copies while the target runs. Returns how many pages it found.
    fn round<T: Target>(&mut self, target: &mut T, store: &mut dyn Store) -> Result<u64, CaptureError<T::Error>> {
        self.collect(target).map_err(CaptureError::Target)?;
        let mut found_pages = 0;
        for id in self.spaces.keys().copied().collect::<Vec<_>>() {
            let Some(space) = self.spaces.get_mut(&id) else { continue };
            let pending = std::mem::take(&mut space.pending);
            space.uncommitted.extend(&pending);
            found_pages += pending.total_bytes() / PAGE_SIZE as u64;
            for part in ranges::split(pending.iter(), BUFFER_BYTES as u64).map(RangeSet::from_iter) {
                if self.flight.total_bytes + part.total_bytes() as usize > self.flight.limit_bytes {
                    self.land(store)?;
                }
                self.flight.copy(target, id, part).map_err(CaptureError::Target)?;
            }
        }
        Ok(found_pages)
    }

    /// Collects and copies without storing anything, however much it is. Returns how many pages that were.
    fn copy_dirty<T: Target>(&mut self, target: &mut T) -> Result<u64, T::Error> {
        self.collect(target)?;
        let mut copied_pages = 0;
        for (&id, space) in &mut self.spaces {
            let pending = std::mem::take(&mut space.pending);
            space.uncommitted.extend(&pending);
            copied_pages += pending.total_bytes() / PAGE_SIZE as u64;
            self.flight.copy(target, id, pending)?;
        }
        Ok(copied_pages)
    }

    /// Puts what is in flight into the store.
    fn land(&mut self, store: &mut dyn Store) -> Result<(), StoreError> {
        let mut landed: HashMap<SpaceId, RangeSet> = HashMap::new();
        // The last copy of a page counts.
        for mut copied in std::mem::take(&mut self.flight.copied).into_iter().rev() {
            let Some(space) = self.spaces.get_mut(&copied.space) else { continue };
            let landed = landed.entry(copied.space).or_default();
            let buffer = &mut self.flight.buffers[copied.buffer];
            let mut offset = copied.offset;
            for range in copied.ranges.iter() {
                let content = buffer.slice(offset..offset + (range.end - range.start) as usize);
                offset += content.len();
                let mut superseded = landed.within(range.clone()).peekable();
                for (address, page) in range.step_by(PAGE_SIZE).zip(content.chunks_exact(PAGE_SIZE)) {
                    while superseded.next_if(|later| later.end <= address).is_some() {}
                    if superseded.peek().is_some_and(|later| later.start <= address) {
                        continue;
                    }
                    let is_missing = !copied.missing.is_empty() && copied.missing.contains(address);
                    let id = if is_missing { ContentId::ZERO } else { store.put(Kind::Page, page)? };
                    space.tree.set(address / PAGE_SIZE as u64, id);
                }
            }
            landed.extend(&std::mem::take(&mut copied.ranges));
        }
        self.flight.clear();
        Ok(())
    }
}

/// Pages that were copied from the target and are not yet in the store.
#[derive(Default)]
struct Flight {
    buffers: Vec<FlightBuffer>,
    /// The buffer that is being filled.
    current: usize,
    /// Bytes of it that are in use.
    used_bytes: usize,
    /// Bytes of all buffers that are in use.
    total_bytes: usize,
    /// What rounds make room for by storing.
    limit_bytes: usize,
    /// In the order in which they were copied.
    copied: Vec<Copied>,
}

/// Where a copy lies: the ranges one after the other.
struct Copied {
    space: SpaceId,
    ranges: RangeSet,
    /// What could not be read, because it was no longer there.
    missing: RangeSet,
    buffer: usize,
    offset: usize,
}

impl Flight {
    /// Makes sure that some pages can be copied without a page fault.
    fn prepare(&mut self) {
        let buffer = self.room(KEPT_BYTES);
        let used_bytes = self.used_bytes;
        self.buffers[buffer].populate(used_bytes..used_bytes + KEPT_BYTES);
    }

    /// The buffer with room for so many bytes behind what is used of it.
    fn room(&mut self, bytes: usize) -> usize {
        while self.buffers.get(self.current).is_some_and(|buffer| buffer.length() - self.used_bytes < bytes) {
            self.current += 1;
            self.used_bytes = 0;
        }
        if self.current == self.buffers.len() {
            self.buffers.push(FlightBuffer::new(bytes.max(BUFFER_BYTES)));
        }
        self.current
    }

    fn copy<T: Target>(&mut self, target: &mut T, space: SpaceId, ranges: RangeSet) -> Result<(), T::Error> {
        let bytes = ranges.total_bytes() as usize;
        if bytes == 0 {
            return Ok(());
        }
        let buffer = self.room(bytes);
        let offset = self.used_bytes;
        let list: Vec<Range> = ranges.iter().collect();
        let missing = target.read(space, &list, self.buffers[buffer].slice(offset..offset + bytes))?;
        self.used_bytes += bytes;
        self.total_bytes += bytes;
        self.copied.push(Copied { space, ranges, missing, buffer, offset });
        Ok(())
    }

    fn clear(&mut self) {
        self.copied.clear();
        // Buffers that were not needed this time are not likely to be the next time.
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
    use std::cell::RefCell;
    use std::collections::{BTreeMap, BTreeSet};
    use std::convert::Infallible;
    use std::rc::Rc;

    use proptest::prelude::{any, prop, prop_assert, prop_oneof, proptest};
    use proptest::strategy::Strategy as _;

    use super::*;
    use crate::store::MemoryStore;

    const PAGES: u64 = 64;

    /// A target that writes, whenever it is asked anything while it runs, what its script says next.
    struct Scripted {
        /// What each page of each space holds; a page that is not there is not mapped.
        memory: BTreeMap<(SpaceId, u64), u8>,
        written: BTreeMap<SpaceId, BTreeSet<u64>>,
        spaces: BTreeSet<SpaceId>,
        script: Rc<RefCell<Vec<Act>>>,
        looks_before_freeze: u32,
        is_frozen: bool,
        /// From the begin of a freeze to the thaw.
        is_held: bool,
    }

    #[derive(Clone, Debug)]
    enum Act {
        Write(SpaceId, u64, u8),
        Unmap(SpaceId, u64),
        Fork(SpaceId, SpaceId),
        Exit(SpaceId),
    }

    fn act() -> impl proptest::strategy::Strategy<Value = Act> {
        prop_oneof![
            20 => (0u64..3, 0..PAGES, 0u8..4).prop_map(|(space, page, value)| Act::Write(space, page, value)),
            4 => (0u64..3, 0..PAGES).prop_map(|(space, page)| Act::Unmap(space, page)),
            1 => (0u64..3, 1u64..3).prop_map(|(from, to)| Act::Fork(from, to)),
            1 => (1u64..3).prop_map(Act::Exit),
        ]
    }

    impl Scripted {
        fn new(script: Rc<RefCell<Vec<Act>>>) -> Self {
            let (memory, written) = (BTreeMap::new(), BTreeMap::new());
            Scripted {
                memory,
                written,
                spaces: [0].into(),
                script,
                looks_before_freeze: 0,
                is_frozen: false,
                is_held: false,
            }
        }

        fn run(&mut self) {
            let act = if self.is_frozen { None } else { self.script.borrow_mut().pop() };
            match act {
                Some(Act::Write(space, page, value)) if self.spaces.contains(&space) => {
                    self.memory.insert((space, page), value);
                    self.written.entry(space).or_default().insert(page);
                }
                Some(Act::Unmap(space, page)) => {
                    self.memory.remove(&(space, page));
                }
                Some(Act::Fork(from, to)) if self.spaces.contains(&from) && !self.spaces.contains(&to) => {
                    self.spaces.insert(to);
                    for page in 0..PAGES {
                        if let Some(&value) = self.memory.get(&(from, page)) {
                            self.memory.insert((to, page), value);
                            self.written.entry(to).or_default().insert(page);
                        }
                    }
                }
                Some(Act::Exit(space)) => {
                    self.spaces.remove(&space);
                    self.written.remove(&space);
                    self.memory.retain(|key, _| key.0 != space);
                }
                _ => {}
            }
        }
    }

    impl Target for Scripted {
        type Error = Infallible;

        fn spaces(&mut self) -> Result<Vec<SpaceId>, Infallible> {
            self.run();
            Ok(self.spaces.iter().copied().collect())
        }

        fn collect(&mut self, space: SpaceId, dirty: &mut RangeSet) -> Result<(), Infallible> {
            for page in self.written.remove(&space).unwrap_or_default() {
                dirty.insert(page * PAGE_SIZE as u64..(page + 1) * PAGE_SIZE as u64);
            }
            self.run();
            Ok(())
        }

        fn read(&mut self, space: SpaceId, ranges: &[Range], buffer: &mut [u8]) -> Result<RangeSet, Infallible> {
            let mut missing = RangeSet::new();
            let mut pages = buffer.chunks_exact_mut(PAGE_SIZE);
            for address in ranges.iter().cloned().flat_map(|range| range.step_by(PAGE_SIZE)) {
                self.run();
                let page = pages.next().expect("as long as the ranges");
                match self.memory.get(&(space, address / PAGE_SIZE as u64)) {
                    Some(&value) => page.fill(value),
                    None => missing.insert(address..address + PAGE_SIZE as u64),
                }
            }
            assert!(pages.next().is_none());
            Ok(missing)
        }

        fn begin_freeze(&mut self) -> Result<(), Infallible> {
            self.run();
            self.looks_before_freeze = 2;
            self.is_held = true;
            Ok(())
        }

        fn wait_frozen(&mut self, _: Duration) -> Result<bool, Infallible> {
            self.run();
            self.is_frozen = self.looks_before_freeze == 0;
            self.looks_before_freeze = self.looks_before_freeze.saturating_sub(1);
            Ok(self.is_frozen)
        }

        fn save_state(&mut self) -> Result<(), Infallible> {
            assert!(self.is_frozen);
            Ok(())
        }

        fn thaw(&mut self) -> Result<Duration, Infallible> {
            self.is_frozen = false;
            self.is_held = false;
            Ok(Duration::ZERO)
        }

        fn relax(&mut self) -> Result<(), Infallible> {
            Ok(())
        }
    }

    /// A store that fails at its nth page.
    struct Failing<'a> {
        store: &'a mut MemoryStore,
        puts_left: u32,
    }

    impl Store for Failing<'_> {
        fn put(&mut self, kind: Kind, content: &[u8]) -> Result<ContentId, StoreError> {
            self.puts_left = self.puts_left.checked_sub(1).ok_or(StoreError::ReadOnly)?;
            self.store.put(kind, content)
        }

        fn get(&self, kind: Kind, id: ContentId) -> Result<Vec<u8>, StoreError> {
            self.store.get(kind, id)
        }

        fn get_page(&self, id: ContentId, page: &mut [u8; PAGE_SIZE]) -> Result<(), StoreError> {
            self.store.get_page(id, page)
        }
    }

    proptest! {
        #[test]
        fn a_capture_is_the_memory_at_the_freeze(
            script in prop::collection::vec(act(), 0..400),
            stop_and_copy in any::<bool>(),
            failures in prop::collection::vec(0u32..40, 6),
        ) {
            let strategy = match stop_and_copy {
                true => Strategy::StopAndCopy,
                false => Strategy::PreCopy { max_rounds: 3, enough_pages: 2 },
            };
            let script = Rc::new(RefCell::new(script));
            let mut target = Scripted::new(script);
            let mut checkpointer = Checkpointer::new();
            let mut store = MemoryStore::new();
            for puts_left in failures {
                (0..20).for_each(|_| target.run());
                // Every other checkpoint may fail in the middle.
                let puts_left = if puts_left % 2 == 0 { u32::MAX } else { puts_left };
                let mut failing = Failing { store: &mut store, puts_left };
                // What the target holds when it runs on is what it held when it was frozen: nothing runs after thawing.
                let captured = checkpointer.capture(&mut target, &mut failing, strategy);
                prop_assert!(!target.is_held, "the target was left frozen: {captured:?}");
                if captured.is_err() {
                    checkpointer.aborted();
                    continue;
                }
                for &space in &target.spaces {
                    let tree = checkpointer.tree(space).expect("it was there");
                    for page in 0..PAGES {
                        let mut content = [0; PAGE_SIZE];
                        store.get_page(tree.get(page), &mut content).expect("the page was put");
                        if let Some(&value) = target.memory.get(&(space, page)) {
                            prop_assert!(content.iter().all(|&byte| byte == value), "space {space}, page {page}");
                        }
                    }
                }
                checkpointer.committed();
            }
        }
    }
}
