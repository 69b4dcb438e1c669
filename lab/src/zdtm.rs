//! CRIU's own tests, ZDTM, through Pagemark.
//!
//! Each test is a program that sets up some state of a process, waits for SIGTERM, and then checks
//! that the state is still there. It is started, saved, killed, restored and asked for its verdict,
//! once with plain CRIU and once with each way in which Pagemark saves and restores. Where plain
//! CRIU passes, Pagemark must pass: the exceptions are in `lab/zdtm-exceptions.txt`, each with its
//! reason.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::path::Path;
use std::process::Command;
use std::str::FromStr;
use std::sync::Mutex;
use std::time::Duration;

use crate::{Error, Result, cache, command, setup, source_root};

mod catalog;
mod exceptions;
mod root;
mod source;
mod text;
mod trial;

pub use catalog::{Flavor, Test};
pub use exceptions::Exceptions;
pub use trial::run as run_trial;

/// Tests that run side by side. They wait more than they compute.
const WORKERS: usize = 3;
/// The longest time of a trial.
const TRIAL_LIMIT: Duration = Duration::from_secs(300);

/// How a test is saved and restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mode {
    /// `criu dump --leave-running`, a kill, `criu restore`: what Pagemark is compared with.
    Criu,
    /// `pagemark checkpoint`, a kill, `pagemark restore`.
    Checkpoint,
    /// `pagemark attach` until three checkpoints are taken, a kill, `pagemark restore`.
    Attach,
    /// Like [`Mode::Checkpoint`], with `pagemark restore --lazy`.
    Lazy,
}

impl Mode {
    /// All modes.
    pub const ALL: [Mode; 4] = [Mode::Criu, Mode::Checkpoint, Mode::Attach, Mode::Lazy];

    /// The name that the command line and the list of exceptions use.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Criu => "criu",
            Mode::Checkpoint => "checkpoint",
            Mode::Attach => "attach",
            Mode::Lazy => "lazy",
        }
    }
}

impl FromStr for Mode {
    type Err = Error;

    fn from_str(name: &str) -> Result<Mode> {
        Mode::ALL.into_iter().find(|mode| mode.name() == name).ok_or_else(|| {
            let names = Mode::ALL.map(Mode::name).join(", ");
            Error::unmet(format!("{name} is no way to save a test of CRIU"), format!("use any of: {names}"))
        })
    }
}

/// How a trial ended: a test in a mode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The state was there after the restore; or the test expects that it cannot be saved, and it
    /// was refused.
    Passed,
    /// The test could not be started here, so that nothing is known.
    NotStarted(String),
    /// It could not be saved or restored, or its state was not there afterwards.
    Failed(String),
    /// It could not be saved, and did not continue as if nothing had happened.
    Harmed(String),
}

impl fmt::Display for Verdict {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Verdict::Passed => formatter.write_str("passed"),
            Verdict::NotStarted(reason) => write!(formatter, "not started: {reason}"),
            Verdict::Failed(reason) => write!(formatter, "failed: {reason}"),
            Verdict::Harmed(reason) => write!(formatter, "harmed: {reason}"),
        }
    }
}

impl FromStr for Verdict {
    type Err = Error;

    fn from_str(line: &str) -> Result<Verdict> {
        let (word, reason) = line.split_once(": ").unwrap_or((line, ""));
        match word {
            "passed" => Ok(Verdict::Passed),
            "not started" => Ok(Verdict::NotStarted(reason.to_owned())),
            "failed" => Ok(Verdict::Failed(reason.to_owned())),
            "harmed" => Ok(Verdict::Harmed(reason.to_owned())),
            _ => Err(Error::unmet(format!("{line:?} is no verdict"), "see the log of the trial")),
        }
    }
}

/// The verdict of each trial.
pub type Verdicts = BTreeMap<(String, Mode), Verdict>;

/// What is run.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Names of tests, such as `static/pipe00` or `ns/static/pipe00`; empty for all that can run
    /// here.
    pub tests: Vec<String>,
    /// The flavors, where no tests are named; empty for the tests in the namespaces of the host.
    pub flavors: Vec<Flavor>,
    /// The modes; empty for all.
    pub modes: Vec<Mode>,
}

