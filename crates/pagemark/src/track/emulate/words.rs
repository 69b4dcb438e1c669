//! Which words were written: one bit for 8 bytes.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use pagemark_linux::room;

use crate::track::page_bits::{PageBits, runs};
use crate::{Address, ByteCount, PAGE_SIZE, RangeSet};

/// Bytes of a word, the unit in which emulated writes are told.
pub const WORD: usize = 8;

const WORDS_OF_PAGE: usize = PAGE_SIZE / WORD;
const BITS: usize = 64;
/// Number of 64-bit words of the bit map of a page.
const NUMBERS_OF_PAGE: usize = WORDS_OF_PAGE / BITS;

/// A set of words of one region, by their offset from its start.
#[derive(Debug)]
pub struct Words {
    /// Pages in which there are some.
    pages: PageBits,
    numbers: Box<[AtomicU64]>,
    /// Number of stores to each page since the words were taken, up to 255.
    stores: Box<[AtomicU8]>,
}

/// Room for what is taken, so that nothing is allocated meanwhile.
#[derive(Debug)]
pub struct TakenWords {
    pages: Vec<Range<usize>>,
    numbers: Box<[u64]>,
}

impl Words {
    /// The empty set for a region of `pages` pages.
    ///
    /// # Errors
    /// `ENOMEM`
    pub fn new(pages: usize) -> io::Result<Words> {
        let (numbers, stores) = (room::zeros(pages * NUMBERS_OF_PAGE)?, room::zeros(pages)?);
        Ok(Words { pages: PageBits::new(pages)?, numbers, stores })
    }

    /// Counts a store to a page, and returns the number of stores before it. Async-signal-safe.
    pub fn count_store(&self, page: usize) -> u8 {
        let stores = &self.stores[page];
        let before = stores.load(Ordering::Relaxed);
        // The number decides only how stores are handled, so a store that is not counted is no harm.
        stores.store(before.saturating_add(1), Ordering::Relaxed);
        before
    }

    /// Adds the words that the bytes at these offsets lie in. Async-signal-safe.
    pub fn set(&self, bytes: Range<usize>) {
        let mut start = bytes.start / WORD;
        let end = bytes.end.div_ceil(WORD);
        self.pages.set(bytes.start / PAGE_SIZE..bytes.end.div_ceil(PAGE_SIZE));
        while start < end {
            let next = end.min((start / BITS + 1) * BITS);
            let mask = (u64::MAX >> (BITS - (next - start))) << (start % BITS);
            self.numbers[start / BITS].fetch_or(mask, Ordering::Relaxed);
            start = next;
        }
    }

    /// Room for all.
    ///
    /// # Errors
    /// `ENOMEM`
    pub fn room(&self) -> io::Result<TakenWords> {
        let pages = self.numbers.len() / NUMBERS_OF_PAGE;
        Ok(TakenWords {
            pages: room::vector(pages.div_ceil(2) + pages.div_ceil(BITS))?,
            numbers: room::zeros(self.numbers.len())?,
        })
    }

    /// Empties the set into `taken`, whose content is replaced. Allocates nothing.
    pub fn take(&self, taken: &mut TakenWords) {
        taken.pages.clear();
        self.pages.take(|run| {
            let numbers = run.start * NUMBERS_OF_PAGE..run.end * NUMBERS_OF_PAGE;
            for (number, taken) in self.numbers[numbers.clone()].iter().zip(&mut taken.numbers[numbers]) {
                *taken = number.swap(0, Ordering::Relaxed);
            }
            self.stores[run.clone()].iter().for_each(|stores| stores.store(0, Ordering::Relaxed));
            taken.pages.push(run);
        });
    }
}

impl TakenWords {
    /// Adds the words of the region that starts at `start` to `written`.
    pub fn add_to(&self, start: Address, written: &mut RangeSet) {
        for index in self.pages.iter().flat_map(|run| run.start * NUMBERS_OF_PAGE..run.end * NUMBERS_OF_PAGE) {
            runs(self.numbers[index], |run| {
                let offset = |bit: usize| start + ByteCount::from((index * BITS + bit) * WORD);
                written.insert(offset(run.start)..offset(run.end));
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::address::offsets;

    proptest! {
        #[test]
        fn tells_the_words_that_were_touched(writes in prop::collection::vec((0usize..9 * PAGE_SIZE, 1usize..9000), 0..9)) {
            let words = Words::new(12).unwrap();
            let mut taken = words.room().unwrap();
            for _ in 0..2 {
                let mut expected = RangeSet::new();
                for &(start, length) in &writes {
                    words.set(start..start + length);
                    expected.insert(offsets(1000 + start / 8 * 8..1000 + (start + length).div_ceil(8) * 8));
                }
                words.take(&mut taken);
                let mut found = RangeSet::new();
                taken.add_to(Address::new(1000), &mut found);
                prop_assert_eq!(found, expected);
                words.take(&mut taken);
                prop_assert!(taken.pages.is_empty());
            }
        }
    }
}
