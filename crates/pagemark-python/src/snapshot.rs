//! Snapshots.

use pagemark::Address;
use pagemark::region::RegionSnapshot;
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::errors;
use crate::ranges::list;

/// The content of a region at one time.
///
/// Snapshots in one store are equal if they hold the same bytes, of whichever region. Neither the
/// comparison nor the hash reads the bytes, so that snapshots serve as keys of dictionaries, for
/// example to recognize states.
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
        self.snapshot.content().bytes().to_usize()
    }

    fn __repr__(&self) -> String {
        format!("<pagemark.Snapshot of {} bytes>", self.snapshot.content().bytes())
    }

    /// The offsets at which two snapshots of one store differ, in whole chunks: a list of disjoint
    /// `range` objects in ascending order. The cost is proportional to the difference.
    fn diff<'py>(&self, py: Python<'py>, other: &Snapshot) -> PyResult<Bound<'py, PyList>> {
        let differing = py.detach(|| self.snapshot.content().diff(other.snapshot.content()));
        list(py, &differing.map_err(errors::of_error)?)
    }

    /// The `size` bytes of the snapshot from `offset` on. The region does not change.
    fn read<'py>(&self, py: Python<'py>, offset: u64, size: usize) -> PyResult<Bound<'py, PyBytes>> {
        let content = self.snapshot.content();
        let bytes = content.bytes().get();
        // Before memory is allocated.
        if offset.saturating_add(size as u64) > bytes {
            let message = format!("{size} bytes from {offset} on are not within a snapshot of {bytes} bytes");
            return Err(PyIndexError::new_err(message));
        }
        PyBytes::new_with(py, size, |to| {
            py.detach(|| content.read_at(Address::new(offset), to)).map_err(errors::of_error)
        })
    }
}
