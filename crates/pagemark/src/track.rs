//! Finding out which ranges of memory were written. [`Tracker`] is the interface; each mechanism
//! has a file of its own, and the [`registry`] knows all of them.

use std::io;

use pagemark_linux::room;

use crate::error::{Error, ErrorKind, Object};
use crate::{ByteCount, Range, RangeSet};

pub mod adaptive;
pub mod compare;
#[cfg_attr(not(feature = "emulate"), path = "track/emulate/disabled.rs")]
pub mod emulate;
pub mod full;
pub mod kvm_emulate;
pub mod kvm_log;
pub mod kvm_ring;
pub mod kvm_scan;
pub mod ldt;
pub mod mprotect;
pub mod pagemap_scan;
pub mod registration;
pub mod registry;
pub mod soft_dirty;
pub mod uffd;

pub mod own_memory;

mod fault_watch;
mod in_machine;
mod of_machine;
pub(crate) mod page_bits;
mod pins;
mod populated;
pub mod probe;
mod protected;
mod region_scan;
#[cfg(test)]
mod tests;
pub mod view_log;
pub mod view_scan;

pub use own_memory::OwnMemory;
pub use populated::{DataPages, Pages, populated};
pub use probe::{Cost, Probe, check, cost, cost_with, probe};
pub(crate) use registry::own_pagemap;
pub use registry::{
    MachineTracking, Mechanism, MechanismEntry, MemoryPart, NewTracker, ProcessMemory, ProcessTracking, Scope,
};

/// Finds the ranges of one address space that were written.
///
/// A tracker may over-report and must never miss a write. Its first `collect` of a range reports
/// all of it that holds data, so that a mapping which is new is dirty as a whole.
pub trait Tracker: Send {
    /// The mechanism of the tracker.
    fn mechanism(&self) -> Mechanism;

    /// Name of the type that implements the tracker: one mechanism can have a type for each
    /// [`Scope`].
    fn type_name(&self) -> &'static str {
        std::any::type_name::<Self>()
    }

    /// Smallest unit in which a write is reported.
    fn granularity(&self) -> ByteCount {
        ByteCount::PAGE
    }

    /// Adds to `dirty` what was written in `ranges` since the last `collect` that covered it (all
    /// of it that holds data, the first time), and starts the next interval there. `ranges` is what
    /// the target has mapped now, whole mappings; ranges that are no longer named are forgotten.
    ///
    /// The next interval starts before this returns: whoever reads a reported page afterwards reads
    /// it with all writes of the interval that ended, and a later write is reported by the next
    /// `collect`.
    ///
    /// # Errors
    /// [`Error`]; then what was collected is in `dirty` and nothing is lost, but the interval
    /// may have started for part of `ranges` only.
    fn collect(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<(), Error>;

    /// Like [`Tracker::collect`], for a caller that writes to what is reported. Returns true if
    /// that stays open: the writes cost no faults, and the next collect reports all of it again. If
    /// false, a pin is what saves the faults.
    ///
    /// # Errors
    /// Those of [`Tracker::collect`].
    fn collect_open(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<bool, Error> {
        self.collect(ranges, dirty).map(|()| false)
    }

    /// Like [`Tracker::collect`], for memory that is collected again before it is described by
    /// [`Tracker::populated`]: what has stopped holding data may be left to that collect.
    ///
    /// # Errors
    /// Those of [`Tracker::collect`].
    fn collect_ahead(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<(), Error> {
        self.collect(ranges, dirty)
    }

    /// Finds out now which pages of `ranges` hold data, as far as the next `collect` would do it.
    /// Until that has returned, no thread of the target runs.
    ///
    /// # Errors
    /// Those of [`Tracker::collect`]; then the next one finds it out.
    fn find_data_pages(&mut self, _ranges: &RangeSet) -> Result<(), Error> {
        Ok(())
    }

    /// The pages that held data at the last `collect`, for trackers that know.
    fn populated(&self) -> Option<&RangeSet> {
        None
    }

    /// The part of `ranges` where the memory may hold anything else than zeros, from a tracker that
    /// hides it in the page table; `None` if the page table shows it.
    ///
    /// # Errors
    /// Those of [`Tracker::collect`].
    fn data(&self, _ranges: &RangeSet) -> Result<Option<RangeSet>, Error> {
        Ok(None)
    }

    /// Lets the kernel write to `range` on behalf of system calls, until [`Tracker::unpin`]: each
    /// collect reports the pages around it. Mechanisms that see what system calls write have
    /// nothing to do; for the others such a call fails with `EFAULT` where nothing is pinned. The
    /// same range may be pinned several times.
    ///
    /// # Errors
    /// Those of [`Tracker::collect`]; then nothing is pinned.
    fn pin(&mut self, _range: &Range) -> Result<(), Error> {
        Ok(())
    }

    /// Ends one [`Tracker::pin`] of the same range.
    fn unpin(&mut self, _range: &Range) {}

    /// Declares that a long interval begins, in which the target should run at full speed.
    /// `adaptive` unprotects the pages here that will be written anyway; other trackers do nothing.
    ///
    /// # Errors
    /// Those of [`Tracker::collect`].
    fn begin_interval(&mut self) -> Result<(), Error> {
        Ok(())
    }
}

impl Error {
    /// The mechanism does not work on this machine. The reason says what would enable it.
    pub fn unavailable(mechanism: Mechanism, reason: impl Into<String>) -> Error {
        let object = Object::Other(mechanism.to_string().into());
        Error::about(ErrorKind::Unavailable, object, "does not work here").caused_by(reason.into())
    }

    /// What a mechanism needs was refused. The mechanism does not work on this machine, for
    /// `reason`, unless too little was left of something: then `operation` has failed.
    pub(crate) fn refused(
        mechanism: Mechanism,
        error: io::Error,
        operation: &str,
        reason: impl FnOnce(&io::Error) -> String,
    ) -> Error {
        match room::is_passing(&error) {
            true => Error::system(operation.to_owned())(error),
            false => Error::unavailable(mechanism, reason(&error)),
        }
    }

    /// A mapping of a region that is not the one that was tracked.
    pub(crate) fn remapped(range: Range) -> Error {
        let reason =
            "was mapped anew or had its protection changed while it was tracked: the writes since then are unknown";
        Error::about(ErrorKind::Remapped, Object::Range(range), reason)
    }

    /// The tracked address space is gone.
    pub(crate) fn gone() -> Error {
        let reason = "the tracked memory is gone: its process has exited or executed another program";
        Error::because(ErrorKind::Gone, reason)
    }

    /// A failed system call on the tracked memory: of kind [`ErrorKind::Gone`] if the error means
    /// that the process is gone, and [`ErrorKind::System`] otherwise.
    pub(crate) fn while_tracking(error: io::Error, operation: impl FnOnce() -> String) -> Error {
        match error.raw_os_error() {
            Some(libc::ESRCH) => Error::gone(),
            _ if error.kind() == io::ErrorKind::UnexpectedEof => Error::gone(),
            _ => Error::system(operation())(error),
        }
    }
}
