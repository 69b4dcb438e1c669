//! Figure 9 (section IV-A of "LDT"): a program writes random pages at a fixed rate. Measured is the
//! time after which it uses no more processor time than untracked (it has converged), and how much
//! more it has used until then.

use std::time::{Duration, Instant};

use pagemark::Mechanism;
use pagemark_report::chart::Chart;
use pagemark_report::samples::Samples;
use serde::{Deserialize, Serialize};

use super::page_buffer::PageBuffer;
use super::task::Task;
use super::tracked_buffer::TrackedBuffer;
use super::{Rounds, Session, format_pages};
use crate::BenchError;
use crate::measuring::random::Xorshift;
use crate::measuring::task::ProcessTask;
use crate::measuring::usage::thread_cpu_ns;

/// The write-rate program of table I.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub(super) struct WriteRate {
    mechanism: Option<Mechanism>,
    pages: usize,
    writes_per_second: u32,
    samples: usize,
    /// Bursts of writes that make up a sample.
    bursts: u32,
}

/// Time from the start of one burst to the start of the next.
const TICK: Duration = Duration::from_millis(1);

impl WriteRate {
    /// Share of a processor that each sample used.
    pub fn run(&self) -> Result<Vec<f64>, BenchError> {
        let buffer = PageBuffer::new(self.pages).map_err(BenchError::on("map memory"))?;
        // The first run of the loop faults for its code and data.
        self.samples(&buffer, 4)?;
        let _tracked = TrackedBuffer::new(&buffer, self.mechanism)?;
        self.samples(&buffer, self.samples)
    }

    fn samples(&self, buffer: &PageBuffer, count: usize) -> Result<Vec<f64>, BenchError> {
        let mut random = Xorshift::new(11);
        let writes = self.writes_per_second / (1000 / TICK.as_millis() as u32);
        let mut used = Vec::with_capacity(count);
        let mut next = Instant::now();
        for _ in 0..count {
            let before = thread_cpu_ns()?;
            for _ in 0..self.bursts {
                for value in 0..writes {
                    buffer.write(random.index(self.pages), value as u8);
                }
                // A late burst is not made up for, so that each sample has the same work.
                next = (next + TICK).max(Instant::now());
                std::thread::sleep(next.saturating_duration_since(Instant::now()).max(MIN_SLEEP));
            }
            used.push((thread_cpu_ns()? - before) / (TICK * self.bursts).as_nanos() as f64);
        }
        Ok(used)
    }
}

/// Each burst ends with a sleep, also a late one: the cost of a sleep is a part of the measured
/// work.
const MIN_SLEEP: Duration = Duration::from_nanos(1);

/// The paper's rates, writes a second.
const RATES: [u32; 3] = [50_000, 100_000, 200_000];

/// A program has converged when its processor time is above the untracked median by this share at
/// most. The paper does not state its threshold.
const THRESHOLD: f64 = 0.1;

/// Writes in the measured time, as a multiple of the pages. Of 3000 pages, one has then not been
/// written, so `soft-dirty` has had nearly all its faults.
const COVERAGE: f64 = 8.0;

/// Samples in the measured time.
const SAMPLES: f64 = 80.0;

/// Fewest bursts in a sample.
const MIN_BURSTS: u32 = 5;

