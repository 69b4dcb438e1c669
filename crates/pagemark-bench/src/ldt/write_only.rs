//! Figures 3, 5 and 6: one byte of each page, or every byte, is written in an interval.

use pagemark::Mechanism;
use serde::{Deserialize, Serialize};

use super::area::Area;
use super::chart::{Chart, format_bytes};
use super::clock::Used;
use super::task::Task;
use super::tracked::Tracked;
use super::{Figure, Session};
use crate::BenchError;

/// One writer.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub(super) struct WriteOnly {
    mechanism: Option<Mechanism>,
    pages: usize,
    every_byte: bool,
}

impl WriteOnly {
    /// Processor time (ns) and page faults of writing one byte of each page; then, if that is asked for, those of writing every
    /// byte, in another interval.
    pub fn run(&self) -> Result<Vec<f64>, BenchError> {
        // What runs for the first time faults for its code.
        self.run_once(1)?;
        self.run_once(self.pages)
    }

    fn run_once(&self, pages: usize) -> Result<Vec<f64>, BenchError> {
        let area = Area::new(pages).map_err(BenchError::on("map memory"))?;
        let mut tracked = Tracked::new(&area, self.mechanism)?;
        let before = Used::now()?;
        area.touch(100);
        let used = before.since()?;
        tracked.end_of_full_interval()?;
        let mut numbers = vec![used.cpu_ns, used.faults];
        if self.every_byte {
            let before = Used::now()?;
            area.fill(101);
            let used = before.since()?;
            tracked.end_of_full_interval()?;
            numbers.extend([used.cpu_ns, used.faults]);
        }
        Ok(numbers)
    }
}

/// The least area.
const LEAST_PAGES: usize = 1024;

/// Draws the figures that are asked for.
pub(super) fn figures(session: &Session) -> Result<(), BenchError> {
    let most_pages = session.scale.pages;
    let sizes: Vec<usize> = std::iter::successors(Some(LEAST_PAGES.min(most_pages)), |pages| {
        (pages * 2 <= most_pages).then_some(pages * 2)
    })
    .collect();
    let every_byte = session.wants(Figure::Five);
    let mut results = Vec::new();
    for &pages in &sizes {
        session.progress(&format!("writing {}", format_bytes(pages)));
        results.push(
            session.by_subject(|mechanism| Task::WriteOnly(WriteOnly { mechanism, pages, every_byte }).run_apart())?,
        );
    }
    let unit = session.clock.unit();
    let chart = |name: &str, title: &str, y: String, number: usize| Chart {
        name: name.into(),
        title: title.into(),
        x: "memory".into(),
        y,
        is_logarithmic: true,
        reference: Some(0),
        places: sizes.iter().map(|&pages| format_bytes(pages)).collect(),
        series: session.series(|subject| results.iter().map(|result| result[subject].number(number)).collect()),
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
        match run_if_available(Mechanism::PagemapScan) {
            Some(numbers) => assert_eq!((numbers[1], numbers[3]), (512.0, 512.0)),
            None => eprintln!("no pagemap-scan here"),
        }
    }

    fn run_if_available(mechanism: Mechanism) -> Option<Vec<f64>> {
        pagemark::tracker::own(mechanism).ok()?;
        Some(WriteOnly { mechanism: Some(mechanism), pages: 512, every_byte: true }.run().unwrap())
    }
}