/// Runs the tests and compares their verdicts with plain CRIU's and with the list of exceptions.
/// What each trial printed is kept below `logs`.
///
/// Returns the lines of the report, and whether nothing is worse than the list says.
///
/// # Errors
/// If the tests cannot be fetched or built, or are not among the selected ones.
pub fn run(selection: &Selection, logs: &Path) -> Result<(Vec<String>, bool)> {
    if !command::is_root() {
        return Err(Error::unmet("only root can checkpoint and restore", "run it as root"));
    }
    let exceptions = Exceptions::read(&source_root().join("lab/zdtm-exceptions.txt"))?;
    let tree = source::built()?;
    let criu = setup::criu_path()?;
    let all = catalog::tests(&tree, &criu)?;
    let (tests, not_here) = selected(selection, all, &tree)?;
    let modes = if selection.modes.is_empty() { Mode::ALL.to_vec() } else { selection.modes.clone() };
    cache::remove(logs)?;
    cache::create(logs)?;
    cache::remove_abandoned(&std::env::temp_dir(), source::COPY);
    let mut verdicts = run_all(&tests, &modes, &tree, &criu, logs)?;
    if !modes.contains(&Mode::Criu) {
        // What Pagemark does not pass is compared.
        let failed: Vec<Test> = tests.into_iter().filter(|test| has_failed(&test.name(), &verdicts)).collect();
        verdicts.extend(run_all(&failed, &[Mode::Criu], &tree, &criu, logs)?);
    }
    let (mut report, is_good) = exceptions.compare(&verdicts);
    report.extend(not_here.iter().map(|name| format!("cannot run here: {name}")));
    Ok((report, is_good))
}

/// Whether a test has not passed in some mode.
fn has_failed(name: &str, verdicts: &Verdicts) -> bool {
    verdicts.iter().any(|((test, _), verdict)| test == name && *verdict != Verdict::Passed)
}

/// The tests of `all` that are selected, and the names of those that cannot run here.
///
/// # Errors
/// A name is that of no test.
fn selected(selection: &Selection, all: Vec<Test>, tree: &Path) -> Result<(Vec<Test>, Vec<String>)> {
    if selection.tests.is_empty() {
        let flavors = if selection.flavors.is_empty() { &[Flavor::Host][..] } else { &selection.flavors };
        return Ok((all.into_iter().filter(|test| flavors.contains(&test.flavor)).collect(), Vec::new()));
    }
    let (mut tests, mut not_here) = (Vec::new(), Vec::new());
    for name in &selection.tests {
        match all.iter().find(|test| test.name() == *name) {
            Some(test) => tests.push(test.clone()),
            None if Test::read(tree, name)?.exists(tree) => not_here.push(name.clone()),
            None => {
                let what = format!("{name} is no test of CRIU");
                return Err(Error::unmet(what, "the names are those of the sources, such as static/pipe00"));
            }
        }
    }
    Ok((tests, not_here))
}

/// Runs every test in every mode, some tests side by side. The modes of one test take turns: it may
/// use the same names in `/tmp` in each of them.
fn run_all(tests: &[Test], modes: &[Mode], tree: &Path, criu: &Path, logs: &Path) -> Result<Verdicts> {
    let (alone, together): (Vec<_>, Vec<_>) = tests.iter().partition(|test| test.is_exclusive());
    let together = Mutex::new(VecDeque::from(together));
    let verdicts = Mutex::new(Verdicts::new());
    let next = || together.lock().unwrap_or_else(std::sync::PoisonError::into_inner).pop_front();
    let run = |test: &Test, tree: &Path| -> Result<()> {
        for mode in modes {
            let verdict = run_one(test, *mode, tree, criu, logs)?;
            crate::progress!("{} {}: {verdict}", test.name(), mode.name());
            let mut verdicts = verdicts.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            verdicts.insert((test.name(), *mode), verdict);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let worker = |_| {
            scope.spawn(|| -> Result<()> {
                // Tests write beside their sources.
                let own = source::Copy::new(tree)?;
                while let Some(test) = next() {
                    run(test, own.path())?;
                }
                Ok(())
            })
        };
        let workers: Vec<_> = (0..WORKERS).map(worker).collect();
        workers
            .into_iter()
            .try_for_each(|worker| worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })?;
    let own = source::Copy::new(tree)?;
    alone.into_iter().try_for_each(|test| run(test, own.path()))?;
    Ok(verdicts.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner))
}

