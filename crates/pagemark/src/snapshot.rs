//! Snapshots of memory areas, held in memory: same-page merging (SPM).
//!
//! A store holds each chunk of content once, whichever snapshots hold it, and zeros not at all. A snapshot is an immutable radix
//! tree of chunk numbers, and equal subtrees are the same node. So a snapshot costs what was written since the one before it,
//! two snapshots are equal if their roots are (O(1)), and what they share is neither compared nor restored.
//!
//! ```
//! use pagemark::RangeSet;
//! use pagemark::snapshot::{Area, SnapshotStore};
//! let store = SnapshotStore::new();
//! let mut memory = vec![7; 1 << 20];
//! let all = RangeSet::from(0..1 << 20);
//! let first = store.snapshot(None, &Area::of(&mut memory), &all, &RangeSet::new())?;
//!
//! memory[5000] = 8;
//! let dirty = RangeSet::from(5000..5001);
//! let second = store.snapshot(Some(&first), &Area::of(&mut memory), &dirty, &RangeSet::new())?;
//! assert!(first != second);
//! assert_eq!(first.diff(&second)?, RangeSet::from(4096..8192));
//! assert_eq!((first.read_value::<u8>(5000)?, second.read_value::<u8>(5000)?), (7, 8));
//! assert_eq!(store.usage().chunks, 2, "the page of sevens, and the one with an eight");
//!
//! let written = store.restore(&first, Some((&second, &RangeSet::new())), &Area::of(&mut memory))?;
//! assert_eq!(written, RangeSet::from(4096..8192));
//! assert_eq!(memory[5000], 7);
//! # Ok::<(), pagemark::snapshot::SnapshotError>(())
//! ```

use std::fmt;
use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::io;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::{PAGE_SIZE, Range, RangeSet};

mod chunks;
mod delta;
mod index;
mod nodes;
mod packing;
mod pool;
mod state;
#[cfg(test)]
mod tests;
mod tree;
mod value;

pub use crate::sys::area::Area;
pub use value::Value;

use chunks::MOST_CHUNK_BYTES;
use state::State;
use tree::Root;

/// Fewest bytes of a chunk.
const FEWEST_CHUNK_BYTES: usize = 256;

/// How a store holds snapshots.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SnapshotOptions {
    /// Bytes of a chunk, a power of two from 256 to 65 536. Smaller chunks share more and cost more: some 40 bytes a chunk.
    pub chunk_bytes: usize,
    /// Most bytes that may be held ([`Usage::held_bytes`]). Where that is not enough, chunks are packed, those first that were not
    /// used for long: compressed, or as the difference from what was at the same place in the parent snapshot. Without a
    /// budget nothing is packed.
    pub budget_bytes: Option<u64>,
}

impl Default for SnapshotOptions {
    /// Chunks of a page, no budget.
    fn default() -> Self {
        SnapshotOptions { chunk_bytes: PAGE_SIZE, budget_bytes: None }
    }
}

/// Holds snapshots of memory areas, of any number of areas of any length. A clone is the same store.
///
/// It is used from many threads at once: those that read (restore, diff, values) together, those that take or drop snapshots one
/// after the other.
#[derive(Clone)]
pub struct SnapshotStore {
    shared: Arc<Shared>,
}

struct Shared {
    options: SnapshotOptions,
    state: RwLock<State>,
}

impl Shared {
    // A panic below the lock is a bug here; what it leaves is still what other threads' snapshots refer to.
    fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
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
    /// [`SnapshotError::ChunkSize`]
    pub fn with_options(options: SnapshotOptions) -> Result<Self, SnapshotError> {
        let chunk_bytes = options.chunk_bytes;
        if !chunk_bytes.is_power_of_two() || !(FEWEST_CHUNK_BYTES..=MOST_CHUNK_BYTES).contains(&chunk_bytes) {
            return Err(SnapshotError::ChunkSize { chunk_bytes });
        }
        Ok(Self::build(options))
    }

    fn build(options: SnapshotOptions) -> Self {
        // Nobody can choose content whose hashes collide.
        let seed = RandomState::new().hash_one(0);
        let state = RwLock::new(State::new(options.chunk_bytes, seed, options.budget_bytes));
        SnapshotStore { shared: Arc::new(Shared { options, state }) }
    }

