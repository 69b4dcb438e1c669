//! `pagemark vm`: checkpoints virtual machines of QEMU, and brings them back.

use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus};
use std::sync::mpsc;

use clap::{Args, Subcommand};
use nix::unistd::Pid;
use pagemark::job::End;
use pagemark::repository::Checkpoint as Held;
use pagemark::track::Scope;
use pagemark::{ByteCount, Job, JobOptions};
use pagemark_report::message;
use pagemark_report::text;
use pagemark_vm::{ErrorKind, LazyMachine, RunningMachine, VmTarget, monitor_sockets};

use crate::failure::{Failure, Outcome};
use crate::live::Progress;
use crate::options::{MemoryOptions, ScheduleOptions, TrackingOptions};
use crate::reference::job_name;
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
        let (pid, name) = (target.pid(), name_of(&self.memory, &target));
        let job = Job::new(target, repository, JobOptions { name: name.clone(), policy });

        let (stop, stopped) = mpsc::channel();
        announce_exit(Pid::from_raw(pid), stop.clone())?;
        signals.stop_at(stop)?;
        let mut report = Report::choose(self.schedule.quiet, self.json, report::stdout(), None);
        let done = job.run(&stopped, &mut |event| report.event(&name, pid, event));
        let state = if done.end == End::TargetGone { "has ended" } else { "keeps running" };
        report.say(&format!("QEMU (process {pid}) {state}; {}", summary(&name, &done)));
        Ok(ExitCode::SUCCESS)
    }
}

impl Checkpoint {
    fn run(self) -> Outcome {
        self.memory.tracking.check_machine()?;
        let repository = self.repository.open_or_create(&self.memory)?;
        let target = self.qemu.attach(&self.memory.tracking)?;
        let name = name_of(&self.memory, &target);
        let mut job = Job::new(target, repository, self.memory.job_options(name.clone()));
        let taken = job.checkpoint().map_err(|error| Failure::of(format!("cannot checkpoint {name}"), error))?;
        job.detach();
        let mut report = if self.json { Report::Json { out: report::stdout() } } else { Report::Plain };
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
        attached.map_err(failed)
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

/// The job's name: that which the options give, or the machine's.
fn name_of(memory: &MemoryOptions, target: &VmTarget) -> String {
    memory.job.clone().unwrap_or_else(|| job_name(std::path::Path::new(target.label())))
}

/// A restored machine.
enum Started<'a> {
    /// With all of its memory.
    Whole(RunningMachine),
    /// With memory that comes on demand.
    Lazy(LazyMachine<'a>),
}

/// Restores a machine, and reports on it. Without `is_detached`, waits until QEMU ends and returns
/// its exit status.
pub fn restore(
    checkpoint: &Held,
    is_lazy: bool,
    is_detached: bool,
    is_quiet: bool,
) -> Result<(i32, Option<ExitStatus>), Failure> {
    let manifest = &checkpoint.manifest;
    let name = format!("{}@{}", manifest.job, manifest.sequence);
    let failed = |error| Failure::of(format!("cannot restore {name}"), error);
    if !is_quiet {
        message!("pagemark: restoring {name} from {}", text::ago(manifest.taken_unix_us));
    }
    let signals = match (is_detached, is_lazy) {
        (false, _) => Some(Signals::hold_for_target()?),
        // QEMU is killed if this process ends before all memory is there, so this process must not be
        // interrupted.
        (true, true) => Some(Signals::hold_for_stop()?),
        (true, false) => None,
    };
    let mut progress = Progress::new("reading");
    let restore = pagemark_vm::Restore::new(checkpoint).detach(is_detached);
    let report = &mut |done: ByteCount, total: ByteCount| progress.at(done.get(), total.get(), text::bytes);
    let started = match is_lazy {
        true => restore.start_lazily(report).map(Started::Lazy),
        false => restore.start(report).map(Started::Whole),
    };
    drop(progress);
    let started = started.map_err(failed)?;
    let machine = match &started {
        Started::Whole(machine) => machine,
        Started::Lazy(lazy) => lazy.machine(),
    };
    let pid = machine.pid();
    if let Some(signals) = signals.filter(|_| !is_detached) {
        signals.share_with(Pid::from_raw(pid))?;
    }
    if !is_quiet {
        message!("pagemark: {name} runs in QEMU, process {pid}");
        let (before, now) = (machine.checkpoint_version(), machine.version());
        if before != now {
            message!("pagemark: its QEMU is version {now}; the checkpoint is of version {before}");
        }
        for (disk, image) in machine.disks() {
            message!("pagemark: its disk {disk} is {}", image.display());
        }
    }
    let machine = match started {
        Started::Whole(machine) => machine,
        Started::Lazy(lazy) => lazy.complete(&|_| {}).map_err(failed)?,
    };
    let status = if is_detached { None } else { Some(machine.wait().map_err(failed)?) };
    Ok((pid, status))
}
