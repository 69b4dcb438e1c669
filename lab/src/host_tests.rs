//! The tests of the workspace on the host: cargo's test binaries, several at a time.
//!
//! `cargo test` runs one after another. Most tests here wait for processes and for time to pass,
//! so that it takes several to keep two processors busy.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::contained_run::{ContainedRun, LeftFile};
use crate::failure::{Failure, Place, TestName, finding, is_undefined_behaviour};
use crate::idle::IdleProcessors;
use crate::left_over::{self, Watch};
use crate::libtest::{self, Summary};
use crate::steps::lock;
use crate::test_programs::{TestBinaries, TestBinary};
use crate::{Error, Result, command, contained, source_root};

/// So many programs run at a time, whatever runs beside.
const LANES: usize = 2;
/// So many more run at a time if processors are idle when they begin.
const MORE_LANES: usize = 4;
/// The name of the tests in the documentation, which cargo compiles and runs.
const DOCUMENTATION: &str = "the examples of the documentation";

/// The programs that take longest, which begin first: none of them is left alone at the end.
pub const FIRST: [&str; 16] = [
    "pagemark-cli machine",
    "pagemark-testing comes_back",
    "pagemark-replay simulate",
    "pagemark-trace pagemark_trace",
    "pagemark-cli deaths",
    "pagemark-cli simulate",
    "pagemark-process pagemark_process",
    "pagemark pagemark",
    "pagemark-vm load",
    "papers vm",
    "pagemark-c c",
    "pagemark-cli attacks",
    "pagemark-kvm programs",
    "pagemark-vm qemu",
    "pagemark-cli vm",
    "pagemark-process attach",
];

/// A program whose tests libtest runs.
pub struct TestProgram {
    /// Its name in reports.
    pub name: String,
    /// The program, without the arguments of libtest.
    base: Command,
}

impl TestProgram {
    /// A program; `base` has none of libtest's arguments.
    pub fn new(name: impl Into<String>, base: Command) -> TestProgram {
        TestProgram { name: name.into(), base }
    }

    /// The test binaries, and the tests in the documentation, with these environment variables.
    pub fn all(binaries: &TestBinaries, environment: &[(&str, &str)]) -> Vec<TestProgram> {
        let mut documentation = Command::new("cargo");
        // Its documentation is that of pagemark-heap.
        documentation.args(["test", "--workspace", "--exclude", "pagemark-saved-heap", "--doc"]);
        documentation.args(["--locked", "--no-fail-fast", "--"]).current_dir(source_root());
        let mut programs = vec![TestProgram::new(DOCUMENTATION, documentation)];
        for binary in binaries.all() {
            let mut program = Command::new(&binary.path);
            surround(&mut program, binary);
            programs.push(TestProgram::new(binary.name(), program));
        }
        for program in &mut programs {
            program.base.envs(environment.iter().copied());
        }
        programs
    }

    /// The program with libtest's arguments.
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = command::behind::<&str>(&[], &self.base);
        command.args(arguments);
        command
    }

    /// The names of its tests.
    ///
    /// # Errors
    /// If it cannot list them.
    pub fn list(&self, arguments: &[&str]) -> Result<Vec<String>> {
        let mut list = self.command(&[&["--list"], arguments].concat());
        let listed = command::output(&mut list, &format!("listing the tests of {}", self.name), "see above")?;
        Ok(listed.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
    }

    fn place(&self) -> Place {
        Place::Host(self.name.clone())
    }
}

/// Lets a program that runs a test binary find what cargo lets it find.
pub(crate) fn surround(program: &mut Command, binary: &TestBinary) {
    program.current_dir(&binary.package).env("CARGO_MANIFEST_DIR", &binary.package);
}

/// How tests are run.
#[derive(Clone, Copy)]
pub struct Manner<'a> {
    /// The arguments of libtest.
    pub arguments: &'a [&'a str],
    /// A program that runs longer is killed.
    pub limit: Duration,
    /// Whether they are stopped for 100 ms at a time, see [`contained::run`].
    pub stalls: bool,
}

/// What the tests of several programs have shown.
#[derive(Debug, Default)]
pub struct Results {
    /// The tests that have failed.
    pub failures: Vec<Failure>,
    /// How long each test took.
    pub durations: Vec<(TestName, Duration)>,
    /// How long each program took.
    pub programs: Vec<ProgramTime>,
}

/// How long a program took.
#[derive(Clone, Debug)]
pub struct ProgramTime {
    /// The program.
    pub name: String,
    /// The time on the clock.
    pub took: Duration,
    /// The time of processors, of all that it has started, too.
    pub processor_time: Duration,
}

