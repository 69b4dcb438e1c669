//! Another process's memory: attaching to processes, stopping and freezing them, making system
//! calls in them, and tracking what they write.
//!
//! Nothing here leaves a process stopped, changed or tracked if Pagemark fails or is killed. State
//! other than memory is not this crate's: processes with all of their state are the crate
//! `pagemark-process`, virtual machines `pagemark-vm`.

pub mod attach;
pub mod cgroups;
pub mod error;
pub mod freezer;
pub mod identity;
pub mod inject;
pub mod leaving;
pub mod namespace_ids;
pub mod objects;
pub mod parked;
pub mod preload;
pub mod recorded_pid;
pub mod space;

pub use error::{Error, ErrorKind, Object, Result};
pub use recorded_pid::{PidsHere, RecordedPid};
