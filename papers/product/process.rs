//! `pagemark-bench process`: downtime, processor time, throughput of the target, written bytes and
//! Pagemark's own memory, for a process that dirties a share of its pages between checkpoints,
//! beside CRIU's full dump of the same process. It reproduces no experiment of the papers.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use pagemark::checkpointer::Strategy;
use pagemark::repository::Repository;
use pagemark::track::{Probe, Scope, probe};
use pagemark::{Job, JobOptions, Mechanism, Policy};
use pagemark_linux::proc::Process;
use pagemark_process::criu::{Criu, DumpOptions};
use pagemark_process::saver::CriuSaver;
use pagemark_process::target::ProcessTarget;
use pagemark_report::output::print;
use pagemark_report::samples::Samples;
use pagemark_report::table::Table;

use crate::measuring::usage::{own_memory_bytes, processor_time};
use crate::product::criu_dump::{FullDump, full_dump};
use crate::product::delta_turns::{self, Comparison, compare};
use crate::product::trackee::{Trackee, idle};
use crate::product::workload::Workload;
use crate::{BenchError, print_json};

/// Options of the measurement.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// The target's memory, MiB
    #[arg(long, default_value_t = 1024)]
    mib: usize,
    /// Pages dirtied between checkpoints, per cent
    #[arg(long, value_delimiter = ',', default_values_t = [1.0, 10.0, 50.0])]
    percent: Vec<f64>,
    /// Mechanisms [default: those of adaptive, pagemap-scan and soft-dirty that work here]
    #[arg(long, value_delimiter = ',')]
    mechanism: Vec<Mechanism>,
    /// How memory is copied
    #[arg(long, default_value = "pre-copy", value_enum)]
    strategy: StrategyName,
    /// Checkpoints in a measurement
    #[arg(long, default_value_t = 12)]
    checkpoints: u32,
    /// Time between checkpoints, milliseconds
    #[arg(long, default_value_t = 1000)]
    every_ms: u64,
    /// Length of the runs of dirtied pages
    #[arg(long, default_value_t = 16)]
    run_pages: usize,
    /// Children of the target that share its memory since they were forked
    #[arg(long, default_value_t = 0, value_name = "CHILDREN")]
    prefork: u32,
    /// Measure instead what deltas of pages save and cost: take checkpoints with deltas and with
    /// whole pages by turns, TURNS times each
    #[arg(long, value_name = "TURNS")]
    deltas: Option<u32>,
    /// Directory for the repository [default: the directory for temporary files]
    #[arg(long)]
    directory: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The strategies of the measurement.
#[derive(clap::ValueEnum, Clone, Copy, Debug)]
enum StrategyName {
    /// Most of the memory before the target is frozen.
    PreCopy,
    /// Everything while it is frozen.
    StopAndCopy,
    /// From a copy when it runs again.
    CopyOnWrite,
    /// The shortest freeze of these, in each checkpoint.
    Auto,
}

impl Options {
    fn mechanisms(&self) -> Vec<Mechanism> {
        if !self.mechanism.is_empty() {
            return self.mechanism.clone();
        }
        let mut probes = probe(Scope::Process);
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

    /// A directory for repositories.
    fn temporary_directory(&self) -> Result<tempfile::TempDir, BenchError> {
        let directory = match &self.directory {
            Some(directory) => tempfile::tempdir_in(directory),
            None => tempfile::tempdir(),
        };
        directory.map_err(BenchError::on("make a directory for the repository"))
    }

    fn describe(&self) -> String {
        format!(
            "{} MiB, {} checkpoints of each form in a turn, every {} ms; dirty pages in runs of {}; medians",
            self.mib, self.checkpoints, self.every_ms, self.run_pages
        )
    }

    fn strategy(&self) -> Strategy {
        match self.strategy {
            StrategyName::PreCopy => Strategy::default(),
            StrategyName::StopAndCopy => Strategy::StopAndCopy,
            StrategyName::CopyOnWrite => Strategy::CopyOnWrite,
            StrategyName::Auto => Strategy::Auto,
        }
    }
}

/// Checkpoints before the measured ones: the first copies everything, and `adaptive` learns which
/// pages are hot.
const WARM_UP: u32 = 6;

/// Number of full dumps by CRIU.
const PEER_DUMPS: u32 = 3;

/// A row of the result.
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
    /// Processor time of a checkpoint: of Pagemark, of CRIU, and of the programs that CRIU starts.
    processor_us: Samples,
    written_bytes: Samples,
    /// Throughput of the target while it is checkpointed, divided by that without Pagemark.
    throughput_ratio: Samples,
    own_memory_bytes: u64,
    /// Memory of the target and its children without Pagemark, each shared page counted once.
    target_bytes_before: u64,
    /// The same after the checkpoints.
    target_bytes_after: u64,
    peer_frozen_us: Samples,
    peer_total_us: Samples,
    peer_bytes: u64,
}

