//! The memory that jemalloc gets: the first view of a [`Views`], from its beginning on.
//!
//! jemalloc asks for *extents*, runs of pages, through the hooks of its arenas. It keeps the
//! extents that it no longer needs, and uses them again; their memory is freed.

use std::ffi::{c_uint, c_void};
use std::io;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};

use pagemark::{Address, ByteCount, PAGE_SIZE, Range};
use pagemark_linux::views::Views;

use crate::Parts;
use crate::crossings::Crossings;
use crate::jemalloc::ExtentHooks;

/// The views of a heap, and how much of them jemalloc has. What it has is open, with its part of
/// the tables; what it may have once is only reserved.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Space {
    /// The first field: jemalloc calls the hooks with its address, which is that of the space.
    hooks: Hooks,
    pub(crate) views: Views,
    pub(crate) crossings: Crossings,
    used: AtomicUsize,
}

#[repr(transparent)]
struct Hooks(ExtentHooks);

impl std::fmt::Debug for Hooks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hooks")
    }
}

impl Space {
    /// Makes a space whose capacity is rounded up to a power of two.
    ///
    /// # Errors
    /// Those of [`Views::new`].
    pub(crate) fn new(capacity: ByteCount, parts: Parts) -> io::Result<Space> {
        let capacity = capacity.get().max(1 << 21).checked_next_power_of_two();
        let capacity = capacity.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        let hooks = ExtentHooks {
            alloc: Some(allocate),
            dalloc: Some(keep),
            commit: Some(prepare),
            decommit: Some(free),
            split: Some(split),
            merge: Some(merge),
            ..ExtentHooks::default()
        };
        Ok(Space {
            hooks: Hooks(hooks),
            views: Views::reserve(ByteCount::new(capacity), parts.count())?,
            crossings: Crossings::new(parts, capacity as usize)?,
            used: AtomicUsize::new(0),
        })
    }

    /// The hooks. They are valid as long as the space stays where it is.
    pub(crate) fn hooks(&self) -> *mut ExtentHooks {
        // jemalloc only reads them.
        (&raw const self.hooks.0).cast_mut()
    }

    /// The bytes, from the beginning of each view, of which jemalloc may have handed out some.
    pub(crate) fn used(&self) -> ByteCount {
        ByteCount::from(self.used.load(Ordering::Acquire))
    }

    /// Part of an extent, as offsets.
    fn offsets(&self, extent: *mut c_void, offset: usize, length: usize) -> Range {
        let start = Address::from(extent.addr() - self.views.start().as_ptr().addr() + offset);
        start..start + ByteCount::from(length)
    }

    /// Opens bytes of the views, and what the tables have for them.
    ///
    /// # Errors
    /// Those of [`Views::open`].
    fn open(&self, bytes: std::ops::Range<usize>) -> io::Result<()> {
        self.crossings.open(bytes.clone())?;
        self.views.open(&(Address::from(bytes.start)..Address::from(bytes.end)))
    }

    /// Opens everything.
    ///
    /// # Errors
    /// Those of [`Views::open`].
    pub(crate) fn open_all(&self) -> io::Result<()> {
        self.open(0..self.views.view_bytes().to_usize())
    }

    /// Takes the next free pages. With `wanted`, only if they begin at this address.
    fn take(&self, wanted: Option<usize>, bytes: usize, alignment: usize) -> Option<*mut u8> {
        let start = self.views.start().as_ptr();
        let take = |used: usize| {
            let at = start.addr().checked_add(used)?.checked_next_multiple_of(alignment)?;
            let end = (at - start.addr()).checked_add(bytes)?;
            let is_right = wanted.is_none_or(|wanted| wanted == at) && end <= self.views.view_bytes().to_usize();
            // Before anybody takes these bytes for used ones. Nothing is lost if another thread gets them.
            (is_right && self.open(used..end).is_ok()).then_some((at, end))
        };
        let mut used = self.used.load(Ordering::Relaxed);
        loop {
            let (at, end) = take(used)?;
            match self.used.compare_exchange_weak(used, end, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return Some(start.with_addr(at)),
                Err(now) => used = now,
            }
        }
    }
}

unsafe extern "C" fn allocate(
    hooks: *mut ExtentHooks,
    wanted: *mut c_void,
    bytes: usize,
    alignment: usize,
    zero: *mut bool,
    commit: *mut bool,
    _arena: c_uint,
) -> *mut c_void {
    // SAFETY: jemalloc passes the hooks of the arena, which are the first field of the space, and
    // two variables of its own.
    unsafe {
        let space = &*hooks.cast::<Space>();
        let wanted = (!wanted.is_null()).then(|| wanted.addr());
        let Some(start) = space.take(wanted, bytes, alignment) else { return null_mut() };
        // The file holds zeros where nothing was written yet.
        *zero = true;
        // So that jemalloc calls `prepare` before it uses a part of them.
        *commit = false;
        start.cast()
    }
}

/// Refuses to take an extent back, so that jemalloc keeps it for later use.
unsafe extern "C" fn keep(_: *mut ExtentHooks, _: *mut c_void, _: usize, _: bool, _: c_uint) -> bool {
    true
}

/// Most bytes of a run of small objects, which are used through all views. What is longer is one
/// object, which is used through the first view, and maybe never whole.
const MOST_RUN_BYTES: usize = 7 * PAGE_SIZE;

/// Part of an extent that holds no data, or was freed, is used from now on.
unsafe extern "C" fn prepare(
    hooks: *mut ExtentHooks,
    extent: *mut c_void,
    _bytes: usize,
    offset: usize,
    length: usize,
    _arena: c_uint,
) -> bool {
    if length <= MOST_RUN_BYTES {
        // SAFETY: as in `allocate`.
        let space = unsafe { &*hooks.cast::<Space>() };
        space.views.prepare(&space.offsets(extent, offset, length));
    }
    false
}

/// Frees the memory of part of an extent. Keeps `errno`, as `free(3)` must: the kernel frees no
/// locked memory.
unsafe extern "C" fn free(
    hooks: *mut ExtentHooks,
    extent: *mut c_void,
    _bytes: usize,
    offset: usize,
    length: usize,
    _arena: c_uint,
) -> bool {
    // SAFETY: as in `allocate`. jemalloc no longer needs the content of this part. The number is that of
    // this thread.
    unsafe {
        let errno = libc::__errno_location();
        let before = errno.read();
        let space = &*hooks.cast::<Space>();
        let is_kept = space.views.free(&space.offsets(extent, offset, length)).is_err();
        errno.write(before);
        is_kept
    }
}

/// Extents may be split everywhere.
unsafe extern "C" fn split(
    _: *mut ExtentHooks,
    _: *mut c_void,
    _: usize,
    _: usize,
    _: usize,
    _: bool,
    _: c_uint,
) -> bool {
    false
}

/// All extents are parts of one mapping.
unsafe extern "C" fn merge(
    _: *mut ExtentHooks,
    _: *mut c_void,
    _: usize,
    _: *mut c_void,
    _: usize,
    _: bool,
    _: c_uint,
) -> bool {
    false
}
