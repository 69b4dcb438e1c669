//! Addresses, page numbers and byte counts: three types, so that none is taken for another.
//!
//! A bare `u64` is converted where it enters Pagemark ([`Address::new`], [`PageNumber::new`],
//! [`ByteCount::new`]) and where it leaves it (`get`): at system calls, at formats on disk, and at
//! the bindings for other languages.
//!
//! The operators overflow as those of `u64` do. For numbers that come from outside (a repository,
//! CRIU's images, a caller in another language) there are the `checked_` and `saturating_` methods.

use std::fmt;
use std::iter::{FusedIterator, Sum};
use std::ops::{Add, AddAssign, Mul, Sub, SubAssign};

use serde::{Deserialize, Serialize};

/// Bytes of a page: the unit in which memory is stored and restored.
pub const PAGE_SIZE: usize = 4096;

const PAGE: u64 = PAGE_SIZE as u64;

/// A place in a space, in bytes from its beginning. For a process these are virtual addresses, for
/// a file or a `Region` offsets from its start.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[repr(transparent)]
#[serde(transparent)]
pub struct Address(u64);

/// The number of a page in a space: its address divided by [`PAGE_SIZE`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[repr(transparent)]
#[serde(transparent)]
pub struct PageNumber(u64);

/// An amount of bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[repr(transparent)]
#[serde(transparent)]
pub struct ByteCount(u64);

/// Addresses from `start` up to, not including, `end`. [`AddressRangeExt`] has what can be asked of
/// it.
pub type Range = std::ops::Range<Address>;

/// Pages from `start` up to, not including, `end`. [`PageRangeExt`] has what can be asked of it.
pub type PageRange = std::ops::Range<PageNumber>;

/// What the three types have in common.
macro_rules! number {
    ($type:ident) => {
        impl $type {
            /// The lowest value.
            pub const MIN: Self = Self(u64::MIN);
            /// The highest value.
            pub const MAX: Self = Self(u64::MAX);

            /// Gives a number its meaning.
            #[inline]
            pub const fn new(value: u64) -> Self {
                Self(value)
            }

            /// The bare number.
            #[inline]
            pub const fn get(self) -> u64 {
                self.0
            }

            /// The bare number as an index of memory. [`usize::MAX`], which no index reaches, where
            /// it does not fit.
            #[inline]
            pub const fn to_usize(self) -> usize {
                if self.0 > usize::MAX as u64 { usize::MAX } else { self.0 as usize }
            }
        }

        impl From<usize> for $type {
            #[inline]
            fn from(value: usize) -> Self {
                Self(value as u64)
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }

        impl fmt::LowerHex for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::LowerHex::fmt(&self.0, f)
            }
        }
    };
}

number!(Address);
number!(PageNumber);
number!(ByteCount);

impl Address {
    /// The address of what a pointer points to, in this process.
    #[inline]
    pub fn of<T: ?Sized>(pointer: *const T) -> Address {
        Address::from(pointer.cast::<()>().addr())
    }

    /// The address as a pointer, for system calls and for memory of this process.
    #[inline]
    pub const fn as_mut_ptr<T>(self) -> *mut T {
        self.to_usize() as *mut T
    }

    /// The page that holds this address.
    #[inline]
    pub const fn page(self) -> PageNumber {
        PageNumber(self.0 / PAGE)
    }

    /// How far behind the beginning of its page the address lies, in bytes.
    #[inline]
    pub const fn offset_in_page(self) -> usize {
        (self.0 % PAGE) as usize
    }

    /// True for the first address of a page.
    #[inline]
    pub const fn is_page_aligned(self) -> bool {
        self.0.is_multiple_of(PAGE)
    }

    /// The beginning of the page that holds this address.
    #[inline]
    pub const fn page_aligned_down(self) -> Address {
        Address(self.0 / PAGE * PAGE)
    }

    /// The first beginning of a page that is not below this address; [`Address::MAX`] if only 2⁶⁴
    /// would be.
    #[inline]
    pub const fn page_aligned_up(self) -> Address {
        match self.0.checked_next_multiple_of(PAGE) {
            Some(aligned) => Address(aligned),
            None => Address::MAX,
        }
    }

