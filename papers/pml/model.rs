//! The paper's cost model, a second one that fits better, and how both are fitted to counts.

/// What events cost, microseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Costs {
    /// A page fault (alpha of write protection).
    pub(super) fault_us: f64,
    /// An event of a full log (alpha of PML).
    pub(super) full_log_us: f64,
    /// A page in the log, no matter which exit empties it.
    pub(super) entry_us: f64,
    /// A copy before a write, with its page fault (beta).
    pub(super) copy_us: f64,
}

/// What a run with write protection has counted, from which the gain of PML is predicted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Traced {
    /// Page faults at pages that were copied before: what PML could log (CC).
    pub(super) concurrent: f64,
    /// Copies before a write (COW).
    pub(super) cow: f64,
    /// R(l), of dirty logging without checkpoints.
    pub(super) ratio: f64,
}

impl Traced {
    /// The time that write protection and copies add (formula 3.1).
    pub(super) fn protect_us(&self, costs: &Costs) -> f64 {
        costs.fault_us * self.concurrent + costs.copy_us * self.cow
    }

    /// The time that PML and copies add, by the paper's model: R(l) pages in the log for each event
    /// of a full log, and all pages logged that are copied concurrently.
    pub(super) fn pml_us(&self, costs: &Costs) -> f64 {
        costs.full_log_us * self.concurrent / self.ratio + costs.copy_us * self.cow
    }

    /// The same with a cost for each page in the log, where the log finds the given part of the
    /// pages and page faults find the others.
    pub(super) fn pml_by_page_us(&self, costs: &Costs, logged: f64) -> f64 {
        let cost_us = costs.entry_us * logged + costs.fault_us * (1.0 - logged);
        cost_us * self.concurrent + costs.copy_us * self.cow
    }
}

/// The part of the pages of a checkpoint that the last of its buffers has: all if they fit into
/// one.
pub(super) fn part_in_the_last_buffer(pages: f64, buffer: f64) -> f64 {
    let before = ((pages / buffer).ceil() - 1.0).max(0.0) * buffer;
    (pages - before) / pages
}

/// The cost of an event that fits the costs of several runs best: least squares, through zero.
pub(super) fn fit(events_and_costs: impl Iterator<Item = (f64, f64)>) -> f64 {
    let sums = events_and_costs
        .fold((0.0, 0.0), |(products, squares), (events, cost)| (products + events * cost, squares + events * events));
    sums.0 / sums.1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measuring::random::Xorshift;

    #[test]
    fn the_cost_of_an_event_is_found_again() {
        let mut random = Xorshift::new(1);
        for _ in 0..1000 {
            let cost = 0.1 + random.below(5_000_000) as f64 / 1e3;
            let events: Vec<f64> = (0..=random.below(8)).map(|_| 1.0 + random.below(100_000_000) as f64).collect();
            let exact = fit(events.iter().map(|&events| (events, cost * events)));
            assert!((exact / cost - 1.0).abs() < 1e-9, "{cost}: {exact}");
            // Errors of at most 1 % make one of at most 1 %.
            let error = |random: &mut Xorshift| 0.99 + random.below(20_001) as f64 / 1e6;
            let near = fit(events.iter().map(|&events| (events, cost * events * error(&mut random))));
            assert!((near / cost - 1.0).abs() < 0.010_001, "{cost}: {near}");
        }
    }

    #[test]
    fn both_models_agree_where_their_assumptions_hold() {
        let traced = Traced { concurrent: 1e6, cow: 1e5, ratio: 2000.0 };
        let costs = Costs { fault_us: 1.25, full_log_us: 400.0, entry_us: 0.2, copy_us: 7.4 };
        assert!((traced.pml_us(&costs) - traced.pml_by_page_us(&costs, 1.0)).abs() < 1e-3);
        assert!((traced.protect_us(&costs) - traced.pml_by_page_us(&costs, 0.0)).abs() < 1e-3);
    }

    #[test]
    fn the_last_buffer_has_what_the_others_leave() {
        for (pages, part) in [(1.0, 1.0), (9.0, 1.0), (10.0, 1.0), (12.0, 2.0 / 12.0), (20.0, 0.5), (21.0, 1.0 / 21.0)]
        {
            assert!((part_in_the_last_buffer(pages, 10.0) - part).abs() < 1e-12, "{pages}");
        }
    }
}
