//! Values that can be read from a snapshot, and read and written in a region.

/// A number in native byte order. Any bytes of its size are a valid number.
pub trait Value: Copy + sealed::Sealed {
    /// Reads the number by `read`, which fills a buffer of the size of the number.
    #[doc(hidden)]
    fn read_by<E>(read: impl FnOnce(&mut [u8]) -> Result<(), E>) -> Result<Self, E>;

    /// Writes the number by `write`, which takes its bytes.
    #[doc(hidden)]
    fn write_by(self, write: impl FnOnce(&[u8]));
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! values {
    ($($number:ty),*) => {$(
        impl sealed::Sealed for $number {}
        impl Value for $number {
            #[inline]
            fn read_by<E>(read: impl FnOnce(&mut [u8]) -> Result<(), E>) -> Result<Self, E> {
                let mut bytes = [0; size_of::<$number>()];
                read(&mut bytes)?;
                Ok(<$number>::from_ne_bytes(bytes))
            }

            #[inline]
            fn write_by(self, write: impl FnOnce(&[u8])) {
                write(&self.to_ne_bytes());
            }
        }
    )*};
}

values!(u8, u16, u32, u64, u128, usize, i8, i16, i32, i64, i128, isize, f32, f64);
