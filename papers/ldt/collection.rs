//! Figure 11 (section IV-B of "LDT"): the cost of reading which pages were written, by interface
//! and by their number.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;

use pagemark::{AddressRangeExt, Mechanism, Range};
use pagemark_linux::pagemap::{Filter, LDT_DIRTY, Pagemap, WRITTEN};
use pagemark_linux::userfaultfd::Userfaultfd;
use pagemark_report::chart::{Chart, Series};
use serde::{Deserialize, Serialize};

use super::page_buffer::PageBuffer;
use super::task::Task;
use super::{Rounds, Session, format_pages};
use crate::BenchError;
use crate::measuring::task::ProcessTask;
use crate::measuring::usage::thread_cpu_ns;

/// A kernel interface that reports written pages.
#[derive(Serialize, Deserialize, Clone, Copy, PartialEq, Eq, Debug)]
enum Interface {
    /// The soft-dirty bits in `/proc/PID/pagemap`.
    Pagemap,
    /// PAGEMAP_SCAN for pages that are dirty by the dirty bits of the page table.
    LdtScan,
    /// PAGEMAP_SCAN for pages whose write protection a write has removed.
    PagemapScan,
}

impl Interface {
    const ALL: [Interface; 3] = [Interface::Pagemap, Interface::LdtScan, Interface::PagemapScan];

    /// The mechanism that uses it.
    fn mechanism(self) -> Mechanism {
        match self {
            Interface::Pagemap => Mechanism::SoftDirty,
            Interface::LdtScan => Mechanism::Ldt,
            Interface::PagemapScan => Mechanism::PagemapScan,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Interface::Pagemap => "pagemap (soft-dirty)",
            Interface::LdtScan => "ldt",
            Interface::PagemapScan => "pagemap-scan",
        }
    }
}

/// Reading the written pages after each of several intervals.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub(super) struct Collection {
    interface: Interface,
    pages: usize,
    /// Pages written in each interval, per cent.
    percents: Vec<f64>,
    /// Length of the runs of written pages, which are at equal distances.
    run_pages: usize,
}

impl Collection {
    /// For each percentage, the processor time (ns) of reading, and that of reading and beginning
    /// the next interval.
    pub fn run(&self) -> Result<Vec<f64>, BenchError> {
        let buffer = PageBuffer::new(self.pages).map_err(BenchError::on("map memory"))?;
        let mut reader = DirtyReader::new(self.interface, buffer.range()).map_err(BenchError::on("start tracking"))?;
        reader.begin_interval().map_err(BenchError::on("begin an interval"))?;
        let mut numbers = Vec::new();
        // The first interval only faults in the code and data that the others use.
        for (interval, &percent) in self.percents.iter().take(1).chain(&self.percents).enumerate() {
            let mut pages = 0;
            for page in written_pages(self.pages, percent, self.run_pages) {
                buffer.write(page, interval as u8);
                pages += 1;
            }
            let mut measure = |read: &mut dyn FnMut(&mut DirtyReader) -> io::Result<u64>| {
                let before = thread_cpu_ns()?;
                let found = read(&mut reader).map_err(BenchError::on("read which pages were written"))?;
                let used = thread_cpu_ns()? - before;
                if found == pages { Ok(used) } else { Err(BenchError::WrongPages { pages: pages as usize, found }) }
            };
            let reading = measure(&mut DirtyReader::count)?;
            let with_restart = measure(&mut DirtyReader::count_and_restart)?;
            if interval > 0 {
                numbers.extend([reading, with_restart]);
            }
        }
        Ok(numbers)
    }
}

/// Numbers of the pages to write: `percent` of `pages`, at least one, in runs of `run_pages`.
fn written_pages(pages: usize, percent: f64, run_pages: usize) -> impl Iterator<Item = usize> {
    let wanted = ((pages as f64 * percent / 100.0).round() as usize).clamp(1, pages);
    let runs = wanted.div_ceil(run_pages);
    let gaps = pages - wanted;
    let written_before = move |run: usize| run * wanted / runs;
    (0..runs).flat_map(move |run| {
        let start = written_before(run) + run * gaps / runs;
        start..start + written_before(run + 1) - written_before(run)
    })
}

/// Reads which pages of a range of this process were written.
struct DirtyReader {
    interface: Interface,
    range: Range,
    pagemap: Pagemap,
    clear_refs: File,
    /// Keeps the range registered.
    _userfaultfd: Option<Userfaultfd>,
}

impl DirtyReader {
    fn new(interface: Interface, range: Range) -> io::Result<DirtyReader> {
        let userfaultfd = match interface {
            Interface::PagemapScan => {
                let userfaultfd = Userfaultfd::of_this_process()?;
                userfaultfd.register(&range)?;
                Some(userfaultfd)
            }
            _ => None,
        };
        Ok(DirtyReader {
            interface,
            range,
            pagemap: Pagemap::of_this_process()?,
            clear_refs: OpenOptions::new().write(true).open("/proc/self/clear_refs")?,
            _userfaultfd: userfaultfd,
        })
    }

