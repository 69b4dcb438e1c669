//! Values that can be read from a snapshot.

/// A number in native byte order. Any bytes of its size are a valid number.
pub trait Value: Copy + sealed::Sealed {
    /// Reads the number by `read`, which fills a buffer of the size of the number.
    #[doc(hidden)]
    fn read_by<E>(read: impl FnOnce(&mut [u8]) -> Result<(), E>) -> Result<Self, E>;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! values {
    ($($number:ty),*) => {$(
        impl sealed::Sealed for $number {}
        impl Value for $number {
            fn read_by<E>(read: impl FnOnce(&mut [u8]) -> Result<(), E>) -> Result<Self, E> {
                let mut bytes = [0; size_of::<$number>()];
                read(&mut bytes)?;
                Ok(<$number>::from_ne_bytes(bytes))
            }
        }
    )*};
}

values!(u8, u16, u32, u64, u128, usize, i8, i16, i32, i64, i128, isize, f32, f64);
