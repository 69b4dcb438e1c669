//! Figure 11: what it costs to ask which pages were written, by how many were, and by whom is asked.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;

use pagemark::sys::pagemap::{Filter, LDT_DIRTY, Pagemap, WRITTEN};
use pagemark::sys::userfaultfd::Userfaultfd;
use pagemark::{Mechanism, PAGE_SIZE, Range};
use serde::{Deserialize, Serialize};

use super::area::Area;
use super::chart::{Chart, Series, format_bytes};
use super::clock::cpu_ns;
use super::task::Task;
use super::{Measured, Session};
use crate::BenchError;

/// A way to ask.
#[derive(Serialize, Deserialize, Clone, Copy, PartialEq, Eq, Debug)]
enum Interface {
    /// The soft-dirty bits in `/proc/PID/pagemap`.
    Pagemap,
    /// PAGEMAP_SCAN for what the dirty bits of the page table tell.
    LdtScan,
    /// `/proc/PID/ldt_dirty`.
    LdtList,
    /// PAGEMAP_SCAN for what was unprotected by a write.
    PagemapScan,
}

impl Interface {
    const ALL: [Interface; 4] = [Interface::Pagemap, Interface::LdtScan, Interface::LdtList, Interface::PagemapScan];

    /// The mechanism that it belongs to.
    fn mechanism(self) -> Mechanism {
        match self {
            Interface::Pagemap => Mechanism::SoftDirty,
            Interface::LdtScan | Interface::LdtList => Mechanism::Ldt,
            Interface::PagemapScan => Mechanism::PagemapScan,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Interface::Pagemap => "pagemap (soft-dirty)",
            Interface::LdtScan => "ldt (PAGEMAP_SCAN)",
            Interface::LdtList => "ldt (ldt_dirty)",
            Interface::PagemapScan => "pagemap-scan",
        }
    }
}

/// The question asked after each of several intervals.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub(super) struct Collect {
    interface: Interface,
    pages: usize,
    /// Pages written in each interval, per cent.
    percents: Vec<f64>,
    /// They lie in runs of so many, at equal distances.
    run_pages: usize,
}

impl Collect {
    /// For each percentage, the processor time (ns) of asking, and that of asking and beginning the next interval.
    pub fn run(&self) -> Result<Vec<f64>, BenchError> {
        let area = Area::new(self.pages).map_err(BenchError::on("map memory"))?;
        let mut asker = Asker::new(self.interface, area.range()).map_err(BenchError::on("start tracking"))?;
        asker.restart().map_err(BenchError::on("restart tracking"))?;
        let mut numbers = Vec::new();
        // The first interval only makes sure that everything that is used is there.
        for (interval, &percent) in self.percents.iter().take(1).chain(&self.percents).enumerate() {
            let mut pages = 0;
            for page in written_pages(self.pages, percent, self.run_pages) {
                area.write(page, interval as u8);
                pages += 1;
            }
            let mut measure = |ask: &mut dyn FnMut(&mut Asker) -> io::Result<u64>| {
                let before = cpu_ns()?;
                let found = ask(&mut asker).map_err(BenchError::on("ask which pages were written"))?;
                let used = cpu_ns()? - before;
                if found == pages { Ok(used) } else { Err(BenchError::Missed { pages: pages as usize, found }) }
            };
            let asking = measure(&mut Asker::ask)?;
            let with_restart = measure(&mut Asker::ask_and_restart)?;
            if interval > 0 {
                numbers.extend([asking, with_restart]);
            }
        }
        Ok(numbers)
    }
}

/// Pages of an area that make up the percentage, at least one, in runs.
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

/// Asks for what was written in a range of this process.
struct Asker {
    interface: Interface,
    range: Range,
    pagemap: Pagemap,
    clear_refs: File,
    list: Option<File>,
    buffer: Vec<u8>,
    /// Holds the registration of the range.
    _userfaultfd: Option<Userfaultfd>,
}

/// Bytes of the list that are read at once.
const LIST_BYTES: usize = 32 << 10;

impl Asker {
    fn new(interface: Interface, range: Range) -> io::Result<Asker> {
        let userfaultfd = match interface {
            Interface::PagemapScan => {
                let userfaultfd = Userfaultfd::of_this_process()?;
                userfaultfd.register(&range)?;
                Some(userfaultfd)
            }
            _ => None,
        };
        let list = match interface {
            Interface::LdtList => Some(File::open("/proc/self/ldt_dirty")?),
            _ => None,
        };
        Ok(Asker {
            interface,
            range,
            pagemap: Pagemap::of_this_process()?,
            clear_refs: OpenOptions::new().write(true).open("/proc/self/clear_refs")?,
            list,
            buffer: vec![1; LIST_BYTES],
            _userfaultfd: userfaultfd,
        })
    }

