//! What the program has mapped, and with which protection: faults of the guest are resolved by it.

use std::collections::BTreeMap;

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
    /// Where the search for free addresses begins.
    top: Option<u64>,
}

impl Mappings {
    /// No mappings; free addresses are searched below `top`.
    pub fn below(top: u64) -> Mappings {
        Mappings { ranges: BTreeMap::new(), top: Some(top) }
    }

    /// Forgets all ranges, without a look at them: a killed child may have left them half changed.
    pub fn abandon(&mut self) {
        std::mem::forget(std::mem::take(&mut self.ranges));
    }

    /// Takes the ranges of `other`.
    pub fn replace(&mut self, other: Mappings) {
        self.ranges = other.ranges;
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
        for part in self.within(start, end) {
            // `within` cuts, so the whole range is looked up again.
            let Some(whole) = self.find(part.start) else { continue };
            self.ranges.remove(&whole.start);
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
        self.remove(start, end);
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
        let mut end = limit.min(PROGRAM_END);
        loop {
            let start = end.checked_sub(len)? & !(align.max(PAGE) - 1);
            if start < PROGRAM_START {
                return None;
            }
            match self.ranges.range(..start + len).next_back() {
                Some((&before, &(last, _))) if last > start => end = before,
                _ => return Some(start),
            }
        }
    }

    /// Free addresses for `len` bytes that begin at a multiple of `align`: the highest below the
    /// top, or anywhere.
    pub fn place_aligned(&self, len: u64, align: u64) -> Option<u64> {
        let below = self.free_below(self.top.unwrap_or(MMAP_TOP), len, align);
        below.or_else(|| self.free_below(PROGRAM_END, len, align))
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
                prop_assert_eq!(mappings.is_free(from, to), model[start as usize..end as usize].iter().all(Option::is_none));
                let all: Vec<Mapping> = mappings.iter().collect();
                prop_assert!(all.windows(2).all(|pair| pair[0].end < pair[1].start
                    || (pair[0].end == pair[1].start && pair[0].protection != pair[1].protection)));
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
}
