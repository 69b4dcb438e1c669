//! `pagemark-bench explore`: the tables of "Results on same-page-merging snapshots" (section
//! "Results"). A model checker explores programs, with states that are plain copies of their
//! memory, page trees without tracking, and page trees with each mechanism.
//!
//! Each row is measured in a process of its own, so that its peak of memory is its own.

use std::fmt;
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::time::Instant;

use pagemark::track::Scope;
use pagemark::{Mechanism, track};
use pagemark_explore::programs::{Flaw, Messages, Pattern, Queue};
use pagemark_explore::{Exploration, Explorer, Order, Outcome, StateForm};
use pagemark_report::output::print;
use pagemark_report::samples::Samples;
use pagemark_report::table::Table;
use serde::{Deserialize, Serialize};

use crate::measuring::usage::{own_memory_bytes, process_cpu_time};
use crate::{BenchError, print_json};

/// Options of the measurement.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// Programs [default: all]
    #[arg(long, value_delimiter = ',', value_enum)]
    program: Vec<Program>,
    /// How states are held: copies, or a mechanism [default: copies, and all mechanisms that work
    /// here]
    #[arg(long, value_delimiter = ',')]
    keep: Vec<StateStorage>,
    /// Data that a program only reads, KiB; each actor also has a stack of 64 KiB
    #[arg(long, default_value_t = 1024)]
    data_kib: usize,
    /// Factor by which the programs run longer, and have more states
    #[arg(long, default_value_t = 1)]
    scale: usize,
    /// Visit states breadth-first, so that almost every transition needs a restore
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
    /// Three processes send requests to another, which probes for a message from any
    Probe,
    /// Three processes send to all and receive from any
    SendAll,
    /// Producer and consumer of a queue without locks
    Queue,
}

/// How the explorer holds states: in snapshots under a mechanism, or as copies if there is none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct StateStorage(Option<Mechanism>);

impl fmt::Display for StateStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.0.map_or("copies", Mechanism::name))
    }
}

impl FromStr for StateStorage {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        if name == "copies" {
            Ok(StateStorage(None))
        } else {
            name.parse().map(|mechanism| StateStorage(Some(mechanism)))
        }
    }
}

impl Serialize for StateStorage {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Result of one exploration.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Run {
    states: u64,
    transitions: u64,
    clock_s: f64,
    user_s: f64,
    system_s: f64,
    /// Greatest resident set during the exploration, less the resident set before it.
    peak_bytes: u64,
    region_bytes: u64,
}

/// Results of one program with one storage of states.
#[derive(Serialize)]
struct Row {
    program: Program,
    keep: StateStorage,
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

