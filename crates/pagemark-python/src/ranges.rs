//! Sets of offsets as sequences of `range` objects, and as arrays.

use std::ffi::c_int;

use pagemark::{Address, RangeSet};
use pyo3::exceptions::{PyBufferError, PyIndexError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyIterator, PyList, PyRange, PyRangeMethods};

/// Disjoint ranges of offsets in ascending order: a sequence of `range` objects.
///
/// It is also a read-only buffer of pairs of 64-bit integers, start and stop, so that
/// `numpy.asarray(ranges)` is an array of the shape `(len(ranges), 2)` without a copy.
#[pyclass(frozen, weakref, sequence, module = "pagemark")]
pub struct Ranges {
    /// Start and stop of each range. Offsets in a mapping are less than half the address space.
    pairs: Vec<[i64; 2]>,
    /// The shape of the buffer, and the distances between its items.
    shape: [ffi::Py_ssize_t; 2],
    strides: [ffi::Py_ssize_t; 2],
}

impl From<&RangeSet> for Ranges {
    fn from(set: &RangeSet) -> Self {
        let pairs: Vec<_> = set.iter().map(|range| [range.start.get() as i64, range.end.get() as i64]).collect();
        Ranges { shape: [pairs.len() as ffi::Py_ssize_t, 2], strides: [16, 8], pairs }
    }
}

impl From<RangeSet> for Ranges {
    fn from(set: RangeSet) -> Self {
        Ranges::from(&set)
    }
}

impl Ranges {
    fn list<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let ranges = self.pairs.iter().map(|&[start, stop]| PyRange::new(py, start as isize, stop as isize));
        PyList::new(py, ranges.collect::<PyResult<Vec<_>>>()?)
    }
}

#[pymethods]
impl Ranges {
    /// Number of bytes in all ranges.
    #[getter]
    fn total_bytes(&self) -> i64 {
        self.pairs.iter().map(|[start, stop]| stop - start).sum()
    }

    fn __len__(&self) -> usize {
        self.pairs.len()
    }

    fn __getitem__<'py>(&self, py: Python<'py>, index: isize) -> PyResult<Bound<'py, PyRange>> {
        let count = self.pairs.len();
        let at = if index < 0 { count.checked_add_signed(index) } else { usize::try_from(index).ok() };
        let pair = at.and_then(|at| self.pairs.get(at));
        let &[start, stop] = pair.ok_or_else(|| PyIndexError::new_err(format!("there are {count} ranges")))?;
        PyRange::new(py, start as isize, stop as isize)
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        self.list(py)?.try_iter()
    }

    /// Equal to ranges, and to lists of ranges, that are the same.
    fn __eq__(&self, py: Python<'_>, other: &Bound<'_, PyAny>) -> PyResult<bool> {
        match other.cast::<Ranges>() {
            Ok(other) => Ok(self.pairs == other.get().pairs),
            Err(_) => self.list(py)?.eq(other),
        }
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.list(py)?.repr()?.to_string())
    }

    /// # Safety
    /// Called by Python, which passes a view to be filled.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        let asks = |flag: c_int| flags & flag == flag;
        if asks(ffi::PyBUF_WRITABLE) {
            // SAFETY: as the buffer protocol asks of exporters that fail.
            unsafe { (*view).obj = std::ptr::null_mut() };
            return Err(PyBufferError::new_err("ranges are read-only"));
        }
        let numbers = |flag: c_int, numbers: &[ffi::Py_ssize_t; 2]| {
            if asks(flag) { numbers.as_ptr().cast_mut() } else { std::ptr::null_mut() }
        };
        let format = if asks(ffi::PyBUF_FORMAT) { c"q".as_ptr().cast_mut() } else { std::ptr::null_mut() };
        // SAFETY: the view refers to this object, which does not change: the numbers, the shape and
        // the strides stay where they are as long as it.
        unsafe {
            *view = ffi::Py_buffer {
                buf: this.pairs.as_ptr().cast_mut().cast(),
                len: (this.pairs.len() * 16) as ffi::Py_ssize_t,
                itemsize: 8,
                readonly: 1,
                ndim: if asks(ffi::PyBUF_ND) { 2 } else { 1 },
                format,
                shape: numbers(ffi::PyBUF_ND, &this.shape),
                strides: numbers(ffi::PyBUF_STRIDES, &this.strides),
                obj: slf.clone().into_ptr(),
                ..ffi::Py_buffer::new()
            };
        }
        Ok(())
    }
}

/// The offsets in an iterable of `range` objects.
pub fn set(ranges: &Bound<'_, PyAny>) -> PyResult<RangeSet> {
    let mut set = RangeSet::new();
    for range in ranges.try_iter()? {
        let range = range?.cast_into::<PyRange>()?;
        let offset = |value: isize| {
            let offset = u64::try_from(value).map(Address::new);
            offset.map_err(|_| PyValueError::new_err(format!("{value} is no offset: it is negative")))
        };
        if range.step()? != 1 {
            return Err(PyValueError::new_err(format!("the steps of {range} are not of 1")));
        }
        let (start, stop) = (offset(range.start()?)?, offset(range.stop()?)?);
        if start < stop {
            set.insert(start..stop);
        }
    }
    Ok(set)
}
