//! The tables and figures, with the paper's numbers.

use std::path::Path;

use pagemark_report::chart::{Chart, Series};
use pagemark_report::samples::Samples;
use pagemark_report::table::Table;

use super::model::{Costs, Traced, fit, part_in_the_last_buffer};
use super::paper::{self, Column};
use super::{Counts, Mode};
use crate::BenchError;
use Mode::{CopyBuffers, CopyEarly, CopyLast, CopyLate, CopyProtect, LogPml, LogProtect, Native};

/// What was counted, for the tables.
pub(super) struct Report<'a> {
    pub(super) intervals: &'a [u32],
    pub(super) counts: Vec<Counts>,
    pub(super) costs: Costs,
    /// Pages.
    pub(super) buffer: f64,
}

const COPIES: [Mode; 5] = [CopyProtect, CopyLate, CopyEarly, CopyBuffers, CopyLast];

/// Milliseconds of the guest that were counted.
fn guest_ms(counts: &Counts) -> f64 {
    f64::from(counts.interval_ms) * f64::from(counts.intervals)
}

fn per_checkpoint(counts: &Counts, number: u64) -> f64 {
    number as f64 / f64::from(counts.intervals)
}

/// A count for as much time of the guest as the paper's build takes.
fn per_build(counts: &Counts, number: u64) -> f64 {
    number as f64 * paper::native_seconds() * 1e3 / guest_ms(counts)
}

/// The time of the run, percent of native, by what a model adds to it. Each processor has its part.
fn percent_of_native(counts: &Counts, added_us: f64) -> f64 {
    100.0 + added_us / (guest_ms(counts) * 1e3 * f64::from(counts.processors)) * 100.0
}

/// How much longer the first takes than the second, percent.
fn gain(percent: f64, smaller: f64) -> f64 {
    (percent / smaller - 1.0) * 100.0
}

