//! `pagemark-bench ldt`: figures 3 and 5 to 11 and table III of "LDT: Lightweight Dirty Tracking of
//! Memory Pages for x86 Systems" (sections II and IV), for the mechanisms of the paper and today's.
//! In each round the mechanisms take turns.

use std::cell::OnceCell;
use std::path::PathBuf;
use std::time::Duration;

use pagemark::track::{OwnMemory, Scope};
use pagemark::{Error, Mechanism, PAGE_SIZE, RangeSet, Tracker};
use pagemark_linux::proc::system;

use crate::BenchError;

mod clock;
mod collection;
mod helpers;
pub(crate) mod page_buffer;
mod read_write_mix;
mod redis;
pub mod task;
mod tracked_buffer;
mod write_only;
mod write_rate;
mod ycsb;

use clock::Clock;
use page_buffer::PageBuffer;
use pagemark_report::chart::{Chart, Series};
use pagemark_report::output::print;
use pagemark_report::samples::Samples;
use pagemark_report::text;

/// Options of the measurement.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// Figures, by their numbers in the paper; 10 is Table III too [default: all]
    #[arg(long, value_delimiter = ',')]
    figure: Vec<Figure>,
    /// Directory for the numbers (CSV) and the picture (SVG) of each figure
    #[arg(long)]
    out: Option<PathBuf>,
    /// Size of the largest buffer, as in 256M or 4G [default: a quarter of the free memory, 1 GiB
    /// at most; where instructions are counted, 128 MiB]
    #[arg(long, value_parser = parse_pages, value_name = "SIZE")]
    memory: Option<usize>,
    /// Size of the smallest buffer of figures 3, 5 and 6 [default: 4 MiB]
    #[arg(long, value_parser = parse_pages, value_name = "SIZE")]
    min_memory: Option<usize>,
    /// Size of the largest buffer of figure 9 [default: a sixteenth of that of the others]
    #[arg(long, value_parser = parse_pages, value_name = "SIZE")]
    rate_memory: Option<usize>,
    /// Rounds; the mechanisms take turns in each [default: 5; where instructions are counted, 2]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Longest interval of figure 10, and how long each of its measurements takes, seconds
    /// [default: 10; where instructions are counted, 0.3 s of 10^9 of them]
    #[arg(long, value_parser = parse_seconds)]
    seconds: Option<Duration>,
    /// Results of --figure helpers on another kernel (helpers.csv), to be shown beside those of
    /// this one
    #[arg(long, value_name = "FILE")]
    against: Option<PathBuf>,
}

/// A figure of the paper, or a result that it has no figure for.
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
    /// Cost for the rest of the kernel
    Helpers,
}

/// No tracking, then the mechanisms of the paper, then today's.
const VARIANTS: [Option<Mechanism>; 5] =
    [None, Some(Mechanism::SoftDirty), Some(Mechanism::Ldt), Some(Mechanism::PagemapScan), Some(Mechanism::Adaptive)];

/// A mechanism, or no tracking.
struct Variant {
    mechanism: Option<Mechanism>,
    /// Why the mechanism does not work here, if it does not.
    unavailable: Option<String>,
}

impl Variant {
    fn new(mechanism: Option<Mechanism>) -> Variant {
        let unavailable = mechanism.and_then(|mechanism| check(mechanism).err()).map(|error| error.to_string());
        Variant { mechanism, unavailable }
    }

    fn name(&self) -> &'static str {
        self.mechanism.map_or("untracked", Mechanism::name)
    }
}

/// A tracker of a buffer, as for other processes where the mechanism has one. It is dropped before
/// the buffer is.
fn tracker(mechanism: Mechanism, buffer: &PageBuffer) -> Result<Box<dyn Tracker>, Error> {
    let scope = if mechanism.has_scope(Scope::Process) { Scope::Process } else { Scope::OwnMemory };
    // SAFETY: the buffer has whole pages of data, whose mapping nobody changes, and it is not
    // accessed while a tracker collects.
    let memory = unsafe { OwnMemory::new(buffer.range()) };
    mechanism.tracker(scope, &memory?)
}

