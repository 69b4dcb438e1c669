//! `bench ldt`: the figures and tables of "LDT: Lightweight Dirty Tracking of Memory Pages for x86 Systems" (section IV), with
//! every mechanism that works here side by side: in each round all of them take their turns.

use std::cell::OnceCell;
use std::path::PathBuf;
use std::time::Duration;

use pagemark::tracker::own;
use pagemark::{Mechanism, PAGE_SIZE, RangeSet};

use crate::BenchError;
use crate::stats::Samples;

mod area;
mod chart;
mod clock;
mod collect;
mod helpers;
mod mix;
mod plot;
mod random;
mod rate;
mod redis;
pub mod task;
mod tracked;
mod write_only;
mod ycsb;

use area::Area;
use chart::{Chart, Series};
use clock::Clock;

/// What is measured.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// Figures, by their numbers in the paper; 10 is Table III too [default: all]
    #[arg(long, value_delimiter = ',')]
    figure: Vec<Figure>,
    /// Where each figure's numbers (CSV) and picture (SVG) go
    #[arg(long)]
    out: Option<PathBuf>,
    /// Memory of the largest area, as in 256M or 4G [default: a quarter of what is free, 1 GiB at most; where instructions are
    /// counted, 128 MiB]
    #[arg(long, value_parser = parse_pages, value_name = "SIZE")]
    memory: Option<usize>,
    /// Rounds; the mechanisms take turns in each [default: 5; where instructions are counted, 2]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Longest interval of figure 10, and how long each of its measurements takes, seconds [default: 10; where
    /// instructions are counted, 0.3 s of 10^9 of them]
    #[arg(long, value_parser = parse_seconds)]
    seconds: Option<Duration>,
    /// What --figure helpers has written on another kernel (helpers.csv), to be put beside this one's
    #[arg(long, value_name = "FILE")]
    against: Option<PathBuf>,
}

/// A figure of the paper, or what it tells without one.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Figure {
    /// Writing one byte of each page, by size
    #[value(name = "3")]
    Three,
    /// Writing every byte, by size
    #[value(name = "5")]
    Five,
    /// Page faults of writing, by size
    #[value(name = "6")]
    Six,
    /// Throughput of read-write mixes after a restart
    #[value(name = "7")]
    Seven,
    /// Page faults of read-write mixes after a restart
    #[value(name = "8")]
    Eight,
    /// Time to converge at a rate of writes
    #[value(name = "9")]
    Nine,
    /// Redis, and Table III
    #[value(name = "10")]
    Ten,
    /// Reading which pages were written
    #[value(name = "11")]
    Eleven,
    /// What the rest of the kernel pays
    Helpers,
}

/// Nobody tracks, then the mechanisms of the paper, then today's.
const SUBJECTS: [Option<Mechanism>; 5] =
    [None, Some(Mechanism::SoftDirty), Some(Mechanism::Ldt), Some(Mechanism::PagemapScan), Some(Mechanism::Adaptive)];

/// One of them.
struct Subject {
    mechanism: Option<Mechanism>,
    /// Why it does not work here.
    refused: Option<String>,
}

impl Subject {
    fn new(mechanism: Option<Mechanism>) -> Subject {
        let refused = mechanism.and_then(|mechanism| try_out(mechanism).err()).map(|error| error.to_string());
        Subject { mechanism, refused }
    }

    fn name(&self) -> &'static str {
        self.mechanism.map_or("untracked", Mechanism::name)
    }
}

/// Tracks a page by it.
fn try_out(mechanism: Mechanism) -> Result<(), BenchError> {
    let area = Area::new(1).map_err(BenchError::on("map memory"))?;
    let mut tracker = own(mechanism).map_err(|error| BenchError::Pagemark(error.into()))?;
    let collected = tracker.collect(&area.range().into(), &mut RangeSet::new());
    collected.map_err(|error| BenchError::Pagemark(error.into()))
}

/// How much is measured.
struct Scale {
    /// Pages of figures 3, 5, 6 and 11.
    pages: usize,
    /// Of figures 7 and 8.
    mix_pages: usize,
    /// Of figure 9.
    rate_pages: usize,
    helper_pages: usize,
    /// Records of figure 10.
    records: u32,
    /// Its longest interval.
    longest: Duration,
}

