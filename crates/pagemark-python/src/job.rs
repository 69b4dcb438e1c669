//! Checkpoints of a process tree.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use pagemark::checkpointer::Strategy;
use pagemark::job::{End, JobEvent, Summary, Taken};
use pagemark::repository::Retention;
use pagemark::track::Scope;
use pagemark::{Job as CoreJob, JobOptions, Mechanism, Policy};
use pagemark_linux::exit_watch::ExitWatch;
use pagemark_linux::proc::{self, Process};
use pagemark_linux::this_process::OfThisProcess;
use pagemark_process::attach;
use pagemark_process::criu::DumpOptions;
use pagemark_process::saver::{CriuSaver, RegisterSaver, StateSaver};
use pagemark_process::target::ProcessTarget;
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::errors::{self, ForkedError};
use crate::repository::{Checkpoint, Repository};
use crate::signals::HeldSignals;

/// Pause between two checks for signals, and whether the process has exited.
const SIGNAL_POLL: Duration = Duration::from_millis(50);

/// Takes checkpoints of a process and its descendants into a repository, under the name `name`.
/// Needs root.
///
/// `mechanism` finds the written pages: one of `MECHANISMS` that works for other processes, or
/// "auto". `strategy` is "pre-copy" (memory is copied in rounds while the processes run), "stop-
/// and-copy" (while they are frozen), "copy-on-write" (when they run again, each page as it was
/// before the first write to it; not with `memory_only`) or "auto" (what of these freezes them for
/// the shortest time, in each checkpoint). `keep_connections` saves TCP connections;
/// `memory_only` saves memory and registers alone, which needs no CRIU and cannot be restored.
/// `run` keeps the newest `keep_last` checkpoints and the newest checkpoint of each period of
/// `keep_every` seconds; without both it keeps all.
///
/// The processes keep running, untouched, when the job is detached: by `detach`, at the end of a
/// `with` block or of `run`, or when this program ends. Raises ProcessGoneError if there is no such
/// process, ProcessError if it cannot be checkpointed, PermissionError, MechanismError, and
/// CriuError if CRIU is missing.
#[pyclass(frozen, module = "pagemark")]
pub struct Job {
    /// None once the job is detached.
    job: Mutex<Option<CoreJob<ProcessTarget>>>,
    pid: i32,
    name: String,
    mechanism: Mechanism,
    /// The process that made the job.
    owner: OfThisProcess,
}

#[pymethods]
impl Job {
    #[new]
    #[pyo3(signature = (
        pid, repository, name, *, mechanism = "auto", strategy = "pre-copy", keep_connections = false, memory_only = false,
        keep_last = None, keep_every = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn new(
        py: Python<'_>,
        pid: i32,
        repository: &Repository,
        name: &str,
        mechanism: &str,
        strategy: &str,
        keep_connections: bool,
        memory_only: bool,
        keep_last: Option<u32>,
        keep_every: Option<f64>,
    ) -> PyResult<Job> {
        let mechanism = match mechanism {
            "auto" => None,
            name => Some(name.parse::<Mechanism>().map_err(PyValueError::new_err)?),
        };
        let retention = retention(keep_last, keep_every)?;
        let policy = Policy { strategy: parse_strategy(strategy)?, retention, ..Policy::default() };
        let options = JobOptions { policy, ..JobOptions::new(name) };
        let repository = repository.repository.clone();
        py.detach(|| {
            let _held = HeldSignals::hold()?;
            // Refuses a name that no job can have.
            repository.checkpoints(name).map_err(errors::of_error)?;
            let saver: Arc<dyn StateSaver> = if memory_only {
                Arc::new(RegisterSaver)
            } else {
                let options = DumpOptions { keep_connections, ..DumpOptions::default() };
                Arc::new(CriuSaver::find(options).map_err(|error| errors::of_process(&error))?)
            };
            let mechanism = mechanism.unwrap_or_else(|| Mechanism::choose(Scope::Process));
            let target = attach::check(pid).and_then(|process| ProcessTarget::attach(process, mechanism, saver));
            let target = target.map_err(|error| errors::of_process(&error))?;
            let job = Mutex::new(Some(CoreJob::new(target, repository, options)));
            Ok(Job { job, pid, name: name.to_owned(), mechanism, owner: OfThisProcess::new() })
        })
    }

