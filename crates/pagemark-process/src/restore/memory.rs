//! The memory of a process that is restored.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use pagemark::{ContentId, PageNumber, PageRange, PageTree, RangeSet, Store};
use pagemark_trace::RecordedPid;
use pagemark_trace::error::Error;

/// Some pages of a process of the checkpoint. They are numbered by position.
#[derive(Debug, Default)]
pub(super) struct Pages {
    /// In ascending order.
    pub(super) numbers: Vec<PageNumber>,
    pub(super) ids: Vec<ContentId>,
}

impl Pages {
    /// Reads which pages of `ranges` a page tree names.
    pub(super) fn read(root: ContentId, ranges: &RangeSet<PageNumber>, store: &dyn Store) -> Result<Pages, Error> {
        let ranges: Vec<PageRange> = ranges.iter().collect();
        let (numbers, ids) = PageTree::read_pages(root, &ranges, store)?.into_iter().unzip();
        Ok(Pages { numbers, ids })
    }

    /// The position of a page; None if it holds zeros.
    pub(super) fn position(&self, page: PageNumber) -> Option<usize> {
        self.numbers.binary_search(&page).ok()
    }

    /// The content of a page; [`ContentId::ZERO`] if it holds zeros.
    pub(super) fn id(&self, page: PageNumber) -> ContentId {
        self.position(page).map_or(ContentId::ZERO, |position| self.ids[position])
    }

    /// The positions of the pages of a range.
    pub(super) fn positions(&self, pages: &PageRange) -> Range<usize> {
        let from = |page: PageNumber| self.numbers.partition_point(|number| *number < page);
        from(pages.start)..from(pages.end)
    }

    /// The pages of some runs, which are in ascending order.
    fn within(&self, runs: &[PageRange]) -> Pages {
        let mut pages = Pages::default();
        for positions in runs.iter().map(|run| self.positions(run)) {
            pages.numbers.extend_from_slice(&self.numbers[positions.clone()]);
            pages.ids.extend_from_slice(&self.ids[positions]);
        }
        pages
    }
}

/// The memory of a process that is delivered into it.
#[derive(Debug)]
pub(super) struct ProcessMemory {
    /// The process.
    pub(super) pid: RecordedPid,
    /// The root of its page tree.
    root: ContentId,
    /// The pages that the images directory does not have, in ascending order.
    pub(super) delivered: Vec<PageRange>,
    /// The mappings of which pages may be delivered.
    pub(super) deliverable: RangeSet,
    /// The delivered pages that do not hold zeros; None until they are asked for.
    pages: Mutex<Option<Arc<Pages>>>,
}

impl ProcessMemory {
    /// The memory of a process, with `known` pages if more than the delivered ones are known.
    pub(super) fn new(
        pid: RecordedPid,
        root: ContentId,
        delivered: Vec<PageRange>,
        deliverable: RangeSet,
        known: Option<&Pages>,
    ) -> ProcessMemory {
        let pages = Mutex::new(known.map(|known| Arc::new(known.within(&delivered))));
        ProcessMemory { pid, root, delivered, deliverable, pages }
    }

    /// The delivered pages that do not hold zeros. The first call reads the page tree, which takes
    /// long for much memory; other calls wait for that.
    ///
    /// # Errors
    /// Those of [`PageTree::load`].
    pub(super) fn pages(&self, store: &dyn Store) -> Result<Arc<Pages>, Error> {
        let mut pages = self.pages.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pages) = &*pages {
            return Ok(pages.clone());
        }
        let read = Arc::new(Pages::read(self.root, &self.delivered.iter().cloned().collect(), store)?);
        *pages = Some(read.clone());
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use pagemark::MemoryStore;

    use super::*;

    fn range(first: u64, end: u64) -> PageRange {
        PageNumber::new(first)..PageNumber::new(end)
    }

    #[test]
    fn pages_that_are_known_and_pages_that_are_read_are_the_same() {
        let (mut tree, mut store) = (PageTree::new(), MemoryStore::new());
        let content = |page: u64| ContentId([page as u8; 16]);
        for page in [3, 4, 5, 9, 20, 21] {
            tree.set(PageNumber::new(page), content(page));
        }
        let root = tree.save(&mut store).unwrap();
        let delivered = vec![range(4, 10), range(21, 30)];
        let all = Pages::read(root, &[range(0, 100)].into_iter().collect(), &store).unwrap();
        assert_eq!((all.id(PageNumber::new(9)), all.id(PageNumber::new(10))), (content(9), ContentId::ZERO));
        for known in [Some(&all), None] {
            let memory = ProcessMemory::new(RecordedPid::new(7), root, delivered.clone(), RangeSet::new(), known);
            let pages = memory.pages(&store).unwrap();
            assert_eq!(pages.numbers.iter().map(|page| page.get()).collect::<Vec<_>>(), [4, 5, 9, 21]);
            assert_eq!(pages.ids, [4, 5, 9, 21].map(content));
            assert_eq!(pages.positions(&range(5, 21)), 1..3);
        }
    }
}
