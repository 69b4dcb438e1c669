//! Pages of a file in memory that several processes fill, each of them once.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use super::this_process::OfThisProcess;
use super::userfaultfd::MissingPages;
use crate::{Address, ByteCount, PAGE_SIZE, PageNumber};

/// A file of tmpfs that is mapped to be filled. A page of it is a hole until it is there as a
/// whole, also for processes that have the file mapped: whoever fills it first decides what it
/// holds, and nobody sees a part of it, whenever a process is killed.
///
/// A process that reads a hole through a mapping of the file makes it zeros for all, unless a
/// userfaultfd watches that mapping for missing pages.
#[derive(Debug)]
pub struct FilePages {
    start: NonNull<u8>,
    bytes: usize,
    missing: MissingPages,
    process: OfThisProcess,
}

// SAFETY: the mapping belongs to this value alone, which neither reads nor writes through it.
unsafe impl Send for FilePages {}
// SAFETY: as for `Send`; the kernel copies what is filled.
unsafe impl Sync for FilePages {}

impl FilePages {
    /// Maps the first `bytes` of a file that may be read and written.
    ///
    /// # Errors
    /// `EINVAL`: the file is not of tmpfs, or the kernel is older than 4.11. `EPERM`: this process
    /// may have no userfaultfd.
    pub fn new(file: &File, bytes: ByteCount) -> io::Result<FilePages> {
        let bytes = bytes.to_usize();
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let (any, flags) = (std::ptr::null_mut(), libc::MAP_SHARED | libc::MAP_NORESERVE);
        // SAFETY: only the mapping that is made here is registered, which nobody else knows.
        let missing = unsafe { MissingPages::of_this_process()? };
        // SAFETY: a new mapping at an address that the kernel chooses touches no other memory.
        let start = unsafe { libc::mmap(any, bytes, protection, flags, file.as_raw_fd(), 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the mapping was just made. A child of this process has no use for it.
        unsafe { libc::madvise(start, bytes, libc::MADV_DONTFORK) };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let pages = FilePages { start, bytes, missing, process: OfThisProcess::new() };
        let first = pages.first();
        pages.missing.register(&(first..first + ByteCount::from(bytes)))?;
        Ok(pages)
    }

    /// Fills whole pages, from `page` on. A page that is there already stays as it is.
    ///
    /// # Errors
    /// `ENOMEM`: the file system is full, or there is no memory. `InvalidInput`: behind the end of
    /// the mapping.
    pub fn fill(&self, page: PageNumber, pages: &[[u8; PAGE_SIZE]]) -> io::Result<()> {
        let last = page.get().checked_add(pages.len() as u64);
        if last.is_none_or(|last| last > (self.bytes / PAGE_SIZE) as u64) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.missing.fill(self.first() + ByteCount::of_pages(page.get()), pages)
    }

    fn first(&self) -> Address {
        Address::of(self.start.as_ptr())
    }
}

impl Drop for FilePages {
    fn drop(&mut self) {
        // A child made by fork does not have the mapping, and the place may be another's.
        if self.process.is_here() {
            // SAFETY: the mapping is ours, and nobody can reach it any more.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::memory_file::anonymous_file;
    use crate::this_process::keeps_what_a_child_maps;

    #[test]
    fn a_child_keeps_what_it_has_at_the_place_of_the_pages() {
        let file = File::from(anonymous_file(c"pagemark-test", PAGE_SIZE).unwrap());
        let pages = match FilePages::new(&file, ByteCount::PAGE) {
            Ok(pages) => pages,
            Err(error) => pagemark_testing::skip!("no userfaultfd ({error})"),
        };
        keeps_what_a_child_maps(&(pages.first()..pages.first() + ByteCount::PAGE), || drop(pages));
    }

    #[test]
    fn a_page_is_filled_once_and_as_a_whole() {
        let file = File::from(anonymous_file(c"pagemark-test", 4 * PAGE_SIZE).unwrap());
        let bytes = ByteCount::of_pages(4);
        let pages = match FilePages::new(&file, bytes) {
            Ok(pages) => pages,
            Err(error) => pagemark_testing::skip!("no userfaultfd ({error})"),
        };
        let other = FilePages::new(&file.try_clone().unwrap(), bytes).unwrap();
        pages.fill(PageNumber::new(1), &[[1; PAGE_SIZE], [2; PAGE_SIZE]]).unwrap();
        other.fill(PageNumber::new(2), &[[3; PAGE_SIZE]; 2]).unwrap();
        let mut content = [0; PAGE_SIZE];
        for (page, expected) in [0, 1, 2, 3].into_iter().enumerate() {
            file.read_exact_at(&mut content, (page * PAGE_SIZE) as u64).unwrap();
            assert_eq!(content, [expected; PAGE_SIZE], "page {page}");
        }
        let data = crate::sparse::next_data(&file, Address::MIN, Address::MIN + bytes).unwrap();
        assert_eq!(data.start, Address::MIN + ByteCount::PAGE, "what is only read stays a hole");
        for (page, count) in [(4, 1), (3, 2), (u64::MAX >> 12, 1)] {
            assert!(other.fill(PageNumber::new(page), &vec![[1; PAGE_SIZE]; count]).is_err(), "{page}");
        }
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let on_disk = File::create_new(directory.path().join("file")).unwrap();
        on_disk.set_len(PAGE_SIZE as u64).unwrap();
        assert!(FilePages::new(&on_disk, ByteCount::PAGE).is_err());
    }
}