    /// The options that it was made with.
    pub fn options(&self) -> SnapshotOptions {
        self.shared.options
    }

    /// Takes a snapshot of an area that differs from `previous` only in `dirty`, byte offsets in the area of which any may
    /// be named that was not written. Without `previous`, all of the area counts as dirty. It costs O(dirty).
    ///
    /// What is in `forget` (freed memory, stack that is not in use) need not be saved, dirty or not: the snapshot holds zeros
    /// there. A chunk that is forgotten as a whole is not even read. What `previous` forgot and neither set names now is held as
    /// zeros still, unless its chunk is read for the sake of other bytes.
    ///
    /// # Errors
    /// After an error, all snapshots are as they were. [`SnapshotError::BudgetExceeded`] if the budget can't be kept even with
    /// all chunks packed; [`SnapshotError::WrongStore`], [`SnapshotError::LengthDiffers`], [`SnapshotError::OutOfRange`],
    /// [`SnapshotError::Memory`], [`SnapshotError::Full`].
    pub fn snapshot(
        &self,
        previous: Option<&Snapshot>,
        area: &Area<'_>,
        dirty: &RangeSet,
        forget: &RangeSet,
    ) -> Result<Snapshot, SnapshotError> {
        let bytes = area.bytes() as u64;
        self.check(previous, bytes)?;
        check_within(dirty, bytes)?;
        check_within(forget, bytes)?;
        let all;
        let dirty = match previous {
            Some(_) => dirty,
            None => {
                all = RangeSet::from(0..bytes);
                &all
            }
        };
        let root = self.shared.write().take(previous.map(|previous| previous.held.root), area, dirty, forget)?;
        Ok(Snapshot { held: Arc::new(Held { store: self.shared.clone(), root, bytes }) })
    }

    /// Makes the area hold what the snapshot holds, and returns what was written: the chunks that differed, and no others.
    ///
    /// `current` says what the area holds now: what that snapshot holds, but for the offsets in the set. Then only these, and
    /// the chunks in which the snapshots differ, are looked at; what `current` forgot is then left as it is where both
    /// hold zeros, unless the set names it. Without `current`, all of the area is compared.
    ///
    /// # Errors
    /// Nothing is written then. [`SnapshotError::WrongStore`], [`SnapshotError::LengthDiffers`],
    /// [`SnapshotError::OutOfRange`].
    pub fn restore(
        &self,
        snapshot: &Snapshot,
        current: Option<(&Snapshot, &RangeSet)>,
        area: &Area<'_>,
    ) -> Result<RangeSet, SnapshotError> {
        let bytes = area.bytes() as u64;
        self.check(Some(snapshot), bytes)?;
        if let Some((current, dirty)) = current {
            self.check(Some(current), bytes)?;
            check_within(dirty, bytes)?;
        }
        let current = current.map(|(current, dirty)| (current.held.root, dirty));
        Ok(self.shared.read().restore(snapshot.held.root, current, area))
    }

    /// What the store holds, and what that takes.
    pub fn usage(&self) -> Usage {
        self.shared.read().usage()
    }

