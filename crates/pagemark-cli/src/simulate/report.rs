//! `pagemark simulate report`: what simulating a run in parallel has taken and gained.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use pagemark_report::escape::printable;
use pagemark_report::html::Page;
use pagemark_report::message;
use pagemark_report::output::print;
use pagemark_report::table::Table;
use pagemark_report::text;
use pagemark_report::timeline::{Bar, Lane, Timeline};
use pagemark_vm::SimulatedInterval;
use serde::{Deserialize, Serialize};

use crate::failure::{Failure, Outcome};
use crate::output::print_json;
use crate::repository::RepositoryOptions;
use crate::simulate::kept::{ResultsDirectory, read_result};
use crate::simulate::list::{ListedInterval, intervals};
use crate::simulate::merge::{kept_intervals, taken_us};
use crate::simulate::model::{Long, Measured, Model, Point};
use crate::simulate::observer::ObserverOptions;

/// The numbers of workers for which the time is predicted.
const PREDICTED_WORKERS: [usize; 8] = [1, 2, 4, 8, 16, 64, 256, 1000];

/// Report what simulating a recorded machine in parallel has taken and gained
///
/// Reports the last run of `pagemark simulate run`: its speedup against the intervals one after the
/// other, and against one long simulation if its result is kept (`pagemark simulate interval JOB@1
/// --to N --results DIR`), the use of the workers, and what ran where and when. Predicts the time
/// with other numbers of workers, and by an analytical model the best length of an interval of a
/// long run.
#[derive(Args, Debug)]
pub struct SimulateReport {
    #[command(flatten)]
    repository: RepositoryOptions,
    #[command(flatten)]
    observer: ObserverOptions,
    /// The directory of the results [default: JOB-results]
    #[arg(long, value_name = "DIR")]
    results: Option<PathBuf>,
    /// How long the run takes that the model is of, without its checkpoints: 30m, 2h
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = text::parse_duration)]
    model: Duration,
    /// Write the report as a page of HTML, with a picture
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// One JSON document
    #[arg(long, conflicts_with = "html")]
    json: bool,
    /// The job of the recording
    job: String,
}

/// An interval that a worker has simulated. Moments are microseconds since 1970.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct RanInterval {
    from: u64,
    to: u64,
    /// The name of the node.
    node: String,
    /// The id of the worker's process.
    worker: i64,
    started_unix_us: u64,
    ended_unix_us: u64,
    instructions: u64,
    start_us: u64,
    #[serde(default)]
    warm_up_us: u64,
    run_us: u64,
    compare_us: u64,
}

impl RanInterval {
    /// Microseconds for which it had its worker.
    fn taken_us(&self) -> u64 {
        self.ended_unix_us.saturating_sub(self.started_unix_us)
    }
}

/// The record of a run, which the Python module writes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct RunRecord {
    job: String,
    plugin: String,
    /// How many intervals could be simulated at once.
    workers: usize,
    started_unix_us: u64,
    /// When Ray was there.
    ready_unix_us: u64,
    ended_unix_us: u64,
    /// In the order in which they ended.
    intervals: Vec<RanInterval>,
}

/// The time with some number of workers.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
struct Prediction {
    workers: usize,
    time_us: u64,
    speedup: f64,
}

