//! `pagemark-bench heap`: figures 6 to 11 of "Flexible Page-level Memory Access Monitoring Based on
//! Virtualization Hardware" (section 6), with the parts of pages of `pagemark-heap`: four programs
//! with many objects after STAMP, and Tokyo Cabinet; beside them, a Redis server and a program in
//! Python. In each round the variants take turns.
//!
//! A checkpoint is taken by the program itself, at the end of an interval, in which it has had the
//! processor for a given time: what was written is appended to a file, and `fdatasync` called.
//! Times are those of the whole program, without waits for a processor that others have.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use pagemark::Mechanism;
use pagemark_report::chart::{Chart, Series};
use pagemark_report::output::print;
use pagemark_report::samples::Samples;
use pagemark_report::table::Table;
use pagemark_report::text;
use serde::{Deserialize, Serialize};

use crate::BenchError;
use crate::measuring::figures::publish;
use crate::measuring::task::ProcessTask;

mod bayes;
mod genome;
mod intruder;
mod monitor;
mod objects;
mod preloaded;
mod python;
mod redis;
pub mod task;
mod tokyo;
mod tree;
mod vacation;

use task::Task;

/// Options of the measurement.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// Figures, by their numbers in the paper [default: all]
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u8).range(6..=11))]
    figure: Vec<u8>,
    /// Programs [default: all that are installed]
    #[arg(long, value_delimiter = ',')]
    program: Vec<Program>,
    /// Parts of a page
    #[arg(long, value_delimiter = ',', default_values_t = [2, 4, 8], value_parser = parse_parts)]
    parts: Vec<usize>,
    /// Part of the paper's sizes: an N-th of its flows, records, tasks and nucleotides
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..))]
    scale: u64,
    /// The paper's sizes: as --scale 1
    #[arg(long)]
    full: bool,
    /// Interval between checkpoints, milliseconds of the program's processor time [default: 200,
    /// divided by the scale]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    interval_ms: Option<u64>,
    /// Rounds; the variants take turns in each
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// The program `pagemark-kvm`: the two-level form is measured beside the user-level one, in its
    /// machine
    #[arg(long)]
    machine: Option<PathBuf>,
    /// Directory for the numbers (CSV) and the picture (SVG) of each figure
    #[arg(long)]
    out: Option<PathBuf>,
    /// Directory for checkpoints [default: the directory for temporary files]
    #[arg(long)]
    directory: Option<PathBuf>,
    /// After each program, look for each live object in its checkpoints
    #[arg(long)]
    verify: bool,
}

/// A measured program.
#[derive(clap::ValueEnum, Serialize, Deserialize, Clone, Copy, PartialEq, Eq, Debug)]
#[serde(rename_all = "kebab-case")]
enum Program {
    /// Learns the structure of a Bayesian network
    Bayes,
    /// Finds attacks in packets
    Intruder,
    /// A travel agency
    Vacation,
    /// Puts a gene together
    Genome,
    /// Tokyo Cabinet, 10 million records of 64 bytes
    Tokyo64,
    /// Tokyo Cabinet, 5 million records of 128 bytes
    Tokyo128,
    /// Tokyo Cabinet, 1 million records of 1024 bytes
    Tokyo1024,
    /// A Redis server: values of 100 bytes, counters, lists
    Redis,
    /// Accounts of a bank as objects of Python
    Python,
}

/// What the paper prints of a program (figures 6 and 7).
struct Printed {
    input: &'static str,
    objects: u64,
    gigabytes: f64,
}

