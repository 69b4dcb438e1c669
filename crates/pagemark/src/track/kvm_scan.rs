//! `kvm-scan`: the dirty bits in the page tables of the machine in which the program runs (Scanxen
//! in HAC, IV-D). A collect reads the tables of the tracked memory, of those that exist.
//!
//! Of a region, the monitor reads them. Of a whole process, they are read from outside, in the
//! memory of the process, while it has given up its machine as for a checkpoint: then nobody
//! changes them, and the machine that the process makes afterwards has no translations for which
//! the processor would not set the bits again.

use std::sync::Arc;

use super::full::Full;
use super::in_machine::InMachine;
use super::populated::{Pages, Seen, each_populated};
use super::registry::{MechanismEntry, MemoryPart, ProcessMemory, ProcessTracking};
use crate::sys::guest_tables::{Failure, GuestTables};
use crate::sys::own_machine::Means;
use crate::sys::pagemap::{MAYBE_ZERO, Pagemap, ZERO};
use crate::{Error, ErrorKind, Mechanism, RangeSet, Tracker};

/// The mechanism `kvm-scan`.
pub const ENTRY: MechanismEntry = MechanismEntry {
    name: "kvm-scan",
    description: "the dirty bits of the guest's page tables, for a program in the machine of pagemark-kvm",
    requirement: "a program that pagemark-kvm runs",
    is_exclusive: false,
    sees_other_mappings: false,
    own_memory: |memory| Ok(Box::new(InMachine::new(Mechanism::KvmScan, Means::Scan, memory.clone())?)),
    machine: None,
    process: Some(ProcessTracking {
        needs_userfaultfd: false,
        needs_stop: false,
        needs_parking: true,
        compares_content: false,
        hot_after: None,
        private_parts: &[MemoryPart::Private],
        tracker: |memory, part| {
            Ok(match part {
                // Whether a file was written shows in its times.
                MemoryPart::SharedFile => Box::new(Full::new(memory.pagemap.clone(), part.pages())),
                _ => Box::new(OfProcess::new(memory, part.pages())?),
            })
        },
    }),
};

/// Tracks a whole process from outside. The monitor's own memory counts as written in each collect.
#[derive(Debug)]
struct OfProcess {
    pagemap: Arc<Pagemap>,
    tables: GuestTables,
    pages: Pages,
    seen: Seen,
    /// The addresses at which the zero page was mapped at the last collect.
    zeros: RangeSet,
}

impl OfProcess {
    fn new(memory: &ProcessMemory, pages: Pages) -> Result<OfProcess, Error> {
        let lacking = "of a whole process, it tracks one that runs in the machine of `pagemark-kvm`, as `pagemark run \
                       --kvm` starts it";
        if memory.thread == std::process::id() as i32 {
            return Err(Error::unavailable(Mechanism::KvmScan, lacking));
        }
        let begun = GuestTables::begin(memory.thread)
            .map_err(|error| Error::while_tracking(error, || "opening the memory for writing".to_owned()))?;
        let tables = begun.ok_or_else(|| Error::unavailable(Mechanism::KvmScan, lacking))?;
        let pagemap = memory.pagemap.clone();
        Ok(OfProcess { pagemap, tables, pages, seen: Seen::default(), zeros: RangeSet::new() })
    }
}

impl Tracker for OfProcess {
    fn mechanism(&self) -> Mechanism {
        Mechanism::KvmScan
    }

    fn populated(&self) -> Option<&RangeSet> {
        Some(self.seen.pages())
    }

    fn collect(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<(), Error> {
        let mut written = RangeSet::new();
        let collected = self.tables.collect(&mut written);
        let mut written = written.intersection(ranges);
        // What no page table of the guest tells.
        let own_start = self.tables.program_end();
        written.extend(&ranges.iter().filter(|range| range.start >= own_start).collect());
        let (mut now, mut zeros) = (RangeSet::new(), RangeSet::new());
        let found = collected.map_err(failed).and_then(|()| {
            each_populated(&self.pagemap, self.pages, ranges, ZERO | MAYBE_ZERO, |run, categories| {
                if categories & ZERO != 0 {
                    zeros.insert(run.clone());
                }
                // The kernel does not say whether it is the zero page; see below.
                if categories & MAYBE_ZERO != 0 {
                    written.insert(run.clone());
                }
                now.insert(run);
            })
        });
        if found.is_err() {
            dirty.extend(&written);
            return found;
        }
        dirty.extend(&written.intersection(&now));
        let mut new = now.clone();
        new.subtract(self.seen.pages());
        dirty.extend(&new);
        // A page that the kernel took back (`MADV_FREE`) and that was then read maps the zero page.
        let mut new_zeros = zeros.clone();
        new_zeros.subtract(&self.zeros);
        dirty.extend(&new_zeros);
        dirty.extend(&self.seen.advance(ranges, now));
        self.zeros = zeros;
        Ok(())
    }
}

fn failed(failure: Failure) -> Error {
    match failure {
        Failure::System(error) => Error::while_tracking(error, || "reading the page tables of the machine".to_owned()),
        Failure::Running => Error::because(
            ErrorKind::Unavailable,
            "the process has a machine, whose page tables can be read only while it has given it up, as for a \
             checkpoint by CRIU",
        ),
        Failure::Taken => Error::because(
            ErrorKind::Unavailable,
            "another tracker of kvm-scan tracks the process now: a machine has one set of dirty bits",
        ),
    }
}
