//! The machines that this program has made.

use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pagemark_kvm_log::kernel::KvmMachine;
use pagemark_kvm_log::machine::Machine;
use pagemark_kvm_log::protocol::RINGS;
use pagemark_kvm_log::ring::ENTRIES;
use pagemark_linux::this_process::OfThisProcess;

use crate::server;

/// A machine of this program.
pub struct OwnMachine {
    kernel: KvmMachine,
    /// The process that made it. A child made by `fork` has the descriptor, and not the machine.
    process: OfThisProcess,
    known: Mutex<Machine>,
}

impl OwnMachine {
    /// KVM's calls on it.
    pub fn kernel(&self) -> &KvmMachine {
        &self.kernel
    }

    /// True in the process that made it.
    pub fn is_of_this_process(&self) -> bool {
        self.process.is_here()
    }

    /// What is known of it.
    pub fn lock(&self) -> MutexGuard<'_, Machine> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

static MACHINES: Mutex<Vec<Arc<OwnMachine>>> = Mutex::new(Vec::new());

fn machines() -> MutexGuard<'static, Vec<Arc<OwnMachine>>> {
    MACHINES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes note of a new machine, and begins to serve Pagemark.
pub fn add(fd: RawFd) {
    // SAFETY: all calls of this program on the machine pass through this library, which keeps the slots
    // and what memory they have.
    let kernel = unsafe { KvmMachine::new(fd) };
    let known = match std::env::var_os(RINGS) {
        Some(value) => {
            let entries = value.to_str().and_then(|text| text.parse().ok()).unwrap_or(ENTRIES);
            Machine::with_rings(kernel.enable_rings(entries))
        }
        None => Machine::new(),
    };
    let machine = OwnMachine { kernel, process: OfThisProcess::new(), known: Mutex::new(known) };
    {
        let mut machines = machines();
        // One that had this descriptor is gone.
        machines.retain(|machine| machine.kernel.fd() != fd);
        machines.push(Arc::new(machine));
    }
    server::start();
}

/// The machine with this descriptor, if this process made it.
pub fn of_descriptor(fd: RawFd) -> Option<Arc<OwnMachine>> {
    let found = machines().iter().find(|machine| machine.kernel.fd() == fd).cloned();
    found.filter(|machine| machine.is_of_this_process())
}

/// True if a machine of this process reaches memory between these addresses by a view.
pub fn have_view(start: u64, end: u64) -> bool {
    let all: Vec<Arc<OwnMachine>> = machines().clone();
    let mut own = all.iter().filter(|machine| machine.is_of_this_process());
    own.any(|machine| machine.lock().views(start, end))
}

/// The machine of this process that Pagemark means: the last one that has memory. Others are made
/// to ask KVM for what it can do.
pub fn current() -> Option<Arc<OwnMachine>> {
    // Not under the lock of all: a machine is locked for as long as the kernel takes.
    let all: Vec<Arc<OwnMachine>> = machines().clone();
    let mut own = all.into_iter().rev().filter(|machine| machine.is_of_this_process());
    own.find(|machine| machine.kernel.is_there() && machine.lock().has_slots())
}
