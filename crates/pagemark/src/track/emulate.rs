//! `emulate`: pages stay protected. A signal handler decodes each store, records the words that it
//! writes, and executes it through a second mapping of the memory (Emul in HAC, IV-B).
//!
//! The handler does not reimplement instructions. It executes the instruction itself, with the
//! registers of the interrupted thread, and with the operand redirected to the same memory in the
//! alias mapping. Atomic instructions stay atomic, masked ones masked, and flags and results are
//! those of the processor. The operands of `stos` and `movs` cannot be redirected, so the handler
//! copies by itself. Other writes (`push`, `call`, x87, scatters, …) open their page, as with
//! `mprotect`, and the whole page counts as written. So does a page after [`HOT_STORES`] stores in
//! one interval, because emulating each further store would cost more.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pagemark_linux::alias::Alias;
use pagemark_linux::fault::{self, Fault, HandledRange, Outcome, WriteFault};
use pagemark_linux::own_mappings::OwnMappings;
use pagemark_linux::pagemap::Pagemap;
use pagemark_linux::this_process::OfThisProcess;

use super::OwnMemory;
use super::mprotect::{ByMprotect, install_handler, list};
use super::pins::Pins;
use super::protected::{Protected, Taken, WriteProtection};
use super::registry::{MechanismEntry, own_mappings, own_pagemap};
use crate::{Address, AddressRangeExt, ByteCount, Error, Mechanism, PageRangeExt, Range, RangeSet, Tracker};

mod cache;
mod decode;
mod execute;
pub mod stores;
mod words;

use stores::{Memory, Stores, Vectors};
use words::{TakenWords, Words};

/// Number of stores to a page in one interval after which the page is opened. An emulated store
/// costs about as much as opening the page and closing it again. The page then counts as written as
/// a whole, which later costs about as much as ten stores.
pub const HOT_STORES: u8 = 16;

/// The mechanism `emulate`.
pub const ENTRY: MechanismEntry = MechanismEntry {
    name: "emulate",
    description: "each store to a protected page is executed by a signal handler, and recorded by the word",
    requirement: "a system that lets programs make code",
    is_exclusive: false,
    sees_other_mappings: false,
    own_memory: |memory| Ok(Box::new(Emulate::new(own_pagemap()?, memory.clone())?)),
    machine: None,
    process: None,
};

/// Tracks by emulating stores. Only for private memory of this process.
///
/// The first collect of a range replaces its memory by shared anonymous memory with the same
/// content. Nobody may access the memory during that call. Children made by `fork` do not have the
/// memory. It stays shared when it is no longer tracked.
#[derive(Debug)]
pub struct Emulate {
    pagemap: Arc<Pagemap>,
    memory: OwnMemory,
    mappings: Arc<OwnMappings>,
    open_after: Option<u8>,
    stores: Stores,
    tracked: Vec<EmulatedRange>,
    pins: Pins,
    taken: Taken,
}

/// Numbers of stores, by their handling.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Counts {
    /// Stores that were emulated.
    pub emulated_stores: u64,
    /// Stores that were not emulated, and opened a page instead.
    pub opened_pages: u64,
}

/// A range that is tracked, as long as this exists.
#[derive(Debug)]
struct EmulatedRange {
    shared: Arc<Shared>,
    /// The file that is mapped twice.
    file: Option<([u32; 2], u64)>,
    taken: TakenWords,
    _armed: HandledRange,
}

/// What the signal handler uses.
#[derive(Debug)]
struct Shared {
    pages: Protected<ByMprotect>,
    alias: Alias,
    words: Words,
    open_after: Option<u8>,
    stores: Stores,
    process: OfThisProcess,
    emulated_stores: AtomicU64,
    opened_pages: AtomicU64,
}

impl Emulate {
    /// Tracks memory of this process. `pagemap` is the pagemap of the process.
    ///
    /// # Errors
    /// `ErrorKind::Unavailable`: the system does not let programs make code, or valgrind lacks an
    /// option.
    pub fn new(pagemap: Arc<Pagemap>, memory: OwnMemory) -> Result<Self, Error> {
        fault::check_registers().map_err(|error| Error::unavailable(Mechanism::Emulate, error.to_string()))?;
        let stores = Stores::of_this_process().map_err(|error| {
            let what = "memory that can be written and executed, as instructions need that are redirected";
            Error::refused(Mechanism::Emulate, error, &format!("making {what}"), |error| format!("no {what} ({error})"))
        })?;
        let mappings = own_mappings()?;
        Ok(Emulate {
            pagemap,
            memory,
            mappings,
            open_after: Some(HOT_STORES),
            stores,
            tracked: Vec::new(),
            pins: Pins::default(),
            taken: Taken::default(),
        })
    }

