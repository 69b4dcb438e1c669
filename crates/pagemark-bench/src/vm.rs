//! `pagemark-bench vm`: the downtime of a virtual machine in a checkpoint, and how much slower it
//! runs, beside QEMU's own ways to save a machine: `savevm`, migration to a file, and a
//! `background-snapshot`. PML, sections 2.4 and 5, measures the same of a changed QEMU.

mod kvm_counts;
mod machine;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use pagemark::checkpointer::Strategy;
use pagemark::repository::Repository;
use pagemark::track::Scope;
use pagemark::{Job, JobOptions, Mechanism, Policy};
use pagemark_report::output::print;
use pagemark_report::samples::Samples;
use pagemark_report::table::Table;
use pagemark_vm::VmTarget;

use crate::{BenchError, print_json};
use kvm_counts::CountsPerPass;
use machine::{Machine, Peer};

/// Options of the measurement.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// Memory of the machine, MiB, all of it in use
    #[arg(long, default_value_t = 1024)]
    mib: u32,
    /// Pages that the machine writes again and again
    #[arg(long, default_value_t = 2048)]
    pages: u32,
    /// Times between checkpoints, milliseconds
    #[arg(long, value_delimiter = ',', default_values_t = [100, 1000])]
    every_ms: Vec<u64>,
    /// Checkpoints in a measurement
    #[arg(long, default_value_t = 20)]
    checkpoints: u32,
    /// Measurements of each strategy and interval, each between two of the machine alone
    #[arg(long, default_value_t = 3)]
    turns: u32,
    /// Mechanism [default: the one that Pagemark chooses]
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

/// How long the machine is measured by itself.
const ALONE: Duration = Duration::from_secs(2);

/// What checkpoints of one strategy cost.
#[derive(serde::Serialize)]
struct Row {
    strategy: &'static str,
    every_ms: u64,
    /// As Pagemark measures it.
    downtime_us: Samples,
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
}

/// What one of QEMU's own ways costs.
#[derive(serde::Serialize)]
struct PeerRow {
    way: &'static str,
    /// From one of QEMU's events to the other.
    paused_us: Samples,
    total_us: Samples,
    /// As [`Row::throughput_ratio`], while the machine is saved.
    throughput_ratio: Samples,
}

#[derive(serde::Serialize)]
struct Measured {
    qemu: String,
    rows: Vec<Row>,
    peers: Vec<PeerRow>,
}

const STRATEGIES: [(&str, Strategy); 3] = [
    ("pre-copy", Strategy::PreCopy { max_rounds: 4, enough_pages: 1024 }),
    ("stop-and-copy", Strategy::StopAndCopy),
    ("copy-on-write", Strategy::CopyOnWrite),
];

/// Measures and prints.
///
/// # Errors
/// There is no QEMU or no compiler for the machine's program, or a checkpoint failed.
pub fn run(options: &Options) -> Result<(), BenchError> {
    let mut builder = tempfile::Builder::new();
    let builder = builder.prefix("pagemark-bench-");
    let directory = match &options.directory {
        Some(directory) => builder.tempdir_in(directory),
        None => builder.tempdir(),
    };
    let directory = directory.map_err(BenchError::on("make a directory"))?;
    let mut machine = Machine::start(directory.path(), &options.accel, options.mib, options.pages)?;
    let mut peers: Vec<PeerRow> = Vec::new();
    for peer in Peer::ALL {
        let (paused_us, total_us, throughput_ratio) = Default::default();
        peers.push(PeerRow { way: peer.name(), paused_us, total_us, throughput_ratio });
    }
    let mut rows = Vec::new();
    for (strategy, how) in STRATEGIES {
        for &every_ms in &options.every_ms {
            let (downtime_us, memory_downtime_us, paused_us) = Default::default();
            let (dirty_pages, written_bytes, throughput_ratio) = Default::default();
            rows.push((
                how,
                Row {
                    strategy,
                    every_ms,
                    downtime_us,
                    memory_downtime_us,
                    paused_us,
                    dirty_pages,
                    written_bytes,
                    throughput_ratio,
                    kvm: CountsPerPass::default(),
                    kvm_alone: CountsPerPass::default(),
                },
            ));
        }
    }
    // In turns, so that what else the machine of the host does meets all of them.
    for turn in 0..options.turns.max(options.peers) {
        if turn < options.turns {
            for (how, row) in &mut rows {
                eprintln!("{}, every {} ms …", row.strategy, row.every_ms);
                let repository = directory.path().join(format!("{}-{}-{turn}", row.strategy, row.every_ms));
                measure(options, &mut machine, *how, row, &repository)?;
                // Its content is of no use any more.
                std::fs::remove_dir_all(&repository).map_err(BenchError::on("remove a repository"))?;
            }
        }
        if turn < options.peers {
            for (peer, row) in Peer::ALL.into_iter().zip(&mut peers) {
                eprintln!("{} …", row.way);
                let alone = machine.passes_a_second(ALONE)?;
                let cost = machine.measure_peer(peer)?;
                row.throughput_ratio.push(cost.passes as f64 / cost.total.as_secs_f64() / alone);
                row.paused_us.push(cost.paused.as_micros() as f64);
                row.total_us.push(cost.total.as_micros() as f64);
            }
        }
    }
    let measured = Measured { qemu: machine.version()?, rows: rows.into_iter().map(|(_, row)| row).collect(), peers };
    if options.json { print_json(&measured) } else { print_tables(options, &measured) }
}

