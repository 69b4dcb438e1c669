//! Which objects reach from one part into the next: whose bytes a part begins with.
//!
//! An object is written through the view of the part in which it begins, wherever its bytes are.
//! The beginning of a part therefore may belong to another view than the rest of the part. There is
//! one entry for each part, with the view of the object that reaches into it, and where that object
//! ends in the page. An object that is handed out sets the entries of the parts that it reaches
//! into, and clears the entry of the part in which it begins if the entry says that another object
//! was there. Nothing has to be done when an object is freed: an entry that remains names bytes
//! that belong to no object.
//!
//! A report finds a write only if the entries are set before it. An object that the allocator fills
//! before it hands it out is therefore [reported once more](Crossings::reports) if a report may
//! have read the entries meanwhile.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering, fence};

use pagemark::PAGE_SIZE;
use pagemark_linux::pieces::ReservedMemory;

use crate::Parts;

/// Objects begin and end at multiples of this.
const UNIT: usize = 8;

/// Bits of the end, in units from the beginning of the page: 1 to 512.
const END_BITS: u32 = 10;

/// The entries of all parts of a heap.
#[derive(Debug)]
pub(crate) struct Crossings {
    parts: Parts,
    /// `None` if a page is one part: then each page belongs to the one view.
    entries: Option<ReservedMemory>,
    /// Number of reports that have begun to read the entries.
    reports: AtomicUsize,
}

impl Crossings {
    /// Makes the table for a heap of `bytes`, of which nothing is open.
    ///
    /// # Errors
    /// `ENOMEM`: there is no address space.
    pub(crate) fn new(parts: Parts, bytes: usize) -> io::Result<Crossings> {
        let table_bytes = (bytes >> parts.shift()) * size_of::<AtomicU16>();
        let entries = (parts != Parts::One).then(|| ReservedMemory::new(table_bytes)).transpose()?;
        Ok(Crossings { parts, entries, reports: AtomicUsize::new(0) })
    }

    /// Opens the entries of the parts in which `bytes` of the heap lie. Only objects there may be
    /// recorded, and only pages there be asked for. Allocates no memory of the program.
    ///
    /// # Errors
    /// Those of [`ReservedMemory::open`].
    pub(crate) fn open(&self, bytes: Range<usize>) -> io::Result<()> {
        let Some(entries) = &self.entries else { return Ok(()) };
        let (first, end) = (bytes.start >> self.parts.shift(), bytes.end.div_ceil(1 << self.parts.shift()));
        entries.open(first * size_of::<AtomicU16>()..end * size_of::<AtomicU16>())
    }

