//! Two mappings of the same memory: one that is write-protected, and one through which it is
//! written.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;

use super::memory_file::anonymous_file;
use super::sparse::next_data;
use super::this_process::OfThisProcess;
use crate::{Address, AddressRangeExt, Range, RangeSet};

/// A second mapping of a range's memory.
#[derive(Debug)]
pub struct Alias {
    memory: Option<File>,
    start: NonNull<u8>,
    bytes: usize,
    process: OfThisProcess,
}

// SAFETY: the mapping belongs to this value alone, and any thread may access or unmap it.
unsafe impl Send for Alias {}
// SAFETY: through a shared reference only its address can be had.
unsafe impl Sync for Alias {}

impl Alias {
    /// Replaces the private memory of `range` by new shared memory with the same content, and maps
    /// that memory a second time. `populated` are the parts that hold data. Children made by `fork`
    /// have neither mapping.
    ///
    /// # Errors
    /// `EMFILE`, `ENOMEM`; then the range is as it was.
    ///
    /// # Safety
    /// The range is made of whole pages of readable and writable private mappings, and nobody
    /// accesses it during the call.
    pub unsafe fn take_over(range: &Range, populated: &RangeSet) -> io::Result<Alias> {
        let bytes = range.byte_count().to_usize();
        let memory = anonymous_file(c"pagemark-region", bytes)?;
        let mut alias = Alias::map(&memory, bytes, None)?;
        for part in populated.iter() {
            // SAFETY: the part is readable memory of the range, and lies at the same offset in the
            // alias, which is as long.
            unsafe {
                let to = alias.start.as_ptr().add((part.start - range.start).to_usize());
                std::ptr::copy_nonoverlapping(part.start.as_mut_ptr::<u8>(), to, part.byte_count().to_usize());
            }
        }
        // The value for the range itself is not dropped: that mapping stays.
        std::mem::forget(Alias::map(&memory, bytes, Some(range.start))?);
        alias.memory = Some(memory.into());
        Ok(alias)
    }

    /// The parts of the memory, by their offsets, that may hold anything else than zeros.
    ///
    /// # Errors
    /// `lseek` failed.
    pub fn data(&self) -> io::Result<RangeSet> {
        let (mut data, end) = (RangeSet::new(), Address::from(self.bytes));
        let mut at = Address::MIN;
        while let Some(memory) = self.memory.as_ref().filter(|_| at < end) {
            let next = next_data(memory, at, end)?;
            at = next.end;
            data.insert(next);
        }
        Ok(data)
    }

    /// Maps shared memory at an address, or where the kernel chooses.
    fn map(memory: &OwnedFd, bytes: usize, address: Option<Address>) -> io::Result<Alias> {
        let place = address.map_or(0, |_| libc::MAP_FIXED);
        // SAFETY: without an address no other memory is touched; an address is the caller's to
        // replace what is there.
        let start = unsafe {
            libc::mmap(
                address.unwrap_or_default().as_mut_ptr(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_NORESERVE | place,
                memory.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the mapping was just made.
        unsafe { libc::madvise(start, bytes, libc::MADV_DONTFORK) };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Alias { memory: None, start, bytes, process: OfThisProcess::new() })
    }

    /// Where it begins.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }
}

impl Drop for Alias {
    fn drop(&mut self) {
        if self.process.is_here() {
            // SAFETY: the mapping is ours, and nobody can reach it any more.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
        }
    }
}

/// Memory for code that is written through one mapping and executed through another.
#[derive(Debug)]
pub struct CodeMemory {
    written: NonNull<u8>,
    executed: NonNull<u8>,
    bytes: usize,
}

// SAFETY: what is written where is up to the users of `write`; the mappings themselves stay for
// ever.
unsafe impl Send for CodeMemory {}
// SAFETY: as for `Send`.
unsafe impl Sync for CodeMemory {}

impl CodeMemory {
    /// Maps room for `bytes` of code, for the rest of the process's life.
    ///
    /// # Errors
    /// `EACCES`, `EPERM`: the system does not let programs make code.
    pub fn new(bytes: usize) -> io::Result<CodeMemory> {
        let memory = anonymous_file(c"pagemark-code", bytes)?;
        let map = |protection| {
            let (any, descriptor) = (std::ptr::null_mut(), memory.as_raw_fd());
            // SAFETY: a new mapping at an address that the kernel chooses touches no other memory.
            let start = unsafe { libc::mmap(any, bytes, protection, libc::MAP_SHARED, descriptor, 0) };
            if start == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(start.cast::<u8>()) }
        };
        let executed = map(libc::PROT_READ | libc::PROT_EXEC)?;
        let written = map(libc::PROT_READ | libc::PROT_WRITE)?;
        let pointer = |start| NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory);
        Ok(CodeMemory { written: pointer(written)?, executed: pointer(executed)?, bytes })
    }

    /// Writes code at an offset. Async-signal-safe.
    ///
    /// # Safety
    /// Nobody writes or executes there meanwhile.
    pub unsafe fn write(&self, offset: usize, code: &[u8]) {
        assert!(offset <= self.bytes && code.len() <= self.bytes - offset);
        // SAFETY: the place lies within the mapping, and the caller has it alone.
        unsafe { std::ptr::copy_nonoverlapping(code.as_ptr(), self.written.as_ptr().add(offset), code.len()) };
        // It was written by another address than it will be executed by: the processor must not
        // have fetched it before.
        std::arch::x86_64::__cpuid(0);
    }

    /// Where the code at an offset is executed.
    pub fn address(&self, offset: usize) -> *const u8 {
        self.executed.as_ptr().wrapping_add(offset)
    }
}
