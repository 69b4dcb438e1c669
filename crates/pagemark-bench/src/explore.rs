//! `bench explore`: SPM's table. What it costs to explore programs when states are plain copies of their memory, a page tree
//! without tracking, and a page tree with each mechanism.
//!
//! Each row is a process of its own, so that peaks of memory are each row's own.

use std::fmt;
use std::fs;
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};
use pagemark::{Mechanism, tracker};
use pagemark_explore::programs::{Flaw, Messages, Pattern, Queue};
use pagemark_explore::{Exploration, ExploreError, Explorer, Keep, Order, Outcome};
use serde::{Deserialize, Serialize};

use crate::BenchError;
use crate::stats::Samples;

/// What is measured.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// Programs; by default all
    #[arg(long, value_delimiter = ',', value_enum)]
    program: Vec<Program>,
    /// How states are held: copies, or a mechanism; by default copies, and all mechanisms that work here
    #[arg(long, value_delimiter = ',')]
    keep: Vec<Kept>,
    /// Data that a program only reads, KiB; besides, each actor has a stack of 64 KiB
    #[arg(long, default_value_t = 1024)]
    data_kib: usize,
    /// Multiplies how long the programs run, and so the number of states
    #[arg(long, default_value_t = 1)]
    scale: usize,
    /// Visit states breadth-first: almost every transition needs a restore then
    #[arg(long)]
    breadth_first: bool,
    /// Rounds; the rows take turns in each
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Explore once, in this process
    #[arg(long, hide = true)]
    once: bool,
}

/// A program that is explored.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Program {
    /// Four processes in a ring, point to point
    SendReceive,
    /// Three processes ask one, which probes for anybody's message
    Probe,
    /// Three processes send to all and receive from anybody
    SendAll,
    /// Producer and consumer at a queue without locks
    Queue,
}

/// How states are held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Kept(Option<Mechanism>);

impl fmt::Display for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.0.map_or("copies", Mechanism::name))
    }
}

impl FromStr for Kept {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        if name == "copies" { Ok(Kept(None)) } else { name.parse().map(|mechanism| Kept(Some(mechanism))) }
    }
}

impl Serialize for Kept {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// What one exploration took.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Run {
    states: u64,
    transitions: u64,
    clock_s: f64,
    user_s: f64,
    system_s: f64,
    /// The greatest resident set while exploring, less that before it.
    peak_bytes: u64,
    region_bytes: u64,
}

/// What the explorations of one program took with one way to hold states.
#[derive(Serialize)]
struct Row {
    program: Program,
    keep: Kept,
    states: u64,
    transitions: u64,
    region_bytes: u64,
    clock_s: Samples,
    user_s: Samples,
    system_s: Samples,
    peak_bytes: Samples,
}

impl Row {
    fn processor_s(&self) -> f64 {
        self.user_s.median() + self.system_s.median()
    }
}

impl Program {
    const ALL: [Program; 4] = [Program::SendReceive, Program::Probe, Program::SendAll, Program::Queue];

    fn name(self) -> String {
        clap::ValueEnum::to_possible_value(&self).map_or_else(String::new, |value| value.get_name().to_owned())
    }

    fn explore(self, options: &Options, keep: Keep) -> Result<(Exploration, usize), ExploreError> {
        let messages = |pattern, processes, rounds| Messages {
            pattern,
            processes,
            rounds: rounds * options.scale,
            vector_words: 512,
            table_bytes: options.data_kib << 10,
        };
        let program = match self {
            Program::SendReceive => messages(Pattern::SendReceive, 4, 12),
            Program::Probe => messages(Pattern::Probe, 4, 2),
            Program::SendAll => messages(Pattern::SendAll, 3, 2),
            Program::Queue => {
                let items = 2 + options.scale;
                let table_bytes = options.data_kib << 10;
                let queue = Queue { flaw: Flaw::None, producers: 1, items, consumers: 1, tries: items, table_bytes };
                let explorer = explorer(options, keep, queue.sizes());
                return Ok((explorer.explore(|world| queue.set_up(world))?, queue.sizes().total_bytes()));
            }
        };
        let explorer = explorer(options, keep, program.sizes());
        let found = explorer.explore(|world| program.set_up(world).map(drop))?;
        Ok((found, program.sizes().total_bytes()))
    }
}

fn explorer(options: &Options, keep: Keep, sizes: pagemark_explore::Sizes) -> Explorer {
    let order = if options.breadth_first { Order::BreadthFirst } else { Order::DepthFirst };
    Explorer { sizes, keep, order, ..Explorer::default() }
}

