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
