//! The exceptions that the package raises. Where Python has an exception for the failure (a bad
//! argument, an index beyond the end, a system call that failed), the package raises that;
//! otherwise it raises a subclass of its own `Error`.

use std::borrow::Borrow;
use std::io;

use pagemark::{Error as CoreError, ErrorKind};
use pagemark_process::restore::{RestoreFailure, Stage};
use pagemark_process::{Error as CoreProcessError, ErrorKind as ProcessErrorKind};
use pagemark_saved_heap::{Error as CoreHeapError, ErrorKind as HeapErrorKind};
use pyo3::create_exception;
use pyo3::exceptions::{
    PyBaseException, PyException, PyIndexError, PyMemoryError, PyOSError, PyPermissionError, PyValueError,
};
use pyo3::prelude::*;
use pyo3::types::PyList;

create_exception!(
    pagemark,
    Error,
    PyException,
    "An operation of Pagemark failed. The content of a region is unchanged."
);
create_exception!(
    pagemark,
    TransactionError,
    Error,
    "The operation is not possible in a transaction, or only in one, or the region was made without rollback."
);
create_exception!(
    pagemark,
    MechanismError,
    Error,
    "The mechanism does not work on this machine; the message says what would enable it."
);
create_exception!(
    pagemark,
    SnapshotError,
    Error,
    "The snapshot or the changes do not fit the region or the store, or the store's budget does not suffice."
);
create_exception!(
    pagemark,
    RepositoryError,
    Error,
    "The repository could not be read or written, or has no such checkpoint."
);
create_exception!(
    pagemark,
    ForkedError,
    Error,
    "The region, heap or job belongs to the process that this one was forked from."
);
create_exception!(
    pagemark,
    HeapError,
    Error,
    "The saved heap could not be opened or saved: it is another one than was expected, its addresses are taken, or \
     another program has saved to the job."
);
create_exception!(
    pagemark,
    ProcessError,
    Error,
    "The process could not be attached to or checkpointed. It keeps running."
);
create_exception!(pagemark, ProcessGoneError, ProcessError, "There is no such process, or it has exited.");
create_exception!(
    pagemark,
    CriuError,
    Error,
    "CRIU is missing, too old or does not work here, or could not save the processes; the message has CRIU's errors."
);
create_exception!(
    pagemark,
    RestoreError,
    Error,
    "The process tree could not be restored. None of its processes is left, and the checkpoint can be restored again; \
     notes of the exception name files that were put back."
);
create_exception!(
    pagemark,
    PidInUseError,
    RestoreError,
    "Another process has a process id that the tree needs. Unless notes of the exception name files, nothing was changed."
);

/// The exception for an error of the core: of a region, a snapshot, a repository or a job.
pub fn of_error(error: impl Borrow<CoreError>) -> PyErr {
    let error = error.borrow();
    if let Some(error) = error.target_error() {
        return of_process(error);
    }
    let message = error.to_string();
    match error.kind() {
        ErrorKind::NoTransaction | ErrorKind::TransactionOpen | ErrorKind::NoRollback => {
            TransactionError::new_err(message)
        }
        ErrorKind::Unaligned
        | ErrorKind::NotData
        | ErrorKind::BeyondFile
        | ErrorKind::Shared
        | ErrorKind::NotDistinct
        | ErrorKind::SavedLengthDiffers
        | ErrorKind::InvalidName
        | ErrorKind::ChunkSize => PyValueError::new_err(message),
        ErrorKind::OutOfRange => PyIndexError::new_err(message),
        ErrorKind::ForkedChild => ForkedError::new_err(message),
        ErrorKind::WrongRegion
        | ErrorKind::WrongStore
        | ErrorKind::LengthDiffers
        | ErrorKind::BudgetExceeded { .. }
        | ErrorKind::StoreFull => SnapshotError::new_err(message),
        ErrorKind::NoMemory => PyMemoryError::new_err(message),
        ErrorKind::Unavailable => MechanismError::new_err(message),
        ErrorKind::Gone
        | ErrorKind::Target
        | ErrorKind::SavedElsewhere
        | ErrorKind::Overlaps
        | ErrorKind::NotOwned
        | ErrorKind::Remapped
        | ErrorKind::NotMapped => Error::new_err(message),
        _ => match error.io_error() {
            Some(source) => of_system(source, message),
            None => RepositoryError::new_err(message),
        },
    }
}

/// The exception for a process that could not be attached to or captured.
pub fn of_process(error: &CoreProcessError) -> PyErr {
    let message = error.to_string();
    match error.kind() {
        _ if error.is_gone() => ProcessGoneError::new_err(message),
        ProcessErrorKind::Criu | ProcessErrorKind::NoCriu | ProcessErrorKind::Image => CriuError::new_err(message),
        ProcessErrorKind::Track if core_error(error).is_some_and(|error| error.kind() == ErrorKind::Unavailable) => {
            MechanismError::new_err(message)
        }
        ProcessErrorKind::Store => RepositoryError::new_err(message),
        ProcessErrorKind::NotPermitted => PyPermissionError::new_err(message),
        ProcessErrorKind::System => match error.io_error() {
            Some(source) => of_system(source, message),
            None => ProcessError::new_err(message),
        },
        _ => ProcessError::new_err(message),
    }
}

/// The exception for a saved heap that could not be made, opened or saved.
pub fn of_heap(error: CoreHeapError) -> PyErr {
    let message = error.to_string();
    match error.kind() {
        HeapErrorKind::NoRoom => PyMemoryError::new_err(message),
        HeapErrorKind::ForkedChild => ForkedError::new_err(message),
        HeapErrorKind::Core(_) => error.core_error().map_or_else(|| HeapError::new_err(message), of_error),
        _ => HeapError::new_err(message),
    }
}

/// The error of the core that caused an error.
fn core_error(error: &CoreProcessError) -> Option<&CoreError> {
    let first = Some(error as &(dyn std::error::Error + 'static));
    std::iter::successors(first, |error| error.source()).find_map(|error| error.downcast_ref())
}

/// The exception for a process tree that could not be restored.
pub fn of_restore(failure: RestoreFailure) -> PyErr {
    let (message, error) = (failure.to_string(), failure.error);
    match error.kind() {
        _ if failure.stage == Stage::FindCriu => CriuError::new_err(message),
        ProcessErrorKind::PidInUse | ProcessErrorKind::PidTaken => PidInUseError::new_err(message),
        ProcessErrorKind::Store if failure.stage != Stage::Files => match core_error(&error) {
            Some(error) => of_error(error),
            None => RepositoryError::new_err(message),
        },
        ProcessErrorKind::System if failure.stage != Stage::Files => match error.io_error() {
            Some(source) => of_system(source, message),
            None => RestoreError::new_err(message),
        },
        _ => RestoreError::new_err(message),
    }
}

/// An `OSError`; Python chooses its subclass by the error number.
fn of_system(source: &io::Error, message: String) -> PyErr {
    match source.raw_os_error() {
        Some(number) => PyOSError::new_err((number, message)),
        None => PyOSError::new_err(message),
    }
}

/// Adds a note to an exception, which Python prints below its message.
pub fn add_note(exception: &Bound<'_, PyBaseException>, note: String) -> PyResult<()> {
    if exception.hasattr("add_note")? {
        return exception.call_method1("add_note", (note,)).map(drop);
    }
    // Before Python 3.11 nothing prints notes but what knows their attribute, such as pytest.
    if !exception.hasattr("__notes__")? {
        exception.setattr("__notes__", PyList::empty(exception.py()))?;
    }
    exception.getattr("__notes__")?.call_method1("append", (note,)).map(drop)
}
