//! Pages that were freed: they hold zeros, which nobody has written.
//!
//! The kernel drops the page table entries of freed memory, and with them the protection. The scan
//! of the views does not report such a page until it is written. Allocators rely on the zeros: they
//! hand out the page as part of an object that is filled with zeros, without a write.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::sys::own_memory::Mapping;
use crate::{AddressRangeExt, ByteCount, PAGE_SIZE, PageNumber, PageRangeExt, Range};

const WORD_PAGES: usize = u64::BITS as usize;

/// The pages of views that were freed since they were taken last. Allocates no memory of the
/// program, since an allocator frees while it allocates.
#[derive(Debug)]
pub(super) struct FreedPages {
    /// A bit for each page.
    words: Mapping,
}

impl FreedPages {
    /// Makes the list for views of `bytes`. It takes memory only as it is written.
    ///
    /// # Errors
    /// `ENOMEM`: there is no address space.
    pub(super) fn new(bytes: usize) -> io::Result<FreedPages> {
        let words = bytes.div_ceil(PAGE_SIZE).div_ceil(WORD_PAGES);
        Ok(FreedPages { words: Mapping::new(words * size_of::<AtomicU64>())? })
    }

    /// Adds the pages of a range of offsets, which were freed before this call.
    pub(super) fn add(&self, offsets: &Range) {
        let pages = offsets.page_range();
        for page in pages.start.get() as usize..pages.end.get() as usize {
            if let Some(word) = self.word(page / WORD_PAGES) {
                word.fetch_or(1 << (page % WORD_PAGES), Ordering::Release);
            }
        }
    }

    /// Removes the pages below `end` from the list, and calls `visit` with the offsets of each.
    pub(super) fn take(&self, end: ByteCount, visit: &mut dyn FnMut(Range)) {
        let pages = end.to_usize() / PAGE_SIZE;
        for index in 0..pages.div_ceil(WORD_PAGES) {
            let Some(word) = self.word(index) else { return };
            let below_end = match pages - index * WORD_PAGES {
                left if left < WORD_PAGES => (1 << left) - 1,
                _ => u64::MAX,
            };
            // A write would take memory for the list of views of which nothing is freed.
            if word.load(Ordering::Relaxed) & below_end == 0 {
                continue;
            }
            let mut bits = word.fetch_and(!below_end, Ordering::Acquire) & below_end;
            while bits != 0 {
                let page = PageNumber::new((index * WORD_PAGES) as u64 + u64::from(bits.trailing_zeros()));
                visit((page..page + 1).addresses());
                bits &= bits - 1;
            }
        }
    }

    fn word(&self, index: usize) -> Option<&AtomicU64> {
        let word = self.words.start().as_ptr().cast::<u64>().wrapping_add(index);
        // SAFETY: the word is in the mapping, which lives as long as `self`, is filled with zeros at
        // first, and is accessed by atomic operations only.
        (index < self.words.bytes() / size_of::<AtomicU64>()).then(|| unsafe { AtomicU64::from_ptr(word) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RangeSet;

    fn range(pages: std::ops::Range<u64>) -> Range {
        (PageNumber::new(pages.start)..PageNumber::new(pages.end)).addresses()
    }

    #[test]
    fn pages_are_taken_once() {
        let freed = FreedPages::new(200 * PAGE_SIZE).unwrap();
        let take = |pages: usize| {
            let mut found = RangeSet::new();
            freed.take(ByteCount::from(pages * PAGE_SIZE), &mut |offsets| found.insert(offsets));
            found
        };
        assert!(take(200).is_empty());
        [3..5, 63..130, 199..200].into_iter().for_each(|pages| freed.add(&range(pages)));
        // Beyond the end.
        freed.add(&range(255..300));
        assert_eq!(take(200), [range(3..5), range(63..130), range(199..200)].into_iter().collect());
        assert!(take(200).is_empty());
        freed.add(&range(10..30));
        assert_eq!(take(20), [range(10..20)].into_iter().collect());
        assert_eq!(take(200), [range(20..30)].into_iter().collect());
    }
}
