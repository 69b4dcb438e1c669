//! Numbers and structs in a region.

use std::fmt;
use std::marker::PhantomData;

use bytemuck::Pod;
use pagemark_linux::shared_bytes::SharedBytes;

use super::Region;
use crate::Error;

/// A part of a region as an array of values, which any thread may read and write: numbers, or
/// structs of numbers without padding ([`Pod`], which `bytemuck` derives).
///
/// An access is checked against the end of the view and costs as much as one of a slice otherwise.
/// A value of 1, 2, 4 or 8 bytes whose address is a multiple of its size is read and written as a
/// whole: a read returns what one write has written. A larger one may be read in part as one write
/// and in part as another has written it, if threads write it meanwhile.
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
///
/// Structs, of a crate that depends on `bytemuck` with its feature `derive`:
///
/// ```
/// use pagemark::Region;
///
/// #[derive(Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
/// #[repr(C)]
/// struct Account {
///     id: u64,
///     cents: i64,
/// }
///
/// let region = Region::new(1 << 20)?;
/// let accounts = region.view::<Account>(0, 100)?;
/// region.begin()?;
/// accounts.set(3, Account { id: 3, cents: 500 });
/// region.rollback()?;
/// assert_eq!(accounts.get(3).cents, 0);
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
    /// Views `len` values, from a byte offset on that is a multiple of their alignment.
    ///
    /// # Errors
    /// `ErrorKind::OutOfRange`, `ErrorKind::Unaligned`, `ErrorKind::NotMapped`.
    pub fn view<T: Pod>(&self, offset: usize, len: usize) -> Result<View<'_, T>, Error> {
        const { assert!(size_of::<T>() > 0, "a view of values without bytes") };
        self.check_within(offset..offset.saturating_add(len.saturating_mul(size_of::<T>())))?;
        if !offset.is_multiple_of(align_of::<T>()) {
            return Err(Error::unaligned_view(offset, align_of::<T>()));
        }
        self.check_mapped()?;
        Ok(View { bytes: self.shared_bytes(), offset, len, values: PhantomData })
    }

    /// Views all of the region as values; what is left behind the last whole one is not viewed.
    ///
    /// # Errors
    /// `ErrorKind::NotMapped`
    pub fn view_all<T: Pod>(&self) -> Result<View<'_, T>, Error> {
        self.view(0, self.bytes() / size_of::<T>().max(1))
    }
}

impl<T: Pod> View<'_, T> {
    /// The number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The value at an index.
    ///
    /// # Panics
    /// If the index is not below the length, as that of a slice.
    #[inline]
    pub fn get(&self, index: usize) -> T {
        let mut value = T::zeroed();
        self.bytes.read(self.offset_of(index), bytemuck::bytes_of_mut(&mut value));
        value
    }

    /// Writes the value at an index.
    ///
    /// # Panics
    /// If the index is not below the length, as that of a slice.
    #[inline]
    pub fn set(&self, index: usize, value: T) {
        self.bytes.write(self.offset_of(index), bytemuck::bytes_of(&value));
    }

    /// The values, in order. Those that are written meanwhile are old or new.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = T> {
        (0..self.len).map(|index| self.get(index))
    }

    #[inline]
    fn offset_of(&self, index: usize) -> usize {
        assert!(index < self.len, "the index is {index} and the view has {} values", self.len);
        self.offset + index * size_of::<T>()
    }
}

impl<T> fmt::Debug for View<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("View").field("offset", &self.offset).field("len", &self.len).finish_non_exhaustive()
    }
}
