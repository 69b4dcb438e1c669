//! The options that several commands share.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use pagemark::checkpointer::Strategy;
use pagemark::model::{Overhead, OverheadGoal};
use pagemark::repository::{Retention, check_job_name};
use pagemark::track::Scope;
use pagemark::{JobOptions, Mechanism, Policy};
use pagemark_linux::proc::Process;
use pagemark_process::Error;
use pagemark_process::criu::DumpOptions;
use pagemark_process::files::{DataTree, FileWatch};
use pagemark_process::saver::{CriuSaver, RegisterSaver, StateSaver};
use pagemark_process::target::ProcessTarget;
use pagemark_report::text;
use pagemark_trace::cgroups::Cgroups;
use pagemark_vm::Activation;

use crate::costs::costs;
use crate::failure::Failure;
use crate::job::OwnJob;

/// How memory is tracked and copied, of any target.
#[derive(Args, Debug, Clone)]
pub struct MemoryOptions {
    /// Name under which the checkpoints are filed [default: the program's name; with a number where
    /// that job has the checkpoints of another program]
    #[arg(long, value_name = "NAME", value_parser = job_name, allow_hyphen_values = true)]
    pub job: Option<String>,
    #[command(flatten)]
    pub tracking: TrackingOptions,
    /// Memory for copied pages until they are stored; pages that are copied while the program is
    /// frozen are added to that [default: a quarter of the available memory, at most 2GiB, or
    /// 64MiB for the first checkpoint]
    #[arg(long, value_name = "SIZE", value_parser = text::parse_bytes)]
    in_flight: Option<usize>,
    /// Store each page whole, never as what changed in it since an earlier checkpoint: more is
    /// written, and a restore reads less
    #[arg(long)]
    pub whole_pages: bool,
}

/// How written memory is found, and how it is copied.
#[derive(Args, Debug, Clone)]
pub struct TrackingOptions {
    #[arg(long, default_value = "auto", value_parser = mechanism, help = mechanism_help())]
    mechanism: MechanismChoice,
    /// How memory is copied: in rounds while the program runs, all while it is frozen, or when it
    /// runs again, each page as it was before the first write to it (of a virtual machine, this
    /// needs the mechanism uffd, which `auto` then means, kvm-log or kvm-ring). `auto`: what of
    /// these freezes it for the shortest time, in each checkpoint
    #[arg(long, default_value = "pre-copy", value_enum)]
    strategy: StrategyName,
    /// With copy-on-write and kvm-log or kvm-ring: until when a virtual machine waits where it
    /// writes to a page of the checkpoint. `early`: until the page is copied; `late`: the first
    /// write to it, until the next checkpoint [default: early]
    #[arg(long, value_name = "WHEN", value_enum)]
    activation: Option<ActivationName>,
}

impl TrackingOptions {
    /// The mechanism that is named, or the best that works here in the scope with the strategy.
    pub fn mechanism(&self, scope: Scope) -> Mechanism {
        let holds_writes = match self.strategy {
            StrategyName::CopyOnWrite if scope == Scope::Machine => Mechanism::choose_to_hold_writes(),
            _ => None,
        };
        self.mechanism.0.or(holds_writes).unwrap_or_else(|| Mechanism::choose(scope))
    }

    /// Checks that processes can be checkpointed in this way, or their memory alone.
    pub fn check_process(&self, memory_only: bool) -> Result<(), Failure> {
        if self.activation.is_some() {
            return Err(Failure::usage("--activation is for virtual machines alone"));
        }
        if memory_only && self.strategy == StrategyName::CopyOnWrite {
            return Err(Failure::usage("--memory-only has no strategy copy-on-write").help("use --strategy pre-copy"));
        }
        Ok(())
    }

