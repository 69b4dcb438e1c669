//! Regions of a program's own memory, with transactions and snapshots.
//!
//! A region is the critical data area of HAC, section IV; a transaction is its checkpoint cycle.
//!
//! ```
//! use pagemark::region::Region;
//! let region = Region::new(1 << 20)?;
//! region.write(5000, b"first")?;
//! region.begin()?;
//! region.write(5000, b"other")?;
//! region.write(100_000, b"and more")?;
//! assert_eq!(region.rollback()?.page_count(), 2, "two pages were written");
//! let mut now = [0; 5];
//! region.read(5000, &mut now)?;
//! assert_eq!(&now, b"first");
//! # Ok::<(), pagemark::Error>(())
//! ```

use std::hash::{Hash, Hasher};
use std::ops::Range as Span;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{fmt, io};

use pagemark_linux::at_fork::{Locked, hold_off};
use pagemark_linux::own_mappings::{self, OwnMapping};
use pagemark_linux::own_memory::{self, Mapping};
use pagemark_linux::pagemap::Pagemap;
use pagemark_linux::shared_bytes::SharedBytes;
use pagemark_linux::this_process::OfThisProcess;

use crate::address::offsets as addresses_of;
use crate::snapshot::{Snapshot, SnapshotStore};
use crate::track::{OwnMemory, Scope, own_pagemap};
use crate::{Address, AddressRangeExt, ByteCount, Error, Mechanism, PAGE_SIZE, Range, RangeSet, Tracker};

mod adopt;
mod base;
mod changes;
mod claim;
mod error;
mod portable;
mod saved;
mod target;
mod view;

pub use changes::{Change, Changes};
pub use target::{FrozenRegions, RegionTarget};
pub use view::View;

use base::Base;
use claim::Claim;
use saved::Saved;
use target::UnsavedOffsets;

/// Options of a region.
#[derive(Clone, Default, Debug)]
pub struct RegionOptions {
    /// How writes are found; none is `auto`, [`Mechanism::choose`].
    pub mechanism: Option<Mechanism>,
    /// True if no transaction will be rolled back. The region then has no copies of its content,
    /// and a transaction begins where the previous transaction ended: its commit also reports the
    /// writes between the two.
    pub without_rollback: bool,
    /// The store of the region's snapshots. `None` is a store of its own. Regions that share a
    /// store hold equal content once.
    pub store: Option<SnapshotStore>,
    /// The promise that only threads of this process write the region's memory, their system calls
    /// among them: no debugger, no `process_vm_writev` of another process, and no child of `vfork`,
    /// which shares the memory. With `adaptive`, a commit then looks at no page if the process has
    /// one thread and had no page fault in the transaction. A write that breaks the promise may be
    /// missing there and in the next commits, and counts as written later.
    pub sole_use: bool,
}

