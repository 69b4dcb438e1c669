//! KVM's log of dirty pages of a machine, shared by two readers: the process that made the machine,
//! such as QEMU, for its own purposes, and Pagemark.
//!
//! KVM keeps one log for each memory slot, and allows the calls on a machine to the process that
//! made it alone. So the library `pagemark-kvm-preload` in that process makes them, and answers
//! those of the process so that it need not know of the other reader.
//!
//! | module | content |
//! |---|---|
//! | [`ring`] | KVM's rings of dirty pages, in place of its log |
//! | [`slot_log`] | the log of one slot and what each reader has still to be told: pure logic |
//! | [`machine`] | the slots of a machine, and the calls of its process on them |
//! | [`kernel`] | KVM's own calls, and whether it has the log |
//! | [`views`] | where second mappings of its memory can be |
//! | [`protocol`] | what Pagemark and the library say to each other |

pub mod kernel;
pub mod machine;
pub mod protocol;
pub mod ring;
pub mod slot_log;
pub mod views;

/// Bytes of a page of the log.
pub const PAGE: u64 = 4096;
