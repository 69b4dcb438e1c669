//! Sets of disjoint address ranges.

use crate::{Address, AddressRangeExt, ByteCount, PageNumber, PageRangeExt, Range};

/// A set of addresses (or of other numbers, such as those of pages), held as disjoint ranges in
/// ascending order; adjacent ranges are merged.
///
/// The written memory is a `RangeSet`. Its granularity (page, sub-page, word) is a property of the
/// mechanism that found it, never an assumption of the code that reads it.
///
/// Adding ranges in ascending order, as trackers do, appends them; adding a range in the middle
/// moves the ranges behind it. Adding or subtracting a whole set takes one pass.
///
/// ```
/// use pagemark::{Address, RangeSet};
/// let range = |start, end| Address::new(start)..Address::new(end);
/// let mut dirty = RangeSet::new();
/// dirty.insert(range(0x1000, 0x2000));
/// dirty.insert(range(0x2000, 0x2010));
/// assert_eq!(dirty.iter().collect::<Vec<_>>(), [range(0x1000, 0x2010)]);
/// assert_eq!(dirty.whole_pages().iter().collect::<Vec<_>>(), [range(0x1000, 0x3000)]);
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RangeSet<T = Address> {
    ranges: Vec<std::ops::Range<T>>,
}

impl<T> Default for RangeSet<T> {
    fn default() -> Self {
        RangeSet { ranges: Vec::new() }
    }
}

impl<T: Copy + Ord> RangeSet<T> {
    /// The empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// The empty set, with room for a number of ranges.
    pub fn with_capacity(ranges: usize) -> Self {
        RangeSet { ranges: Vec::with_capacity(ranges) }
    }

    /// True if no address is in the set.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Number of disjoint ranges.
    pub fn range_count(&self) -> usize {
        self.ranges.len()
    }

