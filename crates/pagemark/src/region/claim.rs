//! Which addresses belong to regions: a page belongs to one at most.

use std::sync::{Mutex, PoisonError};

use super::RegionError;
use crate::Range;

/// With the process that claimed it: a child made by `fork` starts with none.
static CLAIMED: Mutex<Vec<(Range, u32)>> = Mutex::new(Vec::new());

/// A range that belongs to one region as long as this exists.
#[derive(Debug)]
pub(super) struct Claim {
    range: Range,
    process: u32,
}

impl Claim {
    /// Claims a range.
    pub fn new(range: Range) -> Result<Claim, RegionError> {
        let mut claimed = CLAIMED.lock().unwrap_or_else(PoisonError::into_inner);
        let process = std::process::id();
        claimed.retain(|(_, claimer)| *claimer == process);
        if let Some((other, _)) = claimed.iter().find(|(other, _)| other.start < range.end && range.start < other.end) {
            return Err(RegionError::Overlaps { range, other: other.clone() });
        }
        claimed.push((range.clone(), process));
        Ok(Claim { range, process })
    }

    pub fn range(&self) -> Range {
        self.range.clone()
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // The lock of a forked child may be held by a thread that it does not have.
        if self.process == std::process::id() {
            let mut claimed = CLAIMED.lock().unwrap_or_else(PoisonError::into_inner);
            claimed.retain(|(range, _)| *range != self.range);
        }
    }
}
