//! The cost of the kernel's changed dirty-bit helpers (section IV-A of "LDT", which calls them from
//! a kernel module): system calls that use a helper for each of many pages. The results of a kernel
//! without the patches can be shown beside those of one with them.

use std::fs::File;
use std::io;
use std::time::Instant;

use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, fork};
use pagemark::Mechanism;
use pagemark_linux::proc::system;
use pagemark_report::chart::{Chart, Point, Series, read_csv};
use pagemark_report::samples::Samples;
use serde::{Deserialize, Serialize};

use super::page_buffer::PageBuffer;
use super::task::Task;
use super::{Rounds, Session, format_pages};
use crate::BenchError;
use crate::measuring::task::ProcessTask;
use crate::measuring::usage::thread_cpu_ns;

/// An operation of the kernel on pages that were written.
#[derive(Serialize, Deserialize, Clone, Copy, PartialEq, Eq, Debug)]
enum Operation {
    ForkAndExit,
    ProtectTwice,
    Move,
    /// `Move` in a process that `ldt` tracks.
    MoveTracked,
    /// `Move` in a process that `ldt` has tracked before.
    MoveTrackedBefore,
    Unmap,
    Free,
    PageOut,
    PageIn,
    Sync,
}

impl Operation {
    const ALL: [Operation; 10] = [
        Operation::ForkAndExit,
        Operation::ProtectTwice,
        Operation::Move,
        Operation::MoveTracked,
        Operation::MoveTrackedBefore,
        Operation::Unmap,
        Operation::Free,
        Operation::PageOut,
        Operation::PageIn,
        Operation::Sync,
    ];

    fn name(self) -> &'static str {
        match self {
            Operation::ForkAndExit => "fork and exit",
            Operation::ProtectTwice => "mprotect twice",
            Operation::Move => "mremap",
            Operation::MoveTracked => "mremap, tracked",
            Operation::MoveTrackedBefore => "mremap, tracked before",
            Operation::Unmap => "munmap",
            Operation::Free => "madvise(FREE)",
            Operation::PageOut => "madvise(PAGEOUT)",
            Operation::PageIn => "read after PAGEOUT",
            Operation::Sync => "msync of a file",
        }
    }

    fn is_tracked(self) -> bool {
        matches!(self, Operation::MoveTracked | Operation::MoveTrackedBefore)
    }

    fn needs_swap(self) -> bool {
        matches!(self, Operation::PageOut | Operation::PageIn)
    }
}

/// Repeated measurements of one operation.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub(super) struct HelperCost {
    operation: Operation,
    pages: usize,
    /// Where the file to map is made.
    directory: std::path::PathBuf,
}

/// Measured repetitions in a process, after one that is not measured.
const REPETITIONS: usize = 5;

impl HelperCost {
    /// Elapsed time (ns) of each repetition, divided by the pages; for `Sync`, processor time.
    /// Empty if the operation is not possible here. Elapsed time includes the work of other threads
    /// of the kernel.
    pub fn run(&self) -> Result<Vec<f64>, BenchError> {
        let page = PageBuffer::new(1).map_err(BenchError::on("map memory"))?;
        let tracker = if self.operation.is_tracked() {
            let Ok(tracker) = super::started_tracker(Mechanism::Ldt, &page) else { return Ok(Vec::new()) };
            // Tracking lasts as long as its tracker.
            Some(tracker).filter(|_| self.operation == Operation::MoveTracked)
        } else {
            None
        };
        let file = match self.operation {
            Operation::Sync => Some(self.file().map_err(BenchError::on("make a file to map"))?),
            _ => None,
        };
        let times = (0..=REPETITIONS).map(|_| self.once(file.as_ref())).collect::<io::Result<Vec<_>>>();
        drop(tracker);
        let times = times.map_err(BenchError::on(self.operation.name()))?;
        Ok(times[1..].iter().map(|ns| ns / self.pages as f64).collect())
    }

    fn file(&self) -> io::Result<File> {
        let file = tempfile::tempfile_in(&self.directory)?;
        file.set_len((self.pages * pagemark::PAGE_SIZE) as u64)?;
        Ok(file)
    }

    fn once(&self, file: Option<&File>) -> io::Result<f64> {
        let buffer = match file {
            Some(file) => PageBuffer::of_file(file, self.pages)?,
            None => PageBuffer::new(self.pages)?,
        };
        let ns = |begin: Instant| begin.elapsed().as_nanos() as f64;
        Ok(match self.operation {
            Operation::ForkAndExit => {
                let begin = Instant::now();
                fork_and_exit()?;
                ns(begin)
            }
            Operation::ProtectTwice => {
                let begin = Instant::now();
                buffer.set_writable(false)?;
                buffer.set_writable(true)?;
                ns(begin)
            }
            Operation::Move | Operation::MoveTracked | Operation::MoveTrackedBefore => {
                let target = PageBuffer::unpopulated(self.pages)?;
                let begin = Instant::now();
                let _moved = buffer.move_to(target)?;
                ns(begin)
            }
            Operation::Unmap => {
                let begin = Instant::now();
                drop(buffer);
                ns(begin)
            }
            Operation::Free => {
                let begin = Instant::now();
                buffer.advise(libc::MADV_FREE)?;
                ns(begin)
            }
            Operation::PageOut => {
                let begin = Instant::now();
                buffer.advise(libc::MADV_PAGEOUT)?;
                ns(begin)
            }
            Operation::PageIn => {
                buffer.advise(libc::MADV_PAGEOUT)?;
                let begin = Instant::now();
                (0..self.pages).for_each(|page| {
                    buffer.read(page);
                });
                ns(begin)
            }
            Operation::Sync => {
                buffer.touch(1);
                // Only processor time: the rest is the device's.
                let now_ns = || thread_cpu_ns().map_err(io::Error::other);
                let before_ns = now_ns()?;
                buffer.sync()?;
                now_ns()? - before_ns
            }
        })
    }
}

