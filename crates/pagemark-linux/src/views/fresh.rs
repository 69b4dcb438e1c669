//! Memory that is used for the first time: each page raises a page fault in each view through which
//! it is used. Populating several pages at once, before their use, costs about half of that.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::Views;
use super::bits::Bits;
use crate::populate::{self, POPULATE};
use crate::{Address, AddressRangeExt, ByteCount, PAGE_SIZE, PageNumber, PageRangeExt, Range};

/// Number of pages of a block, the unit in which memory is populated. The kernel maps as many pages
/// at once around a page that is read (`fault_around_bytes`).
const BLOCK_PAGES: usize = 16;

/// Which memory was populated before its use.
#[derive(Debug)]
pub(super) struct FreshPages {
    /// The pages that were, and have not been freed since.
    present: Bits,
    /// The pages that were since the tracker has asked last.
    populated: Bits,
    /// Number of trackers that have registered the views with userfaultfd, or will.
    trackers: AtomicUsize,
    is_off: AtomicBool,
}

impl FreshPages {
    /// For views of `bytes`, of which nothing was used yet.
    ///
    /// # Errors
    /// `ENOMEM`: there is no address space.
    pub(super) fn new(bytes: usize) -> io::Result<FreshPages> {
        // Probed here, so that an allocator need not do it.
        POPULATE.is_there();
        let pages = bytes / PAGE_SIZE;
        Ok(FreshPages {
            present: Bits::new(pages)?,
            populated: Bits::new(pages)?,
            trackers: AtomicUsize::new(0),
            is_off: AtomicBool::new(false),
        })
    }

    /// Makes place for the numbers of pages.
    ///
    /// # Errors
    /// Those of [`Bits::open`].
    pub(super) fn open(&self, pages: std::ops::Range<usize>) -> io::Result<()> {
        self.present.open(pages.clone())?;
        self.populated.open(pages)
    }

    /// Whole pages, given as offsets, are freed.
    pub(super) fn freed(&self, offsets: &Range) {
        self.present.remove(numbers(offsets));
    }
}

impl Views {
    /// Prepares for the use of a few whole pages, given as offsets, that hold no data, through all
    /// views: they are populated, as far as memory permits, and with them the blocks in which they
    /// lie, unless a part of these was populated before. They take memory from now on. Keeps
    /// `errno`, and allocates no memory of the program.
    ///
    /// One view that is not tracked is populated as it is used.
    pub fn prepare(&self, offsets: &Range) {
        let FreshPages { present, populated, trackers, is_off } = &self.fresh;
        let (pages, is_tracked) = (numbers(offsets), trackers.load(Ordering::Relaxed) > 0);
        if pages.is_empty() || self.count == 1 && !is_tracked || is_off.load(Ordering::Relaxed) {
            return;
        }
        // What was populated in an earlier interval may have been protected since.
        let are_ready = present.has_all(pages.clone()) && (!is_tracked || populated.has_all(pages.clone()));
        if are_ready || !POPULATE.is_there() {
            return;
        }
        let first = pages.start / BLOCK_PAGES * BLOCK_PAGES;
        let last = (pages.end - 1) / BLOCK_PAGES * BLOCK_PAGES;
        let is_new = |block: usize| !present.has_any(block..block + BLOCK_PAGES);
        let start = if is_new(first) { first } else { pages.start };
        let end = if is_new(last) { (last + BLOCK_PAGES).min(self.view_bytes / PAGE_SIZE) } else { pages.end };
        let pages = start..end;
        let offsets = offsets_of(pages.clone());
        for view in 0..self.count {
            let start = self.view(view).start;
            let addresses = start + (offsets.start - Address::MIN)..start + (offsets.end - Address::MIN);
            // In views that are registered with userfaultfd, a page that was read is mapped so that it
            // cannot be written; in others, all pages of the block that hold data are mapped at once.
            populate::ahead(&addresses, view == 0 || is_tracked);
        }
        present.add(pages.clone());
        if is_tracked {
            populated.add(pages);
        }
    }

    /// Leaves memory to be populated as it is used.
    pub fn populate_by_use(&self) {
        self.fresh.is_off.store(true, Ordering::Relaxed);
    }

    /// Declares that a tracker registers the views with userfaultfd, or will do so from outside of
    /// the process. This decides how memory is populated, and nothing else.
    pub fn begin_tracking(&self) {
        self.fresh.trackers.fetch_add(1, Ordering::Relaxed);
    }

