//! All tests of the project, in an order and with an overlap that keep two processors busy.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{OnceLock, mpsc};
use std::time::{Duration, Instant};

use crate::batch::TestResult;
use crate::failure::{Failure, Place, TestName};
use crate::history::{self, Record};
use crate::host_tests::{Manner, ProgramTime, TestProgram};
use crate::left_over::{self, Watch};
use crate::libtest::Summary;
use crate::load::Load;
use crate::process_ids::LargeRange;
use crate::repeat::{self, Judged, Repeater};
use crate::skips::{self, AllowedSkips};
use crate::steps::{Outcome, Steps};
use crate::surroundings::Surroundings;
use crate::test_plan::{Extent, Part, Programs};
use crate::test_programs::TestBinaries;
use crate::unchanged::Content;
use crate::zdtm::Flavor;
use crate::{
    Error, Result, batch, cache, command, cpython, flaky, go_suite, host_tests, kernel_build, ltp, machine,
    newest_qemu, progress, python_tests, redis_suite, setup, source_root, sqlite_suite, zdtm,
};

/// What runs beside the tests on the host gives way to them: many of them wait for time to pass.
const NICENESS: u32 = 10;
/// The full tests multiply the number of cases of each property test by this factor.
const FULL_CASES: u32 = 10;
/// The lines of a failed step that are printed again at the end of the run.
const REPEATED_LINES: usize = 25;
/// The number of tests that are printed because they took longest.
const LONGEST: usize = 20;
/// How often the full tests run all tests beside a load.
const LOADED_RUNS: u32 = 2;

/// What a run of the tests includes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// What is tested, and how long.
    pub extent: Extent,
    /// How long each fuzz target runs in a full run, in seconds. 0 leaves fuzzing out.
    pub fuzz_seconds: u32,
    /// Whether the lab's tests run.
    pub lab: bool,
    /// Whether only the skips that scripts/ci-skips.txt allows are accepted.
    pub ci: bool,
}

impl Options {
    /// The options that the environment asks for: `PAGEMARK_FUZZ_SECONDS` for each fuzz target,
    /// `PAGEMARK_LAB=0`, `CI=true`.
    ///
    /// # Errors
    /// If `PAGEMARK_FUZZ_SECONDS` is no number.
    pub fn from_environment(extent: Extent) -> Result<Options> {
        let fuzz_seconds = match std::env::var("PAGEMARK_FUZZ_SECONDS") {
            Ok(text) => text.parse().map_err(|_| {
                Error::unmet(format!("PAGEMARK_FUZZ_SECONDS={text}"), "set it to a number of seconds for each target")
            })?,
            Err(_) => 180,
        };
        let is = |name: &str, value: &str| std::env::var(name).is_ok_and(|found| found == value);
        Ok(Options { extent, fuzz_seconds, lab: !is("PAGEMARK_LAB", "0"), ci: is("CI", "true") })
    }
}

/// The tests that need no root and, once everything is built, no network: format, lints, unit
/// tests.
///
/// Returns whether they passed.
pub fn check() -> Result<bool> {
    let steps = Steps::new(&logs()?)?;
    format_and_lints(&steps);
    let mut tests = cargo(&["test", "--workspace", "--locked", "--no-fail-fast", "--lib", "--bins"]);
    // The tests of the documents are as fast as unit tests.
    tests.args(["--test", "architecture", "--test", "documents", "--", "--show-output"]);
    let mut summary = Summary::default();
    steps.run("unit tests", || match steps.output("unit tests", &mut tests) {
        Ok((status, log)) => {
            summary = Summary::parse(&log);
            summary.outcome(status == 0)
        }
        Err(error) => Outcome::Failed(error.to_string()),
    });
    Ok(finish(&steps, &summary, &[], false))
}

/// The record of flaky tests in this build directory, as a table.
///
/// # Errors
/// If it cannot be read.
pub fn flaky() -> Result<bool> {
    Ok(printed((flaky::table(&logs()?.with_file_name("flaky"))?, true)))
}

