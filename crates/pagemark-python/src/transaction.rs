//! Transactions as context managers.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pagemark::RangeSet;
use pagemark::region::Changes as CoreChanges;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::changes::Changes;
use crate::errors::TransactionError;
use crate::ranges::Ranges;
use crate::region::Region;

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
        if !matches!(*self.lock(), Progress::Open) {
            return Err(TransactionError::new_err("the transaction is not open"));
        }
        let written = self.region.get().rollback_detached(py)?;
        *self.lock() = Progress::Ended(written);
        Ok(())
    }

    fn __enter__(slf: Py<Self>, py: Python<'_>) -> PyResult<Py<Self>> {
        let transaction = slf.get();
        if !matches!(*transaction.lock(), Progress::New) {
            return Err(TransactionError::new_err(
                "a transaction serves one `with` block: call transaction() for each",
            ));
        }
        transaction.region.get().begin_detached(py)?;
        *transaction.lock() = Progress::Open;
        Ok(slf)
    }

    #[pyo3(signature = (kind, *_exception))]
    fn __exit__(&self, py: Python<'_>, kind: &Bound<'_, PyAny>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        // The lock is released first: other threads may hold the interpreter and wait for it.
        let is_open = matches!(*self.lock(), Progress::Open);
        if is_open {
            let region = self.region.get();
            let rolls_back = !kind.is_none() && region.has_rollback();
            let ended = match (rolls_back, self.with_changes) {
                (true, _) => Progress::Ended(region.rollback_detached(py)?),
                (false, true) => Progress::Changed(region.commit_changes_detached(py)?),
                (false, false) => Progress::Ended(region.commit_detached(py)?),
            };
            *self.lock() = ended;
        }
        Ok(())
    }
}
