//! The tests of the workspace on the host: cargo's test binaries, several at a time.
//!
//! `cargo test` runs one after another. Most tests here wait for processes and for time to pass,
//! so that it takes several to keep two processors busy.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{PipeReader, Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::failure::{Failure, Place, TestName, finding, is_undefined_behaviour};
use crate::idle::IdleProcessors;
use crate::left_over::{self, TemporaryDirectory, Watch};
use crate::libtest::{self, Summary};
use crate::steps::lock;
use crate::test_programs::{TestBinaries, TestBinary};
use crate::{Error, Result, command, contained, source_root};

/// So many programs run at a time, whatever runs beside.
const LANES: usize = 2;
/// So many more run at a time if processors are idle when they begin.
const MORE_LANES: usize = 4;
/// How long the programs that a binary has left may still print.
const LEFT_LIMIT: Duration = Duration::from_secs(30);
/// How much longer the containing program may take than the contained one.
const CONTAINED_LIMIT: Duration = Duration::from_secs(120);
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

    /// The program, with words before it and libtest's arguments behind.
    fn command<S: AsRef<OsStr>>(&self, before: &[S], arguments: &[&str]) -> Command {
        let mut words = before.iter().map(AsRef::as_ref).chain([self.base.get_program()]).chain(self.base.get_args());
        let mut command = Command::new(words.next().expect("there is a program"));
        command.args(words).args(arguments);
        for (name, value) in self.base.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        if let Some(directory) = self.base.get_current_dir() {
            command.current_dir(directory);
        }
        command
    }

    /// The names of its tests.
    ///
    /// # Errors
    /// If it cannot list them.
    pub fn list(&self, arguments: &[&str]) -> Result<Vec<String>> {
        let mut list = self.command::<&str>(&[], &[&["--list"], arguments].concat());
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
    /// The files that programs have left in their temporary directories, with the programs' names.
    pub files: Vec<String>,
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
            let run = Run::of(program, manner);
            watch.end(&program.name);
            let run = run?;
            let mut file = lock(&log_file);
            // As cargo prints it; see `libtest`.
            let written = writeln!(file, "     Running {}", program.name).and_then(|()| file.write_all(&run.output));
            written.map_err(Error::file("write", log))?;
            let mut results = lock(&results);
            results.files.extend(run.files.iter().map(|file| format!("{}: {file}", program.name)));
            results.failures.extend(run.failures(program, manner.arguments));
            let named = |(test, took)| (TestName::one(program.place(), test), took);
            results.durations.extend(run.durations.into_iter().map(named));
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
        let run = Run::of(program, Manner { arguments: &arguments, limit, stalls })?;
        watch.end(&program.name);
        let summary = Summary::parse(&run.text());
        if let Some(failure) = run.failures(program, &arguments).into_iter().next() {
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

/// A program that has ended.
struct Run {
    /// The exit status as a shell gives it.
    status: i32,
    /// All that it and its children have printed.
    output: Vec<u8>,
    /// What it has left, a line each, and the files, which are gone with their directory.
    left: Vec<String>,
    files: Vec<String>,
    durations: BTreeMap<String, Duration>,
}

impl Run {
    /// Runs a program with a temporary directory of its own.
    fn of(program: &TestProgram, manner: Manner) -> Result<Run> {
        let Manner { arguments, limit, stalls } = manner;
        let (directory, place) = (TemporaryDirectory::new()?, TemporaryDirectory::new()?);
        let report = place.path().join("left");
        let mut command = program.command(&contained::prefix(limit, stalls, &report)?, arguments);
        let (reader, writer) = std::io::pipe().map_err(Error::file("make a pipe for", &report))?;
        let second = writer.try_clone().map_err(Error::file("make a pipe for", &report))?;
        command.env("TMPDIR", directory.path()).stdin(Stdio::null()).stdout(writer).stderr(second);
        let mut child = command::start(&mut command)?;
        // The command keeps the ends for writing open.
        drop(command);
        let output = Arc::new(Mutex::new(Output::default()));
        // Not a scoped thread: it waits as long as any process has the pipe open.
        let reading = std::thread::spawn({
            let output = Arc::clone(&output);
            move || read_all(reader, &output)
        });
        let ended = command::wait_for(&mut child, limit + CONTAINED_LIMIT)?;
        let status = ended.map_or(contained::TIMED_OUT, command::exit_code);
        let end = Instant::now() + LEFT_LIMIT.min(limit);
        while !reading.is_finished() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut left: Vec<String> =
            std::fs::read_to_string(&report).unwrap_or_default().lines().map(str::to_owned).collect();
        match reading.is_finished() {
            true => reading
                .join()
                .expect("the reader does not panic")
                .map_err(Error::file("read the output for", &report))?,
            false => left.push("a program that holds the output".to_owned()),
        }
        let Output { text, ended } = std::mem::take(&mut *lock(&output));
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let files = directory.files();
        Ok(Run { status, output: text, left, files, durations: libtest::durations(&ended, threads) })
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.output).into_owned()
    }

    /// The tests that have failed.
    fn failures(&self, program: &TestProgram, arguments: &[&str]) -> Vec<Failure> {
        let text = self.text();
        let failed = |test: libtest::FailedTest| Failure {
            name: TestName::one(program.place(), test.name),
            message: test.message,
            is_finding: test.is_finding,
        };
        let mut failures: Vec<Failure> = libtest::failed_tests(&text).into_iter().map(failed).collect();
        if failures.is_empty() && self.status != 0 {
            failures.push(self.death(program, arguments, &text));
        }
        if !self.left.is_empty() {
            failures.push(has_left(TestName { place: program.place(), tests: Vec::new() }, &self.left));
        }
        failures
    }

    /// The failure of a program that hung or died, and so names no failed test.
    fn death(&self, program: &TestProgram, arguments: &[&str], text: &str) -> Failure {
        let ended_well = libtest::ended_well(text);
        let mut tests = program.list(arguments).unwrap_or_default();
        tests.retain(|test| !ended_well.contains(&test.as_str()));
        let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
        let end = match self.status {
            contained::TIMED_OUT => "did not end".to_owned(),
            status => format!("ended with status {status}"),
        };
        Failure {
            name: TestName { place: program.place(), tests },
            message: finding(text).map_or(format!("{end}: {last}"), str::to_owned),
            is_finding: is_undefined_behaviour(self.status) || finding(text).is_some(),
        }
    }
}

#[derive(Default)]
struct Output {
    text: Vec<u8>,
    /// The tests that have ended, and when.
    ended: Vec<(String, Duration)>,
}

/// Reads until no process has the other end of the pipe.
fn read_all(mut reader: PipeReader, output: &Mutex<Output>) -> std::io::Result<()> {
    let start = Instant::now();
    let (mut part, mut line_begin) = ([0; 1 << 16], 0);
    loop {
        let length = reader.read(&mut part)?;
        if length == 0 {
            return Ok(());
        }
        let mut output = lock(output);
        let Output { text, ended } = &mut *output;
        text.extend_from_slice(&part[..length]);
        while let Some(line_length) = text[line_begin..].iter().position(|&byte| byte == b'\n') {
            let line = String::from_utf8_lossy(&text[line_begin..line_begin + line_length]);
            ended.extend(libtest::ended_test(&line).map(|name| (name.to_owned(), start.elapsed())));
            line_begin += line_length + 1;
        }
    }
}
