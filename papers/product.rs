//! Pagemark beside what a user would use in its place. These measurements reproduce no paper.

mod criu_dump;
mod delta_turns;
pub mod deltas;
pub mod peers;
pub mod process;
pub mod redis;
pub mod restore;
mod trackee;
pub mod vm;
pub mod workload;
