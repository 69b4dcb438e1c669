//! Merging by history (FPM, sections 3.3 and 6.2).

use super::{Grouping, Groups, PageGroups, PartSet, Seen, grow, numbers};
use crate::Parts;

/// Number of consecutive intervals after which parts that were written in each are merged.
pub const MERGE_AFTER: u8 = 2;

/// Merges the parts of a page that were written in each of the last [`MERGE_AFTER`] intervals. As
/// in the paper, parts are merged after every interval, and all are separated after as many
/// intervals as a page has parts. A group whose armed part was not written in an interval is
/// separated at once: the other parts had to be reported although they may not have been written.
#[derive(Clone, Debug)]
pub struct ByHistory {
    parts: usize,
    interval: u32,
    /// An entry for each part of the heap.
    history: Vec<History>,
}

#[derive(Clone, Copy, Default, Debug)]
struct History {
    /// The last interval that wrote the part.
    written_in: u32,
    /// Number of consecutive intervals that did.
    streak: u8,
}

impl ByHistory {
    /// Begins without history.
    pub fn new(parts: Parts) -> ByHistory {
        ByHistory { parts: parts.count(), interval: 0, history: Vec::new() }
    }

    /// Records the parts of a page that were written, and returns those that may be merged.
    fn record(&mut self, page: usize, written: PartSet) -> PartSet {
        let first = page * self.parts;
        grow(&mut self.history, first + self.parts - 1);
        let mut frequent = 0;
        for part in numbers(written) {
            let history = &mut self.history[first + part];
            let goes_on = history.written_in + 1 == self.interval;
            history.streak = if goes_on { history.streak.saturating_add(1) } else { 1 };
            history.written_in = self.interval;
            frequent |= PartSet::from(history.streak >= MERGE_AFTER) << part;
        }
        frequent
    }
}

impl Grouping for ByHistory {
    fn separates_all(&mut self) -> bool {
        (self.interval as usize + 1).is_multiple_of(self.parts)
    }

    fn decide(&mut self, seen: &[Seen], groups: &mut PageGroups) {
        self.interval += 1;
        let has_separated = (self.interval as usize).is_multiple_of(self.parts);
        for &Seen { page, written } in seen {
            let merged = groups.get(&page).map_or(0, |groups| groups.merged);
            let is_written = written & Groups { merged, released: 0 }.sentinel() != 0;
            // Nothing more is known of a group than that it was written.
            let merged = if is_written { merged } else { 0 };
            let merged = self.record(page, written | merged) | merged;
            if merged.count_ones() >= 2 && !has_separated {
                groups.insert(page, Groups { merged, released: 0 });
            } else {
                groups.remove(&page);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_that_are_written_together_are_merged_and_separated_again() {
        let mut strategy = ByHistory::new(Parts::Four);
        let mut groups = PageGroups::new();
        let mut decide = |written, groups: &mut PageGroups| {
            let separates_all = strategy.separates_all();
            strategy.decide(&[Seen { page: 3, written }], groups);
            assert!(groups.is_empty() || !separates_all);
            groups.get(&3).map_or(0, |groups| groups.merged)
        };
        assert_eq!(decide(0b0111, &mut groups), 0);
        assert_eq!(decide(0b0110, &mut groups), 0b0110);
        // The armed part stands for the group; another part does not join before it was written often.
        assert_eq!(decide(0b1010, &mut groups), 0b0110);
        assert_eq!(groups[&3].sentinel(), 0b0010);
        // The fourth interval separates all, and the next ones merge again.
        assert_eq!(decide(0b0010, &mut groups), 0);
        assert_eq!(decide(0b1100, &mut groups), 0);
        assert_eq!(decide(0b1100, &mut groups), 0b1100);
        // The armed part was not written.
        assert_eq!(decide(0, &mut groups), 0);
    }
}
