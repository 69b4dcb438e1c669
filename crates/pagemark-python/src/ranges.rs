//! What was written, as Python sees it.

use pagemark::RangeSet;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyRange};

/// A list of `range` objects, disjoint and in ascending order.
pub fn list<'py>(py: Python<'py>, set: &RangeSet) -> PyResult<Bound<'py, PyList>> {
    // Offsets in a mapping are less than half the address space.
    let ranges = set.iter().map(|range| PyRange::new(py, range.start as isize, range.end as isize));
    PyList::new(py, ranges.collect::<PyResult<Vec<_>>>()?)
}
