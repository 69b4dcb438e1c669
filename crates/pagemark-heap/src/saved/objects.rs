//! The objects of a saved heap: an allocator whose whole state is in the memory of the heap.
//!
//! Small objects of one size share runs of pages, with a bitmap for each run. Larger objects have
//! runs of their own. What is free follows from the tables ([`memory`](super::memory)); the lists
//! that find it quickly are in memory of the process, and are made anew when the heap is opened.

use std::io::Write;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pagemark::{ByteCount, PAGE_SIZE, PageNumber, PageRange, PageRangeExt, RangeSet};
use pagemark_linux::this_process::OfThisProcess;

use super::memory::{BITMAP_BITS, Field, Memory};
use super::runs::{List, Nodes, Runs};
use super::sizes::Class;
use crate::crossings::Crossings;
use crate::tracked::Tracked;
use crate::{Error, Parts};

/// What a page is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Entry {
    /// It is free, or within the run of a large object.
    None,
    /// It is in a run of small objects.
    Small(Class),
    /// It is the first of that many, which one object has.
    Large(u32),
}

impl Entry {
    const LARGE: u32 = 1 << 31;

    /// `None` for a number that is no entry.
    #[inline]
    fn decode(number: u32) -> Option<Entry> {
        match number {
            0 => Some(Entry::None),
            _ if number & Entry::LARGE != 0 => Some(Entry::Large(number & !Entry::LARGE)),
            _ => Class::with_number(number as usize - 1).map(Entry::Small),
        }
    }

    fn encode(self) -> u32 {
        match self {
            Entry::None => 0,
            Entry::Small(class) => class.number() as u32 + 1,
            Entry::Large(pages) => Entry::LARGE | pages,
        }
    }
}

/// A live object.
#[derive(Clone, Copy)]
enum Found {
    Small { class: Class, run: u32, index: usize },
    Large { page: u32, pages: u32 },
}

impl Found {
    fn bytes(self) -> usize {
        match self {
            Found::Small { class, .. } => class.bytes(),
            Found::Large { pages, .. } => pages as usize * PAGE_SIZE,
        }
    }
}

/// The allocator. Threads share it by reference.
#[derive(Debug)]
pub(crate) struct Objects {
    pub(super) memory: Memory,
    nodes: Nodes,
    /// For each class, the runs that have room. The value of a run's node is the number of objects
    /// that it has room for. Locked before `free_pages`, and in ascending order.
    with_room: [Mutex<List>; Class::COUNT],
    free_pages: Mutex<Runs>,
    process: OfThisProcess,
}

