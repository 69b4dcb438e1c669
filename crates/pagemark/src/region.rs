//! Regions of the program's own memory, with transactions and snapshots: HAC's critical data area.
//!
//! ```
//! use pagemark::region::Region;
//! let region = Region::new(1 << 20)?;
//! region.write(5000, b"first")?;
//! region.begin()?;
//! region.write(5000, b"other")?;
//! region.write(100_000, b"and more")?;
//! assert_eq!(region.rollback()?.total_bytes(), 2 * 4096, "two pages were written");
//! let mut now = [0; 5];
//! region.read(5000, &mut now)?;
//! assert_eq!(&now, b"first");
//! # Ok::<(), pagemark::region::RegionError>(())
//! ```

use std::hash::{Hash, Hasher};
use std::ops::Range as Span;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{fmt, io};

use crate::snapshot::{Snapshot, SnapshotStore};
use crate::sys::area::Area;
use crate::sys::own_memory::{self, Mapping};
use crate::{Mechanism, PAGE_SIZE, RangeSet, Tracker};

mod base;
mod claim;
mod error;

pub use error::RegionError;

use base::Base;
use claim::Claim;

/// How a region is tracked.
#[derive(Clone, Default, Debug)]
pub struct RegionOptions {
    /// How writes are found; none is `auto`, the first of [`Mechanism::choose_own`].
    pub mechanism: Option<Mechanism>,
    /// No transaction will be rolled back. Then no copy of the region is kept, and a transaction begins where the last one ended: its
    /// commit names also what was written between the two.
    pub without_rollback: bool,
    /// Where the region's snapshots are held; none is a store of its own. Regions that share a store hold equal content once.
    pub store: Option<SnapshotStore>,
}

/// A piece of this process's memory whose writes are tracked.
///
/// The program uses the memory as it likes: through [`Region::as_ptr`], with [`Region::read`] and [`Region::write`], from any
/// thread, in a transaction or not. A transaction is everything that is written between [`Region::begin`] and
/// [`Region::commit`], which tells what that is, or [`Region::rollback`], which undoes it. What is written outside of transactions
/// stays. What other threads write at the very moment of one of these calls counts as before it or after it.
///
/// Sets of offsets are relative to the region's start.
///
/// What is written while the region is tracked by `soft-dirty` must not be written at the moment of these calls at all, since the
/// kernel can't read and clear its marks in one step. System calls that write to a region (`read`, `recv`, …) are seen by
/// `pagemap-scan` and `adaptive`, and fail with `EFAULT` under `mprotect` and `emulate` unless they are made through
/// [`Region::read_from`] or while [`Region::writable`] holds. Memory is freed by [`Region::discard`]; other changes of
/// the mapping are not expected.
///
/// In a child made by `fork` the calls fail with [`RegionError::ForkedChild`]; its memory is its own, not tracked.
pub struct Region {
    // Before the memory, so that it is dropped first.
    state: Mutex<State>,
    memory: Memory,
    mechanism: Mechanism,
    process: u32,
    /// Different for each region that ever was.
    number: u64,
}

// SAFETY: the memory is accessed through raw pointers whose users answer for their order, or by `Area`'s atomic accesses;
// everything else is behind the mutex.
unsafe impl Send for Region {}
// SAFETY: as for `Send`.
unsafe impl Sync for Region {}

/// Whose the mapping is.
struct Memory {
    claim: Claim,
    start: NonNull<u8>,
    /// None for memory that was adopted.
    _mapping: Option<Mapping>,
}

struct State {
    tracker: Box<dyn Tracker>,
    /// The region's addresses, as the tracker wants them.
    addresses: RangeSet,
    is_open: bool,
    /// Offsets written in the transaction. Without a base also what was written since the last one.
    written: RangeSet,
    /// Offsets that changed without a write that the tracker sees, until the next collect: freed memory, and what a
    /// restore wrote, of which `compare` sees nothing where the program then writes again what was there before.
    discarded: RangeSet,
    /// None without rollback.
    base: Option<Base>,
    store: Option<SnapshotStore>,
    /// What the region held when the last snapshot was taken or restored, and what may be different now.
    last: Option<(Snapshot, RangeSet)>,
}

