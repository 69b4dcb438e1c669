//! What a program writes to its heap, for the program itself: it starts tracking, and takes
//! checkpoints when it wants to.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::FromRawFd;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use pagemark::RangeSet;
use pagemark_heap::grouping::{ByCost, ByHistory, Costs, Grouping, Separate};
use pagemark_heap::{Form, HeapTracker};
use pagemark_linux::at_fork::hold_off;
use pagemark_linux::this_process::OfThisProcess;

use crate::HEAP;

type Tracker = HeapTracker<Box<dyn Grouping>>;

/// The tracker of a process, if it has one. Locked while a checkpoint is taken and saved.
struct OfProcess {
    process: OfThisProcess,
    tracker: Mutex<Option<Tracker>>,
}

/// That of this process, or of the one that it was forked from. In a child, the thread that had it
/// locked may be missing: a fork need not wait until a checkpoint is saved. While a tracker is
/// changed, forks are held off, because a child's copy of the heap is older than the rest of it.
static TRACKER: AtomicPtr<OfProcess> = AtomicPtr::new(null_mut());

/// Locks the tracker of this process.
fn locked() -> MutexGuard<'static, Option<Tracker>> {
    let process = OfThisProcess::new();
    loop {
        let forks = hold_off();
        let found = TRACKER.load(Ordering::Acquire);
        // SAFETY: the pointer is null or of a value that is never freed.
        let known = unsafe { found.as_ref() };
        if let Some(known) = known.filter(|known| known.process == process) {
            // A thread that saves a checkpoint has it for long.
            drop(forks);
            return known.tracker.lock().unwrap_or_else(PoisonError::into_inner);
        }
        let own = Box::into_raw(Box::new(OfProcess { process, tracker: Mutex::new(None) }));
        if TRACKER.compare_exchange(found, own, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            // SAFETY: the value was just made, and nobody else knows it.
            drop(unsafe { Box::from_raw(own) });
        } else if let Some(mut inherited) = known.and_then(|inherited| inherited.tracker.try_lock().ok()) {
            // Where a thread of the parent has it locked, it stays.
            *inherited = None;
        }
    }
}

/// What a checkpoint has cost.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct Checkpoint {
    /// Armed parts that were written in the interval.
    pub faults: u64,
    /// Parts that are no longer armed.
    pub merges: u64,
    /// Parts that are armed again.
    pub splits: u64,
    /// Bytes that were reported, and in how many ranges.
    pub bytes: u64,
    /// Number of ranges.
    pub ranges: u64,
    /// Time of finding them, nanoseconds.
    pub collect_ns: u64,
    /// Time of saving them, nanoseconds.
    pub save_ns: u64,
}

/// Starts to track the heap at user level. `strategy` is `separate`, `by-history` or `by-cost`.
/// Returns 0 or the number of an error: `EINVAL` for another strategy, `ENOTSUP` if the kernel
/// cannot track it.
///
/// # Safety
/// `strategy` is a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemark_heap_track(strategy: *const c_char) -> c_int {
    // SAFETY: the caller guarantees it.
    track(unsafe { CStr::from_ptr(strategy) }, Form::UserLevel)
}

/// Like [`pagemark_heap_track`], by the second level of page tables: in a program that
/// `pagemark-kvm` runs (FPM, sections 3.2 and 4). Elsewhere it is `ENOTSUP`.
///
/// # Safety
/// `strategy` is a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemark_heap_track_two_level(strategy: *const c_char) -> c_int {
    // SAFETY: the caller guarantees it.
    track(unsafe { CStr::from_ptr(strategy) }, Form::TwoLevel)
}

fn track(strategy: &CStr, form: Form) -> c_int {
    let Ok(heap) = HEAP.allocator() else { return libc::ENOMEM };
    let grouping: Box<dyn Grouping> = match strategy.to_bytes() {
        b"separate" => Box::new(Separate),
        b"by-history" => Box::new(ByHistory::new(heap.parts())),
        b"by-cost" => Box::new(ByCost::new(heap.parts(), Costs::default())),
        _ => return libc::EINVAL,
    };
    let mut tracker = locked();
    let _forks = hold_off();
    // A heap has one tracker at a time.
    *tracker = None;
    match HeapTracker::of_program(&HEAP, grouping, form) {
        Ok(new) => {
            *tracker = Some(new);
            0
        }
        Err(_) => libc::ENOTSUP,
    }
}

/// Finds what was written to the heap since the last call; all of it, the first time. If `file` is
/// not -1, appends it there, and waits until it is on disk: for each range its address and length,
/// 8 bytes each, and its bytes. Returns 0 or the number of an error: `EINVAL` if nothing is
/// tracked.
///
/// # Safety
/// `taken` points to memory for the result. `file` is -1 or an open file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemark_heap_checkpoint(file: c_int, taken: *mut Checkpoint) -> c_int {
    let mut tracker = locked();
    let (Some(tracker), Ok(heap)) = (&mut *tracker, HEAP.allocator()) else { return libc::EINVAL };
    let (begin, mut written) = (Instant::now(), RangeSet::new());
    let forks = hold_off();
    let Ok(interval) = tracker.collect_written(&mut written) else { return libc::EIO };
    drop(forks);
    let mut cost = Checkpoint {
        faults: interval.faults,
        merges: interval.merges,
        splits: interval.splits,
        bytes: written.total_bytes().get(),
        ranges: written.range_count() as u64,
        collect_ns: begin.elapsed().as_nanos() as u64,
        save_ns: 0,
    };
    if file >= 0 {
        let begin = Instant::now();
        // SAFETY: the caller guarantees that it is open. It is not closed here.
        let file = ManuallyDrop::new(unsafe { File::from_raw_fd(file) });
        if let Err(error) = heap.append_ranges(&written, &file) {
            return error.raw_os_error().unwrap_or(libc::EIO);
        }
        let took = begin.elapsed();
        cost.save_ns = took.as_nanos() as u64;
        let _forks = hold_off();
        tracker.learn_cost(written.total_bytes(), took);
    }
    // SAFETY: the caller guarantees it.
    unsafe { taken.write(cost) };
    0
}

/// The address by which a checkpoint has the byte at `address`: each page of the heap is mapped
/// several times, and an object has an address in one of these mappings. The address of other
/// memory is returned as it is.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_heap_canonical(address: *const c_void) -> *const c_void {
    match HEAP.allocator() {
        Ok(heap) => heap.canonical(address).as_mut_ptr::<c_void>().cast_const(),
        Err(_) => address,
    }
}
