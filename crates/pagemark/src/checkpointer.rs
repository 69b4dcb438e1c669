//! Freeze, collect, save state, copy, thaw.
//!
//! The strategies are those of PML, section III: stop-and-copy collects and copies everything while the target
//! is frozen; pre-copy copies in rounds while it runs, and freezes it for what is left.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::sys::flight::FlightBuffer;
use crate::target::{SpaceId, Target};
use crate::{ContentId, Kind, PAGE_SIZE, PageTree, Range, RangeSet, Store, StoreError};

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

/// Pages that are read at once in a pre-copy round: they stay in the cache until they are hashed.
const BATCH_PAGES: u64 = 128;

/// How long to wait for the freeze before another pre-copy round begins.
const FREEZE_POLL: Duration = Duration::from_millis(16);

/// Keeps, from one checkpoint of a target to the next, what each page of its memory holds.
///
/// It knows targets and stores by their traits alone. What it collected is never lost: until [`Checkpointer::committed`]
/// is called, a failed checkpoint's pages count as written for the next one.
#[derive(Default)]
pub struct Checkpointer {
    spaces: HashMap<SpaceId, Space>,
    flight: FlightBuffer,
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
    /// Pages copied, all rounds together.
    pub dirty_pages: u64,
    /// Those of them copied while the target was frozen.
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
        if let Strategy::PreCopy { max_rounds, enough_pages } = strategy {
            loop {
                let found_pages = self.round(target, store)?;
                capture.rounds += 1;
                capture.dirty_pages += found_pages;
                if found_pages <= enough_pages || capture.rounds >= max_rounds {
                    break;
                }
            }
        }
        self.flight.prepare();
        target.begin_freeze().map_err(CaptureError::Target)?;
        while !target.wait_frozen(FREEZE_POLL).map_err(CaptureError::Target)? {
            if strategy != Strategy::StopAndCopy {
                capture.dirty_pages += self.round(target, store)?;
                capture.rounds += 1;
            }
        }
        target.save_state().map_err(CaptureError::Target)?;

        let memory_begin = Instant::now();
        let copied = self.copy_frozen(target);
        capture.memory_downtime = memory_begin.elapsed();
        capture.downtime = target.thaw().map_err(CaptureError::Target)?;
        let copied = copied.map_err(CaptureError::Target)?;

        capture.frozen_pages = self.land(&copied, store)?;
        capture.dirty_pages += capture.frozen_pages;
        target.relax().map_err(CaptureError::Target)?;
        Ok(capture)
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
        let mut buffer = vec![0; (BATCH_PAGES as usize) * PAGE_SIZE];
        for (&id, space) in &mut self.spaces {
            let pending = std::mem::take(&mut space.pending);
            space.uncommitted.extend(&pending);
            found_pages += pending.total_bytes() / PAGE_SIZE as u64;
            for batch in Batches::new(&pending) {
                let bytes: u64 = batch.iter().map(|range| range.end - range.start).sum();
                let buffer = &mut buffer[..bytes as usize];
                let missing = target.read(id, &batch, buffer).map_err(CaptureError::Target)?;
                enter(&mut space.tree, &batch, buffer, &missing, store)?;
            }
        }
        Ok(found_pages)
    }

    /// Collects and copies what is left while the target is frozen.
    fn copy_frozen<T: Target>(&mut self, target: &mut T) -> Result<Vec<Copied>, T::Error> {
        self.collect(target)?;
        let pending_bytes: u64 = self.spaces.values().map(|space| space.pending.total_bytes()).sum();
        self.flight.reserve(pending_bytes as usize);
        let mut copied = Vec::with_capacity(self.spaces.len());
        let mut offset = 0;
        for (&id, space) in &mut self.spaces {
            let ranges: Vec<Range> = space.pending.iter().collect();
            let bytes = space.pending.total_bytes() as usize;
            let missing = target.read(id, &ranges, self.flight.slice(offset..offset + bytes))?;
            copied.push(Copied { space: id, ranges, offset, missing });
            offset += bytes;
        }
        Ok(copied)
    }

    /// Puts what was copied into the store.
    fn land(&mut self, copied: &[Copied], store: &mut dyn Store) -> Result<u64, StoreError> {
        let mut frozen_pages = 0;
        for copy in copied {
            let Some(space) = self.spaces.get_mut(&copy.space) else { continue };
            let pending = std::mem::take(&mut space.pending);
            space.uncommitted.extend(&pending);
            let bytes = pending.total_bytes() as usize;
            frozen_pages += (bytes / PAGE_SIZE) as u64;
            let content = self.flight.slice(copy.offset..copy.offset + bytes);
            enter(&mut space.tree, &copy.ranges, content, &copy.missing, store)?;
        }
        self.flight.release();
        Ok(frozen_pages)
    }
}

/// Where the pages of one space lie in the flight buffer.
struct Copied {
    space: SpaceId,
    ranges: Vec<Range>,
    offset: usize,
    missing: RangeSet,
}

/// Enters pages into a tree: `content` holds `ranges` one after the other.
fn enter(
    tree: &mut PageTree,
    ranges: &[Range],
    content: &[u8],
    missing: &RangeSet,
    store: &mut dyn Store,
) -> Result<(), StoreError> {
    let mut pages = content.chunks_exact(PAGE_SIZE);
    for address in ranges.iter().cloned().flat_map(|range| range.step_by(PAGE_SIZE)) {
        let Some(page) = pages.next() else { break };
        let id = if !missing.is_empty() && missing.contains(address) {
            ContentId::ZERO
        } else {
            store.put(Kind::Page, page)?
        };
        tree.set(address / PAGE_SIZE as u64, id);
    }
    Ok(())
}

/// Cuts a set into lists of ranges of at most [`BATCH_PAGES`] pages.
struct Batches<I: Iterator<Item = Range>> {
    ranges: I,
    rest: Option<Range>,
}

impl<'a> Batches<Box<dyn Iterator<Item = Range> + 'a>> {
    fn new(set: &'a RangeSet) -> Self {
        Batches { ranges: Box::new(set.iter()), rest: None }
    }
}

impl<I: Iterator<Item = Range>> Iterator for Batches<I> {
    type Item = Vec<Range>;

    fn next(&mut self) -> Option<Vec<Range>> {
        let mut room = BATCH_PAGES * PAGE_SIZE as u64;
        let mut batch = Vec::new();
        while room > 0 {
            let Some(range) = self.rest.take().or_else(|| self.ranges.next()) else { break };
            let end = range.end.min(range.start + room);
            room -= end - range.start;
            if end < range.end {
                self.rest = Some(end..range.end);
            }
            batch.push(range.start..end);
        }
        (!batch.is_empty()).then_some(batch)
    }
}
