//! Sets of disjoint address ranges.

/// Addresses from `start` up to, not including, `end`, in bytes.
pub type Range = std::ops::Range<u64>;

/// A set of addresses, held as disjoint ranges in ascending order; ranges that touch are one.
///
/// What was written is a `RangeSet`. Its granularity (page, sub-page, word) is a property of the mechanism
/// that found it, never an assumption of the code that reads it.
///
/// Adding ranges in ascending order, as trackers do, costs nothing but the memory; adding one in the middle moves
/// what lies behind it. Whole sets are added and taken out in one pass.
///
/// ```
/// use pagemark::RangeSet;
/// let mut dirty = RangeSet::new();
/// dirty.insert(0x1000..0x2000);
/// dirty.insert(0x2000..0x3000);
/// assert_eq!(dirty.iter().collect::<Vec<_>>(), [0x1000..0x3000]);
/// ```
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct RangeSet {
    ranges: Vec<Range>,
}

impl RangeSet {
    /// The empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// True if no address is in the set.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// How many disjoint ranges the set consists of.
    pub fn range_count(&self) -> usize {
        self.ranges.len()
    }

    /// How many addresses are in the set.
    pub fn total_bytes(&self) -> u64 {
        self.ranges.iter().map(|range| range.end - range.start).sum()
    }