    /// Declares that a tracker of [`Views::begin_tracking`] has gone.
    pub fn end_tracking(&self) {
        self.fresh.trackers.fetch_sub(1, Ordering::Relaxed);
    }

    /// Calls `visit` with the offsets of each page below the offset `end` that was populated by
    /// [`Views::prepare`] since the last call for it, while a tracker had the views: it counts as
    /// written in all views, and has raised no page fault.
    pub fn take_populated(&self, end: ByteCount, visit: &mut dyn FnMut(Range)) {
        take_pages(&self.fresh.populated, end, visit);
    }
}

/// The numbers of the pages of a range of offsets.
pub(super) fn numbers(offsets: &Range) -> std::ops::Range<usize> {
    let pages = offsets.page_range();
    pages.start.get() as usize..pages.end.get() as usize
}

/// The offsets of pages, given by their numbers.
fn offsets_of(pages: std::ops::Range<usize>) -> Range {
    (PageNumber::new(pages.start as u64)..PageNumber::new(pages.end as u64)).addresses()
}

/// Removes the pages below the offset `end` from a set, and calls `visit` with the offsets of each.
pub(super) fn take_pages(set: &Bits, end: ByteCount, visit: &mut dyn FnMut(Range)) {
    set.take(end.to_usize() / PAGE_SIZE, &mut |page| visit(offsets_of(page..page + 1)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RangeSet;
    use crate::pagemap::{Filter, PRESENT, Pagemap};

    const PAGES: usize = 40;

    fn views(count: usize) -> Option<Views> {
        match POPULATE.refusal() {
            None => Some(Views::new(ByteCount::of_pages(PAGES as u64), count).unwrap()),
            Some(error) => {
                pagemark_testing::skipped(&error.to_string());
                None
            }
        }
    }

    /// The pages of each view that are in the page table.
    fn present(views: &Views) -> Vec<RangeSet> {
        let pagemap = Pagemap::of_this_process().unwrap();
        let present = |view: usize| {
            let (mut found, view) = (RangeSet::new(), views.view(view));
            let filter = Filter { all: PRESENT, ..Filter::default() };
            let offset = |address: Address| Address::MIN + (address - view.start);
            pagemap.find(&view, filter, |run, _| found.insert(offset(run.start)..offset(run.end))).unwrap();
            found
        };
        (0..views.count()).map(present).collect()
    }

    #[test]
    fn pages_are_populated_with_their_block_in_all_views() {
        let Some(views) = views(4) else { return };
        views.prepare(&offsets_of(17..18));
        assert_eq!(present(&views), vec![RangeSet::from(offsets_of(16..32)); 4]);
        // A run in two blocks, of which the first is there, and the last has only half of its pages.
        views.prepare(&offsets_of(31..33));
        assert_eq!(present(&views), vec![RangeSet::from(offsets_of(16..40)); 4]);
        // SAFETY: nobody needs the content.
        unsafe { views.free(&offsets_of(20..22)).unwrap() };
        let rest: RangeSet = [offsets_of(16..20), offsets_of(22..40)].into_iter().collect();
        assert_eq!(present(&views), vec![rest; 4]);
        // The rest of the block is in use: only what was asked for.
        views.prepare(&offsets_of(20..21));
        let rest: RangeSet = [offsets_of(16..21), offsets_of(22..40)].into_iter().collect();
        assert_eq!(present(&views), vec![rest; 4]);
        // SAFETY: as above.
        unsafe { views.free(&offsets_of(16..32)).unwrap() };
        views.prepare(&offsets_of(20..21));
        assert_eq!(present(&views), vec![RangeSet::from(offsets_of(16..40)); 4]);
        // Nothing is reported to a tracker that comes later.
        views.take_populated(views.view_bytes(), &mut |page| panic!("{page:?}"));
    }

    #[test]
    fn one_view_is_populated_only_if_it_is_tracked() {
        let Some(views) = views(1) else { return };
        views.prepare(&offsets_of(3..4));
        assert!(present(&views)[0].is_empty());
        views.begin_tracking();
        views.prepare(&offsets_of(3..4));
        assert_eq!(present(&views), [RangeSet::from(offsets_of(0..16))]);
        views.populate_by_use();
        views.prepare(&offsets_of(16..17));
        assert_eq!(present(&views), [RangeSet::from(offsets_of(0..16))]);
    }
}