/// The allocator while nobody else allocates or frees.
pub(super) struct Locked<'a> {
    _with_room: Vec<MutexGuard<'a, List>>,
    _free_pages: MutexGuard<'a, Runs>,
    objects: &'a Objects,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while the lists are inconsistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Objects {
    /// An allocator of a memory without objects.
    ///
    /// # Errors
    /// There is no address space.
    pub(super) fn new(memory: Memory) -> std::io::Result<Objects> {
        let objects = Objects::without_free_pages(memory)?;
        let first = objects.memory.first_page();
        locked(&objects.free_pages).give(&objects.nodes, first, objects.memory.pages - first);
        Ok(objects)
    }

    fn without_free_pages(memory: Memory) -> std::io::Result<Objects> {
        // The numbers of the tables do not reach from one part into the next, and are written through
        // their own views.
        let (nodes, free_pages) = (Nodes::new(memory.pages)?, Mutex::new(Runs::none(memory.pages)));
        Ok(Objects {
            memory,
            nodes,
            with_room: std::array::from_fn(|_| Mutex::default()),
            free_pages,
            process: OfThisProcess::new(),
        })
    }

    /// An allocator of a memory that was saved. Checks all tables.
    ///
    /// # Errors
    /// `ErrorKind::Damaged`: they contradict each other. `ErrorKind::NoRoom`
    pub(super) fn load(memory: Memory) -> Result<Objects, Error> {
        let objects = Objects::without_free_pages(memory).map_err(Error::creating)?;
        let memory = &objects.memory;
        let used = memory.field(Field::UsedPages).load(Ordering::Relaxed);
        let used = u32::try_from(used).ok().filter(|used| (memory.first_page()..=memory.pages).contains(used));
        let used = used.ok_or_else(|| Error::damaged("name more pages than the heap has"))?;
        memory.open_tables(0..used).map_err(Error::creating)?;
        let mut page = memory.first_page();
        let mut free_from = page;
        while page < used {
            let damaged = || Error::damaged(format!("contradict each other on page {page} of the heap"));
            let pages = match objects.entry(page).ok_or_else(damaged)? {
                Entry::None if objects.has_bits(page) => return Err(damaged()),
                Entry::None => {
                    page += 1;
                    continue;
                }
                Entry::Small(class) => class.run_pages(),
                Entry::Large(pages) => pages,
            };
            let end = page.checked_add(pages).filter(|end| pages > 0 && *end <= used).ok_or_else(damaged)?;
            memory.open(page..end).and_then(|()| objects.nodes.open(page)).map_err(Error::creating)?;
            if let Some(Entry::Small(class)) = objects.entry(page) {
                objects.load_run(page, class).ok_or_else(damaged)?;
            }
            let is_large = matches!(objects.entry(page), Some(Entry::Large(_)));
            if is_large && objects.has_bits(page) || (page + 1..end).any(|inner| objects.has_bits(inner)) {
                return Err(damaged());
            }
            let is_one_run = (page + 1..end).all(|inner| match objects.entry(page) {
                Some(Entry::Small(class)) => objects.entry(inner) == Some(Entry::Small(class)),
                _ => objects.entry(inner) == Some(Entry::None),
            });
            if !is_one_run {
                return Err(damaged());
            }
            if let Some(Entry::Large(pages)) = objects.entry(page) {
                memory.crossings.record(page as usize * PAGE_SIZE, pages as usize * PAGE_SIZE);
            }
            locked(&objects.free_pages).give(&objects.nodes, free_from, page - free_from);
            (page, free_from) = (end, end);
        }
        if !memory.has_no_entries_from(used).map_err(Error::creating)? {
            return Err(Error::damaged("have entries of pages that were never used"));
        }
        locked(&objects.free_pages).give(&objects.nodes, free_from, memory.pages - free_from);
        Ok(objects)
    }

    /// Takes over a run of small objects, which is open. `None` if its tables are wrong.
    fn load_run(&self, run: u32, class: Class) -> Option<()> {
        let (pages, objects) = (class.run_pages(), class.run_objects());
        if !run.is_multiple_of(pages) || run + pages > self.memory.pages {
            return None;
        }
        let mut live = 0;
        for word in 0..BITMAP_BITS / 64 {
            let mut bits = self.memory.bitmap_word(run, word).load(Ordering::Relaxed);
            while bits != 0 {
                let index = word * 64 + bits.trailing_zeros() as usize;
                if index >= objects {
                    return None;
                }
                self.memory.crossings.record(run as usize * PAGE_SIZE + index * class.bytes(), class.bytes());
                live += 1;
                bits &= bits - 1;
            }
        }
        self.nodes.set_value(run, objects as u32 - live);
        if (live as usize) < objects {
            locked(&self.with_room[class.number()]).push(&self.nodes, run);
        }
        Some(())
    }

    /// True if the bitmap of a page has a bit. That of a page that begins no run of small objects
    /// has none.
    fn has_bits(&self, page: u32) -> bool {
        self.bitmap_words(page).any(|word| word.load(Ordering::Relaxed) != 0)
    }

    fn bitmap_words(&self, page: u32) -> impl Iterator<Item = &AtomicU64> {
        (0..BITMAP_BITS / 64).map(move |word| self.memory.bitmap_word(page, word))
    }

    /// `None` also for a page whose entry is not open.
    #[inline]
    fn entry(&self, page: u32) -> Option<Entry> {
        self.memory.is_known(page).then(|| Entry::decode(self.memory.entry(page).load(Ordering::Relaxed)))?
    }

    fn set_entry(&self, page: u32, entry: Entry) {
        self.memory.entry(page).store(entry.encode(), Ordering::Relaxed);
    }

    /// True in the process that has the heap, false in a child made by `fork`.
    #[inline]
    pub fn is_here(&self) -> bool {
        self.process.is_here()
    }

    /// Allocates an object; null if there is no room, and in a forked child. `align` is a power of
    /// two.
    #[inline]
    pub fn allocate(&self, bytes: usize, align: usize) -> *mut u8 {
        if !self.is_here() {
            return null_mut();
        }
        match Class::of(bytes, align) {
            Some(class) => self.allocate_small(class),
            None => self.allocate_large(bytes, align, false),
        }
    }

    /// Allocates an object that is filled with zeros.
    pub fn allocate_zeroed(&self, bytes: usize, align: usize) -> *mut u8 {
        if !self.is_here() {
            return null_mut();
        }
        let Some(class) = Class::of(bytes, align) else { return self.allocate_large(bytes, align, true) };
        let object = self.allocate_small(class);
        if !object.is_null() {
            // SAFETY: the object has that many bytes, and nobody else knows it.
            unsafe { object.write_bytes(0, bytes) };
        }
        object
    }

    fn allocate_small(&self, class: Class) -> *mut u8 {
        let mut with_room = locked(&self.with_room[class.number()]);
        let run = match with_room.first() {
            Some(run) => run,
            None => {
                let Some(run) = self.take_run(class) else { return null_mut() };
                with_room.push(&self.nodes, run);
                run
            }
        };
        let words = (0..BITMAP_BITS / 64).map(|word| (word, self.memory.bitmap_word(run, word)));
        let free =
            words.map(|(word, bits)| (word, bits, bits.load(Ordering::Relaxed))).find(|(_, _, bits)| *bits != u64::MAX);
        // A run with room has a clear bit, and the bits are below the number of its objects.
        let Some((word, place, bits)) = free else { return null_mut() };
        let bit = bits.trailing_ones() as usize;
        place.store(bits | 1 << bit, Ordering::Relaxed);
        let room = self.nodes.value(run) - 1;
        self.nodes.set_value(run, room);
        if room == 0 {
            with_room.remove(&self.nodes, run);
        }
        drop(with_room);
        self.hand_out(run as usize * PAGE_SIZE + (word * 64 + bit) * class.bytes(), class.bytes())
    }

    /// A run without objects. The class is locked.
    fn take_run(&self, class: Class) -> Option<u32> {
        let run = self.take_pages(&mut locked(&self.free_pages), class.run_pages(), class.run_pages())?;
        for page in run..run + class.run_pages() {
            self.set_entry(page, Entry::Small(class));
        }
        // Bits behind the pages that were ever used are not checked when the heap is opened.
        self.bitmap_words(run).filter(|word| word.load(Ordering::Relaxed) != 0).for_each(|word| {
            word.store(0, Ordering::Relaxed);
        });
        self.nodes.set_value(run, class.run_objects() as u32);
        Some(run)
    }

    fn take_pages(&self, free: &mut Runs, pages: u32, align: u32) -> Option<u32> {
        let start = free.take(&self.nodes, pages, align)?;
        let (used, end) = (self.memory.field(Field::UsedPages), start + pages);
        let before = self.used_pages();
        // The tables of all pages up to the last used one are read.
        let tables = if before < end { self.memory.open_tables(before..end) } else { Ok(()) };
        if tables.and_then(|()| self.memory.open(start..end)).is_err() {
            free.give(&self.nodes, start, pages);
            return None;
        }
        if before < end {
            used.store(end.into(), Ordering::Release);
        }
        Some(start)
    }

    fn allocate_large(&self, bytes: usize, align: usize, zeroed: bool) -> *mut u8 {
        let Ok(pages) = u32::try_from(bytes.max(1).div_ceil(PAGE_SIZE)) else { return null_mut() };
        let Ok(align) = u32::try_from(align.div_ceil(PAGE_SIZE)) else { return null_mut() };
        // Blocks are aligned by their offsets, and the heap by no more than this.
        if align as usize > super::ALIGN_BYTES / PAGE_SIZE {
            return null_mut();
        }
        let start = {
            let mut free = locked(&self.free_pages);
            let Some(start) = self.take_pages(&mut free, pages, align) else { return null_mut() };
            self.set_entry(start, Entry::Large(pages));
            start
        };
        let object = self.hand_out(start as usize * PAGE_SIZE, pages as usize * PAGE_SIZE);
        if zeroed && !self.release(start, pages) {
            // SAFETY: the object has these bytes, and nobody else knows it.
            unsafe { object.write_bytes(0, pages as usize * PAGE_SIZE) };
        }
        object
    }

    /// The address of an object in the view of the part in which it begins. Records where it
    /// reaches on.
    #[inline]
    fn hand_out(&self, offset: usize, bytes: usize) -> *mut u8 {
        self.memory.crossings.record(offset, bytes);
        self.memory.at(offset)
    }

    /// Gives the memory of pages back to the kernel, so that they hold zeros. False if it refuses.
    fn release(&self, start: u32, pages: u32) -> bool {
        // SAFETY: the pages belong to no object whose content is needed.
        unsafe { self.memory.views.free(&run_of(start, pages).addresses()).is_ok() }
    }

    /// What is at an address.
    fn find(&self, object: *const u8) -> Option<Found> {
        let offset = self.memory.offset(object)?;
        let page = (offset / PAGE_SIZE) as u32;
        match self.entry(page)? {
            Entry::None => None,
            Entry::Large(pages) => offset.is_multiple_of(PAGE_SIZE).then_some(Found::Large { page, pages }),
            Entry::Small(class) => {
                let run = page & !(class.run_pages() - 1);
                let at = offset - run as usize * PAGE_SIZE;
                let index = at / class.bytes();
                let is_live = self.memory.bitmap_word(run, index / 64).load(Ordering::Relaxed) >> (index % 64) & 1 != 0;
                (at.is_multiple_of(class.bytes()) && is_live).then_some(Found::Small { class, run, index })
            }
        }
    }

    /// The bytes of the live object at an address that was handed out.
    pub fn object_bytes(&self, object: *const u8) -> Option<usize> {
        let found = self.is_here().then(|| self.find(object))??;
        let is_handed_out =
            self.memory.offset(object).map(|offset| self.memory.at(offset).cast_const()) == Some(object);
        is_handed_out.then(|| found.bytes())
    }

    /// Like [`Objects::find`]. Ends the process if there is no object: what the program would do to
    /// the heap then would be saved.
    fn expect(&self, object: *const u8, operation: &str) -> Found {
        self.find(object).unwrap_or_else(|| no_object(object, operation))
    }

    /// Frees an object. Does nothing in a forked child.
    ///
    /// # Safety
    /// Nobody uses the object.
    pub unsafe fn free(&self, object: *mut u8) {
        if !self.is_here() {
            return;
        }
        match self.expect(object, "freed") {
            Found::Small { class, run, index } => self.free_small(object, class, run, index),
            Found::Large { page, pages } => {
                self.release(page, pages);
                let mut free = locked(&self.free_pages);
                if self.entry(page) != Some(Entry::Large(pages)) {
                    no_object(object, "freed");
                }
                self.set_entry(page, Entry::None);
                free.give(&self.nodes, page, pages);
            }
        }
    }

    fn free_small(&self, object: *const u8, class: Class, run: u32, index: usize) {
        let mut with_room = locked(&self.with_room[class.number()]);
        let word = self.memory.bitmap_word(run, index / 64);
        let bits = word.load(Ordering::Relaxed);
        if bits >> (index % 64) & 1 == 0 {
            no_object(object, "freed");
        }
        word.store(bits & !(1 << (index % 64)), Ordering::Relaxed);
        let room = self.nodes.value(run) + 1;
        self.nodes.set_value(run, room);
        if room == 1 {
            with_room.push(&self.nodes, run);
        }
        // The last run with room stays, so that a pair of allocation and free costs no system call.
        if room as usize == class.run_objects() && !with_room.is_only(&self.nodes, run) {
            with_room.remove(&self.nodes, run);
            self.nodes.set_value(run, 0);
            self.release(run, class.run_pages());
            let mut free = locked(&self.free_pages);
            for page in run..run + class.run_pages() {
                self.set_entry(page, Entry::None);
            }
            free.give(&self.nodes, run, class.run_pages());
        }
    }

    /// The bytes that an object has, all of which the program may write.
    ///
    /// # Safety
    /// The object is live.
    pub unsafe fn usable_size(&self, object: *const u8) -> usize {
        self.expect(object, "measured").bytes()
    }

    /// Resizes an object, and moves it if needed. Null if there is no room; then it is as it was.
    ///
    /// # Safety
    /// The object is live, and was made with this alignment.
    pub unsafe fn reallocate(&self, object: *mut u8, bytes: usize, align: usize) -> *mut u8 {
        if !self.is_here() {
            return null_mut();
        }
        let found = self.expect(object, "resized");
        match (found, Class::of(bytes, align)) {
            (Found::Small { class, .. }, Some(wanted)) if class == wanted => return object,
            (Found::Large { page, pages }, None) => {
                let wanted = bytes.div_ceil(PAGE_SIZE);
                if wanted <= pages as usize {
                    self.shorten(page, pages, wanted as u32);
                    return object;
                }
            }
            _ => {}
        }
        let moved = self.allocate(bytes, align);
        if !moved.is_null() {
            // SAFETY: both objects are live and have that many bytes. The caller gives the old one up.
            unsafe {
                moved.copy_from_nonoverlapping(object, found.bytes().min(bytes));
                self.free(object);
            }
        }
        moved
    }

    /// Frees the pages of a large object behind the first ones.
    fn shorten(&self, page: u32, pages: u32, wanted: u32) {
        if wanted == pages {
            return;
        }
        let (rest, rest_pages) = (page + wanted, pages - wanted);
        self.release(rest, rest_pages);
        let mut free = locked(&self.free_pages);
        self.set_entry(page, Entry::Large(wanted));
        free.give(&self.nodes, rest, rest_pages);
    }

    /// Keeps everybody from allocating and freeing.
    pub(super) fn lock(&self) -> Locked<'_> {
        let with_room = self.with_room.iter().map(locked).collect();
        Locked { _with_room: with_room, _free_pages: locked(&self.free_pages), objects: self }
    }

    /// The offsets of pages that hold tables or objects.
    fn held(&self) -> RangeSet {
        let mut held = RangeSet::from(self.memory.table_pages().addresses());
        let (mut page, used) = (self.memory.first_page(), self.used_pages());
        while page < used {
            let pages = match self.entry(page) {
                Some(Entry::Small(class)) => class.run_pages(),
                Some(Entry::Large(pages)) => pages,
                // A damaged entry is saved, and found when the heap is opened.
                Some(Entry::None) | None => {
                    page += 1;
                    continue;
                }
            };
            held.insert(run_of(page, pages).addresses());
            page = page.saturating_add(pages.max(1));
        }
        held
    }

    fn used_pages(&self) -> u32 {
        self.memory.field(Field::UsedPages).load(Ordering::Acquire).min(self.memory.pages.into()) as u32
    }
}

