//! Figures 7 and 8 (section IV-A of "LDT"): a program reads and writes random pages after an
//! interval has begun. Its throughput and its page faults are measured slice by slice.

use std::hint::black_box;

use pagemark::Mechanism;
use pagemark_report::chart::Chart;
use serde::{Deserialize, Serialize};

use super::page_buffer::PageBuffer;
use super::task::Task;
use super::tracked_buffer::TrackedBuffer;
use super::{Figure, Session, format_pages};
use crate::BenchError;
use crate::measuring::random::Xorshift;
use crate::measuring::task::ProcessTask;
use crate::measuring::usage::{ThreadUsage, thread_cpu_ns};

/// The read-write program of table I.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub(super) struct ReadWriteMix {
    mechanism: Option<Mechanism>,
    pages: usize,
    writes_percent: u32,
    slices: usize,
    /// Processor time of a slice, ns.
    slice_ns: f64,
}

/// Accesses between two readings of the clock.
const BATCH: u32 = 256;

impl ReadWriteMix {
    /// Accesses in a million ns for each slice, then page faults for each slice.
    pub fn run(&self) -> Result<Vec<f64>, BenchError> {
        let buffer = PageBuffer::new(self.pages).map_err(BenchError::on("map memory"))?;
        let mut random = Xorshift::new(7);
        // The first run of the loop faults for its code and data.
        self.slice(&buffer, &mut random, self.slice_ns / 10.0)?;
        let _tracked = TrackedBuffer::new(&buffer, self.mechanism)?;
        let (mut rates, mut faults) = (Vec::new(), Vec::new());
        for _ in 0..self.slices {
            let (rate, slice_faults) = self.slice(&buffer, &mut random, self.slice_ns)?;
            rates.push(rate);
            faults.push(slice_faults);
        }
        rates.append(&mut faults);
        Ok(rates)
    }

    fn slice(&self, buffer: &PageBuffer, random: &mut Xorshift, slice_ns: f64) -> Result<(f64, f64), BenchError> {
        let before = ThreadUsage::now()?;
        let mut accesses = 0u64;
        loop {
            for _ in 0..BATCH {
                let page = random.index(self.pages);
                if random.below(100) < u64::from(self.writes_percent) {
                    buffer.write(page, accesses as u8);
                } else {
                    black_box(buffer.read(page));
                }
            }
            accesses += u64::from(BATCH);
            if thread_cpu_ns()? - before.cpu_ns >= slice_ns {
                break;
            }
        }
        let used = before.elapsed()?;
        Ok((accesses as f64 / used.cpu_ns * 1e6, used.faults))
    }
}

/// The paper's shares of writes.
const WRITES_PERCENT: [u32; 3] = [75, 50, 25];

const SLICES: usize = 24;

/// Long enough that `soft-dirty` has all its faults in the first half of the slices.
const SLICE_NS_PER_PAGE: f64 = 150.0;

/// Draws those of the two figures that are asked for.
pub(super) fn figures(session: &Session) -> Result<(), BenchError> {
    let pages = session.scale.mix_pages;
    let slice_ns = (pages as f64 * SLICE_NS_PER_PAGE).max(20_000.0);
    for (writes_percent, panel) in WRITES_PERCENT.into_iter().zip(["a", "b", "c"]) {
        let mix = format!(
            "{} % reads and {writes_percent} % writes of random pages of {}",
            100 - writes_percent,
            format_pages(pages)
        );
        session.progress(&mix);
        let results = session.by_variant(|mechanism| {
            Task::ReadWriteMix(ReadWriteMix { mechanism, pages, writes_percent, slices: SLICES, slice_ns })
                .run_in_process()
        })?;
        let million = session.clock.million();
        let chart = |figure: &str, title: String, y: String, reference, numbers: std::ops::Range<usize>| Chart {
            name: format!("figure-{figure}{panel}"),
            title,
            x_axis: format!("{million} since the restart"),
            y_axis: y,
            is_logarithmic: false,
            reference,
            x_labels: (0..SLICES).map(|slice| format!("{:.1}", (slice + 1) as f64 * slice_ns / 1e6)).collect(),
            series: session.series(|variant| numbers.clone().map(|number| results[variant].number(number)).collect()),
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

    fn mix(mechanism: Option<Mechanism>, writes_percent: u32) -> ReadWriteMix {
        ReadWriteMix { mechanism, pages: 256, writes_percent, slices: 12, slice_ns: 200_000.0 }
    }

    #[test]
    fn each_page_faults_at_most_once_and_only_for_writes() {
        let _alone = crate::ldt::alone();
        if pagemark::track::check(Mechanism::PagemapScan, pagemark::track::Scope::Process).is_err() {
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
