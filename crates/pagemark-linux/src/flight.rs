//! Memory for pages in flight, which is mapped in advance so that copying takes few page faults.

use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::ptr::NonNull;

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, mprotect, munmap};

use super::{populate, room};

/// Alignment of huge pages, bytes.
const HUGE_PAGE: usize = 2 << 20;

/// A piece of memory that pages are copied to.
pub struct FlightBuffer {
    start: NonNull<libc::c_void>,
    length: usize,
    /// The part from the beginning that may be accessed. `mlockall` fills no more than that.
    open: usize,
}

// SAFETY: the mapping is owned by this value alone, and any thread may access or unmap it.
unsafe impl Send for FlightBuffer {}

impl FlightBuffer {
    /// Maps room for `bytes`, of which nothing is open.
    ///
    /// # Errors
    /// `ENOMEM`
    pub fn new(bytes: usize) -> io::Result<FlightBuffer> {
        let length = bytes.checked_next_multiple_of(HUGE_PAGE).ok_or_else(room::none)?;
        let size = NonZeroUsize::new(length).unwrap_or(NonZeroUsize::MIN);
        // SAFETY: a new private anonymous mapping at an address that the kernel chooses touches no
        // other memory.
        let start = unsafe {
            mmap_anonymous(None, size, ProtFlags::PROT_NONE, MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE)
        };
        let start = start?;
        // Huge pages make the first write to it cheap; without them it merely costs more.
        // SAFETY: the range is the mapping just made.
        let _ = unsafe { madvise(start, size.get(), MmapAdvise::MADV_HUGEPAGE) };
        // As long as a child shares the pages, each first write to one copies it: that costs
        // several times as much as the copy of a page that is wanted. A child finds zeros.
        // SAFETY: as above.
        let _ = unsafe { madvise(start, size.get(), MmapAdvise::MADV_WIPEONFORK) };
        Ok(FlightBuffer { start, length: size.get(), open: 0 })
    }

    /// Bytes of room.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Opens the first `bytes`. They take memory only as they are written.
    ///
    /// # Errors
    /// `ENOMEM`. `EINVAL`: the buffer is shorter.
    pub fn open(&mut self, bytes: usize) -> io::Result<()> {
        if bytes <= self.open {
            return Ok(());
        }
        if bytes > self.length {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let end = bytes.next_multiple_of(HUGE_PAGE);
        // SAFETY: the range lies in our own mapping, whose length is a multiple of huge pages, and more
        // access than before breaks nobody's expectation.
        unsafe {
            let start = self.start.byte_add(self.open);
            mprotect(start, end - self.open, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE)?;
        }
        self.open = end;
        Ok(())
    }

    /// Populates a part before its use.
    pub fn populate(&mut self, part: Range<usize>) {
        populate::for_writing(self.slice(part));
    }

    /// A part of it.
    ///
    /// # Panics
    /// If the part is not within what is open of the buffer.
    pub fn slice(&mut self, part: Range<usize>) -> &mut [u8] {
        assert!(part.start <= part.end && part.end <= self.open, "{part:?} of a buffer of {} bytes", self.open);
        // SAFETY: the part lies in the readable and writable part of our own mapping, and the borrow of `self`
        // keeps it mapped and unaliased.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().cast::<u8>().add(part.start), part.len()) }
    }

    /// Lends the memory behind the first `kept` bytes to the kernel (`MADV_FREE`). The kernel takes
    /// it when memory is needed, and pages that it has not taken are reused at no cost. The content
    /// there becomes unspecified.
    ///
    /// Memory that is freed and allocated again costs its zeroing each time, and much more under a
    /// hypervisor that reclaims freed memory of its guests.
    ///
    /// # Safety
    /// What is behind is written before it is read again: until then it can change at any moment.
    pub unsafe fn lend_behind(&mut self, kept: usize) {
        let kept = kept.next_multiple_of(HUGE_PAGE).min(self.length);
        if kept < self.length {
            // SAFETY: the range lies in our own mapping, and `&mut self` shows that no slice of it
            // is in use.
            let _ = unsafe { madvise(self.start.byte_add(kept), self.length - kept, MmapAdvise::MADV_FREE) };
        }
    }
}

impl Drop for FlightBuffer {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and no slice of it can be borrowed now.
        let _ = unsafe { munmap(self.start, self.length) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proc::{self, Fields};

    #[test]
    fn keeps_what_is_written_and_lends_the_rest() {
        let lent_kib = || {
            let rollup = Fields::read(proc::own_path("smaps_rollup")).unwrap();
            rollup.number::<usize>("LazyFree").unwrap()
        };
        let mut buffer = FlightBuffer::new(5 << 20).unwrap();
        assert_eq!(buffer.length(), 6 << 20);
        buffer.open(6 << 20).unwrap();
        buffer.populate(0..8192);
        buffer.slice(0..6 << 20).fill(7);
        // SAFETY: nobody reads what is behind.
        unsafe { buffer.lend_behind(1) };
        // The kernel handles the last pages later.
        assert!(lent_kib() >= 3 << 10);
        assert!(buffer.slice(0..2 << 20).iter().all(|&byte| byte == 7));
        buffer.slice(2 << 20..6 << 20).fill(8);
        assert!(buffer.slice(2 << 20..6 << 20).iter().all(|&byte| byte == 8));
    }

    /// A child that lives on would make each write copy a page.
    #[test]
    fn a_child_does_not_share_it() {
        let mut buffer = FlightBuffer::new(2 << 20).unwrap();
        buffer.open(2 << 20).unwrap();
        buffer.slice(0..2 << 20).fill(7);
        // SAFETY: the child reads a byte and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let sum = buffer.slice(0..2 << 20).iter().map(|&byte| u32::from(byte)).sum::<u32>();
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(sum != 0)) };
        }
        let mut status = -1;
        // SAFETY: the child is ours.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0, "the child has the content");
        assert!(buffer.slice(0..2 << 20).iter().all(|&byte| byte == 7));
    }

    #[test]
    #[should_panic(expected = "of a buffer of")]
    fn refuses_more_than_it_has() {
        FlightBuffer::new(4096).unwrap().slice(0..(4 << 20));
    }
}
