//! `kvm-log`: the log of dirty pages that KVM keeps of a machine (PTxen in HAC, IV-A; PML, section
//! 3). KVM finds the first write to a page by write protection below the program, or by
//! page-modification logging where the processor has it.
//!
//! The machine is that in which the program runs, for its regions and for whole processes, or one
//! of QEMU: those are tracked by `pagemark-vm`.

use pagemark_kvm_protocol::machine_calls::Means;

use super::in_machine::InMachine;
use super::of_machine::{OfMachine, tracking};
use super::registry::{MachineTracking, MechanismEntry};
use crate::Mechanism;

/// The mechanism `kvm-log`.
pub const ENTRY: MechanismEntry = MechanismEntry {
    name: "kvm-log",
    description: "KVM's log of dirty pages, for a program that pagemark-kvm runs, or a virtual machine under KVM",
    requirement: "a program that pagemark-kvm runs, Linux 5.0; or a virtual machine that vm run starts, Linux 6.7",
    is_exclusive: false,
    sees_other_mappings: false,
    own_memory: |memory| Ok(Box::new(InMachine::new(Mechanism::KvmLog, Means::Log, memory.clone())?)),
    machine: Some(MachineTracking::ByHypervisor),
    process: Some(tracking(|memory, part| OfMachine::tracker(Mechanism::KvmLog, Means::Log, memory, part))),
};