/// Memory of this process whose writes are tracked.
///
/// The program accesses the memory through [`Region::as_ptr`], [`Region::read`] and
/// [`Region::write`], from any thread, in a transaction or not. A transaction consists of the
/// writes between [`Region::begin`] and [`Region::commit`], which reports them, or
/// [`Region::rollback`], which undoes them. Writes outside of transactions are never undone. A
/// write of another thread during one of these calls counts as before or after the call.
///
/// Offsets are relative to the start of the region.
///
/// Under `soft-dirty`, no thread may write during these calls, because the kernel cannot read and
/// clear its marks in one step. `pagemap-scan` and `adaptive` report the writes of system calls
/// (`read`, `recv`, …). Under `mprotect` and `emulate` such system calls fail with `EFAULT`, unless
/// they are made by [`Region::read_from`] or while a [`Region::writable`] guard exists. Writes of
/// debuggers and through `/proc/self/mem` fail under `emulate` and are not seen under `mprotect`,
/// because the kernel ignores the protection of private memory for them; the other mechanisms
/// report them.
///
/// Under `mprotect` and `emulate` writes raise SIGSEGV. A thread that has this signal blocked, also
/// by the mask of a signal handler (`sigfillset`), ends the process by its first write to a page.
/// Where another part of the program has replaced the signal's action, the next begin installs the
/// handler again, above what has replaced it.
///
/// [`Region::discard`] frees memory; the program must not change the mapping in other ways. Pages
/// that the program frees by `madvise` itself are reported in all cases by `compare` and `full`
/// only; with the other mechanisms a rollback may leave zeros there. Under `uffd`, the program must
/// not let the kernel merge the region's pages (`MADV_MERGEABLE`, or `PR_SET_MEMORY_MERGE` after
/// the region was made): writes to merged pages are not reported. If the memory is unmapped,
/// mapped anew or its protection is changed nevertheless, the next begin, commit, rollback,
/// snapshot or save fails with `ErrorKind::NotMapped` or `ErrorKind::Remapped`, or reports the new
/// content. [`Region::read`], [`Region::write`] and views do not ask the kernel, and crash at
/// memory that was unmapped.
///
/// In a child made by `fork` the calls fail with `ErrorKind::ForkedChild`. The child has a copy
/// of the memory, which is not tracked. A fork waits until no other thread is in a call of a
/// region, as with `malloc`. A fork by the bare system call does not, and its child must use none.
pub struct Region {
    // Declared before the memory, and therefore dropped before it.
    state: Mutex<State>,
    /// Locked before `state`, where both are.
    saved: Mutex<Option<Saved>>,
    memory: RegionMemory,
    mechanism: Mechanism,
    granularity: ByteCount,
    process: OfThisProcess,
    /// Unique among all regions that the process has made.
    number: u64,
}

/// The memory of a region.
struct RegionMemory {
    claim: Claim,
    start: NonNull<u8>,
    /// None for adopted memory.
    _mapping: Option<Mapping>,
}

// SAFETY: the memory is accessed through raw pointers, whose users synchronize the accesses, or by
// the atomic accesses of `SharedBytes`.
unsafe impl Send for RegionMemory {}
// SAFETY: as for `Send`.
unsafe impl Sync for RegionMemory {}

/// The memory of a region that is no more: it stays mapped as long as this exists.
#[derive(Debug)]
pub struct FormerMemory {
    _mapping: Option<Mapping>,
}

struct State {
    tracker: Box<dyn Tracker>,
    /// The memory, and the pagemap that shows which of it is populated.
    own: OwnMemory,
    pagemap: Arc<Pagemap>,
    /// The addresses of the region, as an argument for the tracker.
    addresses: RangeSet,
    is_open: bool,
    /// Offsets written in the transaction; without a base, also offsets written since the previous
    /// transaction.
    written: RangeSet,
    /// Offsets that changed without a write that the tracker reports, until the next collect: freed
    /// memory and restored memory. (`compare` reports no restored memory where the program then
    /// writes the previous content again.)
    discarded: RangeSet,
    /// None without rollback.
    base: Option<Base>,
    store: Option<SnapshotStore>,
    /// The snapshot that was taken or restored last, and the offsets that may differ from it now.
    last: Option<(Snapshot, RangeSet)>,
    /// Offsets that the next checkpoint has to save; None as long as the region belongs to no
    /// target.
    unsaved: Option<UnsavedOffsets>,
}

/// A snapshot of a region. A clone is the same snapshot.
///
/// Snapshots with equal content are equal, even if they are of different regions: see [`Snapshot`].
/// Snapshots of different stores are never equal. A region has a store of its own unless its
/// options name a store.
#[derive(Clone, Debug)]
pub struct RegionSnapshot {
    content: Snapshot,
    /// Number of the region; None for a snapshot that comes from outside.
    region: Option<u64>,
}

impl RegionSnapshot {
    /// The content, to read and compare.
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
    /// Maps a region of `bytes`, rounded up to whole pages, and tracks it by the best mechanism of
    /// this machine. The region holds zeros, and takes memory only where it is written.
    ///
    /// # Errors
    /// `ErrorKind::System`: there is not enough address space, or `bytes` is 0.
    /// The mechanism failed.
    pub fn new(bytes: usize) -> Result<Region, Error> {
        Region::with_options(bytes, RegionOptions::default())
    }