/// Draws the figure, with a panel for each rate.
pub(super) fn figures(session: &Session) -> Result<(), BenchError> {
    let max_pages = session.scale.rate_pages;
    let sizes = [8, 4, 2, 1].map(|part| (max_pages / part).max(1));
    for (writes_per_second, panel) in RATES.into_iter().zip(["a", "b", "c"]) {
        let mut times = Vec::new();
        let mut overheads = Vec::new();
        let mut unfinished = Vec::new();
        for pages in sizes {
            let rate = format!("{writes_per_second} writes a second to {}", format_pages(pages));
            session.progress(&rate);
            let measured = Duration::from_secs_f64(pages as f64 / f64::from(writes_per_second) * COVERAGE);
            let bursts = (measured.div_f64(SAMPLES).div_duration_f64(TICK).ceil() as u32).max(MIN_BURSTS);
            let sample = TICK * bursts;
            let samples = measured.div_duration_f64(sample).ceil() as usize;
            let results = session.by_variant(|mechanism| {
                Task::WriteRate(WriteRate { mechanism, pages, writes_per_second, samples, bursts }).run_in_process()
            })?;
            let untracked = typical(&results[0]);
            let baseline = untracked.iter().copied().collect::<Samples>().median();
            let converged: Vec<Vec<Converged>> = results
                .iter()
                .map(|result| result.rounds.iter().map(|used| converge(used, &untracked, baseline)).collect())
                .collect();
            for (variant, rounds) in session.variants().iter().zip(&converged) {
                if rounds.iter().any(|converged| !converged.is_complete) {
                    unfinished.push(format!("{} at {}", variant.name(), format_pages(pages)));
                }
            }
            let to_ms = sample.as_secs_f64() * 1e3;
            times.push(of_each(&converged, |converged| converged.samples as f64 * to_ms));
            overheads.push(of_each(&converged, |converged| converged.overhead));
        }
        let mut notes = vec![format!("converged: within {:.0} % of the untracked median", THRESHOLD * 100.0)];
        if !unfinished.is_empty() {
            notes.push(format!("in some round not within the time that was looked at: {}", unfinished.join(", ")));
        }
        let chart = |part: &str, what: &str, y: &str, points: &[Vec<Samples>]| Chart {
            name: format!("figure-9{panel}-{part}"),
            title: format!("Figure 9{panel}: {what}, {writes_per_second} writes a second"),
            x_axis: "memory".into(),
            y_axis: y.into(),
            is_logarithmic: false,
            reference: None,
            x_labels: sizes.map(format_pages).into(),
            series: session.series(|variant| points.iter().map(|point| point[variant].clone()).collect()),
            notes: notes.clone(),
        };
        let unit = format!("{} of the clock", session.clock.million());
        session.publish(&chart("time", "time to converge with the untracked processor use", &unit, &times))?;
        let y = "processor time until then to the untracked";
        session.publish(&chart("overhead", "processor time until it has converged", y, &overheads))?;
    }
    Ok(())
}

/// The median of the rounds, sample by sample.
fn typical(result: &Rounds) -> Vec<f64> {
    let samples = result.rounds.iter().map(Vec::len).min().unwrap_or(0);
    (0..samples).map(|number| result.number(number).median()).collect()
}

fn of_each(converged: &[Vec<Converged>], value: impl Fn(&Converged) -> f64) -> Vec<Samples> {
    converged.iter().map(|rounds| rounds.iter().map(&value).collect()).collect()
}

/// When a program used no more processor time than untracked, and how much more it had used until
/// then.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Converged {
    /// Samples before that.
    samples: usize,
    /// Processor time of these samples and the next, divided by that of untracked.
    overhead: f64,
    /// False if it never did in the measured time.
    is_complete: bool,
}

fn converge(used: &[f64], untracked: &[f64], baseline: f64) -> Converged {
    let found = used.iter().position(|&used| used <= baseline * (1.0 + THRESHOLD));
    let samples = found.unwrap_or(used.len());
    let until = |used: &[f64]| used.iter().take(samples + 1).sum::<f64>();
    Converged { samples, overhead: until(used) / until(untracked), is_complete: found.is_some() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_sample_near_the_baseline_counts() {
        let untracked = [1.0, 1.0, 1.2, 0.8, 1.0];
        let run = |used: &[f64]| converge(used, &untracked, 1.0);
        let at = |samples, overhead| Converged { samples, overhead, is_complete: true };
        assert_eq!(run(&[1.0, 5.0, 5.0, 5.0, 5.0]), at(0, 1.0));
        assert_eq!(run(&[1.1, 5.0, 5.0, 5.0, 5.0]), at(0, 1.1));
        assert_eq!(run(&[5.0, 3.0, 0.32, 9.0, 9.0]), at(2, 8.32 / 3.2));
        assert_eq!(run(&[0.1, 3.0, 1.1, 9.0, 9.0]), at(0, 0.1));
        assert_eq!(run(&[2.0; 5]), Converged { samples: 5, overhead: 2.0, is_complete: false });
    }

    #[test]
    fn a_sample_has_the_writes_of_its_bursts() {
        let _alone = crate::ldt::alone();
        let run = |mechanism, writes_per_second| {
            let rate = WriteRate { mechanism, pages: 64, writes_per_second, samples: 3, bursts: 5 };
            rate.run().unwrap()
        };
        let used = run(None, 10_000);
        assert!(used.len() == 3 && used.iter().all(|&used| used > 0.0), "{used:?}");
        // Two million writes in a burst take longer than the time between bursts.
        assert!(run(None, 2_000_000_000).iter().all(|&used| used > 1.0));
    }
}
