//! `pagemap-scan`: userfaultfd in asynchronous write-protect mode, read and re-armed by the PAGEMAP_SCAN ioctl.
//!
//! A page that was never protected counts as written, so nothing needs to be armed ahead and no page table is allocated
//! for memory that holds nothing: the first scan reports what is populated and protects it in the same step.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::populated::{Pages, Seen, check_alive};
use crate::sys::pagemap::{Filter, Pagemap, SWAPPED, WP_ALLOWED, WRITTEN};
use crate::sys::userfaultfd::Userfaultfd;
use crate::{Mechanism, Range, RangeSet, TrackError, Tracker};

/// How often a mapping that changes while it is registered is tried again in one collect. Until it is registered, all of it
/// is reported each time.
const REGISTER_TRIES: u32 = 4;

/// When mappings of another process are registered: only while they can't change.
///
/// Registering a part of a mapping splits it, and a process that then resizes what it knows as one mapping gets an error.
/// Between reading where a running process's mappings are and registering them they may have become others.
#[derive(Debug, Default)]
pub struct Registration {
    stands_still: AtomicBool,
    left_pages: AtomicU64,
}

impl Registration {
    /// Says whether the process stands still from now on.
    pub fn set_stands_still(&self, stands_still: bool) {
        self.stands_still.store(stands_still, Ordering::Relaxed);
    }

    /// Pages that were reported since the last call because they lie in mappings that are not registered, and could not
    /// be then. They are reported by every collect.
    pub fn take_left_pages(&self) -> u64 {
        self.left_pages.swap(0, Ordering::Relaxed)
    }

    fn is_allowed(&self) -> bool {
        self.stands_still.load(Ordering::Relaxed)
    }
}

/// Tracks by PAGEMAP_SCAN.
#[derive(Debug)]
pub struct PagemapScan {
    pagemap: Arc<Pagemap>,
    userfaultfd: Arc<Userfaultfd>,
    pages: Pages,
    /// What `register` was asked for.
    registered: RangeSet,
    seen: Seen,
    /// None for memory whose mappings nobody changes meanwhile.
    registration: Option<Arc<Registration>>,
}

impl PagemapScan {
    /// Tracks the address space of `pagemap`, from which `userfaultfd` must be too. Several trackers can share both, for
    /// different ranges.
    pub fn new(pagemap: Arc<Pagemap>, userfaultfd: Arc<Userfaultfd>, pages: Pages) -> Self {
        let registered = RangeSet::new();
        PagemapScan { pagemap, userfaultfd, pages, registered, seen: Seen::default(), registration: None }
    }

    /// Registers mappings only when `registration` allows it.
    #[must_use]
    pub fn registering(self, registration: Arc<Registration>) -> Self {
        PagemapScan { registration: Some(registration), ..self }
    }

    /// Leaves `range` unprotected, so that its pages count as written.
    pub(super) fn release(&self, range: &Range) -> Result<(), TrackError> {
        match self.userfaultfd.write_protect(range, false) {
            // It is no longer mapped as it was: it is not registered, so it counts as written anyway.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            other => other.map_err(|error| TrackError::from_io(error, || format!("unprotecting {range:#x?}"))),
        }
    }

    /// Registers ranges that are named for the first time. This alone tells whether somebody else tracks them: a scan takes
    /// no notice of who has registered a mapping. What can't be registered for another reason may hold no data, so that it
    /// never matters; if it does, [`PagemapScan::collect_new`] meets it.
    fn claim(&mut self, ranges: &RangeSet) -> Result<(), TrackError> {
        let mut new = ranges.clone();
        match &self.registration {
            Some(registration) if !registration.is_allowed() => return Ok(()),
            // Mappings may have taken the place of others: only whole ones are sure not to be split.
            Some(_) => {}
            None => new.subtract(&self.registered),
        }
        for range in new.iter() {
            match self.userfaultfd.register(&range) {
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Err(TrackError::Gone),
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => return Err(refused(&range, error)),
                _ => {}
            }
        }
        self.registered = ranges.clone();
        Ok(())
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
            let registered = match &self.registration {
                Some(registration) if !registration.is_allowed() => {
                    let left_pages = new.total_bytes() / crate::PAGE_SIZE as u64;
                    registration.left_pages.fetch_add(left_pages, Ordering::Relaxed);
                    return Ok(());
                }
                Some(_) => self.userfaultfd.register(range),
                // The mappings as wholes; if one among them can't be registered, those at least that hold data.
                None => self
                    .userfaultfd
                    .register(range)
                    .or_else(|_| new.iter().try_for_each(|run| self.userfaultfd.register(&run))),
            };
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
        self.claim(ranges)?;
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

/// There is no userfaultfd of the kind that is needed.
pub(super) fn unavailable(mechanism: Mechanism, error: io::Error) -> TrackError {
    let reason = format!("no userfaultfd with asynchronous write-protection, which Linux 6.7 has ({error})");
    TrackError::Unavailable { mechanism, reason }
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
