//! Processes of a dump that run in a machine of `pagemark-kvm`: they give it up at the moment in
//! which CRIU begins to stop them, and may make it again when their state is saved.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use super::interrupted::Interrupted;
use crate::error::{Error, Result};
use crate::parked::{Parked, executes_monitor, is_in_machine, list_tree};

/// The machines of a tree.
#[derive(Clone, Debug)]
pub(super) struct Machines {
    root_pid: i32,
    interrupted: Interrupted,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    /// When the first process began to wait.
    since: OnceLock<Instant>,
    /// None before the first attempt.
    parked: Mutex<Option<Result<Parked>>>,
}

impl Machines {
    /// None if no process of the tree runs in a machine, or is about to.
    pub fn of_tree(root_pid: i32, pids: &[i32], interrupted: &Interrupted) -> Option<Machines> {
        let machines = || Machines { root_pid, interrupted: interrupted.clone(), shared: Arc::default() };
        pids.iter().any(|&pid| is_in_machine(pid) || executes_monitor(pid)).then(machines)
    }

    /// Has all processes of the tree give up their machines, unless that was done. False if that
    /// has failed.
    pub fn park(&self) -> bool {
        let mut parked = self.parked();
        let park = || {
            let _ = self.shared.since.set(Instant::now());
            let list = || list_tree(self.root_pid).map_err(|_| Error::criu_gone(self.root_pid));
            // Parking interrupts the calls before CRIU does.
            self.interrupted.observe(&list()?);
            Parked::park(list)
        };
        parked.get_or_insert_with(park).is_ok()
    }

    /// When the first process began to wait.
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

    fn parked(&self) -> MutexGuard<'_, Option<Result<Parked>>> {
        self.shared.parked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
