//! `ldt`: the dirty bits of the page table, read and restarted by the PAGEMAP_SCAN ioctl of a kernel with the patches of
//! `kernel/ldt` (LDT, section III).
//!
//! Nothing is write-protected and nothing registered, so the tracked program takes no page fault for it. A page that was not
//! there at the last restart counts as written by itself, wherever it comes from.

use std::sync::Arc;

use super::populated::{Pages, Seen, check_alive};
use crate::sys::pagemap::{Filter, LDT_DIRTY, Pagemap};
use crate::sys::scratch::Scratch;
use crate::{Mechanism, RangeSet, TrackError, Tracker};

/// Tracks by the dirty bits.
///
/// An address space has one interval at a time: it can have one such tracker only, also among several programs.
#[derive(Debug)]
pub struct Ldt {
    pagemap: Arc<Pagemap>,
    pages: Pages,
    /// What the last collect was asked for. Outside of it the intervals are not ours.
    covered: RangeSet,
    seen: Seen,
}

impl Ldt {
    /// Tracks the address space of `pagemap`. Several trackers can share it, for different ranges.
    ///
    /// # Errors
    /// [`TrackError::Unavailable`]: the kernel lacks the patches.
    pub fn new(pagemap: Arc<Pagemap>, pages: Pages) -> Result<Self, TrackError> {
        check_kernel()?;
        Ok(Ldt { pagemap, pages, covered: RangeSet::new(), seen: Seen::default() })
    }
}

/// Asks the kernel whether a page of this process was written, and restarts nothing.
fn check_kernel() -> Result<(), TrackError> {
    let page = Scratch::new(1);
    page.write(0, 1);
    let mut is_dirty = false;
    let filter = Filter { all: LDT_DIRTY, report: LDT_DIRTY, ..Filter::default() };
    let scanned = Pagemap::of_this_process().and_then(|own| own.scan(&page.range(), filter, |_, _| is_dirty = true));
    match scanned {
        Ok(()) if is_dirty => Ok(()),
        // The category is unknown, or PAGEMAP_SCAN itself.
        Ok(()) => Err(unavailable()),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOTTY)) => Err(unavailable()),
        Err(error) => Err(TrackError::from_io(error, || "scanning our own pages".to_owned())),
    }
}

fn unavailable() -> TrackError {
    TrackError::Unavailable {
        mechanism: Mechanism::Ldt,
        reason: "the kernel has no lightweight dirty tracking; one with Pagemark's patches (kernel/ldt) does"
            .to_owned(),
    }
}

impl Tracker for Ldt {
    fn mechanism(&self) -> Mechanism {
        Mechanism::Ldt
    }

    fn populated(&self) -> Option<&RangeSet> {
        Some(self.seen.pages())
    }

    fn collect(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<(), TrackError> {
        let mut populated = RangeSet::new();
        let mut written = RangeSet::new();
        let filter = Filter { report: LDT_DIRTY, restart: true, ..self.pages.filter() };
        let result = ranges
            .iter()
            .try_for_each(|range| {
                let scanned = self.pagemap.scan(&range, filter, |run, categories| {
                    if categories & LDT_DIRTY != 0 {
                        written.insert(run.clone());
                    }
                    populated.insert(run);
                });
                scanned.map_err(|error| TrackError::from_io(error, || format!("scanning the pages of {range:#x?}")))
            })
            .and_then(|()| check_alive(&self.pagemap));
        let mut new = populated.clone();
        new.subtract(&self.covered);
        dirty.extend(&written);
        dirty.extend(&new);
        if let Err(error) = result {
            self.seen.add(&populated);
            return Err(error);
        }
        dirty.extend(&self.seen.advance(ranges, populated));
        self.covered = ranges.clone();
        Ok(())
    }
}