fn fork_and_exit() -> io::Result<()> {
    // SAFETY: the child calls only _exit, which is async-signal-safe.
    match unsafe { fork() }? {
        // SAFETY: _exit runs no destructors of this process.
        ForkResult::Child => unsafe { libc::_exit(0) },
        ForkResult::Parent { child } => {
            waitpid(child, None)?;
            Ok(())
        }
    }
}

/// Draws the cost of each operation for a page, beside that of another kernel if `--against` gives
/// it.
pub(super) fn figures(session: &Session) -> Result<(), BenchError> {
    let pages = session.scale.helper_pages;
    let directory = session.directory();
    let has_swap = system::has_swap().map_err(BenchError::on("read /proc/swaps"))?;
    let mut notes = vec!["elapsed time; of msync, processor time".to_owned()];
    if !has_swap {
        notes.push("there is no swap here, so that PAGEOUT has nowhere to go".into());
    }
    session.progress("operations of the kernel on written pages");
    let mut results = vec![Rounds::default(); Operation::ALL.len()];
    for _ in 0..session.rounds {
        for (operation, result) in Operation::ALL.into_iter().zip(&mut results) {
            if has_swap || !operation.needs_swap() {
                let task = HelperCost { operation, pages, directory: directory.clone() };
                result.rounds.push(Task::Helpers(task).run_in_process()?);
            }
        }
    }
    let here = Series { name: kernel_name(), points: results.iter().map(Rounds::all).collect() };
    let x_labels: Vec<String> = Operation::ALL.map(|operation| operation.name().to_owned()).into();
    let mut series = vec![here];
    if let Some(path) = &session.against {
        let file = File::open(path).map_err(BenchError::on("open the file given by --against"))?;
        let other = read_csv(file).map_err(BenchError::on("read the file given by --against"))?;
        series.insert(0, series_of_other_kernel(other, &x_labels)?);
    }
    session.publish(&Chart {
        name: "helpers".into(),
        title: format!("What the kernel's work on written pages costs, {} of them", format_pages(pages)),
        x_axis: "work".into(),
        y_axis: format!("{} a page", session.clock.unit()),
        is_logarithmic: true,
        reference: (series.len() > 1).then_some(0),
        x_labels,
        series,
        notes,
    })
}

/// The other kernel's points at these labels. Each has its median and extremes; the file has no
/// single measurements.
fn series_of_other_kernel(other: Vec<Point>, x_labels: &[String]) -> Result<Series, BenchError> {
    let name = other.first().map(|point| point.series.clone()).ok_or(BenchError::NoNumbers)?;
    let at = |label: &String| other.iter().find(|point| point.series == name && &point.x == label);
    let points =
        x_labels.iter().map(|label| at(label).map_or_else(Samples::default, |point| point.samples())).collect();
    Ok(Series { name, points })
}

/// The name that the lab has for its kernel, or the release.
fn kernel_name() -> String {
    let release = || nix::sys::utsname::uname().map(|name| name.release().to_string_lossy().into_owned());
    std::env::var("PAGEMARK_LAB").or_else(|_| release()).unwrap_or_else(|_| "this kernel".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_is_possible() {
        let _alone = crate::ldt::alone();
        for operation in Operation::ALL {
            // Without swap PAGEOUT has no effect, but succeeds.
            let cost = HelperCost { operation, pages: 64, directory: std::env::temp_dir() };
            let times = cost.run().unwrap();
            let works = !operation.is_tracked() || crate::ldt::check(Mechanism::Ldt).is_ok();
            assert_eq!(times.len(), if works { REPETITIONS } else { 0 }, "{operation:?}");
            assert!(times.iter().all(|&ns| ns > 0.0), "{operation:?} {times:?}");
        }
    }

    #[test]
    fn points_of_another_kernel_are_at_their_labels() {
        let point = |series: &str, x: &str, median: Option<f64>| Point {
            series: series.into(),
            x: x.into(),
            median,
            least: median.map(|median| median - 1.0),
            greatest: median,
            ..Point::default()
        };
        let other = vec![point("plain", "b", Some(7.0)), point("plain", "a", None), point("x", "c", Some(3.0))];
        let x_labels = ["a", "b", "c"].map(String::from);
        let series = series_of_other_kernel(other, &x_labels).unwrap();
        assert_eq!(series.name, "plain");
        let medians: Vec<f64> = series.points.iter().map(Samples::median).collect();
        assert!(medians[0].is_nan() && medians[1] == 7.0 && medians[2].is_nan());
        assert_eq!(series.points[1].quantile(0.0), 6.0);
        assert!(matches!(series_of_other_kernel(Vec::new(), &x_labels), Err(BenchError::NoNumbers)));
    }
}
