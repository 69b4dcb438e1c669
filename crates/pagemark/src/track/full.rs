//! `full`: every page that holds data counts as written. The baseline of every paper.

use std::sync::Arc;

use pagemark_linux::pagemap::Pagemap;

use super::populated::{DataPages, Seen};
use super::registry::{MachineTracking, MechanismEntry, MemoryPart, ProcessTracking, own_pagemap};
use crate::{Error, Mechanism, RangeSet, Tracker};

/// The mechanism `full`.
pub const ENTRY: MechanismEntry = MechanismEntry {
    name: "full",
    description: "every page that holds data counts as written",
    requirement: "nothing",
    is_exclusive: false,
    sees_other_mappings: true,
    own_memory: |memory| Ok(Box::new(Full::new(own_pagemap()?, memory))),
    machine: Some(MachineTracking::OfProcess),
    process: Some(ProcessTracking {
        needs_userfaultfd: false,
        needs_stop: false,
        needs_parking: false,
        compares_content: false,
        hot_after: None,
        private_parts: &[MemoryPart::Private],
        tracker: |memory, part| Ok(Box::new(Full::new(memory.pagemap.clone(), part.pages()))),
    }),
};

/// Reports every page that holds data, each time.
#[derive(Debug)]
pub struct Full {
    pagemap: Arc<Pagemap>,
    data: DataPages,
    seen: Seen,
}

impl Full {
    /// Tracks the address space of `pagemap`.
    pub fn new(pagemap: Arc<Pagemap>, data: impl Into<DataPages>) -> Self {
        Full { pagemap, data: data.into(), seen: Seen::default() }
    }
}

impl Tracker for Full {
    fn mechanism(&self) -> Mechanism {
        Mechanism::Full
    }

    fn populated(&self) -> Option<&RangeSet> {
        Some(self.seen.pages())
    }

    fn collect(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<(), Error> {
        let now = self.data.find(&self.pagemap, ranges)?;
        dirty.extend(&now);
        dirty.extend(&self.seen.advance(ranges, now));
        Ok(())
    }
}
