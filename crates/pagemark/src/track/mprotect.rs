//! `mprotect`: pages are read-only, and the first write to each raises SIGSEGV, whose handler
//! records the page (PT in HAC, II-B).
//!
//! Only for memory of this process. A system call that writes to a protected page fails with
//! `EFAULT`, and raises no signal. Memory that system calls write to is therefore pinned
//! ([`Tracker::pin`]).

use std::io;
use std::sync::Arc;

use pagemark_linux::fault::{self, Fault, HandledRange, Outcome, WriteFault};
use pagemark_linux::own_mappings::{OwnMapping, OwnMappings};
use pagemark_linux::own_memory::{Access, set_access};
use pagemark_linux::pagemap::Pagemap;
use pagemark_linux::this_process::OfThisProcess;

use super::OwnMemory;
use super::pins::Pins;
use super::protected::{Protected, Taken, WriteProtection};
use super::registry::{MechanismEntry, own_mappings, own_pagemap};
use crate::{Error, Mechanism, Range, RangeSet, Tracker};

/// The mechanism `mprotect`.
pub const ENTRY: MechanismEntry = MechanismEntry {
    name: "mprotect",
    description: "pages are read-only until a signal handler sees the first write to each",
    requirement: "nothing",
    is_exclusive: false,
    sees_other_mappings: false,
    own_memory: |memory| Ok(Box::new(Mprotect::new(own_pagemap()?, memory.clone())?)),
    machine: None,
    process: None,
};

/// Tracks by write-protection and a signal handler.
///
/// The ranges are readable and writable mappings of data, whose protection nobody else changes.
/// They are readable and writable again when they are no longer tracked.
#[derive(Debug)]
pub struct Mprotect {
    pagemap: Arc<Pagemap>,
    memory: OwnMemory,
    mappings: Arc<OwnMappings>,
    tracked: Vec<ProtectedRange>,
    pins: Pins,
    taken: Taken,
}

impl Mprotect {
    /// Tracks memory of this process. `pagemap` is the pagemap of the process.
    ///
    /// # Errors
    /// `/proc` is not mounted. `ErrorKind::Unavailable`: valgrind lacks an option.
    pub fn new(pagemap: Arc<Pagemap>, memory: OwnMemory) -> Result<Self, Error> {
        fault::check_registers().map_err(|error| Error::unavailable(Mechanism::Mprotect, error.to_string()))?;
        let mappings = own_mappings()?;
        Ok(Mprotect { pagemap, memory, mappings, tracked: Vec::new(), pins: Pins::default(), taken: Taken::default() })
    }

    /// Starts to track a range, and adds what holds data there to `dirty`.
    fn arm(&mut self, range: Range, dirty: &mut RangeSet) -> Result<(), Error> {
        self.memory.check(&range)?;
        let unavailable = |error| Error::while_tracking(error, || format!("protecting {range:#x?}"));
        let pages = Protected::new(range.clone(), self.memory.pages_per_unit(), ByMprotect).map_err(unavailable)?;
        let shared = Arc::new(Shared { pages, process: OfThisProcess::new() });
        let armed = fault::arm(range.clone(), shared.clone()).map_err(unavailable)?;
        let tracked = ProtectedRange { shared, _armed: armed };
        tracked.shared.pages.close_all().map_err(unavailable)?;
        dirty.extend(&self.memory.holding(&self.pagemap, &range.clone().into())?);
        self.pins.open_in(&tracked.shared.pages).map_err(unavailable)?;
        self.tracked.push(tracked);
        Ok(())
    }

    /// Collects, and protects what was written or leaves it open.
    fn collect_pages(&mut self, ranges: &RangeSet, dirty: &mut RangeSet, protect: bool) -> Result<(), Error> {
        install_handler()?;
        self.tracked.retain(|tracked| ranges.iter().any(|range| range == *tracked.shared.pages.range()));
        let pinned = self.pins.pages();
        let mut written = RangeSet::new();
        let result = ranges.iter().try_for_each(|range| {
            match self.tracked.iter().find(|tracked| *tracked.shared.pages.range() == range) {
                Some(tracked) => {
                    let pages = &tracked.shared.pages;
                    pages.check_mappings(&list(&self.mappings, &range)?)?;
                    if protect {
                        return pages.collect(&pinned, &mut self.taken, &mut written);
                    }
                    pages.collect_open(&mut written);
                    Ok(())
                }
                None => self.arm(range, &mut written),
            }
        });
        dirty.extend(&written);
        result
    }
}

impl Tracker for Mprotect {
    fn mechanism(&self) -> Mechanism {
        Mechanism::Mprotect
    }

    fn collect(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<(), Error> {
        self.collect_pages(ranges, dirty, true)
    }

    fn collect_open(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<bool, Error> {
        self.collect_pages(ranges, dirty, false).map(|()| true)
    }

    fn pin(&mut self, range: &Range) -> Result<(), Error> {
        self.pins.add(range, self.tracked.iter().map(|tracked| &tracked.shared.pages))
    }

    fn unpin(&mut self, range: &Range) {
        self.pins.remove(range);
    }

    fn begin_interval(&mut self) -> Result<(), Error> {
        install_handler()
    }
}

/// Makes sure that writes to protected pages reach the handler.
pub(super) fn install_handler() -> Result<(), Error> {
    fault::install().map_err(|error| Error::while_tracking(error, || "installing a handler of SIGSEGV".to_owned()))
}

/// The mappings of a range.
pub(super) fn list(mappings: &OwnMappings, range: &Range) -> Result<Vec<OwnMapping>, Error> {
    mappings
        .within(range)
        .map_err(|error| Error::while_tracking(error, || format!("reading the mappings of {range:#x?}")))
}

/// A range that is tracked, as long as this exists.
#[derive(Debug)]
struct ProtectedRange {
    shared: Arc<Shared>,
    _armed: HandledRange,
}

impl Drop for ProtectedRange {
    fn drop(&mut self) {
        // The handler must still be armed here. An error means that the range was unmapped, which
        // needs nothing. A child, too, writes to the memory when the handler is gone. It has the
        // memory: the contract of `Region::adopt` excludes MADV_DONTFORK.
        let _ = self.shared.pages.protection().unprotect(self.shared.pages.range());
    }
}

/// What the signal handler uses.
#[derive(Debug)]
struct Shared {
    pages: Protected<ByMprotect>,
    process: OfThisProcess,
}

// SAFETY: the handler uses atomic numbers and system calls, and changes no register.
unsafe impl WriteFault for Shared {
    fn handle(&self, fault: &mut Fault<'_>) -> Outcome {
        let opened = if !self.process.is_here() {
            // The child inherits the protection, but collects nothing. The gate may have been
            // closed by a thread that does not exist in the child.
            self.pages.protection().unprotect(self.pages.range())
        } else {
            let _inside = self.pages.gate().enter();
            self.pages.open_inside(fault.address)
        };
        if opened.is_ok() { Outcome::Resume } else { Outcome::Crash }
    }
}

/// Write-protection by `mprotect`.
#[derive(Debug)]
pub(super) struct ByMprotect;

impl WriteProtection for ByMprotect {
    const IS_IDEMPOTENT: bool = true;
    const TAKES_MAPPINGS: bool = true;

    fn unprotect(&self, range: &Range) -> io::Result<()> {
        // SAFETY: restores the access that the program has without tracking.
        unsafe { set_access(range, Access::Write) }
    }

    fn protect(&self, range: &Range) -> io::Result<()> {
        // SAFETY: the range is armed, so a write raises a signal whose handler unprotects the page.
        unsafe { set_access(range, Access::Read) }
    }
}
