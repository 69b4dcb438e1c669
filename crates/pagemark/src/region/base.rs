//! What a region held when its transaction began.

use std::io;

use crate::sys::area::Area;
use crate::sys::own_memory::Mapping;
use crate::{Range, RangeSet};

/// A copy of the region, to roll back to. It takes memory only where the region was ever written.
#[derive(Debug)]
pub(super) struct Base {
    copy: Mapping,
    /// Offsets where the region may hold something else than the copy, from before the transaction.
    stale: RangeSet,
}

impl Base {
    /// One of zeros.
    pub fn new(bytes: usize) -> io::Result<Base> {
        Ok(Base { copy: Mapping::new(bytes)?, stale: RangeSet::new() })
    }

    /// Says that the region was written.
    pub fn add_stale(&mut self, offsets: &RangeSet) {
        self.stale.extend(offsets);
    }

    /// Copies what was written since the last time.
    pub fn refresh(&mut self, region: &Area<'_>) {
        let stale = std::mem::take(&mut self.stale);
        for range in stale.iter() {
            region.read(range.start as usize, self.bytes_mut(&range));
        }
    }

    /// Writes the copy back to `region`, in ranges of offsets that were written since.
    pub fn put_back(&mut self, region: &Area<'_>, offsets: &RangeSet) {
        for range in offsets.iter() {
            region.write(range.start as usize, self.bytes_mut(&range));
        }
    }

    fn bytes_mut(&mut self, range: &Range) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.copy.bytes() as u64, "{range:?} is not in the region");
        // SAFETY: the range lies within our own readable and writable mapping, of which `&mut self` is the only user.
        unsafe {
            let start = self.copy.start().as_ptr().add(range.start as usize);
            std::slice::from_raw_parts_mut(start, (range.end - range.start) as usize)
        }
    }
}
