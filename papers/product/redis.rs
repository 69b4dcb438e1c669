//! `pagemark-bench redis`: the throughput of a Redis server under load while it is checkpointed,
//! beside its throughput without Pagemark. It reproduces no experiment of the papers;
//! [`crate::ldt`] has their Redis figures.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pagemark::repository::Repository;
use pagemark::track::Scope;
use pagemark::{Job, JobOptions, Mechanism};
use pagemark_linux::proc::Process;
use pagemark_process::criu::DumpOptions;
use pagemark_process::saver::CriuSaver;
use pagemark_process::target::ProcessTarget;
use pagemark_report::output::print;
use pagemark_report::samples::Samples;

use crate::BenchError;
use crate::measuring::redis_server::RedisServer;
use crate::product::delta_turns::{self, compare};

/// Options of the measurement.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// Keys of 1000 bytes each in the server
    #[arg(long, default_value_t = 1_000_000)]
    keys: u32,
    /// Requests in a measurement, half of them GET and half SET, of random keys
    #[arg(long, default_value_t = 200_000)]
    requests: u32,
    /// Measurements with checkpoints, each between two without
    #[arg(long, default_value_t = 5)]
    turns: u32,
    /// Time between checkpoints, milliseconds
    #[arg(long, default_value_t = 1000)]
    every_ms: u64,
    /// Keep server and load on this core, so that the others are free for the checkpoints
    #[arg(long)]
    core: Option<u32>,
    /// Measure instead what deltas of pages save and cost in turns with whole pages, by kinds of
    /// requests: values of 100 bytes, counters, a list that grows. A tenth of the requests come
    /// before each checkpoint
    #[arg(long)]
    deltas: bool,
}

impl Options {
    /// The words before a command that is to run on the chosen core.
    fn prefix(&self) -> Vec<String> {
        self.core.map_or_else(Vec::new, |core| vec!["taskset".into(), "-c".into(), core.to_string()])
    }

    /// The load generator, with the arguments that all its runs have.
    fn benchmark(&self, server: &RedisServer) -> Command {
        let mut words = self.prefix();
        words.push("redis-benchmark".into());
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).args(["-p", &server.port().to_string(), "-c", CLIENTS, "-r", &self.keys.to_string()]);
        command.args(["-d", "1000", "-q"]).stderr(Stdio::null());
        command
    }
}

/// Connections of the load.
const CLIENTS: &str = "8";

/// Sets twice as many random keys as there are, which reaches most of them.
fn fill(server: &RedisServer, options: &Options) -> Result<(), BenchError> {
    let filled = options
        .benchmark(server)
        .args(["-P", "64", "-n", &(u64::from(options.keys) * 2).to_string(), "-t", "set"])
        .stdout(Stdio::null())
        .status()
        .map_err(BenchError::on("start redis-benchmark"))?;
    if !filled.success() {
        return Err(BenchError::Workload { output: "redis-benchmark could not fill the server".into() });
    }
    Ok(())
}

/// Requests a second, of both kinds together.
fn load(server: &RedisServer, options: &Options) -> Result<f64, BenchError> {
    let half = (options.requests / 2).to_string();
    let begin = Instant::now();
    let output = options
        .benchmark(server)
        .args(["-n", &half, "-t", "set,get"])
        .output()
        .map_err(BenchError::on("start redis-benchmark"))?;
    if !output.status.success() {
        return Err(BenchError::Workload { output: String::from_utf8_lossy(&output.stdout).into_owned() });
    }
    Ok(f64::from(options.requests) / begin.elapsed().as_secs_f64())
}

/// The requests by which deltas are measured.
const DELTA_REQUESTS: [(&str, &str); 3] =
    [("values of 100 bytes", "set"), ("counters", "incr"), ("a list that grows", "rpush")];

/// Checkpoints of each form in a turn.
const DELTA_CHECKPOINTS: u32 = 5;

/// Sends requests of one kind, with values of 100 bytes.
fn send(server: &RedisServer, options: &Options, kind: &str, requests: u64) -> Result<(), BenchError> {
    let sent = options
        .benchmark(server)
        .args(["-d", "100", "-P", "16", "-n", &requests.to_string(), "-t", kind])
        .stdout(Stdio::null())
        .status()
        .map_err(BenchError::on("start redis-benchmark"))?;
    if !sent.success() {
        return Err(BenchError::Workload { output: format!("redis-benchmark -t {kind} failed") });
    }
    Ok(())
}

