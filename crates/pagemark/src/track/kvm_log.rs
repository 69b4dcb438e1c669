//! `kvm-log`: the log of dirty pages that KVM keeps of the machine in which the program runs (PTxen
//! in HAC, IV-A). KVM finds the first write to a page by write protection below the program, or by
//! page-modification logging where the processor has it.

use super::in_machine::InMachine;
use super::registry::MechanismEntry;
use crate::Mechanism;
use crate::sys::own_machine::Means;

/// The mechanism `kvm-log`.
pub const ENTRY: MechanismEntry = MechanismEntry {
    name: "kvm-log",
    description: "KVM's log of dirty pages, for a program in the machine of pagemark-kvm",
    requirement: "a program that pagemark-kvm runs, Linux 5.0",
    is_exclusive: false,
    sees_other_mappings: false,
    own_memory: |memory| Ok(Box::new(InMachine::new(Mechanism::KvmLog, Means::Log, memory.clone())?)),
    machine: None,
    process: None,
};
