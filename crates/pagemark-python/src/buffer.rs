//! Python's buffer protocol: objects that let others view their memory.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use pyo3::ffi;
use pyo3::prelude::*;

/// What may be done with the memory through a view.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    ReadOnly,
    Writable,
}

/// Memory that an object gives away: its start and its size in bytes.
pub(crate) type Exported = (*mut c_void, ffi::Py_ssize_t);

/// Fills `view` with the memory that `owner` has exported, or sets it to what the protocol asks of
/// exporters that fail. `release` takes the view off a count of views if Python does not accept it.
///
/// # Safety
/// `view` is the one that Python passes to `__getbuffer__` of `owner`. The exported memory stays
/// mapped as long as `owner`.
pub(crate) unsafe fn fill<T>(
    owner: &Bound<'_, T>,
    view: *mut ffi::Py_buffer,
    flags: c_int,
    exported: PyResult<Exported>,
    access: Access,
    release: impl FnOnce(),
) -> PyResult<()> {
    let (start, bytes) = exported.inspect_err(|_| {
        // SAFETY: the caller guarantees that it is a view.
        unsafe { (*view).obj = null_mut() };
    })?;
    let read_only = c_int::from(access == Access::ReadOnly);
    // SAFETY: the caller guarantees it. The view refers to its owner, which therefore lives as long.
    let result = unsafe { ffi::PyBuffer_FillInfo(view, owner.as_ptr(), start, bytes, read_only, flags) };
    if result != 0 {
        release();
        return Err(PyErr::fetch(owner.py()));
    }
    Ok(())
}