    /// Pages that were written.
    fn ask(&mut self) -> io::Result<u64> {
        match self.interface {
            Interface::Pagemap => {
                let mut pages = 0;
                self.pagemap.entries(&self.range, |_, entry| pages += u64::from(entry.is_soft_dirty()))?;
                Ok(pages)
            }
            Interface::LdtScan => self.scan(Filter { all: LDT_DIRTY, report: LDT_DIRTY, ..Filter::default() }),
            Interface::PagemapScan => self.scan(Filter { all: WRITTEN, report: WRITTEN, ..Filter::default() }),
            Interface::LdtList => self.read_list(),
        }
    }

    /// The same, and begins the next interval.
    fn ask_and_restart(&mut self) -> io::Result<u64> {
        match self.interface {
            Interface::LdtScan => {
                self.scan(Filter { all: LDT_DIRTY, report: LDT_DIRTY, restart: true, ..Filter::default() })
            }
            Interface::PagemapScan => {
                self.scan(Filter { all: WRITTEN, report: WRITTEN, protect: true, ..Filter::default() })
            }
            Interface::Pagemap | Interface::LdtList => {
                let pages = self.ask()?;
                self.restart()?;
                Ok(pages)
            }
        }
    }

    fn restart(&mut self) -> io::Result<()> {
        match self.interface {
            Interface::Pagemap => self.clear_refs.write_at(b"4", 0).map(drop),
            Interface::LdtList => self.clear_refs.write_at(b"6", 0).map(drop),
            Interface::LdtScan | Interface::PagemapScan => self.ask_and_restart().map(drop),
        }
    }

    fn scan(&self, filter: Filter) -> io::Result<u64> {
        let mut pages = 0;
        self.pagemap.scan(&self.range, filter, |run, _| pages += (run.end - run.start) / PAGE_SIZE as u64)?;
        Ok(pages)
    }

    fn read_list(&mut self) -> io::Result<u64> {
        let list = self.list.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let (mut pages, mut position) = (0, self.range.start);
        loop {
            let read = list.read_at(&mut self.buffer, position)?;
            let (numbers, _) = self.buffer[..read].as_chunks::<8>();
            let (bounds, _) = numbers.as_chunks::<2>();
            for bounds in bounds {
                let [start, end] = bounds.map(u64::from_ne_bytes);
                if start >= self.range.end {
                    return Ok(pages);
                }
                pages += (end.min(self.range.end) - start.max(self.range.start)) / PAGE_SIZE as u64;
                position = end;
            }
            if read < self.buffer.len() {
                return Ok(pages);
            }
        }
    }
}

const PERCENTS: [f64; 9] = [0.1, 1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 100.0];

/// Written pages in runs of so many.
const RUN_PAGES: [usize; 2] = [1, 16];

/// Draws the figure: asking alone, as the paper has it, and asking with beginning the next interval.
pub(super) fn figures(session: &Session) -> Result<(), BenchError> {
    let pages = session.scale.pages;
    for (run_pages, panel) in RUN_PAGES.into_iter().zip(["a", "b"]) {
        let layout = match run_pages {
            1 => format!("{}, written pages spread singly", format_bytes(pages)),
            _ => format!("{}, written pages in runs of {run_pages}", format_bytes(pages)),
        };
        session.progress(&format!("asking for written pages of {layout}"));
        let percents = PERCENTS.to_vec();
        let mut results = vec![Measured::default(); Interface::ALL.len()];
        for _ in 0..session.rounds {
            for (interface, result) in Interface::ALL.into_iter().zip(&mut results) {
                if session.works(interface.mechanism()) {
                    let task = Collect { interface, pages, percents: percents.clone(), run_pages };
                    result.rounds.push(Task::Collect(task).run_apart()?);
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
                x: "written, %".into(),
                y: format!("processor time, {}", session.clock.unit()),
                is_logarithmic: true,
                reference: session.works(Mechanism::SoftDirty).then_some(0),
                places: PERCENTS.map(|percent| percent.to_string()).into(),
                series: Interface::ALL
                    .into_iter()
                    .zip(&results)
                    .map(|(interface, result)| Series {
                        name: interface.name().into(),
                        points: (0..PERCENTS.len()).map(|place| result.number(2 * place + offset)).collect(),
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
    fn what_is_asked_is_answered_exactly() {
        let _alone = crate::ldt::alone();
        for interface in Interface::ALL {
            if pagemark::tracker::own(interface.mechanism()).is_err() {
                eprintln!("no {}", interface.name());
                continue;
            }
            // `run` fails when the number is not that of the pages written.
            let task = Collect { interface, pages: 3000, percents: vec![0.1, 30.0, 100.0], run_pages: 1 };
            assert_eq!(task.run().unwrap().len(), 6);
        }
    }
}
