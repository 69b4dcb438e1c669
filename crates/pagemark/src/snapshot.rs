//! Snapshots of memory areas, held in memory: same-page merging (SPM, "Implementation").
//!
//! A store holds each chunk of content once, even if several snapshots have it, and does not hold
//! zeros. A snapshot is an immutable radix tree of chunk numbers, and equal subtrees are the same
//! node. The cost of a snapshot therefore follows what was written since the previous snapshot, two
//! snapshots are equal if their roots are (O(1)), and shared content is neither compared nor
//! restored.
//!
//! ```
//! use pagemark::{Address, RangeSet, address::offsets};
//! use pagemark::snapshot::{SharedBytes, SnapshotStore};
//! let store = SnapshotStore::new();
//! let mut memory = vec![7; 1 << 20];
//! let all = RangeSet::from(offsets(0..1 << 20));
//! let first = store.snapshot(None, &SharedBytes::of(&mut memory), &all, &RangeSet::new())?;
//!
//! memory[5000] = 8;
//! let dirty = RangeSet::from(offsets(5000..5001));
//! let second = store.snapshot(Some(&first), &SharedBytes::of(&mut memory), &dirty, &RangeSet::new())?;
//! assert!(first != second);
//! assert_eq!(first.diff(&second)?, RangeSet::from(offsets(4096..8192)));
//! let address = Address::new(5000);
//! assert_eq!((first.read_value::<u8>(address)?, second.read_value::<u8>(address)?), (7, 8));
//! assert_eq!(store.usage().chunks, 2, "the page of sevens, and the one with an eight");
//!
//! let written = store.restore(&first, Some((&second, &RangeSet::new())), &SharedBytes::of(&mut memory))?;
//! assert_eq!(written, RangeSet::from(offsets(4096..8192)));
//! assert_eq!(memory[5000], 7);
//! # Ok::<(), pagemark::Error>(())
//! ```

use std::fmt;
use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::ops::Deref;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use pagemark_linux::at_fork::{Locked, hold_off};
use pagemark_linux::own_memory::Mapping;

use crate::address::offsets;
use crate::{Address, AddressRangeExt, ByteCount, Error, PAGE_SIZE, Range, RangeSet};

mod chunks;
mod delta;
mod error;
mod index;
mod nodes;
mod packing;
mod pool;
mod state;
#[cfg(test)]
mod tests;
mod tree;

pub use pagemark_linux::shared_bytes::SharedBytes;

use chunks::MAX_CHUNK_BYTES;
use state::State;
use tree::Root;

/// Minimum size of a chunk, bytes.
const MIN_CHUNK_BYTES: usize = 256;

/// Options of a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SnapshotOptions {
    /// Bytes of a chunk, a power of two from 256 to 65 536. Smaller chunks share more content, and
    /// take more memory for tables: about 40 bytes a chunk.
    pub chunk_bytes: usize,
    /// Maximum of [`Usage::held_bytes`]. Where it does not suffice, the store packs the chunks that
    /// were not used for the longest time: it compresses them, or holds the difference from the
    /// chunk at the same position in the parent snapshot. Without a budget no chunk is packed.
    pub budget_bytes: Option<u64>,
}

impl Default for SnapshotOptions {
    /// Chunks of a page, no budget.
    fn default() -> Self {
        SnapshotOptions { chunk_bytes: PAGE_SIZE, budget_bytes: None }
    }
}

/// Holds snapshots of any number of memory areas of any length. A clone is the same store.
///
/// Many threads can use a store at once. Reads (restore, diff, values) run concurrently; taking and
/// dropping snapshots excludes all other operations.
#[derive(Clone)]
pub struct SnapshotStore {
    shared: Arc<Shared>,
}

struct Shared {
    options: SnapshotOptions,
    state: RwLock<State>,
}

