//! What is checkpointed: a process tree, a region, a virtual machine.
//!
//! A target is in one of three states, and each state is a type, so that nothing can be done in the
//! wrong order:
//!
//! ```text
//! Target (runs) ── freeze() ──► Frozen ── thaw() ──► Captured (runs; the rest is recorded)
//! ```
//!
//! Dropped in any state, the target resumes.

use std::time::{Duration, SystemTime};

use crate::repository::{FileRecord, MappingRecord, SpaceKind, StateRecord, TargetKind};
use crate::{Error, ErrorKind, Mechanism, PAGE_SIZE, PageNumber, PageRange, Range, RangeSet, Store};

pub use crate::id::SpaceId;

#[cfg(test)]
pub(crate) mod scripted;

/// The error of a target.
pub trait TargetError: std::error::Error + Send + Sync + 'static {
    /// True if the target has ended, so that there is nothing left to checkpoint.
    fn is_gone(&self) -> bool;

    /// The error of a checkpoint that failed because of this error. Its kind is
    /// [`ErrorKind::Gone`] if the target has ended, [`ErrorKind::Target`] otherwise;
    /// [`Error::target_error`] returns this error.
    fn into_error(self) -> Error
    where
        Self: Sized,
    {
        let kind = if self.is_gone() { ErrorKind::Gone } else { ErrorKind::Target };
        Error::of_target(kind, self)
    }
}

/// A target whose errors are those of this crate.
impl TargetError for Error {
    fn is_gone(&self) -> bool {
        Error::is_gone(self)
    }

    fn into_error(self) -> Error {
        self
    }
}

impl TargetError for std::convert::Infallible {
    fn is_gone(&self) -> bool {
        match *self {}
    }
}

/// The memory of a target, in any state in which it can be tracked and copied.
pub trait TargetMemory {
    /// Why the memory could not be tracked or copied.
    type Error: TargetError;

    /// Lists the spaces that the target has now. Called before each round of collecting.
    ///
    /// # Errors
    /// The target is gone or could not be followed.
    fn spaces(&mut self) -> Result<Vec<SpaceId>, Self::Error>;

    /// Adds to `dirty` what was written in `space` since the last call, as
    /// [`Tracker::collect`](crate::Tracker::collect) does. A space that is gone has nothing
    /// dirty.
    ///
    /// # Errors
    /// The space could not be tracked.
    fn collect(&mut self, space: SpaceId, dirty: &mut RangeSet) -> Result<(), Self::Error>;

    /// Reads `ranges` one after the other into `buffer`, whose length is their sum. Returns what
    /// could not be read because it is no longer mapped; the buffer's content for it is
    /// unspecified.
    ///
    /// # Errors
    /// The memory could not be read for another reason than that it is gone.
    fn read(&mut self, space: SpaceId, ranges: &[Range], buffer: &mut [u8]) -> Result<RangeSet, Self::Error>;
}

impl<M: TargetMemory + ?Sized> TargetMemory for &mut M {
    type Error = M::Error;

    fn spaces(&mut self) -> Result<Vec<SpaceId>, M::Error> {
        (**self).spaces()
    }

    fn collect(&mut self, space: SpaceId, dirty: &mut RangeSet) -> Result<(), M::Error> {
        (**self).collect(space, dirty)
    }

    fn read(&mut self, space: SpaceId, ranges: &[Range], buffer: &mut [u8]) -> Result<RangeSet, M::Error> {
        (**self).read(space, ranges, buffer)
    }
}

/// Called again and again while a target is being frozen, with its memory.
pub type WhileFreezing<'a, E> = &'a mut dyn FnMut(&mut dyn TargetMemory<Error = E>) -> Result<(), E>;

/// A target that runs.
pub trait Target: TargetMemory {
    /// The target while it is frozen.
    type Frozen<'target>: Frozen<Error = Self::Error>
    where
        Self: 'target;

    /// What the target is.
    fn description(&self) -> TargetDescription;

    /// Copies ahead what belongs to a checkpoint besides memory, so that less is left for the
    /// freeze. Called once, before the first round of collecting.
    ///
    /// # Errors
    /// It could not be read or stored.
    fn precopy(&mut self, store: &mut dyn Store) -> Result<(), Error>;

    /// Freezes the target and saves all of its state that has to be saved while it is frozen. Until
    /// the target is frozen, `meanwhile` is called again and again; the target may become
    /// frozen during a call.
    ///
    /// # Errors
    /// The target could not be frozen or saved, or `meanwhile` failed. The target resumes.
    fn freeze(&mut self, meanwhile: WhileFreezing<'_, Self::Error>) -> Result<Self::Frozen<'_>, Self::Error>;

    /// Drops what the target knows only by a checkpoint that was not completed. Called after a
    /// capture, or the commit of one, has failed.
    fn capture_failed(&mut self);
}

/// When a target keeps pages: see [`Frozen::keep`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Keep {
    /// Where it can.
    Always,
    /// Where the target is frozen for a shorter time by it than if the pages are copied.
    IfShorter,
}

/// A target that is frozen, with its state saved. Dropped, the target resumes.
pub trait Frozen: TargetMemory {
    /// What is known after the thaw.
    type Captured: Captured;

