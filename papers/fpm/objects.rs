//! The objects of the measured programs.

use std::alloc::{GlobalAlloc, Layout, System, handle_alloc_error};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io::{self, Read};
use std::mem::{MaybeUninit, needs_drop};
use std::ptr::NonNull;

use pagemark::{Address, RangeSet};
use pagemark_heap::Heap;

/// Where objects are.
pub(super) enum ObjectAllocator {
    /// The allocator of the C library.
    System,
    /// A heap with views.
    Heap(Heap),
}

/// Makes and frees objects, which are plain data and change through cells.
pub(super) struct Objects {
    memory: ObjectAllocator,
    made: Cell<u64>,
    made_bytes: Cell<u64>,
    /// The addresses of the live objects, with their lengths, if they are to be found in what was
    /// saved.
    live: Option<RefCell<BTreeMap<usize, usize>>>,
}

impl Objects {
    /// Makes objects in `memory`.
    pub fn new(memory: ObjectAllocator, lists_live: bool) -> Objects {
        Objects { memory, made: Cell::new(0), made_bytes: Cell::new(0), live: lists_live.then(RefCell::default) }
    }

    /// The heap, if the objects are in one.
    pub fn heap(&self) -> Option<&Heap> {
        match &self.memory {
            ObjectAllocator::System => None,
            ObjectAllocator::Heap(heap) => Some(heap),
        }
    }

    /// Number of objects that were made, and their bytes.
    pub fn made(&self) -> (u64, u64) {
        (self.made.get(), self.made_bytes.get())
    }

    /// Makes an object.
    pub fn make<T>(&self, value: T) -> &T {
        const { assert!(!needs_drop::<T>(), "objects are freed without being dropped") };
        let object = self.allocate(Layout::new::<T>()).cast::<T>();
        // SAFETY: the allocation is aligned and has room for the value. It is not freed while it is
        // used, see `free`, nor before `self`, which owns the heap.
        unsafe {
            object.write(value);
            object.as_ref()
        }
    }

    /// Makes an object of `count` elements, at least one.
    pub fn make_all<T>(&self, count: usize, mut element: impl FnMut(usize) -> T) -> &[T] {
        const { assert!(!needs_drop::<T>(), "objects are freed without being dropped") };
        let object = self.allocate(array::<T>(count)).cast::<MaybeUninit<T>>();
        for index in 0..count {
            // SAFETY: the allocation has room for `count` elements.
            unsafe { object.add(index).write(MaybeUninit::new(element(index))) };
        }
        // SAFETY: as in `make`; all elements were written.
        unsafe { NonNull::slice_from_raw_parts(object.cast::<T>(), count).as_ref() }
    }

    /// Frees an object.
    ///
    /// # Safety
    /// The object was made here, and is not used again.
    pub unsafe fn free<T>(&self, object: *const T) {
        // SAFETY: the caller guarantees it.
        unsafe { self.deallocate(object.cast_mut().cast(), Layout::new::<T>()) }
    }

    /// Frees an object of several elements.
    ///
    /// # Safety
    /// Those of [`Objects::free`].
    pub unsafe fn free_all<T>(&self, object: *const [T]) {
        // SAFETY: the caller guarantees it.
        unsafe { self.deallocate(object.cast_mut().cast(), array::<T>(object.len())) }
    }

    #[inline]
    fn allocate(&self, layout: Layout) -> NonNull<u8> {
        let wanted = layout.size();
        let layout = if wanted == 0 { Layout::new::<u8>() } else { layout };
        // SAFETY: the layout has a size.
        let object = unsafe {
            match &self.memory {
                ObjectAllocator::System => System.alloc(layout),
                ObjectAllocator::Heap(heap) => heap.alloc(layout),
            }
        };
        let Some(object) = NonNull::new(object) else { handle_alloc_error(layout) };
        self.made.set(self.made.get() + 1);
        self.made_bytes.set(self.made_bytes.get() + layout.size() as u64);
        if let Some(live) = &self.live {
            live.borrow_mut().insert(object.addr().get(), wanted);
        }
        object
    }

