//! `/proc/PID/smaps`: the flags of mappings that `/proc/PID/maps` does not show.
//!
//! The kernel walks the page tables of a process to write this file: some 5 to 20 ms for each GiB
//! that is populated.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::sync::OnceLock;

use super::maps::Mapping;
use crate::RangeSet;

/// `MAP_DROPPABLE` of `mmap`, since Linux 6.11: private memory whose content the kernel may drop at
/// any moment.
const MAP_DROPPABLE: libc::c_int = 0x08;

/// The droppable mappings among `candidates`, which are whole mappings of the process.
///
/// # Errors
/// As [`super::maps::read`].
pub fn droppable(pid: i32, candidates: &RangeSet) -> io::Result<RangeSet> {
    let mut found = RangeSet::new();
    let Some(last) = candidates.iter().last() else { return Ok(found) };
    let mut mapping = None;
    for line in BufReader::new(File::open(super::path(pid, "smaps"))?).split(b'\n') {
        let line = line?;
        if let Some(flags) = line.strip_prefix(b"VmFlags:") {
            let is_droppable = flags.split(|&byte| byte == b' ').any(|flag| flag == b"dp");
            match mapping.take() {
                Some(range) if is_droppable => found.insert(range),
                _ => {}
            }
        } else if let Some(header) = Mapping::parse(&line) {
            if header.start >= last.end {
                break;
            }
            mapping = candidates.contains(header.start).then(|| header.range());
        }
    }
    Ok(found)
}

/// True if the kernel has droppable mappings.
pub fn has_droppable() -> bool {
    static HAS_DROPPABLE: OnceLock<bool> = OnceLock::new();
    *HAS_DROPPABLE.get_or_init(|| {
        let flags = MAP_DROPPABLE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping without access, at an address that the kernel chooses, is unmapped
        // again at once; no other memory is touched.
        unsafe {
            let mapped = libc::mmap(std::ptr::null_mut(), crate::PAGE_SIZE, libc::PROT_NONE, flags, -1, 0);
            mapped != libc::MAP_FAILED && libc::munmap(mapped, crate::PAGE_SIZE) == 0
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Address, ByteCount, PAGE_SIZE};

    #[test]
    fn a_droppable_mapping_is_told_from_others() {
        if !has_droppable() {
            pagemark_testing::skip!("the kernel has no droppable mappings (Linux 6.11)");
        }
        let map = |flags| {
            // SAFETY: a new mapping at an address that the kernel chooses.
            let start = unsafe { libc::mmap(std::ptr::null_mut(), PAGE_SIZE, libc::PROT_READ, flags, -1, 0) };
            assert_ne!(start, libc::MAP_FAILED);
            Address::of(start)..Address::of(start) + ByteCount::PAGE
        };
        let private = map(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let dropped = map(MAP_DROPPABLE | libc::MAP_ANONYMOUS);
        let pid = std::process::id() as i32;
        let candidates = super::super::maps::read(pid).unwrap();
        let candidates: RangeSet = candidates.iter().map(Mapping::range).collect();
        let found = droppable(pid, &candidates).unwrap();
        assert!(found.contains(dropped.start) && !found.contains(private.start));
        assert!(droppable(pid, &RangeSet::from(private)).unwrap().is_empty());
        assert_eq!(droppable(pid, &RangeSet::from(dropped.clone())).unwrap(), RangeSet::from(dropped));
    }
}
