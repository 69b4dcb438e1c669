//! `pagemark-bench pml`: what dirty logging by page-modification logging costs beside
//! write-protection: the tables and figures of "Intel Page Modification Logging for Lightweight
//! Continuous Checkpointing" (PML, chapters 3 and 5), beside the paper's own numbers.
//!
//! Counted are the events and the hypervisor's instructions of an emulated processor with EPT and
//! PML (Bochs), on which a hypervisor of some hundred lines runs a guest that writes memory
//! (`pml/`). They are exact, and with one processor the same in each run. Times mean nothing there:
//! where the paper has times, this has what the paper's model and another one make of the counts.

mod lab;
mod model;
mod paper;
mod report;

use std::path::PathBuf;

use crate::BenchError;
use crate::measuring::figures::publish;
use lab::{Counts, Lab, TICK_MS};
use model::Costs;
use report::Report;

/// Options of the measurement.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// Intervals between checkpoints, milliseconds of the guest, which are multiples of 10
    #[arg(long, value_delimiter = ',', default_values_t = paper::INTERVALS_MS, value_parser = parse_interval)]
    interval: Vec<u32>,
    /// Time of the guest in each run, milliseconds, after the first two intervals
    #[arg(long, default_value_t = 2_000, value_parser = clap::value_parser!(u32).range(1..1_000_000))]
    time: u32,
    /// Checkpoints that are counted in each run at least, also if they take more time
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..1_000_000))]
    checkpoints: u32,
    /// Processors of the machine. Because the emulation of several is slow, a run with more than
    /// one has exactly the checkpoints of --checkpoints, and no interval is longer than a second
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4], value_parser = clap::value_parser!(u32).range(1..=4))]
    processors: Vec<u32>,
    /// Pages that each processor of the guest writes to in a millisecond, some of them again and
    /// again; the default makes checkpoints as large as the paper's
    #[arg(long, default_value_t = 110, value_parser = clap::value_parser!(u32).range(1..1_000_000))]
    writes: u32,
    /// Pages that are copied in a millisecond while the guest runs
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..1_000_000))]
    copied: u32,
    /// Pages that one call of the copier copies, after which early activation with buffers makes
    /// the log find writes to them; the default is the paper's 64 MiB
    #[arg(long, default_value_t = paper::BUFFER_PAGES, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    buffer: u32,
    /// Cost of a page fault in the models, microseconds [default: the paper's]
    #[arg(long, default_value_t = paper::FAULT_US, hide_default_value = true, value_parser = parse_cost)]
    fault_us: f64,
    /// Cost of an event of a full log, microseconds [default: what the paper's table 3.3 needs; its
    /// text says 2400, which contradicts that table]
    #[arg(long, default_value_t = paper::full_log_us(), hide_default_value = true, value_parser = parse_cost)]
    full_log_us: f64,
    /// Cost of a page in the log, microseconds [default: what the paper's table 3.3 needs]
    #[arg(long, default_value_t = paper::entry_us(), hide_default_value = true, value_parser = parse_cost)]
    entry_us: f64,
    /// Cost of a copy before a write, microseconds [default: the paper's]
    #[arg(long, default_value_t = paper::COPY_US, hide_default_value = true, value_parser = parse_cost)]
    copy_us: f64,
    /// Directory for the numbers (CSV) and the picture (SVG) of each table and figure
    #[arg(long)]
    out: Option<PathBuf>,
}

/// With more than one processor, longer intervals are left out.
const LONGEST_WITH_SEVERAL_MS: u32 = 1000;

fn parse_interval(text: &str) -> Result<u32, String> {
    let interval: u32 = text.parse().map_err(|error| format!("{error}"))?;
    match (1..=1_000_000).contains(&interval) && interval.is_multiple_of(TICK_MS) {
        true => Ok(interval),
        false => Err(format!("it is not a multiple of {TICK_MS}, up to a million")),
    }
}

fn parse_cost(text: &str) -> Result<f64, String> {
    let cost: f64 = text.parse().map_err(|error| format!("{error}"))?;
    match cost.is_finite() && cost > 0.0 {
        true => Ok(cost),
        false => Err("it is not a cost".into()),
    }
}

/// How dirty pages are found, and whether checkpoints copy them while the guest runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
enum Mode {
    #[default]
    Native,
    LogProtect,
    LogPml,
    CopyProtect,
    CopyLate,
    /// Each page is logged from its copy on.
    CopyEarly,
    /// The pages of a buffer are logged when it is full.
    CopyBuffers,
    /// Only the pages of the last buffer are.
    CopyLast,
}

impl Mode {
    const ALL: [Mode; 8] = [
        Mode::Native,
        Mode::LogProtect,
        Mode::LogPml,
        Mode::CopyProtect,
        Mode::CopyLate,
        Mode::CopyEarly,
        Mode::CopyBuffers,
        Mode::CopyLast,
    ];

    /// Its name in the output of the hypervisor.
    fn name(self) -> &'static str {
        match self {
            Mode::Native => "native",
            Mode::LogProtect => "log-protect",
            Mode::LogPml => "log-pml",
            Mode::CopyProtect => "copy-protect",
            Mode::CopyLate => "copy-late",
            Mode::CopyEarly => "copy-early",
            Mode::CopyBuffers => "copy-buffers",
            Mode::CopyLast => "copy-last",
        }
    }

    fn title(self) -> &'static str {
        match self {
            Mode::Native => "native",
            Mode::LogProtect | Mode::CopyProtect => "write-protection",
            Mode::LogPml => "PML",
            Mode::CopyLate => "late PML",
            Mode::CopyEarly => "early PML",
            Mode::CopyBuffers => "early, by buffers",
            Mode::CopyLast => "early, last buffer",
        }
    }
}

/// Counts the events and prints them beside the paper's.
///
/// # Errors
/// There is no Bochs or compiler, the processor lacks PML, a page was missed, or a copy is wrong.
pub(crate) fn run(options: &Options) -> Result<(), BenchError> {
    if let Some(out) = &options.out {
        std::fs::create_dir_all(out).map_err(BenchError::on("make a directory for the figures"))?;
    }
    let mut counts = Vec::new();
    for &processors in &options.processors {
        counts.extend(lab(options, processors).run()?);
    }
    let costs = Costs {
        fault_us: options.fault_us,
        full_log_us: options.full_log_us,
        entry_us: options.entry_us,
        copy_us: options.copy_us,
    };
    let report = Report { intervals: &options.interval, counts, costs, buffer: options.buffer.into() };
    pagemark_report::output::print(&report.introduction());
    if let Some(out) = &options.out {
        report.write_counts(&out.join("pml-counts.csv"))?;
    }
    report.charts().iter().try_for_each(|chart| publish(options.out.as_deref(), chart))
}

fn lab(options: &Options, processors: u32) -> Lab {
    let several = processors > 1;
    let runs = options.interval.iter().filter(|&&interval| !several || interval <= LONGEST_WITH_SEVERAL_MS);
    Lab {
        processors,
        writes: options.writes,
        copied: options.copied,
        buffer: options.buffer,
        ticks: options.time.div_ceil(TICK_MS),
        runs: runs
            .map(|&interval| {
                let least = if several { 1 } else { options.time.div_ceil(interval) };
                (interval, least.max(options.checkpoints))
            })
            .collect(),
    }
}
