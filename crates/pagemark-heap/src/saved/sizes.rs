//! Sizes of small objects, and the runs of pages that hold objects of one size.

use pagemark::PAGE_SIZE;

/// The sizes: steps of 16 bytes at first, then four for each doubling.
pub(super) const SIZES: [usize; 28] = [
    16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792,
    2048, 2560, 3072, 3584, 4096,
];

/// Number of pages of a run for larger objects than [`ONE_PAGE_BYTES`].
pub(super) const LONG_RUN_PAGES: u32 = 4;
/// Up to this size, a run is one page.
const ONE_PAGE_BYTES: usize = 512;

/// A size, by its position in [`SIZES`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Class(u8);

impl Class {
    pub const COUNT: usize = SIZES.len();

    /// The class for an object; `None` if it is not small. `align` is a power of two.
    #[inline]
    pub fn of(bytes: usize, align: usize) -> Option<Class> {
        let largest = SIZES[Class::COUNT - 1];
        if bytes > largest || align > PAGE_SIZE {
            return None;
        }
        if align <= 16 {
            let class =
                if bytes <= 128 { bytes.saturating_sub(1) / 16 } else { SIZES.partition_point(|&size| size < bytes) };
            return Some(Class(class as u8));
        }
        // Runs begin at a page, so that an object is aligned as its size is. The largest size is a
        // multiple of each alignment.
        let class = SIZES.iter().position(|&size| size >= bytes && size.is_multiple_of(align));
        class.map(|class| Class(class as u8))
    }

    /// The class with a number below [`Class::COUNT`].
    pub fn with_number(number: usize) -> Option<Class> {
        (number < Class::COUNT).then_some(Class(number as u8))
    }

    pub fn number(self) -> usize {
        self.0.into()
    }

    /// Bytes of each object.
    #[inline]
    pub fn bytes(self) -> usize {
        SIZES[self.number()]
    }

    /// Pages of each run, which begins at a multiple of that number.
    #[inline]
    pub fn run_pages(self) -> u32 {
        if self.bytes() <= ONE_PAGE_BYTES { 1 } else { LONG_RUN_PAGES }
    }

    /// Objects of each run.
    #[inline]
    pub fn run_objects(self) -> usize {
        self.run_pages() as usize * PAGE_SIZE / self.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::saved::memory::BITMAP_BITS;

    #[test]
    fn a_class_is_the_smallest_that_fits_and_is_aligned() {
        for align in (0..=12).map(|shift| 1 << shift) {
            for bytes in 0..=4096 {
                let class = Class::of(bytes, align).unwrap();
                let fits = |size: usize| size >= bytes && (align <= 16 || size.is_multiple_of(align));
                assert!(
                    fits(class.bytes()) && !SIZES[..class.number()].iter().any(|&size| fits(size)),
                    "{bytes} {align}"
                );
            }
        }
        assert_eq!((Class::of(4097, 1), Class::of(1, 8192)), (None, None));
    }

    #[test]
    fn a_run_has_a_bit_for_each_object_and_wastes_little() {
        for class in (0..Class::COUNT).filter_map(Class::with_number) {
            let (objects, run_bytes) = (class.run_objects(), class.run_pages() as usize * PAGE_SIZE);
            assert!((1..=BITMAP_BITS).contains(&objects), "{class:?}");
            assert!(run_bytes - objects * class.bytes() <= run_bytes / 8, "{class:?}");
        }
    }
}
