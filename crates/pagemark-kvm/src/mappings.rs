//! What the program has mapped, and with which protection: faults of the guest are resolved by it.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::layout::{MMAP_TOP, PAGE, PROGRAM_END, PROGRAM_START};

/// A protection, as the bits `PROT_READ`, `PROT_WRITE` and `PROT_EXEC`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protection(u8);

impl Protection {
    /// From the argument of `mmap` or `mprotect`; other bits are dropped.
    pub const fn new(bits: u64) -> Protection {
        Protection(bits as u8 & 7)
    }

    /// Whether the processor may read: without protection keys each access includes reading.
    pub const fn readable(self) -> bool {
        self.0 != 0
    }

    /// Whether the processor may write.
    pub const fn writable(self) -> bool {
        self.0 & libc::PROT_WRITE as u8 != 0
    }

    /// Whether reading was asked for. Otherwise the host may keep the monitor from it.
    pub const fn says_readable(self) -> bool {
        self.0 & libc::PROT_READ as u8 != 0
    }

    /// The bits.
    pub const fn bits(self) -> u64 {
        self.0 as u64
    }

    /// The same, but for writes.
    pub const fn without_writes(self) -> Protection {
        Protection(self.0 & !(libc::PROT_WRITE as u8))
    }

    /// Whether the processor may execute.
    pub const fn executable(self) -> bool {
        self.0 & libc::PROT_EXEC as u8 != 0
    }
}

/// The protection that the host's mapping has. The processor reads what it may write, and what it
/// may execute, as there are no protection keys in the machine. The kernel would keep KVM and the
/// monitor from that.
pub const fn on_host(protection: u64) -> u64 {
    let implies = (libc::PROT_WRITE | libc::PROT_EXEC) as u64;
    if protection & implies != 0 { protection | libc::PROT_READ as u64 } else { protection }
}

/// A mapped range of addresses with one protection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Its first address.
    pub start: u64,
    /// The address behind it.
    pub end: u64,
    /// Its protection.
    pub protection: Protection,
}

/// The mapped ranges, disjoint. Neighbours of equal protection are one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mappings {
    /// By start: the end and the protection.
    ranges: BTreeMap<u64, (u64, Protection)>,
    /// Bytes of all of them.
    bytes: u64,
    /// Where nothing more is to be found.
    full: Full,
}

/// Where searches for free addresses begin: they need not look at what is full.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Full {
    /// Where the first one begins.
    limit: u64,
    /// For each power of two: there are no free addresses of as many bytes from here up to the
    /// limit.
    from: [u64; 64],
}

impl Default for Full {
    fn default() -> Full {
        Full::below(MMAP_TOP)
    }
}

impl Full {
    /// Nothing is known.
    fn below(limit: u64) -> Full {
        Full { limit, from: [limit; 64] }
    }

    /// Below `end` something is free again.
    fn forget(&mut self, end: u64) {
        self.from.iter_mut().for_each(|from| *from = (*from).max(end.min(self.limit)));
    }
}

/// The power of two that is at most `len`.
fn power(len: u64) -> usize {
    len.max(1).ilog2() as usize
}

impl Mappings {
    /// No mappings; free addresses are searched below `top`.
    pub fn below(top: u64) -> Mappings {
        Mappings { ranges: BTreeMap::new(), bytes: 0, full: Full::below(top) }
    }

    /// Forgets all ranges, without a look at them: a killed child may have left them half changed.
    pub fn abandon(&mut self) {
        std::mem::forget(std::mem::take(&mut self.ranges));
        self.bytes = 0;
        self.full = Full::below(self.full.limit);
    }

    /// Takes the ranges of `other`.
    pub fn replace(&mut self, other: Mappings) {
        (self.ranges, self.bytes) = (other.ranges, other.bytes);
        self.full = Full::below(self.full.limit);
    }

