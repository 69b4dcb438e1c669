//! Access to bare memory and registers: one interface a file, with safe types above it.

pub(crate) mod alternate_stack;
pub(crate) mod arena;
pub(crate) mod fiber;
pub(crate) mod plain_memory;
pub(crate) mod switch;
