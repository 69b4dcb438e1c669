//! `pagemark simulate list`: the intervals of a recorded run.

use clap::Args;
use pagemark::repository::Repository;
use pagemark_report::output::print;
use pagemark_report::table::Table;
use pagemark_report::text;
use pagemark_vm::instructions_of;
use serde::Serialize;

use crate::failure::{Failure, Outcome};
use crate::output::print_json;
use crate::reference::{Reference, no_checkpoints, read_checkpoint};
use crate::repository::RepositoryOptions;

/// List the intervals of a recorded machine, and their instructions
#[derive(Args, Debug)]
pub struct List {
    #[command(flatten)]
    repository: RepositoryOptions,
    /// One JSON document
    #[arg(long)]
    json: bool,
    /// The job of the recording
    job: String,
}

/// An interval between one checkpoint and the next.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct ListedInterval {
    /// The number of the checkpoint at its begin.
    pub from: u64,
    /// The number of the checkpoint at its end.
    pub to: u64,
    /// Instructions that were completed before it, since the machine's start.
    pub begin: u64,
    /// Instructions that were completed in it.
    pub instructions: u64,
    /// Microseconds that the machine needed for it, with its checkpoint.
    pub recorded_us: u64,
    /// Microseconds of them for which it was stopped for the checkpoint at the begin.
    pub stopped_us: u64,
}

/// The intervals of a job.
pub fn intervals(repository: &Repository, job: &str) -> Result<Vec<ListedInterval>, Failure> {
    let failed = |error| Failure::of(format!("cannot list the intervals of {job}"), error);
    let taken = repository.checkpoints(job).map_err(|error| Failure::of(format!("cannot list {job}"), error))?;
    if taken.is_empty() {
        return Err(no_checkpoints(repository, job));
    }
    let mut points = Vec::with_capacity(taken.len());
    for info in taken {
        let reference = Reference { job: job.to_owned(), sequence: Some(info.sequence) };
        let checkpoint = read_checkpoint(repository, &reference)?;
        let instructions = instructions_of(&checkpoint).map_err(failed)?;
        let stopped_us = checkpoint.manifest.cost.downtime_us;
        points.push((info, instructions, stopped_us));
    }
    let pairs = points.iter().zip(points.iter().skip(1));
    let intervals = pairs.map(|((from, begin, stopped_us), (to, end, _))| ListedInterval {
        from: from.sequence,
        to: to.sequence,
        begin: *begin,
        instructions: end.saturating_sub(*begin),
        recorded_us: to.taken_unix_us.saturating_sub(from.taken_unix_us),
        stopped_us: *stopped_us,
    });
    Ok(intervals.collect())
}

impl List {
    pub fn run(self) -> Outcome {
        let repository = self.repository.open()?;
        let intervals = intervals(&repository, &self.job)?;
        if self.json {
            return print_json(&intervals);
        }
        let mut table = Table::new(["FROM", "TO", "BEGINS AT", "INSTRUCTIONS", "RECORDED IN"]);
        for interval in &intervals {
            table.row([
                format!("{}@{}", self.job, interval.from),
                format!("{}@{}", self.job, interval.to),
                text::count(interval.begin),
                text::count(interval.instructions),
                text::micros(interval.recorded_us),
            ]);
        }
        print(&table.to_string());
        Ok(std::process::ExitCode::SUCCESS)
    }
}