    /// How many bytes are mapped.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// All mappings, in ascending order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = Mapping> + '_ {
        self.ranges.iter().map(|(&start, &(end, protection))| Mapping { start, end, protection })
    }

    /// The mapping that holds `address`.
    pub fn find(&self, address: u64) -> Option<Mapping> {
        let (&start, &(end, protection)) = self.ranges.range(..=address).next_back()?;
        (address < end).then_some(Mapping { start, end, protection })
    }

    /// The parts of `start..end` that are mapped.
    pub fn within(&self, start: u64, end: u64) -> Vec<Mapping> {
        let first = self.ranges.range(..=start).next_back().map_or(start, |(&start, _)| start);
        let parts = self.ranges.range(first..end.max(first)).map(|(&from, &(to, protection))| Mapping {
            start: from.max(start),
            end: to.min(end),
            protection,
        });
        parts.filter(|part| part.start < part.end).collect()
    }

    /// Whether nothing of `start..end` is mapped.
    pub fn is_free(&self, start: u64, end: u64) -> bool {
        self.ranges.range(..end).next_back().is_none_or(|(_, &(last, _))| last <= start)
    }

    /// `start..end` is no longer mapped.
    pub fn remove(&mut self, start: u64, end: u64) {
        if start >= end {
            return;
        }
        self.cut(start, end);
        // With its neighbours, it is free up to the next mapping.
        let behind = self.ranges.range(end..).next().map_or(PROGRAM_END, |(&next, _)| next);
        self.full.forget(behind);
    }

    fn cut(&mut self, start: u64, end: u64) {
        for part in self.within(start, end) {
            // `within` cuts, so the whole range is looked up again.
            let Some(whole) = self.find(part.start) else { continue };
            self.ranges.remove(&whole.start);
            self.bytes -= part.end - part.start;
            if whole.start < start {
                self.ranges.insert(whole.start, (start, whole.protection));
            }
            if whole.end > end {
                self.ranges.insert(end, (whole.end, whole.protection));
            }
        }
    }

    /// `start..end` is mapped with `protection`, whatever was there.
    pub fn insert(&mut self, start: u64, end: u64, protection: Protection) {
        if start >= end {
            return;
        }
        self.cut(start, end);
        self.bytes += end - start;
        let (mut from, mut to) = (start, end);
        if let Some((&before, &(last, same))) = self.ranges.range(..start).next_back()
            && last == start
            && same == protection
        {
            from = before;
        }
        if let Some(&(last, same)) = self.ranges.get(&end)
            && same == protection
        {
            self.ranges.remove(&end);
            to = last;
        }
        self.ranges.insert(from, (to, protection));
    }

    /// What is mapped in `start..end` gets `protection`.
    pub fn protect(&mut self, start: u64, end: u64, protection: Protection) {
        for part in self.within(start, end) {
            self.insert(part.start, part.end, protection);
        }
    }

    /// The highest free addresses for `len` bytes that begin at a multiple of `align` and end at or
    /// below `limit`, with an unmapped page on neither side required.
    pub fn free_below(&self, limit: u64, len: u64, align: u64) -> Option<u64> {
        self.search(limit.min(PROGRAM_END), len, align, |_| {})
    }

    /// Like [`Mappings::free_below`]. Calls `skipped` with each range of free addresses that is too
    /// short.
    fn search(&self, limit: u64, len: u64, align: u64, mut skipped: impl FnMut(Range<u64>)) -> Option<u64> {
        let mut end = limit;
        loop {
            let below = self.ranges.range(..end).next_back();
            let (before, last) = below.map_or((0, PROGRAM_START), |(&before, &(last, _))| (before, last));
            if last < end {
                let start = end.checked_sub(len).map(|start| start & !(align.max(PAGE) - 1));
                match start {
                    Some(start) if start >= last.max(PROGRAM_START) => return Some(start),
                    _ => skipped(last..end),
                }
            }
            below?;
            end = before;
        }
    }

    /// Free addresses for `len` bytes that begin at a multiple of `align`: the highest below the
    /// top, or anywhere.
    pub fn place_aligned(&mut self, len: u64, align: u64) -> Option<u64> {
        let power = power(len);
        // The highest addresses that such a search has to look at again.
        let mut next = None;
        let found = self.search(self.full.from[power], len, align, |skipped| {
            if next.is_none() && skipped.end - skipped.start >= 1 << power {
                next = Some(skipped.end);
            }
        });
        self.full.from[power] = next.or_else(|| found.map(|start| self.end_of_gap(start))).unwrap_or(PROGRAM_START);
        found.or_else(|| self.free_below(PROGRAM_END, len, align))
    }

    /// Where the free addresses end in which `start` is.
    fn end_of_gap(&self, start: u64) -> u64 {
        self.ranges.range(start..).next().map_or(PROGRAM_END, |(&next, _)| next).min(self.full.limit)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BASE: u64 = PROGRAM_START;

    /// The protection of each of 64 pages, the slow way.
    fn pages(mappings: &Mappings) -> Vec<Option<Protection>> {
        (0..64).map(|page| mappings.find(BASE + page * PAGE).map(|mapping| mapping.protection)).collect()
    }

    proptest! {
        #[test]
        fn mappings_are_what_each_page_says(
            steps in prop::collection::vec((0u8..3, 0u64..64, 1u64..20, 0u64..8), 1..60)
        ) {
            let mut mappings = Mappings::default();
            let mut model: Vec<Option<Protection>> = vec![None; 64];
            for (kind, start, len, bits) in steps {
                let end = (start + len).min(64);
                let (from, to) = (BASE + start * PAGE, BASE + end * PAGE);
                let protection = Protection::new(bits);
                let slice = &mut model[start as usize..end as usize];
                match kind {
                    0 => { mappings.insert(from, to, protection); slice.fill(Some(protection)); }
                    1 => { mappings.remove(from, to); slice.fill(None); }
                    _ => {
                        mappings.protect(from, to, protection);
                        slice.iter_mut().flatten().for_each(|page| *page = protection);
                    }
                }
                prop_assert_eq!(&pages(&mappings), &model);
                prop_assert_eq!(mappings.bytes(), model.iter().flatten().count() as u64 * PAGE);
                prop_assert_eq!(mappings.is_free(from, to), model[start as usize..end as usize].iter().all(Option::is_none));
                let all: Vec<Mapping> = mappings.iter().collect();
                prop_assert!(all.windows(2).all(|pair| pair[0].end < pair[1].start
                    || (pair[0].end == pair[1].start && pair[0].protection != pair[1].protection)));
            }
        }

        #[test]
        fn places_are_the_highest_although_searches_skip_what_is_full(
            steps in prop::collection::vec((0u8..4, 0u64..60, 1u64..8, 0u32..3), 1..120)
        ) {
            let limit = BASE + 48 * PAGE;
            let mut mappings = Mappings::below(limit);
            for (kind, page, pages, align) in steps {
                let (at, len) = (BASE + page * PAGE, pages * PAGE);
                match kind {
                    0 => mappings.remove(at, at + len),
                    1 => mappings.insert(at, at + len, Protection::new(page & 1)),
                    _ => {
                        let align = PAGE << align;
                        let below = mappings.free_below(limit, len, align);
                        let expected = below.or_else(|| mappings.free_below(PROGRAM_END, len, align));
                        let place = mappings.place_aligned(len, align);
                        prop_assert_eq!(place, expected);
                        if let (Some(place), 3) = (place, kind) {
                            mappings.insert(place, place + len, Protection::new(page & 1));
                        }
                    }
                }
            }
        }

        #[test]
        fn free_addresses_are_the_highest(
            taken in prop::collection::vec(any::<bool>(), 64), len in 1u64..10, limit in 1u64..64
        ) {
            let mut mappings = Mappings::default();
            for (page, _) in taken.iter().enumerate().filter(|(_, taken)| **taken) {
                let start = BASE + page as u64 * PAGE;
                mappings.insert(start, start + PAGE, Protection::new(0));
            }
            let fits = |start: u64| (start..start + len).all(|page| !taken[page as usize]);
            let best = (0..=limit.saturating_sub(len)).rev().find(|&start| start + len <= limit && fits(start));
            let found = mappings.free_below(BASE + limit * PAGE, len * PAGE, PAGE);
            prop_assert_eq!(found, best.map(|page| BASE + page * PAGE));
        }
    }
    /// With a search from the top for each, this would take minutes.
    #[test]
    fn many_mappings_are_placed_at_once() {
        let mut mappings = Mappings::below(MMAP_TOP);
        for number in 0..200_000 {
            let len = if number % 3 == 0 { PAGE } else { 2 * PAGE };
            let place = mappings.place_aligned(len, PAGE).expect("room for it");
            mappings.insert(place, place + len, Protection::new(number & 1));
        }
        let lowest = mappings.iter().next().expect("all of them").start;
        assert!(mappings.is_free(PROGRAM_START, lowest) && lowest > MMAP_TOP - 200_000 * 2 * PAGE);
    }
}