    /// Number of written pages.
    fn count(&mut self) -> io::Result<u64> {
        match self.interface {
            Interface::Pagemap => {
                let mut pages = 0;
                self.pagemap.entries(&self.range, |_, entry| pages += u64::from(entry.is_soft_dirty()))?;
                Ok(pages)
            }
            Interface::LdtScan => self.scan(Filter { all: LDT_DIRTY, report: LDT_DIRTY, ..Filter::default() }),
            Interface::PagemapScan => self.scan(Filter { all: WRITTEN, report: WRITTEN, ..Filter::default() }),
        }
    }

    /// Number of written pages. Begins the next interval, in the same call if the interface can do
    /// that.
    fn count_and_restart(&mut self) -> io::Result<u64> {
        match self.interface {
            Interface::LdtScan => {
                self.scan(Filter { all: LDT_DIRTY, report: LDT_DIRTY, restart: true, ..Filter::default() })
            }
            Interface::PagemapScan => {
                self.scan(Filter { all: WRITTEN, report: WRITTEN, protect: true, ..Filter::default() })
            }
            Interface::Pagemap => {
                let pages = self.count()?;
                self.begin_interval()?;
                Ok(pages)
            }
        }
    }

    fn begin_interval(&mut self) -> io::Result<()> {
        match self.interface {
            Interface::Pagemap => self.clear_refs.write_at(b"4", 0).map(drop),
            Interface::LdtScan | Interface::PagemapScan => self.count_and_restart().map(drop),
        }
    }

    fn scan(&self, filter: Filter) -> io::Result<u64> {
        let mut pages = 0;
        self.pagemap.scan(&self.range, filter, |run, _| pages += run.byte_count().pages_rounded_down())?;
        Ok(pages)
    }
}

const PERCENTS: [f64; 9] = [0.1, 1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 100.0];

/// Lengths of the runs of written pages, a panel for each.
const RUN_PAGES: [usize; 2] = [1, 16];

/// Draws the figure: reading alone, as in the paper, and reading and beginning the next interval.
pub(super) fn figures(session: &Session) -> Result<(), BenchError> {
    let pages = session.scale.pages;
    for (run_pages, panel) in RUN_PAGES.into_iter().zip(["a", "b"]) {
        let layout = match run_pages {
            1 => format!("{}, written pages spread singly", format_pages(pages)),
            _ => format!("{}, written pages in runs of {run_pages}", format_pages(pages)),
        };
        session.progress(&format!("reading which pages were written of {layout}"));
        let percents = PERCENTS.to_vec();
        let mut results = vec![Rounds::default(); Interface::ALL.len()];
        for _ in 0..session.rounds {
            for (interface, result) in Interface::ALL.into_iter().zip(&mut results) {
                if session.works(interface.mechanism()) {
                    let task = Collection { interface, pages, percents: percents.clone(), run_pages };
                    result.rounds.push(Task::Collection(task).run_in_process()?);
                }
            }
        }
        for (part, title, offset) in [
            ("", "reading which pages were written", 0),
            ("-restart", "reading which pages were written, and restarting", 1),
        ] {
            session.publish(&Chart {
                name: format!("figure-11{panel}{part}"),
                title: format!("Figure 11{panel}: {title}; {layout}"),
                x_axis: "written, %".into(),
                y_axis: format!("processor time, {}", session.clock.unit()),
                is_logarithmic: true,
                reference: session.works(Mechanism::SoftDirty).then_some(0),
                x_labels: PERCENTS.map(|percent| percent.to_string()).into(),
                series: Interface::ALL
                    .into_iter()
                    .zip(&results)
                    .map(|(interface, result)| Series {
                        name: interface.name().into(),
                        points: (0..PERCENTS.len()).map(|index| result.number(2 * index + offset)).collect(),
                    })
                    .collect(),
                notes: Vec::new(),
            })?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_pages_are_the_percentage_in_runs() {
        for (pages, percent, run_pages, wanted, runs) in [
            (1000, 0.01, 1, 1, 1),
            (1000, 10.0, 1, 100, 100),
            (1000, 10.0, 16, 100, 7),
            (1000, 100.0, 16, 1000, 1),
            (1024, 50.0, 1, 512, 512),
            (1024, 75.0, 1, 768, 256),
            (7, 100.0, 3, 7, 1),
        ] {
            let written: Vec<usize> = written_pages(pages, percent, run_pages).collect();
            assert_eq!(written.len(), wanted);
            assert!(written.windows(2).all(|pair| pair[0] < pair[1]) && written.last() < Some(&pages));
            let gaps = written.windows(2).filter(|pair| pair[0] + 1 < pair[1]).count();
            assert_eq!(gaps + 1, runs, "{pages} {percent} {run_pages}");
        }
    }

    #[test]
    fn written_pages_are_counted_exactly() {
        let _alone = crate::ldt::alone();
        for interface in Interface::ALL {
            if pagemark::track::check(interface.mechanism(), pagemark::track::Scope::Process).is_err() {
                eprintln!("no {}", interface.name());
                continue;
            }
            // `run` fails if the number is not that of the written pages.
            let task = Collection { interface, pages: 3000, percents: vec![0.1, 30.0, 100.0], run_pages: 1 };
            assert_eq!(task.run().unwrap().len(), 6);
        }
    }
}
