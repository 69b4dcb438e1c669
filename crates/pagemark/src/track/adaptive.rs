//! `adaptive`: as `pagemap-scan`, but pages that are written in every interval stay unprotected, so
//! that they cost the target nothing.
//!
//! A page that was written in each of the last [`HOT_AFTER`] long intervals is hot.
//! [`Tracker::begin_interval`] unprotects the hot pages. The next collect reports them as written,
//! whether they were or not, and protects them again. The collects that follow, the rounds of a
//! pre-copy, are therefore exact. In each interval, another slice of the [`PROBE_SLICES`] slices of
//! the address space stays protected, to find out whether its hot pages are still written.

use std::collections::VecDeque;

use super::pagemap_scan::PagemapScan;
use super::region_scan::RegionScan;
use super::registry::{MechanismEntry, MemoryPart, ProcessTracking};
use crate::{Address, AddressRangeExt, Error, Mechanism, PageRangeExt, Range, RangeSet, Tracker};

/// The mechanism `adaptive`. Regions have a tracker of their own (`RegionScan`).
pub const ENTRY: MechanismEntry = MechanismEntry {
    name: "adaptive",
    description: "as pagemap-scan, but pages that are written in every interval are left unprotected, so that they cost the \
                  program nothing",
    requirement: "Linux 6.7",
    is_exclusive: false,
    sees_other_mappings: false,
    own_memory: |memory| Ok(Box::new(RegionScan::new(Mechanism::Adaptive, memory.clone())?)),
    process: Some(ProcessTracking {
        needs_userfaultfd: true,
        needs_stop: false,
        private_parts: MemoryPart::BY_FILE,
        tracker: |memory, part| {
            let scan = PagemapScan::of_process(memory, part)?;
            Ok(if part == MemoryPart::Anonymous { Box::new(Adaptive::new(scan)) } else { Box::new(scan) })
        },
    }),
};

/// Number of consecutive long intervals after which a page that was written in each is hot.
pub const HOT_AFTER: usize = 3;

/// Number of slices. A hot page is probed in every 16th long interval.
pub const PROBE_SLICES: u64 = 16;

/// Bytes of a piece of a slice. The pieces of all slices alternate, so that each slice has a part
/// of every mapping.
const SLICE_BYTES: u64 = 2 << 20;

/// Most runs that one `begin_interval` unprotects, the longest first. Each is a system call of
/// about half a microsecond.
const RELEASES: usize = 65_536;

/// Tracks as [`PagemapScan`] does, and leaves hot pages unprotected.
#[derive(Debug)]
pub struct Adaptive {
    scan: PagemapScan,
    /// The pages written in each of the last long intervals, the latest last.
    intervals: VecDeque<RangeSet>,
    /// The pages written in the long interval that the last `begin_interval` began. `None` before
    /// the collect that ends it.
    current: Option<RangeSet>,
    round: u64,
    released_pages: u64,
}

impl Adaptive {
    /// Tracks by `scan`.
    pub fn new(scan: PagemapScan) -> Self {
        Adaptive { scan, intervals: VecDeque::new(), current: None, round: 0, released_pages: 0 }
    }

    /// Number of pages that the last `begin_interval` unprotected.
    pub fn released_pages(&self) -> u64 {
        self.released_pages
    }

    /// The pages that were written in each of the last long intervals.
    fn hot(&self) -> RangeSet {
        let mut intervals = self.intervals.iter();
        match intervals.next() {
            Some(first) if self.intervals.len() == HOT_AFTER => {
                intervals.fold(first.clone(), |hot, interval| hot.intersection(interval))
            }
            _ => RangeSet::new(),
        }
    }

    fn collect_by(
        &mut self,
        collect: fn(&mut PagemapScan, &RangeSet, &mut RangeSet) -> Result<(), Error>,
        ranges: &RangeSet,
        dirty: &mut RangeSet,
    ) -> Result<(), Error> {
        if self.current.is_some() {
            return collect(&mut self.scan, ranges, dirty);
        }
        // The first collect after `begin_interval` ends the long interval. The following ones end
        // the short intervals of a pre-copy.
        let mut written = RangeSet::new();
        let result = collect(&mut self.scan, ranges, &mut written);
        dirty.extend(&written);
        if result.is_ok() {
            self.current = Some(written);
        }
        result
    }

    /// True if the piece of the address space at `address` stays protected in this interval.
    fn is_probed(&self, address: Address) -> bool {
        (address.get() / SLICE_BYTES).wrapping_add(self.round).is_multiple_of(PROBE_SLICES)
    }
}

impl Tracker for Adaptive {
    fn mechanism(&self) -> Mechanism {
        Mechanism::Adaptive
    }

    fn populated(&self) -> Option<&RangeSet> {
        self.scan.populated()
    }

    fn collect(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<(), Error> {
        self.collect_by(PagemapScan::collect, ranges, dirty)
    }

    fn collect_ahead(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<(), Error> {
        self.collect_by(PagemapScan::collect_ahead, ranges, dirty)
    }

    fn look_ahead(&mut self, ranges: &RangeSet) -> Result<(), Error> {
        self.scan.look_ahead(ranges)
    }

    fn begin_interval(&mut self) -> Result<(), Error> {
        let Some(written) = self.current.take() else { return Ok(()) };
        if self.intervals.len() == HOT_AFTER {
            self.intervals.pop_front();
        }
        self.intervals.push_back(written);
        self.round = self.round.wrapping_add(1);

        let mut releases: Vec<Range> = self.hot().iter().flat_map(slices).collect();
        releases.retain(|piece| !self.is_probed(piece.start));
        let mut releases = join(releases);
        if releases.len() > RELEASES {
            releases.sort_by_key(|run| std::cmp::Reverse(run.byte_count()));
            releases.truncate(RELEASES);
        }
        self.released_pages = 0;
        for run in releases {
            self.scan.release(&run)?;
            self.released_pages += run.page_range().page_count();
        }
        self.scan.begin_interval()
    }
}

/// Splits a range where slices meet.
fn slices(range: Range) -> impl Iterator<Item = Range> {
    let mut start = range.start;
    std::iter::from_fn(move || {
        let end = range.end.min(Address::new((start.get() / SLICE_BYTES + 1) * SLICE_BYTES));
        let piece = start..end;
        start = end;
        (!piece.is_empty()).then_some(piece)
    })
}

/// Joins pieces that touch.
fn join(pieces: Vec<Range>) -> Vec<Range> {
    pieces.into_iter().collect::<RangeSet>().iter().collect()
}