/// Prints the lines of a report, and returns whether the tests passed.
fn printed((report, is_good): (Vec<String>, bool)) -> bool {
    report.iter().for_each(|line| println!("{line}"));
    is_good
}

/// CRIU's own tests.
///
/// Returns whether they passed.
pub fn zdtm(selection: &zdtm::Selection) -> Result<bool> {
    build(&["--workspace", "--bin", "pagemark"])?;
    Ok(printed(zdtm::run(selection, &logs()?.with_file_name("zdtm-logs"))?))
}

/// CPython's own tests within surroundings; the modules that are meant if none are named.
///
/// Returns whether they passed.
pub fn cpython(within: Surroundings, modules: &[String]) -> Result<bool> {
    build(&within.target())?;
    Ok(printed(cpython::run(within, modules, &logs()?.with_file_name("cpython-logs"))?))
}

/// Redis's own tests within surroundings; the units that are meant if none are named.
///
/// Returns whether they passed.
pub fn redis(within: Surroundings, units: &[String]) -> Result<bool> {
    build(&within.target())?;
    Ok(printed(redis_suite::run(within, units, &logs()?.with_file_name("redis-logs"))?))
}

/// The tests of Go's own packages within surroundings; the packages that are meant if none are
/// named.
///
/// Returns whether they passed.
pub fn go(within: Surroundings, names: &[String]) -> Result<bool> {
    build(&within.target())?;
    Ok(printed(go_suite::run(within, names, &logs()?.with_file_name("go-logs"))?))
}

/// SQLite's own tests within surroundings; the files that are meant if none are named.
///
/// Returns whether they passed.
pub fn sqlite(within: Surroundings, files: &[String]) -> Result<bool> {
    build(&within.target())?;
    Ok(printed(sqlite_suite::run(within, files, &logs()?.with_file_name("sqlite-logs"))?))
}

/// The tests of system calls of the Linux Test Project in `root` within surroundings; the commands
/// that are meant if none are named.
///
/// Returns whether they passed.
pub fn ltp(within: Surroundings, root: &Path, commands: &[String]) -> Result<bool> {
    build(&within.target())?;
    Ok(printed(ltp::run(within, root, commands, &logs()?.with_file_name("ltp-logs"))?))
}

/// The tests of virtual machines with the QEMU of Debian's backports. `arguments` are libtest's.
///
/// Returns whether they passed.
pub fn newest_qemu(arguments: &[String]) -> Result<bool> {
    Ok(printed(newest_qemu::run(arguments, &logs()?.join("newest-qemu"))?))
}

/// All tests of an extent, after the set-up.
///
/// Returns whether they passed.
pub fn test(options: &Options) -> Result<bool> {
    let start = Instant::now();
    let steps = Steps::new(&logs()?)?;
    let _ids = LargeRange::set();
    let passed = run(&steps, options)?;
    if options.extent == Extent::Full {
        Record::of_now(start.elapsed().as_secs(), passed).save()?;
    }
    println!("{}\n{}", history::last_run(), steps.time_table());
    Ok(passed)
}

