//! `pagemark-bench vm`: the downtime of a virtual machine in a checkpoint, and how much slower it
//! runs, beside QEMU's own ways to save a machine: `savevm`, migration to a file, and a
//! `background-snapshot`. PML, sections 2.4 and 5, measures the same of a changed QEMU.

mod kvm_counts;
mod machine;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use pagemark::checkpointer::Strategy;
use pagemark::model::{self, CostModel, Costs, DirtyCurve, Forecast, Observation};
use pagemark::repository::Repository;
use pagemark::track::Scope;
use pagemark::{Job, JobOptions, Mechanism, Policy};
use pagemark_report::output::print;
use pagemark_report::samples::Samples;
use pagemark_report::table::Table;
use pagemark_vm::Activation;

use crate::measuring::full_logs::{FullLogs, NotCounted};
use crate::{BenchError, print_json};
use kvm_counts::CountsPerPass;
use machine::{Machine, Peer, Plan, Work};

/// Options of the measurement.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// Memory of the machine, MiB, all of it in use with the work `memory`
    #[arg(long, default_value_t = 1024)]
    mib: u32,
    /// What the machine does
    #[arg(long, value_enum, default_value_t)]
    work: Work,
    /// Pages that the machine writes again and again, with the work `memory`
    #[arg(long, default_value_t = 2048)]
    pages: u32,
    /// Processors of the machine; more than one need a Linux guest
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=255))]
    cpus: u32,
    /// The directory of a Linux guest, which `scripts/vm-guest.sh bench` makes, needed for the work
    /// `compile` [default: a program without an operating system]
    #[arg(long)]
    guest: Option<PathBuf>,
    /// Times between checkpoints, milliseconds
    #[arg(long, value_delimiter = ',', default_values_t = [100, 1000])]
    every_ms: Vec<u64>,
    /// Checkpoints in a measurement
    #[arg(long, default_value_t = 20)]
    checkpoints: u32,
    /// Measurements of each strategy and interval, each between two of the machine alone
    #[arg(long, default_value_t = 3)]
    turns: u32,
    /// How long the machine is measured alone, and with checkpoints at least, milliseconds
    /// [default: 2000; 10000 of a compiler]
    #[arg(long)]
    alone_ms: Option<u64>,
    /// The program without an operating system, for where there is no compiler: `bare.c` of this
    /// benchmark, compiled elsewhere
    #[arg(long)]
    program: Option<PathBuf>,
    /// Compile that program, and end
    #[arg(long, requires = "program")]
    compile_only: bool,
    /// Mechanism of pre-copy and stop-and-copy; kvm-log and kvm-ring also of copy-on-write, and
    /// then of a machine whose memory is shared [default: the one that Pagemark chooses]
    #[arg(long)]
    mechanism: Option<Mechanism>,
    /// Times that each of QEMU's own ways is measured
    #[arg(long, default_value_t = 3)]
    peers: u32,
    /// The accelerator of QEMU
    #[arg(long, default_value = "tcg")]
    accel: String,
    /// Directory for the repository and QEMU's files [default: the directory for temporary files]
    #[arg(long)]
    directory: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Checkpoints before the measured ones: the first copies everything.
const WARM_UP: u32 = 4;

/// How long the machine is observed for the cost model.
const OBSERVED: Duration = Duration::from_secs(4);

/// How long the machine is measured by itself, and with checkpoints at least.
const ALONE: Duration = Duration::from_secs(2);
/// The same of a compiler, which takes some tenths of a second for a pass.
const ALONE_COMPILING: Duration = Duration::from_secs(10);

/// What checkpoints of one strategy cost.
#[derive(Default, serde::Serialize)]
struct Row {
    strategy: &'static str,
    every_ms: u64,
    /// As Pagemark measures it.
    downtime_us: Samples,
    /// The parts of it: QEMU's stop, its disks, the state of its devices, and memory.
    stop_us: Samples,
    disks_us: Samples,
    devices_us: Samples,
    memory_downtime_us: Samples,
    /// From one of QEMU's events to the other.
    paused_us: Samples,
    dirty_pages: Samples,
    written_bytes: Samples,
    /// Passes of the machine's program in a second, divided by those without checkpoints.
    throughput_ratio: Samples,
    /// What KVM counts while checkpoints are taken, and without them.
    kvm: CountsPerPass,
    kvm_alone: CountsPerPass,
    /// Full page-modification logs, with checkpoints, for each pass of the program.
    full_logs_per_pass: Samples,
    /// From one checkpoint to the next.
    interval_ms: Samples,
    /// What the cost model says of it, from an observation before.
    predicted: Option<Predicted>,
}

