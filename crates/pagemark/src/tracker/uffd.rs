//! `uffd`: userfaultfd in synchronous write-protect mode. A thread of ours hears of a page's first write while the writer waits.
//!
//! Dearer than the asynchronous mode of `pagemap-scan`, but a page can be looked at before it changes, as copy-on-write
//! needs, and a collect costs O(written).

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::pins::{Pins, pages_around};
use super::populated::{Pages, populated};
use super::protected::{Lock, Protected, Taken};
use crate::sys::pagemap::Pagemap;
use crate::sys::signals::Blocked;
use crate::sys::userfaultfd::Userfaultfd;
use crate::{Mechanism, Range, RangeSet, TrackError, Tracker};

/// Tracks by userfaultfd and a thread that handles its faults. Only for memory of this process.
///
/// Where this process may not let the kernel's own writes wait (it needs the privilege, or `vm.unprivileged_userfaultfd`), what
/// system calls write to is pinned meanwhile ([`Tracker::pin`]).
#[derive(Debug)]
pub struct Uffd {
    pagemap: Arc<Pagemap>,
    shared: Arc<Shared>,
    handler: Option<JoinHandle<()>>,
    pins: Pins,
    taken: Taken,
    process: u32,
}

/// What the thread uses.
#[derive(Debug)]
struct Shared {
    userfaultfd: Arc<Userfaultfd>,
    areas: Mutex<Vec<Arc<Protected<ByFault>>>>,
    /// Can be read when the thread is to end.
    stop: OwnedFd,
}

impl Shared {
    fn areas(&self) -> MutexGuard<'_, Vec<Arc<Protected<ByFault>>>> {
        self.areas.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens each page that a thread wants to write, until the end. Allocates nothing: the writer may hold an allocator's
    /// lock.
    fn handle_faults(&self) {
        while let Ok(Some(address)) = self.userfaultfd.wait(self.stop.as_fd()) {
            let area = self.areas().iter().find(|area| area.range().contains(&address)).cloned();
            let opened = area.map(|area| {
                let _inside = area.gate().enter();
                area.open_inside(&(address..address + 1))
            });
            if !matches!(opened, Some(Ok(()))) {
                // It is no longer tracked, or no longer mapped: whoever waits tries again, and meets what is there now.
                let _ = self.userfaultfd.wake(&pages_around(&(address..address + 1)));
            }
        }
    }
}

impl Uffd {
    /// Tracks the address space of this process, whose pagemap it is given.
    ///
    /// # Errors
    /// [`TrackError::Unavailable`]: the kernel is older than 6.4, or allows no userfaultfd. Or there are too many threads.
    pub fn new(pagemap: Arc<Pagemap>) -> Result<Self, TrackError> {
        let (userfaultfd, _) = Userfaultfd::synchronous().map_err(|error| TrackError::Unavailable {
            mechanism: Mechanism::Uffd,
            reason: format!(
                "no userfaultfd with write-protection of all kinds of memory, which Linux 6.4 has ({error})"
            ),
        })?;
        let stop = event().map_err(|error| TrackError::from_io(error, || "making an eventfd".to_owned()))?;
        let shared = Arc::new(Shared { userfaultfd: Arc::new(userfaultfd), areas: Mutex::default(), stop });
        let for_thread = shared.clone();
        // The thread starts with the signals blocked, so that no handler of the program runs on it: were that to write to
        // tracked memory, it would wait for itself.
        let _signals = Blocked::all();
        let handler = std::thread::Builder::new()
            .name("pagemark-uffd".to_owned())
            .spawn(move || for_thread.handle_faults())
            .map_err(|error| TrackError::from_io(error, || "starting a thread".to_owned()))?;
        let (pins, taken) = (Pins::default(), Taken::default());
        Ok(Uffd { pagemap, shared, handler: Some(handler), pins, taken, process: std::process::id() })
    }

    /// Starts to track a range, and adds what holds data there to `dirty`.
    fn arm(&mut self, range: Range, dirty: &mut RangeSet) -> Result<(), TrackError> {
        let failed = |error| TrackError::from_io(error, || format!("protecting {range:#x?} with userfaultfd"));
        let userfaultfd = self.shared.userfaultfd.clone();
        userfaultfd.register(&range).map_err(failed)?;
        let area = Arc::new(Protected::new(range.clone(), ByFault { userfaultfd }));
        self.shared.areas().push(area.clone());
        area.close_all().map_err(failed)?;
        dirty.extend(&populated(&self.pagemap, Pages::All, &range.clone().into())?);
        self.pins.open_in(&area).map_err(failed)?;
        Ok(())
    }
}

impl Tracker for Uffd {
    fn mechanism(&self) -> Mechanism {
        Mechanism::Uffd
    }

    fn collect(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<(), TrackError> {
        self.shared.areas().retain(|area| {
            let stays = ranges.iter().any(|range| range == *area.range());
            if !stays {
                // If it is no longer mapped, there is nothing to unregister.
                let _ = self.shared.userfaultfd.unregister(area.range());
            }
            stays
        });
        let pinned = self.pins.pages();
        let mut written = RangeSet::new();
        let result = ranges.iter().try_for_each(|range| {
            let area = self.shared.areas().iter().find(|area| *area.range() == range).cloned();
            match area {
                Some(area) => area
                    .close(&pinned, &mut self.taken, &mut written, || {})
                    .map_err(|error| TrackError::from_io(error, || format!("protecting {range:#x?}"))),
                None => self.arm(range, &mut written),
            }
        });
        dirty.extend(&written);
        result
    }

    fn pin(&mut self, range: &Range) -> Result<(), TrackError> {
        let areas = self.shared.areas().clone();
        self.pins.add(range, areas.iter().map(|area| &**area))
    }

    fn unpin(&mut self, range: &Range) {
        self.pins.remove(range);
    }
}

impl Drop for Uffd {
    fn drop(&mut self) {
        // In a child made by `fork` there is no thread, and the descriptor is the parent's.
        if self.process != std::process::id() {
            return;
        }
        // Not by closing alone: a child may hold a copy of the descriptor, and then writers would wait for nobody.
        for area in self.shared.areas().drain(..) {
            let _ = self.shared.userfaultfd.unregister(area.range());
        }
        // SAFETY: the descriptor is an eventfd of ours, to which eight bytes are written.
        unsafe { libc::write(self.shared.stop.as_raw_fd(), (&raw const ONE).cast(), size_of::<u64>()) };
        if let Some(handler) = self.handler.take() {
            let _ = handler.join();
        }
    }
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

/// Pages refuse writes by userfaultfd.
#[derive(Debug)]
struct ByFault {
    userfaultfd: Arc<Userfaultfd>,
}

impl Lock for ByFault {
    const SPANS: bool = false;

    fn allow(&self, range: &Range) -> io::Result<()> {
        self.userfaultfd.write_protect(range, false)
    }

    fn refuse(&self, range: &Range) -> io::Result<()> {
        self.userfaultfd.write_protect(range, true)
    }
}
