//! `ldt`: the dirty bits of the page table, read and restarted by the PAGEMAP_SCAN ioctl of a
//! kernel with the patches of `kernel/ldt` (LDT, section III).
//!
//! Nothing is write-protected or registered, so that the tracked program takes no page faults. A
//! page that was not mapped at the last restart counts as written, wherever it comes from.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use pagemark_linux::pagemap::{Filter, LDT_DIRTY, PRESENT, Pagemap, SWAPPED};
use pagemark_linux::scratch::Scratch;

use super::populated::{DataPages, Seen, check_alive};
use super::registry::{MachineTracking, MechanismEntry, MemoryPart, ProcessTracking, own_pagemap};
use crate::{Error, Mechanism, RangeSet, Tracker};

/// The mechanism `ldt`.
pub const ENTRY: MechanismEntry = MechanismEntry {
    name: "ldt",
    description: "the dirty bits of the page table are read and cleared, without page faults",
    requirement: "a kernel with Pagemark's patches (kernel/ldt)",
    is_exclusive: false,
    sees_other_mappings: false,
    own_memory: |memory| Ok(Box::new(Ldt::new(own_pagemap()?, memory)?)),
    machine: Some(MachineTracking::OfProcess),
    process: Some(ProcessTracking {
        needs_userfaultfd: false,
        needs_stop: false,
        needs_parking: false,
        compares_content: false,
        hot_after: None,
        private_parts: MemoryPart::BY_FILE,
        tracker: |memory, part| Ok(Box::new(Ldt::new(memory.pagemap.clone(), part.pages())?)),
    }),
};

/// Tracks by the dirty bits.
///
/// An address space has one interval at a time. Trackers that share a pagemap share it, each for
/// ranges of its own. If another tracker begins a new one through a pagemap of its own, be it of
/// another program, then the kernel says so, and the next collect reports every page.
#[derive(Debug)]
pub struct Ldt {
    /// Open from the first interval to the last: the kernel ends tracking when it is closed.
    pagemap: Arc<Pagemap>,
    data: DataPages,
    /// The ranges of the last collect. Intervals outside of them were not begun by this tracker.
    covered: RangeSet,
    seen: Seen,
    /// [`Pagemap::losses`] as of the last collect that succeeded. The kernel says once that it has
    /// lost what was written to shared memory that left the page tables, or that another tracker
    /// has collected, and perhaps to a tracker of other ranges; the next collect of each reports
    /// every page.
    losses: u64,
}

impl Ldt {
    /// Tracks the address space of `pagemap`. Several trackers can share it, for different ranges.
    ///
    /// # Errors
    /// `ErrorKind::Unavailable`: the kernel lacks the patches.
    pub fn new(pagemap: Arc<Pagemap>, data: impl Into<DataPages>) -> Result<Self, Error> {
        check_kernel()?;
        let losses = pagemap.losses();
        Ok(Ldt { pagemap, data: data.into(), covered: RangeSet::new(), seen: Seen::default(), losses })
    }
}

/// How often a page is restarted until it does not count as written any more. When another thread
/// begins to track, the kernel has all memory of the process count as written once more, which
/// takes some time.
const TRIES: usize = 1000;

/// Pause between two tries.
const TRY_PAUSE: Duration = Duration::from_millis(1);

/// Has the kernel find and restart a page of this process. A kernel without the patches may use the
/// bits of PAGEMAP_SCAN for something else, so that it is not enough that it accepts them.
fn check_kernel() -> Result<(), Error> {
    let page = Scratch::new(1);
    // Trackers of this process would have to report every page if another file were used here.
    let own = own_pagemap()?;
    let is_dirty = |restart| {
        let mut is_dirty = false;
        let filter = Filter { all: LDT_DIRTY, report: LDT_DIRTY, restart, ..Filter::default() };
        match own.scan(&page.range(), filter, |_, _| is_dirty = true) {
            Ok(_) => Ok(is_dirty),
            // Another program tracks this one, too: nothing is known of the page.
            Err(error) if !restart && error.raw_os_error() == Some(libc::ESTALE) => Ok(true),
            // The kernel does not know the category, or PAGEMAP_SCAN.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOTTY)) => Err(unavailable()),
            Err(error) => Err(scanning(error)),
        }
    };
    for value in 1..=2 {
        page.write(0, value);
        // Written until it is restarted, and then no longer.
        if !is_dirty(true)? {
            return Err(unavailable());
        }
        let mut tries = 0;
        while is_dirty(false)? {
            if tries == TRIES {
                return Err(unavailable());
            }
            tries += 1;
            std::thread::sleep(TRY_PAUSE);
            is_dirty(true)?;
        }
    }
    Ok(())
}

fn scanning(error: std::io::Error) -> Error {
    Error::while_tracking(error, || "scanning our own pages".to_owned())
}

