//! A heap within the state, whose content depends only on what is allocated, not on the history.
//!
//! The heap keeps one bit for each 16 bytes. An allocation gets the lowest address where it fits.
//! Freed memory is zeroed, so that it takes no space in a snapshot and makes no two states differ
//! (SPM, "Conclusion").

use std::cell::Cell;

use crate::Plain;
use crate::sys::arena::{Arena, clear};

/// Bytes for each bit.
const GRANULE: usize = 16;

/// Allocates memory of the state. Copies are the same heap.
///
/// Memory is named by its address: a number other than 0 that can be stored in the state. Freed
/// memory can still be accessed, as in C, with the same consequences for the explored program but
/// without undefined behaviour: the memory always holds a valid value.
#[derive(Clone, Copy, Debug)]
pub struct Heap<'w> {
    arena: Arena<'w>,
    /// One bit for each granule, set if the granule is allocated.
    used: &'w [Cell<u64>],
    /// Address of the first granule.
    start: usize,
}

/// An operation of the heap failed. Actors hold this error across steps, so unlike
/// [`Error`](crate::Error) it is plain data, without a destructor.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HeapError {
    /// The heap has no room.
    #[error("no {bytes} bytes are left in the heap: raise Sizes::heap_bytes")]
    Full {
        /// Length of the memory that was asked for.
        bytes: usize,
    },
    /// The memory to free was not allocated, or was freed already.
    #[error("{address:#x} is not allocated")]
    NotAllocated {
        /// Its address.
        address: u64,
    },
}

impl<'w> Heap<'w> {
    /// Bytes of the arena that a heap of `bytes` bytes takes.
    pub(crate) fn footprint(bytes: usize) -> usize {
        let words = bytes.div_ceil(GRANULE * 64);
        (words * 8).next_multiple_of(GRANULE) + words * 64 * GRANULE
    }

    /// Makes a heap at `offset` in the arena, which is the beginning of a page. The footprint of
    /// the heap must hold zeros.
    pub(crate) fn new(arena: Arena<'w>, offset: usize, bytes: usize) -> Heap<'w> {
        let words = bytes.div_ceil(GRANULE * 64);
        Heap { arena, used: arena.words(offset, words), start: (offset + words * 8).next_multiple_of(GRANULE) }
    }

    /// Allocates memory for a `T`, and fills it with zeros.
    ///
    /// # Errors
    /// [`HeapError::Full`]
    pub fn allocate<T: Plain>(&self) -> Result<u64, HeapError> {
        let granules = Self::granules::<T>();
        let first = self.find(granules).ok_or(HeapError::Full { bytes: size_of::<T>() })?;
        (first..first + granules).for_each(|granule| self.set(granule, true));
        Ok((self.start + first * GRANULE) as u64)
    }

    /// The value at an address. None if there cannot be a `T`, as at 0.
    pub fn get<T: Plain>(&self, address: u64) -> Option<&'w T> {
        self.index(address)?;
        self.arena.get(address as usize)
    }

    /// Frees a `T`: its memory becomes zeros.
    ///
    /// # Errors
    /// [`HeapError::NotAllocated`]
    pub fn free<T: Plain>(&self, address: u64) -> Result<(), HeapError> {
        let granules = Self::granules::<T>();
        let first = self.index(address).ok_or(HeapError::NotAllocated { address })?;
        let end = first + granules;
        if end > self.used.len() * 64 || !(first..end).all(|granule| self.is_used(granule)) {
            return Err(HeapError::NotAllocated { address });
        }
        (first..end).for_each(|granule| self.set(granule, false));
        clear(self.arena.words(address as usize, granules * GRANULE / 8));
        Ok(())
    }

    /// Number of allocated bytes.
    pub fn used_bytes(&self) -> usize {
        self.used.iter().map(|word| word.get().count_ones() as usize * GRANULE).sum()
    }

    fn granules<T>() -> usize {
        const { assert!(align_of::<T>() <= GRANULE, "the heap aligns to 16 bytes") };
        size_of::<T>().div_ceil(GRANULE).max(1)
    }

    /// The granule at an address.
    fn index(&self, address: u64) -> Option<usize> {
        let offset = (address as usize).checked_sub(self.start)?;
        (offset.is_multiple_of(GRANULE) && offset / GRANULE < self.used.len() * 64).then_some(offset / GRANULE)
    }

