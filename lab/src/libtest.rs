//! What cargo and libtest print.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::failure::finding;
use crate::steps::Outcome;

/// The results of all test binaries in a log of `cargo test -- --show-output`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// The number of tests that passed.
    pub passed: u64,
    /// The number of tests that failed.
    pub failed: u64,
    /// Lines `skipped: NAME: REASON` of the tests that were skipped or ignored.
    pub skips: Vec<String>,
    /// The lines that a reader wants to see: the binaries and their results, failed tests, compiler
    /// messages.
    pub digest: Vec<String>,
    /// The output of failed tests and of the compiler.
    pub failures: Vec<String>,
    /// Of each failed test its name and the begin of its message.
    pub reasons: Vec<String>,
}

/// The number of lines that are quoted after a compiler's error.
const ERROR_LINES: usize = 12;
/// So many of the first and of the last lines of the message of a failed test are in its reason.
const REASON_LINES: usize = 6;
const REASON_CHARACTERS: usize = 600;
/// How much earlier than its reported begin a test may have made a file.
const CLOCK_ERROR: Duration = Duration::from_millis(100);

impl Summary {
    /// Reads a log.
    pub fn parse(log: &str) -> Summary {
        let mut summary = Summary::default();
        let (mut in_failures, mut error_lines) = (false, 0);
        let mut message: Option<Vec<&str>> = None;
        for line in log.lines() {
            if let Some(result) = line.strip_prefix("test result:") {
                summary.passed += count_before(result, "passed");
                summary.failed += count_before(result, "failed");
                in_failures = false;
            } else if line == "failures:" {
                in_failures = true;
            } else if line.starts_with("error[") || line.starts_with("error:") {
                error_lines = ERROR_LINES;
            } else if line.starts_with("skipped: ") {
                summary.skips.push(line.to_owned());
            } else if let Some((name, reason)) = ignored(line) {
                summary.skips.push(format!("skipped: {name}: ignored {reason}"));
            }
            let (is_name, is_panic) = (line.starts_with("---- "), line.contains(" panicked at "));
            if is_name || is_panic || !in_failures || ["stack backtrace:", "failures:"].contains(&line) {
                summary.reasons.extend(message.take().into_iter().flat_map(shortened));
            }
            if in_failures && is_name {
                summary.reasons.push(line.to_owned());
            } else if in_failures && is_panic {
                message = Some(Vec::new());
            }
            if let Some(lines) = &mut message {
                lines.push(line);
            }
            if in_failures || error_lines > 0 {
                summary.failures.push(line.to_owned());
                error_lines = error_lines.saturating_sub(1);
            }
            if is_of_interest(line) {
                summary.digest.push(line.to_owned());
            }
        }
        summary.reasons.extend(message.into_iter().flat_map(shortened));
        summary
    }

    /// How the step ended whose log this is, with the lines that it prints.
    pub fn outcome(&self, passed: bool) -> Outcome {
        let digest = self.digest.join("\n");
        // libtest prints failures at the end of each binary, behind the output of what passed.
        if passed { Outcome::Passed(digest) } else { Outcome::Failed(digest + "\n" + &self.failures.join("\n")) }
    }
}

/// A test that has failed, as its binary reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedTest {
    /// Its name.
    pub name: String,
    /// The first line of its message.
    pub message: String,
    /// Whether an oracle has found a fault.
    pub is_finding: bool,
}

/// The tests that have failed in the output of one binary, in the order of their reports.
pub fn failed_tests(output: &str) -> Vec<FailedTest> {
    let lines: Vec<&str> = output.lines().collect();
    // The reports of those that failed are behind this line, their names behind the next one.
    let Some(begin) = lines.iter().position(|&line| line == "failures:") else { return Vec::new() };
    let name_of = |line: &str| {
        let name = line.strip_prefix("---- ")?.strip_suffix(" ----")?;
        name.strip_suffix(" stdout").or(name.strip_suffix(" stderr")).map(str::to_owned)
    };
    let mut reports: Vec<(String, String)> = Vec::new();
    let mut rest = lines[begin + 1..].iter();
    for line in rest.by_ref().take_while(|&&line| line != "failures:") {
        match (name_of(line), reports.last_mut()) {
            (Some(name), _) => reports.push((name, String::new())),
            (None, Some((_, text))) => *text += &format!("{line}\n"),
            (None, None) => {}
        }
    }
    for name in rest.map_while(|line| line.strip_prefix("    ")) {
        if !reports.iter().any(|(reported, _)| reported == name) {
            reports.push((name.to_owned(), String::new()));
        }
    }
    let failed = |(name, text): (String, String)| {
        let found = finding(&text).map(str::to_owned);
        let message = found.clone().unwrap_or_else(|| first_line(&text));
        FailedTest { name, message, is_finding: found.is_some() }
    };
    reports.into_iter().map(failed).collect()
}

