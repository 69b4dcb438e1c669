//! `pagemark simulate merge`: the results of all intervals of a run as one.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use pagemark_report::escape::printable;
use pagemark_report::output::print;
use pagemark_report::text;
use pagemark_simulate::Merged;
use pagemark_vm::SimulatedInterval;
use serde::Serialize;

use crate::failure::{Failure, Outcome};
use crate::output::print_json;
use crate::repository::RepositoryOptions;
use crate::simulate::kept::ResultsDirectory;
use crate::simulate::list::{ListedInterval, intervals};
use crate::simulate::observer::ObserverOptions;

/// As many counts are printed without --json.
const PRINTED_COUNTS: usize = 100;

/// Merge the kept results of all intervals of a recorded machine
///
/// Sums of mix, hot and trace are those of one long simulation. Sums of cache are not, and say by
/// how much they differ at most. If intervals were not simulated yet they are named, and the exit
/// status is 1.
#[derive(Args, Debug)]
pub struct Merge {
    #[command(flatten)]
    pub repository: RepositoryOptions,
    #[command(flatten)]
    pub observer: ObserverOptions,
    /// The directory of the results [default: JOB-results]
    #[arg(long, value_name = "DIR")]
    pub results: Option<PathBuf>,
    /// One JSON document
    #[arg(long)]
    pub json: bool,
    /// The job of the recording
    pub job: String,
}

/// The kept results of a run.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct MergedRun {
    /// The job of the recording.
    pub job: String,
    /// What observed the machine.
    pub plugin: String,
    /// How many intervals have a result.
    pub intervals: usize,
    /// Those that have none.
    pub missing: Vec<ListedInterval>,
    /// Instructions that were completed in the intervals that have a result.
    pub instructions: u64,
    /// Instructions that were begun.
    pub begun: u64,
    /// Microseconds of all simulations: starts, runs and comparisons.
    pub simulated_us: u64,
    /// What Pagemark's simulator found, and its error. None for a plugin, which writes its own
    /// results.
    #[serde(flatten)]
    pub merged: Option<Merged>,
}

/// The intervals of a recording, each with its result if it has one.
pub fn kept_intervals(
    listed: &[ListedInterval],
    directory: &ResultsDirectory,
) -> Result<Vec<Option<SimulatedInterval>>, Failure> {
    listed.iter().map(|interval| directory.find(interval.from, interval.to, interval.instructions)).collect()
}

/// A failure that names the intervals that have no result. None if all have one.
pub fn missing(
    job: &str,
    listed: &[ListedInterval],
    kept: &[Option<SimulatedInterval>],
    directory: &ResultsDirectory,
) -> Option<Failure> {
    let missing = listed.iter().zip(kept).filter(|(_, kept)| kept.is_none());
    let missing: Vec<String> = missing.map(|(interval, _)| format!("{job}@{}", interval.from)).collect();
    let first = missing.get(..missing.len().min(3))?;
    if first.is_empty() {
        return None;
    }
    let text = format!(
        "{} of {} intervals have no result in {}: those from {}{}",
        missing.len(),
        listed.len(),
        directory.path().display(),
        first.join(", "),
        if missing.len() > first.len() { " and others" } else { "" }
    );
    Some(Failure::plain(text).help("`pagemark simulate run` simulates what is missing"))
}

/// Microseconds that an interval took.
pub fn taken_us(interval: &SimulatedInterval) -> u64 {
    let parts = [interval.start_us, interval.warm_up_us, interval.run_us, interval.compare_us];
    parts.into_iter().fold(0, u64::saturating_add)
}

impl MergedRun {
    fn new(
        job: &str,
        plugin: String,
        listed: &[ListedInterval],
        kept: &[Option<SimulatedInterval>],
    ) -> Result<MergedRun, Failure> {
        let done = || kept.iter().flatten();
        let sum = |of: fn(&SimulatedInterval) -> u64| done().map(of).fold(0, u64::saturating_add);
        let merged = Merged::of(done().filter_map(|interval| interval.results.as_ref()))
            .map_err(|error| Failure::new(format!("cannot merge the results of {job}"), error))?;
        let missing = listed.iter().zip(kept).filter(|(_, kept)| kept.is_none());
        Ok(MergedRun {
            job: job.to_owned(),
            plugin,
            intervals: done().count(),
            missing: missing.map(|(interval, _)| *interval).collect(),
            instructions: sum(|interval| interval.instructions),
            begun: sum(|interval| interval.begun),
            simulated_us: sum(taken_us),
            merged,
        })
    }

    fn print(&self) {
        print(&format!(
            "{}: {} of {} intervals by {}, {} instructions, simulated in {} of all processors\n",
            self.job,
            self.intervals,
            self.intervals + self.missing.len(),
            self.plugin,
            text::count(self.instructions),
            text::micros(self.simulated_us)
        ));
        let Some(merged) = &self.merged else { return };
        let counts = &merged.results.counts;
        if counts.len() > PRINTED_COUNTS {
            print(&format!("{} counts: --json prints them\n", text::count(counts.len() as u64)));
            return;
        }
        for (name, &count) in counts {
            let bound = |bounds: &BTreeMap<String, u64>, which| {
                let error = *bounds.get(name)?;
                Some(format!("at most {error} too {which}, {}", text::percent(error as f64 / count.max(1) as f64)))
            };
            let bounds = [bound(&merged.at_most_too_many, "many"), bound(&merged.at_most_too_few, "few")];
            let bounds: Vec<String> = bounds.into_iter().flatten().collect();
            let bounds = if bounds.is_empty() { String::new() } else { format!(" ({})", bounds.join("; ")) };
            print(&format!("{}: {count}{bounds}\n", printable(name)));
        }
    }
}

impl Merge {
    pub fn run(self) -> Outcome {
        let chosen = self.observer.chosen()?;
        let repository = self.repository.open()?;
        let listed = intervals(&repository, &self.job)?;
        let directory = ResultsDirectory::new(self.results.as_deref(), &self.job, &chosen);
        let kept = kept_intervals(&listed, &directory)?;
        let run = MergedRun::new(&self.job, chosen.argument(), &listed, &kept)?;
        match self.json {
            true => print_json(&run).map(drop)?,
            false => run.print(),
        }
        missing(&self.job, &listed, &kept, &directory).map_or(Ok(ExitCode::SUCCESS), Err)
    }
}