    /// # Safety
    /// The object was made with this layout, and is not used again.
    #[inline]
    unsafe fn deallocate(&self, object: *mut u8, layout: Layout) {
        let layout = if layout.size() == 0 { Layout::new::<u8>() } else { layout };
        if let Some(live) = &self.live {
            live.borrow_mut().remove(&object.addr());
        }
        // SAFETY: the caller guarantees it.
        unsafe {
            match &self.memory {
                ObjectAllocator::System => System.dealloc(object, layout),
                ObjectAllocator::Heap(heap) => heap.dealloc(object, layout),
            }
        }
    }

    /// Looks for the live objects in what [`Heap::write_ranges`] has written. Returns how many
    /// there are, and how many of them are there as they are in memory.
    ///
    /// # Errors
    /// What was written cannot be read.
    pub fn find_in(&self, mut saved: impl Read) -> io::Result<(usize, usize)> {
        let (Some(heap), Some(live)) = (self.heap(), &self.live) else { return Ok((0, 0)) };
        let origin = heap.addresses().start;
        let (mut image, mut known) = (vec![0; heap.used().to_usize()], RangeSet::new());
        let mut word = [0; 8];
        while saved.read(&mut word[..1])? == 1 {
            saved.read_exact(&mut word[1..])?;
            let start = Address::new(u64::from_ne_bytes(word));
            saved.read_exact(&mut word)?;
            let (at, bytes) = ((start - origin).to_usize(), u64::from_ne_bytes(word) as usize);
            saved.read_exact(image.get_mut(at..at + bytes).ok_or(io::ErrorKind::InvalidData)?)?;
            known.insert(start..start + bytes.into());
        }
        let is_saved = |(&address, &bytes): (&usize, &usize)| {
            let start = heap.canonical(address as *const u8);
            let at = (start - origin).to_usize();
            // SAFETY: the object is live.
            let content = unsafe { std::slice::from_raw_parts(address as *const u8, bytes) };
            bytes == 0 || known.covers(start..start + bytes.into()) && image[at..at + bytes] == *content
        };
        let live = live.borrow();
        Ok((live.len(), live.iter().filter(|&object| is_saved(object)).count()))
    }
}

/// The layout of `count` elements, which exist in memory, or are about to.
fn array<T>(count: usize) -> Layout {
    Layout::array::<T>(count).unwrap_or_else(|_| handle_alloc_error(Layout::new::<T>()))
}

#[cfg(test)]
mod tests {
    use pagemark::ByteCount;
    use pagemark_heap::Parts;

    use super::*;

    #[test]
    fn an_object_that_was_lost_is_noticed() {
        let heap = Heap::new(Parts::Four, ByteCount::new(64 << 20)).unwrap();
        let objects = Objects::new(ObjectAllocator::Heap(heap), true);
        let heap = objects.heap().unwrap();
        let live: Vec<_> = (0..1000u64).map(|number| objects.make(Cell::new([number; 9]))).collect();
        // SAFETY: the object is not used again.
        unsafe { objects.free(std::ptr::from_ref(live[7])) };
        let origin = heap.addresses().start;
        let mut all = RangeSet::from(origin..origin + heap.used());
        let save = |ranges: &RangeSet| {
            let mut saved = Vec::new();
            heap.write_ranges(ranges, &mut saved).unwrap();
            saved
        };
        let saved = save(&all);
        assert_eq!(objects.find_in(saved.as_slice()).unwrap(), (999, 999));
        live[500].set([0; 9]);
        assert_eq!(objects.find_in(saved.as_slice()).unwrap(), (999, 998));
        // A later checkpoint has it.
        let place = heap.canonical(live[500].as_ptr());
        let later = save(&(place..place + ByteCount::new(72)).into());
        assert_eq!(objects.find_in([saved, later].concat().as_slice()).unwrap(), (999, 999));
        all.remove(place..place + ByteCount::new(8));
        assert_eq!(objects.find_in(save(&all).as_slice()).unwrap(), (999, 998));
        assert!(objects.find_in(&save(&all)[..1000]).is_err(), "it is not whole");
    }
}
