//! `adaptive`: `pagemap-scan`, with the pages that are written in every interval left unprotected, so that they cost the
//! target nothing.
//!
//! A page that was written in each of the last [`HOT_AFTER`] long intervals is hot. [`Tracker::relax`], with which a long
//! interval begins, unprotects the hot pages, and the next collect reports them as written, whether they were or not, and protects
//! them again: so the collects that follow at once, the rounds of a pre-copy, are exact. One slice in [`PROBE_SLICES`]
//! of the address space, another one each interval, is left protected to see whether its hot pages have cooled.

use std::collections::VecDeque;

use super::pagemap_scan::PagemapScan;
use crate::{Mechanism, Range, RangeSet, TrackError, Tracker};

/// Long intervals in a row in which a page must be written to count as hot.
pub const HOT_AFTER: usize = 3;

/// A hot page is probed once in so many long intervals.
pub const PROBE_SLICES: u64 = 16;

/// Bytes of a slice's pieces; they take turns, so that each slice has its part of every mapping.
const SLICE_BYTES: u64 = 2 << 20;

/// Unprotects in one `relax` at most; the longest runs go first. Each is a system call of about half a microsecond.
const RELEASES: usize = 65_536;

/// Tracks as [`PagemapScan`] does, and leaves hot pages alone.
#[derive(Debug)]
pub struct Adaptive {
    scan: PagemapScan,
    /// What the last long intervals wrote, the latest last.
    intervals: VecDeque<RangeSet>,
    /// What the long interval wrote that the last `relax` began; none before the collect that ends it.
    current: Option<RangeSet>,
    round: u64,
    released_pages: u64,
}

impl Adaptive {
    /// Tracks by `scan`.
    pub fn new(scan: PagemapScan) -> Self {
        Adaptive { scan, intervals: VecDeque::new(), current: None, round: 0, released_pages: 0 }
    }

    /// Pages that the last `relax` left unprotected.
    pub fn released_pages(&self) -> u64 {
        self.released_pages
    }

    /// What was written in each of the last long intervals.
    fn hot(&self) -> RangeSet {
        let mut intervals = self.intervals.iter();
        match intervals.next() {
            Some(first) if self.intervals.len() == HOT_AFTER => {
                intervals.fold(first.clone(), |hot, interval| hot.intersection(interval))
            }
            _ => RangeSet::new(),
        }
    }

    /// True if the piece of address space at `address` is left protected in this interval.
    fn is_probed(&self, address: u64) -> bool {
        (address / SLICE_BYTES).wrapping_add(self.round).is_multiple_of(PROBE_SLICES)
    }
}

impl Tracker for Adaptive {
    fn mechanism(&self) -> Mechanism {
        Mechanism::Adaptive
    }

    fn populated(&self) -> Option<&RangeSet> {
        self.scan.populated()
    }

    fn collect(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<(), TrackError> {
        if self.current.is_some() {
            return self.scan.collect(ranges, dirty);
        }
        // The first collect of a burst tells what the long interval wrote; the others see only short ones.
        let mut written = RangeSet::new();
        let result = self.scan.collect(ranges, &mut written);
        dirty.extend(&written);
        if result.is_ok() {
            self.current = Some(written);
        }
        result
    }

    fn relax(&mut self) -> Result<(), TrackError> {
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
            releases.sort_by_key(|run| std::cmp::Reverse(run.end - run.start));
            releases.truncate(RELEASES);
        }
        self.released_pages = 0;
        for run in releases {
            self.scan.release(&run)?;
            self.released_pages += (run.end - run.start) / crate::PAGE_SIZE as u64;
        }
        self.scan.relax()
    }
}

/// Cuts a range where slices meet.
fn slices(range: Range) -> impl Iterator<Item = Range> {
    let mut start = range.start;
    std::iter::from_fn(move || {
        let end = range.end.min((start / SLICE_BYTES + 1) * SLICE_BYTES);
        let piece = start..end;
        start = end;
        (!piece.is_empty()).then_some(piece)
    })
}

/// Joins pieces that touch.
fn join(pieces: Vec<Range>) -> Vec<Range> {
    pieces.into_iter().collect::<RangeSet>().iter().collect()
}
