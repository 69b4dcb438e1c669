//! A heap with arenas of its own.

use std::alloc::{GlobalAlloc, Layout};
use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io::{self, Write};
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use pagemark::{Address, ByteCount, Range, RangeSet};
use pagemark_linux::at_fork::hold_off;

use crate::allocator::Allocator;
use crate::error::Error;
use crate::jemalloc::{self, Flags};
use crate::{Parts, fork};

/// Most arenas of a heap. Threads that use different arenas do not wait for each other.
const MOST_ARENAS: usize = 8;

/// A heap whose objects can be tracked by parts of pages. Threads share it by reference.
///
/// It allocates as [`GlobalAlloc`] does. Dropping it frees all its objects, so no object may be
/// used after that.
///
/// In a child made by `fork`, the heap has a copy of the memory. The fork takes the time to copy
/// all memory of the heap. What other threads write at that moment is in the copy or not. If there
/// is no memory for the copy, the child ends at once with the status 127 and a message.
#[derive(Debug)]
pub struct Heap {
    shared: Arc<Shared>,
}

/// What the heap, its trackers and the threads that use it share.
#[derive(Debug)]
pub(crate) struct Shared {
    allocator: Allocator,
    id: u64,
    arenas: Vec<u32>,
    next_arena: AtomicUsize,
    caches: Mutex<Caches>,
}

/// The caches of threads.
#[derive(Debug, Default)]
struct Caches {
    all: Vec<u32>,
    /// Those that no thread uses, with their arenas, as flags.
    free: Vec<Flags>,
}

thread_local! {
    /// The heap that this thread used last, by its id, and the flags for it.
    static LAST: Cell<(u64, Flags)> = const { Cell::new((0, 0)) };
    /// The flags for each heap that this thread has used.
    static USED: RefCell<Vec<Used>> = const { RefCell::new(Vec::new()) };
}

struct Used {
    id: u64,
    flags: Flags,
    heap: Weak<Shared>,
}

impl Drop for Used {
    fn drop(&mut self) {
        // The thread is ending. Another one may use the cache.
        LAST.set((0, 0));
        if let Some(heap) = self.heap.upgrade() {
            let _forks = hold_off();
            heap.caches.lock().unwrap_or_else(PoisonError::into_inner).free.push(self.flags);
        }
    }
}

impl Heap {
    /// Makes a heap that can hold `capacity` bytes, rounded up to a power of two. The capacity
    /// takes address space only, once for each part of a page.
    ///
    /// # Errors
    /// [`Error`], whose kind says which limit is in the way.
    pub fn new(parts: Parts, capacity: ByteCount) -> Result<Heap, Error> {
        static IDS: AtomicU64 = AtomicU64::new(1);
        let mut shared = Arc::new(Shared {
            allocator: Allocator::new(parts, capacity).map_err(Error::creating)?,
            id: IDS.fetch_add(1, Ordering::Relaxed),
            arenas: Vec::new(),
            next_arena: AtomicUsize::new(0),
            caches: Mutex::default(),
        });
        // SAFETY: the space stays where it is, because it is behind an `Arc`.
        unsafe { fork::register(&shared.allocator.space).map_err(Error::creating)? };
        let arenas = std::thread::available_parallelism().map_or(1, usize::from).min(MOST_ARENAS);
        for _ in 0..arenas {
            // SAFETY: as above. The arenas are destroyed before the space.
            let arena = unsafe { jemalloc::create_arena(shared.allocator.space.hooks()) }.map_err(Error::creating)?;
            if let Some(shared) = Arc::get_mut(&mut shared) {
                shared.arenas.push(arena);
            }
        }
        Ok(Heap { shared })
    }

    /// Number of parts of each page.
    pub fn parts(&self) -> Parts {
        self.shared.allocator.parts()
    }

    /// The addresses of the first view, which shows all memory of the heap.
    pub fn addresses(&self) -> Range {
        self.shared.allocator.addresses()
    }

    /// Makes all memory of the heap accessible. The heap opens its memory as it uses it; a tracker
    /// for whole pages that changes the protection of memory, such as `mprotect`, needs all of it
    /// to be open before. `mlockall` then locks what the heap may have, not only what it uses.
    ///
    /// # Errors
    /// `ErrorKind::NoRoom`: there is no memory for tables, or there are too many mappings.
    pub fn open_all(&self) -> Result<(), Error> {
        self.shared.allocator.open_all().map_err(Error::creating)
    }

