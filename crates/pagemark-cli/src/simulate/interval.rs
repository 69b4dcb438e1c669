//! `pagemark simulate interval`: simulates one interval, and compares the machine with the
//! checkpoint at its end.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use nix::unistd::getppid;
use pagemark::ByteCount;
use pagemark::repository::{Checkpoint, Repository};
use pagemark_linux::exit_watch::ExitWatch;
use pagemark_linux::proc::Process;
use pagemark_replay::{Interval, NewTrace, ResultsDirectory, default_shared_directory};
use pagemark_report::output::print;
use pagemark_report::text;
use pagemark_vm::simulator_library;

use crate::failure::{Failure, Outcome};
use crate::output::print_json;
use crate::reference::{Reference, read_checkpoint};
use crate::repository::RepositoryOptions;
use crate::simulate::observer::ObserverOptions;

/// Simulate one interval, and compare the machine with the checkpoint at its end
///
/// The machine runs again from the checkpoint JOB@N, watched by a plugin of QEMU. At the end its
/// memory and the state of its devices must be those of the next checkpoint; otherwise the first
/// page or device that differs is named, and the exit status is 3. The machine writes no files.
#[derive(Args, Debug)]
pub struct SimulateInterval {
    #[command(flatten)]
    repository: RepositoryOptions,
    #[command(flatten)]
    observer: ObserverOptions,
    /// The number of the checkpoint at the end [default: the next one]
    #[arg(long, value_name = "N")]
    to: Option<u64>,
    /// Keep the result in this directory, in a file for each interval and plugin
    #[arg(long, value_name = "DIR")]
    results: Option<PathBuf>,
    /// Share memory with other intervals on this node, by files in this directory: what they have
    /// in common is read from the repository once; auto: a directory of this user in /dev/shm, or
    /// in /var/tmp where that has too little room
    #[arg(long, value_name = "auto|DIR")]
    share: Option<PathBuf>,
    /// End when this process ends, which has started this one
    #[arg(long, value_name = "PID", hide = true)]
    parent: Option<i32>,
    /// One JSON document
    #[arg(long)]
    json: bool,
    /// The checkpoint at the begin: JOB@N
    checkpoint: Reference,
}

/// The directory that this program chooses.
pub(super) const AUTO: &str = "auto";

/// The exit status of an interval that is not the one that ran.
const DIFFERS: u8 = 3;

impl SimulateInterval {
    pub fn run(self) -> Outcome {
        if let Some(parent) = self.parent {
            end_with(parent)?;
        }
        let choice = self.observer.choice()?;
        let repository = self.repository.open()?;
        let from = read_checkpoint(&repository, &self.checkpoint)?;
        let (job, first) = (from.manifest.job.clone(), from.manifest.sequence);
        let last = match self.to {
            Some(last) => last,
            None => next(&repository, &job, first)?.ok_or_else(|| {
                let help = format!("`pagemark simulate list {job}` lists the intervals");
                Failure::plain(format!("no interval begins at {job}@{first}")).help(help)
            })?,
        };
        let to = read_checkpoint(&repository, &Reference { job: job.clone(), sequence: Some(last) })?;
        let failed = |error: pagemark_vm::Error| {
            let status = if error.kind() == pagemark_vm::ErrorKind::Differs { DIFFERS } else { 1 };
            Failure::of(format!("cannot simulate {job}@{first} to {job}@{last}"), error).status(status)
        };
        let directory = ResultsDirectory::new(self.results.as_deref(), &job, &choice);
        let trace = match (choice.is_trace(), &self.results) {
            (true, None) => {
                let reason = "a trace needs a directory for its files";
                return Err(Failure::usage(reason).help("name one by --results DIR"));
            }
            (true, Some(_)) => Some(directory.new_trace().map_err(Failure::cannot)?),
            (false, _) => None,
        };
        let observer = choice.observer(first, trace.as_ref().map(NewTrace::path).as_deref());
        let library = simulator_library().map_err(failed)?;
        let warm_up = earlier(&repository, &job, first, choice.warm_up())?;
        let interval = Interval::new(&from, &to).and_then(|interval| match &warm_up {
            Some(earlier) => interval.with_warm_up(earlier),
            None => Ok(interval),
        });
        let interval = interval.and_then(|interval| match &self.share {
            Some(directory) if directory == Path::new(AUTO) => interval.sharing(&default_shared_directory(&from)),
            Some(directory) => interval.sharing(directory),
            None => Ok(interval),
        });
        let done = interval.and_then(|interval| interval.simulate(&observer, &library)).map_err(failed)?;
        let done = directory.described(done);
        if self.results.is_some() {
            directory.keep(&done, trace).map_err(Failure::cannot)?;
        }
        if self.json {
            return print_json(&done);
        }
        let done = done.simulated;
        print(&format!(
            "{job}@{first} to {job}@{last}: {} instructions as recorded, in {} (start {}, comparison {}, {} read)\n",
            text::count(done.instructions),
            text::micros(done.run_us),
            text::micros(done.start_us),
            text::micros(done.compare_us),
            text::bytes(ByteCount::of_pages(done.read_pages).get())
        ));
        if let Some(results) = done.results.filter(|results| results.counts.len() <= 100) {
            results.counts.iter().for_each(|(name, count)| print(&format!("{name}: {count}\n")));
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Ends this process when its parent ends, which may be killed. Its QEMU ends with it.
fn end_with(parent: i32) -> Result<(), Failure> {
    const LOST: u8 = 1;
    let failed = |reason: &str| Failure::new(format!("cannot watch process {parent}"), reason);
    let exit = Process::find(parent).and_then(ExitWatch::new).map_err(|error| failed(&error.to_string()))?;
    // Another process may have got its id.
    if getppid().as_raw() != parent {
        return Err(failed("it has not started this one, or has ended"));
    }
    let started = std::thread::Builder::new().name("exit-watch".into()).spawn(move || {
        exit.wait();
        std::process::exit(LOST.into());
    });
    started.map(drop).map_err(|error| failed(&error.to_string()))
}

/// The checkpoint so many intervals before another, or the first. None if there is none before it.
fn earlier(repository: &Repository, job: &str, from: u64, intervals: u32) -> Result<Option<Checkpoint>, Failure> {
    let taken = repository.checkpoints(job).map_err(|error| Failure::of(format!("cannot list {job}"), error))?;
    let before: Vec<u64> = taken.iter().map(|info| info.sequence).filter(|&sequence| sequence < from).collect();
    let first = before.get(before.len().saturating_sub(intervals as usize)).copied();
    let reference = |sequence| Reference { job: job.to_owned(), sequence: Some(sequence) };
    first.map(|sequence| read_checkpoint(repository, &reference(sequence))).transpose()
}

/// The end of the interval that begins at a checkpoint.
fn next(repository: &Repository, job: &str, from: u64) -> Result<Option<u64>, Failure> {
    let taken = repository.checkpoints(job).map_err(|error| Failure::of(format!("cannot list {job}"), error))?;
    Ok(taken.iter().map(|info| info.sequence).find(|&sequence| sequence > from))
}
