//! The thin layer at the kernel interface: one file an interface, safe types above it.

#[cfg(feature = "emulate")]
pub mod alias;
pub mod exit_watch;
pub mod fault;
pub mod flight;
pub(crate) mod futex;
pub mod gate;
pub mod interface;
pub mod memory;
pub mod own_mappings;
pub mod own_memory;
pub mod pagemap;
pub(crate) mod per_process;
pub mod pidfd;
pub(crate) mod populate;
pub mod proc;
pub(crate) mod random;
pub(crate) mod scratch;
pub mod shared_bytes;
pub mod signals;
pub(crate) mod slab;
pub(crate) mod slots;
pub mod sparse;
pub(crate) mod sync;
pub mod userfaultfd;
pub(crate) mod write_access;
