//! `pagemark simulate report`: what simulating a run in parallel has taken and gained.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use pagemark_replay::{ModelPoint, Plan, Prediction, RanInterval, ResultsDirectory, RunRecord, RunReport};
use pagemark_report::escape::printable;
use pagemark_report::html::Page;
use pagemark_report::message;
use pagemark_report::output::print;
use pagemark_report::table::Table;
use pagemark_report::text;
use pagemark_report::timeline::{Bar, Lane, Timeline};

use crate::failure::{Failure, Outcome};
use crate::output::print_json;
use crate::repository::RepositoryOptions;
use crate::simulate::list::intervals;
use crate::simulate::observer::ObserverOptions;
use crate::simulate::plan::say_unusable;

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

/// A report as text, and as a page of HTML.
struct PrintedReport {
    report: RunReport,
}

impl PrintedReport {
    /// What the report says in words, a line each.
    fn lines(&self) -> Vec<String> {
        let mut lines = vec![
            format!(
                "{}: {} of {} intervals by {}, with {} workers, in {}, of which Ray's start took {}",
                self.report.job,
                self.report.simulated,
                self.report.intervals,
                self.report.plugin,
                self.report.workers,
                text::micros(self.report.run_us),
                text::micros(self.report.ray_start_us)
            ),
            format!(
                "speedup {:.2} against the {} of these intervals one after the other; workers used to {}",
                self.report.speedup,
                text::micros(self.report.sum_us),
                text::percent(self.report.utilization)
            ),
        ];
        if let (Some(long_us), Some(speedup)) = (self.report.long_us, self.report.speedup_to_long) {
            lines.push(format!("speedup {speedup:.2} against the {} of one long simulation", text::micros(long_us)));
        }
        if self.report.simulated == self.report.intervals {
            let with = text::micros(self.report.with_recording_us);
            lines.push(format!("with a worker for each interval, begun while the machine is recorded: {with} in all"));
        } else {
            lines.push("the other intervals had a result before".into());
        }
        lines
    }

    fn predicted(&self) -> Vec<Vec<String>> {
        let row =
            |at: &Prediction| vec![at.workers.to_string(), text::micros(at.time_us), format!("{:.2}", at.speedup)];
        self.report.predictions.iter().map(row).collect()
    }

