//! `pagemark run`: starts a program and keeps it checkpointed.

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ExitCode, ExitStatus};
use std::sync::mpsc;

use clap::Args;
use nix::unistd::Pid;
use pagemark::track::Scope;
use pagemark::{Job, JobOptions};
use pagemark_process::saver::SignalGate;
use pagemark_process::spawn::{self, spawn, spawn_on};
use pagemark_process::terminal::Terminal;

use crate::failure::{Failure, Outcome};
use crate::heap::HeapOptions;
use crate::job;
use crate::machine;
use crate::options::{CaptureOptions, ScheduleOptions, WatchOptions};
use crate::report::{self, Report, summary};
use crate::repository::RepositoryOptions;
use crate::signals::{Signals, announce_exit, process_to_watch};

/// Start a program and keep it checkpointed
///
/// The program has this terminal, through a pseudo-terminal, this environment and directory, gets
/// the signals that are sent to Pagemark, and its exit status becomes Pagemark's. Pagemark's own
/// lines go to stderr. If a checkpoint fails, Pagemark reports it and the program keeps running.
#[derive(Args, Debug)]
pub struct Run {
    #[command(flatten)]
    repository: RepositoryOptions,
    #[command(flatten)]
    capture: CaptureOptions,
    #[command(flatten)]
    watch: WatchOptions,
    #[command(flatten)]
    schedule: ScheduleOptions,
    #[command(flatten)]
    heap: HeapOptions,
    /// Run the program in a virtual machine of its own, by pagemark-kvm
    #[arg(long)]
    kvm: bool,
    /// A line of JSON on stderr for each checkpoint
    #[arg(long)]
    json: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

impl Run {
    pub fn run(self) -> Outcome {
        let program = self.command.first().map(Path::new).unwrap_or(Path::new(""));
        // Whatever would make every checkpoint fail is reported before the program starts.
        self.capture.check()?;
        let mut variables = self.heap.variables(program.as_os_str())?;
        if self.kvm {
            variables = machine::variables(self.capture.memory.tracking.mechanism(Scope::Process), variables);
        }
        let command = if self.kvm { machine::command(&self.command)? } else { self.command.clone() };
        let repository = self.repository.open_or_create(&self.capture.memory)?;
        self.capture.check_data(repository.path())?;
        let saver = self.capture.saver().map_err(Failure::no_checkpoints_here)?;
        let policy = self.schedule.policy(&self.capture.memory, Scope::Process)?;
        let (named, default) = (self.capture.memory.job.as_deref(), job::default_name(program));
        let mut own = job::claim(&repository, named, &default, job::of_command(&self.command))?;
        let name = own.name();

        // What the program writes first is written after this.
        let watch = self.capture.watch_files(&self.watch);
        let signals = Signals::hold_for_target()?;
        let mut terminal = Terminal::open().map_err(Failure::plain)?;
        let started = match &mut terminal {
            Some(terminal) => spawn_on(terminal, &command, &variables, signals.before()),
            None => spawn(&command, &variables, signals.before()).map(|child| {
                let pid = child.id() as i32;
                (child, pid)
            }),
        };
        let (mut child, pid) = started.map_err(|error| Failure::plain(&error).status(spawn::exit_status(&error)))?;
        let process = process_to_watch(pid)?;
        own.program.process = job::record(process);
        let options = JobOptions { name: name.clone(), policy, program: Some(own.program.clone()) };
        let pid = Pid::from_raw(pid);
        let (stop, stopped) = mpsc::channel();
        announce_exit(process, stop)?;
        let gate = terminal.as_ref().map_or_else(SignalGate::new, |terminal| SignalGate::with_input(terminal.input()));
        signals.pass_on_to(pid, gate.clone())?;
        let saver = gate.saver(saver);

        let program_terminal = terminal.as_ref().and_then(|terminal| terminal.master().ok());
        let mut report = Report::choose(self.schedule.quiet, self.json, report::stderr(), program_terminal);
        report.job(own.notice.as_deref());
        let watch = report.watch(watch, process.pid);
        let mut attach = || self.capture.attach(process, saver.clone(), watch.as_ref());
        let done = Job::attach_and_run(&mut attach, &repository, &options, &stopped, &mut |event| {
            report.event(&name, process.pid, event);
            report.notices(watch.as_deref(), &*saver);
        });
        let status = exit_status(&mut child);
        // What the program wrote last comes first, and the terminal has its mode again.
        drop(terminal);
        report.say(&summary(&name, &done));
        status
    }
}

/// The program's exit status, as a shell gives it: 128 + n for a signal n.
fn exit_status(child: &mut Child) -> Outcome {
    let status = child.wait().map_err(|error| Failure::new("the program's exit status is not known", error))?;
    Ok(exit_code(status))
}

/// An exit status as a shell gives it.
pub fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    ExitCode::from(code as u8)
}