fn run(steps: &Steps, options: &Options) -> Result<bool> {
    let lab = match reason_without_lab(options) {
        Some(reason) => {
            steps.skip(&format!("skipped: lab: {reason}"));
            false
        }
        None => true,
    };
    let packages = || -> Result<()> {
        setup::set_up(setup::Part::Packages)?;
        if options.extent == Extent::Full {
            setup::set_up(setup::Part::Programs)?;
        }
        if lab { machine::set_up() } else { Ok(()) }
    };
    if !steps.run("packages", || packages().into()) {
        return Ok(false);
    }
    // The tests on the host wait more than they compute, so two other threads have work beside them.
    let (send_binaries, receive_binaries) = mpsc::channel();
    let (send_tools, tools) = mpsc::channel();
    let watch = &Watch::new();
    let (tested, programs) = std::thread::scope(|scope| {
        let of_the_lab = lab.then(|| scope.spawn(move || lab_steps(steps, options.extent, receive_binaries)));
        scope.spawn(move || {
            // Without tools, these steps are skipped or fail for themselves.
            let _ = tools.recv();
            separate_steps(steps, options, watch);
        });
        let tested = host_steps(steps, options, watch, send_tools, send_binaries);
        (tested, of_the_lab.and_then(|thread| thread.join().expect("the lab's thread returns its errors")))
    });
    for (name, things) in watch.left(left_over::GRACE) {
        let failure = host_tests::has_left(name.parse()?, &things);
        steps.run("what is left over", || Outcome::TestsFailed(vec![failure], things.join("\n")));
    }
    // Nothing else runs any more.
    let repeater = Repeater {
        host: tested.programs,
        lab: programs.as_ref(),
        extent: options.extent,
        log: steps.log("repeated"),
        stalls: false,
    };
    let judged = repeat_failures(steps, &repeater);
    Ok(finish(steps, &tested.summary, &judged, options.ci))
}

/// Repeats the tests that have failed, and keeps a record of those that are flaky.
fn repeat_failures(steps: &Steps, repeater: &Repeater) -> Vec<Judged> {
    let failures = steps.failures();
    let mut judged = Vec::new();
    if !failures.is_empty() {
        steps.run("repetitions", || {
            judged = repeat::judge(failures, |name| repeater.once(name));
            Outcome::Passed(judged.iter().map(Judged::line).collect::<Vec<_>>().join("\n"))
        });
    }
    let flaky: Vec<String> = judged.iter().filter(|judged| !judged.is_failed()).map(Judged::line).collect();
    if let Err(error) = flaky::keep(&steps.logs().with_file_name("flaky"), &flaky) {
        progress!("{error}");
    }
    judged
}

fn reason_without_lab(options: &Options) -> Option<&'static str> {
    if !options.lab {
        Some("PAGEMARK_LAB=0")
    } else if std::env::consts::ARCH != "x86_64" {
        Some("the lab needs an x86-64 host")
    } else if !command::is_root() {
        Some("the lab needs root")
    } else {
        None
    }
}

/// The steps on kernels that the host does not run. Those on kernels of distributions, which are
/// only fetched, wait for no build of a kernel. The test binaries arrive when they are built; if
/// none arrive, the build has failed.
///
/// Returns what these steps have run, if it could be built.
fn lab_steps(steps: &Steps, extent: Extent, binaries: mpsc::Receiver<TestBinaries>) -> Option<Programs> {
    let is_fetched = |part: &&Part| {
        let kernels = part.kernels(extent);
        !kernels.is_empty() && kernels.iter().all(|kernel| kernel.package().is_some())
    };
    let (fetched, built): (Vec<&Part>, Vec<&Part>) = Part::of(extent).iter().partition(is_fetched);
    let kernels = |parts: &[&Part]| -> Result<()> {
        parts.iter().flat_map(|part| part.kernels(extent)).try_for_each(|&kernel| kernel_build::image(kernel).map(drop))
    };
    let programs = OnceLock::new();
    std::thread::scope(|scope| {
        let (kernels, built) = (&kernels, &built);
        let building = scope.spawn(move || {
            let all = || kernels(built).and_then(|()| kernel_build::source().map(drop));
            steps.run("built kernels", || all().into())
        });
        let are_fetched = steps.run("fetched kernels", || kernels(&fetched).into());
        let Some(programs) = programs.get_or_init(|| lab_programs(steps, binaries)) else { return };
        if are_fetched {
            let fetched = &fetched;
            scope.spawn(move || fetched.iter().for_each(|part| lab_step(steps, extent, programs, **part)));
        }
        if building.join().expect("the build of kernels returns its errors") {
            built.iter().for_each(|part| lab_step(steps, extent, programs, **part));
        }
    });
    programs.into_inner().flatten()
}

