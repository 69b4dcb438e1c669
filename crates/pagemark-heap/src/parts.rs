//! The parts of a page.

use pagemark::{ByteCount, PAGE_SIZE};

/// Number of parts of each page, which is the number of views.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Parts {
    /// Whole pages of 4096 bytes: one view.
    One,
    /// 2048 bytes.
    Two,
    /// 1024 bytes.
    Four,
    /// 512 bytes.
    Eight,
}

impl Parts {
    /// All numbers of parts.
    pub const ALL: [Parts; 4] = [Parts::One, Parts::Two, Parts::Four, Parts::Eight];

    /// The number of parts, if a page can have it.
    pub fn from_count(count: usize) -> Option<Parts> {
        Parts::ALL.into_iter().find(|parts| parts.count() == count)
    }

    /// Number of parts, and of views.
    pub const fn count(self) -> usize {
        1 << self as usize
    }

    /// Length of each part.
    pub fn part_bytes(self) -> ByteCount {
        ByteCount::from(1usize << self.shift())
    }

    /// Binary logarithm of the length.
    pub(crate) const fn shift(self) -> u32 {
        PAGE_SIZE.ilog2() - self as u32
    }
}
