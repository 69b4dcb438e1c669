//! What simulating a run in parallel has taken and gained, and what it would take with other
//! numbers of workers.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::interval::SimulatedInterval;
use crate::model::{LongSimulation, MeasuredInterval, Model};
use crate::plan::RecordedInterval;
use crate::run_record::{RanInterval, RunRecord};

/// The numbers of workers for which the time is predicted.
const PREDICTED_WORKERS: [usize; 8] = [1, 2, 4, 8, 16, 64, 256, 1000];

/// The time with some number of workers.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Prediction {
    /// How many there are.
    pub workers: usize,
    /// Microseconds of the run.
    pub time_us: u64,
    /// Against the intervals one after the other.
    pub speedup: f64,
}

/// What a run has taken and gained.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct RunReport {
    /// The job of the recording.
    pub job: String,
    /// What observed the machine.
    pub plugin: String,
    /// How many intervals there are.
    pub intervals: usize,
    /// How many of them the run has simulated.
    pub simulated: usize,
    /// How many could be simulated at once.
    pub workers: usize,
    /// Microseconds until Ray was there.
    pub ray_start_us: u64,
    /// Microseconds of the run, from its begin.
    pub run_us: u64,
    /// Microseconds of all its intervals, by the workers.
    pub sum_us: u64,
    /// The sum divided by the time of the run.
    pub speedup: f64,
    /// Microseconds of one long simulation, if it was measured, and if the run has simulated all.
    pub long_us: Option<u64>,
    /// That time divided by the time of the run.
    pub speedup_to_long: Option<f64>,
    /// The share of the time since Ray was there in which the workers simulated.
    pub utilization: f64,
    /// By the measured times of the intervals.
    pub predictions: Vec<Prediction>,
    /// Microseconds from the begin of the recording to the end of the last simulation, if each
    /// interval began on a worker of its own when its checkpoint was taken (SimuBoost).
    pub with_recording_us: u64,
    /// Of a long run, by the costs of this one.
    pub model: Option<Model>,
    /// What the run has simulated, in the order in which it ended.
    pub ran: Vec<RanInterval>,
}

/// Microseconds of tasks on some workers, each of which takes the next task when it is free.
fn makespan_us(tasks: &[u64], workers: usize) -> u64 {
    let mut free_at = vec![0u64; workers.clamp(1, tasks.len().max(1))];
    for task in tasks {
        if let Some(first) = free_at.iter_mut().min() {
            *first = first.saturating_add(*task);
        }
    }
    free_at.into_iter().max().unwrap_or(0)
}

/// Microseconds until all intervals are simulated, if each begins when the machine is there.
fn with_recording_us(recorded: &[RecordedInterval], taken: &BTreeMap<u64, u64>) -> u64 {
    let mut recorded_us = 0u64;
    let ends = recorded.iter().map(|interval| {
        let end = recorded_us.saturating_add(taken.get(&interval.from).copied().unwrap_or(0));
        recorded_us = recorded_us.saturating_add(interval.recorded_us);
        // The comparison needs the checkpoint at its end.
        end.max(recorded_us)
    });
    ends.max().unwrap_or(0)
}

/// The costs of the intervals that a run has simulated. A warm-up is not part of the model.
fn measured(record: &RunRecord, recorded: &[RecordedInterval]) -> Vec<MeasuredInterval> {
    let of = |ran: &RanInterval| {
        let interval = recorded.iter().find(|interval| (interval.from, interval.to) == (ran.from, ran.to))?;
        let without_run_us = ran.taken_us().saturating_sub(ran.run_us).saturating_sub(ran.warm_up_us);
        Some(MeasuredInterval {
            instructions: ran.instructions,
            recorded_us: interval.recorded_us.saturating_sub(interval.stopped_us),
            checkpoint_us: interval.stopped_us,
            run_us: ran.run_us,
            fixed_us: without_run_us,
        })
    };
    record.intervals.iter().filter_map(of).collect()
}

fn ratio(of: u64, to: u64) -> f64 {
    of as f64 / to.max(1) as f64
}

