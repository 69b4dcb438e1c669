//! `pagemark verify`: rereads the repository and lists damage.

use std::process::ExitCode;

use clap::Args;
use pagemark_report::escape::printable;
use pagemark_report::text;

use crate::failure::{Failure, Outcome};
use crate::live::Progress;
use crate::output::{print, print_json};
use crate::repository::RepositoryOptions;

/// Reread the whole repository and list what is damaged
///
/// Exits with 1 if something is.
#[derive(Args, Debug)]
pub struct Verify {
    #[command(flatten)]
    repository: RepositoryOptions,
    /// One JSON document
    #[arg(long)]
    json: bool,
}

impl Verify {
    pub fn run(self) -> Outcome {
        let repository = self.repository.open()?;
        let mut progress = Progress::new("verifying");
        let report = repository
            .verify(&mut |step| progress.at(step.done_bytes, step.total_bytes, text::bytes))
            .map_err(|error| {
                Failure::new(format!("cannot verify {}", repository.path().display()), error)
                    .help("it must be readable as a whole: run pagemark as the user that owns it")
            })?;
        drop(progress);
        let status = if report.damaged.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
        if self.json {
            print_json(&report)?;
            return Ok(status);
        }
        // The report has names of files, which may contain control characters.
        report.to_string().lines().for_each(|line| print(&(printable(line) + "\n")));
        Ok(status)
    }
}
