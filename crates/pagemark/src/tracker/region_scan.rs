//! `pagemap-scan` and `adaptive` for regions of this process: memory whose mappings nobody changes behind our back.
//!
//! What a tracker of other processes has to look for, mappings that come, go and move, is not there to be found. So a collect is
//! one walk of the page table, in the kernel's shortest form: whatever is not protected counts as written, also what was freed.
//!
//! With `adaptive`, a page that was written in each of the last [`HOT_AFTER`] transactions is hot: it is not protected any
//! more, and counts as written in each. Now and then some hot pages are protected for one transaction, to see whether they cooled; the longer
//! none did, the more rarely.

use std::ops::Range as Span;

use super::pagemap_scan::unavailable;
use crate::sys::pagemap::{Filter, Pagemap, WRITTEN};
use crate::sys::userfaultfd::Userfaultfd;
use crate::{Mechanism, PAGE_SIZE, Range, RangeSet, TrackError, Tracker};

/// Transactions in a row in which a page must be written to count as hot.
pub const HOT_AFTER: u8 = 3;

/// One in so many hot pages is protected to see whether it cooled.
pub const PROBE_SLICES: usize = 16;

/// Most transactions between two such looks.
pub const MOST_BETWEEN_PROBES: u64 = 128;

/// Runs of hot pages that are on average at least so long are worth a scan of their own on each side.
const LONG_RUN_PAGES: usize = 32;

/// Pages of a slice lie together in runs of so many, so that protecting them takes few system calls.
const SLICE_RUN_PAGES: usize = 16;

/// Tracks ranges of this process's memory by PAGEMAP_SCAN.
#[derive(Debug)]
pub struct RegionScan {
    pagemap: Pagemap,
    userfaultfd: Userfaultfd,
    areas: Vec<Area>,
    is_adaptive: bool,
    /// True from `relax`, with which a transaction begins, to the collect that ends it.
    in_transaction: bool,
    process: u32,
}

impl Drop for RegionScan {
    fn drop(&mut self) {
        // Not by closing alone: a child made by `fork` may hold a copy of the descriptor. It has nothing to undo itself.
        if self.process == std::process::id() {
            self.areas.iter().for_each(|area| _ = self.userfaultfd.unregister(&area.range));
        }
    }
}

/// A registered range, and what is hot there.
#[derive(Debug)]
struct Area {
    range: Range,
    /// None with `pagemap-scan`.
    heat: Option<Heat>,
}

impl RegionScan {
    /// Tracks the memory of this process, by `pagemap-scan` or `adaptive`.
    ///
    /// # Errors
    /// [`TrackError::Unavailable`]: the kernel is older than 6.7.
    pub fn new(mechanism: Mechanism) -> Result<Self, TrackError> {
        let userfaultfd = Userfaultfd::of_this_process().map_err(|error| unavailable(mechanism, error))?;
        let pagemap = Pagemap::of_this_process()
            .map_err(|error| TrackError::from_io(error, || "opening /proc/self/pagemap".to_owned()))?;
        let is_adaptive = mechanism == Mechanism::Adaptive;
        Ok(RegionScan {
            pagemap,
            userfaultfd,
            areas: Vec::new(),
            is_adaptive,
            in_transaction: false,
            process: std::process::id(),
        })
    }

    fn register(&mut self, range: Range) -> Result<(), TrackError> {
        self.userfaultfd
            .register(&range)
            .map_err(|error| TrackError::from_io(error, || format!("registering {range:#x?} with userfaultfd")))?;
        let pages = (range.end - range.start) as usize / PAGE_SIZE;
        let heat = self.is_adaptive.then(|| Heat::new(pages));
        self.areas.push(Area { range, heat });
        Ok(())
    }
}

