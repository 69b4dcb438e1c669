//! Memory for content, in pieces of one size that are freed as a whole.

use std::io;
use std::ops::Range;
use std::ptr::NonNull;

/// Bytes of a slab: a huge page.
pub const SLAB_BYTES: usize = if cfg!(miri) { 64 << 10 } else { 2 << 20 };

/// Memory of [`SLAB_BYTES`], aligned to its size, and filled with zeros at first.
#[derive(Debug)]
pub struct Slab {
    start: NonNull<u8>,
}

// SAFETY: the memory is owned by this value alone, and any thread may access or unmap it.
unsafe impl Send for Slab {}
// SAFETY: through a shared reference it is only read.
unsafe impl Sync for Slab {}

impl Slab {
    /// Maps a slab. With `huge`, it asks the kernel for a huge page, which makes the first writes
    /// cheap and takes all of the memory at once.
    ///
    /// # Errors
    /// The kernel gives no memory.
    pub fn new(huge: bool) -> io::Result<Slab> {
        let slab = Slab { start: map()? };
        #[cfg(not(miri))]
        if huge {
            // Without huge pages the first writes merely cost more.
            // SAFETY: the range is the mapping just made.
            let _ = unsafe { libc::madvise(slab.start.as_ptr().cast(), SLAB_BYTES, libc::MADV_HUGEPAGE) };
        }
        #[cfg(miri)]
        let _ = huge;
        Ok(slab)
    }

    /// A part of it.
    ///
    /// # Panics
    /// If the part is not within the slab.
    pub fn part(&self, part: Range<usize>) -> &[u8] {
        assert!(part.start <= part.end && part.end <= SLAB_BYTES, "{part:?} of a slab");
        // SAFETY: the part lies in our own initialized memory, and the borrow of `self` keeps it
        // from being written.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(part.start), part.len()) }
    }

    /// A part of it, to be written.
    ///
    /// # Panics
    /// If the part is not within the slab.
    pub fn part_mut(&mut self, part: Range<usize>) -> &mut [u8] {
        assert!(part.start <= part.end && part.end <= SLAB_BYTES, "{part:?} of a slab");
        // SAFETY: the part lies in our own initialized memory, and the borrow of `self` keeps it
        // unaliased.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(part.start), part.len()) }
    }

    /// Frees the memory of the whole pages in a part. The content of the part becomes unspecified.
    ///
    /// # Panics
    /// If the part is not within the slab.
    pub fn discard(&mut self, part: Range<usize>) {
        assert!(part.end <= SLAB_BYTES, "{part:?} of a slab");
        let pages = part.start.next_multiple_of(crate::PAGE_SIZE)..part.end / crate::PAGE_SIZE * crate::PAGE_SIZE;
        if pages.is_empty() {
            return;
        }
        #[cfg(not(miri))]
        // SAFETY: the pages lie in our own private anonymous mapping, where this leaves zeros, and
        // no slice of it is in use.
        let _ = unsafe { libc::madvise(self.start.as_ptr().add(pages.start).cast(), pages.len(), libc::MADV_DONTNEED) };
    }
}

#[cfg(not(miri))]
fn map() -> io::Result<NonNull<u8>> {
    // Twice the size, of which the aligned half is kept. SAFETY: a new private anonymous mapping at
    // an address that the kernel chooses touches no other memory.
    let mapped = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            2 * SLAB_BYTES,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if mapped == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let ahead = mapped.addr().next_multiple_of(SLAB_BYTES) - mapped.addr();
    // SAFETY: both parts lie in the mapping just made, outside of the half that is kept; `ahead` is
    // less than SLAB_BYTES.
    unsafe {
        if ahead > 0 {
            libc::munmap(mapped, ahead);
        }
        libc::munmap(mapped.byte_add(ahead + SLAB_BYTES), SLAB_BYTES - ahead);
        NonNull::new(mapped.byte_add(ahead).cast()).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))
    }
}

impl Drop for Slab {
    #[cfg(not(miri))]
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and no slice of it can be borrowed now.
        unsafe { libc::munmap(self.start.as_ptr().cast(), SLAB_BYTES) };
    }

    #[cfg(miri)]
    fn drop(&mut self) {
        // SAFETY: allocated in `map` with the same layout, and no slice of it can be borrowed now.
        unsafe { std::alloc::dealloc(self.start.as_ptr(), LAYOUT) };
    }
}

/// Miri knows no `mmap` of aligned memory.
#[cfg(miri)]
const LAYOUT: std::alloc::Layout = match std::alloc::Layout::from_size_align(SLAB_BYTES, SLAB_BYTES) {
    Ok(layout) => layout,
    Err(_) => unreachable!(),
};

#[cfg(miri)]
fn map() -> io::Result<NonNull<u8>> {
    // SAFETY: the layout is not empty.
    let start = unsafe { std::alloc::alloc_zeroed(LAYOUT) };
    NonNull::new(start).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holds_what_is_written_until_it_is_discarded() {
        let mut slab = Slab::new(false).unwrap();
        assert_eq!(slab.part(0..1).as_ptr().addr() % SLAB_BYTES, 0);
        assert!(slab.part(0..SLAB_BYTES).iter().all(|&byte| byte == 0));
        slab.part_mut(0..SLAB_BYTES).fill(7);
        slab.discard(100..3 * crate::PAGE_SIZE + 1);
        assert!(slab.part(0..crate::PAGE_SIZE).iter().all(|&byte| byte == 7), "not a whole page");
        assert!(slab.part(3 * crate::PAGE_SIZE..SLAB_BYTES).iter().all(|&byte| byte == 7));
        if !cfg!(miri) {
            assert!(slab.part(crate::PAGE_SIZE..3 * crate::PAGE_SIZE).iter().all(|&byte| byte == 0));
        }
    }
}
