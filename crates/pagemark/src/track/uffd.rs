//! `uffd`: userfaultfd in synchronous write-protect mode. A thread of ours hears of a page's first
//! write while the writer waits.
//!
//! Dearer than the asynchronous mode of `pagemap-scan`, but a page can be looked at before it
//! changes, as copy-on-write needs, and a collect costs O(written).

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use pagemark_linux::own_mappings::{OwnMapping, OwnMappings};
use pagemark_linux::own_memory::keep_unmerged;
use pagemark_linux::pagemap::{Filter, PRESENT, Pagemap, ZERO};
use pagemark_linux::populate;
use pagemark_linux::room;
use pagemark_linux::signals::BlockedSignals;
use pagemark_linux::this_process::OfThisProcess;
use pagemark_linux::userfaultfd::{Synchronous, Userfaultfd, WRITE_PROTECT_SHARED};

use super::OwnMemory;
use super::mprotect::list;
use super::pins::Pins;
use super::protected::{Protected, Taken, WriteProtection};
use super::registry::{MachineTracking, MechanismEntry, own_mappings, own_pagemap};
use crate::{Address, AddressRangeExt, ByteCount, Error, Mechanism, Range, RangeSet, Tracker};

/// The mechanism `uffd`.
pub const ENTRY: MechanismEntry = MechanismEntry {
    name: "uffd",
    description: "a thread handles the first write to each page by userfaultfd, while the writer waits",
    requirement: "Linux 5.7; for shared memory and hugetlbfs 5.19",
    is_exclusive: false,
    sees_other_mappings: false,
    own_memory: |memory| Ok(Box::new(Uffd::new(own_pagemap()?, memory.clone())?)),
    machine: Some(MachineTracking::HoldsWrites),
    process: None,
};

/// Tracks by userfaultfd and a thread that handles its faults. Only for memory of this process.
///
/// Without CAP_SYS_PTRACE and `vm.unprivileged_userfaultfd`, the kernel's own writes cannot wait.
/// Memory that system calls write to must then be pinned ([`Tracker::pin`]).
///
/// Before Linux 6.4, the kernel protects only pages that are there: the zero page is mapped to all
/// unpopulated memory of a range, which takes page tables and no other memory. Before 5.19, only
/// private anonymous memory can be tracked.
#[derive(Debug)]
pub struct Uffd {
    pagemap: Arc<Pagemap>,
    memory: OwnMemory,
    mappings: Arc<OwnMappings>,
    shared: Arc<Shared>,
    handler: Option<JoinHandle<()>>,
    pins: Pins,
    taken: Taken,
    /// The pages that held data when their range was armed, and those that were reported since. The
    /// page table does not show them: protection makes entries for unpopulated pages, too.
    data: RangeSet,
    process: OfThisProcess,
    protects_shared: bool,
    protects_unpopulated: bool,
}

/// State that the handler thread shares.
#[derive(Debug)]
struct Shared {
    userfaultfd: Arc<Userfaultfd>,
    tracked: Mutex<Vec<Arc<Protected<ByUserfaultfd>>>>,
    /// Becomes readable when the thread must end.
    stop: OwnedFd,
}

impl Shared {
    fn tracked(&self) -> MutexGuard<'_, Vec<Arc<Protected<ByUserfaultfd>>>> {
        self.tracked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens each page that a thread writes to, until `stop` is readable. Allocates nothing,
    /// because the writer may hold the allocator's lock.
    fn handle_faults(&self) {
        while let Ok(Some(address)) = self.userfaultfd.wait(self.stop.as_fd()) {
            let protected = self.tracked().iter().find(|protected| protected.range().contains(&address)).cloned();
            let opened = protected.map(|protected| {
                let _inside = protected.gate().enter();
                protected.open_inside(address)
            });
            if !matches!(opened, Some(Ok(()))) {
                // The page is no longer tracked or mapped. The writer retries, and meets what is
                // mapped now.
                let _ = self.userfaultfd.wake(&address.page().addresses());
            }
        }
    }
}

