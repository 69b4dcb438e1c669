//! The interval of a job that is to keep the overhead below a goal.

use std::collections::VecDeque;
use std::time::Duration;

use super::{CostModel, Costs, DirtyCurve, INTERVALS, Overhead};
use crate::checkpointer::Strategy;
use crate::repository::Cost;

/// The number of checkpoints that the model is fitted to: the last ones, so that it follows a
/// target whose behaviour changes.
const HISTORY: usize = 24;

/// An interval is at most this many times as long as the one before it, and at least this part of
/// it.
const LARGEST_STEP: u32 = 2;

/// The share of its time that a target may lose to checkpoints, and what is known beforehand of
/// their costs: those of a first write and of a copied page, and [`Costs::hot_after`]. The others
/// are taken from the checkpoints.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OverheadGoal {
    /// The most that the target may lose.
    pub overhead: Overhead,
    /// What events cost.
    pub costs: Costs,
}

/// Chooses the interval between checkpoints by what the last checkpoints have cost.
#[derive(Clone, Debug)]
pub struct AutoInterval {
    goal: OverheadGoal,
    strategy: Strategy,
    interval: Duration,
    history: VecDeque<(Duration, Cost)>,
}

impl AutoInterval {
    /// Begins with `first` as the interval.
    pub fn new(goal: OverheadGoal, strategy: Strategy, first: Duration) -> AutoInterval {
        AutoInterval { goal, strategy, interval: within(first), history: VecDeque::new() }
    }

    /// The time to wait from one checkpoint to the next.
    pub fn interval(&self) -> Duration {
        self.interval
    }

    /// Takes into account a checkpoint that was taken this time after the last one.
    pub fn taken(&mut self, since_last: Duration, cost: Cost) {
        if since_last.is_zero() {
            return;
        }
        if self.history.len() == HISTORY {
            self.history.pop_front();
        }
        self.history.push_back((since_last, cost));
        let Some(model) = self.model() else { return };
        // Above the goal at each interval: the longest is the best.
        let wanted = model.interval_for(self.goal.overhead).unwrap_or(*INTERVALS.end());
        let next = wanted.clamp(self.interval / LARGEST_STEP, self.interval.saturating_mul(LARGEST_STEP));
        self.interval = within(next);
    }

    /// The model of the last checkpoints. None before there is one.
    pub fn model(&self) -> Option<CostModel> {
        // With pre-copy, this counts also what was written first during its rounds, which are short.
        let points: Vec<(Duration, f64)> =
            self.history.iter().map(|(at, cost)| (*at, cost.dirty_pages as f64)).collect();
        let curve = DirtyCurve::fit(&points)?;
        let median = |of: &dyn Fn(&Cost) -> Duration| {
            let mut values: Vec<Duration> = self.history.iter().map(|(_, cost)| of(cost)).collect();
            values.sort_unstable();
            values.get(values.len() / 2).copied().unwrap_or_default()
        };
        let costs = Costs {
            stop: median(&|cost| Duration::from_micros(cost.state_downtime_us)),
            walk: median(&|cost| {
                let Costs { copy, collect, .. } = self.goal.costs;
                let (each, pages) = match self.strategy {
                    Strategy::CopyOnWrite => (collect, cost.dirty_pages),
                    _ => (copy, cost.frozen_pages),
                };
                let copying = each.saturating_mul(u32::try_from(pages).unwrap_or(u32::MAX));
                Duration::from_micros(cost.memory_downtime_us).saturating_sub(copying)
            }),
            ..self.goal.costs
        };
        Some(CostModel { curve, costs, strategy: self.strategy })
    }
}

