//! Figures 7 and 8: reads and writes of random pages after a restart, slice by slice.

use std::hint::black_box;

use pagemark::Mechanism;
use serde::{Deserialize, Serialize};

use super::area::Area;
use super::chart::{Chart, format_bytes};
use super::clock::{Used, cpu_ns};
use super::random::Random;
use super::task::Task;
use super::tracked::Tracked;
use super::{Figure, Session};
use crate::BenchError;

/// A program that reads and writes.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub(super) struct Mix {
    mechanism: Option<Mechanism>,
    pages: usize,
    writes_percent: u32,
    slices: usize,
    /// Processor time of a slice.
    slice_ns: f64,
}

/// Accesses between two looks at the clock.
const BATCH: u32 = 256;

impl Mix {
    /// Accesses in a million ns of each slice, then page faults of each slice.
    pub fn run(&self) -> Result<Vec<f64>, BenchError> {
        let area = Area::new(self.pages).map_err(BenchError::on("map memory"))?;
        let mut random = Random::new(7);
        // Code and data of the loop are there when it counts.
        self.slice(&area, &mut random, self.slice_ns / 10.0)?;
        let _tracked = Tracked::new(&area, self.mechanism)?;
        let (mut rates, mut faults) = (Vec::new(), Vec::new());
        for _ in 0..self.slices {
            let (rate, slice_faults) = self.slice(&area, &mut random, self.slice_ns)?;
            rates.push(rate);
            faults.push(slice_faults);
        }
        rates.append(&mut faults);
        Ok(rates)
    }

    fn slice(&self, area: &Area, random: &mut Random, slice_ns: f64) -> Result<(f64, f64), BenchError> {
        let before = Used::now()?;
        let mut accesses = 0u64;
        loop {
            for _ in 0..BATCH {
                let page = random.below(self.pages as u32) as usize;
                if random.below(100) < self.writes_percent {
                    area.write(page, accesses as u8);
                } else {
                    black_box(area.read(page));
                }
            }
            accesses += u64::from(BATCH);
            if cpu_ns()? - before.cpu_ns >= slice_ns {
                break;
            }
        }
        let used = before.since()?;
        Ok((accesses as f64 / used.cpu_ns * 1e6, used.faults))
    }
}

/// The paper's shares of writes.
const WRITES_PERCENT: [u32; 3] = [75, 50, 25];

const SLICES: usize = 24;

/// Long enough for `soft-dirty` to take all its faults in the first half.
const SLICE_NS_PER_PAGE: f64 = 150.0;

/// Draws the figures that are asked for.
pub(super) fn figures(session: &Session) -> Result<(), BenchError> {
    let pages = session.scale.mix_pages;
    let slice_ns = (pages as f64 * SLICE_NS_PER_PAGE).max(20_000.0);
    for (writes_percent, panel) in WRITES_PERCENT.into_iter().zip(["a", "b", "c"]) {
        let mix = format!(
            "{} % reads and {writes_percent} % writes of random pages of {}",
            100 - writes_percent,
            format_bytes(pages)
        );
        session.progress(&mix);
        let results = session.by_subject(|mechanism| {
            Task::Mix(Mix { mechanism, pages, writes_percent, slices: SLICES, slice_ns }).run_apart()
        })?;
        let million = session.clock.million();
        let chart = |figure: &str, title: String, y: String, reference, numbers: std::ops::Range<usize>| Chart {
            name: format!("figure-{figure}{panel}"),
            title,
            x: format!("{million} since the restart"),
            y,
            is_logarithmic: false,
            reference,
            places: (0..SLICES).map(|slice| format!("{:.1}", (slice + 1) as f64 * slice_ns / 1e6)).collect(),
            series: session.series(|subject| numbers.clone().map(|number| results[subject].number(number)).collect()),
            notes: Vec::new(),
        };
        if session.wants(Figure::Seven) {
            let y = format!("accesses in {} {million}", if million == "ms" { "one" } else { "a" });
            session.publish(&chart("7", format!("Figure 7{panel}: throughput with {mix}"), y, Some(0), 0..SLICES))?;
        }
        if session.wants(Figure::Eight) {
            let title = format!("Figure 8{panel}: page faults with {mix}");
            session.publish(&chart("8", title, "page faults in the slice".into(), None, SLICES..2 * SLICES))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mix(mechanism: Option<Mechanism>, writes_percent: u32) -> Mix {
        Mix { mechanism, pages: 256, writes_percent, slices: 12, slice_ns: 200_000.0 }
    }

    #[test]
    fn each_page_faults_at_most_once_and_only_for_writes() {
        let _alone = crate::ldt::alone();
        if pagemark::tracker::own(Mechanism::PagemapScan).is_err() {
            return eprintln!("no pagemap-scan here");
        }
        let faults = |writes_percent| {
            let numbers = mix(Some(Mechanism::PagemapScan), writes_percent).run().unwrap();
            assert_eq!(numbers.len(), 24);
            assert!(numbers[..12].iter().all(|&rate| rate > 0.0));
            numbers[12..].iter().sum::<f64>()
        };
        assert_eq!(faults(100), 256.0);
        assert_eq!(faults(0), 0.0);
        assert_eq!(mix(None, 75).run().unwrap()[12..], [0.0; 12]);
    }
}
