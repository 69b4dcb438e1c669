//! A set of pages with one bit per page, which a signal handler or another thread can add to.

use std::io;
use std::ops::Range;

#[cfg(not(feature = "loom"))]
use pagemark_linux::room;
use pagemark_linux::sync::atomic::{AtomicU64, Ordering};

/// A set of pages of one range, by their index in the range. Each word of 64 bits is set by one
/// atomic operation.
///
/// What orders it with what the bits stand for is the [`Gate`](pagemark_linux::gate::Gate) that
/// whoever sets and takes them passes.
#[derive(Debug)]
pub(super) struct PageBits {
    words: Box<[AtomicU64]>,
}

impl PageBits {
    /// None of `pages` pages.
    ///
    /// # Errors
    /// `ENOMEM`
    pub fn new(pages: usize) -> io::Result<Self> {
        let words = pages.div_ceil(64);
        #[cfg(not(feature = "loom"))]
        let words = room::zeros(words)?;
        #[cfg(feature = "loom")]
        let words = (0..words).map(|_| AtomicU64::new(0)).collect();
        Ok(PageBits { words })
    }

    /// Adds pages, which must be among those it was made for.
    pub fn set(&self, pages: Range<usize>) {
        for_words(pages, |word, mask| {
            self.words[word].fetch_or(mask, Ordering::Relaxed);
        });
    }

    /// True if all of these pages are in the set.
    pub fn contains_all(&self, pages: Range<usize>) -> bool {
        let mut contains_all = true;
        for_words(pages, |word, mask| contains_all &= self.words[word].load(Ordering::Relaxed) & mask == mask);
        contains_all
    }

    /// Calls `each` for the runs of pages in the set, in ascending order; runs may touch.
    pub fn each_run(&self, mut each: impl FnMut(Range<usize>)) {
        for (index, word) in self.words.iter().enumerate() {
            runs(word.load(Ordering::Relaxed), |run| each(run.start + 64 * index..run.end + 64 * index));
        }
    }

    /// Empties the set, and calls `each` for the runs of pages that were in it, in ascending order;
    /// runs may touch.
    pub fn take(&self, mut each: impl FnMut(Range<usize>)) {
        for (index, word) in self.words.iter().enumerate() {
            if word.load(Ordering::Relaxed) != 0 {
                runs(word.swap(0, Ordering::Relaxed), |run| each(run.start + 64 * index..run.end + 64 * index));
            }
        }
    }
}

/// Calls `each` for the words in which bits of the range lie, with those bits.
pub(crate) fn for_words(bits: Range<usize>, mut each: impl FnMut(usize, u64)) {
    let mut start = bits.start;
    while start < bits.end {
        let end = bits.end.min((start / 64 + 1) * 64);
        let mask = (u64::MAX >> (64 - (end - start))) << (start % 64);
        each(start / 64, mask);
        start = end;
    }
}

/// Calls `each` for the runs of set bits, in ascending order.
pub(crate) fn runs(mut word: u64, mut each: impl FnMut(Range<usize>)) {
    let mut passed = 0;
    while word != 0 {
        let zeros = word.trailing_zeros();
        word >>= zeros;
        let ones = word.trailing_ones();
        word = word.checked_shr(ones).unwrap_or(0);
        let start = passed + zeros as usize;
        passed = start + ones as usize;
        each(start..passed);
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn behaves_like_a_set(
            ranges in prop::collection::vec((0usize..300, 0usize..140), 0..12),
        ) {
            let bits = PageBits::new(300).unwrap();
            let mut model = BTreeSet::new();
            for (start, length) in ranges {
                bits.set(start..(start + length).min(300));
                model.extend(start..(start + length).min(300));
            }
            for start in 0..300 {
                let pages = start..(start + 70).min(300);
                prop_assert_eq!(bits.contains_all(pages.clone()), pages.clone().all(|page| model.contains(&page)));
            }
            let mut listed = Vec::new();
            bits.each_run(|run| listed.extend(run));
            prop_assert!(listed.iter().eq(model.iter()), "{:?} {:?}", listed, model);
            let mut taken = Vec::new();
            bits.take(|run| taken.extend(run));
            prop_assert!(taken.iter().eq(model.iter()), "{:?} {:?}", taken, model);
            bits.take(|run| panic!("{run:?} is left"));
        }
    }
}