impl Locked<'_> {
    /// The offsets of pages that hold tables or objects.
    pub fn held(&self) -> RangeSet {
        self.objects.held()
    }
}

/// The pages of a run.
fn run_of(start: u32, pages: u32) -> PageRange {
    let start = PageNumber::new(start.into());
    start..start + u64::from(pages)
}

#[cold]
fn no_object(address: *const u8, operation: &str) -> ! {
    let text = format!("pagemark-heap: {address:?} is {operation}, but there is no object of the heap\n");
    // Nothing can be done if nobody reads it.
    _ = std::io::stderr().write_all(text.as_bytes());
    std::process::abort()
}

impl Tracked for Objects {
    fn views(&self) -> &pagemark_linux::views::Views {
        &self.memory.views
    }

    fn crossings(&self) -> &Crossings {
        &self.memory.crossings
    }

    fn used(&self) -> ByteCount {
        ByteCount::of_pages(self.used_pages().into())
    }

    fn parts(&self) -> Parts {
        self.memory.parts
    }
}

#[cfg(test)]
mod tests {
    use pagemark::Address;

    use super::*;
    use crate::ErrorKind;
    use crate::saved::memory::Header;

    fn memory(start: u64) -> Memory {
        let header = Header {
            start: Address::new(start),
            capacity: ByteCount::new(2 << 20),
            parts: Parts::Four,
            program_version: 1,
            session: 1,
        };
        let memory = Memory::map(&header).unwrap();
        memory.write_header(&header);
        memory
    }

