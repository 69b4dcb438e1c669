//! A set of tests in one machine of the lab.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::failure::{Failure, Place, TestName, finding, is_undefined_behaviour};
use crate::libtest;
use crate::machine::{Machine, Outcome};
use crate::skips::AllowedSkips;
use crate::test_plan::Part;
use crate::{Error, Result, cache, source_root};

/// The exit status of an oracle that has found a fault; others are of what keeps it from working.
const FOUND: &str = "1";
const UNFINISHED: &str = "not run to its end";

/// What a test in a machine depends on, beside the kernel and the sources of the lab.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject {
    /// Nothing else.
    Kernel,
    /// A test binary, which starts no program of the workspace but itself and those of
    /// `pagemark-testing`.
    Binary(PathBuf),
    /// All sources.
    Sources,
}

/// A test in a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestTest {
    /// Its name, without `|`.
    pub name: String,
    /// A command for a shell.
    pub command: String,
    /// Whether it is an oracle, whose exit status 1 is a finding.
    pub is_oracle: bool,
    /// What it depends on.
    pub subject: Subject,
}

impl GuestTest {
    /// A test, which depends on all sources.
    pub fn new(name: impl Into<String>, command: impl Into<String>) -> GuestTest {
        GuestTest { name: name.into(), command: command.into(), is_oracle: false, subject: Subject::Sources }
    }

    /// The same test, which depends on this.
    pub fn of(self, subject: Subject) -> GuestTest {
        GuestTest { subject, ..self }
    }

    /// A test that is an oracle.
    pub fn oracle(name: impl Into<String>, command: impl Into<String>) -> GuestTest {
        GuestTest { is_oracle: true, ..GuestTest::new(name, command) }
    }

    /// The line of the file that lab/guest/batch.sh reads.
    fn line(&self, limit_s: u64) -> String {
        format!("{}|{limit_s}|{}\n", self.name, self.command)
    }
}

/// The result of a test, or of a part of the tests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TestResult {
    /// The kernel and the test.
    pub name: String,
    /// The name of the test without its kernel. None for what stands for a whole machine.
    pub test: Option<String>,
    /// Why it failed, or `None` if it passed.
    pub failure: Option<String>,
    /// Whether the failure is a fault however often the test passes.
    pub is_finding: bool,
    /// How long it took, if it ended.
    pub seconds: Option<u64>,
}

impl TestResult {
    /// The result of what is no test of a machine alone.
    pub fn new(name: impl Into<String>, failure: Option<String>, seconds: Option<u64>) -> TestResult {
        TestResult { name: name.into(), test: None, failure, is_finding: false, seconds }
    }

    /// A line of the summary.
    pub fn line(&self) -> String {
        let result = self.failure.as_ref().map_or("passed".to_owned(), |reason| format!("FAILED ({reason})"));
        let seconds = self.seconds.map_or("-".to_owned(), |seconds| seconds.to_string());
        format!("{result:<20} {seconds:>4} s  {}", self.name)
    }
}

