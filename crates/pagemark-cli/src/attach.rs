//! `pagemark attach`: keeps a running program checkpointed. `pagemark checkpoint`: once.

use std::fs;
use std::path::Path;
use std::process::ExitCode;
use std::sync::mpsc;

use clap::Args;
use nix::unistd::Pid;
use pagemark_process::job::Job;

use crate::failure::{Failure, Outcome};
use crate::place::{Place, job_name};
use crate::report::{self, Report, Taken};
use crate::signals::{Event, Signals, announce_exit};
use crate::take::{How, Series, When, attach_failure, last_word};

/// Keep a running program checkpointed
///
/// Ctrl-C ends Pagemark; the program runs on, untouched.
#[derive(Args, Debug)]
pub struct Attach {
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    how: How,
    #[command(flatten)]
    when: When,
    /// A line of JSON for each checkpoint
    #[arg(long)]
    json: bool,
    /// Process id of the program; its children come along
    pid: i32,
}

/// Take one checkpoint of a running program
#[derive(Args, Debug)]
pub struct Checkpoint {
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    how: How,
    /// One JSON document
    #[arg(long)]
    json: bool,
    /// Process id of the program; its children come along
    pid: i32,
}

impl Attach {
    pub fn run(self) -> Outcome {
        let job = job_of(&self.how, self.pid)?;
        let repository = self.place.open_or_create()?;
        let options = self.how.options(job.clone());
        let signals = Signals::hold_for_stop()?;
        // Attach once now, so that what can't be attached to is said at once and ends with a status.
        let attached = Job::attach(self.pid, repository.clone(), options.clone())
            .map_err(|error| attach_failure(self.pid, error))?;
        attached.detach();

        let (sender, events) = mpsc::channel();
        let pid = Pid::from_raw(self.pid);
        announce_exit(pid, sender.clone())?;
        signals.stop_at(sender)?;
        let mut report = Report::choose(self.when.quiet, self.json, report::stdout());
        let series = Series {
            pid,
            repository,
            options,
            every: self.when.every,
            policy: self.when.keep.policy(),
            report: &mut report,
        };
        let (end, done) = series.take(&events);
        let how_it_is = if end == Event::Exited { "has exited" } else { "runs on" };
        report.say(&format!("process {pid} {how_it_is}; {}", last_word(&job, &done)));
        Ok(ExitCode::SUCCESS)
    }
}

impl Checkpoint {
    pub fn run(self) -> Outcome {
        let job = job_of(&self.how, self.pid)?;
        let repository = self.place.open_or_create()?;
        let mut attached = Job::attach(self.pid, repository, self.how.options(job.clone()))
            .map_err(|error| attach_failure(self.pid, error))?;
        let taken = attached.checkpoint().map_err(|error| attach_failure(self.pid, error));
        attached.detach();
        let taken = taken?;
        let mut report = if self.json { Report::Json { out: report::stdout() } } else { Report::Plain };
        report.taken(&Taken {
            job: &job,
            sequence: taken.sequence,
            taken_unix_us: taken.taken_unix_us,
            cost: taken.cost,
        });
        Ok(ExitCode::SUCCESS)
    }
}

/// The job's name for a running process: the one that was asked for, or the name that the process has.
fn job_of(how: &How, pid: i32) -> Result<String, Failure> {
    let missing = || {
        Failure::plain(format!("there is no process {pid}"))
            .help("`ps -e` lists the processes; the first column is the id")
    };
    if pid < 1 {
        return Err(missing());
    }
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).map_err(|_| missing())?;
    Ok(how.job.clone().unwrap_or_else(|| job_name(Path::new(name.trim_end()))))
}