/// The first line of a test's message: behind the place of its panic, if it has one.
fn first_line(report: &str) -> String {
    let behind = report.lines().skip_while(|line| !line.contains(" panicked at ")).skip(1);
    let mut lines = behind.chain(report.lines()).map(str::trim).filter(|line| !line.is_empty());
    lines.next().unwrap_or("no message").chars().take(REASON_CHARACTERS).collect()
}

/// The names of the tests that have ended well, or were ignored, in the output of a binary.
pub fn ended_well(output: &str) -> Vec<&str> {
    let line = |line: &'_ str| -> Option<usize> {
        let end = line.find(" ... ok").or_else(|| line.find(" ... ignored"))?;
        line.starts_with("test ").then_some(end)
    };
    output
        .lines()
        .filter_map(|text| line(text).map(|end| text["test ".len()..end].trim_end_matches(" - should panic")))
        .collect()
}

/// When tests began and ended, by their names.
pub type Times = BTreeMap<String, (Duration, Duration)>;

/// When each test began and ended, from the times at which its binary has reported that it had
/// ended.
///
/// libtest starts tests in the order of their names, `threads` at first, and another one when one
/// has ended.
pub fn times(ended: &[(String, Duration)], threads: usize) -> Times {
    let mut names: Vec<&str> = ended.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    let mut waiting = names.into_iter();
    let mut begun: BTreeMap<&str, Duration> =
        waiting.by_ref().take(threads).map(|name| (name, Duration::ZERO)).collect();
    let mut times = BTreeMap::new();
    for (name, end) in ended {
        let begin = begun.get(name.as_str()).copied().unwrap_or_default();
        times.insert(name.clone(), (begin, *end));
        if let Some(next) = waiting.next() {
            begun.insert(next, *end);
        }
    }
    times
}

/// The tests that ran at a time.
pub fn running_at(times: &Times, time: Duration) -> Vec<String> {
    // The reports of what has ended arrive later than it, and the clocks of files tick slowly.
    let runs = |&(begin, end): &(Duration, Duration)| begin.saturating_sub(CLOCK_ERROR) <= time && time <= end;
    times.iter().filter(|(_, times)| runs(times)).map(|(name, _)| name.clone()).collect()
}

/// The test of which a line says how it ended: `test NAME ... ok`.
pub fn ended_test(line: &str) -> Option<&str> {
    let (name, result) = line.strip_prefix("test ")?.split_once(" ... ")?;
    ["ok", "FAILED"].contains(&result.trim()).then(|| name.trim_end_matches(" - should panic"))
}

/// The first and the last lines of a message, each cut.
fn shortened(message: Vec<&str>) -> Vec<String> {
    let last = message.len().saturating_sub(REASON_LINES).max(REASON_LINES);
    let lines = message.iter().enumerate().filter(|&(index, _)| index < REASON_LINES || index >= last);
    lines.map(|(_, line)| line.chars().take(REASON_CHARACTERS).collect()).collect()
}

fn is_of_interest(line: &str) -> bool {
    let text = line.trim_start();
    (text.len() < line.len() && (text.starts_with("Running ") || text.starts_with("Doc-tests ")))
        || (line.starts_with("test ") && line.ends_with(" FAILED"))
        || ["test result:", "error", "warning"].iter().any(|start| line.starts_with(start))
}

/// The number before a word in `ok. 3 passed; 0 failed; …`.
fn count_before(result: &str, word: &str) -> u64 {
    let parts = result.split([';', '.']).map(str::trim);
    parts.filter_map(|part| part.strip_suffix(word)?.trim().parse().ok()).next().unwrap_or(0)
}

