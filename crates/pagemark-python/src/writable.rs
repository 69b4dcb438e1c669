//! Memory that system calls may write, as a context manager.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors;
use crate::region::{Held, Region};

/// A part of a region that system calls may write in a `with` block.
#[pyclass(frozen, module = "pagemark")]
pub struct Writable {
    region: Py<Region>,
    start: usize,
    stop: Option<usize>,
    open: Mutex<Option<Open>>,
}

struct Open {
    // Before what it refers to, so that it is dropped first.
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
        let held = this.region.get().open()?;
        let offsets = this.start..this.stop.unwrap_or(held.region.bytes());
        let opened = py.detach(|| {
            // SAFETY: what is pointed to stays where it is as long as `held`, which is dropped after what refers to it.
            let region: &'static pagemark::Region = unsafe { &(*Arc::as_ptr(&held)).region };
            region.writable(offsets).map(|writable| Open { _writable: writable, _held: held })
        });
        let opened = opened.map_err(errors::of_region)?;
        let mut open = this.lock();
        if open.is_some() {
            return Err(PyValueError::new_err("a `with` block has this open already: call writable() for each"));
        }
        *open = Some(opened);
        drop(open);
        Ok(slf)
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> bool {
        let open = self.lock().take();
        py.detach(|| drop(open));
        false
    }
}