impl Shared {
    // A panic while the lock is held is a bug of this module. The snapshots of other threads still
    // refer to the state, so the poison is ignored.
    fn read(&self) -> Locked<RwLockReadGuard<'_, State>> {
        let forks = hold_off();
        Locked::new(self.state.read().unwrap_or_else(PoisonError::into_inner), forks)
    }

    fn write(&self) -> Locked<RwLockWriteGuard<'_, State>> {
        let forks = hold_off();
        Locked::new(self.state.write().unwrap_or_else(PoisonError::into_inner), forks)
    }
}

impl Default for SnapshotStore {
    fn default() -> Self {
        Self::new()
    }
}

impl SnapshotStore {
    /// An empty store with chunks of a page and no budget.
    pub fn new() -> Self {
        Self::build(SnapshotOptions::default())
    }

    /// An empty store.
    ///
    /// # Errors
    /// `ErrorKind::ChunkSize`
    pub fn with_options(options: SnapshotOptions) -> Result<Self, Error> {
        let chunk_bytes = options.chunk_bytes;
        if !chunk_bytes.is_power_of_two() || !(MIN_CHUNK_BYTES..=MAX_CHUNK_BYTES).contains(&chunk_bytes) {
            return Err(Error::chunk_size(chunk_bytes));
        }
        Ok(Self::build(options))
    }

    fn build(options: SnapshotOptions) -> Self {
        // A random seed, so that no program can choose content whose hashes collide.
        let seed = RandomState::new().hash_one(0);
        let state = RwLock::new(State::new(options.chunk_bytes, seed, options.budget_bytes));
        SnapshotStore { shared: Arc::new(Shared { options, state }) }
    }

    /// The options of the store.
    pub fn options(&self) -> SnapshotOptions {
        self.shared.options
    }

    /// Takes a snapshot of an area that differs from `previous` only at the byte offsets `dirty`.
    /// `dirty` may include offsets that were not written. Without `previous`, the whole area counts
    /// as dirty. The cost is O(dirty).
    ///
    /// Content at the offsets `forget` (freed memory, unused stack) is not saved, dirty or not: the
    /// snapshot holds zeros there. A chunk that `forget` covers completely is not read. Offsets
    /// that `previous` forgot and that neither set names now still hold zeros, unless their chunk
    /// is read because of other bytes.
    ///
    /// # Errors
    /// After an error, all snapshots are unchanged. `ErrorKind::BudgetExceeded` if the
    /// content exceeds the budget even with all chunks packed; `ErrorKind::WrongStore`,
    /// `ErrorKind::LengthDiffers`, `ErrorKind::OutOfRange`, `ErrorKind::NoMemory`,
    /// `ErrorKind::StoreFull`.
    pub fn snapshot(
        &self,
        previous: Option<&Snapshot>,
        memory: &SharedBytes<'_>,
        dirty: &RangeSet,
        forget: &RangeSet,
    ) -> Result<Snapshot, Error> {
        let bytes = ByteCount::from(memory.bytes());
        self.check(previous, bytes)?;
        check_within(dirty, bytes)?;
        check_within(forget, bytes)?;
        let all;
        let dirty = match previous {
            Some(_) => dirty,
            None => {
                all = RangeSet::from(offsets(0..memory.bytes()));
                &all
            }
        };
        let root = self.shared.write().take(previous.map(|previous| previous.held.root), memory, dirty, forget)?;
        Ok(Snapshot { held: Arc::new(Held { store: self.shared.clone(), root, bytes }) })
    }

    /// Takes a snapshot of an area that holds zeros except at the byte offsets `holding`. The cost
    /// is O(`holding`). `forget` and the errors are as for [`SnapshotStore::snapshot`].
    pub(crate) fn snapshot_of_zeros_except(
        &self,
        area: &SharedBytes<'_>,
        holding: &RangeSet,
        forget: &RangeSet,
    ) -> Result<Snapshot, Error> {
        let bytes = ByteCount::from(area.bytes());
        check_within(holding, bytes)?;
        check_within(forget, bytes)?;
        let root = self.shared.write().take(None, area, holding, forget)?;
        Ok(Snapshot { held: Arc::new(Held { store: self.shared.clone(), root, bytes }) })
    }

