//! Signals that would interrupt the system calls of a checkpoint or a restore.

use nix::sys::signal::SigSet;
use pagemark_process::spawn::FROM_OUTSIDE;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;

/// Blocks the signals [`FROM_OUTSIDE`] in this thread until it is dropped. Python handles them
/// afterwards.
pub struct HeldSignals {
    before: SigSet,
}

impl HeldSignals {
    /// Blocks the signals.
    pub fn hold() -> PyResult<HeldSignals> {
        let held: SigSet = FROM_OUTSIDE.iter().copied().collect();
        let before = SigSet::thread_get_mask().and_then(|before| held.thread_block().map(|()| before));
        let before = before.map_err(|error| PyOSError::new_err((error as i32, "cannot block signals")))?;
        Ok(HeldSignals { before })
    }
}

impl Drop for HeldSignals {
    fn drop(&mut self) {
        // The call fails only for arguments that are no masks.
        let _ = self.before.thread_set_mask();
    }
}