/// Measures and prints.
///
/// # Errors
/// A checkpoint, a dump by CRIU, or the target failed.
pub fn run(options: &Options) -> Result<(), BenchError> {
    let (mut rows, mut deltas) = (Vec::new(), Vec::new());
    let mechanisms = options.mechanisms();
    for &percent in &options.percent {
        let workload = Workload {
            mib: options.mib,
            percent,
            run_pages: options.run_pages,
            pass_ms: options.every_ms / 2,
            children: options.prefork,
        };
        let trackee = Trackee::start(&workload)?;
        if let Some(turns) = options.deltas {
            for &mechanism in &mechanisms {
                let compared = measure_deltas(options, &trackee, mechanism, turns)?;
                deltas.push((format!("{percent} % of the pages, {mechanism}"), compared));
            }
            continue;
        }
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
    if options.deltas.is_some() {
        if options.json {
            return print_json(&deltas);
        }
        print(&format!("{}\n{}", options.describe(), delta_turns::table(&deltas)));
    } else if options.json {
        print_json(&rows)?;
    } else {
        print(&table(options, &rows));
    }
    Ok(())
}

fn measure_peer(trackee: &Trackee) -> Result<Vec<FullDump>, BenchError> {
    let criu = Criu::find().map_err(BenchError::pagemark)?;
    (0..PEER_DUMPS)
        .map(|_| {
            let directory = tempfile::tempdir_in("/dev/shm").map_err(BenchError::on("make a directory in memory"))?;
            full_dump(criu.path(), trackee.pid(), directory.path())
        })
        .collect()
}

fn measure_deltas(
    options: &Options,
    trackee: &Trackee,
    mechanism: Mechanism,
    turns: u32,
) -> Result<Comparison, BenchError> {
    let directory = options.temporary_directory()?;
    let every = Duration::from_millis(options.every_ms);
    let mut write = || trackee.updates_per_second(idle(every)).map(drop);
    compare(trackee.pid(), mechanism, directory.path(), [turns, options.checkpoints], &mut write)
}

fn measure(options: &Options, trackee: &Trackee, percent: f64, mechanism: Mechanism) -> Result<Row, BenchError> {
    let directory = options.temporary_directory()?;
    let repository = Repository::create(&directory.path().join("repository")).map_err(BenchError::pagemark)?;
    let mut row = Row {
        percent,
        mechanism,
        dirty_pages: Samples::default(),
        frozen_pages: Samples::default(),
        rounds: Samples::default(),
        downtime_us: Samples::default(),
        memory_downtime_us: Samples::default(),
        state_downtime_us: Samples::default(),
        processor_us: Samples::default(),
        written_bytes: Samples::default(),
        throughput_ratio: Samples::default(),
        own_memory_bytes: 0,
        target_bytes_before: 0,
        target_bytes_after: 0,
        peer_frozen_us: Samples::default(),
        peer_total_us: Samples::default(),
        peer_bytes: 0,
    };
    let every = Duration::from_millis(options.every_ms);
    let alone_time = every * 3;
    let alone_before = trackee.updates_per_second(idle(alone_time))?;

    row.target_bytes_before = trackee.proportional_bytes()?;
    let saver = CriuSaver::find(DumpOptions::default()).map_err(BenchError::pagemark)?;
    let target = ProcessTarget::attach(Process::find(trackee.pid()).unwrap(), mechanism, Arc::new(saver))
        .map_err(BenchError::pagemark)?;
    let policy = Policy { strategy: options.strategy(), ..Policy::default() };
    let mut job = Job::new(target, repository, JobOptions { policy, ..JobOptions::new("bench") });
    for _ in 0..WARM_UP {
        let begin = Instant::now();
        job.checkpoint().map_err(BenchError::pagemark)?;
        std::thread::sleep(every.saturating_sub(begin.elapsed()));
    }
    let mut tracked = Samples::default();
    for _ in 0..options.checkpoints {
        let rate = trackee.updates_per_second(|| {
            let (begin, used) = (Instant::now(), processor_time()?);
            let taken = job.checkpoint().map_err(BenchError::pagemark)?;
            row.processor_us.push((processor_time()? - used).as_micros() as f64);
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
    row.own_memory_bytes = anonymous_bytes()?;
    row.target_bytes_after = trackee.proportional_bytes()?;
    job.detach();
    let alone_after = trackee.updates_per_second(idle(alone_time))?;
    // On a shared machine the throughput without Pagemark drifts, so it is measured before and
    // after.
    let alone = (alone_before + alone_after) / 2.0;
    row.throughput_ratio = tracked.map(|rate| rate / alone);
    Ok(row)
}

/// Anonymous memory of this process, bytes, without the memory that the kernel may reclaim
/// (`MADV_FREE`).
fn anonymous_bytes() -> Result<u64, BenchError> {
    let bytes = |field| own_memory_bytes("smaps_rollup", field);
    Ok(bytes("Anonymous")?.saturating_sub(bytes("LazyFree")?))
}

fn table(options: &Options, rows: &[Row]) -> String {
    let mut out = format!(
        "{} MiB, {} {} checkpoints every {} ms after {WARM_UP} to warm up; dirty pages in runs of {}; medians\n",
        options.mib,
        options.checkpoints,
        options.strategy.to_possible_value().map_or_else(String::new, |name| name.get_name().to_owned()),
        options.every_ms,
        options.run_pages
    );
    let mut table = Table::new([
        ">dirty",
        "mechanism",
        ">pages",
        ">frozen",
        ">downtime",
        ">p99",
        ">memory",
        ">state",
        ">processor",
        ">CRIU full",
        ">ratio",
        ">written",
        ">target",
        ">own mem",
        ">target mem",
        ">after",
    ]);
    for row in rows {
        let mib = |bytes: u64| format!("{:.0} MiB", bytes as f64 / 1048576.0);
        let ms = |us: f64| format!("{:.1} ms", us / 1e3);
        let downtime_us = row.downtime_us.median();
        let peer_us = row.peer_frozen_us.median();
        table.row([
            format!("{} %", row.percent),
            row.mechanism.name().into(),
            row.dirty_pages.median().to_string(),
            row.frozen_pages.median().to_string(),
            ms(downtime_us),
            ms(row.downtime_us.p99()),
            ms(row.memory_downtime_us.median()),
            ms(row.state_downtime_us.median()),
            ms(row.processor_us.median()),
            format!("{:.0} ms", peer_us / 1e3),
            format!("{:.3}x", downtime_us / peer_us),
            format!("{:.1} MB", row.written_bytes.median() / 1e6),
            format!("{:.1} %", row.throughput_ratio.median() * 100.0),
            mib(row.own_memory_bytes),
            mib(row.target_bytes_before),
            mib(row.target_bytes_after),
        ]);
    }
    out += &table.to_string();
    out += "pages: copied a checkpoint, all rounds; frozen: those copied while frozen; processor: time of Pagemark, \
            CRIU and what it starts; ratio: downtime to CRIU's full dump's; \
            target: its throughput to that without Pagemark; target mem, after: proportional set size of the target and its \
            children without Pagemark, and after the checkpoints\n";
    out
}
