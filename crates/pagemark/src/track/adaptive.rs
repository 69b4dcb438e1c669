//! `adaptive`: as `pagemap-scan`, but pages that are written in every interval stay unprotected, so
//! that they cost the target nothing.
//!
//! A page that was written in each of the last [`HOT_AFTER`] long intervals is hot.
//! [`Tracker::begin_interval`] unprotects the hot pages. The next collect reports them as written,
//! whether they were or not, and protects them again. The collects that follow, the rounds of a
//! pre-copy, are therefore exact. In each interval, another slice of the [`PROBE_SLICES`] slices of
//! the address space stays protected, to find out whether its hot pages are still written
//! (`ProbeCycle`).

use std::collections::VecDeque;

use super::pagemap_scan::PagemapScan;
use super::region_scan::RegionScan;
use super::registry::{MachineTracking, MechanismEntry, MemoryPart, ProcessTracking};
use crate::{Address, AddressRangeExt, Error, Mechanism, PAGE_SIZE, PageRangeExt, Range, RangeSet, Tracker};

/// The mechanism `adaptive`. Regions have a tracker of their own (`RegionScan`).
pub const ENTRY: MechanismEntry = MechanismEntry {
    name: "adaptive",
    description: "as pagemap-scan, but pages that are written in every interval are left unprotected, so that they cost the \
                  program nothing",
    requirement: "Linux 6.7",
    is_exclusive: false,
    sees_other_mappings: false,
    own_memory: |memory| Ok(Box::new(RegionScan::new(Mechanism::Adaptive, memory.clone())?)),
    machine: Some(MachineTracking::OfProcess),
    process: Some(ProcessTracking {
        needs_userfaultfd: true,
        needs_stop: false,
        needs_parking: false,
        compares_content: false,
        hot_after: Some(HOT_AFTER),
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

/// Most bytes of a piece of a slice: a huge page, which the kernel splits when it unprotects a
/// part.
const MAX_PIECE_BYTES: u64 = 2 << 20;

/// Pieces of each slice that hot memory is divided into, as far as that does not make pieces
/// smaller than a page, or greater than [`MAX_PIECE_BYTES`].
const MIN_PIECES: u64 = 4;

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
    /// `None` while no page is hot.
    probes: Option<ProbeCycle>,
    released_pages: u64,
}

impl Adaptive {
    /// Tracks by `scan`.
    pub fn new(scan: PagemapScan) -> Self {
        Adaptive { scan, intervals: VecDeque::new(), current: None, probes: None, released_pages: 0 }
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

    fn find_data_pages(&mut self, ranges: &RangeSet) -> Result<(), Error> {
        self.scan.find_data_pages(ranges)
    }

    fn begin_interval(&mut self) -> Result<(), Error> {
        let Some(written) = self.current.take() else { return Ok(()) };
        if self.intervals.len() == HOT_AFTER {
            self.intervals.pop_front();
        }
        self.intervals.push_back(written);

        let hot = self.hot();
        self.probes = ProbeCycle::next(self.probes.take(), &hot);
        let mut releases = self.probes.as_ref().map_or_else(Vec::new, |probes| probes.unprobed(&hot));
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

/// The intervals in which all hot pages are probed once. The address space is divided into pieces
/// of equal length, and the pieces of the slices alternate, so that each slice has a part of every
/// mapping.
#[derive(Debug)]
struct ProbeCycle {
    piece_bytes: u64,
    /// The slice that stays protected in this interval.
    slice: u64,
    /// The most hot memory in an interval of this cycle.
    most_bytes: u64,
}

impl ProbeCycle {
    /// The probes of the next interval. The length of the pieces follows the amount of hot memory:
    /// with few pieces, the place of the memory would decide how many of its pages are in a slice.
    /// Pieces become shorter only after a whole cycle with little hot memory, so that pages that
    /// cool are found within a cycle, and longer at once, which begins a cycle.
    fn next(last: Option<ProbeCycle>, hot: &RangeSet) -> Option<ProbeCycle> {
        let bytes = hot.total_bytes().get();
        if bytes == 0 {
            return None;
        }
        let piece_bytes = piece_length(bytes);
        Some(match last {
            Some(last) if piece_bytes <= last.piece_bytes => {
                let most_bytes = last.most_bytes.max(bytes);
                if last.slice + 1 < PROBE_SLICES {
                    ProbeCycle { slice: last.slice + 1, most_bytes, ..last }
                } else {
                    ProbeCycle { piece_bytes: piece_length(most_bytes), slice: 0, most_bytes: bytes }
                }
            }
            _ => ProbeCycle { piece_bytes, slice: 0, most_bytes: bytes },
        })
    }

    /// The parts of `hot` that do not stay protected.
    fn unprobed(&self, hot: &RangeSet) -> Vec<Range> {
        let pieces = hot.iter().flat_map(|range| self.pieces(range));
        // The pieces of a slice have others between them, which touch: the set joins those.
        let unprobed: RangeSet = pieces.filter(|piece| !self.is_probed(piece.start)).collect();
        unprobed.iter().collect()
    }

    /// Splits a range where pieces meet.
    fn pieces(&self, range: Range) -> impl Iterator<Item = Range> {
        let (mut start, bytes) = (range.start, self.piece_bytes);
        std::iter::from_fn(move || {
            let end = range.end.min(Address::new((start.get() / bytes + 1) * bytes));
            let piece = start..end;
            start = end;
            (!piece.is_empty()).then_some(piece)
        })
    }

    fn is_probed(&self, address: Address) -> bool {
        address.get() / self.piece_bytes % PROBE_SLICES == self.slice
    }
}

/// The length of a piece for an amount of hot memory above 0.
fn piece_length(hot_bytes: u64) -> u64 {
    let most = (hot_bytes / (PROBE_SLICES * MIN_PIECES)).max(1);
    (1 << most.ilog2()).clamp(PAGE_SIZE as u64, MAX_PIECE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PageNumber;

    /// Hot memory of a number of pages.
    fn hot(start: u64, pages: u64) -> RangeSet {
        (PageNumber::new(start)..PageNumber::new(start + pages)).addresses().into()
    }

    #[test]
    fn every_cycle_probes_each_hot_page_once_and_the_same_share_in_each_interval() {
        for pages in [64, 100, 1000, 4096, 5000, 300_000] {
            for start in [0, 1, 300, 511, 7777] {
                let hot = hot(0x7f12_3456_0000 / PAGE_SIZE as u64 + start, pages);
                let mut probes = None;
                for _ in 0..2 {
                    let mut left = hot.clone();
                    for _ in 0..PROBE_SLICES {
                        probes = ProbeCycle::next(probes, &hot);
                        let mut probed = hot.clone();
                        let unprobed: RangeSet = probes.as_ref().unwrap().unprobed(&hot).into_iter().collect();
                        probed.subtract(&unprobed);
                        let share = (probed.page_count() * PROBE_SLICES) as f64 / pages as f64;
                        assert!((0.7..=1.3).contains(&share), "{share} of {pages} at {start}");
                        assert_eq!(left.intersection(&probed), probed, "{pages} at {start}: probed twice");
                        left.subtract(&probed);
                    }
                    assert!(left.is_empty(), "{pages} at {start}: {} left out", left.page_count());
                }
            }
        }
    }

    #[test]
    fn memory_that_becomes_hot_or_cool_is_probed_too() {
        let all = hot(0, 100_000);
        let mut probes = ProbeCycle::next(None, &hot(0, 1));
        // More hot memory begins a new cycle, less does not.
        let sizes = [1, 10, 100_000].into_iter().chain([5, 100_000].into_iter().cycle().take(15));
        let mut left = all.clone();
        for (interval, pages) in sizes.enumerate() {
            probes = ProbeCycle::next(probes, &hot(0, pages));
            let mut probed = all.clone();
            probed.subtract(&probes.as_ref().unwrap().unprobed(&all).into_iter().collect());
            if interval >= 2 {
                left.subtract(&probed);
            }
        }
        assert!(left.is_empty());
        assert!(ProbeCycle::next(probes, &RangeSet::new()).is_none());
    }

    #[test]
    fn pages_that_cool_are_found_within_as_many_intervals_as_there_are_slices() {
        for phase in 1..=3 * PROBE_SLICES {
            let mut hot = hot(12_345, 100_000);
            let mut probes = None;
            (0..phase).for_each(|_| probes = ProbeCycle::next(probes.take(), &hot));
            for _ in 0..PROBE_SLICES {
                probes = ProbeCycle::next(probes, &hot);
                // What is probed is not written any more.
                hot = probes.as_ref().map_or_else(RangeSet::new, |probes| probes.unprobed(&hot).into_iter().collect());
            }
            assert!(hot.is_empty(), "{} pages left out from interval {phase} on", hot.page_count());
        }
    }

    #[test]
    fn few_calls_release_much_memory() {
        let probes = ProbeCycle::next(None, &hot(0, 1 << 20)).unwrap();
        assert_eq!(probes.unprobed(&hot(0, 1 << 20)).len(), (4 << 30) / (MAX_PIECE_BYTES * PROBE_SLICES) as usize);
        assert_eq!(ProbeCycle::next(None, &hot(0, 4096)).unwrap().unprobed(&hot(0, 4096)).len(), MIN_PIECES as usize);
    }
}