    /// The ranges in ascending order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = std::ops::Range<T>> + '_ {
        self.ranges.iter().cloned()
    }

    /// Removes everything.
    pub fn clear(&mut self) {
        self.ranges.clear();
    }

    /// Adds a range; an empty range adds nothing.
    #[inline]
    pub fn insert(&mut self, range: std::ops::Range<T>) {
        if range.is_empty() {
            return;
        }
        match self.ranges.last_mut() {
            Some(last) if range.start > last.end => self.ranges.push(range),
            Some(last) if range.start >= last.start => last.end = last.end.max(range.end),
            None => self.ranges.push(range),
            Some(_) => self.insert_within(range),
        }
    }

    fn insert_within(&mut self, range: std::ops::Range<T>) {
        let first = self.ranges.partition_point(|other| other.end < range.start);
        let behind = self.ranges.partition_point(|other| other.start <= range.end);
        let mut merged = range;
        if let [from, .., to] | [from @ to] = &self.ranges[first..behind] {
            merged = merged.start.min(from.start)..merged.end.max(to.end);
        }
        self.ranges.splice(first..behind, [merged]);
    }

    /// Removes a range.
    pub fn remove(&mut self, range: std::ops::Range<T>) {
        if range.is_empty() {
            return;
        }
        let first = self.ranges.partition_point(|other| other.end <= range.start);
        let behind = self.ranges.partition_point(|other| other.start < range.end);
        if let [from, .., to] | [from @ to] = &self.ranges[first..behind] {
            let left = from.start..range.start;
            let right = range.end..to.end;
            self.ranges.splice(first..behind, [left, right].into_iter().filter(|rest| !rest.is_empty()));
        }
    }

    /// Adds all of `other`.
    pub fn extend(&mut self, other: &RangeSet<T>) {
        if self.is_empty() {
            self.ranges.clone_from(&other.ranges);
            return;
        }
        if self.ranges.last().is_none_or(|last| other.ranges.first().is_none_or(|next| next.start >= last.start)) {
            other.iter().for_each(|range| self.insert(range));
            return;
        }
        let mut merged = RangeSet { ranges: Vec::with_capacity(self.ranges.len() + other.ranges.len()) };
        let (mut mine, mut theirs) = (self.ranges.drain(..).peekable(), other.iter().peekable());
        while let Some(next) = match (mine.peek(), theirs.peek()) {
            (Some(a), Some(b)) if a.start <= b.start => mine.next(),
            (Some(_), None) => mine.next(),
            _ => theirs.next(),
        } {
            merged.insert(next);
        }
        drop(mine);
        *self = merged;
    }

    /// Moves all ranges of `other` into this set: as [`RangeSet::extend`], but in constant time if
    /// this set is empty.
    pub fn append(&mut self, other: &mut RangeSet<T>) {
        if self.is_empty() {
            std::mem::swap(self, other);
        } else {
            self.extend(other);
        }
        other.clear();
    }

    /// Removes all ranges of `other`.
    pub fn subtract(&mut self, other: &RangeSet<T>) {
        let mut rest = RangeSet::new();
        let mut first = 0;
        for range in self.ranges.drain(..) {
            first = other.first_behind(range.start, first);
            let mut start = range.start;
            for hole in other.parts(range.clone(), first) {
                rest.insert(start..hole.start);
                start = hole.end;
            }
            rest.insert(start..range.end);
        }
        *self = rest;
    }

    /// The parts of `range` that are in the set, in ascending order.
    pub fn within(&self, range: std::ops::Range<T>) -> impl Iterator<Item = std::ops::Range<T>> + '_ {
        let first = self.ranges.partition_point(|other| other.end <= range.start);
        self.parts(range, first)
    }

    /// The parts of `range` that are in the set, where `first` is the first range of the set that
    /// ends behind the start of `range`.
    fn parts(&self, range: std::ops::Range<T>, first: usize) -> impl Iterator<Item = std::ops::Range<T>> + '_ {
        self.ranges[first..]
            .iter()
            .map(move |other| other.start.max(range.start)..other.end.min(range.end))
            .take_while(|part| !part.is_empty())
    }

    /// The first range from the one numbered `from` on that ends behind `start`. Looks at few
    /// ranges if it is near: so a walk over two sets takes one pass.
    fn first_behind(&self, start: T, from: usize) -> usize {
        let (mut low, mut high, mut step) = (from, from, 1);
        while self.ranges.get(high).is_some_and(|range| range.end <= start) {
            low = high + 1;
            high += step;
            step *= 2;
        }
        let high = high.min(self.ranges.len());
        low + self.ranges[low..high].partition_point(|range| range.end <= start)
    }

    /// The addresses that are in both sets.
    pub fn intersection(&self, other: &RangeSet<T>) -> RangeSet<T> {
        let mut both = RangeSet::new();
        let mut first = 0;
        for range in other.iter() {
            first = self.first_behind(range.start, first);
            self.parts(range, first).for_each(|part| both.insert(part));
        }
        both
    }

    /// True if `address` is in the set.
    pub fn contains(&self, address: T) -> bool {
        let first = self.ranges.partition_point(|other| other.end <= address);
        self.ranges.get(first).is_some_and(|range| range.start <= address)
    }

    /// True if all of `range` is in the set. The empty range always is.
    pub fn covers(&self, range: std::ops::Range<T>) -> bool {
        range.is_empty() || self.within(range.clone()).next() == Some(range)
    }
}

impl RangeSet {
    /// Number of addresses in the set.
    pub fn total_bytes(&self) -> ByteCount {
        self.ranges.iter().map(|range| range.end - range.start).sum()
    }

    /// Number of pages that the ranges touch.
    pub fn page_count(&self) -> u64 {
        let mut counted = PageNumber::MIN;
        let mut pages = 0;
        for range in &self.ranges {
            let touched = range.page_range();
            // Two ranges can touch the same page.
            pages += (touched.start.max(counted)..touched.end).page_count();
            counted = touched.end;
        }
        pages
    }

    /// The pages that the ranges touch.
    pub fn whole_pages(&self) -> RangeSet {
        self.ranges.iter().map(AddressRangeExt::whole_pages).collect()
    }

