//! What an instruction does to memory.

/// An access of an instruction to memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Access {
    /// How long it is.
    pub(crate) bytes: u32,
    /// False for a read.
    pub(crate) is_store: bool,
    /// The virtual address.
    pub(crate) address: u64,
    /// The physical address; None for an access to a device.
    pub(crate) physical: Option<u64>,
}
