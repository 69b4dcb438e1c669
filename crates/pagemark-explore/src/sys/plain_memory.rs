//! Memory that nobody tracks, copied as a whole.

use std::io;
use std::ptr::NonNull;

use pagemark::sys::own_memory::Mapping;

/// A mapping of our own, with what it holds as bytes.
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

    /// A copy of all of it.
    pub fn copy(&self) -> Box<[u8]> {
        // SAFETY: it is mapped and readable. Who else writes it is the arena, on this thread, and not during this call.
        unsafe { self.memory().as_ref() }.into()
    }

    /// Makes it hold what is in `content`, which is as long.
    pub fn fill(&mut self, content: &[u8]) {
        // SAFETY: as in `copy`; the arena's users know that its content is put back.
        unsafe { self.memory().as_mut() }.copy_from_slice(content);
    }
}
