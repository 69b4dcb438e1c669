//! A hierarchy of caches for data: 32 KiB in sets of 8 lines, and behind it 1 MiB in sets of 16
//! lines. Lines have 64 bytes, and the line that was used least recently is replaced. Addresses are
//! physical. Writes bring lines in as reads do.
//!
//! At the begin of an interval, or of its warm-up, the caches are empty, and those of one long
//! simulation are not. A set holds the lines that were used last. So as soon as as many lines were
//! used as it has places, it holds what it would hold in the long simulation. What happens in a set
//! before that is counted as `uncertain`:
//!
//! - A miss of the first cache that fills an empty place can be a hit in the long simulation. A hit
//!   is always one there, too: the cache holds a part of what it would hold.
//! - The second cache gets the misses of the first, so an uncertain one may be no access at all.
//!   From then on, when the set of the first cache is filled, what its misses use is known. All
//!   lines of a set of the second cache are in the same set of the first.

use std::io;

use super::Simulator;
use crate::access::Access;
use crate::kind::Kind;
use crate::results::Results;

const LINE_BYTES: u64 = 64;

/// What was counted of a cache.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
struct Counts {
    hits: u64,
    misses: u64,
    uncertain_hits: u64,
    uncertain_misses: u64,
}

/// Lines that share places in a cache.
#[derive(Clone, Default)]
struct Set {
    /// The lines by their number, the most recently used first.
    lines: Vec<u64>,
    /// How many of the first of them are also in the cache of one long simulation, in this order.
    known: usize,
}

/// A cache of some sets, each with `ways` lines.
struct Cache {
    ways: usize,
    sets: Vec<Set>,
    counts: Counts,
}

/// A use of a line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Use {
    is_hit: bool,
    /// True if one long simulation has the same.
    is_certain: bool,
}

impl Cache {
    fn new(bytes: u64, ways: usize) -> Cache {
        let sets = bytes / LINE_BYTES / ways as u64;
        let set = Set { lines: Vec::with_capacity(ways), known: 0 };
        Cache { ways, sets: vec![set; sets as usize], counts: Counts::default() }
    }

    /// Uses a line. `is_certain` if one long simulation uses it, too.
    fn use_line(&mut self, line: u64, is_certain: bool) -> Use {
        let (sets, ways) = (self.sets.len() as u64, self.ways);
        let Set { lines, known } = &mut self.sets[(line % sets) as usize];
        let found = lines.iter().position(|&held| held == line);
        let is_known = found.is_some_and(|at| at < *known) || *known == ways;
        match found {
            Some(at) => lines[..=at].rotate_right(1),
            None => {
                lines.truncate(ways - 1);
                lines.insert(0, line);
            }
        }
        // What is used becomes known; where its use is none, no line behind it is known any more.
        *known = match is_certain {
            true if is_known => *known,
            true => *known + 1,
            false => 0,
        };
        let of = Use { is_hit: found.is_some(), is_certain: is_certain && is_known };
        let (count, uncertain) = match of.is_hit {
            true => (&mut self.counts.hits, &mut self.counts.uncertain_hits),
            false => (&mut self.counts.misses, &mut self.counts.uncertain_misses),
        };
        *count += 1;
        *uncertain += u64::from(!of.is_certain);
        of
    }
}

/// The hierarchy.
pub(super) struct Caches {
    first: Cache,
    second: Cache,
    device_accesses: u64,
}

impl Default for Caches {
    fn default() -> Caches {
        Caches { first: Cache::new(32 << 10, 8), second: Cache::new(1 << 20, 16), device_accesses: 0 }
    }
}

impl Caches {
    fn use_line(&mut self, line: u64) {
        let first = self.first.use_line(line, true);
        if !first.is_hit {
            self.second.use_line(line, first.is_certain);
        }
    }
}

impl Simulator for Caches {
    fn translated(&mut self, _: u64, _: &dyn Fn() -> Option<String>) -> usize {
        0
    }

