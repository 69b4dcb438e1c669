//! Freezing a process tree, and saving what it is besides memory.
//!
//! A [`StateSaver`] freezes the tree and gives a [`FrozenState`]; its thaw gives a [`SavedState`].
//! Everything that depends on how the state is saved is behind these three traits: [`CriuSaver`]
//! saves the whole state, [`RegisterSaver`] registers.

mod criu;
mod registers;
mod signal_gate;

use std::collections::HashSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use pagemark::blob::BlobHistory;
use pagemark::repository::StateRecord;
use pagemark::target::VisitPage;
use pagemark::{PageRange, Store};
use pagemark_linux::proc::Process;
use pagemark_trace::RecordedPid;
use pagemark_trace::error::{Error, ErrorKind, Object, Result, Source};
use pagemark_trace::inject::memory_copy::MemoryCopy;
use pagemark_trace::objects::ObjectId;
use pagemark_trace::space::AddressSpace;

pub use criu::CriuSaver;
pub use registers::{REGISTERS, RegisterSaver, auxiliary_vector_name};
pub use signal_gate::SignalGate;

/// Freezes process trees and saves their state.
pub trait StateSaver: Send + Sync {
    /// True if a tree can be restored from what is saved. Then a checkpoint also has the files that
    /// the tree writes.
    fn is_restorable(&self) -> bool;

    /// Finds out whether the state of a tree can be saved, without disturbing the tree.
    ///
    /// # Errors
    /// It can't, and why.
    fn check(&self, root: Process) -> Result<()>;

    /// True if the content of shared memory can be left out of the state of these processes, which
    /// are a tree.
    fn leaves_objects_out(&self, pids: &[i32]) -> bool;

    /// True if a frozen tree has given up its machines of `pagemark-kvm`. If not, the caller has it
    /// do so before, for mechanisms that need it.
    fn gives_up_machines(&self) -> bool {
        false
    }

    /// What there is to say of the states that were saved since the last call.
    fn take_notices(&self) -> Vec<String> {
        Vec::new()
    }

    /// Freezes the tree and saves its state, without the content of `objects` of shared memory,
    /// which the caller copies. Calls `meanwhile` again and again until the tree is being frozen;
    /// processes may stop during a call. May call it once more, when the tree is frozen.
    ///
    /// # Errors
    /// The tree could not be frozen or its state not be saved, or `meanwhile` failed. The tree
    /// resumes.
    fn freeze(
        &self,
        root: Process,
        objects: &HashSet<ObjectId>,
        meanwhile: Meanwhile<'_>,
    ) -> Result<Box<dyn FrozenState>>;
}

/// How far a freeze has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FreezeStage {
    /// Processes run, or are being stopped.
    Freezing,
    /// No thread runs any more, and the state is being saved.
    Saving,
}

/// Called while a tree is being frozen and saved.
pub type Meanwhile<'a> = &'a mut dyn FnMut(FreezeStage) -> Result<()>;

/// A tree that is frozen, with its state saved. Dropped, the tree resumes.
pub trait FrozenState {
    /// Makes a copy of the memory of a process, which stays as it is in the freeze. None if whoever
    /// holds the tree cannot do that.
    ///
    /// # Errors
    /// Why it could not be made. The tree stays frozen.
    fn copy_memory(&self, pid: i32) -> Result<Option<MemoryCopy>>;

    /// Lets the tree resume. `spaces` has the memory of each process, as it was collected in the
    /// freeze.
    ///
    /// # Errors
    /// The state could not be saved. The tree resumes.
    fn thaw(self: Box<Self>, spaces: &[&AddressSpace]) -> Result<ResumedTree>;
}

/// A tree that has resumed.
pub struct ResumedTree {
    /// When the first process of the tree was stopped.
    pub frozen_at: Instant,
    /// How long the tree was frozen.
    pub frozen_time: Duration,
    /// The saved state.
    pub state: Box<dyn SavedState>,
}

/// The saved state of a tree.
pub trait SavedState {
    /// The page numbers of a process's private pages that held data in the freeze, in ascending
    /// order. None if nothing is known.
    fn held_pages(&self, pid: RecordedPid) -> Option<Vec<PageRange>>;

    /// The objects of shared memory whose content is not in the state, of those that it was not to
    /// have. None if it has no shared memory at all.
    fn objects_left_out(&self) -> Option<&HashSet<ObjectId>>;

    /// Visits the pages of a process that were saved with the state, in ascending order.
    ///
    /// # Errors
    /// The saved state could not be read, or what `visit` returns.
    fn saved_pages(&self, pid: RecordedPid, visit: VisitPage<'_>) -> Result<(), pagemark::Error>;

    /// Stores the state. `history` has that of the last checkpoint.
    ///
    /// # Errors
    /// The saved state could not be read or stored.
    fn record(&self, history: &mut BlobHistory, store: &mut dyn Store) -> Result<Vec<StateRecord>, pagemark::Error>;
}

/// For `map_err`: a file of the saved state cannot be read.
fn unreadable_state<E: Into<Source>>(path: impl Into<PathBuf>) -> impl FnOnce(E) -> Error {
    let object = Object::File(path.into());
    move |source| Error::of(ErrorKind::System, "cannot read the saved state", object, source)
}
