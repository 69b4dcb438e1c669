//! `pagemap-scan` and `adaptive` for regions of this process: memory whose mappings do not change.
//!
//! A tracker of another process must find mappings that appear, vanish and move. Here a collect is
//! one walk of the page table, in the kernel's shortest form: each page that is not protected
//! counts as written, and so do freed pages. Memory that was never used costs nothing.
//!
//! With `adaptive`, a page that was written in each of the last [`HOT_AFTER`] transactions is hot:
//! it stays unprotected, and counts as written in each transaction. At intervals, some hot pages
//! are protected for one transaction, to find out whether they are still written. The interval
//! doubles each time that all of them are.
//!
//! With the promise that no other process writes the memory, `adaptive` does not look at the pages
//! of a transaction in which the process had no page fault ([`FaultWatch`]): the hot pages were
//! written then, and no other. It looks at them while the process has several threads.

use std::io;
use std::ops::Range as Span;
use std::sync::Arc;

use pagemark_linux::pagemap::{Filter, PRESENT, Pagemap, SCAN, SWAPPED, WP_ALLOWED, WRITTEN};
use pagemark_linux::per_process::PerProcess;
use pagemark_linux::room;
use pagemark_linux::this_process::OfThisProcess;
use pagemark_linux::userfaultfd::Userfaultfd;

use super::OwnMemory;
use super::fault_watch::FaultWatch;
use super::pagemap_scan::unavailable;
use super::registry::own_pagemap;
use crate::{AddressRangeExt, Error, Mechanism, PageNumber, PageRangeExt, Range, RangeSet, Tracker};

/// Number of consecutive transactions after which a page that was written in each is hot.
pub const HOT_AFTER: u8 = 3;

/// Every 16th hot page is protected in one probe.
pub const PROBE_SLICES: usize = 16;

/// Most transactions between two probes.
pub const MAX_PROBE_DISTANCE: u64 = 128;

/// Average length from which runs of hot pages are skipped by separate scans on each side.
const LONG_RUN_PAGES: usize = 32;

/// Pages from which a run of populated pages is scanned in the kernel's shortest form.
const DENSE_PAGES: u64 = 64;

/// Most runs that are scanned in that form, each by a system call.
const MAX_DENSE_RUNS: usize = 16;

/// Pages in each run of a slice. Longer runs are protected with fewer system calls.
const SLICE_RUN_PAGES: usize = 16;

/// Tracks ranges of this process's memory by PAGEMAP_SCAN.
#[derive(Debug)]
pub struct RegionScan {
    pagemap: Arc<Pagemap>,
    memory: OwnMemory,
    userfaultfd: Arc<Userfaultfd>,
    tracked: Vec<RegisteredRange>,
    is_adaptive: bool,
    /// True from `begin_interval`, which begins a transaction, to the collect that ends it.
    in_transaction: bool,
    /// `None` where each collect looks at the pages.
    fault_watch: Option<FaultWatch>,
    process: OfThisProcess,
}

impl Drop for RegionScan {
    fn drop(&mut self) {
        // Closing the descriptor is not enough: a child made by `fork` may hold a copy. The child
        // itself undoes nothing.
        if self.process.is_here() {
            self.tracked.iter().for_each(|tracked| _ = self.userfaultfd.unregister(&tracked.range));
        }
    }
}

/// How a range is collected.
#[derive(Clone, Copy)]
struct Collect {
    /// True for the first collect after the begin of a transaction.
    ends_transaction: bool,
    /// False where what was written stays open until the next collect.
    protect: bool,
}

/// A registered range, and its hot pages.
#[derive(Debug)]
struct RegisteredRange {
    range: Range,
    /// Number of pages that are protected together.
    unit: usize,
    /// The part that is not private anonymous memory.
    backed: RangeSet,
    /// Pages that were populated at some collect.
    known: RangeSet,
    /// The part that is scanned in the kernel's shortest form: backed memory, and long runs of
    /// known pages. There each page that is not protected counts as written, also a page that the
    /// page table does not have. Elsewhere only populated pages are scanned, because the shortest
    /// form would report memory that was never used, and make page tables for it.
    dense: RangeSet,
    /// `None` with `pagemap-scan`.
    heat: Option<Heat>,
}

