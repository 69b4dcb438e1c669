//! The memory of a saved heap: a header, the tables of the allocator, and the objects, by offsets.
//!
//! Everything that says which objects there are is in this memory, and is saved with it:
//!
//! | what | place |
//! |---|---|
//! | [`Field`]s of 8 bytes | the first page |
//! | an entry of 4 bytes for each page: what the page is for | from the second page on |
//! | a bitmap of 32 bytes for each page: which small objects are live | behind the entries |
//! | objects | behind the bitmaps |
//!
//! A number in a table is written through the view of the part in which it is, as objects are, so
//! that the tracker finds it.

use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use pagemark::{Address, ByteCount, PAGE_SIZE, PageNumber, PageRange, Range};
use pagemark_linux::views::Views;

use super::ALIGN_BYTES;
use crate::crossings::Crossings;
use crate::{Error, Parts};

/// What the first field holds.
const MAGIC: u64 = u64::from_le_bytes(*b"pm-heap\0");
/// The form of the tables, which changes with sizes of objects too.
const ALLOCATOR_VERSION: u64 = 1;

/// Bytes of the entry of a page.
const ENTRY_BYTES: usize = size_of::<u32>();
/// Bits of a bitmap: one for each object of a page.
pub(super) const BITMAP_BITS: usize = 256;
const BITMAP_BYTES: usize = BITMAP_BITS / 8;

/// The capacities that a heap can have: powers of two.
const LEAST_BYTES: u64 = 2 << 20;
pub(super) const MOST_BYTES: u64 = 1 << 40;

/// Numbers in the header.
#[derive(Clone, Copy)]
pub(super) enum Field {
    Magic,
    AllocatorVersion,
    /// Where the first view begins.
    Start,
    /// Bytes of each view.
    Capacity,
    Parts,
    /// [`HeapOptions::version`](crate::HeapOptions::version).
    ProgramVersion,
    /// The address that the program finds its data by, or 0.
    Root,
    /// Pages behind the last page that was ever used.
    UsedPages,
    /// Tells the program that has the heap from all others.
    Session,
}

/// What has to be known of a heap before it can be mapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Header {
    pub start: Address,
    pub capacity: ByteCount,
    pub parts: Parts,
    pub program_version: u64,
    pub session: u64,
}

impl Header {
    /// Reads the first page of a saved heap.
    ///
    /// # Errors
    /// `ErrorKind::OtherAllocator`, `ErrorKind::Damaged`
    pub fn read(page: &[u8; PAGE_SIZE], bytes: ByteCount) -> Result<Header, Error> {
        let fields = page.as_chunks::<8>().0;
        let field = |field: Field| u64::from_le_bytes(fields[field as usize]);
        if field(Field::Magic) != MAGIC {
            return Err(Error::damaged("have no header"));
        }
        let version = field(Field::AllocatorVersion);
        if version != ALLOCATOR_VERSION {
            return Err(Error::other_allocator(version, ALLOCATOR_VERSION));
        }
        let capacity = field(Field::Capacity);
        let parts = usize::try_from(field(Field::Parts)).ok().and_then(Parts::from_count);
        let is_capacity = capacity.is_power_of_two() && (LEAST_BYTES..=MOST_BYTES).contains(&capacity);
        let (true, true, Some(parts)) = (is_capacity, capacity == bytes.get(), parts) else {
            return Err(Error::damaged("have a damaged header"));
        };
        // Objects are aligned by their offsets.
        let start = field(Field::Start);
        if !start.is_multiple_of(ALIGN_BYTES as u64) {
            return Err(Error::damaged("have a damaged header"));
        }
        Ok(Header {
            start: Address::new(start),
            capacity: bytes,
            parts,
            program_version: field(Field::ProgramVersion),
            session: field(Field::Session),
        })
    }

    /// The capacity of a heap that is to hold that many bytes.
    ///
    /// # Errors
    /// `ENOMEM`: it is more than is possible.
    pub fn capacity(bytes: ByteCount) -> io::Result<ByteCount> {
        let capacity = bytes.get().max(LEAST_BYTES).checked_next_power_of_two().filter(|bytes| *bytes <= MOST_BYTES);
        capacity.map(ByteCount::new).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
    }

    /// The addresses of all views.
    pub fn place(&self) -> Range {
        self.start..self.start.saturating_add(self.capacity * self.parts.count() as u64)
    }
}

/// The views, and the numbers in them.
#[derive(Debug)]
pub(super) struct Memory {
    pub views: Views,
    pub crossings: Crossings,
    pub parts: Parts,
    /// Number of pages of each view.
    pub pages: u32,
}

