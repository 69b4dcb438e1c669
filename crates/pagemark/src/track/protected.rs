//! Pages that are write-protected until a fault handler opens them: the common part of `mprotect`,
//! `uffd` and `emulate`.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use pagemark_linux::at_fork::made_once;
use pagemark_linux::gate::Gate;
use pagemark_linux::own_mappings::OwnMapping;
use pagemark_linux::room;
use pagemark_linux::signals::BlockedSignals;

use super::page_bits::{self, PageBits};
use crate::{Address, AddressRangeExt, ByteCount, Error, PageRangeExt, Range, RangeSet};

/// A way to write-protect pages.
pub(super) trait WriteProtection: Send + Sync {
    /// True if protecting protected pages again costs nothing. Then the span from the first open
    /// page to the last is closed in one step.
    const IS_IDEMPOTENT: bool;
    /// True if each run of open pages takes mappings, of which a process has a limited number.
    const TAKES_MAPPINGS: bool = false;
    /// Permits writes to `range`. Async-signal-safe if the fault handler is a signal handler.
    fn unprotect(&self, range: &Range) -> io::Result<()>;
    /// Makes the next write to each page of `range` fault. Protected pages stay protected.
    fn protect(&self, range: &Range) -> io::Result<()>;
}

/// The pages of one range. An open page is writable and counts as written. A closed page is
/// write-protected.
///
/// The gate excludes opening a page while a collect takes the open pages and closes them. A
/// writable page is therefore always marked as open, at whatever moment the marks are taken.
#[derive(Debug)]
pub(super) struct Protected<P> {
    range: Range,
    /// Number of pages whose protection changes together. Their bits are equal.
    unit: usize,
    protection: P,
    gate: Gate,
    open: PageBits,
    /// How many runs of open pages there are at most, and how many all ranges may have together.
    runs: AtomicUsize,
    most_runs: usize,
}

/// The runs of open pages of all ranges of the process that take mappings.
static RUNS: AtomicUsize = AtomicUsize::new(0);

/// Pages that are opened together once most of the runs are used, and once more than those are.
const WIDE_PAGES: [usize; 2] = [64, 4096];

/// How many runs of open pages a process may have before more pages are opened at once: with two
/// mappings each, they take half of what the kernel permits. The rest is for the program.
fn most_runs() -> usize {
    /// `vm.max_map_count` by default.
    const DEFAULT: usize = 65_530;
    static MOST: OnceLock<usize> = OnceLock::new();
    *made_once(&MOST, || {
        let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
        text.trim().parse().unwrap_or(DEFAULT) / 4
    })
}

/// Buffer for the pages that were open. It is allocated before the gate is closed: a handler that
/// waits at the gate may have interrupted an allocation.
#[derive(Debug, Default)]
pub(super) struct Taken {
    words: Vec<u64>,
}

impl<P: WriteProtection> Protected<P> {
    /// All pages of `range`, open. The range consists of whole units of `unit` pages.
    ///
    /// # Errors
    /// `ENOMEM`
    pub fn new(range: Range, unit: usize, protection: P) -> io::Result<Self> {
        let pages = range.page_range().page_count() as usize;
        let (gate, open, runs) = (Gate::default(), PageBits::new(pages)?, AtomicUsize::new(0));
        let most_runs = if P::TAKES_MAPPINGS { most_runs() } else { usize::MAX };
        Ok(Protected { range, unit, protection, gate, open, runs, most_runs })
    }

    pub fn range(&self) -> &Range {
        &self.range
    }

    pub fn gate(&self) -> &Gate {
        &self.gate
    }

    pub fn protection(&self) -> &P {
        &self.protection
    }

    /// Closes all pages, for the first time.
    pub fn close_all(&self) -> io::Result<()> {
        self.protection.protect(&self.range)
    }

    /// Opens the page that holds `address`. The caller is inside the gate.
    ///
    /// # Errors
    /// The kernel cannot even unprotect the whole range.
    pub fn open_inside(&self, address: Address) -> io::Result<()> {
        self.open_pages(self.indices(&address.page().addresses()))
    }

    fn open_pages(&self, pages: std::ops::Range<usize>) -> io::Result<()> {
        let pages = if P::TAKES_MAPPINGS { self.count_run(pages) } else { pages };
        self.open.set(pages.clone());
        // Each open page can split a mapping, and the number of mappings is limited. The whole
        // range as one mapping is always possible.
        self.protection.unprotect(&self.addresses(pages)).or_else(|_| {
            self.open.set(self.indices(&self.range));
            self.protection.unprotect(&self.range)
        })
    }

