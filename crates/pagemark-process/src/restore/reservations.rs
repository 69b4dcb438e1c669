//! Mappings that hold little or nothing: memory that a program has reserved.
//!
//! CRIU makes private mappings elsewhere first, writable, and moves them; before that, it reserves
//! as many addresses as all of them have, in one piece. The kernel refuses a writable mapping that
//! is larger than its memory, although it sets none aside for one that cannot be written; and there
//! are not enough addresses for twice the mappings of a program that reserves most of them.
//!
//! Therefore the images have CRIU make what holds nothing in its place and as it is. Where the
//! private mappings of a process cover `MANY` bytes of addresses, those addresses may not be free a
//! second time: the images then have the parts of a large mapping that hold something as mappings
//! of their own. The kernel joins them with their neighbours again, except those that were written
//! far apart.

use std::path::{Path, PathBuf};

use pagemark::{Address, AddressRangeExt, ByteCount, Range, RangeSet};
use pagemark_trace::error::Error;

use super::io;
use crate::criu::images::mappings::{self, PRIVATE_ANONYMOUS};
use crate::criu::images::schema::{MmEntry, PstreeEntry, VmaEntry};
use crate::criu::images::{ImageKind, read_first, with_varint};

/// CRIU's status of a mapping that the program has made.
const IS_REGULAR: u32 = 1 << 0;
/// CRIU's status of a private mapping without a file.
const IS_PRIVATE_ANONYMOUS: u32 = 1 << 9;
/// CRIU's status of a mapping that needs no right to write for its restore.
const NEEDS_NO_WRITE: u32 = 1 << 29;

/// Addresses of private mappings in one process from which on mappings are divided. A process has
/// 128 TiB.
const MANY: ByteCount = ByteCount::new(16 << 40);

/// The smallest mapping that is divided.
const SMALLEST: ByteCount = ByteCount::new(4 << 30);

/// The smallest part without pages that a mapping is divided for.
const SMALLEST_GAP: ByteCount = ByteCount::new(1 << 30);

/// The boundaries of parts: a huge page lies in one part.
const ALIGNMENT: ByteCount = ByteCount::new(2 << 20);

/// Limit of the parts of one mapping. A process may have 65,530 mappings by default.
const MAX_PARTS: usize = 512;

fn image_of(directory: &Path, process: &PstreeEntry) -> PathBuf {
    directory.join(format!("mm-{}.img", process.pid))
}

