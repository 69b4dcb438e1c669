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

/// Stack of the thread that resets the rings.
const STACK_BYTES: usize = 64 << 10;

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

/// Has KVM protect all pages again whose entries were read, `entries` of them, in the rings of all
/// virtual CPUs. True if it has; false if some may not be protected: their next writes are in no
/// ring.
///
/// Since Linux 6.16, a call that is interrupted leaves up to 64 pages as they are, and reports
/// success. So all signals are blocked meanwhile. Where something stops the thread all the same, a
/// tracer, SIGSTOP or a freezer, it sleeps, and the kernel counts that. Only work that the kernel
/// gives a thread for io_uring is not noticed: a thread that may use that calls [`reset_apart`].
///
/// # Errors
/// Those of the call: then any of the pages may be unprotected.
pub fn reset(machine: RawFd, entries: u32) -> Result<bool, i32> {
    // SAFETY: the call has no argument.
    with_signals_blocked(|| reset_all(entries, || unsafe { call(machine, RESET, 0) }.map(i32::unsigned_abs)))
}

/// As [`reset`], by a thread of its own, to which the kernel gives no other work.
///
/// # Errors
/// Those of [`reset`], or of starting a thread.
pub fn reset_apart(machine: RawFd, entries: u32) -> Result<bool, i32> {
    if entries == 0 {
        return Ok(true);
    }
    let thread = std::thread::Builder::new().name("pagemark-ring".to_owned()).stack_size(STACK_BYTES);
    // The new thread has the blocked signals of this one.
    let thread = with_signals_blocked(|| thread.spawn(move || reset(machine, entries)));
    let thread = thread.map_err(|error| error.raw_os_error().unwrap_or(libc::EAGAIN))?;
    thread.join().unwrap_or(Err(libc::EIO))
}

/// Does `work` while this thread takes no signal, also none that the C library keeps for itself.
fn with_signals_blocked<T>(work: impl FnOnce() -> T) -> T {
    let mut before = 0u64;
    let set_mask = |new: &u64, old: *mut u64| {
        // SAFETY: the kernel reads one mask and writes the other, which live through the call, or none.
        unsafe { libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, new, old, size_of::<u64>()) }
    };
    set_mask(&u64::MAX, &raw mut before);
    let done = work();
    set_mask(&before, std::ptr::null_mut());
    done
}

/// Calls `reset` until it has gone through as many entries. Returns as the function of that name.
fn reset_all(entries: u32, mut reset: impl FnMut() -> Result<u32, i32>) -> Result<bool, i32> {
    let (mut left, mut was_whole) = (entries, true);
    while left > 0 {
        let before = sleeps();
        let count = reset()?;
        let has_slept = sleeps() != before;
        if count == 0 && !has_slept {
            // Somebody else has gone through the entries.
            return Ok(false);
        }
        was_whole &= count >= left && !has_slept;
        left = left.saturating_sub(count);
    }
    Ok(was_whole)
}

/// How often this thread has slept.
fn sleeps() -> i64 {
    // SAFETY: the structure consists of numbers, for which zeros are valid; the kernel writes to it.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage);
        usage.ru_nvcsw
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reset_that_was_or_may_have_been_interrupted_is_noticed() {
        let nap = || std::thread::sleep(std::time::Duration::from_millis(1));
        assert_eq!(reset_all(0, || panic!("there is nothing to do")), Ok(true));
        assert_eq!(reset_all(70, || Ok(70)), Ok(true));
        // More have come since they were counted.
        assert_eq!(reset_all(70, || Ok(71)), Ok(true));
        let slept = reset_all(70, || {
            nap();
            Ok(70)
        });
        assert_eq!(slept, Ok(false));
        let mut parts = [Ok(0), Ok(64), Ok(0), Ok(6)].into_iter();
        let interrupted = reset_all(70, || {
            nap();
            parts.next().unwrap()
        });
        assert_eq!((interrupted, parts.next()), (Ok(false), None));
        // By something in which the thread does not sleep.
        let mut parts = [Ok(64), Ok(6)].into_iter();
        assert_eq!(reset_all(70, || parts.next().unwrap()), Ok(false));
        assert_eq!(reset_all(70, || Ok(0)), Ok(false));
        let mut parts = [Ok(64), Err(libc::ENOMEM)].into_iter();
        assert_eq!(reset_all(70, || parts.next().unwrap()), Err(libc::ENOMEM));
    }

    #[test]
    fn the_thread_of_its_own_reports_what_the_call_does() {
        let file = std::fs::File::open("/dev/null").unwrap();
        let machine = std::os::fd::AsRawFd::as_raw_fd(&file);
        assert_eq!(reset_apart(machine, 1), Err(libc::ENOTTY));
        assert_eq!(reset_apart(machine, 0), Ok(true));
    }
}
