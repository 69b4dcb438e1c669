//! Repeats tests alone: those that have failed in a run, to find out whether they fail again when
//! nothing runs beside them, and any test, to find out how often it fails.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::failure::{Failure, Place, TestName};
use crate::host_tests::{self, TestProgram};
use crate::load::Load;
use crate::test_plan::{Extent, Programs};
use crate::test_programs::TestBinaries;
use crate::{Error, Result, batch, progress, python_tests};

/// How often a failed test is repeated.
const REPETITIONS: u32 = 3;
/// From this number of failed tests on, a run has failed, whatever they do alone.
const MOST_FLAKY: usize = 10;
/// After this time, one repetition that passes is enough.
const LONG: Duration = Duration::from_secs(600);

/// What repetitions have shown of a failed test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It has failed for good, with the reason why it was not repeated, or not again.
    Failed(String),
    /// It has passed alone.
    Flaky {
        /// How often it has failed, the run included.
        failed: u32,
        /// How often it was run.
        runs: u32,
    },
}

/// A failed test, with what repetitions have shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Judged {
    /// The test.
    pub failure: Failure,
    /// What repetitions have shown.
    pub verdict: Verdict,
}

impl Judged {
    /// Whether it fails the run.
    pub fn is_failed(&self) -> bool {
        matches!(self.verdict, Verdict::Failed(_))
    }

    /// The line of the summary.
    pub fn line(&self) -> String {
        let Failure { name, message, .. } = &self.failure;
        match &self.verdict {
            Verdict::Flaky { failed, runs } => format!("flaky: {name}: {failed} of {runs} failed: {message}"),
            Verdict::Failed(why) => format!("failed: {name}: {message} ({why}): {}", name.command()),
        }
    }
}

/// Judges failed tests by repetitions, of which `again` makes one: it returns the failure, if there
/// is one. Findings are not repeated, and nothing is in a run that has failed whatever the tests do
/// alone.
pub fn judge(failures: Vec<Failure>, mut again: impl FnMut(&TestName) -> Result<Option<Failure>>) -> Vec<Judged> {
    let start = Instant::now();
    let has_finding = failures.iter().any(|failure| failure.is_finding);
    let are_many = failures.len() >= MOST_FLAKY;
    let mut judged = Vec::new();
    for failure in failures {
        let verdict = if failure.is_finding {
            Verdict::Failed("a finding of an oracle, which is not repeated".to_owned())
        } else if has_finding {
            Verdict::Failed("not repeated, since there is a finding of an oracle".to_owned())
        } else if are_many {
            Verdict::Failed(format!("not repeated, since {MOST_FLAKY} tests or more have failed"))
        } else {
            verdict(&failure.name, start, &mut again)
        };
        judged.push(Judged { failure, verdict });
    }
    judged
}

fn verdict(name: &TestName, start: Instant, again: &mut impl FnMut(&TestName) -> Result<Option<Failure>>) -> Verdict {
    let (mut failed, mut runs) = (1, 1);
    for _ in 0..REPETITIONS {
        progress!("repeating {name}");
        match again(name) {
            Ok(None) => {}
            Ok(Some(failure)) if failure.is_finding => {
                return Verdict::Failed(format!("a finding of an oracle when it was repeated: {}", failure.message));
            }
            Ok(Some(_)) => failed += 1,
            Err(error) => return Verdict::Failed(format!("it could not be repeated: {error}")),
        }
        runs += 1;
        if failed < runs && start.elapsed() > LONG {
            break;
        }
    }
    if failed < runs { Verdict::Flaky { failed, runs } } else { Verdict::Failed(format!("{runs} of {runs} failed")) }
}

/// What repeats tests alone.
pub struct Repeater<'a> {
    /// The test binaries of the host.
    pub host: Vec<TestProgram>,
    /// What the lab's tests run.
    pub lab: Option<&'a Programs>,
    /// The extent of the lab's tests, which is that of the limits, too.
    pub extent: Extent,
    /// Where the output of the tests that fail again is kept.
    pub log: PathBuf,
    /// Whether tests of the host are stopped for 100 ms at a time.
    pub stalls: bool,
}

impl Repeater<'_> {
    /// Runs tests once, alone. Returns the failure, if there is one.
    ///
    /// # Errors
    /// If there is no such test, or it cannot be run.
    pub fn once(&self, name: &TestName) -> Result<Option<Failure>> {
        match &name.place {
            Place::Host(binary) => {
                let program = self.host.iter().find(|program| program.name == *binary).ok_or_else(|| {
                    Error::unmet(format!("there are no tests {binary}"), "take a name that a run has printed")
                })?;
                let limit = Duration::from_secs(self.extent.hangs_s());
                host_tests::run_alone(program, &name.tests, limit, self.stalls, &self.log)
            }
            Place::Lab(part) => {
                let Some(programs) = self.lab else {
                    return Err(Error::unmet("the lab's tests were not built", "see the failed steps above"));
                };
                let results = programs.run(*part, self.extent, &name.tests, 0, &self.log)?;
                let has_run = |test: &String| results.iter().any(|result| result.test.as_ref() == Some(test));
                if let Some(test) = name.tests.iter().find(|test| !has_run(test)) {
                    return Err(Error::unmet(format!("{} has no test {test}", name.place), "correct the name"));
                }
                Ok(batch::failures(*part, &results).into_iter().next())
            }
            Place::Python => Ok(self.python(&name.tests)?.into_iter().next()),
        }
    }

    fn python(&self, tests: &[String]) -> Result<Vec<Failure>> {
        let run = python_tests::run(tests, Duration::from_secs(self.extent.hangs_s()))?;
        let failures = python_tests::failures(&run);
        if !failures.is_empty() {
            std::fs::write(&self.log, &run.output).map_err(Error::file("write", &self.log))?;
        }
        Ok(failures)
    }
}