/// What the steps of the lab run. None if it cannot be built, which is a failed step.
fn lab_programs(steps: &Steps, binaries: mpsc::Receiver<TestBinaries>) -> Option<Programs> {
    let failure = match binaries.recv() {
        Ok(binaries) => match Programs::build(Some(binaries)) {
            Ok(programs) => return Some(programs),
            Err(error) => error.to_string(),
        },
        Err(mpsc::RecvError) => "the test binaries could not be built".to_owned(),
    };
    steps.run("lab", || Outcome::Failed(failure));
    None
}

/// Tests of a part that depend on the same.
struct SameContent {
    names: Vec<String>,
    /// None if it is not known, which is not the same as any.
    content: Option<Content>,
}

fn lab_step(steps: &Steps, extent: Extent, programs: &Programs, part: Part) {
    let name = format!("lab {}", part.name());
    let passed = |tests: &SameContent| tests.content.as_ref().and_then(|content| content.passed(&name));
    let all = contents_of(programs, part, extent).unwrap_or_default();
    let number = all.len();
    let (due, before): (Vec<SameContent>, Vec<SameContent>) =
        all.into_iter().partition(|tests| passed(tests).is_none());
    for tests in &before {
        let which = if due.is_empty() { name.clone() } else { format!("{name}: {}", tests.names.join(", ")) };
        let date = passed(tests).unwrap_or_default();
        steps.note(&format!("not run again: {which} has passed on the same content, on {date}"));
    }
    if number > 0 && due.is_empty() {
        return;
    }
    // None that is named are all.
    let named = if before.is_empty() { Vec::new() } else { due.iter().flat_map(|tests| tests.names.clone()).collect() };
    let log = steps.log(&name);
    let mut results = Vec::new();
    steps.run(&name, || match programs.run(part, extent, &named, NICENESS, &log) {
        Ok(found) => {
            results = found;
            let lines: Vec<String> = results.iter().map(|result| result.line()).collect();
            let text = lines.join("\n");
            if results.iter().all(|result| result.failure.is_none()) {
                return Outcome::Passed(text);
            }
            let log = std::fs::read(&log).unwrap_or_default();
            let text = format!("{}\n{text}", command::last_lines(&log, 150));
            Outcome::TestsFailed(batch::failures(part, &results), text)
        }
        Err(error) => {
            let name = TestName { place: Place::Lab(part), tests: Vec::new() };
            let failure = Failure { name, message: first_line(&error.to_string()), is_finding: false };
            Outcome::TestsFailed(vec![failure], error.to_string())
        }
    });
    for content in due.iter().filter(|tests| have_passed(tests, &results)).filter_map(|tests| tests.content.as_ref()) {
        if let Err(error) = content.keep(&name) {
            progress!("{error}");
        }
    }
}

/// Whether the results have each of the tests, and no failure of one of them or of a whole machine.
fn have_passed(tests: &SameContent, results: &[TestResult]) -> bool {
    let is_of_them = |result: &TestResult| result.test.as_ref().is_none_or(|test| tests.names.contains(test));
    let has_run = |name: &String| results.iter().any(|result| result.test.as_ref() == Some(name));
    let passed = results.iter().filter(|result| is_of_them(result)).all(|result| result.failure.is_none());
    !results.is_empty() && tests.names.iter().all(has_run) && passed
}

/// The tests of a part, with what they depend on.
fn contents_of(programs: &Programs, part: Part, extent: Extent) -> Result<Vec<SameContent>> {
    let mut words = vec![extent.name().to_owned()];
    for &kernel in part.kernels(extent) {
        words.push(kernel_build::image(kernel)?.path().display().to_string());
    }
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let subjects = programs.subjects(part, extent)?;
    let with_content = |(subject, names): (_, Vec<String>)| {
        // What these run is in the content, too.
        let words = words.iter().copied().chain(names.iter().map(String::as_str)).collect::<Vec<_>>();
        Ok(SameContent { content: Content::of_tests(&subject, &words)?, names })
    };
    subjects.into_iter().map(with_content).collect()
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_owned()
}

