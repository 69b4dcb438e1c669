//! A set of pages with one bit per page.
//!
//! The core has such a set for signal handlers, `PageBits` in `pagemark/src/track/page_bits.rs`,
//! which is atomic, only grows, and is taken as a whole. This one is behind a lock, and pages leave
//! it one by one.

use std::ops::Range;

/// Pages of a block of memory, by number.
#[derive(Debug, Default)]
pub(crate) struct PageSet {
    words: Vec<u64>,
}

impl PageSet {
    /// None of `pages` pages.
    pub(crate) fn new(pages: usize) -> PageSet {
        PageSet { words: vec![0; pages.div_ceil(64)] }
    }

    pub(crate) fn contains(&self, page: usize) -> bool {
        self.words.get(page / 64).is_some_and(|word| word & 1 << (page % 64) != 0)
    }

    /// Adds a page. One behind the end is left out.
    pub(crate) fn insert(&mut self, page: usize) {
        if let Some(word) = self.words.get_mut(page / 64) {
            *word |= 1 << (page % 64);
        }
    }

    /// Removes a page. True if it was in the set.
    pub(crate) fn remove(&mut self, page: usize) -> bool {
        let was_set = self.contains(page);
        if let Some(word) = self.words.get_mut(page / 64).filter(|_| was_set) {
            *word &= !(1 << (page % 64));
        }
        was_set
    }

    pub(crate) fn clear(&mut self) {
        self.words.fill(0);
    }

    /// The runs of pages in the set, in ascending order.
    pub(crate) fn runs(&self) -> Vec<Range<usize>> {
        let mut runs: Vec<Range<usize>> = Vec::new();
        for (index, &word) in self.words.iter().enumerate() {
            let mut rest = word;
            while rest != 0 {
                let start = rest.trailing_zeros();
                let length = (!(rest >> start)).trailing_zeros();
                let first = index * 64 + start as usize;
                let end = first + length as usize;
                match runs.last_mut() {
                    Some(last) if last.end == first => last.end = end,
                    _ => runs.push(first..end),
                }
                rest = if start + length == 64 { 0 } else { rest >> (start + length) << (start + length) };
            }
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn bits_are_a_set_of_pages(
            pages in 1usize..200,
            steps in prop::collection::vec((any::<bool>(), 0usize..220, 1usize..80), 0..40),
        ) {
            let (mut bits, mut set) = (PageSet::new(pages), BTreeSet::new());
            let room = pages.div_ceil(64) * 64;
            for (is_insert, first, count) in steps {
                for page in first..first + count {
                    if is_insert {
                        bits.insert(page);
                        if page < room {
                            set.insert(page);
                        }
                    } else {
                        prop_assert_eq!(bits.remove(page), set.remove(&page));
                    }
                }
                let runs = bits.runs();
                prop_assert!(runs.windows(2).all(|pair| pair[0].end < pair[1].start));
                let listed: Vec<usize> = runs.into_iter().flatten().collect();
                prop_assert!(listed.iter().eq(set.iter()));
                prop_assert!((0..260).all(|page| bits.contains(page) == set.contains(&page)));
            }
            bits.clear();
            prop_assert!(bits.runs().is_empty());
        }
    }
}