impl Report<'_> {
    /// What the columns are, and all counts.
    pub(super) fn introduction(&self) -> String {
        let Costs { fault_us, full_log_us, entry_us, copy_us } = self.costs;
        let mut table = Table::new([
            ">processors",
            "run",
            ">interval, ms",
            ">checkpoints",
            ">exits",
            ">faults",
            ">full logs",
            ">logged",
            ">flushes",
            ">pages",
            ">copied before a write",
            ">concurrently",
            ">in the stop",
            ">instructions",
            ">of stops",
        ]);
        for counts in &self.counts {
            let numbers = [
                counts.exits,
                counts.faults,
                counts.full,
                counts.logged,
                counts.flushes,
                counts.dirty,
                counts.cow,
                counts.concurrent,
                counts.rest,
                counts.handling,
                counts.stopped,
            ];
            let first = [
                counts.processors.to_string(),
                counts.mode.name().to_owned(),
                counts.interval_ms.to_string(),
                counts.intervals.to_string(),
            ];
            table.row(first.into_iter().chain(numbers.map(|number| number.to_string())));
        }
        format!(
            "Columns with \"(counted)\" are counts of an emulated processor: exact, of a guest that is not the paper's. \
             Counts of a run are scaled to {:.0} s, the time of the paper's kernel build.\n\
             Columns with \"(modelled)\" are what a model makes of such counts, and no measurements: \
             a fault {fault_us:.3} µs, a full log {full_log_us:.0} µs, a page in the log {entry_us:.3} µs, \
             a copy before a write {copy_us:.2} µs. (The paper prints {:.0} µs for a full log, which contradicts its \
             table 3.3.)\n\
             Columns with \"(paper)\" are printed in the paper, and those with \"(from the paper)\" follow from its numbers.\n\
             Times: {}\n\n{table}\n",
            paper::native_seconds(),
            paper::FULL_LOG_US,
            hardware()
        )
    }

    /// All counts as they are.
    pub(super) fn write_counts(&self, path: &Path) -> Result<(), BenchError> {
        let write = || -> std::io::Result<()> {
            let mut writer = csv::Writer::from_path(path)?;
            self.counts.iter().try_for_each(|counts| writer.serialize(counts))?;
            writer.flush()
        };
        write().map_err(BenchError::on("write the counts"))
    }

    pub(super) fn charts(&self) -> Vec<Chart> {
        let mut charts = self.dirty_logging();
        charts.extend(self.predictions());
        charts.extend(self.checkpoints());
        charts
    }

    /// Section 3.1.
    fn dirty_logging(&self) -> Vec<Chart> {
        let mut charts = self.events_of_logging();
        charts.extend(self.scores_of_logging());
        charts.extend([self.time_of_logging(), self.gain_of_logging(), self.faults_for_a_full_log()]);
        charts.extend(self.costs_of_logging());
        charts.push(self.errors_of_fits());
        charts
    }

    /// True if some was counted with four processors.
    fn has_four(&self) -> bool {
        self.counts.iter().any(|counts| counts.processors == 4)
    }

    /// Table 3.1.
    fn events_of_logging(&self) -> Vec<Chart> {
        let exits = |counts: &Counts| counts.exits;
        let faults = |counts: &Counts| counts.faults;
        let full = |counts: &Counts| counts.full;
        vec![
            self.chart(
                "table-3-1-exits",
                "Table 3.1: exits of the guest while its writes are logged",
                "exits",
                vec![
                    self.counted(Native, exits),
                    self.counted(LogProtect, exits),
                    self.counted(LogPml, exits),
                    self.paper(Native, paper::NATIVE_EXITS),
                    self.paper(LogProtect, paper::LOG_PROTECT_EXITS),
                    self.paper(LogPml, paper::LOG_PML_EXITS),
                ],
            ),
            self.chart(
                "table-3-1-faults",
                "Table 3.1: page faults while writes are logged",
                "faults",
                vec![
                    self.counted(Native, faults),
                    self.counted(LogProtect, faults),
                    self.counted(LogPml, faults),
                    self.paper(Native, [paper::NATIVE_FAULTS; 8]),
                    self.paper(LogProtect, paper::LOG_PROTECT_FAULTS),
                    self.paper(LogPml, paper::LOG_PML_FAULTS),
                ],
            ),
            self.chart(
                "table-3-1-full",
                "Table 3.1: events of a full log",
                "events",
                vec![self.counted(LogPml, full), self.paper(LogPml, paper::LOG_PML_FULL)],
            ),
        ]
    }

    /// Figures 3.1 and 3.2.
    fn scores_of_logging(&self) -> Vec<Chart> {
        let score = |percent: f64| Some(1e4 / percent);
        let scores = |processors: u32| {
            vec![
                self.series("write-protection (modelled)", processors, LogProtect, |counts| {
                    score(self.log_protect_percent(counts))
                }),
                self.series("PML, by full logs (modelled)", processors, LogPml, |counts| {
                    score(self.log_pml_percent(counts))
                }),
                self.series("PML, by pages (modelled)", processors, LogPml, |counts| {
                    score(self.log_pml_by_page_percent(counts))
                }),
            ]
        };
        let mut charts = vec![
            self.chart(
                "figure-3-1",
                "Figure 3.1: performance while writes are logged, one processor (paper: SPECjbb2005)",
                "% of native",
                [scores(1), vec![self.paper(LogProtect, paper::SCORE_PROTECT), self.paper(LogPml, paper::SCORE_PML)]]
                    .concat(),
            ),
        ];
        if self.has_four() {
            charts.push(self.chart(
                "figure-3-2",
                "Figure 3.2: performance while writes are logged, four processors; the paper prints only gains",
                "% of native",
                scores(4),
            ));
        }
        charts
    }

    /// Figure 3.3.
    fn time_of_logging(&self) -> Chart {
        let paper_time = |faults: Column, cost_us: f64| -> Column {
            faults.map(|faults| 100.0 + faults * cost_us / 1e4 / paper::native_seconds())
        };
        self.chart(
            "figure-3-3",
            "Figure 3.3: time of the work while writes are logged, one processor (paper: kernel build)",
            "% of native",
            vec![
                self.series("write-protection (modelled)", 1, LogProtect, |counts| {
                    Some(self.log_protect_percent(counts))
                }),
                self.series("PML, by full logs (modelled)", 1, LogPml, |counts| Some(self.log_pml_percent(counts))),
                self.series("PML, by pages (modelled)", 1, LogPml, |counts| Some(self.log_pml_by_page_percent(counts))),
                self.known("write-protection (from the paper)", paper_time(paper::log_faults(), self.costs.fault_us)),
                self.known("PML (from the paper)", paper_time(paper::LOG_PML_FULL, self.costs.full_log_us)),
                self.known(
                    "PML, as the paper prints the cost (from the paper)",
                    paper_time(paper::LOG_PML_FULL, paper::FULL_LOG_US),
                ),
            ],
        )
    }

    /// Figure 3.4.
    fn gain_of_logging(&self) -> Chart {
        let gains = |name: &str, processors: u32, percent: fn(&Self, &Counts) -> f64| {
            let pair = self.points(|interval| {
                let protect = self.find(processors, LogProtect, interval)?;
                let pml = self.find(processors, LogPml, interval)?;
                Some(gain(self.log_protect_percent(protect), percent(self, pml)))
            });
            Series { name: name.into(), points: pair }
        };
        let mut series = vec![
            gains("1 processor, by full logs (modelled)", 1, Self::log_pml_percent),
            gains("1 processor, by pages (modelled)", 1, Self::log_pml_by_page_percent),
        ];
        if self.has_four() {
            series.push(gains("4 processors, by full logs (modelled)", 4, Self::log_pml_percent));
            series.push(gains("4 processors, by pages (modelled)", 4, Self::log_pml_by_page_percent));
        }
        series.extend([
            self.known("SPECjbb2005, 1 processor (paper)", paper::SCORE_GAIN),
            self.known("SPECjbb2005, 4 processors (paper)", paper::SCORE_GAIN_OF_FOUR),
            self.known("kernel build, 1 processor (paper)", paper::LOG_GAIN),
        ]);
        self.linear("figure-3-4", "Figure 3.4: gain of PML over write-protection", "%", series)
    }

    /// Figure 3.5.
    fn faults_for_a_full_log(&self) -> Chart {
        let ratio = |name: &str, processors| Series {
            name: name.into(),
            points: self.points(|interval| self.ratio(processors, interval)),
        };
        let mut series = vec![ratio("PML (counted)", 1)];
        if self.has_four() {
            series.push(ratio("PML, 4 processors (counted)", 4));
        }
        series.push(self.paper(LogPml, paper::ratio()));
        self.chart(
            "figure-3-5",
            "Figure 3.5: R(l), page faults by write-protection for each event of a full log",
            "faults / event",
            series,
        )
    }

    /// Figures 3.6 and 3.7.
    fn costs_of_logging(&self) -> Vec<Chart> {
        vec![
            self.chart(
                "figure-3-6",
                "Figure 3.6: page faults by write-protection, and what they add",
                "faults; instructions; ms",
                vec![
                    self.series("faults (counted)", 1, LogProtect, |counts| Some(per_build(counts, counts.faults))),
                    self.series("added instructions (counted)", 1, LogProtect, |counts| self.added_per_build(counts)),
                    self.series("added ms (modelled)", 1, LogProtect, |counts| {
                        Some(per_build(counts, counts.faults) * self.costs.fault_us / 1e3)
                    }),
                    self.known("faults (from the paper)", paper::log_faults()),
                    self.known(
                        "added ms (from the paper)",
                        paper::log_faults().map(|faults| faults * paper::FAULT_US / 1e3),
                    ),
                ],
            ),
            self.chart(
                "figure-3-7",
                "Figure 3.7: events of a full log, and what PML adds",
                "events; pages; instructions; ms",
                vec![
                    self.series("full logs (counted)", 1, LogPml, |counts| Some(per_build(counts, counts.full))),
                    self.series("pages in the log (counted)", 1, LogPml, |counts| {
                        Some(per_build(counts, counts.logged))
                    }),
                    self.series("added instructions (counted)", 1, LogPml, |counts| self.added_per_build(counts)),
                    self.series("added ms, by full logs (modelled)", 1, LogPml, |counts| {
                        Some(per_build(counts, counts.full) * self.costs.full_log_us / 1e3)
                    }),
                    self.series("added ms, by pages (modelled)", 1, LogPml, |counts| {
                        Some(per_build(counts, counts.logged) * self.costs.entry_us / 1e3)
                    }),
                    self.known("full logs (paper)", paper::LOG_PML_FULL),
                ],
            ),
        ]
    }

    /// Figure 3.8. What events cost is fitted to all intervals together.
    fn errors_of_fits(&self) -> Chart {
        let errors = |name: &str, mode, events: fn(&Counts) -> f64| {
            let cost = self.fit(mode, events);
            self.series(name, 1, mode, move |counts| Some((cost? * events(counts) / self.added(counts)? - 1.0) * 100.0))
        };
        self.linear(
            "figure-3-8",
            "Figure 3.8: errors of the added instructions, if they are a cost times the events (of all time: 1 % in the paper)",
            "% of the counted instructions",
            vec![
                errors("write-protection, by faults", LogProtect, |counts| counts.faults as f64),
                errors("PML, by full logs", LogPml, |counts| counts.full as f64),
                errors("PML, by pages", LogPml, |counts| counts.logged as f64),
            ],
        )
    }

    /// Section 3.2.
    fn predictions(&self) -> Vec<Chart> {
        let protect = |counts: &Counts| Some(self.copy_percent(counts));
        let predicted = |counts: &Counts| {
            let traced = self.traced(counts)?;
            Some(percent_of_native(counts, traced.pml_us(&self.costs)))
        };
        let by_page = |counts: &Counts| {
            let traced = self.traced(counts)?;
            Some(percent_of_native(counts, traced.pml_by_page_us(&self.costs, self.logged_part(counts))))
        };
        let seconds = |percent: Option<f64>| percent.map(|percent| percent / 100.0 * paper::native_seconds());
        let paper_percent = |seconds: Column| seconds.map(|seconds| seconds / paper::native_seconds() * 100.0);
        let paper_outside: Column = std::array::from_fn(|index| match paper::INTERVALS_MS[index] {
            20 => 720.0,
            50 => 600.0,
            _ => f64::NAN,
        });
        let gain_of = |prediction: &dyn Fn(&Counts) -> Option<f64>, name: &str| {
            self.series(name, 1, CopyProtect, |counts| Some(gain(protect(counts)?, prediction(counts)?)))
        };
        vec![
            self.chart(
                "figure-3-11",
                "Figure 3.11: time of the work with copy-on-write checkpoints by write-protection",
                "% of native",
                vec![
                    self.series("inside (modelled)", 1, CopyProtect, protect),
                    self.known("inside (from the paper)", paper_percent(paper::protect_seconds())),
                    self.known("outside (paper)", paper_percent(paper_outside)),
                ],
            ),
            self.chart(
                "table-3-2",
                "Table 3.2: B(l), what a copy before a write costs, which should not depend on the interval",
                "instructions, or µs",
                vec![
                    self.series("instructions (counted)", 1, CopyProtect, |counts| {
                        let faults = self.fit(LogProtect, |counts| counts.faults as f64)?;
                        let concurrent = (counts.faults - counts.cow) as f64;
                        Some((self.added(counts)? - faults * concurrent) / counts.cow as f64)
                    }),
                    self.known("µs (paper)", paper::COPY_BY_INTERVAL_US),
                ],
            ),
            self.chart(
                "table-3-3-seconds",
                "Table 3.3: predicted time of the work with checkpoints by PML",
                "s",
                vec![
                    self.series("paper's model (modelled)", 1, CopyProtect, |counts| seconds(predicted(counts))),
                    self.series("by pages (modelled)", 1, CopyProtect, |counts| seconds(by_page(counts))),
                    self.known("paper's model (paper)", paper::PREDICTED_SECONDS),
                ],
            ),
            self.linear(
                "table-3-3-gain",
                "Table 3.3: predicted gain",
                "%",
                vec![
                    gain_of(&predicted, "paper's model (modelled)"),
                    gain_of(&by_page, "by pages (modelled)"),
                    self.known("paper's model (paper)", paper::PREDICTED_GAIN),
                ],
            ),
            self.chart(
                "figure-3-12",
                "Figure 3.12: time of the work with checkpoints, and as predicted with PML",
                "% of native",
                vec![
                    self.series("write-protection (modelled)", 1, CopyProtect, protect),
                    self.series("PML, paper's model (modelled)", 1, CopyProtect, predicted),
                    self.series("PML, by pages (modelled)", 1, CopyProtect, by_page),
                    self.known("write-protection (from the paper)", paper_percent(paper::protect_seconds())),
                    self.known("PML, paper's model (paper)", paper_percent(paper::PREDICTED_SECONDS)),
                ],
            ),
        ]
    }

    /// Chapter 5.
    fn checkpoints(&self) -> Vec<Chart> {
        let mut charts = vec![self.downtimes(), self.time_of_checkpoints(), self.gain_of_checkpoints()];
        charts.extend([self.avoided_faults(), self.errors_of_predictions()]);
        charts.extend(self.events_of_checkpoints());
        charts.extend([self.activations(), self.pages_of_checkpoints(), self.moments_of_copies()]);
        charts
    }

    /// Figure 5.1.
    fn time_of_checkpoints(&self) -> Chart {
        self.chart(
            "figure-5-1",
            "Figure 5.1: time of the work with copy-on-write checkpoints, without stops",
            "% of native",
            COPIES
                .iter()
                .map(|&mode| {
                    let name = format!("{} (modelled)", mode.title());
                    self.series(&name, 1, mode, |counts| Some(self.copy_percent(counts)))
                })
                .chain([self.known(
                    "write-protection (from the paper)",
                    paper::protect_seconds().map(|seconds| seconds / paper::native_seconds() * 100.0),
                )])
                .collect(),
        )
    }

    /// Figure 5.2.
    fn gain_of_checkpoints(&self) -> Chart {
        let gains = |mode: Mode| {
            let name = format!("{} (modelled)", mode.title());
            self.series(&name, 1, mode, move |counts| {
                let protect = self.find(1, CopyProtect, counts.interval_ms)?;
                Some(gain(self.copy_percent(protect), self.copy_percent(counts)))
            })
        };
        let mut gain_series: Vec<Series> = COPIES[1..].iter().map(|&mode| gains(mode)).collect();
        gain_series.extend([
            self.known("paper's model (paper)", paper::PREDICTED_GAIN),
            self.known("by pages, last buffer (from the paper)", self.paper_gain(&paper_part_in_the_last_buffer())),
            self.known("by avoided faults (from the paper)", self.paper_gain(&paper::avoided_by_early())),
            self.known("early PML, measured (paper)", paper::EARLY_GAIN),
        ]);
        self.linear("figure-5-2", "Figure 5.2: gain of PML over write-protection", "%", gain_series)
    }

    /// The share of the faults of write-protection that each way avoids.
    fn avoided_faults(&self) -> Chart {
        let avoided = |mode: Mode| {
            let name = format!("{} (counted)", mode.title());
            self.series(&name, 1, mode, move |counts| {
                let protect = self.find(1, CopyProtect, counts.interval_ms)?;
                Some(100.0 - counts.faults as f64 / protect.faults as f64 * 100.0)
            })
        };
        let percent = |column: Column| column.map(|part| part * 100.0);
        self.linear(
            "avoided",
            "Page faults of write-protection that PML avoids",
            "% of the faults",
            COPIES[1..]
                .iter()
                .map(|&mode| avoided(mode))
                .chain([
                    self.series("last buffer (modelled)", 1, CopyProtect, |counts| {
                        Some(self.logged_part(counts) * counts.concurrent as f64 / counts.dirty as f64 * 100.0)
                    }),
                    self.known("late PML (from the paper)", percent(paper::avoided_by_late())),
                    self.known("early PML (from the paper)", percent(paper::avoided_by_early())),
                    self.known("last buffer (from the paper)", percent(paper_part_in_the_last_buffer())),
                ])
                .collect(),
        )
    }

    fn errors_of_predictions(&self) -> Chart {
        self.linear(
            "prediction-errors",
            "Errors of the predicted gain of early activation (figure 5.2): predicted minus by its own counts",
            "percentage points",
            self.prediction_errors(),
        )
    }

    /// Table 5.2 and figure 5.3.
    fn events_of_checkpoints(&self) -> Vec<Chart> {
        let counted = |number: fn(&Counts) -> u64| COPIES.map(|mode| self.counted(mode, number)).to_vec();
        let logging = |number: fn(&Counts) -> u64| COPIES[1..].iter().map(|&mode| self.counted(mode, number)).collect();
        let with_paper = |mut series: Vec<Series>, columns: &[(Mode, Column)]| {
            series.extend(columns.iter().map(|&(mode, column)| self.paper(mode, column)));
            series
        };
        vec![
            self.chart(
                "table-5-2-exits",
                "Table 5.2: exits of the guest with copy-on-write checkpoints",
                "exits",
                with_paper(
                    counted(|counts| counts.exits),
                    &[
                        (CopyProtect, paper::COPY_PROTECT_EXITS),
                        (CopyLate, paper::COPY_LATE_EXITS),
                        (CopyEarly, paper::COPY_EARLY_EXITS),
                    ],
                ),
            ),
            self.chart(
                "table-5-2-faults",
                "Table 5.2: page faults with copy-on-write checkpoints",
                "faults",
                with_paper(
                    counted(|counts| counts.faults),
                    &[
                        (CopyProtect, paper::COPY_PROTECT_FAULTS),
                        (CopyLate, paper::COPY_LATE_FAULTS),
                        (CopyEarly, paper::COPY_EARLY_FAULTS),
                    ],
                ),
            ),
            self.chart(
                "table-5-2-full",
                "Table 5.2: events of a full log with copy-on-write checkpoints",
                "events",
                with_paper(
                    logging(|counts| counts.full),
                    &[(CopyLate, paper::COPY_LATE_FULL), (CopyEarly, paper::COPY_EARLY_FULL)],
                ),
            ),
            self.chart(
                "figure-5-3",
                "Figure 5.3: flushes of the processor's translations",
                "flushes",
                with_paper(
                    counted(|counts| counts.flushes),
                    &[
                        (CopyProtect, paper::PROTECT_FLUSHES),
                        (CopyLate, paper::LATE_FLUSHES),
                        (CopyEarly, paper::EARLY_FLUSHES),
                    ],
                ),
            ),
        ]
    }

    fn activations(&self) -> Chart {
        self.linear(
            "activations",
            "Flushes for each checkpoint besides its own, and the buffers that its pages fill",
            "flushes, or buffers",
            vec![
                self.series("flushes, early, by buffers (counted)", 1, CopyBuffers, |counts| {
                    Some(per_checkpoint(counts, counts.flushes) - 1.0)
                }),
                self.series("buffers (counted)", 1, CopyBuffers, |counts| {
                    Some(per_checkpoint(counts, counts.dirty) / self.buffer)
                }),
                self.known("flushes, early PML (from the paper)", paper::activations_of_a_checkpoint()),
                self.known(
                    "buffers (from the paper)",
                    paper::pages_of_a_checkpoint().map(|pages| pages / f64::from(paper::BUFFER_PAGES)),
                ),
            ],
        )
    }

    fn pages_of_checkpoints(&self) -> Chart {
        self.chart(
            "pages",
            "Pages of all checkpoints, and those of them that the log held",
            "pages",
            [LogPml, CopyLate, CopyEarly, CopyBuffers, CopyLast].iter().fold(
                vec![self.series("dirty (counted)", 1, LogProtect, |counts| Some(per_build(counts, counts.dirty)))],
                |mut series, &mode| {
                    series.push(self.counted(mode, |counts| counts.logged));
                    series
                },
            ),
        )
    }

    fn moments_of_copies(&self) -> Chart {
        let copies = |name: &str, part: fn(&Counts) -> u64| {
            self.series(name, 1, CopyEarly, move |counts| Some(per_build(counts, part(counts))))
        };
        self.chart(
            "copies",
            "When the pages of copy-on-write checkpoints were copied, the same with each mechanism",
            "pages",
            vec![
                copies("copied concurrently (counted)", |counts| counts.concurrent),
                copies("copied before a write (counted)", |counts| counts.cow),
                copies("left to the next stop (counted)", |counts| counts.rest),
            ],
        )
    }

    /// Table 5.1: by processors, over all intervals that each of them has.
    fn downtimes(&self) -> Chart {
        let mut processors: Vec<u32> = self.counts.iter().map(|counts| counts.processors).collect();
        processors.dedup();
        let longest = |processors: u32| {
            let own = self.counts.iter().filter(move |counts| counts.processors == processors);
            own.map(|counts| counts.interval_ms).max()
        };
        let shared = processors.iter().filter_map(|&processors| longest(processors)).min().unwrap_or(0);
        let counted = |mode: Mode| {
            let point = |&processors: &u32| -> Samples {
                let runs = self.counts.iter().filter(|counts| {
                    counts.processors == processors && counts.mode == mode && counts.interval_ms <= shared
                });
                let stops: Vec<f64> = runs.map(|counts| per_checkpoint(counts, counts.stopped)).collect();
                let mean = stops.iter().sum::<f64>() / stops.len() as f64;
                (!stops.is_empty()).then_some(mean).into_iter().collect()
            };
            Series {
                name: format!("{}, instructions (counted)", mode.title()),
                points: processors.iter().map(point).collect(),
            }
        };
        let printed = |mode: Mode, column: usize| {
            let number = |&processors: &u32| paper::DOWNTIME_MS[processors as usize - 1][column];
            let point = |number: f64| -> Samples { (!number.is_nan()).then_some(number).into_iter().collect() };
            Series {
                name: format!("{}, ms (paper)", mode.title()),
                points: processors.iter().map(number).map(point).collect(),
            }
        };
        let mut series = COPIES.map(counted).to_vec();
        series.extend([printed(CopyProtect, 0), printed(CopyLate, 1), printed(CopyEarly, 2)]);
        let chart = self.chart(
            "table-5-1",
            &format!("Table 5.1: what a stop takes, the average of the intervals up to {shared} ms (paper: all)"),
            "instructions, or ms",
            series,
        );
        let x_labels = processors.iter().map(u32::to_string).collect();
        Chart { x_axis: "processors".into(), x_labels, ..chart }
    }

    /// The gain of early activation: by the paper's model and by pages, minus what its own counts
    /// give.
    fn prediction_errors(&self) -> Vec<Series> {
        let error = |counts: &Counts, is_by_page: bool| {
            let protect = self.find(1, CopyProtect, counts.interval_ms)?;
            let part = if counts.mode == CopyLast { self.logged_part(protect) } else { 1.0 };
            let traced = self.traced(protect)?;
            let added = if is_by_page { traced.pml_by_page_us(&self.costs, part) } else { traced.pml_us(&self.costs) };
            let before = percent_of_native(protect, traced.protect_us(&self.costs));
            let predicted = gain(before, percent_of_native(protect, added));
            Some(predicted - gain(self.copy_percent(protect), self.copy_percent(counts)))
        };
        let series = |mode: Mode, is_by_page: bool| {
            let model = if is_by_page { "by pages" } else { "paper's model" };
            let name = format!("{}: {model} (modelled)", mode.title());
            self.series(&name, 1, mode, move |counts| error(counts, is_by_page))
        };
        let modes = [CopyEarly, CopyBuffers, CopyLast];
        let mut all: Vec<Series> =
            modes.into_iter().flat_map(|mode| [series(mode, false), series(mode, true)]).collect();
        let of_paper =
            |predicted: Column| -> Column { std::array::from_fn(|index| predicted[index] - paper::EARLY_GAIN[index]) };
        all.extend([
            self.known("paper's model (from the paper)", of_paper(paper::PREDICTED_GAIN)),
            self.known(
                "by pages, last buffer (from the paper)",
                of_paper(self.paper_gain(&paper_part_in_the_last_buffer())),
            ),
        ]);
        all
    }

    /// The gain over write-protection in the paper's build, if the given part of its faults becomes
    /// entries of the log.
    fn paper_gain(&self, avoided: &Column) -> Column {
        let Costs { fault_us, entry_us, .. } = self.costs;
        std::array::from_fn(|index| {
            let saved = avoided[index] * paper::copy_faults()[index] * (fault_us - entry_us) / 1e6;
            let protect = paper::protect_seconds()[index];
            gain(protect, protect - saved)
        })
    }

    fn log_protect_percent(&self, counts: &Counts) -> f64 {
        percent_of_native(counts, self.costs.fault_us * counts.faults as f64)
    }

    fn log_pml_percent(&self, counts: &Counts) -> f64 {
        percent_of_native(counts, self.costs.full_log_us * counts.full as f64)
    }

    fn log_pml_by_page_percent(&self, counts: &Counts) -> f64 {
        percent_of_native(counts, self.costs.entry_us * counts.logged as f64)
    }

    /// With checkpoints: copies before a write, other faults, and pages in the log.
    fn copy_percent(&self, counts: &Counts) -> f64 {
        let Costs { fault_us, entry_us, copy_us, .. } = self.costs;
        let faults = counts.faults.saturating_sub(counts.cow) as f64;
        let added = fault_us * faults + copy_us * counts.cow as f64 + entry_us * counts.logged as f64;
        percent_of_native(counts, added)
    }

    /// What the models start from: the counts of a run with write-protection.
    fn traced(&self, protect: &Counts) -> Option<Traced> {
        Some(Traced {
            concurrent: protect.faults.saturating_sub(protect.cow) as f64,
            cow: protect.cow as f64,
            ratio: self.ratio(protect.processors, protect.interval_ms)?,
        })
    }

    /// The part of the concurrently copied pages that the log finds, where the last buffer counts.
    fn logged_part(&self, protect: &Counts) -> f64 {
        part_in_the_last_buffer(per_checkpoint(protect, protect.concurrent), self.buffer)
    }

    /// R(l). Without an event there is none.
    fn ratio(&self, processors: u32, interval: u32) -> Option<f64> {
        let protect = self.find(processors, LogProtect, interval)?;
        let pml = self.find(processors, LogPml, interval)?;
        (pml.full > 0).then(|| protect.faults as f64 / pml.full as f64)
    }

    /// Instructions for exits that the guest would not make by itself.
    fn added(&self, counts: &Counts) -> Option<f64> {
        let native = self.find(counts.processors, Native, counts.interval_ms)?;
        Some(counts.handling as f64 - native.handling as f64 * guest_ms(counts) / guest_ms(native))
    }

    fn added_per_build(&self, counts: &Counts) -> Option<f64> {
        Some(self.added(counts)? * paper::native_seconds() * 1e3 / guest_ms(counts))
    }

    /// Instructions for an event, with one processor, of all intervals together.
    fn fit(&self, mode: Mode, events: impl Fn(&Counts) -> f64) -> Option<f64> {
        let runs = self.counts.iter().filter(|counts| counts.processors == 1 && counts.mode == mode);
        // Each interval counts the same, however long its run was.
        let pairs: Option<Vec<(f64, f64)>> = runs
            .map(|counts| Some((events(counts) / guest_ms(counts), self.added(counts)? / guest_ms(counts))))
            .collect();
        let cost = fit(pairs?.into_iter());
        cost.is_finite().then_some(cost)
    }

    fn find(&self, processors: u32, mode: Mode, interval: u32) -> Option<&Counts> {
        // Without logging there are no intervals.
        let is_same = |counts: &&Counts| mode == Native || counts.interval_ms == interval;
        let own = self.counts.iter().filter(|counts| counts.processors == processors && counts.mode == mode);
        own.into_iter().find(is_same)
    }

    fn points(&self, number: impl Fn(u32) -> Option<f64>) -> Vec<Samples> {
        let finite = |interval: &u32| number(*interval).filter(|number| number.is_finite());
        self.intervals.iter().map(|interval| finite(interval).into_iter().collect()).collect()
    }

    fn series(&self, name: &str, processors: u32, mode: Mode, number: impl Fn(&Counts) -> Option<f64>) -> Series {
        let points = self.points(|interval| number(self.find(processors, mode, interval)?));
        Series { name: name.into(), points }
    }

    /// A count with one processor, for as long as the paper's build takes.
    fn counted(&self, mode: Mode, number: impl Fn(&Counts) -> u64) -> Series {
        let name = format!("{} (counted)", mode.title());
        self.series(&name, 1, mode, |counts| Some(per_build(counts, number(counts))))
    }

    /// Numbers at the intervals that the paper has; none where it has a NaN.
    fn known(&self, name: &str, column: Column) -> Series {
        let points = self.points(|interval| {
            let found = paper::INTERVALS_MS.iter().zip(column).find(|(known, _)| **known == interval);
            found.map(|(_, number)| number)
        });
        Series { name: name.into(), points }
    }

    fn paper(&self, mode: Mode, column: Column) -> Series {
        self.known(&format!("{} (paper)", mode.title()), column)
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
            notes: Vec::new(),
        }
    }

    /// A picture with zero, for numbers that may be zero or less.
    fn linear(&self, name: &str, title: &str, unit: &str, series: Vec<Series>) -> Chart {
        Chart { is_logarithmic: false, ..self.chart(name, title, unit, series) }
    }
}

/// The part of the paper's checkpoints that their last buffers have.
fn paper_part_in_the_last_buffer() -> Column {
    paper::pages_of_a_checkpoint().map(|pages| part_in_the_last_buffer(pages, paper::BUFFER_PAGES.into()))
}

/// Whether this machine could measure times, and what it lacks.
fn hardware() -> String {
    let parameter = "/sys/module/kvm_intel/parameters/pml";
    match std::fs::read_to_string(parameter) {
        Ok(value) if value.trim() == "Y" => {
            "not measured here. This machine has KVM with PML: `pagemark-bench vm --accel kvm` measures what \
             checkpoints cost a machine with it, and without it after `modprobe kvm_intel pml=N`."
                .into()
        }
        Ok(_) => "none, because KVM does not use PML: load kvm_intel with pml=Y, on a processor that has it.".into(),
        Err(_) => {
            "none, because this machine has no KVM with PML: it needs an Intel processor with PML, and the module \
             kvm_intel with the parameters ept=Y, eptad=Y and pml=Y."
                .into()
        }
    }
}