/// Runs the tests that a name stands for `times` times, alone or beside a load: one test, or all
/// whose names contain the words. Prints how often which assertion failed.
///
/// Returns whether all passed.
///
/// # Errors
/// If there is no such test, or one cannot be run.
pub fn repeat(words: &str, times: u32, beside_load: bool) -> Result<bool> {
    let binaries = TestBinaries::build()?;
    let host = TestProgram::all(&binaries, &[]);
    let names = matching(words, &host)?;
    let is_of_the_lab = names.iter().any(|name| matches!(name.place, Place::Lab(_)));
    let lab = if is_of_the_lab { Some(Programs::build(Some(binaries))?) } else { None };
    let log = std::env::temp_dir().join(format!("pagemark-repeat.{}.log", std::process::id()));
    let repeater = Repeater { host, lab: lab.as_ref(), extent: Extent::Quick, log: log.clone(), stalls: beside_load };
    let _load = if beside_load { Some(Load::start()?) } else { None };
    let mut are_good = true;
    for name in names {
        let mut messages: BTreeMap<String, u32> = BTreeMap::new();
        let start = Instant::now();
        for _ in 0..times {
            if let Some(failure) = repeater.once(&name)? {
                progress!("{name}: {}", failure.message);
                *messages.entry(failure.message).or_default() += 1;
            }
        }
        let failed: u32 = messages.values().sum();
        are_good &= failed == 0;
        let each_s = start.elapsed().as_secs_f64() / f64::from(times.max(1));
        println!("{name}: {failed} of {times} failed, {each_s:.1} s each");
        messages.iter().for_each(|(message, count)| println!("  {count} times: {message}"));
    }
    if !are_good {
        println!("the output of the failures: {}", log.display());
    }
    Ok(are_good)
}

/// The tests that words stand for.
fn matching(words: &str, host: &[TestProgram]) -> Result<Vec<TestName>> {
    let name: TestName = words.parse()?;
    let is_whole = match &name.place {
        Place::Host(binary) => host.iter().any(|program| program.name == *binary),
        Place::Lab(_) | Place::Python => true,
    };
    if is_whole {
        return Ok(vec![name]);
    }
    let mut found = Vec::new();
    // The first one compiles the examples of the documentation to list them.
    for program in &host[1..] {
        let tests = program.list(&["--include-ignored"])?.into_iter().filter(|test| test.contains(words));
        found.extend(tests.map(|test| TestName::one(Place::Host(program.name.clone()), test)));
    }
    if found.is_empty() {
        return Err(Error::unmet(format!("no test has {words} in its name"), "take a name that a run has printed"));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(test: &str, is_finding: bool) -> Failure {
        Failure { name: TestName::one(Place::Python, test), message: "too long".to_owned(), is_finding }
    }

    fn lines(judged: &[Judged]) -> Vec<String> {
        judged.iter().map(Judged::line).collect()
    }

    #[test]
    fn a_test_that_passes_alone_is_flaky() {
        let mut runs = 0;
        let judged = judge(vec![failure("a", false), failure("b", false)], |name| {
            runs += 1;
            Ok((name.tests[0] == "a" && runs == 2).then(|| failure("a", false)))
        });
        assert_eq!(
            lines(&judged),
            ["flaky: python: a: 2 of 4 failed: too long", "flaky: python: b: 1 of 4 failed: too long"]
        );
        assert!(!judged.iter().any(Judged::is_failed));
    }

    #[test]
    fn a_test_that_fails_alone_fails_the_run_and_has_the_command() {
        let judged = judge(vec![failure("a", false)], |_| Ok(Some(failure("a", false))));
        assert!(judged[0].is_failed());
        assert_eq!(lines(&judged), ["failed: python: a: too long (4 of 4 failed): scripts/suite repeat 'python: a'"]);
    }

    #[test]
    fn a_finding_is_never_repeated_and_fails_the_run_at_once() {
        let judged = judge(vec![failure("a", false), failure("b", true)], |_| panic!("repeated"));
        assert!(judged.iter().all(Judged::is_failed));
        let judged = judge(vec![failure("a", false)], |_| Ok(Some(failure("a", true))));
        assert!(judged[0].is_failed(), "a finding when it was repeated");
    }

    #[test]
    fn ten_flaky_tests_fail_the_run() {
        let judge = |count| judge(vec![failure("a", false); count], |_| Ok(None));
        assert!(judge(9).iter().all(|judged| !judged.is_failed()));
        assert!(judge(10).iter().all(Judged::is_failed));
    }
}