    /// Like [`Region::new`], with options.
    ///
    /// # Errors
    /// Those of [`Region::new`]. A mechanism of the options that does not work is an error; no
    /// other mechanism replaces it.
    pub fn with_options(bytes: usize, options: RegionOptions) -> Result<Region, Error> {
        let mapping = Mapping::new(bytes).map_err(Error::system(format!("mapping a region of {bytes} bytes")))?;
        let claim = Claim::new(mapping.range())?;
        Region::track_new(mapping, claim, options)
    }

    /// Tracks a mapping that is new and has no other user.
    fn track_new(mapping: Mapping, claim: Claim, options: RegionOptions) -> Result<Region, Error> {
        // SAFETY: the mapping is private anonymous memory. The region unmaps it after the tracker
        // is dropped, and its users change no mappings.
        let own = unsafe { OwnMemory::anonymous(mapping.range()) };
        Region::track(RegionMemory { claim, start: mapping.start(), _mapping: Some(mapping) }, own, options)
    }

    /// Tracks memory. `own` describes the same memory to the tracker.
    fn track(memory: RegionMemory, own: OwnMemory, options: RegionOptions) -> Result<Region, Error> {
        let _forks = hold_off();
        let mechanism = options.mechanism.unwrap_or_else(|| Mechanism::choose(Scope::OwnMemory));
        let range = memory.claim.range();
        let bytes = range.byte_count().to_usize();
        let base = if options.without_rollback { None } else { Some(Base::new(bytes)) };
        let base = base.transpose().map_err(Error::system(format!("mapping a copy of {bytes} bytes")))?;
        let own = own.with_sole_use(options.sole_use);
        let mut state = State {
            tracker: mechanism.tracker(Scope::OwnMemory, &own)?,
            own,
            pagemap: own_pagemap()?,
            addresses: range.into(),
            is_open: false,
            written: RangeSet::new(),
            discarded: RangeSet::new(),
            base,
            store: options.store,
            last: None,
            unsaved: None,
        };
        state.collect()?;
        // The earlier content matters to the base only; it is not a write of the program.
        state.written.clear();
        static REGIONS: AtomicU64 = AtomicU64::new(0);
        let number = REGIONS.fetch_add(1, Ordering::Relaxed);
        let granularity = state.tracker.granularity();
        Ok(Region {
            state: Mutex::new(state),
            saved: Mutex::new(None),
            memory,
            mechanism,
            granularity,
            process: OfThisProcess::new(),
            number,
        })
    }

    /// Ends tracking, as dropping the region does, and leaves its memory mapped as long as the
    /// returned value exists. The memory of an adopted region stays in any case.
    pub fn into_memory(self) -> FormerMemory {
        let Region { state, saved, memory, .. } = self;
        drop((state, saved));
        FormerMemory { _mapping: memory._mapping }
    }

    /// The address of the region.
    ///
    /// The caller must follow Rust's rules for raw pointers: memory that another thread may write
    /// or roll back meanwhile must be accessed atomically. The memory belongs to the region, and
    /// stays mapped, readable and writable as long as the region exists.
    pub fn as_ptr(&self) -> *mut u8 {
        self.memory.start.as_ptr()
    }

    /// Length of the region, bytes.
    pub fn bytes(&self) -> usize {
        self.memory.claim.range().byte_count().to_usize()
    }

    /// The mechanism that finds writes.
    pub fn mechanism(&self) -> Mechanism {
        self.mechanism
    }

    /// The smallest unit in which writes are reported.
    pub fn granularity(&self) -> ByteCount {
        self.granularity
    }

    /// True between begin and commit or rollback. False in a child made by `fork`.
    pub fn in_transaction(&self) -> bool {
        self.process.is_here() && self.lock().is_open
    }

