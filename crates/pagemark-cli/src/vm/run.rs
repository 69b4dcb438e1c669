//! `pagemark vm run`: starts a virtual machine and keeps it checkpointed.

use std::ffi::OsString;
use std::path::Path;
use std::sync::mpsc;

use clap::Args;
use nix::unistd::Pid;
use pagemark::track::Scope;
use pagemark::{Job, JobOptions};
use pagemark_vm::{ErrorKind, OwnQemu, machine_name};

use crate::failure::{Failure, Outcome};
use crate::job;
use crate::options::{MemoryOptions, ScheduleOptions};
use crate::report::{self, Report, summary};
use crate::repository::RepositoryOptions;
use crate::run::exit_code;
use crate::signals::{Signals, announce_exit, process_to_watch};

/// Start a virtual machine by QEMU's own command line, and keep it checkpointed
///
/// QEMU has this terminal, environment and directory, gets the signals that are sent to Pagemark,
/// and its exit status becomes Pagemark's. Pagemark adds a monitor socket (QMP) of its own, in a
/// directory in TMPDIR, to QEMU's arguments, and nothing else; with `--mechanism kvm-log` and
/// `kvm-ring`, it also preloads a library (LD_PRELOAD), which reads KVM's log or rings in QEMU. Its
/// own lines go to stderr.
/// If a checkpoint fails, Pagemark reports it and the machine keeps running; also if Pagemark is
/// killed: `pagemark vm attach` with that socket continues the checkpoints.
#[derive(Args, Debug)]
pub struct Run {
    #[command(flatten)]
    repository: RepositoryOptions,
    #[command(flatten)]
    memory: MemoryOptions,
    #[command(flatten)]
    schedule: ScheduleOptions,
    /// A line of JSON on stderr for each checkpoint
    #[arg(long)]
    json: bool,
    /// QEMU and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

impl Run {
    pub fn run(self) -> Outcome {
        self.memory.tracking.check_machine()?;
        let repository = self.repository.open_or_create(&self.memory)?;
        let policy = self.schedule.policy(&self.memory, Scope::Machine)?;
        let mut program = job::of_command(&self.command);
        program.name = machine_name(&program.command);
        let mut own = job::claim(&repository, self.memory.job.as_deref(), &machine_job(&self.command), program)?;
        let name = own.name();
        let signals = Signals::hold_for_target()?;
        let mechanism = self.memory.mechanism(Scope::Machine);
        let mut qemu = OwnQemu::start_for(mechanism, &self.command, &name, signals.before()).map_err(|error| {
            let status = match error.kind() {
                ErrorKind::NotFound => 127,
                ErrorKind::Start => 126,
                ErrorKind::Unsupported => 2,
                _ => 1,
            };
            Failure::of(format!("cannot run {name}"), error).status(status)
        })?;
        let pid = qemu.pid();
        let process = process_to_watch(pid)?;
        own.program.process = job::record(process);
        let options = JobOptions { name: name.clone(), policy, program: Some(own.program.clone()) };
        let (stop, stopped) = mpsc::channel();
        announce_exit(process, stop)?;
        signals.share_with(Pid::from_raw(pid), false)?;

        let mut report = Report::choose(self.schedule.quiet, self.json, report::stderr(), None);
        report.job(own.notice.as_deref());
        report.say(&format!("{name} is QEMU, process {pid}; monitor {}", qemu.monitor().display()));
        let (send_event, events) = mpsc::channel();
        let mut attach = || {
            let mut target = match self.memory.tracking.activation() {
                Some(activation) => qemu.attach_to_hold(mechanism, activation),
                None => qemu.attach(mechanism),
            }?;
            let send_event = send_event.clone();
            // The receiver lives as long as the job.
            target.on_event(Box::new(move |event| drop(send_event.send(event))));
            Ok(target)
        };
        let done = Job::attach_and_run(&mut attach, &repository, &options, &stopped, &mut |event| {
            events.try_iter().for_each(|event| report.machine_event(&name, &event));
            report.event(&name, pid, event);
        });
        let status = qemu.wait().map_err(|error| Failure::new("QEMU's exit status is not known", error))?;
        events.try_iter().for_each(|event| report.machine_event(&name, &event));
        report.say(&summary(&name, &done));
        Ok(exit_code(status))
    }
}

/// The name of a job for a machine, by its command line.
pub fn machine_job(command: &[OsString]) -> String {
    let words: Vec<String> = command.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let own = machine_name(&words).or(words.first().cloned()).unwrap_or_default();
    job::default_name(Path::new(&own))
}