/// `test NAME ... ignored, REASON`.
fn ignored(line: &str) -> Option<(&str, &str)> {
    let (name, rest) = line.strip_prefix("test ")?.split_once(" ... ignored")?;
    Some((name, rest.trim_start_matches(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "   Compiling pagemark v0.1.0
warning: unused variable
     Running unittests src/lib.rs (target/debug/deps/a-1)

running 3 tests
test one ... ok
test two ... FAILED
test three ... ignored, needs a disk

successes:

---- one stdout ----
skipped: one: no swap

failures:

---- two stdout ----
what the test has printed

thread 'two' panicked at tests/two.rs:7:5:
assertion failed: left
stack backtrace:
   0: one::two

failures:
    two

test result: FAILED. 1 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s

   Doc-tests pagemark
test result: ok. 12 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s
";

    #[test]
    fn results_of_all_binaries_are_added() {
        let summary = Summary::parse(LOG);
        assert_eq!((summary.passed, summary.failed), (13, 1));
        assert_eq!(summary.skips, ["skipped: three: ignored needs a disk", "skipped: one: no swap"]);
    }

    #[test]
    fn the_digest_has_results_and_the_failures_their_output() {
        let summary = Summary::parse(LOG);
        assert!(summary.digest.contains(&"test two ... FAILED".to_owned()));
        assert!(summary.digest.contains(&"   Doc-tests pagemark".to_owned()));
        assert!(!summary.digest.contains(&"test one ... ok".to_owned()));
        assert!(summary.failures.contains(&"assertion failed: left".to_owned()));
        assert!(!summary.failures.iter().any(|line| line.contains("no swap")), "{:?}", summary.failures);
        let reason = ["---- two stdout ----", "thread 'two' panicked at tests/two.rs:7:5:", "assertion failed: left"];
        assert_eq!(summary.reasons, reason);
    }

    #[test]
    fn failed_tests_have_their_messages() {
        let failed = failed_tests(LOG);
        let two =
            FailedTest { name: "two".to_owned(), message: "assertion failed: left".to_owned(), is_finding: false };
        assert_eq!(failed, [two]);
        assert_eq!(ended_well(LOG), ["one", "three"]);
        assert_eq!(failed_tests("test one ... ok\n\ntest result: ok. 1 passed; 0 failed;\n"), []);
    }

    #[test]
    fn a_finding_is_the_message() {
        let found = LOG.replace("assertion failed: left", "\nfinding: page 3 differs");
        let failed = failed_tests(&found);
        assert_eq!((failed[0].message.as_str(), failed[0].is_finding), ("page 3 differs", true));
        // A test that has passed may have caught one.
        let caught = LOG.replace("skipped: one: no swap", "finding: page 3 differs");
        assert!(!failed_tests(&caught)[0].is_finding);
    }

    #[test]
    fn a_failed_test_without_a_report_is_named() {
        let failed = failed_tests("failures:\n\nfailures:\n    a::b\n\ntest result: FAILED. 0 passed; 1 failed;\n");
        assert_eq!((failed[0].name.as_str(), failed[0].message.as_str()), ("a::b", "no message"));
    }

    #[test]
    fn a_test_begins_when_another_one_has_ended() {
        let seconds = Duration::from_secs;
        let ended: Vec<(String, Duration)> =
            [("b", 2), ("a", 5), ("d", 6), ("c", 9)].map(|(name, end)| (name.to_owned(), seconds(end))).into();
        let times = times(&ended, 2);
        let whole = |name: &str| [times[name].0, times[name].1].map(|time| time.as_secs());
        assert_eq!(["a", "b", "c", "d"].map(whole), [[0, 5], [0, 2], [2, 9], [5, 6]]);
        assert_eq!(running_at(&times, Duration::from_secs(3)), ["a", "c"]);
        assert_eq!(running_at(&times, Duration::from_millis(1950)), ["a", "b", "c"]);
        assert!(running_at(&times, Duration::from_secs(10)).is_empty());
        assert_eq!(ended_test("test a::b - should panic ... ok"), Some("a::b"));
        assert_eq!(ended_test("test a::b ... ignored"), None);
    }

    #[test]
    fn a_long_message_keeps_its_ends() {
        let message: Vec<String> = (1..30).map(|line| line.to_string()).collect();
        let log = format!(
            "failures:\n\n---- one stdout ----\nthread 'one' panicked at a:\n{}\n\nfailures:",
            message.join("\n")
        );
        let reasons = Summary::parse(&log).reasons.join(" ");
        assert_eq!(reasons, "---- one stdout ---- thread 'one' panicked at a: 1 2 3 4 5 25 26 27 28 29 ");
    }

    #[test]
    fn a_compiler_error_is_quoted() {
        let summary = Summary::parse("error[E0308]: mismatched types\n --> x.rs:1\n");
        assert_eq!(summary.failures, ["error[E0308]: mismatched types", " --> x.rs:1"]);
        assert_eq!((summary.passed, summary.failed), (0, 0));
    }
}
