//! What the fuzz targets in `fuzz/` call: readers that are private otherwise.

pub use crate::trace::fuzzing::trace;
