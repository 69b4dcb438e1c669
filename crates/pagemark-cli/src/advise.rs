//! `pagemark advise`: predicts what checkpoints of a running process cost.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use pagemark::Mechanism;
use pagemark::model::{CostModel, Forecast, Observation, Overhead, stop_time};
use pagemark::target::TargetMemory;
use pagemark::track::Scope;
use pagemark_process::criu::DumpOptions;
use pagemark_process::saver::{CriuSaver, RegisterSaver, StateSaver};
use pagemark_process::target::ProcessTarget;
use pagemark_report::table::Table;
use pagemark_report::text;
use pagemark_trace::attach;
use serde::Serialize;

use crate::costs::costs;
use crate::failure::{Failure, Outcome};
use crate::options::{TrackingOptions, overhead};
use crate::output::{print, print_json};

/// The slices of an observation: a power of two, so that all intervals up to the whole are seen.
const SLICES: u32 = 64;

/// Intervals that are predicted, milliseconds.
const INTERVALS_MS: [u64; 9] = [100, 200, 500, 1000, 2000, 5000, 10_000, 30_000, 60_000];

/// Predict what checkpoints of a running program would cost, from a short observation
///
/// The program is observed as by `attach`, and frozen five times, but nothing is stored. The
/// overhead is the share of its time that the program would lose: by freezes, and by first writes
/// to pages that are protected. The time that reading and storing take on another processor is not
/// part of it, nor is the time for files that the program writes.
#[derive(Args, Debug)]
pub struct Advise {
    #[command(flatten)]
    options: ObservationOptions,
    /// Predict checkpoints of memory and registers alone, which need no CRIU
    #[arg(long)]
    memory_only: bool,
    /// Process id of the program; its children come along
    pid: i32,
}

/// How a target is observed, and what is said of it.
#[derive(Args, Debug)]
pub struct ObservationOptions {
    #[command(flatten)]
    pub tracking: TrackingOptions,
    /// How long to observe; intervals that are much longer are less certain
    #[arg(long, value_name = "TIME", default_value = "6s", value_parser = text::parse_duration)]
    observe: Duration,
    /// The overhead that is acceptable: the shortest interval that keeps it is named
    #[arg(long, value_name = "PERCENT", default_value = "3%", value_parser = overhead)]
    overhead: Overhead,
    /// One JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Advice {
    mechanism: Mechanism,
    observed_us: u64,
    /// What the target loses by each event.
    stop_us: u64,
    first_write_ns: u64,
    copy_ns: u64,
    /// Measured: intervals, and the mean number of pages that were written in each.
    measured: Vec<Measurement>,
    forecasts: Vec<Row>,
    /// The acceptable overhead, and the shortest interval that keeps it; none if there is none.
    overhead: f64,
    interval_us: Option<u64>,
}

#[derive(Serialize)]
struct Measurement {
    interval_us: u64,
    pages: f64,
}

#[derive(Serialize)]
struct Row {
    interval_us: u64,
    overhead: f64,
    downtime_us: u64,
    dirty_pages: f64,
    cow_pages: f64,
    bytes_per_second: f64,
}

impl Advise {
    pub fn run(self) -> Outcome {
        self.options.tracking.check_process(self.memory_only)?;
        self.options.tracking.check_forecast()?;
        let failed = |error| Failure::checkpointing(self.pid, error);
        let saver: Arc<dyn StateSaver> = match self.memory_only {
            true => Arc::new(RegisterSaver),
            false => Arc::new(CriuSaver::find(DumpOptions::default()).map_err(Failure::no_checkpoints_here)?),
        };
        let process = attach::check(self.pid).map_err(failed)?;
        let mechanism = self.options.tracking.mechanism(Scope::Process);
        let mut target = ProcessTarget::attach(process, mechanism, saver).map_err(failed)?;
        target.track_shared_memory().map_err(failed)?;
        let observation = self.options.observe(&mut target).map_err(failed)?;
        let stop = stop_time(&mut std::thread::sleep, &mut || target.stop_time()).map_err(failed)?;
        self.options.advise(&observation, stop, &format!("process {}", self.pid), Scope::Process)
    }
}