    /// Checks that virtual machines can be checkpointed in this way.
    pub fn check_machine(&self) -> Result<(), Failure> {
        let mechanism = self.mechanism(Scope::Machine);
        if self.activation.is_some() && self.activation().is_none() {
            return Err(Failure::usage(
                "--activation is for the strategy copy-on-write with the mechanisms kvm-log and kvm-ring",
            ));
        }
        if self.strategy != StrategyName::CopyOnWrite || mechanism.allows_copy_on_write() {
            return Ok(());
        }
        let needed = Mechanism::choose_to_hold_writes().map_or("one that holds writes", Mechanism::name);
        Err(Failure::usage(format!("the strategy copy-on-write needs the mechanism {needed}, not {mechanism}"))
            .help(format!("name {needed}, or no mechanism")))
    }

    /// Checks that the cost of this way is known for processes.
    pub fn check_forecast(&self) -> Result<(), Failure> {
        if self.strategy == StrategyName::CopyOnWrite {
            return Err(Failure::usage("the cost of copy-on-write is predicted for virtual machines alone")
                .help("use --strategy pre-copy, or take checkpoints and compare what `log` reports"));
        }
        Ok(())
    }

    /// How a machine that KVM's log tracks waits in a copy-on-write checkpoint; None for other
    /// mechanisms and strategies.
    pub fn activation(&self) -> Option<Activation> {
        let mechanism = self.mechanism(Scope::Machine);
        let holds_beside = mechanism.allows_copy_on_write() && !mechanism.holds_writes();
        (self.strategy == StrategyName::CopyOnWrite && holds_beside).then_some(match self.activation {
            Some(ActivationName::Late) => Activation::Late,
            Some(ActivationName::Early) | None => Activation::Early,
        })
    }

    /// The strategy that is named.
    pub fn strategy(&self) -> Strategy {
        match self.strategy {
            StrategyName::PreCopy => Strategy::default(),
            StrategyName::StopAndCopy => Strategy::StopAndCopy,
            StrategyName::CopyOnWrite => Strategy::CopyOnWrite,
            StrategyName::Auto => Strategy::Auto,
        }
    }
}

impl MemoryOptions {
    /// The mechanism that is named, or the best that works here in the scope.
    pub fn mechanism(&self, scope: Scope) -> Mechanism {
        self.tracking.mechanism(scope)
    }

    /// The options of a job for a single checkpoint.
    pub fn job_options(&self, job: &OwnJob) -> JobOptions {
        JobOptions { name: job.name(), policy: self.policy(), program: Some(job.program.clone()) }
    }

    /// The policy for a single checkpoint.
    fn policy(&self) -> Policy {
        Policy { strategy: self.tracking.strategy(), in_flight_bytes: self.in_flight, ..Policy::default() }
    }
}

/// How a checkpoint of processes is taken.
#[derive(Args, Debug, Clone)]
pub struct CaptureOptions {
    #[command(flatten)]
    pub memory: MemoryOptions,
    /// Let client connections be part of the checkpoint, so that a restore can continue them
    #[arg(long)]
    keep_connections: bool,
    /// A directory that belongs to the program whole: its files are part of each checkpoint, open
    /// or closed, and a restore removes what is new in it. May be given several times
    #[arg(long, value_name = "DIR", conflicts_with = "memory_only")]
    data: Vec<PathBuf>,
    /// Control groups: `restore` puts processes back into them if they still exist, `ignore` leaves
    /// them out; CRIU's modes `props`, `soft`, `full` and `strict` also save properties, which
    /// makes the freeze longer
    #[arg(long, value_name = "MODE", default_value = "restore")]
    cgroups: Cgroups,
    /// Save the addresses, routes, rules and settings of the network too, if the program is a
    /// container that has one of its own; makes the freeze longer
    #[arg(long)]
    save_network: bool,
    /// Save a program also if it confines itself by Landlock or syscall user dispatch, or has keys
    /// in keyrings of its own. The restored program has none of that: no such sandbox, no such
    /// keys. `restore` names what it lacks
    #[arg(long)]
    without_sandbox: bool,
    /// Save memory and registers alone: needs no CRIU; to look at, not to restore
    #[arg(long)]
    memory_only: bool,
}

