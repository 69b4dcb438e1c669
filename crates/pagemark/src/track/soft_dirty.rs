//! `soft-dirty`: the kernel's soft-dirty bits (`CONFIG_MEM_SOFT_DIRTY`). LDT's and SPM's baseline.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use pagemark_linux::pagemap::{MAYBE_ZERO, Pagemap, SOFT_DIRTY, ZERO};
use pagemark_linux::proc;
use pagemark_linux::scratch::Scratch;
use pagemark_linux::this_process::{LastProcess, OfThisProcess};

use super::full::Full;
use super::populated::{DataPages, Seen, each_populated};
use super::registry::{MachineTracking, MechanismEntry, MemoryPart, ProcessTracking, own_pagemap};
use crate::{Error, Mechanism, RangeSet, Tracker};

/// The mechanism `soft-dirty`.
pub const ENTRY: MechanismEntry = MechanismEntry {
    name: "soft-dirty",
    description: "the kernel's soft-dirty bits are read, and cleared for the whole address space",
    requirement: "a kernel with CONFIG_MEM_SOFT_DIRTY",
    is_exclusive: true,
    sees_other_mappings: false,
    own_memory: |memory| Ok(Box::new(SoftDirty::of_this_process(own_pagemap()?, memory)?)),
    machine: Some(MachineTracking::OfProcess),
    process: Some(ProcessTracking {
        needs_userfaultfd: false,
        needs_stop: true,
        needs_parking: false,
        compares_content: false,
        hot_after: None,
        private_parts: &[MemoryPart::Private],
        tracker: |memory, part| {
            let pagemap = memory.pagemap.clone();
            Ok(match part {
                // Whether a file was written shows in its times.
                MemoryPart::SharedFile => Box::new(Full::new(pagemap, part.pages())),
                _ if proc::is_own_id(memory.thread) => Box::new(SoftDirty::of_this_process(pagemap, part.pages())?),
                _ => Box::new(SoftDirty::new(
                    pagemap,
                    open_clear_refs(&proc::path(memory.thread, "clear_refs"))?,
                    part.pages(),
                )?),
            })
        },
    }),
};

fn open_clear_refs(path: &Path) -> Result<File, Error> {
    let opened = File::options().write(true).open(path);
    opened.map_err(|error| Error::while_tracking(error, || format!("opening {}", path.display())))
}

/// Reports the pages whose soft-dirty bit is set, and clears the bits of the whole address space.
///
/// The kernel cannot read and clear the bits in one step, so that a write between the two would be
/// missed. The caller of [`Tracker::collect`] therefore stops the threads of the tracked process.
/// Clearing applies to the whole address space, which can have only one such tracker, and no other
/// user of the bits.
#[derive(Debug)]
pub struct SoftDirty {
    pagemap: Arc<Pagemap>,
    clear_refs: File,
    data: DataPages,
    seen: Seen,
    /// The addresses at which the zero page was mapped at the last collect.
    zeros: RangeSet,
    /// The claim on the bits of this process.
    _own: Option<Own>,
}

impl SoftDirty {
    /// Tracks the address space of `pagemap`; `clear_refs` is that of the same process, open for
    /// writing.
    ///
    /// # Errors
    /// `ErrorKind::Unavailable`: the kernel has no soft-dirty bits.
    pub fn new(pagemap: Arc<Pagemap>, clear_refs: File, data: impl Into<DataPages>) -> Result<Self, Error> {
        check_kernel()?;
        let (data, seen) = (data.into(), Seen::default());
        Ok(SoftDirty { pagemap, clear_refs, data, seen, zeros: RangeSet::new(), _own: None })
    }

    /// Tracks this process's own memory. There can be one such tracker: a second one would clear
    /// bits that the first has not read.
    ///
    /// # Errors
    /// `ErrorKind::Unavailable`: the kernel has no soft-dirty bits, or there is such a tracker
    /// already.
    pub fn of_this_process(pagemap: Arc<Pagemap>, data: impl Into<DataPages>) -> Result<Self, Error> {
        let clear_refs = open_clear_refs(&proc::own_path("clear_refs"))?;
        let own = Some(Own::claim()?);
        Ok(SoftDirty { _own: own, ..SoftDirty::new(pagemap, clear_refs, data)? })
    }
}

/// The process whose bits are claimed. A child made by `fork` has its own bits.
static OWNER: LastProcess = LastProcess::none();

/// Claim on the soft-dirty bits of this process, until it is dropped.
#[derive(Debug)]
struct Own {
    process: OfThisProcess,
}

impl Own {
    fn claim() -> Result<Own, Error> {
        if OWNER.set() {
            return Err(Error::unavailable(
                Mechanism::SoftDirty,
                "an address space has one set of soft-dirty bits, and this one's are in use by another region or \
                         tracker: track one at a time, or choose another mechanism",
            ));
        }
        Ok(Own { process: OfThisProcess::new() })
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        // A child may have claimed its own bits.
        if self.process.is_here() {
            OWNER.clear();
        }
    }
}

/// Checks that the kernel has soft-dirty bits: a page of this process that was just written has its
/// bit set. No bit is cleared, so that other users of the bits are not disturbed.
///
/// # Errors
/// `ErrorKind::Unavailable`: it has none.
pub fn check_kernel() -> Result<(), Error> {
    let page = Scratch::new(1);
    page.write(0, 1);
    let mut is_set = false;
    Pagemap::of_this_process()
        .and_then(|pagemap| pagemap.entries(&page.range(), |_, entry| is_set = entry.is_soft_dirty()))
        .map_err(|error| Error::while_tracking(error, || "reading our own pagemap".to_owned()))?;
    if is_set {
        return Ok(());
    }
    Err(Error::unavailable(
        Mechanism::SoftDirty,
        "the kernel has no soft-dirty bits; one built with CONFIG_MEM_SOFT_DIRTY does",
    ))
}

impl Tracker for SoftDirty {
    fn mechanism(&self) -> Mechanism {
        Mechanism::SoftDirty
    }

    fn populated(&self) -> Option<&RangeSet> {
        Some(self.seen.pages())
    }

    fn collect(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<(), Error> {
        let (mut now, mut zeros, mut written) = (RangeSet::new(), RangeSet::new(), RangeSet::new());
        let reported = SOFT_DIRTY | ZERO | MAYBE_ZERO;
        each_populated(&self.pagemap, self.data.pages(), ranges, reported, |run, categories| {
            // Pages of which the kernel does not say whether they are the zero page count as
            // written, for the reason below.
            if categories & (SOFT_DIRTY | MAYBE_ZERO) != 0 {
                written.insert(run.clone());
            }
            if categories & ZERO != 0 {
                zeros.insert(run.clone());
            }
            now.insert(run);
        })?;
        let mut new = now.clone();
        new.subtract(self.seen.pages());
        written.extend(&new);
        // A page that was dropped and then read maps the zero page. Its content has changed, and no
        // bit is set.
        let mut new_zeros = zeros.clone();
        new_zeros.subtract(&self.zeros);
        written.extend(&new_zeros);
        // A page of a file may have been written, and then have left the page table with its bit.
        let mut absent = self.data.backed_within(ranges);
        absent.subtract(&now);
        written.extend(&absent);
        dirty.extend(&written);
        self.clear_refs
            .write_at(b"4", 0)
            .map_err(|error| Error::while_tracking(error, || "clearing soft-dirty bits".to_owned()))?;
        now.extend(&absent);
        dirty.extend(&self.seen.advance(ranges, now));
        self.zeros = zeros;
        Ok(())
    }
}
