//! Values that can be read out of a snapshot.

/// A number in native byte order: any bytes of its size are one.
pub trait Value: Copy + sealed::Sealed {
    /// Reads it through `read`, which fills a buffer of its size.
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
