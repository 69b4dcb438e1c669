//! The two ways to hold states that SPM, "Results", compares: snapshots and plain copies.

use std::hash::{Hash, Hasher};
use std::ptr::NonNull;
use std::rc::Rc;

use pagemark::ErrorKind;
use pagemark::region::{RegionOptions, RegionSnapshot};
use pagemark::snapshot::{SnapshotOptions, SnapshotStore};
use pagemark::{Mechanism, Region};
use xxhash_rust::xxh3::xxh3_64;

use crate::Error;
use crate::sys::plain_memory::PlainMemory;

/// The form in which states are held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StateForm {
    /// Snapshots of a region, which share equal content. `None` tracks the region by the best
    /// mechanism of this machine.
    Snapshots(Option<Mechanism>),
    /// A copy of all the memory for each state: the baseline of measurements.
    Copies,
}

/// The content of a state. Equal content compares equal; snapshots compare by two numbers.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) enum State {
    Snapshot(RegionSnapshot),
    Copy(Rc<Copied>),
}

/// A copy of all the memory, with its hash.
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

/// The memory of the program, whose content is a state, with the means to save and restore it.
pub(crate) enum StateMemory {
    Snapshots { region: Box<Region>, store: SnapshotStore },
    Copies { memory: PlainMemory, held_bytes: u64, budget_bytes: Option<u64> },
}

impl StateMemory {
    pub fn new(
        state_form: StateForm,
        bytes: usize,
        chunk_bytes: usize,
        budget_bytes: Option<u64>,
    ) -> Result<StateMemory, Error> {
        match state_form {
            StateForm::Snapshots(mechanism) => {
                let options = SnapshotOptions { chunk_bytes, budget_bytes };
                let store = SnapshotStore::with_options(options)?;
                let options = RegionOptions {
                    mechanism,
                    without_rollback: true,
                    store: Some(store.clone()),
                    ..RegionOptions::default()
                };
                Ok(StateMemory::Snapshots { region: Box::new(Region::with_options(bytes, options)?), store })
            }
            StateForm::Copies => {
                let memory = PlainMemory::new(bytes).map_err(Error::system("mapping the program's memory"))?;
                Ok(StateMemory::Copies { memory, held_bytes: 0, budget_bytes })
            }
        }
    }

    /// The address of the memory, for the program.
    pub fn memory(&self) -> Result<NonNull<[u8]>, Error> {
        match self {
            StateMemory::Snapshots { region, .. } => {
                let start = NonNull::new(region.as_ptr()).ok_or(std::io::ErrorKind::OutOfMemory.into());
                let start = start.map_err(Error::system("finding the region"))?;
                Ok(NonNull::slice_from_raw_parts(start, region.bytes()))
            }
            StateMemory::Copies { memory, .. } => Ok(memory.memory()),
        }
    }

    /// Saves the present content. None if it does not fit the budget.
    pub fn save(&mut self) -> Result<Option<State>, Error> {
        match self {
            StateMemory::Snapshots { region, .. } => match region.snapshot() {
                Ok(snapshot) => Ok(Some(State::Snapshot(snapshot))),
                Err(error) if matches!(error.kind(), ErrorKind::BudgetExceeded { .. }) => Ok(None),
                Err(error) => Err(error.into()),
            },
            StateMemory::Copies { memory, held_bytes, budget_bytes } => {
                let content = memory.copy();
                if budget_bytes.is_some_and(|budget_bytes| *held_bytes + content.len() as u64 > budget_bytes) {
                    return Ok(None);
                }
                Ok(Some(State::Copy(Rc::new(Copied { hash: xxh3_64(&content), content }))))
            }
        }
    }

    /// Counts a state that will be held.
    pub fn hold(&mut self, state: &State) {
        if let (StateMemory::Copies { held_bytes, .. }, State::Copy(copy)) = (self, state) {
            *held_bytes += copy.content.len() as u64;
        }
    }

    /// Restores a state into the memory.
    pub fn restore(&mut self, state: &State) -> Result<(), Error> {
        match (self, state) {
            (StateMemory::Snapshots { region, .. }, State::Snapshot(snapshot)) => _ = region.restore(snapshot)?,
            (StateMemory::Copies { memory, .. }, State::Copy(copy)) => memory.fill(&copy.content),
            _ => unreachable!("a memory is given back the states that it made"),
        }
        Ok(())
    }

    /// Bytes that the states take.
    pub fn held_bytes(&self) -> u64 {
        match self {
            StateMemory::Snapshots { store, .. } => store.usage().content_bytes + store.usage().overhead_bytes,
            StateMemory::Copies { held_bytes, .. } => *held_bytes,
        }
    }
}
