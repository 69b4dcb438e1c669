//! Process trees as targets: attaching to running processes, tracking their memory from outside,
//! freezing them, saving their state, and restoring them.
//!
//! Memory is Pagemark's: it is tracked, read and stored by the core crate. CRIU saves and restores
//! everything else ([`criu`]); where there is no CRIU, memory and registers alone can be saved.
//! Nothing here leaves a target stopped, changed or tracked if Pagemark fails or is killed.
//!
//! # Example
//!
//! A checkpoint of a running process:
//!
//! ```no_run
//! use std::path::Path;
//! use std::sync::Arc;
//!
//! use pagemark::repository::Repository;
//! use pagemark::track::Scope;
//! use pagemark::{Job, JobOptions, Mechanism};
//! use pagemark_process::criu::DumpOptions;
//! use pagemark_process::saver::CriuSaver;
//! use pagemark_process::target::ProcessTarget;
//!
//! let repository = Repository::open_or_create(Path::new("checkpoints"))?;
//! let saver = CriuSaver::find(DumpOptions::default())?;
//! let target = ProcessTarget::attach(4711, Mechanism::choose(Scope::Process), Arc::new(saver))?;
//! let mut job = Job::new(target, repository, JobOptions::new("simulate"));
//! job.checkpoint()?; // everything
//! job.checkpoint()?; // the pages written since
//! job.detach();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod attach;
pub mod cgroups;
pub mod container;
pub mod core_file;
pub mod criu;
mod error;
pub mod files;
pub mod freezer;
pub mod helper;
pub mod inject;
mod leaving;
pub mod objects;
mod parked;
mod plain_proc;
pub mod preload;
mod ptrace;
mod refusal;
pub mod restore;
pub mod saver;
pub mod scratch;
pub mod space;
pub mod spawn;
pub mod target;
pub mod terminal;
mod tree;

pub use error::{Error, ErrorKind, Object, Result};