    /// The address `count` bytes further; `None` if there is none.
    #[inline]
    pub const fn checked_add(self, count: ByteCount) -> Option<Address> {
        match self.0.checked_add(count.0) {
            Some(sum) => Some(Address(sum)),
            None => None,
        }
    }

    /// The address `count` bytes further, at most [`Address::MAX`].
    #[inline]
    pub const fn saturating_add(self, count: ByteCount) -> Address {
        Address(self.0.saturating_add(count.0))
    }

    /// The address `count` bytes before this one; `None` if there is none.
    #[inline]
    pub const fn checked_sub(self, count: ByteCount) -> Option<Address> {
        match self.0.checked_sub(count.0) {
            Some(difference) => Some(Address(difference)),
            None => None,
        }
    }

    /// The distance from `start` to this address; `None` if it lies before `start`.
    #[inline]
    pub const fn checked_distance(self, start: Address) -> Option<ByteCount> {
        match self.0.checked_sub(start.0) {
            Some(distance) => Some(ByteCount(distance)),
            None => None,
        }
    }
}

impl PageNumber {
    /// The address at which the page begins; [`Address::MAX`] for page numbers that no address has.
    #[inline]
    pub const fn address(self) -> Address {
        Address(self.0.saturating_mul(PAGE))
    }

    /// The address at which the page begins; `None` for page numbers that no address has.
    #[inline]
    pub const fn checked_address(self) -> Option<Address> {
        match self.0.checked_mul(PAGE) {
            Some(address) => Some(Address(address)),
            None => None,
        }
    }

    /// The addresses of the page.
    #[inline]
    pub const fn addresses(self) -> Range {
        self.address()..Address(self.0.saturating_add(1).saturating_mul(PAGE))
    }

    /// The page `count` pages further; `None` if there is none.
    #[inline]
    pub const fn checked_add(self, count: u64) -> Option<PageNumber> {
        match self.0.checked_add(count) {
            Some(sum) => Some(PageNumber(sum)),
            None => None,
        }
    }

    /// The page `count` pages further, at most [`PageNumber::MAX`].
    #[inline]
    pub const fn saturating_add(self, count: u64) -> PageNumber {
        PageNumber(self.0.saturating_add(count))
    }
}

impl ByteCount {
    /// No byte.
    pub const ZERO: ByteCount = ByteCount(0);
    /// The bytes of one page.
    pub const PAGE: ByteCount = ByteCount(PAGE);

    /// The bytes of `count` pages, at most [`ByteCount::MAX`].
    #[inline]
    pub const fn of_pages(count: u64) -> ByteCount {
        ByteCount(count.saturating_mul(PAGE))
    }

    /// Number of whole pages in this length.
    #[inline]
    pub const fn pages_rounded_down(self) -> u64 {
        self.0 / PAGE
    }

    /// Number of pages that content of this length needs.
    #[inline]
    pub const fn pages_rounded_up(self) -> u64 {
        self.0.div_ceil(PAGE)
    }

    /// True if the length is a multiple of the page size.
    #[inline]
    pub const fn is_whole_pages(self) -> bool {
        self.0.is_multiple_of(PAGE)
    }

    /// The sum; `None` if it overflows.
    #[inline]
    pub const fn checked_add(self, other: ByteCount) -> Option<ByteCount> {
        match self.0.checked_add(other.0) {
            Some(sum) => Some(ByteCount(sum)),
            None => None,
        }
    }

    /// The sum, at most [`ByteCount::MAX`].
    #[inline]
    pub const fn saturating_add(self, other: ByteCount) -> ByteCount {
        ByteCount(self.0.saturating_add(other.0))
    }

    /// The difference, at least zero.
    #[inline]
    pub const fn saturating_sub(self, other: ByteCount) -> ByteCount {
        ByteCount(self.0.saturating_sub(other.0))
    }
}

impl Add<ByteCount> for Address {
    type Output = Address;

    #[inline]
    fn add(self, count: ByteCount) -> Address {
        Address(self.0 + count.0)
    }
}

impl AddAssign<ByteCount> for Address {
    #[inline]
    fn add_assign(&mut self, count: ByteCount) {
        self.0 += count.0;
    }
}

impl Sub<ByteCount> for Address {
    type Output = Address;

    #[inline]
    fn sub(self, count: ByteCount) -> Address {
        Address(self.0 - count.0)
    }
}

