//! What the changed dirty bit helpers cost the rest of the kernel: system calls that use them for each of many pages. Run on a
//! kernel with the patches and on the same kernel without, the two results are put beside each other.

use std::fs::File;
use std::io;
use std::time::Instant;

use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, fork};
use pagemark::Mechanism;
use serde::{Deserialize, Serialize};

use super::area::Area;
use super::chart::{Chart, Series, format_bytes, read_csv};
use super::clock::cpu_ns;
use super::task::Task;
use super::{Measured, Session};
use crate::BenchError;
use crate::stats::Samples;

/// What the kernel does with pages that were written.
#[derive(Serialize, Deserialize, Clone, Copy, PartialEq, Eq, Debug)]
enum Work {
    ForkAndExit,
    ProtectTwice,
    Move,
    /// The same in a program that `ldt` has once tracked.
    MoveTracked,
    Unmap,
    Free,
    PageOut,
    PageIn,
    Sync,
}

impl Work {
    const ALL: [Work; 9] = [
        Work::ForkAndExit,
        Work::ProtectTwice,
        Work::Move,
        Work::MoveTracked,
        Work::Unmap,
        Work::Free,
        Work::PageOut,
        Work::PageIn,
        Work::Sync,
    ];

    fn name(self) -> &'static str {
        match self {
            Work::ForkAndExit => "fork and exit",
            Work::ProtectTwice => "mprotect twice",
            Work::Move => "mremap",
            Work::MoveTracked => "mremap, tracked",
            Work::Unmap => "munmap",
            Work::Free => "madvise(FREE)",
            Work::PageOut => "madvise(PAGEOUT)",
            Work::PageIn => "read after PAGEOUT",
            Work::Sync => "msync of a file",
        }
    }

    fn needs_swap(self) -> bool {
        matches!(self, Work::PageOut | Work::PageIn)
    }
}

/// One of them, some times.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub(super) struct Helper {
    work: Work,
    pages: usize,
    /// Where the mapped file is made.
    directory: std::path::PathBuf,
}

/// How often it is done in a process; once more before, which is not counted.
const TIMES: usize = 5;

impl Helper {
    /// Time (ns) of each, a page; nothing where it can't be done. It is elapsed time, since not only this thread works.
    pub fn run(&self) -> Result<Vec<f64>, BenchError> {
        if self.work == Work::MoveTracked && super::try_out(Mechanism::Ldt).is_err() {
            return Ok(Vec::new());
        }
        let file = match self.work {
            Work::Sync => Some(self.file().map_err(BenchError::on("make a file to map"))?),
            _ => None,
        };
        let times = (0..=TIMES).map(|_| self.once(file.as_ref())).collect::<io::Result<Vec<_>>>();
        let times = times.map_err(BenchError::on(self.work.name()))?;
        Ok(times[1..].iter().map(|ns| ns / self.pages as f64).collect())
    }

    fn file(&self) -> io::Result<File> {
        let file = tempfile::tempfile_in(&self.directory)?;
        file.set_len((self.pages * pagemark::PAGE_SIZE) as u64)?;
        Ok(file)
    }

    fn once(&self, file: Option<&File>) -> io::Result<f64> {
        let area = match file {
            Some(file) => Area::of_file(file, self.pages)?,
            None => Area::new(self.pages)?,
        };
        let ns = |begin: Instant| begin.elapsed().as_nanos() as f64;
        Ok(match self.work {
            Work::ForkAndExit => {
                let begin = Instant::now();
                fork_and_exit()?;
                ns(begin)
            }
            Work::ProtectTwice => {
                let begin = Instant::now();
                area.set_writable(false)?;
                area.set_writable(true)?;
                ns(begin)
            }
            Work::Move | Work::MoveTracked => {
                let elsewhere = Area::unpopulated(self.pages)?;
                let begin = Instant::now();
                let _moved = area.move_to(elsewhere)?;
                ns(begin)
            }
            Work::Unmap => {
                let begin = Instant::now();
                drop(area);
                ns(begin)
            }
            Work::Free => {
                let begin = Instant::now();
                area.advise(libc::MADV_FREE)?;
                ns(begin)
            }
            Work::PageOut => {
                let begin = Instant::now();
                area.advise(libc::MADV_PAGEOUT)?;
                ns(begin)
            }
            Work::PageIn => {
                area.advise(libc::MADV_PAGEOUT)?;
                let begin = Instant::now();
                (0..self.pages).for_each(|page| {
                    area.read(page);
                });
                ns(begin)
            }
            Work::Sync => {
                area.touch(1);
                // The processor time alone, since the rest is the device's.
                let now_ns = || cpu_ns().map_err(io::Error::other);
                let before_ns = now_ns()?;
                area.sync()?;
                now_ns()? - before_ns
            }
        })
    }
}

