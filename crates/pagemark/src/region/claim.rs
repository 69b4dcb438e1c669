//! The addresses that belong to regions. A page belongs to at most one region.

use std::sync::{Mutex, PoisonError};

use pagemark_linux::at_fork::hold_off;
use pagemark_linux::this_process::OfThisProcess;

use crate::Error;
use crate::Range;

/// Each range with the process that claimed it: a child made by `fork` has no claims.
static CLAIMED: Mutex<Vec<(Range, OfThisProcess)>> = Mutex::new(Vec::new());

/// A range that belongs to one region while the claim exists.
#[derive(Debug)]
pub(super) struct Claim {
    range: Range,
    process: OfThisProcess,
}

impl Claim {
    /// Claims a range.
    pub fn new(range: Range) -> Result<Claim, Error> {
        let _forks = hold_off();
        let mut claimed = CLAIMED.lock().unwrap_or_else(PoisonError::into_inner);
        let process = OfThisProcess::new();
        claimed.retain(|(_, claimer)| claimer.is_here());
        if let Some((other, _)) = claimed.iter().find(|(other, _)| other.start < range.end && range.start < other.end) {
            return Err(Error::overlaps(range, other));
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
        // A forked child has no claims.
        if self.process.is_here() {
            let _forks = hold_off();
            let mut claimed = CLAIMED.lock().unwrap_or_else(PoisonError::into_inner);
            claimed.retain(|(range, _)| *range != self.range);
        }
    }
}
