//! Targets that are processes: attach to a running one or start one, follow its threads, children and
//! mappings, track their memory from outside, freeze them, save and restore them.

pub mod spawn;
pub mod files;
pub mod criu;
pub mod restore;
pub mod stdio;
pub mod attach;
pub mod family;
pub mod freezer;
pub mod inject;
pub mod mappings;
pub mod proc;
pub mod space;
mod ptrace;
pub mod scratch;
pub mod job;
pub mod target;
pub mod core_file;
pub mod lazy;
