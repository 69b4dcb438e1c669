//! Regions as targets: a program saves its own memory to a repository, and continues from there
//! after a crash.
//!
//! This is checkpointing by the application, as FTI and VeloC offer it: the program calls it where
//! its data is consistent. A save is incremental, since the tracker of the region knows what has
//! been written since the last one, and atomic, since a repository commits a checkpoint as a whole
//! or not at all.

use std::sync::MutexGuard;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime};

use pagemark_linux::at_fork::hold_off;

use super::{Region, State};
use crate::repository::{SpaceKind, TargetKind};
use crate::target::{
    CapturedSpace, CapturedSpaces, Frozen, SpaceId, Target, TargetDescription, TargetMemory, WhileFreezing,
};
use crate::{AddressRangeExt, ByteCount, Error, Range, RangeSet, Store};

/// Regions of this process, each under a label, as one target: a checkpoint holds all of them at
/// one instant.
///
/// [`Region::save`] saves a single region without it. Of several targets that a region belongs to,
/// only the one made last can save it.
///
/// A region is not frozen as a process is: other threads continue to write. What they write while a
/// checkpoint is taken is in that checkpoint or in the next one. A program that needs a consistent
/// state takes checkpoints while no thread writes.
///
/// ```
/// use pagemark::region::{Region, RegionOptions, RegionTarget};
/// use pagemark::repository::Repository;
/// use pagemark::{Job, JobOptions};
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("repository");
/// let (grid, step) = (Region::new(1 << 20)?, Region::new(4096)?);
/// let target = RegionTarget::new([("grid", &grid), ("step", &step)])?;
/// let mut job = Job::new(target, Repository::create(&path)?, JobOptions::new("simulation"));
/// grid.write(77, b"hot")?;
/// step.write(0, &[1])?;
/// let saved = job.checkpoint()?;
///
/// let checkpoint = Repository::open(&path)?.read("simulation", saved.sequence)?;
/// let grid = Region::from_checkpoint(&checkpoint, "grid", RegionOptions::default())?;
/// let mut heat = [0; 3];
/// grid.read(77, &mut heat)?;
/// assert_eq!(&heat, b"hot");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct RegionTarget<'region> {
    members: Vec<Member<'region>>,
    number: u64,
}

struct Member<'region> {
    label: String,
    region: &'region Region,
}

/// The offsets that a region has to save, and the target that saves them.
pub(super) struct UnsavedOffsets {
    /// Number of the target that saves the region.
    target: u64,
    /// Offsets that were written since that target collected last.
    pub(super) written: RangeSet,
}

static TARGETS: AtomicU64 = AtomicU64::new(0);

impl<'region> RegionTarget<'region> {
    /// Makes a target of regions whose content has not been saved yet.
    ///
    /// # Errors
    /// `ErrorKind::NotDistinct`, `ErrorKind::ForkedChild`, `ErrorKind::NotMapped`,
    /// `ErrorKind::Track`.
    pub fn new(
        regions: impl IntoIterator<Item = (impl Into<String>, &'region Region)>,
    ) -> Result<RegionTarget<'region>, Error> {
        let mut target = RegionTarget { members: Vec::new(), number: TARGETS.fetch_add(1, Ordering::Relaxed) };
        for (label, region) in regions {
            let label = label.into();
            let is_known = |member: &Member<'_>| member.label == label || member.region.number == region.number;
            if target.members.iter().any(is_known) {
                return Err(Error::not_distinct(label));
            }
            region.check()?;
            target.members.push(Member { label, region });
        }
        for member in &target.members {
            let mut state = member.region.lock();
            // From here on the tracker reports what is written, and what holds no data now is saved
            // as zeros.
            state.collect()?;
            let written = state.holding_all()?;
            state.unsaved = Some(UnsavedOffsets { target: target.number, written });
        }
        Ok(target)
    }

    /// Makes a target of a region of which a checkpointer already knows what was saved, except for
    /// what has been written since.
    pub(super) fn resumed(label: &str, region: &'region Region, number: u64) -> RegionTarget<'region> {
        RegionTarget { members: vec![Member { label: label.to_owned(), region }], number }
    }

    /// A number for a target that is made later.
    pub(super) fn reserve_number() -> u64 {
        TARGETS.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    fn member(&self, space: SpaceId) -> Option<&Member<'region>> {
        self.members.get(position(space))
    }
}

/// The position of a space among the regions of its target.
fn position(space: SpaceId) -> usize {
    usize::try_from(space).unwrap_or(usize::MAX)
}

impl UnsavedOffsets {
    /// No offsets for `target` to save.
    pub(super) fn none(target: u64) -> UnsavedOffsets {
        UnsavedOffsets { target, written: RangeSet::new() }
    }

