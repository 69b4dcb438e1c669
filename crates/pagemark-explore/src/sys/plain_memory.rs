//! Memory that is not tracked, and is copied as a whole.

use std::io;
use std::ptr::NonNull;

use pagemark_linux::own_memory::Mapping;

/// A private mapping whose content is accessible as bytes.
#[derive(Debug)]
pub(crate) struct PlainMemory {
    mapping: Mapping,
}

impl PlainMemory {
    pub fn new(bytes: usize) -> io::Result<PlainMemory> {
        Ok(PlainMemory { mapping: Mapping::new(bytes)? })
    }

    pub fn memory(&self) -> NonNull<[u8]> {
        NonNull::slice_from_raw_parts(self.mapping.start(), self.mapping.bytes())
    }

    /// A copy of the whole content.
    pub fn copy(&self) -> Box<[u8]> {
        // SAFETY: the memory is mapped and readable. Only the arena writes it otherwise, on this
        // thread, and not during this call.
        unsafe { self.memory().as_ref() }.into()
    }

    /// Replaces the content by `content`, which has the same length.
    pub fn fill(&mut self, content: &[u8]) {
        // SAFETY: as in `copy`; the users of the arena expect its content to be restored.
        unsafe { self.memory().as_mut() }.copy_from_slice(content);
    }
}
