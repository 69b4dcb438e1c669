//! `pagemark simulate interval`: simulates one interval, and compares the machine with the
//! checkpoint at its end.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use pagemark::repository::Repository;
use pagemark_report::output::print;
use pagemark_report::text;
use pagemark_vm::{Interval, Observer, SimulatedInterval, simulator_library};

use crate::failure::{Failure, Outcome};
use crate::output::print_json;
use crate::reference::{Reference, read_checkpoint};
use crate::repository::RepositoryOptions;

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
    /// One JSON document
    #[arg(long)]
    json: bool,
    /// The checkpoint at the begin: JOB@N
    checkpoint: Reference,
}

/// The exit status of an interval that is not the one that ran.
const DIFFERS: u8 = 3;

/// What observes the machine.
#[derive(Args, Debug, Clone)]
struct ObserverOptions {
    /// What observes the machine: mix (instructions by kind, accesses to memory), hot (instructions
    /// by lines of code), cache (two levels of caches for data), or a plugin of QEMU:
    /// FILE[,OPTION=VALUE], where {} stands for the interval's first checkpoint
    #[arg(long, value_name = "PLUGIN")]
    plugin: String,
}

impl ObserverOptions {
    /// The observer of the interval that begins at a checkpoint.
    fn observer(&self, from: u64) -> Result<Observer, Failure> {
        match self.plugin.parse() {
            Ok(kind) => Ok(Observer::Simulator(kind)),
            Err(reason) => {
                // QEMU is started in another directory.
                let (file, options) = self.plugin.split_once(',').unwrap_or((&self.plugin, ""));
                let path = Path::new(file).canonicalize().map_err(|_| {
                    Failure::usage(format!("{file} is no file; {reason}"))
                        .help("name a simulator or the file of a plugin")
                })?;
                let separator = if options.is_empty() { "" } else { "," };
                let path = path.display().to_string().replace(',', ",,");
                Ok(Observer::Plugin(format!("{path}{separator}{}", options.replace("{}", &from.to_string()))))
            }
        }
    }

    /// A name for files: that of the simulator, or the plugin's file.
    fn name(&self) -> String {
        let file = self.plugin.split(',').next().unwrap_or_default();
        Path::new(file).file_stem().map_or_else(|| file.to_owned(), |stem| stem.to_string_lossy().into_owned())
    }

    /// The directory of the results among `results`.
    fn directory(&self, results: &Path) -> PathBuf {
        results.join(self.name())
    }
}

impl SimulateInterval {
    pub fn run(self) -> Outcome {
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
        let observer = self.observer.observer(first)?;
        let library = simulator_library().map_err(failed)?;
        let done =
            Interval::new(&from, &to).and_then(|interval| interval.simulate(&observer, &library)).map_err(failed)?;
        if let Some(results) = &self.results {
            let directory = self.observer.directory(results);
            keep(&directory, &done).map_err(|error| {
                Failure::new(format!("cannot keep the result in {}", directory.display()), error)
                    .help("it is simulated again if it is asked for again")
            })?;
        }
        if self.json {
            return print_json(&done);
        }
        print(&format!(
            "{job}@{first} to {job}@{last}: {} instructions as recorded, in {} (start {}, comparison {})\n",
            text::count(done.instructions),
            text::micros(done.run_us),
            text::micros(done.start_us),
            text::micros(done.compare_us)
        ));
        if let Some(results) = done.results.filter(|results| results.counts.len() <= 100) {
            results.counts.iter().for_each(|(name, count)| print(&format!("{name}: {count}\n")));
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// The end of the interval that begins at a checkpoint.
fn next(repository: &Repository, job: &str, from: u64) -> Result<Option<u64>, Failure> {
    let taken = repository.checkpoints(job).map_err(|error| Failure::of(format!("cannot list {job}"), error))?;
    Ok(taken.iter().map(|info| info.sequence).find(|&sequence| sequence > from))
}

/// Writes a result, whole or not at all.
fn keep(directory: &Path, done: &SimulatedInterval) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    let name = format!("{}-{}", done.from, done.to);
    // Two tasks may simulate the same interval, if one was lost for a while.
    let partial = directory.join(format!("{name}.{}.partial", std::process::id()));
    let file = File::create(&partial)?;
    let written = serde_json::to_writer(&file, done).map_err(io::Error::from).and_then(|()| file.sync_all());
    written.and_then(|()| fs::rename(&partial, directory.join(format!("{name}.json")))).inspect_err(|_| {
        // A part of a result is of no use; the error above is the one to report.
        let _ = fs::remove_file(&partial);
    })
}
