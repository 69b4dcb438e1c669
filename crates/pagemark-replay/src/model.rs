//! The analytical model of a parallel simulation (SimuBoost; PML, section 2.2), with the costs of a
//! run that was measured.
//!
//! A run of `I` instructions is recorded in `n` intervals of `L = I / n` instructions. Its
//! recording takes `r = aL + c` for each: `a` for an instruction, `c` for a checkpoint. A worker
//! takes `t = f + w + sL` to simulate one: `f` until the machine is there and behind its end, `w`
//! because QEMU must translate all code first, `s` for an instruction. If `t <= Nr`, each interval
//! has a worker when it is recorded, and the whole takes `(n - 1) r + t`. Otherwise the workers
//! begin one after the other, each `r` behind the one before, and then take one interval after the
//! other: with `n - 1 = kN + m`, the whole takes `kt + mr + t`. One long simulation takes `f + w +
//! sI`. With workers for all, the best length is `√(Ic / (s - a))`.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use serde::Serialize;

/// The numbers of workers of the model.
const WORKERS: [usize; 7] = [1, 2, 4, 16, 64, 256, 1000];

/// How many intervals a run is divided into at most.
const MAX_INTERVALS: u64 = 1_000_000;

/// An interval that was recorded and simulated. Times are microseconds.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct MeasuredInterval {
    /// How many it has.
    pub instructions: u64,
    /// Of the machine, without its checkpoint.
    pub recorded_us: u64,
    /// For which the machine was stopped for the checkpoint.
    pub checkpoint_us: u64,
    /// Of the simulation, from the checkpoint to the end.
    pub run_us: u64,
    /// Of the worker, besides that.
    pub fixed_us: u64,
}

/// A simulation of the whole run at once.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LongSimulation {
    /// How many instructions it has.
    pub instructions: u64,
    /// Microseconds of its run.
    pub run_us: u64,
}

/// The costs of a run, in microseconds.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Costs {
    /// Of an instruction in the recording, with what checkpoints slow it down.
    pub recorded_us: f64,
    /// For which the machine is stopped at a checkpoint.
    pub checkpoint_us: f64,
    /// Of an instruction in a simulation.
    pub simulated_us: f64,
    /// Of a simulation besides its instructions: start, comparison, and the worker's own.
    pub fixed_us: f64,
    /// Of the run of a simulation besides its instructions: code is translated. 0 where it is not
    /// known, and part of the cost of an instruction.
    pub translation_us: f64,
}

impl Costs {
    /// The costs of measured intervals. What an instruction takes and what an interval takes
    /// besides are told apart by a long simulation. None if nothing was measured.
    pub fn of(measured: &[MeasuredInterval], long: Option<LongSimulation>) -> Option<Costs> {
        let sum = |of: fn(&MeasuredInterval) -> u64| measured.iter().map(of).fold(0, u64::saturating_add) as f64;
        let (count, instructions) = (measured.len() as f64, sum(|interval| interval.instructions));
        let (length, run_us) = (instructions / count, sum(|interval| interval.run_us) / count);
        let rate = run_us / length;
        let longer = long.filter(|long| long.instructions as f64 > length * 1.5);
        let by_long = longer.map(|long| (long.run_us as f64 - run_us) / (long.instructions as f64 - length));
        let simulated_us = by_long.filter(|&slope| slope > 0.0 && slope < rate).unwrap_or(rate);
        let costs = Costs {
            recorded_us: sum(|interval| interval.recorded_us) / instructions,
            checkpoint_us: sum(|interval| interval.checkpoint_us) / count,
            simulated_us,
            fixed_us: sum(|interval| interval.fixed_us) / count,
            translation_us: run_us - simulated_us * length,
        };
        (instructions > 0.0 && costs.recorded_us > 0.0 && costs.simulated_us > 0.0).then_some(costs)
    }

    /// How long a simulation takes.
    fn simulation_us(&self, instructions: f64) -> f64 {
        self.fixed_us + self.translation_us + self.simulated_us * instructions
    }

    /// How long recording and simulating take together, where the run has `intervals` intervals.
    fn time_us(&self, instructions: f64, intervals: u64, workers: usize) -> f64 {
        let (count, length) = (intervals as f64, instructions / intervals as f64);
        let recorded_us = self.recorded_us * length + self.checkpoint_us;
        let simulated_us = self.simulation_us(length);
        let workers = workers.max(1) as u64;
        if simulated_us <= workers as f64 * recorded_us {
            // The comparison needs the checkpoint at the end.
            return (count - 1.0) * recorded_us + simulated_us.max(recorded_us);
        }
        let (rounds, rest) = ((intervals - 1) / workers, (intervals - 1) % workers);
        rounds as f64 * simulated_us + rest as f64 * recorded_us + simulated_us
    }

