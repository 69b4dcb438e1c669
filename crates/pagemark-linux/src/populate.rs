//! Populating memory before its use, so that the use takes no page faults.

use std::io;

use nix::errno::Errno;

use super::interface::Interface;
use super::own_memory::Mapping;
use crate::{Address, AddressRangeExt, ByteCount, PAGE_SIZE, Range};

/// `MADV_POPULATE_READ` and `MADV_POPULATE_WRITE`.
pub static POPULATE: Interface = Interface::new(
    "MADV_POPULATE_READ and MADV_POPULATE_WRITE",
    "5.14",
    "memory is populated by a page fault for each page",
    || {
        let page = Mapping::new(PAGE_SIZE)?;
        advise(&page.range(), libc::MADV_POPULATE_WRITE)
    },
);

/// Maps a page at each address of `range` that has none: in anonymous memory the zero page, which
/// takes no memory.
///
/// # Errors
/// `ENOMEM`, `EFAULT`: not all of it is mapped and readable.
///
/// # Safety
/// The range is mapped and readable memory of this process.
pub unsafe fn for_reading(range: &Range) -> io::Result<()> {
    if POPULATE.is_there() {
        return advise(range, libc::MADV_POPULATE_READ);
    }
    for page in range.pages() {
        let address: *const u8 = page.address().as_mut_ptr();
        // SAFETY: the caller promises that the page can be read; the value, which another thread
        // may be writing, is not used.
        unsafe { std::ptr::read_volatile(address) };
    }
    Ok(())
}

/// Makes each page of `memory` writable without a further page fault, as far as memory permits. The
/// content stays.
pub fn for_writing(memory: &mut [u8]) {
    let start = Address::of(memory.as_mut_ptr()).page_aligned_down();
    let range = start..Address::of(memory.as_mut_ptr()) + ByteCount::from(memory.len());
    if POPULATE.is_there() {
        // An error only means that the memory is populated as it is used.
        let _ = advise(&range.whole_pages(), libc::MADV_POPULATE_WRITE);
        return;
    }
    for byte in memory.iter_mut().step_by(PAGE_SIZE) {
        let byte = std::ptr::from_mut(byte);
        // SAFETY: the byte is borrowed mutably. Volatile accesses, which are not left out.
        unsafe { byte.write_volatile(byte.read_volatile()) };
    }
}

/// Makes each page of `range` writable without a further page fault. The content stays.
///
/// # Errors
/// `ENOMEM`, `EFAULT`: not all of it is mapped and writable. `EINVAL`: the kernel is older than
/// 5.14.
pub fn open_for_writing(range: &Range) -> io::Result<()> {
    advise(range, libc::MADV_POPULATE_WRITE)
}

/// Populates memory before its use, as far as memory permits: with `for_writing`, so that it can be
/// written without a further page fault. Keeps `errno`. Nothing on kernels older than 5.14.
pub fn ahead(range: &Range, for_writing: bool) {
    let errno = Errno::last();
    let _ = advise(range, if for_writing { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ });
    errno.set();
}

/// Gives one of the two kinds of advice above, which change no content.
fn advise(range: &Range, advice: libc::c_int) -> io::Result<()> {
    // SAFETY: populating changes no content; what is not mapped is refused.
    let result = unsafe { libc::madvise(range.start.as_mut_ptr(), range.byte_count().to_usize(), advice) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pagemap::{Filter, PRESENT, Pagemap};
    use crate::scratch::Scratch;

    fn present_pages(range: &Range) -> u64 {
        let mut pages = 0;
        let filter = Filter { all: PRESENT, ..Filter::default() };
        let pagemap = Pagemap::of_this_process().unwrap();
        pagemap.find(range, filter, |run, _| pages += run.pages().count() as u64).unwrap();
        pages
    }

    #[test]
    fn pages_are_populated_and_keep_their_content() {
        let scratch = Scratch::new(16);
        scratch.write(3, 7);
        assert_eq!(present_pages(&scratch.range()), 1);
        // SAFETY: the range is readable memory.
        unsafe { for_reading(&scratch.range()).unwrap() };
        assert_eq!((present_pages(&scratch.range()), scratch.read(3), scratch.read(4)), (16, 7, 0));

        let mut mapping = Mapping::new(16 * PAGE_SIZE).unwrap();
        let range = mapping.range();
        mapping.content_mut()[5 * PAGE_SIZE] = 9;
        for_writing(&mut mapping.content_mut()[PAGE_SIZE..8 * PAGE_SIZE]);
        assert_eq!(present_pages(&range), 7);
        assert_eq!(mapping.content_mut()[5 * PAGE_SIZE], 9);
    }

    #[test]
    fn what_cannot_be_populated_ahead_is_left_alone() {
        let range = Mapping::new(PAGE_SIZE).unwrap().range();
        Errno::EDOM.set();
        // Nothing is mapped there any more.
        [true, false].into_iter().for_each(|for_writing| ahead(&range, for_writing));
        assert_eq!(Errno::last(), Errno::EDOM);
    }
}