    /// Id of the process at the root of the tree.
    #[getter]
    fn pid(&self) -> i32 {
        self.pid
    }

    /// The name of the checkpoints in the repository.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// The mechanism that finds the written pages; never "auto".
    #[getter]
    fn mechanism(&self) -> &'static str {
        self.mechanism.name()
    }

    /// Takes a checkpoint, and returns it with its cost. When this returns, the checkpoint is on
    /// disk. Raises ProcessGoneError if the process has exited. If the checkpoint fails, the
    /// processes keep running, and the next checkpoint loses nothing.
    fn checkpoint(&self, py: Python<'_>) -> PyResult<Checkpoint> {
        self.check_owner()?;
        let taken = py.detach(|| {
            let _held = HeldSignals::hold()?;
            let mut job = self.lock();
            job.as_mut().ok_or_else(detached)?.checkpoint().map_err(errors::of_error)
        })?;
        Ok(Checkpoint::taken(&self.name, &taken))
    }

    /// Takes a checkpoint every `every` seconds until the process exits, then detaches. Returns the
    /// number of checkpoints taken.
    ///
    /// `on_checkpoint` is called with each checkpoint. `on_failure` is called with the error if a
    /// checkpoint cannot be taken, or old checkpoints cannot be removed; the next interval tries
    /// again, and the same failure several times in a row is reported once. Without
    /// `on_failure` the first failure is raised. An exception of either function, or of a handler
    /// of signals (KeyboardInterrupt), ends the run: a checkpoint that is being taken is completed
    /// but not reported, the process keeps running, and the exception is raised.
    #[pyo3(signature = (every = 10.0, on_checkpoint = None, on_failure = None))]
    fn run(
        &self,
        py: Python<'_>,
        every: f64,
        on_checkpoint: Option<Py<PyAny>>,
        on_failure: Option<Py<PyAny>>,
    ) -> PyResult<u64> {
        self.check_owner()?;
        let every = seconds("every", every)?;
        let mut handle = |event: Event| {
            Python::attach(|py| match (event, &on_checkpoint, &on_failure) {
                (Event::Taken(taken), Some(call), _) => {
                    call.call1(py, (Checkpoint::taken(&self.name, &taken),)).map(drop)
                }
                (Event::Taken(_), None, _) => Ok(()),
                (Event::Failed(error), _, Some(call)) => call.call1(py, (error,)).map(drop),
                (Event::Failed(error), _, None) => Err(error),
            })
        };
        py.detach(|| {
            let mut job = self.lock().take().ok_or_else(detached)?;
            job.policy_mut().every = every;
            let exit = match Process::find(self.pid).and_then(ExitWatch::new) {
                Ok(exit) => Some(exit),
                Err(error) if proc::is_gone(&error) => None,
                Err(error) => return Err(PyOSError::new_err((error.raw_os_error(), "cannot watch the process"))),
            };
            match exit {
                Some(exit) => run(job, &exit, &mut handle).map(|summary| summary.checkpoints),
                None => Ok(0),
            }
        })
    }

    /// Detaches from the processes, which keep running. A second call does nothing.
    fn detach(&self, py: Python<'_>) -> PyResult<()> {
        self.check_owner()?;
        py.detach(|| drop(self.lock().take()));
        Ok(())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.detach(py)
    }

    fn __repr__(&self) -> String {
        format!("<pagemark.Job {} of process {}, {}>", self.name, self.pid, self.mechanism.name())
    }
}

impl Job {
    /// Call with the interpreter released: a checkpoint holds the lock.
    fn lock(&self) -> MutexGuard<'_, Option<CoreJob<ProcessTarget>>> {
        self.job.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fails in a forked child. It shares the descriptors of the trackers, so that the pages that
    /// it collected would be missing in the parent's checkpoints.
    fn check_owner(&self) -> PyResult<()> {
        if self.owner.is_here() {
            return Ok(());
        }
        Err(ForkedError::new_err("the job belongs to the process that this one was forked from"))
    }
}

/// An event that a run reports.
enum Event {
    Taken(Taken),
    Failed(PyErr),
}

