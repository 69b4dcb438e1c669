//! A target for tests that does what a script says.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime};

use proptest::prelude::prop_oneof;
use proptest::strategy::Strategy;

use super::*;
use crate::{AddressRangeExt, ByteCount, Error, Kind, Mechanism};

pub(crate) const PAGES: u64 = 64;
/// Every page whose number is a multiple of this cannot be kept.
const UNKEPT_PAGES: u64 = 5;

/// The page that the state saver of the scripted target saves itself, and its content there.
pub(crate) const SAVED_PAGE: PageNumber = PageNumber::new(7);
pub(crate) const SAVED_VALUE: u8 = 9;

/// A target that does the next thing in its script at every call while it runs.
pub(crate) struct Scripted {
    /// The value of each mapped page of each space.
    pub(crate) memory: BTreeMap<(SpaceId, PageNumber), u8>,
    written: BTreeMap<SpaceId, BTreeSet<PageNumber>>,
    pub(crate) spaces: BTreeSet<SpaceId>,
    script: Vec<Act>,
    /// The number of fallible calls that succeed before one fails.
    pub(crate) calls_left: u32,
    is_frozen: bool,
    /// True from the begin of a freeze to the thaw.
    pub(crate) is_held: bool,
    pub(crate) is_failure_reported: bool,
    /// The number of failing calls after which they say that the target is gone.
    pub(crate) failures_until_gone: Option<u32>,
    /// The values of the pages that are kept.
    kept: Kept,
    pub(crate) refuses_to_keep: bool,
    /// What is written at the last moment before a freeze.
    pub(crate) last_write: Option<(SpaceId, PageNumber, u8)>,
}

/// The values of pages; None for those that were not mapped.
type Kept = BTreeMap<(SpaceId, PageNumber), Option<u8>>;

/// A call failed because the script says so.
#[derive(Debug, thiserror::Error)]
#[error("the script says so")]
pub(crate) struct Failed {
    pub(crate) is_gone: bool,
}

impl TargetError for Failed {
    fn is_gone(&self) -> bool {
        self.is_gone
    }
}

#[derive(Clone, Debug)]
pub(crate) enum Act {
    Write(SpaceId, PageNumber, u8),
    Unmap(SpaceId, PageNumber),
    Fork(SpaceId, SpaceId),
    Exit(SpaceId),
}

fn page() -> impl Strategy<Value = PageNumber> {
    (0..PAGES).prop_map(PageNumber::new)
}

pub(crate) fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        20 => (0u64..3, page(), 0u8..4).prop_map(|(space, page, value)| Act::Write(space, page, value)),
        4 => (0u64..3, page()).prop_map(|(space, page)| Act::Unmap(space, page)),
        1 => (0u64..3, 1u64..3).prop_map(|(from, to)| Act::Fork(from, to)),
        1 => (1u64..3).prop_map(Act::Exit),
    ]
}

impl Scripted {
    pub(crate) fn new(script: Vec<Act>) -> Self {
        Scripted {
            memory: BTreeMap::new(),
            written: BTreeMap::new(),
            spaces: [0].into(),
            script,
            calls_left: u32::MAX,
            is_frozen: false,
            is_held: false,
            is_failure_reported: false,
            failures_until_gone: None,
            kept: Kept::new(),
            refuses_to_keep: false,
            last_write: None,
        }
    }

    fn call(&mut self) -> Result<(), Failed> {
        self.run();
        if let Some(calls_left) = self.calls_left.checked_sub(1) {
            self.calls_left = calls_left;
            return Ok(());
        }
        let Some(left) = &mut self.failures_until_gone else { return Err(Failed { is_gone: false }) };
        *left = left.saturating_sub(1);
        Err(Failed { is_gone: *left == 0 })
    }

    fn write(&mut self, space: SpaceId, page: PageNumber, value: u8) {
        self.memory.insert((space, page), value);
        self.written.entry(space).or_default().insert(page);
    }

