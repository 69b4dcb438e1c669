//! Memory for pages in flight, mapped before the target is frozen so that copying meets no page fault.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::ptr::NonNull;

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};

/// Kept populated from one checkpoint to the next, bytes.
const KEPT: usize = 2 << 20;

/// A buffer that is grown and populated ahead of use, and given back to the kernel after it.
#[derive(Default)]
pub struct FlightBuffer {
    mapping: Option<(NonNull<libc::c_void>, usize)>,
    /// Bytes that the last capture needed: the guess for the next one.
    last_used: usize,
}

// SAFETY: the mapping is owned by this value alone, and any thread may access or unmap it.
unsafe impl Send for FlightBuffer {}

impl FlightBuffer {
    /// Populates what the next capture will probably need.
    pub fn prepare(&mut self) {
        let likely = (self.last_used + self.last_used / 4).max(KEPT);
        self.reserve(likely);
        if let Some((start, length)) = self.mapping {
            // A kernel without it (before 5.14) populates page by page as the copy goes.
            // SAFETY: the range lies in our own mapping; populating changes no content.
            let _ = unsafe { libc::madvise(start.as_ptr(), likely.min(length), libc::MADV_POPULATE_WRITE) };
        }
        self.last_used = 0;
    }

    /// Makes room for `bytes`. What the buffer held may be lost.
    ///
    /// # Panics
    /// If the kernel gives no address space, as a failed allocation does.
    pub fn reserve(&mut self, bytes: usize) {
        self.last_used = self.last_used.max(bytes);
        if self.mapping.is_some_and(|(_, length)| length >= bytes) {
            return;
        }
        self.unmap();
        let length = bytes.next_multiple_of(2 << 20);
        let Some(size) = NonZeroUsize::new(length) else { return };
        // SAFETY: a new private anonymous mapping at an address that the kernel chooses touches no other memory.
        let start = unsafe {
            mmap_anonymous(
                None,
                size,
                ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
                MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE,
            )
        };
        let Ok(start) = start else { std::alloc::handle_alloc_error(std::alloc::Layout::new::<[u8; 4096]>()) };
        // Huge pages make populating cheap; without them it merely costs more.
        // SAFETY: the range is the mapping just made.
        let _ = unsafe { madvise(start, length, MmapAdvise::MADV_HUGEPAGE) };
        self.mapping = Some((start, length));
    }

    /// A part of what was reserved.
    ///
    /// # Panics
    /// If it was not reserved.
    pub fn slice(&mut self, part: Range<usize>) -> &mut [u8] {
        let (start, length) = self.mapping.unwrap_or((NonNull::dangling(), 0));
        assert!(part.start <= part.end && part.end <= length, "the part {part:?} was not reserved");
        // SAFETY: the part lies in our own readable and writable mapping (or is empty), and the borrow of `self` keeps
        // it mapped and unaliased.
        unsafe { std::slice::from_raw_parts_mut(start.as_ptr().cast::<u8>().add(part.start), part.len()) }
    }

    /// Gives the memory back, but for a little.
    pub fn release(&mut self) {
        if let Some((start, length)) = self.mapping
            && length > KEPT
        {
            // SAFETY: the range lies in our own mapping, and `&mut self` shows that no slice of it is in use.
            let _ = unsafe { madvise(start.byte_add(KEPT), length - KEPT, MmapAdvise::MADV_DONTNEED) };
        }
    }

    fn unmap(&mut self) {
        if let Some((start, length)) = self.mapping.take() {
            // SAFETY: the mapping is ours and no slice of it can be borrowed now.
            let _ = unsafe { munmap(start, length) };
        }
    }
}

impl Drop for FlightBuffer {
    fn drop(&mut self) {
        self.unmap();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_and_keeps_what_is_written_until_released() {
        let mut buffer = FlightBuffer::default();
        assert!(buffer.slice(0..0).is_empty());
        buffer.prepare();
        for bytes in [5000, 3 << 20, 100] {
            buffer.reserve(bytes);
            buffer.slice(0..bytes).fill(7);
            assert!(buffer.slice(0..bytes).iter().all(|&byte| byte == 7));
            buffer.release();
        }
    }

    #[test]
    #[should_panic(expected = "was not reserved")]
    fn refuses_more_than_was_reserved() {
        let mut buffer = FlightBuffer::default();
        buffer.reserve(4096);
        buffer.slice(0..(4 << 20));
    }
}
