//! Steps of a test run: each is timed, its output is kept, and a failure does not end the run.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::failure::Failure;
use crate::{Error, Result, cache, command};

/// The exit status of a script that was skipped.
pub const SKIPPED: i32 = 77;
/// The lines of a failed step's log that are printed.
const QUOTED_LINES: usize = 150;

/// How a step ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It passed. The text is printed.
    Passed(String),
    /// It was left out, for reasons that are in the list of skips.
    Skipped,
    /// It failed. The text is printed.
    Failed(String),
    /// Only these of its tests failed; they may be repeated. The text is printed.
    TestsFailed(Vec<Failure>, String),
}

impl From<Result<()>> for Outcome {
    fn from(result: Result<()>) -> Outcome {
        result.map_or_else(|error| Outcome::Failed(error.to_string()), |()| Outcome::Passed(String::new()))
    }
}

/// A step that has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Its name.
    pub name: String,
    /// How long it took.
    pub duration: Duration,
    /// Whether it failed by more than tests that may be repeated.
    pub failed: bool,
    /// Its tests that have failed.
    pub failures: Vec<Failure>,
}

/// A test run. Steps may run on several threads at a time; what each prints stays together.
pub struct Steps {
    logs: PathBuf,
    start: Instant,
    ended: Mutex<Vec<Step>>,
    skips: Mutex<Vec<String>>,
    notes: Mutex<Vec<String>>,
}

impl Steps {
    /// A run that keeps the output of its steps in the directory `logs`, which it replaces.
    pub fn new(logs: &Path) -> Result<Steps> {
        cache::remove(logs)?;
        cache::create(logs)?;
        Ok(Steps {
            logs: logs.to_owned(),
            start: Instant::now(),
            ended: Mutex::default(),
            skips: Mutex::default(),
            notes: Mutex::default(),
        })
    }

    /// The directory of the logs.
    pub fn logs(&self) -> &Path {
        &self.logs
    }

    /// The log of a step.
    pub fn log(&self, name: &str) -> PathBuf {
        self.logs.join(name.replace(' ', "-"))
    }

    /// Runs a step. Returns whether it did not fail.
    pub fn run(&self, name: &str, step: impl FnOnce() -> Outcome) -> bool {
        crate::progress!("{name} has started");
        let start = Instant::now();
        let outcome = step();
        let duration = start.elapsed();
        let failed = matches!(outcome, Outcome::Failed(_));
        let (text, failures, word) = match outcome {
            Outcome::Passed(text) => (text, Vec::new(), ""),
            Outcome::Skipped => (String::new(), Vec::new(), ", skipped"),
            Outcome::Failed(text) => (text, Vec::new(), ", FAILED"),
            Outcome::TestsFailed(failures, text) => (text, failures, ", FAILED"),
        };
        let is_good = !failed && failures.is_empty();
        let mut ended = lock(&self.ended);
        // While the list is locked, so that what a step prints stays together.
        println!("\n== {name} ({} s{word})", duration.as_secs());
        if !text.is_empty() {
            println!("{}", text.trim_end());
        }
        if !is_good {
            println!("log: {}", self.log(name).display());
        }
        ended.push(Step { name: name.to_owned(), duration, failed, failures });
        is_good
    }

    /// Runs a program as a step. `digest` makes of its output what is printed when it has passed.
    /// With exit status [`SKIPPED`] its lines `skipped: …` are added to the skips.
    pub fn program(&self, name: &str, program: &mut Command, digest: impl FnOnce(&str) -> String) -> bool {
        self.run(name, || match self.output(name, program) {
            Ok((status, text)) => self.outcome(status, &text, digest, Vec::new()),
            Err(error) => Outcome::Failed(error.to_string()),
        })
    }

    /// The outcome of a program that has ended with this status and has printed `text`, and of its
    /// tests that have failed; see [`Steps::program`].
    pub fn outcome(
        &self,
        status: i32,
        text: &str,
        digest: impl FnOnce(&str) -> String,
        failures: Vec<Failure>,
    ) -> Outcome {
        let end = || command::last_lines(text.as_bytes(), QUOTED_LINES);
        if !failures.is_empty() {
            return Outcome::TestsFailed(failures, end());
        }
        match status {
            0 => Outcome::Passed(digest(text)),
            SKIPPED => {
                text.lines().filter(|line| line.starts_with("skipped: ")).for_each(|line| self.skip(line));
                Outcome::Skipped
            }
            _ => Outcome::Failed(end()),
        }
    }

    /// Runs a program with its output in the log of a step. Returns its exit status and the log.
    ///
    /// # Errors
    /// If it cannot be started, or its log cannot be written.
    pub fn output(&self, name: &str, program: &mut Command) -> Result<(i32, String)> {
        let log = self.log(name);
        let file = std::fs::File::create(&log).map_err(Error::file("create", &log))?;
        command::redirect(program, file, &log)?;
        let status = command::start(program)?.wait().map_err(Error::file("wait for the writer of", &log))?;
        let text = std::fs::read(&log).map_err(Error::file("read", &log))?;
        Ok((command::exit_code(status), String::from_utf8_lossy(&text).into_owned()))
    }

