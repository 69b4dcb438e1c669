//! `pagemark restore`: brings a program back.

mod machine;
mod processes;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueEnum};
use nix::errno::Errno;
use nix::sys::signal::SigSet;
use nix::sys::wait::{Id, WaitPidFlag, waitid, waitpid};
use nix::unistd::Pid;
use pagemark::repository::{Checkpoint, TargetKind};
use pagemark::restore::{Gated, Opened, Prepared, Running};
use pagemark_process::restore::Network;
use pagemark_report::text;
use serde::Serialize;

use crate::asides::AsidesOptions;
use crate::failure::{Failure, Outcome};
use crate::live::Progress;
use crate::options::DiskPlace;
use crate::output::print_json;
use crate::reference::{Reference, only_job, read_checkpoint};
use crate::repository::RepositoryOptions;
use crate::run::exit_code;
use crate::signals::{Signals, current_mask};
use machine::Machine;
use processes::Processes;

/// Bring a program back as it was at a checkpoint
///
/// The program continues in this terminal; signals and the exit status are passed on as with
/// `pagemark run`. Files that it had open for writing get the content that they had then; copies of
/// their present content are kept, as is reported (see `pagemark asides`).
/// Before set-uid files are changed, or files outside the directories in which the program worked,
/// they are listed and Pagemark asks.
#[derive(Args, Debug)]
pub struct Restore {
    #[command(flatten)]
    repository: RepositoryOptions,
    /// The checkpoint's number [default: the newest]
    #[arg(long, value_name = "N")]
    checkpoint: Option<u64>,
    /// Let the program run before its memory is there: pages that it touches are delivered at once,
    /// the rest one after the other. Until all are delivered, the program ends if Pagemark ends
    #[arg(long)]
    lazy: bool,
    /// Return at once (with --lazy, once all memory is there); the program continues by itself,
    /// without this terminal
    #[arg(long)]
    detach: bool,
    /// Change set-uid files, and files outside the program's own directories, without asking
    #[arg(long, short)]
    yes: bool,
    /// End the restore if CRIU takes longer [default: 2m, and a second for each 8 MiB of memory]
    #[arg(long, value_name = "TIME", value_parser = text::parse_duration)]
    time_limit: Option<Duration>,
    /// The root directory of a container, or of another program with mounts of its own [default: as
    /// at the checkpoint]
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
    /// The network of a container: the path of a network namespace, such as /run/netns/NAME, or
    /// `loopback` for a new one with the loopback interface alone [default: that, if the container
    /// had no other interfaces]
    #[arg(long, value_name = "PATH", value_parser = parse_network)]
    network: Option<Network>,
    /// Let a program that was started by `run --kvm` continue without its virtual machine
    #[arg(long)]
    without_kvm: bool,
    /// Of a virtual machine: put the disk NAME, as `restore` names it, into the new file PATH, or
    /// onto the block device PATH, in place of a file beside its old image. The user who ran QEMU
    /// must be able to write there; repeatable
    #[arg(long, value_name = "NAME=PATH")]
    disk: Vec<DiskPlace>,
    /// Let the processes have the file at this path though their users may not use it and others
    /// may have put it there; repeatable
    #[arg(long, value_name = "PATH")]
    trust_path: Vec<PathBuf>,
    /// Let processes take root for the user at the other end of a Unix socket (SO_PEERCRED) where
    /// the restore cannot make the socket for that user
    #[arg(long)]
    root_peers: bool,
    /// Control groups: `restore` puts processes back into them where they still exist, `ignore`
    /// leaves processes in the groups of this command
    #[arg(long, value_name = "MODE", default_value = "restore", value_enum)]
    cgroups: GroupMode,
    /// Say nothing but errors
    #[arg(long, short)]
    quiet: bool,
    /// One JSON document on stdout, once the program runs; needs --detach
    #[arg(long, requires = "detach")]
    json: bool,
    #[command(flatten)]
    asides: AsidesOptions,
    /// The job, or one checkpoint of it; not needed where there is only one job
    #[arg(value_name = "JOB[@N]")]
    job: Option<Reference>,
}