    /// Restores a snapshot into an area. Writes the chunks that differ and no others, and returns
    /// their offsets.
    ///
    /// `current` describes the present content of the area: the content of a snapshot, except at
    /// the offsets of a set. Then only these offsets, and the chunks in which the two snapshots
    /// differ, are compared. Where both snapshots hold zeros, offsets that `current` forgot are not
    /// restored unless the set names them. Without `current`, the whole area is compared.
    ///
    /// # Errors
    /// After an error, nothing was written. `ErrorKind::WrongStore`,
    /// `ErrorKind::LengthDiffers`, `ErrorKind::OutOfRange`, `ErrorKind::NoMemory`.
    pub fn restore(
        &self,
        snapshot: &Snapshot,
        current: Option<(&Snapshot, &RangeSet)>,
        memory: &SharedBytes<'_>,
    ) -> Result<RangeSet, Error> {
        let bytes = ByteCount::from(memory.bytes());
        self.check(Some(snapshot), bytes)?;
        if let Some((current, dirty)) = current {
            self.check(Some(current), bytes)?;
            check_within(dirty, bytes)?;
        }
        let current = current.map(|(current, dirty)| (current.held.root, dirty));
        self.shared.read().restore(snapshot.held.root, current, memory).map_err(Error::no_memory)
    }

    /// The number of chunks and nodes that the store holds, and the memory that they take.
    pub fn usage(&self) -> Usage {
        self.shared.read().usage()
    }

    fn check(&self, snapshot: Option<&Snapshot>, bytes: ByteCount) -> Result<(), Error> {
        match snapshot {
            Some(snapshot) if !Arc::ptr_eq(&snapshot.held.store, &self.shared) => Err(Error::wrong_store()),
            Some(snapshot) => snapshot.check_length(bytes),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for SnapshotStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SnapshotStore").field("options", &self.shared.options).finish_non_exhaustive()
    }
}

fn check_within(set: &RangeSet, bytes: ByteCount) -> Result<(), Error> {
    match set.iter().next_back() {
        Some(range) if range.end - Address::MIN > bytes => Err(Error::beyond_snapshot(&range, bytes)),
        _ => Ok(()),
    }
}

/// The content of an area at one time. A clone is the same snapshot; dropping the last clone frees
/// the memory.
///
/// Snapshots of one store are equal if they hold the same bytes; the comparison compares two
/// numbers, not the content. Snapshots of different stores are never equal.
#[derive(Clone)]
pub struct Snapshot {
    held: Arc<Held>,
}

/// A reference to a root.
struct Held {
    store: Arc<Shared>,
    root: Root,
    bytes: ByteCount,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.store.write().release(self.root);
    }
}

impl Snapshot {
    /// Length of the area.
    pub fn bytes(&self) -> ByteCount {
        self.held.bytes
    }

    /// The chunks in which two snapshots differ, as byte offsets. The cost is O(difference).
    ///
    /// # Errors
    /// `ErrorKind::WrongStore`, `ErrorKind::LengthDiffers`
    pub fn diff(&self, other: &Snapshot) -> Result<RangeSet, Error> {
        if !Arc::ptr_eq(&self.held.store, &other.held.store) {
            return Err(Error::wrong_store());
        }
        self.check_length(other.held.bytes)?;
        Ok(self.held.store.read().diff(self.held.root, other.held.root, self.held.bytes))
    }

    /// The chunks that hold anything else than zeros, as byte offsets. The cost is O(result).
    pub fn holding(&self) -> RangeSet {
        self.held.store.read().holding(self.held.root, self.held.bytes)
    }

    /// Copies the content into one piece of memory, for code that needs it so: a store holds the
    /// content in chunks, which several snapshots share. The copy takes memory only where the
    /// snapshot holds anything else than zeros.
    ///
    /// # Errors
    /// `ErrorKind::NoMemory`
    pub fn copy(&self) -> Result<SnapshotCopy, Error> {
        let bytes = self.held.bytes.to_usize();
        let mut mapping = Mapping::new(bytes.max(1)).map_err(Error::no_memory)?;
        for range in self.holding().iter() {
            self.read_at(range.start, &mut mapping.content_mut()[range.to_offsets()])?;
        }
        Ok(SnapshotCopy { mapping, bytes })
    }