/// A snapshot of a region. A clone is the same snapshot.
///
/// Snapshots are equal if their content is, whichever regions they are of: see [`Snapshot`]. Those of different stores are never
/// equal, and a region has a store of its own unless it is made with one.
#[derive(Clone, Debug)]
pub struct RegionSnapshot {
    content: Snapshot,
    region: u64,
}

impl RegionSnapshot {
    /// Its content, to read and compare.
    pub fn content(&self) -> &Snapshot {
        &self.content
    }
}

impl PartialEq for RegionSnapshot {
    fn eq(&self, other: &Self) -> bool {
        self.content == other.content
    }
}

impl Eq for RegionSnapshot {}

impl Hash for RegionSnapshot {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.content.hash(state);
    }
}

impl Region {
    /// Maps a region of `bytes`, rounded up to whole pages, tracked by the mechanism that serves best. It holds zeros, and takes
    /// memory only as it is written.
    ///
    /// # Errors
    /// [`RegionError::System`]: no room, or no bytes at all. [`RegionError::Track`].
    pub fn new(bytes: usize) -> Result<Region, RegionError> {
        Region::with_options(bytes, RegionOptions::default())
    }

    /// As [`Region::new`], tracked as the options say.
    ///
    /// # Errors
    /// As [`Region::new`]; a mechanism that is named and does not work is an error, never replaced by another one.
    pub fn with_options(bytes: usize, options: RegionOptions) -> Result<Region, RegionError> {
        let mapping = Mapping::new(bytes).map_err(RegionError::system(format!("mapping a region of {bytes} bytes")))?;
        let claim = Claim::new(mapping.range())?;
        Region::track(Memory { claim, start: mapping.start(), _mapping: Some(mapping) }, options)
    }

    /// Makes memory that is there already a region: whole pages, in one mapping or several, readable and writable and not
    /// executable. It is as it was again when the region is dropped, except that `emulate` turns private memory into shared
    /// anonymous memory that children made by `fork` do not have.
    ///
    /// # Errors
    /// [`RegionError::Unaligned`], [`RegionError::Overlaps`], [`RegionError::NotMapped`], [`RegionError::NotData`],
    /// [`RegionError::Track`].
    ///
    /// # Safety
    /// While the region exists, the memory stays mapped, and nobody else changes its mapping or protection. No Rust reference to
    /// it is used while a call of the region may write it ([`Region::rollback`], [`Region::restore`], [`Region::discard`],
    /// [`Region::write`], [`Region::read_from`]).
    pub unsafe fn adopt(start: NonNull<u8>, bytes: usize, options: RegionOptions) -> Result<Region, RegionError> {
        let address = start.as_ptr() as u64;
        let end = address.checked_add(bytes as u64);
        let aligned = address.is_multiple_of(PAGE_SIZE as u64) && bytes.is_multiple_of(PAGE_SIZE) && bytes > 0;
        let Some(end) = end.filter(|_| aligned) else {
            return Err(RegionError::Unaligned { start: address, bytes });
        };
        let range = address..end;
        let claim = Claim::new(range.clone())?;
        let described = own_memory::describe(&range).map_err(RegionError::system("reading /proc/self/maps"))?;
        let mapped: RangeSet = described.iter().map(|mapping| mapping.range.clone()).collect();
        if !mapped.covers(range.clone()) {
            return Err(RegionError::NotMapped { range });
        }
        if !described.iter().all(|mapping| mapping.is_data) {
            return Err(RegionError::NotData { range });
        }
        Region::track(Memory { claim, start, _mapping: None }, options)
    }

    fn track(memory: Memory, options: RegionOptions) -> Result<Region, RegionError> {
        let mechanism = options.mechanism.unwrap_or_else(Mechanism::choose_own);
        let range = memory.claim.range();
        let bytes = (range.end - range.start) as usize;
        let base = if options.without_rollback { None } else { Some(Base::new(bytes)) };
        let base = base.transpose().map_err(RegionError::system(format!("mapping a copy of {bytes} bytes")))?;
        let mut state = State {
            tracker: crate::tracker::of_region(mechanism)?,
            addresses: range.into(),
            is_open: false,
            written: RangeSet::new(),
            discarded: RangeSet::new(),
            base,
            store: options.store,
            last: None,
        };
        state.collect()?;
        // What was there before counts for nobody but the base.
        state.written.clear();
        static REGIONS: AtomicU64 = AtomicU64::new(0);
        let number = REGIONS.fetch_add(1, Ordering::Relaxed);
        Ok(Region { state: Mutex::new(state), memory, mechanism, process: std::process::id(), number })
    }

