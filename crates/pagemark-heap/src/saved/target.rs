//! A saved heap as a target of checkpoints.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Instant, SystemTime};

use pagemark::repository::{Repository, SpaceKind, TargetKind};
use pagemark::target::{
    CapturedSpace, CapturedSpaces, Frozen, SpaceId, Target, TargetDescription, TargetError, TargetMemory, WhileFreezing,
};
use pagemark::{Address, AddressRangeExt, Mechanism, PageTree, Range, RangeSet, Store};
use pagemark_linux::shared_bytes::SharedBytes;

use super::memory::Header;
use super::objects::{Locked, Objects};
use super::{header_of, heap_space};
use crate::grouping::Separate;
use crate::tracked::Tracked;
use crate::{Error, HeapTracker};

/// The heap, and what it knows of its job.
pub(super) struct HeapTarget {
    objects: Arc<Objects>,
    tracker: HeapTracker<Separate>,
    repository: Repository,
    job: String,
    /// The newest checkpoint of the job when this program saved or opened it.
    newest: Option<u64>,
    /// The number that this program has written into the heap.
    session: u64,
    /// Gets a message at the thaw.
    copied: Option<Sender<()>>,
}

impl HeapTarget {
    /// Tracks a heap from now on. The first collect reports everything.
    ///
    /// # Errors
    /// Those of [`HeapTracker::new`].
    pub fn new(
        objects: Arc<Objects>,
        repository: Repository,
        job: &str,
        newest: Option<u64>,
        header: &Header,
    ) -> Result<HeapTarget, Error> {
        let tracker = HeapTracker::of_saved(objects.clone(), Separate).map_err(Error::core("tracking", job))?;
        let (job, session) = (job.to_owned(), header.session);
        Ok(HeapTarget { objects, tracker, repository, job, newest, session, copied: None })
    }

    /// Takes what the memory holds now for what is saved.
    ///
    /// # Errors
    /// Those of [`HeapTracker::collect_written`].
    pub fn count_as_saved(&mut self) -> Result<(), Error> {
        let collected = self.tracker.collect_written(&mut RangeSet::new());
        collected.map(drop).map_err(Error::core("tracking", &self.job))
    }

    /// Has the next thaw reported, after which the program may write again.
    pub fn report_copied(&mut self, copied: Option<Sender<()>>) {
        self.copied = copied;
    }

    /// Records that a checkpoint of this heap is the newest of its job.
    pub fn saved_as(&mut self, sequence: u64) {
        self.newest = Some(sequence);
    }

    /// Checks that nobody else has saved to the job. The repository is locked for writing.
    fn check_newest(&mut self) -> Result<(), Error> {
        let core = |error| Error::core("reading the newest checkpoint of", &self.job)(error);
        let newest = self.repository.newest(&self.job).map_err(core)?;
        if newest == self.newest {
            return Ok(());
        }
        // A checkpoint that failed may have been committed all the same.
        let Some(sequence) = newest else { return Err(Error::saved_elsewhere(&self.job, None)) };
        let checkpoint = self.repository.read(&self.job, sequence).map_err(core)?;
        let is_own = match heap_space(&checkpoint) {
            Some((space, bytes)) => {
                let tree = PageTree::load(space.root, &checkpoint).map_err(core)?;
                header_of(&checkpoint, &tree, bytes, &self.job)?.session == self.session
            }
            None => false,
        };
        if !is_own {
            return Err(Error::saved_elsewhere(&self.job, newest));
        }
        self.newest = newest;
        Ok(())
    }
}

/// Offsets that a tracker has reported as addresses of the first view.
fn collect(
    objects: &Objects,
    tracker: &mut HeapTracker<Separate>,
    job: &str,
    dirty: &mut RangeSet,
) -> Result<(), Error> {
    let mut written = RangeSet::new();
    let collected = tracker.collect_written(&mut written);
    let start = objects.views().view(0).start;
    // What was found before an error counts too.
    let offset = |address: Address| Address::MIN + (address - start);
    dirty.append(&mut written.iter().map(|range| offset(range.start)..offset(range.end)).collect());
    collected.map(drop).map_err(Error::core("tracking", job))
}