impl Sub for Address {
    type Output = ByteCount;

    #[inline]
    fn sub(self, start: Address) -> ByteCount {
        ByteCount(self.0 - start.0)
    }
}

/// A number of pages further.
impl Add<u64> for PageNumber {
    type Output = PageNumber;

    #[inline]
    fn add(self, pages: u64) -> PageNumber {
        PageNumber(self.0 + pages)
    }
}

/// How many pages lie between.
impl Sub for PageNumber {
    type Output = u64;

    #[inline]
    fn sub(self, start: PageNumber) -> u64 {
        self.0 - start.0
    }
}

impl Add for ByteCount {
    type Output = ByteCount;

    #[inline]
    fn add(self, other: ByteCount) -> ByteCount {
        ByteCount(self.0 + other.0)
    }
}

impl AddAssign for ByteCount {
    #[inline]
    fn add_assign(&mut self, other: ByteCount) {
        self.0 += other.0;
    }
}

impl Sub for ByteCount {
    type Output = ByteCount;

    #[inline]
    fn sub(self, other: ByteCount) -> ByteCount {
        ByteCount(self.0 - other.0)
    }
}

impl SubAssign for ByteCount {
    #[inline]
    fn sub_assign(&mut self, other: ByteCount) {
        self.0 -= other.0;
    }
}

impl Mul<u64> for ByteCount {
    type Output = ByteCount;

    #[inline]
    fn mul(self, factor: u64) -> ByteCount {
        ByteCount(self.0 * factor)
    }
}

impl Sum for ByteCount {
    #[inline]
    fn sum<I: Iterator<Item = ByteCount>>(counts: I) -> ByteCount {
        ByteCount(counts.map(|count| count.0).sum())
    }
}

/// Offsets in memory of this process, as addresses of the space that begins with that memory: a
/// region, or an area of which snapshots are taken. [`AddressRangeExt::to_offsets`] is the way
/// back.
///
/// ```
/// use pagemark::{AddressRangeExt, address::offsets};
/// assert_eq!(offsets(16..32).to_offsets(), 16..32);
/// ```
#[inline]
pub fn offsets(range: std::ops::Range<usize>) -> Range {
    Address::from(range.start)..Address::from(range.end)
}

/// What can be asked of a [`Range`] of addresses.
pub trait AddressRangeExt {
    /// How long the range is; zero if it ends before it begins.
    fn byte_count(&self) -> ByteCount;
    /// The pages that the range touches.
    fn page_range(&self) -> PageRange;
    /// The pages that the range touches, in ascending order.
    fn pages(&self) -> PagesOfRange;
    /// The range extended at both ends to whole pages; the empty range stays empty.
    fn whole_pages(&self) -> Range;
    /// The part that lies in `other` as well; empty if there is none.
    fn overlap(&self, other: &Range) -> Range;
    /// The range as offsets in memory of this process.
    fn to_offsets(&self) -> std::ops::Range<usize>;
    /// The range `distance` bytes further, with overflow as the operators have it.
    fn moved_up(&self, distance: ByteCount) -> Range;
    /// The range `distance` bytes before, with overflow as the operators have it.
    fn moved_down(&self, distance: ByteCount) -> Range;
}

impl AddressRangeExt for Range {
    #[inline]
    fn byte_count(&self) -> ByteCount {
        ByteCount(self.end.0.saturating_sub(self.start.0))
    }

    #[inline]
    fn page_range(&self) -> PageRange {
        let first = self.start.0 / PAGE;
        if self.is_empty() {
            PageNumber(first)..PageNumber(first)
        } else {
            PageNumber(first)..PageNumber(self.end.0.div_ceil(PAGE))
        }
    }

    #[inline]
    fn pages(&self) -> PagesOfRange {
        self.page_range().pages()
    }

    #[inline]
    fn whole_pages(&self) -> Range {
        self.page_range().addresses()
    }

    #[inline]
    fn overlap(&self, other: &Range) -> Range {
        self.start.max(other.start)..self.end.min(other.end)
    }

    #[inline]
    fn to_offsets(&self) -> std::ops::Range<usize> {
        self.start.to_usize()..self.end.to_usize()
    }

    #[inline]
    fn moved_up(&self, distance: ByteCount) -> Range {
        self.start + distance..self.end + distance
    }