    /// Reads bytes of the snapshot without restoring it: finds the chunks that hold them in the
    /// tree (the software MMU of SPM, "State comparison layer").
    ///
    /// # Errors
    /// `ErrorKind::OutOfRange`
    pub fn read_at(&self, address: Address, to: &mut [u8]) -> Result<(), Error> {
        let range = address..address.saturating_add(ByteCount::from(to.len()));
        if range.end - Address::MIN > self.held.bytes {
            return Err(Error::beyond_snapshot(&range, self.held.bytes));
        }
        self.held.store.read().read(self.held.root, address, to);
        Ok(())
    }

    /// Reads a number or a struct of numbers, which may cross the border of a chunk.
    ///
    /// # Errors
    /// `ErrorKind::OutOfRange`
    pub fn read_value<T: bytemuck::Pod>(&self, address: Address) -> Result<T, Error> {
        let mut value = T::zeroed();
        self.read_at(address, bytemuck::bytes_of_mut(&mut value))?;
        Ok(value)
    }

    /// Calls `each` with the parts of `offsets`, split at the borders of chunks, and their content,
    /// in ascending order. `area` is an area of the same length, of which `each` reads or writes
    /// the parts.
    ///
    /// # Errors
    /// `ErrorKind::LengthDiffers`, `ErrorKind::OutOfRange`, `ErrorKind::NoMemory`; `each` was not
    /// called then.
    pub(crate) fn each_part(
        &self,
        offsets: &RangeSet,
        area: &SharedBytes<'_>,
        each: impl FnMut(Range, &[u8]),
    ) -> Result<(), Error> {
        self.check_length(ByteCount::from(area.bytes()))?;
        check_within(offsets, self.held.bytes)?;
        self.held.store.read().each_part(self.held.root, offsets, area, each).map_err(Error::no_memory)
    }

    fn check_length(&self, bytes: ByteCount) -> Result<(), Error> {
        if self.held.bytes == bytes {
            return Ok(());
        }
        Err(Error::length_differs(self.held.bytes, bytes))
    }
}

/// A copy of the content of a snapshot, in one piece: see [`Snapshot::copy`].
#[derive(Debug)]
pub struct SnapshotCopy {
    mapping: Mapping,
    bytes: usize,
}

impl Deref for SnapshotCopy {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.mapping.content()[..self.bytes]
    }
}

impl PartialEq for Snapshot {
    fn eq(&self, other: &Self) -> bool {
        let (a, b) = (&self.held, &other.held);
        Arc::ptr_eq(&a.store, &b.store) && a.bytes == b.bytes && a.root == b.root
    }
}

impl Eq for Snapshot {}

impl Hash for Snapshot {
    /// Hashes the number of the root. Equal content has an equal hash for as long as a snapshot of
    /// it exists.
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.held.root, self.held.bytes).hash(state);
    }
}

impl fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let held = &self.held;
        f.debug_struct("Snapshot").field("root", &held.root.node).field("bytes", &held.bytes).finish_non_exhaustive()
    }
}

/// Statistics of a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// Number of different chunks, without the chunk of zeros.
    pub chunks: u64,
    /// Number of chunks that are compressed.
    pub compressed_chunks: u64,
    /// Number of chunks that are held as the difference from another chunk.
    pub delta_chunks: u64,
    /// Number of different tree nodes.
    pub nodes: u64,
    /// Bytes of memory for content.
    pub content_bytes: u64,
    /// Bytes of memory for nodes, reference counts and indexes, including their spare capacity.
    pub overhead_bytes: u64,
    /// Bytes that the budget limits: the content, and the used part of nodes, reference counts and
    /// indexes.
    pub held_bytes: u64,
    /// Bytes of address space that are reserved for content. Parts that were never used take no
    /// memory.
    pub mapped_bytes: u64,
}