/// A tracker of a buffer that has collected once, so that the first interval has begun. It is
/// dropped before the buffer is.
///
/// # Errors
/// The mechanism does not work here.
fn started_tracker(mechanism: Mechanism, buffer: &PageBuffer) -> Result<Box<dyn Tracker>, Error> {
    let mut tracker = tracker(mechanism, buffer)?;
    tracker.collect(&buffer.range().into(), &mut RangeSet::new())?;
    Ok(tracker)
}

/// Tracks one page.
///
/// # Errors
/// The mechanism does not work here.
fn check(mechanism: Mechanism) -> Result<(), BenchError> {
    let buffer = PageBuffer::new(1).map_err(BenchError::on("map memory"))?;
    started_tracker(mechanism, &buffer).map(|_| ()).map_err(BenchError::pagemark)
}

/// Sizes of the measurements.
struct Scale {
    /// Smallest buffer of figures 3, 5 and 6.
    min_pages: usize,
    /// Largest buffer of figures 3, 5, 6 and 11.
    pages: usize,
    /// Buffer of figures 7 and 8.
    mix_pages: usize,
    /// Largest buffer of figure 9.
    rate_pages: usize,
    /// Buffer of `helpers`.
    helper_pages: usize,
    /// Records of figure 10.
    records: u32,
    /// Longest interval of figure 10.
    longest: Duration,
}

const MIB_PAGES: usize = (1 << 20) / PAGE_SIZE;

impl Scale {
    fn new(options: &Options, clock: Clock) -> Result<Scale, BenchError> {
        let counts = clock == Clock::Instructions;
        let pages = match options.memory {
            Some(pages) => pages,
            None => (available_pages()? / 4).min(if counts { 128 } else { 1024 } * MIB_PAGES).max(MIB_PAGES),
        };
        let longest = options.seconds.unwrap_or(Duration::from_millis(if counts { 300 } else { 10_000 }));
        Ok(Scale {
            min_pages: options.min_memory.unwrap_or(4 * MIB_PAGES).min(pages),
            pages,
            mix_pages: (pages / 8).max(64),
            rate_pages: options.rate_memory.unwrap_or(pages / 16).max(64),
            helper_pages: (pages / 16).max(64),
            records: ((pages / if counts { 8 } else { 2 }) as u32).max(100),
            longest,
        })
    }
}

fn available_pages() -> Result<usize, BenchError> {
    system::available_bytes()
        .map(|bytes| bytes as usize / PAGE_SIZE)
        .ok_or_else(|| BenchError::on("read /proc/meminfo")(std::io::ErrorKind::InvalidData.into()))
}

/// What all figures share.
struct Session {
    figures: Vec<Figure>,
    /// True if the options name the figures. Then none may be left out.
    is_chosen: bool,
    out: Option<PathBuf>,
    against: Option<PathBuf>,
    clock: Clock,
    rounds: u32,
    scale: Scale,
    /// Checked by the first figure that needs them, see [`Session::variants`].
    variants: OnceCell<Vec<Variant>>,
}

/// Results of the rounds of one variant. Each round has the same list of numbers.
#[derive(Clone, Default, Debug)]
struct Rounds {
    rounds: Vec<Vec<f64>>,
}

impl Rounds {
    /// The number at `index` of each round.
    fn number(&self, index: usize) -> Samples {
        self.rounds.iter().map(|round| round[index]).collect()
    }

    /// All numbers, as measurements of one quantity.
    fn all(&self) -> Samples {
        self.rounds.iter().flatten().copied().collect()
    }
}

impl Session {
    fn wants(&self, figure: Figure) -> bool {
        self.figures.contains(&figure)
    }

    /// The variants that are measured. The first call checks them.
    fn variants(&self) -> &[Variant] {
        self.variants.get_or_init(|| {
            let variants = VARIANTS.map(Variant::new);
            for variant in &variants {
                if let Some(reason) = &variant.unavailable {
                    print(&format!("{}: -, because {reason}\n", variant.name()));
                }
            }
            print("\n");
            variants.into()
        })
    }

    fn works(&self, mechanism: Mechanism) -> bool {
        self.variants().iter().any(|variant| variant.mechanism == Some(mechanism) && variant.unavailable.is_none())
    }