/// What the tests of the workspace have shown, and the programs that have them.
#[derive(Default)]
struct Tested {
    summary: Summary,
    programs: Vec<TestProgram>,
}

/// The steps that share the build directory of the workspace.
fn host_steps(
    steps: &Steps,
    options: &Options,
    watch: &Watch,
    send_tools: mpsc::Sender<()>,
    send_binaries: mpsc::Sender<TestBinaries>,
) -> Tested {
    let mut tools = vec![setup::Part::Criu, setup::Part::Rust, setup::Part::C, setup::Part::Book, setup::Part::Python];
    if options.extent == Extent::Full {
        tools.extend([setup::Part::Fuzz, setup::Part::Miri, setup::Part::Musl, setup::Part::Semver]);
    }
    steps.run("tools", || tools.into_iter().try_for_each(setup::set_up).into());
    drop(send_tools);
    let mut binaries = None;
    steps.run("build", || match TestBinaries::build() {
        Ok(built) => {
            binaries = Some(built);
            Outcome::Passed(String::new())
        }
        Err(error) => Outcome::Failed(error.to_string()),
    });
    // The receiver does not exist without the lab, or without its kernels.
    binaries.iter().for_each(|built| drop(send_binaries.send(built.clone())));
    drop(send_binaries);
    binaries.map_or_else(Tested::default, |binaries| host_tests(steps, options.extent, watch, &binaries))
}

/// All tests of the workspace, as a step; the full tests run them beside a load, too.
fn host_tests(steps: &Steps, extent: Extent, watch: &Watch, binaries: &TestBinaries) -> Tested {
    const NAME: &str = "tests";
    let skip_log = steps.log("skips-of-tests");
    let (skip_log_name, factor) = (skip_log.to_string_lossy(), FULL_CASES.to_string());
    let mut arguments = vec!["--show-output"];
    let mut environment = vec![("PAGEMARK_SKIP_LOG", &*skip_log_name)];
    if extent == Extent::Full {
        arguments.push("--include-ignored");
        environment.push(("PAGEMARK_CASES_FACTOR", &factor));
    }
    let programs = TestProgram::all(binaries, &environment);
    let limit = Duration::from_secs(extent.hangs_s());
    let mut summary = Summary::default();
    let run = |name: &str, stalls: bool, summary: &mut Summary| {
        let log = steps.log(name);
        match host_tests::run_programs(&programs, Manner { arguments: &arguments, limit, stalls }, watch, &log) {
            Ok(results) => {
                *summary = Summary::parse(&String::from_utf8_lossy(&std::fs::read(&log).unwrap_or_default()));
                let longest = format!("{}\n{}", longest(results.durations), longest_programs(results.programs));
                match summary.outcome(results.failures.is_empty()) {
                    Outcome::Passed(text) => Outcome::Passed(format!("{text}\n{longest}")),
                    Outcome::Failed(text) => Outcome::TestsFailed(results.failures, format!("{text}\n{longest}")),
                    other => other,
                }
            }
            Err(error) => Outcome::Failed(error.to_string()),
        }
    };
    steps.run(NAME, || run(NAME, false, &mut summary));
    if extent == Extent::Full {
        for number in 1..=LOADED_RUNS {
            let name = format!("tests beside a load, {number}");
            steps.run(&name, || match Load::start() {
                Ok(_load) => run(&name, true, &mut Summary::default()),
                Err(error) => Outcome::Failed(error.to_string()),
            });
        }
    }
    let skips = std::fs::read_to_string(&skip_log).unwrap_or_default();
    summary.skips.extend(skips.lines().map(str::to_owned));
    Tested { summary, programs }
}

