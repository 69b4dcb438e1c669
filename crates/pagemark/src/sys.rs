//! The thin layer at the kernel interface: one file an interface, safe types above it.

pub mod flight;
pub mod memory;
pub mod pagemap;
pub(crate) mod scratch;
pub mod userfaultfd;