impl Program {
    fn name(self) -> &'static str {
        match self {
            Program::Bayes => "bayes",
            Program::Intruder => "intruder",
            Program::Vacation => "vacation",
            Program::Genome => "genome",
            Program::Tokyo64 => "tokyo 64 B",
            Program::Tokyo128 => "tokyo 128 B",
            Program::Tokyo1024 => "tokyo 1024 B",
            Program::Redis => "redis",
            Program::Python => "python",
        }
    }

    /// None if the paper does not have the program.
    fn printed(self) -> Option<Printed> {
        let (input, objects, gigabytes) = match self {
            Program::Bayes => ("-e -l -i1 -n4 -p10 -q1 -r32768 -s1 -t1 -v32", 48_441_744, 1.34),
            Program::Intruder => ("-a10 -i16 -n1048576 -s1 -t1", 14_990_453, 0.62),
            Program::Vacation => ("-c1 -n10 -q90 -r1048576 -t524288 -u80", 11_487_872, 0.43),
            Program::Genome => ("-g65536 -n2097152 -s128 -t1", 16_957_591, 0.78),
            Program::Tokyo64 => ("10M @ 64B", 10_000_021, 1.28),
            Program::Tokyo128 => ("5M @ 128B", 5_000_021, 0.96),
            Program::Tokyo1024 => ("1M @ 1024B", 1_000_021, 1.09),
            Program::Redis | Program::Python => return None,
        };
        Some(Printed { input, objects, gigabytes })
    }

    /// True if the program is a library, which the task of this program uses.
    fn is_library(self) -> bool {
        matches!(self, Program::Tokyo64 | Program::Tokyo128 | Program::Tokyo1024)
    }

    /// True if the program has the heap of the library that is preloaded.
    fn is_preloaded(self) -> bool {
        self.is_library() || matches!(self, Program::Redis | Program::Python)
    }

    /// Why the program cannot run here, and what to do.
    fn missing(self) -> Option<&'static str> {
        match self {
            Program::Redis if !is_installed("redis-server") => Some("redis-server is missing: install redis-server"),
            Program::Python if !is_installed("python3") => Some("python3 is missing: install python3"),
            _ if self.is_library() && !tokyo::is_installed() => {
                Some("libtokyocabinet.so.9 is missing: install libtokyocabinet9")
            }
            _ => None,
        }
    }
}

fn is_installed(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success())
}

/// Size of a program's input.
#[derive(Serialize, Deserialize, Clone, Copy, PartialEq, Eq, Debug)]
enum Size {
    /// The paper's.
    Full,
    /// An n-th of it.
    Part(u64),
}

impl Size {
    /// A number of the paper's input, scaled.
    fn of(self, full: u64) -> u64 {
        match self {
            Size::Full => full,
            Size::Part(part) => (full / part).max(16),
        }
    }
}

/// How written memory is found.
#[derive(Serialize, Deserialize, Clone, Copy, PartialEq, Eq, Debug)]
enum Tracking {
    /// Not at all.
    Nothing,
    /// By pages, by a mechanism of the core.
    Pages(Mechanism),
    /// By static parts.
    Static,
    /// By parts that are merged by history.
    Dynamic,
    /// By parts that are released by cost.
    ByCost,
}

/// A way to run a program.
#[derive(Serialize, Deserialize, Clone, Copy, PartialEq, Eq, Debug)]
struct Variant {
    /// Views of the heap; `None` for the allocator of the C library.
    parts: Option<usize>,
    tracking: Tracking,
    /// In the machine, where the second level of page tables tells parts apart.
    is_in_machine: bool,
}

impl Variant {
    fn new(parts: Option<usize>, tracking: Tracking) -> Variant {
        Variant { parts, tracking, is_in_machine: false }
    }

    fn of_pages(mechanism: Mechanism) -> Variant {
        Variant::new(Some(1), Tracking::Pages(mechanism))
    }

    fn name(self) -> String {
        if self.is_in_machine {
            return format!("vm-{}", Variant { is_in_machine: false, ..self }.name());
        }
        match (self.tracking, self.parts) {
            (_, None) => "malloc".into(),
            (Tracking::Nothing, Some(parts)) => format!("views-{parts}"),
            (Tracking::Pages(Mechanism::Mprotect), _) => "base".into(),
            (Tracking::Pages(mechanism), _) => mechanism.to_string(),
            (Tracking::Static, Some(parts)) => format!("static-{parts}"),
            (Tracking::Dynamic, Some(parts)) => format!("dynamic-{parts}"),
            (Tracking::ByCost, Some(parts)) => format!("cost-{parts}"),
        }
    }

    /// True if a program can be run so.
    fn fits(self, program: Program) -> bool {
        match self.tracking {
            // The library that is preloaded has the user-level form.
            _ if self.is_in_machine && program.is_preloaded() => false,
            // The library that is preloaded has its own tracking.
            Tracking::Pages(_) if program.is_preloaded() => preloaded::strategy(self.tracking).is_some(),
            _ => true,
        }
    }
}

/// What is done with what was written.
#[derive(Serialize, Deserialize, Clone, Copy, PartialEq, Eq, Debug)]
enum Saving {
    Nothing,
    ToDisk,
}

