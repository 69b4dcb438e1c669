//! Sets of offsets as lists of `range` objects.

use pagemark::{Address, RangeSet};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyRange, PyRangeMethods};

/// A list of `range` objects, disjoint and in ascending order.
pub fn list<'py>(py: Python<'py>, set: &RangeSet) -> PyResult<Bound<'py, PyList>> {
    // Offsets in a mapping are less than half the address space.
    let ranges = set.iter().map(|range| PyRange::new(py, range.start.get() as isize, range.end.get() as isize));
    PyList::new(py, ranges.collect::<PyResult<Vec<_>>>()?)
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
