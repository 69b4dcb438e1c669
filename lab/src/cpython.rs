//! CPython's own tests, in the machine of a process (`pagemark-kvm`) and outside of it.
//!
//! What passes outside must pass inside: the exceptions are in `lab/kvm-exceptions.txt`, each with
//! its reason.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::{Error, Result, cache, command, exceptions, packages, source_root};

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

/// Whether each test passed; one that was skipped has passed.
type Verdicts = BTreeMap<String, bool>;

/// Runs the tests of `modules`, or those that are meant if there are none. What they print is kept
/// below `logs`.
///
/// Returns the lines of the report, and whether nothing is worse than the list of exceptions says.
///
/// # Errors
/// If the tests are not there and cannot be installed, or nothing of a module runs outside.
pub fn run(modules: &[String], logs: &Path) -> Result<(Vec<String>, bool)> {
    let excepted = read_exceptions()?;
    let machine = command::built("pagemark-kvm")?;
    packages::install(&["python3"])?;
    let version = "import sys; print('%d.%d' % sys.version_info[:2], end='')";
    let version = command::output(Command::new(PYTHON).args(["-c", version]), "python3", "reinstall it")?;
    packages::install(&[format!("libpython{version}-testsuite")])?;
    cache::remove(logs)?;
    cache::create(logs)?;
    let named: Vec<&str> = modules.iter().map(String::as_str).collect();
    let (mut report, mut is_good) = (Vec::new(), true);
    for module in if named.is_empty() { &MODULES } else { &named[..] } {
        let outside = verdicts(Command::new(PYTHON), module, &logs.join(format!("{module}.outside")))?;
        if outside.is_empty() {
            return Err(Error::unmet(format!("no test of {module} runs"), format!("see {}", logs.display())));
        }
        let mut inside = Command::new(&machine);
        inside.arg(PYTHON);
        let inside = verdicts(inside, module, &logs.join(format!("{module}.inside")))?;
        let passed = |of: &Verdicts| of.values().filter(|passed| **passed).count();
        crate::progress!("{module}: {} of {} outside, {} inside", passed(&outside), outside.len(), passed(&inside));
        let (lines, is_as_expected) = compare(&outside, &inside, &excepted);
        report.extend(lines);
        is_good &= is_as_expected;
    }
    Ok((report, is_good))
}

/// Runs a module's tests in a directory of their own. Those that a run that did not end had passed
/// are not known.
fn verdicts(mut python: Command, module: &str, log: &Path) -> Result<Verdicts> {
    let work = log.with_extension("work");
    cache::create(&work)?;
    let results = log.with_extension("xml");
    let file = File::create(log).map_err(Error::file("create", log))?;
    python.args(["-m", "test", "--junit-xml"]).arg(&results).arg(module).current_dir(&work);
    command::redirect(&mut python, file, log)?;
    command::wait_for(&mut command::start(&mut python)?, LIMIT)?;
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

/// Lines `TEST: REASON` of tests that pass outside only.
fn read_exceptions() -> Result<BTreeMap<String, String>> {
    let path: PathBuf = source_root().join("lab/kvm-exceptions.txt");
    let list = std::fs::read_to_string(&path).map_err(Error::file("read", &path))?;
    let owned = |(test, reason): (&str, &str)| (test.to_owned(), reason.to_owned());
    exceptions::lines(&list, "TEST: REASON").map(|line| line.map(owned)).collect()
}

fn compare(outside: &Verdicts, inside: &Verdicts, exceptions: &BTreeMap<String, String>) -> (Vec<String>, bool) {
    let (mut report, mut is_good) = (Vec::new(), true);
    for (test, _) in outside.iter().filter(|(_, passed)| **passed) {
        match (inside.get(test), exceptions.get(test)) {
            (Some(true), None) => {}
            (Some(true), Some(reason)) => report.push(format!("passed: {test}, although: {reason}")),
            (_, Some(reason)) => report.push(format!("an exception: {test}: {reason}")),
            (verdict, None) => {
                let word = if verdict.is_some() { "failed" } else { "did not run" };
                report.push(format!("worse than outside: {test} {word}"));
                is_good = false;
            }
        }
    }
    (report, is_good)
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

    #[test]
    fn what_passes_outside_only_is_worse() {
        let verdicts =
            |pairs: &[(&str, bool)]| pairs.iter().map(|(name, passed)| ((*name).to_owned(), *passed)).collect();
        let outside: Verdicts = verdicts(&[("a", true), ("b", true), ("c", false), ("d", true)]);
        let excepted = BTreeMap::from([("d".to_owned(), "a reason".to_owned())]);
        let same = verdicts(&[("a", true), ("b", true), ("c", false), ("d", false)]);
        assert_eq!(compare(&outside, &same, &excepted), (vec!["an exception: d: a reason".to_owned()], true));
        let worse = verdicts(&[("a", false), ("c", true), ("d", true)]);
        let (report, is_good) = compare(&outside, &worse, &excepted);
        assert!(!is_good);
        assert_eq!(
            report,
            ["worse than outside: a failed", "worse than outside: b did not run", "passed: d, although: a reason"]
        );
    }

    #[test]
    fn the_list_of_exceptions_is_of_its_form() {
        read_exceptions().unwrap();
    }
}
