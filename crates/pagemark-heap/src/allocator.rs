//! Allocation over the views of a memory: jemalloc knows the addresses of the first view only; here
//! they become those of the other views, and back.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::ptr::null_mut;

use pagemark::{Address, AddressRangeExt, ByteCount, PAGE_SIZE, Range, RangeSet};
use pagemark_linux::shared_bytes::SharedBytes;
use pagemark_linux::views::Views;

use crate::Parts;
use crate::crossings::Crossings;
use crate::jemalloc::{self, Flags};
use crate::space::Space;
use crate::tracked::Tracked;

/// Alignment that every object of its size or more has.
const MIN_ALIGN: usize = 16;

/// The memory of a heap, and the objects in it. [`Heap`](crate::Heap) and
/// [`GlobalHeap`](crate::GlobalHeap) have one each.
#[derive(Debug)]
pub struct Allocator {
    /// Its address must not change while jemalloc has arenas with its hooks.
    pub(crate) space: Space,
    parts: Parts,
}

impl Allocator {
    /// Makes the memory. Allocates no memory of the program.
    ///
    /// # Errors
    /// Those of [`Views::new`](pagemark_linux::views::Views::new).
    pub(crate) fn new(parts: Parts, capacity: ByteCount) -> io::Result<Allocator> {
        Ok(Allocator { space: Space::new(capacity, parts)?, parts })
    }

    /// Number of parts of each page.
    pub fn parts(&self) -> Parts {
        self.parts
    }

    /// The addresses of the first view, which shows all memory of the heap.
    pub fn addresses(&self) -> Range {
        self.space.views.view(0)
    }

    /// Makes all memory accessible.
    ///
    /// # Errors
    /// There is no memory for tables, or there are too many mappings.
    pub fn open_all(&self) -> io::Result<()> {
        self.space.open_all()
    }

    /// The address in the first view of what is at `address` in some view. Reports of trackers have
    /// these addresses. The address of other memory is returned as it is.
    pub fn canonical<T>(&self, address: *const T) -> Address {
        Address::of(self.to_first_view(address.cast_mut().cast::<u8>()).cast_const())
    }

    /// Declares that a tracker outside of the process tracks the heap, or will. New memory is then
    /// populated in the way that suits it.
    pub fn expect_tracker(&self) {
        self.space.views.begin_tracking();
    }

    /// Leaves new memory to be populated by the program's first accesses, as other allocators do.
    /// By default, a heap that has several parts a page, or is tracked, populates it by blocks of
    /// 64 KiB.
    pub fn populate_by_use(&self) {
        self.space.views.populate_by_use();
    }

    /// Appends `ranges` to a file as [`Allocator::write_ranges`] writes them, and waits until they
    /// are on disk (FPM, section 5).
    ///
    /// # Errors
    /// As there, and those of the file. The file may have got a part then.
    pub fn append_ranges(&self, ranges: &RangeSet, file: &File) -> io::Result<()> {
        let mut out = BufWriter::with_capacity(1 << 20, file);
        self.write_ranges(ranges, &mut out)?;
        out.flush()?;
        file.sync_data()
    }