    /// Measures each variant in each round, in turns. A variant that does not work here has no
    /// rounds.
    fn by_variant(
        &self,
        mut measure: impl FnMut(Option<Mechanism>) -> Result<Vec<f64>, BenchError>,
    ) -> Result<Vec<Rounds>, BenchError> {
        let mut results = vec![Rounds::default(); self.variants().len()];
        for _ in 0..self.rounds {
            for (variant, result) in self.variants().iter().zip(&mut results) {
                if variant.unavailable.is_none() {
                    result.rounds.push(measure(variant.mechanism)?);
                }
            }
        }
        Ok(results)
    }

    /// A line of a chart for each variant, with the points that `points` returns for its index.
    fn series(&self, points: impl Fn(usize) -> Vec<Samples>) -> Vec<Series> {
        let variants = self.variants().iter().enumerate();
        variants.map(|(index, variant)| Series { name: variant.name().into(), points: points(index) }).collect()
    }

    /// Prints a chart, and writes its files if there is a directory for them.
    fn publish(&self, chart: &Chart) -> Result<(), BenchError> {
        crate::measuring::figures::publish(self.out.as_deref(), chart)
    }

    /// Directory for files that are measured.
    fn directory(&self) -> PathBuf {
        self.out.clone().unwrap_or_else(std::env::temp_dir)
    }

    fn progress(&self, step: &str) {
        eprintln!("{step} …");
    }
}

/// Measures and prints.
///
/// # Errors
/// A step of a measurement failed, a mechanism has missed a write, or a file could not be written.
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
        variants: OnceCell::new(),
    };
    let uname =
        nix::sys::utsname::uname().map_err(|error| BenchError::on("ask for the kernel's name")(error.into()))?;
    print(&format!("Linux {}; {clock}\n\n", uname.release().display()));
    let wants = |figures: &[Figure]| figures.iter().any(|&figure| session.wants(figure));
    if wants(&[Figure::Helpers]) {
        helpers::figures(&session)?;
    }
    if wants(&[Figure::Three, Figure::Five, Figure::Six]) {
        write_only::figures(&session)?;
    }
    if wants(&[Figure::Seven, Figure::Eight]) {
        read_write_mix::figures(&session)?;
    }
    if wants(&[Figure::Nine]) {
        write_rate::figures(&session)?;
    }
    if wants(&[Figure::Ten]) {
        redis::figures(&session)?;
    }
    if wants(&[Figure::Eleven]) {
        collection::figures(&session)?;
    }
    Ok(())
}

/// The size of `pages` pages as text.
fn format_pages(pages: usize) -> String {
    text::exact_bytes((pages * PAGE_SIZE) as u64)
}

/// Reads a size such as `256M`. Returns pages.
fn parse_pages(text: &str) -> Result<usize, String> {
    let invalid = || format!("{text:?} is no size of at least 1M; write it as in 256M or 4G");
    let (number, factor) = match text.strip_suffix(['M', 'G']) {
        Some(number) if text.ends_with('M') => (number, MIB_PAGES),
        Some(number) => (number, MIB_PAGES * 1024),
        None => return Err(invalid()),
    };
    let number: usize = number.parse().map_err(|_| invalid())?;
    number.checked_mul(factor).filter(|&pages| pages > 0).ok_or_else(invalid)
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let invalid = || format!("{text:?} is no number of seconds above 0");
    let seconds: f64 = text.parse().map_err(|_| invalid())?;
    Duration::try_from_secs_f64(seconds).ok().filter(|time| !time.is_zero()).ok_or_else(invalid)
}

/// Held by tests that count page faults and by tests that fork, since after a fork each page of
/// this process faults once more.
#[cfg(test)]
pub(crate) fn alone() -> std::sync::MutexGuard<'static, ()> {
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
    fn a_mechanism_that_does_not_work_has_a_reason() {
        let _alone = alone();
        assert!(Variant::new(None).unavailable.is_none());
        for mechanism in Mechanism::ALL {
            let variant = Variant::new(Some(mechanism));
            assert_eq!(variant.unavailable.is_none(), check(mechanism).is_ok());
        }
    }
}
