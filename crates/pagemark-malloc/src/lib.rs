//! `malloc` of `pagemark-heap`, for programs that know nothing of it:
//!
//! ```text
//! PAGEMARK_HEAP_PARTS=4 LD_PRELOAD=libpagemark_malloc.so PROGRAM
//! ```
//!
//! `PAGEMARK_HEAP_PARTS` is the number of parts of a page: 1, 2, 4 or 8; 4 by default.
//! `PAGEMARK_HEAP_GIB` is the capacity in GiB, 64 by default, which takes address space only.
//! With `PAGEMARK_HEAP_TRACKED=1`, the heap expects to be tracked from outside. With
//! `PAGEMARK_HEAP_POPULATE=0`, memory is populated by its first use, and not before. A program
//! whose heap cannot be made ends at its start, with a message and the status 127.
//!
//! The functions behave as those of glibc: `realloc` to 0 bytes frees, `malloc(0)` returns an
//! object.

use std::ffi::{CStr, c_int, c_void};
use std::ptr::null_mut;

use pagemark::{ByteCount, PAGE_SIZE};
use pagemark_heap::{GlobalHeap, Parts};

mod checkpoints;

pub use checkpoints::{
    Checkpoint, pagemark_heap_canonical, pagemark_heap_checkpoint, pagemark_heap_track, pagemark_heap_track_two_level,
};

static HEAP: GlobalHeap = GlobalHeap::chosen_by(settings);

/// Capacity where nothing else is asked for.
const CAPACITY_GIB: u64 = 64;

fn settings() -> (Parts, ByteCount) {
    let parts = number(c"PAGEMARK_HEAP_PARTS").and_then(|count| Parts::from_count(count as usize));
    let capacity = number(c"PAGEMARK_HEAP_GIB").unwrap_or(CAPACITY_GIB);
    (parts.unwrap_or(Parts::Four), ByteCount::new(capacity.saturating_mul(1 << 30)))
}

/// A number in the environment.
fn number(name: &CStr) -> Option<u64> {
    // SAFETY: the environment does not change while the program starts, and its values are strings.
    let value = unsafe {
        let value = libc::getenv(name.as_ptr());
        (!value.is_null()).then(|| CStr::from_ptr(value))?
    };
    value.to_str().ok()?.parse().ok()
}

/// Makes the heap before the program starts.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

extern "C" fn start() {
    let message = match (number(c"PAGEMARK_HEAP_PARTS"), HEAP.allocator()) {
        (Some(count), _) if Parts::from_count(count as usize).is_none() => {
            c"pagemark-malloc: PAGEMARK_HEAP_PARTS must be 1, 2, 4 or 8\n"
        }
        (_, Err(error)) if error.raw_os_error() == Some(libc::EFBIG) => {
            c"pagemark-malloc: the heap is larger than RLIMIT_FSIZE permits: set PAGEMARK_HEAP_GIB\n"
        }
        (_, Err(error)) if error.raw_os_error() == Some(libc::ENOMEM) => {
            c"pagemark-malloc: no address space for the heap: set PAGEMARK_HEAP_GIB, or raise RLIMIT_AS\n"
        }
        (_, Err(_)) => c"pagemark-malloc: the heap could not be made\n",
        (_, Ok(heap)) => {
            if number(c"PAGEMARK_HEAP_TRACKED").is_some_and(|value| value > 0) {
                heap.expect_tracker();
            }
            if number(c"PAGEMARK_HEAP_POPULATE") == Some(0) {
                heap.populate_by_use();
            }
            return;
        }
    };
    // SAFETY: the message is as long as is said. The program has not begun.
    unsafe {
        libc::write(libc::STDERR_FILENO, message.as_ptr().cast(), message.to_bytes().len());
        libc::_exit(127);
    }
}

fn set_errno(error: c_int) {
    // SAFETY: the address is that of this thread's number.
    unsafe { *libc::__errno_location() = error };
}

