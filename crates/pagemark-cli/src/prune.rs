//! `pagemark prune`: removes old checkpoints and frees their space.

use std::collections::BTreeMap;
use std::process::ExitCode;

use clap::Args;
use pagemark_report::message;
use pagemark_report::text;

use crate::failure::{Failure, Outcome};
use crate::live::Progress;
use crate::options::RetentionOptions;
use crate::output::{print, print_json};
use crate::repository::RepositoryOptions;

/// Remove old checkpoints and give their space back
///
/// Checkpoints that neither --keep-last nor --keep-every selects are removed.
#[derive(Args, Debug)]
pub struct Prune {
    #[command(flatten)]
    repository: RepositoryOptions,
    #[command(flatten)]
    retention: RetentionOptions,
    /// One JSON document
    #[arg(long)]
    json: bool,
    /// Only this job's checkpoints; without it, every job's
    job: Option<String>,
}

impl Prune {
    pub fn run(self) -> Outcome {
        let retention = self.retention.retention().ok_or_else(|| {
            Failure::usage("no number and no period of checkpoints to keep is given")
                .help("for example `pagemark prune --keep-last 10`, or `--keep-every 1h`, or both")
        })?;
        let repository = self.repository.open()?;
        let mut progress = Progress::new("pruning");
        let report = repository
            .prune(&retention, self.job.as_deref(), &mut |step| {
                progress.at(step.done_bytes, step.total_bytes, text::bytes)
            })
            .map_err(|error| {
                Failure::new(format!("cannot prune {}", repository.path().display()), error)
                    .help("what was not removed stays as it was; `pagemark verify` reports whether anything is damaged")
            })?;
        drop(progress);
        if self.json {
            return print_json(&report);
        }
        let mut jobs: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
        for (job, sequence) in &report.removed {
            jobs.entry(job).or_default().push(*sequence);
        }
        for (job, sequences) in jobs {
            print(&format!("{job}: removed {}\n", ranges(sequences)));
        }
        for (job, sequence) in &report.in_use {
            print(&format!("{job}@{sequence} stays: it is being read\n"));
        }
        if !report.unreadable.is_empty() {
            message!("pagemark: {} pieces of content are missing or damaged", report.unreadable.len());
            message!("help: `pagemark verify` lists the checkpoints that have it");
        }
        print(&format!(
            "{} checkpoints removed, {} given back\n",
            report.removed.len(),
            text::bytes(report.freed_bytes)
        ));
        Ok(ExitCode::SUCCESS)
    }
}

/// `@1, @3–@7`.
fn ranges(mut sequences: Vec<u64>) -> String {
    sequences.sort_unstable();
    let runs = sequences.chunk_by(|before, after| before + 1 == *after);
    let texts: Vec<_> = runs
        .filter_map(|run| match run {
            [] => None,
            [only] => Some(format!("@{only}")),
            [first, .., last] => Some(format!("@{first}–@{last}")),
        })
        .collect();
    texts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_numbers_are_joined() {
        assert_eq!(ranges(vec![7, 1, 3, 6, 5, 4]), "@1, @3–@7");
        assert_eq!(ranges(vec![2]), "@2");
        assert_eq!(ranges(vec![]), "");
    }
}