impl Area {
    /// Adds what was written to `written` and protects it, except what is hot.
    fn collect(
        &mut self,
        pagemap: &Pagemap,
        userfaultfd: &Userfaultfd,
        ends_transaction: bool,
        written: &mut RangeSet,
    ) -> Result<(), TrackError> {
        let scan = |range: &Range, protect: bool, found: &mut RangeSet| {
            let filter = Filter { all: WRITTEN, report: WRITTEN, protect, ..Filter::default() };
            pagemap
                .scan(range, filter, |run, _| found.insert(run))
                .map_err(|error| TrackError::from_io(error, || format!("scanning the pages of {range:#x?}")))
        };
        let Some(heat) = &mut self.heat else { return scan(&self.range, true, written) };
        let start = self.range.start;
        let addresses =
            |pages: Span<usize>| start + (pages.start * PAGE_SIZE) as u64..start + (pages.end * PAGE_SIZE) as u64;
        let pages = |run: Range| (run.start - start) as usize / PAGE_SIZE..(run.end - start) as usize / PAGE_SIZE;
        let write_protect = |pages: Span<usize>, protect: bool| {
            let run = addresses(pages);
            userfaultfd
                .write_protect(&run, protect)
                .map_err(|error| TrackError::from_io(error, || format!("protecting {run:#x?}")))
        };

        heat.transaction += u64::from(ends_transaction);
        let hot_pages = heat.hot_pages;
        let hot_runs = heat.hot_runs(start);
        let mut found = RangeSet::new();
        if hot_runs.range_count() * LONG_RUN_PAGES <= hot_pages {
            // Few runs are hot, or none: the rest is found and protected in one step, and the hot ones are not looked at.
            let mut rest = RangeSet::from(self.range.clone());
            rest.subtract(hot_runs);
            written.extend(hot_runs);
            let scanned = rest.iter().try_for_each(|piece| scan(&piece, true, &mut found));
            written.extend(&found);
            scanned?;
            if ends_transaction {
                let mut hot = PageRuns::default();
                found
                    .iter()
                    .flat_map(pages)
                    .filter(|&page| heat.is_hot_now(page, true))
                    .for_each(|page| hot.push(page));
                hot.runs.into_iter().try_for_each(|run| write_protect(run, false))?;
            }
        } else {
            scan(&self.range, false, &mut found)?;
            // Mostly the hot pages were written and no others: then each of them needs no look.
            let other = if found == *hot_runs { RangeSet::new() } else { found.clone() };
            written.append(&mut found);
            // What is not hot lies in spans between hot pages. What is written there between the scans is found by the second.
            let (mut cold, mut last_hot): (Vec<Span<usize>>, _) = (Vec::new(), 0);
            for page in other.iter().flat_map(pages) {
                if heat.is_hot_now(page, ends_transaction) {
                    last_hot = page;
                    continue;
                }
                match cold.last_mut() {
                    Some(span) if last_hot <= span.start => span.end = page + 1,
                    _ => cold.push(page..page + 1),
                }
            }
            cold.into_iter().try_for_each(|span| scan(&addresses(span), true, written))?;
        }
        if ends_transaction && heat.probe_is_due() {
            heat.probe().into_iter().try_for_each(|run| write_protect(run, true))?;
        }
        Ok(())
    }
}

impl Tracker for RegionScan {
    fn mechanism(&self) -> Mechanism {
        if self.is_adaptive { Mechanism::Adaptive } else { Mechanism::PagemapScan }
    }

    fn collect(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<(), TrackError> {
        let userfaultfd = &self.userfaultfd;
        self.areas.retain(|area| {
            let stays = ranges.iter().any(|range| range == area.range);
            if !stays {
                // If it is no longer mapped, there is nothing to unregister.
                let _ = userfaultfd.unregister(&area.range);
            }
            stays
        });
        let ends_transaction = std::mem::take(&mut self.in_transaction);
        let mut written = RangeSet::new();
        let result = ranges.iter().try_for_each(|range| {
            if !self.areas.iter().any(|area| area.range == range) {
                self.register(range.clone())?;
            }
            let area = self.areas.iter_mut().find(|area| area.range == range);
            area.map_or(Ok(()), |area| area.collect(&self.pagemap, &self.userfaultfd, ends_transaction, &mut written))
        });
        dirty.append(&mut written);
        result
    }

    /// Spares the writes that follow their faults; system calls need no permission.
    fn pin(&mut self, range: &Range) -> Result<(), TrackError> {
        let pages = super::pins::pages_around(range);
        for area in &self.areas {
            let part = pages.start.max(area.range.start)..pages.end.min(area.range.end);
            if part.start < part.end {
                self.userfaultfd
                    .write_protect(&part, false)
                    .map_err(|error| TrackError::from_io(error, || format!("unprotecting {part:#x?}")))?;
            }
        }
        Ok(())
    }

    fn relax(&mut self) -> Result<(), TrackError> {
        self.in_transaction = true;
        Ok(())
    }
}

/// Pages put together to runs as they come.
#[derive(Default)]
struct PageRuns {
    runs: Vec<Span<usize>>,
}

impl PageRuns {
    fn push(&mut self, page: usize) {
        match self.runs.last_mut() {
            Some(run) if run.end == page => run.end += 1,
            _ => self.runs.push(page..page + 1),
        }
    }
}

/// What is known of the pages of one area.
#[derive(Debug)]
struct Heat {
    pages: Vec<Page>,
    hot_pages: usize,
    /// The addresses of the hot pages; none if they are others since it was made.
    hot_runs: Option<RangeSet>,
    /// The transactions that were ended.
    transaction: u64,
    /// The transaction in which probed pages show whether they are hot, if some are probed.
    probed_in: u64,
    /// Pages probed then that were not written yet.
    silent_pages: usize,
    between_probes: u64,
    slice: usize,
}

#[derive(Clone, Copy, Default, Debug)]
struct Page {
    /// The last transaction that wrote it, modulo 2³².
    written_in: u32,
    /// Transactions in a row that wrote it, up to [`HOT_AFTER`]: then it is hot, and not protected.
    streak: u8,
    /// It was hot, and shows in this transaction whether it still is.
    is_probed: bool,
}

impl Heat {
    fn new(pages: usize) -> Self {
        Heat {
            pages: vec![Page::default(); pages],
            hot_pages: 0,
            hot_runs: None,
            transaction: 0,
            probed_in: 0,
            silent_pages: 0,
            between_probes: 1,
            slice: 0,
        }
    }

