//! Where the pages of a checkpoint are in a process that runs: it moves, drops and unmaps them
//! before they are delivered.

use pagemark::{PageNumber, PageRange, PageRangeExt};

/// Where the pages of a checkpoint are in a process. A page that is nowhere was dropped or
/// unmapped; a page of the process that has none of the checkpoint holds zeros.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Layout {
    /// By ascending pages. No two have a page in common.
    parts: Vec<Part>,
    /// Pages were moved.
    has_moved: bool,
    /// Changes that were read too early, in the order in which they were read. See
    /// [`Layout::apply`].
    held: Vec<Change>,
    /// Where moved pages were, of which the kernel has yet to report that they are unmapped: a move
    /// is reported before that.
    unmaps_to_come: Vec<PageRange>,
}

/// A change of the mappings of a process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Change {
    /// Pages were moved.
    Moved {
        /// Where they were.
        from: PageRange,
        /// Where the first of them is now.
        to: PageNumber,
    },
    /// Pages were dropped, and hold zeros.
    Dropped(PageRange),
    /// Pages were unmapped.
    Unmapped(PageRange),
}

impl Change {
    /// Where pages were before the change.
    fn from(&self) -> &PageRange {
        match self {
            Change::Moved { from, .. } | Change::Dropped(from) | Change::Unmapped(from) => from,
        }
    }

    /// Where pages are because of the change.
    fn to(&self) -> Option<PageRange> {
        match self {
            Change::Moved { from, to } => Some(*to..*to + from.page_count()),
            Change::Dropped(_) | Change::Unmapped(_) => None,
        }
    }

    /// True if the order of the two changes matters.
    fn touches(&self, other: &Change) -> bool {
        let ranges = |change: &Change| [Some(change.from().clone()), change.to()].into_iter().flatten();
        ranges(self).any(|range| ranges(other).any(|other| overlap(&range, &other)))
    }
}

fn overlap(a: &PageRange, b: &PageRange) -> bool {
    a.start < b.end && b.start < a.end
}

/// Pages that are adjacent, now and in the checkpoint.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Part {
    /// Where they are now.
    now: PageRange,
    /// The first of them in the checkpoint.
    first: PageNumber,
}

impl Part {
    /// The part of it that is in `pages` now.
    fn within(&self, pages: &PageRange) -> Option<Part> {
        let now = self.now.start.max(pages.start)..self.now.end.min(pages.end);
        (now.start < now.end).then(|| Part { first: self.first + (now.start.get() - self.now.start.get()), now })
    }

    fn in_checkpoint(&self) -> PageRange {
        self.first..self.first + self.now.page_count()
    }
}

impl Layout {
    /// The layout at the checkpoint, with the given pages in ascending order.
    pub(super) fn new(pages: impl IntoIterator<Item = PageRange>) -> Layout {
        let parts = pages.into_iter().map(|now| Part { first: now.start, now }).collect();
        Layout { parts, has_moved: false, held: Vec::new(), unmaps_to_come: Vec::new() }
    }

    /// Follows a change of the mappings.
    ///
    /// Two threads that change mappings at the same time report that in any order. If a thread
    /// moves pages to where the layout still has others, another thread has moved or unmapped those
    /// before, and its report comes later. The change is held until then, and with it all changes
    /// of the same places.
    pub(super) fn apply(&mut self, change: Change) {
        match &change {
            Change::Moved { from, .. } => self.unmaps_to_come.push(from.clone()),
            Change::Unmapped(pages) => {
                if let Some(at) = self.unmaps_to_come.iter().position(|from| from == pages) {
                    // By now another thread may have moved pages there.
                    self.unmaps_to_come.remove(at);
                    return;
                }
            }
            Change::Dropped(_) => {}
        }
        let is_late = !matches!(change, Change::Dropped(_))
            && self.held.iter().any(|held| held.to().is_some_and(|to| overlap(&to, change.from())))
            && self.has_any(change.from());
        if !is_late && (self.held.iter().any(|held| held.touches(&change)) || self.is_early(&change)) {
            self.held.push(change);
            return;
        }
        self.change(&change);
        while let Some(at) = self.next_held() {
            let held = self.held.remove(at);
            self.change(&held);
        }
    }

    /// True if changes are held.
    pub(super) fn has_held(&self) -> bool {
        !self.held.is_empty()
    }

    /// True if further changes are to be reported before the layout is that of the process.
    pub(super) fn is_expecting(&self) -> bool {
        self.has_held() || !self.unmaps_to_come.is_empty()
    }

    /// Carries out the changes that are held: all reports were read. `MREMAP_DONTUNMAP` unmaps
    /// nothing.
    pub(super) fn settle(&mut self) {
        self.unmaps_to_come.clear();
        for held in std::mem::take(&mut self.held) {
            self.change(&held);
        }
    }

