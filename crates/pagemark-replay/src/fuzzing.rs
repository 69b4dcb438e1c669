//! What the fuzz targets in `fuzz/` call: readers that are private otherwise.

use crate::instruction_count::{first_difference, instruction_count};

/// Reads the counter of instructions in the state of a machine's devices, and compares two states.
pub fn devices(one: &[u8], other: &[u8]) {
    let _ = instruction_count(one);
    let _ = first_difference(one, other);
}