    /// True if `target` saves the region.
    pub(super) fn is_of(&self, target: u64) -> bool {
        self.target == target
    }
}

impl State {
    /// Moves to `dirty` the offsets that were written since `target` collected last.
    fn collect_unsaved(&mut self, target: u64, dirty: &mut RangeSet) -> Result<(), Error> {
        if !self.unsaved.as_ref().is_some_and(|unsaved| unsaved.is_of(target)) {
            return Err(Error::saved_elsewhere());
        }
        let collected = self.collect();
        if let Some(unsaved) = &mut self.unsaved {
            dirty.append(&mut unsaved.written);
        }
        collected
    }
}

impl Region {
    /// Copies ranges of offsets one after the other into `buffer`. All of a region can always be
    /// read.
    fn copy_offsets(&self, ranges: &[Range], mut buffer: &mut [u8]) -> RangeSet {
        for range in ranges {
            let offsets = range.to_offsets();
            let (part, rest) = buffer.split_at_mut(offsets.len());
            self.shared_bytes().read(offsets.start, part);
            buffer = rest;
        }
        RangeSet::new()
    }
}

impl TargetMemory for RegionTarget<'_> {
    type Error = Error;

    fn spaces(&mut self) -> Result<Vec<SpaceId>, Error> {
        self.members.iter().try_for_each(|member| member.region.check())?;
        Ok((0..self.members.len() as SpaceId).collect())
    }

    fn collect(&mut self, space: SpaceId, dirty: &mut RangeSet) -> Result<(), Error> {
        match self.member(space) {
            Some(member) => member.region.lock().collect_unsaved(self.number, dirty),
            None => Ok(()),
        }
    }

    fn read(&mut self, space: SpaceId, ranges: &[Range], buffer: &mut [u8]) -> Result<RangeSet, Error> {
        let Some(member) = self.member(space) else { return Ok(ranges.iter().cloned().collect()) };
        Ok(member.region.copy_offsets(ranges, buffer))
    }
}

impl Target for RegionTarget<'_> {
    type Frozen<'target>
        = FrozenRegions<'target>
    where
        Self: 'target;

    fn description(&self) -> TargetDescription {
        let labels: Vec<&str> = self.members.iter().map(|member| member.label.as_str()).collect();
        TargetDescription {
            label: format!("{} of process {}", labels.join(", "), std::process::id()),
            command: std::env::args_os().map(|part| part.to_string_lossy().into_owned()).collect(),
            kind: TargetKind::Region,
            mechanism: self.members.first().map_or(crate::Mechanism::Full, |member| member.region.mechanism()),
        }
    }

    fn precopy(&mut self, _: &mut dyn Store) -> Result<(), Error> {
        Ok(())
    }

    /// Blocks calls that change the regions, such as begin and rollback. Direct writes of the
    /// program are not blocked.
    fn freeze(&mut self, _: WhileFreezing<'_, Error>) -> Result<FrozenRegions<'_>, Error> {
        let (frozen_at, since) = (SystemTime::now(), Instant::now());
        // All threads lock regions in the same order, so that two threads that freeze the same
        // regions do not deadlock.
        let mut order: Vec<usize> = (0..self.members.len()).collect();
        order.sort_by_key(|&index| self.members[index].region.number);
        let mut states: Vec<Option<MutexGuard<'_, State>>> = self.members.iter().map(|_| None).collect();
        for index in order {
            let region = self.members[index].region;
            region.check()?;
            let state = region.lock_beside_forks();
            if state.is_open {
                return Err(Error::transaction_open());
            }
            states[index] = Some(state);
        }
        let members = self.members.iter().zip(states.into_iter().flatten());
        let members =
            members.map(|(member, state)| FrozenMember { label: &member.label, region: member.region, state });
        Ok(FrozenRegions { members: members.collect(), target: self.number, frozen_at, since })
    }

    fn capture_failed(&mut self) {}
}

/// Frozen regions: no call changes them until this value is dropped.
pub struct FrozenRegions<'target> {
    members: Vec<FrozenMember<'target>>,
    target: u64,
    frozen_at: SystemTime,
    since: Instant,
}

struct FrozenMember<'target> {
    label: &'target str,
    region: &'target Region,
    state: MutexGuard<'target, State>,
}

impl TargetMemory for FrozenRegions<'_> {
    type Error = Error;

    fn spaces(&mut self) -> Result<Vec<SpaceId>, Error> {
        Ok((0..self.members.len() as SpaceId).collect())
    }

    fn collect(&mut self, space: SpaceId, dirty: &mut RangeSet) -> Result<(), Error> {
        let target = self.target;
        let _forks = hold_off();
        self.members.get_mut(position(space)).map_or(Ok(()), |member| member.state.collect_unsaved(target, dirty))
    }

    fn read(&mut self, space: SpaceId, ranges: &[Range], buffer: &mut [u8]) -> Result<RangeSet, Error> {
        let Some(member) = self.members.get(position(space)) else { return Ok(ranges.iter().cloned().collect()) };
        Ok(member.region.copy_offsets(ranges, buffer))
    }
}

impl Frozen for FrozenRegions<'_> {
    type Captured = CapturedSpaces;

    fn thaw(self) -> Result<CapturedSpaces, Error> {
        let spaces = self.members.iter().zip(0..).map(|(member, space)| CapturedSpace {
            space,
            id: space,
            label: member.label.to_owned(),
            kind: SpaceKind::Region { bytes: ByteCount::from(member.region.bytes()) },
            mappings: Vec::new(),
            held_pages: None,
        });
        Ok(CapturedSpaces { spaces: spaces.collect(), taken_at: self.frozen_at, downtime: self.since.elapsed() })
    }
}