/// What was measured of a run.
#[derive(Serialize, Deserialize, Clone, Default, Debug)]
struct Outcome {
    /// Time of the program and its checkpoints, without waits for a processor.
    elapsed_ns: f64,
    /// Those waits.
    waited_ns: f64,
    /// Time of finding what was written.
    collect_ns: f64,
    /// Time of saving it.
    save_ns: f64,
    checkpoints: f64,
    /// Page faults of the program.
    faults: f64,
    /// Parts that were disarmed, and armed again.
    merges: f64,
    splits: f64,
    /// Bytes and ranges that were reported.
    bytes: f64,
    ranges: f64,
    /// Objects that were made, their bytes, and the memory of the heap.
    objects: f64,
    object_bytes: f64,
    used_bytes: f64,
}

/// Runs of programs, by variant and round.
struct Session<'a> {
    options: &'a Options,
    size: Size,
    programs: Vec<Program>,
    directory: PathBuf,
}

/// Results by variant: for each program or interval, the rounds.
type Results = Vec<Vec<Vec<Outcome>>>;

/// Measures and prints.
///
/// # Errors
/// A program could not be run, or has a wrong result.
pub fn run(options: &Options) -> Result<(), BenchError> {
    let directory = match &options.directory {
        Some(directory) => tempfile::tempdir_in(directory),
        None => tempfile::tempdir(),
    };
    let directory = directory.map_err(BenchError::on("make a directory for checkpoints"))?;
    if let Some(out) = &options.out {
        std::fs::create_dir_all(out).map_err(BenchError::on("make the directory for the figures"))?;
    }
    let size = if options.full || options.scale == 1 { Size::Full } else { Size::Part(options.scale) };
    let mut programs = options.program.clone();
    if programs.is_empty() {
        programs = <Program as clap::ValueEnum>::value_variants().to_vec();
        programs.retain(|program| match program.missing() {
            Some(reason) => {
                print(&format!("{}: -, because {reason}\n", program.name()));
                false
            }
            None => true,
        });
    }
    let session = Session { options, size, programs, directory: directory.path().into() };
    session.describe();
    let wants = |figure: u8| options.figure.is_empty() || options.figure.contains(&figure);
    if wants(6) || wants(7) {
        session.inputs()?;
    }
    if wants(8) {
        session.views()?;
    }
    if wants(9) {
        session.protection()?;
    }
    if wants(10) {
        session.checkpoints()?;
    }
    if wants(11) {
        session.intervals()?;
    }
    Ok(())
}