impl Uffd {
    /// Tracks memory of this process. `pagemap` is the pagemap of the process.
    ///
    /// # Errors
    /// `ErrorKind::Unavailable`: the kernel is older than 5.7, or allows no userfaultfd. Or
    /// there are too many threads.
    pub fn new(pagemap: Arc<Pagemap>, memory: OwnMemory) -> Result<Self, Error> {
        let Synchronous { userfaultfd, protects_shared, protects_unpopulated, .. } = Userfaultfd::synchronous()
            .map_err(|error| {
                Error::refused(Mechanism::Uffd, error, "making a userfaultfd", |error| {
                    format!("no userfaultfd with write-protection ({error}); {}", remedy(error))
                })
            })?;
        let mappings = own_mappings()?;
        let stop = event().map_err(|error| Error::while_tracking(error, || "making an eventfd".to_owned()))?;
        let shared = Arc::new(Shared { userfaultfd: Arc::new(userfaultfd), tracked: Mutex::default(), stop });
        let for_thread = shared.clone();
        let no_thread = |error| Error::while_tracking(error, || "starting a thread".to_owned());
        room::for_threads(1).map_err(no_thread)?;
        // The thread starts with all signals blocked: a handler of the program that ran on it and
        // wrote to tracked memory would wait for itself.
        let _signals = BlockedSignals::all();
        let handler = std::thread::Builder::new()
            .name("pagemark-uffd".to_owned())
            .spawn(move || for_thread.handle_faults())
            .map_err(no_thread)?;
        let (pins, taken) = (Pins::default(), Taken::default());
        let process = OfThisProcess::new();
        Ok(Uffd {
            pagemap,
            memory,
            mappings,
            shared,
            handler: Some(handler),
            pins,
            taken,
            data: RangeSet::new(),
            process,
            protects_shared,
            protects_unpopulated,
        })
    }

    /// Starts to track a range, and adds what holds data there to `dirty`.
    fn arm(&mut self, range: Range, dirty: &mut RangeSet) -> Result<(), Error> {
        self.memory.check(&range)?;
        let failed = |error| Error::while_tracking(error, || format!("protecting {range:#x?} with userfaultfd"));
        let userfaultfd = self.shared.userfaultfd.clone();
        if !self.protects_shared {
            self.check_anonymous(&range)?;
        }
        userfaultfd.register(&range).map_err(|error| match error.raw_os_error() {
            Some(libc::EINVAL) => unavailable(format!(
                "the kernel protects only anonymous memory, shared memory and hugetlb while the writer waits, and \
                 {range:#x?} maps a file; use pagemap-scan or mprotect for this region"
            )),
            _ => failed(error),
        })?;
        let protection = ByUserfaultfd { userfaultfd, protects_unpopulated: self.protects_unpopulated };
        let protected = Protected::new(range.clone(), self.memory.pages_per_unit(), protection).map_err(failed)?;
        let protected = Arc::new(protected);
        self.shared.tracked().push(protected.clone());
        let mut data = self.memory.holding(&self.pagemap, &range.clone().into())?;
        // The kernel forgets the protection of a page that it merges with another one.
        keep_unmerged(&range).map_err(failed)?;
        if !self.protects_unpopulated {
            protected.protection().split_huge_pages(&range).map_err(failed)?;
        }
        protected.close_all().map_err(failed)?;
        // What another thread has written meanwhile.
        self.pagemap
            .find(&range, Filter { all: PRESENT, report: ZERO, ..Filter::default() }, |run, categories| {
                if categories & ZERO == 0 {
                    data.insert(run);
                }
            })
            .map_err(failed)?;
        dirty.extend(&data);
        self.add_data(data);
        self.pins.open_in(&protected).map_err(failed)?;
        Ok(())
    }

    /// Records pages that hold data.
    fn add_data(&mut self, mut pages: RangeSet) {
        pages.subtract(&self.data);
        if !pages.is_empty() {
            self.data.extend(&pages);
        }
    }

    /// Fails unless all of `range` is private anonymous memory.
    fn check_anonymous(&self, range: &Range) -> Result<(), Error> {
        let other = self.memory.backed().within(range.clone()).next();
        other.map_or(Ok(()), |other| {
            Err(unavailable(format!(
                "the mapping {:x}-{:x} is shared memory, of a file or of hugetlbfs, whose write-protection came with \
                 Linux {}; use another mechanism for this region",
                other.start, other.end, WRITE_PROTECT_SHARED.since
            )))
        })
    }

    /// Collects, and protects what was written or leaves it open.
    fn collect_pages(&mut self, ranges: &RangeSet, dirty: &mut RangeSet, protect: bool) -> Result<(), Error> {
        self.shared.tracked().retain(|protected| {
            let stays = ranges.iter().any(|range| range == *protected.range());
            if !stays {
                // An error means that the range is no longer mapped, which needs nothing.
                let _ = self.shared.userfaultfd.unregister(protected.range());
            }
            stays
        });
        let pinned = self.pins.pages();
        let mut written = RangeSet::new();
        let result = ranges.iter().try_for_each(|range| {
            let protected = self.shared.tracked().iter().find(|protected| *protected.range() == range).cloned();
            match protected {
                Some(protected) => {
                    check_registered(&protected, &list(&self.mappings, &range)?)?;
                    if protect {
                        return protected.collect(&pinned, &mut self.taken, &mut written);
                    }
                    protected.collect_open(&mut written);
                    Ok(())
                }
                None => self.arm(range, &mut written),
            }
        });
        dirty.extend(&written);
        self.add_data(written.whole_pages());
        result
    }
}

