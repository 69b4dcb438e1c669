//! What is done with bare memory and registers: one file an interface, safe types above it.

pub(crate) mod alternate_stack;
pub(crate) mod arena;
pub(crate) mod fiber;
pub(crate) mod plain_memory;
pub(crate) mod switch;