/// Measures what deltas save and cost.
fn run_deltas(options: &Options, server: &RedisServer, directory: &std::path::Path) -> Result<(), BenchError> {
    let mut rows = Vec::new();
    for (name, kind) in DELTA_REQUESTS {
        send(server, options, kind, u64::from(options.keys) * 2)?;
        let mechanism = Mechanism::choose(Scope::Process);
        let mut write = || send(server, options, kind, u64::from(options.requests / 10));
        let directory = directory.join(kind);
        std::fs::create_dir(&directory).map_err(BenchError::on("make a directory for the repositories"))?;
        let compared = compare(server.pid(), mechanism, &directory, [options.turns, DELTA_CHECKPOINTS], &mut write)?;
        rows.push((name.to_owned(), compared));
    }
    print(&format!(
        "Redis, {} keys, {} requests before each checkpoint, {} turns of {DELTA_CHECKPOINTS} checkpoints of each form; \
         medians\n{}",
        options.keys,
        options.requests / 10,
        options.turns,
        delta_turns::table(&rows),
    ));
    Ok(())
}

/// Measures and prints.
///
/// # Errors
/// Redis could not be run, or a checkpoint failed.
pub fn run(options: &Options) -> Result<(), BenchError> {
    let server = RedisServer::start(&options.prefix())?;
    let directory = tempfile::tempdir().map_err(BenchError::on("make a directory for the repository"))?;
    if options.deltas {
        return run_deltas(options, &server, directory.path());
    }
    fill(&server, options)?;
    let mut ratios = Samples::default();
    let mut downtimes_us = Samples::default();
    let mut before = load(&server, options)?;
    for _ in 0..options.turns {
        let mut costs = Vec::new();
        let tracked = checkpointed(&server, directory.path(), options, &mut costs)?;
        costs.into_iter().for_each(|cost| downtimes_us.push(cost));
        let after = load(&server, options)?;
        ratios.push(tracked / ((before + after) / 2.0));
        eprintln!("alone {before:.0} requests/s, checkpointed {tracked:.0}, alone again {after:.0}");
        before = after;
    }
    print(&format!(
        "Redis, {} keys, {CLIENTS} connections, GET and SET in turn, a checkpoint every {} ms: {:.1} % of its requests \
         a second alone (median of {}; {:.1} % to {:.1} %); frozen {:.1} ms (median), {:.1} ms (p99)\n",
        options.keys,
        options.every_ms,
        ratios.median() * 100.0,
        options.turns,
        ratios.least() * 100.0,
        ratios.greatest() * 100.0,
        downtimes_us.median() / 1e3,
        downtimes_us.p99() / 1e3,
    ));
    Ok(())
}

/// Requests a second while a job takes checkpoints. The first checkpoint, which copies everything,
/// precedes the load.
fn checkpointed(
    server: &RedisServer,
    directory: &std::path::Path,
    options: &Options,
    downtimes_us: &mut Vec<f64>,
) -> Result<f64, BenchError> {
    let repository = Repository::open_or_create(&directory.join("repository")).map_err(BenchError::pagemark)?;
    let saver = CriuSaver::find(DumpOptions::default()).map_err(BenchError::pagemark)?;
    let target =
        ProcessTarget::attach(Process::find(server.pid()).unwrap(), Mechanism::choose(Scope::Process), Arc::new(saver));
    let mut job = Job::new(target.map_err(BenchError::pagemark)?, repository, JobOptions::new("redis"));
    job.checkpoint().map_err(BenchError::pagemark)?;
    let is_over = AtomicBool::new(false);
    let every = Duration::from_millis(options.every_ms);
    std::thread::scope(|scope| {
        let checkpoints = scope.spawn(|| -> Result<(), BenchError> {
            while !is_over.load(Ordering::Relaxed) {
                let begin = Instant::now();
                let taken = job.checkpoint().map_err(BenchError::pagemark)?;
                downtimes_us.push(taken.cost.downtime_us as f64);
                std::thread::sleep(every.saturating_sub(begin.elapsed()));
            }
            Ok(())
        });
        let rate = load(server, options);
        is_over.store(true, Ordering::Relaxed);
        checkpoints.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        rate
    })
}