    /// The ranges in ascending order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = Range> + '_ {
        self.ranges.iter().cloned()
    }

    /// Removes everything.
    pub fn clear(&mut self) {
        self.ranges.clear();
    }

    /// Adds a range; an empty range adds nothing.
    #[inline]
    pub fn insert(&mut self, range: Range) {
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

    fn insert_within(&mut self, range: Range) {
        let first = self.ranges.partition_point(|other| other.end < range.start);
        let behind = self.ranges.partition_point(|other| other.start <= range.end);
        let mut merged = range;
        if let [from, .., to] | [from @ to] = &self.ranges[first..behind] {
            merged = merged.start.min(from.start)..merged.end.max(to.end);
        }
        self.ranges.splice(first..behind, [merged]);
    }

    /// Takes a range out.
    pub fn remove(&mut self, range: Range) {
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
    pub fn extend(&mut self, other: &RangeSet) {
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

    /// Adds all of `other`, and leaves it empty: as [`RangeSet::extend`], but costs nothing where the set was empty.
    pub fn append(&mut self, other: &mut RangeSet) {
        if self.is_empty() {
            std::mem::swap(self, other);
        } else {
            self.extend(other);
        }
        other.clear();
    }

    /// Moves all ranges down by `distance`, as from addresses to offsets. None of them may lie below it.
    pub(crate) fn move_down(&mut self, distance: u64) {
        debug_assert!(self.ranges.first().is_none_or(|first| first.start >= distance));
        for range in &mut self.ranges {
            *range = range.start - distance..range.end - distance;
        }
    }

    /// Takes all of `other` out.
    pub fn subtract(&mut self, other: &RangeSet) {
        let mut rest = RangeSet::new();
        for range in self.ranges.drain(..) {
            let mut start = range.start;
            for hole in other.within(range.clone()) {
                rest.insert(start..hole.start);
                start = hole.end;
            }
            rest.insert(start..range.end);
        }
        *self = rest;
    }

    /// The parts of `range` that are in the set, in ascending order.
    pub fn within(&self, range: Range) -> impl Iterator<Item = Range> + '_ {
        let first = self.ranges.partition_point(|other| other.end <= range.start);
        self.ranges[first..]
            .iter()
            .map(move |other| other.start.max(range.start)..other.end.min(range.end))
            .take_while(|part| !part.is_empty())
    }

    /// The addresses that are in both sets.
    pub fn intersection(&self, other: &RangeSet) -> RangeSet {
        other.iter().flat_map(|range| self.within(range)).collect()
    }

    /// True if `address` is in the set.
    pub fn contains(&self, address: u64) -> bool {
        self.within(address..address.saturating_add(1)).next().is_some()
    }

    /// True if all of `range` is in the set. The empty range always is.
    pub fn covers(&self, range: Range) -> bool {
        range.is_empty() || self.within(range.clone()).next() == Some(range)
    }
}

impl From<Range> for RangeSet {
    fn from(range: Range) -> Self {
        std::iter::once(range).collect()
    }
}

impl FromIterator<Range> for RangeSet {
    fn from_iter<I: IntoIterator<Item = Range>>(ranges: I) -> Self {
        let mut set = RangeSet::new();
        ranges.into_iter().for_each(|range| set.insert(range));
        set
    }
}

/// Splits ranges, in their order, into groups of at most `most_bytes` together.
pub fn split(ranges: impl Iterator<Item = Range>, most_bytes: u64) -> impl Iterator<Item = Vec<Range>> {
    let mut ranges = ranges.filter(|range| !range.is_empty());
    let mut rest: Option<Range> = None;
    std::iter::from_fn(move || {
        let mut room = most_bytes;
        let mut part = Vec::new();
        while room > 0 {
            let Some(range) = rest.take().or_else(|| ranges.next()) else { break };
            let end = range.end.min(range.start + room);
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

    #[test]
    fn parts_are_no_larger_than_asked_for_and_miss_nothing() {
        let set: RangeSet = [0..10, 20..25, 30..31].into_iter().collect();
        let parts: Vec<RangeSet> = split(set.iter(), 4).map(RangeSet::from_iter).collect();
        assert!(parts.iter().all(|part| part.total_bytes() <= 4));
        assert_eq!(parts.len(), 4);
        assert_eq!(parts.iter().flat_map(RangeSet::iter).collect::<RangeSet>(), set);
    }

    #[test]
    fn parts_hold_all_in_order() {
        const PAGE: u64 = crate::PAGE_SIZE as u64;
        let ranges = [0..PAGE, 2 * PAGE..7 * PAGE, 8 * PAGE..8 * PAGE, 9 * PAGE..10 * PAGE, 20 * PAGE..29 * PAGE];
        let pages =
            |ranges: &[Range]| ranges.iter().cloned().flat_map(|r| r.step_by(crate::PAGE_SIZE)).collect::<Vec<_>>();
        for most_pages in 1..20 {
            let parts: Vec<_> = split(ranges.iter().cloned(), most_pages * PAGE).collect();
            assert_eq!(parts.iter().flat_map(|part| pages(part)).collect::<Vec<_>>(), pages(&ranges));
            let (last, full) = parts.split_last().unwrap();
            assert!(full.iter().all(|part| pages(part).len() as u64 == most_pages), "{parts:x?}");
            assert!((1..=most_pages).contains(&(pages(last).len() as u64)), "{parts:x?}");
        }
        assert!(split(std::iter::empty(), PAGE).next().is_none());
    }

    #[derive(Debug, Clone)]
    enum Change {
        Insert(Range),
        Remove(Range),
    }

    fn small_range() -> impl Strategy<Value = Range> {
        (0u64..64, 0u64..16).prop_map(|(start, length)| start..start + length)
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
                    Change::Insert(range) => { set.insert(range.clone()); model.extend(range); }
                    Change::Remove(range) => { set.remove(range.clone()); model.retain(|a| !range.contains(a)); }
                }
                let ranges: Vec<_> = set.iter().collect();
                prop_assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start), "not normal: {ranges:?}");
            }
            prop_assert_eq!(set.iter().flatten().collect::<BTreeSet<_>>(), model.clone());
            prop_assert_eq!(set.total_bytes(), model.len() as u64);
            let within: BTreeSet<_> = set.within(probe.clone()).flatten().collect();
            let expected: BTreeSet<_> = probe.clone().filter(|a| model.contains(a)).collect();
            prop_assert_eq!(set.covers(probe.clone()), expected.len() as u64 == probe.end - probe.start);
            prop_assert_eq!(within, expected);
            let other: RangeSet = other.into_iter().collect();
            let both: BTreeSet<_> = set.intersection(&other).iter().flatten().collect();
            prop_assert_eq!(both, other.iter().flatten().filter(|a| model.contains(a)).collect());
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
            let mut moved: RangeSet = set.iter().map(|range| range.start + 7..range.end + 7).collect();
            moved.move_down(7);
            prop_assert_eq!(&moved, &set);
            let mut less = set.clone();
            less.subtract(&other);
            let left: BTreeSet<_> = model.iter().copied().filter(|&a| !other.contains(a)).collect();
            prop_assert_eq!(less.iter().flatten().collect::<BTreeSet<_>>(), left);
            for address in 0..80 {
                prop_assert_eq!(set.contains(address), model.contains(&address));
            }
        }
    }
}
