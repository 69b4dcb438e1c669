//! Numbers in a region.

use std::convert::Infallible;
use std::fmt;
use std::marker::PhantomData;

use super::Region;
use crate::Error;
use crate::snapshot::Value;
use crate::sys::shared_bytes::SharedBytes;

/// A part of a region as an array of numbers, which any thread may read and write.
///
/// An access is checked against the end of the view and costs as much as one of a slice otherwise.
/// A number of up to 8 bytes is read and written as a whole: a read returns what one write has
/// written.
///
/// ```
/// use pagemark::Region;
/// let region = Region::new(1 << 20)?;
/// let heights = region.view::<f64>(4096, 1000)?;
/// heights.set(7, 1.5);
/// region.begin()?;
/// heights.set(7, 2.5);
/// heights.set(999, 1.0);
/// region.rollback()?;
/// assert_eq!((heights.get(7), heights.get(999)), (1.5, 0.0));
/// assert_eq!(heights.iter().sum::<f64>(), 1.5);
/// # Ok::<(), pagemark::Error>(())
/// ```
#[derive(Clone, Copy)]
pub struct View<'region, T> {
    bytes: SharedBytes<'region>,
    offset: usize,
    len: usize,
    values: PhantomData<fn(T) -> T>,
}

impl Region {
    /// Views `len` numbers, from a byte offset on that is a multiple of their size.
    ///
    /// # Errors
    /// `ErrorKind::OutOfRange`, `ErrorKind::Unaligned`, `ErrorKind::NotMapped`.
    pub fn view<T: Value>(&self, offset: usize, len: usize) -> Result<View<'_, T>, Error> {
        self.check_within(offset..offset.saturating_add(len.saturating_mul(size_of::<T>())))?;
        if !offset.is_multiple_of(size_of::<T>()) {
            return Err(Error::unaligned_view(offset, size_of::<T>()));
        }
        self.check_mapped()?;
        Ok(View { bytes: self.shared_bytes(), offset, len, values: PhantomData })
    }

    /// Views all of the region as numbers.
    ///
    /// # Errors
    /// `ErrorKind::NotMapped`
    pub fn view_all<T: Value>(&self) -> Result<View<'_, T>, Error> {
        self.view(0, self.bytes() / size_of::<T>())
    }
}

impl<T: Value> View<'_, T> {
    /// The number of numbers.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The number at an index.
    ///
    /// # Panics
    /// If the index is not below the length, as that of a slice.
    #[inline]
    pub fn get(&self, index: usize) -> T {
        let offset = self.offset_of(index);
        let read = T::read_by(|number| {
            self.bytes.read(offset, number);
            Ok::<(), Infallible>(())
        });
        match read {
            Ok(number) => number,
        }
    }

    /// Writes the number at an index.
    ///
    /// # Panics
    /// If the index is not below the length, as that of a slice.
    #[inline]
    pub fn set(&self, index: usize, value: T) {
        let offset = self.offset_of(index);
        value.write_by(|number| self.bytes.write(offset, number));
    }

    /// The numbers, in order. Those that are written meanwhile are old or new.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = T> {
        (0..self.len).map(|index| self.get(index))
    }

    #[inline]
    fn offset_of(&self, index: usize) -> usize {
        assert!(index < self.len, "the index is {index} and the view has {} numbers", self.len);
        self.offset + index * size_of::<T>()
    }
}

impl<T> fmt::Debug for View<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("View").field("offset", &self.offset).field("len", &self.len).finish_non_exhaustive()
    }
}