impl Memory {
    /// Maps memory that holds zeros, where the header says. Only the header is open.
    ///
    /// # Errors
    /// `EEXIST`: something else is there. Otherwise as [`Views::new`].
    pub fn map(header: &Header) -> io::Result<Memory> {
        let views = Views::reserve_at(header.start, header.capacity, header.parts.count())?;
        let crossings = Crossings::new(header.parts, header.capacity.to_usize())?;
        let pages = header.capacity.pages_rounded_down() as u32;
        let memory = Memory { views, crossings, parts: header.parts, pages };
        memory.open_bytes(0..PAGE_SIZE)?;
        Ok(memory)
    }

    /// True if the tables of a page are open: the page was used once, or is close to one that was.
    pub fn is_known(&self, page: u32) -> bool {
        self.views.is_open(PAGE_SIZE + page as usize * ENTRY_BYTES)
    }

    fn open_bytes(&self, bytes: std::ops::Range<usize>) -> io::Result<()> {
        self.views.open(&(Address::from(bytes.start)..Address::from(bytes.end)))
    }

    /// Opens what the tables have for pages.
    ///
    /// # Errors
    /// Those of [`Views::open`].
    pub fn open_tables(&self, pages: std::ops::Range<u32>) -> io::Result<()> {
        let (start, end, bitmaps) = (pages.start as usize, pages.end as usize, self.bitmaps());
        self.open_bytes(PAGE_SIZE + start * ENTRY_BYTES..PAGE_SIZE + end * ENTRY_BYTES)?;
        self.open_bytes(bitmaps + start * BITMAP_BYTES..bitmaps + end * BITMAP_BYTES)
    }

    /// Opens pages for their content.
    ///
    /// # Errors
    /// Those of [`Views::open`].
    pub fn open(&self, pages: std::ops::Range<u32>) -> io::Result<()> {
        let bytes = pages.start as usize * PAGE_SIZE..pages.end as usize * PAGE_SIZE;
        self.crossings.open(bytes.clone())?;
        self.open_bytes(bytes)
    }

    /// Writes the header of a new heap.
    pub fn write_header(&self, header: &Header) {
        let fields = [
            (Field::Magic, MAGIC),
            (Field::AllocatorVersion, ALLOCATOR_VERSION),
            (Field::Start, header.start.get()),
            (Field::Capacity, header.capacity.get()),
            (Field::Parts, header.parts.count() as u64),
            (Field::ProgramVersion, header.program_version),
            (Field::UsedPages, u64::from(self.first_page())),
            (Field::Session, header.session),
        ];
        for (field, value) in fields {
            self.field(field).store(value, std::sync::atomic::Ordering::Relaxed);
        }
    }

    /// The first page that can hold objects.
    pub fn first_page(&self) -> u32 {
        (self.bitmaps() + self.pages as usize * BITMAP_BYTES).div_ceil(PAGE_SIZE) as u32
    }

    /// The pages that hold the header and the tables.
    pub fn table_pages(&self) -> PageRange {
        PageNumber::new(0)..PageNumber::new(self.first_page().into())
    }

    /// Offset of the first bitmap.
    fn bitmaps(&self) -> usize {
        PAGE_SIZE + (self.pages as usize * ENTRY_BYTES).next_multiple_of(PAGE_SIZE)
    }

    /// The address of an offset, in the view of the part in which it is.
    #[inline]
    pub fn at(&self, offset: usize) -> *mut u8 {
        let view_bytes = self.views.view_bytes().to_usize();
        let view = (offset & (PAGE_SIZE - 1)) >> self.parts.shift();
        self.views.start().as_ptr().wrapping_add(offset + view * view_bytes)
    }

    /// The offset of an address in any view; `None` for other memory.
    #[inline]
    pub fn offset(&self, address: *const u8) -> Option<usize> {
        let view_bytes = self.views.view_bytes().to_usize();
        let offset = address.addr().wrapping_sub(self.views.start().as_ptr().addr());
        (offset < view_bytes * self.parts.count()).then_some(offset & (view_bytes - 1))
    }

    pub fn field(&self, field: Field) -> &AtomicU64 {
        // SAFETY: the first page is open as long as `self` exists, and is accessed as atomic numbers.
        unsafe { AtomicU64::from_ptr(self.at(field as usize * size_of::<u64>()).cast()) }
    }

    /// The entry of a page.
    ///
    /// # Panics
    /// If the heap does not have the page, or has not opened it.
    #[inline]
    pub fn entry(&self, page: u32) -> &AtomicU32 {
        let offset = PAGE_SIZE + page as usize * ENTRY_BYTES;
        assert!(page < self.pages && self.views.is_open(offset), "the heap has no page {page}, or has never used it");
        // SAFETY: the entry is in the open part of the table, which is mapped as long as `self` exists,
        // and is accessed as atomic numbers. An entry lies in one part.
        unsafe { AtomicU32::from_ptr(self.at(offset).cast()) }
    }