    /// The index of the lowest run of `granules` free granules.
    fn find(&self, granules: usize) -> Option<usize> {
        let (mut granule, mut run) = (0, 0);
        while granule < self.used.len() * 64 {
            if self.used[granule / 64].get() == u64::MAX {
                granule = (granule / 64 + 1) * 64;
                run = 0;
                continue;
            }
            run = if self.is_used(granule) { 0 } else { run + 1 };
            granule += 1;
            if run == granules {
                return Some(granule - granules);
            }
        }
        None
    }

    fn is_used(&self, granule: usize) -> bool {
        self.used[granule / 64].get() >> (granule % 64) & 1 == 1
    }

    fn set(&self, granule: usize, is_used: bool) {
        let word = &self.used[granule / 64];
        let bit = 1 << (granule % 64);
        word.set(if is_used { word.get() | bit } else { word.get() & !bit });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::sys::plain_memory::PlainMemory;

    type Small = Cell<u64>;
    type Large = [Cell<u64>; 9];

    fn address_of(allocated: &BTreeMap<u64, bool>, nth: usize) -> Option<(u64, bool)> {
        allocated.iter().nth(nth % allocated.len().max(1)).map(|(&address, &is_large)| (address, is_large))
    }

    proptest! {
        #[test]
        fn what_is_allocated_is_ours_alone_and_what_is_freed_is_zero(
            changes in prop::collection::vec((0u8..4, any::<usize>()), 0..200),
        ) {
            let memory = PlainMemory::new(Heap::footprint(2048)).unwrap();
            // SAFETY: the memory outlives the arena, and no other code uses it.
            let arena = unsafe { Arena::new(memory.memory()) };
            let heap = Heap::new(arena, 0, 2048);
            let mut allocated = BTreeMap::new();
            for (change, nth) in changes {
                match (change, address_of(&allocated, nth)) {
                    (0, Some((address, true))) => {
                        heap.free::<Large>(address).unwrap();
                        prop_assert!(heap.get::<Large>(address).unwrap().iter().all(|word| word.get() == 0));
                        allocated.remove(&address);
                    }
                    (0, Some((address, false))) => {
                        heap.free::<Small>(address).unwrap();
                        prop_assert_eq!(heap.get::<Small>(address).unwrap().get(), 0);
                        prop_assert_eq!(heap.free::<Small>(address), Err(HeapError::NotAllocated { address }));
                        allocated.remove(&address);
                    }
                    (1, _) => {
                        if let Ok(address) = heap.allocate::<Large>() {
                            let words = heap.get::<Large>(address).unwrap();
                            prop_assert!(words.iter().all(|word| word.replace(address) == 0));
                            prop_assert_eq!(allocated.insert(address, true), None);
                        }
                    }
                    _ => {
                        if let Ok(address) = heap.allocate::<Small>() {
                            prop_assert_eq!(heap.get::<Small>(address).unwrap().replace(address), 0);
                            prop_assert_eq!(allocated.insert(address, false), None);
                        }
                    }
                }
                for (&address, &is_large) in &allocated {
                    prop_assert_eq!(heap.get::<Small>(address).unwrap().get(), address);
                    if is_large {
                        prop_assert!(heap.get::<Large>(address).unwrap().iter().all(|word| word.get() == address));
                    }
                }
                let bytes: usize = allocated.values().map(|&is_large| if is_large { 80 } else { 16 }).sum();
                prop_assert_eq!(heap.used_bytes(), bytes);
            }
            for (address, is_large) in allocated {
                if is_large { heap.free::<Large>(address).unwrap() } else { heap.free::<Small>(address).unwrap() }
            }
            prop_assert!(memory.copy().iter().all(|&byte| byte == 0), "an empty heap is zeros, whatever came before");
        }
    }

    #[test]
    fn what_is_not_allocated_is_refused() {
        let memory = PlainMemory::new(Heap::footprint(1024)).unwrap();
        // SAFETY: the memory outlives the arena, and no other code uses it.
        let heap = Heap::new(unsafe { Arena::new(memory.memory()) }, 0, 1024);
        let address = heap.allocate::<Small>().unwrap();
        assert!(heap.get::<Small>(0).is_none());
        assert!(heap.get::<Small>(address + 1).is_none());
        assert!(heap.get::<Small>(u64::MAX).is_none());
        assert_eq!(heap.free::<Small>(0), Err(HeapError::NotAllocated { address: 0 }));
        assert_eq!(heap.free::<Large>(address), Err(HeapError::NotAllocated { address }));
        assert_eq!(heap.allocate::<[Cell<u64>; 128]>(), Err(HeapError::Full { bytes: 1024 }));
    }
}