    /// The number of intervals by which the whole takes least.
    fn best_intervals(&self, instructions: f64, workers: usize) -> u64 {
        let most = MAX_INTERVALS.min(instructions as u64).max(1);
        // A full last round of the workers is better than any number between two of them.
        let rounds = std::iter::successors(Some(1u64), |&round| Some(round + round / 64 + 1));
        let full = rounds.map(|round| round.saturating_mul(workers as u64)).take_while(|&count| count <= most);
        let others = std::iter::successors(Some(1u64), |&count| Some(count + count / 64 + 1));
        let candidates = full.chain(others.take_while(|&count| count <= most));
        let time = |count: &u64| self.time_us(instructions, *count, workers);
        candidates.min_by(|a, b| time(a).total_cmp(&time(b))).unwrap_or(1)
    }
}

/// What the model says of a number of workers.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct ModelPoint {
    /// How many there are.
    pub workers: usize,
    /// How many intervals are best.
    pub intervals: u64,
    /// The instructions of each.
    pub length: u64,
    /// Microseconds of recording and simulating together.
    pub time_us: u64,
    /// Against one long simulation.
    pub speedup: f64,
    /// The speedup for each worker.
    pub efficiency: f64,
    /// The time by events: with the measured times of single intervals.
    pub by_events_us: u64,
}

/// The model of a long run.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Model {
    /// Those of the run that was measured.
    pub costs: Costs,
    /// Microseconds that the run takes when it is not recorded in intervals.
    pub run_us: u64,
    /// Instructions of the run.
    pub instructions: u64,
    /// Microseconds of one long simulation.
    pub long_us: u64,
    /// The speedup that no number of workers exceeds: the recording must be waited for.
    pub limit: f64,
    /// By the number of workers.
    pub points: Vec<ModelPoint>,
}

impl Model {
    /// The model of a run that takes `run_us` when it is recorded, without checkpoints. None if
    /// nothing was measured.
    pub fn new(measured: &[MeasuredInterval], long: Option<LongSimulation>, run_us: u64) -> Option<Model> {
        let costs = Costs::of(measured, long)?;
        let instructions = run_us as f64 / costs.recorded_us;
        let long_us = costs.simulation_us(instructions);
        let points = WORKERS.into_iter().map(|workers| {
            let intervals = costs.best_intervals(instructions, workers);
            let time_us = costs.time_us(instructions, intervals, workers);
            let speedup = long_us / time_us;
            ModelPoint {
                workers,
                intervals,
                length: (instructions / intervals as f64) as u64,
                time_us: time_us as u64,
                speedup,
                efficiency: speedup / workers as f64,
                by_events_us: by_events_us(&costs, measured, instructions, intervals, workers) as u64,
            }
        });
        Some(Model {
            costs,
            run_us,
            instructions: instructions as u64,
            long_us: long_us as u64,
            limit: long_us / run_us as f64,
            points: points.collect(),
        })
    }
}