/// Runs the job in a thread of its own, while this thread, in which Python may handle signals,
/// calls `handle` and checks for signals. The job waits until an event is handled.
fn run(
    job: CoreJob<ProcessTarget>,
    exit: &ExitWatch,
    handle: &mut dyn FnMut(Event) -> PyResult<()>,
) -> PyResult<Summary> {
    let (stop, stopped) = mpsc::channel();
    let (report, reports) = mpsc::channel();
    let (handled, is_handled) = mpsc::channel();
    thread::scope(|scope| {
        let work = move || run_holding_signals(job, &stopped, &report, &is_handled);
        let started = thread::Builder::new().name("pagemark-job".into()).spawn_scoped(scope, work);
        let worker = started.map_err(|error| PyOSError::new_err((error.raw_os_error(), "cannot start a thread")))?;
        let mut result = Ok(());
        loop {
            match reports.recv_timeout(SIGNAL_POLL) {
                Ok(event) => {
                    if result.is_ok() {
                        // A run with a short interval may never reach the timeout below.
                        result = handle(event).and_then(|()| check_signals());
                    }
                    // The stop is sent first, so that no further checkpoint begins.
                    if result.is_err() {
                        let _ = stop.send(End::Stopped);
                    }
                    let _ = handled.send(());
                }
                Err(RecvTimeoutError::Timeout) => {
                    if result.is_ok() {
                        result = check_signals();
                    }
                    // The job no longer listens only when it has ended anyway.
                    if result.is_err() {
                        let _ = stop.send(End::Stopped);
                    }
                    if exit.has_exited() {
                        let _ = stop.send(End::TargetGone);
                    }
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        let summary = worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        result.map(|()| summary)
    })
}

fn run_holding_signals(
    job: CoreJob<ProcessTarget>,
    stopped: &Receiver<End>,
    report: &Sender<Event>,
    is_handled: &Receiver<()>,
) -> PyResult<Summary> {
    let _held = HeldSignals::hold()?;
    Ok(job.run(stopped, &mut |event: JobEvent<'_>| {
        let event = match event {
            JobEvent::FirstCheckpoint | JobEvent::NotKept(_) | JobEvent::Pruned(_) => return,
            JobEvent::Taken(taken) => Event::Taken(*taken),
            JobEvent::AttachFailed(error) => Event::Failed(errors::of_error(error)),
            JobEvent::CheckpointFailed(error) => Event::Failed(errors::of_error(error)),
            JobEvent::PruneFailed(error) => Event::Failed(errors::of_error(error)),
        };
        if report.send(event).is_ok() {
            let _ = is_handled.recv();
        }
    }))
}

/// Runs the handlers of signals that have arrived, if this is the thread in which Python runs them.
fn check_signals() -> PyResult<()> {
    Python::attach(|py| py.check_signals())
}

fn parse_strategy(name: &str) -> PyResult<Strategy> {
    match name {
        "pre-copy" => Ok(Strategy::default()),
        "stop-and-copy" => Ok(Strategy::StopAndCopy),
        "copy-on-write" => Ok(Strategy::CopyOnWrite),
        "auto" => Ok(Strategy::Auto),
        name => {
            let known = "\"pre-copy\", \"stop-and-copy\", \"copy-on-write\" or \"auto\"";
            Err(PyValueError::new_err(format!("unknown strategy {name:?}: {known}")))
        }
    }
}

fn retention(keep_last: Option<u32>, keep_every: Option<f64>) -> PyResult<Option<Retention>> {
    if keep_last == Some(0) {
        return Err(PyValueError::new_err("keep_last must be at least 1"));
    }
    let keep_every = keep_every.map(|period| seconds("keep_every", period)).transpose()?;
    Ok((keep_last.is_some() || keep_every.is_some()).then_some(Retention { keep_last, keep_every }))
}

/// A positive time.
fn seconds(argument: &str, value: f64) -> PyResult<Duration> {
    let time = Duration::try_from_secs_f64(value).ok().filter(|time| !time.is_zero());
    time.ok_or_else(|| PyValueError::new_err(format!("{argument} must be a positive number of seconds, not {value}")))
}

fn detached() -> PyErr {
    PyValueError::new_err("the job is detached")
}
