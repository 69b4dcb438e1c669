//! The heap of all memory of a program.

use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::io;
use std::mem::ManuallyDrop;
use std::ptr::null_mut;
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};

use pagemark::ByteCount;
use pagemark_linux::at_fork;
use pagemark_linux::own_memory::Mapping;

use crate::allocator::Allocator;
use crate::{Parts, fork, jemalloc};

/// Most arenas. Threads that use different arenas do not wait for each other.
const MOST_ARENAS: usize = 8;

/// A heap for `#[global_allocator]`. It is made at the first allocation.
///
/// ```
/// use pagemark::ByteCount;
/// use pagemark_heap::{GlobalHeap, Parts};
///
/// #[global_allocator]
/// static HEAP: GlobalHeap = GlobalHeap::new(Parts::Four, ByteCount::new(64 << 30));
///
/// let numbers = vec![1u64; 1000];
/// let heap = HEAP.allocator()?;
/// assert_ne!(heap.canonical(&numbers[999]), heap.canonical(&numbers[998]));
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// A program can use jemalloc itself beside it. A thread that allocates after jemalloc has released
/// the thread's data, in a destructor of `pthread_key_create`, gets memory that is not tracked. A
/// forked child has a copy of the heap, as with [`Heap`](crate::Heap). The memory of a heap that is
/// dropped is not freed.
#[derive(Debug)]
pub struct GlobalHeap {
    settings: Settings,
    once: Once,
    /// The allocator once it is made. It stays where it is for ever, also if this value is moved or
    /// dropped: jemalloc and each fork use it.
    made: AtomicPtr<Allocator>,
    /// Error number of the attempt to make it.
    error: AtomicU32,
    arenas: [AtomicU32; MOST_ARENAS],
    arena_count: AtomicUsize,
    next_arena: AtomicUsize,
}

#[derive(Debug)]
enum Settings {
    Fixed(Parts, ByteCount),
    Chosen(fn() -> (Parts, ByteCount)),
}

thread_local! {
    /// The heap from whose arena this thread allocates by default.
    ///
    /// It is asked for in `malloc`, and must not allocate itself. The loader gives the variables of
    /// threads of a library that it loads with the program their place when a thread begins, and
    /// allocates nothing when they are used, also after the program has loaded other libraries: a
    /// test of `pagemark-malloc` does so. Of a library that is loaded later the place is allocated
    /// at the first use, by the program's `malloc`. A library that replaces `malloc` is therefore
    /// preloaded or linked, and never loaded by `dlopen`.
    static BOUND_TO: Cell<usize> = const { Cell::new(0) };
}

impl GlobalHeap {
    /// A heap that can hold `capacity` bytes, rounded up to a power of two. The capacity takes
    /// address space only, once for each part of a page. A program has one such heap.
    pub const fn new(parts: Parts, capacity: ByteCount) -> GlobalHeap {
        GlobalHeap::with_settings(Settings::Fixed(parts, capacity))
    }

    /// Like [`GlobalHeap::new`], where number and capacity are chosen when the heap is made, by a
    /// function that does not allocate.
    pub const fn chosen_by(choose: fn() -> (Parts, ByteCount)) -> GlobalHeap {
        GlobalHeap::with_settings(Settings::Chosen(choose))
    }

    const fn with_settings(settings: Settings) -> GlobalHeap {
        GlobalHeap {
            settings,
            once: Once::new(),
            made: AtomicPtr::new(null_mut()),
            error: AtomicU32::new(0),
            arenas: [const { AtomicU32::new(0) }; MOST_ARENAS],
            arena_count: AtomicUsize::new(0),
            next_arena: AtomicUsize::new(0),
        }
    }

    /// The memory of the heap. Makes it if need be.
    ///
    /// # Errors
    /// Those of [`Heap::new`](crate::Heap::new), but without text: the allocator of a program
    /// cannot allocate.
    pub fn allocator(&'static self) -> io::Result<&'static Allocator> {
        self.get().ok_or_else(|| io::Error::from_raw_os_error(self.error.load(Ordering::Acquire) as i32))
    }

    #[inline]
    fn get(&self) -> Option<&'static Allocator> {
        // SAFETY: the pointer is null, or that of the allocator, which is never dropped.
        match unsafe { self.made.load(Ordering::Acquire).as_ref() } {
            None => self.make(),
            made => made,
        }
    }

