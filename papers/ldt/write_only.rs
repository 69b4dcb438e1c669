//! Figures 3, 5 and 6 (sections II and IV-A of "LDT"): a program writes one byte of each page, or
//! every byte, in an interval.

use pagemark::Mechanism;
use pagemark_report::chart::Chart;
use serde::{Deserialize, Serialize};

use super::page_buffer::PageBuffer;
use super::task::Task;
use super::tracked_buffer::TrackedBuffer;
use super::{Figure, Session, format_pages};
use crate::BenchError;
use crate::measuring::task::ProcessTask;
use crate::measuring::usage::ThreadUsage;

/// The write-only program of table I.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub(super) struct WriteOnly {
    mechanism: Option<Mechanism>,
    pages: usize,
    every_byte: bool,
}

impl WriteOnly {
    /// Processor time (ns) and page faults of writing one byte of each page. With `every_byte`,
    /// also those of writing every byte in a second interval.
    pub fn run(&self) -> Result<Vec<f64>, BenchError> {
        // The first run of the code faults for the code itself.
        self.run_once(1)?;
        self.run_once(self.pages)
    }

    fn run_once(&self, pages: usize) -> Result<Vec<f64>, BenchError> {
        let buffer = PageBuffer::new(pages).map_err(BenchError::on("map memory"))?;
        let mut tracked = TrackedBuffer::new(&buffer, self.mechanism)?;
        let before = ThreadUsage::now()?;
        buffer.touch(100);
        let used = before.elapsed()?;
        tracked.end_full_interval()?;
        let mut numbers = vec![used.cpu_ns, used.faults];
        if self.every_byte {
            let before = ThreadUsage::now()?;
            buffer.fill(101);
            let used = before.elapsed()?;
            tracked.end_full_interval()?;
            numbers.extend([used.cpu_ns, used.faults]);
        }
        Ok(numbers)
    }
}

/// Draws those of the three figures that are asked for.
pub(super) fn figures(session: &Session) -> Result<(), BenchError> {
    let max_pages = session.scale.pages;
    let sizes: Vec<usize> =
        std::iter::successors(Some(session.scale.min_pages), |pages| (pages * 2 <= max_pages).then_some(pages * 2))
            .collect();
    let every_byte = session.wants(Figure::Five);
    let mut results = Vec::new();
    for &pages in &sizes {
        session.progress(&format!("writing {}", format_pages(pages)));
        results
            .push(session.by_variant(|mechanism| {
                Task::WriteOnly(WriteOnly { mechanism, pages, every_byte }).run_in_process()
            })?);
    }
    let unit = session.clock.unit();
    let chart = |name: &str, title: &str, y_axis: String, number: usize| Chart {
        name: name.into(),
        title: title.into(),
        x_axis: "memory".into(),
        y_axis,
        is_logarithmic: true,
        reference: Some(0),
        x_labels: sizes.iter().map(|&pages| format_pages(pages)).collect(),
        series: session.series(|variant| results.iter().map(|result| result[variant].number(number)).collect()),
        notes: Vec::new(),
    };
    if session.wants(Figure::Three) {
        session.publish(&chart(
            "figure-3",
            "Figure 3: writing one byte of each page",
            format!("processor time, {unit}"),
            0,
        ))?;
    }
    if every_byte {
        session.publish(&chart("figure-5", "Figure 5: writing every byte", format!("processor time, {unit}"), 2))?;
    }
    if session.wants(Figure::Six) {
        let faults =
            chart("figure-6", "Figure 6: page faults while one byte of each page is written", "page faults".into(), 1);
        session.publish(&Chart { reference: None, is_logarithmic: false, ..faults })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn protected_pages_fault_once_and_others_never() {
        let _alone = crate::ldt::alone();
        let run = |mechanism| WriteOnly { mechanism, pages: 512, every_byte: true }.run().unwrap();
        assert_eq!((run(None)[1], run(None)[3]), (0.0, 0.0));
        if pagemark::track::check(Mechanism::PagemapScan, pagemark::track::Scope::Process).is_ok() {
            let numbers = run(Some(Mechanism::PagemapScan));
            assert_eq!((numbers[1], numbers[3]), (512.0, 512.0));
        } else {
            eprintln!("no pagemap-scan here");
        }
    }
}
