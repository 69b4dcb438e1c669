//! `pagemark prune`: removes old checkpoints and gives their space back.

use std::process::ExitCode;

use clap::Args;

use crate::failure::{Failure, Outcome};
use crate::live::Progress;
use crate::output::{print, print_json};
use crate::place::Place;
use crate::take::Keep;
use crate::text;

/// Remove old checkpoints and give their space back
///
/// What --keep-last or --keep-every names stays; the rest goes.
#[derive(Args, Debug)]
pub struct Prune {
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    keep: Keep,
    /// One JSON document
    #[arg(long)]
    json: bool,
    /// Only this job's checkpoints; without it, every job's
    job: Option<String>,
}

impl Prune {
    pub fn run(self) -> Outcome {
        let policy = self.keep.policy().ok_or_else(|| {
            Failure::usage("it is not said what to keep")
                .help("for example `pagemark prune --keep-last 10`, or `--keep-every 1h`, or both")
        })?;
        let repository = self.place.open()?;
        let mut progress = Progress::new("pruning");
        let report = repository
            .prune(&policy, self.job.as_deref(), &mut |step| {
                progress.at(step.done_bytes, step.total_bytes, text::bytes)
            })
            .map_err(|error| Failure::new(format!("cannot prune {}", repository.path().display()), error))?;
        drop(progress);
        if self.json {
            return print_json(&report);
        }
        for (job, sequence) in &report.removed {
            print(&format!("removed {job}@{sequence}\n"));
        }
        print(&format!(
            "{} checkpoints removed, {} given back\n",
            report.removed.len(),
            text::bytes(report.freed_bytes)
        ));
        Ok(ExitCode::SUCCESS)
    }
}