    /// The layout of a child that is forked now. What other threads did before the fork and have
    /// not reported yet, the child does not hear of.
    pub(super) fn of_child(&self) -> Layout {
        let mut layout = self.clone();
        layout.unmaps_to_come.clear();
        for held in std::mem::take(&mut layout.held) {
            held.to().into_iter().for_each(|to| layout.remove(&to));
            layout.change(&held);
        }
        layout
    }

    /// The first held change that need not be held any more.
    fn next_held(&self) -> Option<usize> {
        let is_free = |at: &usize| {
            !self.is_early(&self.held[*at]) && !self.held[..*at].iter().any(|earlier| earlier.touches(&self.held[*at]))
        };
        (0..self.held.len()).find(is_free)
    }

    /// True if pages are moved to where others are.
    fn is_early(&self, change: &Change) -> bool {
        change.to().is_some_and(|to| self.has_any(&to) && self.has_any(change.from()))
    }

    fn has_any(&self, pages: &PageRange) -> bool {
        let near = self.parts.partition_point(|part| part.now.end <= pages.start);
        self.parts.get(near).is_some_and(|part| part.now.start < pages.end)
    }

    fn change(&mut self, change: &Change) {
        match change {
            Change::Moved { from, to } => self.move_to(from, *to),
            Change::Dropped(pages) | Change::Unmapped(pages) => self.remove(pages),
        }
    }

    /// The page of the checkpoint that belongs to a page of the process.
    pub(super) fn in_checkpoint(&self, page: PageNumber) -> Option<PageNumber> {
        let part = self.parts.get(self.parts.partition_point(|part| part.now.end <= page))?;
        (part.now.start <= page).then(|| part.first + (page.get() - part.now.start.get()))
    }

    /// Where a page of the checkpoint is now, and up to which page its successors follow it there.
    pub(super) fn now(&self, page: PageNumber) -> Option<PageRange> {
        let place = |part: &Part| {
            let is_there = part.in_checkpoint().contains(&page);
            is_there.then(|| part.now.start + (page.get() - part.first.get())..part.now.end)
        };
        // Most pages are where they were.
        let near = self.parts.partition_point(|part| part.now.end <= page);
        let elsewhere = if self.has_moved { &self.parts[..] } else { &[] };
        self.parts.get(near).and_then(place).or_else(|| elsewhere.iter().find_map(place))
    }

    /// Pages were dropped or unmapped.
    fn remove(&mut self, pages: &PageRange) {
        self.take(pages);
    }

    /// Pages were moved to where nothing was, or to where nothing is any more.
    fn move_to(&mut self, pages: &PageRange, to: PageNumber) {
        let moved = self.take(pages);
        self.has_moved |= !moved.is_empty();
        for part in moved {
            let start = to + (part.now.start.get() - pages.start.get());
            let mut free = vec![Part { now: start..start + part.now.page_count(), first: part.first }];
            // Before Linux 6.16, the length is that before a mapping was made shorter. What is behind its new end
            // belongs to other mappings.
            for other in &self.parts {
                free = free
                    .iter()
                    .flat_map(|part| {
                        [
                            part.within(&(PageNumber::new(0)..other.now.start)),
                            part.within(&(other.now.end..PageNumber::new(u64::MAX))),
                        ]
                    })
                    .flatten()
                    .collect();
            }
            for part in free {
                let at = self.parts.partition_point(|other| other.now.start < part.now.start);
                self.parts.insert(at, part);
            }
        }
    }

    /// Takes out what is in `pages` now.
    fn take(&mut self, pages: &PageRange) -> Vec<Part> {
        let first = self.parts.partition_point(|part| part.now.end <= pages.start);
        let end = self.parts.partition_point(|part| part.now.start < pages.end).max(first);
        let touched: Vec<Part> = self.parts.drain(first..end).collect();
        let outside = [PageNumber::new(0)..pages.start, pages.end..PageNumber::new(u64::MAX)];
        let kept: Vec<Part> =
            touched.iter().flat_map(|part| outside.iter().filter_map(|range| part.within(range))).collect();
        self.parts.splice(first..first, kept);
        touched.iter().filter_map(|part| part.within(pages)).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAGES: u64 = 48;

    #[derive(Clone, Debug)]
    enum Step {
        Remove(u64, u64),
        Move(u64, u64, u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0..PAGES, 0..9_u64).prop_map(|(start, count)| Step::Remove(start, count)),
            (0..PAGES, 1..9_u64, 0..PAGES).prop_map(|(start, count, to)| Step::Move(start, count, to)),
        ]
    }

    fn range(start: u64, count: u64) -> PageRange {
        PageNumber::new(start)..PageNumber::new(start + count)
    }

