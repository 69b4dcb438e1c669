//! The calls of jemalloc that the heap needs.

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::io;
use std::ptr::{from_mut, null_mut};

use tikv_jemalloc_sys as ffi;

pub(crate) use ffi::extent_hooks_t as ExtentHooks;

/// Largest size of objects that share runs of pages. Larger objects begin at a page.
pub(crate) const SMALL_BYTES: usize = 14 << 10;

/// Sizes and flags of [`ffi::mallocx`] and its kin: an arena and a cache of a thread.
pub(crate) type Flags = c_int;

/// The flags of an arena, without a cache.
pub(crate) fn arena_flags(arena: u32) -> Flags {
    ffi::MALLOCX_ARENA(arena as usize) | ffi::MALLOCX_TCACHE_NONE
}

/// The flags of an arena and a cache, which one thread at a time may use.
pub(crate) fn cached_flags(arena: u32, cache: u32) -> Flags {
    ffi::MALLOCX_ARENA(arena as usize) | ffi::MALLOCX_TCACHE(cache as usize)
}

/// The flag of an alignment, a power of two.
pub(crate) fn align_flag(align: usize) -> Flags {
    ffi::MALLOCX_ALIGN(align)
}

/// The flag of memory that is filled with zeros.
pub(crate) const ZERO: Flags = ffi::MALLOCX_ZERO;

/// Has jemalloc register its handlers of forks, if it has not done so.
pub(crate) fn start() {
    size_class(1, 0);
}

/// Allocates; null if there is no memory. `size` is not 0.
#[inline]
pub(crate) fn allocate(size: usize, flags: Flags) -> *mut u8 {
    // SAFETY: the size is not 0, and the flags are those of the functions above.
    unsafe { if flags == 0 { ffi::malloc(size).cast() } else { ffi::mallocx(size, flags).cast() } }
}

/// Frees.
///
/// # Safety
/// `object` is a live object of jemalloc.
#[inline]
pub(crate) unsafe fn free(object: *mut u8, flags: Flags) {
    // SAFETY: the caller guarantees it.
    unsafe { if flags == 0 { ffi::free(object.cast()) } else { ffi::dallocx(object.cast(), flags) } }
}

/// Frees an object of a known size, which saves jemalloc looking for it.
///
/// # Safety
/// `object` is a live object of jemalloc that was made, or resized, with this size and these flags.
#[inline]
pub(crate) unsafe fn free_sized(object: *mut u8, size: usize, flags: Flags) {
    // SAFETY: the caller guarantees it.
    unsafe { ffi::sdallocx(object.cast(), size, flags) }
}

/// The bytes that an object has.
///
/// # Safety
/// `object` is a live object of jemalloc.
pub(crate) unsafe fn usable_size(object: *const u8) -> usize {
    // SAFETY: the caller guarantees it.
    unsafe { ffi::sallocx(object.cast(), 0) }
}

/// The bytes that an object of that size would have; 0 if there can be none.
pub(crate) fn size_class(size: usize, flags: Flags) -> usize {
    // SAFETY: the size is not 0.
    unsafe { ffi::nallocx(size, flags) }
}

/// Resizes an object without moving it. Returns the bytes that it has then.
///
/// # Safety
/// `object` is a live object of jemalloc, and `size` is not 0.
pub(crate) unsafe fn resize_in_place(object: *mut u8, size: usize, flags: Flags) -> usize {
    // SAFETY: the caller guarantees it.
    unsafe { ffi::xallocx(object.cast(), size, 0, flags) }
}

/// `arena_config_t`.
#[repr(C)]
struct ArenaConfig {
    hooks: *mut ExtentHooks,
    metadata_uses_hooks: bool,
}

/// Makes an arena whose objects are in memory from `hooks`, and whose own data is elsewhere.
///
/// # Errors
/// `EAGAIN`: there is no memory.
///
/// # Safety
/// The hooks are valid until the arena is destroyed.
pub(crate) unsafe fn create_arena(hooks: *mut ExtentHooks) -> io::Result<u32> {
    let mut config = ArenaConfig { hooks, metadata_uses_hooks: false };
    // SAFETY: this name takes a configuration, and returns an unsigned number.
    unsafe { control(c"experimental.arenas_create_ext", Some(&mut config)) }
}

/// Destroys an arena with all its objects.
///
/// # Safety
/// Nobody uses the arena, its objects, or a cache that holds some of them.
pub(crate) unsafe fn destroy_arena(arena: u32) -> io::Result<()> {
    let mut mib = [0usize; 3];
    let mut length = mib.len();
    // SAFETY: the name has three components. The caller guarantees the rest.
    let result = unsafe {
        match ffi::mallctlnametomib(c"arena.0.destroy".as_ptr(), mib.as_mut_ptr(), &raw mut length) {
            0 => {
                mib[1] = arena as usize;
                ffi::mallctlbymib(mib.as_ptr(), length, null_mut(), null_mut(), null_mut(), 0)
            }
            error => error,
        }
    };
    check(result)
}

/// Makes a cache.
///
/// # Errors
/// `EFAULT`: there is no memory.
pub(crate) fn create_cache() -> io::Result<u32> {
    // SAFETY: this name takes nothing, and returns an unsigned number.
    unsafe { control::<()>(c"tcache.create", None) }
}

/// Destroys a cache, and frees what it holds.
///
/// # Safety
/// Nobody uses the cache.
pub(crate) unsafe fn destroy_cache(cache: u32) -> io::Result<()> {
    // SAFETY: this name takes an unsigned number. The caller guarantees the rest.
    unsafe { set(c"tcache.destroy", cache) }
}

/// Has the calling thread allocate from an arena where no flags are given.
pub(crate) fn set_thread_arena(arena: u32) -> io::Result<()> {
    // SAFETY: this name takes an unsigned number.
    unsafe { set(c"thread.arena", arena) }
}

/// Frees the memory that the arenas keep for later use.
#[cfg(test)]
pub(crate) fn purge() {
    /// All arenas: `MALLCTL_ARENAS_ALL`.
    const NAME: &CStr = c"arena.4096.purge";
    // SAFETY: this name takes and returns nothing.
    let result = unsafe { ffi::mallctl(NAME.as_ptr(), null_mut(), null_mut(), null_mut(), 0) };
    assert_eq!(result, 0);
}

/// # Safety
/// The name takes a `T`, or nothing, and returns an unsigned number.
unsafe fn control<T>(name: &CStr, input: Option<&mut T>) -> io::Result<u32> {
    let (mut output, mut length): (c_uint, _) = (0, size_of::<c_uint>());
    let (input, input_length) = input.map_or((null_mut(), 0), |input| (from_mut(input), size_of::<T>()));
    // SAFETY: the caller guarantees the types, and the values live through the call.
    let result = unsafe {
        ffi::mallctl(name.as_ptr(), (&raw mut output).cast(), &raw mut length, input.cast::<c_void>(), input_length)
    };
    check(result).map(|()| output)
}

/// # Safety
/// The name takes an unsigned number.
unsafe fn set(name: &CStr, mut value: c_uint) -> io::Result<()> {
    let input = (&raw mut value).cast();
    // SAFETY: the caller guarantees the type, and the value lives through the call.
    check(unsafe { ffi::mallctl(name.as_ptr(), null_mut(), null_mut(), input, size_of::<c_uint>()) })
}

fn check(result: c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(result)) }
}
