//! `pagemark log`: what checkpoints there are.

use std::process::ExitCode;

use clap::Args;
use pagemark::repository::Repository;
use serde::Serialize;

use crate::failure::{Failure, Outcome};
use crate::output::{print, print_json};
use crate::place::{Place, Reference, no_checkpoints, read};
use crate::report::Taken;
use crate::text::{self, Table};

/// List the jobs, or the checkpoints of one
#[derive(Args, Debug)]
pub struct Log {
    #[command(flatten)]
    place: Place,
    /// One JSON document
    #[arg(long)]
    json: bool,
    /// The job whose checkpoints to list
    job: Option<String>,
}

/// A job, in the list of them.
#[derive(Serialize)]
struct JobLine {
    job: String,
    checkpoints: u64,
    newest: u64,
    newest_taken_unix_us: u64,
    written_bytes: u64,
}

impl Log {
    pub fn run(self) -> Outcome {
        let repository = self.place.open()?;
        match &self.job {
            Some(job) => self.checkpoints(&repository, job),
            None => self.jobs(&repository),
        }
    }

    fn jobs(&self, repository: &Repository) -> Outcome {
        let failed = |error| Failure::new(format!("cannot list the jobs in {}", repository.path().display()), error);
        let mut lines = Vec::new();
        for job in repository.jobs().map_err(failed)? {
            let checkpoints = repository.checkpoints(&job).map_err(failed)?;
            let Some(newest) = checkpoints.last() else { continue };
            lines.push(JobLine {
                checkpoints: checkpoints.len() as u64,
                newest: newest.sequence,
                newest_taken_unix_us: newest.taken_unix_us,
                written_bytes: checkpoints.iter().map(|checkpoint| checkpoint.written_bytes).sum(),
                job,
            });
        }
        if self.json {
            return print_json(&lines);
        }
        let mut table = Table::new(&["job", ">checkpoints", ">newest", "taken", ">written"]);
        for line in &lines {
            table.row([
                line.job.clone(),
                text::count(line.checkpoints),
                format!("@{}", line.newest),
                format!("{} ({})", text::moment(line.newest_taken_unix_us), text::ago(line.newest_taken_unix_us)),
                text::bytes(line.written_bytes),
            ]);
        }
        print(&table.to_string());
        Ok(ExitCode::SUCCESS)
    }

    fn checkpoints(&self, repository: &Repository, job: &str) -> Outcome {
        let checkpoints = repository
            .checkpoints(job)
            .map_err(|error| Failure::new(format!("cannot list the checkpoints of {job}"), error))?;
        if checkpoints.is_empty() {
            return Err(no_checkpoints(repository, job));
        }
        let mut lines = Vec::new();
        for checkpoint in &checkpoints {
            let read = read(repository, &Reference { job: job.to_owned(), sequence: Some(checkpoint.sequence) })?;
            lines.push(Taken {
                job,
                sequence: checkpoint.sequence,
                taken_unix_us: checkpoint.taken_unix_us,
                cost: read.manifest.cost,
            });
        }
        if self.json {
            return print_json(&lines);
        }
        let mut table =
            Table::new(&["checkpoint", "taken", ">dirty pages", ">written", ">frozen", ">memory", ">state", ">rounds"]);
        for Taken { job, sequence, taken_unix_us, cost } in &lines {
            table.row([
                format!("{job}@{sequence}"),
                text::moment(*taken_unix_us),
                text::count(cost.dirty_pages),
                text::bytes(cost.written_bytes),
                text::micros(cost.downtime_us),
                text::micros(cost.memory_downtime_us),
                text::micros(cost.state_downtime_us),
                cost.rounds.to_string(),
            ]);
        }
        print(&table.to_string());
        Ok(ExitCode::SUCCESS)
    }
}