fn within(interval: Duration) -> Duration {
    interval.clamp(*INTERVALS.start(), *INTERVALS.end())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::checkpointer::Strategy;

    fn goal(share: f64) -> OverheadGoal {
        let (first_write, copy) = (Duration::from_nanos(800), Duration::from_nanos(1200));
        OverheadGoal {
            overhead: Overhead::from_share(share).unwrap(),
            costs: Costs { first_write, copy, ..Costs::default() },
        }
    }

    /// What a checkpoint costs whose target writes this many pages in an interval. Each number is
    /// multiplied by `noise`.
    fn cost(pages: f64, stop_us: f64, noise: f64) -> Cost {
        let pages = (pages * noise) as u64;
        let (state, memory) = ((stop_us * noise) as u64, pages * 12 / 10);
        Cost {
            dirty_pages: pages,
            frozen_pages: pages,
            downtime_us: state + memory,
            state_downtime_us: state,
            memory_downtime_us: memory,
            ..Cost::default()
        }
    }

    /// The interval that is reached, its true overhead, and that of the last checkpoints together.
    fn settle(
        goal: OverheadGoal,
        first: Duration,
        pages: &dyn Fn(f64) -> f64,
        stop_us: f64,
        noise: &[f64],
    ) -> (Duration, f64, f64) {
        let mut auto = AutoInterval::new(goal, Strategy::StopAndCopy, first);
        let lost = |seconds: f64| stop_us * 1e-6 + pages(seconds) * 2e-6;
        let mut last = Vec::new();
        for noise in noise {
            let interval = auto.interval();
            auto.taken(interval, cost(pages(interval.as_secs_f64()), stop_us, *noise));
            assert!(INTERVALS.contains(&auto.interval()));
            assert!(auto.interval() <= interval * LARGEST_STEP && auto.interval() >= interval / LARGEST_STEP);
            last.push(auto.interval().as_secs_f64());
        }
        let reached = auto.interval().as_secs_f64();
        last.drain(..last.len().saturating_sub(HISTORY));
        let together = last.iter().map(|seconds| lost(*seconds)).sum::<f64>() / last.iter().sum::<f64>();
        (auto.interval(), lost(reached) / reached, together)
    }

    #[test]
    fn the_overhead_comes_to_the_goal_from_above_and_from_below() {
        let pages = |at: f64| 20_000.0 * (1.0 - (-at / 0.5).exp()) + 200.0 * at;
        for first in [Duration::from_millis(50), Duration::from_secs(1), Duration::from_secs(600)] {
            let (interval, overhead, _) = settle(goal(0.03), first, &pages, 15_000.0, &[1.0; 30]);
            assert!((0.028..0.0303).contains(&overhead), "{first:?}: {interval:?} {overhead}");
        }
        // More than the goal at each interval.
        let (interval, ..) = settle(goal(0.01), Duration::from_secs(1), &|at| 20_000.0 * at, 0.0, &[1.0; 30]);
        assert_eq!(interval, *INTERVALS.end());
        // Without costs the shortest interval does.
        let (interval, ..) = settle(goal(0.01), Duration::from_secs(1), &|_| 0.0, 10.0, &[1.0; 30]);
        assert_eq!(interval, *INTERVALS.start());
    }

    #[test]
    fn before_a_checkpoint_nothing_is_known() {
        let mut auto = AutoInterval::new(goal(0.03), Strategy::default(), Duration::from_secs(7));
        assert_eq!((auto.model(), auto.interval()), (None, Duration::from_secs(7)));
        auto.taken(Duration::ZERO, Cost::default());
        assert_eq!(auto.interval(), Duration::from_secs(7));
    }

    proptest! {
        // Each case fits the model 40 times.
        #![proptest_config(ProptestConfig::with_cases(64 * pagemark_testing::factor()))]
        #[test]
        fn noise_does_not_lead_far_away(
            noise in prop::collection::vec(0.7f64..1.4, 40),
            time in 0.05f64..5.0,
            pages in 100f64..100_000.0,
            stop_us in 100f64..20_000.0,
        ) {
            let truth = |at: f64| pages * (1.0 - (-at / time).exp());
            let (interval, _, overhead) = settle(goal(0.03), Duration::from_secs(1), &truth, stop_us, &noise);
            let shortest = INTERVALS.start().as_secs_f64();
            let at_shortest = (stop_us * 1e-6 + truth(shortest) * 2e-6) / shortest;
            // Single intervals are up to twice too long or too short. Of 10,000 sequences none lost
            // less than 0.024 or more than 0.035 together.
            let is_near = (0.02..0.045).contains(&overhead);
            prop_assert!(is_near || at_shortest < 0.06, "{interval:?}: {overhead}");
        }
    }
}