const MIB_PAGES: usize = (1 << 20) / PAGE_SIZE;

impl Scale {
    fn new(options: &Options, clock: Clock) -> Result<Scale, BenchError> {
        let counts = clock == Clock::Instructions;
        let pages = match options.memory {
            Some(pages) => pages,
            None => (free_pages()? / 4).min(if counts { 128 } else { 1024 } * MIB_PAGES).max(MIB_PAGES),
        };
        let longest = options.seconds.unwrap_or(Duration::from_millis(if counts { 300 } else { 10_000 }));
        Ok(Scale {
            pages,
            mix_pages: (pages / 8).max(64),
            rate_pages: (pages / 16).max(64),
            helper_pages: (pages / 16).max(64),
            records: ((pages / if counts { 8 } else { 2 }) as u32).max(100),
            longest,
        })
    }
}

fn free_pages() -> Result<usize, BenchError> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").map_err(BenchError::on("read /proc/meminfo"))?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<usize>().ok());
    kib.map(|kib| kib * 1024 / PAGE_SIZE)
        .ok_or_else(|| BenchError::on("read /proc/meminfo")(std::io::ErrorKind::InvalidData.into()))
}

/// What all figures have in common.
struct Session {
    figures: Vec<Figure>,
    /// Whether the figures were named, so that none may be left out.
    is_chosen: bool,
    out: Option<PathBuf>,
    against: Option<PathBuf>,
    clock: Clock,
    rounds: u32,
    scale: Scale,
    /// Tried out by the first figure that needs them, see [`Session::subjects`].
    subjects: OnceCell<Vec<Subject>>,
}

/// What a subject's rounds have given.
#[derive(Clone, Default, Debug)]
struct Measured {
    rounds: Vec<Vec<f64>>,
}

impl Measured {
    /// The number at one place of each round.
    fn number(&self, place: usize) -> Samples {
        self.rounds.iter().map(|round| round[place]).collect()
    }

    /// All numbers, as measurements of the same.
    fn all(&self) -> Samples {
        self.rounds.iter().flatten().copied().collect()
    }
}

impl Session {
    fn wants(&self, figure: Figure) -> bool {
        self.figures.contains(&figure)
    }

    /// What is measured side by side. A process in which dirty tracking has once been used is marked by it, and its children
    /// are: who asks for the subjects is to come behind the figure that is about others.
    fn subjects(&self) -> &[Subject] {
        self.subjects.get_or_init(|| {
            let subjects = SUBJECTS.map(Subject::new);
            for subject in &subjects {
                if let Some(reason) = &subject.refused {
                    self.say(&format!("{}: -, because {reason}\n", subject.name()));
                }
            }
            self.say("\n");
            subjects.into()
        })
    }

    fn works(&self, mechanism: Mechanism) -> bool {
        self.subjects().iter().any(|subject| subject.mechanism == Some(mechanism) && subject.refused.is_none())
    }

    /// Measures each subject in each round, in turns. A subject that does not work here has no rounds.
    fn by_subject(
        &self,
        mut measure: impl FnMut(Option<Mechanism>) -> Result<Vec<f64>, BenchError>,
    ) -> Result<Vec<Measured>, BenchError> {
        let mut results = vec![Measured::default(); self.subjects().len()];
        for _ in 0..self.rounds {
            for (subject, result) in self.subjects().iter().zip(&mut results) {
                if subject.refused.is_none() {
                    result.rounds.push(measure(subject.mechanism)?);
                }
            }
        }
        Ok(results)
    }

    /// A line a subject, with the points that are given for its number.
    fn series(&self, points: impl Fn(usize) -> Vec<Samples>) -> Vec<Series> {
        let subjects = self.subjects().iter().enumerate();
        subjects.map(|(number, subject)| Series { name: subject.name().into(), points: points(number) }).collect()
    }

    /// Prints a chart, and writes its files if there is a place for them.
    fn publish(&self, chart: &Chart) -> Result<(), BenchError> {
        self.say(&format!("{chart}\n"));
        let Some(out) = &self.out else { return Ok(()) };
        let mut csv = Vec::new();
        chart.write_csv(&mut csv).map_err(BenchError::on("write a figure's numbers"))?;
        let svg = plot::svg(chart).map_err(BenchError::Pagemark)?;
        std::fs::write(out.join(&chart.name).with_extension("csv"), csv)
            .and_then(|()| std::fs::write(out.join(&chart.name).with_extension("svg"), svg))
            .map_err(BenchError::on("write a figure"))
    }