impl RegionScan {
    /// Tracks memory of this process, by `pagemap-scan` or `adaptive`.
    ///
    /// # Errors
    /// `ErrorKind::Unavailable`: the kernel is older than 6.7.
    pub fn new(mechanism: Mechanism, memory: OwnMemory) -> Result<Self, Error> {
        // The kernel looks at all mappings of the process when a userfaultfd is closed, so the regions
        // share one.
        static SHARED: PerProcess<Userfaultfd> = PerProcess::new();
        let userfaultfd = SHARED.get(Userfaultfd::of_this_process).map_err(|error| unavailable(mechanism, error))?;
        let pagemap = own_pagemap()?;
        // A filter may refuse the one and not the other.
        if let Some(error) = SCAN.refusal() {
            return Err(Error::refused(mechanism, error, "scanning pages", |error| {
                format!("no PAGEMAP_SCAN, which Linux 6.7 has ({error})")
            }));
        }
        let is_adaptive = mechanism == Mechanism::Adaptive;
        let fault_watch = if is_adaptive && memory.has_sole_use() { FaultWatch::new() } else { None };
        Ok(RegionScan {
            pagemap,
            memory,
            userfaultfd,
            tracked: Vec::new(),
            is_adaptive,
            in_transaction: false,
            fault_watch,
            process: OfThisProcess::new(),
        })
    }

    fn register(&mut self, range: Range) -> Result<(), Error> {
        self.memory.check(&range)?;
        let pages = range.page_range().page_count() as usize;
        let heat = if self.is_adaptive { Some(Heat::new(pages)) } else { None };
        let heat = heat.transpose().map_err(Error::system(format!("counting the writes of {pages} pages")))?;
        self.userfaultfd
            .register(&range)
            .map_err(|error| Error::while_tracking(error, || format!("registering {range:#x?} with userfaultfd")))?;
        let backed = self.memory.backed().intersection(&range.clone().into());
        let (unit, known, dense) = (self.memory.pages_per_unit(), RangeSet::new(), backed.clone());
        self.tracked.push(RegisteredRange { range, unit, backed, known, dense, heat });
        Ok(())
    }

    /// Collects, and protects what was written or leaves it open.
    fn collect_pages(&mut self, ranges: &RangeSet, dirty: &mut RangeSet, protect: bool) -> Result<(), Error> {
        let userfaultfd = &self.userfaultfd;
        self.tracked.retain(|tracked| {
            let stays = ranges.iter().any(|range| range == tracked.range);
            if !stays {
                // An error means that the range is no longer mapped, which needs nothing.
                let _ = userfaultfd.unregister(&tracked.range);
            }
            stays
        });
        let ends_transaction = std::mem::take(&mut self.in_transaction);
        // Faults after this moment are those of the next collect.
        let faults = self.fault_watch.as_ref().and_then(FaultWatch::now);
        if ends_transaction && self.is_quiet(ranges, faults) {
            return self.tracked.iter_mut().try_for_each(|tracked| tracked.collect_quiet(&self.pagemap, dirty));
        }
        let mut written = RangeSet::new();
        let result = ranges.iter().try_for_each(|range| {
            if !self.tracked.iter().any(|tracked| tracked.range == range) {
                self.register(range.clone())?;
                // Pages of files hold data although the page table does not have them.
                written.extend(&self.memory.backed().intersection(&range.clone().into()));
            }
            let tracked = self.tracked.iter_mut().find(|tracked| tracked.range == range);
            tracked.map_or(Ok(()), |tracked| {
                let mut found = RangeSet::new();
                let how = Collect { ends_transaction, protect };
                let collected = tracked.collect(&self.pagemap, &self.userfaultfd, how, &mut found);
                tracked.learn(&found);
                written.append(&mut found);
                collected
            })
        });
        dirty.append(&mut written);
        if let Some(watch) = &mut self.fault_watch {
            match (&result, faults) {
                (Ok(()), Some(faults)) if protect => watch.record(faults),
                _ => watch.forget(),
            }
        }
        result
    }

    /// True if no protected page was written in the transaction that ends, and none of the ranges
    /// is to be probed. `faults` are those until now, if they tell.
    fn is_quiet(&self, ranges: &RangeSet, faults: Option<u64>) -> bool {
        let (Some(watch), Some(faults)) = (&self.fault_watch, faults) else { return false };
        let is_tracked = |range: &Range| self.tracked.iter().any(|tracked| tracked.range == *range);
        watch.is_quiet(faults)
            && self.tracked.len() == ranges.range_count()
            && ranges.iter().all(|range| is_tracked(&range))
            && self.tracked.iter().all(|tracked| tracked.heat.as_ref().is_some_and(Heat::is_between_probes))
    }
}

impl RegisteredRange {
    /// Ends a transaction in which no protected page was written, and adds the pages that count as
    /// written.
    fn collect_quiet(&mut self, pagemap: &Pagemap, written: &mut RangeSet) -> Result<(), Error> {
        check_registered(pagemap, &self.range)?;
        if let Some(heat) = &mut self.heat {
            heat.transaction += 1;
            written.extend(heat.hot_runs(self.range.start.page()));
        }
        Ok(())
    }

