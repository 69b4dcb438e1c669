//! `kvm-emulate`: pages stay protected in the page tables of the machine in which the program runs.
//! The machine's monitor executes each store with the emulator of [`emulate`](super::emulate), and
//! records the words that it writes (Emulxen in HAC, IV-C).

use pagemark_kvm_protocol::machine_calls::Means;

use super::in_machine::InMachine;
use super::registry::MechanismEntry;
use crate::Mechanism;

/// The mechanism `kvm-emulate`.
pub const ENTRY: MechanismEntry = MechanismEntry {
    name: "kvm-emulate",
    description: "each store to a protected page is executed by the monitor of pagemark-kvm, and recorded by the word",
    requirement: "a program that pagemark-kvm runs",
    is_exclusive: false,
    sees_other_mappings: false,
    own_memory: |memory| Ok(Box::new(InMachine::new(Mechanism::KvmEmulate, Means::Emulate, memory.clone())?)),
    machine: None,
    process: None,
};