/// What the cost model predicts.
#[derive(serde::Serialize)]
struct Predicted {
    downtime_us: f64,
    dirty_pages: f64,
    /// The share of its time that the machine loses.
    overhead: f64,
    bytes_a_second: f64,
}

impl Predicted {
    fn of(forecast: &Forecast) -> Predicted {
        Predicted {
            downtime_us: forecast.downtime.as_micros() as f64,
            dirty_pages: forecast.dirty_pages,
            overhead: forecast.overhead,
            bytes_a_second: forecast.bytes_per_second,
        }
    }
}

/// What one of QEMU's own ways costs.
#[derive(Default, serde::Serialize)]
struct PeerRow {
    way: &'static str,
    /// From one of QEMU's events to the other.
    paused_us: Samples,
    total_us: Samples,
    /// Like [`Row::throughput_ratio`], while the machine is saved.
    throughput_ratio: Samples,
}

#[derive(serde::Serialize)]
struct Measured {
    qemu: String,
    rows: Vec<Row>,
    peers: Vec<PeerRow>,
    /// Why full page-modification logs are not counted.
    no_full_logs: Option<NotCounted>,
}

/// A strategy, with the mechanism that it uses.
#[derive(Clone, Copy)]
struct Way {
    name: &'static str,
    strategy: Strategy,
    mechanism: Mechanism,
    activation: Option<Activation>,
}

/// What is measured, in this order.
fn ways(mechanism: Mechanism, shares_memory: bool) -> Vec<Way> {
    let pre_copy = Strategy::PreCopy { max_rounds: 4, enough_pages: 1024 };
    let way = |name, strategy| Way { name, strategy, mechanism, activation: None };
    let mut ways = vec![way("pre-copy", pre_copy), way("stop-and-copy", Strategy::StopAndCopy)];
    let on_write = way("copy-on-write", Strategy::CopyOnWrite);
    if shares_memory {
        let activated = |name, activation| Way { name, activation: Some(activation), ..on_write };
        ways.push(activated("copy-on-write, early", Activation::Early));
        ways.push(activated("copy-on-write, late", Activation::Late));
    } else if let Some(mechanism) = Mechanism::choose_to_hold_writes() {
        ways.push(Way { mechanism, ..on_write });
    }
    ways
}

impl Options {
    fn plan(&self) -> Result<Plan, BenchError> {
        if self.guest.is_none() && (self.work == Work::Compile || self.cpus > 1) {
            let output = "a compiler, and more than one processor, need --guest: see scripts/vm-guest.sh bench";
            return Err(BenchError::Workload { output: output.to_owned() });
        }
        Ok(Plan {
            accel: self.accel.clone(),
            mib: self.mib,
            cpus: self.cpus,
            work: self.work,
            pages: self.pages,
            guest: self.guest.clone(),
            program: self.program.clone(),
            mechanism: self.mechanism.unwrap_or_else(|| Mechanism::choose(Scope::Machine)),
        })
    }

    /// Fits the cost model to a mechanism, by an observation of the machine as `vm advise` makes
    /// it. None where what the mechanism costs is not known outside of a machine.
    fn observe(&self, machine: &mut Machine, way: Way) -> Result<Option<(DirtyCurve, Costs)>, BenchError> {
        /// A power of two, so that all intervals up to the whole are seen.
        const SLICES: u32 = 64;
        let Ok(cost) = pagemark_vm::cost(way.mechanism) else { return Ok(None) };
        let mut target = machine.attach(way.mechanism, way.activation)?;
        let observation = Observation::take(&mut target, OBSERVED / SLICES, SLICES, &mut |time| {
            std::thread::sleep(time);
            true
        });
        let observation = observation.map_err(BenchError::pagemark)?;
        let stop = model::stop_time(&mut std::thread::sleep, &mut || model::stop(&mut target));
        let costs = Costs::of(way.mechanism, &cost).for_target(&observation, stop.map_err(BenchError::pagemark)?);
        Ok(observation.curve().map(|curve| (curve, costs)))
    }