    /// Counts pages that are to be opened as a run, unless they lengthen one. Returns the pages
    /// around them that are opened with them, so that the rest of the program has mappings left.
    fn count_run(&self, pages: std::ops::Range<usize>) -> std::ops::Range<usize> {
        let all = self.range.page_range().page_count() as usize;
        let is_open = |page: usize| self.open.contains_all(page..page + 1);
        let lengthens = pages.start > 0 && is_open(pages.start - 1) || pages.end < all && is_open(pages.end);
        if !lengthens {
            self.runs.fetch_add(1, Ordering::Relaxed);
            RUNS.fetch_add(1, Ordering::Relaxed);
        }
        let (used, quarter) = (RUNS.load(Ordering::Relaxed), self.most_runs / 4);
        let wide = match used.saturating_sub(self.most_runs) {
            0 => return pages,
            more if more < quarter => WIDE_PAGES[0],
            more if more < 2 * quarter => WIDE_PAGES[1],
            _ => return 0..all,
        };
        let wide = wide.next_multiple_of(self.unit);
        pages.start / wide * wide..pages.end.next_multiple_of(wide).min(all)
    }

    /// Forgets the runs, all of whose pages are closed.
    fn forget_runs(&self) {
        RUNS.fetch_sub(self.runs.swap(0, Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Opens the pages that `range` touches, from outside of handlers.
    pub fn open(&self, range: &Range) -> io::Result<()> {
        let _signals = BlockedSignals::all();
        let _inside = self.gate.enter();
        self.open_pages(self.indices(range))
    }

    /// Collects for a tracker: closes the open pages except the `pinned` ones, and adds the pages
    /// that were open to `written`.
    pub fn collect(&self, pinned: &RangeSet, taken: &mut Taken, written: &mut RangeSet) -> Result<(), Error> {
        let closed = self.close(pinned, taken, written, || {});
        closed.map_err(|error| Error::while_tracking(error, || format!("protecting {:#x?}", self.range)))
    }

    /// Collects for a tracker whose caller writes to what is reported: adds the open pages to
    /// `written`, and leaves them open. A page that is opened meanwhile is written after this.
    pub fn collect_open(&self, written: &mut RangeSet) {
        self.open.each_run(|run| written.insert(self.addresses(run)));
    }

    /// Closes the open pages except the `pinned` ones, and calls `meanwhile`, which must not
    /// allocate, while no handler is inside the gate. Then adds the pages that were open to
    /// `written`.
    pub fn close(
        &self,
        pinned: &RangeSet,
        taken: &mut Taken,
        written: &mut RangeSet,
        meanwhile: impl FnOnce(),
    ) -> io::Result<()> {
        let pages = self.range.page_range().page_count() as usize;
        taken.words.clear();
        room::reserve(&mut taken.words, pages.div_ceil(64))?;
        taken.words.resize(pages.div_ceil(64), 0);
        let result = {
            let _signals = BlockedSignals::all();
            let _closed = self.gate.close();
            self.open.take(|run| taken.words[run.start / 64] |= (u64::MAX >> (64 - run.len())) << (run.start % 64));
            let result = if P::IS_IDEMPOTENT {
                taken.span().map_or(Ok(()), |span| self.protect_unpinned(span, pinned))
            } else {
                taken.runs(|run| self.protect_unpinned(run, pinned))
            };
            if result.is_ok() {
                self.forget_runs();
            } else {
                // Some pages may be closed already. A write opens them again.
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
    fn protect_unpinned(&self, pages: std::ops::Range<usize>, pinned: &RangeSet) -> io::Result<()> {
        let all = self.addresses(pages);
        let mut start = all.start;
        for pin in pinned.within(all.clone()) {
            let pin = self.indices(&pin);
            self.open.set(pin.clone());
            let pin = self.addresses(pin);
            if start < pin.start {
                self.protection.protect(&(start..pin.start))?;
            }
            start = start.max(pin.end);
        }
        if start < all.end { self.protection.protect(&(start..all.end)) } else { Ok(()) }
    }

    /// Checks that the mappings of the range are as this value has left them: all of it is mapped,
    /// and what is writable is open. `mappings` was read before; a handler marks pages before it
    /// makes them writable, so no page that a handler opened meanwhile is taken for another's.
    pub fn check_mappings(&self, mappings: &[OwnMapping]) -> Result<(), Error> {
        let mut end = self.range.start;
        for mapping in mappings {
            let part = mapping.range.overlap(&self.range);
            let is_ours = mapping.is_readable && (!mapping.is_writable || self.open.contains_all(self.indices(&part)));
            if part.start > end || !is_ours {
                return Err(Error::remapped(part));
            }
            end = part.end;
        }
        if end < self.range.end { Err(Error::remapped(end..self.range.end)) } else { Ok(()) }
    }

    /// Protects a closed page of the part again, or unprotects an open one. That changes nothing,
    /// and fails if the part is not protected in the way that this value uses.
    pub fn touch(&self, part: &Range) -> io::Result<()> {
        let unit = part.start..part.start + ByteCount::PAGE;
        let pages = self.indices(&unit);
        let addresses = self.addresses(pages.clone());
        if self.open.contains_all(pages) {
            self.protection.unprotect(&addresses)
        } else {
            self.protection.protect(&addresses)
        }
    }

    /// The pages of the units that a part of the range touches, counted from the first page of the
    /// range.
    fn indices(&self, part: &Range) -> std::ops::Range<usize> {
        let (first, pages) = (self.range.start.page(), part.page_range());
        let (start, end) = ((pages.start - first) as usize, (pages.end - first) as usize);
        start / self.unit * self.unit..end.next_multiple_of(self.unit)
    }

    fn addresses(&self, pages: std::ops::Range<usize>) -> Range {
        let first = self.range.start.page();
        (first + pages.start as u64..first + pages.end as u64).addresses()
    }
}

impl<P> Drop for Protected<P> {
    fn drop(&mut self) {
        RUNS.fetch_sub(*self.runs.get_mut(), Ordering::Relaxed);
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

#[cfg(all(test, feature = "loom"))]
mod models {
    use loom::sync::{Arc, Mutex};
    use loom::thread;
    use pagemark_linux::sync::model;

    use super::*;
    use crate::address::offsets;
    use crate::{PAGE_SIZE, PageNumber};

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
    struct ByModel<const IS_IDEMPOTENT: bool>(Arc<Memory>);

    impl<const IS_IDEMPOTENT: bool> ByModel<IS_IDEMPOTENT> {
        fn set(&self, range: &Range, is_open: bool) -> io::Result<()> {
            let mut pages = self.0.pages.lock().unwrap();
            let numbers = range.page_range().start.to_usize()..range.page_range().end.to_usize();
            pages[numbers].iter_mut().for_each(|page| page.is_open = is_open);
            Ok(())
        }
    }

    impl<const IS_IDEMPOTENT: bool> WriteProtection for ByModel<IS_IDEMPOTENT> {
        const IS_IDEMPOTENT: bool = IS_IDEMPOTENT;

        fn unprotect(&self, range: &Range) -> io::Result<()> {
            self.set(range, true)
        }

        fn protect(&self, range: &Range) -> io::Result<()> {
            self.set(range, false)
        }
    }

    struct Tracked<const IS_IDEMPOTENT: bool> {
        memory: Arc<Memory>,
        protected: Protected<ByModel<IS_IDEMPOTENT>>,
    }

    impl<const IS_IDEMPOTENT: bool> Tracked<IS_IDEMPOTENT> {
        /// The program writes: by itself where that is allowed, and else again after the fault that
        /// it gets.
        fn write(&self, page: usize) {
            loop {
                {
                    let mut pages = self.memory.pages.lock().unwrap();
                    if pages[page].is_open {
                        pages[page].number += 1;
                        return;
                    }
                }
                self.protected.open(&PageNumber::from(page).addresses()).unwrap();
            }
        }

        /// Copies the pages that were written.
        fn collect(&self, copy: &mut [u32; PAGES]) {
            let mut written = RangeSet::new();
            self.protected.close(&RangeSet::new(), &mut Taken::default(), &mut written, || {}).unwrap();
            let pages = self.memory.pages.lock().unwrap();
            for page in (0..PAGES).filter(|&page| written.contains(PageNumber::from(page).address())) {
                copy[page] = pages[page].number;
            }
        }
    }

    fn no_write_is_missed<const IS_IDEMPOTENT: bool>() {
        model(3, || {
            let memory = Arc::new(Memory::default());
            let protected =
                Protected::new(offsets(0..PAGES * PAGE_SIZE), 1, ByModel::<IS_IDEMPOTENT>(memory.clone())).unwrap();
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
