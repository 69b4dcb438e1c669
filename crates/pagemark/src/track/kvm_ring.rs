//! `kvm-ring`: KVM's rings of dirty pages, one for each virtual CPU of the machine in which the
//! program runs (PTxen in HAC, IV-A). A collect takes a time that follows the pages that were
//! written, and not the size of the memory.

use super::in_machine::InMachine;
use super::of_machine::{OfMachine, tracking};
use super::registry::MechanismEntry;
use crate::Mechanism;
use crate::sys::own_machine::Means;

/// The mechanism `kvm-ring`.
pub const ENTRY: MechanismEntry = MechanismEntry {
    name: "kvm-ring",
    description: "KVM's rings of dirty pages, for a program in the machine of pagemark-kvm",
    requirement: "a program that pagemark-kvm runs with PAGEMARK_KVM_DIRTY=rings in its environment, as run --kvm sets it for \
                  this mechanism, Linux 5.11",
    is_exclusive: false,
    sees_other_mappings: false,
    own_memory: |memory| Ok(Box::new(InMachine::new(Mechanism::KvmRing, Means::Ring, memory.clone())?)),
    machine: None,
    process: Some(tracking(|memory, part| OfMachine::tracker(Mechanism::KvmRing, Means::Ring, memory, part))),
};