    /// Adds a line `skipped: NAME: REASON` to the skips.
    pub fn skip(&self, line: &str) {
        lock(&self.skips).push(line.to_owned());
    }

    /// The skips so far.
    pub fn skips(&self) -> Vec<String> {
        lock(&self.skips).clone()
    }

    /// Adds a line that the summary has.
    pub fn note(&self, line: &str) {
        lock(&self.notes).push(line.to_owned());
    }

    /// The notes so far.
    pub fn notes(&self) -> Vec<String> {
        lock(&self.notes).clone()
    }

    /// The names of the steps that failed by more than tests that may be repeated.
    pub fn failed(&self) -> Vec<String> {
        lock(&self.ended).iter().filter(|step| step.failed).map(|step| step.name.clone()).collect()
    }

    /// The tests that have failed.
    pub fn failures(&self) -> Vec<Failure> {
        lock(&self.ended).iter().flat_map(|step| step.failures.clone()).collect()
    }

    /// The lines that say how long each step took.
    pub fn time_table(&self) -> String {
        time_table(&lock(&self.ended), self.start.elapsed())
    }
}

/// Locks, also after a thread has panicked with the lock held.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// `time: NAME 3 s, NAME 12 s, …; 15 s in all`, in lines that fit a terminal.
fn time_table(steps: &[Step], all: Duration) -> String {
    const WIDTH: usize = 100;
    let mut parts: Vec<String> =
        steps.iter().map(|step| format!("{} {} s,", step.name, step.duration.as_secs())).collect();
    if let Some(last) = parts.last_mut() {
        last.pop();
        last.push(';');
    }
    parts.push(format!("{} min {} s in all", all.as_secs() / 60, all.as_secs() % 60));
    let mut lines = vec!["time:".to_owned()];
    for part in parts {
        let line = lines.last_mut().expect("there is a line");
        if line.len() + 1 + part.len() > WIDTH {
            lines.push(format!("     {part}"));
        } else {
            *line += &format!(" {part}");
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::{Place, TestName};

    fn steps() -> (tempfile::TempDir, Steps) {
        let directory = tempfile::tempdir().unwrap();
        let steps = Steps::new(&directory.path().join("logs")).unwrap();
        (directory, steps)
    }

    fn shell(script: &str) -> Command {
        let mut shell = Command::new("sh");
        shell.args(["-c", script]);
        shell
    }

    #[test]
    fn a_run_goes_on_after_a_failure_and_names_it() {
        let (_directory, steps) = steps();
        assert!(!steps.program("first", &mut shell("echo reason; exit 1"), str::to_owned));
        assert!(steps.program("second", &mut shell("echo fine"), str::to_owned));
        assert!(!steps.program("third", &mut Command::new("/nowhere/program"), str::to_owned));
        assert_eq!(steps.failed(), ["first", "third"]);
        assert_eq!(std::fs::read_to_string(steps.log("first")).unwrap(), "reason\n");
    }

    #[test]
    fn a_step_of_which_only_tests_failed_names_them() {
        let (_directory, steps) = steps();
        let failure =
            Failure { name: TestName::one(Place::Python, "a"), message: "too long".to_owned(), is_finding: false };
        let outcome = |status, failures| steps.outcome(status, "text\n", str::to_owned, failures);
        assert!(!steps.run("first", || outcome(1, vec![failure.clone()])));
        assert!(!steps.run("second", || outcome(1, Vec::new())));
        assert!(steps.run("third", || outcome(0, Vec::new())));
        // A test that has left something fails, whatever the program says.
        assert!(!steps.run("fourth", || outcome(0, vec![failure.clone()])));
        assert_eq!((steps.failed(), steps.failures()), (vec!["second".to_owned()], vec![failure.clone(), failure]));
    }

    #[test]
    fn a_skipped_program_gives_its_reasons() {
        let (_directory, steps) = steps();
        assert!(steps.program("x", &mut shell("echo other; echo 'skipped: x: no y'; exit 77"), str::to_owned));
        assert_eq!(steps.skips(), ["skipped: x: no y"]);
        assert!(steps.failed().is_empty());
    }

    #[test]
    fn the_table_of_times_has_every_step_and_fits() {
        let step = |name: &str, seconds| Step {
            name: name.to_owned(),
            duration: Duration::from_secs(seconds),
            failed: false,
            failures: Vec::new(),
        };
        assert_eq!(
            time_table(&[step("a", 3), step("b", 61)], Duration::from_secs(64)),
            "time: a 3 s, b 61 s; 1 min 4 s in all"
        );
        let many: Vec<Step> = (0..40).map(|index| step(&format!("step-{index}"), index)).collect();
        let table = time_table(&many, Duration::from_secs(1));
        assert!(table.lines().all(|line| line.len() <= 100), "{table}");
        assert!(many.iter().all(|step| table.contains(&format!("{} {} s", step.name, step.duration.as_secs()))));
    }
}
