//! `bench process`: downtime, throughput of the target, bytes written and Pagemark's own memory, for a process that dirties
//! a share of its pages between checkpoints.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use pagemark::Mechanism;
use pagemark::checkpointer::Strategy;
use pagemark::repository::Repository;
use pagemark::tracker::{Probe, probe};
use pagemark_process::criu::Criu;
use pagemark_process::job::{self, Job};

use crate::BenchError;
use crate::peer::full_dump;
use crate::stats::Samples;
use crate::trackee::{Trackee, idle};
use crate::workload::Workload;

/// What is measured.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// The target's memory, MiB
    #[arg(long, default_value_t = 1024)]
    mib: usize,
    /// Pages dirtied between checkpoints, per cent
    #[arg(long, value_delimiter = ',', default_values_t = [1.0, 10.0, 50.0])]
    percent: Vec<f64>,
    /// Mechanisms [default: adaptive, pagemap-scan and soft-dirty, those that work here]
    #[arg(long, value_delimiter = ',')]
    mechanism: Vec<Mechanism>,
    /// Copy everything while the target is frozen, instead of most of it before
    #[arg(long)]
    stop_and_copy: bool,
    /// Checkpoints a measurement
    #[arg(long, default_value_t = 12)]
    checkpoints: u32,
    /// Time between checkpoints, milliseconds
    #[arg(long, default_value_t = 1000)]
    every_ms: u64,
    /// Dirtied pages lie in runs of so many
    #[arg(long, default_value_t = 16)]
    run_pages: usize,
    /// Where the repository lies while it is measured; by default in the directory for temporary files
    #[arg(long)]
    directory: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Options {
    fn mechanisms(&self) -> Vec<Mechanism> {
        if !self.mechanism.is_empty() {
            return self.mechanism.clone();
        }
        let mut probes = probe();
        probes.retain(|probe| {
            [Mechanism::Adaptive, Mechanism::PagemapScan, Mechanism::SoftDirty].contains(&probe.mechanism)
        });
        let works = |probe: Probe| match probe.result {
            Ok(_) => Some(probe.mechanism),
            Err(error) => {
                eprintln!("left out: {error}");
                None
            }
        };
        probes.into_iter().filter_map(works).collect()
    }

    fn strategy(&self) -> Strategy {
        if self.stop_and_copy { Strategy::StopAndCopy } else { Strategy::default() }
    }
}

/// Checkpoints taken before anything is measured: the first copies everything, and `adaptive` learns what is hot.
const WARM_UP: u32 = 6;

/// Full dumps by the peer.
const PEER_DUMPS: u32 = 3;

/// One line of the result.
#[derive(serde::Serialize)]
struct Row {
    percent: f64,
    mechanism: Mechanism,
    dirty_pages: Samples,
    frozen_pages: Samples,
    rounds: Samples,
    downtime_us: Samples,
    memory_downtime_us: Samples,
    state_downtime_us: Samples,
    written_bytes: Samples,
    /// Of the target, tracked and checkpointed, to the target alone.
    throughput_ratio: Samples,
    own_memory_bytes: u64,
    peer_frozen_us: Samples,
    peer_total_us: Samples,
    peer_bytes: u64,
}

/// Measures and prints.
///
/// # Errors
/// A checkpoint, or something else that is measured, failed.
pub fn run(options: &Options) -> Result<(), BenchError> {
    let mut rows = Vec::new();
    let mechanisms = options.mechanisms();
    for &percent in &options.percent {
        let workload =
            Workload { mib: options.mib, percent, run_pages: options.run_pages, pass_ms: options.every_ms / 2 };
        let trackee = Trackee::start(&workload)?;
        let peer = measure_peer(&trackee)?;
        for &mechanism in &mechanisms {
            eprintln!("{percent} % dirty, {mechanism} …");
            let mut row = measure(options, &trackee, percent, mechanism)?;
            row.peer_frozen_us = peer.iter().map(|dump| dump.frozen.as_micros() as f64).collect();
            row.peer_total_us = peer.iter().map(|dump| dump.total.as_micros() as f64).collect();
            row.peer_bytes = peer.last().map_or(0, |dump| dump.bytes);
            rows.push(row);
        }
    }
    if options.json {
        println!("{}", serde_json::to_string_pretty(&rows).map_err(|error| BenchError::Pagemark(error.into()))?);
    } else {
        print(options, &rows);
    }
    Ok(())
}

fn measure_peer(trackee: &Trackee) -> Result<Vec<crate::peer::FullDump>, BenchError> {
    let criu = Criu::find().map_err(|error| BenchError::Pagemark(error.into()))?;
    (0..PEER_DUMPS)
        .map(|_| {
            let directory = tempfile::tempdir_in("/dev/shm").map_err(BenchError::on("make a directory in memory"))?;
            full_dump(criu.path(), trackee.pid(), directory.path())
        })
        .collect()
}

