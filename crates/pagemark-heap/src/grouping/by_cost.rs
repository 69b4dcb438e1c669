//! Releasing by cost: our own strategy, which learns what a part saves in faults and what it costs
//! in bytes. `adaptive` of the core does the same for whole pages, and without costs.

use super::{Grouping, Groups, PageGroups, PartSet, Seen, grow};
use crate::Parts;

/// What faults and bytes cost, in the same unit.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Costs {
    /// Nanoseconds of a first write to an armed part.
    pub fault_ns: f64,
    /// Nanoseconds to save a byte.
    pub byte_ns: f64,
    /// Nanoseconds to release a part that lies by itself, and to arm it again later: system calls,
    /// and a scan in more pieces.
    pub regroup_ns: f64,
}

impl Default for Costs {
    /// Costs on the machine that the figures in `docs/` are of: a fault, and copying, hashing and
    /// storing a byte.
    fn default() -> Self {
        Costs { fault_ns: 800.0, byte_ns: 0.6, regroup_ns: 1500.0 }
    }
}

/// Weight of the last interval in the probability that a part is written: a quarter.
const WEIGHT_SHIFT: u32 = 2;

/// Intervals from the release of a part to its first probe, as a binary logarithm.
const FIRST_WAIT: u8 = 2;

/// Most intervals between two probes of a released part, as a binary logarithm.
const MOST_WAIT: u8 = 5;

/// Releases a part if it is written so often that its faults would cost more than saving it in
/// vain would: if `n · (p · (fault + bytes) - bytes) > regroup` for the probability `p` that an
/// interval writes the part, and the `n` intervals until it is armed again. Released parts are
/// armed for one interval at times, to find out whether they are still written; the time between
/// doubles as long as they are.
#[derive(Clone, Debug)]
pub struct ByCost {
    parts: usize,
    part_bytes: f64,
    costs: Costs,
    interval: u32,
    /// An entry for each part of the heap.
    estimates: Vec<Estimate>,
}

#[derive(Clone, Copy, Default, Debug)]
struct Estimate {
    /// For an armed part, the last interval that wrote it. For a released part, the interval after
    /// which it is armed.
    interval: u32,
    /// Probability that an interval writes the part, of 255.
    probability: u8,
    /// Binary logarithm of the number of intervals for which the part is released.
    wait: u8,
    is_released: bool,
}

impl ByCost {
    /// Begins without knowledge of parts.
    pub fn new(parts: Parts, costs: Costs) -> ByCost {
        let part_bytes = parts.part_bytes().get() as f64;
        ByCost { parts: parts.count(), part_bytes, costs, interval: 0, estimates: Vec::new() }
    }

    /// What it saves to release a part for an interval, in nanoseconds, by the probability (of 255)
    /// that the interval writes the part.
    fn gain(&self, probability: u8) -> f64 {
        let bytes = self.part_bytes * self.costs.byte_ns;
        f64::from(probability) / 255.0 * (self.costs.fault_ns + bytes) - bytes
    }

    /// Decides on the parts of a page.
    fn decide_page(&mut self, page: usize, written: PartSet, released: PartSet) -> PartSet {
        let (now, first) = (self.interval, page * self.parts);
        grow(&mut self.estimates, first + self.parts - 1);
        let mut next = 0;
        for part in 0..self.parts {
            let estimate = &mut self.estimates[first + part];
            if released >> part & 1 != 0 {
                if estimate.interval > now {
                    next |= 1 << part;
                } else {
                    // Armed for one interval, which shows whether the part is still written.
                    estimate.interval = now;
                }
                continue;
            }
            if written >> part & 1 == 0 {
                continue;
            }
            let was_released = std::mem::take(&mut estimate.is_released);
            if was_released && estimate.interval + 1 != now {
                // The interval in which it was armed did not write it. It is as a new part.
                *estimate = Estimate::default();
            }
            let was_released = was_released && estimate.interval != 0;
            let idle = (now - estimate.interval).saturating_sub(1).min(16);
            // Much memory is written once, when its objects are made: nothing is expected of a part
            // that was never written before.
            let before = if estimate.interval == 0 {
                0
            } else {
                (0..idle).fold(estimate.probability, |p, _| p - (p >> WEIGHT_SHIFT))
            };
            estimate.probability = before + ((255 - before) >> WEIGHT_SHIFT);
            estimate.interval = now;
            let wait = if was_released { (estimate.wait + 1).min(MOST_WAIT) } else { FIRST_WAIT };
            let probability = estimate.probability;
            if self.gain(probability) * f64::from(1 << wait) > self.costs.regroup_ns {
                let interval = now + (1 << wait);
                self.estimates[first + part] = Estimate { interval, probability, wait, is_released: true };
                next |= 1 << part;
            }
        }
        next
    }
}