#[derive(Clone, PartialEq, Debug, Serialize)]
struct Report {
    job: String,
    plugin: String,
    /// How many intervals there are, and how many of them the run has simulated.
    intervals: usize,
    simulated: usize,
    workers: usize,
    /// Microseconds until Ray was there.
    ray_start_us: u64,
    /// Microseconds of the run, from its begin.
    run_us: u64,
    /// Microseconds of all its intervals, by the workers.
    sum_us: u64,
    /// The sum divided by the time of the run.
    speedup: f64,
    /// Microseconds of one long simulation, if it was measured, and if the run has simulated all.
    long_us: Option<u64>,
    speedup_to_long: Option<f64>,
    /// The share of the time since Ray was there in which the workers simulated.
    utilization: f64,
    /// By the measured times of the intervals.
    predictions: Vec<Prediction>,
    /// Microseconds from the begin of the recording to the end of the last simulation, if each
    /// interval began on a worker of its own when its checkpoint was taken (SimuBoost).
    with_recording_us: u64,
    /// Of a long run, by the costs of this one.
    model: Option<Model>,
    ran: Vec<RanInterval>,
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
fn with_recording_us(listed: &[ListedInterval], taken: &BTreeMap<u64, u64>) -> u64 {
    let mut recorded_us = 0u64;
    let ends = listed.iter().map(|interval| {
        let end = recorded_us.saturating_add(taken.get(&interval.from).copied().unwrap_or(0));
        recorded_us = recorded_us.saturating_add(interval.recorded_us);
        // The comparison needs the checkpoint at its end.
        end.max(recorded_us)
    });
    ends.max().unwrap_or(0)
}

/// The costs of the intervals that a run has simulated. A warm-up is not part of the model.
fn measured(record: &RunRecord, listed: &[ListedInterval]) -> Vec<Measured> {
    let of = |ran: &RanInterval| {
        let recorded = listed.iter().find(|listed| (listed.from, listed.to) == (ran.from, ran.to))?;
        let without_run_us = ran.taken_us().saturating_sub(ran.run_us).saturating_sub(ran.warm_up_us);
        Some(Measured {
            instructions: ran.instructions,
            recorded_us: recorded.recorded_us.saturating_sub(recorded.stopped_us),
            checkpoint_us: recorded.stopped_us,
            run_us: ran.run_us,
            fixed_us: without_run_us,
        })
    };
    record.intervals.iter().filter_map(of).collect()
}

fn ratio(of: u64, to: u64) -> f64 {
    of as f64 / to.max(1) as f64
}

impl Report {
    fn new(record: RunRecord, listed: &[ListedInterval], long: Option<&SimulatedInterval>, model_us: u64) -> Report {
        let tasks: Vec<u64> = record.intervals.iter().map(RanInterval::taken_us).collect();
        let sum_us = tasks.iter().fold(0, |sum: u64, task| sum.saturating_add(*task));
        let run_us = record.ended_unix_us.saturating_sub(record.started_unix_us);
        let ray_start_us = record.ready_unix_us.saturating_sub(record.started_unix_us);
        let parallel_us = record.ended_unix_us.saturating_sub(record.ready_unix_us);
        let is_whole = record.intervals.len() == listed.len();
        let long_us = long.filter(|_| is_whole).map(taken_us);
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
        let long_run = long.map(|long| Long { instructions: long.instructions, run_us: long.run_us });
        let model = Model::new(&measured(&record, listed), long_run, model_us);
        Report {
            intervals: listed.len(),
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
            with_recording_us: with_recording_us(listed, &taken),
            model,
            job: record.job,
            plugin: record.plugin,
            ran: record.intervals,
        }
    }

    /// What the report says in words, a line each.
    fn lines(&self) -> Vec<String> {
        let mut lines = vec![
            format!(
                "{}: {} of {} intervals by {}, with {} workers, in {}, of which Ray's start took {}",
                self.job,
                self.simulated,
                self.intervals,
                self.plugin,
                self.workers,
                text::micros(self.run_us),
                text::micros(self.ray_start_us)
            ),
            format!(
                "speedup {:.2} against the {} of these intervals one after the other; workers used to {}",
                self.speedup,
                text::micros(self.sum_us),
                text::percent(self.utilization)
            ),
        ];
        if let (Some(long_us), Some(speedup)) = (self.long_us, self.speedup_to_long) {
            lines.push(format!("speedup {speedup:.2} against the {} of one long simulation", text::micros(long_us)));
        }
        if self.simulated == self.intervals {
            let with = text::micros(self.with_recording_us);
            lines.push(format!("with a worker for each interval, begun while the machine is recorded: {with} in all"));
        } else {
            lines.push("the other intervals had a result before".into());
        }
        lines
    }

    fn predicted(&self) -> Vec<Vec<String>> {
        let row =
            |at: &Prediction| vec![at.workers.to_string(), text::micros(at.time_us), format!("{:.2}", at.speedup)];
        self.predictions.iter().map(row).collect()
    }