fn fork_and_exit() -> io::Result<()> {
    // SAFETY: the child calls nothing but _exit.
    match unsafe { fork() }? {
        // SAFETY: as above; nothing of this process is torn down.
        ForkResult::Child => unsafe { libc::_exit(0) },
        ForkResult::Parent { child } => {
            waitpid(child, None)?;
            Ok(())
        }
    }
}

/// Draws what each costs a page, beside another kernel's if its numbers are given.
pub(super) fn figures(session: &Session) -> Result<(), BenchError> {
    let pages = session.scale.helper_pages;
    let directory = session.directory();
    let swaps = std::fs::read_to_string("/proc/swaps").map_err(BenchError::on("read /proc/swaps"))?;
    let has_swap = swaps.lines().count() > 1;
    let mut notes = vec!["elapsed time; of msync, processor time".to_owned()];
    if !has_swap {
        notes.push("there is no swap here, so that PAGEOUT has nowhere to go".into());
    }
    session.progress("what the kernel does with written pages");
    let mut results = vec![Measured::default(); Work::ALL.len()];
    for _ in 0..session.rounds {
        for (work, result) in Work::ALL.into_iter().zip(&mut results) {
            if has_swap || !work.needs_swap() {
                let task = Helper { work, pages, directory: directory.clone() };
                result.rounds.push(Task::Helper(task).run_apart()?);
            }
        }
    }
    let here = Series { name: kernel_name(), points: results.iter().map(Measured::all).collect() };
    let places: Vec<String> = Work::ALL.map(|work| work.name().to_owned()).into();
    let mut series = vec![here];
    if let Some(path) = &session.against {
        let file = File::open(path).map_err(BenchError::on("open the file given by --against"))?;
        let other = read_csv(file).map_err(BenchError::on("read the file given by --against"))?;
        series.insert(0, beside(other, &places)?);
    }
    session.publish(&Chart {
        name: "helpers".into(),
        title: format!("What the kernel's work on written pages costs, {} of them", format_bytes(pages)),
        x: "work".into(),
        y: format!("{} a page", session.clock.unit()),
        is_logarithmic: true,
        reference: (series.len() > 1).then_some(0),
        places,
        series,
        notes,
    })
}

/// The other kernel's numbers at these places. Its spread stays, its single measurements are not in the file.
fn beside(other: Vec<super::chart::Point>, places: &[String]) -> Result<Series, BenchError> {
    let name = other.first().map(|point| point.series.clone()).ok_or(BenchError::Against)?;
    let at = |place: &String| other.iter().find(|point| point.series == name && &point.x == place);
    let points = places.iter().map(|place| at(place).map_or_else(Samples::default, |point| point.spread())).collect();
    Ok(Series { name, points })
}

/// The lab's name for its kernel, or the kernel's own.
fn kernel_name() -> String {
    let release = || nix::sys::utsname::uname().map(|name| name.release().to_string_lossy().into_owned());
    std::env::var("PAGEMARK_LAB").or_else(|_| release()).unwrap_or_else(|_| "this kernel".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ldt::chart::Point;

    #[test]
    fn every_work_can_be_done() {
        let _alone = crate::ldt::alone();
        for work in Work::ALL {
            // Without swap PAGEOUT has no effect, and is no error.
            let helper = Helper { work, pages: 64, directory: std::env::temp_dir() };
            let times = helper.run().unwrap();
            let works = work != Work::MoveTracked || crate::ldt::try_out(Mechanism::Ldt).is_ok();
            assert_eq!(times.len(), if works { TIMES } else { 0 }, "{work:?}");
            assert!(times.iter().all(|&ns| ns > 0.0), "{work:?} {times:?}");
        }
    }

    #[test]
    fn another_kernels_numbers_stand_at_their_places() {
        let point = |series: &str, x: &str, median: Option<f64>| Point {
            series: series.into(),
            x: x.into(),
            median,
            least: median.map(|median| median - 1.0),
            greatest: median,
            ..Point::default()
        };
        let other = vec![point("plain", "b", Some(7.0)), point("plain", "a", None), point("x", "c", Some(3.0))];
        let places = ["a", "b", "c"].map(String::from);
        let series = beside(other, &places).unwrap();
        assert_eq!(series.name, "plain");
        let medians: Vec<f64> = series.points.iter().map(Samples::median).collect();
        assert!(medians[0].is_nan() && medians[1] == 7.0 && medians[2].is_nan());
        assert_eq!(series.points[1].quantile(0.0), 6.0);
        assert!(matches!(beside(Vec::new(), &places), Err(BenchError::Against)));
    }
}
