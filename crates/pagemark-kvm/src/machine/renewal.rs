//! The machine is made anew after the process has given up what it had of KVM, for a checkpoint
//! ([`pagemark_kvm_protocol::description`]).
//!
//! Descriptors keep their numbers, and what KVM shares its addresses, so that all values that use
//! them stay valid. The first thread that needs KVM makes the machine; each thread makes its own
//! virtual CPU, when it needs that.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::Ordering;

use pagemark_kvm_protocol::machine_calls::Means;

use super::tracking::log_failed;
use super::{Machine, above_limit, begin_rings, checked, create_vm, lock, open_device};
use crate::error::{Error, ErrorKind};
use crate::layout::{PAGE, PROGRAM_END, Physical, TABLE_MEMORY};
use crate::sys::parking::{InUse, Parking};
use crate::sys::signals::{self, INFO_BYTES};
use crate::sys::{descriptors, dirty_log, reports};
use crate::vcpu::Vcpu;

impl Machine {
    /// Begins to use KVM otherwise than to run. Waits while the process is parked, and makes the
    /// machine if there is none. If that fails, the process ends. A process that leaves its machine
    /// makes none: what is used then is what was saved of it.
    pub fn enter(&self) -> InUse {
        loop {
            if let Some(in_use) = self.parking.enter() {
                return in_use;
            }
            self.parking.wait();
            let _renewal = lock(&self.renewal);
            // Another thread may have made it meanwhile, and the process may be parked again.
            if let Some(_in_use) = self.parking.begin_renewal()
                && let Err(error) = self.renew()
            {
                reports::write(&format!("pagemark-kvm: the machine cannot be made again: {error}\n"));
                signals::die(libc::SIGKILL as u32, &[0; INFO_BYTES]);
            }
        }
    }

    fn renew(&self) -> Result<(), Error> {
        let kvm = checked(above_limit(open_device)?)?;
        let vm = create_vm(&kvm)?;
        begin_rings(&vm, self.keeps)?;
        replace(kvm.as_raw_fd(), self.kvm.as_raw_fd(), true)?;
        replace(vm.as_raw_fd(), self.vm.as_raw_fd(), false)?;
        drop((vm, kvm));
        let mut space = self.space.lock();
        // What nobody has collected.
        self.noted.take(|start, end| self.listed.add(start, end));
        self.noted.begin(self.keeps);
        self.add_slot(0, Physical::ZERO, TABLE_MEMORY, self.tables.host_address())?;
        self.renew_clock(&mut space);
        self.add_slots(&space)?;
        // The log and the rings of the old machine are gone.
        for means in [Means::Log, Means::Ring] {
            space.tracking.by[means as usize].mark(PAGE, 0, PROGRAM_END);
        }
        if self.log.get() == Some(&Ok(())) {
            dirty_log::enable(&self.vm).map_err(log_failed)?;
        }
        self.set_logging(&space, 0, PROGRAM_END).map_err(log_failed)?;
        self.parking.reserve_closed(|descriptor| replace(self.vm.as_raw_fd(), descriptor, false))?;
        self.generation.fetch_add(1, Ordering::Relaxed);
        self.parking.set_running();
        Ok(())
    }

    /// True if the process continues without the machine, and makes none.
    pub fn is_leaving(&self) -> bool {
        self.parking.is_leaving()
    }

    /// What the threads of a process have in common that leaves its machine.
    pub fn parking(&self) -> &Parking {
        &self.parking
    }

    /// True if a virtual CPU belongs to this machine, and not to one that was given up.
    pub fn has(&self, vcpu: &Vcpu) -> bool {
        vcpu.generation() == self.generation.load(Ordering::Relaxed)
    }

    /// Makes a virtual CPU of the calling thread anew if it is of a machine that was given up. The
    /// thread uses KVM. If the process leaves its machine, the thread goes on with what was saved.
    ///
    /// # Errors
    /// If KVM refuses.
    pub fn renew_vcpu(&self, vcpu: &mut Vcpu) -> Result<(), Error> {
        let is_leaving = self.is_leaving();
        if self.has(vcpu) && !is_leaving {
            return Ok(());
        }
        let generation = self.generation.load(Ordering::Relaxed);
        let saved = self.parking.saved(vcpu.number()).ok_or_else(|| {
            Error::new(ErrorKind::System, "make", "a virtual CPU again").reason("its state was not saved")
        })?;
        if is_leaving {
            vcpu.keep(saved);
            return Ok(());
        }
        let fresh = self.create_vcpu(vcpu.number())?;
        replace(fresh.as_raw_fd(), vcpu.descriptor(), false)?;
        vcpu.renew(fresh, generation, self.vm.run_size(), &self.cpuid, &self.stubs, &saved)?;
        self.add_ring(vcpu);
        self.parking.set_vcpu(vcpu.number(), vcpu.descriptor(), vcpu.shared_address());
        self.check_time_of(vcpu);
        Ok(())
    }
}

/// Gives the open file `from` the number `to`, too.
fn replace(from: RawFd, to: RawFd, stays: bool) -> Result<(), Error> {
    let failed = Error::system("make again", format!("descriptor {to}"));
    descriptors::replace(from, to, stays).map_err(failed)
}