    /// What the model says in words, and its table.
    fn modelled(&self) -> Option<(Vec<String>, Vec<Vec<String>>)> {
        let model = self.model.as_ref()?;
        let costs = &model.costs;
        let each = |us: f64| text::micros((us * 1e6) as u64);
        let lines = vec![
            format!(
                "model of a run of {} ({} instructions), simulated while it is recorded: one long simulation takes {}",
                text::micros(model.run_us),
                text::count(model.instructions),
                text::micros(model.long_us)
            ),
            format!(
                "for a million instructions: recording {}, simulation {}; for an interval: checkpoint {}, worker {}, \
                 translation {}",
                each(costs.recorded_us),
                each(costs.simulated_us),
                text::micros(costs.checkpoint_us as u64),
                text::micros(costs.fixed_us as u64),
                text::micros(costs.translation_us as u64)
            ),
            format!("no number of workers is faster than the recording: a speedup of {:.1}", model.limit),
        ];
        let row = |point: &Point| {
            let deviation = point.by_events_us as f64 / point.time_us.max(1) as f64 - 1.0;
            vec![
                point.workers.to_string(),
                text::count(point.intervals),
                text::count(point.length),
                text::micros(point.time_us),
                format!("{:.2}", point.speedup),
                text::percent(point.efficiency),
                text::micros(point.by_events_us),
                format!("{:+.1} %", deviation * 100.0),
            ]
        };
        Some((lines, model.points.iter().map(row).collect()))
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let mut ran: Vec<&RanInterval> = self.ran.iter().collect();
        ran.sort_by_key(|ran| ran.from);
        let row = |ran: &&RanInterval| {
            let times = [ran.start_us, ran.warm_up_us, ran.run_us, ran.compare_us].map(text::micros);
            let first = [format!("{}@{}", self.job, ran.from), text::count(ran.instructions), printable(&ran.node)];
            first.into_iter().chain([ran.worker.to_string()]).chain(times).collect()
        };
        ran.iter().map(row).collect()
    }

    fn timeline(&self, started_unix_us: u64) -> Timeline {
        let mut lanes: BTreeMap<(&str, i64), Vec<Bar>> = BTreeMap::new();
        for ran in &self.ran {
            let known = [ran.start_us, ran.warm_up_us, ran.run_us, ran.compare_us];
            let known_us = known.iter().fold(0, |sum: u64, part| sum.saturating_add(*part));
            let rest_us = ran.taken_us().saturating_sub(known_us);
            lanes.entry((&ran.node, ran.worker)).or_default().push(Bar {
                start_us: ran.started_unix_us.saturating_sub(started_unix_us),
                parts_us: known.into_iter().chain([rest_us]).collect(),
                name: format!("{}@{}: {}", self.job, ran.from, text::micros(ran.taken_us())),
            });
        }
        let lane = |((node, worker), bars)| Lane { name: format!("{node}, process {worker}"), bars };
        Timeline {
            parts: ["start", "warm-up", "run", "comparison", "other"].map(String::from).into(),
            lanes: lanes.into_iter().map(lane).collect(),
            end_us: self.run_us,
        }
    }

