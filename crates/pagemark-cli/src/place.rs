//! Where checkpoints are: the repository, and `JOB@N`.

use std::env;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Args;
use pagemark::repository::{Checkpoint, Repository};

use crate::failure::Failure;

/// Options of every command that reads or writes a repository.
#[derive(Args, Debug)]
pub struct Place {
    /// Directory of the repository [default: $PAGEMARK_REPO, else ~/.local/share/pagemark]
    #[arg(long, value_name = "DIR", global = true)]
    pub repo: Option<PathBuf>,
}

impl Place {
    /// The directory that is meant.
    pub fn path(&self) -> Result<PathBuf, Failure> {
        let absolute = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        self.repo
            .clone()
            .or_else(|| absolute("PAGEMARK_REPO"))
            .or_else(|| absolute("XDG_DATA_HOME").map(|data| data.join("pagemark")))
            .or_else(|| absolute("HOME").map(|home| home.join(".local/share/pagemark")))
            .ok_or_else(|| {
                Failure::plain("it is not known where the repository is: HOME is not set")
                    .help("name it with --repo DIR or PAGEMARK_REPO")
            })
    }

    /// The repository, which must exist.
    pub fn open(&self) -> Result<Repository, Failure> {
        let path = self.path()?;
        if !path.exists() {
            return Err(Failure::plain(format!("there is no repository at {}", path.display())).help(
                "take a checkpoint first (`pagemark run -- PROGRAM`), or name another with --repo DIR or PAGEMARK_REPO",
            ));
        }
        Repository::open(&path).map_err(|error| opening(&path, error))
    }

    /// The repository, made if it does not exist.
    pub fn open_or_create(&self) -> Result<Repository, Failure> {
        let path = self.path()?;
        Repository::open_or_create(&path).map_err(|error| opening(&path, error))
    }
}

fn opening(path: &Path, error: impl fmt::Display) -> Failure {
    Failure::new(format!("cannot open the repository at {}", path.display()), error)
        .help("another place can be named with --repo DIR or PAGEMARK_REPO")
}

/// A job, or one checkpoint of it: `redis`, `redis@12`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reference {
    /// The job.
    pub job: String,
    /// The checkpoint's number; the newest if None.
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

/// The job that is meant where none is named: the only one.
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
pub fn read(repository: &Repository, reference: &Reference) -> Result<Checkpoint, Failure> {
    let sequence = match reference.sequence {
        Some(sequence) => sequence,
        None => newest(repository, &reference.job)?,
    };
    repository.read(&reference.job, sequence).map_err(|error| {
        Failure::new(format!("cannot read checkpoint {}@{sequence}", reference.job), error)
            .help(format!("`pagemark log {}` lists what there is", reference.job))
    })
}

/// The number of the newest checkpoint of `job`.
fn newest(repository: &Repository, job: &str) -> Result<u64, Failure> {
    let checkpoints = repository
        .checkpoints(job)
        .map_err(|error| Failure::new(format!("cannot list the checkpoints of {job}"), error))?;
    checkpoints.last().map(|checkpoint| checkpoint.sequence).ok_or_else(|| no_checkpoints(repository, job))
}

/// `job` has none.
pub fn no_checkpoints(repository: &Repository, job: &str) -> Failure {
    let jobs = repository.jobs().unwrap_or_default();
    let failure = Failure::plain(format!("job {job} has no checkpoints in {}", repository.path().display()));
    if jobs.is_empty() {
        failure.help("take one first: `pagemark run -- PROGRAM` or `pagemark checkpoint PID`")
    } else {
        failure.help(format!("these jobs have some: {}", jobs.join(", ")))
    }
}

/// A job's name made of a program's: what may not stand in one becomes `-`.
pub fn job_name(program: &Path) -> String {
    let name = program.file_name().unwrap_or(program.as_os_str()).to_string_lossy();
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let name: String = name.chars().map(|c| if allowed(c) { c } else { '-' }).take(64).collect();
    match name.trim_start_matches('.') {
        "" => "job".into(),
        name => name.into(),
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

    #[test]
    fn a_job_is_called_as_its_program() {
        assert_eq!(job_name(Path::new("/usr/bin/redis-server")), "redis-server");
        assert_eq!(job_name(Path::new("./.hidden job é")), "hidden-job--");
        assert_eq!(job_name(Path::new("/")), "-");
        assert_eq!(job_name(Path::new("..")), "job");
    }
}
