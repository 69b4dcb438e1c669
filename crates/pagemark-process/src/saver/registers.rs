//! Registers and auxiliary vectors, saved by ptrace.

use std::collections::{HashMap, HashSet};

use pagemark::blob::BlobHistory;
use pagemark::repository::StateRecord;
use pagemark::target::VisitPage;
use pagemark::{AddressRangeExt, PageRange, RangeSet, Store};
use pagemark_linux::proc::{self, Process};
use pagemark_trace::RecordedPid;
use pagemark_trace::error::Result;
use pagemark_trace::freezer::{Freezer, ThreadRegisters};
use pagemark_trace::inject::memory_copy::MemoryCopy;
use pagemark_trace::objects::ObjectId;
use pagemark_trace::space::AddressSpace;

use super::{FrozenState, Meanwhile, ResumedTree, SavedState, StateSaver, unreadable_state};

/// The state file with the registers of a checkpoint of memory alone: a list of [`ThreadRegisters`]
/// in JSON.
pub const REGISTERS: &str = "registers.json";

/// The state file of a checkpoint of memory alone with a process's auxiliary vector, in the format
/// of `/proc/PID/auxv`. The oldest checkpoints lack it.
pub fn auxiliary_vector_name(pid: RecordedPid) -> String {
    format!("auxv-{pid}")
}

/// Freezes a tree by ptrace and saves the registers of its threads: enough to inspect its memory,
/// not to restore the tree.
#[derive(Clone, Copy, Debug, Default)]
pub struct RegisterSaver;

impl StateSaver for RegisterSaver {
    fn is_restorable(&self) -> bool {
        false
    }

    fn check(&self, _: Process) -> Result<()> {
        Ok(())
    }

    fn leaves_objects_out(&self, _: &[i32]) -> bool {
        true
    }

    fn freeze(&self, root: Process, _: &HashSet<ObjectId>, _: Meanwhile<'_>) -> Result<Box<dyn FrozenState>> {
        Ok(Box::new(Stopped(Freezer::freeze(root)?)))
    }
}

/// A tree that ptrace keeps stopped.
struct Stopped(Freezer);

impl FrozenState for Stopped {
    /// The process that holds the tree makes none.
    fn copy_memory(&self, _: i32) -> Result<Option<MemoryCopy>> {
        Ok(None)
    }

    fn thaw(self: Box<Self>, spaces: &[&AddressSpace]) -> Result<ResumedTree> {
        let Stopped(freezer) = *self;
        let frozen_at = freezer.frozen_at();
        let auxiliary_vectors = spaces.iter().map(|space| {
            let pid = space.pid();
            (RecordedPid::new(pid), proc::auxiliary_vector(pid).unwrap_or_default())
        });
        let auxiliary_vectors = auxiliary_vectors.collect();
        let registers = freezer.registers();
        let frozen_time = freezer.thaw()?;
        let populated = spaces.iter().map(|space| (RecordedPid::new(space.pid()), space.populated())).collect();
        let state = Registers { registers: registers?, auxiliary_vectors, populated };
        Ok(ResumedTree { frozen_at, frozen_time, state: Box::new(state) })
    }
}

struct Registers {
    registers: Vec<ThreadRegisters>,
    /// Of each process; empty where it could not be read.
    auxiliary_vectors: Vec<(RecordedPid, Vec<u8>)>,
    /// The private pages of each process that held data.
    populated: HashMap<RecordedPid, RangeSet>,
}

impl SavedState for Registers {
    fn held_pages(&self, pid: RecordedPid) -> Option<Vec<PageRange>> {
        let populated = self.populated.get(&pid)?;
        Some(populated.iter().map(|range| range.page_range()).collect())
    }

    fn objects_left_out(&self) -> Option<&HashSet<ObjectId>> {
        None
    }

    fn saved_pages(&self, _: RecordedPid, _: VisitPage<'_>) -> Result<(), pagemark::Error> {
        Ok(())
    }

    fn record(&self, history: &mut BlobHistory, store: &mut dyn Store) -> Result<Vec<StateRecord>, pagemark::Error> {
        let text = serde_json::to_vec(&self.registers).map_err(unreadable_state(REGISTERS))?;
        let mut record = |name: String, mut content: &[u8]| -> Result<StateRecord, pagemark::Error> {
            let content = history.write(&name, store, &mut content)?;
            Ok(StateRecord { name, content })
        };
        let mut records = vec![record(REGISTERS.to_owned(), &text)?];
        for (pid, vector) in self.auxiliary_vectors.iter().filter(|(_, vector)| !vector.is_empty()) {
            records.push(record(auxiliary_vector_name(*pid), vector)?);
        }
        Ok(records)
    }
}