/// The lines that name the tests that took longest.
fn longest(mut durations: Vec<(TestName, Duration)>) -> String {
    durations.sort_by_key(|(_, took)| std::cmp::Reverse(*took));
    let line = |(name, took): &(TestName, Duration)| format!("{:>5} s  {name}", took.as_secs());
    let lines: Vec<String> = durations.iter().take(LONGEST).map(line).collect();
    format!("the {LONGEST} tests that took longest:\n{}", lines.join("\n"))
}

/// The lines that name the programs that took longest, and what of that processors were busy.
fn longest_programs(mut programs: Vec<ProgramTime>) -> String {
    programs.sort_by_key(|program| std::cmp::Reverse(program.took));
    let line = |program: &ProgramTime| {
        let [took, busy] = [program.took, program.processor_time].map(|time| time.as_secs());
        format!("{took:>5} s, {busy:>4} s of processors  {}", program.name)
    };
    let lines: Vec<String> = programs.iter().take(LONGEST).map(line).collect();
    let sum = |time: fn(&ProgramTime) -> Duration| programs.iter().map(time).sum::<Duration>().as_secs();
    let all = format!("{} s, {} s of processors", sum(|program| program.took), sum(|program| program.processor_time));
    format!("all {} programs: {all}; those that took longest:\n{}", programs.len(), lines.join("\n"))
}

/// The steps beside those of the host. Those up to Python build in the directory of the workspace,
/// with the priority of those that wait for it; models and Python run their tests with a lower one.
fn separate_steps(steps: &Steps, options: &Options, watch: &Watch) {
    let last = |log: &str| command::last_lines(log.as_bytes(), 1);
    steps.program("models", &mut script("models.sh"), |log| lines_with(log, &["test result:"]));
    format_and_lints(steps);
    let mut documentation = cargo(&["doc", "--workspace", "--no-deps", "--locked", "--quiet"]);
    steps.program("documentation", documentation.env("RUSTDOCFLAGS", "-Dwarnings"), str::to_owned);
    steps.program("licences", &mut script("licences.py"), last);
    steps.program("book", &mut script("book.py"), last);
    python(steps, options.extent, watch);
    // In a build directory of its own. The tool takes ten minutes to build, so only the full tests install it.
    steps.program("semver", &mut low_priority_script("semver.sh"), last);
    if options.extent == Extent::Full {
        steps.program("pythons", &mut low_priority_script("pythons.sh"), last);
        let selection = zdtm::Selection { flavors: Flavor::ALL.to_vec(), ..zdtm::Selection::default() };
        steps.run("zdtm", || reported(zdtm::run(&selection, &steps.log("zdtm"))));
        let all = ["--include-ignored".to_owned()];
        steps.run("newest QEMU", || reported(newest_qemu::run(&all, &steps.log("newest QEMU"))));
        if options.fuzz_seconds == 0 {
            steps.skip("skipped: fuzz: PAGEMARK_FUZZ_SECONDS=0");
        } else {
            let mut fuzz = low_priority_script("fuzz.sh");
            fuzz.arg(options.fuzz_seconds.to_string());
            steps.program("fuzz", &mut fuzz, |log| lines_with(log, &["stat::number_of_executed_units", "Done"]));
        }
        steps.program("miri", &mut low_priority_script("miri.sh"), |log| lines_with(log, &["test result:"]));
        let mut sanitizers = low_priority_script("sanitize.sh");
        steps.program("sanitizers", sanitizers.args(["address", "thread"]), |log| lines_with(log, &["test result:"]));
    }
}

/// The tests of the Python package, which leave as little as those of the workspace.
fn python(steps: &Steps, extent: Extent, watch: &Watch) {
    let run = || -> Result<Outcome> {
        watch.begin(python_tests::NAME);
        let run = python_tests::run(&[], Duration::from_secs(extent.hangs_s()));
        watch.end(python_tests::NAME);
        let (run, log) = (run?, steps.log(python_tests::NAME));
        std::fs::write(&log, &run.output).map_err(Error::file("write", &log))?;
        let last = |log: &str| command::last_lines(log.as_bytes(), 1);
        Ok(steps.outcome(run.status, &run.text(), last, python_tests::failures(&run)))
    };
    steps.run(python_tests::NAME, || run().unwrap_or_else(|error| Outcome::Failed(error.to_string())));
}

