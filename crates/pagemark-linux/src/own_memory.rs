//! Mappings of this process: making, protecting and freeing them.

use std::io;
use std::ptr::NonNull;

use super::this_process::OfThisProcess;
use crate::{Address, AddressRangeExt, ByteCount, PAGE_SIZE, Range};

/// Permitted access to pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Reading only.
    Read,
    /// Reading and writing.
    Write,
}

/// A private anonymous mapping, filled with zeros at first.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
    process: OfThisProcess,
}

// SAFETY: the mapping belongs to this value alone, and any thread may access or unmap it.
unsafe impl Send for Mapping {}
// SAFETY: through a shared reference only its address can be had, and its content be read.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `bytes`, rounded up to whole pages. It takes memory only as it is written.
    ///
    /// # Errors
    /// `EINVAL`: no bytes at all. `ENOMEM`: there is no room.
    pub fn new(bytes: usize) -> io::Result<Mapping> {
        Mapping::with_protection(bytes, libc::PROT_READ | libc::PROT_WRITE)
    }

    /// Like [`Mapping::new`], for addresses of which none may be accessed.
    pub(super) fn reserve(bytes: usize) -> io::Result<Mapping> {
        Mapping::with_protection(bytes, libc::PROT_NONE)
    }

    fn with_protection(bytes: usize, protection: libc::c_int) -> io::Result<Mapping> {
        let bytes = bytes.checked_next_multiple_of(PAGE_SIZE).ok_or(io::ErrorKind::OutOfMemory)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new private anonymous mapping at an address that the kernel chooses touches no
        // other memory.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { start, bytes, process: OfThisProcess::new() })
    }

    /// Where it begins.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// How long it is.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its content.
    pub fn content(&self) -> &[u8] {
        // SAFETY: the mapping is readable, and all ours. Whoever writes it by its address does not
        // do so while it is borrowed.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }

    /// Its content, to be written.
    pub fn content_mut(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is readable and writable, and all ours. Whoever accesses it by its
        // address does not do so while it is borrowed.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }

    /// Its addresses.
    pub fn range(&self) -> Range {
        let start = Address::of(self.start.as_ptr());
        start..start + ByteCount::from(self.bytes)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // In a child made by fork the mapping may not be there, and the place be another's.
        if self.process.is_here() {
            // SAFETY: the mapping is ours, and nobody can reach it any more.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
        }
    }
}

/// Changes the permitted access to the pages of `range`. Async-signal-safe.
///
/// # Errors
/// `ENOMEM`: not all of it is mapped, or the process would have too many mappings. `EACCES`: a file
/// that may not be written.
///
/// # Safety
/// Users of the memory expect the change: a write that is not permitted raises a signal.
pub unsafe fn set_access(range: &Range, access: Access) -> io::Result<()> {
    let protection = match access {
        Access::Read => libc::PROT_READ,
        Access::Write => libc::PROT_READ | libc::PROT_WRITE,
    };
    // SAFETY: content is not changed, and the caller answers for the access.
    let result = unsafe { libc::mprotect(range.start.as_mut_ptr(), range.byte_count().to_usize(), protection) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// True if something is mapped everywhere in `range`, as far as the kernel says. Costs a system
/// call, whatever the size.
pub fn is_mapped(range: &Range) -> bool {
    // The call does nothing but fail with ENOMEM if there is a hole. A filter may refuse it.
    // SAFETY: without further flags the call changes nothing.
    let result = unsafe { libc::msync(range.start.as_mut_ptr(), range.byte_count().to_usize(), libc::MS_ASYNC) };
    result == 0 || io::Error::last_os_error().raw_os_error() != Some(libc::ENOMEM)
}

/// Frees the memory behind the pages of `range`: they hold zeros afterwards (in a mapping of a
/// file, what the file holds).
///
/// # Errors
/// `EINVAL`: a kind of mapping of which nothing can be freed, such as locked memory. `ENOMEM`: not
/// all of it is mapped.
///
/// # Safety
/// The content is no longer needed.
pub unsafe fn free(range: &Range, is_shared: bool) -> io::Result<()> {
    let advice = if is_shared { libc::MADV_REMOVE } else { libc::MADV_DONTNEED };
    // SAFETY: the caller gives the content up.
    let result = unsafe { libc::madvise(range.start.as_mut_ptr(), range.byte_count().to_usize(), advice) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Keeps the kernel from merging equal pages of `range` (KSM), which a process can ask for all of
/// its memory (`PR_SET_MEMORY_MERGE`), and separates those that are merged.
///
/// # Errors
/// `ENOMEM`: there is no memory to separate merged pages.
pub fn keep_unmerged(range: &Range) -> io::Result<()> {
    let (start, bytes) = (range.start.as_mut_ptr(), range.byte_count().to_usize());
    // SAFETY: the content stays as it is.
    let result = unsafe { libc::madvise(start, bytes, libc::MADV_UNMERGEABLE) };
    match io::Error::last_os_error() {
        // A kernel without KSM.
        error if result != 0 && error.raw_os_error() != Some(libc::EINVAL) => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::own_mappings;

    #[test]
    fn a_mapping_is_described_while_it_is_there() {
        let mapping = Mapping::new(3 * PAGE_SIZE).unwrap();
        let range = mapping.range();
        assert!(is_mapped(&range));
        let described = own_mappings::describe(&range).unwrap();
        assert!(described.iter().all(|found| found.is_data() && !found.is_shared), "{described:?}");
        let middle = range.start + ByteCount::PAGE..range.start + ByteCount::of_pages(2);
        // SAFETY: nobody uses the mapping.
        unsafe { set_access(&middle, Access::Read).unwrap() };
        let described = own_mappings::describe(&range).unwrap();
        let protected = described.iter().find(|found| found.range == middle).unwrap();
        assert!(!protected.is_data() && !protected.is_shared);
        // SAFETY: the page is part of our own mapping, which nobody uses.
        unsafe { libc::munmap(middle.start.as_mut_ptr(), PAGE_SIZE) };
        assert!(!is_mapped(&range));
        assert!(Mapping::new(0).is_err());
    }
}