    /// What the model says in words, and its table.
    fn modelled(&self) -> Option<(Vec<String>, Vec<Vec<String>>)> {
        let model = self.report.model.as_ref()?;
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
        let row = |point: &ModelPoint| {
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
        let mut ran: Vec<&RanInterval> = self.report.ran.iter().collect();
        ran.sort_by_key(|ran| ran.from);
        let row = |ran: &&RanInterval| {
            let times = [ran.start_us, ran.warm_up_us, ran.run_us, ran.compare_us].map(text::micros);
            let first =
                [format!("{}@{}", self.report.job, ran.from), text::count(ran.instructions), printable(&ran.node)];
            first.into_iter().chain([ran.worker.to_string()]).chain(times).collect()
        };
        ran.iter().map(row).collect()
    }

    fn timeline(&self, started_unix_us: u64) -> Timeline {
        let mut lanes: BTreeMap<(&str, i64), Vec<Bar>> = BTreeMap::new();
        for ran in &self.report.ran {
            let known = [ran.start_us, ran.warm_up_us, ran.run_us, ran.compare_us];
            let known_us = known.iter().fold(0, |sum: u64, part| sum.saturating_add(*part));
            let rest_us = ran.taken_us().saturating_sub(known_us);
            lanes.entry((&ran.node, ran.worker)).or_default().push(Bar {
                start_us: ran.started_unix_us.saturating_sub(started_unix_us),
                parts_us: known.into_iter().chain([rest_us]).collect(),
                name: format!("{}@{}: {}", self.report.job, ran.from, text::micros(ran.taken_us())),
            });
        }
        let lane = |((node, worker), bars)| Lane { name: format!("{node}, process {worker}"), bars };
        Timeline {
            parts: ["start", "warm-up", "run", "comparison", "other"].map(String::from).into(),
            lanes: lanes.into_iter().map(lane).collect(),
            end_us: self.report.run_us,
        }
    }

    fn page(&self, started_unix_us: u64) -> String {
        let mut page = Page::new(&format!("Simulation of {} by {}", self.report.job, self.report.plugin));
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

impl SimulateReport {
    pub fn run(self) -> Outcome {
        let choice = self.observer.choice()?;
        let repository = self.repository.open()?;
        let listed = intervals(&repository, &self.job)?;
        let directory = ResultsDirectory::new(self.results.as_deref(), &self.job, &choice);
        let record = RunRecord::last(directory.path(), &self.job, &choice.argument(), &mut say_unusable);
        let record = record.map_err(Failure::cannot)?.ok_or_else(|| {
            Failure::plain(format!("no run of {} is recorded in {}", self.job, directory.path().display()))
                .help("`pagemark simulate run` simulates its intervals, and keeps a record")
        })?;
        let plan = Plan::new(&listed, &directory, &mut say_unusable).map_err(Failure::cannot)?;
        let missing = plan.missing().len();
        if missing > 0 {
            message!("pagemark: {missing} of {} intervals have no result yet", listed.len());
        }
        let instructions = listed.iter().fold(0, |sum: u64, interval| sum.saturating_add(interval.instructions));
        let long = match (listed.first(), listed.last()) {
            (Some(first), Some(last)) if listed.len() > 1 => {
                directory.find(first.from, last.to, instructions, &mut say_unusable).map_err(Failure::cannot)?
            }
            _ => None,
        };
        let started_unix_us = record.started_unix_us;
        let model_us = u64::try_from(self.model.as_micros()).unwrap_or(u64::MAX);
        let printed = PrintedReport { report: RunReport::new(record, &listed, long.as_ref(), model_us) };
        if self.json {
            return print_json(&printed.report);
        }
        if let Some(html) = &self.html {
            fs::write(html, printed.page(started_unix_us))
                .map_err(|error| Failure::new(format!("cannot write {}", html.display()), error))?;
            return Ok(ExitCode::SUCCESS);
        }
        printed.lines().iter().for_each(|line| print(&format!("{line}\n")));
        let mut predicted = Table::new([">WORKERS", ">PREDICTED TIME", ">SPEEDUP"]);
        printed.predicted().into_iter().for_each(|row| predicted.row(row));
        print(&format!("\n{predicted}\n"));
        if let Some((lines, rows)) = printed.modelled() {
            lines.iter().for_each(|line| print(&format!("{line}\n")));
            let mut modelled = Table::new(MODEL_COLUMNS.map(|name| format!(">{}", name.to_uppercase())));
            rows.into_iter().for_each(|row| modelled.row(row));
            print(&format!("\n{modelled}\n"));
        }
        let columns = COLUMNS.map(|name| format!(">{}", name.to_uppercase()));
        let mut table = Table::new(columns);
        printed.rows().into_iter().for_each(|row| table.row(row));
        print(&table.to_string());
        Ok(ExitCode::SUCCESS)
    }
}

#[cfg(test)]
mod tests {
    use pagemark_replay::{RecordedInterval, SimulatedInterval};

    use super::*;

    #[test]
    fn a_report_is_printed_in_words_and_as_a_page() {
        let ran = |from, worker, started_unix_us| RanInterval {
            from,
            to: from + 1,
            node: "<node>".to_owned(),
            worker,
            started_unix_us,
            ended_unix_us: started_unix_us + 300,
            instructions: 7,
            start_us: 10,
            warm_up_us: 0,
            run_us: 280,
            compare_us: 5,
        };
        let recorded = [1, 2, 3].map(|from| RecordedInterval {
            from,
            to: from + 1,
            begin: 7 * (from - 1),
            instructions: 7,
            recorded_us: 50,
            stopped_us: 8,
        });
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
        let record = RunRecord {
            job: "vm".into(),
            plugin: "mix".into(),
            workers: 2,
            started_unix_us: 1000,
            ready_unix_us: 1100,
            ended_unix_us: 1700,
            intervals: vec![ran(1, 8, 1100), ran(2, 9, 1100), ran(3, 8, 1400)],
        };
        let printed = |record| PrintedReport { report: RunReport::new(record, &recorded, Some(&long), 3_600_000_000) };
        let page = printed(record.clone()).page(record.started_unix_us);
        assert!(page.contains("model of a run of") && page.contains("by events"), "{page}");
        assert!(page.contains("speedup 3.00") && page.contains("&lt;node&gt;") && !page.contains("<node>"));
        assert_eq!(page.matches("process 8").count(), 1, "a worker has one lane");

        // A part of a run is not compared with the whole.
        let part = RunRecord { intervals: vec![ran(2, 9, 1100)], ..record };
        assert!(printed(part).lines().iter().any(|line| line.contains("had a result before")));
    }
}
