//! The log of one memory slot, with two readers.
//!
//! The kernel's log is in its manual mode: a read neither clears a page nor protects it, and a page
//! that was cleared is protected again at once. Each reader sees a log of its own with the same
//! rules. A page is written for a reader if the kernel's log has it, or if it is *pending*: cleared
//! in the kernel's log on behalf of the other reader, and not yet by this one.
//!
//! Only pages that were seen in the kernel's log are cleared there. A page that is written between
//! a read and a clear therefore stays in the log, or was pending for the other reader before: no
//! reader loses what the other has read or cleared. The price is a page that is reported once more
//! than its reader needs, if it was written between the reader's read and its clear.

/// Pages of a word.
pub const WORD_PAGES: u64 = 64;

/// One of the two readers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reader {
    /// The process that made the machine.
    Owner,
    /// Pagemark.
    Pagemark,
}

impl Reader {
    const ALL: [Reader; 2] = [Reader::Owner, Reader::Pagemark];
}

/// The number of words that have a bit for each page.
pub fn words_of(pages: u64) -> usize {
    usize::try_from(pages.div_ceil(WORD_PAGES)).unwrap_or(usize::MAX)
}

/// The log of a slot. Pages are numbered from the begin of the slot; a set of pages is a slice of
/// words with a bit for each.
#[derive(Clone, Debug)]
pub struct SlotLog {
    pages: u64,
    /// Pages that were read from the kernel's log and are still in it.
    seen: Vec<u64>,
    /// The pages that are pending for each reader; None for one that does not read.
    pending: [Option<Vec<u64>>; 2],
}

impl SlotLog {
    /// The log of a slot that nobody reads yet.
    pub fn new(pages: u64) -> SlotLog {
        SlotLog { pages, seen: vec![0; words_of(pages)], pending: [None, None] }
    }

    /// The number of pages.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Begins to keep what `reader` has to be told: all pages if `is_full`, else those that are
    /// written from now on. What the kernel's log has already is reported, too.
    pub fn begin(&mut self, reader: Reader, is_full: bool) {
        let word = if is_full { u64::MAX } else { 0 };
        let mut pending = vec![word; self.seen.len()];
        if let Some(last) = pending.last_mut() {
            *last &= last_mask(self.pages);
        }
        self.pending[reader as usize] = Some(pending);
    }

    /// The reader reads no longer.
    pub fn end(&mut self, reader: Reader) {
        self.pending[reader as usize] = None;
    }

    /// True if that reader reads.
    pub fn has(&self, reader: Reader) -> bool {
        self.pending[reader as usize].is_some()
    }

    /// True if somebody reads.
    pub fn is_read(&self) -> bool {
        Reader::ALL.into_iter().any(|reader| self.has(reader))
    }

    /// Takes note of the pages that the kernel's log has.
    pub fn see(&mut self, in_kernel: &[u64]) {
        for (seen, found) in self.seen.iter_mut().zip(in_kernel) {
            *seen |= found;
        }
        if let Some(last) = self.seen.last_mut() {
            *last &= last_mask(self.pages);
        }
    }

    /// A page was written that the kernel's log does not have: its ring had it, and it is protected
    /// again.
    pub fn add(&mut self, page: u64) {
        let index = usize::try_from(page / WORD_PAGES).unwrap_or(usize::MAX);
        if page < self.pages {
            for word in self.pending.iter_mut().flatten().filter_map(|pending| pending.get_mut(index)) {
                *word |= 1 << (page % WORD_PAGES);
            }
        }
    }

    /// All pages count as written, for each reader.
    pub fn add_all(&mut self) {
        for reader in Reader::ALL {
            if self.has(reader) {
                self.begin(reader, true);
            }
        }
    }

    /// The pages that are written for a reader, of those that were seen.
    pub fn written(&self, reader: Reader) -> Vec<u64> {
        match &self.pending[reader as usize] {
            Some(pending) => pending.iter().zip(&self.seen).map(|(pending, seen)| pending | seen).collect(),
            None => self.seen.clone(),
        }
    }

    /// The pages that the kernel must clear before [`SlotLog::cleared`] is called with `pages`, of
    /// which the first is that of the word `first`.
    pub fn to_clear(&self, first: usize, pages: &[u64]) -> Vec<u64> {
        let seen = self.seen.iter().skip(first).chain(std::iter::repeat(&0));
        pages.iter().zip(seen).map(|(wanted, seen)| wanted & seen).collect()
    }

    /// The reader has cleared `pages`, of which the first is that of the word `first`: those of
    /// [`SlotLog::to_clear`] are no longer in the kernel's log, and are protected again.
    pub fn cleared(&mut self, reader: Reader, first: usize, pages: &[u64]) {
        for (index, &wanted) in (first..).zip(pages) {
            let Some(seen) = self.seen.get_mut(index) else { return };
            let taken = wanted & *seen;
            *seen &= !taken;
            for other in Reader::ALL {
                let Some(word) = self.pending[other as usize].as_mut().and_then(|pending| pending.get_mut(index))
                else {
                    continue;
                };
                match other == reader {
                    true => *word &= !wanted,
                    false => *word |= taken,
                }
            }
        }
    }
}