/// True if mappings are to be divided: if the private mappings of one of the processes cover `MANY`
/// bytes of addresses.
pub(super) fn divides<'a>(
    directory: &Path,
    processes: impl IntoIterator<Item = &'a PstreeEntry>,
) -> Result<bool, Error> {
    for process in processes {
        let memory: MmEntry = read_first(&image_of(directory, process), ImageKind::Mm)?;
        let private = memory.vmas.iter().filter(|mapping| mapping.flags & libc::MAP_PRIVATE as u32 != 0);
        let bytes = private.map(|mapping| mapping.end.saturating_sub(mapping.start)).fold(0, u64::saturating_add);
        if bytes >= MANY.get() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Has CRIU make the mappings of a process in their place as far as they hold nothing. `pages` are
/// the pages that any process of the tree has in its images: a child shares pages with its parent
/// only in mappings of the same addresses. `divides` is what [`divides`] returns, for the same
/// reason.
pub(super) fn map_in_place(
    directory: &Path,
    process: &PstreeEntry,
    pages: &RangeSet,
    divides: bool,
) -> Result<(), Error> {
    let path = image_of(directory, process);
    let image = mappings::divided(&path, |entry, mapping| {
        if entry.status != IS_REGULAR | IS_PRIVATE_ANONYMOUS {
            return None;
        }
        let in_place = (IS_REGULAR | NEEDS_NO_WRITE).into();
        let parts = parts(entry, pages, divides)?.into_iter().map(|part| {
            let mapping = with_varint(mapping, VmaEntry::START, part.range.start.get());
            let mapping = with_varint(&mapping, VmaEntry::END, part.range.end.get());
            if part.is_empty { with_varint(&mapping, VmaEntry::STATUS, in_place) } else { mapping }
        });
        Some(parts.collect())
    })?;
    std::fs::write(&path, image.encode()).map_err(io(format!("write {}", path.display())))
}

#[derive(PartialEq, Eq, Debug)]
struct Part {
    range: Range,
    is_empty: bool,
}

/// The parts that a mapping is divided into. None if it stays as it is.
fn parts(entry: &VmaEntry, pages: &RangeSet, divides: bool) -> Option<Vec<Part>> {
    let range = Address::new(entry.start)..Address::new(entry.end);
    let is_writable = entry.prot & libc::PROT_WRITE as u32 != 0;
    let is_empty = pages.within(range.clone()).next().is_none();
    if !is_writable && is_empty {
        return Some(vec![Part { range, is_empty: true }]);
    }
    let others = (libc::MAP_LOCKED | libc::MAP_GROWSDOWN | libc::MAP_HUGETLB) as u32;
    let is_plain = entry.flags & PRIVATE_ANONYMOUS == PRIVATE_ANONYMOUS && entry.flags & others == 0;
    if !is_plain || range.is_empty() || range.byte_count() < SMALLEST {
        return None;
    }
    if !divides {
        return is_empty.then(|| vec![Part { range, is_empty }]);
    }
    let mut smallest_gap = SMALLEST_GAP;
    loop {
        let parts = divide(&range, pages, smallest_gap);
        if parts.len() <= MAX_PARTS {
            return parts.iter().any(|part| part.is_empty).then_some(parts);
        }
        smallest_gap = ByteCount::new(smallest_gap.get() * 2);
    }
}

/// Divides a mapping at all gaps between pages that are not smaller.
fn divide(range: &Range, pages: &RangeSet, smallest_gap: ByteCount) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    let mut at = range.start;
    let down = |address: Address| Address::new(address.get() / ALIGNMENT.get() * ALIGNMENT.get());
    let up = |address: Address| Address::new(address.get().next_multiple_of(ALIGNMENT.get()));
    for held in pages.within(range.clone()) {
        let start = down(held.start).max(at);
        let end = up(held.end).min(range.end).max(at);
        if (at..start).byte_count() >= smallest_gap {
            parts.push(Part { range: at..start, is_empty: true });
            parts.push(Part { range: start..end, is_empty: false });
        } else if let Some(last) = parts.last_mut() {
            last.range.end = end;
        } else {
            parts.push(Part { range: at..end, is_empty: false });
        }
        at = end;
    }
    let rest = at..range.end;
    match parts.last_mut() {
        Some(last) if rest.byte_count() < smallest_gap => last.range.end = range.end,
        _ => parts.push(Part { range: rest, is_empty: true }),
    }
    parts
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GIB: u64 = 1 << 30;

    fn entry(start: u64, end: u64, prot: i32, flags: i32) -> VmaEntry {
        let flags = PRIVATE_ANONYMOUS | flags as u32;
        VmaEntry { start, end, shmid: 0, prot: prot as u32, flags, status: 0x201, madv: None, fdflags: None }
    }

    fn set(ranges: &[(u64, u64)]) -> RangeSet {
        ranges.iter().map(|&(start, end)| Address::new(start)..Address::new(end)).collect()
    }

    fn described(entry: &VmaEntry, pages: &RangeSet) -> Option<Vec<(u64, u64, bool)>> {
        let parts = parts(entry, pages, true)?;
        Some(parts.iter().map(|part| (part.range.start.get(), part.range.end.get(), part.is_empty)).collect())
    }

    #[test]
    fn what_a_reservation_holds_is_a_mapping_of_its_own() {
        let writable = libc::PROT_READ | libc::PROT_WRITE;
        let pages = set(&[(100 * GIB, 100 * GIB + 0x1000), (105 * GIB - 0x1000, 105 * GIB + 0x3000)]);
        let huge = ALIGNMENT.get();
        let divided = vec![
            (100 * GIB, 100 * GIB + huge, false),
            (100 * GIB + huge, 105 * GIB - huge, true),
            (105 * GIB - huge, 105 * GIB + huge, false),
            (105 * GIB + huge, 200 * GIB, true),
        ];
        for protection in [writable, libc::PROT_READ, libc::PROT_NONE] {
            let mapping = entry(100 * GIB, 200 * GIB, protection, libc::MAP_NORESERVE);
            assert_eq!(described(&mapping, &pages), Some(divided.clone()));
        }
        // A gap that is too small, and one at the end.
        let mapping = entry(104 * GIB + GIB / 2, 105 * GIB + GIB / 2, writable, 0);
        assert_eq!(described(&mapping, &pages), None);
        let near = set(&[(100 * GIB, 101 * GIB), (102 * GIB - huge, 108 * GIB)]);
        let mapping = entry(100 * GIB, 108 * GIB + 0x5000, writable, 0);
        assert_eq!(described(&mapping, &near), None);
    }

    #[test]
    fn a_mapping_without_a_page_is_made_in_its_place() {
        let none = RangeSet::new();
        let whole = |end| Some(vec![(GIB, end, true)]);
        assert_eq!(described(&entry(GIB, GIB + 0x1000, libc::PROT_READ, 0), &none), whole(GIB + 0x1000));
        assert_eq!(described(&entry(GIB, GIB + 0x1000, libc::PROT_WRITE, 0), &none), None);
        assert_eq!(described(&entry(GIB, 99 * GIB, libc::PROT_WRITE, 0), &none), whole(99 * GIB));
        for flag in [libc::MAP_LOCKED, libc::MAP_GROWSDOWN, libc::MAP_HUGETLB] {
            assert_eq!(described(&entry(GIB, 99 * GIB, libc::PROT_WRITE, flag), &none), None);
        }
    }

    #[test]
    fn a_mapping_is_not_divided_where_there_are_addresses() {
        let mapping = entry(100 * GIB, 200 * GIB, libc::PROT_WRITE, libc::MAP_NORESERVE);
        assert_eq!(parts(&mapping, &set(&[(100 * GIB, 100 * GIB + 0x1000)]), false), None);
        let whole = Part { range: Address::new(100 * GIB)..Address::new(200 * GIB), is_empty: true };
        assert_eq!(parts(&mapping, &RangeSet::new(), false), Some(vec![whole]));
    }

    #[test]
    fn a_mapping_has_a_limited_number_of_parts() {
        let pages: RangeSet =
            (0..40_000_u64).map(|at| Address::new(at * 2 * GIB)..Address::new(at * 2 * GIB + 0x1000)).collect();
        let parts = parts(&entry(0, 80_000 * GIB, libc::PROT_WRITE, 0), &pages, true);
        assert!(parts.is_none_or(|parts| parts.len() <= MAX_PARTS));
    }

    proptest! {
        #[test]
        fn parts_are_all_of_a_mapping_and_empty_ones_hold_nothing(
            runs in prop::collection::vec((0_u64..40 << 18, 1_u64..10_000), 0..20),
            start in 0_u64..20 << 18,
            pages in 1_u64..30 << 18,
        ) {
            let address = |page: u64| Address::new(page * 4096);
            let held: RangeSet = runs.iter().map(|&(page, count)| address(page)..address(page + count)).collect();
            let mapping = entry(start * 4096, (start + pages) * 4096, libc::PROT_WRITE, 0);
            if let Some(parts) = parts(&mapping, &held, true) {
                let mut at = address(start);
                for part in parts {
                    prop_assert_eq!(part.range.start, at);
                    prop_assert!(part.range.start < part.range.end);
                    prop_assert!(!part.is_empty || held.within(part.range.clone()).next().is_none());
                    at = part.range.end;
                }
                prop_assert_eq!(at, address(start + pages));
            }
        }
    }
}
