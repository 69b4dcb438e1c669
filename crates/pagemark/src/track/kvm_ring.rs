//! `kvm-ring`: KVM's rings of dirty pages, one for each virtual CPU of the machine in which the
//! program runs (PTxen in HAC, IV-A). A collect takes a time that follows the pages that were
//! written, and not the size of the memory.
//!
//! The machine is that in which the program runs, or one of QEMU: those are tracked by
//! `pagemark-vm`.

use pagemark_kvm_protocol::machine_calls::Means;

use super::in_machine::InMachine;
use super::of_machine::{OfMachine, tracking};
use super::registry::{MachineTracking, MechanismEntry};
use crate::Mechanism;

/// The mechanism `kvm-ring`.
pub const ENTRY: MechanismEntry = MechanismEntry {
    name: "kvm-ring",
    description: "KVM's rings of dirty pages, for a program that pagemark-kvm runs, or a virtual machine under KVM",
    requirement: "a program that pagemark-kvm runs with PAGEMARK_KVM_DIRTY=rings in its environment, as run --kvm sets it for \
                  this mechanism, Linux 5.11; or a virtual machine that vm run starts for it, Linux 6.7",
    is_exclusive: false,
    sees_other_mappings: false,
    own_memory: |memory| Ok(Box::new(InMachine::new(Mechanism::KvmRing, Means::Ring, memory.clone())?)),
    machine: Some(MachineTracking::ByHypervisor),
    process: Some(tracking(|memory, part| OfMachine::tracker(Mechanism::KvmRing, Means::Ring, memory, part))),
};