/// The bits of the last word that stand for pages.
fn last_mask(pages: u64) -> u64 {
    match pages % WORD_PAGES {
        0 => u64::MAX,
        rest => (1 << rest) - 1,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        /// The machine writes a page.
        Write(u64),
        Begin(Reader, bool),
        End(Reader),
        Get(Reader),
        /// Clears those of the pages that the reader has read last that have a bit in the mask.
        Clear(Reader, u64),
    }

    fn reader() -> impl Strategy<Value = Reader> {
        prop_oneof![Just(Reader::Owner), Just(Reader::Pagemark)]
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            6 => (0u64..150).prop_map(Step::Write),
            1 => (reader(), any::<bool>()).prop_map(|(reader, is_full)| Step::Begin(reader, is_full)),
            1 => reader().prop_map(Step::End),
            4 => reader().prop_map(Step::Get),
            4 => (reader(), prop_oneof![Just(u64::MAX), any::<u64>()])
                .prop_map(|(reader, mask)| Step::Clear(reader, mask)),
        ]
    }

    /// What a reader must be told, and may be told.
    #[derive(Clone, Default)]
    struct Expected {
        reads: bool,
        /// Written since it began, or since its last clear.
        must: BTreeSet<u64>,
        /// Also what was written between its last read and its clear.
        may: BTreeSet<u64>,
        /// What it has read last.
        read: BTreeSet<u64>,
        /// Written since its last read.
        since_read: BTreeSet<u64>,
    }

    fn pages_of(words: &[u64]) -> BTreeSet<u64> {
        (0..words.len() as u64 * 64).filter(|page| words[(page / 64) as usize] & 1 << (page % 64) != 0).collect()
    }

    fn words(pages: &BTreeSet<u64>, count: usize) -> Vec<u64> {
        let mut words = vec![0; count];
        pages.iter().for_each(|page| words[(page / 64) as usize] |= 1 << (page % 64));
        words
    }

    proptest! {
        /// Each reader is told each page that was written since it cleared the page, whatever the
        /// other does, and nothing that was not written since its last read before that clear.
        #[test]
        fn neither_reader_loses_what_the_other_reads_or_clears(
            pages in 1u64..150,
            steps in prop::collection::vec(step(), 0..120),
        ) {
            let mut kernel = BTreeSet::new();
            let mut log = SlotLog::new(pages);
            let mut readers = [Expected::default(), Expected::default()];
            let count = words_of(pages);
            for step in steps {
                match step {
                    Step::Write(page) => {
                        let page = page % pages;
                        // The kernel notes nothing while nobody reads.
                        if log.is_read() {
                            kernel.insert(page);
                        }
                        for expected in &mut readers {
                            expected.must.insert(page);
                            expected.may.insert(page);
                            expected.since_read.insert(page);
                        }
                    }
                    Step::Begin(reader, is_full) => {
                        if !log.is_read() {
                            (log, kernel) = (SlotLog::new(pages), BTreeSet::new());
                        }
                        log.begin(reader, is_full);
                        let must = if is_full { (0..pages).collect() } else { BTreeSet::new() };
                        let may = if is_full { must.clone() } else { kernel.clone() };
                        readers[reader as usize] = Expected { reads: true, must, may, ..Expected::default() };
                    }
                    Step::End(reader) => {
                        log.end(reader);
                        readers[reader as usize] = Expected::default();
                    }
                    Step::Get(reader) => {
                        let expected = &mut readers[reader as usize];
                        if !expected.reads {
                            continue;
                        }
                        log.see(&words(&kernel, count));
                        let found = pages_of(&log.written(reader));
                        prop_assert!(expected.must.is_subset(&found), "lost {:?}", &expected.must - &found);
                        prop_assert!(found.is_subset(&expected.may), "not written: {:?}", &found - &expected.may);
                        expected.read = found;
                        expected.since_read.clear();
                    }
                    Step::Clear(reader, mask) => {
                        let expected = &mut readers[reader as usize];
                        if !expected.reads {
                            continue;
                        }
                        let cleared: BTreeSet<u64> =
                            expected.read.iter().copied().filter(|page| mask & 1 << (page % 64) != 0).collect();
                        let wanted = words(&cleared, count);
                        let to_clear = log.to_clear(0, &wanted);
                        for page in pages_of(&to_clear) {
                            prop_assert!(kernel.remove(&page), "cleared what the log does not have");
                        }
                        log.cleared(reader, 0, &wanted);
                        for page in &cleared {
                            expected.must.remove(page);
                            if !expected.since_read.contains(page) {
                                expected.may.remove(page);
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_reader_that_reads_and_clears_at_once_is_told_each_write_once() {
        let mut log = SlotLog::new(70);
        log.begin(Reader::Owner, false);
        log.begin(Reader::Pagemark, true);
        assert_eq!(log.written(Reader::Pagemark), [u64::MAX, 0b11_1111]);
        log.see(&[0b101, 0]);
        assert_eq!(log.written(Reader::Owner), [0b101, 0]);
        let all = log.written(Reader::Pagemark);
        assert_eq!(log.to_clear(0, &all), [0b101, 0]);
        log.cleared(Reader::Pagemark, 0, &all);
        assert_eq!(log.written(Reader::Pagemark), [0, 0]);
        // Pending, although the kernel has cleared it.
        assert_eq!(log.written(Reader::Owner), [0b101, 0]);
        log.cleared(Reader::Owner, 0, &[0b100]);
        assert_eq!(log.written(Reader::Owner), [0b001, 0]);
        // A part that begins at the second word, and one behind the end.
        log.see(&[0, 0b10]);
        assert_eq!(log.to_clear(1, &[0b11, 0b1]), [0b10, 0]);
        log.cleared(Reader::Owner, 1, &[0b11, 0b1]);
        assert_eq!((log.written(Reader::Owner), log.written(Reader::Pagemark)), (vec![1, 0], vec![0, 0b10]));
    }

    #[test]
    fn what_is_behind_the_last_page_is_not_reported() {
        let mut log = SlotLog::new(3);
        log.begin(Reader::Pagemark, true);
        log.see(&[u64::MAX]);
        assert_eq!(log.written(Reader::Pagemark), [0b111]);
        log.end(Reader::Pagemark);
        assert!(!log.is_read());
    }
}