    /// Opens a page after this number of stores to it in one interval; `None` never opens a page
    /// for that reason. Applies to ranges whose tracking begins later. The default is
    /// [`HOT_STORES`].
    #[must_use]
    pub fn opening_after(self, stores: Option<u8>) -> Self {
        Emulate { open_after: stores, ..self }
    }

    /// Numbers of the stores to all ranges that are tracked now.
    pub fn counts(&self) -> Counts {
        self.tracked.iter().fold(Counts::default(), |sum, tracked| Counts {
            emulated_stores: sum.emulated_stores + tracked.shared.emulated_stores.load(Ordering::Relaxed),
            opened_pages: sum.opened_pages + tracked.shared.opened_pages.load(Ordering::Relaxed),
        })
    }

    /// Starts to track a range, and adds what holds data there to `dirty`.
    fn arm(&mut self, range: Range, dirty: &mut RangeSet) -> Result<(), Error> {
        self.memory.check(&range)?;
        let failed = |error| Error::while_tracking(error, || format!("mapping the memory of {range:#x?} twice"));
        if self.memory.shared().within(range.clone()).next().is_some() {
            return Err(Error::unavailable(
                Mechanism::Emulate,
                format!("the memory of {range:#x?} is shared, and only private memory can be mapped anew"),
            ));
        }
        // Before the memory is replaced.
        let words = Words::new(range.page_range().page_count() as usize).map_err(failed)?;
        let taken = words.room().map_err(failed)?;
        let pages = Protected::new(range.clone(), 1, ByMprotect).map_err(failed)?;
        let held = self.memory.holding(&self.pagemap, &range.clone().into())?;
        // SAFETY: the range is private data, and the owner of the memory guarantees that no other
        // code accesses it now.
        let alias = unsafe { Alias::take_over(&range, &held) }.map_err(failed)?;
        let shared = Arc::new(Shared {
            pages,
            alias,
            words,
            open_after: self.open_after,
            stores: self.stores,
            process: OfThisProcess::new(),
            emulated_stores: AtomicU64::new(0),
            opened_pages: AtomicU64::new(0),
        });
        let armed = fault::arm(range.clone(), shared.clone()).map_err(failed)?;
        let file = list(&self.mappings, &range)?.first().and_then(|mapping| mapping.file);
        let tracked = EmulatedRange { shared, file, taken, _armed: armed };
        tracked.shared.pages.close_all().map_err(failed)?;
        self.pins.open_in(&tracked.shared.pages).map_err(failed)?;
        dirty.extend(&held);
        self.tracked.push(tracked);
        Ok(())
    }
}

impl Tracker for Emulate {
    fn mechanism(&self) -> Mechanism {
        Mechanism::Emulate
    }

    fn granularity(&self) -> ByteCount {
        ByteCount::from(words::WORD)
    }

