//! Registers and auxiliary vectors, saved by ptrace.

use std::collections::{HashMap, HashSet};

use pagemark::blob::BlobHistory;
use pagemark::repository::StateRecord;
use pagemark::sys::proc;
use pagemark::target::VisitPage;
use pagemark::{AddressRangeExt, PageRange, RangeSet, Store};

use super::{FrozenState, Meanwhile, SavedState, StateSaver, Thawed, unreadable_state};
use crate::error::Result;
use crate::freezer::{Freezer, ThreadRegisters};
use crate::objects::ObjectId;
use crate::space::AddressSpace;

/// The state file with the registers of a checkpoint of memory alone: a list of [`ThreadRegisters`]
/// in JSON.
pub const REGISTERS: &str = "registers.json";

/// The state file of a checkpoint of memory alone with a process's auxiliary vector, in the format
/// of `/proc/PID/auxv`. The oldest checkpoints lack it.
pub fn auxiliary_vector_name(pid: i32) -> String {
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

    fn check(&self, _: i32) -> Result<()> {
        Ok(())
    }

    fn leaves_objects_out(&self, _: &[i32]) -> bool {
        true
    }

    fn freeze(&self, root_pid: i32, _: &HashSet<ObjectId>, _: Meanwhile<'_>) -> Result<Box<dyn FrozenState>> {
        Ok(Box::new(Stopped(Freezer::freeze(root_pid)?)))
    }
}

/// A tree that ptrace keeps stopped.
struct Stopped(Freezer);

impl FrozenState for Stopped {
    fn thaw(self: Box<Self>, spaces: &[&AddressSpace]) -> Result<Thawed> {
        let Stopped(freezer) = *self;
        let frozen_at = freezer.frozen_at();
        let auxiliary_vectors = spaces.iter().map(|space| {
            let pid = space.pid();
            (pid, proc::auxiliary_vector(pid).unwrap_or_default())
        });
        let auxiliary_vectors = auxiliary_vectors.collect();
        let registers = freezer.registers();
        let frozen_time = freezer.thaw()?;
        let populated = spaces.iter().map(|space| (space.pid(), space.populated())).collect();
        let state = Registers { registers: registers?, auxiliary_vectors, populated };
        Ok(Thawed { frozen_at, frozen_time, state: Box::new(state) })
    }
}

struct Registers {
    registers: Vec<ThreadRegisters>,
    /// Of each process; empty where it could not be read.
    auxiliary_vectors: Vec<(i32, Vec<u8>)>,
    /// The private pages of each process that held data.
    populated: HashMap<i32, RangeSet>,
}

impl SavedState for Registers {
    fn held_pages(&self, pid: i32) -> Option<Vec<PageRange>> {
        let populated = self.populated.get(&pid)?;
        Some(populated.iter().map(|range| range.page_range()).collect())
    }

    fn objects_left_out(&self) -> Option<&HashSet<ObjectId>> {
        None
    }

    fn saved_pages(&self, _: i32, _: VisitPage<'_>) -> Result<(), pagemark::Error> {
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