/// How files are watched.
#[derive(Args, Debug, Clone)]
pub struct WatchOptions {
    /// Which files outside of `--data` belong to the program: all that its processes write while
    /// they are watched, or those that are open for writing at the checkpoint
    #[arg(long, default_value = "written", value_enum, conflicts_with = "memory_only")]
    files: FilesName,
}

/// The first interval of `--every auto`.
const FIRST_INTERVAL: Duration = Duration::from_secs(1);

/// The overhead that `--every auto` keeps unless another one is named.
const DEFAULT_OVERHEAD: &str = "3%";

/// The interval between checkpoints.
#[derive(Clone, Copy, Debug)]
enum Every {
    Time(Duration),
    /// The shortest that keeps the overhead.
    Auto,
}

fn every(text: &str) -> Result<Every, String> {
    match text {
        "auto" => Ok(Every::Auto),
        _ => text::parse_duration(text).map(Every::Time),
    }
}

/// Reads an overhead: `3%`, `0.5`.
pub fn overhead(text: &str) -> Result<Overhead, String> {
    let number = text.strip_suffix('%').unwrap_or(text).trim_end();
    let share = number.parse::<f64>().ok().and_then(|percent| Overhead::from_share(percent / 100.0));
    share.ok_or_else(|| format!("{text:?} is no overhead; write 3%, from 0.01% to 100%"))
}

/// A name that a job can have.
fn job_name(name: &str) -> Result<String, String> {
    if name.starts_with('-') {
        return Err("every command would take a name that begins with `-` for an option".into());
    }
    check_job_name(name).map(|()| name.to_owned()).map_err(|error| error.to_string())
}

/// Names the mechanisms that can track other processes.
fn mechanism_help() -> String {
    let names = |mechanisms: Vec<Mechanism>| mechanisms.into_iter().map(Mechanism::name).collect::<Vec<_>>().join(", ");
    let of_machines = Mechanism::of_scope(Scope::Machine).filter(|mechanism| !mechanism.has_scope(Scope::Process));
    let (of_processes, of_machines) =
        (names(Mechanism::of_scope(Scope::Process).collect()), names(of_machines.collect()));
    format!(
        "How written pages are found: auto or one of {of_processes}, or {of_machines} (virtual machines); see \
         `pagemark doctor`"
    )
}

/// None is `auto`.
#[derive(Debug, Clone, Copy)]
struct MechanismChoice(Option<Mechanism>);

