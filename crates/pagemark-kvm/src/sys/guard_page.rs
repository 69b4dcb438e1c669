//! Guard pages (`MADV_GUARD_INSTALL`, Linux 6.13), which the kernel shows in `/proc/self/pagemap`
//! since Linux 6.15.

use std::fs::File;
use std::os::unix::fs::FileExt;

use pagemark_linux::proc::thread_path;

use crate::layout::PAGE;

/// The bit of an entry.
const GUARD: u64 = 1 << 58;

/// Whether the page at `address` is one, as far as the kernel tells it.
pub fn is_at(address: u64) -> bool {
    let mut entry = [0; 8];
    let read = File::open(thread_path("pagemap")).and_then(|map| map.read_exact_at(&mut entry, address / PAGE * 8));
    read.is_ok() && u64::from_ne_bytes(entry) & GUARD != 0
}