    #[cold]
    fn make(&self) -> Option<&'static Allocator> {
        self.once.call_once(|| {
            if let Err(error) = self.try_make() {
                self.error.store(error.raw_os_error().unwrap_or(libc::ENOMEM) as u32, Ordering::Release);
            }
        });
        // SAFETY: as in `get`.
        unsafe { self.made.load(Ordering::Acquire).as_ref() }
    }

    /// Makes the heap, without memory of the program.
    fn try_make(&self) -> io::Result<()> {
        let (parts, capacity) = match self.settings {
            Settings::Fixed(parts, capacity) => (parts, capacity),
            Settings::Chosen(choose) => choose(),
        };
        // Whoever holds forks off may wait for jemalloc, whose handlers come first.
        fork::prepare()?;
        at_fork::register();
        let allocator = leak(Allocator::new(parts, capacity)?)?;
        // SAFETY: the space stays where it is.
        unsafe { fork::register(&allocator.space)? };
        // The number of processors without memory of the program.
        // SAFETY: the call takes and returns a number.
        let processors = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
        let count = usize::try_from(processors).unwrap_or(1).clamp(1, MOST_ARENAS);
        for arena in &self.arenas[..count] {
            // SAFETY: the hooks stay where they are, with the space.
            let made = unsafe { jemalloc::create_arena(allocator.space.hooks())? };
            arena.store(made, Ordering::Relaxed);
        }
        self.arena_count.store(count, Ordering::Relaxed);
        self.made.store((&raw const *allocator).cast_mut(), Ordering::Release);
        Ok(())
    }

    /// The allocator, from whose arenas the calling thread allocates.
    #[inline]
    fn bound(&self) -> Option<&'static Allocator> {
        let allocator = self.get()?;
        let id = (&raw const *allocator).addr();
        if BOUND_TO.get() != id {
            self.bind(id)?;
        }
        Some(allocator)
    }

    #[cold]
    fn bind(&self, id: usize) -> Option<()> {
        let next = self.next_arena.fetch_add(1, Ordering::Relaxed) % self.arena_count.load(Ordering::Relaxed);
        jemalloc::set_thread_arena(self.arenas[next].load(Ordering::Relaxed)).ok()?;
        BOUND_TO.set(id);
        Some(())
    }

    /// Allocates, as `malloc` does: null if there is no memory. `align` is a power of two.
    #[inline]
    pub fn allocate(&self, size: usize, align: usize) -> *mut u8 {
        self.bound().map_or(null_mut(), |heap| heap.allocate(size, align, 0))
    }

    /// Allocates memory that is filled with zeros.
    pub fn allocate_zeroed(&self, size: usize) -> *mut u8 {
        self.bound().map_or(null_mut(), |heap| heap.allocate_zeroed(size, 1, 0))
    }

    /// Frees an object.
    ///
    /// # Safety
    /// `object` is a live object of this heap.
    #[inline]
    pub unsafe fn free(&self, object: *mut u8) {
        if let Some(heap) = self.get() {
            // SAFETY: the caller guarantees it.
            unsafe { heap.free(object, 0) }
        }
    }

    /// Resizes an object as `realloc` does, with the alignment that it must have.
    ///
    /// # Safety
    /// `object` is a live object of this heap.
    pub unsafe fn reallocate(&self, object: *mut u8, size: usize, align: usize) -> *mut u8 {
        // SAFETY: the caller guarantees it.
        self.bound().map_or(null_mut(), |heap| unsafe { heap.reallocate(object, size, align, 0) })
    }

    /// The bytes that an object has, all of which may be written.
    ///
    /// # Safety
    /// `object` is a live object of this heap.
    pub unsafe fn usable_size(&self, object: *mut u8) -> usize {
        // SAFETY: the caller guarantees it.
        self.get().map_or(0, |heap| unsafe { heap.usable_size(object) })
    }
}

/// Gives an allocator a place for ever, without memory of the program.
fn leak(allocator: Allocator) -> io::Result<&'static Allocator> {
    let place = ManuallyDrop::new(Mapping::new(size_of::<Allocator>())?);
    let place = place.start().cast::<Allocator>();
    // SAFETY: the mapping has the size, the alignment of a page, and no other user; it stays.
    unsafe {
        place.write(allocator);
        Ok(place.as_ref())
    }
}

// SAFETY: jemalloc is a correct allocator, and the views of an object show its memory.
unsafe impl GlobalAlloc for GlobalHeap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.allocate(layout.size(), layout.align())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.bound().map_or(null_mut(), |heap| heap.allocate_zeroed(layout.size(), layout.align(), 0))
    }

    unsafe fn dealloc(&self, object: *mut u8, layout: Layout) {
        if let Some(heap) = self.get() {
            // SAFETY: the caller guarantees it.
            unsafe { heap.free_sized(object, layout.size(), layout.align(), 0) }
        }
    }

    unsafe fn realloc(&self, object: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller guarantees it.
        unsafe { self.reallocate(object, size, layout.align()) }
    }
}