/// Runs a test in namespaces of its own: its process ids, network, mounts and System V objects are
/// free when it is restored.
fn run_one(test: &Test, mode: Mode, tree: &Path, criu: &Path, logs: &Path) -> Result<Verdict> {
    let log = logs.join(format!("{}.{}", test.name().replace('/', "-"), mode.name()));
    let work = tree.with_extension("work");
    cache::remove(&work)?;
    cache::create(&work)?;
    let program = std::env::current_exe().map_err(Error::file("find", "this program".as_ref()))?;
    let file = std::fs::File::create(&log).map_err(Error::file("create", &log))?;
    let mut trial = Command::new("unshare");
    trial
        .args([
            "--net",
            "--mount",
            "--pid",
            "--ipc",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "--propagation",
            "slave",
        ])
        .arg(program)
        .args(["zdtm-trial", &test.name(), mode.name()])
        .args([tree, &work, criu, &command::built("pagemark")?, &work.join("verdict")]);
    command::redirect(&mut trial, file, &log)?;
    let mut trial = command::start(&mut trial)?;
    if command::wait_for(&mut trial, TRIAL_LIMIT)?.is_none() {
        return Ok(Verdict::Failed(format!("the trial did not end within {} s", TRIAL_LIMIT.as_secs())));
    }
    let verdict = verdict(&work.join("verdict"), &log);
    cache::remove(&work)?;
    Ok(verdict)
}

/// The verdict that a trial has written to a file. A trial that ended without one has failed, with
/// the end of its log as the reason.
fn verdict(file: &Path, log: &Path) -> Verdict {
    let verdict = text::read(file);
    verdict.trim_end().parse().unwrap_or_else(|_| {
        Verdict::Failed(format!("the trial ended without a verdict: {}", text::end_of(&text::read(log))))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_tests_that_cannot_run_here_are_kept() {
        let tree = std::env::temp_dir().join(format!("pagemark-selected.{}", std::process::id()));
        cache::create(&tree.join("zdtm/static")).unwrap();
        for program in ["pipe00", "pipe01"] {
            std::fs::write(tree.join(format!("zdtm/static/{program}.c")), "").unwrap();
        }
        let all = || vec![Test::read(&tree, "static/pipe00").unwrap()];
        let select = |names: &[&str]| {
            let tests = names.iter().map(|name| (*name).to_owned()).collect();
            let (tests, not_here) = selected(&Selection { tests, ..Selection::default() }, all(), &tree)?;
            Ok::<_, Error>((tests.iter().map(Test::name).collect::<Vec<_>>(), not_here))
        };
        assert_eq!(select(&[]).unwrap(), (vec!["static/pipe00".to_owned()], vec![]));
        let (tests, not_here) = select(&["static/pipe01", "static/pipe00"]).unwrap();
        assert_eq!((tests, not_here), (vec!["static/pipe00".to_owned()], vec!["static/pipe01".to_owned()]));
        assert!(select(&["static/pipe02"]).unwrap_err().to_string().contains("no test of CRIU"));
        cache::remove(&tree).unwrap();
    }

    #[test]
    fn what_has_not_passed_in_a_mode_has_failed() {
        let verdict = |verdict| Verdicts::from([(("static/pipe00".to_owned(), Mode::Lazy), verdict)]);
        assert!(has_failed("static/pipe00", &verdict(Verdict::Failed("refused".to_owned()))));
        assert!(has_failed("static/pipe00", &verdict(Verdict::NotStarted(String::new()))));
        assert!(!has_failed("static/pipe00", &verdict(Verdict::Passed)));
        assert!(!has_failed("static/pipe01", &verdict(Verdict::Harmed(String::new()))));
    }

    #[test]
    fn a_trial_without_a_verdict_has_failed() {
        let directory = std::env::temp_dir().join(format!("pagemark-verdict.{}", std::process::id()));
        cache::create(&directory).unwrap();
        let (file, log) = (directory.join("verdict"), directory.join("log"));
        std::fs::write(&log, "some output\nthe disk is full\n").unwrap();
        let missing = verdict(&file, &log);
        assert!(matches!(&missing, Verdict::Failed(reason) if reason.ends_with("the disk is full")), "{missing}");
        std::fs::write(&file, "pas").unwrap();
        assert_eq!(verdict(&file, &log), missing);
        std::fs::write(&file, "passed").unwrap();
        assert_eq!(verdict(&file, &log), Verdict::Passed);
        cache::remove(&directory).unwrap();
    }

    #[test]
    fn a_verdict_is_read_as_it_is_written() {
        for verdict in [
            Verdict::Passed,
            Verdict::NotStarted("no nft".to_owned()),
            Verdict::Failed("a: b".to_owned()),
            Verdict::Harmed("it is stopped".to_owned()),
        ] {
            assert_eq!(verdict.to_string().parse::<Verdict>().unwrap(), verdict);
        }
        assert!("".parse::<Verdict>().is_err());
    }
}
