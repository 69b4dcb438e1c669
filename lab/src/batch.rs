//! A set of tests in one machine of the lab.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::machine::{Machine, Outcome};
use crate::skips::AllowedSkips;
use crate::{Error, Result, cache, source_root};

/// A test in a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestTest {
    /// Its name, without `|`.
    pub name: String,
    /// A command for a shell.
    pub command: String,
}

impl GuestTest {
    /// A test.
    pub fn new(name: impl Into<String>, command: impl Into<String>) -> GuestTest {
        GuestTest { name: name.into(), command: command.into() }
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
    /// Why it failed, or `None` if it passed.
    pub failure: Option<String>,
    /// How long it took, if it ended.
    pub seconds: Option<u64>,
}

impl TestResult {
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
    let outcome = machine.run(&words, Some(&output))?;
    let read = |path: &PathBuf| std::fs::read_to_string(path).map_err(Error::file("read", path));
    let name = machine.name();
    let mut found = parse(&name, tests, &read(&results)?);
    let took = start.elapsed().as_secs();
    if outcome != Outcome::Exited(0) {
        let name = format!("{name}: the machine, and its kernel's log");
        found.push(TestResult { name, failure: Some(outcome.to_string()), seconds: Some(took) });
    }
    let skips = read(&skips)?;
    let skips: Vec<String> = skips.lines().map(str::to_owned).collect();
    let allowed = AllowedSkips::parse(machine.allowed_skips())?;
    let unwanted = allowed.unwanted(&skips);
    if !unwanted.is_empty() {
        let failure = Some(unwanted.join("; "));
        found.push(TestResult { name: format!("{name}: skipped tests"), failure, seconds: None });
    }
    found.push(TestResult { name: format!("{name}: all, with the machine"), failure: None, seconds: Some(took) });
    Ok(found)
}

/// The result of each test, from lines of `NAME|STATUS|SECONDS`. A test without a line was not run
/// to its end.
fn parse(kernel: &str, tests: &[GuestTest], results: &str) -> Vec<TestResult> {
    let ended: Vec<(&str, &str, &str)> = results
        .lines()
        .filter_map(|line| match line.split('|').collect::<Vec<_>>()[..] {
            [name, status, seconds] => Some((name, status, seconds)),
            _ => None,
        })
        .collect();
    let result = |test: &GuestTest| {
        let name = format!("{kernel}: {}", test.name);
        match ended.iter().find(|(name, ..)| *name == test.name) {
            Some((_, "0", seconds)) => TestResult { name, failure: None, seconds: seconds.parse().ok() },
            Some((_, status, seconds)) => {
                TestResult { name, failure: Some(format!("exit {status}")), seconds: seconds.parse().ok() }
            }
            None => TestResult { name, failure: Some("not run to its end".to_owned()), seconds: None },
        }
    };
    tests.iter().map(result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Kernel;

    #[test]
    fn each_test_has_a_result() {
        let tests = ["a", "b", "c, seed 1"].map(|name| GuestTest::new(name, "true"));
        let lines: Vec<String> =
            parse("ldt", &tests, "a|0|3\nc, seed 1|137|12\n").iter().map(TestResult::line).collect();
        assert_eq!(
            lines,
            [
                "passed                  3 s  ldt: a",
                "FAILED (not run to its end)    - s  ldt: b",
                "FAILED (exit 137)      12 s  ldt: c, seed 1",
            ]
        );
    }

    #[test]
    fn a_name_is_compared_as_a_whole() {
        let tests = ["seed 1", "seed 11"].map(|name| GuestTest::new(name, "true"));
        let results = parse("ldt", &tests, "seed 11|0|1\n");
        assert!(results[0].failure.is_some() && results[1].failure.is_none());
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
