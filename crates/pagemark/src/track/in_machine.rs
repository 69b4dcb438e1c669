//! Regions of a program that runs in the machine of `pagemark-kvm`: the common part of `kvm-log`,
//! `kvm-ring`, `kvm-scan` and `kvm-emulate`.
//!
//! The machine's monitor finds what the program's instructions write by one of its means, and knows
//! what the kernel writes on the program's behalf, as each system call passes through it. So system
//! calls may write anywhere, and nothing is pinned.

use std::io;
use std::sync::Arc;

use pagemark_kvm_protocol::machine_calls::{self, Means};
use pagemark_linux::pagemap::Pagemap;
use pagemark_linux::this_process::OfThisProcess;

use super::OwnMemory;
use super::registry::own_pagemap;
use crate::{ByteCount, Error, Mechanism, Range, RangeSet, Tracker};

/// Tracks by a means of the machine.
#[derive(Debug)]
pub struct InMachine {
    mechanism: Mechanism,
    means: Means,
    pagemap: Arc<Pagemap>,
    memory: OwnMemory,
    tracked: Vec<Range>,
    process: OfThisProcess,
}

impl InMachine {
    /// Tracks memory of this process.
    ///
    /// # Errors
    /// `ErrorKind::Unavailable`: the program does not run in the machine, or the machine lacks the
    /// means.
    pub(super) fn new(mechanism: Mechanism, means: Means, memory: OwnMemory) -> Result<InMachine, Error> {
        machine_calls::check(means).map_err(|error| unavailable(mechanism, &error))?;
        let pagemap = own_pagemap()?;
        Ok(InMachine { mechanism, means, pagemap, memory, tracked: Vec::new(), process: OfThisProcess::new() })
    }

    fn track(&mut self, range: Range, dirty: &mut RangeSet) -> Result<(), Error> {
        self.memory.check(&range)?;
        machine_calls::track(self.means, &range).map_err(|error| match error.raw_os_error() {
            Some(libc::EOPNOTSUPP) => unavailable(self.mechanism, &error),
            _ => Error::while_tracking(error, || format!("tracking {range:#x?} in the machine")),
        })?;
        self.tracked.push(range.clone());
        dirty.extend(&self.memory.holding(&self.pagemap, &range.into())?);
        Ok(())
    }
}

pub(super) fn unavailable(mechanism: Mechanism, error: &io::Error) -> Error {
    let reason = match error.raw_os_error() {
        Some(libc::ENOSYS) => {
            "the program does not run in the machine of `pagemark-kvm`; `pagemark-kvm PROGRAM` does it"
        }
        Some(libc::EBUSY) => keeps_other(if mechanism == Mechanism::KvmRing { Means::Ring } else { Means::Log }),
        _ => "the machine cannot do it with this kernel and this memory",
    };
    Error::unavailable(mechanism, reason)
}

/// Why a machine has neither a log nor rings, if it is to have them: `means` says which.
pub(super) fn keeps_other(means: Means) -> &'static str {
    match means {
        Means::Ring => {
            "the machine keeps a log, which excludes rings; with PAGEMARK_KVM_DIRTY=rings in its environment, \
             pagemark-kvm keeps rings"
        }
        _ => {
            "the machine keeps rings, which exclude a log; without PAGEMARK_KVM_DIRTY in its environment, \
             pagemark-kvm keeps a log"
        }
    }
}

impl Tracker for InMachine {
    fn mechanism(&self) -> Mechanism {
        self.mechanism
    }

    fn granularity(&self) -> ByteCount {
        ByteCount::new(self.means.unit())
    }

    fn collect(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<(), Error> {
        let means = self.means;
        self.tracked.retain(|tracked| {
            let stays = ranges.iter().any(|range| range == *tracked);
            if !stays {
                // An error means that the range was mapped anew, which needs nothing.
                let _ = machine_calls::forget(means, tracked);
            }
            stays
        });
        ranges.iter().try_for_each(|range| {
            if !self.tracked.contains(&range) {
                return self.track(range, dirty);
            }
            machine_calls::collect(means, &range, |run| dirty.insert(run)).map_err(|error| match error.raw_os_error() {
                Some(libc::ESTALE) => Error::remapped(range.clone()),
                _ => Error::while_tracking(error, || format!("asking the machine for {range:#x?}")),
            })
        })
    }
}

impl Drop for InMachine {
    fn drop(&mut self) {
        // The machine of a child made by `fork` tracks nothing.
        if self.process.is_here() {
            self.tracked.iter().for_each(|range| _ = machine_calls::forget(self.means, range));
        }
    }
}
