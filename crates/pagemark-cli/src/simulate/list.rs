//! `pagemark simulate list`: the intervals of a recorded run.

use clap::Args;
use pagemark::repository::Repository;
use pagemark_replay::{RecordedInterval, RecordedPoint};
use pagemark_report::output::print;
use pagemark_report::table::Table;
use pagemark_report::text;

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

/// The intervals of a job.
pub fn intervals(repository: &Repository, job: &str) -> Result<Vec<RecordedInterval>, Failure> {
    let failed = |error| Failure::of(format!("cannot list the intervals of {job}"), error);
    let taken = repository.checkpoints(job).map_err(|error| Failure::of(format!("cannot list {job}"), error))?;
    if taken.is_empty() {
        return Err(no_checkpoints(repository, job));
    }
    let mut points = Vec::with_capacity(taken.len());
    for info in taken {
        let reference = Reference { job: job.to_owned(), sequence: Some(info.sequence) };
        let checkpoint = read_checkpoint(repository, &reference)?;
        points.push(RecordedPoint::of(&checkpoint).map_err(failed)?);
    }
    Ok(RecordedInterval::between(&points))
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