/// What becomes of the control groups.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum GroupMode {
    Restore,
    Ignore,
}

fn parse_network(text: &str) -> Result<Network, std::convert::Infallible> {
    Ok(if text == "loopback" { Network::LoopbackAlone } else { Network::At(text.into()) })
}

#[derive(Serialize)]
struct Document<'a> {
    job: &'a str,
    sequence: u64,
    /// The root process.
    pid: i32,
    /// All processes, the root first.
    pids: &'a [i32],
    files: Vec<File>,
    /// The connections that are closed, each as `ADDRESS to PEER`.
    closed_connections: &'a [String],
    /// What CRIU does not save and did not come back, each with its reason.
    lost_state: &'a [String],
}

#[derive(Serialize)]
struct File {
    path: String,
    /// What was done to it.
    action: &'static str,
    /// Path of the content that it had before the restore.
    set_aside: Option<String>,
}

impl Restore {
    pub fn run(self) -> Outcome {
        let repository = self.repository.open()?;
        let mut reference = match &self.job {
            Some(reference) => reference.clone(),
            None => Reference { job: only_job(&repository)?, sequence: None },
        };
        if self.checkpoint.is_some() && reference.sequence.is_some() && self.checkpoint != reference.sequence {
            return Err(Failure::usage("two different checkpoints are named").help("either JOB@N or --checkpoint N"));
        }
        reference.sequence = self.checkpoint.or(reference.sequence);
        let checkpoint = read_checkpoint(&repository, &reference)?;
        match checkpoint.manifest.kind {
            TargetKind::VirtualMachine => self.restore::<Machine>(checkpoint),
            _ => self.restore::<Processes>(checkpoint),
        }
    }

    /// Restores a checkpoint, and reports on it. Without --detach, waits until the program ends.
    fn restore<K: Kind>(&self, checkpoint: Checkpoint) -> Outcome {
        K::check(self, &checkpoint)?;
        let mask = current_mask()?;
        let mut signals = match (self.detach, self.lazy) {
            (false, _) => Some(Signals::hold_for_target()?),
            // The program ends with this process until all of its memory is there, so this process must not be
            // interrupted.
            (true, true) => Some(Signals::hold_for_stop()?),
            (true, false) => None,
        };
        let name = name_of(&checkpoint);
        let failed = |error| K::failure(&name, error);
        let prepared = K::prepare(self, &checkpoint, mask)?;
        K::announce(self, &checkpoint, &prepared);
        let mut reading = ShownProgress::new("reading", true);
        let made = prepared.make(&mut |done, total| reading.at(done.get(), total.get(), text::bytes));
        drop(reading);
        // Where the program has the terminal, it has all of it.
        let mut delivering = ShownProgress::new("delivering", self.detach);
        // The program runs by then: what fails is reported at the end.
        let mut reported = Ok(());
        let opened = made.map_err(failed)?.open(&mut |opened| match opened {
            Opened::Runs(running) => reported = self.report_running::<K>(&checkpoint, running, signals.take()),
            Opened::Delivering { done_pages, total_pages } => delivering.at(done_pages, total_pages, text::count),
        });
        drop(delivering);
        let running = opened.map_err(failed)?;
        reported?;
        if self.detach {
            return Ok(ExitCode::SUCCESS);
        }
        // A checkpoint that is held can't be pruned.
        drop(checkpoint);
        if std::process::id() == 1 {
            take_orphans_until(K::child(&running));
        }
        let status = running.wait();
        status.map(exit_code).map_err(|error| Failure::new("the program's exit status is not known", error))
    }

