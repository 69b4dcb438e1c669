//! Figure 9: a program that writes random pages at a fixed rate. After how long does it use no more processor time than untracked,
//! and how much more has it used until then?

use std::time::{Duration, Instant};

use pagemark::Mechanism;
use serde::{Deserialize, Serialize};

use super::area::Area;
use super::chart::{Chart, format_bytes};
use super::clock::cpu_ns;
use super::random::Random;
use super::task::Task;
use super::tracked::Tracked;
use super::{Measured, Session};
use crate::BenchError;
use crate::stats::Samples;

/// A program with a rate.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub(super) struct Rate {
    mechanism: Option<Mechanism>,
    pages: usize,
    writes_per_second: u32,
    samples: usize,
    /// Bursts of writes that make up a sample.
    bursts: u32,
}

/// The distance of bursts.
const TICK: Duration = Duration::from_millis(1);

impl Rate {
    /// The share of a processor that each sample used.
    pub fn run(&self) -> Result<Vec<f64>, BenchError> {
        let area = Area::new(self.pages).map_err(BenchError::on("map memory"))?;
        // Code and data of the loop are there when it counts.
        self.samples(&area, 4)?;
        let _tracked = Tracked::new(&area, self.mechanism)?;
        self.samples(&area, self.samples)
    }

    fn samples(&self, area: &Area, count: usize) -> Result<Vec<f64>, BenchError> {
        let mut random = Random::new(11);
        let writes = self.writes_per_second / (1000 / TICK.as_millis() as u32);
        let mut used = Vec::with_capacity(count);
        let mut next = Instant::now();
        for _ in 0..count {
            let before = cpu_ns()?;
            for _ in 0..self.bursts {
                for value in 0..writes {
                    area.write(random.below(self.pages as u32) as usize, value as u8);
                }
                // What was late is not made up for, so that each sample has the same work.
                next = (next + TICK).max(Instant::now());
                std::thread::sleep(next.saturating_duration_since(Instant::now()).max(SHORTEST_SLEEP));
            }
            used.push((cpu_ns()? - before) / (TICK * self.bursts).as_nanos() as f64);
        }
        Ok(used)
    }
}

/// Each burst ends with a sleep: what that costs is a part of what the program does.
const SHORTEST_SLEEP: Duration = Duration::from_nanos(1);

/// The paper's rates, writes a second.
const RATES: [u32; 3] = [50_000, 100_000, 200_000];

/// How far above the untracked median the processor time may lie that counts as converged. The paper does not tell its own.
const THRESHOLD: f64 = 0.1;

/// How often all pages could be written in the time that is looked at. Of `soft-dirty`'s pages, 1 in 3000 is then left to fault.
const COVERAGE: f64 = 8.0;

/// Samples in that time, and the fewest bursts that make up one.
const SAMPLES: f64 = 80.0;
const FEWEST_BURSTS: u32 = 5;

/// Draws the figure, a panel a rate.
pub(super) fn figures(session: &Session) -> Result<(), BenchError> {
    let most_pages = session.scale.rate_pages;
    let sizes = [most_pages / 4, most_pages / 2, most_pages];
    for (writes_per_second, panel) in RATES.into_iter().zip(["a", "b", "c"]) {
        let mut times = Vec::new();
        let mut overheads = Vec::new();
        let mut unfinished = Vec::new();
        for pages in sizes {
            let rate = format!("{writes_per_second} writes a second to {}", format_bytes(pages));
            session.progress(&rate);
            let all = Duration::from_secs_f64(pages as f64 / f64::from(writes_per_second) * COVERAGE);
            let bursts = (all.div_f64(SAMPLES).div_duration_f64(TICK).ceil() as u32).max(FEWEST_BURSTS);
            let sample = TICK * bursts;
            let samples = all.div_duration_f64(sample).ceil() as usize;
            let results = session.by_subject(|mechanism| {
                Task::Rate(Rate { mechanism, pages, writes_per_second, samples, bursts }).run_apart()
            })?;
            let untracked = typical(&results[0]);
            let baseline = untracked.iter().copied().collect::<Samples>().median();
            let converged: Vec<Vec<Converged>> = results
                .iter()
                .map(|result| result.rounds.iter().map(|used| converge(used, &untracked, baseline)).collect())
                .collect();
            for (subject, rounds) in session.subjects().iter().zip(&converged) {
                if rounds.iter().any(|converged| !converged.is_complete) {
                    unfinished.push(format!("{} at {}", subject.name(), format_bytes(pages)));
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
            x: "memory".into(),
            y: y.into(),
            is_logarithmic: false,
            reference: None,
            places: sizes.map(format_bytes).into(),
            series: session.series(|subject| points.iter().map(|point| point[subject].clone()).collect()),
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
fn typical(result: &Measured) -> Vec<f64> {
    let samples = result.rounds.iter().map(Vec::len).min().unwrap_or(0);
    (0..samples).map(|number| result.number(number).median()).collect()
}

fn of_each(converged: &[Vec<Converged>], value: impl Fn(&Converged) -> f64) -> Vec<Samples> {
    converged.iter().map(|rounds| rounds.iter().map(&value).collect()).collect()
}

/// How a program came to use no more processor time than untracked.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Converged {
    /// Samples before it did.
    samples: usize,
    /// Processor time up to then, and of the sample in which it had, to that of untracked.
    overhead: f64,
    /// Whether it did.
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
            let rate = Rate { mechanism, pages: 64, writes_per_second, samples: 3, bursts: 5 };
            rate.run().unwrap()
        };
        let used = run(None, 10_000);
        assert!(used.len() == 3 && used.iter().all(|&used| used > 0.0), "{used:?}");
        // Two million writes in a burst take longer than the time between bursts.
        assert!(run(None, 2_000_000_000).iter().all(|&used| used > 1.0));
    }
}