/// Measures and prints.
///
/// # Errors
/// A program could not be explored, or a mechanism that was asked for does not work.
pub fn run(options: &Options) -> Result<(), BenchError> {
    let programs = if options.program.is_empty() { Program::ALL.to_vec() } else { options.program.clone() };
    if options.once {
        let (Some(&program), Some(&keep)) = (programs.first(), options.keep.first()) else {
            return Err(failed("--once explores one program with one way to hold states"));
        };
        let run = once(options, program, keep)?;
        println!("{}", serde_json::to_string(&run).map_err(|error| BenchError::Pagemark(error.into()))?);
        return Ok(());
    }
    let keeps = keeps(options);
    let mut rows = Vec::new();
    for program in programs {
        eprintln!("{} …", program.name());
        rows.extend(measure(options, program, &keeps)?);
    }
    if options.json {
        println!("{}", serde_json::to_string_pretty(&rows).map_err(|error| BenchError::Pagemark(error.into()))?);
    } else {
        print(options, &rows);
    }
    Ok(())
}

/// What was asked for, or copies and every mechanism that works here; those without tracking first.
fn keeps(options: &Options) -> Vec<Kept> {
    if !options.keep.is_empty() {
        return options.keep.clone();
    }
    let mut mechanisms = Vec::new();
    for probe in tracker::probe() {
        match probe.result {
            Ok(_) => mechanisms.push(probe.mechanism),
            Err(reason) => eprintln!("left out: {reason}"),
        }
    }
    mechanisms.sort_by_key(|mechanism| !is_untracked(*mechanism));
    std::iter::once(Kept(None)).chain(mechanisms.into_iter().map(|mechanism| Kept(Some(mechanism)))).collect()
}

/// True if all memory is looked at each time.
fn is_untracked(mechanism: Mechanism) -> bool {
    matches!(mechanism, Mechanism::Full | Mechanism::Compare)
}

fn measure(options: &Options, program: Program, keeps: &[Kept]) -> Result<Vec<Row>, BenchError> {
    let mut rows: Vec<Row> = keeps
        .iter()
        .map(|&keep| Row {
            program,
            keep,
            states: 0,
            transitions: 0,
            region_bytes: 0,
            clock_s: Samples::default(),
            user_s: Samples::default(),
            system_s: Samples::default(),
            peak_bytes: Samples::default(),
        })
        .collect();
    for _ in 0..options.rounds {
        for row in &mut rows {
            let run = in_a_process(options, program, row.keep)?;
            (row.states, row.transitions, row.region_bytes) = (run.states, run.transitions, run.region_bytes);
            row.clock_s.push(run.clock_s);
            row.user_s.push(run.user_s);
            row.system_s.push(run.system_s);
            row.peak_bytes.push(run.peak_bytes as f64);
        }
    }
    let all_same = rows.iter().all(|row| (row.states, row.transitions) == (rows[0].states, rows[0].transitions));
    if all_same { Ok(rows) } else { Err(failed("what holds the states must not change how many there are")) }
}

/// Starts this executable again to explore once.
fn in_a_process(options: &Options, program: Program, keep: Kept) -> Result<Run, BenchError> {
    let mut command = Command::new("/proc/self/exe");
    command
        .args(["bench", "explore", "--once", "--program", &program.name(), "--keep", &keep.to_string()])
        .args(["--data-kib", &options.data_kib.to_string(), "--scale", &options.scale.to_string()])
        .args(options.breadth_first.then_some("--breadth-first"))
        .stdin(Stdio::null())
        .stderr(Stdio::inherit());
    let output = command.output().map_err(BenchError::on("start an exploration"))?;
    if !output.status.success() {
        return Err(failed(&format!("exploring {} with {keep}: {}", program.name(), output.status)));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| BenchError::Pagemark(error.into()))
}

/// Explores once, in this process.
fn once(options: &Options, program: Program, keep: Kept) -> Result<Run, BenchError> {
    let resident_bytes = memory_bytes("VmRSS:")?;
    let (user, system) = processor_time()?;
    let begin = Instant::now();
    let keep = keep.0.map_or(Keep::Copies, |mechanism| Keep::Snapshots(Some(mechanism)));
    let (found, region_bytes) = program.explore(options, keep).map_err(|error| BenchError::Pagemark(error.into()))?;
    let clock = begin.elapsed();
    let (user_then, system_then) = processor_time()?;
    let peak_bytes = memory_bytes("VmHWM:")?;
    if found.outcome != Outcome::Exhausted {
        return Err(failed(&format!("{}: {:?}", program.name(), found.outcome)));
    }
    Ok(Run {
        states: found.states,
        transitions: found.transitions,
        clock_s: clock.as_secs_f64(),
        user_s: (user_then - user).as_secs_f64(),
        system_s: (system_then - system).as_secs_f64(),
        peak_bytes: peak_bytes.saturating_sub(resident_bytes),
        region_bytes: region_bytes as u64,
    })
}

