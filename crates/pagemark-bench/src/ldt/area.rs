//! Memory that the measured program writes, and what else a kernel does with it.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use pagemark::{PAGE_SIZE, Range};

/// A mapping of pages of 4 KiB that is ours alone. Its memory is accessed only through the methods here.
#[derive(Debug)]
pub(super) struct Area {
    start: NonNull<u8>,
    pages: usize,
}

impl Area {
    /// Private anonymous memory, none of it populated.
    pub fn unpopulated(pages: usize) -> io::Result<Area> {
        let area = Area::map(pages, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1)?;
        match area.advise(libc::MADV_NOHUGEPAGE) {
            // A kernel without huge pages.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(area),
            advised => advised.map(|()| area),
        }
    }

    /// Private anonymous memory, each page written once.
    pub fn new(pages: usize) -> io::Result<Area> {
        let area = Area::unpopulated(pages)?;
        area.touch(1);
        Ok(area)
    }

    /// The first pages of a file, shared.
    pub fn of_file(file: &File, pages: usize) -> io::Result<Area> {
        Area::map(pages, libc::MAP_SHARED, file.as_raw_fd())
    }

    fn map(pages: usize, flags: libc::c_int, file: libc::c_int) -> io::Result<Area> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses touches no other memory.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), pages * PAGE_SIZE, protection, flags, file, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Area { start, pages })
    }

    /// How many pages it has.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Its addresses.
    pub fn range(&self) -> Range {
        let start = self.start.as_ptr() as u64;
        start..start + self.bytes() as u64
    }

    fn bytes(&self) -> usize {
        self.pages * PAGE_SIZE
    }

    /// Writes one byte of a page.
    #[inline]
    pub fn write(&self, page: usize, value: u8) {
        assert!(page < self.pages);
        // SAFETY: the page lies within our own mapping, to which no reference exists anywhere.
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

    /// Advises the kernel about all of it.
    pub fn advise(&self, advice: libc::c_int) -> io::Result<()> {
        // SAFETY: the memory is ours, and nobody relies on its content.
        check(unsafe { libc::madvise(self.start.as_ptr().cast(), self.bytes(), advice) })
    }

    /// Forbids or allows writing.
    pub fn set_writable(&self, writable: bool) -> io::Result<()> {
        let protection = if writable { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        // SAFETY: the memory is ours; a write while it is forbidden would be a signal, not undefined.
        check(unsafe { libc::mprotect(self.start.as_ptr().cast(), self.bytes(), protection) })
    }

    /// Moves it to another address, which `elsewhere` gives up for it.
    pub fn move_to(self, elsewhere: Area) -> io::Result<Area> {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        let bytes = self.bytes();
        assert_eq!(bytes, elsewhere.bytes());
        let to = elsewhere.start;
        // SAFETY: both mappings are ours, as long as each other, and given up here.
        let moved = unsafe { libc::mremap(self.start.as_ptr().cast(), bytes, bytes, flags, to.as_ptr()) };
        if moved == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // Its old place is mapped no more.
        std::mem::forget(self);
        Ok(elsewhere)
    }

    /// Writes what was changed to the file.
    pub fn sync(&self) -> io::Result<()> {
        // SAFETY: writes nothing but the file.
        check(unsafe { libc::msync(self.start.as_ptr().cast(), self.bytes(), libc::MS_SYNC) })
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nobody can reach it any more.
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
        let area = Area::new(8).unwrap();
        area.write(3, 77);
        let elsewhere = Area::unpopulated(8).unwrap();
        let range = elsewhere.range();
        let moved = area.move_to(elsewhere).unwrap();
        assert_eq!(moved.range(), range);
        assert_eq!((moved.read(3), moved.read(4)), (77, 1));
        moved.fill(5);
        assert!((0..8).all(|page| moved.read(page) == 5));
    }
}
