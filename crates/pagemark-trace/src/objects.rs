//! Objects of shared anonymous memory, and what a process writes to them.
//!
//! An object (`mmap` with MAP_SHARED and MAP_ANONYMOUS, or of `/dev/zero`) belongs to no process
//! alone, and keeps what was written when the page has left a page table. So a page is known to be
//! unwritten only while the page table says so: by a protected entry, or by the marker of one. An
//! empty entry may have been written, and then dropped or swapped out. Each scan reports the empty
//! entries as written and puts markers there, which needs page tables for the whole mapping: a
//! 512th of its size in each process.

use std::os::fd::AsFd;
use std::sync::{Arc, LazyLock};

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::fstat;
use pagemark::{Address, AddressRangeExt, ByteCount, PageRangeExt, Range, RangeSet};
use pagemark_linux::pagemap::{Filter, PRESENT, Pagemap, SWAPPED, WP_ALLOWED, WRITTEN};
use pagemark_linux::proc::{Mapping, MappingKind};

/// Device and inode of an object of shared anonymous memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ObjectId {
    device: (u32, u32),
    inode: u64,
}

/// The names of the mappings of shared anonymous memory: as the kernel makes it, and as CRIU
/// restores it; and that of the memory of a heap ([`pagemark_linux::views`]), which has a
/// descriptor by which nobody writes.
const NAMES: [&[u8]; 3] = [b"/dev/zero (deleted)", b"/memfd:/dev/zero (deleted)", b"/memfd:pagemark-heap (deleted)"];

/// The device of the kernel's own shared memory. None where the kernel makes none.
static DEVICE: LazyLock<Option<(u32, u32)>> = LazyLock::new(|| {
    let file = memfd_create(c"", MFdFlags::MFD_CLOEXEC).ok()?;
    Some(numbers(fstat(file.as_fd()).ok()?.st_dev))
});

fn numbers(device: libc::dev_t) -> (u32, u32) {
    (libc::major(device), libc::minor(device))
}

/// True if a mapping is of the kernel's own shared memory, not of huge pages or of a file.
pub fn is_shared_memory(mapping: &Mapping) -> bool {
    mapping.kind == MappingKind::SharedMemory && Some(mapping.device) == *DEVICE
}

impl ObjectId {
    /// The object that a mapping shows. None if it is not of shared anonymous memory.
    pub fn of_mapping(mapping: &Mapping) -> Option<ObjectId> {
        let is_object = is_shared_memory(mapping) && NAMES.contains(&&mapping.name[..]);
        is_object.then_some(ObjectId { device: mapping.device, inode: mapping.inode })
    }

    /// The object that is open, by the path that its descriptor leads to and its status. None if
    /// it is no shared anonymous memory.
    pub fn of_open_file(path: &[u8], device: libc::dev_t, inode: u64) -> Option<ObjectId> {
        let device = numbers(device);
        let is_object = Some(device) == *DEVICE && NAMES.contains(&path);
        is_object.then_some(ObjectId { device, inode })
    }

    /// The inode.
    pub fn inode(self) -> u64 {
        self.inode
    }
}

/// The part of an object, by offset, in which writes are looked for; None for all of it. What holds
/// data elsewhere is new.
pub type TrackedPart = Option<Arc<RangeSet>>;

/// A mapping of an object.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct ObjectMapping {
    /// The object.
    pub object: ObjectId,
    /// Where the mapping is.
    pub range: Range,
    /// Offset of its first page in the object.
    pub offset: ByteCount,
}

impl ObjectMapping {
    /// That of a mapping, if it maps an object that other processes can map.
    pub fn of(mapping: &Mapping) -> Option<ObjectMapping> {
        let object = ObjectId::of_mapping(mapping)?;
        Some(ObjectMapping { object, range: mapping.range(), offset: ByteCount::new(mapping.offset) })
    }

    /// The part of the object that a part of the mapping shows, by offset.
    fn offsets(&self, part: &Range) -> Range {
        let start = Address::new(0) + self.offset + (self.range.start..part.start).byte_count();
        start..start + part.byte_count()
    }

    /// The part of the object that it shows, by offset.
    pub fn all_offsets(&self) -> Range {
        self.offsets(&self.range)
    }

    /// The addresses at which it shows a part of the object.
    pub fn addresses(&self, part: &TrackedPart) -> Vec<Range> {
        match part {
            None => vec![self.range.clone()],
            Some(part) => {
                let moved = |shown: Range| {
                    let start = self.range.start + (self.all_offsets().start..shown.start).byte_count();
                    start..start + shown.byte_count()
                };
                part.within(self.all_offsets()).map(moved).collect()
            }
        }
    }