    fn alone(&self) -> Duration {
        let default = if self.work == Work::Compile { ALONE_COMPILING } else { ALONE };
        self.alone_ms.map_or(default, Duration::from_millis)
    }
}

/// Measures and prints.
///
/// # Errors
/// There is no QEMU or no compiler for the machine's program, or a checkpoint failed.
pub fn run(options: &Options) -> Result<(), BenchError> {
    if let (true, Some(program)) = (options.compile_only, &options.program) {
        return machine::compile(program);
    }
    let mut builder = tempfile::Builder::new();
    let builder = builder.prefix("pagemark-bench-");
    let directory = match &options.directory {
        Some(directory) => builder.tempdir_in(directory),
        None => builder.tempdir(),
    };
    let directory = directory.map_err(BenchError::on("make a directory"))?;
    let plan = options.plan()?;
    let mut machine = Machine::start(directory.path(), &plan)?;
    let (mut full_logs, no_full_logs) = match FullLogs::of(machine.pid()?) {
        Ok(full_logs) => (Some(full_logs), None),
        Err(reason) => (None, Some(reason)),
    };
    // The library that reads KVM's log lets QEMU have no such snapshot of memory that is mapped twice.
    let possible = |peer: &Peer| *peer != Peer::BackgroundSnapshot || !plan.shares_memory();
    let ways_of_qemu: Vec<Peer> = Peer::ALL.into_iter().filter(possible).collect();
    let mut peers: Vec<PeerRow> =
        ways_of_qemu.iter().map(|peer| PeerRow { way: peer.name(), ..PeerRow::default() }).collect();
    let mut rows = Vec::new();
    for way in ways(plan.mechanism, plan.shares_memory()) {
        eprintln!("{}, observed …", way.name);
        let fitted = options.observe(&mut machine, way)?;
        rows.extend(options.every_ms.iter().map(|&every_ms| {
            let predicted = fitted.as_ref().map(|(curve, costs)| {
                let model = CostModel { curve: curve.clone(), costs: *costs, strategy: way.strategy };
                Predicted::of(&model.forecast(Duration::from_millis(every_ms)))
            });
            (way, Row { strategy: way.name, every_ms, predicted, ..Row::default() })
        }));
    }
    // In turns, so that what else the machine of the host does meets all of them.
    for turn in 0..options.turns.max(options.peers) {
        if turn < options.turns {
            for (way, row) in &mut rows {
                eprintln!("{}, every {} ms …", row.strategy, row.every_ms);
                let repository = directory.path().join(format!("{}-{}-{turn}", row.strategy, row.every_ms));
                measure(options, &mut machine, *way, row, full_logs.as_mut(), &repository)?;
                // Its content is of no use any more.
                std::fs::remove_dir_all(&repository).map_err(BenchError::on("remove a repository"))?;
            }
        }
        if turn < options.peers {
            for (&peer, row) in ways_of_qemu.iter().zip(&mut peers) {
                eprintln!("{} …", row.way);
                let alone = machine.passes_a_second(options.alone())?;
                let cost = machine.measure_peer(peer)?;
                row.throughput_ratio.push(cost.passes as f64 / cost.total.as_secs_f64() / alone);
                row.paused_us.push(cost.paused.as_micros() as f64);
                row.total_us.push(cost.total.as_micros() as f64);
            }
        }
    }
    let rows = rows.into_iter().map(|(_, row)| row).collect();
    let measured = Measured { qemu: machine.version()?, rows, peers, no_full_logs };
    if options.json { print_json(&measured) } else { print_tables(options, &measured) }
}

