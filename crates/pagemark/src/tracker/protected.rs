//! Pages that refuse to be written until a handler of ours allows it: what `mprotect`, `uffd` and `emulate` have in common.

use std::io;

use super::page_bits::{self, PageBits};
use crate::sys::gate::Gate;
use crate::sys::signals::Blocked;
use crate::{PAGE_SIZE, Range, RangeSet};

/// How pages are made to refuse writes.
pub(super) trait Lock: Send + Sync {
    /// True if refusing costs nothing for pages that refuse already: then a span is closed at once.
    const SPANS: bool;
    /// Lets `range` be written. Async-signal-safe if the handler is a signal handler.
    fn allow(&self, range: &Range) -> io::Result<()>;
    /// Lets each page of `range` refuse its next write. Pages that do already stay as they are.
    fn refuse(&self, range: &Range) -> io::Result<()>;
}

/// The pages of one range. A page is open, which means that it may be written and counts as written, or it refuses writes.
///
/// Opening a page, and taking the open ones while they are closed again, exclude each other by the gate. So a page that
/// may be written is always marked, at whatever moment the marks are taken.
#[derive(Debug)]
pub(super) struct Protected<L> {
    range: Range,
    lock: L,
    gate: Gate,
    open: PageBits,
}

/// Room for the pages that were open, so that nothing is allocated while handlers are kept out: one of them may wait in
/// the midst of an allocation.
#[derive(Debug, Default)]
pub(super) struct Taken {
    words: Vec<u64>,
}

impl<L: Lock> Protected<L> {
    /// All pages of `range`, open. Its bounds are those of pages.
    pub fn new(range: Range, lock: L) -> Self {
        let pages = (range.end - range.start) as usize / PAGE_SIZE;
        Protected { range, lock, gate: Gate::default(), open: PageBits::new(pages) }
    }

    pub fn range(&self) -> &Range {
        &self.range
    }

    pub fn gate(&self) -> &Gate {
        &self.gate
    }

    pub fn lock(&self) -> &L {
        &self.lock
    }

    /// Makes all pages refuse writes, for the first time.
    pub fn close_all(&self) -> io::Result<()> {
        self.lock.refuse(&self.range)
    }

    /// Opens the pages that `range` touches. The caller is inside the gate.
    ///
    /// # Errors
    /// The kernel refuses even to open the whole range.
    pub fn open_inside(&self, range: &Range) -> io::Result<()> {
        let pages = self.page(range.start)..self.page(range.end - 1) + 1;
        self.open.set(pages.clone());
        // Single open pages make many small mappings, of which a process can have only so many. All of the range as one
        // mapping is always possible.
        self.lock.allow(&self.addresses(pages)).or_else(|_| {
            self.open.set(0..self.page(self.range.end - 1) + 1);
            self.lock.allow(&self.range)
        })
    }

    /// Opens the pages that `range` touches, from outside of handlers.
    pub fn open(&self, range: &Range) -> io::Result<()> {
        let _signals = Blocked::all();
        let _inside = self.gate.enter();
        self.open_inside(range)
    }

    /// Closes the open pages except the `pinned` ones, and calls `meanwhile` while no handler is inside the gate, which
    /// must not allocate. Then adds the pages that were open to `written`.
    pub fn close(
        &self,
        pinned: &RangeSet,
        taken: &mut Taken,
        written: &mut RangeSet,
        meanwhile: impl FnOnce(),
    ) -> io::Result<()> {
        let pages = (self.range.end - self.range.start) as usize / PAGE_SIZE;
        taken.words.clear();
        taken.words.resize(pages.div_ceil(64), 0);
        let result = {
            let _signals = Blocked::all();
            let _closed = self.gate.close();
            self.open.take(|run| taken.words[run.start / 64] |= (u64::MAX >> (64 - run.len())) << (run.start % 64));
            let result = if L::SPANS {
                taken.span().map_or(Ok(()), |span| self.refuse(span, pinned))
            } else {
                taken.runs(|run| self.refuse(run, pinned))
            };
            if result.is_err() {
                // Some may be closed by now; a write to those opens them again.
                let _ = taken.runs(|run| {
                    self.open.set(run);
                    Ok(())
                });
            }
            meanwhile();
            result
        };
        result?;
        taken.runs(|run| {
            written.insert(self.addresses(run));
            Ok(())
        })
    }

    /// Closes pages except the pinned ones, which are marked again.
    fn refuse(&self, pages: std::ops::Range<usize>, pinned: &RangeSet) -> io::Result<()> {
        let all = self.addresses(pages);
        let mut start = all.start;
        for pin in pinned.within(all.clone()) {
            self.open.set(self.page(pin.start)..self.page(pin.end - 1) + 1);
            if start < pin.start {
                self.lock.refuse(&(start..pin.start))?;
            }
            start = pin.end;
        }
        if start < all.end { self.lock.refuse(&(start..all.end)) } else { Ok(()) }
    }

    fn page(&self, address: u64) -> usize {
        (address - self.range.start) as usize / PAGE_SIZE
    }

