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

        // Where nothing is hot, finding and protecting is one step.
        let none_hot = heat.hot_pages == 0;
        let mut found = RangeSet::new();
        scan(&self.range, none_hot, &mut found)?;
        written.extend(&found);
        if none_hot && !ends_transaction {
            return Ok(());
        }
        heat.transaction += u64::from(ends_transaction);
        // What is not hot lies in spans between hot pages. What is written there between the scans is found by the second.
        let (mut cold, mut hot): (Vec<Span<usize>>, Vec<Span<usize>>) = (Vec::new(), Vec::new());
        for page in found.iter().flat_map(pages) {
            let last_hot = hot.last_mut().map(|run| &mut run.end);
            if heat.is_hot_now(page, ends_transaction) {
                match last_hot {
                    Some(end) if *end == page => *end += 1,
                    _ => hot.push(page..page + 1),
                }
            } else {
                match cold.last_mut() {
                    Some(span) if last_hot.is_none_or(|end| *end <= span.start) => span.end = page + 1,
                    _ => cold.push(page..page + 1),
                }
            }
        }
        if none_hot {
            hot.into_iter().try_for_each(|run| write_protect(run, false))?;
        } else {
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
        dirty.extend(&written);
        result
    }

    /// Spares the writes that follow their faults; system calls need no permission.
    fn pin(&mut self, range: &Range) -> Result<(), TrackError> {
        let pages = super::mprotect::pages_around(range);
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

/// What is known of the pages of one area.
#[derive(Debug)]
struct Heat {
    pages: Vec<Page>,
    hot_pages: usize,
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
            transaction: 0,
            probed_in: 0,
            silent_pages: 0,
            between_probes: 1,
            slice: 0,
        }
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

    /// Takes one slice of the hot pages for cold, just short of hot, and returns them, to be protected.
    fn probe(&mut self) -> Vec<Span<usize>> {
        self.slice = (self.slice + 1) % PROBE_SLICES;
        self.probed_in = self.transaction + 1;
        self.silent_pages = 0;
        let mut probed = Vec::new();
        let mut run_start = self.slice * SLICE_RUN_PAGES;
        while run_start < self.pages.len() {
            for index in run_start..(run_start + SLICE_RUN_PAGES).min(self.pages.len()) {
                let page = &mut self.pages[index];
                if page.streak == HOT_AFTER {
                    *page = Page { streak: HOT_AFTER - 1, written_in: self.transaction as u32, is_probed: true };
                    self.hot_pages -= 1;
                    self.silent_pages += 1;
                    match probed.last_mut() {
                        Some(Span { end, .. }) if *end == index => *end += 1,
                        _ => probed.push(index..index + 1),
                    }
                }
            }
            run_start += PROBE_SLICES * SLICE_RUN_PAGES;
        }
        probed
    }
}
