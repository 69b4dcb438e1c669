//! Whether the process is the one that it was, or a child made by `fork`, without a system call.

use std::io;
use std::sync::atomic::{AtomicU8, Ordering};

use super::own_memory::Mapping;
use crate::PAGE_SIZE;

/// A mark that the process has which made it, and that its children made by `fork` lack.
#[derive(Debug)]
pub struct ForkMark {
    /// A page that the kernel fills with zeros in children (`MADV_WIPEONFORK`, Linux 4.14).
    page: Mapping,
}

impl ForkMark {
    /// Marks this process. Where the kernel refuses to clear the page in children, nothing is
    /// marked.
    ///
    /// # Errors
    /// There is no room for a page.
    pub fn new() -> io::Result<ForkMark> {
        let page = Mapping::new(PAGE_SIZE)?;
        // SAFETY: the mapping is ours, and only what a child sees of it changes.
        let is_cleared =
            unsafe { libc::madvise(page.start().as_ptr().cast(), page.bytes(), libc::MADV_WIPEONFORK) } == 0;
        let mark = ForkMark { page };
        mark.byte().store(u8::from(is_cleared), Ordering::Relaxed);
        Ok(mark)
    }

    /// True in the process that made the mark; false in a child made by `fork`, and where nothing
    /// is marked.
    #[inline]
    pub fn is_here(&self) -> bool {
        self.byte().load(Ordering::Relaxed) != 0
    }

    #[inline]
    fn byte(&self) -> &AtomicU8 {
        // SAFETY: the page is mapped as long as `self` exists, and is accessed as an atomic number
        // only.
        unsafe { AtomicU8::from_ptr(self.page.start().as_ptr()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_lacks_the_mark() {
        let mark = ForkMark::new().unwrap();
        assert!(mark.is_here());
        // SAFETY: the child only reads memory and exits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: ends the child without its handlers.
            unsafe { libc::_exit(i32::from(mark.is_here())) };
        }
        let mut status = 0;
        // SAFETY: waits for the child that was just made.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "status {status:#x}");
        assert!(mark.is_here());
    }
}
