//! Memory that system calls may write, as a context manager.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::{Held, Region};
use crate::errors;

/// A part of a region that system calls may write in a `with` block.
#[pyclass(frozen, module = "pagemark")]
pub struct Writable {
    region: Py<Region>,
    start: usize,
    stop: Option<usize>,
    open: Mutex<Option<Open>>,
}

struct Open {
    // Before the region that it refers to, so that it is dropped first.
    _writable: pagemark::region::Writable<'static>,
    _held: Arc<Held>,
}

impl Writable {
    pub(crate) fn new(region: Py<Region>, start: usize, stop: Option<usize>) -> Writable {
        Writable { region, start, stop, open: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Writable {
    fn __enter__(slf: Py<Self>, py: Python<'_>) -> PyResult<Py<Self>> {
        let this = slf.get();
        let held = this.region.get().held()?;
        let offsets = this.start..this.stop.unwrap_or(held.region.bytes());
        let opened = py.detach(|| {
            // SAFETY: the region stays at its address as long as `held`, which is dropped after the
            // `Writable` that refers to the region.
            let region: &'static pagemark::Region = unsafe { &(*Arc::as_ptr(&held)).region };
            region.writable(offsets).map(|writable| Open { _writable: writable, _held: held })
        });
        let opened = opened.map_err(errors::of_error)?;
        let mut open = this.lock();
        if open.is_some() {
            return Err(PyValueError::new_err(
                "a `with` block has entered this object already: call writable() for each block",
            ));
        }
        *open = Some(opened);
        drop(open);
        Ok(slf)
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) {
        let open = self.lock().take();
        py.detach(|| drop(open));
    }
}