    #[inline]
    fn moved_down(&self, distance: ByteCount) -> Range {
        self.start - distance..self.end - distance
    }
}

/// What can be asked of a [`PageRange`].
pub trait PageRangeExt {
    /// How many pages there are; zero if the range ends before it begins.
    fn page_count(&self) -> u64;
    /// The pages in ascending order.
    fn pages(&self) -> PagesOfRange;
    /// The addresses of the pages.
    fn addresses(&self) -> Range;
}

impl PageRangeExt for PageRange {
    #[inline]
    fn page_count(&self) -> u64 {
        self.end.0.saturating_sub(self.start.0)
    }

    #[inline]
    fn pages(&self) -> PagesOfRange {
        PagesOfRange(self.start.0..self.end.0)
    }

    #[inline]
    fn addresses(&self) -> Range {
        self.start.address()..self.end.address()
    }
}

/// Iterator over the pages of a range, in ascending order.
#[derive(Clone, Debug)]
pub struct PagesOfRange(std::ops::Range<u64>);

impl Iterator for PagesOfRange {
    type Item = PageNumber;

    #[inline]
    fn next(&mut self) -> Option<PageNumber> {
        self.0.next().map(PageNumber)
    }

    #[inline]
    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }

    #[inline]
    fn nth(&mut self, n: usize) -> Option<PageNumber> {
        self.0.nth(n).map(PageNumber)
    }
}

impl DoubleEndedIterator for PagesOfRange {
    #[inline]
    fn next_back(&mut self) -> Option<PageNumber> {
        self.0.next_back().map(PageNumber)
    }
}

impl FusedIterator for PagesOfRange {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn converts_between_addresses_and_pages() {
        let address = Address::new(5 * PAGE + 7);
        assert_eq!(address.page(), PageNumber::new(5));
        assert_eq!(address.offset_in_page(), 7);
        assert_eq!(address.page_aligned_down(), PageNumber::new(5).address());
        assert_eq!(address.page_aligned_up(), PageNumber::new(6).address());
        assert_eq!(address.page_aligned_down().page_aligned_up(), address.page_aligned_down());
        assert_eq!(PageNumber::new(5).addresses(), Address::new(5 * PAGE)..Address::new(6 * PAGE));
        assert_eq!(ByteCount::new(PAGE + 1).pages_rounded_up(), 2);
        assert_eq!(ByteCount::new(PAGE + 1).pages_rounded_down(), 1);
        assert_eq!(address - Address::new(7), ByteCount::of_pages(5));
        assert_eq!(format!("{address} {address:#x} {address:?}"), "20487 0x5007 20487");
    }

    #[test]
    fn ranges_are_extended_to_the_pages_that_they_touch() {
        let range = Address::new(PAGE - 8)..Address::new(PAGE + 8);
        assert_eq!(range.byte_count(), ByteCount::new(16));
        assert_eq!(range.pages().collect::<Vec<_>>(), [PageNumber::new(0), PageNumber::new(1)]);
        assert_eq!(range.whole_pages(), Address::new(0)..Address::new(2 * PAGE));
        let empty = Address::new(5)..Address::new(5);
        assert!(empty.whole_pages().is_empty() && empty.pages().next().is_none());
    }

    #[test]
    fn nothing_overflows_at_the_highest_addresses() {
        let top = Address::new(u64::MAX - 1)..Address::MAX;
        assert_eq!(top.page_range().page_count(), 1);
        assert_eq!(top.whole_pages().end, Address::MAX);
        assert_eq!(Address::MAX.page_aligned_up(), Address::MAX);
        assert_eq!(PageNumber::MAX.address(), Address::MAX);
        assert_eq!(PageNumber::MAX.checked_address(), None);
        assert!(PageNumber::MAX.addresses().is_empty());
        assert_eq!(ByteCount::of_pages(u64::MAX), ByteCount::MAX);
        assert_eq!(Address::MAX.checked_add(ByteCount::PAGE), None);
    }

    #[test]
    fn numbers_are_plain_in_json() {
        assert_eq!(
            serde_json::to_string(&(Address::new(1), PageNumber::new(2), ByteCount::new(3))).unwrap(),
            "[1,2,3]"
        );
    }
}
