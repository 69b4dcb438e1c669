//! `pagemark simulate merge`: the results of all intervals of a run as one.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use pagemark_replay::{MergedRun, Plan, ResultsDirectory};
use pagemark_report::escape::printable;
use pagemark_report::output::print;
use pagemark_report::text;

use crate::failure::{Failure, Outcome};
use crate::output::print_json;
use crate::repository::RepositoryOptions;
use crate::simulate::observer::ObserverOptions;
use crate::simulate::plan::plan;

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

/// A failure that names the intervals that have no result. None if all have one.
pub fn missing(job: &str, plan: &Plan, directory: &ResultsDirectory) -> Option<Failure> {
    let missing: Vec<String> = plan.missing().iter().map(|interval| format!("{job}@{}", interval.from)).collect();
    let first = missing.get(..missing.len().min(3))?;
    if first.is_empty() {
        return None;
    }
    let text = format!(
        "{} of {} intervals have no result in {}: those from {}{}",
        missing.len(),
        plan.count(),
        directory.path().display(),
        first.join(", "),
        if missing.len() > first.len() { " and others" } else { "" }
    );
    Some(Failure::plain(text).help("`pagemark simulate run` simulates what is missing"))
}

/// Prints the sums.
fn print_run(run: &MergedRun) {
    print(&format!(
        "{}: {} of {} intervals by {}, {} instructions, simulated in {} of all processors\n",
        run.job,
        run.intervals,
        run.intervals + run.missing.len(),
        run.plugin,
        text::count(run.instructions),
        text::micros(run.simulated_us)
    ));
    let Some(merged) = &run.merged else { return };
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

impl Merge {
    pub fn run(self) -> Outcome {
        let choice = self.observer.choice()?;
        let repository = self.repository.open()?;
        let directory = ResultsDirectory::new(self.results.as_deref(), &self.job, &choice);
        let plan = plan(&repository, &self.job, &directory)?;
        let run = MergedRun::new(&self.job, choice.argument(), &plan)
            .map_err(|error| Failure::new(format!("cannot merge the results of {}", self.job), error))?;
        match self.json {
            true => print_json(&run).map(drop)?,
            false => print_run(&run),
        }
        missing(&self.job, &plan, &directory).map_or(Ok(ExitCode::SUCCESS), Err)
    }
}
