//! Pages that were copied from the target and are not yet in the store.

use std::collections::HashMap;
use std::io;

use pagemark_linux::flight::FlightBuffer;
use pagemark_linux::proc::system;

use super::ReadPages;
use crate::target::SpaceId;
use crate::{AddressRangeExt, ByteCount, Error, ErrorKind, PAGE_SIZE, PageNumber, Range, RangeSet, ranges};

/// Copied pages are held in memory until the target resumes: up to a quarter of the memory that the
/// machine has to spare, but at most this many bytes. A page that a later round copies again is
/// then hashed, compressed and stored only once, and a round takes no longer than its copying.
const MAX_BYTES: usize = 2 << 30;
/// The same for a capture that copies all memory. More gains little, since each page is stored, and
/// costs the zeroing of new memory: three times as much as all else of a checkpoint, where a
/// hypervisor takes back what its guests free.
const MAX_FIRST_BYTES: usize = 64 << 20;
/// The least limit that is chosen on a machine, or in a control group, with little memory.
const MIN_BYTES: usize = 4 << 20;
/// Divisor of the available memory that gives the part for pages in flight.
const SHARE: usize = 4;
/// Memory that is left for all else when more is copied than the limit.
const SPARE_BYTES: usize = 8 << 20;

/// Bytes of one buffer for pages in flight.
const BUFFER_BYTES: usize = 128 << 20;
/// The most that a pre-copy round copies at once: what fits into one buffer.
pub(super) const PART: ByteCount = ByteCount::new(BUFFER_BYTES as u64);

/// Bytes of the first buffer that are kept from one checkpoint to the next; the rest is lent to the
/// kernel.
pub(super) const KEPT_BYTES: usize = 2 << 20;
/// The most that is copied at once in a freeze, so that what was populated is used first.
const PART_FROZEN: ByteCount = ByteCount::new(8 << 20);

/// The limit of bytes in flight that is chosen on this machine.
pub(super) fn default_limit(is_first: bool) -> usize {
    let available_bytes = system::available_bytes().unwrap_or(0) as usize;
    (available_bytes / SHARE).clamp(MIN_BYTES, if is_first { MAX_FIRST_BYTES } else { MAX_BYTES })
}

/// Pages that were copied from the target and are not yet in the store.
pub(super) struct Flight {
    buffers: Vec<FlightBuffer>,
    /// The least length of a buffer, bytes.
    buffer_bytes: usize,
    /// The buffer that is being filled.
    current: usize,
    /// Bytes of the current buffer that are in use.
    used_bytes: usize,
    /// The last buffer of which a part was populated.
    prepared: usize,
    /// Bytes of all buffers that are in use.
    total_bytes: usize,
    /// Those of them that hold superseded copies.
    superseded_bytes: usize,
    /// The most bytes that were in use during this capture.
    pub peak_bytes: usize,
    /// Above this many bytes a pre-copy round stores what is in flight.
    pub limit_bytes: usize,
    /// In the order in which they were copied.
    copied: Vec<PageCopy>,
    /// The error number for which a copy was left out since the last check.
    left_out: Option<i32>,
}

impl Default for Flight {
    fn default() -> Self {
        Flight {
            buffers: Vec::new(),
            buffer_bytes: BUFFER_BYTES,
            current: 0,
            used_bytes: 0,
            prepared: 0,
            total_bytes: 0,
            superseded_bytes: 0,
            peak_bytes: 0,
            limit_bytes: 0,
            copied: Vec::new(),
            left_out: None,
        }
    }
}

/// One copy: the content of the ranges lies one after the other in a buffer.
struct PageCopy {
    space: SpaceId,
    ranges: RangeSet,
    /// The part of the ranges that is copied again later.
    superseded: RangeSet,
    /// Pages that could not be read, because they were no longer mapped.
    missing: RangeSet,
    buffer: usize,
    offset: usize,
}

/// The last copy of a page. None if the page could not be read, because it was no longer mapped.
pub(super) type LastCopy<'a> = (PageNumber, Option<&'a [u8; PAGE_SIZE]>);