    /// Declares that a report is going to read the entries.
    pub(crate) fn begin_report(&self) {
        self.reports.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// The number of reports so far. A report that was begun between two calls may not have seen
    /// what was recorded between them; of a page that is one part, every report sees all.
    #[cfg(feature = "jemalloc")]
    pub(crate) fn reports(&self) -> usize {
        fence(Ordering::SeqCst);
        if self.entries.is_some() { self.reports.load(Ordering::Acquire) } else { 0 }
    }

    /// The entry of a part, by the number of the part in the heap.
    #[inline]
    fn entry(&self, entries: &ReservedMemory, part: usize) -> &AtomicU16 {
        debug_assert!(entries.is_open(part * size_of::<AtomicU16>()));
        // SAFETY: the part is one of the heap that is used, so its entry is in the open part of the
        // mapping, which lives as long as `self`, is filled with zeros at first, and is accessed by atomic
        // operations only.
        unsafe { AtomicU16::from_ptr(entries.start().as_ptr().cast::<u16>().add(part)) }
    }

    /// Records an object that is handed out. It has `size` bytes from the offset `start` on.
    #[inline]
    pub(crate) fn record(&self, start: usize, size: usize) {
        let Some(entries) = &self.entries else { return };
        let shift = self.parts.shift();
        let part = start >> shift;
        let reaches_on = (start & ((1 << shift) - 1)) + size > 1 << shift;
        let (_, end) = unpack(self.entry(entries, part).load(Ordering::Relaxed));
        if reaches_on || start % PAGE_SIZE < end {
            self.record_crossing(entries, start, size);
        }
    }

    #[cold]
    fn record_crossing(&self, entries: &ReservedMemory, start: usize, size: usize) {
        let shift = self.parts.shift();
        let (first, last) = (start >> shift, (start + size - 1) >> shift);
        // Another thread may set the entry now, for an object that ends before this one begins.
        let clear = |entry| (start % PAGE_SIZE < unpack(entry).1).then_some(0);
        let _ = self.entry(entries, first).fetch_update(Ordering::Release, Ordering::Relaxed, clear);
        let view = first % self.parts.count();
        for part in first + 1..=last {
            let page = part << shift & !(PAGE_SIZE - 1);
            let end = (start + size - page).min(PAGE_SIZE).next_multiple_of(UNIT);
            let entry = (end / UNIT) as u16 | (view as u16) << END_BITS;
            if self.entry(entries, part).load(Ordering::Relaxed) != entry {
                self.entry(entries, part).store(entry, Ordering::Release);
            }
        }
    }

    /// Calls `each` with the parts of a page that were written, as offsets in the page, in
    /// ascending order. Bit k of `views` says whether the page was written through the view k.
    pub(crate) fn written(&self, page: usize, views: u8, mut each: impl FnMut(Range<usize>)) {
        let Some(entries) = &self.entries else { return each(0..PAGE_SIZE) };
        let count = self.parts.count();
        let is_written = |view: usize| views >> view & 1 != 0;
        for part in 0..count {
            let (start, next) = (part << self.parts.shift(), (part + 1) << self.parts.shift());
            let (view, end) = unpack(self.entry(entries, page * count + part).load(Ordering::Acquire));
            let end = end.clamp(start, next);
            if is_written(view) && start < end {
                each(start..end);
            }
            if is_written(part) && end < next {
                each(end..next);
            }
        }
    }
}

/// The view of an entry, and the offset in the page where its object ends; 0 if there is none.
fn unpack(entry: u16) -> (usize, usize) {
    ((entry >> END_BITS) as usize, (entry & ((1 << END_BITS) - 1)) as usize * UNIT)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(crossings: &Crossings, page: usize, views: u8) -> Vec<(usize, usize)> {
        let mut found = Vec::new();
        crossings.written(page, views, |range| found.push((range.start, range.end)));
        found
    }

    #[test]
    fn the_bytes_of_a_view_are_those_of_its_objects() {
        let crossings = Crossings::new(Parts::Four, 4 * PAGE_SIZE).unwrap();
        crossings.open(0..4 * PAGE_SIZE).unwrap();
        assert_eq!(written(&crossings, 0, 0b0101), [(0, 1024), (2048, 3072)]);
        // From part 1 of page 0 into part 2; from part 3 of page 0 into part 1 of page 1.
        crossings.record(2000, 100);
        crossings.record(3500, 2000);
        assert_eq!(written(&crossings, 0, 0b0010), [(1024, 2048), (2048, 2104)]);
        assert_eq!(written(&crossings, 0, 0b0100), [(2104, 3072)]);
        assert_eq!(written(&crossings, 1, 0b1000), [(0, 1024), (1024, 1408), (3072, 4096)]);
        assert_eq!(written(&crossings, 1, 0b0010), [(1408, 2048)]);
        assert_eq!(written(&crossings, 1, 0b0001), []);
        // Another object where the second one ended.
        crossings.record(PAGE_SIZE + 1392, 16);
        assert_eq!(written(&crossings, 1, 0b0010), [(1024, 2048)]);
        assert_eq!(written(&crossings, 1, 0b1111), [(0, 1024), (1024, 2048), (2048, 3072), (3072, 4096)]);
    }

    /// Two threads get neighbours in memory where a large object was.
    #[test]
    fn an_object_beside_one_that_reaches_into_its_part_leaves_its_entry() {
        const ROUNDS: usize = 400_000;
        let crossings = Crossings::new(Parts::Two, PAGE_SIZE).unwrap();
        crossings.open(0..PAGE_SIZE).unwrap();
        let (begun, ended) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let mut lost_rounds = 0;
        let wait_for = |count: &AtomicUsize, least: usize| {
            while count.load(Ordering::Acquire) < least {
                std::thread::yield_now();
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..ROUNDS {
                    wait_for(&begun, round + 1);
                    crossings.record(2064, 64);
                    ended.fetch_add(1, Ordering::AcqRel);
                }
            });
            for round in 0..ROUNDS {
                crossings.record(0, PAGE_SIZE);
                begun.fetch_add(1, Ordering::AcqRel);
                crossings.record(2000, 64);
                wait_for(&ended, round + 1);
                lost_rounds += usize::from(written(&crossings, 0, 0b01) != [(0, 2048), (2048, 2064)]);
            }
        });
        assert_eq!(lost_rounds, 0);
    }
}