impl RunReport {
    /// The report of a run of `recorded` intervals. `long` is one long simulation of them, and
    /// `model_us` how long the run takes that the model is of.
    pub fn new(
        record: RunRecord,
        recorded: &[RecordedInterval],
        long: Option<&SimulatedInterval>,
        model_us: u64,
    ) -> RunReport {
        let tasks: Vec<u64> = record.intervals.iter().map(RanInterval::taken_us).collect();
        let sum_us = tasks.iter().fold(0, |sum: u64, task| sum.saturating_add(*task));
        let run_us = record.ended_unix_us.saturating_sub(record.started_unix_us);
        let ray_start_us = record.ready_unix_us.saturating_sub(record.started_unix_us);
        let parallel_us = record.ended_unix_us.saturating_sub(record.ready_unix_us);
        let is_whole = record.intervals.len() == recorded.len();
        let long_us = long.filter(|_| is_whole).map(SimulatedInterval::taken_us);
        let counts = PREDICTED_WORKERS.into_iter();
        let useful = counts.scan(false, |is_enough, workers| {
            let is_first = !*is_enough;
            *is_enough = workers >= tasks.len();
            is_first.then_some(workers)
        });
        let predictions = useful.map(|workers| {
            let time_us = ray_start_us.saturating_add(makespan_us(&tasks, workers));
            Prediction { workers, time_us, speedup: ratio(sum_us, time_us) }
        });
        let taken = record.intervals.iter().map(|ran| (ran.from, ran.taken_us())).collect();
        let long_run = long.map(|long| LongSimulation { instructions: long.instructions, run_us: long.run_us });
        let model = Model::new(&measured(&record, recorded), long_run, model_us);
        RunReport {
            intervals: recorded.len(),
            simulated: tasks.len(),
            workers: record.workers,
            ray_start_us,
            run_us,
            sum_us,
            speedup: ratio(sum_us, run_us),
            long_us,
            speedup_to_long: long_us.map(|long_us| ratio(long_us, run_us)),
            utilization: ratio(sum_us, parallel_us.saturating_mul(record.workers.max(1) as u64)),
            predictions: predictions.collect(),
            with_recording_us: with_recording_us(recorded, &taken),
            model,
            job: record.job,
            plugin: record.plugin,
            ran: record.intervals,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ran(from: u64, worker: i64, started_unix_us: u64, taken_us: u64) -> RanInterval {
        let ended_unix_us = started_unix_us + taken_us;
        let node = "<node>".to_owned();
        let (start_us, run_us, compare_us) = (10, taken_us - 20, 5);
        RanInterval {
            from,
            to: from + 1,
            node,
            worker,
            started_unix_us,
            ended_unix_us,
            instructions: 7,
            start_us,
            warm_up_us: 0,
            run_us,
            compare_us,
        }
    }

    #[test]
    fn workers_take_the_next_task_when_they_are_free() {
        let tasks = [30, 10, 10, 10, 30];
        let times = [1, 2, 3, 5, 100].map(|workers| makespan_us(&tasks, workers));
        assert_eq!(times, [90, 60, 40, 30, 30]);
        assert_eq!((makespan_us(&[], 2), makespan_us(&tasks, 0)), (0, 90));
    }

    #[test]
    fn a_report_divides_what_was_measured() {
        let recorded: Vec<_> = (1..4)
            .map(|from| RecordedInterval {
                from,
                begin: 7 * (from - 1),
                to: from + 1,
                instructions: 7,
                recorded_us: 50,
                stopped_us: 8,
            })
            .collect();
        let record = RunRecord {
            job: "vm".into(),
            plugin: "mix".into(),
            workers: 2,
            started_unix_us: 1000,
            ready_unix_us: 1100,
            ended_unix_us: 1700,
            intervals: vec![ran(1, 8, 1100, 300), ran(2, 9, 1100, 500), ran(3, 8, 1400, 200)],
        };
        let long = SimulatedInterval {
            from: 1,
            to: 4,
            instructions: 21,
            begun: 21,
            started_unix_us: 0,
            start_us: 100,
            warm_up_us: 0,
            run_us: 2000,
            compare_us: 0,
            read_pages: 0,
            results: None,
        };
        let report = RunReport::new(record.clone(), &recorded, Some(&long), 3_600_000_000);
        assert_eq!((report.sum_us, report.run_us, report.ray_start_us), (1000, 700, 100));
        assert_eq!((report.long_us, report.speedup_to_long), (Some(2100), Some(3.0)));
        assert!((report.utilization - 1000.0 / 1200.0).abs() < 1e-9);
        let predicted: Vec<_> = report.predictions.iter().map(|at| (at.workers, at.time_us)).collect();
        assert_eq!(predicted, [(1, 1100), (2, 600), (4, 600)]);
        assert_eq!(report.with_recording_us, 550, "the second interval begins behind the first's 50");
        let costs = &report.model.as_ref().unwrap().costs;
        assert_eq!((costs.recorded_us, costs.checkpoint_us, costs.fixed_us), (6.0, 8.0, 20.0));
        assert_eq!(costs.simulated_us, 940.0 / 21.0, "the long simulation was slower");
        // A part of a run is not compared with the whole.
        let part = RunRecord { intervals: vec![ran(2, 9, 1100, 500)], ..record };
        let report = RunReport::new(part, &recorded, Some(&long), 1);
        assert_eq!((report.simulated, report.long_us), (1, None));
    }
}