    /// Where files that are measured may lie.
    fn directory(&self) -> PathBuf {
        self.out.clone().unwrap_or_else(std::env::temp_dir)
    }

    fn say(&self, text: &str) {
        print!("{text}");
    }

    fn progress(&self, what: &str) {
        eprintln!("{what} …");
    }
}

/// Measures and prints.
///
/// # Errors
/// Something that is measured could not be done, a mechanism has missed a write, or a file could not be written.
pub fn run(options: &Options) -> Result<(), BenchError> {
    let clock = Clock::of_this_machine()?;
    if let Some(out) = &options.out {
        std::fs::create_dir_all(out).map_err(BenchError::on("make the directory for the figures"))?;
    }
    let all: &[Figure] = clap::ValueEnum::value_variants();
    let session = Session {
        figures: if options.figure.is_empty() { all.to_vec() } else { options.figure.clone() },
        is_chosen: !options.figure.is_empty(),
        out: options
            .out
            .as_ref()
            .map(|out| out.canonicalize())
            .transpose()
            .map_err(BenchError::on("find the directory"))?,
        against: options.against.clone(),
        clock,
        rounds: options.rounds.unwrap_or(if clock == Clock::Instructions { 2 } else { 5 }),
        scale: Scale::new(options, clock)?,
        subjects: OnceCell::new(),
    };
    let uname =
        nix::sys::utsname::uname().map_err(|error| BenchError::on("ask for the kernel's name")(error.into()))?;
    session.say(&format!("Linux {}; {clock}\n\n", uname.release().display()));
    let wants = |figures: &[Figure]| figures.iter().any(|&figure| session.wants(figure));
    if wants(&[Figure::Helpers]) {
        helpers::figures(&session)?;
    }
    if wants(&[Figure::Three, Figure::Five, Figure::Six]) {
        write_only::figures(&session)?;
    }
    if wants(&[Figure::Seven, Figure::Eight]) {
        mix::figures(&session)?;
    }
    if wants(&[Figure::Nine]) {
        rate::figures(&session)?;
    }
    if wants(&[Figure::Ten]) {
        redis::figures(&session)?;
    }
    if wants(&[Figure::Eleven]) {
        collect::figures(&session)?;
    }
    Ok(())
}

/// A size, in whole pages.
fn parse_pages(text: &str) -> Result<usize, String> {
    let wrong = || format!("{text:?} is no size of at least 1M; write it as in 256M or 4G");
    let (number, factor) = match text.strip_suffix(['M', 'G']) {
        Some(number) if text.ends_with('M') => (number, MIB_PAGES),
        Some(number) => (number, MIB_PAGES * 1024),
        None => return Err(wrong()),
    };
    let number: usize = number.parse().map_err(|_| wrong())?;
    number.checked_mul(factor).filter(|&pages| pages > 0).ok_or_else(wrong)
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is no number of seconds above 0");
    let seconds: f64 = text.parse().map_err(|_| wrong())?;
    Duration::try_from_secs_f64(seconds).ok().filter(|time| !time.is_zero()).ok_or_else(wrong)
}

/// Held by tests that count page faults, and by those that fork, which makes all pages of this process fault once more.
#[cfg(test)]
fn alone() -> std::sync::MutexGuard<'static, ()> {
    static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_whole_mebibytes() {
        assert_eq!(parse_pages("1M"), Ok(256));
        assert_eq!(parse_pages("2G"), Ok(1 << 19));
        for wrong in ["", "M", "0M", "12", "1.5G", "-1M", "4K", "99999999999999999G"] {
            assert!(parse_pages(wrong).is_err(), "{wrong}");
        }
        assert_eq!(parse_seconds("0.5"), Ok(Duration::from_millis(500)));
        for wrong in ["0", "-1", "x", "inf", "NaN"] {
            assert!(parse_seconds(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_does_not_work_has_a_reason() {
        let _alone = alone();
        assert!(Subject::new(None).refused.is_none());
        for mechanism in Mechanism::ALL {
            let subject = Subject::new(Some(mechanism));
            assert_eq!(subject.refused.is_none(), try_out(mechanism).is_ok());
        }
    }
}