/// The outcome of tests that return the lines of a report, and whether they passed.
fn reported(result: Result<(Vec<String>, bool)>) -> Outcome {
    match result {
        Ok((report, true)) => Outcome::Passed(report.join("\n")),
        Ok((report, false)) => Outcome::Failed(report.join("\n")),
        Err(error) => Outcome::Failed(error.to_string()),
    }
}

fn format_and_lints(steps: &Steps) {
    steps.program("format", &mut cargo(&["fmt", "--all", "--check"]), str::to_owned);
    let clippy = ["clippy", "--workspace", "--all-targets", "--locked", "--quiet", "--", "-D", "warnings"];
    steps.program("clippy", &mut cargo(&clippy), str::to_owned);
    // Within the workspace, the crate below is always built with the features that other members want.
    let c = ["clippy", "-p", "pagemark-c", "--locked", "--quiet", "--", "-D", "warnings"];
    steps.program("clippy of the C library alone", &mut cargo(&c), str::to_owned);
    // A workspace of its own, because it is built with another compiler. It shares dependencies with the lints above.
    let fuzz = ["clippy", "--manifest-path", "fuzz/Cargo.toml", "--locked", "--quiet", "--", "-D", "warnings"];
    let mut fuzz = cargo(&fuzz);
    // Lints link nothing. Any file that stays the same serves as the fuzzer's library, a minute of C++.
    fuzz.env("CUSTOM_LIBFUZZER_PATH", source_root().join("fuzz/Cargo.toml"));
    if let Some(build) = steps.logs().parent() {
        fuzz.env("CARGO_TARGET_DIR", build);
    }
    steps.program("clippy of fuzz targets", &mut fuzz, str::to_owned);
}

/// Prints the summary of a run, and returns whether it passed. The last lines are those that a
/// reader needs first: a line for each failure.
fn finish(steps: &Steps, summary: &Summary, judged: &[Judged], ci: bool) -> bool {
    let skips = skips::sorted([steps.skips(), summary.skips.clone()].concat());
    let mut problems: Vec<String> = steps.failed().iter().map(|name| format!("failed: {name}")).collect();
    if summary.passed == 0 {
        problems.push("failed: no test ran".to_owned());
    }
    // Once more at the end: whoever sees only the last lines of a long run finds the reasons there.
    for name in steps.failed() {
        let log = std::fs::read(steps.log(&name)).unwrap_or_default();
        println!("\n-- the end of the log of {name}\n{}", command::last_lines(&log, REPEATED_LINES));
    }
    if !summary.reasons.is_empty() {
        println!("\n-- why tests have failed\n{}", summary.reasons.join("\n"));
    }
    println!("\n== summary");
    skips.iter().for_each(|skip| println!("{skip}"));
    if ci {
        let list = source_root().join("scripts/ci-skips.txt");
        let allowed = std::fs::read_to_string(&list)
            .map_err(Error::file("read", &list))
            .and_then(|list| AllowedSkips::parse(&list));
        match allowed {
            Ok(allowed) => problems
                .extend(allowed.unwanted(&skips).iter().map(|skip| format!("failed: CI does not allow this: {skip}"))),
            Err(error) => problems.push(format!("failed: {error}")),
        }
    }
    let flaky = judged.iter().filter(|judged| !judged.is_failed());
    let failed = judged.iter().filter(|judged| judged.is_failed()).map(Judged::line);
    problems.extend(failed);
    steps.notes().iter().for_each(|note| println!("{note}"));
    println!("{} tests passed, {} failed, {} skipped", summary.passed, summary.failed, skips.len());
    flaky.for_each(|judged| println!("{}", judged.line()));
    problems.iter().for_each(|problem| println!("{problem}"));
    if problems.is_empty() {
        println!("all good");
    }
    problems.is_empty()
}