/// A line of `/proc/self/status` that tells an amount of memory.
fn memory_bytes(line: &str) -> Result<u64, BenchError> {
    // Not `ru_maxrss`: that of a new program begins with what its parent had.
    let status = fs::read_to_string("/proc/self/status").map_err(BenchError::on("read /proc/self/status"))?;
    let value =
        status.lines().find_map(|found| found.strip_prefix(line)?.split_ascii_whitespace().next()?.parse().ok());
    value.map(|kib: u64| kib * 1024).ok_or_else(|| failed(&format!("/proc/self/status has no {line}")))
}

/// Time that this process spent in user and in system mode.
fn processor_time() -> Result<(Duration, Duration), BenchError> {
    let usage = getrusage(UsageWho::RUSAGE_SELF).map_err(|error| BenchError::on("read the usage")(error.into()))?;
    let time = |time: nix::sys::time::TimeVal| Duration::new(time.tv_sec() as u64, time.tv_usec() as u32 * 1000);
    Ok((time(usage.user_time()), time(usage.system_time())))
}

fn failed(reason: &str) -> BenchError {
    BenchError::Pagemark(reason.into())
}

fn print(options: &Options, rows: &[Row]) {
    let order = if options.breadth_first { "breadth-first" } else { "depth-first" };
    println!("{} rounds, interleaved, a process each; medians; {order}", options.rounds);
    for of_program in rows.chunk_by(|a, b| a.program == b.program) {
        let [first, ..] = of_program else { continue };
        println!(
            "\n{}: {} states, {} transitions, memory of {} KiB",
            first.program.name(),
            first.states,
            first.transitions,
            first.region_bytes >> 10
        );
        println!(
            "{:<13}{:>10}{:>8}{:>10}{:>10}{:>12}{:>10}{:>11}",
            "states held", "clock ms", "±", "user ms", "system ms", "peak MiB", "time", "memory"
        );
        let copies = of_program.iter().find(|row| row.keep == Kept(None));
        for row in of_program {
            let spread = (row.clock_s.quantile(0.9) - row.clock_s.quantile(0.1)) / row.clock_s.median() * 50.0;
            print!(
                "{:<13}{:>10.1}{:>6.0} %{:>10.1}{:>10.1}{:>12.1}",
                row.keep,
                row.clock_s.median() * 1e3,
                spread,
                row.user_s.median() * 1e3,
                row.system_s.median() * 1e3,
                row.peak_bytes.median() / f64::from(1 << 20)
            );
            match copies {
                Some(copies) => println!(
                    "{:>9.2}×{:>9.1} %",
                    row.clock_s.median() / copies.clock_s.median(),
                    row.peak_bytes.median() / copies.peak_bytes.median() * 100.0
                ),
                None => println!(),
            }
        }
        goals(of_program, copies);
    }
}

/// Says what is to be reached, and what was.
fn goals(rows: &[Row], copies: Option<&Row>) {
    let fastest = |wanted: &dyn Fn(Mechanism) -> bool| {
        let rows = rows.iter().filter(|row| row.keep.0.is_some_and(wanted));
        rows.min_by(|a, b| a.clock_s.median().total_cmp(&b.clock_s.median()))
    };
    let (Some(untracked), Some(tracked)) = (fastest(&is_untracked), fastest(&|mechanism| !is_untracked(mechanism)))
    else {
        return;
    };
    if let Some(copies) = copies {
        println!(
            "{}: {:.1} % less memory than copies (goal: at least 80 %), {:.2}× their time (goal: at most 1.10×), {:.2}× \
             their processor time",
            tracked.keep,
            100.0 - tracked.peak_bytes.median() / copies.peak_bytes.median() * 100.0,
            tracked.clock_s.median() / copies.clock_s.median(),
            tracked.processor_s() / copies.processor_s()
        );
    }
    println!(
        "{} takes {:.2}× the time of {}, the faster one without tracking (goal: below 1×), {:.2}× its processor time",
        tracked.keep,
        tracked.clock_s.median() / untracked.clock_s.median(),
        untracked.keep,
        tracked.processor_s() / untracked.processor_s()
    );
}
