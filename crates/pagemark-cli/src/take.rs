//! What `run`, `attach` and `checkpoint` have in common: options, and checkpoints one after the other.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use nix::unistd::Pid;
use pagemark::Mechanism;
use pagemark::checkpointer::Strategy;
use pagemark::repository::{Policy, Repository};
use pagemark_process::job::{Job, Options, StateMode};

use crate::failure::Failure;
use crate::report::{Report, Taken};
use crate::signals::Event;
use crate::text;

/// How checkpoints are taken.
#[derive(Args, Debug, Clone)]
pub struct How {
    /// Name under which the checkpoints are filed [default: the program's name]
    #[arg(long, value_name = "NAME")]
    pub job: Option<String>,
    /// How written pages are found: auto, ldt, adaptive, pagemap-scan, soft-dirty, compare or full
    #[arg(long, default_value = "auto", value_parser = mechanism)]
    mechanism: Chosen,
    /// How memory is copied: in rounds while the program runs, or all while it stands still
    #[arg(long, default_value = "pre-copy", value_enum)]
    strategy: StrategyName,
    /// Let client connections be part of the checkpoint, so that a restore can go on with them
    #[arg(long)]
    keep_connections: bool,
    /// Save memory and registers alone: needs no CRIU; to look at, not to restore
    #[arg(long)]
    memory_only: bool,
}

/// None is `auto`.
#[derive(Debug, Clone, Copy)]
struct Chosen(Option<Mechanism>);

fn mechanism(name: &str) -> Result<Chosen, String> {
    if name == "auto" { Ok(Chosen(None)) } else { name.parse().map(|mechanism| Chosen(Some(mechanism))) }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum StrategyName {
    PreCopy,
    StopAndCopy,
}

impl How {
    /// As the library wants it, for the checkpoints of `job`.
    pub fn options(&self, job: String) -> Options {
        Options {
            job,
            mechanism: self.mechanism.0,
            strategy: match self.strategy {
                StrategyName::PreCopy => Strategy::default(),
                StrategyName::StopAndCopy => Strategy::StopAndCopy,
            },
            state: if self.memory_only { StateMode::MemoryOnly } else { StateMode::Process },
            keep_connections: self.keep_connections,
        }
    }
}

/// When checkpoints are taken, and which stay.
#[derive(Args, Debug, Clone)]
pub struct When {
    /// Time between checkpoints
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = text::parse_duration)]
    pub every: Duration,
    #[command(flatten)]
    pub keep: Keep,
    /// Say nothing but errors
    #[arg(long, short)]
    pub quiet: bool,
}

/// Which checkpoints stay; all of them without an option.
#[derive(Args, Debug, Clone)]
pub struct Keep {
    /// Keep the newest N checkpoints
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub keep_last: Option<u32>,
    /// Keep the newest checkpoint of each such period
    #[arg(long, value_name = "TIME", value_parser = text::parse_duration)]
    pub keep_every: Option<Duration>,
}

impl Keep {
    /// None if nothing is to go.
    pub fn policy(&self) -> Option<Policy> {
        (self.keep_last.is_some() || self.keep_every.is_some())
            .then_some(Policy { keep_last: self.keep_last, keep_every: self.keep_every })
    }
}

/// The first checkpoint is not put off longer than this: a job that is killed early should come back too.
const FIRST_AT_MOST: Duration = Duration::from_secs(1);

/// Pruning rests at least so many times as long as it took.
const PRUNE_SHARE: u32 = 20;

/// Takes checkpoints of one target until an event ends it.
pub struct Series<'a> {
    /// The target's root process.
    pub pid: Pid,
    /// Where they go.
    pub repository: Repository,
    /// As for one checkpoint.
    pub options: Options,
    /// Time from the begin of one checkpoint to the begin of the next.
    pub every: Duration,
    /// What is pruned in between.
    pub policy: Option<Policy>,
    /// Who is told.
    pub report: &'a mut Report,
}

/// What a series came to.
#[derive(Default)]
pub struct Done {
    /// Checkpoints taken.
    pub count: u64,
    /// The last one's number, and when it was taken.
    pub last: Option<(u64, u64)>,
}

