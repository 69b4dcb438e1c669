//! Processes of a dump that run in a machine of `pagemark-kvm`: they give it up at the moment in
//! which CRIU begins to stop them, and may make it again when their state is saved.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use pagemark_trace::error::{Error, Result};
use pagemark_trace::parked::{ParkedProcesses, list_tree, may_have_machine};

use super::interrupted_calls::InterruptedCalls;

/// The machines of a tree: those that its processes have when CRIU begins to stop them.
#[derive(Clone, Debug)]
pub(super) struct Machines {
    root_pid: i32,
    interrupted: InterruptedCalls,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    /// When the first process began to wait.
    since: OnceLock<Instant>,
    /// None before the first attempt.
    parked: Mutex<Option<Result<ParkedProcesses>>>,
}

impl Machines {
    pub fn new(root_pid: i32, interrupted: &InterruptedCalls) -> Machines {
        Machines { root_pid, interrupted: interrupted.clone(), shared: Arc::default() }
    }

    /// Has all processes of the tree give up their machines, unless that was done. False if that
    /// has failed.
    pub fn park(&self) -> bool {
        let mut parked = self.parked();
        let park = || {
            let list = || list_tree(self.root_pid).map_err(|_| Error::criu_gone(self.root_pid));
            let pids: Vec<i32> = list()?.iter().map(|process| process.pid).collect();
            if !pids.iter().any(|&pid| may_have_machine(pid)) {
                return Ok(ParkedProcesses::default());
            }
            let _ = self.shared.since.set(Instant::now());
            // Parking interrupts the calls before CRIU does.
            self.interrupted.observe(&pids);
            ParkedProcesses::park(list)
        };
        parked.get_or_insert_with(park).is_ok()
    }

    /// True if a process had a machine, or may have had one.
    pub fn are_there(&self) -> bool {
        self.since().is_some()
    }

    /// When the first process began to wait. None if none had a machine.
    pub fn since(&self) -> Option<Instant> {
        self.shared.since.get().copied()
    }

    /// The processes may make their machines again.
    pub fn release(&self) {
        if let Some(Ok(parked)) = &mut *self.parked() {
            parked.release();
        }
    }

    /// Why a process could not give up its machine, if so.
    pub fn take_error(&self) -> Option<Error> {
        self.parked().take_if(|parked| parked.is_err()).and_then(Result::err)
    }

    fn parked(&self) -> MutexGuard<'_, Option<Result<ParkedProcesses>>> {
        self.shared.parked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
