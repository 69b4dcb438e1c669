//! `pagemark vm`: checkpoints virtual machines of QEMU, and brings them back.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc;

use clap::{Args, Subcommand};
use pagemark::job::End;
use pagemark::repository::Repository;
use pagemark::track::Scope;
use pagemark::{Job, JobOptions};
use pagemark_vm::{ErrorKind, VmTarget, machine_name, monitor_sockets, restored_birth};

use crate::failure::{Failure, Outcome};
use crate::job::{self, OwnJob};
use crate::options::{MemoryOptions, ScheduleOptions, TrackingOptions};
use crate::report::{self, Report, summary};
use crate::repository::RepositoryOptions;
use crate::signals::{Signals, announce_exit};

mod advise;
mod run;

pub use run::machine_job;

/// Checkpoint virtual machines: an unmodified QEMU, by its monitor socket
///
/// `run` starts a machine. A QEMU that runs already needs a socket for Pagemark: `-qmp
/// unix:PATH,server=on,wait=off`. `pagemark restore` brings a machine back, by a QEMU with the same
/// command line and new images of its disks.
#[derive(Args, Debug)]
pub struct Vm {
    #[command(subcommand)]
    command: VmCommand,
}

#[derive(Subcommand, Debug)]
enum VmCommand {
    Run(run::Run),
    Attach(Attach),
    Checkpoint(Checkpoint),
    Advise(advise::Advise),
}

/// Keep a virtual machine checkpointed
///
/// Ctrl-C ends Pagemark; the machine keeps running.
#[derive(Args, Debug)]
struct Attach {
    #[command(flatten)]
    repository: RepositoryOptions,
    #[command(flatten)]
    memory: MemoryOptions,
    #[command(flatten)]
    schedule: ScheduleOptions,
    /// A line of JSON for each checkpoint
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    qemu: QemuOptions,
}

/// Take one checkpoint of a virtual machine
#[derive(Args, Debug)]
struct Checkpoint {
    #[command(flatten)]
    repository: RepositoryOptions,
    #[command(flatten)]
    memory: MemoryOptions,
    /// One JSON document
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    qemu: QemuOptions,
}

/// Which QEMU is meant.
#[derive(Args, Debug)]
struct QemuOptions {
    /// The monitor socket (QMP) of QEMU
    #[arg(required_unless_present = "pid")]
    monitor: Option<PathBuf>,
    /// QEMU's process id in place of the socket: the first socket for monitors (QMP) on its command
    /// line that has no client
    #[arg(long, conflicts_with = "monitor", value_parser = clap::value_parser!(i32).range(1..))]
    pid: Option<i32>,
}

impl Vm {
    pub fn run(self) -> Outcome {
        match self.command {
            VmCommand::Run(command) => command.run(),
            VmCommand::Attach(command) => command.run(),
            VmCommand::Checkpoint(command) => command.run(),
            VmCommand::Advise(command) => command.run(),
        }
    }
}

impl Attach {
    fn run(self) -> Outcome {
        self.memory.tracking.check_machine()?;
        let policy = self.schedule.policy(&self.memory, Scope::Machine)?;
        let repository = self.repository.open_or_create(&self.memory)?;
        let signals = Signals::hold_for_stop()?;
        let target = self.qemu.attach(&self.memory.tracking)?;
        let own = own_job(&repository, &self.memory, &target)?;
        let (process, name, program) = (target.process(), own.name(), Some(own.program.clone()));
        let job = Job::new(target, repository, JobOptions { name: name.clone(), policy, program });

        let (stop, stopped) = mpsc::channel();
        announce_exit(process, stop.clone())?;
        signals.stop_at(stop)?;
        let mut report = Report::choose(self.schedule.quiet, self.json, report::stdout(), None);
        report.job(own.notice.as_deref());
        let done = job.run(&stopped, &mut |event| report.event(&name, process.pid, event));
        let state = if done.end == End::TargetGone { "has ended" } else { "keeps running" };
        report.say(&format!("QEMU (process {}) {state}; {}", process.pid, summary(&name, &done)));
        Ok(ExitCode::SUCCESS)
    }
}

impl Checkpoint {
    fn run(self) -> Outcome {
        self.memory.tracking.check_machine()?;
        let repository = self.repository.open_or_create(&self.memory)?;
        let target = self.qemu.attach(&self.memory.tracking)?;
        let own = own_job(&repository, &self.memory, &target)?;
        let name = own.name();
        let mut job = Job::new(target, repository, self.memory.job_options(&own));
        let taken = job.checkpoint().map_err(|error| Failure::of(format!("cannot checkpoint {name}"), error))?;
        job.detach();
        let mut report = if self.json { Report::Json { out: report::stdout() } } else { Report::Plain };
        report.job(own.notice.as_deref());
        report.taken(&name, &taken);
        Ok(ExitCode::SUCCESS)
    }
}

impl QemuOptions {
    /// Attaches to the machine.
    fn attach(&self, tracking: &TrackingOptions) -> Result<VmTarget, Failure> {
        let failed = |error| Failure::of(format!("cannot attach to {}", self.name()), error);
        let sockets = match &self.monitor {
            Some(monitor) => vec![monitor.clone()],
            None => monitor_sockets(self.pid.unwrap_or_default()).map_err(failed)?,
        };
        let mut sockets = sockets.into_iter();
        let mut attached = attach(tracking, &sockets.next().unwrap_or_default());
        for socket in sockets {
            // Another client has the last one.
            if !attached.as_ref().is_err_and(|error| error.kind() == ErrorKind::Monitor) {
                break;
            }
            attached = attach(tracking, &socket);
        }
        let target = attached.map_err(failed)?;
        if let Some(pid) = self.pid.filter(|pid| *pid != target.pid()) {
            // Its command line names whatever its user likes.
            let reason = format!("process {} has its socket", target.pid());
            return Err(Failure::new(format!("cannot attach to the machine of process {pid}"), reason));
        }
        Ok(target)
    }

    /// The machine, for people.
    fn name(&self) -> String {
        match (&self.monitor, self.pid) {
            (Some(monitor), _) => format!("the machine of {}", monitor.display()),
            (None, pid) => format!("the machine of process {}", pid.unwrap_or_default()),
        }
    }
}

fn attach(tracking: &TrackingOptions, monitor: &Path) -> pagemark_vm::Result<VmTarget> {
    let mechanism = tracking.mechanism(Scope::Machine);
    match tracking.activation() {
        Some(activation) => VmTarget::attach_to_hold(monitor, mechanism, activation),
        None => VmTarget::attach(monitor, mechanism),
    }
}

/// The job of a machine: that which the options give, or one with its name.
fn own_job(repository: &Repository, memory: &MemoryOptions, target: &VmTarget) -> Result<OwnJob, Failure> {
    let default = job::default_name(Path::new(target.label()));
    let mut program = job::of_process(target.process());
    program.name = machine_name(&program.command);
    if let (Some(process), Some(birth)) = (&mut program.process, restored_birth(target.pid())) {
        process.birth = Some(birth);
    }
    job::claim(repository, memory.job.as_deref(), &default, program)
}