/// Takes checkpoints of the machine while it runs.
fn measure(
    options: &Options,
    machine: &mut Machine,
    strategy: Strategy,
    row: &mut Row,
    repository: &std::path::Path,
) -> Result<(), BenchError> {
    let (first_counts, first_pass) = (machine.kvm_counts(), machine.passes()?);
    let before = machine.passes_a_second(ALONE)?;
    row.kvm_alone.push(first_counts, machine.kvm_counts(), machine.passes()? - first_pass);
    let mechanism = match strategy {
        Strategy::CopyOnWrite => Mechanism::choose_to_hold_writes(),
        _ => options.mechanism,
    };
    let target = VmTarget::attach(machine.socket(), mechanism.unwrap_or_else(|| Mechanism::choose(Scope::Machine)))
        .map_err(BenchError::pagemark)?;
    let repository = Repository::create(repository).map_err(BenchError::pagemark)?;
    let policy = Policy { strategy, ..Policy::default() };
    let job_options = JobOptions { policy, ..JobOptions::new("vm") };
    let mut job = Job::new(target, repository, job_options);
    for _ in 0..WARM_UP {
        job.checkpoint()?;
    }
    machine.pauses()?;
    let every = Duration::from_millis(row.every_ms);
    let first_counts = machine.kvm_counts();
    let (begin, first_pass) = (Instant::now(), machine.passes()?);
    for _ in 0..options.checkpoints {
        let begin = Instant::now();
        let taken = job.checkpoint()?;
        row.downtime_us.push(taken.cost.downtime_us as f64);
        row.memory_downtime_us.push(taken.cost.memory_downtime_us as f64);
        row.dirty_pages.push(taken.cost.dirty_pages as f64);
        row.written_bytes.push(taken.cost.written_bytes as f64);
        std::thread::sleep(every.saturating_sub(begin.elapsed()));
    }
    let passes = machine.passes()? - first_pass;
    let rate = passes as f64 / begin.elapsed().as_secs_f64();
    row.kvm.push(first_counts, machine.kvm_counts(), passes);
    for pause in machine.pauses()? {
        row.paused_us.push(pause.as_micros() as f64);
    }
    job.detach();
    let after = machine.passes_a_second(ALONE)?;
    row.throughput_ratio.push(rate / ((before + after) / 2.0));
    Ok(())
}

fn table_of_counts(rows: &[Row]) -> Table {
    let mut table =
        Table::new(["strategy", ">every ms", ">exits", ">alone", ">page faults", ">alone", ">TLB flushes", ">alone"]);
    for Row { strategy, every_ms, kvm, kvm_alone, .. } in rows {
        let median = |samples: &Samples| format!("{:.1}", samples.median());
        table.row([
            (*strategy).to_owned(),
            every_ms.to_string(),
            median(&kvm.exits),
            median(&kvm_alone.exits),
            median(&kvm.page_faults),
            median(&kvm_alone.page_faults),
            median(&kvm.tlb_flushes),
            median(&kvm_alone.tlb_flushes),
        ]);
    }
    table
}

fn print_tables(options: &Options, measured: &Measured) -> Result<(), BenchError> {
    let ms = |samples: &Samples, quantile: fn(&Samples) -> f64| format!("{:.2}", quantile(samples) / 1e3);
    let mut table = Table::new([
        "strategy",
        ">every ms",
        ">downtime ms",
        ">p99",
        ">memory",
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
            ms(&row.memory_downtime_us, Samples::median),
            ms(&row.paused_us, Samples::median),
            ms(&row.paused_us, Samples::p99),
            format!("{:.0}", row.dirty_pages.median()),
            format!("{:.0}", row.written_bytes.median() / 1024.0),
            percent(row.throughput_ratio.median()),
            percent(row.throughput_ratio.least()),
            percent(row.throughput_ratio.greatest()),
        ]);
    }
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
    print(&format!(
        "QEMU {} ({}), {} MiB in use, a working set of {} pages; medians\n{table}\n{peers}",
        measured.qemu, options.accel, options.mib, options.pages
    ));
    if measured.rows.iter().all(|row| row.kvm.is_empty()) {
        print("KVM's counts: none, because QEMU does not use KVM, or is older than 7.1\n");
    } else {
        print(&format!("KVM's counts for each pass of the program; medians\n{}", table_of_counts(&measured.rows)));
    }
    Ok(())
}