    /// Like [`RangeSet::whole_pages`], without a copy if the set consists of whole pages already.
    pub fn into_whole_pages(self) -> RangeSet {
        let is_aligned = |range: &Range| range.start.is_page_aligned() && range.end.is_page_aligned();
        if self.ranges.iter().all(is_aligned) { self } else { self.whole_pages() }
    }

    /// Turns addresses into offsets from `origin`. No address may be below it.
    pub fn make_relative_to(&mut self, origin: Address) {
        debug_assert!(self.ranges.first().is_none_or(|first| first.start >= origin));
        let distance = origin - Address::MIN;
        for range in &mut self.ranges {
            *range = range.start - distance..range.end - distance;
        }
    }
}

impl<T: Copy + Ord> From<std::ops::Range<T>> for RangeSet<T> {
    fn from(range: std::ops::Range<T>) -> Self {
        std::iter::once(range).collect()
    }
}

impl<T: Copy + Ord> FromIterator<std::ops::Range<T>> for RangeSet<T> {
    fn from_iter<I: IntoIterator<Item = std::ops::Range<T>>>(ranges: I) -> Self {
        let mut set = RangeSet::new();
        ranges.into_iter().for_each(|range| set.insert(range));
        set
    }
}

/// Splits ranges, in their order, into groups of at most `most_bytes` together.
pub fn split(ranges: impl Iterator<Item = Range>, most_bytes: ByteCount) -> impl Iterator<Item = Vec<Range>> {
    let mut ranges = ranges.filter(|range| !range.is_empty());
    let mut rest: Option<Range> = None;
    std::iter::from_fn(move || {
        let mut room = most_bytes;
        let mut part = Vec::new();
        while room > ByteCount::ZERO {
            let Some(range) = rest.take().or_else(|| ranges.next()) else { break };
            let end = range.end.min(range.start.saturating_add(room));
            room -= end - range.start;
            if end < range.end {
                rest = Some(end..range.end);
            }
            part.push(range.start..end);
        }
        (!part.is_empty()).then_some(part)
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const PAGE: u64 = ByteCount::PAGE.get();

    fn bytes(range: std::ops::Range<u64>) -> Range {
        Address::new(range.start)..Address::new(range.end)
    }

    fn addresses(ranges: impl IntoIterator<Item = Range>) -> BTreeSet<u64> {
        ranges.into_iter().flat_map(|range| range.start.get()..range.end.get()).collect()
    }

    #[test]
    fn parts_are_no_larger_than_asked_for_and_miss_nothing() {
        let set: RangeSet = [0..10, 20..25, 30..31].map(bytes).into_iter().collect();
        let parts: Vec<RangeSet> = split(set.iter(), ByteCount::new(4)).map(RangeSet::from_iter).collect();
        assert!(parts.iter().all(|part| part.total_bytes() <= ByteCount::new(4)));
        assert_eq!(parts.len(), 4);
        assert_eq!(parts.iter().flat_map(RangeSet::iter).collect::<RangeSet>(), set);
    }

    #[test]
    fn parts_hold_all_in_order() {
        let pages =
            |range: std::ops::Range<u64>| PageNumber::new(range.start).address()..PageNumber::new(range.end).address();
        let ranges = [0..1, 2..7, 8..8, 9..10, 20..29].map(pages);
        let pages = |ranges: &[Range]| ranges.iter().flat_map(AddressRangeExt::pages).collect::<Vec<_>>();
        for most_pages in 1..20 {
            let parts: Vec<_> = split(ranges.iter().cloned(), ByteCount::of_pages(most_pages)).collect();
            assert_eq!(parts.iter().flat_map(|part| pages(part)).collect::<Vec<_>>(), pages(&ranges));
            let (last, full) = parts.split_last().unwrap();
            assert!(full.iter().all(|part| pages(part).len() as u64 == most_pages), "{parts:x?}");
            assert!((1..=most_pages).contains(&(pages(last).len() as u64)), "{parts:x?}");
        }
        assert!(split(std::iter::empty(), ByteCount::PAGE).next().is_none());
    }

    #[test]
    fn ranges_of_any_granularity_become_pages() {
        let set: RangeSet = [PAGE - 8..PAGE + 8, PAGE + 16..PAGE + 24, 5 * PAGE..6 * PAGE, 6 * PAGE + 1..6 * PAGE + 2]
            .map(bytes)
            .into_iter()
            .collect();
        assert_eq!(set.whole_pages(), [0..2 * PAGE, 5 * PAGE..7 * PAGE].map(bytes).into_iter().collect());
        assert_eq!(set.clone().into_whole_pages(), set.whole_pages());
        assert_eq!(set.whole_pages().into_whole_pages(), set.whole_pages());
        assert_eq!(set.page_count(), 4);
        assert_eq!(set.whole_pages().total_bytes(), ByteCount::of_pages(4));
    }

    #[derive(Debug, Clone)]
    enum Change {
        Insert(Range),
        Remove(Range),
    }

    fn small_range() -> impl Strategy<Value = Range> {
        (0u64..64, 0u64..16).prop_map(|(start, length)| bytes(start..start + length))
    }

    fn change() -> impl Strategy<Value = Change> {
        prop_oneof![small_range().prop_map(Change::Insert), small_range().prop_map(Change::Remove)]
    }

    proptest! {
        #[test]
        fn behaves_like_a_set_of_addresses(
            changes in prop::collection::vec(change(), 0..40), probe in small_range(), other in
            prop::collection::vec(small_range(), 0..6),
        ) {
            let mut set = RangeSet::new();
            let mut model = BTreeSet::new();
            for change in changes {
                match change {
                    Change::Insert(range) => { set.insert(range.clone()); model.extend(addresses([range])); }
                    Change::Remove(range) => { set.remove(range.clone()); model.retain(|&a| !range.contains(&Address::new(a))); }
                }
                let ranges: Vec<_> = set.iter().collect();
                prop_assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start), "not normal: {ranges:?}");
            }
            prop_assert_eq!(addresses(set.iter()), model.clone());
            prop_assert_eq!(set.total_bytes(), ByteCount::from(model.len()));
            let within = addresses(set.within(probe.clone()));
            let expected: BTreeSet<_> = addresses([probe.clone()]).into_iter().filter(|a| model.contains(a)).collect();
            prop_assert_eq!(set.covers(probe.clone()), ByteCount::from(expected.len()) == probe.byte_count());
            prop_assert_eq!(within, expected);
            let other: RangeSet = other.into_iter().collect();
            let both = addresses(set.intersection(&other).iter());
            prop_assert_eq!(both, addresses(other.iter()).into_iter().filter(|a| model.contains(a)).collect());
            let mut more = set.clone();
            more.extend(&other);
            prop_assert_eq!(&more, &set.iter().chain(other.iter()).collect());
            for start in [&set, &RangeSet::new()] {
                let (mut appended, mut rest, mut extended) = (start.clone(), other.clone(), start.clone());
                appended.append(&mut rest);
                extended.extend(&other);
                prop_assert_eq!(appended, extended);
                prop_assert!(rest.is_empty());
            }
            let mut moved: RangeSet = set.iter().map(|range| range.moved_up(ByteCount::new(7))).collect();
            moved.make_relative_to(Address::new(7));
            prop_assert_eq!(&moved, &set);
            let touched: BTreeSet<_> = model.iter().map(|a| a / PAGE).collect();
            prop_assert_eq!(set.page_count(), touched.len() as u64);
            let mut less = set.clone();
            less.subtract(&other);
            let left: BTreeSet<_> = model.iter().copied().filter(|&a| !other.contains(Address::new(a))).collect();
            prop_assert_eq!(addresses(less.iter()), left);
            for address in 0..80 {
                prop_assert_eq!(set.contains(Address::new(address)), model.contains(&address));
            }
        }
    }
}
