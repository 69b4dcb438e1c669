//! KVM's rings of dirty pages (Linux 5.11): each virtual CPU of a machine has one, in which KVM
//! enters each page that it writes first. They take the place of the log: a machine has one of the
//! two.
//!
//! A page is entered again only after its entry was read and the rings were reset. KVM leaves the
//! machine when a ring is nearly full.

use std::io;
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::PAGE;
use crate::kernel::{CAP_RING, CAP_RING_ACQUIRE, CHECK_EXTENSION, ENABLE_CAP, RawCapability, call};

/// `KVM_RESET_DIRTY_RINGS`.
const RESET: u32 = 0xaec7;

/// `KVM_EXIT_DIRTY_RING_FULL`.
pub const EXIT_FULL: u32 = 31;

/// The page of a virtual CPU's file at which its ring begins (`KVM_DIRTY_LOG_PAGE_OFFSET`).
pub const PAGE_OFFSET: u64 = 64;

/// Entries of a ring, if nothing else is asked for: a machine that writes much is left once for so
/// many pages, and a virtual CPU takes 256 KiB of memory.
pub const ENTRIES: u32 = 16384;

/// The entry is new: KVM has written it.
pub const DIRTY: u32 = 1;
/// The entry was read: with the next reset KVM protects the page again.
pub const READ: u32 = 2;

/// No slot has this number: KVM passes over the entry.
const NO_SLOT: u32 = u32::MAX;

/// `struct kvm_dirty_gfn`.
#[repr(C)]
struct RawEntry {
    flags: AtomicU32,
    slot: AtomicU32,
    page: AtomicU64,
}

/// Enables rings for a machine, in place of its log. Each has `entries` entries, a power of two. To
/// be called before the machine has virtual CPUs.
///
/// # Errors
/// `EOPNOTSUPP`: this KVM has none of that length. Otherwise those of the call.
pub fn enable(machine: RawFd, entries: u32) -> Result<(), i32> {
    let bytes = ring_bytes(entries);
    // Both are the same on x86; a kernel may have the second alone. KVM says how many bytes a ring may have.
    let allows = |capability: &u32| {
        // SAFETY: reads a number.
        let most = unsafe { call(machine, CHECK_EXTENSION, *capability as usize) };
        most.is_ok_and(|most| usize::try_from(most).is_ok_and(|most| most >= bytes))
    };
    let capability = [CAP_RING, CAP_RING_ACQUIRE].into_iter().find(allows).ok_or(libc::EOPNOTSUPP)?;
    let request = RawCapability { capability, flags: 0, arguments: [bytes as u64, 0, 0, 0], padding: [0; 64] };
    // SAFETY: KVM reads the request.
    unsafe { call(machine, ENABLE_CAP, (&raw const request) as usize) }.map(drop)
}

fn ring_bytes(entries: u32) -> usize {
    entries as usize * size_of::<RawEntry>()
}

/// Has KVM protect all pages again whose entries were read, in the rings of all virtual CPUs.
///
/// Since Linux 6.16, a call that a signal or a tracer interrupts leaves up to 64 pages as they are,
/// and reports success. Whoever may be interrupted protects the pages otherwise, and names no slot
/// in the entries.
///
/// # Errors
/// Those of the call: then none was.
pub fn reset(machine: RawFd) -> Result<(), i32> {
    // SAFETY: the call has no argument.
    unsafe { call(machine, RESET, 0) }.map(drop)
}

/// The ring of a virtual CPU.
#[derive(Debug)]
pub struct Ring {
    entries: NonNull<RawEntry>,
    /// How many it has.
    length: u32,
    /// How many were read, modulo 2^32.
    read: u32,
}

// SAFETY: the mapping belongs to no thread, and its entries are changed through `&mut` alone; what KVM changes
// meanwhile is accessed atomically.
unsafe impl Send for Ring {}

impl Ring {
    /// That of a virtual CPU whose machine keeps rings of `length` entries, and of whose ring
    /// `read` entries were read in all, modulo 2^32.
    ///
    /// # Errors
    /// `EINVAL`: the length is no power of two. Otherwise those of `mmap`.
    pub fn of(processor: RawFd, length: u32, read: u32) -> io::Result<Ring> {
        if !length.is_power_of_two() {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let (rights, offset) = (libc::PROT_READ | libc::PROT_WRITE, (PAGE_OFFSET * PAGE) as i64);
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let start = unsafe {
            libc::mmap(std::ptr::null_mut(), ring_bytes(length), rights, libc::MAP_SHARED, processor, offset)
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let entries = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Ring { entries, length, read })
    }

    /// How many entries were read in all, modulo 2^32.
    pub fn position(&self) -> u32 {
        self.read
    }

    fn next(&self) -> &RawEntry {
        // SAFETY: within the mapping, which lives as long as this; KVM and this process access it atomically.
        unsafe { self.entries.add((self.read % self.length) as usize).as_ref() }
    }

    /// Passes over the entries that a reader has read who was killed before it reset them, and
    /// before it could say how many.
    pub fn pass_over_read(&mut self) {
        for _ in 0..self.length {
            if self.next().flags.load(Ordering::Acquire) & READ == 0 {
                return;
            }
            self.read = self.read.wrapping_add(1);
        }
    }

    /// Reads the new entries: `each` gets the slot, with its address space in the upper half, and
    /// the page of the slot, and returns whether the page is to be protected again. Returns how
    /// many entries there were.
    pub fn read(&mut self, mut each: impl FnMut(u32, u64) -> bool) -> u32 {
        let before = self.read;
        loop {
            let RawEntry { flags, slot, page } = self.next();
            if flags.load(Ordering::Acquire) & (DIRTY | READ) != DIRTY {
                return self.read.wrapping_sub(before);
            }
            if !each(slot.load(Ordering::Relaxed), page.load(Ordering::Relaxed)) {
                slot.store(NO_SLOT, Ordering::Relaxed);
            }
            flags.store(DIRTY | READ, Ordering::Release);
            self.read = self.read.wrapping_add(1);
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: the mapping of `of`, which nothing uses any more.
        unsafe { libc::munmap(self.entries.as_ptr().cast(), ring_bytes(self.length)) };
    }
}
