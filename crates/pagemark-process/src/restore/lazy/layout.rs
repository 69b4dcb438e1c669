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
        Layout { parts, has_moved: false }
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
    pub(super) fn remove(&mut self, pages: &PageRange) {
        self.take(pages);
    }

    /// Pages were moved to where nothing was, or to where nothing is any more.
    pub(super) fn move_to(&mut self, pages: &PageRange, to: PageNumber) {
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