    fn page(&self, started_unix_us: u64) -> String {
        let mut page = Page::new(&format!("Simulation of {} by {}", self.job, self.plugin));
        self.lines().iter().for_each(|line| page.paragraph(line));
        page.heading("What ran where and when");
        page.svg(&self.timeline(started_unix_us).svg());
        page.heading("Predicted by the measured times of the intervals");
        page.table(&["workers", "time", "speedup"], &self.predicted());
        if let Some((lines, rows)) = self.modelled() {
            page.heading("Model of a long run");
            lines.iter().for_each(|line| page.paragraph(line));
            page.table(&MODEL_COLUMNS, &rows);
        }
        page.heading("Intervals");
        page.table(&COLUMNS, &self.rows());
        page.document()
    }
}

/// The columns of the table of intervals.
const COLUMNS: [&str; 8] = ["from", "instructions", "node", "worker", "start", "warm-up", "run", "comparison"];

/// The columns of the table of the model. "By events" is the same with the measured times of single
/// intervals, in turns, and workers that take what is there.
const MODEL_COLUMNS: [&str; 8] =
    ["workers", "intervals", "instructions", "time", "speedup", "efficiency", "by events", "deviation"];

/// The record of the last run of a job by a plugin, below the directory of its results.
fn last_run(directory: &Path, job: &str, plugin: &str) -> Result<Option<RunRecord>, Failure> {
    let failed = |error| Failure::new(format!("cannot read {}", directory.display()), error);
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let mut last: Option<RunRecord> = None;
    for entry in entries {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if !name.starts_with("run-") || !name.ends_with(".json") {
            continue;
        }
        let record: RunRecord = match serde_json::from_slice(&read_result(&path).map_err(failed)?) {
            Ok(record) => record,
            Err(error) => {
                message!("pagemark: {} is not used: {error}", path.display());
                continue;
            }
        };
        let is_later = last.as_ref().is_none_or(|last| last.started_unix_us < record.started_unix_us);
        if record.job == job && record.plugin == plugin && is_later {
            last = Some(record);
        }
    }
    Ok(last)
}

impl SimulateReport {
    pub fn run(self) -> Outcome {
        let chosen = self.observer.chosen()?;
        let repository = self.repository.open()?;
        let listed = intervals(&repository, &self.job)?;
        let directory = ResultsDirectory::new(self.results.as_deref(), &self.job, &chosen);
        let record = last_run(directory.path(), &self.job, &chosen.argument())?.ok_or_else(|| {
            Failure::plain(format!("no run of {} is recorded in {}", self.job, directory.path().display()))
                .help("`pagemark simulate run` simulates its intervals, and keeps a record")
        })?;
        let kept = kept_intervals(&listed, &directory)?;
        let missing = kept.iter().filter(|kept| kept.is_none()).count();
        if missing > 0 {
            message!("pagemark: {missing} of {} intervals have no result yet", listed.len());
        }
        let instructions = listed.iter().fold(0, |sum: u64, interval| sum.saturating_add(interval.instructions));
        let long = match (listed.first(), listed.last()) {
            (Some(first), Some(last)) if listed.len() > 1 => directory.find(first.from, last.to, instructions)?,
            _ => None,
        };
        let started_unix_us = record.started_unix_us;
        let model_us = u64::try_from(self.model.as_micros()).unwrap_or(u64::MAX);
        let report = Report::new(record, &listed, long.as_ref(), model_us);
        if self.json {
            return print_json(&report);
        }
        if let Some(html) = &self.html {
            fs::write(html, report.page(started_unix_us))
                .map_err(|error| Failure::new(format!("cannot write {}", html.display()), error))?;
            return Ok(ExitCode::SUCCESS);
        }
        report.lines().iter().for_each(|line| print(&format!("{line}\n")));
        let mut predicted = Table::new([">WORKERS", ">PREDICTED TIME", ">SPEEDUP"]);
        report.predicted().into_iter().for_each(|row| predicted.row(row));
        print(&format!("\n{predicted}\n"));
        if let Some((lines, rows)) = report.modelled() {
            lines.iter().for_each(|line| print(&format!("{line}\n")));
            let mut modelled = Table::new(MODEL_COLUMNS.map(|name| format!(">{}", name.to_uppercase())));
            rows.into_iter().for_each(|row| modelled.row(row));
            print(&format!("\n{modelled}\n"));
        }
        let columns = COLUMNS.map(|name| format!(">{}", name.to_uppercase()));
        let mut table = Table::new(columns);
        report.rows().into_iter().for_each(|row| table.row(row));
        print(&table.to_string());
        Ok(ExitCode::SUCCESS)
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
        let listed: Vec<_> = (1..4)
            .map(|from| ListedInterval {
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
        let report = Report::new(record.clone(), &listed, Some(&long), 3_600_000_000);
        assert_eq!((report.sum_us, report.run_us, report.ray_start_us), (1000, 700, 100));
        assert_eq!((report.long_us, report.speedup_to_long), (Some(2100), Some(3.0)));
        assert!((report.utilization - 1000.0 / 1200.0).abs() < 1e-9);
        let predicted: Vec<_> = report.predictions.iter().map(|at| (at.workers, at.time_us)).collect();
        assert_eq!(predicted, [(1, 1100), (2, 600), (4, 600)]);
        assert_eq!(report.with_recording_us, 550, "the second interval begins behind the first's 50");
        let costs = &report.model.as_ref().unwrap().costs;
        assert_eq!((costs.recorded_us, costs.checkpoint_us, costs.fixed_us), (6.0, 8.0, 20.0));
        assert_eq!(costs.simulated_us, 940.0 / 21.0, "the long simulation was slower");
        let page = report.page(record.started_unix_us);
        assert!(page.contains("model of a run of") && page.contains("by events"), "{page}");
        assert!(page.contains("speedup 3.00") && page.contains("&lt;node&gt;") && !page.contains("<node>"));
        assert_eq!(page.matches("process 8").count(), 1, "a worker has one lane");

        // A part of a run is not compared with the whole.
        let part = RunRecord { intervals: vec![ran(2, 9, 1100, 500)], ..record };
        let report = Report::new(part, &listed, Some(&long), 1);
        assert_eq!((report.simulated, report.long_us), (1, None));
        assert!(report.lines().iter().any(|line| line.contains("had a result before")));
    }
}