/// Takes the last copies of many pages of a space.
type VisitCopies<'a> = &'a mut dyn FnMut(SpaceId, &[LastCopy<'_>]) -> Result<(), Error>;

/// True if this number of bytes can be copied besides those in flight. What is within the limit
/// always can.
fn fits(bytes: usize, in_flight: usize, limit: usize, available: impl FnOnce() -> Option<usize>) -> bool {
    let has_memory = |available: usize| bytes.saturating_add(SPARE_BYTES) <= available;
    bytes <= KEPT_BYTES || in_flight + bytes <= limit || available().is_none_or(has_memory)
}

impl Flight {
    /// Makes sure that `expected_bytes` can be copied without a page fault, as far as there is
    /// memory within the limit. A page fault for each copied page takes several times as long as
    /// the copy.
    pub fn prepare(&mut self, expected_bytes: usize) {
        let room_bytes = self.limit_bytes.saturating_sub(self.total_bytes);
        let mut left_bytes = expected_bytes.min(room_bytes).max(KEPT_BYTES);
        let (mut number, mut used_bytes) = (self.current, self.used_bytes);
        while left_bytes > 0 {
            if number == self.buffers.len() {
                let Ok(buffer) = FlightBuffer::new(self.buffer_bytes) else { return };
                self.buffers.push(buffer);
            }
            let buffer = &mut self.buffers[number];
            let part_bytes = left_bytes.min(buffer.length() - used_bytes);
            if buffer.open(used_bytes + part_bytes).is_err() {
                return;
            }
            buffer.populate(used_bytes..used_bytes + part_bytes);
            self.prepared = self.prepared.max(number);
            left_bytes -= part_bytes;
            (number, used_bytes) = (number + 1, 0);
        }
    }

    /// The buffer with room for that many bytes after its used part.
    ///
    /// # Errors
    /// `ENOMEM`
    fn room(&mut self, bytes: usize) -> io::Result<usize> {
        while self.buffers.get(self.current).is_some_and(|buffer| buffer.length() - self.used_bytes < bytes) {
            self.current += 1;
            self.used_bytes = 0;
        }
        if self.current == self.buffers.len() {
            // Where address space is scarce, no more than is needed.
            let buffer = FlightBuffer::new(bytes.max(self.buffer_bytes)).or_else(|_| FlightBuffer::new(bytes))?;
            self.buffers.push(buffer);
        }
        self.buffers[self.current].open(self.used_bytes + bytes)?;
        Ok(self.current)
    }

    /// True if that many bytes can be copied within the limit.
    pub fn has_room(&self, bytes: usize) -> bool {
        self.total_bytes + bytes <= self.limit_bytes
    }

    /// Like [`Flight::has_room`], where superseded copies make room if there is none.
    pub fn make_room(&mut self, bytes: usize) -> bool {
        if !self.has_room(bytes) && self.total_bytes - self.superseded_bytes + bytes <= self.limit_bytes {
            self.compact();
        }
        self.has_room(bytes)
    }

    /// Fails if a copy was left out for want of memory.
    pub fn check(&mut self) -> Result<(), Error> {
        match self.left_out.take() {
            Some(number) => {
                let error = io::Error::from_raw_os_error(number);
                let reason = "no memory for the pages that are copied while the target is stopped, on the machine or \
                              in a control group of Pagemark";
                Err(Error::because(ErrorKind::NoMemory, reason).caused_by(error))
            }
            None => Ok(()),
        }
    }

    /// Copies pages. Without memory for them, [`Flight::check`] fails later: first, a frozen target
    /// resumes.
    pub fn copy<E>(&mut self, read: ReadPages<'_, E>, space: SpaceId, ranges: RangeSet) -> Result<(), E> {
        let bytes = ranges.total_bytes().to_usize();
        if bytes == 0 {
            return Ok(());
        }
        // A process that takes more memory than its control group has is killed.
        if !fits(bytes, self.total_bytes, self.limit_bytes, || Some(system::available_bytes()? as usize)) {
            self.left_out = Some(libc::ENOMEM);
            return Ok(());
        }
        let buffer = match self.room(bytes) {
            Ok(buffer) => buffer,
            Err(error) => {
                self.left_out = Some(error.raw_os_error().unwrap_or(libc::ENOMEM));
                return Ok(());
            }
        };
        let offset = self.used_bytes;
        let list: Vec<Range> = ranges.iter().collect();
        let missing = read(space, &list, self.buffers[buffer].slice(offset..offset + bytes))?;
        self.used_bytes += bytes;
        self.total_bytes += bytes;
        self.peak_bytes = self.peak_bytes.max(self.total_bytes);
        self.copied.push(PageCopy { space, ranges, superseded: RangeSet::new(), missing, buffer, offset });
        Ok(())
    }

    /// Copies pages in parts, so that memory that is populated already is used first.
    pub fn copy_in_freeze<E>(&mut self, read: ReadPages<'_, E>, space: SpaceId, pages: &RangeSet) -> Result<(), E> {
        let mut parts = ranges::split(pages.iter(), PART_FROZEN).map(RangeSet::from_iter);
        parts.try_for_each(|part| self.copy(read, space, part))
    }

    /// The copies of these pages are not the last ones: others follow.
    pub fn supersede(&mut self, space: SpaceId, pages: &RangeSet) {
        for copied in self.copied.iter_mut().filter(|copied| copied.space == space) {
            let before = copied.superseded.total_bytes();
            copied.superseded.extend(&copied.ranges.intersection(pages));
            self.superseded_bytes += (copied.superseded.total_bytes() - before).to_usize();
        }
    }

    /// Moves the copies together, without those that are superseded.
    ///
    /// Copies keep their order, and none is longer than before. So each fits where it was, and is
    /// moved to there or before, over nothing that has not been moved.
    fn compact(&mut self) {
        let copied = std::mem::take(&mut self.copied);
        (self.current, self.used_bytes, self.total_bytes, self.superseded_bytes) = (0, 0, 0, 0);
        for old in copied {
            let mut kept = old.ranges.clone();
            kept.subtract(&old.superseded);
            let bytes = kept.total_bytes().to_usize();
            if bytes == 0 {
                continue;
            }
            // More of a buffer may have to be opened than was, for which there may be no memory.
            while self.buffers[self.current].length() - self.used_bytes < bytes
                || self.buffers[self.current].open(self.used_bytes + bytes).is_err()
            {
                self.current += 1;
                self.used_bytes = 0;
            }
            let (buffer, offset) = (self.current, self.used_bytes);
            let mut from = old.offset;
            for range in old.ranges.iter() {
                for piece in kept.within(range.clone()) {
                    let skipped = (piece.start - range.start).to_usize();
                    self.move_down((old.buffer, from + skipped), piece.byte_count().to_usize());
                }
                from += range.byte_count().to_usize();
            }
            self.total_bytes += bytes;
            let missing = old.missing.intersection(&kept);
            let superseded = RangeSet::new();
            self.copied.push(PageCopy { space: old.space, ranges: kept, superseded, missing, buffer, offset });
        }
    }

    /// Moves bytes of a buffer to the end of what is used, which lies before them.
    fn move_down(&mut self, (buffer, offset): (usize, usize), bytes: usize) {
        let to = self.used_bytes;
        if buffer == self.current {
            self.buffers[buffer].slice(to..offset + bytes).copy_within(offset - to.., 0);
        } else {
            let (before, from) = self.buffers.split_at_mut(buffer);
            before[self.current].slice(to..to + bytes).copy_from_slice(from[0].slice(offset..offset + bytes));
        }
        self.used_bytes += bytes;
    }

    /// Visits the last copy of each page, and no copy that is superseded.
    ///
    /// # Errors
    /// What `visit` returns.
    pub fn visit(&mut self, visit: VisitCopies<'_>) -> Result<(), Error> {
        let mut visited: HashMap<SpaceId, RangeSet> = HashMap::new();
        for copied in self.copied.iter().rev() {
            let visited = visited.entry(copied.space).or_default();
            visited.extend(&copied.superseded);
            let buffer = &mut self.buffers[copied.buffer];
            let bytes = copied.ranges.total_bytes().to_usize();
            let mut content = &*buffer.slice(copied.offset..copied.offset + bytes);
            let mut last_copies = Vec::new();
            for range in copied.ranges.iter() {
                let pages = content.split_off(..range.byte_count().to_usize()).unwrap_or_default();
                let mut later = visited.within(range.clone()).peekable();
                for (number, page) in range.pages().zip(pages.as_chunks::<PAGE_SIZE>().0) {
                    let address = number.address();
                    while later.next_if(|later| later.end <= address).is_some() {}
                    if later.peek().is_some_and(|later| later.start <= address) {
                        continue;
                    }
                    let is_missing = !copied.missing.is_empty() && copied.missing.contains(address);
                    last_copies.push((number, (!is_missing).then_some(page)));
                }
            }
            visit(copied.space, &last_copies)?;
            visited.extend(&copied.ranges);
        }
        Ok(())
    }

    /// Forgets all copies. Their memory is lent to the kernel.
    pub fn clear(&mut self) {
        self.copied.clear();
        self.left_out = None;
        // Buffers that this checkpoint did not need are likely not needed by the next one either.
        self.buffers.truncate(self.current.max(self.prepared) + 1);
        self.prepared = 0;
        (self.current, self.used_bytes, self.total_bytes, self.superseded_bytes) = (0, 0, 0, 0);
        for (number, buffer) in self.buffers.iter_mut().enumerate() {
            // SAFETY: what is read of a buffer was copied to it for the same checkpoint.
            unsafe { buffer.lend_behind(if number == 0 { KEPT_BYTES } else { 0 }) };
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{Just, Strategy, prop, prop_assert_eq, prop_oneof, proptest};

    use super::*;
    use crate::PageRangeExt;

    /// Pages of one of two spaces: more than fit into a buffer of a test.
    const PAGES: u64 = 700;
    const SPACES: u64 = 2;
    /// The length of a buffer is a multiple of this.
    const TEST_BUFFER_BYTES: usize = 2 << 20;

    /// What is done with pages in flight. Page numbers are first and behind the last.
    #[derive(Clone, Debug)]
    enum Act {
        Copy(u64, Vec<(u64, u64)>),
        /// The pages are copied again, at once or with others in between.
        Supersede(u64, Vec<(u64, u64)>),
        Compact,
    }

    fn act() -> impl Strategy<Value = Act> {
        let pages = || prop::collection::vec((0..PAGES, 1..200u64), 1..6);
        prop_oneof![
            4 => (0..SPACES, pages()).prop_map(|(space, pages)| Act::Copy(space, pages)),
            2 => (0..SPACES, pages()).prop_map(|(space, pages)| Act::Supersede(space, pages)),
            2 => Just(Act::Compact),
        ]
    }

    fn set(pages: &[(u64, u64)]) -> RangeSet {
        let range = |&(first, count): &(u64, u64)| {
            let end = PageNumber::new((first + count).min(PAGES));
            (PageNumber::new(first)..end).addresses()
        };
        pages.iter().map(range).collect()
    }

    /// Copies pages, each full of a byte that tells which copy it is.
    fn copy(flight: &mut Flight, space: u64, ranges: &RangeSet, stamp: u8) {
        let mut read = |_: SpaceId, _: &[Range], buffer: &mut [u8]| -> Result<RangeSet, Error> {
            buffer.fill(stamp);
            Ok(RangeSet::new())
        };
        flight.copy(&mut read, space, ranges.clone()).unwrap();
    }

    proptest! {
        #[test]
        fn the_last_copy_of_each_page_is_visited_once(acts in prop::collection::vec(act(), 1..40)) {
            let mut flight =
                Flight { buffer_bytes: TEST_BUFFER_BYTES, limit_bytes: usize::MAX / 2, ..Flight::default() };
            let mut model: HashMap<(u64, u64), u8> = HashMap::new();
            for (stamp, act) in (1..).zip(acts) {
                let (space, ranges) = match &act {
                    Act::Copy(space, pages) | Act::Supersede(space, pages) => (*space, set(pages)),
                    Act::Compact => {
                        flight.compact();
                        prop_assert_eq!(flight.superseded_bytes, 0);
                        continue;
                    }
                };
                if matches!(act, Act::Supersede(..)) {
                    flight.supersede(space, &ranges);
                    flight.make_room(usize::MAX / 2 - flight.total_bytes + 1);
                }
                copy(&mut flight, space, &ranges, stamp);
                for page in ranges.iter().flat_map(|range| range.pages()) {
                    model.insert((space, page.get()), stamp);
                }
            }
            let mut visited = HashMap::new();
            let mut visit = |space: SpaceId, copies: &[LastCopy<'_>]| {
                for (page, content) in copies {
                    let content = content.expect("all were mapped");
                    assert!(content.iter().all(|&byte| byte == content[0]), "a copy was mixed with another");
                    assert!(visited.insert((space, page.get()), content[0]).is_none(), "{page:?} is visited twice");
                }
                Ok(())
            };
            flight.visit(&mut visit).unwrap();
            prop_assert_eq!(visited, model);
        }
    }

    #[test]
    fn superseded_copies_make_room() {
        const PAGE: usize = PAGE_SIZE;
        let mut flight = Flight { limit_bytes: 8 * PAGE, ..Flight::default() };
        copy(&mut flight, 0, &set(&[(0, 8)]), 1);
        assert!(!flight.has_room(PAGE) && !flight.make_room(PAGE));
        flight.supersede(0, &set(&[(1, 2), (6, 9)]));
        assert!(!flight.make_room(5 * PAGE) && flight.total_bytes == 8 * PAGE, "not that much");
        assert!(flight.make_room(4 * PAGE) && flight.total_bytes == 4 * PAGE);
        assert_eq!(flight.peak_bytes, 8 * PAGE);
    }

    #[test]
    fn more_than_the_limit_is_copied_where_there_is_memory() {
        const MIB: usize = 1 << 20;
        let none = || -> Option<usize> { unreachable!("it is within the limit") };
        assert!(fits(30 * MIB, 2 * MIB, 32 * MIB, none) && fits(KEPT_BYTES, 40 * MIB, 32 * MIB, none));
        assert!(fits(40 * MIB, 0, 32 * MIB, || Some(48 * MIB)) && fits(40 * MIB, 0, 32 * MIB, || None));
        assert!(!fits(40 * MIB, 0, 32 * MIB, || Some(47 * MIB)) && !fits(40 * MIB, 30 * MIB, 32 * MIB, || Some(0)));
    }
}