    /// Begins a transaction.
    ///
    /// # Errors
    /// `ErrorKind::TransactionOpen`, `ErrorKind::ForkedChild`, `ErrorKind::NotMapped`,
    /// or the mechanism failed. After an error, no transaction is open.
    pub fn begin(&self) -> Result<(), Error> {
        self.check()?;
        let mut state = self.lock();
        if state.is_open {
            return Err(Error::transaction_open());
        }
        if state.base.is_some() {
            state.collect()?;
            state.replace_base();
            state.refresh_base(&self.shared_bytes())?;
        }
        state.tracker.begin_interval()?;
        state.is_open = true;
        Ok(())
    }

    /// Ends the transaction, and returns the offsets that were written in it, in units of
    /// [`Region::granularity`]. A mechanism may report more than was written, never less.
    ///
    /// # Errors
    /// `ErrorKind::NoTransaction`, `ErrorKind::ForkedChild`, `ErrorKind::NotMapped`,
    /// or the mechanism failed. After an error, an open transaction is still open, and none of its
    /// writes is lost.
    pub fn commit(&self) -> Result<RangeSet, Error> {
        self.check()?;
        let mut state = self.lock();
        if !state.is_open {
            return Err(Error::no_transaction());
        }
        state.collect()?;
        state.is_open = false;
        Ok(std::mem::take(&mut state.written))
    }

    /// Ends the transaction and restores the content from its beginning, where the region was
    /// written. Returns the restored offsets.
    ///
    /// # Errors
    /// Those of [`Region::commit`], and `ErrorKind::NoRollback`.
    pub fn rollback(&self) -> Result<RangeSet, Error> {
        self.check()?;
        let mut state = self.lock();
        if !state.is_open {
            return Err(Error::no_transaction());
        }
        if state.base.is_none() {
            return Err(Error::no_rollback());
        }
        // The tracker sees these writes as writes of the program, so the next collect reports them:
        // other threads may write the same pages meanwhile. What is collected here need not be
        // protected in between.
        let open = state.collect_open()?;
        let written = state.written.clone();
        let mut protected = written.clone();
        protected.subtract(&open);
        let pinned = state.pin(&protected)?;
        let restored = state.put_back(&self.shared_bytes(), &written);
        state.unpin(&pinned);
        restored?;
        state.written.clear();
        state.is_open = false;
        Ok(written)
    }

    /// Copies content of the region into `to`, without a system call.
    ///
    /// # Errors
    /// `ErrorKind::OutOfRange`. `ErrorKind::NotMapped` in a child made by `fork` that does not have
    /// the memory.
    #[inline]
    pub fn read(&self, offset: usize, to: &mut [u8]) -> Result<(), Error> {
        self.check_within(offset..offset.saturating_add(to.len()))?;
        self.check_inherited()?;
        self.shared_bytes().read(offset, to);
        Ok(())
    }

    /// Copies `from` into the region, without a system call.
    ///
    /// # Errors
    /// Those of [`Region::read`].
    #[inline]
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<(), Error> {
        self.check_within(offset..offset.saturating_add(from.len()))?;
        self.check_inherited()?;
        self.shared_bytes().write(offset, from);
        Ok(())
    }