    /// Writes the bytes of `ranges`, which are addresses of the first view: for each range its
    /// address and its length, 8 bytes each in the machine's order, and its bytes. What other
    /// threads write meanwhile is in what is written or not.
    ///
    /// # Errors
    /// `InvalidInput`: a range is not in the memory that the heap uses. `ESRCH`: in a child that
    /// does not have the heap, as of the bare system call. Errors of `out`.
    pub fn write_ranges(&self, ranges: &RangeSet, out: &mut impl Write) -> io::Result<()> {
        if !self.space.views.are_here() {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        let start = self.addresses().start;
        // Not an object: where the heap is the program's, it would be one of those that are written.
        let mut copy = [0; PAGE_SIZE];
        // SAFETY: the first view is mapped as long as `self` lives, and is read only as far as it is
        // used, which is open. What other threads write meanwhile is read by atomic operations.
        let memory = unsafe { SharedBytes::new(self.space.views.start(), self.space.views.view_bytes().to_usize()) };
        for range in ranges.iter() {
            if range.start < start || range.end > start + self.space.used() {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "the range is not one of the heap"));
            }
            let bytes = range.byte_count().to_usize();
            out.write_all(&range.start.get().to_ne_bytes())?;
            out.write_all(&range.byte_count().get().to_ne_bytes())?;
            for offset in (0..bytes).step_by(PAGE_SIZE) {
                let length = (bytes - offset).min(PAGE_SIZE);
                memory.read((range.start - start).to_usize() + offset, &mut copy[..length]);
                out.write_all(&copy[..length])?;
            }
        }
        Ok(())
    }

    /// Offset of an address from the first view; beyond all views for other memory.
    #[inline]
    fn offset(&self, address: *mut u8) -> usize {
        address.addr().wrapping_sub(self.space.views.start().as_ptr().addr())
    }

    #[inline]
    fn to_first_view(&self, object: *mut u8) -> *mut u8 {
        let (offset, view_bytes) = (self.offset(object), self.space.views.view_bytes().to_usize());
        if offset < view_bytes * self.parts.count() {
            self.space.views.start().as_ptr().wrapping_add(offset & (view_bytes - 1))
        } else {
            object
        }
    }

    /// The address of an object, of which jemalloc has returned the address in the first view, in
    /// the view of the part in which it begins. Records its `size`.
    #[inline]
    fn hand_out(&self, object: *mut u8, size: usize) -> *mut u8 {
        let (offset, view_bytes) = (self.offset(object), self.space.views.view_bytes().to_usize());
        // A thread that is ending may get memory from another arena.
        if object.is_null() || offset >= view_bytes {
            return object;
        }
        self.space.crossings.record(offset, size);
        object.wrapping_add(((offset & (PAGE_SIZE - 1)) >> self.parts.shift()) * view_bytes)
    }

    /// Like [`Allocator::hand_out`], for an object that begins at a page and was written since the
    /// crossings had `reports`.
    pub(crate) fn hand_out_written(&self, object: *mut u8, size: usize, reports: usize) -> *mut u8 {
        let handed_out = self.hand_out(object, size);
        let offset = self.offset(handed_out);
        if self.space.crossings.reports() != reports && offset < self.space.views.view_bytes().to_usize() {
            let start = Address::from(offset);
            self.space.views.report(&(start..start + ByteCount::from(size.next_multiple_of(PAGE_SIZE))));
        }
        handed_out
    }

    /// Allocates an object; null if there is no memory. `align` is a power of two.
    #[inline]
    pub(crate) fn allocate(&self, size: usize, align: usize, flags: Flags) -> *mut u8 {
        let size = size.max(1);
        self.hand_out(jemalloc::allocate(size, with_align(flags, size, align)), size)
    }

    /// Allocates an object that is filled with zeros.
    pub(crate) fn allocate_zeroed(&self, size: usize, align: usize, flags: Flags) -> *mut u8 {
        if size > jemalloc::SMALL_BYTES {
            // It begins at a page, so jemalloc fills it through its own view, and need not do so
            // where the memory is new.
            let reports = self.space.crossings.reports();
            let object = jemalloc::allocate(size, with_align(flags, size, align) | jemalloc::ZERO);
            return self.hand_out_written(object, size, reports);
        }
        let object = self.allocate(size, align, flags);
        if !object.is_null() {
            // SAFETY: the object has `size` bytes, and nobody else knows it.
            unsafe { object.write_bytes(0, size) };
        }
        object
    }

    /// Frees an object.
    ///
    /// # Safety
    /// `object` is a live object of this allocator.
    #[inline]
    pub(crate) unsafe fn free(&self, object: *mut u8, flags: Flags) {
        // SAFETY: the caller guarantees it.
        unsafe { jemalloc::free(self.to_first_view(object), flags) }
    }

    /// Frees an object of a known size and alignment.
    ///
    /// # Safety
    /// `object` is a live object of this allocator, which has this size and alignment.
    #[inline]
    pub(crate) unsafe fn free_sized(&self, object: *mut u8, size: usize, align: usize, flags: Flags) {
        let size = size.max(1);
        // SAFETY: the caller guarantees it.
        unsafe { jemalloc::free_sized(self.to_first_view(object), size, with_align(flags, size, align)) }
    }

    /// The bytes that an object has, all of which the program may write.
    ///
    /// # Safety
    /// Those of [`Allocator::free`].
    pub(crate) unsafe fn usable_size(&self, object: *mut u8) -> usize {
        let first = self.to_first_view(object);
        // SAFETY: the caller guarantees it.
        let size = unsafe { jemalloc::usable_size(first) };
        // From now on, all of them count.
        self.hand_out(first, size);
        size
    }

    /// Resizes an object, and moves it if needed. Returns null if there is no memory; then the
    /// object is as it was.
    ///
    /// # Safety
    /// Those of [`Allocator::free`].
    pub(crate) unsafe fn reallocate(&self, object: *mut u8, size: usize, align: usize, flags: Flags) -> *mut u8 {
        let (size, first) = (size.max(1), self.to_first_view(object));
        // SAFETY: the caller guarantees it.
        let old_size = unsafe { jemalloc::usable_size(first) };
        let aligned = with_align(flags, size, align);
        let new_size = jemalloc::size_class(size, aligned);
        let may_stay = old_size > jemalloc::SMALL_BYTES && new_size > jemalloc::SMALL_BYTES;
        // SAFETY: the object is live, and the size is not 0.
        if new_size == old_size || may_stay && unsafe { jemalloc::resize_in_place(first, size, aligned) } >= size {
            return self.hand_out(first, size);
        }
        let moved = self.allocate(size, align, flags);
        if !moved.is_null() {
            // SAFETY: both objects are live and have that many bytes. The caller gives the old one
            // up.
            unsafe {
                moved.copy_from_nonoverlapping(object, old_size.min(size));
                self.free(object, flags);
            }
        }
        if moved.is_null() { null_mut() } else { moved }
    }
}

/// Adds the flag of an alignment where jemalloc does not give it anyway.
#[inline]
fn with_align(flags: Flags, size: usize, align: usize) -> Flags {
    if align <= MIN_ALIGN && align <= size { flags } else { flags | jemalloc::align_flag(align) }
}

impl Tracked for Allocator {
    fn views(&self) -> &Views {
        &self.space.views
    }

    fn crossings(&self) -> &Crossings {
        &self.space.crossings
    }

    fn used(&self) -> ByteCount {
        self.space.used()
    }

    fn parts(&self) -> Parts {
        Allocator::parts(self)
    }
}
