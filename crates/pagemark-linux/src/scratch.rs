//! Memory on which mechanisms are probed and tested.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Address, ByteCount, PAGE_SIZE, Range};

/// A private anonymous mapping whose pages are written and remapped only through system calls and
/// atomic accesses.
#[derive(Debug)]
pub struct Scratch {
    start: Address,
    pages: usize,
}

impl Scratch {
    /// Maps the given number of pages, none of them populated.
    ///
    /// # Panics
    /// If the kernel gives no address space, as a failed allocation does.
    pub fn new(pages: usize) -> Self {
        // SAFETY: a new private anonymous mapping at an address that the kernel chooses touches no
        // other memory.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                pages * PAGE_SIZE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        assert_ne!(start, libc::MAP_FAILED, "mapping {pages} pages: {}", io::Error::last_os_error());
        Scratch { start: Address::of(start), pages }
    }

    /// Where page `page` is.
    ///
    /// # Panics
    /// If the mapping has fewer pages. (One behind the last is allowed.)
    pub fn address(&self, page: usize) -> Address {
        assert!(page <= self.pages, "page {page} of {}", self.pages);
        self.start + ByteCount::from(page * PAGE_SIZE)
    }

    /// All of it.
    pub fn range(&self) -> Range {
        self.address(0)..self.address(self.pages)
    }

    /// Writes a number to the beginning of a page, which must be mapped and writable.
    pub fn write(&self, page: usize, value: u64) {
        self.number(page).store(value, Ordering::Relaxed);
    }

    fn number(&self, page: usize) -> &AtomicU64 {
        assert!(page < self.pages, "page {page} of {}", self.pages);
        // SAFETY: the number lies within our own mapping and is aligned, and all accesses by this value
        // are atomic.
        unsafe { AtomicU64::from_ptr(self.address(page).as_mut_ptr()) }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and only raw accesses through `self` touch it.
        unsafe { libc::munmap(self.start.as_mut_ptr(), self.pages * PAGE_SIZE) };
    }
}

/// What only tests do to the mapping.
#[cfg(any(test, feature = "testing"))]
#[expect(clippy::undocumented_unsafe_blocks, reason = "all calls change nothing but the mapping that the value owns")]
impl Scratch {
    /// The number at the beginning of a page.
    pub fn read(&self, page: usize) -> u64 {
        self.number(page).load(Ordering::Relaxed)
    }

    fn call(&self, from: usize, count: usize, call: impl FnOnce(*mut libc::c_void, usize) -> bool) {
        assert!(from + count <= self.pages);
        let start = self.address(from).as_mut_ptr();
        assert!(call(start, count * PAGE_SIZE), "{}", io::Error::last_os_error());
    }

    /// Takes part of the mapping out of use. Were it unmapped, another thread could be given the
    /// place.
    pub fn take_out(&self, from: usize, count: usize) {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
        self.call(from, count, |start, length| {
            libc::MAP_FAILED != unsafe { libc::mmap(start, length, libc::PROT_NONE, flags, -1, 0) }
        });
    }

    /// Maps new memory over part of the mapping.
    pub fn remap_new(&self, from: usize, count: usize) {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
        self.call(from, count, |start, length| {
            libc::MAP_FAILED != unsafe { libc::mmap(start, length, protection, flags, -1, 0) }
        });
    }

    /// Maps new shared memory over part of the mapping.
    pub fn remap_shared(&self, from: usize, count: usize) {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
        self.call(from, count, |start, length| {
            libc::MAP_FAILED != unsafe { libc::mmap(start, length, protection, flags, -1, 0) }
        });
    }

    /// Maps a file over part of the mapping.
    pub fn map_file(&self, from: usize, count: usize, file: &std::fs::File, shared: bool) {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_FIXED | if shared { libc::MAP_SHARED } else { libc::MAP_PRIVATE };
        let descriptor = std::os::fd::AsRawFd::as_raw_fd(file);
        self.call(from, count, |start, length| {
            libc::MAP_FAILED != unsafe { libc::mmap(start, length, protection, flags, descriptor, 0) }
        });
    }

    /// Changes the protection of part of the mapping.
    pub fn protect(&self, from: usize, count: usize, protection: libc::c_int) {
        self.call(from, count, |start, length| unsafe { libc::mprotect(start, length, protection) } == 0);
    }

    /// Advises the kernel about part of the mapping.
    pub fn advise(&self, from: usize, count: usize, advice: libc::c_int) {
        self.call(from, count, |start, length| unsafe { libc::madvise(start, length, advice) } == 0);
    }

    /// Moves pages over others; the place they leave stays mapped, without data. False, with
    /// nothing changed, if they belong to several mappings, which the kernel does not move at once,
    /// or if the kernel is older than 5.7.
    pub fn try_move(&self, from: usize, count: usize, to: usize) -> bool {
        assert!(from + count <= self.pages && to + count <= self.pages);
        let source = self.address(from)..self.address(from + count);
        let is_one = super::own_mappings::describe(&source)
            .unwrap()
            .iter()
            .any(|mapping| mapping.range.start <= source.start && source.end <= mapping.range.end);
        if !is_one {
            return false;
        }
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
        let (start, length) = (source.start.as_mut_ptr(), count * PAGE_SIZE);
        let target = self.address(to).as_mut_ptr::<libc::c_void>();
        let moved = unsafe { libc::mremap(start, length, length, flags, target) } != libc::MAP_FAILED;
        let error = io::Error::last_os_error();
        // A kernel that does not know the last flag.
        assert!(moved || error.raw_os_error() == Some(libc::EINVAL), "{error}");
        moved
    }

    /// Lets the kernel write a page, from a file.
    pub fn fill_from(&self, page: usize, file: &mut std::fs::File) {
        self.call(page, 1, |start, length| {
            let descriptor = std::os::fd::AsRawFd::as_raw_fd(file);
            usize::try_from(unsafe { libc::read(descriptor, start, length) }) == Ok(length)
        });
    }
}
