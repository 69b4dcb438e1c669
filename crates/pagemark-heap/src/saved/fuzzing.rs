//! What the fuzz targets in `fuzz/` call: readers that are private otherwise.

use std::sync::atomic::Ordering;

use pagemark::{Address, ByteCount, PAGE_SIZE};

use super::memory::{Field, Header, Memory};
use super::objects::Objects;
use crate::Parts;

/// The smallest heap, at a place where nothing else is.
const HEADER: Header = Header {
    start: Address::new(0x1236_4000_0000),
    capacity: ByteCount::new(2 << 20),
    parts: Parts::Four,
    program_version: 1,
    session: 1,
};

/// Loads a saved heap whose tables are `entries`, one for each page from the first that can hold
/// objects on, and `bitmaps` (page, word, bits), and uses it if it is accepted.
pub fn saved_heap(used_pages: u64, entries: &[u32], bitmaps: &[(u16, u8, u64)]) {
    let Ok(memory) = Memory::map(&HEADER) else { return };
    memory.write_header(&HEADER);
    memory.field(Field::UsedPages).store(used_pages, Ordering::Relaxed);
    let pages = memory.first_page()..memory.pages;
    for (page, &entry) in pages.zip(entries) {
        memory.entry(page).store(entry, Ordering::Relaxed);
    }
    for &(page, word, bits) in bitmaps {
        memory.bitmap_word(u32::from(page) % memory.pages, usize::from(word) % 4).store(bits, Ordering::Relaxed);
    }
    let Ok(objects) = Objects::load(memory) else { return };
    let held = objects.lock().held();
    let objects_of = |bytes| (0..40).map(move |_| bytes);
    let made: Vec<*mut u8> = [16, 100, 4096, 5000, 70_000]
        .into_iter()
        .flat_map(objects_of)
        .map(|bytes| objects.allocate(bytes, 16))
        .filter(|object| !object.is_null())
        .collect();
    let mut sorted = made.clone();
    sorted.sort_unstable();
    sorted.dedup();
    assert_eq!(sorted.len(), made.len(), "two objects are at one place");
    for object in made {
        // SAFETY: the object is live, and is freed once.
        unsafe { objects.free(object) };
    }
    assert!(held.iter().all(|range| range.start.get() < HEADER.capacity.get()));
}

/// Reads the header of a saved heap.
pub fn header(page: &[u8; PAGE_SIZE], bytes: u64) {
    if let Ok(header) = Header::read(page, ByteCount::new(bytes)) {
        let _ = header.place();
    }
}
