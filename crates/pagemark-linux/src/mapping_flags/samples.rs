//! Mappings of this process that have the flags whose names are compared.

use std::ffi::c_int;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::own_memory::Mapping;
use crate::proc;
use crate::userfaultfd::Userfaultfd;
use crate::{ByteCount, PAGE_SIZE, Range};

const READ: c_int = libc::PROT_READ;
const WRITE: c_int = libc::PROT_WRITE;
const PRIVATE: c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
const SHARED: c_int = libc::MAP_SHARED | libc::MAP_ANONYMOUS;

/// `MAP_DROPPABLE` of `mmap`, since Linux 6.11.
const DROPPABLE: c_int = 0x08 | libc::MAP_ANONYMOUS;

/// Bytes of a huge page.
const HUGE_BYTES: usize = 2 << 20;

/// Protection and flags of anonymous mappings.
const PLAIN: [(c_int, c_int); 9] = [
    (libc::PROT_NONE, PRIVATE),
    (READ, PRIVATE),
    (READ | WRITE, PRIVATE),
    (READ | libc::PROT_EXEC, PRIVATE),
    (READ | WRITE, SHARED),
    (READ | WRITE, PRIVATE | libc::MAP_NORESERVE),
    (READ | WRITE, PRIVATE | libc::MAP_GROWSDOWN),
    (READ | WRITE, PRIVATE | libc::MAP_LOCKED),
    (READ | WRITE, DROPPABLE),
];

/// Advice for private anonymous mappings.
const ADVICE: [c_int; 8] = [
    libc::MADV_SEQUENTIAL,
    libc::MADV_RANDOM,
    libc::MADV_DONTFORK,
    libc::MADV_DONTDUMP,
    libc::MADV_WIPEONFORK,
    libc::MADV_MERGEABLE,
    libc::MADV_HUGEPAGE,
    libc::MADV_NOHUGEPAGE,
];

/// The other samples: locked when touched, of a file, write-protected.
const OTHERS: usize = 3;

/// The mappings. They end when this is dropped.
pub(super) struct Samples {
    /// Each sample is a page of it, with a page without access behind it.
    reserved: Mapping,
    used: usize,
    /// A huge page that is never touched, where there can be one.
    _huge: Option<Huge>,
    _userfaultfd: Option<Userfaultfd>,
}

impl Samples {
    /// Makes the mappings, except what this kernel, or a limit, does not permit.
    pub(super) fn make() -> io::Result<Samples> {
        let reserved = Mapping::new((PLAIN.len() + ADVICE.len() + OTHERS) * 2 * PAGE_SIZE)?;
        // SAFETY: the memory is that of `reserved`, which nothing else uses.
        if unsafe { libc::mprotect(reserved.start().as_ptr().cast(), reserved.bytes(), libc::PROT_NONE) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let mut samples = Samples { reserved, used: 0, _huge: Huge::map(), _userfaultfd: None };
        for (protection, flags) in PLAIN {
            let _ = samples.map(protection, flags, -1);
        }
        for advice in ADVICE {
            let Ok(page) = samples.map(READ | WRITE, PRIVATE, -1) else { continue };
            // SAFETY: the page is a sample; its content is not used.
            unsafe { libc::madvise(page.start.to_usize() as *mut _, PAGE_SIZE, advice) };
        }
        if let Ok(page) = samples.map(READ | WRITE, PRIVATE, -1) {
            // SAFETY: the page is a sample. If it cannot be locked, the flag is not known.
            unsafe { libc::mlock2(page.start.to_usize() as *const _, PAGE_SIZE, libc::MLOCK_ONFAULT) };
        }
        let file = File::from(memfd_create(c"pagemark-sample", MFdFlags::MFD_CLOEXEC)?);
        file.set_len(PAGE_SIZE as u64)?;
        // Shared, but not for writing.
        let reader = File::open(proc::own_path(&format!("fd/{}", file.as_raw_fd())))?;
        let _ = samples.map(READ, libc::MAP_SHARED, reader.as_raw_fd());
        if let (Ok(page), Ok(userfaultfd)) = (samples.map(READ | WRITE, PRIVATE, -1), Userfaultfd::of_this_process()) {
            let _ = userfaultfd.register(&page);
            samples._userfaultfd = Some(userfaultfd);
        }
        Ok(samples)
    }

    /// Maps the next page.
    fn map(&mut self, protection: c_int, flags: c_int, descriptor: c_int) -> io::Result<Range> {
        let start = self.reserved.range().start + ByteCount::of_pages(2 * self.used as u64);
        self.used += 1;
        let address = start.to_usize() as *mut libc::c_void;
        // SAFETY: the page is one of `reserved`, and nothing else uses it.
        let mapped = unsafe { libc::mmap(address, PAGE_SIZE, protection, flags | libc::MAP_FIXED, descriptor, 0) };
        if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(start..start + ByteCount::PAGE) }
    }
}

/// A mapping of a huge page.
struct Huge(*mut libc::c_void);

impl Huge {
    fn map() -> Option<Huge> {
        let flags = PRIVATE | libc::MAP_HUGETLB | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let mapped = unsafe { libc::mmap(std::ptr::null_mut(), HUGE_BYTES, READ | WRITE, flags, -1, 0) };
        (mapped != libc::MAP_FAILED).then_some(Huge(mapped))
    }
}

impl Drop for Huge {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own.
        unsafe { libc::munmap(self.0, HUGE_BYTES) };
    }
}