    #[test]
    fn bits_of_pages_without_small_objects_are_damage() {
        let large = Entry::Large(3).encode();
        for (number, (entries, page_with_bits)) in
            [([0, 0, 0], 1), ([large, 0, 0], 0), ([large, 0, 0], 2)].into_iter().enumerate()
        {
            let memory = memory(0x1237_4000_0000 + ((number as u64) << 32));
            let first = memory.first_page();
            memory.field(Field::UsedPages).store(u64::from(first) + 3, Ordering::Relaxed);
            (first..).zip(entries).for_each(|(page, entry)| memory.entry(page).store(entry, Ordering::Relaxed));
            memory.bitmap_word(first + page_with_bits, 3).store(1 << 9, Ordering::Relaxed);
            assert_eq!(Objects::load(memory).unwrap_err().kind(), ErrorKind::Damaged, "{entries:?}");
        }
    }

    #[test]
    fn entries_of_pages_that_were_never_used_are_damage() {
        for (number, entry) in [0, Entry::Large(3).encode(), 1].into_iter().enumerate() {
            for behind in [0, 1, 200] {
                let memory = memory(0x1238_4000_0000 + ((number as u64) << 32) + (u64::from(behind) << 36));
                let first = memory.first_page();
                memory.open_tables(first..first + 250).unwrap();
                memory.entry(first + behind).store(entry, Ordering::Relaxed);
                let loaded = Objects::load(memory).map(drop).map_err(|error| error.kind());
                assert_eq!(loaded, if entry == 0 { Ok(()) } else { Err(ErrorKind::Damaged) }, "{entry} {behind}");
            }
        }
    }

    #[test]
    fn objects_do_not_overlap_whatever_the_bitmaps_of_unused_pages_hold() {
        let memory = memory(0x1236_5000_0000);
        for page in memory.first_page()..memory.pages {
            memory.bitmap_word(page, 3).store(u64::MAX, Ordering::Relaxed);
        }
        let objects = Objects::load(memory).unwrap();
        for class in (0..Class::COUNT).filter_map(Class::with_number) {
            let mut made: Vec<usize> = (0..class.run_objects() * 2)
                .map(|_| objects.allocate(class.bytes(), 16).addr() & ((2 << 20) - 1))
                .collect();
            made.sort_unstable();
            assert!(made.windows(2).all(|pair| pair[1] - pair[0] >= class.bytes()), "{class:?}");
        }
    }
}
