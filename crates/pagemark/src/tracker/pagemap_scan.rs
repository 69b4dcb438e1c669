//! `pagemap-scan`: userfaultfd in asynchronous write-protect mode, read and re-armed by the PAGEMAP_SCAN ioctl.
//!
//! A page that was never protected counts as written, so nothing needs to be armed ahead and no page table is allocated
//! for memory that holds nothing: the first scan reports what is populated and protects it in the same step.

use std::io;
use std::sync::Arc;

use super::populated::{Pages, Seen, check_alive};
use crate::sys::pagemap::{Filter, Pagemap, SWAPPED, WP_ALLOWED, WRITTEN};
use crate::sys::userfaultfd::Userfaultfd;
use crate::{Mechanism, Range, RangeSet, TrackError, Tracker};

/// How often a mapping that changes while it is registered is tried again in one collect. Until it is registered, all of it
/// is reported each time.
const REGISTER_TRIES: u32 = 4;

/// Tracks by PAGEMAP_SCAN.
#[derive(Debug)]
pub struct PagemapScan {
    pagemap: Arc<Pagemap>,
    userfaultfd: Arc<Userfaultfd>,
    pages: Pages,
    seen: Seen,
}

impl PagemapScan {
    /// Tracks the address space of `pagemap`, from which `userfaultfd` must be too. Several trackers can share both, for
    /// different ranges.
    pub fn new(pagemap: Arc<Pagemap>, userfaultfd: Arc<Userfaultfd>, pages: Pages) -> Self {
        PagemapScan { pagemap, userfaultfd, pages, seen: Seen::default() }
    }

    /// Leaves `range` unprotected, so that its pages count as written.
    pub(super) fn release(&self, range: &Range) -> Result<(), TrackError> {
        match self.userfaultfd.write_protect(range, false) {
            // It is no longer mapped as it was: it is not registered, so it counts as written anyway.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            other => other.map_err(|error| TrackError::from_io(error, || format!("unprotecting {range:#x?}"))),
        }
    }

    /// Scans and protects `range` as far as it is registered.
    fn collect_registered(&self, range: &Range, found: &mut Found) -> Result<(), TrackError> {
        let filter = Filter { report: WRITTEN | SWAPPED, protect: true, ..self.pages.filter() };
        self.scan(range, filter, |run, categories| {
            // In a mapping of a file, an entry that is neither empty nor in memory may be the mark that a protected
            // page left when it was dropped: then the content has changed without a write.
            let may_be_dropped = self.pages == Pages::NotOfFile && categories & SWAPPED != 0;
            if categories & WRITTEN != 0 || may_be_dropped {
                found.written.insert(run.clone());
            }
            found.populated.insert(run);
        })
    }

    /// Finds populated pages in mappings of `range` that are not registered: new ones, and ones that were moved.
    fn unregistered(&self, range: &Range) -> Result<RangeSet, TrackError> {
        let mut runs = RangeSet::new();
        let filter = self.pages.filter();
        self.scan(range, Filter { none: filter.none | WP_ALLOWED, ..filter }, |run, _| runs.insert(run))?;
        Ok(runs)
    }

    /// Registers what is new in `range`. All of the new mappings that is populated counts as written.
    fn collect_new(&self, range: &Range, found: &mut Found) -> Result<(), TrackError> {
        let mut refusal = None;
        for _ in 0..REGISTER_TRIES {
            let new = self.unregistered(range)?;
            if new.is_empty() {
                return Ok(());
            }
            found.written.extend(&new);
            found.populated.extend(&new);
            // The mappings as wholes; if one among them can't be registered, those at least that hold data.
            let registered = self
                .userfaultfd
                .register(range)
                .or_else(|_| new.iter().try_for_each(|run| self.userfaultfd.register(&run)));
            if let Err(error) = registered {
                if error.raw_os_error() == Some(libc::ESRCH) {
                    return Err(TrackError::Gone);
                }
                // The mappings may just have changed: look again.
                refusal = Some(error);
                continue;
            }
            refusal = None;
            // A kernel before 6.13 leaves marks of protection on pages that mremap has moved, which may yet be
            // writable: those are taken off, else a write to them would go unseen.
            let mut stale = Vec::new();
            for run in new.iter() {
                let filter = Filter { report: WRITTEN, protect: true, ..self.pages.filter() };
                self.scan(&run, filter, |run, categories| {
                    if categories & WRITTEN == 0 {
                        stale.push(run);
                    }
                })?;
            }
            for run in stale {
                self.release(&run)?;
                self.collect_registered(&run, found)?;
            }
        }
        match refusal {
            None => Ok(()),
            Some(error) => Err(refused(range, error)),
        }
    }

    fn scan(&self, range: &Range, filter: Filter, each: impl FnMut(Range, u64)) -> Result<(), TrackError> {
        self.pagemap.scan(range, filter, each).map_err(|error| match error.raw_os_error() {
            Some(libc::ENOTTY) => TrackError::Unavailable {
                mechanism: Mechanism::PagemapScan,
                reason: "the kernel has no PAGEMAP_SCAN; Linux 6.7 or later does".to_owned(),
            },
            _ => TrackError::from_io(error, || format!("scanning the pages of {range:#x?}")),
        })
    }
}

/// What one collect has found so far.
#[derive(Default)]
struct Found {
    written: RangeSet,
    populated: RangeSet,
}

impl Tracker for PagemapScan {
    fn mechanism(&self) -> Mechanism {
        Mechanism::PagemapScan
    }

    fn populated(&self) -> Option<&RangeSet> {
        Some(self.seen.pages())
    }

    fn collect(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<(), TrackError> {
        let mut found = Found::default();
        let result = ranges
            .iter()
            .try_for_each(|range| {
                self.collect_registered(&range, &mut found)?;
                self.collect_new(&range, &mut found)
            })
            .and_then(|()| check_alive(&self.pagemap));
        dirty.extend(&found.written);
        match result {
            Ok(()) => dirty.extend(&self.seen.advance(ranges, found.populated)),
            Err(_) => self.seen.add(&found.populated),
        }
        result
    }
}

fn refused(range: &Range, error: io::Error) -> TrackError {
    let why = match error.raw_os_error() {
        Some(libc::EBUSY) => {
            "belongs to a userfaultfd of the program itself, so that its writes can't be seen this way; use --mechanism \
             compare"
        }
        Some(libc::EPERM) => "is shared and can never be written, so that it should not be tracked",
        _ => "can't be registered",
    };
    TrackError::Unavailable {
        mechanism: Mechanism::PagemapScan,
        reason: format!("the mapping {:x}-{:x} {why} ({error})", range.start, range.end),
    }
}