    /// Where it begins.
    ///
    /// Whoever accesses the memory answers for what Rust asks of raw pointers. What another thread may write or roll back
    /// meanwhile is accessed atomically.
    pub fn as_ptr(&self) -> *mut u8 {
        self.memory.start.as_ptr()
    }

    /// How long it is.
    pub fn bytes(&self) -> usize {
        let range = self.memory.claim.range();
        (range.end - range.start) as usize
    }

    /// By what writes are found.
    pub fn mechanism(&self) -> Mechanism {
        self.mechanism
    }

    /// Smallest unit in which a write is reported, bytes.
    pub fn granularity_bytes(&self) -> u64 {
        self.lock().tracker.granularity_bytes()
    }

    /// True between begin and commit or rollback.
    pub fn in_transaction(&self) -> bool {
        self.lock().is_open
    }

    /// Begins a transaction.
    ///
    /// # Errors
    /// [`RegionError::TransactionOpen`], [`RegionError::ForkedChild`], [`RegionError::NotMapped`], [`RegionError::Track`]; then none
    /// is begun.
    pub fn begin(&self) -> Result<(), RegionError> {
        self.check()?;
        let mut state = self.lock();
        if state.is_open {
            return Err(RegionError::TransactionOpen);
        }
        if state.base.is_some() {
            state.collect()?;
            if let Some(base) = &mut state.base {
                base.refresh(&self.area());
            }
        }
        state.tracker.relax()?;
        state.is_open = true;
        Ok(())
    }

    /// Ends the transaction, and returns the offsets that were written in it: in units of
    /// [`Region::granularity_bytes`], and more than was written where the mechanism can't tell.
    ///
    /// # Errors
    /// [`RegionError::NoTransaction`], [`RegionError::ForkedChild`], [`RegionError::NotMapped`], [`RegionError::Track`]; then
    /// the transaction, if there is one, is still open and nothing of it is lost.
    pub fn commit(&self) -> Result<RangeSet, RegionError> {
        self.check()?;
        let mut state = self.lock();
        if !state.is_open {
            return Err(RegionError::NoTransaction);
        }
        state.collect()?;
        state.is_open = false;
        Ok(std::mem::take(&mut state.written))
    }

    /// Ends the transaction and puts back what the region held when it began, where it was written. Returns the offsets
    /// that were put back.
    ///
    /// # Errors
    /// As [`Region::commit`], and [`RegionError::NoRollback`].
    pub fn rollback(&self) -> Result<RangeSet, RegionError> {
        self.check()?;
        let mut state = self.lock();
        if !state.is_open {
            return Err(RegionError::NoTransaction);
        }
        if state.base.is_none() {
            return Err(RegionError::NoRollback);
        }
        state.collect()?;
        // Written as the program writes, and so found as written by the next collect: other threads may write there too.
        let written = state.written.clone();
        let pinned = state.pin(&written)?;
        let area = self.area();
        if let Some(base) = &mut state.base {
            base.put_back(&area, &written);
        }
        state.unpin(&pinned);
        state.written.clear();
        state.is_open = false;
        Ok(written)
    }

    /// Copies from the region.
    ///
    /// # Errors
    /// [`RegionError::OutOfRange`], [`RegionError::NotMapped`].
    pub fn read(&self, offset: usize, to: &mut [u8]) -> Result<(), RegionError> {
        self.check_within(offset..offset.saturating_add(to.len()))?;
        self.check_mapped()?;
        self.area().read(offset, to);
        Ok(())
    }

    /// Copies into the region.
    ///
    /// # Errors
    /// [`RegionError::OutOfRange`], [`RegionError::NotMapped`].
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<(), RegionError> {
        self.check_within(offset..offset.saturating_add(from.len()))?;
        self.check_mapped()?;
        self.area().write(offset, from);
        Ok(())
    }