    pub(crate) fn run(&mut self) {
        let act = if self.is_frozen { None } else { self.script.pop() };
        match act {
            Some(Act::Write(space, page, value)) if self.spaces.contains(&space) => self.write(space, page, value),
            Some(Act::Unmap(space, page)) => {
                self.memory.remove(&(space, page));
            }
            Some(Act::Fork(from, to)) if self.spaces.contains(&from) && !self.spaces.contains(&to) => {
                self.spaces.insert(to);
                for page in (0..PAGES).map(PageNumber::new) {
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

impl TargetMemory for Scripted {
    type Error = Failed;

    fn spaces(&mut self) -> Result<Vec<SpaceId>, Failed> {
        self.call()?;
        Ok(self.spaces.iter().copied().collect())
    }

    fn collect(&mut self, space: SpaceId, dirty: &mut RangeSet) -> Result<(), Failed> {
        self.call()?;
        for page in self.written.remove(&space).unwrap_or_default() {
            dirty.insert(page.addresses());
        }
        self.run();
        Ok(())
    }

    fn read(&mut self, space: SpaceId, ranges: &[Range], buffer: &mut [u8]) -> Result<RangeSet, Failed> {
        let mut missing = RangeSet::new();
        let mut pages = buffer.chunks_exact_mut(PAGE_SIZE);
        for number in ranges.iter().flat_map(AddressRangeExt::pages) {
            self.call()?;
            let page = pages.next().expect("as long as the ranges");
            match self.memory.get(&(space, number)) {
                Some(&value) => page.fill(value),
                None => missing.insert(number.addresses()),
            }
        }
        assert!(pages.next().is_none());
        Ok(missing)
    }
}

impl Target for Scripted {
    type Frozen<'target> = Stopped<'target>;

    fn description(&self) -> TargetDescription {
        TargetDescription {
            label: "a script".into(),
            command: Vec::new(),
            kind: TargetKind::Memory,
            mechanism: Mechanism::Full,
        }
    }

    fn precopy(&mut self, _: &mut dyn Store) -> Result<(), Error> {
        self.call().map_err(TargetError::into_error)
    }

    fn freeze(&mut self, meanwhile: WhileFreezing<'_, Failed>) -> Result<Stopped<'_>, Failed> {
        self.is_held = true;
        self.kept.clear();
        let stopped = Stopped(self);
        for _ in 0..2 {
            meanwhile(stopped.0)?;
        }
        if let Some((space, page, value)) = stopped.0.last_write.take() {
            stopped.0.write(space, page, value);
        }
        stopped.0.is_frozen = true;
        stopped.0.call()?;
        Ok(stopped)
    }

    fn capture_failed(&mut self) {
        self.is_failure_reported = true;
    }
}

/// The scripted target from the begin of a freeze on.
pub(crate) struct Stopped<'target>(&'target mut Scripted);

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        self.0.is_frozen = false;
        self.0.is_held = false;
    }
}

impl TargetMemory for Stopped<'_> {
    type Error = Failed;

    fn spaces(&mut self) -> Result<Vec<SpaceId>, Failed> {
        self.0.spaces()
    }

    fn collect(&mut self, space: SpaceId, dirty: &mut RangeSet) -> Result<(), Failed> {
        self.0.collect(space, dirty)
    }

    fn read(&mut self, space: SpaceId, ranges: &[Range], buffer: &mut [u8]) -> Result<RangeSet, Failed> {
        self.0.read(space, ranges, buffer)
    }
}

impl Frozen for Stopped<'_> {
    type Captured = CapturedMemory;

    fn keep(&mut self, space: SpaceId, pages: &RangeSet, _: Keep) -> Result<Option<RangeSet>, Failed> {
        self.0.call()?;
        if self.0.refuses_to_keep {
            return Err(Failed { is_gone: false });
        }
        let mut not_kept = RangeSet::new();
        for page in pages.iter().flat_map(|range| range.pages().collect::<Vec<_>>()) {
            if page.get().is_multiple_of(UNKEPT_PAGES) {
                not_kept.insert(page.address()..(page + 1).address());
            } else {
                self.0.kept.insert((space, page), self.0.memory.get(&(space, page)).copied());
            }
        }
        Ok(Some(not_kept))
    }

    fn thaw(self) -> Result<CapturedMemory, Failed> {
        self.0.call()?;
        let held_pages = |space: SpaceId| {
            let pages = self.0.memory.range((space, PageNumber::MIN)..(space, PageNumber::MAX));
            pages.map(|((_, page), _)| *page..*page + 1).collect()
        };
        let spaces = self.0.spaces.iter().map(|&space| captured_space(space, PAGES, Some(held_pages(space))));
        let spaces = spaces.collect();
        Ok(CapturedMemory { spaces, kept: std::mem::take(&mut self.0.kept) })
    }
}

/// A space of that many pages, of which `held_pages` held data.
pub(crate) fn captured_space(space: SpaceId, pages: u64, held_pages: Option<Vec<PageRange>>) -> CapturedSpace {
    let kind = SpaceKind::Region { bytes: ByteCount::of_pages(pages) };
    CapturedSpace { space, id: space, label: String::new(), kind, mappings: Vec::new(), held_pages }
}

/// A target without files and state, after the thaw. A page [`SAVED_PAGE`] that is known to have
/// held data was saved by its state saver.
#[derive(Default)]
pub(crate) struct CapturedMemory {
    pub(crate) spaces: Vec<CapturedSpace>,
    kept: Kept,
}

impl CapturedMemory {
    pub(crate) fn of(spaces: Vec<CapturedSpace>) -> CapturedMemory {
        CapturedMemory { spaces, ..CapturedMemory::default() }
    }
}

impl Captured for CapturedMemory {
    fn taken_at(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH
    }

    fn downtime(&self) -> Duration {
        Duration::ZERO
    }

    fn spaces(&self) -> Vec<CapturedSpace> {
        self.spaces.clone()
    }

    fn read_kept(&mut self, space: SpaceId, ranges: &[Range], buffer: &mut [u8]) -> Result<RangeSet, Error> {
        let mut missing = RangeSet::new();
        for (number, page) in ranges.iter().flat_map(AddressRangeExt::pages).zip(buffer.chunks_exact_mut(PAGE_SIZE)) {
            match self.kept.remove(&(space, number)) {
                Some(Some(value)) => page.fill(value),
                Some(None) => missing.insert(number.addresses()),
                None => panic!("a page was read that was not kept, or was read twice"),
            }
        }
        Ok(missing)
    }

    fn saved_pages(&self, space: SpaceId, visit: VisitPage<'_>) -> Result<(), Error> {
        let space = self.spaces.iter().find(|captured| captured.space == space);
        let held_pages = space.and_then(|captured| captured.held_pages.as_ref());
        if held_pages.is_some_and(|held_pages| held_pages.contains(&(SAVED_PAGE..SAVED_PAGE + 1))) {
            visit(SAVED_PAGE, &[SAVED_VALUE; PAGE_SIZE])?;
        }
        Ok(())
    }

    fn record(self, store: &mut dyn Store) -> Result<Recorded, Error> {
        store.put(Kind::Page, &[1; PAGE_SIZE])?;
        Ok(Recorded::default())
    }
}