    fn collect(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<(), Error> {
        install_handler()?;
        self.tracked.retain(|tracked| ranges.iter().any(|range| range == *tracked.shared.pages.range()));
        let pinned = self.pins.pages();
        for range in ranges.iter() {
            let Some(tracked) = self.tracked.iter_mut().find(|tracked| *tracked.shared.pages.range() == range) else {
                self.arm(range, dirty)?;
                continue;
            };
            let (shared, taken) = (&tracked.shared, &mut tracked.taken);
            let mappings = list(&self.mappings, &range)?;
            shared.pages.check_mappings(&mappings)?;
            if let Some(other) = mappings.iter().find(|mapping| mapping.file != tracked.file) {
                return Err(Error::remapped(other.range.overlap(&range)));
            }
            let mut opened = RangeSet::new();
            let closed = shared.pages.close(&pinned, &mut self.taken, &mut opened, || shared.words.take(taken));
            let mut written = RangeSet::new();
            taken.add_to(range.start, &mut written);
            written.extend(&opened);
            dirty.extend(&written);
            closed.map_err(|error| Error::while_tracking(error, || format!("protecting {range:#x?}")))?;
        }
        Ok(())
    }

    fn data(&self, ranges: &RangeSet) -> Result<Option<RangeSet>, Error> {
        let mut data = RangeSet::new();
        for tracked in &self.tracked {
            let range = tracked.shared.pages.range();
            let failed = |error| Error::while_tracking(error, || format!("finding the data of {range:#x?}"));
            let offsets = tracked.shared.alias.data().map_err(failed)?;
            offsets.iter().for_each(|part| data.insert(part.moved_up(range.start - Address::MIN)));
        }
        Ok(Some(data.intersection(ranges)))
    }

    fn pin(&mut self, range: &Range) -> Result<(), Error> {
        self.pins.add(range, self.tracked.iter().map(|tracked| &tracked.shared.pages))
    }

    fn unpin(&mut self, range: &Range) {
        self.pins.remove(range);
    }

    fn begin_interval(&mut self) -> Result<(), Error> {
        install_handler()
    }
}

impl Drop for EmulatedRange {
    fn drop(&mut self) {
        // The handler must still be armed here. An error means that the range was unmapped, which
        // needs nothing. A child made by `fork` does not have the range.
        if self.shared.process.is_here() {
            let _ = self.shared.pages.protection().unprotect(self.shared.pages.range());
        }
    }
}

// SAFETY: the handler uses atomic numbers, and tables that were made before. Registers change as the
// instruction that it executes changes them.
unsafe impl WriteFault for Shared {
    fn handle(&self, fault: &mut Fault<'_>) -> Outcome {
        if !self.process.is_here() {
            return Outcome::Crash;
        }
        let _inside = self.pages.gate().enter();
        if !self.is_hot(fault.address) && self.emulate(fault).is_some() {
            self.emulated_stores.fetch_add(1, Ordering::Relaxed);
            return Outcome::Resume;
        }
        self.opened_pages.fetch_add(1, Ordering::Relaxed);
        match self.pages.open_inside(fault.address) {
            Ok(()) => Outcome::Resume,
            Err(_) => Outcome::Crash,
        }
    }
}

impl Shared {
    /// Counts a store to the page at the address, and returns true if the page is to be opened.
    fn is_hot(&self, address: Address) -> bool {
        let page = (address.page() - self.pages.range().start.page()) as usize;
        self.open_after.is_some_and(|stores| self.words.count_store(page) >= stores)
    }

    /// Executes the store through the alias, records it, and advances the thread past it. `None`,
    /// with nothing done, if the store cannot be emulated.
    fn emulate(&self, fault: &mut Fault<'_>) -> Option<()> {
        let vectors = execute::vector_state(fault.context);
        let registers = &mut fault.context.uc_mcontext.gregs;
        // SAFETY: the thread was interrupted in executing the instruction; the alias is as long as
        // the range.
        unsafe { self.stores.execute(registers, fault.address, &mut Interrupted { shared: self, vectors }) }
    }

    fn alias_of(&self, address: Address) -> std::ptr::NonNull<u8> {
        // SAFETY: callers name addresses within the range, of which the alias has as many bytes.
        unsafe { self.alias.start().add((address - self.pages.range().start).to_usize()) }
    }
}

/// The thread that has got a signal.
struct Interrupted<'a> {
    shared: &'a Shared,
    vectors: Option<Vectors>,
}

impl Memory for Interrupted<'_> {
    fn range(&self) -> Range {
        self.shared.pages.range().clone()
    }

    fn writable(&self, address: Address) -> *mut u8 {
        self.shared.alias_of(address).as_ptr()
    }

    fn vectors(&mut self) -> Option<Vectors> {
        self.vectors
    }

    fn record(&mut self, bytes: Range) {
        let start = self.shared.pages.range().start;
        self.shared.words.set((bytes.start - start).to_usize()..(bytes.end - start).to_usize());
    }

    unsafe fn copy_from(&mut self, source: u64, target: *mut u8, bytes: usize) -> usize {
        // SAFETY: by the contract of this function.
        unsafe { copy_from(source, target, bytes) }
    }
}

/// Copies from an address that may not be readable, and returns how many bytes that were.
/// Async-signal-safe.
///
/// # Safety
/// So many bytes from `target` on may be written.
unsafe fn copy_from(source: u64, target: *mut u8, bytes: usize) -> usize {
    let local = libc::iovec { iov_base: target.cast(), iov_len: bytes };
    let remote = libc::iovec { iov_base: source as *mut libc::c_void, iov_len: bytes };
    // SAFETY: the kernel writes to the target, which the caller allows, and checks the source.
    let copied = unsafe { libc::process_vm_readv(libc::getpid(), &local, 1, &remote, 1, 0) };
    usize::try_from(copied).unwrap_or(0)
}
