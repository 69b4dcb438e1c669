//! The thin layer at the kernel interface: one file an interface, safe types above it.

pub mod flight;