    fn check(&self, snapshot: Option<&Snapshot>, bytes: u64) -> Result<(), SnapshotError> {
        match snapshot {
            Some(snapshot) if !Arc::ptr_eq(&snapshot.held.store, &self.shared) => Err(SnapshotError::WrongStore),
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

fn check_within(set: &RangeSet, bytes: u64) -> Result<(), SnapshotError> {
    match set.iter().next_back() {
        Some(range) if range.end > bytes => Err(SnapshotError::OutOfRange { range, bytes }),
        _ => Ok(()),
    }
}

/// What an area held at one time. A clone is the same snapshot; its memory is given back when the last one is dropped.
///
/// Snapshots of one store are equal if they hold the same bytes: as a comparison of two numbers, not of content. Those of
/// different stores are never equal.
#[derive(Clone)]
pub struct Snapshot {
    held: Arc<Held>,
}

/// A reference to a root.
struct Held {
    store: Arc<Shared>,
    root: Root,
    bytes: u64,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.store.write().release(self.root);
    }
}

impl Snapshot {
    /// How long the area is.
    pub fn bytes(&self) -> u64 {
        self.held.bytes
    }

    /// The chunks in which two snapshots differ, as byte offsets. It costs O(difference).
    ///
    /// # Errors
    /// [`SnapshotError::WrongStore`], [`SnapshotError::LengthDiffers`]
    pub fn diff(&self, other: &Snapshot) -> Result<RangeSet, SnapshotError> {
        if !Arc::ptr_eq(&self.held.store, &other.held.store) {
            return Err(SnapshotError::WrongStore);
        }
        self.check_length(other.held.bytes)?;
        Ok(self.held.store.read().diff(self.held.root, other.held.root, self.held.bytes))
    }

    /// Reads bytes as they were, without restoring anything (SPM's software MMU): each chunk that they are in is found in the
    /// tree.
    ///
    /// # Errors
    /// [`SnapshotError::OutOfRange`]
    pub fn read_at(&self, offset: u64, to: &mut [u8]) -> Result<(), SnapshotError> {
        let range = offset..offset.saturating_add(to.len() as u64);
        if range.end > self.held.bytes {
            return Err(SnapshotError::OutOfRange { range, bytes: self.held.bytes });
        }
        self.held.store.read().read(self.held.root, offset, to);
        Ok(())
    }

    /// Reads a number, which may lie across chunks.
    ///
    /// # Errors
    /// [`SnapshotError::OutOfRange`]
    pub fn read_value<T: Value>(&self, offset: u64) -> Result<T, SnapshotError> {
        T::read_by(|bytes| self.read_at(offset, bytes))
    }

    fn check_length(&self, bytes: u64) -> Result<(), SnapshotError> {
        if self.held.bytes == bytes {
            return Ok(());
        }
        Err(SnapshotError::LengthDiffers { snapshot_bytes: self.held.bytes, bytes })
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
    /// That of the root's number: equal content has an equal one for as long as a snapshot of it exists.
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

/// What a store holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// Different chunks, without that of zeros.
    pub chunks: u64,
    /// Those of them that are compressed.
    pub compressed_chunks: u64,
    /// Those of them that are held as the difference from another one.
    pub delta_chunks: u64,
    /// Different nodes of trees.
    pub nodes: u64,
    /// Bytes of memory that the content takes.
    pub content_bytes: u64,
    /// Bytes of memory that everything else takes: nodes, reference counts, indexes, with the room that they keep for more.
    pub overhead_bytes: u64,
    /// What the budget limits: the content, and of everything else the part that is in use.
    pub held_bytes: u64,
    /// Address space that is reserved for content. What of it was never used takes no memory.
    pub mapped_bytes: u64,
}

/// A store could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// A chunk can't be that long.
    #[error("a chunk can't have {chunk_bytes} bytes: choose a power of two from 256 to 65536")]
    ChunkSize {
        /// What was asked for.
        chunk_bytes: usize,
    },
    /// The snapshot is one of another store.
    #[error("the snapshot belongs to another store")]
    WrongStore,
    /// The snapshot is one of an area of another length.
    #[error("the snapshot is one of an area of {snapshot_bytes} bytes, not of {bytes} bytes")]
    LengthDiffers {
        /// What the snapshot has.
        snapshot_bytes: u64,
        /// What it was used with.
        bytes: u64,
    },
    /// Something beyond the area's end was named.
    #[error("offsets {range:?} are not within an area of {bytes} bytes")]
    OutOfRange {
        /// What was named.
        range: Range,
        /// The area's length.
        bytes: u64,
    },
    /// The budget can't be kept, even with all chunks packed.
    #[error(
        "holding the snapshot takes {needed_bytes} bytes and the budget is {budget_bytes} bytes: drop snapshots, or give \
         the store more"
    )]
    BudgetExceeded {
        /// The budget.
        budget_bytes: u64,
        /// What would have to be held, at least.
        needed_bytes: u64,
    },
    /// The kernel gives no memory.
    #[error("no memory for a snapshot's content: {source}")]
    Memory {
        /// Its answer.
        source: io::Error,
    },
    /// There are more chunks or nodes than a store has numbers for.
    #[error("the store is full: drop snapshots, or use larger chunks or a second store")]
    Full,
}

/// Adds to a vector that may be long: it grows by an eighth, where `push` would double it.
fn push_gently<T>(vector: &mut Vec<T>, value: T) {
    if vector.len() == vector.capacity() {
        vector.reserve_exact((vector.len() / 8).max(16));
    }
    vector.push(value);
}
