//! Second mappings of shared memory, for the machine alone.
//!
//! A slot over shared memory names a view of it, and the program keeps its own mapping. So each of
//! the two has a page table of its own: what protects the program's mapping, to find what the
//! program writes, does not slow the machine down, and KVM's log alone finds what the machine
//! writes.
//!
//! All views are in one span of addresses that is reserved by a file in memory without content,
//! whose name shows others where it is.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use pagemark_kvm_log::protocol::VIEWS;
use pagemark_kvm_log::views::{SPAN, covers, place};

/// The span, and the views in it.
struct Views {
    reserve: OwnedFd,
    start: u64,
    /// The length of each, by its address.
    made: BTreeMap<u64, u64>,
}

/// None before the first; an inner None if there is no address space.
static VIEWS_OF_THIS_PROCESS: Mutex<Option<Option<Views>>> = Mutex::new(None);

/// Makes a view of memory of this program. None if the memory is not shared, or cannot be mapped
/// again: then the machine uses the program's mapping.
pub fn make(start: u64, bytes: u64) -> Option<u64> {
    if bytes == 0 || !is_shared(start, bytes) {
        return None;
    }
    let mut views = VIEWS_OF_THIS_PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    views.get_or_insert_with(Views::reserve).as_mut()?.make(start, bytes)
}

/// Removes a view that no slot has any longer.
pub fn remove(view: u64) {
    let mut views = VIEWS_OF_THIS_PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(Some(views)) = &mut *views
        && let Some(bytes) = views.made.remove(&view)
    {
        // If that fails, the view stays where no other comes.
        if views.map_reserve(view, bytes, libc::MAP_FIXED).is_none() {
            views.made.insert(view, bytes);
        }
    }
}

impl Views {
    fn reserve() -> Option<Views> {
        // SAFETY: takes a string, and returns a new descriptor.
        let made = unsafe { libc::memfd_create(VIEWS.as_ptr(), libc::MFD_CLOEXEC) };
        // SAFETY: the descriptor is new, and owned by nothing else.
        let reserve = (made >= 0).then(|| unsafe { OwnedFd::from_raw_fd(made) })?;
        let mut views = Views { reserve, start: 0, made: BTreeMap::new() };
        views.start = views.map_reserve(0, SPAN, 0)?;
        Some(views)
    }

    /// Maps the file without content.
    fn map_reserve(&self, at: u64, bytes: u64, flags: c_int) -> Option<u64> {
        let flags = flags | libc::MAP_SHARED | libc::MAP_NORESERVE;
        // SAFETY: without an address, it takes the place of nothing; else that of a view, which is within
        // the span, and which no slot has.
        let mapped =
            unsafe { libc::mmap(at as *mut _, bytes as usize, libc::PROT_NONE, flags, self.reserve.as_raw_fd(), 0) };
        (mapped != libc::MAP_FAILED).then_some(mapped as u64)
    }

    fn make(&mut self, start: u64, bytes: u64) -> Option<u64> {
        let view = place(self.start, &self.made, start, bytes)?;
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: an old length of 0 leaves the mapping as it is, and the view takes the place of nothing
        // but a free part of the span.
        let made = unsafe { libc::mremap(start as *mut _, 0, bytes as usize, flags, view as *mut libc::c_void) };
        if made == libc::MAP_FAILED {
            // The kernel may have removed what was there.
            let _ = self.map_reserve(view, bytes, libc::MAP_FIXED);
            return None;
        }
        for advice in [libc::MADV_DONTFORK, libc::MADV_DONTDUMP] {
            // SAFETY: a child and a dump have the program's own mapping.
            unsafe { libc::madvise(made, bytes as usize, advice) };
        }
        self.made.insert(view, bytes);
        Some(view)
    }
}

/// True if all of the memory is mapped from one object, shared and for writing, in one piece.
fn is_shared(start: u64, bytes: u64) -> bool {
    let Some(end) = start.checked_add(bytes) else { return false };
    std::fs::read_to_string("/proc/self/maps").is_ok_and(|maps| covers(&maps, start, end))
}