fn measure(options: &Options, trackee: &Trackee, percent: f64, mechanism: Mechanism) -> Result<Row, BenchError> {
    let directory = match &options.directory {
        Some(directory) => tempfile::tempdir_in(directory),
        None => tempfile::tempdir(),
    };
    let directory = directory.map_err(BenchError::on("make a directory for the repository"))?;
    let pagemark = |error: Box<dyn std::error::Error + Send + Sync>| BenchError::Pagemark(error);
    let repository =
        Repository::create(&directory.path().join("repository")).map_err(|error| pagemark(error.into()))?;
    let mut row = Row {
        percent,
        mechanism,
        dirty_pages: Samples::default(),
        frozen_pages: Samples::default(),
        rounds: Samples::default(),
        downtime_us: Samples::default(),
        memory_downtime_us: Samples::default(),
        state_downtime_us: Samples::default(),
        written_bytes: Samples::default(),
        throughput_ratio: Samples::default(),
        own_memory_bytes: 0,
        peer_frozen_us: Samples::default(),
        peer_total_us: Samples::default(),
        peer_bytes: 0,
    };
    let every = Duration::from_millis(options.every_ms);
    let alone_time = every * 3;
    let mut alone_before = trackee.updates_per_second(idle(alone_time))?;

    let mut job = Job::attach(
        trackee.pid(),
        repository,
        job::Options { mechanism: Some(mechanism), strategy: options.strategy(), ..job::Options::new("bench") },
    )
    .map_err(|error| pagemark(error.into()))?;
    for _ in 0..WARM_UP {
        let begin = Instant::now();
        job.checkpoint().map_err(|error| pagemark(error.into()))?;
        std::thread::sleep(every.saturating_sub(begin.elapsed()));
    }
    let mut tracked = Samples::default();
    for _ in 0..options.checkpoints {
        let rate = trackee.updates_per_second(|| {
            let begin = Instant::now();
            let taken = job.checkpoint().map_err(|error| pagemark(error.into()))?;
            let cost = taken.cost;
            row.dirty_pages.push(cost.dirty_pages as f64);
            row.frozen_pages.push(cost.frozen_pages as f64);
            row.rounds.push(cost.rounds.into());
            row.downtime_us.push(cost.downtime_us as f64);
            row.memory_downtime_us.push(cost.memory_downtime_us as f64);
            row.state_downtime_us.push(cost.state_downtime_us as f64);
            row.written_bytes.push(cost.written_bytes as f64);
            std::thread::sleep(every.saturating_sub(begin.elapsed()));
            Ok(())
        })?;
        tracked.push(rate);
    }
    row.own_memory_bytes = own_memory_bytes()?;
    job.detach();
    let alone_after = trackee.updates_per_second(idle(alone_time))?;
    // What the target does alone drifts on a shared machine: measured before and after, the mean is nearest.
    alone_before = (alone_before + alone_after) / 2.0;
    row.throughput_ratio = tracked.map(|rate| rate / alone_before);
    Ok(row)
}

/// Anonymous memory of this process, bytes, without what it has lent to the kernel: what Pagemark needs for itself.
fn own_memory_bytes() -> Result<u64, BenchError> {
    let rollup =
        std::fs::read_to_string("/proc/self/smaps_rollup").map_err(BenchError::on("read its own memory use"))?;
    let kib = |name| {
        let line = rollup.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|line| line.split_whitespace().next()).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0)
    };
    Ok((kib("Anonymous:") - kib("LazyFree:").min(kib("Anonymous:"))) * 1024)
}

fn print(options: &Options, rows: &[Row]) {
    println!(
        "{} MiB, {} {} checkpoints every {} ms after {WARM_UP} to warm up; dirty pages in runs of {}; medians",
        options.mib,
        options.checkpoints,
        if options.stop_and_copy { "stop-and-copy" } else { "pre-copy" },
        options.every_ms,
        options.run_pages
    );
    println!(
        "{:>6} {:<13} {:>8} {:>7} {:>9} {:>9} {:>8} {:>8} {:>9} {:>10} {:>9} {:>9} {:>8}",
        "dirty",
        "mechanism",
        "pages",
        "frozen",
        "downtime",
        "p99",
        "memory",
        "state",
        "CRIU full",
        "ratio",
        "written",
        "target",
        "own mem"
    );
    for row in rows {
        let downtime = row.downtime_us.median();
        let peer = row.peer_frozen_us.median();
        println!(
            "{:>4} % {:<13} {:>8} {:>7} {:>6.1} ms {:>6.1} ms {:>5.1} ms {:>5.1} ms {:>6.0} ms {:>9.3}x {:>5.1} MB {:>7.1} % {:>4.0} MiB",
            row.percent,
            row.mechanism.name(),
            row.dirty_pages.median(),
            row.frozen_pages.median(),
            downtime / 1e3,
            row.downtime_us.p99() / 1e3,
            row.memory_downtime_us.median() / 1e3,
            row.state_downtime_us.median() / 1e3,
            peer / 1e3,
            downtime / peer,
            row.written_bytes.median() / 1e6,
            row.throughput_ratio.median() * 100.0,
            row.own_memory_bytes as f64 / 1048576.0,
        );
    }
    println!(
        "pages: copied a checkpoint, all rounds; frozen: those copied while frozen; ratio: downtime to CRIU's full dump's; \
         target: its throughput to that without Pagemark"
    );
}
