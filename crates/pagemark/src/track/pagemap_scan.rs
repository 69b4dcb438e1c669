//! `pagemap-scan`: userfaultfd in asynchronous write-protect mode, read and re-armed by the
//! PAGEMAP_SCAN ioctl.
//!
//! A page that was never protected counts as written. Nothing is therefore protected in advance,
//! and memory without data needs no page table: the first scan reports the populated pages and
//! protects them in the same step.
//!
//! Most of the time of a scan goes into the runs that it reports and the pages that it adds to
//! them, 3 ms for a GiB of populated pages. In anonymous memory, one scan therefore reports written
//! pages alone (0.9 ms), and another the pages without data. The latter is needed only for pages
//! that were freed, so that the rounds of a pre-copy do without it, and it can be made while the
//! state of a frozen process is being saved.

use std::io;
use std::sync::Arc;

use pagemark_linux::pagemap::{Filter, PRESENT, Pagemap, SWAPPED, WP_ALLOWED, WRITTEN};
use pagemark_linux::userfaultfd::Userfaultfd;

use super::populated::{Pages, Seen, check_alive};
use super::region_scan::RegionScan;
use super::registration::Registration;
use super::registry::{MachineTracking, MechanismEntry, MemoryPart, ProcessMemory, ProcessTracking};
use crate::{AddressRangeExt, ByteCount, Error, Mechanism, Range, RangeSet, Tracker};

/// The mechanism `pagemap-scan`. Regions have a tracker of their own (`RegionScan`).
pub const ENTRY: MechanismEntry = MechanismEntry {
    name: "pagemap-scan",
    description: "userfaultfd write protection that the kernel resolves itself, collected by the PAGEMAP_SCAN ioctl",
    requirement: "Linux 6.7",
    is_exclusive: false,
    sees_other_mappings: false,
    own_memory: |memory| Ok(Box::new(RegionScan::new(Mechanism::PagemapScan, memory.clone())?)),
    machine: Some(MachineTracking::OfProcess),
    process: Some(ProcessTracking {
        needs_userfaultfd: true,
        needs_stop: false,
        needs_parking: false,
        compares_content: false,
        hot_after: None,
        private_parts: MemoryPart::BY_FILE,
        tracker: |memory, part| Ok(Box::new(PagemapScan::of_process(memory, part)?)),
    }),
};

/// Number of attempts in one collect to register a mapping that changes meanwhile. Until the
/// mapping is registered, each collect reports all of it.
const REGISTER_TRIES: u32 = 4;

/// The most memory that one scan for pages without data covers, if the scan before it has found
/// data. Meanwhile the process can map and unmap nothing, which CRIU has it do while its state is
/// being saved.
const LOCKED: ByteCount = ByteCount::new(64 << 20);

/// The most that a scan covers after scans that have found no data: programs reserve terabytes.
const LOCKED_AFTER_NONE: ByteCount = ByteCount::new(16 << 30);

/// From this length on, it pays to scan a run of pages that hold data by itself.
const DENSE: ByteCount = ByteCount::new(2 << 20);

/// Tracks by PAGEMAP_SCAN.
#[derive(Debug)]
pub struct PagemapScan {
    pagemap: Arc<Pagemap>,
    userfaultfd: Arc<Userfaultfd>,
    pages: Pages,
    /// The ranges that were passed to `register`.
    registered: RangeSet,
    seen: Seen,
    /// What [`Tracker::find_data_pages`] has found, until the next collect.
    ahead: Option<PopulatedPages>,
    /// Registers the mappings of another process. `None` for memory whose mappings nobody changes
    /// during a collect, which the tracker registers itself.
    registration: Option<Arc<Registration>>,
}

impl PagemapScan {
    /// Tracks the address space of `pagemap`. `userfaultfd` was made in the same address space.
    /// Several trackers can share both, for different ranges.
    pub fn new(pagemap: Arc<Pagemap>, userfaultfd: Arc<Userfaultfd>, pages: Pages) -> Self {
        let registered = RangeSet::new();
        PagemapScan { pagemap, userfaultfd, pages, registered, seen: Seen::default(), ahead: None, registration: None }
    }

    /// Tracks a part of the memory of a process.
    ///
    /// # Errors
    /// `ErrorKind::Unavailable`: there is no userfaultfd of the process.
    pub fn of_process(memory: &ProcessMemory, part: MemoryPart) -> Result<Self, Error> {
        let userfaultfd = memory
            .userfaultfd
            .clone()
            .ok_or_else(|| Error::unavailable(Mechanism::PagemapScan, "the process was given no userfaultfd"))?;
        let registration = memory.registration.clone();
        Ok(PagemapScan { registration, ..PagemapScan::new(memory.pagemap.clone(), userfaultfd, part.pages()) })
    }

    /// Leaves `range` unprotected, so that its pages count as written.
    pub(super) fn release(&self, range: &Range) -> Result<(), Error> {
        match self.userfaultfd.write_protect(range, false) {
            // The range was mapped anew. It is not registered, and so counts as written.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            other => other.map_err(|error| Error::while_tracking(error, || format!("unprotecting {range:#x?}"))),
        }
    }

