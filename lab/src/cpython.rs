//! CPython's own tests, outside and inside of [`Surroundings`].

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::surroundings::{Surroundings, Verdicts};
use crate::{Result, cache, command, packages};

/// Debian's Python, whose tests are a package.
const PYTHON: &str = "/usr/bin/python3";
/// The modules of tests that run if none are named: those of system calls, memory, signals, threads
/// and children.
const MODULES: [&str; 13] = [
    "test_posix",
    "test_os",
    "test_fork1",
    "test_wait4",
    "test_mmap",
    "test_signal",
    "test_threadsignals",
    "test_faulthandler",
    "test_select",
    "test_poll",
    "test_epoll",
    "test_fcntl",
    "test_resource",
];
/// The longest time of a module's tests.
const LIMIT: Duration = Duration::from_secs(1800);

/// Runs the tests of `modules`, or those that are meant if there are none. What they print is kept
/// below `logs`.
///
/// Returns the lines of the report, and whether nothing is worse than the list of exceptions says.
///
/// # Errors
/// If the tests are not there and cannot be installed, or nothing of a module runs outside.
pub fn run(within: Surroundings, modules: &[String], logs: &Path) -> Result<(Vec<String>, bool)> {
    packages::install(&["python3"])?;
    let version = "import sys; print('%d.%d' % sys.version_info[:2], end='')";
    let version = command::output(Command::new(PYTHON).args(["-c", version]), "python3", "reinstall it")?;
    packages::install(&[format!("libpython{version}-testsuite")])?;
    cache::remove(logs)?;
    cache::create(logs)?;
    within.compare_groups(modules, &MODULES, logs, |module| {
        let outside = verdicts(Command::new(PYTHON), module, &logs.join(format!("{module}.outside")))?;
        Ok([outside, verdicts(within.command(PYTHON)?, module, &logs.join(format!("{module}.inside")))?])
    })
}

/// Runs a module's tests in a directory of their own. Those that a run that did not end had passed
/// are not known.
fn verdicts(mut python: Command, module: &str, log: &Path) -> Result<Verdicts> {
    let work = log.with_extension("work");
    cache::create(&work)?;
    let results = log.with_extension("xml");
    python.args(["-m", "test", "--junit-xml"]).arg(&results).arg(module).current_dir(&work);
    command::printed_within(&mut python, log, LIMIT)?;
    cache::remove(&work)?;
    Ok(parse(&std::fs::read_to_string(&results).unwrap_or_default()))
}

/// The verdicts in a file of JUnit's form: an element `testcase` for each test, with an element in
/// it for what went wrong.
fn parse(results: &str) -> Verdicts {
    let cases = results.split("<testcase ").skip(1);
    let verdict = |case: &str| {
        let name = case.split_once("name=\"")?.1.split_once('"')?.0;
        let case = case.split("</testcase>").next()?;
        Some((name.to_owned(), !case.contains("<failure") && !case.contains("<error")))
    };
    cases.filter_map(verdict).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_read() {
        let text = "<testsuites tests=\"3\"><testsuite start=\"x\">\
            <testcase name=\"test.test_os.A.test_a\" status=\"run\" result=\"completed\" time=\"0.1\" />\
            <testcase name=\"test.test_os.A.test_b\" status=\"run\" result=\"completed\" time=\"0.1\">\
            <failure type=\"AssertionError\" message=\"1 != 2\">text</failure></testcase>\
            <testcase name=\"test.test_os.A.test_c\" status=\"run\" result=\"completed\"><skipped>no</skipped></testcase>\
            <testcase name=\"test.test_os.A.test_d\"><error type=\"OSError\" /></testcase></testsuite></testsuites>";
        let verdicts = parse(text);
        let expected = [("a", true), ("b", false), ("c", true), ("d", false)];
        let expected = expected.map(|(name, passed)| (format!("test.test_os.A.test_{name}"), passed));
        assert_eq!(verdicts, Verdicts::from(expected));
        assert!(parse("").is_empty() && parse("<testcase ").is_empty());
    }
}
