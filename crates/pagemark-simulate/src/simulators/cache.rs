//! A hierarchy of caches for data: 32 KiB in sets of 8 lines, and behind it 1 MiB in sets of 16
//! lines. Lines have 64 bytes, and the line that was used least recently is replaced. Addresses are
//! physical. Writes bring lines in as reads do.
//!
//! At the begin of an interval the caches are empty, and those of one long simulation are not. A
//! miss that fills a place which was empty is counted as `cold`: only such a miss can be a hit in
//! the long simulation, so the cold misses of all intervals but the first bound the error of the
//! first cache.

use super::{Access, Errors, Kind, Simulator};
use crate::results::Results;

const LINE_BYTES: u64 = 64;

/// The second cache gets other accesses than in one long simulation: the misses of the first.
pub(super) const ERRORS: Errors = Errors {
    too_many: &["l1d-misses", "l1d-cold-misses"],
    too_few: &["l1d-hits"],
    bound: "l1d-cold-misses",
    unbounded: &["l2-hits", "l2-misses", "l2-cold-misses"],
};

/// A cache of `sets`, each with `ways` lines.
struct Cache {
    ways: usize,
    /// The lines of each set by their number, the most recently used first.
    sets: Vec<Vec<u64>>,
    hits: u64,
    misses: u64,
    cold_misses: u64,
}

impl Cache {
    fn new(bytes: u64, ways: usize) -> Cache {
        let sets = bytes / LINE_BYTES / ways as u64;
        Cache { ways, sets: vec![Vec::with_capacity(ways); sets as usize], hits: 0, misses: 0, cold_misses: 0 }
    }

    /// Uses a line. True if it was there.
    fn use_line(&mut self, line: u64) -> bool {
        let count = self.sets.len() as u64;
        let set = &mut self.sets[(line % count) as usize];
        if let Some(at) = set.iter().position(|&held| held == line) {
            set[..=at].rotate_right(1);
            self.hits += 1;
            return true;
        }
        self.misses += 1;
        if set.len() < self.ways {
            self.cold_misses += 1;
        } else {
            set.pop();
        }
        set.insert(0, line);
        false
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

impl Simulator for Caches {
    fn translated(&mut self, _: u64, _: &dyn Fn() -> Option<String>) -> usize {
        0
    }

    fn begun(&mut self, _: usize) {}

    fn accessed(&mut self, access: Access) {
        let Some(address) = access.physical else {
            self.device_accesses += 1;
            return;
        };
        let last = address.saturating_add(u64::from(access.bytes.max(1)) - 1);
        for line in address / LINE_BYTES..=last / LINE_BYTES {
            if !self.first.use_line(line) {
                self.second.use_line(line);
            }
        }
    }

    fn results(&self) -> Results {
        let of = |name: &str, cache: &Cache| {
            [("hits", cache.hits), ("misses", cache.misses), ("cold-misses", cache.cold_misses)]
                .map(|(what, count)| (format!("{name}-{what}"), count))
        };
        let devices = [("device-accesses".to_owned(), self.device_accesses)];
        let counts = of("l1d", &self.first).into_iter().chain(of("l2", &self.second)).chain(devices).collect();
        Results { simulator: Kind::Cache, counts }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(caches: &mut Caches, address: u64) {
        caches.accessed(Access { bytes: 8, is_store: false, physical: Some(address) });
    }

    #[test]
    fn the_least_recently_used_line_is_replaced() {
        let mut caches = Caches::default();
        // A set of the first cache has each 64th line.
        let line = |number: u64| number * 64 * LINE_BYTES;
        (0..8).for_each(|number| read(&mut caches, line(number)));
        read(&mut caches, line(0));
        read(&mut caches, line(8));
        assert_eq!((caches.first.hits, caches.first.misses, caches.first.cold_misses), (1, 9, 8));
        read(&mut caches, line(0));
        assert_eq!(caches.first.hits, 2, "line 1 was replaced");
        read(&mut caches, line(1));
        assert_eq!((caches.first.misses, caches.second.hits), (10, 1));
        // Across the border of two lines.
        read(&mut caches, 0x10_0000 + LINE_BYTES - 4);
        assert_eq!(caches.first.misses, 12);
        caches.accessed(Access { bytes: 4, is_store: true, physical: None });
        assert_eq!(caches.results().counts["device-accesses"], 1);
    }

    proptest! {
        /// Misses of a run in two parts are those of the whole run, and at most the cold misses of
        /// the second part more.
        #[test]
        fn cold_misses_bound_the_error(lines in prop::collection::vec(0u64..700, 1..3000), cut in 0usize..3000) {
            let run = |lines: &[u64]| {
                let mut cache = Cache::new(32 << 10, 8);
                for &line in lines {
                    cache.use_line(line);
                }
                cache
            };
            let (first, second) = lines.split_at(cut.min(lines.len()));
            let (whole, first, second) = (run(&lines), run(first), run(second));
            let parts = first.misses + second.misses;
            prop_assert!(whole.misses <= parts && parts <= whole.misses + second.cold_misses);
            prop_assert!(whole.cold_misses <= first.cold_misses + second.cold_misses);
            prop_assert!(first.cold_misses <= whole.cold_misses);
            prop_assert_eq!(first.hits + second.hits + parts, whole.hits + whole.misses);
        }
    }
}
