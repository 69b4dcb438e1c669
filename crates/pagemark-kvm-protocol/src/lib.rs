//! What the monitor of `pagemark-kvm`, the program in its machine, and whoever saves or tracks that
//! program from outside have agreed on.
//!
//! The memory of the process has a description of its machine ([`description`], [`state`]), which
//! others read and change ([`outside`]). By it a process is made to give up its machine ([`park`]),
//! and its writes are found ([`guest_tables`], [`write_record`]). The program itself asks the
//! monitor by system calls that Linux does not have ([`machine_calls`]).
//!
//! This crate is internal: processes and trackers have its interfaces as they need them.

pub mod description;
pub mod guest_tables;
pub mod machine_calls;
pub mod outside;
pub mod park;
pub mod state;
pub mod write_record;
