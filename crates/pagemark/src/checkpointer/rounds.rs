//! When a round of copying is worth its cost.

/// A round that finds at most this many pages is followed by a pause: copying them in the
/// freeze takes less time than another round, which walks the page tables.
const QUIET_PAGES: u64 = 64;

/// Calls without a round in the first pause of a freeze; each further pause is twice as long.
const FIRST_PAUSE: u32 = 3;

/// Captures that begin without rounds after the first one in which rounds were of no use.
const FIRST_WITHOUT_ROUNDS: u32 = 2;
/// The most captures that begin without rounds.
const MAX_WITHOUT_ROUNDS: u32 = 32;

/// True if a round that has found this many pages leaves less for the freeze than the one before:
/// where a target writes as much while a round copies, the next round would find as much again.
pub(super) fn pays(found_before: u64, found_pages: u64) -> bool {
    found_pages < found_before - found_before / 4
}

/// When a round is worth its cost while a target is being frozen.
pub(super) struct Pauses {
    /// Calls that are still left out.
    calls_left: u32,
    /// Length of the next pause, calls.
    next_calls: u32,
}

impl Pauses {
    /// After a round that found this many pages.
    pub fn after(found_pages: u64) -> Pauses {
        let mut pauses = Pauses { calls_left: 0, next_calls: FIRST_PAUSE };
        pauses.round_found(found_pages);
        pauses
    }

    /// True if this call is left out.
    pub fn leaves_out_call(&mut self) -> bool {
        let is_pause = self.calls_left > 0;
        self.calls_left = self.calls_left.saturating_sub(1);
        is_pause
    }

    pub fn round_found(&mut self, found_pages: u64) {
        if found_pages <= QUIET_PAGES {
            self.calls_left = self.next_calls;
            self.next_calls = self.next_calls.saturating_mul(2);
        } else {
            self.next_calls = FIRST_PAUSE;
        }
    }
}

/// Whether a capture begins with rounds where the freeze may keep the pages that they leave. Rounds
/// are of no use if they leave more than is copied in a freeze.
pub(super) struct Trials {
    /// Captures that still begin without rounds.
    without_left: u32,
    /// How many begin without rounds if the next rounds are of no use.
    next_without: u32,
}

impl Default for Trials {
    fn default() -> Self {
        Trials { without_left: 0, next_without: FIRST_WITHOUT_ROUNDS }
    }
}

impl Trials {
    /// True if the next capture begins with rounds.
    pub fn has_rounds(&self) -> bool {
        self.without_left == 0
    }

    /// What came of a capture: whether pages were kept in its freeze.
    pub fn captured(&mut self, were_kept: bool) {
        match (were_kept, self.without_left) {
            (false, _) => *self = Trials::default(),
            (true, 0) => {
                self.without_left = self.next_without;
                self.next_without = (2 * self.next_without).min(MAX_WITHOUT_ROUNDS);
            }
            (true, _) => self.without_left -= 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_go_on_only_while_they_find_pages() {
        // The calls in which a round is done, where a round finds the pages of a script.
        let rounds = |found_before: u64, found: &[u64], calls: u32| {
            let mut found = found.iter().copied();
            let mut pauses = Pauses::after(found_before);
            let is_round = |_: &u32| {
                let is_round = !pauses.leaves_out_call();
                if is_round {
                    pauses.round_found(found.next().unwrap_or(0));
                }
                is_round
            };
            (1..=calls).filter(is_round).collect::<Vec<_>>()
        };
        assert_eq!(rounds(1000, &[1000; 9], 5), [1, 2, 3, 4, 5]);
        assert_eq!(rounds(2, &[2, 2, 2], 25), [4, 11, 24]);
        // The target begins to write.
        assert_eq!(rounds(2, &[1000, 1000, 2, 1000], 11), [4, 5, 6, 10, 11]);
    }

    #[test]
    fn a_round_pays_if_it_finds_less() {
        assert!(pays(1000, 749) && !pays(1000, 750) && !pays(1000, 2000) && pays(4, 2) && !pays(0, 0));
    }

    #[test]
    fn rounds_are_tried_less_and_less_while_pages_are_kept() {
        let mut trials = Trials::default();
        let mut rounds = |were_kept: bool, captures: u32| {
            let had_rounds = |_: &u32| {
                let has_rounds = trials.has_rounds();
                trials.captured(were_kept);
                has_rounds
            };
            (0..captures).filter(had_rounds).collect::<Vec<_>>()
        };
        assert_eq!(rounds(true, 50), [0, 3, 8, 17, 34]);
        assert_eq!(rounds(false, 4), [0, 1, 2, 3][1..], "a capture without rounds that keeps nothing ends it");
        assert_eq!(rounds(true, 9), [0, 3, 8]);
    }
}
