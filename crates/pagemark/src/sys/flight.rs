//! Memory for pages in flight, mapped before it is needed so that copying meets few page faults.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::ptr::NonNull;

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};

/// What huge pages are aligned to, bytes.
const HUGE_PAGE: usize = 2 << 20;

/// A piece of memory that pages are copied to.
pub struct FlightBuffer {
    start: NonNull<libc::c_void>,
    length: usize,
}

// SAFETY: the mapping is owned by this value alone, and any thread may access or unmap it.
unsafe impl Send for FlightBuffer {}

impl FlightBuffer {
    /// Maps room for `bytes`. It takes memory only as it is written.
    ///
    /// # Panics
    /// If the kernel gives no address space, as a failed allocation does.
    pub fn new(bytes: usize) -> FlightBuffer {
        let length = bytes.next_multiple_of(HUGE_PAGE);
        let size = NonZeroUsize::new(length).unwrap_or(NonZeroUsize::MIN);
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
        // Huge pages make the first write to it cheap; without them it merely costs more.
        // SAFETY: the range is the mapping just made.
        let _ = unsafe { madvise(start, size.get(), MmapAdvise::MADV_HUGEPAGE) };
        FlightBuffer { start, length: size.get() }
    }

    /// Bytes of room.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Has the kernel give memory for the part ahead of its use.
    pub fn populate(&mut self, part: Range<usize>) {
        let part = self.slice(part);
        // A kernel without it (before 5.14) gives it page by page as the copy goes.
        // SAFETY: the part lies in our own mapping; populating changes no content.
        let _ = unsafe { libc::madvise(aligned(part.as_mut_ptr()), part.len(), libc::MADV_POPULATE_WRITE) };
    }

    /// A part of it.
    ///
    /// # Panics
    /// If it is not that long.
    pub fn slice(&mut self, part: Range<usize>) -> &mut [u8] {
        assert!(part.start <= part.end && part.end <= self.length, "{part:?} of a buffer of {} bytes", self.length);
        // SAFETY: the part lies in our own readable and writable mapping, and the borrow of `self` keeps it mapped and
        // unaliased.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().cast::<u8>().add(part.start), part.len()) }
    }

    /// Leaves the memory behind the first `kept` bytes to the kernel: it takes it as soon as somebody needs it, without
    /// writing it anywhere, and what it has not taken is used again at no cost. Content there is unspecified from now on.
    ///
    /// Memory that is given back and taken anew costs its zeroing each time, and under a hypervisor that takes back what a
    /// guest frees, much more than that.
    pub fn lend_behind(&mut self, kept: usize) {
        let kept = kept.next_multiple_of(HUGE_PAGE).min(self.length);
        if kept < self.length {
            // SAFETY: the range lies in our own mapping, and `&mut self` shows that no slice of it is in use.
            let _ = unsafe { madvise(self.start.byte_add(kept), self.length - kept, MmapAdvise::MADV_FREE) };
        }
    }
}

/// What the machine has to spare, bytes: its memory that is free, or holds only what can be read again. Zero where that is not told.
pub fn available_bytes() -> usize {
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = memory.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_whitespace().next()).and_then(|kib| kib.parse::<usize>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

/// The page in which an address lies.
fn aligned(address: *mut u8) -> *mut libc::c_void {
    address.map_addr(|address| address & !(crate::PAGE_SIZE - 1)).cast()
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

    #[test]
    fn keeps_what_is_written_and_lends_the_rest() {
        let lent_kib = || {
            let rollup = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
            let line = rollup.lines().find_map(|line| line.strip_prefix("LazyFree:")).unwrap().trim();
            line.trim_end_matches(" kB").parse::<usize>().unwrap()
        };
        let mut buffer = FlightBuffer::new(5 << 20);
        assert_eq!(buffer.length(), 6 << 20);
        buffer.populate(0..8192);
        buffer.slice(0..6 << 20).fill(7);
        buffer.lend_behind(1);
        assert!(lent_kib() >= 4 << 10);
        assert!(buffer.slice(0..2 << 20).iter().all(|&byte| byte == 7));
        buffer.slice(2 << 20..6 << 20).fill(8);
        assert!(buffer.slice(2 << 20..6 << 20).iter().all(|&byte| byte == 8));
    }

    #[test]
    #[should_panic(expected = "of a buffer of")]
    fn refuses_more_than_it_has() {
        FlightBuffer::new(4096).slice(0..(4 << 20));
    }
}