    /// The address in the first view of what is at `address` in some view. Reports of trackers have
    /// these addresses.
    pub fn canonical<T>(&self, address: *const T) -> Address {
        self.shared.allocator.canonical(address)
    }

    /// The bytes from the beginning of each view that may hold data. What is beyond was never used.
    pub fn used(&self) -> ByteCount {
        self.shared.allocator.space.used()
    }

    /// Appends `ranges` to a file, as [`Allocator::append_ranges`] does.
    ///
    /// # Errors
    /// As there.
    pub fn append_ranges(&self, ranges: &RangeSet, file: &File) -> io::Result<()> {
        self.shared.allocator.append_ranges(ranges, file)
    }

    /// Writes the bytes of `ranges`, as [`Allocator::write_ranges`] does.
    ///
    /// # Errors
    /// As there.
    pub fn write_ranges(&self, ranges: &RangeSet, out: &mut impl Write) -> io::Result<()> {
        self.shared.allocator.write_ranges(ranges, out)
    }

    /// The bytes that an object has, all of which may be written.
    ///
    /// # Safety
    /// `object` is a live object of this heap.
    pub unsafe fn usable_size(&self, object: *mut u8) -> usize {
        // SAFETY: the caller guarantees it.
        unsafe { self.shared.allocator.usable_size(object) }
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// The flags with which the calling thread uses the heap.
    #[inline]
    fn flags(&self) -> Flags {
        let known = LAST.try_with(Cell::get).unwrap_or((0, 0));
        if known.0 == self.shared.id { known.1 } else { self.find_flags() }
    }

    #[cold]
    fn find_flags(&self) -> Flags {
        let shared = &self.shared;
        let find = |used: &RefCell<Vec<Used>>| {
            let mut used = used.borrow_mut();
            if let Some(known) = used.iter().find(|used| used.id == shared.id) {
                return known.flags;
            }
            used.retain(|used| used.heap.strong_count() > 0);
            let flags = shared.take_cache();
            used.push(Used { id: shared.id, flags, heap: Arc::downgrade(shared) });
            flags
        };
        match USED.try_with(find) {
            Ok(flags) => {
                LAST.set((shared.id, flags));
                flags
            }
            // The thread is ending.
            Err(_) => jemalloc::arena_flags(shared.arenas[0]),
        }
    }
}

impl Shared {
    pub(crate) fn allocator(&self) -> &Allocator {
        &self.allocator
    }

    /// A cache that no other thread uses, or no cache if there is no memory for one.
    fn take_cache(&self) -> Flags {
        let _forks = hold_off();
        let mut caches = self.caches.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(flags) = caches.free.pop() {
            return flags;
        }
        let arena = self.arenas[self.next_arena.fetch_add(1, Ordering::Relaxed) % self.arenas.len()];
        match jemalloc::create_cache() {
            Ok(cache) => {
                caches.all.push(cache);
                jemalloc::cached_flags(arena, cache)
            }
            Err(_) => jemalloc::arena_flags(arena),
        }
    }
}

impl Deref for Shared {
    type Target = Allocator;

    fn deref(&self) -> &Allocator {
        &self.allocator
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        fork::unregister(&self.allocator.space);
        let caches = self.caches.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the heap is gone, so that no thread uses a cache or an arena. An error leaves them
        // unused.
        unsafe {
            caches.all.drain(..).for_each(|cache| _ = jemalloc::destroy_cache(cache));
            self.arenas.drain(..).for_each(|arena| _ = jemalloc::destroy_arena(arena));
        }
    }
}

// SAFETY: jemalloc is a correct allocator, and the views of an object show its memory.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.shared.allocator.allocate(layout.size(), layout.align(), self.flags())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.shared.allocator.allocate_zeroed(layout.size(), layout.align(), self.flags())
    }

    unsafe fn dealloc(&self, object: *mut u8, layout: Layout) {
        // SAFETY: the caller guarantees it.
        unsafe { self.shared.allocator.free_sized(object, layout.size(), layout.align(), self.flags()) }
    }

    unsafe fn realloc(&self, object: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller guarantees it.
        unsafe { self.shared.allocator.reallocate(object, size, layout.align(), self.flags()) }
    }
}
