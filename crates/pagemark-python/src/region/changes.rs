//! The content that a transaction changed.

use std::sync::Arc;

use pagemark::region::{Change as CoreChange, Changes as CoreChanges};
use pagemark::{AddressRangeExt, Error as CoreError, ErrorKind};
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyIterator, PyType};

use super::Region;
use crate::errors;
use crate::ranges::Ranges;

/// The content of the written ranges after a transaction, and before it if it is known: a sequence
/// of `Change` objects in ascending order. Pages that hold the same content as before are left out.
///
/// `encode` returns the changes as bytes, and `Changes(encoded)` reads them; they can be pickled. A
/// process that applies the changes of each transaction to a region of the same length has a
/// replica of it.
#[pyclass(frozen, eq, weakref, sequence, module = "pagemark")]
#[derive(PartialEq)]
pub struct Changes {
    changes: Arc<CoreChanges>,
}

/// The changed content of one range.
#[pyclass(frozen, eq, module = "pagemark")]
#[derive(PartialEq)]
pub struct Change {
    /// The first byte, relative to the start of the region.
    #[pyo3(get)]
    offset: usize,
    new: Vec<u8>,
    old: Option<Vec<u8>>,
}

impl From<Arc<CoreChanges>> for Changes {
    fn from(changes: Arc<CoreChanges>) -> Self {
        Changes { changes }
    }
}

impl From<CoreChange<'_>> for Change {
    fn from(change: CoreChange<'_>) -> Self {
        Change { offset: change.offset, new: change.new.to_vec(), old: change.old.map(<[u8]>::to_vec) }
    }
}

#[pymethods]
impl Changes {
    #[new]
    fn new(py: Python<'_>, encoded: Vec<u8>) -> PyResult<Changes> {
        let decoded = py.detach(|| CoreChanges::from_bytes(&encoded));
        let changes = decoded.map_err(|error: CoreError| match error.kind() {
            ErrorKind::Damaged | ErrorKind::NewerFormat { .. } => PyValueError::new_err(error.to_string()),
            _ => errors::of_error(error),
        })?;
        Ok(Arc::new(changes).into())
    }

    /// The offsets of the changes.
    #[getter]
    fn offsets(&self) -> Ranges {
        self.changes.offsets().into()
    }

    /// Length of the region that the changes are of.
    #[getter]
    fn region_bytes(&self) -> u64 {
        self.changes.region_bytes().get()
    }

    /// True if the content before the transaction is known.
    #[getter]
    fn has_old(&self) -> bool {
        self.changes.has_old()
    }

    /// Writes the new content to a region of the same length, which then counts as written there.
    /// Another thread that commits or takes a snapshot of that region has all of the changes or
    /// none.
    fn apply(&self, py: Python<'_>, region: &Region) -> PyResult<()> {
        region.detached(py, |region| self.changes.apply(region))
    }

    /// Writes the old content to a region: undoes the changes if they are the last that were made.
    /// Raises TransactionError if the old content is not known.
    fn revert(&self, py: Python<'_>, region: &Region) -> PyResult<()> {
        region.detached(py, |region| self.changes.revert(region))
    }

    /// The same changes without the content before the transaction, which a replica does not need.
    fn without_old(&self, py: Python<'_>) -> Changes {
        py.detach(|| Arc::new(CoreChanges::clone(&self.changes).without_old()).into())
    }

    /// The changes as bytes, for another process or a file.
    fn encode<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let encoded = py.detach(|| self.changes.try_to_bytes()).map_err(errors::of_error)?;
        Ok(PyBytes::new(py, &encoded))
    }

    /// For pickles of every protocol.
    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyType>, (Bound<'py, PyBytes>,))> {
        Ok((py.get_type::<Changes>(), (self.encode(py)?,)))
    }

    fn __copy__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __deepcopy__(slf: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        slf
    }

    fn __len__(&self) -> usize {
        self.changes.offsets().range_count()
    }

    fn __getitem__(&self, index: isize) -> PyResult<Change> {
        let count = self.__len__();
        let at = if index < 0 { count.checked_add_signed(index) } else { usize::try_from(index).ok() };
        let change = at.and_then(|at| self.changes.iter().nth(at));
        let change = change.ok_or_else(|| PyIndexError::new_err(format!("there are {count} changes")))?;
        Ok(change.into())
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        let changes: Vec<Change> = self.changes.iter().map(Change::from).collect();
        changes.into_pyobject(py)?.try_iter()
    }

    fn __repr__(&self) -> String {
        let bytes: u64 = self.changes.offsets().iter().map(|range| range.byte_count().get()).sum();
        format!("<pagemark.Changes in {} ranges, {bytes} bytes>", self.__len__())
    }
}

#[pymethods]
impl Change {
    /// The content after the transaction.
    #[getter(new)]
    fn new_content<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.new)
    }

    /// The content before the transaction. None if it is not known.
    #[getter(old)]
    fn old_content<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.old.as_ref().map(|old| PyBytes::new(py, old))
    }

    fn __repr__(&self) -> String {
        format!("<pagemark.Change of {} bytes at {}>", self.new.len(), self.offset)
    }
}