impl Grouping for ByCost {
    fn decide(&mut self, seen: &[Seen], groups: &mut PageGroups) {
        self.interval += 1;
        for &Seen { page, written } in seen {
            let released = groups.get(&page).map_or(0, |groups| groups.released);
            match self.decide_page(page, written, released) {
                0 => _ = groups.remove(&page),
                released => _ = groups.insert(page, Groups { merged: 0, released }),
            }
        }
    }

    fn learn_cost(&mut self, nanoseconds_per_byte: f64) {
        if nanoseconds_per_byte.is_finite() && nanoseconds_per_byte >= 0.0 {
            self.costs.byte_ns += (nanoseconds_per_byte - self.costs.byte_ns) / 4.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(strategy: &mut ByCost, intervals: &[bool]) -> Vec<bool> {
        let mut groups = PageGroups::new();
        let step = |&is_written: &bool| {
            let is_released = groups.contains_key(&0);
            strategy.decide(&[Seen { page: 0, written: PartSet::from(is_written && !is_released) }], &mut groups);
            groups.contains_key(&0)
        };
        intervals.iter().map(step).collect()
    }

    #[test]
    fn a_part_is_released_where_faults_cost_more_than_bytes() {
        let always = [true; 40];
        let released = run(&mut ByCost::new(Parts::Eight, Costs::default()), &always);
        assert!(released[2..].iter().filter(|&&released| released).count() >= 30, "{released:?}");
        // It is probed at times, and less often after each probe.
        let probes: Vec<usize> = (3..40).filter(|&interval| !released[interval]).collect();
        assert!(
            probes.len() >= 3 && probes.windows(3).all(|three| three[2] - three[1] > three[1] - three[0]),
            "{probes:?}"
        );
        // Bytes that cost a hundred times as much.
        let mut strategy = ByCost::new(Parts::Two, Costs { byte_ns: 60.0, ..Costs::default() });
        assert!(run(&mut strategy, &always).iter().all(|released| !released));
    }

    #[test]
    fn a_part_that_is_no_longer_written_is_armed_again() {
        let intervals: Vec<bool> = (0..60).map(|interval| interval < 10).collect();
        let released = run(&mut ByCost::new(Parts::Eight, Costs::default()), &intervals);
        assert!(released[9], "{released:?}");
        assert!(released[30..].iter().all(|released| !released), "{released:?}");
    }

    #[test]
    fn learned_costs_change_the_gain() {
        let mut strategy = ByCost::new(Parts::Four, Costs::default());
        let before = strategy.gain(200);
        assert!(before > 0.0 && strategy.gain(100) < 0.0);
        strategy.learn_cost(f64::NAN);
        assert_eq!(strategy.gain(200), before);
        (0..20).for_each(|_| strategy.learn_cost(20.0));
        assert!(strategy.gain(200) < 0.0);
    }

    #[test]
    fn a_part_that_is_written_once_is_not_released() {
        for parts in Parts::ALL {
            let intervals = [true, false, false, true, false, false, false, true];
            let released = run(&mut ByCost::new(parts, Costs::default()), &intervals);
            assert!(released.iter().all(|released| !released), "{parts:?} {released:?}");
        }
    }
}
