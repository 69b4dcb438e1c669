//! A machine's memory: the blocks that QEMU has for it, and how writes to them are found.

pub(crate) mod block_file;
pub(crate) mod kvm_log;
pub(crate) mod memory_map;
pub(crate) mod page_set;
pub(crate) mod preloaded;
pub(crate) mod probe;
pub(crate) mod ram_blocks;
pub(crate) mod registers;
pub(crate) mod views;
pub(crate) mod write_watch;