fn mechanism(name: &str) -> Result<MechanismChoice, String> {
    if name == "auto" {
        Ok(MechanismChoice(None))
    } else {
        name.parse().map(|mechanism| MechanismChoice(Some(mechanism)))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum FilesName {
    Written,
    Open,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum StrategyName {
    PreCopy,
    StopAndCopy,
    CopyOnWrite,
    Auto,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ActivationName {
    Early,
    Late,
}

impl CaptureOptions {
    /// Checks that processes can be checkpointed in this way.
    pub fn check(&self) -> Result<(), Failure> {
        self.memory.tracking.check_process(self.memory_only)
    }

    /// The saver of what is not memory.
    pub fn saver(&self) -> Result<Arc<dyn StateSaver>, Error> {
        if self.memory_only {
            return Ok(Arc::new(RegisterSaver));
        }
        let CaptureOptions { keep_connections, cgroups, save_network, without_sandbox, .. } = *self;
        let options = DumpOptions { keep_connections, cgroups, save_network, without_sandbox };
        Ok(Arc::new(CriuSaver::find(options)?))
    }

    /// Attaches to a process and its descendants. `watch` follows the process.
    pub fn attach(
        &self,
        process: Process,
        saver: Arc<dyn StateSaver>,
        watch: Option<&Arc<FileWatch>>,
    ) -> pagemark_process::Result<ProcessTarget> {
        let mut target = ProcessTarget::attach(process, self.memory.mechanism(Scope::Process), saver)?;
        target.set_data(self.data.iter().map(|path| DataTree::new(path)).collect::<Result<_, _>>()?);
        if let Some(watch) = watch {
            target.set_watch(watch.clone());
        }
        Ok(target)
    }

    /// Begins to watch which files are written. None if that is not wanted.
    pub fn watch_files(&self, options: &WatchOptions) -> Option<Result<FileWatch, Error>> {
        (options.files == FilesName::Written && !self.memory_only).then(FileWatch::new)
    }

    /// Checks the data directories, before anything else is done. None may contain the repository:
    /// a checkpoint would change it.
    pub fn check_data(&self, repository: &Path) -> Result<(), Failure> {
        let repository = repository.canonicalize().unwrap_or_else(|_| repository.to_owned());
        for path in &self.data {
            let help = "--data names a directory that belongs to the program alone";
            let tree = DataTree::new(path).map_err(|error| Failure::plain(error).status(2).help(help))?;
            if repository.starts_with(tree.path()) {
                let reason = format!("the data directory {} contains the repository", tree.path().display());
                return Err(Failure::usage(reason).help("name another repository with --repo DIR"));
            }
        }
        Ok(())
    }
}

/// When checkpoints are taken, which are kept, and what is reported.
#[derive(Args, Debug, Clone)]
pub struct ScheduleOptions {
    /// Time between checkpoints, or `auto`: the shortest that keeps the overhead, as the last
    /// checkpoints show
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = every)]
    every: Every,
    /// With `--every auto`: the share of its time that the program may lose to checkpoints
    /// [default: 3%]
    #[arg(long, value_name = "PERCENT", value_parser = overhead)]
    overhead: Option<Overhead>,
    #[command(flatten)]
    retention: RetentionOptions,
    /// Say nothing but errors
    #[arg(long, short)]
    pub quiet: bool,
}

impl ScheduleOptions {
    /// The policy of a job for checkpoints in series.
    ///
    /// # Errors
    /// An overhead without `--every auto`; the costs of the mechanism cannot be measured.
    pub fn policy(&self, memory: &MemoryOptions, scope: Scope) -> Result<Policy, Failure> {
        let (every, overhead) = match (self.every, self.overhead) {
            (Every::Time(every), None) => (every, None),
            (Every::Time(_), Some(_)) => {
                return Err(Failure::usage("--overhead needs an interval that can be chosen").help("--every auto"));
            }
            (Every::Auto, overhead) => {
                let overhead = overhead.map_or_else(|| self::overhead(DEFAULT_OVERHEAD), Ok).map_err(Failure::usage)?;
                (FIRST_INTERVAL, Some(OverheadGoal { overhead, costs: costs(memory.mechanism(scope), scope)? }))
            }
        };
        let retention = self.retention.retention();
        Ok(Policy { every, overhead, retention, ..memory.policy() })
    }
}

/// Which checkpoints are kept; all of them without an option.
#[derive(Args, Debug, Clone)]
pub struct RetentionOptions {
    /// Keep the newest N checkpoints
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    keep_last: Option<u32>,
    /// Keep the newest checkpoint of each such period
    #[arg(long, value_name = "TIME", value_parser = text::parse_duration)]
    keep_every: Option<Duration>,
}

impl RetentionOptions {
    /// None if all checkpoints are kept.
    pub fn retention(&self) -> Option<Retention> {
        (self.keep_last.is_some() || self.keep_every.is_some())
            .then_some(Retention { keep_last: self.keep_last, keep_every: self.keep_every })
    }
}

/// Where a restore puts a disk of a machine.
#[derive(Clone, Debug)]
pub struct DiskPlace {
    pub name: String,
    pub path: PathBuf,
}

impl FromStr for DiskPlace {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<DiskPlace, Self::Err> {
        match text.split_once('=') {
            Some((name, path)) if !name.is_empty() && !path.is_empty() => {
                Ok(DiskPlace { name: name.to_owned(), path: path.into() })
            }
            _ => Err("a disk and its place are NAME=PATH"),
        }
    }
}
