//! `pagemark-bench pml`: what dirty logging by page-modification logging costs beside
//! write-protection, in events: tables 3.1 and 5.2 and figures 3.5 and 5.3 of "Intel Page
//! Modification Logging for Lightweight Continuous Checkpointing" (PML, chapters 3 and 5).
//!
//! The events are those of an emulated processor with EPT and PML (Bochs), on which a hypervisor of
//! some hundred lines runs a guest that writes memory (`pml/`). They are exact, and the same in
//! each run. Times mean nothing there, and none are printed.

mod lab;
mod paper;

use std::path::PathBuf;

use pagemark_report::chart::{Chart, Series};
use pagemark_report::samples::Samples;

use crate::BenchError;
use crate::figures::publish;
use lab::{Counts, Lab};

/// Options of the measurement.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// Intervals between checkpoints, milliseconds of the guest, which are multiples of 5
    #[arg(long, value_delimiter = ',', default_values_t = paper::INTERVALS_MS, value_parser = parse_interval)]
    interval: Vec<u32>,
    /// Time of the guest in each run, milliseconds
    #[arg(long, default_value_t = 10_000)]
    time: u32,
    /// Pages that the guest writes to in a millisecond, some of them again and again
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..1_000_000))]
    writes: u32,
    /// Pages that are copied in a millisecond while the guest runs
    #[arg(long, default_value_t = 150, value_parser = clap::value_parser!(u32).range(1..1_000_000))]
    copied: u32,
    /// Directory for the numbers (CSV) and the picture (SVG) of each table and figure
    #[arg(long)]
    out: Option<PathBuf>,
}

/// The guest's time between two exits that it makes by itself, as a timer would.
const TICK_MS: u32 = 5;

fn parse_interval(text: &str) -> Result<u32, String> {
    let interval: u32 = text.parse().map_err(|error| format!("{error}"))?;
    match interval > 0 && interval.is_multiple_of(TICK_MS) {
        true => Ok(interval),
        false => Err(format!("it is not a multiple of {TICK_MS}")),
    }
}

/// How dirty pages are found, and whether checkpoints copy them while the guest runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mode {
    Native,
    LogProtect,
    LogPml,
    CopyProtect,
    CopyLate,
    CopyEarly,
}

impl Mode {
    const ALL: [Mode; 6] =
        [Mode::Native, Mode::LogProtect, Mode::LogPml, Mode::CopyProtect, Mode::CopyLate, Mode::CopyEarly];

    /// Its name in the output of the hypervisor.
    fn name(self) -> &'static str {
        match self {
            Mode::Native => "native",
            Mode::LogProtect => "log-protect",
            Mode::LogPml => "log-pml",
            Mode::CopyProtect => "copy-protect",
            Mode::CopyLate => "copy-late",
            Mode::CopyEarly => "copy-early",
        }
    }

    fn title(self) -> &'static str {
        match self {
            Mode::Native => "no logging",
            Mode::LogProtect | Mode::CopyProtect => "write-protection",
            Mode::LogPml => "PML",
            Mode::CopyLate => "late PML",
            Mode::CopyEarly => "early PML",
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
    let lab = Lab {
        ticks: options.time / TICK_MS,
        writes: options.writes * TICK_MS,
        copied: options.copied * TICK_MS,
        intervals: options.interval.iter().map(|interval| interval / TICK_MS).collect(),
    };
    let report = Report { intervals: &options.interval, counts: lab.run()? };
    report.charts().iter().try_for_each(|chart| publish(options.out.as_deref(), chart))
}

/// What was counted, for the tables.
struct Report<'a> {
    intervals: &'a [u32],
    counts: Vec<Counts>,
}

/// A column of the paper's tables, by interval.
type Column = [f64; paper::INTERVALS_MS.len()];