    fn explore(self, options: &Options, keep: StateForm) -> Result<(Exploration, usize), pagemark_explore::Error> {
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

fn explorer(options: &Options, keep: StateForm, sizes: pagemark_explore::Sizes) -> Explorer {
    let order = if options.breadth_first { Order::BreadthFirst } else { Order::DepthFirst };
    Explorer { sizes, state_form: keep, order, ..Explorer::default() }
}

/// Measures and prints.
///
/// # Errors
/// A program could not be explored, or a mechanism of the options does not work.
pub fn run(options: &Options) -> Result<(), BenchError> {
    let programs = if options.program.is_empty() { Program::ALL.to_vec() } else { options.program.clone() };
    if options.once {
        let (Some(&program), Some(&keep)) = (programs.first(), options.keep.first()) else {
            return Err(failed("--once explores one program with one value of --keep"));
        };
        let run = explore_once(options, program, keep)?;
        return print_json(&run);
    }
    let storages = storages(options);
    let mut rows = Vec::new();
    for program in programs {
        eprintln!("{} …", program.name());
        rows.extend(measure(options, program, &storages)?);
    }
    if options.json {
        print_json(&rows)?;
    } else {
        print(&tables(options, &rows));
    }
    Ok(())
}

/// The storages of the options, or copies and every mechanism that works here, those without
/// tracking first.
fn storages(options: &Options) -> Vec<StateStorage> {
    if !options.keep.is_empty() {
        return options.keep.clone();
    }
    let mut mechanisms = Vec::new();
    for probe in track::probe(Scope::OwnMemory) {
        match probe.result {
            Ok(_) => mechanisms.push(probe.mechanism),
            Err(reason) => eprintln!("left out: {reason}"),
        }
    }
    mechanisms.sort_by_key(|mechanism| !is_untracked(*mechanism));
    let mechanisms = mechanisms.into_iter().map(|mechanism| StateStorage(Some(mechanism)));
    std::iter::once(StateStorage(None)).chain(mechanisms).collect()
}

/// True if the mechanism reads all memory each time.
fn is_untracked(mechanism: Mechanism) -> bool {
    matches!(mechanism, Mechanism::Full | Mechanism::Compare)
}

fn measure(options: &Options, program: Program, storages: &[StateStorage]) -> Result<Vec<Row>, BenchError> {
    let mut rows: Vec<Row> = storages
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
            let run = explore_in_process(options, program, row.keep)?;
            (row.states, row.transitions, row.region_bytes) = (run.states, run.transitions, run.region_bytes);
            row.clock_s.push(run.clock_s);
            row.user_s.push(run.user_s);
            row.system_s.push(run.system_s);
            row.peak_bytes.push(run.peak_bytes as f64);
        }
    }
    let all_same = rows.iter().all(|row| (row.states, row.transitions) == (rows[0].states, rows[0].transitions));
    if all_same { Ok(rows) } else { Err(failed("the number of states differs between storages of states")) }
}

/// Explores once, in a new process of this executable.
fn explore_in_process(options: &Options, program: Program, keep: StateStorage) -> Result<Run, BenchError> {
    let mut command = Command::new("/proc/self/exe");
    command
        .args(["explore", "--once", "--program", &program.name(), "--keep", &keep.to_string()])
        .args(["--data-kib", &options.data_kib.to_string(), "--scale", &options.scale.to_string()])
        .args(options.breadth_first.then_some("--breadth-first"))
        .stdin(Stdio::null())
        .stderr(Stdio::inherit());
    let output = command.output().map_err(BenchError::on("start an exploration"))?;
    if !output.status.success() {
        return Err(failed(&format!("exploring {} with {keep}: {}", program.name(), output.status)));
    }
    serde_json::from_slice(&output.stdout).map_err(BenchError::pagemark)
}

/// Explores once, in this process.
fn explore_once(options: &Options, program: Program, keep: StateStorage) -> Result<Run, BenchError> {
    let resident_bytes = own_memory_bytes("status", "VmRSS")?;
    let [user, system] = process_cpu_time()?;
    let begin = Instant::now();
    let keep = keep.0.map_or(StateForm::Copies, |mechanism| StateForm::Snapshots(Some(mechanism)));
    let (found, region_bytes) = program.explore(options, keep).map_err(BenchError::pagemark)?;
    let clock = begin.elapsed();
    let [user_after, system_after] = process_cpu_time()?;
    // Not `ru_maxrss`: in a new program it begins with the value of the parent.
    let peak_bytes = own_memory_bytes("status", "VmHWM")?;
    if found.outcome != Outcome::Exhausted {
        return Err(failed(&format!("{}: {:?}", program.name(), found.outcome)));
    }
    Ok(Run {
        states: found.states,
        transitions: found.transitions,
        clock_s: clock.as_secs_f64(),
        user_s: (user_after - user).as_secs_f64(),
        system_s: (system_after - system).as_secs_f64(),
        peak_bytes: peak_bytes.saturating_sub(resident_bytes),
        region_bytes: region_bytes as u64,
    })
}

fn failed(reason: &str) -> BenchError {
    BenchError::Pagemark(reason.into())
}

/// A table for each program.
fn tables(options: &Options, rows: &[Row]) -> String {
    let order = if options.breadth_first { "breadth-first" } else { "depth-first" };
    let mut out = format!("{} rounds, interleaved, a process each; medians; {order}\n", options.rounds);
    for of_program in rows.chunk_by(|a, b| a.program == b.program) {
        let [first, ..] = of_program else { continue };
        out += &format!(
            "\n{}: {} states, {} transitions, memory of {} KiB\n",
            first.program.name(),
            first.states,
            first.transitions,
            first.region_bytes >> 10
        );
        let copies = of_program.iter().find(|row| row.keep == StateStorage(None));
        let mut table =
            Table::new(["states held", ">clock ms", ">±", ">user ms", ">system ms", ">peak MiB", ">time", ">memory"]);
        for row in of_program {
            let ms = |seconds: &Samples| format!("{:.1}", seconds.median() * 1e3);
            let to_copies =
                |samples: fn(&Row) -> &Samples| copies.map(|copies| samples(row).median() / samples(copies).median());
            table.row([
                row.keep.to_string(),
                ms(&row.clock_s),
                format!("{:.0} %", row.clock_s.spread() * 100.0),
                ms(&row.user_s),
                ms(&row.system_s),
                format!("{:.1}", row.peak_bytes.median() / f64::from(1 << 20)),
                to_copies(|row| &row.clock_s).map_or_else(String::new, |ratio| format!("{ratio:.2}×")),
                to_copies(|row| &row.peak_bytes).map_or_else(String::new, |ratio| format!("{:.1} %", ratio * 100.0)),
            ]);
        }
        out += &table.to_string();
        out += &goals(of_program, copies);
    }
    out
}

/// The goals, and how far they are reached.
fn goals(rows: &[Row], copies: Option<&Row>) -> String {
    let fastest = |wanted: &dyn Fn(Mechanism) -> bool| {
        let rows = rows.iter().filter(|row| row.keep.0.is_some_and(wanted));
        rows.min_by(|a, b| a.clock_s.median().total_cmp(&b.clock_s.median()))
    };
    let (Some(untracked), Some(tracked)) = (fastest(&is_untracked), fastest(&|mechanism| !is_untracked(mechanism)))
    else {
        return String::new();
    };
    let mut out = String::new();
    if let Some(copies) = copies {
        out += &format!(
            "{}: {:.1} % less memory than copies (goal: at least 80 %), {:.2}× their time (goal: at most 1.10×), {:.2}× \
             their processor time\n",
            tracked.keep,
            100.0 - tracked.peak_bytes.median() / copies.peak_bytes.median() * 100.0,
            tracked.clock_s.median() / copies.clock_s.median(),
            tracked.processor_s() / copies.processor_s()
        );
    }
    out += &format!(
        "{} takes {:.2}× the time of {}, the faster one without tracking (goal: below 1×), {:.2}× its processor time\n",
        tracked.keep,
        tracked.clock_s.median() / untracked.clock_s.median(),
        untracked.keep,
        tracked.processor_s() / untracked.processor_s()
    );
    out
}