    /// Lets system calls write to the offsets while the returned guard exists. The pages that
    /// contain the offsets count as written meanwhile.
    ///
    /// # Errors
    /// `ErrorKind::OutOfRange`, `ErrorKind::ForkedChild`, `ErrorKind::NotMapped`,
    /// or the mechanism failed.
    pub fn writable(&self, offsets: Span<usize>) -> Result<Writable<'_>, Error> {
        self.check_within(offsets.clone())?;
        self.check()?;
        let offsets = RangeSet::from(addresses_of(offsets));
        let pinned = self.lock().pin(&offsets)?;
        Ok(Writable { region: self, pinned })
    }

    /// Reads from a file, a pipe or a socket into the region, once, as `read(2)` does. Returns the
    /// number of bytes that were read; 0 at the end of the file.
    ///
    /// # Errors
    /// Those of [`Region::writable`], and `ErrorKind::System` if the system call fails.
    pub fn read_from(&self, file: impl AsFd, offsets: Span<usize>) -> Result<usize, Error> {
        let _writable = self.writable(offsets.clone())?;
        // SAFETY: the range lies within the region, which is mapped; the kernel writes it like any
        // other thread.
        let count = unsafe {
            let to = self.as_ptr().add(offsets.start).cast();
            libc::read(file.as_fd().as_raw_fd(), to, offsets.len())
        };
        usize::try_from(count).map_err(|_| Error::system("reading into a region")(io::Error::last_os_error()))
    }

    /// Makes the whole pages within the offsets hold zeros, which counts as a write, and frees
    /// their memory. In a shared mapping of a file this makes a hole in the file. In a private
    /// mapping of a file, in parts of huge pages and in locked memory (`mlock`), zeros are written
    /// and nothing is freed.
    ///
    /// # Errors
    /// Those of [`Region::writable`], and `ErrorKind::System` for memory that cannot be freed:
    /// files on file systems without holes.
    pub fn discard(&self, offsets: Span<usize>) -> Result<(), Error> {
        self.check_within(offsets.clone())?;
        self.check()?;
        let start = offsets.start.next_multiple_of(PAGE_SIZE);
        let end = offsets.end / PAGE_SIZE * PAGE_SIZE;
        if start >= end {
            return Ok(());
        }
        let mut state = self.lock();
        let offsets = addresses_of(start..end);
        let range = offsets.moved_up(Address::of(self.as_ptr()) - Address::MIN);
        let mappings = own_mappings::describe(&range).map_err(Error::system("reading /proc/self/maps"))?;
        state.discarded.insert(offsets.clone());
        // The kernel may drop the protection together with the pages, so the pages count as written
        // until they are protected again.
        let pinned = state.pin(&RangeSet::from(offsets))?;
        let discarded = mappings.iter().try_for_each(|mapping| self.discard_in(mapping, mapping.range.overlap(&range)));
        state.unpin(&pinned);
        discarded.map_err(Error::system(format!("freeing the memory of {range:#x?}")))
    }

    /// Makes the pages of a part of a mapping hold zeros.
    fn discard_in(&self, mapping: &OwnMapping, part: Range) -> io::Result<()> {
        let page_bytes = mapping.page_bytes.get();
        let (first, last) = (part.start.get().next_multiple_of(page_bytes), part.end.get() / page_bytes * page_bytes);
        // Freed pages of a private mapping of a file show the file again.
        let can_be_freed = mapping.is_shared || mapping.is_private_anonymous();
        let freed = if can_be_freed && first < last { first..last } else { part.end.get()..part.end.get() };
        let freed = Address::new(freed.start)..Address::new(freed.end);
        self.write_zeros(&(part.start..freed.start));
        self.write_zeros(&(freed.end..part.end));
        if freed.is_empty() {
            return Ok(());
        }
        // SAFETY: the range lies within the region, and the caller no longer needs its content.
        match unsafe { own_memory::free(&freed, mapping.is_shared) } {
            // Locked memory (`mlock`), of which the kernel frees nothing.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                self.write_zeros(&freed);
                Ok(())
            }
            freed => freed,
        }
    }

    /// Writes zeros to addresses of the region.
    fn write_zeros(&self, range: &Range) {
        let start = Address::of(self.as_ptr());
        for page in range.pages() {
            self.shared_bytes().write((page.address() - start).to_usize(), &[0; PAGE_SIZE]);
        }
    }

    /// Takes a snapshot. The cost follows what was written since the previous snapshot was taken or
    /// restored.
    ///
    /// # Errors
    /// The errors of snapshots, `ErrorKind::ForkedChild`, `ErrorKind::NotMapped`,
    /// or the mechanism failed.
    pub fn snapshot(&self) -> Result<RegionSnapshot, Error> {
        self.snapshot_without(&RangeSet::new())
    }

    /// Like [`Region::snapshot`], but the content at the offsets `forget` (free memory, unused
    /// stack) is not saved: the snapshot holds zeros there.
    ///
    /// # Errors
    /// Those of [`Region::snapshot`].
    pub fn snapshot_without(&self, forget: &RangeSet) -> Result<RegionSnapshot, Error> {
        self.check()?;
        let mut state = self.lock();
        state.collect()?;
        if let (false, Some(base)) = (state.is_open, &mut state.base) {
            base.make_room();
        }
        let store = state.store.get_or_insert_with(SnapshotStore::new).clone();
        let content = match &state.last {
            Some((last, unsaved)) => store.snapshot(Some(last), &self.shared_bytes(), unsaved, forget)?,
            None => store.snapshot_of_zeros_except(&self.shared_bytes(), &state.holding_all()?, forget)?,
        };
        // At the forgotten offsets the region and the snapshot may differ.
        state.last = Some((content.clone(), forget.clone()));
        state.replace_base();
        Ok(RegionSnapshot { content, region: Some(self.number) })
    }

    /// Restores a snapshot in place. Only differing content is written; returns the offsets of it.
    /// In a transaction, these writes belong to the transaction.
    ///
    /// # Errors
    /// `ErrorKind::WrongRegion`, and as [`Region::snapshot`].
    pub fn restore(&self, snapshot: &RegionSnapshot) -> Result<RangeSet, Error> {
        self.check()?;
        if snapshot.region != Some(self.number) {
            return Err(Error::wrong_region());
        }
        let mut state = self.lock();
        state.collect()?;
        let Some(store) = state.store.clone() else { return Err(Error::wrong_region()) };
        let Some((last, unsaved)) = state.last.take() else { return Err(Error::wrong_region()) };
        let restored = last.diff(&snapshot.content).and_then(|mut differing| {
            differing.extend(&unsaved);
            let pinned = state.pin(&differing)?;
            let restored = store.restore(&snapshot.content, Some((&last, &unsaved)), &self.shared_bytes());
            state.unpin(&pinned);
            let restored = restored?;
            state.discarded.extend(&restored);
            Ok(restored)
        });
        state.last = Some(match &restored {
            Ok(_) => (snapshot.content.clone(), RangeSet::new()),
            Err(_) => (last, unsaved),
        });
        state.replace_base();
        restored
    }

    fn shared_bytes(&self) -> SharedBytes<'_> {
        // SAFETY: while the region exists, the memory is mapped, readable and writable (the tracker
        // resolves writes to protected pages). Other code writes it through raw pointers only, as
        // `as_ptr` and `adopt` require.
        unsafe { SharedBytes::new(self.memory.start, self.bytes()) }
    }

    fn lock(&self) -> Locked<MutexGuard<'_, State>> {
        // In this order: a lock is also kept while code of the caller runs, which may fork
        // (`FrozenRegions`).
        let state = self.lock_beside_forks();
        Locked::new(state, hold_off())
    }

    fn lock_beside_forks(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_saved(&self) -> MutexGuard<'_, Option<Saved>> {
        self.saved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self) -> Result<(), Error> {
        if !self.process.is_here() {
            return Err(Error::forked_child());
        }
        self.check_mapped()
    }

    /// Checks before an access that the process has the memory. In the process that made the region
    /// it does, because unmapping the memory breaks the contract of [`Region::as_ptr`] and
    /// [`Region::adopt`]. A child made by `fork` lacks it under `emulate`.
    #[inline]
    fn check_inherited(&self) -> Result<(), Error> {
        if self.process.is_here() { Ok(()) } else { self.check_mapped() }
    }

    fn check_mapped(&self) -> Result<(), Error> {
        let range = self.memory.claim.range();
        if own_memory::is_mapped(&range) { Ok(()) } else { Err(Error::not_mapped(range)) }
    }

    #[inline]
    fn check_within(&self, offsets: Span<usize>) -> Result<(), Error> {
        let bytes = self.bytes();
        let is_within = offsets.start <= offsets.end && offsets.end <= bytes;
        if is_within { Ok(()) } else { Err(Error::beyond_region(offsets, bytes)) }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let range = self.memory.claim.range();
        f.debug_struct("Region").field("range", &range).field("mechanism", &self.mechanism).finish_non_exhaustive()
    }
}

