//! `mprotect`: pages are made read-only, and the SIGSEGV of a page's first write tells of it. HAC's PT.
//!
//! Only for memory of this process. The kernel refuses to write to a protected page for a system call (`EFAULT`), without
//! a signal: what system calls write to is pinned meanwhile ([`Tracker::pin`]).

use std::io;
use std::sync::Arc;

use super::pins::Pins;
use super::populated::{Pages, populated};
use super::protected::{Lock, Protected, Taken};
use crate::sys::fault::{self, Armed, Fault, Outcome, WriteFault};
use crate::sys::own_memory::{Access, set_access};
use crate::sys::pagemap::Pagemap;
use crate::{Mechanism, Range, RangeSet, TrackError, Tracker};

/// Tracks by write-protection and a signal handler.
///
/// The ranges are readable and writable mappings of data, whose protection nobody else changes; they are so again when the
/// tracker no longer tracks them.
#[derive(Debug)]
pub struct Mprotect {
    pagemap: Arc<Pagemap>,
    areas: Vec<Area>,
    pins: Pins,
    taken: Taken,
}

impl Mprotect {
    /// Tracks the address space of this process, whose pagemap it is given.
    pub fn new(pagemap: Arc<Pagemap>) -> Self {
        Mprotect { pagemap, areas: Vec::new(), pins: Pins::default(), taken: Taken::default() }
    }

    /// Starts to track a range, and adds what holds data there to `dirty`.
    fn arm(&mut self, range: Range, dirty: &mut RangeSet) -> Result<(), TrackError> {
        let unavailable = |error| TrackError::from_io(error, || format!("protecting {range:#x?}"));
        let shared = Arc::new(Shared { pages: Protected::new(range.clone(), ByAccess), process: std::process::id() });
        let armed = fault::arm(range.clone(), shared.clone()).map_err(unavailable)?;
        let area = Area { shared, _armed: armed };
        area.shared.pages.close_all().map_err(unavailable)?;
        dirty.extend(&populated(&self.pagemap, Pages::All, &range.clone().into())?);
        self.pins.open_in(&area.shared.pages).map_err(unavailable)?;
        self.areas.push(area);
        Ok(())
    }
}

impl Tracker for Mprotect {
    fn mechanism(&self) -> Mechanism {
        Mechanism::Mprotect
    }

    fn collect(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<(), TrackError> {
        self.areas.retain(|area| ranges.iter().any(|range| range == *area.shared.pages.range()));
        let pinned = self.pins.pages();
        let mut written = RangeSet::new();
        let result = ranges.iter().try_for_each(|range| {
            match self.areas.iter().find(|area| *area.shared.pages.range() == range) {
                Some(area) => area
                    .shared
                    .pages
                    .close(&pinned, &mut self.taken, &mut written, || {})
                    .map_err(|error| TrackError::from_io(error, || format!("protecting {range:#x?}"))),
                None => self.arm(range, &mut written),
            }
        });
        dirty.extend(&written);
        result
    }

    fn pin(&mut self, range: &Range) -> Result<(), TrackError> {
        self.pins.add(range, self.areas.iter().map(|area| &area.shared.pages))
    }

    fn unpin(&mut self, range: &Range) {
        self.pins.remove(range);
    }
}

/// A range that is tracked, as long as this exists.
#[derive(Debug)]
struct Area {
    shared: Arc<Shared>,
    _armed: Armed,
}

impl Drop for Area {
    fn drop(&mut self) {
        // Before the handler goes. If the range was unmapped meanwhile, there is nothing to do.
        let _ = self.shared.pages.lock().allow(self.shared.pages.range());
    }
}

/// What the signal handler uses.
#[derive(Debug)]
struct Shared {
    pages: Protected<ByAccess>,
    process: u32,
}

impl WriteFault for Shared {
    fn handle(&self, fault: &mut Fault<'_>) -> Outcome {
        let opened = if forked(self.process) {
            // The child has the protection, but nobody collects there, and the gate may be closed by a thread that
            // it does not have.
            self.pages.lock().allow(self.pages.range())
        } else {
            let _inside = self.pages.gate().enter();
            self.pages.open_inside(&(fault.address..fault.address + 1))
        };
        if opened.is_ok() { Outcome::Resume } else { Outcome::Crash }
    }
}

/// True in a child made by `fork`. Async-signal-safe.
pub(super) fn forked(process: u32) -> bool {
    // SAFETY: the call only returns a number.
    unsafe { libc::getpid() as u32 != process }
}

/// Pages refuse writes by their protection.
#[derive(Debug)]
pub(super) struct ByAccess;

impl Lock for ByAccess {
    const SPANS: bool = true;

    fn allow(&self, range: &Range) -> io::Result<()> {
        // SAFETY: gives back what the program has.
        unsafe { set_access(range, Access::Write) }
    }

    fn refuse(&self, range: &Range) -> io::Result<()> {
        // SAFETY: the range is armed: a write goes to our handler, which allows it.
        unsafe { set_access(range, Access::Read) }
    }
}