/// Takes checkpoints of the machine while it runs.
fn measure(
    options: &Options,
    machine: &mut Machine,
    way: Way,
    row: &mut Row,
    mut full_logs: Option<&mut FullLogs>,
    repository: &std::path::Path,
) -> Result<(), BenchError> {
    let (first_counts, first_pass) = (machine.kvm_counts(), machine.passes()?);
    let before = machine.passes_a_second(options.alone())?;
    row.kvm_alone.push(first_counts, machine.kvm_counts(), machine.passes()? - first_pass);
    let target = machine.attach(way.mechanism, way.activation)?;
    let repository = Repository::create(repository).map_err(BenchError::pagemark)?;
    let policy = Policy { strategy: way.strategy, ..Policy::default() };
    let job_options = JobOptions { policy, ..JobOptions::new("vm") };
    let mut job = Job::new(target, repository, job_options);
    for _ in 0..WARM_UP {
        job.checkpoint()?;
    }
    machine.pauses()?;
    let every = Duration::from_millis(row.every_ms);
    let first_counts = machine.kvm_counts();
    let first_full = full_logs.as_mut().and_then(|full_logs| full_logs.count());
    let (measured_from, first_pass) = (Instant::now(), machine.passes()?);
    let mut taken_checkpoints = 0;
    while taken_checkpoints < options.checkpoints || measured_from.elapsed() < options.alone() {
        taken_checkpoints += 1;
        let begin = Instant::now();
        let taken = job.checkpoint()?;
        let stop = job.target().last_stop();
        row.stop_us.push(stop.stop.as_micros() as f64);
        row.disks_us.push(stop.disks.as_micros() as f64);
        row.devices_us.push(stop.devices.as_micros() as f64);
        row.downtime_us.push(taken.cost.downtime_us as f64);
        row.memory_downtime_us.push(taken.cost.memory_downtime_us as f64);
        row.dirty_pages.push(taken.cost.dirty_pages as f64);
        row.written_bytes.push(taken.cost.written_bytes as f64);
        std::thread::sleep(every.saturating_sub(begin.elapsed()));
        row.interval_ms.push(begin.elapsed().as_secs_f64() * 1e3);
    }
    let passes = machine.passes()? - first_pass;
    let rate = passes as f64 / measured_from.elapsed().as_secs_f64();
    let last_full = full_logs.as_mut().and_then(|full_logs| full_logs.count());
    if let (Some(first), Some(last), 1..) = (first_full, last_full, passes) {
        row.full_logs_per_pass.push(last.saturating_sub(first) as f64 / passes as f64);
    }
    row.kvm.push(first_counts, machine.kvm_counts(), passes);
    for pause in machine.pauses()? {
        row.paused_us.push(pause.as_micros() as f64);
    }
    job.detach();
    let after = machine.passes_a_second(options.alone())?;
    row.throughput_ratio.push(rate / ((before + after) / 2.0));
    Ok(())
}

/// What the cost model predicts, beside what was measured.
fn table_of_predictions(rows: &[Row]) -> Table {
    let mut table = Table::new([
        "strategy",
        ">every ms",
        ">kept ms",
        ">pages, predicted",
        ">measured",
        ">downtime ms, predicted",
        ">measured",
        ">loss %, predicted",
        ">measured",
        ">KiB/s, predicted",
        ">measured",
    ]);
    for row in rows {
        let Some(predicted) = &row.predicted else { continue };
        let interval_ms = row.interval_ms.median();
        table.row([
            row.strategy.to_owned(),
            row.every_ms.to_string(),
            format!("{interval_ms:.0}"),
            format!("{:.0}", predicted.dirty_pages),
            format!("{:.0}", row.dirty_pages.median()),
            format!("{:.2}", predicted.downtime_us / 1e3),
            format!("{:.2}", row.downtime_us.median() / 1e3),
            format!("{:.1}", predicted.overhead * 100.0),
            format!("{:.1}", (1.0 - row.throughput_ratio.median()) * 100.0),
            format!("{:.0}", predicted.bytes_a_second / 1024.0),
            format!("{:.0}", row.written_bytes.median() / 1024.0 / interval_ms * 1e3),
        ]);
    }
    table
}

fn peers_are_fewer(measured: &Measured) -> bool {
    measured.peers.len() < Peer::ALL.len()
}