impl State {
    /// Records the writes since the previous call. Writes that were found before an error are
    /// recorded too.
    fn collect(&mut self) -> Result<(), Error> {
        let mut offsets = RangeSet::new();
        let result = self.tracker.collect(&self.addresses, &mut offsets);
        offsets.make_relative_to(self.start());
        self.record(offsets);
        result
    }

    /// Like [`State::collect`], before what was written is written again. Returns the offsets that
    /// are open until the next collect.
    fn collect_open(&mut self) -> Result<RangeSet, Error> {
        let mut offsets = RangeSet::new();
        let result = self.tracker.collect_open(&self.addresses, &mut offsets);
        offsets.make_relative_to(self.start());
        let open = if let Ok(true) = result { offsets.clone() } else { RangeSet::new() };
        self.record(offsets);
        result.map(|_| open)
    }

    /// Records offsets that were written.
    fn record(&mut self, mut offsets: RangeSet) {
        offsets.append(&mut self.discarded);
        if let Some(base) = &mut self.base {
            base.add_stale(&offsets);
        }
        if let Some((_, unsaved)) = &mut self.last {
            unsaved.extend(&offsets);
        }
        if let Some(unsaved) = &mut self.unsaved {
            unsaved.written.extend(&offsets);
        }
        if self.is_open || self.base.is_none() {
            self.written.append(&mut offsets);
        }
    }

