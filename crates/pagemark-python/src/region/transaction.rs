//! Transactions as context managers.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pagemark::RangeSet;
use pagemark::region::Changes as CoreChanges;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::Region;
use super::changes::Changes;
use crate::errors::TransactionError;
use crate::ranges::Ranges;

/// A transaction of a region, for one `with` block: committed at its end, rolled back if it raises.
/// The transaction of a region made with `rollback=False` is committed in both cases.
#[pyclass(frozen, weakref, module = "pagemark")]
pub struct Transaction {
    region: Py<Region>,
    /// True if the commit returns content.
    with_changes: bool,
    progress: Mutex<Progress>,
}

enum Progress {
    New,
    Open,
    /// A thread begins or ends it; others leave it alone.
    Changing,
    /// With the offsets that were written.
    Ended(RangeSet),
    /// With the content of the offsets that were written.
    Changed(Arc<CoreChanges>),
}

impl Transaction {
    pub(crate) fn new(region: Py<Region>, with_changes: bool) -> Transaction {
        Transaction { region, with_changes, progress: Mutex::new(Progress::New) }
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins the transaction, unless a thread has done so before. False if one has.
    fn begin(&self, py: Python<'_>) -> PyResult<bool> {
        // The lock is not held meanwhile: other threads may hold the interpreter and wait for it.
        match &mut *self.lock() {
            new @ Progress::New => *new = Progress::Changing,
            _ => return Ok(false),
        }
        let begun = self.region.get().begin_detached(py);
        *self.lock() = if begun.is_ok() { Progress::Open } else { Progress::New };
        begun.map(|()| true)
    }

    /// Ends the open transaction by `end`. False if it is not open, or another thread ends it.
    fn end(&self, end: impl FnOnce(&Region) -> PyResult<Progress>) -> PyResult<bool> {
        match &mut *self.lock() {
            open @ Progress::Open => *open = Progress::Changing,
            _ => return Ok(false),
        }
        let (ended, result) = match end(self.region.get()) {
            Ok(ended) => (ended, Ok(true)),
            Err(error) => (Progress::Open, Err(error)),
        };
        *self.lock() = ended;
        result
    }
}

#[pymethods]
impl Transaction {
    /// The offsets that were committed, or put back by the rollback. A mechanism may report more
    /// than was written. None before the transaction has ended.
    #[getter]
    fn written(&self) -> Option<Ranges> {
        match &*self.lock() {
            Progress::Ended(written) => Some(written.into()),
            Progress::Changed(changes) => Some(changes.offsets().into()),
            _ => None,
        }
    }

    /// The content that was committed. None before the transaction has ended, after a rollback, and
    /// without `changes=True`.
    #[getter]
    fn changes(&self) -> Option<Changes> {
        match &*self.lock() {
            Progress::Changed(changes) => Some(changes.clone().into()),
            _ => None,
        }
    }

    /// Rolls back at once. The end of the block then does nothing.
    fn rollback(&self, py: Python<'_>) -> PyResult<()> {
        match self.end(|region| region.rollback_detached(py).map(Progress::Ended))? {
            true => Ok(()),
            false => Err(TransactionError::new_err("the transaction is not open")),
        }
    }

    fn __enter__(slf: Py<Self>, py: Python<'_>) -> PyResult<Py<Self>> {
        match slf.get().begin(py)? {
            true => Ok(slf),
            false => {
                Err(TransactionError::new_err("a transaction serves one `with` block: call transaction() for each"))
            }
        }
    }

    #[pyo3(signature = (kind, *_exception))]
    fn __exit__(&self, py: Python<'_>, kind: &Bound<'_, PyAny>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        let ended = self.end(|region| {
            let rolls_back = !kind.is_none() && region.has_rollback();
            Ok(match (rolls_back, self.with_changes) {
                (true, _) => Progress::Ended(region.rollback_detached(py)?),
                (false, true) => Progress::Changed(region.commit_changes_detached(py)?),
                (false, false) => Progress::Ended(region.commit_detached(py)?),
            })
        });
        // It may have been ended within the block.
        ended.map(drop)
    }
}
