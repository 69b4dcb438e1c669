//! Virtual machines as targets: an unmodified QEMU, attached to over its monitor socket (QMP).
//!
//! A checkpoint holds each block of the machine's memory (RAM, ROM shadows, video memory) as a
//! space, and the state of its processors and devices. Memory is tracked from outside, as that of
//! any process. While the machine is stopped, QEMU writes the state of the devices (about 1 ms),
//! and the last written pages are copied. [`Restore`] starts a QEMU with the same command line and
//! gives it both.
//!
//! The work is that of "Intel Page Modification Logging for Lightweight Continuous Checkpointing"
//! (PML, sections 2.4 and 3), without changes to QEMU or the kernel.
//!
//! Disks belong to checkpoints: what the machine wrote until the stop, as a dirty bitmap of QEMU
//! recorded it. A restore writes new images beside those of the machine.
//!
//! ```no_run
//! use std::path::Path;
//!
//! use pagemark::repository::Repository;
//! use pagemark::track::Scope;
//! use pagemark::{Job, JobOptions, Mechanism};
//! use pagemark_vm::VmTarget;
//!
//! let target = VmTarget::attach(Path::new("vm1.qmp"), Mechanism::choose(Scope::Machine))?;
//! let repository = Repository::create(Path::new("checkpoints"))?;
//! let mut job = Job::new(target, repository, JobOptions::new("vm1"));
//! let taken = job.checkpoint()?;
//! println!("checkpoint {} after {} us of downtime", taken.sequence, taken.cost.downtime_us);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod checkpoint;
mod error;
mod export;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod memory;
mod qemu;
mod restore;

pub use checkpoint::deterministic::{deterministic_command, deterministic_disks};
pub use checkpoint::input_list::{InputList, deterministic_inputs};
pub use checkpoint::run::OwnQemu;
pub use checkpoint::simulator::simulator_library;
pub use checkpoint::target::{EventHandler, StopTimes, VmTarget};
pub use error::{Error, ErrorKind, Object, Result};
pub use export::core_file::export_core;
pub use export::{QemuExport, export_qemu, export_qemu_to};
pub use memory::kvm_log::check_kvm;
pub use memory::probe::cost;
pub use memory::write_watch::{Activation, can_hold_writes};
pub use qemu::command_line::machine_name;
pub use qemu::event::MachineEvent;
pub use qemu::machine::restored_birth;
pub use qemu::monitor_sockets::monitor_sockets;
pub use restore::fork::ForkedMachine;
pub use restore::fork_arguments::Replacement;
pub use restore::{GatedMachine, LazyMachine, PreparedMachine, Restore, RunningMachine};

/// QEMU, and the parts of a checkpoint and of a restore, for the crate that runs machines again
/// from their checkpoints. No interface of the library.
#[doc(hidden)]
pub mod parts {
    pub use crate::checkpoint::changes::Changes;
    pub use crate::checkpoint::deterministic::arguments_of_simulation;
    pub use crate::checkpoint::given_files::{add_device_file, save_devices};
    pub use crate::checkpoint::map_file::map_privately;
    pub use crate::checkpoint::simulator::{COMPLETES_REQUESTS, completes_requests, option_word, shared_file};
    pub use crate::memory::ram_blocks::RamBlock;
    pub use crate::qemu::command::text;
    pub use crate::qemu::command_line::{arguments_of_restore, records_inputs};
    pub use crate::qemu::machine::Machine;
    pub use crate::qemu::new_qemu::{NewQemu, Streams};
    pub use crate::restore::demanded::{DemandedBlock, DemandedMemory, MissingMemory, SharedPages};
    pub use crate::restore::images::copy_pages;
    pub use crate::restore::served_disk::ServedDisk;
    pub use crate::restore::{Fill, Progress, load_devices, pair};
}