/// An object for C: where there is none, `errno` says why.
#[inline]
fn returned(object: *mut u8) -> *mut c_void {
    if object.is_null() {
        set_errno(libc::ENOMEM);
    }
    object.cast()
}

/// The length of an array; `None` if there can be none.
fn array_bytes(count: usize, size: usize) -> Option<usize> {
    let bytes = count.checked_mul(size);
    if bytes.is_none() {
        set_errno(libc::ENOMEM);
    }
    bytes
}

/// `malloc(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn malloc(size: usize) -> *mut c_void {
    returned(HEAP.allocate(size, 1))
}

/// `free(3)`. Keeps `errno`.
///
/// # Safety
/// `object` is null or live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(object: *mut c_void) {
    if !object.is_null() {
        // SAFETY: the caller guarantees it.
        unsafe { HEAP.free(object.cast()) };
    }
}

/// `calloc(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn calloc(count: usize, size: usize) -> *mut c_void {
    array_bytes(count, size).map_or(null_mut(), |bytes| returned(HEAP.allocate_zeroed(bytes)))
}

/// `realloc(3)`.
///
/// # Safety
/// `object` is null or live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(object: *mut c_void, size: usize) -> *mut c_void {
    if object.is_null() {
        return malloc(size);
    }
    if size == 0 {
        // SAFETY: the caller guarantees it.
        unsafe { free(object) };
        return null_mut();
    }
    // SAFETY: the caller guarantees it.
    returned(unsafe { HEAP.reallocate(object.cast(), size, 1) })
}

/// `reallocarray(3)`.
///
/// # Safety
/// `object` is null or live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn reallocarray(object: *mut c_void, count: usize, size: usize) -> *mut c_void {
    // SAFETY: the caller guarantees it.
    array_bytes(count, size).map_or(null_mut(), |bytes| unsafe { realloc(object, bytes) })
}

/// `posix_memalign(3)`.
///
/// # Safety
/// `object` points to a pointer that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_memalign(object: *mut *mut c_void, align: usize, size: usize) -> c_int {
    if !align.is_power_of_two() || align < size_of::<*mut c_void>() {
        return libc::EINVAL;
    }
    let made = HEAP.allocate(size, align);
    if made.is_null() {
        return libc::ENOMEM;
    }
    // SAFETY: the caller guarantees it.
    unsafe { object.write(made.cast()) };
    0
}

/// `aligned_alloc(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn aligned_alloc(align: usize, size: usize) -> *mut c_void {
    if !align.is_power_of_two() {
        set_errno(libc::EINVAL);
        return null_mut();
    }
    returned(HEAP.allocate(size, align))
}

/// `memalign(3)`, which rounds the alignment up to a power of two.
#[unsafe(no_mangle)]
pub extern "C" fn memalign(align: usize, size: usize) -> *mut c_void {
    match align.checked_next_power_of_two() {
        Some(align) => aligned_alloc(align, size),
        None => {
            set_errno(libc::EINVAL);
            null_mut()
        }
    }
}

/// `valloc(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn valloc(size: usize) -> *mut c_void {
    aligned_alloc(PAGE_SIZE, size)
}

/// `pvalloc(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn pvalloc(size: usize) -> *mut c_void {
    match size.max(1).checked_next_multiple_of(PAGE_SIZE) {
        Some(size) => aligned_alloc(PAGE_SIZE, size),
        None => returned(null_mut()),
    }
}

/// `malloc_usable_size(3)`.
///
/// # Safety
/// `object` is null or live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc_usable_size(object: *mut c_void) -> usize {
    if object.is_null() {
        return 0;
    }
    // SAFETY: the caller guarantees it.
    unsafe { HEAP.usable_size(object.cast()) }
}

/// The number of parts of each page, for programs that want to know whether they have the heap.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_heap_parts() -> c_int {
    HEAP.allocator().map_or(0, |heap| heap.parts().count() as c_int)
}