fn table_of_counts(rows: &[Row]) -> Table {
    let mut table = Table::new([
        "strategy",
        ">every ms",
        ">exits",
        ">alone",
        ">page faults",
        ">alone",
        ">TLB flushes",
        ">alone",
        ">full logs",
    ]);
    for Row { strategy, every_ms, kvm, kvm_alone, full_logs_per_pass, .. } in rows {
        let median = |samples: &Samples| match samples.median() {
            median if median.is_nan() => "-".to_owned(),
            median => format!("{median:.1}"),
        };
        table.row([
            (*strategy).to_owned(),
            every_ms.to_string(),
            median(&kvm.exits),
            median(&kvm_alone.exits),
            median(&kvm.page_faults),
            median(&kvm_alone.page_faults),
            median(&kvm.tlb_flushes),
            median(&kvm_alone.tlb_flushes),
            median(full_logs_per_pass),
        ]);
    }
    table
}

/// A time in milliseconds.
fn ms(samples: &Samples, quantile: fn(&Samples) -> f64) -> String {
    format!("{:.2}", quantile(samples) / 1e3)
}

fn table_of_strategies(measured: &Measured) -> Table {
    let mut table = Table::new([
        "strategy",
        ">every ms",
        ">downtime ms",
        ">p99",
        ">stop",
        ">disks",
        ">devices",
        ">memory",
        ">p99",
        ">stopped ms",
        ">p99",
        ">dirty pages",
        ">KiB",
        ">speed %",
        ">least",
        ">greatest",
    ]);
    for row in &measured.rows {
        let percent = |share: f64| format!("{:.1}", share * 100.0);
        table.row([
            row.strategy.to_owned(),
            row.every_ms.to_string(),
            ms(&row.downtime_us, Samples::median),
            ms(&row.downtime_us, Samples::p99),
            ms(&row.stop_us, Samples::median),
            ms(&row.disks_us, Samples::median),
            ms(&row.devices_us, Samples::median),
            ms(&row.memory_downtime_us, Samples::median),
            ms(&row.memory_downtime_us, Samples::p99),
            ms(&row.paused_us, Samples::median),
            ms(&row.paused_us, Samples::p99),
            format!("{:.0}", row.dirty_pages.median()),
            format!("{:.0}", row.written_bytes.median() / 1024.0),
            percent(row.throughput_ratio.median()),
            percent(row.throughput_ratio.least()),
            percent(row.throughput_ratio.greatest()),
        ]);
    }
    table
}

fn table_of_peers(measured: &Measured) -> Table {
    let ours = measured.rows.iter().map(|row| row.paused_us.median()).fold(f64::INFINITY, f64::min);
    let mut peers =
        Table::new(["QEMU's own", ">stopped ms", ">least", ">greatest", ">in all ms", ">speed %", ">times ours"]);
    for row in &measured.peers {
        peers.row([
            row.way.to_owned(),
            ms(&row.paused_us, Samples::median),
            ms(&row.paused_us, Samples::least),
            ms(&row.paused_us, Samples::greatest),
            ms(&row.total_us, Samples::median),
            format!("{:.1}", row.throughput_ratio.median() * 100.0),
            format!("{:.1}", row.paused_us.median() / ours),
        ]);
    }
    peers
}

fn print_tables(options: &Options, measured: &Measured) -> Result<(), BenchError> {
    let (table, peers) = (table_of_strategies(measured), table_of_peers(measured));
    if peers_are_fewer(measured) {
        print("background-snapshot is not possible with memory that the machine has a mapping of its own of\n");
    }
    print(&format!(
        "QEMU {} ({}), processors: {}, {}; medians\n{table}\n{peers}",
        measured.qemu,
        options.accel,
        options.cpus,
        match options.work {
            Work::Memory => format!("{} MiB in use, a working set of {} pages", options.mib, options.pages),
            Work::Compile => format!("{} MiB, a compiler on each", options.mib),
        }
    ));
    if measured.rows.iter().any(|row| row.predicted.is_some()) {
        let seconds = OBSERVED.as_secs();
        let table = table_of_predictions(&measured.rows);
        print(&format!("Predictions of the cost model, from {seconds} s of observation; medians\n{table}\n"));
    }
    if measured.rows.iter().all(|row| row.kvm.is_empty()) {
        print("KVM's counts: none, because QEMU does not use KVM, or is older than 7.1\n");
    } else {
        print(&format!("KVM's counts for each pass of the program; medians\n{}", table_of_counts(&measured.rows)));
        if let Some(reason) = &measured.no_full_logs {
            print(&format!("Full page-modification logs are not counted: {reason}\n"));
        }
    }
    Ok(())
}
