//! The paper's own numbers: a kernel build on one processor (tables 3.1 and 5.2, figure 5.3). Where
//! the paper has no number, there is a NaN.

use super::Column;

/// The paper's intervals, milliseconds.
pub(super) const INTERVALS_MS: [u32; 8] = [20, 50, 100, 200, 500, 1000, 2000, 5000];

const NONE: f64 = f64::NAN;

pub(super) const NATIVE_EXITS: Column = [4.6e6; 8];
const NATIVE_FAULTS: f64 = 2.8e5;
pub(super) const LOG_PROTECT_EXITS: Column = [8.8e7, 6.3e7, 4.9e7, 3.8e7, 2.5e7, 1.7e7, 1.2e7, 8e6];
const LOG_PROTECT_FAULTS: Column = [8.3e7, 5.8e7, 4.4e7, 3.4e7, 2e7, 1.2e7, 7.3e6, 3.7e6];
pub(super) const LOG_PML_EXITS: Column = [5e6, 4.8e6, 4.8e6, 4.7e6, 4.7e6, 4.7e6, 4.7e6, 4.7e6];
pub(super) const LOG_PML_FULL: Column = [42594.0, 28994.0, 19902.0, 12787.0, 6573.0, 3677.0, 2088.0, 959.0];

pub(super) const COPY_PROTECT_EXITS: Column = [NONE, 6.5e7, 5e7, 3.8e7, 2.5e7, 1.7e7, 1.2e7, 8.2e6];
pub(super) const COPY_PROTECT_FAULTS: Column = [NONE, 6e7, 4.6e7, 3.4e7, 2.1e7, 1.3e7, 7.5e6, 3.8e6];
pub(super) const COPY_LATE_EXITS: Column = [NONE, 3.4e7, 2.8e7, 2.4e7, 2e7, 1.5e7, 1.1e7, 7.7e6];
pub(super) const COPY_LATE_FAULTS: Column = [NONE, 2.8e7, 2.2e7, 2e7, 1.6e7, 1.1e7, 6.4e6, 3.3e6];
pub(super) const COPY_LATE_FULL: Column = [NONE, 472.0, 547.0, 575.0, 357.0, 249.0, 205.0, 115.0];
pub(super) const COPY_EARLY_EXITS: Column = [NONE, 1.3e7, 1e7, 1.1e7, 1.9e7, 1.3e7, 9.8e6, 7.2e6];
pub(super) const COPY_EARLY_FAULTS: Column = [NONE, 8.6e6, 5.6e6, 6.8e6, 1.5e7, 9.1e6, 5.4e6, 2.9e6];
pub(super) const COPY_EARLY_FULL: Column = [NONE, 25312.0, 17993.0, 8799.0, 722.0, 210.0, 107.0, 37.0];

pub(super) const PROTECT_FLUSHES: Column = [NONE, 12701.0, 5682.0, 2732.0, 1041.0, 507.0, 249.0, 98.0];
pub(super) const LATE_FLUSHES: Column = [NONE, 12693.0, 5686.0, 2721.0, 1040.0, 506.0, 248.0, 98.0];
pub(super) const EARLY_FLUSHES: Column = [NONE, 22242.0, 10527.0, 5531.0, 2924.0, 1528.0, 813.0, 370.0];

/// R(l), from the numbers of table 3.1.
pub(super) fn ratio() -> Column {
    std::array::from_fn(|index| (LOG_PROTECT_FAULTS[index] - NATIVE_FAULTS) / LOG_PML_FULL[index])
}
