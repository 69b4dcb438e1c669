//! Snapshots, and their content as a read-only buffer.

use std::ffi::{c_int, c_void};
use std::hash::{Hash, Hasher};
use std::sync::OnceLock;

use pagemark::region::RegionSnapshot;
use pagemark::snapshot::{SnapshotCopy, SnapshotStore};
use pagemark::{Address, Error as CoreError, ErrorKind};
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyType};

use crate::buffer::{self, Access};
use crate::errors;
use crate::ranges::Ranges;
use crate::repository::{Checkpoint, Repository};
use crate::store::Store;

/// The content of a region at one time.
///
/// Snapshots in one store are equal if they hold the same bytes, of whichever region. Neither the
/// comparison nor the hash reads the bytes, so that snapshots serve as keys of dictionaries, for
/// example to recognize states.
///
/// A snapshot is a read-only buffer: `numpy.frombuffer(snapshot, dtype=...)`. The store holds the
/// content in chunks, so the first view copies it into one piece, which all views share and which
/// is freed with the snapshot; zeros take no memory. `read` copies only what it returns, and the
/// snapshot keeps no copy of it.
///
/// Snapshots can be pickled; `copy.copy` and `copy.deepcopy` return the same snapshot. `encode`
/// returns a snapshot as bytes, and `Snapshot(encoded)` reads it, in a store of its own or in
/// `store`. `Region.from_snapshot` makes a region of any snapshot.
#[pyclass(frozen, eq, hash, weakref, module = "pagemark")]
pub struct Snapshot {
    pub(crate) snapshot: RegionSnapshot,
    /// The content in one piece, once it was viewed. It stays as long as the object: what is made
    /// of a buffer may have its address and no view, as `numpy.ndarray(shape, buffer=snapshot)`
    /// does.
    copy: OnceLock<SnapshotCopy>,
}

impl From<RegionSnapshot> for Snapshot {
    fn from(snapshot: RegionSnapshot) -> Self {
        Snapshot { snapshot, copy: OnceLock::new() }
    }
}

impl PartialEq for Snapshot {
    fn eq(&self, other: &Self) -> bool {
        self.snapshot == other.snapshot
    }
}

impl Hash for Snapshot {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.snapshot.hash(state);
    }
}

impl Snapshot {
    /// The copy that all views share.
    fn copy(&self, py: Python<'_>) -> PyResult<&SnapshotCopy> {
        if let Some(copy) = self.copy.get() {
            return Ok(copy);
        }
        let copy = py.detach(|| self.snapshot.content().copy()).map_err(errors::of_error)?;
        // Another thread may have made one meanwhile.
        Ok(self.copy.get_or_init(|| copy))
    }
}

/// The store to use: that of the caller, or a new one.
fn store_or_new(store: Option<&Store>) -> SnapshotStore {
    store.map_or_else(SnapshotStore::new, |store| store.store.clone())
}

#[pymethods]
impl Snapshot {
    #[new]
    #[pyo3(signature = (encoded, *, store = None))]
    fn new(py: Python<'_>, encoded: Vec<u8>, store: Option<&Store>) -> PyResult<Snapshot> {
        let store = store_or_new(store);
        let decoded = py.detach(|| RegionSnapshot::from_bytes(&encoded, &store));
        let snapshot = decoded.map_err(|error: CoreError| match error.kind() {
            ErrorKind::Damaged | ErrorKind::NewerFormat { .. } => PyValueError::new_err(error.to_string()),
            _ => errors::of_error(error),
        })?;
        Ok(snapshot.into())
    }

    /// The snapshot as bytes, for another process or a file. Zeros take no place in it.
    fn encode<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let encoded = py.detach(|| self.snapshot.to_bytes()).map_err(errors::of_error)?;
        Ok(PyBytes::new(py, &encoded))
    }

    /// For pickles of every protocol.
    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyType>, (Bound<'py, PyBytes>,))> {
        Ok((py.get_type::<Snapshot>(), (self.encode(py)?,)))
    }

    fn __copy__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __deepcopy__(slf: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        slf
    }

    /// Saves the snapshot as the next checkpoint of a job in a repository, as `Region.save` saves a
    /// region. `Snapshot.open` and `Region.open` read it.
    fn save(&self, py: Python<'_>, repository: &Repository, job: &str) -> PyResult<Checkpoint> {
        let taken = py.detach(|| self.snapshot.save(&repository.repository, job)).map_err(errors::of_error)?;
        Ok(Checkpoint::taken(job, &taken))
    }

    /// Reads the newest checkpoint of a job that `save` has written, of a snapshot or of a region.
    /// Raises RepositoryError if there is none.
    #[staticmethod]
    #[pyo3(signature = (repository, job, *, store = None))]
    fn open(py: Python<'_>, repository: &Repository, job: &str, store: Option<&Store>) -> PyResult<Snapshot> {
        let store = store_or_new(store);
        let opened = py.detach(|| RegionSnapshot::open(&repository.repository, job, &store));
        Ok(opened.map_err(errors::of_error)?.into())
    }

    fn __len__(&self) -> usize {
        self.snapshot.content().bytes().to_usize()
    }

    fn __repr__(&self) -> String {
        format!("<pagemark.Snapshot of {} bytes>", self.snapshot.content().bytes())
    }

    /// The offsets at which two snapshots of one store differ, in whole chunks. The cost is
    /// proportional to the difference.
    fn diff(&self, py: Python<'_>, other: &Snapshot) -> PyResult<Ranges> {
        let differing = py.detach(|| self.snapshot.content().diff(other.snapshot.content()));
        Ok(differing.map_err(errors::of_error)?.into())
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

    /// # Safety
    /// Called by Python, which passes a view to be filled.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let copy = slf.get().copy(slf.py());
        let exported = copy.map(|copy| (copy.as_ptr().cast_mut().cast::<c_void>(), copy.len() as ffi::Py_ssize_t));
        // SAFETY: Python passes the view. The bytes stay mapped as long as the object.
        unsafe { buffer::fill(&slf, view, flags, exported, Access::ReadOnly, || {}) }
    }
}