    /// The units that a part of the range touches.
    fn whole_units(&self, part: &Range) -> Range {
        if part.is_empty() {
            return part.clone();
        }
        let first = self.range.start.page();
        let (start, end) = ((part.page_range().start - first) as usize, (part.page_range().end - first) as usize);
        let (start, end) = (start / self.unit * self.unit, end.next_multiple_of(self.unit));
        (first + start as u64..first + end as u64).addresses()
    }

    /// Records populated pages.
    fn learn(&mut self, populated: &RangeSet) {
        if self.dense.covers(self.range.clone()) {
            return;
        }
        let mut new = populated.intersection(&self.range.clone().into());
        new.subtract(&self.dense);
        if new.is_empty() {
            return;
        }
        self.known.extend(&new);
        let is_long = |run: &Range| run.page_range().page_count() >= DENSE_PAGES;
        let dense: RangeSet = self.known.iter().filter(is_long).collect();
        // Each run is scanned by itself.
        self.dense = if dense.range_count() <= MAX_DENSE_RUNS { dense } else { RangeSet::new() };
        self.dense.extend(&self.backed);
    }

    /// Adds the written pages to `written`. Those that are not hot are protected, or all left open.
    fn collect(
        &mut self,
        pagemap: &Pagemap,
        userfaultfd: &Userfaultfd,
        Collect { ends_transaction, protect }: Collect,
        written: &mut RangeSet,
    ) -> Result<(), Error> {
        let scan = |range: &Range, protect: bool, found: &mut RangeSet| {
            scan_around(pagemap, &self.dense, range, protect, found)
        };
        let Some(heat) = &mut self.heat else {
            check_registered(pagemap, &self.range)?;
            return scan(&self.range, protect, written);
        };
        let first = self.range.start.page();
        let addresses = |pages: Span<usize>| (first + pages.start as u64..first + pages.end as u64).addresses();
        let unit = self.unit;
        let write_protect = |pages: Span<usize>, protect: bool| {
            // The pages beside those that are hot are as hot if they are of the same unit.
            let run = addresses(pages.start / unit * unit..pages.end.next_multiple_of(unit));
            let protected = userfaultfd.write_protect(&run, protect);
            protected.map_err(|error| Error::while_tracking(error, || format!("protecting {run:#x?}")))
        };

        heat.transaction += u64::from(ends_transaction);
        let (hot_pages, hot_runs) = (heat.hot_pages, heat.hot_runs(first));
        // Often the hot pages are found, and few others.
        let mut found = RangeSet::with_capacity(hot_runs.range_count() + 8);
        if hot_runs.range_count() * LONG_RUN_PAGES <= hot_pages {
            // Few runs are hot, or none. The other pages are scanned and protected in one step, and
            // the hot runs are skipped.
            check_registered(pagemap, &self.range)?;
            let mut rest = RangeSet::from(self.range.clone());
            rest.subtract(hot_runs);
            written.extend(hot_runs);
            let scanned = rest.iter().try_for_each(|piece| scan(&piece, protect, &mut found));
            written.extend(&found);
            scanned?;
            if ends_transaction {
                let hot = heat.newly_hot(&found, first);
                if protect {
                    hot.into_iter().try_for_each(|run| write_protect(run, false))?;
                }
            }
        } else {
            scan(&self.range, false, &mut found)?;
            // Often exactly the hot pages were written. They need no further look.
            let other = if found == *hot_runs { RangeSet::new() } else { found.clone() };
            written.append(&mut found);
            // The second scan finds writes between the two scans.
            let cold = heat.cold_spans(&other, first, ends_transaction);
            if protect {
                cold.into_iter().try_for_each(|span| scan(&addresses(span), true, written))?;
            }
        }
        heat.awaits_probe |= ends_transaction && heat.probe_is_due();
        // Not before the caller writes, which would look like the program's writes.
        if protect && std::mem::take(&mut heat.awaits_probe) {
            heat.probe().into_iter().try_for_each(|run| write_protect(run, true))?;
        }
        Ok(())
    }
}

