//! How states are held.

use std::hash::{Hash, Hasher};
use std::ptr::NonNull;
use std::rc::Rc;

use pagemark::region::{RegionError, RegionOptions, RegionSnapshot};
use pagemark::snapshot::{SnapshotError, SnapshotOptions, SnapshotStore};
use pagemark::{Mechanism, Region};
use xxhash_rust::xxh3::xxh3_64;

use crate::ExploreError;
use crate::sys::plain_memory::PlainMemory;

/// How states are held: what SPM compares.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Keep {
    /// As snapshots of a region, which share what is equal, tracked by a mechanism; none is the one that serves best here.
    Snapshots(Option<Mechanism>),
    /// Each as a copy of all the memory: the simple way, which everything else is measured against.
    Copies,
}

/// What a state held. Equal states are equal; with snapshots that is a comparison of two numbers.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) enum State {
    Snapshot(RegionSnapshot),
    Copy(Rc<Copied>),
}

/// A copy of all the memory.
#[derive(PartialEq, Eq, Debug)]
pub(crate) struct Copied {
    hash: u64,
    content: Box<[u8]>,
}

impl Hash for Copied {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.hash.hash(state);
    }
}

/// The memory that a state consists of, and how it is saved and put back.
pub(crate) enum Keeper {
    Snapshots { region: Box<Region>, store: SnapshotStore },
    Copies { memory: PlainMemory, held_bytes: u64, budget_bytes: Option<u64> },
}

impl Keeper {
    pub fn new(
        keep: Keep,
        bytes: usize,
        chunk_bytes: usize,
        budget_bytes: Option<u64>,
    ) -> Result<Keeper, ExploreError> {
        match keep {
            Keep::Snapshots(mechanism) => {
                let options = SnapshotOptions { chunk_bytes, budget_bytes };
                let store = SnapshotStore::with_options(options).map_err(RegionError::from)?;
                let options = RegionOptions { mechanism, without_rollback: true, store: Some(store.clone()) };
                Ok(Keeper::Snapshots { region: Box::new(Region::with_options(bytes, options)?), store })
            }
            Keep::Copies => {
                let memory = PlainMemory::new(bytes).map_err(ExploreError::system("mapping the program's memory"))?;
                Ok(Keeper::Copies { memory, held_bytes: 0, budget_bytes })
            }
        }
    }

    /// The memory, for the program.
    pub fn memory(&self) -> Result<NonNull<[u8]>, ExploreError> {
        match self {
            Keeper::Snapshots { region, .. } => {
                let start = NonNull::new(region.as_ptr()).ok_or(std::io::ErrorKind::OutOfMemory.into());
                let start = start.map_err(ExploreError::system("finding the region"))?;
                Ok(NonNull::slice_from_raw_parts(start, region.bytes()))
            }
            Keeper::Copies { memory, .. } => Ok(memory.memory()),
        }
    }

    /// What the memory holds now. None if that is more than the budget allows.
    pub fn save(&mut self) -> Result<Option<State>, ExploreError> {
        match self {
            Keeper::Snapshots { region, .. } => match region.snapshot() {
                Ok(snapshot) => Ok(Some(State::Snapshot(snapshot))),
                Err(RegionError::Snapshot(SnapshotError::BudgetExceeded { .. })) => Ok(None),
                Err(error) => Err(error.into()),
            },
            Keeper::Copies { memory, held_bytes, budget_bytes } => {
                let content = memory.copy();
                if budget_bytes.is_some_and(|budget_bytes| *held_bytes + content.len() as u64 > budget_bytes) {
                    return Ok(None);
                }
                Ok(Some(State::Copy(Rc::new(Copied { hash: xxh3_64(&content), content }))))
            }
        }
    }

    /// Notes that a state stays.
    pub fn hold(&mut self, state: &State) {
        if let (Keeper::Copies { held_bytes, .. }, State::Copy(copy)) = (self, state) {
            *held_bytes += copy.content.len() as u64;
        }
    }

    /// Makes the memory hold what it held.
    pub fn restore(&mut self, state: &State) -> Result<(), ExploreError> {
        match (self, state) {
            (Keeper::Snapshots { region, .. }, State::Snapshot(snapshot)) => _ = region.restore(snapshot)?,
            (Keeper::Copies { memory, .. }, State::Copy(copy)) => memory.fill(&copy.content),
            _ => unreachable!("a keeper is given back the states that it made"),
        }
        Ok(())
    }

    /// Bytes that the states take.
    pub fn held_bytes(&self) -> u64 {
        match self {
            Keeper::Snapshots { store, .. } => store.usage().content_bytes + store.usage().overhead_bytes,
            Keeper::Copies { held_bytes, .. } => *held_bytes,
        }
    }
}
