//! The thin layer at the kernel interface: one file an interface, safe types above it.

#[cfg(feature = "emulate")]
pub mod alias;
pub mod area;
pub mod fault;
pub mod flight;
pub(crate) mod futex;
pub mod gate;
pub mod memory;
pub mod own_memory;
pub mod pagemap;
pub mod pidfd;
pub(crate) mod scratch;
pub mod signals;
pub(crate) mod slab;
pub(crate) mod slots;
pub(crate) mod sync;
pub mod userfaultfd;
