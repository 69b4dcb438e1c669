//! The range of process ids while the tests run.
//!
//! A run starts more processes than the smallest range has ids. They begin anew then, and another
//! process may get the id of one that a test has killed and restores.

use std::path::Path;

use crate::progress;

const LIMIT: &str = "/proc/sys/kernel/pid_max";
/// The most that the kernel permits, which is usual on large machines.
const MOST: u32 = 1 << 22;

/// A larger range of ids, as long as this value exists.
pub struct LargeRange {
    before: u32,
}

impl LargeRange {
    /// Asks for it. None where ids have it already, or where the kernel does not permit to change
    /// it, which needs root; the tests do without it then.
    pub fn set() -> Option<LargeRange> {
        let before = std::fs::read_to_string(LIMIT).ok()?.trim().parse().ok()?;
        (before < MOST && write(MOST)).then_some(LargeRange { before })
    }
}

impl Drop for LargeRange {
    fn drop(&mut self) {
        if !write(self.before) {
            progress!("{LIMIT} was {} before", self.before);
        }
    }
}

fn write(limit: u32) -> bool {
    std::fs::write(Path::new(LIMIT), limit.to_string()).is_ok()
}