    fn addresses(&self, pages: std::ops::Range<usize>) -> Range {
        let address = |page: usize| self.range.start + (page * PAGE_SIZE) as u64;
        address(pages.start)..address(pages.end)
    }
}

impl Taken {
    /// From the first page to the last.
    fn span(&self) -> Option<std::ops::Range<usize>> {
        let first = self.words.iter().position(|&word| word != 0)?;
        let last = self.words.iter().rposition(|&word| word != 0)?;
        let start = first * 64 + self.words[first].trailing_zeros() as usize;
        Some(start..last * 64 + 64 - self.words[last].leading_zeros() as usize)
    }

    /// Calls `each` for runs of pages, in ascending order, until it fails.
    fn runs(&self, mut each: impl FnMut(std::ops::Range<usize>) -> io::Result<()>) -> io::Result<()> {
        let mut run = 0..0;
        for (index, &word) in self.words.iter().enumerate() {
            let mut result = Ok(());
            page_bits::runs(word, |bits| {
                let next = bits.start + 64 * index..bits.end + 64 * index;
                if next.start == run.end {
                    run.end = next.end;
                } else if result.is_ok() {
                    let done = std::mem::replace(&mut run, next);
                    result = if done.is_empty() { Ok(()) } else { each(done) };
                }
            });
            result?;
        }
        if run.is_empty() { Ok(()) } else { each(run) }
    }
}

#[cfg(all(test, loom))]
mod models {
    use loom::sync::{Arc, Mutex};
    use loom::thread;

    use super::*;
    use crate::sys::sync::model;

    const PAGES: usize = 2;

    /// Two pages, of one number each, and which of them the processor lets be written.
    #[derive(Default)]
    struct Memory {
        pages: Mutex<[Page; PAGES]>,
    }

    #[derive(Clone, Copy, Default)]
    struct Page {
        is_open: bool,
        number: u32,
    }

    /// As the kernel opens and closes pages: at one moment for all threads.
    struct ByModel<const SPANS: bool>(Arc<Memory>);

    impl<const SPANS: bool> ByModel<SPANS> {
        fn set(&self, range: &Range, is_open: bool) -> io::Result<()> {
            let mut pages = self.0.pages.lock().unwrap();
            let numbers = range.start as usize / PAGE_SIZE..range.end as usize / PAGE_SIZE;
            pages[numbers].iter_mut().for_each(|page| page.is_open = is_open);
            Ok(())
        }
    }

    impl<const SPANS: bool> Lock for ByModel<SPANS> {
        const SPANS: bool = SPANS;

        fn allow(&self, range: &Range) -> io::Result<()> {
            self.set(range, true)
        }

        fn refuse(&self, range: &Range) -> io::Result<()> {
            self.set(range, false)
        }
    }

    struct Tracked<const SPANS: bool> {
        memory: Arc<Memory>,
        protected: Protected<ByModel<SPANS>>,
    }

    impl<const SPANS: bool> Tracked<SPANS> {
        /// The program writes: by itself where that is allowed, and else again after the fault that it gets.
        fn write(&self, page: usize) {
            loop {
                {
                    let mut pages = self.memory.pages.lock().unwrap();
                    if pages[page].is_open {
                        pages[page].number += 1;
                        return;
                    }
                }
                let address = (page * PAGE_SIZE) as u64;
                self.protected.open(&(address..address + 1)).unwrap();
            }
        }

        /// Copies the pages that were written.
        fn collect(&self, copy: &mut [u32; PAGES]) {
            let mut written = RangeSet::new();
            self.protected.close(&RangeSet::new(), &mut Taken::default(), &mut written, || {}).unwrap();
            let pages = self.memory.pages.lock().unwrap();
            for page in (0..PAGES).filter(|page| written.contains((page * PAGE_SIZE) as u64)) {
                copy[page] = pages[page].number;
            }
        }
    }

    fn no_write_is_missed<const SPANS: bool>() {
        model(3, || {
            let memory = Arc::new(Memory::default());
            let protected = Protected::new(0..(PAGES * PAGE_SIZE) as u64, ByModel::<SPANS>(memory.clone()));
            let tracked = Arc::new(Tracked { memory, protected });
            let programs: Vec<_> = [0, 1]
                .map(|page| {
                    let tracked = tracked.clone();
                    thread::spawn(move || {
                        tracked.write(page);
                        tracked.write(0);
                    })
                })
                .into();
            let mut copy = [0; PAGES];
            tracked.collect(&mut copy);
            programs.into_iter().for_each(|program| program.join().unwrap());
            tracked.collect(&mut copy);
            assert_eq!(copy, [3, 1]);
            tracked.collect(&mut copy);
            assert!(!tracked.memory.pages.lock().unwrap().iter().any(|page| page.is_open), "all are closed in the end");
        });
    }

    #[test]
    fn no_write_is_missed_page_by_page() {
        no_write_is_missed::<false>();
    }

    #[test]
    fn no_write_is_missed_in_spans() {
        no_write_is_missed::<true>();
    }
}