    /// The addresses in the mapping at which `others`, mappings in the order of their addresses,
    /// show the same.
    pub fn parts_within(&self, others: &[ObjectMapping]) -> impl Iterator<Item = Range> {
        let first = others.partition_point(|other| other.range.end <= self.range.start);
        let overlapping = others[first..].iter().take_while(|other| other.range.start < self.range.end);
        overlapping.filter_map(|other| self.same(other))
    }

    /// The addresses in the mapping at which `other` shows the same.
    fn same(&self, other: &ObjectMapping) -> Option<Range> {
        let is_same = self.object == other.object
            && self.range.start.get().wrapping_sub(self.offset.get())
                == other.range.start.get().wrapping_sub(other.offset.get());
        let common = self.range.start.max(other.range.start)..self.range.end.min(other.range.end);
        (is_same && common.start < common.end).then_some(common)
    }
}

/// Parts of objects, by offset.
pub type Written = Vec<(ObjectId, Range)>;

/// What a process may have written to objects, until it is taken.
#[derive(Debug, Default)]
pub struct ObjectWrites {
    /// At the last collect.
    mappings: Vec<ObjectMapping>,
    written: Written,
}

impl ObjectWrites {
    /// Takes what was found.
    pub fn take(&mut self) -> Written {
        std::mem::take(&mut self.written)
    }

    /// What was mapped at the last collect, and is not mapped there any more, may have been
    /// written. The mappings are those of the process, in the order of their addresses.
    pub fn follow(&mut self, mappings: &[ObjectMapping]) {
        for old in std::mem::replace(&mut self.mappings, mappings.to_vec()) {
            let mut gone = RangeSet::from(old.range.clone());
            old.parts_within(mappings).for_each(|common| gone.remove(common));
            self.written.extend(gone.iter().map(|part| (old.object, old.offsets(&part))));
        }
    }

    /// All of a mapping counts as written.
    pub fn add_whole(&mut self, mapping: &ObjectMapping) {
        self.written.push((mapping.object, mapping.all_offsets()));
    }

    /// All of an object counts as written of which a mapping is not registered: the mapping is new,
    /// or has come in the place of another, which may have shown another part (`remap_file_pages`).
    pub fn find_unregistered(&mut self, pagemap: &Pagemap, mappings: &[ObjectMapping]) -> std::io::Result<()> {
        for mapping in mappings {
            if unregistered_pages(pagemap, &mapping.range)? > 0 {
                self.written.push((mapping.object, Address::MIN..Address::MAX.page_aligned_down()));
            }
        }
        Ok(())
    }

    /// Finds the written pages of a mapping that show a part of the object, and protects them.
    /// Returns their addresses, and the number of pages that are not registered: nothing is said of
    /// those.
    pub fn scan(
        &mut self,
        pagemap: &Pagemap,
        mapping: &ObjectMapping,
        part: &TrackedPart,
    ) -> std::io::Result<(RangeSet, u64)> {
        let mut written = RangeSet::new();
        // With this filter alone the kernel also reports the empty entries of a page table.
        let entries = Filter { all: WRITTEN, report: WRITTEN, protect: true, ..Filter::default() };
        // Where there is no page table.
        let none = Filter { all: WP_ALLOWED, none: PRESENT | SWAPPED, protect: true, ..Filter::default() };
        for range in mapping.addresses(part) {
            pagemap.scan(&range, entries, |run, _| written.insert(run))?;
            pagemap.scan(&range, none, |run, _| written.insert(run))?;
        }
        self.written.extend(written.iter().map(|part| (mapping.object, mapping.offsets(&part))));
        Ok((written, unregistered_pages(pagemap, &mapping.range)?))
    }
}

/// The number of pages of a range that are not registered.
fn unregistered_pages(pagemap: &Pagemap, range: &Range) -> std::io::Result<u64> {
    let mut pages = 0;
    let unregistered = Filter { none: WP_ALLOWED, ..Filter::default() };
    pagemap.scan(range, unregistered, |run, _| pages += run.page_range().page_count())?;
    Ok(pages)
}

#[cfg(test)]
mod tests {
    use pagemark_linux::views::Views;

    use super::*;

    fn mapping(line: &str) -> Option<ObjectMapping> {
        ObjectMapping::of(&Mapping::parse(line.as_bytes()).unwrap())
    }