impl ObservationOptions {
    /// Observes memory while its target runs.
    pub fn observe<M: TargetMemory>(&self, memory: &mut M) -> Result<Observation, M::Error> {
        Observation::take(memory, self.observe / SLICES, SLICES, &mut |time| {
            std::thread::sleep(time);
            true
        })
    }

    /// Predicts what checkpoints of the target `name` cost, of which a stop takes `stop`.
    pub fn advise(&self, observation: &Observation, stop: Duration, name: &str, scope: Scope) -> Outcome {
        let mechanism = self.tracking.mechanism(scope);
        if mechanism.compares_content() {
            let reason = format!("{mechanism} finds what was written in a freeze alone, so that nothing is observed");
            return Err(Failure::usage(reason).help("name another mechanism, or none"));
        }
        let curve = observation.curve().ok_or_else(|| Failure::usage("nothing was observed").help("--observe 6s"))?;
        let costs = costs(mechanism, scope)?.for_target(observation, stop);
        let model = CostModel { curve, costs, strategy: self.tracking.strategy() };
        let forecasts: Vec<Forecast> =
            INTERVALS_MS.map(|interval| model.forecast(Duration::from_millis(interval))).to_vec();
        let interval = model.interval_for(self.overhead);
        if self.json {
            let measured = observation.points().into_iter();
            return print_json(&Advice {
                mechanism,
                observed_us: us(observation.time()),
                stop_us: us(stop),
                first_write_ns: costs.first_write.as_nanos() as u64,
                copy_ns: costs.copy.as_nanos() as u64,
                measured: measured.map(|(at, pages)| Measurement { interval_us: us(at), pages }).collect(),
                forecasts: forecasts.iter().map(Row::of).collect(),
                overhead: self.overhead.share(),
                interval_us: interval.map(us),
            });
        }
        let observed = text::micros(us(observation.time()));
        print(&format!("{name}, observed for {observed}; {mechanism}\n\n{}\n", table(&forecasts)));
        let share = text::percent(self.overhead.share());
        print(&match interval {
            Some(interval) => format!("--every {} keeps the overhead below {share}\n", option(interval)),
            None => format!("no interval up to an hour keeps the overhead below {share}\n"),
        });
        Ok(ExitCode::SUCCESS)
    }
}

fn table(forecasts: &[Forecast]) -> Table {
    let mut table = Table::new([">every", ">overhead", ">downtime", ">pages", ">at most per second"]);
    for forecast in forecasts {
        table.row([
            option(forecast.interval),
            text::percent(forecast.overhead),
            text::micros(us(forecast.downtime)),
            text::count(forecast.dirty_pages as u64),
            text::bytes(forecast.bytes_per_second as u64),
        ]);
    }
    table
}

impl Row {
    fn of(forecast: &Forecast) -> Row {
        Row {
            interval_us: us(forecast.interval),
            overhead: forecast.overhead,
            downtime_us: us(forecast.downtime),
            dirty_pages: forecast.dirty_pages,
            cow_pages: forecast.cow_pages,
            bytes_per_second: forecast.bytes_per_second,
        }
    }
}

/// An interval as the option `--every` takes it, rounded up.
fn option(interval: Duration) -> String {
    match interval.as_millis() {
        ms if ms % 1000 == 0 => format!("{}s", ms / 1000),
        ms if ms >= 10_000 => format!("{}s", ms.div_ceil(1000)),
        _ => format!("{}ms", interval.as_nanos().div_ceil(1_000_000)),
    }
}

fn us(time: Duration) -> u64 {
    time.as_micros() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_is_one_that_the_option_takes() {
        for (us, expected) in [(100_000, "100ms"), (1_000_000, "1s"), (1_234_500, "1235ms"), (12_345_000, "13s")] {
            let written = option(Duration::from_micros(us));
            assert_eq!(written, expected);
            assert!(text::parse_duration(&written).expect("it is one") >= Duration::from_micros(us));
        }
    }
}