    /// The offsets, of those given, at which the region may hold anything else than zeros.
    fn holding(&self, offsets: &RangeSet) -> Result<RangeSet, Error> {
        let start = self.own.range().start;
        let addresses = offsets.iter().map(|range| range.moved_up(start - Address::MIN)).collect();
        let mut holding = match self.tracker.data(&addresses)? {
            Some(data) => data,
            None => self.own.holding(&self.pagemap, &addresses)?,
        };
        holding.make_relative_to(start);
        Ok(holding)
    }

    /// Like [`State::holding`], of all offsets. Memory that was never written costs nothing.
    fn holding_all(&self) -> Result<RangeSet, Error> {
        let range = self.own.range();
        self.holding(&(Address::MIN..Address::MIN + range.byte_count()).into())
    }

    /// Brings the base for a rollback up to date.
    fn refresh_base(&mut self, area: &SharedBytes<'_>) -> Result<(), Error> {
        let Some(mut base) = self.base.take() else { return Ok(()) };
        let refreshed = base.refresh(area, |offsets| self.holding(offsets));
        self.base = Some(base);
        refreshed
    }

    /// Restores the content of the base at the offsets.
    fn put_back(&self, area: &SharedBytes<'_>, offsets: &RangeSet) -> Result<(), Error> {
        let Some(base) = &self.base else { return Ok(()) };
        base.put_back(area, offsets, |asked| self.holding(asked))
    }

    /// Lets the last snapshot take the place of the copies for a rollback, except within a
    /// transaction.
    fn replace_base(&mut self) {
        if let (false, Some(base), Some((last, unsaved))) = (self.is_open, &mut self.base, &self.last) {
            base.replace(last, unsaved);
        }
    }

    /// Pins all of the offsets, or none after an error. Returns the addresses for [`State::unpin`].
    fn pin(&mut self, offsets: &RangeSet) -> Result<RangeSet, Error> {
        let distance = self.start() - Address::MIN;
        let mut pinned = RangeSet::new();
        for range in offsets.iter().map(|range| range.moved_up(distance)) {
            if let Err(error) = self.tracker.pin(&range) {
                self.unpin(&pinned);
                return Err(error);
            }
            pinned.insert(range);
        }
        Ok(pinned)
    }

    fn unpin(&mut self, pinned: &RangeSet) {
        pinned.iter().for_each(|range| self.tracker.unpin(&range));
    }

    fn start(&self) -> Address {
        self.addresses.iter().next().map_or(Address::MIN, |range| range.start)
    }
}

/// A guard: while it exists, system calls can write to a part of the region.
#[must_use]
#[derive(Debug)]
pub struct Writable<'a> {
    region: &'a Region,
    pinned: RangeSet,
}

impl Drop for Writable<'_> {
    fn drop(&mut self) {
        // In a forked child, a thread that the child does not have may hold the lock.
        if self.region.process.is_here() {
            self.region.lock().unpin(&self.pinned);
        }
    }
}