fn lines_with(log: &str, starts: &[&str]) -> String {
    let lines = log.lines().filter(|line| starts.iter().any(|start| line.starts_with(start)));
    lines.collect::<Vec<_>>().join("\n")
}

fn cargo(arguments: &[&str]) -> Command {
    let mut cargo = Command::new("cargo");
    cargo.args(arguments).current_dir(source_root());
    cargo
}

/// Builds a target of the workspace as it is, beside this program.
fn build(target: &[&str]) -> Result<()> {
    let mut build = cargo(&["build", "--quiet", "--locked"]);
    command::run(build.args(target), &format!("build {}", target.join(" ")), "see above")
}

fn script(name: &str) -> Command {
    let mut script = Command::new(source_root().join("scripts").join(name));
    script.current_dir(source_root());
    script
}

fn low_priority_script(name: &str) -> Command {
    let path = source_root().join("scripts").join(name);
    let mut script = command::at_low_priority(&path.to_string_lossy(), NICENESS);
    script.current_dir(source_root());
    script
}

/// Where the output of steps is kept: in the build directory, from which this program runs.
fn logs() -> Result<PathBuf> {
    let program = std::env::current_exe().map_err(Error::file("find", "this program".as_ref()))?;
    let build = program.parent().and_then(|debug| debug.parent()).unwrap_or(source_root());
    let logs = build.join("test-logs");
    cache::create(&logs)?;
    progress!("the output of each step is kept in {}", logs.display());
    Ok(logs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_binary_can_be_run_as_a_test() {
        // `cargo test --bins` also runs those whose manifests say `test = false`: without their harness.
        for package in std::fs::read_dir(source_root().join("crates")).unwrap() {
            let manifest = package.unwrap().path().join("Cargo.toml");
            let text = std::fs::read_to_string(&manifest).unwrap_or_default();
            for binary in text.split("[[bin]]").skip(1) {
                let section = binary.split("\n[").next().unwrap_or_default();
                assert!(!section.contains("test = false"), "{} has a binary without a harness", manifest.display());
            }
        }
    }

    #[test]
    fn tests_have_passed_if_each_of_them_has_and_their_machine() {
        let tests = SameContent { names: vec!["a".to_owned(), "b".to_owned()], content: None };
        let result = |test: Option<&str>, failure: Option<&str>| TestResult {
            test: test.map(str::to_owned),
            ..TestResult::new("ldt: a test", failure.map(str::to_owned), None)
        };
        let [a, b, machine] = [result(Some("a"), None), result(Some("b"), None), result(None, None)];
        let of = |results: &[&TestResult]| have_passed(&tests, &results.iter().copied().cloned().collect::<Vec<_>>());
        assert!(of(&[&a, &b, &machine]));
        assert!(of(&[&a, &b, &machine, &result(Some("c"), Some("failed"))]), "it is another's failure");
        assert!(!of(&[&a, &machine]) && !of(&[]), "a test that has not run has not passed");
        assert!(!of(&[&a, &b, &result(Some("b"), Some("failed"))]));
        assert!(!of(&[&a, &b, &result(None, Some("the kernel has warned"))]));
    }

    #[test]
    fn lines_of_a_log() {
        assert_eq!(
            lines_with("test result: ok\nother\nDone 5 runs\n", &["test result:", "Done"]),
            "test result: ok\nDone 5 runs"
        );
    }

    #[test]
    fn the_lab_is_left_out_on_request() {
        let options = Options { extent: Extent::Quick, fuzz_seconds: 0, lab: false, ci: false };
        assert_eq!(reason_without_lab(&options), Some("PAGEMARK_LAB=0"));
    }
}