    /// Passes signals on to the program from now on, and reports that it runs.
    fn report_running<K: Kind>(
        &self,
        checkpoint: &Checkpoint,
        running: &K::Running,
        signals: Option<Signals>,
    ) -> Result<(), Failure> {
        K::warn(running);
        if let (Some(signals), false) = (signals, self.detach) {
            K::pass_signals(running, signals)?;
        }
        if !self.quiet {
            K::report(&name_of(checkpoint), running);
        }
        if self.json {
            let (job, sequence) = (checkpoint.manifest.job.as_str(), checkpoint.manifest.sequence);
            let (pids, closed_connections) = (running.pids(), K::closed_connections(running));
            let (pid, files) = (pids.first().copied().unwrap_or_default(), K::files(running));
            let lost_state = K::lost_state(running);
            print_json(&Document { job, sequence, pid, pids, files, closed_connections, lost_state })?;
        }
        Ok(())
    }
}

/// A kind of target, as this command restores it.
trait Kind {
    /// The restore that can begin.
    type Prepared<'a>: Prepared<Gated: Gated<Running = Self::Running>>;
    /// What was restored.
    type Running: Running;

    /// Refuses what this kind cannot do, and asks for consent.
    fn check(options: &Restore, checkpoint: &Checkpoint) -> Result<(), Failure>;

    /// Prepares the restore of a program that has `mask` as its mask of blocked signals.
    fn prepare<'a>(options: &Restore, checkpoint: &'a Checkpoint, mask: SigSet) -> Result<Self::Prepared<'a>, Failure>;

    /// Says what is about to be restored.
    fn announce(options: &Restore, checkpoint: &Checkpoint, prepared: &Self::Prepared<'_>);

    /// The failure of the restore of `name`, with what to do about it.
    fn failure(name: &str, error: <Self::Prepared<'_> as Prepared>::Error) -> Failure;

    /// Says what went wrong with a program that runs.
    fn warn(_: &Self::Running) {}

    /// Passes signals on to the program from now on.
    fn pass_signals(running: &Self::Running, signals: Signals) -> Result<(), Failure>;

    /// The child of this process that ends with the program.
    fn child(running: &Self::Running) -> Pid {
        Pid::from_raw(running.pids().first().copied().unwrap_or_default())
    }

    /// Says that the program runs, and what is not as at the checkpoint.
    fn report(name: &str, running: &Self::Running);

    /// The files that were put back.
    fn files(_: &Self::Running) -> Vec<File> {
        Vec::new()
    }

    /// The connections that are closed.
    fn closed_connections(_: &Self::Running) -> &[String] {
        &[]
    }

    /// What CRIU does not save and did not come back.
    fn lost_state(_: &Self::Running) -> &[String] {
        &[]
    }
}

/// Waits until `child` has ended, and takes the ends of all other children meanwhile: the first
/// process of a container is the parent of all whose parents have exited.
fn take_orphans_until(child: Pid) {
    loop {
        match waitid(Id::All, WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT).map(|status| status.pid()) {
            Ok(Some(other)) if other != child => drop(waitpid(other, None)),
            Err(Errno::EINTR) => {}
            Ok(_) | Err(_) => return,
        }
    }
}

/// The name of a checkpoint: `JOB@N`.
fn name_of(checkpoint: &Checkpoint) -> String {
    format!("{}@{}", checkpoint.manifest.job, checkpoint.manifest.sequence)
}

/// Progress that is measured from its first report on, if it `is_shown`.
struct ShownProgress {
    work: &'static str,
    is_shown: bool,
    progress: Option<Progress>,
}

impl ShownProgress {
    fn new(work: &'static str, is_shown: bool) -> ShownProgress {
        ShownProgress { work, is_shown, progress: None }
    }

    fn at(&mut self, done: u64, total: u64, unit: fn(u64) -> String) {
        if self.is_shown {
            self.progress.get_or_insert_with(|| Progress::new(self.work)).at(done, total, unit);
        }
    }
}
