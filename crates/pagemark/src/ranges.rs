//! Sets of disjoint address ranges.

use std::collections::BTreeMap;

/// Addresses from `start` up to, not including, `end`, in bytes.
pub type Range = std::ops::Range<u64>;

/// A set of addresses, held as disjoint ranges in ascending order; ranges that touch are one.
///
/// What was written is a `RangeSet`. Its granularity (page, sub-page, word) is a property of the mechanism
/// that found it, never an assumption of the code that reads it.
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
    /// Start to end.
    ranges: BTreeMap<u64, u64>,
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
        self.ranges.iter().map(|(start, end)| end - start).sum()
    }

    /// The ranges in ascending order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = Range> + '_ {
        self.ranges.iter().map(|(&start, &end)| start..end)
    }

    /// Removes everything.
    pub fn clear(&mut self) {
        self.ranges.clear();
    }

    /// Adds a range; an empty range adds nothing.
    pub fn insert(&mut self, range: Range) {
        if range.is_empty() {
            return;
        }
        let (mut start, mut end) = (range.start, range.end);
        if let Some((&before, &before_end)) = self.ranges.range(..=start).next_back()
            && before_end >= start
        {
            if before_end >= end {
                return;
            }
            start = before;
        }
        while let Some((&next, &next_end)) = self.ranges.range(start..=end).next() {
            self.ranges.remove(&next);
            end = end.max(next_end);
        }
        self.ranges.insert(start, end);
    }

    /// Takes a range out.
    pub fn remove(&mut self, range: Range) {
        if range.is_empty() {
            return;
        }
        if let Some((&before, &before_end)) = self.ranges.range(..range.start).next_back()
            && before_end > range.start
        {
            self.ranges.insert(before, range.start);
            if before_end > range.end {
                self.ranges.insert(range.end, before_end);
            }
        }
        while let Some((&next, &next_end)) = self.ranges.range(range.start..range.end).next() {
            self.ranges.remove(&next);
            if next_end > range.end {
                self.ranges.insert(range.end, next_end);
            }
        }
    }

    /// Adds all of `other`.
    pub fn extend(&mut self, other: &RangeSet) {
        other.iter().for_each(|range| self.insert(range));
    }

    /// Takes all of `other` out.
    pub fn subtract(&mut self, other: &RangeSet) {
        other.iter().for_each(|range| self.remove(range));
    }

    /// The parts of `range` that are in the set, in ascending order.
    pub fn within(&self, range: Range) -> impl Iterator<Item = Range> + '_ {
        let first = match self.ranges.range(..=range.start).next_back() {
            Some((&start, &end)) if end > range.start => start,
            _ => range.start,
        };
        let bounds = if range.is_empty() { first..first } else { first..range.end };
        self.ranges.range(bounds).map(move |(&start, &end)| start.max(range.start)..end.min(range.end))
    }

    /// The addresses that are in both sets.
    pub fn intersection(&self, other: &RangeSet) -> RangeSet {
        other.iter().flat_map(|range| self.within(range)).collect()
    }

    /// True if `address` is in the set.
    pub fn contains(&self, address: u64) -> bool {
        self.ranges.range(..=address).next_back().is_some_and(|(_, &end)| end > address)
    }

    /// True if all of `range` is in the set. The empty range always is.
    pub fn covers(&self, range: Range) -> bool {
        range.is_empty() || self.within(range.clone()).next() == Some(range)
    }
}

impl FromIterator<Range> for RangeSet {
    fn from_iter<I: IntoIterator<Item = Range>>(ranges: I) -> Self {
        let mut set = RangeSet::new();
        ranges.into_iter().for_each(|range| set.insert(range));
        set
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

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
            for address in 0..80 {
                prop_assert_eq!(set.contains(address), model.contains(&address));
            }
        }
    }
}