/// Runs the tests one after the other in a machine, each for at most `limit_s` seconds. The machine
/// gets `work` as a share, where its kernel has a directory for the results. The output goes to
/// `log`.
///
/// # Errors
/// If the machine cannot be started. A test that fails, or is not reached, is a result.
pub fn run(
    mut machine: Machine,
    tests: &[GuestTest],
    limit_s: u64,
    work: &Path,
    log: &Path,
) -> Result<Vec<TestResult>> {
    let start = Instant::now();
    let directory = work.join(format!("batch-{}", machine.name()));
    cache::create(&directory)?;
    let [tests_file, results, skips] = ["tests", "results", "skips"].map(|name| directory.join(name));
    let lines: String = tests.iter().map(|test| test.line(limit_s)).collect();
    for (path, text) in [(&tests_file, lines.as_str()), (&results, ""), (&skips, "")] {
        std::fs::write(path, text).map_err(Error::file("write", path))?;
    }
    machine.shares.push(work.to_owned());
    let script = source_root().join("lab/guest/batch.sh");
    let mut skip_log = std::ffi::OsString::from("PAGEMARK_SKIP_LOG=");
    skip_log.push(&skips);
    let words = ["env".into(), skip_log, script.into(), tests_file.into(), results.clone().into()];
    let output = File::options().append(true).create(true).open(log).map_err(Error::file("open", log))?;
    let before = output.metadata().map_err(Error::file("read", log))?.len();
    let outcome = machine.run(&words, Some(&output))?;
    let read = |path: &PathBuf| std::fs::read_to_string(path).map_err(Error::file("read", path));
    let name = machine.name();
    let text = std::fs::read(log).map_err(Error::file("read", log))?;
    let printed = String::from_utf8_lossy(&text[usize::try_from(before).unwrap_or(0)..]).into_owned();
    let mut found = parse(&name, tests, &read(&results)?, &printed);
    let took = start.elapsed().as_secs();
    if outcome != Outcome::Exited(0) {
        let name = format!("{name}: the machine, and its kernel's log");
        let is_finding = matches!(outcome, Outcome::Warned(_));
        found.push(TestResult { is_finding, ..TestResult::new(name, Some(outcome.to_string()), Some(took)) });
    }
    let skips = read(&skips)?;
    let skips: Vec<String> = skips.lines().map(str::to_owned).collect();
    let allowed = AllowedSkips::parse(machine.allowed_skips())?;
    let unwanted = allowed.unwanted(&skips);
    if !unwanted.is_empty() {
        let failure = Some(unwanted.join("; "));
        found.push(TestResult::new(format!("{name}: skipped tests"), failure, None));
    }
    found.push(TestResult::new(format!("{name}: all, with the machine"), None, Some(took)));
    Ok(found)
}

/// The result of each test, from lines of `NAME|STATUS|SECONDS` and what the tests have printed. A
/// test without a line was not run to its end.
fn parse(kernel: &str, tests: &[GuestTest], results: &str, printed: &str) -> Vec<TestResult> {
    let ended: Vec<(&str, &str, &str)> = results
        .lines()
        .filter_map(|line| match line.split('|').collect::<Vec<_>>()[..] {
            [name, status, seconds] => Some((name, status, seconds)),
            _ => None,
        })
        .collect();
    let result = |test: &GuestTest| {
        let name = format!("{kernel}: {}", test.name);
        let (failure, is_finding, seconds) = match ended.iter().find(|(name, ..)| *name == test.name) {
            Some((_, "0", seconds)) => (None, false, seconds.parse().ok()),
            Some((_, status, seconds)) => {
                let (message, is_finding) = explain(test, status, output_of(&test.name, printed));
                (Some(message), is_finding, seconds.parse().ok())
            }
            None => (Some(UNFINISHED.to_owned()), false, None),
        };
        TestResult { name, test: Some(test.name.clone()), failure, is_finding, seconds }
    };
    tests.iter().map(result).collect()
}

/// What a test that has failed has printed. See lab/guest/batch.sh.
fn output_of<'a>(test: &str, printed: &'a str) -> &'a str {
    let begin = format!("-- {test}\n");
    let output = printed.split_once(&begin).map_or("", |(_, rest)| rest);
    output.split_once(&format!("failed: {test} (exit ")).map_or(output, |(output, _)| output)
}

/// Why a test failed, and whether that is a finding.
fn explain(test: &GuestTest, status: &str, output: &str) -> (String, bool) {
    let failed = libtest::failed_tests(output);
    let is_death = status.parse().is_ok_and(is_undefined_behaviour) || finding(output).is_some() && failed.is_empty();
    let is_finding = is_death || test.is_oracle && status == FOUND || failed.iter().any(|failed| failed.is_finding);
    let last = || output.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default().to_owned();
    let first = failed.iter().find(|failed| failed.is_finding == is_finding).or(failed.first());
    let message = first.map_or_else(last, |failed| format!("{}: {}", failed.name, failed.message));
    (format!("exit {status}: {message}"), is_finding)
}