impl Report<'_> {
    fn charts(&self) -> Vec<Chart> {
        use Mode::{CopyEarly, CopyLate, CopyProtect, LogPml, LogProtect, Native};
        let exits = |mode| self.series(mode, |counts| counts.exits as f64);
        let faults = |mode| self.series(mode, |counts| counts.faults as f64);
        let full = |mode| self.series(mode, |counts| counts.full as f64);
        let flushes = |mode| self.series(mode, |counts| counts.flushes as f64);
        let logged = |mode| self.series(mode, |counts| counts.logged as f64);
        let copies = |name: &str, part: fn(&Counts) -> u64| Series {
            name: name.into(),
            ..self.series(CopyEarly, |counts| part(counts) as f64)
        };
        let paper = |mode: Mode, column| self.paper(mode, column);
        vec![
            self.chart(
                "table-3-1-exits",
                "Table 3.1: exits of the guest while its writes are logged",
                "exits",
                vec![
                    exits(Native),
                    exits(LogProtect),
                    exits(LogPml),
                    paper(Native, paper::NATIVE_EXITS),
                    paper(LogProtect, paper::LOG_PROTECT_EXITS),
                    paper(LogPml, paper::LOG_PML_EXITS),
                ],
            ),
            self.chart(
                "table-3-1-full",
                "Table 3.1: events of a full log",
                "events",
                vec![full(LogPml), paper(LogPml, paper::LOG_PML_FULL)],
            ),
            self.chart(
                "figure-3-5",
                "Figure 3.5: R(l), page faults by write-protection for each event of a full log",
                "faults / event",
                vec![self.ratio(), paper(LogPml, paper::ratio())],
            ),
            self.chart(
                "table-5-2-exits",
                "Table 5.2: exits of the guest with copy-on-write checkpoints",
                "exits",
                vec![
                    exits(CopyProtect),
                    exits(CopyLate),
                    exits(CopyEarly),
                    paper(CopyProtect, paper::COPY_PROTECT_EXITS),
                    paper(CopyLate, paper::COPY_LATE_EXITS),
                    paper(CopyEarly, paper::COPY_EARLY_EXITS),
                ],
            ),
            self.chart(
                "table-5-2-faults",
                "Table 5.2: page faults with copy-on-write checkpoints",
                "faults",
                vec![
                    faults(CopyProtect),
                    faults(CopyLate),
                    faults(CopyEarly),
                    paper(CopyProtect, paper::COPY_PROTECT_FAULTS),
                    paper(CopyLate, paper::COPY_LATE_FAULTS),
                    paper(CopyEarly, paper::COPY_EARLY_FAULTS),
                ],
            ),
            self.chart(
                "table-5-2-full",
                "Table 5.2: events of a full log with copy-on-write checkpoints",
                "events",
                vec![
                    full(CopyLate),
                    full(CopyEarly),
                    paper(CopyLate, paper::COPY_LATE_FULL),
                    paper(CopyEarly, paper::COPY_EARLY_FULL),
                ],
            ),
            self.chart(
                "figure-5-3",
                "Figure 5.3: flushes of the processor's translations",
                "flushes",
                vec![
                    flushes(CopyProtect),
                    flushes(CopyLate),
                    flushes(CopyEarly),
                    paper(CopyProtect, paper::PROTECT_FLUSHES),
                    paper(CopyLate, paper::LATE_FLUSHES),
                    paper(CopyEarly, paper::EARLY_FLUSHES),
                ],
            ),
            self.chart(
                "pages",
                "Pages of all checkpoints, and those of them that the log held",
                "pages",
                vec![
                    Series { name: "dirty".into(), ..self.series(LogProtect, |counts| counts.dirty as f64) },
                    logged(LogPml),
                    logged(CopyLate),
                    logged(CopyEarly),
                ],
            ),
            self.chart(
                "copies",
                "When the pages of copy-on-write checkpoints were copied, the same with each mechanism",
                "pages",
                vec![
                    copies("copied concurrently", |counts| counts.concurrent),
                    copies("copied before a write", |counts| counts.cow),
                    copies("left to the next stop", |counts| counts.rest),
                ],
            ),
        ]
    }

    fn chart(&self, name: &str, title: &str, unit: &str, series: Vec<Series>) -> Chart {
        Chart {
            name: format!("pml-{name}"),
            title: title.into(),
            x_axis: "interval, ms".into(),
            y_axis: unit.into(),
            is_logarithmic: true,
            reference: None,
            x_labels: self.intervals.iter().map(u32::to_string).collect(),
            series,
            notes: vec!["counts of an emulated processor; the paper's are of another guest, a kernel build".into()],
        }
    }

    fn find(&self, mode: Mode, interval: u32) -> Option<&Counts> {
        // Without logging there are no intervals.
        let is_same = |counts: &&Counts| mode == Mode::Native || counts.interval * TICK_MS == interval;
        self.counts.iter().filter(|counts| counts.mode == mode).find(is_same)
    }

    fn series(&self, mode: Mode, number: impl Fn(&Counts) -> f64) -> Series {
        let point = |interval: &u32| self.find(mode, *interval).map(&number).into_iter().collect();
        Series { name: mode.title().into(), points: self.intervals.iter().map(point).collect() }
    }

    fn ratio(&self) -> Series {
        let point = |interval: &u32| {
            let (protect, pml) = (self.find(Mode::LogProtect, *interval)?, self.find(Mode::LogPml, *interval)?);
            // Without an event there is no ratio.
            (pml.full > 0).then(|| protect.faults as f64 / pml.full as f64)
        };
        let points = self.intervals.iter().map(|interval| point(interval).into_iter().collect()).collect();
        Series { name: "PML".into(), points }
    }

    /// The paper's numbers at the intervals that it has; none where it has a NaN.
    fn paper(&self, mode: Mode, column: Column) -> Series {
        let point = |interval: &u32| -> Samples {
            let found = paper::INTERVALS_MS.iter().zip(column).find(|(known, _)| *known == interval);
            found.map(|(_, number)| number).filter(|number| !number.is_nan()).into_iter().collect()
        };
        let points = self.intervals.iter().map(point).collect();
        Series { name: format!("{} (paper)", mode.title()), points }
    }
}