/// Runs the programs, several at a time, and more at a time while processors are idle. Those that
/// take long begin first. Writes their outputs to `log`, one after another. `watch` finds out what
/// they leave.
///
/// # Errors
/// If a program cannot be started, or the log cannot be written.
pub fn run_programs(programs: &[TestProgram], manner: Manner, watch: &Watch, log: &Path) -> Result<Results> {
    let mut order: Vec<&TestProgram> = programs.iter().collect();
    order.sort_by_key(|program| FIRST.iter().position(|&name| name == program.name).unwrap_or(FIRST.len()));
    let order = &order;
    let queue = Mutex::new(order.iter());
    let idle = IdleProcessors::default();
    let log_file = Mutex::new(File::create(log).map_err(Error::file("create", log))?);
    let results = Mutex::new(Results::default());
    let lane = |waits: bool| -> Result<()> {
        loop {
            if waits {
                idle.wait(|| lock(&queue).len() == 0);
            }
            let Some(&program) = lock(&queue).next() else { return Ok(()) };
            watch.begin(&program.name);
            let start = Instant::now();
            let run =
                ContainedRun::of(&program.command(manner.arguments), manner.limit, manner.stalls, libtest::ended_test);
            let took = start.elapsed();
            watch.end(&program.name);
            let run = run?;
            let mut file = lock(&log_file);
            // As cargo prints it; see `libtest`.
            let written = writeln!(file, "     Running {}", program.name).and_then(|()| file.write_all(&run.output));
            written.map_err(Error::file("write", log))?;
            let mut results = lock(&results);
            results.failures.extend(failures(program, &run, manner.arguments));
            let times = libtest::times(&run.ended_tests, threads());
            let named = |(test, (begin, end)): (String, (Duration, Duration))| {
                (TestName::one(program.place(), test), end.saturating_sub(begin))
            };
            results.durations.extend(times.into_iter().map(named));
            results.programs.push(ProgramTime { name: program.name.clone(), took, processor_time: run.processor_time });
        }
    };
    std::thread::scope(|scope| {
        let lane = &lane;
        let lanes: Vec<_> = (0..LANES + MORE_LANES).map(|number| scope.spawn(move || lane(number >= LANES))).collect();
        lanes.into_iter().try_for_each(|lane| lane.join().expect("a lane does not panic"))
    })?;
    Ok(results.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// Runs tests of a program one after another, each alone. Returns the first failure, whose
/// output is added to `log`.
///
/// # Errors
/// If the program cannot be started, has no such test, or the log cannot be written.
pub fn run_alone(
    program: &TestProgram,
    tests: &[String],
    limit: Duration,
    stalls: bool,
    log: &Path,
) -> Result<Option<Failure>> {
    let tests = if tests.is_empty() { program.list(&[])? } else { tests.to_vec() };
    for test in tests {
        let arguments = [test.as_str(), "--exact", "--include-ignored", "--show-output"];
        let watch = Watch::new();
        watch.begin(&program.name);
        let run = ContainedRun::of(&program.command(&arguments), limit, stalls, libtest::ended_test)?;
        watch.end(&program.name);
        let summary = Summary::parse(&run.text());
        if let Some(failure) = failures(program, &run, &arguments).into_iter().next() {
            let mut file = File::options().create(true).append(true).open(log).map_err(Error::file("open", log))?;
            file.write_all(&run.output).map_err(Error::file("write", log))?;
            return Ok(Some(Failure { name: TestName::one(program.place(), test), ..failure }));
        }
        if summary.passed == 0 {
            return Err(Error::unmet(format!("{} has no test {test}", program.name), "correct the name"));
        }
        if let Some(things) = watch.left(left_over::GRACE).remove(&program.name) {
            return Ok(Some(has_left(TestName::one(program.place(), test), &things)));
        }
    }
    Ok(None)
}

/// The failure of tests that have left something.
pub fn has_left(name: TestName, things: &[String]) -> Failure {
    Failure { name, message: format!("left over: {}", things.join("; ")), is_finding: false }
}

/// The tests of a program that have failed, and what they have left.
fn failures(program: &TestProgram, run: &ContainedRun, arguments: &[&str]) -> Vec<Failure> {
    let text = run.text();
    let failed = |test: libtest::FailedTest| Failure {
        name: TestName::one(program.place(), test.name),
        message: test.message,
        is_finding: test.is_finding,
    };
    let mut failures: Vec<Failure> = libtest::failed_tests(&text).into_iter().map(failed).collect();
    if failures.is_empty() && run.status != 0 {
        failures.push(death(program, run.status, arguments, &text));
    }
    if !run.left.is_empty() {
        failures.push(has_left(TestName { place: program.place(), tests: Vec::new() }, &run.left));
    }
    failures.extend(left_files(&program.place(), &run.files, &libtest::times(&run.ended_tests, threads())));
    failures
}

/// The failures of the tests that have left files: those that ran when a file was made. `times` are
/// those of the tests.
pub fn left_files(place: &Place, files: &[LeftFile], times: &libtest::Times) -> Vec<Failure> {
    let mut by_tests: BTreeMap<Vec<String>, Vec<String>> = BTreeMap::new();
    for file in files {
        let tests = file.made.map_or_else(Vec::new, |made| libtest::running_at(times, made));
        by_tests.entry(tests).or_default().push(format!("file {}", file.path.display()));
    }
    let failure =
        |(tests, files): (Vec<String>, Vec<String>)| has_left(TestName { place: place.clone(), tests }, &files);
    by_tests.into_iter().map(failure).collect()
}

/// The failure of a program that hung or died, and so names no failed test.
fn death(program: &TestProgram, status: i32, arguments: &[&str], text: &str) -> Failure {
    let ended_well = libtest::ended_well(text);
    let mut tests = program.list(arguments).unwrap_or_default();
    tests.retain(|test| !ended_well.contains(&test.as_str()));
    let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
    let end = match status {
        contained::TIMED_OUT => "did not end".to_owned(),
        status => format!("ended with status {status}"),
    };
    Failure {
        name: TestName { place: program.place(), tests },
        message: finding(text).map_or(format!("{end}: {last}"), str::to_owned),
        is_finding: is_undefined_behaviour(status) || finding(text).is_some(),
    }
}

/// So many tests of a program libtest runs at a time.
fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