    /// The addresses of the hot pages, of an area that begins at `start`.
    fn hot_runs(&mut self, start: u64) -> &RangeSet {
        let make = || {
            let is_hot = |(_, page): &(usize, &Page)| page.streak == HOT_AFTER;
            let address = |index: usize| start + (index * PAGE_SIZE) as u64;
            let hot = self.pages.iter().enumerate().filter(is_hot).map(|(index, _)| address(index)..address(index + 1));
            if self.hot_pages > 0 { hot.collect() } else { RangeSet::new() }
        };
        self.hot_runs.get_or_insert_with(make)
    }

    /// Takes note of a page that was found written. True if it is hot now.
    fn is_hot_now(&mut self, index: usize, ends_transaction: bool) -> bool {
        let now = self.transaction as u32;
        let page = &mut self.pages[index];
        if page.streak < HOT_AFTER && ends_transaction {
            page.streak = if page.written_in == now.wrapping_sub(1) { page.streak + 1 } else { 1 };
            page.written_in = now;
            if page.streak == HOT_AFTER {
                self.hot_pages += 1;
                self.hot_runs = None;
                self.silent_pages -= usize::from(page.is_probed);
            }
            page.is_probed = false;
        }
        page.streak == HOT_AFTER
    }

    /// True if hot pages are to be probed in the next transaction. Called when all that the last one wrote is known.
    fn probe_is_due(&mut self) -> bool {
        if self.transaction == self.probed_in {
            // The fewer cool down, the less often it is worth a look.
            let cooled = self.silent_pages > 0;
            self.between_probes = if cooled { 1 } else { (self.between_probes * 2).min(MOST_BETWEEN_PROBES) };
        }
        self.hot_pages > 0 && self.transaction >= self.probed_in + self.between_probes
    }

    /// Takes the next slice in which there are hot pages for cold, just short of hot, and returns these, to be protected.
    fn probe(&mut self) -> Vec<Span<usize>> {
        self.probed_in = self.transaction + 1;
        self.silent_pages = 0;
        self.hot_runs = None;
        let mut probed = PageRuns::default();
        for _ in 0..PROBE_SLICES {
            self.slice = (self.slice + 1) % PROBE_SLICES;
            let runs = self.pages.chunks_mut(SLICE_RUN_PAGES).enumerate().skip(self.slice).step_by(PROBE_SLICES);
            for (run, pages) in runs {
                for (index, page) in pages.iter_mut().enumerate().filter(|(_, page)| page.streak == HOT_AFTER) {
                    *page = Page { streak: HOT_AFTER - 1, written_in: self.transaction as u32, is_probed: true };
                    self.hot_pages -= 1;
                    self.silent_pages += 1;
                    probed.push(run * SLICE_RUN_PAGES + index);
                }
            }
            if !probed.runs.is_empty() {
                break;
            }
        }
        probed.runs
    }
}