    fn begun(&mut self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn accessed(&mut self, access: Access) -> io::Result<()> {
        let Some(address) = access.physical else {
            self.device_accesses += 1;
            return Ok(());
        };
        let last = address.saturating_add(u64::from(access.bytes.max(1)) - 1);
        (address / LINE_BYTES..=last / LINE_BYTES).for_each(|line| self.use_line(line));
        Ok(())
    }

    fn end_warm_up(&mut self) {
        (self.first.counts, self.second.counts, self.device_accesses) = Default::default();
    }

    fn results(&mut self) -> io::Result<Results> {
        let (first, second) = (self.first.counts, self.second.counts);
        let counts = [
            ("l1d-hits", first.hits),
            ("l1d-misses", first.misses),
            ("l1d-uncertain-misses", first.uncertain_misses),
            ("l2-hits", second.hits),
            ("l2-misses", second.misses),
            ("l2-uncertain-hits", second.uncertain_hits),
            ("l2-uncertain-misses", second.uncertain_misses),
            ("device-accesses", self.device_accesses),
        ];
        let counts = counts.map(|(name, count)| (name.to_owned(), count)).into();
        Ok(Results { simulator: Kind::Cache, counts })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(caches: &mut Caches, address: u64) {
        caches.accessed(Access { bytes: 8, is_store: false, address: 0, physical: Some(address) }).unwrap();
    }

    #[test]
    fn the_least_recently_used_line_is_replaced() {
        let mut caches = Caches::default();
        // A set of the first cache has each 64th line.
        let line = |number: u64| number * 64 * LINE_BYTES;
        (0..8).for_each(|number| read(&mut caches, line(number)));
        read(&mut caches, line(0));
        read(&mut caches, line(8));
        assert_eq!(caches.first.counts, Counts { hits: 1, misses: 9, uncertain_hits: 0, uncertain_misses: 8 });
        read(&mut caches, line(0));
        assert_eq!(caches.first.counts.hits, 2, "line 1 was replaced");
        read(&mut caches, line(1));
        assert_eq!((caches.first.counts.misses, caches.second.counts.hits), (10, 1));
        // Across the border of two lines.
        read(&mut caches, 0x10_0000 + LINE_BYTES - 4);
        assert_eq!(caches.first.counts.misses, 12);
        caches.accessed(Access { bytes: 4, is_store: true, address: 0, physical: None }).unwrap();
        assert_eq!(caches.results().unwrap().counts["device-accesses"], 1);
        // A warm-up leaves lines, and no counts.
        caches.end_warm_up();
        read(&mut caches, 0x10_0000);
        let counts = caches.results().unwrap().counts;
        assert_eq!((counts["l1d-hits"], counts["l1d-misses"], counts["device-accesses"]), (1, 0, 0));
    }

    /// Small caches, so that their sets are filled.
    fn run(lines: &[u64], warm_up: usize) -> Caches {
        let (first, second) = (Cache::new(512, 2), Cache::new(4096, 4));
        let mut caches = Caches { first, second, device_accesses: 0 };
        let (warm_up, measured) = lines.split_at(warm_up);
        warm_up.iter().for_each(|&line| caches.use_line(line));
        caches.end_warm_up();
        measured.iter().for_each(|&line| caches.use_line(line));
        caches
    }

    proptest! {
        /// The counts of a run in parts are those of the whole run, but for what was uncertain in
        /// the parts that began with empty caches.
        #[test]
        fn uncertain_counts_bound_the_error(
            lines in prop::collection::vec(prop_oneof![0u64..200, 0u64..12], 1..1000),
            cut in any::<prop::sample::Index>(),
            warm_up in 0usize..300,
        ) {
            let cut = cut.index(lines.len());
            let warm_up = warm_up.min(cut);
            let (whole, first, second) = (run(&lines, 0), run(&lines[..cut], 0), run(&lines[cut - warm_up..], warm_up));
            for cache in [|caches: &Caches| caches.first.counts, |caches: &Caches| caches.second.counts] {
                let (whole, first, second) = (cache(&whole), cache(&first), cache(&second));
                let (hits, misses) = (first.hits + second.hits, first.misses + second.misses);
                prop_assert!(hits <= whole.hits + second.uncertain_hits);
                prop_assert!(whole.hits <= hits + second.uncertain_misses);
                prop_assert!(misses <= whole.misses + second.uncertain_misses);
                prop_assert!(whole.misses <= misses + second.uncertain_hits);
            }
            prop_assert_eq!(second.first.counts.uncertain_hits, 0);
            if warm_up == cut {
                prop_assert_eq!(first.first.counts.misses + second.first.counts.misses, whole.first.counts.misses);
                prop_assert_eq!(first.second.counts.misses + second.second.counts.misses, whole.second.counts.misses);
            }
        }

        /// A long warm-up leaves no uncertainty.
        #[test]
        fn filled_sets_are_certain(lines in prop::collection::vec(0u64..200, 0..200)) {
            let all: Vec<u64> = (0..400).map(|at| at % 200).chain(lines).collect();
            let caches = run(&all, 400);
            prop_assert_eq!(caches.first.counts.uncertain_misses, 0);
            let second = caches.second.counts;
            prop_assert_eq!((second.uncertain_hits, second.uncertain_misses), (0, 0));
        }
    }
}