    /// Registers ranges that are new to the tracker. Only this call fails if another userfaultfd
    /// tracks them: a scan ignores who registered a mapping. Other failures matter only if the
    /// mapping holds data, and [`PagemapScan::collect_new`] handles those.
    fn claim(&mut self, ranges: &RangeSet) -> Result<(), Error> {
        if self.registration.is_some() {
            return Ok(());
        }
        let mut new = ranges.clone();
        new.subtract(&self.registered);
        for range in new.iter() {
            match self.userfaultfd.register(&range) {
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Err(Error::gone()),
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => return Err(refused(&range, error)),
                _ => {}
            }
        }
        self.registered = ranges.clone();
        Ok(())
    }

    /// Scans and protects the registered parts of `range`. Where all pages are known to hold data,
    /// the kernel's shortest form will do: it would also report those that hold none.
    fn collect_registered(
        &self,
        range: &Range,
        ahead: Option<&PopulatedPages>,
        found: &mut Found,
    ) -> Result<(), Error> {
        if self.pages == Pages::All {
            let shortest = Filter { all: WRITTEN, report: WRITTEN, protect: true, ..Filter::default() };
            let filter = Filter { any: self.pages.filter().any, ..shortest };
            let mut dense = RangeSet::new();
            if let Some(ahead) = ahead {
                dense = ahead.pages.within(range.clone()).filter(|run| run.byte_count() >= DENSE).collect();
            }
            let mut others = RangeSet::from(range.clone());
            others.subtract(&dense);
            let mut add = |run, _| found.written.insert(run);
            dense.iter().try_for_each(|run| self.scan(&run, shortest, &mut add))?;
            return others.iter().try_for_each(|run| self.scan(&run, filter, &mut add));
        }
        let filter = Filter { report: WRITTEN | SWAPPED, protect: true, ..self.pages.filter() };
        self.scan(range, filter, |run, categories| {
            // In a mapping of a file, an entry that is neither empty nor present may be the marker
            // of a protected page that was dropped. Its content has changed without a write.
            let may_be_dropped = self.pages == Pages::NotOfFile && categories & SWAPPED != 0;
            if categories & WRITTEN != 0 || may_be_dropped {
                found.written.insert(run.clone());
            }
            found.populated.insert(run);
        })
    }

    /// Finds populated pages in mappings of `range` that are not registered: new mappings, and
    /// moved ones.
    fn unregistered(&self, range: &Range) -> Result<RangeSet, Error> {
        let mut runs = RangeSet::new();
        let filter = self.pages.filter();
        self.scan(range, Filter { none: filter.none | WP_ALLOWED, ..filter }, |run, _| runs.insert(run))?;
        Ok(runs)
    }

    /// Registers the new mappings in `range`. Their populated pages count as written. The mappings
    /// of another process are left to its [`Registration`].
    fn collect_new(&self, range: &Range, found: &mut Found) -> Result<(), Error> {
        let mut refusal = None;
        for _ in 0..REGISTER_TRIES {
            let new = self.unregistered(range)?;
            if new.is_empty() {
                return Ok(());
            }
            if let Some(registration) = &self.registration {
                registration.leave(new.page_count());
                found.left.extend(&new);
                return Ok(());
            }
            found.written.extend(&new);
            found.populated.extend(&new);
            // Whole mappings. If one of them cannot be registered, at least the runs that hold data.
            let registered = self
                .userfaultfd
                .register(range)
                .or_else(|_| new.iter().try_for_each(|run| self.userfaultfd.register(&run)));
            if let Err(error) = registered {
                if error.raw_os_error() == Some(libc::ESRCH) {
                    return Err(Error::gone());
                }
                // The mappings may have changed. Try again.
                refusal = Some(error);
                continue;
            }
            refusal = None;
            // A kernel before 6.13 leaves protection markers on pages that mremap moved, although
            // they may be writable. The markers are removed, because a write to such a page would
            // not be reported.
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
                self.collect_registered(&run, None, found)?;
            }
        }
        match refusal {
            None => Ok(()),
            Some(error) => Err(refused(range, error)),
        }
    }

    /// Finds the pages of `ranges` that hold data.
    fn find_populated(&self, ranges: &RangeSet) -> Result<PopulatedPages, Error> {
        let mut empty = RangeSet::new();
        let filter = Filter { none: PRESENT | SWAPPED, ..Filter::default() };
        in_parts(ranges, |part| {
            let mut without_data = ByteCount::ZERO;
            self.scan(part, filter, |run, _| {
                without_data += run.byte_count();
                empty.insert(run);
            })?;
            Ok(without_data < part.byte_count())
        })?;
        let mut pages = ranges.clone();
        pages.subtract(&empty);
        Ok(PopulatedPages { ranges: ranges.clone(), pages })
    }

    /// Collects. If `is_ahead`, pages that have stopped holding data are left to the next collect.
    fn collect_all(&mut self, ranges: &RangeSet, dirty: &mut RangeSet, is_ahead: bool) -> Result<(), Error> {
        self.claim(ranges)?;
        let ahead = self.ahead.take().filter(|ahead| ahead.ranges == *ranges);
        let mut found = Found::default();
        let mut result = ranges.iter().try_for_each(|range| {
            self.collect_registered(&range, ahead.as_ref(), &mut found)?;
            self.collect_new(&range, &mut found)
        });
        let leaves_populated = is_ahead && self.pages == Pages::All;
        if self.pages == Pages::All {
            found.populated.extend(&found.written);
            if !leaves_populated && result.is_ok() {
                let populated = match ahead {
                    Some(populated) => Ok(populated),
                    None => self.find_populated(ranges),
                };
                result = populated.map(|mut populated| {
                    populated.pages.subtract(&found.left);
                    found.populated.extend(&populated.pages);
                });
            }
        }
        let result = result.and_then(|()| check_alive(&self.pagemap));
        dirty.extend(&found.written);
        match result {
            Ok(()) if !leaves_populated => dirty.extend(&self.seen.advance(ranges, found.populated)),
            _ => self.seen.add(&found.populated),
        }
        result
    }

    fn scan(&self, range: &Range, filter: Filter, each: impl FnMut(Range, u64)) -> Result<(), Error> {
        self.pagemap.scan(range, filter, each).map_err(|error| match error.raw_os_error() {
            Some(libc::ENOTTY) => {
                Error::unavailable(Mechanism::PagemapScan, "the kernel has no PAGEMAP_SCAN; Linux 6.7 or later does")
            }
            _ => Error::while_tracking(error, || format!("scanning the pages of {range:#x?}")),
        })
    }
}

