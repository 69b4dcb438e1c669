//! Which pages of which views were written: the kernel's part of tracking below the page (FPM,
//! section 3.1).
//!
//! Each [view](pagemark_linux::views) of a page has a page table entry of its own, so that a write
//! through a view marks the page in that view only. Whoever gives out the addresses decides what a
//! view means; the crate `pagemark-heap` gives out objects by the part of the page in which they
//! begin.
//!
//! As with [`pagemap_scan`](super::pagemap_scan), the views are registered with userfaultfd in
//! asynchronous write-protect mode, and one PAGEMAP_SCAN for each view reports the written pages
//! and protects them again. Pages that stay *released* are not protected again, so that writing
//! them costs the program nothing; each collect reports them.

use std::sync::Arc;

use pagemark_linux::pagemap::{Filter, Pagemap, WRITTEN};
use pagemark_linux::populate;
use pagemark_linux::this_process::OfThisProcess;
use pagemark_linux::userfaultfd::Userfaultfd;
use pagemark_linux::views::Views;

use super::pagemap_scan::unavailable;
use super::registry::own_pagemap;
use crate::{Error, ErrorKind, Mechanism, Range, RangeSet};

/// Average length, in pages, from which runs of released pages are skipped by separate scans on
/// each side.
const LONG_RUN_PAGES: u64 = 32;

/// Tracks the pages of all views of one memory.
#[derive(Debug)]
pub struct ViewScan {
    pagemap: Arc<Pagemap>,
    userfaultfd: Userfaultfd,
    views: Vec<Range>,
    process: OfThisProcess,
}

impl Drop for ViewScan {
    fn drop(&mut self) {
        // A child made by `fork` may hold a copy of the descriptor, so closing it is not enough.
        if self.process.is_here() {
            // An error means that the view is no longer mapped, which needs nothing.
            self.views.iter().for_each(|view| _ = self.userfaultfd.unregister(view));
        }
    }
}

impl ViewScan {
    /// Registers the views. Nothing is protected before the first [`ViewScan::collect`].
    ///
    /// # Errors
    /// `ErrorKind::Unavailable`: the kernel is older than 6.7, or refuses userfaultfd.
    /// `ErrorKind::System`: another tracker has the views.
    ///
    /// # Safety
    /// The views stay mapped as long as this value exists.
    pub unsafe fn new(views: &Views) -> Result<ViewScan, Error> {
        let userfaultfd = Userfaultfd::of_this_process().map_err(|error| unavailable(Mechanism::PagemapScan, error))?;
        let pagemap = own_pagemap()?;
        let views: Vec<Range> = (0..views.count()).map(|view| views.view(view)).collect();
        for view in &views {
            userfaultfd
                .register(view)
                .map_err(|error| Error::while_tracking(error, || format!("registering the view {view:#x?}")))?;
        }
        Ok(ViewScan { pagemap, userfaultfd, views, process: OfThisProcess::new() })
    }

    /// Calls `each` for runs of pages of `range`, part of one view, that were written since the
    /// last collect, and protects them again. `released`, whole pages of the range, is reported and
    /// stays or becomes unprotected: a page that was protected before is unprotected by its next
    /// write. A page may be reported twice. Pages that hold no data may count as written the first
    /// time.
    ///
    /// # Errors
    /// A failed system call; then what was found has been reported, and the rest is reported by the
    /// next collect.
    pub fn collect(&self, range: &Range, released: &RangeSet, mut each: impl FnMut(Range)) -> Result<(), Error> {
        self.check_process()?;
        // The shortest form of the scan: whatever is not protected counts as written. Other forms
        // would miss a page that was written and then left the page table.
        let filter = Filter { all: WRITTEN, report: WRITTEN, ..Filter::default() };
        let scan = |range: &Range, protect: bool, each: &mut dyn FnMut(Range)| {
            self.pagemap
                .scan(range, Filter { protect, ..filter }, |run, _| each(run))
                .map_err(|error| Error::while_tracking(error, || format!("scanning the view {range:#x?}")))
        };
        if released.is_empty() {
            return scan(range, true, &mut each);
        }
        released.iter().for_each(&mut each);
        if released.range_count() as u64 * LONG_RUN_PAGES <= released.page_count() {
            let mut rest = RangeSet::from(range.clone());
            rest.subtract(released);
            return rest.iter().try_for_each(|piece| scan(&piece, true, &mut each));
        }
        // Many short runs are released. The first scan finds the other written pages; a second one
        // protects what lies between two released runs from its first written page to its last, and
        // finds what was written meanwhile.
        let mut found = RangeSet::new();
        scan(range, false, &mut |run| found.insert(run))?;
        found.subtract(released);
        let mut spans: Vec<Range> = Vec::new();
        for run in found.iter() {
            match spans.last_mut() {
                Some(span) if released.within(span.end..run.start).next().is_none() => span.end = run.end,
                _ => spans.push(run),
            }
        }
        spans.iter().try_for_each(|span| scan(span, true, &mut each))
    }

    /// Protects pages between two collects. What was written there before counts as written no
    /// more.
    ///
    /// # Errors
    /// A failed system call.
    pub fn protect(&self, pages: &RangeSet) -> Result<(), Error> {
        self.check_process()?;
        pages.iter().try_for_each(|run| {
            self.userfaultfd
                .write_protect(&run, true)
                .map_err(|error| Error::while_tracking(error, || format!("protecting {run:#x?}")))
        })
    }

