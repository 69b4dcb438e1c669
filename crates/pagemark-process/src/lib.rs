//! Targets that are processes: attach to a running one or start one, follow its threads, children and
//! mappings, track their memory from outside, freeze them, save and restore them.

pub mod attach;
pub mod core_file;
pub mod criu;
pub mod family;
pub mod files;
pub mod freezer;
pub mod inject;
pub mod job;
pub mod lazy;
pub mod mappings;
pub mod proc;
mod ptrace;
mod refusal;
pub mod restore;
pub mod scratch;
pub mod space;
pub mod spawn;
pub mod stdio;
pub mod target;
