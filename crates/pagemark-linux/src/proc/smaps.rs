//! `/proc/PID/smaps`: the flags of mappings that `/proc/PID/maps` does not show.
//!
//! The kernel walks the page tables of a process to write this file: some 5 to 20 ms for each GiB
//! that is populated.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::sync::OnceLock;

use super::maps::Mapping;
use crate::at_fork::made_once;
use crate::mapping_flags;
use crate::{Range, RangeSet};

/// `MAP_DROPPABLE` of `mmap`, since Linux 6.11: private memory whose content the kernel may drop at
/// any moment.
const MAP_DROPPABLE: libc::c_int = 0x08;

/// Begin of the line that has the flags of a mapping.
pub(crate) const FLAGS: &[u8] = b"VmFlags:";

/// A mapping and its flags.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct NamedFlags {
    pub(crate) range: Range,
    /// Name of the mapping, as in `maps`.
    pub(crate) name: Vec<u8>,
    /// What follows [`FLAGS`] in its line.
    pub(crate) names: Vec<u8>,
}

impl NamedFlags {
    fn has(&self, flag: &[u8]) -> bool {
        self.names.split(|&byte| byte == b' ').any(|name| name == flag)
    }
}

/// Calls `each` for each mapping, until it returns false.
fn for_each(text: impl BufRead, each: &mut dyn FnMut(NamedFlags) -> bool) -> io::Result<()> {
    let mut mapping = None;
    for line in text.split(b'\n') {
        let line = line?;
        if let Some(names) = line.strip_prefix(FLAGS) {
            let Some(Mapping { start, end, name, .. }) = mapping.take() else { continue };
            if !each(NamedFlags { range: start..end, name, names: names.into() }) {
                break;
            }
        } else if let Some(header) = Mapping::parse(&line) {
            mapping = Some(header);
        }
    }
    Ok(())
}

/// The flags of the mappings of this process.
pub(crate) fn own_flags() -> io::Result<Vec<NamedFlags>> {
    let mut found = Vec::new();
    let file = File::open(super::thread_path("smaps"))?;
    for_each(BufReader::new(file), &mut |flags| {
        found.push(flags);
        true
    })?;
    Ok(found)
}

/// What `smaps` has of a process, without the figures that need a walk of its page tables: for each
/// mapping its line of `maps`, and its flags. The process must not change its mappings meanwhile.
///
/// # Errors
/// The kernel lacks [`mapping_flags::LIST`], or a mapping has a flag that no mapping of this
/// process could be given; and as [`super::maps::read`].
pub fn without_figures(pid: i32) -> io::Result<Vec<u8>> {
    mapping_flags::loaded()?.text(pid)
}

/// All that `smaps` has of a process.
///
/// # Errors
/// Those of [`super::maps::read`].
pub fn with_figures(pid: i32) -> io::Result<Vec<u8>> {
    super::read(pid, "smaps")
}

/// The droppable mappings among `candidates`, which are whole mappings of the process.
///
/// # Errors
/// Those of [`super::maps::read`].
pub fn droppable(pid: i32, candidates: &RangeSet) -> io::Result<RangeSet> {
    let mut found = RangeSet::new();
    let Some(last) = candidates.iter().last() else { return Ok(found) };
    for_each(BufReader::new(File::open(super::path(pid, "smaps"))?), &mut |flags| {
        let is_behind = flags.range.start >= last.end;
        if !is_behind && candidates.contains(flags.range.start) && flags.has(b"dp") {
            found.insert(flags.range);
        }
        !is_behind
    })?;
    Ok(found)
}

/// True if the kernel has droppable mappings.
pub fn has_droppable() -> bool {
    static HAS_DROPPABLE: OnceLock<bool> = OnceLock::new();
    *made_once(&HAS_DROPPABLE, || {
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