impl Session<'_> {
    fn describe(&self) {
        let size = match self.size {
            Size::Full => "the paper's sizes".into(),
            Size::Part(part) => format!("1/{part} of the paper's sizes"),
        };
        let interval = self.interval();
        print(&format!(
            "{size}, a checkpoint every {interval:?} of processor time, {} rounds\n\n",
            self.options.rounds
        ));
    }

    /// The interval of all figures but 11.
    fn interval(&self) -> Duration {
        let part = if let Size::Part(part) = self.size { part as f64 } else { 1.0 };
        self.options.interval_ms.map_or(FULL_INTERVAL.div_f64(part), Duration::from_millis)
    }

    /// An interval of the paper, which has 5 s in all other figures.
    fn scaled(&self, seconds: f64) -> Duration {
        self.interval().mul_f64(seconds / 5.0)
    }

    fn task(&self, program: Program, variant: Variant, saving: Saving, interval: Duration) -> Task {
        let (directory, verifies) = (self.directory.clone(), self.options.verify);
        let machine = self.options.machine.clone().filter(|_| variant.is_in_machine);
        Task { program, size: self.size, variant, saving, interval, directory, verifies, machine }
    }

    /// Runs each program by each variant in each round, in turns.
    fn by_program(&self, variants: &[Variant], saving: Saving) -> Result<Results, BenchError> {
        self.in_turns(variants, self.programs.len(), |position, variant| {
            let program = self.programs[position];
            variant.fits(program).then(|| self.task(program, variant, saving, self.interval()))
        })
    }

    fn in_turns(
        &self,
        variants: &[Variant],
        positions: usize,
        task: impl Fn(usize, Variant) -> Option<Task>,
    ) -> Result<Results, BenchError> {
        let mut results = vec![vec![Vec::new(); positions]; variants.len()];
        for round in 1..=self.options.rounds {
            for position in 0..positions {
                for (&variant, results) in variants.iter().zip(&mut results) {
                    if let Some(task) = task(position, variant) {
                        eprintln!("round {round}, {}, {} …", task.program.name(), variant.name());
                        results[position].push(task.run_in_process()?);
                    }
                }
            }
        }
        Ok(results)
    }

    /// Figures 6 and 7: the programs.
    fn inputs(&self) -> Result<(), BenchError> {
        let variant = Variant::new(Some(1), Tracking::Nothing);
        let columns =
            ["program", "the paper's input", ">objects", ">memory", ">the paper's objects", ">the paper's memory"];
        let mut table = Table::new(columns);
        for &program in &self.programs {
            let outcome = self.task(program, variant, Saving::Nothing, self.interval()).run_in_process()?;
            let printed = program.printed();
            let count = |number: f64| if number == 0.0 { "-".into() } else { text::count(number as u64) };
            let bytes = if outcome.used_bytes == 0.0 { "-".into() } else { text::bytes(outcome.used_bytes as u64) };
            let of_paper = |value: &dyn Fn(&Printed) -> String| printed.as_ref().map_or_else(|| "-".into(), value);
            table.row([
                program.name().into(),
                of_paper(&|printed| printed.input.into()),
                count(outcome.objects),
                bytes,
                of_paper(&|printed| text::count(printed.objects)),
                of_paper(&|printed| format!("{} GB", printed.gigabytes)),
            ]);
        }
        print(&format!("Figures 6 and 7: the programs\n{table}\n"));
        Ok(())
    }

    /// Figure 8: the cost of views alone.
    fn views(&self) -> Result<(), BenchError> {
        let parts = [None, Some(1)].into_iter().chain(self.options.parts.iter().map(|&parts| Some(parts)));
        let variants = parts.map(|parts| Variant::new(parts, Tracking::Nothing)).collect();
        let variants = self.with_machine(variants);
        let results = self.by_program(&variants, Saving::Nothing)?;
        let note = "the paper: at most 2 times the time without its virtual machine";
        self.publish("figure-8", "views without protection", SECONDS, &variants, 1, &results, &[note], seconds)
    }

    /// The variants of figures 9 and 10.
    fn tracked(&self) -> Vec<Variant> {
        let mut pages =
            [Mechanism::PagemapScan, Mechanism::Mprotect, Mechanism::Adaptive].map(Variant::of_pages).to_vec();
        // The strategy needs no parts.
        pages.push(Variant::new(Some(1), Tracking::ByCost));
        let by_parts = |&parts: &usize| {
            let trackings = [Tracking::Static, Tracking::Dynamic, Tracking::ByCost];
            trackings.map(|tracking| Variant::new(Some(parts), tracking))
        };
        self.with_machine(pages.into_iter().chain(self.options.parts.iter().flat_map(by_parts)).collect())
    }

    /// The variants, and those of heaps in the machine, if there is one.
    fn with_machine(&self, mut variants: Vec<Variant>) -> Vec<Variant> {
        if self.options.machine.is_some() {
            let are_heaps =
                |variant: &&Variant| variant.parts.is_some() && !matches!(variant.tracking, Tracking::Pages(_));
            let inside = variants.iter().filter(are_heaps).map(|variant| Variant { is_in_machine: true, ..*variant });
            variants.extend(inside.collect::<Vec<_>>());
        }
        variants
    }

    /// Figure 9: the cost of protection, and its page faults.
    fn protection(&self) -> Result<(), BenchError> {
        let variants = self.tracked();
        let results = self.by_program(&variants, Saving::Nothing)?;
        self.publish("figure-9", "tracking without saving", SECONDS, &variants, 0, &results, &[], seconds)?;
        let faults = |outcome: &Outcome| outcome.faults;
        self.publish("figure-9-faults", "page faults", "page faults", &variants, 0, &results, &[], faults)
    }

    /// Figure 10: time and volume of checkpoints.
    fn checkpoints(&self) -> Result<(), BenchError> {
        let variants = self.tracked();
        let results = self.by_program(&variants, Saving::ToDisk)?;
        let note = "the paper: dynamic parts are up to 10 % faster than static ones";
        self.publish("figure-10-time", "checkpoints to disk", SECONDS, &variants, 0, &results, &[note], seconds)?;
        self.publish("figure-10-volume", "volume of checkpoints", MIB, &variants, 0, &results, &[], mebibytes)?;
        let mut table = Table::new([
            "program",
            "variant",
            ">checkpoints",
            ">collect, ms",
            ">save, ms",
            ">ranges",
            ">merges",
            ">splits",
            ">faults",
        ]);
        for (position, program) in self.programs.iter().enumerate() {
            for (variant, results) in variants.iter().zip(&results) {
                let median = |of: fn(&Outcome) -> f64| -> String {
                    let samples: Samples = results[position].iter().map(of).collect();
                    if samples.count() == 0 { "-".into() } else { text::four_digits(samples.median()) }
                };
                table.row([
                    program.name().into(),
                    variant.name(),
                    median(|outcome| outcome.checkpoints),
                    median(|outcome| outcome.collect_ns / 1e6),
                    median(|outcome| outcome.save_ns / 1e6),
                    median(|outcome| outcome.ranges),
                    median(|outcome| outcome.merges),
                    median(|outcome| outcome.splits),
                    median(|outcome| outcome.faults),
                ]);
            }
        }
        print(&format!("Where the time of figure 10 goes: medians of whole runs\n{table}\n"));
        Ok(())
    }

    /// Figure 11: genome by the interval.
    fn intervals(&self) -> Result<(), BenchError> {
        let mut variants = vec![Variant::of_pages(Mechanism::PagemapScan), Variant::of_pages(Mechanism::Mprotect)];
        for parts in [2, 4] {
            let trackings = [Tracking::Static, Tracking::Dynamic, Tracking::ByCost];
            variants.extend(trackings.map(|tracking| Variant::new(Some(parts), tracking)));
        }
        let variants = self.with_machine(variants);
        let results = self.in_turns(&variants, INTERVALS.len(), |position, variant| {
            Some(self.task(Program::Genome, variant, Saving::ToDisk, self.scaled(INTERVALS[position])))
        })?;
        let labels: Vec<String> = INTERVALS.iter().map(|&seconds| format!("{:?}", self.scaled(seconds))).collect();
        for (name, title, unit, value) in [
            ("figure-11-time", "genome by interval, time", SECONDS, seconds as fn(&Outcome) -> f64),
            ("figure-11-volume", "genome by interval, volume", MIB, mebibytes),
        ] {
            let chart = chart(name, title, unit, "interval", labels.clone(), &variants, 0, &results, value);
            publish(self.options.out.as_deref(), &chart)?;
        }
        Ok(())
    }

    #[expect(clippy::too_many_arguments, reason = "a figure has as many properties")]
    fn publish(
        &self,
        name: &str,
        title: &str,
        unit: &str,
        variants: &[Variant],
        reference: usize,
        results: &Results,
        notes: &[&str],
        value: impl Fn(&Outcome) -> f64,
    ) -> Result<(), BenchError> {
        let labels = self.programs.iter().map(|program| program.name().to_owned()).collect();
        let mut chart = chart(name, title, unit, "program", labels, variants, reference, results, value);
        chart.notes = notes.iter().map(|&note| note.to_owned()).collect();
        publish(self.options.out.as_deref(), &chart)
    }
}

