//! `pagemark attach`: keeps a running program checkpointed. `pagemark checkpoint`: once.

use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, mpsc};

use clap::Args;
use nix::unistd::Pid;
use pagemark::job::End;
use pagemark::sys::proc::Stat;
use pagemark::track::Scope;
use pagemark::{Job, JobOptions};
use pagemark_process::files::FileWatch;
use pagemark_process::target::ProcessTarget;

use crate::failure::{Failure, Outcome, PROCESSES};
use crate::options::{CaptureOptions, ScheduleOptions, WatchOptions};
use crate::reference::job_name;
use crate::report::{self, Report, summary};
use crate::repository::RepositoryOptions;
use crate::signals::{Signals, announce_exit};

/// Keep a running program checkpointed
///
/// Ctrl-C ends Pagemark; the program keeps running, untouched.
#[derive(Args, Debug)]
pub struct Attach {
    #[command(flatten)]
    repository: RepositoryOptions,
    #[command(flatten)]
    capture: CaptureOptions,
    #[command(flatten)]
    watch: WatchOptions,
    #[command(flatten)]
    schedule: ScheduleOptions,
    /// A line of JSON for each checkpoint
    #[arg(long)]
    json: bool,
    /// Process id of the program; its children come along
    pid: i32,
}

/// Take one checkpoint of a running program
///
/// The files that the program has open for writing belong to the checkpoint, and those in `--data`
/// directories. Files that it has written and closed are not known here: `run` and `attach` watch
/// them.
#[derive(Args, Debug)]
pub struct Checkpoint {
    #[command(flatten)]
    repository: RepositoryOptions,
    #[command(flatten)]
    capture: CaptureOptions,
    /// One JSON document
    #[arg(long)]
    json: bool,
    /// Process id of the program; its children come along
    pid: i32,
}

impl Attach {
    pub fn run(self) -> Outcome {
        self.capture.memory.tracking.check_process()?;
        let policy = self.schedule.policy(&self.capture.memory, Scope::Process)?;
        let name = job_name_of(&self.capture, self.pid)?;
        let repository = self.repository.open_or_create(&self.capture.memory)?;
        self.capture.check_data(repository.path())?;
        let signals = Signals::hold_for_stop()?;
        let mut report = Report::choose(self.schedule.quiet, self.json, report::stdout(), None);
        let watch = report.watch(self.capture.watch_files(&self.watch), self.pid);
        let target = attach(&self.capture, self.pid, watch.as_ref())?;
        let job = Job::new(target, repository, JobOptions { name: name.clone(), policy });

        let (stop, stopped) = mpsc::channel();
        announce_exit(Pid::from_raw(self.pid), stop.clone())?;
        signals.stop_at(stop)?;
        let done = job.run(&stopped, &mut |event| {
            report.event(&name, self.pid, event);
            report.notices(watch.as_deref());
        });
        let state = if done.end == End::TargetGone { "has exited" } else { "keeps running" };
        report.say(&format!("process {} {state}; {}", self.pid, summary(&name, &done)));
        Ok(ExitCode::SUCCESS)
    }
}

impl Checkpoint {
    pub fn run(self) -> Outcome {
        self.capture.memory.tracking.check_process()?;
        let name = job_name_of(&self.capture, self.pid)?;
        let repository = self.repository.open_or_create(&self.capture.memory)?;
        self.capture.check_data(repository.path())?;
        let target = attach(&self.capture, self.pid, None)?;
        let mut job = Job::new(target, repository, self.capture.memory.job_options(name.clone()));
        let taken = job.checkpoint().map_err(|error| Failure::checkpointing(self.pid, error))?;
        job.detach();
        let mut report = if self.json { Report::Json { out: report::stdout() } } else { Report::Plain };
        report.taken(&name, &taken);
        Ok(ExitCode::SUCCESS)
    }
}

fn attach(capture: &CaptureOptions, pid: i32, watch: Option<&Arc<FileWatch>>) -> Result<ProcessTarget, Failure> {
    let saver = capture.saver().map_err(|error| Failure::checkpointing(pid, error))?;
    capture.attach(pid, saver, watch).map_err(|error| Failure::checkpointing(pid, error))
}

/// The job's name for a running process: the name that the options give, or the name of the
/// process.
fn job_name_of(capture: &CaptureOptions, pid: i32) -> Result<String, Failure> {
    let missing = || Failure::plain(format!("there is no process {pid}")).help(PROCESSES);
    if pid < 1 {
        return Err(missing());
    }
    let name = Stat::read(pid).map_err(|_| missing())?.command;
    Ok(capture.memory.job.clone().unwrap_or_else(|| job_name(Path::new(&name))))
}
