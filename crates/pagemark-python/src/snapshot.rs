//! Snapshots.

use pagemark::region::RegionSnapshot;
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::errors;
use crate::ranges::list;

/// What a region held at one time.
///
/// Snapshots in one store are equal if they hold the same bytes, whichever regions they are of; that is found without looking
/// at them, and so is the hash: snapshots serve as keys of dictionaries, for states that were seen before.
#[pyclass(frozen, eq, hash, module = "pagemark")]
#[derive(PartialEq, Hash)]
pub struct Snapshot {
    pub(crate) snapshot: RegionSnapshot,
}

impl From<RegionSnapshot> for Snapshot {
    fn from(snapshot: RegionSnapshot) -> Self {
        Snapshot { snapshot }
    }
}

#[pymethods]
impl Snapshot {
    fn __len__(&self) -> usize {
        self.snapshot.content().bytes() as usize
    }

    fn __repr__(&self) -> String {
        format!("<pagemark.Snapshot of {} bytes>", self.snapshot.content().bytes())
    }

    /// Where two snapshots of one store differ, by the chunk: a list of disjoint `range` objects in ascending order. It costs what
    /// differs.
    fn diff<'py>(&self, py: Python<'py>, other: &Snapshot) -> PyResult<Bound<'py, PyList>> {
        let differing = py.detach(|| self.snapshot.content().diff(other.snapshot.content()));
        list(py, &differing.map_err(errors::of_snapshot)?)
    }

    /// `size` bytes from `offset` on as they were, without restoring anything.
    fn read<'py>(&self, py: Python<'py>, offset: u64, size: usize) -> PyResult<Bound<'py, PyBytes>> {
        let content = self.snapshot.content();
        let bytes = content.bytes();
        // Before memory is asked for.
        if offset.saturating_add(size as u64) > bytes {
            let message = format!("{size} bytes from {offset} on are not within a snapshot of {bytes} bytes");
            return Err(PyIndexError::new_err(message));
        }
        PyBytes::new_with(py, size, |to| py.detach(|| content.read_at(offset, to)).map_err(errors::of_snapshot))
    }
}