/// The interval that stands for the paper's 5 s. The programs of the paper are slower: they use a
/// transactional memory, an older processor, and a virtual machine.
const FULL_INTERVAL: Duration = Duration::from_millis(200);

/// The intervals of figure 11, seconds.
const INTERVALS: [f64; 6] = [0.5, 1.0, 2.0, 4.0, 8.0, 10.0];

const SECONDS: &str = "time, s";
const MIB: &str = "written, MiB";

fn seconds(outcome: &Outcome) -> f64 {
    outcome.elapsed_ns / 1e9
}

fn mebibytes(outcome: &Outcome) -> f64 {
    outcome.bytes / f64::from(1 << 20)
}

#[expect(clippy::too_many_arguments, reason = "a figure has as many properties")]
fn chart(
    name: &str,
    title: &str,
    unit: &str,
    x_axis: &str,
    x_labels: Vec<String>,
    variants: &[Variant],
    reference: usize,
    results: &Results,
    value: impl Fn(&Outcome) -> f64,
) -> Chart {
    let points = |results: &[Vec<Outcome>]| results.iter().map(|rounds| rounds.iter().map(&value).collect()).collect();
    let series =
        variants.iter().zip(results).map(|(variant, results)| Series { name: variant.name(), points: points(results) });
    Chart {
        name: name.into(),
        title: format!("{}: {title}", name.split('-').take(2).collect::<Vec<_>>().join(" ").replace('f', "F")),
        x_axis: x_axis.into(),
        y_axis: unit.into(),
        is_logarithmic: false,
        reference: Some(reference),
        x_labels,
        series: series.collect(),
        notes: Vec::new(),
    }
}

fn parse_parts(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(parts @ (2 | 4 | 8)) => Ok(parts),
        _ => Err(format!("a page has 2, 4 or 8 parts, not {text}")),
    }
}