    /// Lets system calls write to the offsets, as long as what is returned exists. The pages around them count as written
    /// meanwhile.
    ///
    /// # Errors
    /// [`RegionError::OutOfRange`], [`RegionError::ForkedChild`], [`RegionError::NotMapped`], [`RegionError::Track`].
    pub fn writable(&self, offsets: Span<usize>) -> Result<Writable<'_>, RegionError> {
        self.check_within(offsets.clone())?;
        self.check()?;
        let offsets = RangeSet::from(offsets.start as u64..offsets.end as u64);
        let pinned = self.lock().pin(&offsets)?;
        Ok(Writable { region: self, pinned })
    }

    /// Reads from a file, a pipe or a socket into the region, once, as `read(2)` does. Returns how many bytes were read; 0 is
    /// the end.
    ///
    /// # Errors
    /// As [`Region::writable`], and what the system call answers.
    pub fn read_from(&self, file: impl AsFd, offsets: Span<usize>) -> Result<usize, RegionError> {
        let _writable = self.writable(offsets.clone())?;
        // SAFETY: the range lies within the region, which is mapped, and is written as the program's own pointers do.
        let count = unsafe {
            let to = self.as_ptr().add(offsets.start).cast();
            libc::read(file.as_fd().as_raw_fd(), to, offsets.len())
        };
        usize::try_from(count).map_err(|_| RegionError::system("reading into a region")(io::Error::last_os_error()))
    }

    /// Frees the memory behind the whole pages among the offsets: they hold zeros afterwards, which counts as a write.
    ///
    /// # Errors
    /// As [`Region::writable`], and [`RegionError::System`] for memory of which nothing can be freed.
    pub fn discard(&self, offsets: Span<usize>) -> Result<(), RegionError> {
        self.check_within(offsets.clone())?;
        self.check()?;
        let start = offsets.start.next_multiple_of(PAGE_SIZE);
        let end = offsets.end / PAGE_SIZE * PAGE_SIZE;
        if start >= end {
            return Ok(());
        }
        let mut state = self.lock();
        let base = self.as_ptr() as u64;
        let range = base + start as u64..base + end as u64;
        state.discarded.insert(range.start - base..range.end - base);
        let is_shared = own_memory::describe(&range)
            .map_err(RegionError::system("reading /proc/self/maps"))?
            .iter()
            .any(|mapping| mapping.is_shared);
        // Protection may go with the pages: so they count as written until they are protected anew.
        let pinned = state.pin(&RangeSet::from(start as u64..end as u64))?;
        // SAFETY: the range lies within the region, and the caller gives its content up.
        let freed = unsafe { own_memory::free(&range, is_shared) };
        state.unpin(&pinned);
        freed.map_err(RegionError::system(format!("freeing the memory of {range:#x?}")))
    }

    /// Takes a snapshot. It costs what was written since the last one was taken or restored.
    ///
    /// # Errors
    /// [`RegionError::Snapshot`], [`RegionError::ForkedChild`], [`RegionError::NotMapped`], [`RegionError::Track`].
    pub fn snapshot(&self) -> Result<RegionSnapshot, RegionError> {
        self.snapshot_without(&RangeSet::new())
    }

    /// As [`Region::snapshot`], but what the offsets in `forget` hold need not be saved: memory that is free, or stack that is
    /// not in use. The snapshot holds zeros there.
    ///
    /// # Errors
    /// As [`Region::snapshot`].
    pub fn snapshot_without(&self, forget: &RangeSet) -> Result<RegionSnapshot, RegionError> {
        self.check()?;
        let mut state = self.lock();
        state.collect()?;
        let store = state.store.get_or_insert_with(SnapshotStore::new).clone();
        let content = match &state.last {
            Some((last, unsaved)) => store.snapshot(Some(last), &self.area(), unsaved, forget)?,
            None => store.snapshot(None, &self.area(), &RangeSet::new(), forget)?,
        };
        // What is forgotten may be anything in the region, and is zeros in the snapshot.
        state.last = Some((content.clone(), forget.clone()));
        Ok(RegionSnapshot { content, region: self.number })
    }

    /// Makes the region hold what the snapshot holds, in place, and returns what was written for that: only what differed. In a
    /// transaction, it counts as written in it.
    ///
    /// # Errors
    /// [`RegionError::WrongRegion`], and as [`Region::snapshot`].
    pub fn restore(&self, snapshot: &RegionSnapshot) -> Result<RangeSet, RegionError> {
        self.check()?;
        if snapshot.region != self.number {
            return Err(RegionError::WrongRegion);
        }
        let mut state = self.lock();
        state.collect()?;
        let Some(store) = state.store.clone() else { return Err(RegionError::WrongRegion) };
        let Some((last, unsaved)) = state.last.take() else { return Err(RegionError::WrongRegion) };
        let restored = last.diff(&snapshot.content).map_err(RegionError::from).and_then(|mut differing| {
            differing.extend(&unsaved);
            let pinned = state.pin(&differing)?;
            let restored = store.restore(&snapshot.content, Some((&last, &unsaved)), &self.area());
            state.unpin(&pinned);
            let restored = restored?;
            state.discarded.extend(&restored);
            Ok(restored)
        });
        state.last = Some(match &restored {
            Ok(_) => (snapshot.content.clone(), RangeSet::new()),
            Err(_) => (last, unsaved),
        });
        restored
    }

    fn area(&self) -> Area<'_> {
        // SAFETY: the memory is mapped and readable and writable (writes to protected pages are resolved by the tracker)
        // as long as the region exists; who else writes it does so by raw pointers, as `as_ptr` and `adopt` demand.
        unsafe { Area::new(self.memory.start, self.bytes()) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self) -> Result<(), RegionError> {
        if self.process != std::process::id() {
            return Err(RegionError::ForkedChild);
        }
        self.check_mapped()
    }

    fn check_mapped(&self) -> Result<(), RegionError> {
        let range = self.memory.claim.range();
        if own_memory::is_mapped(&range) { Ok(()) } else { Err(RegionError::NotMapped { range }) }
    }

    fn check_within(&self, offsets: Span<usize>) -> Result<(), RegionError> {
        let bytes = self.bytes();
        let is_within = offsets.start <= offsets.end && offsets.end <= bytes;
        if is_within { Ok(()) } else { Err(RegionError::OutOfRange { offsets, bytes }) }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let range = self.memory.claim.range();
        f.debug_struct("Region").field("range", &range).field("mechanism", &self.mechanism).finish_non_exhaustive()
    }
}