/// Calls `scan` for parts of `ranges`, which it scans for pages without data, in ascending order.
/// It returns whether the part holds data; the part after one that holds none is longer.
fn in_parts(ranges: &RangeSet, mut scan: impl FnMut(&Range) -> Result<bool, Error>) -> Result<(), Error> {
    let mut most = LOCKED;
    for range in ranges.iter() {
        let mut start = range.start;
        while start < range.end {
            let part = start..range.end.min(start.saturating_add(most));
            most = if scan(&part)? { LOCKED } else { LOCKED_AFTER_NONE.min(most + most) };
            start = part.end;
        }
    }
    Ok(())
}

/// The pages of ranges that hold data.
#[derive(Debug)]
struct PopulatedPages {
    ranges: RangeSet,
    pages: RangeSet,
}

/// The pages that one collect has found so far.
#[derive(Default)]
struct Found {
    written: RangeSet,
    populated: RangeSet,
    /// Pages that hold data in mappings that are not registered yet.
    left: RangeSet,
}

impl Tracker for PagemapScan {
    fn mechanism(&self) -> Mechanism {
        Mechanism::PagemapScan
    }

    fn populated(&self) -> Option<&RangeSet> {
        Some(self.seen.pages())
    }

    fn collect(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<(), Error> {
        self.collect_all(ranges, dirty, false)
    }

    fn collect_ahead(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<(), Error> {
        self.collect_all(ranges, dirty, true)
    }

    fn find_data_pages(&mut self, ranges: &RangeSet) -> Result<(), Error> {
        self.ahead = if self.pages == Pages::All { Some(self.find_populated(ranges)?) } else { None };
        Ok(())
    }
}

/// The kernel has no userfaultfd with asynchronous write-protection.
pub(super) fn unavailable(mechanism: Mechanism, error: io::Error) -> Error {
    Error::refused(mechanism, error, "making a userfaultfd", |error| {
        format!("no userfaultfd with asynchronous write-protection, which Linux 6.7 has ({error})")
    })
}

fn refused(range: &Range, error: io::Error) -> Error {
    let why = match error.raw_os_error() {
        Some(libc::EBUSY) => {
            "belongs to a userfaultfd of the program itself, so that its writes can't be seen this way; use --mechanism \
             compare"
        }
        Some(libc::EPERM) => "is shared and can never be written, so that it should not be tracked",
        _ => "can't be registered",
    };
    Error::unavailable(Mechanism::PagemapScan, format!("the mapping {:x}-{:x} {why} ({error})", range.start, range.end))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Address;

    #[test]
    fn terabytes_without_data_take_few_scans() {
        let at = |gib: u64| Address::new(gib << 30);
        let ranges: RangeSet = [at(1)..at(1) + ByteCount::PAGE, at(10)..at(10 + (16 << 10))].into_iter().collect();
        // A GiB in the middle of sixteen TiB, where the parts are long.
        let data = RangeSet::from(at(9000)..at(9001));
        let (mut scanned, mut after_data, mut count) = (RangeSet::new(), false, 0);
        in_parts(&ranges, |part| {
            assert!(part.byte_count() <= if after_data { LOCKED } else { LOCKED_AFTER_NONE });
            assert!(
                scanned.intersection(&[part.clone()].into_iter().collect()).is_empty(),
                "{part:?} is scanned twice"
            );
            scanned.insert(part.clone());
            count += 1;
            after_data = !data.intersection(&[part.clone()].into_iter().collect()).is_empty();
            Ok(after_data)
        })
        .unwrap();
        assert_eq!(scanned, ranges);
        assert!(count < 1100, "{count} scans");
    }
}
