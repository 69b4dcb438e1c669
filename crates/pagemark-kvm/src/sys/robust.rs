//! Locks of a thread that say so when it has ended. The kernel marks them at the end of the host's
//! thread, which is too late here: by then another thread of the program has joined this one, and
//! may have unmapped them.

use std::sync::atomic::{AtomicU32, Ordering};

use super::{host_call, program_memory};

/// Bits of a lock, as the kernel and C libraries have them.
const OWNER: u32 = 0x3fff_ffff;
const OWNER_DIED: u32 = 0x4000_0000;
const WAITERS: u32 = 0x8000_0000;

/// As many locks does the kernel mark at most.
const MOST_LOCKS: usize = 2048;

/// The bit of an entry whose lock passes on priorities.
const INHERITS: u64 = 1;

/// A lock in the list of the calling thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lock {
    /// Where it is.
    pub address: u64,
    /// Whether the kernel passes it on itself.
    pub inherits: bool,
    /// Whether the thread was about to take or to free it.
    pub is_pending: bool,
}

/// What is to be done after a lock was marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marked {
    /// Nothing.
    Done,
    /// A thread that waits for it is to be woken.
    Wakes,
}

/// The locks that the calling thread holds, or is about to take or to free.
pub fn locks() -> Vec<Lock> {
    let (mut head, mut len) = (0u64, 0u64);
    let arguments = [0, &raw mut head as u64, &raw mut len as u64, 0, 0, 0];
    // SAFETY: fills the two values.
    unsafe { host_call::immediate(libc::SYS_get_robust_list, arguments) };
    if head == 0 {
        return Vec::new();
    }
    // The first entry, where locks are in entries, the entry in hand. An empty list leads to itself.
    let Ok([mut next, offset, pending]) =
        program_memory::read_words(head, 3).as_deref().map(|words| <[u64; 3]>::try_from(words).unwrap_or_default())
    else {
        return Vec::new();
    };
    let lock = |entry: u64, is_pending| Lock {
        address: (entry & !INHERITS).wrapping_add(offset),
        inherits: entry & INHERITS != 0,
        is_pending,
    };
    let mut found = Vec::new();
    while next & !INHERITS != head && found.len() < MOST_LOCKS {
        // Before the entry is marked, as another thread may take its lock then.
        let behind = program_memory::read_words(next & !INHERITS, 1);
        if next & !INHERITS != pending & !INHERITS {
            found.push(lock(next, false));
        }
        match behind.as_deref() {
            Ok(&[behind]) => next = behind,
            _ => break,
        }
    }
    if pending & !INHERITS != 0 {
        found.push(lock(pending, true));
    }
    found
}

/// The kernel marks no lock of the calling thread any more.
pub fn forget() {
    const HEAD_BYTES: u64 = 24;
    // SAFETY: no list is read from then on.
    unsafe { host_call::immediate(libc::SYS_set_robust_list, [0, HEAD_BYTES, 0, 0, 0, 0]) };
}

/// Marks `lock`, if the thread `owner` holds it, as the kernel does it at the thread's end.
///
/// # Safety
/// Four bytes of the program are mapped there for reading and writing, and stay so.
pub unsafe fn mark(lock: &Lock, owner: u32) -> Marked {
    // SAFETY: by the contract of this function; the address of a lock is a multiple of four.
    let word = unsafe { AtomicU32::from_ptr(lock.address as *mut u32) };
    mark_word(word, lock, owner)
}

fn mark_word(word: &AtomicU32, lock: &Lock, owner: u32) -> Marked {
    let marked = |value: u32| (value & OWNER == owner).then_some(value & WAITERS | OWNER_DIED);
    let wakes = match word.fetch_update(Ordering::AcqRel, Ordering::Acquire, marked) {
        Ok(before) => before & WAITERS != 0,
        // It was just freed, and nobody was told yet.
        Err(value) => lock.is_pending && value == 0,
    };
    if wakes && !lock.inherits { Marked::Wakes } else { Marked::Done }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_are_marked_as_the_kernel_does_it() {
        let free = Lock { address: 0, inherits: false, is_pending: false };
        let (pending, inherits) = (Lock { is_pending: true, ..free }, Lock { inherits: true, ..free });
        for (lock, before, after, expected) in [
            (free, 7, OWNER_DIED, Marked::Done),
            (free, 7 | WAITERS, OWNER_DIED | WAITERS, Marked::Wakes),
            (free, 8 | WAITERS, 8 | WAITERS, Marked::Done),
            (free, 0, 0, Marked::Done),
            (pending, 0, 0, Marked::Wakes),
            (pending, 8, 8, Marked::Done),
            (pending, 7 | OWNER_DIED, OWNER_DIED, Marked::Done),
            (inherits, 7 | WAITERS, OWNER_DIED | WAITERS, Marked::Done),
        ] {
            let word = AtomicU32::new(before);
            assert_eq!((mark_word(&word, &lock, 7), word.into_inner()), (expected, after), "{lock:?} {before:#x}");
        }
    }
}
