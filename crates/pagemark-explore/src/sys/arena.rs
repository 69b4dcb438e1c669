//! The memory that a state consists of, as cells.

use std::cell::Cell;
use std::marker::PhantomData;
use std::ptr::NonNull;

/// What may lie in memory whose content is put back behind the program's back.
///
/// Implemented for cells of numbers, and arrays of them; implement it for a `#[repr(C)]` struct of
/// such.
///
/// # Safety
/// The type consists of [`Cell`]s without padding. Any bytes, including zeros, are a valid value.
/// The type owns no resource.
pub unsafe trait Plain: 'static {}

macro_rules! plain_numbers {
    ($($number:ty),*) => { $(
        // SAFETY: a number in a cell; any bytes are one.
        unsafe impl Plain for Cell<$number> {}
    )* };
}
plain_numbers!(u8, u16, u32, u64, u128, usize, i8, i16, i32, i64, i128, isize, f32, f64);

// SAFETY: as for its elements, between which there is nothing.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

/// Memory that is ours for `'w`: zeros at first. Offsets are in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arena<'w> {
    base: NonNull<u8>,
    bytes: usize,
    /// Invariant: what lies in one arena is never taken for what lies in another.
    memory: PhantomData<Cell<&'w ()>>,
}

impl<'w> Arena<'w> {
    /// # Safety
    /// For `'w`, the memory is mapped, readable and writable, begins at a page and consists of
    /// whole pages. Only this thread accesses it while a method of this arena or a fiber on it
    /// runs.
    pub unsafe fn new(memory: NonNull<[u8]>) -> Arena<'w> {
        Arena { base: memory.cast(), bytes: memory.len(), memory: PhantomData }
    }

    /// Where it begins.
    pub fn base(self) -> usize {
        self.base.as_ptr() as usize
    }

    /// The value at an offset; any bytes are a valid value. None if the value would exceed the
    /// arena or is not aligned.
    pub fn get<T: Plain>(self, offset: usize) -> Option<&'w T> {
        self.slice(offset, 1)?.first()
    }

    /// So many values side by side.
    pub fn slice<T: Plain>(self, offset: usize, count: usize) -> Option<&'w [T]> {
        let end = size_of::<T>().checked_mul(count)?.checked_add(offset)?;
        if end > self.bytes || !(self.base() + offset).is_multiple_of(align_of::<T>()) {
            return None;
        }
        // SAFETY: it lies within the memory, which is mapped for `'w`, and is aligned; any bytes
        // are values of `T`, and they are in cells, which several references may change.
        Some(unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(offset).cast(), count) })
    }

    /// Puts a value at an offset. None if it does not fit there.
    pub fn put<T: Plain>(self, offset: usize, value: T) -> Option<&'w T> {
        let place = self.get::<T>(offset)?;
        // SAFETY: all of it is in cells, so that it may be changed while others refer to it.
        unsafe { std::ptr::from_ref(place).cast_mut().write(value) };
        Some(place)
    }

    /// Words side by side, from an offset that is a multiple of 8.
    ///
    /// # Panics
    /// If they are not within the arena.
    pub fn words(self, offset: usize, count: usize) -> &'w [Cell<u64>] {
        self.slice(offset, count).unwrap_or_else(|| panic!("{count} words at {offset} of {} bytes", self.bytes))
    }
}

/// Makes words zero. Pages that are zero are not written.
pub(crate) fn clear(words: &[Cell<u64>]) {
    const PAGE_WORDS: usize = pagemark::PAGE_SIZE / 8;
    let (page_bytes, start) = (pagemark::PAGE_SIZE, words.as_ptr() as usize);
    let first = (start.next_multiple_of(page_bytes) - start) / 8;
    let (head, pages) = words.split_at(first.min(words.len()));
    for page in std::iter::once(head).chain(pages.chunks(PAGE_WORDS)) {
        if page.iter().fold(0, |any, word| any | word.get()) != 0 {
            page.iter().for_each(|word| word.set(0));
        }
    }
}
