//! The list of what is written without a trace in the machine, for whoever tracks the process from
//! outside ([`pagemark_kvm_protocol::guest_tables`]).
//!
//! The list is in memory at a fixed address. It changes only while the program's mappings are
//! locked, by threads that use KVM, so that nobody changes it in a process that is parked. If it is
//! full, neighbours are joined: it may name more than was written, and never less.

use std::sync::atomic::{AtomicU64, Ordering};

use pagemark::RangeSet;
use pagemark_kvm_protocol::description::{Header, OF_MACHINE, Words};

use crate::layout::{PAGE, PROGRAM_END, page_floor};

/// The list of this process.
#[derive(Clone, Copy, Debug)]
pub struct WriteList {
    header: &'static Header,
    ranges: &'static [Words],
}

impl WriteList {
    /// The list at `ranges`, of which `header` tells the length.
    pub fn new(header: &'static Header, ranges: &'static [Words]) -> WriteList {
        WriteList { header, ranges }
    }

    /// Who tracks the process; 0 is nobody.
    pub fn tracker(&self) -> u64 {
        self.header.tracker.load(Ordering::SeqCst)
    }

    /// Whether anybody tracks the process.
    pub fn is_wanted(&self) -> bool {
        self.tracker() != 0
    }

    /// Like [`WriteList::add`], for each range of `pages`.
    pub fn add_pages(&self, pages: &RangeSet<u64>) {
        pages.iter().for_each(|run| self.add(run.start, run.end));
    }

    /// The pages of `start..end` count as written, if anybody wants to know.
    pub fn add(&self, start: u64, end: u64) {
        let start = page_floor(start);
        let end = end.checked_next_multiple_of(PAGE).unwrap_or(PROGRAM_END).min(PROGRAM_END);
        if start >= end || !self.is_wanted() {
            return;
        }
        let count = self.count();
        // The first range that ends where this one begins, or later, and the first that begins behind it.
        let first = self.position(count, |_, its_end| its_end < start);
        let behind = self.position(count, |its_start, _| its_start <= end);
        if first == behind {
            if count == self.ranges.len() {
                self.join_neighbours();
                return self.add(start, end);
            }
            (first..count).rev().for_each(|index| self.set(index + 1, self.range(index)));
            self.set_count(count + 1);
            return self.set(first, (start, end));
        }
        self.set(first, (start.min(self.range(first).0), end.max(self.range(behind - 1).1)));
        if behind > first + 1 {
            (behind..count).for_each(|index| self.set(first + 1 + index - behind, self.range(index)));
            self.set_count(count - (behind - first - 1));
        }
    }

    /// Everything counts as written, after a killed child may have left the list half changed.
    pub fn add_everything(&self) {
        self.set_count(0);
        self.add(0, PROGRAM_END);
    }

    /// From now on, everything counts as written in each collect.
    pub fn add_always(&self) {
        self.header.always.store(1, Ordering::Relaxed);
    }

    /// True if another process has written to the program's memory since this was last asked.
    pub fn take_written_by_others(&self) -> bool {
        self.header.written_by_others[OF_MACHINE].swap(0, Ordering::SeqCst) != 0
    }

    /// This process is a child made by `fork`: who tracks its parent does not track it. Somebody
    /// else may do so already; the first collect finds everything.
    pub fn begin_child(&self, tracker_of_parent: u64) {
        let _ = self.header.tracker.compare_exchange(tracker_of_parent, 0, Ordering::SeqCst, Ordering::Relaxed);
        self.header.always.store(0, Ordering::Relaxed);
        self.header.written_by_others.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        self.set_count(0);
    }

    /// The number of ranges for which `is_before` holds, which come first.
    fn position(&self, count: usize, is_before: impl Fn(u64, u64) -> bool) -> usize {
        self.ranges[..count].partition_point(|range| is_before(value(&range[0]), value(&range[1])))
    }

    fn join_neighbours(&self) {
        let count = self.count();
        for index in 0..count.div_ceil(2) {
            let last = (2 * index + 1).min(count - 1);
            self.set(index, (self.range(2 * index).0, self.range(last).1));
        }
        self.set_count(count.div_ceil(2));
    }

    fn count(&self) -> usize {
        (value(&self.header.written) as usize).min(self.ranges.len())
    }

    fn set_count(&self, count: usize) {
        self.header.written.store(count as u64, Ordering::Relaxed);
    }

    fn range(&self, index: usize) -> (u64, u64) {
        (value(&self.ranges[index][0]), value(&self.ranges[index][1]))
    }

    fn set(&self, index: usize, (start, end): (u64, u64)) {
        self.ranges[index][0].store(start, Ordering::Relaxed);
        self.ranges[index][1].store(end, Ordering::Relaxed);
    }
}

fn value(word: &AtomicU64) -> u64 {
    word.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(room: usize) -> WriteList {
        let listed =
            WriteList::new(Box::leak(Box::default()), (0..room).map(|_| Words::default()).collect::<Vec<_>>().leak());
        listed.header.tracker.store(1, Ordering::Relaxed);
        listed
    }

    fn ranges(listed: &WriteList) -> Vec<(u64, u64)> {
        (0..listed.count()).map(|index| listed.range(index)).collect()
    }

    #[test]
    fn a_list_has_the_ranges_that_a_set_has() {
        let mut state = 1u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        for _ in 0..200 {
            let (listed, mut expected) = (list(64), RangeSet::new());
            for _ in 0..30 {
                let start = random(200);
                let end = start + 1 + random(12);
                // Parts of pages count as whole pages.
                listed.add(start * PAGE + random(PAGE), (end - 1) * PAGE + 1 + random(PAGE));
                expected.insert(start * PAGE..end * PAGE);
                assert_eq!(ranges(&listed), expected.iter().map(|range| (range.start, range.end)).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn a_full_list_names_more() {
        let (listed, mut expected) = (list(8), RangeSet::new());
        for index in 0..100 {
            let page = index * 37 % 100;
            listed.add(2 * page * PAGE, (2 * page + 1) * PAGE);
            expected.insert(2 * page * PAGE..(2 * page + 1) * PAGE);
            let named: RangeSet<u64> = ranges(&listed).into_iter().map(|(start, end)| start..end).collect();
            assert!(expected.iter().all(|range| named.covers(range)));
            assert!(named.iter().all(|range| range.end <= 200 * PAGE));
            assert!(ranges(&listed).windows(2).all(|pair| pair[0].1 < pair[1].0));
        }
        listed.add(0, u64::MAX);
        assert_eq!(ranges(&listed), [(0, PROGRAM_END)]);
    }

    #[test]
    fn nothing_is_listed_that_nobody_wants() {
        let listed = list(8);
        listed.add(PAGE, PAGE);
        listed.add(PROGRAM_END, PROGRAM_END + PAGE);
        listed.header.tracker.store(0, Ordering::Relaxed);
        listed.add(PAGE, 2 * PAGE);
        listed.add_everything();
        assert_eq!(ranges(&listed), []);
    }
}