impl State {
    /// Takes over what was written since the last time. What was found before an error is kept too.
    fn collect(&mut self) -> Result<(), RegionError> {
        let mut offsets = RangeSet::new();
        let result = self.tracker.collect(&self.addresses, &mut offsets);
        offsets.move_down(self.start());
        offsets.append(&mut self.discarded);
        if let Some(base) = &mut self.base {
            base.add_stale(&offsets);
        }
        if let Some((_, unsaved)) = &mut self.last {
            unsaved.extend(&offsets);
        }
        if self.is_open || self.base.is_none() {
            self.written.append(&mut offsets);
        }
        Ok(result?)
    }

    /// Pins offsets, all or none; returns the addresses that [`State::unpin`] takes.
    fn pin(&mut self, offsets: &RangeSet) -> Result<RangeSet, RegionError> {
        let start = self.start();
        let mut pinned = RangeSet::new();
        for range in offsets.iter().map(|range| start + range.start..start + range.end) {
            if let Err(error) = self.tracker.pin(&range) {
                self.unpin(&pinned);
                return Err(error.into());
            }
            pinned.insert(range);
        }
        Ok(pinned)
    }

    fn unpin(&mut self, pinned: &RangeSet) {
        pinned.iter().for_each(|range| self.tracker.unpin(&range));
    }

    fn start(&self) -> u64 {
        self.addresses.iter().next().map_or(0, |range| range.start)
    }
}

/// System calls can write to a part of the region as long as this exists.
#[must_use]
#[derive(Debug)]
pub struct Writable<'a> {
    region: &'a Region,
    pinned: RangeSet,
}

impl Drop for Writable<'_> {
    fn drop(&mut self) {
        self.region.lock().unpin(&self.pinned);
    }
}
