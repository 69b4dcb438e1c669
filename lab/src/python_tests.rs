//! The tests of the Python package.

use std::process::Command;
use std::time::Duration;

use crate::contained_run::{ContainedRun, LeftFile};
use crate::failure::{Failure, Place, TestName, finding};
use crate::{Result, host_tests, libtest, source_root, steps};

/// The name of the tests in reports.
pub const NAME: &str = "python";
/// How names begin that may be left in the temporary directory, and why.
const LEFT_FILES: [(&str, &str); 1] = [("pytest-of-", "pytest keeps the directories of its last runs for its user")];
/// The words by which pytest says how a test has ended.
const ENDS: [&str; 4] = [" PASSED", " FAILED", " SKIPPED", " ERROR"];

/// Builds the package and runs the tests that are named, or all if none are, with all that they
/// start contained.
///
/// # Errors
/// If the script cannot be started.
pub fn run(tests: &[String], limit: Duration) -> Result<ContainedRun> {
    let mut script = Command::new(source_root().join("scripts/python.sh"));
    script.args(tests).current_dir(source_root());
    ContainedRun::of(&script, limit, false, ended_test)
}

/// The tests that have failed or left something.
pub fn failures(run: &ContainedRun) -> Vec<Failure> {
    let mut failures = match run.status {
        0 | steps::SKIPPED => Vec::new(),
        _ => failed(&run.text()),
    };
    if !run.left.is_empty() {
        failures.push(host_tests::has_left(TestName { place: Place::Python, tests: Vec::new() }, &run.left));
    }
    failures.extend(host_tests::left_files(&Place::Python, &unwanted(&run.files), &times(&run.ended_tests)));
    failures
}

/// The files that may not be left.
fn unwanted(files: &[LeftFile]) -> Vec<LeftFile> {
    let may_be_left = |file: &&LeftFile| {
        let name = file.path.file_name().unwrap_or_default().to_string_lossy();
        LEFT_FILES.iter().any(|(begin, _)| name.starts_with(begin))
    };
    files.iter().filter(|file| !may_be_left(file)).cloned().collect()
}

/// When each test ran: they run one after another.
fn times(ended: &[(String, Duration)]) -> libtest::Times {
    let begins = std::iter::once(Duration::ZERO).chain(ended.iter().map(|(_, end)| *end));
    ended.iter().zip(begins).map(|((name, end), begin)| (name.clone(), (begin, *end))).collect()
}

/// The test of which a line of pytest's says how it ended: `tests/test_a.py::test_b[1] PASSED`.
fn ended_test(line: &str) -> Option<&str> {
    let end = ENDS.iter().filter_map(|word| line.find(word)).min()?;
    Some(&line[..end]).filter(|name| name.contains("::"))
}

/// The tests that have failed in the output of pytest, which has failed; all of them where it names
/// none.
fn failed(text: &str) -> Vec<Failure> {
    let is_finding = finding(text).is_some() || text.contains("Fatal Python error: Segmentation fault");
    let failed = |line: &str| {
        let line = line.strip_prefix("FAILED ").or(line.strip_prefix("ERROR "))?;
        let (test, message) = line.split_once(" - ").unwrap_or((line, ""));
        test.contains("::").then(|| (vec![test.to_owned()], message.to_owned()))
    };
    let mut failed: Vec<_> = text.lines().filter_map(failed).collect();
    if failed.is_empty() {
        failed.push((Vec::new(), text.lines().last().unwrap_or_default().to_owned()));
    }
    let failure = |(tests, message)| Failure { name: TestName { place: Place::Python, tests }, message, is_finding };
    failed.into_iter().map(failure).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_tests_of_python() {
        let text =
            "....\nFAILED tests/test_a.py::test_b[1] - AssertionError: one - two\nERROR tests/test_a.py::test_c\n";
        let found: Vec<_> =
            failed(text).into_iter().map(|failure| (failure.name.to_string(), failure.message)).collect();
        let expected = [
            ("python: tests/test_a.py::test_b[1]", "AssertionError: one - two"),
            ("python: tests/test_a.py::test_c", ""),
        ];
        assert_eq!(found, expected.map(|(name, message)| (name.to_owned(), message.to_owned())));
        assert_eq!(failed("no wheel\n")[0].name.to_string(), "python");
        assert!(failed(&format!("Falsifying example: a\n{text}"))[0].is_finding);
    }
    #[test]
    fn the_test_that_has_left_a_file_fails() {
        let seconds = Duration::from_secs;
        let ended =
            ["tests/test_a.py::test_b[x y] PASSED [  1%]", "tests/test_a.py::test_a SKIPPED (why) [ 2%]", "..s"];
        let ended: Vec<_> = ended.iter().filter_map(|line| ended_test(line)).map(str::to_owned).collect();
        assert_eq!(ended, ["tests/test_a.py::test_b[x y]", "tests/test_a.py::test_a"]);
        let ended_tests = ended.into_iter().zip([seconds(10), seconds(20)]).collect();
        let file = |name: &str, made| LeftFile { path: name.into(), made: Some(seconds(made)) };
        let mut run = ContainedRun {
            status: 0,
            output: Vec::new(),
            left: Vec::new(),
            files: vec![file("/tmp/pytest-of-root", 5), file("/tmp/a", 15)],
            processor_time: Duration::ZERO,
            ended_tests,
        };
        let found: Vec<_> = failures(&run).into_iter().map(|found| (found.name.to_string(), found.message)).collect();
        let expected = ("python: tests/test_a.py::test_a".to_owned(), "left over: file /tmp/a".to_owned());
        assert_eq!(found, [expected]);
        (run.left, run.files) = (vec!["process 7: sleep".to_owned()], Vec::new());
        assert_eq!(failures(&run)[0].name.to_string(), "python");
        (run.left, run.status) = (Vec::new(), steps::SKIPPED);
        assert!(failures(&run).is_empty());
    }
}
