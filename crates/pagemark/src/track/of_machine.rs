//! Whole processes that run in the machine of `pagemark-kvm`: the common part of `kvm-log`,
//! `kvm-ring` and `kvm-scan`.
//!
//! What the machine knows of the program's writes is read from outside, in the memory of the
//! process, while it has given up its machine as for a checkpoint. So nobody changes it meanwhile,
//! and the machine that the process makes afterwards has no translations from before: the first
//! write to a page is noted again.

use std::sync::Arc;

use pagemark_kvm_protocol::guest_tables::{Failure, GuestTables, Refused};
use pagemark_kvm_protocol::machine_calls::Means;
use pagemark_linux::pagemap::{MAYBE_ZERO, Pagemap, ZERO};
use pagemark_linux::proc;

use super::full::Full;
use super::in_machine::keeps_other;
use super::populated::{Pages, Seen, each_populated};
use super::registry::{MemoryPart, NewTracker, ProcessMemory, ProcessTracking};
use crate::{Error, ErrorKind, Mechanism, RangeSet, Tracker};

/// How a mechanism tracks other processes whose trackers `tracker` makes.
pub(super) const fn tracking(tracker: fn(&ProcessMemory, MemoryPart) -> NewTracker) -> ProcessTracking {
    ProcessTracking {
        needs_userfaultfd: false,
        needs_stop: false,
        needs_parking: true,
        compares_content: false,
        hot_after: None,
        private_parts: &[MemoryPart::Private],
        tracker,
    }
}

/// Tracks a whole process from outside. The monitor's own memory counts as written in each collect.
#[derive(Debug)]
pub(super) struct OfMachine {
    mechanism: Mechanism,
    pagemap: Arc<Pagemap>,
    tables: GuestTables,
    pages: Pages,
    seen: Seen,
    /// The addresses at which the zero page was mapped at the last collect.
    zeros: RangeSet,
}

impl OfMachine {
    /// The tracker of a part of a process's memory, by a means of its machine.
    pub fn tracker(mechanism: Mechanism, means: Means, memory: &ProcessMemory, part: MemoryPart) -> NewTracker {
        Ok(match part {
            // Whether a file was written shows in its times.
            MemoryPart::SharedFile => Box::new(Full::new(memory.pagemap.clone(), part.pages())),
            _ => Box::new(OfMachine::new(mechanism, means, memory, part.pages())?),
        })
    }

    fn new(mechanism: Mechanism, means: Means, memory: &ProcessMemory, pages: Pages) -> Result<OfMachine, Error> {
        let lacking = "of a whole process, it tracks one that runs in the machine of `pagemark-kvm`, as `pagemark run \
                       --kvm` starts it";
        if proc::is_own_id(memory.thread) {
            return Err(Error::unavailable(mechanism, lacking));
        }
        let tables = GuestTables::begin(memory.thread, means).map_err(|refused| match refused {
            Refused::NoMachine => Error::unavailable(mechanism, lacking),
            Refused::KeepsOther => Error::unavailable(mechanism, keeps_other(means)),
            Refused::System(error) => Error::while_tracking(error, || "opening the memory for writing".to_owned()),
        })?;
        let pagemap = memory.pagemap.clone();
        Ok(OfMachine { mechanism, pagemap, tables, pages, seen: Seen::default(), zeros: RangeSet::new() })
    }
}

impl Tracker for OfMachine {
    fn mechanism(&self) -> Mechanism {
        self.mechanism
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
        let found = collected.map_err(|failure| failed(self.mechanism, failure)).and_then(|()| {
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

fn failed(mechanism: Mechanism, failure: Failure) -> Error {
    match failure {
        Failure::System(error) => {
            Error::while_tracking(error, || "reading what the machine knows of the writes".to_owned())
        }
        Failure::Running => Error::because(
            ErrorKind::Unavailable,
            "the process has a machine, and what that knows can be read only while it has given it up, as for a \
             checkpoint",
        ),
        Failure::Taken => Error::because(
            ErrorKind::Unavailable,
            format!(
                "another tracker by kvm-log, kvm-ring or kvm-scan tracks the process now: {mechanism} was the first, \
                 and a machine notes writes for one"
            ),
        ),
    }
}