fn unavailable() -> Error {
    let reason = if is_paravirtualized_guest_of_xen(Path::new("/sys/hypervisor")) {
        "a paravirtualized guest of Xen has no lightweight dirty tracking, since the hypervisor checks its page \
         tables; on the machine itself, or in a guest of type HVM or PVH, a kernel with Pagemark's patches \
         (kernel/ldt) does"
    } else {
        "the kernel has no lightweight dirty tracking; one with Pagemark's patches (kernel/ldt) does"
    };
    Error::unavailable(Mechanism::Ldt, reason)
}

/// Whether the kernel runs on Xen without page tables of its own, by its files about the
/// hypervisor, `/sys/hypervisor`.
fn is_paravirtualized_guest_of_xen(hypervisor: &Path) -> bool {
    let is = |file, value| std::fs::read_to_string(hypervisor.join(file)).is_ok_and(|text| text.trim() == value);
    is("type", "xen") && is("guest_type", "PV")
}

impl Tracker for Ldt {
    fn mechanism(&self) -> Mechanism {
        Mechanism::Ldt
    }

    fn populated(&self) -> Option<&RangeSet> {
        Some(self.seen.pages())
    }

    fn collect(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<(), Error> {
        let mut populated = RangeSet::new();
        let mut written = RangeSet::new();
        let filter = self.data.pages().filter();
        // A page of shared memory may be written and then leave the page table, whose entry is a
        // marker then: written, but neither present nor swapped.
        let any = filter.any | LDT_DIRTY;
        let filter = Filter { any, report: LDT_DIRTY | PRESENT | SWAPPED, restart: true, ..filter };
        let result = ranges
            .iter()
            .try_for_each(|range| {
                let scanned = self.pagemap.scan(&range, filter, |run, categories| {
                    if categories & LDT_DIRTY != 0 {
                        written.insert(run.clone());
                    }
                    if categories & (PRESENT | SWAPPED) != 0 {
                        populated.insert(run);
                    }
                });
                scanned.map_err(|error| {
                    let is_taken = error.raw_os_error() == Some(libc::ESTALE);
                    let error = Error::while_tracking(error, || format!("scanning the pages of {range:#x?}"));
                    match is_taken {
                        true => error.help("another program collects from this one all the time: end it"),
                        false => error,
                    }
                })
            })
            .and_then(|()| check_alive(&self.pagemap));
        // A page of a file may have been written, and then have left the page table.
        let mut absent = self.data.backed_within(ranges);
        absent.subtract(&populated);
        written.extend(&absent);
        populated.extend(&absent);
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
        let losses = self.pagemap.losses();
        if std::mem::replace(&mut self.losses, losses) != losses {
            dirty.extend(ranges);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tracker_reports_every_page_after_another_one_has_collected() {
        if let Err(error) = check_kernel() {
            pagemark_testing::skipped(&format!("{error}"));
            return;
        }
        let scratch = Scratch::new(4);
        (0..4).for_each(|page| scratch.write(page, 1));
        let ranges = RangeSet::from(scratch.range());
        let [mut first, mut second] = [(); 2].map(|()| {
            let pagemap = Arc::new(Pagemap::of_this_process().unwrap());
            Ldt::new(pagemap, super::super::Pages::All).unwrap()
        });
        let collect = |tracker: &mut Ldt| {
            let mut dirty = RangeSet::new();
            tracker.collect(&ranges, &mut dirty).unwrap();
            dirty
        };
        assert_eq!(collect(&mut first), ranges);
        assert_eq!(collect(&mut first), RangeSet::new());
        scratch.write(0, 2);
        assert_eq!(collect(&mut second), ranges, "all is new to it");
        assert_eq!(collect(&mut second), RangeSet::new());
        assert_eq!(collect(&mut first), ranges, "the second has taken the page");
        assert_eq!(collect(&mut first), RangeSet::new());
        assert_eq!(collect(&mut second), ranges, "the first has begun an interval since");
    }

    #[test]
    fn only_one_type_of_guests_of_xen_is_paravirtualized() {
        let directory = tempfile::tempdir().unwrap();
        assert!(!is_paravirtualized_guest_of_xen(directory.path()));
        std::fs::write(directory.path().join("type"), "xen\n").unwrap();
        for (guest_type, is_paravirtualized) in [("PV\n", true), ("HVM\n", false), ("PVH\n", false)] {
            std::fs::write(directory.path().join("guest_type"), guest_type).unwrap();
            assert_eq!(is_paravirtualized_guest_of_xen(directory.path()), is_paravirtualized, "{guest_type}");
        }
        std::fs::write(directory.path().join("guest_type"), "PV\n").unwrap();
        std::fs::write(directory.path().join("type"), "other\n").unwrap();
        assert!(!is_paravirtualized_guest_of_xen(directory.path()));
    }
}
