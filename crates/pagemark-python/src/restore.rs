//! Restoring a process tree.

use std::path::PathBuf;

use pagemark::ByteCount;
use pagemark_process::restore::{Restore, RestoreEvent, Streams};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::{self, RepositoryError};
use crate::repository::Repository;
use crate::signals::HeldSignals;

/// A process tree that was restored.
#[pyclass(frozen, get_all, module = "pagemark")]
pub struct Restored {
    /// Id of the root process, the same as at the checkpoint.
    pid: i32,
    /// Ids of all processes, the root first.
    pids: Vec<i32>,
    /// The files that were changed to their state at the checkpoint.
    files: Vec<RestoredFile>,
}

/// A file that a restore put back.
#[pyclass(frozen, get_all, module = "pagemark")]
#[derive(Clone)]
pub struct RestoredFile {
    /// Path of the file.
    path: PathBuf,
    /// Path of a copy of the content before the restore, if that differed.
    set_aside: Option<PathBuf>,
}

#[pymethods]
impl Restored {
    fn __repr__(&self) -> String {
        format!("<pagemark.Restored process {}, {} processes, {} files>", self.pid, self.pids.len(), self.files.len())
    }
}

#[pymethods]
impl RestoredFile {
    fn __repr__(&self) -> String {
        format!("<pagemark.RestoredFile {}>", self.path.display())
    }
}

/// Restores a process tree from a checkpoint: the newest one of the job, or number `sequence`.
/// Needs root and CRIU.
///
/// With `lazy` the processes run while their memory is delivered; the function returns when all of
/// the memory is delivered, and until then the processes end if this program ends. With `stopped`
/// the processes stay stopped until they get SIGCONT. With `child` the root process becomes a child
/// of this process, for `os.waitpid`; otherwise of init. Standard streams that led out of the tree
/// become those of this process (`streams="inherit"`) or /dev/null ("null").
///
/// With `without_kvm`, processes that `pagemark run --kvm` had started continue without their
/// virtual machine.
///
/// `progress` is called with the number of bytes restored and the number of bytes in the
/// checkpoint. If it raises, it is not called again; the exception is raised when the restore is
/// complete, with a note that names the process.
///
/// Set-uid files, and files outside the directories in which the processes worked, are changed only
/// with `allow_unusual_files`; otherwise a RestoreError lists them, and nothing is changed.
///
/// Files that the processes wrote get their content at the checkpoint; copies of their present
/// content are kept in the directory `asides` of the repository, and the result names them. If the
/// restore fails, the files are changed back. Raises PidInUseError if a process id that the tree
/// needs is in use (nothing was changed), RepositoryError if there is no such checkpoint, CriuError
/// if CRIU is missing, and RestoreError.
#[pyfunction]
#[pyo3(signature = (
    repository, job, sequence = None, *, lazy = false, stopped = false, child = false, streams = "inherit",
    allow_unusual_files = false, without_kvm = false, progress = None
))]
#[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
pub fn restore(
    py: Python<'_>,
    repository: &Repository,
    job: &str,
    sequence: Option<u64>,
    lazy: bool,
    stopped: bool,
    child: bool,
    streams: &str,
    allow_unusual_files: bool,
    without_kvm: bool,
    progress: Option<Py<PyAny>>,
) -> PyResult<Restored> {
    let streams = match streams {
        "inherit" => Streams::Inherit,
        "null" => Streams::Null,
        name => return Err(PyValueError::new_err(format!("unknown streams {name:?}: \"inherit\" or \"null\""))),
    };
    let mut files = Vec::new();
    let mut raised = None;
    let restored = py.detach(|| {
        let _held = HeldSignals::hold()?;
        let repository = &repository.repository;
        let newest = || match repository.checkpoints(job).map_err(errors::of_error)?.last() {
            Some(checkpoint) => Ok(checkpoint.sequence),
            None => {
                Err(RepositoryError::new_err(format!("{job} has no checkpoint in {}", repository.path().display())))
            }
        };
        let sequence = sequence.map_or_else(newest, Ok)?;
        let checkpoint = repository.read(job, sequence).map_err(errors::of_error)?;
        let mut report = |done_bytes: u64, total_bytes: u64| {
            if let (Some(progress), None) = (&progress, &raised) {
                raised = Python::attach(|py| progress.call1(py, (done_bytes, total_bytes))).err();
            }
        };
        let restore = Restore::new(&checkpoint).lazy(lazy).stopped(stopped).detach(!child).streams(streams);
        let restore = restore.allow_unusual_files(allow_unusual_files).without_machine(without_kvm);
        let restore = restore.asides_in(repository.path().join("asides"));
        let restored = restore.run(&mut |event| match event {
            RestoreEvent::Preparing { .. }
            | RestoreEvent::Staging { .. }
            | RestoreEvent::AsidesNotDescribed(_)
            | RestoreEvent::Running(_) => {}
            RestoreEvent::Reading { done, total } => report(done.get(), total.get()),
            RestoreEvent::FilePutBack(file) => {
                files.push(RestoredFile { path: file.path.clone(), set_aside: file.set_aside.clone() });
            }
            RestoreEvent::Delivering { done_pages, total_pages } => {
                report(ByteCount::of_pages(done_pages).get(), ByteCount::of_pages(total_pages).get());
            }
        });
        restored.map_err(errors::of_restore)
    });
    match (restored, raised) {
        (Ok(restored), None) => Ok(Restored { pid: restored.root_pid, pids: restored.pids, files }),
        (Ok(restored), Some(error)) => {
            let note = format!("process {} was restored", restored.root_pid);
            errors::add_note(error.value(py), note)?;
            Err(error)
        }
        (Err(error), _) => {
            // The processes ran with these files before the delivery of their memory failed.
            for file in &files {
                errors::add_note(error.value(py), file.note())?;
            }
            Err(error)
        }
    }
}

impl RestoredFile {
    fn note(&self) -> String {
        let path = self.path.display();
        match &self.set_aside {
            Some(aside) => format!("{path} was put back; its previous content is in {}", aside.display()),
            None => format!("{path} was put back"),
        }
    }
}