/// How long recording and simulating take together, by the events: an interval is there when it is
/// recorded up to its begin, and is taken by the worker that is free first. Intervals take as long
/// as the measured ones, in turns, each by its own speed; where there are fewer, each takes as long
/// as a part of the measured ones.
fn by_events_us(
    costs: &Costs,
    measured: &[MeasuredInterval],
    instructions: f64,
    intervals: u64,
    workers: usize,
) -> f64 {
    let length = instructions / intervals as f64;
    // The share of a measured run that is not of its instructions.
    let run_us = measured.iter().map(|interval| interval.run_us as f64).sum::<f64>() / measured.len() as f64;
    let fixed_share = costs.translation_us / run_us.max(1.0);
    let times = |interval: &MeasuredInterval| {
        let scale = length / interval.instructions.max(1) as f64;
        let run_us = interval.run_us as f64 * (fixed_share + (1.0 - fixed_share) * scale);
        let recorded_us = interval.recorded_us as f64 * scale + interval.checkpoint_us as f64;
        (recorded_us, interval.fixed_us as f64 + run_us)
    };
    let count = measured.len();
    let (mut recorded_us, mut end_us) = (0.0, 0.0f64);
    // Whole nanoseconds, which have an order.
    let mut free_at: BinaryHeap<Reverse<u64>> = std::iter::repeat_n(Reverse(0), workers.max(1)).collect();
    for number in 0..intervals as usize {
        let part = match count.checked_div(intervals as usize) {
            Some(share) if share > 0 => {
                &measured[number * count / intervals as usize..(number + 1) * count / intervals as usize]
            }
            _ => &measured[number % count..=number % count],
        };
        let sums = part.iter().map(times).fold((0.0, 0.0), |sum, next| (sum.0 + next.0, sum.1 + next.1));
        let (recording_us, simulation_us) = (sums.0 / part.len() as f64, sums.1 / part.len() as f64);
        let free_us = free_at.pop().map_or(0.0, |Reverse(free)| free as f64 / 1e3);
        let done_us = free_us.max(recorded_us) + simulation_us;
        free_at.push(Reverse((done_us * 1e3) as u64));
        recorded_us += recording_us;
        // The comparison needs the checkpoint at the end.
        end_us = end_us.max(done_us).max(recorded_us);
    }
    end_us
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: u64 = 1_000_000;

    fn measured(
        instructions: u64,
        recorded_us: u64,
        checkpoint_us: u64,
        run_us: u64,
        fixed_us: u64,
    ) -> MeasuredInterval {
        MeasuredInterval { instructions, recorded_us, checkpoint_us, run_us, fixed_us }
    }

    #[test]
    fn costs_are_those_of_all_intervals() {
        let intervals = [measured(100, 50, 7, 1000, 20), measured(300, 150, 9, 3000, 40)];
        let costs = Costs::of(&intervals, None).unwrap();
        let expected =
            Costs { recorded_us: 0.5, checkpoint_us: 8.0, simulated_us: 10.0, fixed_us: 30.0, translation_us: 0.0 };
        assert_eq!(costs, expected);
        // 400 instructions at once take 2400, so an instruction takes 2, and each interval 1600 besides.
        let long = |run_us| Some(LongSimulation { instructions: 400, run_us });
        let told_apart = Costs::of(&intervals, long(2400)).unwrap();
        assert_eq!((told_apart.simulated_us, told_apart.translation_us), (2.0, 1600.0));
        assert_eq!(told_apart.simulation_us(200.0), 30.0 + 2000.0);
        for unlikely in [0, 9000] {
            assert_eq!(Costs::of(&intervals, long(unlikely)), Some(expected));
        }
        assert_eq!(Costs::of(&[], None), None);
        assert_eq!(Costs::of(&[measured(0, 0, 1, 1, 1)], None), None);
    }

    /// A simulation that takes 100 times as long as the run, and checkpoints of 0.1 s: the best
    /// length by the formula, and the time that belongs to it, by hand.
    #[test]
    fn the_best_length_is_that_of_the_formula() {
        let costs =
            Costs { recorded_us: 1.0, checkpoint_us: 1e5, simulated_us: 100.0, fixed_us: 0.0, translation_us: 0.0 };
        let instructions = 3600e6;
        let intervals = costs.best_intervals(instructions, 1000) as f64;
        // √(3600 s · 0.1 s / 99) = 1.907 s
        let length = instructions / intervals / 1e6;
        assert!((1.85..1.96).contains(&length), "{length}");
        // 3600 s + 1888 · 0.1 s + 190.7 s - 1.9 s = 3977 s, for 360,000 s
        let speedup = costs.simulation_us(instructions) / costs.time_us(instructions, intervals as u64, 1000);
        assert!((90.3..90.7).contains(&speedup), "{speedup}");
    }

    #[test]
    fn a_single_worker_gains_nothing_and_two_gain_two_at_most() {
        let intervals = [measured(1_000_000, 10_000, 500, 90_000, 1_000)];
        let model = Model::new(&intervals, None, 3600 * SECOND).unwrap();
        assert_eq!(model.points.len(), WORKERS.len());
        assert!((model.limit - 9.0).abs() < 0.01, "{model:?}");
        assert!(model.points[0].speedup <= 1.0 && model.points[0].speedup > 0.99, "{model:?}");
        assert!(model.points[1].efficiency > 0.9 && model.points[1].efficiency <= 1.0, "{model:?}");
        for pair in model.points.windows(2) {
            assert!(pair[0].speedup <= pair[1].speedup + 1e-6 && pair[1].speedup <= model.limit, "{model:?}");
        }
    }

    proptest! {
        /// No other length is better by more than the steps between those that are tried, and the
        /// events agree where all intervals are the same.
        #[test]
        fn the_best_is_best_and_events_agree(
            recorded_us in 1u64..10_000, checkpoint_us in 0u64..100_000, run_us in 1u64..1_000_000,
            fixed_us in 0u64..2_000_000, long_us in 1u64..5_000_000, workers in prop::sample::select(WORKERS.to_vec()), other in 1u64..20_000,
        ) {
            let interval = measured(100_000, recorded_us, checkpoint_us, run_us, fixed_us);
            let long = LongSimulation { instructions: 1_000_000, run_us: long_us };
            let costs = Costs::of(&[interval], Some(long)).unwrap();
            let instructions = 60e6 / costs.recorded_us;
            let best = costs.best_intervals(instructions, workers);
            let best_us = costs.time_us(instructions, best, workers);
            prop_assert!(best_us <= costs.time_us(instructions, other.min(instructions as u64), workers) * 1.04);
            let events_us = by_events_us(&costs, &[interval], instructions, best, workers);
            prop_assert!((events_us / best_us - 1.0).abs() < 0.001, "{} {}", events_us, best_us);
        }
    }
}
