//! The virtual CPUs of machines that keep rings: where a ring is full, the library empties it, and
//! the machine goes on without that its program notices.

use std::ffi::c_int;
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use pagemark_kvm_log::PAGE;
use pagemark_kvm_log::ring::EXIT_FULL;

use crate::machines::OwnMachine;

/// Where `struct kvm_run` says why the machine was left.
const EXIT_REASON: usize = 8;

/// A virtual CPU whose machine keeps rings.
struct Processor {
    fd: RawFd,
    /// The begin of `struct kvm_run`.
    run: NonNull<u8>,
    machine: Arc<OwnMachine>,
}

// SAFETY: the mapping belongs to no thread, and is read atomically alone.
unsafe impl Send for Processor {}
// SAFETY: as above.
unsafe impl Sync for Processor {}

impl Processor {
    fn is_full(&self) -> bool {
        // SAFETY: within the mapping and aligned; KVM writes it only within the call of this thread.
        let reason = unsafe { &*self.run.add(EXIT_REASON).cast::<AtomicU32>().as_ptr() };
        reason.load(Ordering::Relaxed) == EXIT_FULL
    }
}

impl Drop for Processor {
    fn drop(&mut self) {
        // SAFETY: the mapping of `add`, which nothing uses any more.
        unsafe { libc::munmap(self.run.as_ptr().cast(), PAGE as usize) };
    }
}

static PROCESSORS: RwLock<Vec<Arc<Processor>>> = RwLock::new(Vec::new());

/// True once there is one: other programs pass on each run without a look.
static ARE_THERE: AtomicBool = AtomicBool::new(false);

/// Takes note of a new virtual CPU of a machine that keeps rings.
///
/// # Errors
/// It cannot be mapped; then it must not run.
pub fn add(machine: Arc<OwnMachine>, fd: RawFd) -> Result<(), c_int> {
    machine.kernel().add_ring(fd).map_err(|error| error.raw_os_error().unwrap_or(libc::ENOMEM))?;
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let run = unsafe { libc::mmap(std::ptr::null_mut(), PAGE as usize, libc::PROT_READ, libc::MAP_SHARED, fd, 0) };
    if run == libc::MAP_FAILED {
        return Err(libc::ENOMEM);
    }
    let run = NonNull::new(run.cast()).ok_or(libc::ENOMEM)?;
    let mut all = PROCESSORS.write().unwrap_or_else(PoisonError::into_inner);
    // One that had this descriptor is gone.
    all.retain(|processor| processor.fd != fd);
    all.push(Arc::new(Processor { fd, run, machine }));
    ARE_THERE.store(true, Ordering::Release);
    Ok(())
}

/// Runs a virtual CPU by `run`, again as long as it was left because its ring is full.
///
/// # Errors
/// Those of `run`, and of KVM's for the rings.
pub fn run(fd: RawFd, run: impl Fn() -> Result<c_int, c_int>) -> Result<c_int, c_int> {
    if !ARE_THERE.load(Ordering::Acquire) {
        return run();
    }
    let find = |all: &Vec<Arc<Processor>>| all.iter().find(|processor| processor.fd == fd).cloned();
    let found = find(&PROCESSORS.read().unwrap_or_else(PoisonError::into_inner));
    let Some(processor) = found.filter(|processor| processor.machine.is_of_this_process()) else { return run() };
    loop {
        let result = run();
        if result.is_err() || !processor.is_full() {
            return result;
        }
        let machine = &processor.machine;
        machine.lock().take_rings(machine.kernel())?;
    }
}
