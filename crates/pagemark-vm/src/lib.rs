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

mod block_file;
mod changes;
mod command;
mod command_line;
mod core_file;
mod debugged;
mod demanded;
mod deterministic;
mod disks;
mod drive;
mod end_guard;
mod ending;
mod error;
mod event;
mod export;
mod fork;
mod fork_arguments;
mod given_files;
mod guard;
mod images;
mod input_list;
mod instruction_count;
mod interval;
mod kvm_log;
mod lazy;
mod machine;
mod map_file;
mod medium;
mod memory_map;
mod migration_stream;
mod monitor_sockets;
mod nbd;
mod node_hold;
mod node_memory;
mod owner;
mod page_set;
mod preloaded;
mod probe;
mod qmp;
mod ram_blocks;
mod registers;
mod restore;
mod run;
mod served_disk;
mod simulator;
mod started;
mod target;
mod views;
mod write_watch;

pub use command_line::machine_name;
pub use core_file::export_core;
pub use debugged::{DebuggedMachine, GdbAddress};
pub use deterministic::{deterministic_command, deterministic_disks};
pub use error::{Error, ErrorKind, Object, Result};
pub use event::MachineEvent;
pub use export::{QemuExport, export_qemu};
pub use fork::ForkedMachine;
pub use fork_arguments::Replacement;
pub use input_list::{InputList, deterministic_inputs};
pub use interval::{Interval, Observer, SimulatedInterval, instructions_of};
pub use kvm_log::check_kvm;
pub use monitor_sockets::monitor_sockets;
pub use node_memory::default_shared_directory;
pub use probe::cost;
pub use restore::{LazyMachine, Restore, RunningMachine};
pub use run::OwnQemu;
pub use simulator::simulator_library;
pub use target::{EventHandler, StopTimes, VmTarget};
pub use write_watch::{Activation, can_hold_writes};
