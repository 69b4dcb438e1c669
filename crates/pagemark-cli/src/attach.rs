//! `pagemark attach`: keeps a running program checkpointed. `pagemark checkpoint`: once.

use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, mpsc};

use clap::Args;
use pagemark::job::End;
use pagemark::repository::Repository;
use pagemark::track::Scope;
use pagemark::{Job, JobOptions};
use pagemark_linux::proc::{Process, Stat};
use pagemark_process::files::FileWatch;
use pagemark_process::saver::StateSaver;
use pagemark_process::target::ProcessTarget;

use crate::failure::{Failure, Outcome, PROCESSES};
use crate::job::{self, OwnJob};
use crate::options::{CaptureOptions, ScheduleOptions, WatchOptions};
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
        self.capture.check()?;
        let policy = self.schedule.policy(&self.capture.memory, Scope::Process)?;
        let (process, name) = find(self.pid)?;
        let repository = self.repository.open_or_create(&self.capture.memory)?;
        self.capture.check_data(repository.path())?;
        let own = own_job(&repository, &self.capture, process, &name)?;
        let name = own.name();
        let signals = Signals::hold_for_stop()?;
        let mut report = Report::choose(self.schedule.quiet, self.json, report::stdout(), None);
        let watch = report.watch(self.capture.watch_files(&self.watch), process.pid);
        let (target, saver) = attach(&self.capture, process, watch.as_ref())?;
        report.job(own.notice.as_deref());
        let program = Some(own.program.clone());
        let job = Job::new(target, repository, JobOptions { name: name.clone(), policy, program });

        let (stop, stopped) = mpsc::channel();
        announce_exit(process, stop.clone())?;
        signals.stop_at(stop)?;
        let done = job.run(&stopped, &mut |event| {
            report.event(&name, process.pid, event);
            report.notices(watch.as_deref(), &*saver);
        });
        let state = if done.end == End::TargetGone { "has exited" } else { "keeps running" };
        report.say(&format!("process {} {state}; {}", process.pid, summary(&name, &done)));
        Ok(ExitCode::SUCCESS)
    }
}

impl Checkpoint {
    pub fn run(self) -> Outcome {
        self.capture.check()?;
        let (process, name) = find(self.pid)?;
        let repository = self.repository.open_or_create(&self.capture.memory)?;
        self.capture.check_data(repository.path())?;
        let own = own_job(&repository, &self.capture, process, &name)?;
        let (target, saver) = attach(&self.capture, process, None)?;
        let mut job = Job::new(target, repository, self.capture.memory.job_options(&own));
        let taken = job.checkpoint().map_err(|error| Failure::checkpointing(process.pid, error))?;
        let not_kept = job.take_not_kept();
        job.detach();
        let mut report = if self.json { Report::Json { out: report::stdout() } } else { Report::Plain };
        report.job(own.notice.as_deref());
        report.taken(&own.name(), &taken);
        if let Some(error) = not_kept {
            report.not_kept(&own.name(), &error);
        }
        report.notices(None, &*saver);
        Ok(ExitCode::SUCCESS)
    }
}

fn attach(
    capture: &CaptureOptions,
    process: Process,
    watch: Option<&Arc<FileWatch>>,
) -> Result<(ProcessTarget, Arc<dyn StateSaver>), Failure> {
    let saver = capture.saver().map_err(|error| Failure::checkpointing(process.pid, error))?;
    let target = capture.attach(process, saver.clone(), watch);
    let target = target.map_err(|error| Failure::checkpointing(process.pid, error))?;
    Ok((target, saver))
}

/// The process that has an id, and its name.
fn find(pid: i32) -> Result<(Process, String), Failure> {
    let stat = if pid < 1 { None } else { Stat::read(pid).ok() };
    let missing = || Failure::plain(format!("there is no process {pid}")).help(PROCESSES);
    let Stat { start_ticks, command, .. } = stat.ok_or_else(missing)?;
    Ok((Process { pid, start_ticks }, command))
}

/// The job of a running process: that which the options give, or one with its name.
fn own_job(repository: &Repository, capture: &CaptureOptions, process: Process, name: &str) -> Result<OwnJob, Failure> {
    let default = job::default_name(Path::new(name));
    job::claim(repository, capture.memory.job.as_deref(), &default, job::of_process(process))
}