impl Tracker for Uffd {
    fn mechanism(&self) -> Mechanism {
        Mechanism::Uffd
    }

    fn collect(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<(), Error> {
        self.collect_pages(ranges, dirty, true)
    }

    fn collect_open(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<bool, Error> {
        self.collect_pages(ranges, dirty, false).map(|()| true)
    }

    fn data(&self, ranges: &RangeSet) -> Result<Option<RangeSet>, Error> {
        Ok(Some(self.data.intersection(ranges)))
    }

    fn pin(&mut self, range: &Range) -> Result<(), Error> {
        let tracked = self.shared.tracked().clone();
        self.pins.add(range, tracked.iter().map(|protected| &**protected))
    }

    fn unpin(&mut self, range: &Range) {
        self.pins.remove(range);
    }
}

impl Drop for Uffd {
    fn drop(&mut self) {
        // A child made by `fork` has no such thread, and the descriptor belongs to the parent. Dropping
        // the handle would detach another thread, which has the place of that one by now.
        if !self.process.is_here() {
            std::mem::forget(self.handler.take());
            return;
        }
        // Closing the descriptor is not enough: a child may hold a copy, and writers would then
        // wait for ever.
        for protected in self.shared.tracked().drain(..) {
            let _ = self.shared.userfaultfd.unregister(protected.range());
        }
        // SAFETY: the descriptor is an eventfd of ours, to which eight bytes are written.
        unsafe { libc::write(self.shared.stop.as_raw_fd(), (&raw const ONE).cast(), size_of::<u64>()) };
        if let Some(handler) = self.handler.take() {
            let _ = handler.join();
        }
    }
}

fn unavailable(reason: String) -> Error {
    Error::unavailable(Mechanism::Uffd, reason)
}

/// What would make a userfaultfd possible that the kernel has refused.
fn remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM) => "it needs CAP_SYS_PTRACE or vm.unprivileged_userfaultfd=1, or Linux 5.11 or later",
        _ => "Linux 5.7 or later has it",
    }
}

/// Checks that all mappings of a range are still those that were registered.
fn check_registered(protected: &Protected<ByUserfaultfd>, mappings: &[OwnMapping]) -> Result<(), Error> {
    mappings.iter().try_for_each(|mapping| {
        let part = mapping.range.overlap(protected.range());
        protected.touch(&part).map_err(|error| match error.raw_os_error() {
            Some(libc::ENOENT) => Error::remapped(part.clone()),
            _ => Error::while_tracking(error, || format!("protecting {part:#x?}")),
        })
    })
}

static ONE: u64 = 1;

fn event() -> io::Result<OwnedFd> {
    // SAFETY: the call takes only numbers and returns a new descriptor or -1.
    let descriptor = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just returned to us, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Size of a huge page that a page table of the second level maps.
const HUGE_PAGE_BYTES: u64 = 2 << 20;

/// Write-protection by userfaultfd.
#[derive(Debug)]
struct ByUserfaultfd {
    userfaultfd: Arc<Userfaultfd>,
    /// False on kernels before 6.4, which protect only pages that are there.
    protects_unpopulated: bool,
}

impl ByUserfaultfd {
    /// Splits the huge pages of `range`, whose pages are all unprotected.
    ///
    /// Kernels before 6.4 lose the protection of a huge zero page when it is split. It is therefore
    /// split before it is protected: by protecting a part of it.
    fn split_huge_pages(&self, range: &Range) -> io::Result<()> {
        let mut start = range.start;
        while start < range.end {
            let page = start..start + ByteCount::PAGE;
            self.userfaultfd.write_protect(&page, true)?;
            start = Address::new((start.get() / HUGE_PAGE_BYTES + 1) * HUGE_PAGE_BYTES);
        }
        Ok(())
    }

    /// Protects a range, or unprotects it. Before Linux 6.4, one call does not reach over the end
    /// of a mapping: the range is then halved until each part lies in one. Allocates nothing.
    fn write_protect(&self, range: &Range, protect: bool) -> io::Result<()> {
        let middle = (range.start + ByteCount::new(range.byte_count().get() / 2)).page_aligned_down();
        match self.userfaultfd.write_protect(range, protect) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) && middle > range.start => {
                self.write_protect(&(range.start..middle), protect)?;
                self.write_protect(&(middle..range.end), protect)
            }
            done => done,
        }
    }
}

impl WriteProtection for ByUserfaultfd {
    const IS_IDEMPOTENT: bool = false;

    fn unprotect(&self, range: &Range) -> io::Result<()> {
        self.write_protect(range, false)
    }

    fn protect(&self, range: &Range) -> io::Result<()> {
        if !self.protects_unpopulated {
            // SAFETY: the range is part of a tracked range, which is mapped and readable.
            unsafe { populate::for_reading(range)? };
        }
        self.write_protect(range, true)
    }
}
