//! `kvm-scan`: the dirty bits in the page tables of the machine in which the program runs (Scanxen
//! in HAC, IV-D). A collect reads the tables of the tracked memory, of those that exist.
//!
//! Of a region, the monitor reads them. Of a whole process, they are read from outside, in the
//! memory of the process, while it has given up its machine as for a checkpoint: then nobody
//! changes them, and the machine that the process makes afterwards has no translations for which
//! the processor would not set the bits again.

use pagemark_kvm_protocol::machine_calls::Means;

use super::in_machine::InMachine;
use super::of_machine::{OfMachine, tracking};
use super::registry::MechanismEntry;
use crate::Mechanism;

/// The mechanism `kvm-scan`.
pub const ENTRY: MechanismEntry = MechanismEntry {
    name: "kvm-scan",
    description: "the dirty bits of the guest's page tables, for a program in the machine of pagemark-kvm",
    requirement: "a program that pagemark-kvm runs",
    is_exclusive: false,
    sees_other_mappings: false,
    own_memory: |memory| Ok(Box::new(InMachine::new(Mechanism::KvmScan, Means::Scan, memory.clone())?)),
    machine: None,
    process: Some(tracking(|memory, part| OfMachine::tracker(Mechanism::KvmScan, Means::Scan, memory, part))),
};
