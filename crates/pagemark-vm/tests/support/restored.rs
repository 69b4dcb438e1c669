//! Restored machines.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pagemark::repository::Checkpoint;
use pagemark_vm::{Error, Restore, RunningMachine};

/// A restored machine, killed when dropped.
pub struct Restored(pub Option<RunningMachine>);

impl Drop for Restored {
    fn drop(&mut self) {
        if let Some(machine) = self.0.take() {
            let _ = kill(Pid::from_raw(machine.pid()), Signal::SIGKILL);
            let _ = machine.wait();
        }
    }
}

/// Restores a machine, detached.
pub fn restore(checkpoint: &Checkpoint) -> Result<Restored, Error> {
    Restore::new(checkpoint).detach(true).start(&mut |_, _| {}).map(|machine| Restored(Some(machine)))
}