    /// Makes the next write to each of these pages raise no fault. They count as written from now
    /// on.
    ///
    /// # Errors
    /// A failed system call.
    pub fn release(&self, pages: &RangeSet) -> Result<(), Error> {
        self.check_process()?;
        // Removing the protection is not enough: the kernel then leaves a page of shared memory as
        // one that cannot be written, and its next write raises a fault.
        pages.iter().try_for_each(|run| {
            populate::open_for_writing(&run)
                .map_err(|error| Error::while_tracking(error, || format!("unprotecting {run:#x?}")))
        })
    }

    /// The addresses of the views.
    pub fn views(&self) -> &[Range] {
        &self.views
    }

    /// Checks that the process is the one that made the value. In a child made by `fork`, a scan
    /// would find and protect the pages of the parent.
    ///
    /// # Errors
    /// `ErrorKind::ForkedChild`
    pub fn check_process(&self) -> Result<(), Error> {
        if self.process.is_here() {
            return Ok(());
        }
        let reason = "the views were registered by the parent of this process: make a new tracker";
        Err(Error::because(ErrorKind::ForkedChild, reason))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::{AddressRangeExt, ByteCount, PageRangeExt};

    const PAGES: u64 = 96;

    /// `None` where the kernel lacks the mechanism.
    fn tracked(count: usize) -> Option<(Views, ViewScan)> {
        let views = Views::new(ByteCount::of_pages(PAGES), count).unwrap();
        // SAFETY: both values are dropped together, the tracker first.
        match unsafe { ViewScan::new(&views) } {
            Ok(scan) => Some((views, scan)),
            Err(error) if error.kind() == ErrorKind::Unavailable => {
                pagemark_testing::skipped(&error.to_string());
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn write(views: &Views, view: usize, page: u64) {
        let page = views.view(view).start + ByteCount::of_pages(page);
        // SAFETY: the page is mapped, and the test has one thread.
        unsafe { page.as_mut_ptr::<u8>().write_volatile(1) };
    }

    fn of_pages(views: &Views, view: usize, pages: impl IntoIterator<Item = u64>) -> RangeSet {
        let first = views.view(view).start.page();
        pages.into_iter().map(|page| (first + page..first + page + 1).addresses()).collect()
    }

    /// The pages that a collect reports in each view.
    fn collect(views: &Views, scan: &ViewScan, released: &[BTreeSet<u64>]) -> Vec<BTreeSet<u64>> {
        let collect = |(view, released): (usize, &BTreeSet<u64>)| {
            let (range, mut found) = (views.view(view), BTreeSet::new());
            let first = range.start.page();
            scan.collect(&range, &of_pages(views, view, released.iter().copied()), |run| {
                let pages = run.page_range();
                found.extend(pages.start - first..pages.end - first);
            })
            .unwrap();
            found
        };
        released.iter().enumerate().map(collect).collect()
    }

    proptest! {
        #![proptest_config(pagemark_testing::cases(24))]
        #[test]
        fn each_write_is_reported_in_its_view_only(
            count in prop::sample::select(vec![1usize, 2, 4, 8]),
            intervals in prop::collection::vec(
                (prop::collection::vec((0..8usize, 0..PAGES), 0..60), prop::collection::vec((0..8usize, 0..PAGES, 1..40u64), 0..8)),
                1..8,
            ),
        ) {
            let Some((views, scan)) = tracked(count) else { return Ok(()) };
            let none = vec![BTreeSet::new(); count];
            let all: BTreeSet<u64> = (0..PAGES).collect();
            (0..count).for_each(|view| all.iter().for_each(|&page| write(&views, view, page)));
            prop_assert_eq!(collect(&views, &scan, &none), vec![all; count]);
            let mut unprotected = none.clone();
            for (writes, releases) in intervals {
                let mut expected = unprotected.clone();
                for (view, page) in writes.into_iter().map(|(view, page)| (view % count, page)) {
                    write(&views, view, page);
                    expected[view].insert(page);
                }
                let mut released = none.clone();
                releases.into_iter().for_each(|(view, page, pages)| released[view % count].extend(page..PAGES.min(page + pages)));
                for (expected, released) in expected.iter_mut().zip(&released) {
                    expected.extend(released);
                }
                prop_assert_eq!(&collect(&views, &scan, &released), &expected);
                // A released page that was not protected stays so. One that was, stays protected until its next write.
                for ((unprotected, released), expected) in unprotected.iter_mut().zip(&released).zip(&expected) {
                    *unprotected = expected.intersection(released).copied().collect();
                }
                // What is protected explicitly counts as written no more.
                for (view, unprotected) in unprotected.iter_mut().enumerate() {
                    let half: Vec<u64> = unprotected.iter().copied().filter(|page| page % 2 == 0).collect();
                    scan.protect(&of_pages(&views, view, half.iter().copied())).unwrap();
                    let released: Vec<u64> = half.iter().copied().filter(|page| page % 4 == 0).collect();
                    scan.release(&of_pages(&views, view, released.iter().copied())).unwrap();
                    unprotected.retain(|page| page % 2 != 0);
                    unprotected.extend(released);
                }
                // The model does not know which released pages are protected still: write all of them.
                for (view, pages) in unprotected.iter().enumerate() {
                    pages.iter().for_each(|&page| write(&views, view, page));
                }
            }
        }
    }
}
