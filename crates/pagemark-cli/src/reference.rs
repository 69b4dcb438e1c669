//! Names of jobs and checkpoints on the command line: `JOB` and `JOB@N`.

use std::str::FromStr;

use pagemark::repository::{Checkpoint, Repository};
use pagemark_report::escape::printable;
use pagemark_report::message;

use crate::failure::Failure;

/// A job, or one checkpoint of it: `redis`, `redis@12`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reference {
    /// Name of the job.
    pub job: String,
    /// Number of the checkpoint; None for the newest.
    pub sequence: Option<u64>,
}

impl FromStr for Reference {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (job, sequence) = match text.rsplit_once('@') {
            Some((job, number)) => {
                let number =
                    number.parse().map_err(|_| format!("{number:?} is no checkpoint's number; write JOB@N"))?;
                (job, Some(number))
            }
            None => (text, None),
        };
        if job.is_empty() {
            Err("the job's name is missing".into())
        } else {
            Ok(Reference { job: job.into(), sequence })
        }
    }
}

/// The only job of the repository, for a command line that names none.
///
/// # Errors
/// The repository has no job, or several.
pub fn only_job(repository: &Repository) -> Result<String, Failure> {
    let mut jobs = repository
        .jobs()
        .map_err(|error| Failure::new(format!("cannot list the jobs in {}", repository.path().display()), error))?;
    match jobs.len() {
        1 => Ok(jobs.remove(0)),
        0 => Err(Failure::plain(format!("{} holds no checkpoints", repository.path().display()))
            .help("take one first: `pagemark run -- PROGRAM` or `pagemark checkpoint PID`")),
        _ => Err(Failure::usage("several jobs have checkpoints here").help(format!("name one of {}", jobs.join(", ")))),
    }
}

/// Reads the checkpoint that `reference` names.
pub fn read_checkpoint(repository: &Repository, reference: &Reference) -> Result<Checkpoint, Failure> {
    let sequence = match reference.sequence {
        Some(sequence) => sequence,
        None => newest_sequence(repository, &reference.job)?,
    };
    repository.read(&reference.job, sequence).map_err(|error| {
        Failure::new(format!("cannot read checkpoint {}@{sequence}", reference.job), error)
            .help(format!("`pagemark log {}` lists what there is", reference.job))
    })
}

/// Number of the newest checkpoint of `job` whose record can be read. A newer one that cannot be
/// read is reported.
fn newest_sequence(repository: &Repository, job: &str) -> Result<u64, Failure> {
    let records = repository
        .records(job)
        .map_err(|error| Failure::new(format!("cannot list the checkpoints of {job}"), error))?;
    let mut unreadable = Vec::new();
    for (sequence, record) in records.into_iter().rev() {
        match record {
            Ok(_) => {
                for line in unreadable {
                    message!("pagemark: {line}; {job}@{sequence} is taken instead");
                }
                return Ok(sequence);
            }
            Err(error) => unreadable.push(printable(&format!("cannot read {job}@{sequence}: {error}"))),
        }
    }
    match unreadable.pop() {
        Some(line) => Err(Failure::plain(line).help("`pagemark verify` examines the whole repository")),
        None => Err(no_checkpoints(repository, job)),
    }
}

/// The failure that `job` has no checkpoints.
pub fn no_checkpoints(repository: &Repository, job: &str) -> Failure {
    let jobs = repository.jobs().unwrap_or_default();
    let failure = Failure::plain(format!("job {job} has no checkpoints in {}", repository.path().display()));
    if jobs.is_empty() {
        failure.help("take one first: `pagemark run -- PROGRAM` or `pagemark checkpoint PID`")
    } else {
        failure.help(format!("these jobs have some: {}", jobs.join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_a_job_and_maybe_a_number() {
        assert_eq!("redis".parse(), Ok(Reference { job: "redis".into(), sequence: None }));
        assert_eq!("redis@12".parse(), Ok(Reference { job: "redis".into(), sequence: Some(12) }));
        for wrong in ["", "@1", "redis@", "redis@x", "redis@-1"] {
            assert!(wrong.parse::<Reference>().is_err(), "{wrong}");
        }
    }
}
