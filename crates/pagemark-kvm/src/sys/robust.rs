//! Locks of a thread that the kernel marks when the thread ends.

use super::{host_call, program_memory};

/// Whether the calling thread holds such locks, or is about to take one.
pub fn has_locks() -> bool {
    let (mut head, mut len) = (0u64, 0u64);
    let arguments = [0, &raw mut head as u64, &raw mut len as u64, 0, 0, 0];
    // SAFETY: fills the two values.
    unsafe { host_call::immediate(libc::SYS_get_robust_list, arguments) };
    // The first entry, where locks are in entries, the entry in hand. An empty list leads to itself.
    head != 0 && program_memory::read_words(head, 3).is_ok_and(|words| words[0] != head || words[2] != 0)
}
