//! `bench redis`: what a Redis server does under load while it is checkpointed, beside what it does alone.

use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pagemark::repository::Repository;
use pagemark_process::job::{self, Job};

use crate::BenchError;
use crate::stats::Samples;

/// What is measured.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// Keys of 1000 bytes each in the server
    #[arg(long, default_value_t = 1_000_000)]
    keys: u32,
    /// Requests a measurement, half of them GET and half SET on random keys
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
}

impl Options {
    /// The command that runs `program` where it is to run.
    fn command(&self, program: &str) -> Vec<String> {
        let mut words = Vec::new();
        if let Some(core) = self.core {
            words.extend(["taskset".into(), "-c".into(), core.to_string()]);
        }
        words.push(program.into());
        words
    }

    /// The load generator, with what all its runs have in common.
    fn benchmark(&self, port: &str) -> Command {
        let words = self.command("redis-benchmark");
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).args(["-p", port, "-c", CLIENTS, "-r", &self.keys.to_string(), "-d", "1000", "-q"]);
        command.stderr(Stdio::null());
        command
    }
}

/// Connections of the load.
const CLIENTS: &str = "8";

/// A server that is killed when this is dropped.
struct Server {
    child: Child,
    port: String,
}

impl Server {
    fn start(options: &Options) -> Result<Server, BenchError> {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).map_err(BenchError::on("find a free port"))?;
        let port = listener.local_addr().map_err(BenchError::on("find a free port"))?.port();
        drop(listener);
        let mut words = options.command("redis-server");
        words.extend(["--port".into(), port.to_string(), "--save".into(), String::new()]);
        let words: Vec<_> = words.into_iter().map(Into::into).collect();
        let child = pagemark_process::spawn::spawn(&words, nix::sys::signal::SigSet::empty())
            .map_err(|error| BenchError::Pagemark(error.into()))?;
        let server = Server { child, port: port.to_string() };
        let deadline = Instant::now() + Duration::from_secs(10);
        while TcpStream::connect(("127.0.0.1", port)).is_err() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(50));
        }
        // Random keys meet most of the range when there are twice as many of them.
        let filled = options
            .benchmark(&server.port)
            .args(["-P", "64", "-n", &(u64::from(options.keys) * 2).to_string(), "-t", "set"])
            .stdout(Stdio::null())
            .status()
            .map_err(BenchError::on("start redis-benchmark"))?;
        if !filled.success() {
            return Err(BenchError::Workload { said: "redis-benchmark could not fill the server".into() });
        }
        Ok(server)
    }

    /// Requests a second, of both kinds.
    fn load(&self, options: &Options) -> Result<f64, BenchError> {
        let half = (options.requests / 2).to_string();
        let begin = Instant::now();
        let output = options
            .benchmark(&self.port)
            .args(["-n", &half, "-t", "set,get"])
            .output()
            .map_err(BenchError::on("start redis-benchmark"))?;
        if !output.status.success() {
            return Err(BenchError::Workload { said: String::from_utf8_lossy(&output.stdout).into_owned() });
        }
        Ok(f64::from(options.requests) / begin.elapsed().as_secs_f64())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Measures and prints.
///
/// # Errors
/// Redis could not be run, or a checkpoint failed.
pub fn run(options: &Options) -> Result<(), BenchError> {
    let server = Server::start(options)?;
    let directory = tempfile::tempdir().map_err(BenchError::on("make a directory for the repository"))?;
    let mut ratios = Samples::default();
    let mut downtimes_us = Samples::default();
    let mut before = server.load(options)?;
    for _ in 0..options.turns {
        let mut costs = Vec::new();
        let tracked = checkpointed(&server, directory.path(), options, &mut costs)?;
        costs.into_iter().for_each(|cost| downtimes_us.push(cost));
        let after = server.load(options)?;
        ratios.push(tracked / ((before + after) / 2.0));
        eprintln!("alone {before:.0} requests/s, checkpointed {tracked:.0}, alone again {after:.0}");
        before = after;
    }
    println!(
        "Redis, {} keys, {CLIENTS} connections, GET and SET in turn, a checkpoint every {} ms: {:.1} % of its requests \
         a second alone (median of {}; {:.1} % to {:.1} %); frozen {:.1} ms (median), {:.1} ms (p99)",
        options.keys,
        options.every_ms,
        ratios.median() * 100.0,
        options.turns,
        ratios.quantile(0.0) * 100.0,
        ratios.quantile(1.0) * 100.0,
        downtimes_us.median() / 1e3,
        downtimes_us.p99() / 1e3,
    );
    Ok(())
}

/// The load while a job takes checkpoints; the first one, which copies everything, is over when it begins.
fn checkpointed(
    server: &Server,
    directory: &std::path::Path,
    options: &Options,
    downtimes_us: &mut Vec<f64>,
) -> Result<f64, BenchError> {
    let pagemark = |error: Box<dyn std::error::Error + Send + Sync>| BenchError::Pagemark(error);
    let repository =
        Repository::open_or_create(&directory.join("repository")).map_err(|error| pagemark(error.into()))?;
    let mut job = Job::attach(server.child.id() as i32, repository, job::Options::new("redis"))
        .map_err(|error| pagemark(error.into()))?;
    job.checkpoint().map_err(|error| pagemark(error.into()))?;
    let is_over = AtomicBool::new(false);
    let every = Duration::from_millis(options.every_ms);
    std::thread::scope(|scope| {
        let checkpoints = scope.spawn(|| -> Result<(), BenchError> {
            while !is_over.load(Ordering::Relaxed) {
                let begin = Instant::now();
                let taken = job.checkpoint().map_err(|error| pagemark(error.into()))?;
                downtimes_us.push(taken.cost.downtime_us as f64);
                std::thread::sleep(every.saturating_sub(begin.elapsed()));
            }
            Ok(())
        });
        let rate = server.load(options);
        is_over.store(true, Ordering::Relaxed);
        checkpoints.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        rate
    })
}