/// Copies ranges of offsets one after the other into `buffer`.
fn read(objects: &Objects, ranges: &[Range], mut buffer: &mut [u8]) {
    let views = objects.views();
    // SAFETY: the first view is mapped as long as the objects are there. No Rust reference is made
    // to what is read; what other threads write at this moment is read by atomic operations.
    let memory = unsafe { SharedBytes::new(views.start(), views.view_bytes().to_usize()) };
    for range in ranges {
        let offsets = range.to_offsets();
        let (part, rest) = buffer.split_at_mut(offsets.len());
        memory.read(offsets.start, part);
        buffer = rest;
    }
}

/// The only space.
const SPACE: SpaceId = 0;

impl TargetMemory for HeapTarget {
    type Error = Error;

    fn spaces(&mut self) -> Result<Vec<SpaceId>, Error> {
        Ok(vec![SPACE])
    }

    fn collect(&mut self, _: SpaceId, dirty: &mut RangeSet) -> Result<(), Error> {
        collect(&self.objects, &mut self.tracker, &self.job, dirty)
    }

    fn read(&mut self, _: SpaceId, ranges: &[Range], buffer: &mut [u8]) -> Result<RangeSet, Error> {
        read(&self.objects, ranges, buffer);
        Ok(RangeSet::new())
    }
}

impl Target for HeapTarget {
    type Frozen<'target> = FrozenHeap<'target>;

    fn description(&self) -> TargetDescription {
        TargetDescription {
            label: format!("heap of process {}", std::process::id()),
            command: std::env::args_os().map(|part| part.to_string_lossy().into_owned()).collect(),
            kind: TargetKind::Region,
            mechanism: Mechanism::PagemapScan,
        }
    }

    fn precopy(&mut self, _: &mut dyn Store) -> Result<(), pagemark::Error> {
        self.check_newest().map_err(TargetError::into_error)
    }

    /// Keeps all threads from allocating and freeing. Their writes are not blocked.
    fn freeze(&mut self, _: WhileFreezing<'_, Error>) -> Result<FrozenHeap<'_>, Error> {
        let (frozen_at, since) = (SystemTime::now(), Instant::now());
        let HeapTarget { objects, tracker, job, copied, .. } = self;
        let locked = objects.lock();
        let held = locked.held();
        Ok(FrozenHeap { objects, tracker, job, _locked: locked, held, copied: copied.take(), frozen_at, since })
    }

    fn capture_failed(&mut self) {}
}

/// A heap in which nobody allocates or frees.
pub(super) struct FrozenHeap<'target> {
    objects: &'target Objects,
    tracker: &'target mut HeapTracker<Separate>,
    job: &'target str,
    _locked: Locked<'target>,
    /// Offsets of the pages that belong to the checkpoint.
    held: RangeSet,
    copied: Option<Sender<()>>,
    frozen_at: SystemTime,
    since: Instant,
}

impl TargetMemory for FrozenHeap<'_> {
    type Error = Error;

    fn spaces(&mut self) -> Result<Vec<SpaceId>, Error> {
        Ok(vec![SPACE])
    }

    fn collect(&mut self, _: SpaceId, dirty: &mut RangeSet) -> Result<(), Error> {
        let mut found = RangeSet::new();
        let collected = collect(self.objects, self.tracker, self.job, &mut found);
        // A page that is free is reported again when it is used and written.
        dirty.append(&mut found.intersection(&self.held));
        collected
    }

    fn read(&mut self, _: SpaceId, ranges: &[Range], buffer: &mut [u8]) -> Result<RangeSet, Error> {
        read(self.objects, ranges, buffer);
        Ok(RangeSet::new())
    }
}

impl Frozen for FrozenHeap<'_> {
    type Captured = CapturedSpaces;

    fn thaw(self) -> Result<CapturedSpaces, Error> {
        let space = CapturedSpace {
            space: SPACE,
            id: SPACE,
            label: super::LABEL.to_owned(),
            kind: SpaceKind::Heap { bytes: self.objects.views().view_bytes() },
            mappings: Vec::new(),
            held_pages: Some(self.held.iter().map(|range| range.page_range()).collect()),
        };
        let captured = CapturedSpaces { spaces: vec![space], taken_at: self.frozen_at, downtime: self.since.elapsed() };
        if let Some(copied) = self.copied {
            // Nobody waits if the program has ended.
            _ = copied.send(());
        }
        Ok(captured)
    }
}