impl Series<'_> {
    /// Goes on until `events` says that the target has exited or that Pagemark is to end. Leaves the target running.
    ///
    /// What fails is told, once, and tried again at the next interval.
    pub fn take(mut self, events: &Receiver<Event>) -> (Event, Done) {
        let mut done = Done::default();
        let mut job = None;
        let mut told = String::new();
        let mut next = Instant::now() + self.every.min(FIRST_AT_MOST);
        let mut pruning = Pruning::default();
        let end = loop {
            match events.recv_timeout(next.saturating_duration_since(Instant::now())) {
                Ok(event) => break event,
                Err(RecvTimeoutError::Disconnected) => break Event::Stop,
                Err(RecvTimeoutError::Timeout) => {}
            }
            let begin = Instant::now();
            match self.checkpoint(&mut job) {
                Ok((sequence, taken_unix_us)) => {
                    told.clear();
                    done.count += 1;
                    done.last = Some((sequence, taken_unix_us));
                    self.prune(&mut pruning);
                }
                Err(Trouble::Gone) => break Event::Exited,
                Err(Trouble::Failed(message)) => {
                    if message != told {
                        self.report.failed(&message);
                        told = message;
                    }
                }
            }
            // An interval that was missed is left out, so that the target gets its time.
            next = (begin + self.every).max(Instant::now() + self.every / 10);
        };
        if let Some(job) = job {
            job.detach();
        }
        (end, done)
    }

    fn checkpoint(&mut self, attached: &mut Option<Job>) -> Result<(u64, u64), Trouble> {
        let pid = self.pid;
        let name = self.options.job.clone();
        if attached.is_none() {
            self.report.show(&format!("{name}: the first checkpoint saves all memory …"));
            let job = Job::attach(pid.as_raw(), self.repository.clone(), self.options.clone()).map_err(|error| {
                if error.is_target_gone() {
                    Trouble::Gone
                } else {
                    Trouble::Failed(format!(
                        "cannot attach to process {pid}, which runs on without checkpoints: {error}"
                    ))
                }
            })?;
            *attached = Some(job);
        }
        let Some(job) = attached else { return Err(Trouble::Gone) };
        match job.checkpoint() {
            Ok(info) => {
                let (sequence, taken_unix_us) = (info.sequence, info.taken_unix_us);
                self.report.taken(&Taken { job: &name, sequence, taken_unix_us, cost: info.cost });
                Ok((sequence, taken_unix_us))
            }
            Err(error) if error.is_target_gone() => Err(Trouble::Gone),
            Err(error) => Err(Trouble::Failed(format!(
                "no checkpoint of {name} this time, it runs on and the next interval tries again: {error}"
            ))),
        }
    }

    /// Removes what is not to stay. Giving its space back takes longer, so that is done now and then.
    fn prune(&mut self, pruning: &mut Pruning) {
        let Some(policy) = &self.policy else { return };
        let job = Some(self.options.job.as_str());
        let rested = pruning.last.is_none_or(|(end, took)| end.elapsed() >= took * PRUNE_SHARE);
        let begin = Instant::now();
        let pruned =
            if rested { self.repository.prune(policy, job, &mut |_| {}) } else { self.repository.expire(policy, job) };
        if rested {
            pruning.last = Some((Instant::now(), begin.elapsed()));
        }
        if let Err(error) = pruned {
            self.report.failed(&format!("cannot prune {}: {error}", self.options.job));
        }
    }
}

/// When pruning last ended, and how long it took.
#[derive(Default)]
struct Pruning {
    last: Option<(Instant, Duration)>,
}

/// Why there is no checkpoint.
enum Trouble {
    /// The target has exited.
    Gone,
    /// Anything else; the target runs on.
    Failed(String),
}

/// The last word about a series.
pub fn last_word(job: &str, done: &Done) -> String {
    match done.last {
        Some((sequence, taken_unix_us)) => format!(
            "{} of {job}, the last is {job}@{sequence} from {}; `pagemark restore {job}` brings it back",
            if done.count == 1 { "1 checkpoint".into() } else { format!("{} checkpoints", text::count(done.count)) },
            text::ago(taken_unix_us),
        ),
        None => format!("no checkpoint of {job} was taken"),
    }
}

/// Saving state on this machine is not possible as asked for.
pub fn cannot_here(error: impl std::fmt::Display) -> Failure {
    Failure::new("checkpoints can't be taken here as asked for", error)
        .help("`pagemark doctor` tells what works; --memory-only saves memory and registers alone, without CRIU")
}

/// Attaching or a single checkpoint failed: what to do about it.
pub fn attach_failure(pid: i32, error: impl std::fmt::Display) -> Failure {
    Failure::new(format!("cannot checkpoint process {pid}"), error)
        .help("`pagemark doctor` tells what works on this machine")
}