    /// True if no page from `first` on has an entry. Only what the file holds is read.
    ///
    /// # Errors
    /// `lseek` failed.
    pub fn has_no_entries_from(&self, first: u32) -> io::Result<bool> {
        let table = |page: u32| PAGE_SIZE + page as usize * ENTRY_BYTES;
        let (mut at, end) = (Address::from(table(first)), Address::from(table(self.pages)));
        while at < end {
            let data = self.views.next_data(at.page_aligned_down(), end.page_aligned_up())?;
            let bytes = data.start.max(at).min(end)..data.end.min(end);
            let page = |offset: Address| ((offset.get() as usize - PAGE_SIZE) / ENTRY_BYTES) as u32;
            let mut pages = page(bytes.start)..page(bytes.end);
            if pages.any(|page| self.is_known(page) && self.entry(page).load(Ordering::Relaxed) != 0) {
                return Ok(false);
            }
            at = bytes.end;
        }
        Ok(true)
    }

    /// 64 bits of the bitmap of a page.
    ///
    /// # Panics
    /// If the heap does not have the page, or has not opened it, or the bitmap not the word.
    #[inline]
    pub fn bitmap_word(&self, page: u32, word: usize) -> &AtomicU64 {
        let offset = self.bitmaps() + page as usize * BITMAP_BYTES + word * size_of::<u64>();
        let is_there = page < self.pages && word < BITMAP_BITS / 64 && self.views.is_open(offset);
        assert!(is_there, "the heap has no page {page}, or no word {word} of it, or has never used it");
        // SAFETY: as for `entry`.
        unsafe { AtomicU64::from_ptr(self.at(offset).cast()) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    const HEADER: Header = Header {
        start: Address::new(0x1234_4000_0000),
        capacity: ByteCount::new(LEAST_BYTES),
        parts: Parts::Four,
        program_version: 7,
        session: 9,
    };

    #[test]
    fn a_header_is_read_as_it_was_written_and_checked() {
        let memory = Memory::map(&HEADER).unwrap();
        memory.write_header(&HEADER);
        // SAFETY: the first page of the first view is mapped, and nobody writes it now.
        let page = unsafe { *memory.views.start().as_ptr().cast::<[u8; PAGE_SIZE]>() };
        assert_eq!(Header::read(&page, HEADER.capacity).unwrap(), HEADER);
        let kind = |change: &dyn Fn(&mut [u8; PAGE_SIZE])| {
            let mut page = page;
            change(&mut page);
            Header::read(&page, HEADER.capacity).unwrap_err().kind()
        };
        use crate::ErrorKind::{Damaged, OtherAllocator};
        assert_eq!(kind(&|page| page[0] ^= 1), Damaged);
        assert_eq!(kind(&|page| page[8] = 2), OtherAllocator { saved: 2, known: 1 });
        assert_eq!(kind(&|page| page[17] = 0x10), Damaged);
        assert_eq!(kind(&|page| page[24] = 1), Damaged);
        assert_eq!(kind(&|page| page[32] = 3), Damaged);
        let longer = ByteCount::new(2 * LEAST_BYTES);
        assert_eq!(Header::read(&page, longer).unwrap_err().kind(), Damaged);
    }

    #[test]
    fn numbers_of_the_tables_do_not_overlap() {
        let header = Header { start: Address::new(0x1235_4000_0000), ..HEADER };
        let memory = Memory::map(&header).unwrap();
        let pages = memory.pages;
        (0..pages).for_each(|page| memory.entry(page).store(page + 1, Ordering::Relaxed));
        let words = || (0..pages).flat_map(|page| (0..4).map(move |word| (page, word)));
        let number = |page: u32, word: usize| u64::from(page) << 8 | word as u64 | 1 << 60;
        words().for_each(|(page, word)| memory.bitmap_word(page, word).store(number(page, word), Ordering::Relaxed));
        assert!((0..pages).all(|page| memory.entry(page).load(Ordering::Relaxed) == page + 1));
        assert!(
            words().all(|(page, word)| memory.bitmap_word(page, word).load(Ordering::Relaxed) == number(page, word))
        );
        assert_eq!(memory.field(Field::Session).load(Ordering::Relaxed), 0);
        let end = memory.offset(memory.bitmap_word(pages - 1, 3).as_ptr().cast()).unwrap() + 8;
        assert!(
            end <= memory.first_page() as usize * PAGE_SIZE && end > (memory.first_page() as usize - 1) * PAGE_SIZE
        );
    }
}
