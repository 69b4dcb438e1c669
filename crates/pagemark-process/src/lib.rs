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
//! use pagemark_process::attach;
//! use pagemark_process::criu::DumpOptions;
//! use pagemark_process::saver::CriuSaver;
//! use pagemark_process::target::ProcessTarget;
//!
//! let repository = Repository::open_or_create(Path::new("checkpoints"))?;
//! let saver = CriuSaver::find(DumpOptions::default())?;
//! let process = attach::check(4711)?;
//! let target = ProcessTarget::attach(process, Mechanism::choose(Scope::Process), Arc::new(saver))?;
//! let mut job = Job::new(target, repository, JobOptions::new("simulate"));
//! job.checkpoint()?; // everything
//! job.checkpoint()?; // the pages written since
//! job.detach();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod container;
pub mod core_file;
pub mod criu;
pub mod files;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod refusal;
pub mod restore;
pub mod saver;
pub mod spawn;
mod state;
pub mod target;
pub mod terminal;
mod tree;

pub use pagemark_trace::{Error, ErrorKind, Object, RecordedPid, Result, attach};