    #[test]
    fn only_shared_anonymous_memory_is_an_object() {
        let (major, minor) = DEVICE.unwrap();
        let line =
            |permissions: &str, name: &str| format!("1000-3000 {permissions} 0 {major:02x}:{minor:02x} 7 {name}");
        assert_eq!(mapping(&line("rw-s", "/dev/zero (deleted)")).unwrap().object.inode(), 7);
        assert!(mapping(&line("---s", "/memfd:/dev/zero (deleted)")).is_some());
        assert!(mapping(&line("rw-s", "/memfd:pagemark-heap (deleted)")).is_some());
        for other in ["/memfd:other (deleted)", "/SYSV00000000 (deleted)", "/anon_hugepage (deleted)", "/dev/zero"] {
            assert_eq!(mapping(&line("rw-s", other)), None, "{other}");
        }
        assert_eq!(mapping(&line("rw-p", "/dev/zero (deleted)")), None);
        assert_eq!(mapping("1000-3000 rw-s 0 fe:1a 7 /dev/zero (deleted)"), None);
    }

    #[test]
    fn the_memory_of_a_heap_is_an_object() {
        let views = Views::new(ByteCount::of_pages(4), 2).unwrap();
        let mappings = pagemark_linux::proc::maps::read(std::process::id() as i32).unwrap();
        let shown =
            mappings.iter().filter_map(ObjectMapping::of).filter(|mapping| mapping.range.start == views.view(0).start);
        assert_eq!(shown.count(), 1);
    }

    #[test]
    fn the_addresses_of_a_part_are_those_that_show_it() {
        let shown = |offset: &str, part: std::ops::Range<u64>| {
            let (major, minor) = DEVICE.unwrap();
            let line = format!("10000-20000 rw-s {offset} {major:02x}:{minor:02x} 7 /dev/zero (deleted)");
            let part = RangeSet::from(Address::new(part.start)..Address::new(part.end));
            let addresses = mapping(&line).unwrap().addresses(&Some(Arc::new(part)));
            addresses.iter().map(|range| (range.start.get(), range.end.get())).collect::<Vec<_>>()
        };
        assert_eq!(shown("0", 0x2000..0x4000), [(0x12000, 0x14000)]);
        assert_eq!(shown("3000", 0x2000..0x4000), [(0x10000, 0x11000)]);
        assert_eq!(shown("3000", 0..0x100000), [(0x10000, 0x20000)]);
        assert_eq!(shown("3000", 0..0x3000), []);
    }

    #[test]
    fn a_mapping_that_is_split_shows_what_it_showed() {
        let (major, minor) = DEVICE.unwrap();
        let at = |range: &str, offset: &str| {
            mapping(&format!("{range} rw-s {offset} {major:02x}:{minor:02x} 7 /dev/zero (deleted)")).unwrap()
        };
        let left = |others: &[ObjectMapping]| {
            let mapping = at("10000-20000", "5000");
            let mut left = RangeSet::from(mapping.range.clone());
            mapping.parts_within(others).for_each(|shown| left.remove(shown));
            left.iter().map(|range| (range.start.get(), range.end.get())).collect::<Vec<_>>()
        };
        assert_eq!(left(&[at("10000-18000", "5000"), at("18000-30000", "d000")]), []);
        assert_eq!(left(&[at("10000-18000", "5000"), at("18000-20000", "e000")]), [(0x18000, 0x20000)]);
        assert_eq!(left(&[at("0-12000", "1000"), at("20000-30000", "15000")]), [(0x10000, 0x20000)]);
        assert_eq!(left(&[]), [(0x10000, 0x20000)]);
    }

    #[test]
    fn what_is_not_mapped_any_more_counts_as_written() {
        let (major, minor) = DEVICE.unwrap();
        let at = |range: &str, offset: &str| {
            mapping(&format!("{range} rw-s {offset} {major:02x}:{minor:02x} 7 /dev/zero (deleted)")).unwrap()
        };
        let mut writes = ObjectWrites::default();
        let mut after = |mappings: &[ObjectMapping]| -> Vec<(u64, u64)> {
            writes.follow(mappings);
            writes.take().iter().map(|(_, part)| (part.start.get(), part.end.get())).collect()
        };
        assert_eq!(after(&[at("10000-20000", "5000")]), []);
        // Split by a change of protection, which loses nothing, then cut at both ends.
        assert_eq!(after(&[at("10000-18000", "5000"), at("18000-20000", "d000")]), []);
        assert_eq!(after(&[at("11000-1f000", "6000")]), [(0x5000, 0x6000), (0x14000, 0x15000)]);
        // Moved.
        assert_eq!(after(&[at("31000-3f000", "6000")]), [(0x6000, 0x14000)]);
    }
}
