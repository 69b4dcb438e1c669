//! How the suite runs test binaries: what fails, hangs, dies, or leaves something is named.

use std::collections::BTreeSet;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::{self, SigHandler, Signal};
use nix::unistd::Pid;
use pagemark_lab::failure::Failure;
use pagemark_lab::host_tests::{FIRST, Manner, Results, TestProgram, run_alone, run_programs};
use pagemark_lab::left_over::Watch;
use pagemark_lab::libtest::Summary;
use pagemark_lab::repeat::judge;

const LONG: Duration = Duration::from_secs(60);

/// A program that acts as one with tests: those that it lists, and what it does.
fn shell(name: &str, tests: &[&str], script: &str) -> TestProgram {
    let list: String = tests.iter().map(|test| format!("echo '{test}: test';")).collect();
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("case $1 in --list) {list} exit;; esac\n{script}"), "sh"]);
    TestProgram::new(name, shell)
}

/// Waits until something is so, for ten minutes at most.
fn wait_until(event: &str, is_so: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(600);
    while !is_so() {
        assert!(Instant::now() < end, "waited too long: {event}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// What libtest prints of a failed test.
fn failed(test: &str, message: &str) -> String {
    format!(
        "echo 'test {test} ... FAILED\n\nfailures:\n\n---- {test} stdout ----\nthread panicked at a.rs:1:1:\n{message}\n\
         \nfailures:\n    {test}\n\ntest result: FAILED. 0 passed; 1 failed; 0 ignored'; exit 101"
    )
}

fn run(programs: &[TestProgram], limit: Duration, log: &Path) -> Results {
    run_programs(programs, Manner { arguments: &[], limit, stalls: false }, &Watch::new(), log).unwrap()
}

fn run_one(program: TestProgram, limit: Duration) -> Vec<Failure> {
    let directory = tempfile::tempdir().unwrap();
    run(&[program], limit, &directory.path().join("log")).failures
}

#[test]
fn each_output_is_whole_and_failures_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log");
    let good = "echo 'test a ... ok\ntest result: ok. 2 passed; 0 failed; 0 ignored'; echo end >&2";
    let mut programs: Vec<_> = (0..20).map(|index| shell(&format!("number {index}"), &["a"], good)).collect();
    programs.push(shell("a crash", &["b"], "echo begun; kill -SEGV $$"));
    programs.push(shell("a failure", &["c"], &failed("c", "too long")));
    let results = run(&programs, LONG, &log);
    let lines = |failure: &Failure| format!("{}: {}, {}", failure.name, failure.message, failure.is_finding);
    let lines: BTreeSet<String> = results.failures.iter().map(lines).collect();
    let expected = ["a crash: b: ended with status 139: begun, true", "a failure: c: too long, false"];
    assert_eq!(lines, expected.map(str::to_owned).into());
    let text = std::fs::read_to_string(&log).unwrap();
    for index in 0..20 {
        let part =
            format!("Running number {index}\ntest a ... ok\ntest result: ok. 2 passed; 0 failed; 0 ignored\nend\n");
        assert!(text.contains(&part), "{text}");
    }
    assert_eq!(Summary::parse(&text).passed, 40);
    assert!(results.durations.iter().filter(|(name, _)| name.to_string() == "number 7: a").count() == 1);
}

#[test]
fn a_finding_of_an_oracle_fails_the_run_at_once() {
    let found = run_one(shell("one", &["a"], &failed("a", "\nfinding: page 3 differs")), LONG);
    assert_eq!((found[0].message.as_str(), found[0].is_finding), ("page 3 differs", true));
    let judged = judge(found, |name| panic!("{name} was repeated"));
    assert!(judged[0].is_failed());
}

#[test]
fn a_program_that_hangs_is_killed_and_what_has_not_ended_is_named() {
    let script = "echo 'test a ... ok'; echo begun; sleep 600";
    let failed = run_one(shell("one", &["a", "b", "c"], script), Duration::from_secs(1));
    assert_eq!(failed[0].name.to_string(), "one: b + c");
    assert_eq!((failed[0].message.as_str(), failed[0].is_finding), ("did not end: begun", false));
}

#[test]
fn what_a_program_leaves_is_found_and_removed() {
    // A session of its own does not hide a process.
    let failed = run_one(shell("one", &["a"], "setsid sleep 612 >/dev/null 2>&1 & echo begun"), LONG);
    assert_eq!(failed[0].name.to_string(), "one");
    let message = &failed[0].message;
    assert!(message.starts_with("left over: process ") && message.ends_with(": sleep 612"), "{message}");
    wait_until("no sleep of 612 s is left", || !runs("sleep 612"));
}

#[test]
fn a_file_that_is_left_fails_the_tests_that_ran_when_it_was_made() {
    // Tests are started in the order of their names, as many at a time as there are processors.
    let threads = std::thread::available_parallelism().unwrap().get();
    let names: Vec<String> = (0..=threads).map(|number| format!("test{number:04}")).collect();
    let (last, first) = names.split_last().unwrap();
    let ended: String = first.iter().map(|name| format!("echo 'test {name} ... ok';")).collect();
    let script = format!("{ended} sleep 0.5; echo >$TMPDIR/file; sleep 0.2; echo 'test {last} ... ok'");
    let failed = run_one(shell("one", &[], &script), LONG);
    assert_eq!(failed.len(), 1, "{failed:?}");
    assert_eq!(failed[0].name.to_string(), format!("one: {last}"));
    let path = failed[0].message.strip_prefix("left over: file ").unwrap();
    assert!(path.ends_with("/file") && !Path::new(path).exists(), "{path}");
}

#[test]
fn a_test_that_leaves_a_file_alone_is_named() {
    let script = "echo >$TMPDIR/file; echo \"test $1 ... ok\"; echo 'test result: ok. 1 passed; 0 failed'";
    let directory = tempfile::tempdir().unwrap();
    let program = shell("one", &["a", "b"], script);
    let failed = run_alone(&program, &[], LONG, false, &directory.path().join("log")).unwrap().unwrap();
    assert_eq!(failed.name.to_string(), "one: a");
    assert!(failed.message.starts_with("left over: file "), "{failed:?}");
}

/// Whether a program with these words runs.
fn runs(words: &str) -> bool {
    let found = Command::new("pgrep").args(["-f", &format!("^{words}$")]).output().unwrap();
    !found.stdout.is_empty()
}

/// Starts a program that is contained and starts another one, in a session of its own, that sleeps
/// for so many seconds.
fn contained(seconds: u32, directory: &Path) -> Command {
    let mut suite = Command::new(env!("CARGO_BIN_EXE_suite"));
    suite.args(["contained", "600"]).arg(directory.join("left"));
    suite.args(["--", "sh", "-c", &format!("setsid sleep {seconds} >/dev/null 2>&1 & exec sleep {seconds}")]);
    suite
}

#[test]
fn a_signal_ends_all_that_a_contained_program_has_started() {
    let directory = tempfile::tempdir().unwrap();
    for (signal, seconds) in [(Signal::SIGTERM, 613), (Signal::SIGINT, 614), (Signal::SIGHUP, 615)] {
        let mut suite = contained(seconds, directory.path());
        // A shell that has started this process in the background has it ignore SIGINT.
        // SAFETY: between fork and exec, one call that is safe there.
        unsafe { suite.pre_exec(move || signal::signal(signal, SigHandler::SigDfl).map(drop).map_err(Into::into)) };
        let mut suite = suite.spawn().unwrap();
        wait_until("both sleep", || runs(&format!("sleep {seconds}")));
        signal::kill(Pid::from_raw(suite.id().try_into().unwrap()), signal).unwrap();
        let status = suite.wait().unwrap();
        assert!(!status.success(), "{signal}: {status}");
        assert!(!runs(&format!("sleep {seconds}")), "{signal} has left a program");
    }
}

#[test]
fn a_contained_program_ends_with_what_has_started_it() {
    let directory = tempfile::tempdir().unwrap();
    let suite = contained(616, directory.path());
    let mut shell = Command::new("sh");
    shell.args(["-c", "\"$@\"; exit 1", "sh"]).arg(suite.get_program()).args(suite.get_args());
    let mut shell = shell.spawn().unwrap();
    wait_until("both sleep", || runs("sleep 616"));
    shell.kill().unwrap();
    shell.wait().unwrap();
    wait_until("no program is left", || !runs("sleep 616"));
}

#[test]
fn the_programs_that_begin_first_exist() {
    let root = pagemark_lab::source_root();
    for name in FIRST {
        let (package, target) = name.split_once(' ').unwrap();
        let package =
            ["crates", "."].map(|parent| root.join(parent).join(package)).into_iter().find(|path| path.exists());
        let package = package.unwrap_or_else(|| panic!("there is no crate of {name}"));
        let is_library = package.ends_with(target.replace('_', "-"));
        let is_there = is_library || package.join("tests").join(target).with_extension("rs").exists();
        assert!(is_there || package.ends_with("papers"), "there is no {name}");
    }
}

#[test]
fn a_test_is_repeated_alone() {
    let script = "echo \"test $1 ... ok\"; echo 'test result: ok. 1 passed; 0 failed'";
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log");
    let alone = |program: &TestProgram, tests: &[String], stalls| run_alone(program, tests, LONG, stalls, &log);
    let program = shell("one", &["a", "b"], script);
    assert_eq!(alone(&program, &["a".to_owned()], true).unwrap(), None);
    assert_eq!(alone(&program, &[], false).unwrap(), None);
    let nothing = shell("one", &[], "echo 'test result: ok. 0 passed; 0 failed'");
    assert!(alone(&nothing, &["a".to_owned()], false).is_err());
    assert!(!log.exists());
    let bad = shell("one", &["a"], &failed("a", "too long"));
    for times in 1..3 {
        assert_eq!(alone(&bad, &["a".to_owned()], false).unwrap().unwrap().message, "too long");
        let output = std::fs::read_to_string(&log).unwrap();
        assert_eq!(output.matches("test a ... FAILED").count(), times, "{output}");
    }
}

#[test]
fn a_program_that_does_not_exist_is_a_failure() {
    let failed = run_one(TestProgram::new("none", Command::new("/nowhere/program")), LONG);
    assert!(failed[0].message.contains("/nowhere/program"), "{failed:?}");
}