    /// Keeps the content of pages beyond the thaw, until [`Captured::release_kept`] or until the
    /// captured target is dropped: before a write to such a page its content is copied. Called for
    /// each space after it was collected. Returns the pages among them that are not kept, and
    /// have to be copied now. None if this target cannot keep pages.
    ///
    /// # Errors
    /// The pages could not be kept.
    fn keep(&mut self, _space: SpaceId, _pages: &RangeSet, _: Keep) -> Result<Option<RangeSet>, Self::Error> {
        Ok(None)
    }

    /// Lets the target resume, and begins the next interval: see
    /// [`Tracker::begin_interval`](crate::Tracker::begin_interval).
    ///
    /// # Errors
    /// The state was not saved, or it is not known whether the target runs.
    fn thaw(self) -> Result<Self::Captured, Self::Error>;
}

/// What a freeze captured besides the content of memory. The target runs.
pub trait Captured {
    /// When the target was frozen.
    fn taken_at(&self) -> SystemTime;

    /// How long the target was frozen, or stopped in another way since the last checkpoint.
    fn downtime(&self) -> Duration;

    /// The spaces as they were in the freeze.
    fn spaces(&self) -> Vec<CapturedSpace>;

    /// Reads pages that [`Frozen::keep`] has kept, as [`TargetMemory::read`] does, with their
    /// content in the freeze.
    ///
    /// # Errors
    /// The memory could not be read, now or before a write. Or nothing was kept.
    fn read_kept(&mut self, _space: SpaceId, _ranges: &[Range], _buffer: &mut [u8]) -> Result<RangeSet, Error> {
        Err(Error::cannot_keep_pages())
    }

    /// What became of the pages that were kept.
    fn kept_counts(&self) -> KeptCounts {
        KeptCounts::default()
    }

    /// Keeps pages no longer: all of them were read.
    fn release_kept(&mut self) {}

    /// Visits the pages of a space whose content was saved with the state, in ascending order. That
    /// content counts, whatever was copied.
    ///
    /// # Errors
    /// The saved state could not be read, or what `visit` returns.
    fn saved_pages(&self, space: SpaceId, visit: VisitPage<'_>) -> Result<(), Error>;

    /// Stores what was captured besides memory.
    ///
    /// # Errors
    /// It could not be read or stored.
    fn record(self, store: &mut dyn Store) -> Result<Recorded, Error>;
}

/// Captured spaces that have no state to record besides their content: those of a program's own
/// memory.
pub struct CapturedSpaces {
    /// The spaces as they were in the freeze.
    pub spaces: Vec<CapturedSpace>,
    /// When they were frozen.
    pub taken_at: SystemTime,
    /// How long they were frozen.
    pub downtime: Duration,
}

impl Captured for CapturedSpaces {
    fn taken_at(&self) -> SystemTime {
        self.taken_at
    }

    fn downtime(&self) -> Duration {
        self.downtime
    }

    fn spaces(&self) -> Vec<CapturedSpace> {
        self.spaces.clone()
    }

    fn saved_pages(&self, _: SpaceId, _: VisitPage<'_>) -> Result<(), Error> {
        Ok(())
    }

    fn record(self, _: &mut dyn Store) -> Result<Recorded, Error> {
        Ok(Recorded::default())
    }
}

/// What became of pages that [`Frozen::keep`] has kept: the counters of PML, section 3.2.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct KeptCounts {
    /// Pages that were copied while the target ran, before it wrote to them.
    pub concurrent_pages: u64,
    /// Pages that were copied because the target was about to write to them.
    pub cow_pages: u64,
    /// Writes since the last checkpoint that waited for Pagemark, of which the writes to such pages
    /// are a part.
    pub write_faults: u64,
}

/// Takes a page's number and its content.
pub type VisitPage<'a> = &'a mut dyn FnMut(PageNumber, &[u8; PAGE_SIZE]) -> Result<(), Error>;

/// What a target is, for people and for the manifests of its checkpoints.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TargetDescription {
    /// A name for people to read: `process 123`.
    pub label: String,
    /// The command line that started it; empty if there is none.
    pub command: Vec<String>,
    /// What can be restored from its checkpoints.
    pub kind: TargetKind,
    /// How written pages are found.
    pub mechanism: Mechanism,
}

/// A space as it was in the freeze.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CapturedSpace {
    /// Its number in the target.
    pub space: SpaceId,
    /// Its id in checkpoints, which finds it again in others of the same job: for a process the
    /// process id.
    pub id: SpaceId,
    /// A name for people to read; for a process its short name.
    pub label: String,
    /// What the space is.
    pub kind: SpaceKind,
    /// The mappings of an address space, in ascending order; empty for the other kinds.
    pub mappings: Vec<MappingRecord>,
    /// The pages that held data, in ascending order; everything else was freed. None: all that was
    /// ever found written.
    pub held_pages: Option<Vec<PageRange>>,
}

/// What was stored of a target besides memory.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Recorded {
    /// Files, with their content at the freeze.
    pub files: Vec<FileRecord>,
    /// State that its restorer understands.
    pub state: Vec<StateRecord>,
}
