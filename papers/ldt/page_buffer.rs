//! Memory that a measured program writes.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use pagemark::{Address, ByteCount, PAGE_SIZE, Range};

/// A mapping of 4 KiB pages, which only its methods access.
#[derive(Debug)]
pub(crate) struct PageBuffer {
    start: NonNull<u8>,
    pages: usize,
}

impl PageBuffer {
    /// Private anonymous memory without any page yet.
    pub fn unpopulated(pages: usize) -> io::Result<PageBuffer> {
        let buffer = PageBuffer::map(pages, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1)?;
        match buffer.advise(libc::MADV_NOHUGEPAGE) {
            // The kernel was built without huge pages.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(buffer),
            advised => advised.map(|()| buffer),
        }
    }

    /// Private anonymous memory of which each page was written once.
    pub fn new(pages: usize) -> io::Result<PageBuffer> {
        let buffer = PageBuffer::unpopulated(pages)?;
        buffer.touch(1);
        Ok(buffer)
    }

    /// The first pages of a file, shared.
    pub fn of_file(file: &File, pages: usize) -> io::Result<PageBuffer> {
        PageBuffer::map(pages, libc::MAP_SHARED, file.as_raw_fd())
    }

    fn map(pages: usize, flags: libc::c_int, file: libc::c_int) -> io::Result<PageBuffer> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses touches no other memory.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), pages * PAGE_SIZE, protection, flags, file, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(PageBuffer { start, pages })
    }

    /// Number of pages.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Addresses of the whole buffer.
    pub fn range(&self) -> Range {
        let start = Address::of(self.start.as_ptr());
        start..start + ByteCount::from(self.bytes())
    }

    fn bytes(&self) -> usize {
        self.pages * PAGE_SIZE
    }

    /// Writes one byte of a page.
    #[inline]
    pub fn write(&self, page: usize, value: u8) {
        assert!(page < self.pages);
        // SAFETY: the page is in our own mapping, to which no reference exists.
        unsafe { self.start.add(page * PAGE_SIZE).write_volatile(value) }
    }

    /// Reads one byte of a page.
    #[inline]
    pub fn read(&self, page: usize) -> u8 {
        assert!(page < self.pages);
        // SAFETY: as in `write`.
        unsafe { self.start.add(page * PAGE_SIZE).read_volatile() }
    }

    /// Writes one byte of each page.
    pub fn touch(&self, value: u8) {
        (0..self.pages).for_each(|page| self.write(page, value));
    }

    /// Writes every byte, one after the other.
    pub fn fill(&self, value: u8) {
        for offset in 0..self.bytes() {
            // SAFETY: as in `write`.
            unsafe { self.start.add(offset).write_volatile(value) }
        }
    }

    /// Calls madvise for the whole buffer.
    pub fn advise(&self, advice: libc::c_int) -> io::Result<()> {
        // SAFETY: the mapping is ours, and nothing relies on its content.
        check(unsafe { libc::madvise(self.start.as_ptr().cast(), self.bytes(), advice) })
    }

    /// Forbids or allows writing.
    pub fn set_writable(&self, writable: bool) -> io::Result<()> {
        let protection = if writable { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        // SAFETY: the mapping is ours; a write while it is forbidden raises a signal, and is not
        // undefined behaviour.
        check(unsafe { libc::mprotect(self.start.as_ptr().cast(), self.bytes(), protection) })
    }

    /// Moves the mapping to the addresses of `target`, which is unmapped for it and must be as
    /// long.
    pub fn move_to(self, target: PageBuffer) -> io::Result<PageBuffer> {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        let bytes = self.bytes();
        assert_eq!(bytes, target.bytes());
        let to = target.start;
        // SAFETY: both mappings are ours and equally long, and both are given up here.
        let moved = unsafe { libc::mremap(self.start.as_ptr().cast(), bytes, bytes, flags, to.as_ptr()) };
        if moved == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // Its old addresses are no longer mapped.
        std::mem::forget(self);
        Ok(target)
    }

    /// Writes the changed pages of a shared mapping to its file.
    pub fn sync(&self) -> io::Result<()> {
        // SAFETY: msync writes to the file only.
        check(unsafe { libc::msync(self.start.as_ptr().cast(), self.bytes(), libc::MS_SYNC) })
    }
}

impl Drop for PageBuffer {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and no reference to it is left.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes()) };
    }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_moves_with_the_mapping() {
        let buffer = PageBuffer::new(8).unwrap();
        buffer.write(3, 77);
        let target = PageBuffer::unpopulated(8).unwrap();
        let range = target.range();
        let moved = buffer.move_to(target).unwrap();
        assert_eq!(moved.range(), range);
        assert_eq!((moved.read(3), moved.read(4)), (77, 1));
        moved.fill(5);
        assert!((0..8).all(|page| moved.read(page) == 5));
    }
}
