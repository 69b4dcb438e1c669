//! Errors as Python knows them. Where Python has a word for what is wrong (a bad argument, an index beyond the end, a system
//! call that failed), that is raised; everything else is an `Error` of this package.

use std::io;

use pagemark::TrackError;
use pagemark::region::RegionError;
use pagemark::snapshot::SnapshotError as CoreSnapshotError;
use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyIndexError, PyMemoryError, PyOSError, PyValueError};
use pyo3::prelude::*;

create_exception!(
    pagemark,
    Error,
    PyException,
    "Pagemark could not do what was asked. The region's content is as it was."
);
create_exception!(
    pagemark,
    TransactionError,
    Error,
    "A transaction is open where none may be, or none is where one must be, or there is nothing to roll back to."
);
create_exception!(
    pagemark,
    MechanismError,
    Error,
    "The mechanism does not work here; the message says what would enable it."
);
create_exception!(
    pagemark,
    SnapshotError,
    Error,
    "The snapshot is one of another region or store, or the store's budget can't be kept."
);
create_exception!(pagemark, ForkedError, Error, "The region belongs to the process that this one was forked from.");

/// What to raise for an error of a region.
pub fn of_region(error: RegionError) -> PyErr {
    let message = error.to_string();
    match error {
        RegionError::NoTransaction | RegionError::TransactionOpen | RegionError::NoRollback => {
            TransactionError::new_err(message)
        }
        RegionError::Unaligned { .. } | RegionError::NotData { .. } => PyValueError::new_err(message),
        RegionError::OutOfRange { .. } => PyIndexError::new_err(message),
        RegionError::ForkedChild => ForkedError::new_err(message),
        RegionError::WrongRegion => SnapshotError::new_err(message),
        RegionError::Snapshot(error) => of_snapshot(error),
        RegionError::Track(TrackError::Unavailable { .. }) => MechanismError::new_err(message),
        RegionError::Track(TrackError::System { source, .. }) | RegionError::System { source, .. } => {
            of_system(&source, message)
        }
        RegionError::Track(TrackError::Gone) | RegionError::Overlaps { .. } | RegionError::NotMapped { .. } => {
            Error::new_err(message)
        }
    }
}

/// What to raise for an error of a snapshot or a store.
pub fn of_snapshot(error: CoreSnapshotError) -> PyErr {
    let message = error.to_string();
    match error {
        CoreSnapshotError::ChunkSize { .. } => PyValueError::new_err(message),
        CoreSnapshotError::OutOfRange { .. } => PyIndexError::new_err(message),
        CoreSnapshotError::Memory { .. } => PyMemoryError::new_err(message),
        CoreSnapshotError::WrongStore
        | CoreSnapshotError::LengthDiffers { .. }
        | CoreSnapshotError::BudgetExceeded { .. }
        | CoreSnapshotError::Full => SnapshotError::new_err(message),
    }
}

/// Python chooses the kind of `OSError` by the number.
fn of_system(source: &io::Error, message: String) -> PyErr {
    match source.raw_os_error() {
        Some(number) => PyOSError::new_err((number, message)),
        None => PyOSError::new_err(message),
    }
}
