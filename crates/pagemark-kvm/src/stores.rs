//! What emulated stores have written, by the word.

use std::collections::BTreeMap;

use pagemark::RangeSet;

use crate::layout::{PAGE, page_floor};

/// Bytes of a word, the unit in which stores are told.
pub const WORD: u64 = 8;

const NUMBERS: usize = (PAGE / WORD / 64) as usize;

/// A page in which something was written, or that is open.
#[derive(Debug, Default)]
struct Page {
    /// A bit for each word.
    words: [u64; NUMBERS],
    stores: u32,
    /// The program may write to it, and it counts as written as a whole.
    is_open: bool,
}

/// The pages in which something was written since the last collect.
#[derive(Debug, Default)]
pub struct Stores {
    pages: BTreeMap<u64, Page>,
}

impl Stores {
    /// Counts a store to the page of `address`, and returns how many there were before it.
    pub fn count(&mut self, address: u64) -> u32 {
        let page = self.pages.entry(page_floor(address)).or_default();
        let before = page.stores;
        page.stores = before.saturating_add(1);
        before
    }

    /// The words in which `start..end` lies are written.
    pub fn record(&mut self, start: u64, end: u64) {
        let (mut word, last) = (start / WORD, end.div_ceil(WORD));
        while word < last {
            let next = last.min((word / 64 + 1) * 64);
            let bits = (u64::MAX >> (64 - (next - word))) << (word % 64);
            let page = self.pages.entry(page_floor(word * WORD)).or_default();
            page.words[(word / 64) as usize % NUMBERS] |= bits;
            word = next;
        }
    }

    /// The program may write to the page of `address`.
    pub fn open(&mut self, address: u64) {
        self.pages.entry(page_floor(address)).or_default().is_open = true;
    }

    /// Whether the program may write to the page of `address`.
    pub fn is_open(&self, address: u64) -> bool {
        self.pages.get(&page_floor(address)).is_some_and(|page| page.is_open)
    }

    /// The open pages of `start..end`, which are whole pages.
    pub fn opened(&self, start: u64, end: u64) -> RangeSet<u64> {
        let opened = self.pages.range(start..end).filter(|(_, page)| page.is_open);
        opened.map(|(at, _)| *at..at + PAGE).collect()
    }

    /// The words of `start..end` that were written, and the open pages.
    pub fn written(&self, start: u64, end: u64) -> RangeSet<u64> {
        let mut written = RangeSet::new();
        for (at, page) in self.pages.range(page_floor(start)..end) {
            if page.is_open {
                written.insert(*at..at + PAGE);
                continue;
            }
            for (index, mut word) in page.words.into_iter().enumerate() {
                let base = at + index as u64 * 64 * WORD;
                while word != 0 {
                    let bit = word.trailing_zeros();
                    let ones = (word >> bit).trailing_ones();
                    let from = base + u64::from(bit) * WORD;
                    written.insert(from..from + u64::from(ones) * WORD);
                    word &= u64::MAX.checked_shl(bit + ones).unwrap_or(0);
                }
            }
        }
        written.within(start..end).collect()
    }

    /// Forgets what was written to the words of `start..end`, and closes the pages that lie in it.
    pub fn forget(&mut self, start: u64, end: u64) {
        let mut gone = Vec::new();
        for (&at, page) in self.pages.range_mut(page_floor(start)..end) {
            if start <= at && at + PAGE <= end {
                gone.push(at);
                continue;
            }
            for word in at / WORD..(at + PAGE) / WORD {
                if (start..end).contains(&(word * WORD)) {
                    page.words[(word / 64) as usize % NUMBERS] &= !(1 << (word % 64));
                }
            }
        }
        gone.iter().for_each(|at| _ = self.pages.remove(at));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const PAGES: u64 = 5;
    const BASE: u64 = 0x4000_0000_0000;

    #[derive(Clone, Debug)]
    enum Step {
        Record(u64, u64),
        Open(u64),
        Forget(u64, u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        let bytes = || (0..PAGES * PAGE, prop_oneof![1u64..20, 1u64..9000]);
        let end = |(start, len): (u64, u64)| (start, (start + len).min(PAGES * PAGE));
        prop_oneof![
            6 => bytes().prop_map(move |bytes| Step::Record(end(bytes).0, end(bytes).1)),
            1 => (0..PAGES * PAGE).prop_map(Step::Open),
            2 => bytes().prop_map(move |bytes| Step::Forget(end(bytes).0 / WORD * WORD, end(bytes).1 / WORD * WORD)),
        ]
    }

    proptest! {
        #[test]
        fn words_are_kept_as_in_a_set(steps in prop::collection::vec(step(), 0..30)) {
            let mut stores = Stores::default();
            let (mut words, mut open) = (BTreeSet::new(), BTreeSet::new());
            for step in steps {
                match step {
                    Step::Record(start, end) => {
                        stores.record(BASE + start, BASE + end);
                        words.extend(start / WORD..end.div_ceil(WORD));
                    }
                    Step::Open(at) => {
                        stores.open(BASE + at);
                        open.insert(at / PAGE);
                    }
                    Step::Forget(start, end) => {
                        stores.forget(BASE + start, BASE + end.max(start));
                        words.retain(|word| !(start..end).contains(&(word * WORD)));
                        open.retain(|page| page * PAGE < start || (page + 1) * PAGE > end);
                    }
                }
                let expected: RangeSet<u64> = (0..PAGES * PAGE / WORD)
                    .filter(|word| words.contains(word) || open.contains(&(word * WORD / PAGE)))
                    .map(|word| BASE + word * WORD..BASE + (word + 1) * WORD)
                    .collect();
                prop_assert_eq!(stores.written(BASE, BASE + PAGES * PAGE), expected.clone());
                let (from, to) = (BASE + PAGE + 24, BASE + 3 * PAGE - 8);
                prop_assert_eq!(stores.written(from, to), expected.within(from..to).collect::<RangeSet<u64>>());
                for page in 0..PAGES {
                    prop_assert_eq!(stores.is_open(BASE + page * PAGE + 5), open.contains(&page));
                }
                let opened: RangeSet<u64> = open.iter().map(|page| BASE + page * PAGE..BASE + (page + 1) * PAGE).collect();
                prop_assert_eq!(stores.opened(BASE, BASE + PAGES * PAGE), opened);
            }
        }
    }

    #[test]
    fn stores_are_counted_until_they_are_collected() {
        let mut stores = Stores::default();
        assert_eq!([stores.count(BASE), stores.count(BASE + 4095), stores.count(BASE + PAGE)], [0, 1, 0]);
        stores.forget(BASE, BASE + PAGE);
        assert_eq!([stores.count(BASE), stores.count(BASE + PAGE)], [0, 1]);
    }
}