/// The failures among the results of a part.
pub fn failures(part: Part, results: &[TestResult]) -> Vec<Failure> {
    let mut failures = Vec::new();
    let mut unfinished = Vec::new();
    for result in results {
        let Some(message) = &result.failure else { continue };
        match &result.test {
            Some(test) if message == UNFINISHED => unfinished.push(test.clone()),
            test => failures.push(Failure {
                name: TestName { place: Place::Lab(part), tests: test.iter().cloned().collect() },
                message: format!("{}: {message}", result.name),
                is_finding: result.is_finding,
            }),
        }
    }
    if !unfinished.is_empty() {
        // The machine has ended early: that alone need not be repeated.
        failures.retain(|failure| failure.is_finding || !failure.name.tests.is_empty());
        let name = TestName { place: Place::Lab(part), tests: unfinished };
        failures.push(Failure { name, message: UNFINISHED.to_owned(), is_finding: false });
    }
    failures
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Kernel;

    #[test]
    fn each_test_has_a_result() {
        let tests = ["a", "b", "c, seed 1"].map(|name| GuestTest::new(name, "true"));
        let lines: Vec<String> =
            parse("ldt", &tests, "a|0|3\nc, seed 1|137|12\n", "").iter().map(TestResult::line).collect();
        assert_eq!(
            lines,
            [
                "passed                  3 s  ldt: a",
                "FAILED (not run to its end)    - s  ldt: b",
                "FAILED (exit 137: )    12 s  ldt: c, seed 1",
            ]
        );
    }

    #[test]
    fn a_name_is_compared_as_a_whole() {
        let tests = ["seed 1", "seed 11"].map(|name| GuestTest::new(name, "true"));
        let results = parse("ldt", &tests, "seed 11|0|1\n", "");
        assert!(results[0].failure.is_some() && results[1].failure.is_none());
    }

    #[test]
    fn findings_of_oracles_are_known_by_the_test_or_its_output() {
        let tests =
            [GuestTest::oracle("oracle, seed 1", ""), GuestTest::oracle("slow", ""), GuestTest::new("regions", "")];
        let printed = "\n-- oracle, seed 1\nround 1\npage 7 is missing\n\nfailed: oracle, seed 1 (exit 1)\n\n-- slow\nfailed: slow (exit 124)\n\n\
            -- regions\ntest a ... FAILED\n\nfailures:\n\n---- a stdout ----\nthread 'a' panicked at a.rs:1:\n\n\
            finding: word 3\n\nfailures:\n    a\n\ntest result: FAILED. 0 passed; 1 failed;\nfailed: regions (exit 101)\n";
        let results = parse("ldt", &tests, "oracle, seed 1|1|2\nslow|124|9\nregions|101|3\n", printed);
        let found: Vec<_> = failures(Part::Ldt, &results)
            .into_iter()
            .map(|failure| (failure.name.to_string(), failure.message, failure.is_finding))
            .collect();
        let expected = [
            ("lab ldt: oracle, seed 1", "ldt: oracle, seed 1: exit 1: page 7 is missing", true),
            ("lab ldt: slow", "ldt: slow: exit 124: ", false),
            ("lab ldt: regions", "ldt: regions: exit 101: a: word 3", true),
        ];
        assert_eq!(found, expected.map(|(name, message, found)| (name.to_owned(), message.to_owned(), found)));
    }

    #[test]
    fn tests_that_a_machine_did_not_reach_are_repeated_together() {
        let tests = ["a", "b", "c"].map(|name| GuestTest::new(name, "true"));
        let mut results = parse("ldt", &tests, "a|0|3\n", "");
        results.push(TestResult::new("ldt: the machine, and its kernel's log", Some("time".to_owned()), None));
        let failures = failures(Part::Ldt, &results);
        assert_eq!(failures.iter().map(|failure| failure.name.to_string()).collect::<Vec<_>>(), ["lab ldt: b + c"]);
    }

    #[test]
    fn a_machine_may_skip_only_what_its_kernel_lacks() {
        let skips =
            ["skipped: a: no lightweight dirty tracking here", "skipped: b: no swap", "skipped: c: Linux 6.7 has it"];
        let skips = skips.map(str::to_owned);
        let unwanted = |kernel: Kernel| AllowedSkips::parse(kernel.allowed_skips()).unwrap().unwanted(&skips).len();
        assert_eq!([Kernel::Ldt, Kernel::Stock, Kernel::Debian12, Kernel::Debian11].map(unwanted), [3, 2, 1, 1]);
    }
}