/// Adds the written pages of a range to `found`, and protects them if asked to. The `dense` part of
/// the range is scanned as it is, the rest where pages are populated.
fn scan_around(
    pagemap: &Pagemap,
    dense: &RangeSet,
    range: &Range,
    protect: bool,
    found: &mut RangeSet,
) -> Result<(), Error> {
    // A scan that protects is no check: where it fails, it has protected pages and reported none.
    let filter = Filter { all: WRITTEN, report: WRITTEN, protect, registered_only: !protect, ..Filter::default() };
    dense.within(range.clone()).try_for_each(|part| scan(pagemap, &part, filter, found))?;
    let mut sparse = RangeSet::from(range.clone());
    sparse.subtract(dense);
    let filter = Filter { any: PRESENT | SWAPPED, ..filter };
    let mut populated = RangeSet::new();
    let scanned = sparse.iter().try_for_each(|part| scan(pagemap, &part, filter, &mut populated));
    found.append(&mut populated);
    scanned
}

/// The pages of a range, by their numbers from `first` on.
fn pages_from(first: PageNumber, run: &Range) -> Span<usize> {
    (run.start.page() - first) as usize..(run.end.page() - first) as usize
}

impl Tracker for RegionScan {
    fn mechanism(&self) -> Mechanism {
        if self.is_adaptive { Mechanism::Adaptive } else { Mechanism::PagemapScan }
    }