    #[test]
    fn a_move_to_a_place_that_another_thread_has_left_is_held() {
        let moved = |start, count, to| Change::Moved { from: range(start, count), to: PageNumber::new(to) };
        let place = |layout: &Layout, page| layout.now(PageNumber::new(page)).map(|now| now.start.get());
        let before = Layout::new([range(10, 4), range(20, 4), range(30, 4)]);
        // One thread moved 10 to 40, another 20 to 10, and then dropped a page of that.
        let late = moved(10, 4, 40);
        let (early, dropped) = (moved(20, 4, 10), Change::Dropped(range(11, 1)));
        for order in [[&late, &early, &dropped], [&early, &late, &dropped], [&early, &dropped, &late]] {
            let mut layout = before.clone();
            order.into_iter().for_each(|change| layout.apply(change.clone()));
            assert!(!layout.has_held());
            let places: Vec<_> = [10, 13, 20, 21, 22, 30].map(|page| place(&layout, page)).into();
            assert_eq!(places, [Some(40), Some(43), Some(10), None, Some(12), Some(30)], "{order:?}");
        }

        // A child that was forked before the report of the first thread.
        let mut layout = before.clone();
        layout.apply(early.clone());
        assert!(layout.has_held());
        let child = layout.of_child();
        assert_eq!([place(&child, 20), place(&child, 23), place(&child, 30)], [Some(10), Some(13), Some(30)]);
        // The pages were unmapped, not moved.
        let mut unmapped = layout.clone();
        unmapped.apply(Change::Unmapped(range(10, 4)));
        assert_eq!((unmapped.has_held(), place(&unmapped, 21)), (false, Some(11)));
        // Without a report of another thread the length was too long: pages stay where others are.
        layout.settle();
        assert_eq!((layout.has_held(), place(&layout, 10), place(&layout, 20)), (false, Some(10), None));
    }

    #[test]
    fn pages_that_are_moved_to_a_place_before_that_is_reported_as_unmapped_stay() {
        let mut layout = Layout::new([range(10, 4), range(20, 4)]);
        let place = |layout: &Layout, page| layout.now(PageNumber::new(page)).map(|now| now.start.get());
        let moved = |start, count, to| Change::Moved { from: range(start, count), to: PageNumber::new(to) };
        layout.apply(moved(10, 4, 40));
        layout.apply(moved(20, 4, 10));
        layout.apply(Change::Unmapped(range(10, 4)));
        assert_eq!([place(&layout, 10), place(&layout, 20)], [Some(40), Some(10)]);
        layout.apply(Change::Unmapped(range(20, 4)));
        assert!(!layout.is_expecting());
        layout.apply(Change::Unmapped(range(10, 4)));
        assert_eq!([place(&layout, 10), place(&layout, 20)], [Some(40), None]);
        // A move that unmaps nothing.
        layout.apply(moved(40, 4, 60));
        layout.settle();
        layout.apply(moved(60, 4, 40));
        layout.settle();
        layout.apply(Change::Unmapped(range(40, 4)));
        assert_eq!(place(&layout, 10), None);
    }

    proptest! {
        /// A list with an entry for each page of the process.
        #[test]
        fn pages_are_found_as_in_a_plain_list(steps in prop::collection::vec(step(), 0..20)) {
            let mut layout = Layout::new([range(2, 10), range(12, 6), range(25, 15)]);
            let mut list: Vec<Option<u64>> = (0..2 * PAGES).map(|page| layout.in_checkpoint(PageNumber::new(page)).map(PageNumber::get)).collect();
            for step in steps {
                match step {
                    Step::Remove(start, count) => {
                        layout.remove(&range(start, count));
                        list[start as usize..(start + count) as usize].fill(None);
                    }
                    Step::Move(start, count, to) => {
                        layout.move_to(&range(start, count), PageNumber::new(to));
                        let moved: Vec<Option<u64>> = list[start as usize..(start + count) as usize].to_vec();
                        list[start as usize..(start + count) as usize].fill(None);
                        for (offset, page) in moved.into_iter().enumerate() {
                            let place = &mut list[to as usize + offset];
                            *place = place.or(page);
                        }
                    }
                }
                for (page, expected) in list.iter().enumerate() {
                    let found = layout.in_checkpoint(PageNumber::new(page as u64)).map(PageNumber::get);
                    prop_assert_eq!(found, *expected, "page {} after {:?}", page, &layout);
                }
                for page in 0..PAGES {
                    let place = list.iter().position(|entry| *entry == Some(page));
                    let now = layout.now(PageNumber::new(page));
                    prop_assert_eq!(now.as_ref().map(|now| now.start.get()), place.map(|place| place as u64));
                    // Its successors follow it there.
                    for (offset, place) in now.into_iter().flat_map(|now| now.pages()).enumerate() {
                        prop_assert_eq!(list[place.get() as usize], Some(page + offset as u64));
                    }
                }
            }
        }
    }
}