    fn collect(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<(), Error> {
        self.collect_pages(ranges, dirty, true)
    }

    fn collect_open(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<bool, Error> {
        self.collect_pages(ranges, dirty, false).map(|()| true)
    }

    /// Saves the following writes their faults. System calls can write to protected pages.
    fn pin(&mut self, range: &Range) -> Result<(), Error> {
        self.fault_watch.iter_mut().for_each(FaultWatch::forget);
        let pages = range.whole_pages();
        for tracked in &self.tracked {
            let part = tracked.whole_units(&pages.overlap(&tracked.range));
            if !part.is_empty() {
                self.userfaultfd
                    .write_protect(&part, false)
                    .map_err(|error| Error::while_tracking(error, || format!("unprotecting {part:#x?}")))?;
            }
        }
        Ok(())
    }

    fn begin_interval(&mut self) -> Result<(), Error> {
        self.in_transaction = true;
        Ok(())
    }
}

/// Adds the pages of a range that pass a filter to `found`.
fn scan(pagemap: &Pagemap, range: &Range, filter: Filter, found: &mut RangeSet) -> Result<(), Error> {
    pagemap.scan(range, filter, |run, _| found.insert(run)).map_err(|error| scan_failed(error, range))
}

fn scan_failed(error: io::Error, range: &Range) -> Error {
    match error.raw_os_error() {
        Some(libc::EPERM) => Error::remapped(range.clone()),
        _ => Error::while_tracking(error, || format!("scanning the pages of {range:#x?}")),
    }
}

/// Checks that all mappings of a range are still those that were registered. The kernel skips a
/// mapping that is not, so its writes would not be reported.
fn check_registered(pagemap: &Pagemap, range: &Range) -> Result<(), Error> {
    // No registered mapping passes this filter, so the kernel walks over none of their pages.
    let filter = Filter { none: WP_ALLOWED, registered_only: true, ..Filter::default() };
    pagemap.scan(range, filter, |_, _| ()).map_err(|error| scan_failed(error, range))
}

/// Joins ascending pages to runs.
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

/// How often the pages of one range are written.
#[derive(Debug)]
struct Heat {
    /// A [`Page`] each, as a number, because zeros take memory only where they are changed.
    pages: Box<[u64]>,
    hot_pages: usize,
    /// The addresses of the hot pages. `None` if the hot pages have changed since.
    hot_runs: Option<RangeSet>,
    /// Number of transactions that have ended.
    transaction: u64,
    /// The transaction in which probed pages are protected.
    probed_in: u64,
    /// Number of probed pages that were not written yet.
    silent_pages: usize,
    between_probes: u64,
    /// True if the next collect that protects pages begins a probe.
    awaits_probe: bool,
    slice: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Page {
    /// The last transaction that wrote the page, modulo 2³².
    written_in: u32,
    /// Number of consecutive transactions that wrote the page, up to [`HOT_AFTER`], at which the
    /// page is hot and unprotected.
    streak: u8,
    /// True if the page was hot, and this transaction shows whether it still is.
    is_probed: bool,
}

impl Page {
    fn from_number(number: u64) -> Page {
        Page { written_in: number as u32, streak: (number >> 32) as u8, is_probed: number >> 40 != 0 }
    }

    fn to_number(self) -> u64 {
        u64::from(self.written_in) | u64::from(self.streak) << 32 | u64::from(self.is_probed) << 40
    }
}

impl Heat {
    /// No page was written yet.
    ///
    /// # Errors
    /// `ENOMEM`
    fn new(pages: usize) -> io::Result<Self> {
        Ok(Heat {
            pages: room::zeros(pages)?,
            hot_pages: 0,
            hot_runs: None,
            transaction: 0,
            probed_in: 0,
            silent_pages: 0,
            between_probes: 1,
            awaits_probe: false,
            slice: 0,
        })
    }

    /// The addresses of the hot pages of a range whose first page is `first`.
    fn hot_runs(&mut self, first: PageNumber) -> &RangeSet {
        let make = || {
            let is_hot = |(_, page): &(usize, &u64)| Page::from_number(**page).streak == HOT_AFTER;
            let hot = self.pages.iter().enumerate().filter(is_hot).map(|(index, _)| (first + index as u64).addresses());
            if self.hot_pages > 0 { hot.collect() } else { RangeSet::new() }
        };
        self.hot_runs.get_or_insert_with(make)
    }

    /// Records that a page was written. Returns true if the page is hot now.
    fn is_hot_now(&mut self, index: usize, ends_transaction: bool) -> bool {
        let now = self.transaction as u32;
        let mut page = Page::from_number(self.pages[index]);
        if page.streak < HOT_AFTER && ends_transaction {
            page.streak = if page.written_in == now.wrapping_sub(1) { page.streak + 1 } else { 1 };
            page.written_in = now;
            if page.streak == HOT_AFTER {
                self.hot_pages += 1;
                self.hot_runs = None;
                self.silent_pages -= usize::from(page.is_probed);
            }
            page.is_probed = false;
            self.pages[index] = page.to_number();
        }
        page.streak == HOT_AFTER
    }

    /// Records that the pages of `found` were written in a transaction that ends. Returns runs of
    /// those that are hot now. Pages are numbered from `first` on.
    fn newly_hot(&mut self, found: &RangeSet, first: PageNumber) -> Vec<Span<usize>> {
        let mut hot = PageRuns::default();
        for page in found.iter().flat_map(|run| pages_from(first, &run)) {
            if self.is_hot_now(page, true) {
                hot.push(page);
            }
        }
        hot.runs
    }

    /// Records that the pages of `found` were written. Returns spans between hot pages, in which
    /// those lie that are not hot.
    fn cold_spans(&mut self, found: &RangeSet, first: PageNumber, ends_transaction: bool) -> Vec<Span<usize>> {
        let (mut cold, mut last_hot): (Vec<Span<usize>>, _) = (Vec::new(), 0);
        for page in found.iter().flat_map(|run| pages_from(first, &run)) {
            if self.is_hot_now(page, ends_transaction) {
                last_hot = page;
                continue;
            }
            match cold.last_mut() {
                Some(span) if last_hot <= span.start => span.end = page + 1,
                _ => cold.push(page..page + 1),
            }
        }
        cold
    }

    /// True if hot pages must be probed in the next transaction. Called when the writes of the last
    /// one are known.
    fn probe_is_due(&mut self) -> bool {
        if self.transaction == self.probed_in {
            // Probes become rarer while all hot pages stay hot.
            let cooled = self.silent_pages > 0;
            self.between_probes = if cooled { 1 } else { (self.between_probes * 2).min(MAX_PROBE_DISTANCE) };
        }
        self.hot_pages > 0 && self.transaction >= self.probed_in + self.between_probes
    }

    /// True if pages are hot, the transaction that ends is no probe, and the next one is none.
    /// False at least once in [`MAX_PROBE_DISTANCE`] transactions.
    fn is_between_probes(&self) -> bool {
        let ended = self.transaction + 1;
        self.hot_pages > 0 && ended != self.probed_in && ended < self.probed_in + self.between_probes
    }

    /// Makes the pages of the next slice that has hot pages one transaction short of hot, and
    /// returns them, to be protected.
    fn probe(&mut self) -> Vec<Span<usize>> {
        self.probed_in = self.transaction + 1;
        self.silent_pages = 0;
        self.hot_runs = None;
        let mut probed = PageRuns::default();
        for _ in 0..PROBE_SLICES {
            self.slice = (self.slice + 1) % PROBE_SLICES;
            let runs = self.pages.chunks_mut(SLICE_RUN_PAGES).enumerate().skip(self.slice).step_by(PROBE_SLICES);
            for (run, pages) in runs {
                let is_hot = |(_, page): &(usize, &mut u64)| Page::from_number(**page).streak == HOT_AFTER;
                for (index, page) in pages.iter_mut().enumerate().filter(is_hot) {
                    let written_in = self.transaction as u32;
                    *page = Page { streak: HOT_AFTER - 1, written_in, is_probed: true }.to_number();
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
