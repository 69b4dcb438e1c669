//! `soft-dirty`: the kernel's soft-dirty bits (`CONFIG_MEM_SOFT_DIRTY`). LDT's and SPM's baseline.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::populated::{Pages, Seen, each_populated};
use crate::sys::pagemap::{Pagemap, ZERO};
use crate::sys::scratch::Scratch;
use crate::{Mechanism, RangeSet, TrackError, Tracker};

/// Reports the pages whose soft-dirty bit is set, and clears the bits of the whole address space.
///
/// The kernel can't read and clear in one step, so what is written between the two is lost: whoever calls
/// [`Tracker::collect`] stops the threads of the tracked process for that time. And since clearing spares nothing, an address
/// space can have one such tracker only, and no other program that uses the bits.
#[derive(Debug)]
pub struct SoftDirty {
    pagemap: Arc<Pagemap>,
    clear_refs: File,
    pages: Pages,
    seen: Seen,
    /// Where the page of zeros was mapped at the last collect.
    zeros: RangeSet,
    /// Of this process's own address space, whose other trackers need to know.
    _own: Option<Own>,
}

impl SoftDirty {
    /// Tracks the address space of `pagemap`; `clear_refs` is that of the same process, open for writing.
    ///
    /// # Errors
    /// [`TrackError::Unavailable`]: the kernel has no soft-dirty bits.
    pub fn new(pagemap: Arc<Pagemap>, clear_refs: File, pages: Pages) -> Result<Self, TrackError> {
        check_kernel()?;
        Ok(SoftDirty { pagemap, clear_refs, pages, seen: Seen::default(), zeros: RangeSet::new(), _own: None })
    }

    /// Tracks this process's own memory, as the only one in it that does so by soft-dirty bits: a second one would clear them
    /// before the first has read them.
    ///
    /// # Errors
    /// [`TrackError::Unavailable`]: the kernel has no soft-dirty bits, or there is such a tracker already.
    pub fn of_this_process(pagemap: Arc<Pagemap>, pages: Pages) -> Result<Self, TrackError> {
        let path = "/proc/self/clear_refs";
        let failed = |error| TrackError::from_io(error, || format!("opening {path}"));
        let clear_refs = File::options().write(true).open(path).map_err(failed)?;
        let own = Some(Own::claim()?);
        Ok(SoftDirty { _own: own, ..SoftDirty::new(pagemap, clear_refs, pages)? })
    }
}

/// The process whose own bits are in use; 0 if none is. A child made by `fork` has bits of its own.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// The soft-dirty bits of this process are in use as long as this exists.
#[derive(Debug)]
struct Own {
    process: u32,
}

impl Own {
    fn claim() -> Result<Own, TrackError> {
        let process = std::process::id();
        let claim = |owner| (owner != process).then_some(process);
        OWNER.fetch_update(Ordering::Relaxed, Ordering::Relaxed, claim).map(|_| Own { process }).map_err(|_| {
            TrackError::Unavailable {
                mechanism: Mechanism::SoftDirty,
                reason:
                    "an address space has one set of soft-dirty bits, and this one's are in use by another region or \
                         tracker: track one at a time, or choose another mechanism"
                        .to_owned(),
            }
        })
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let _ = OWNER.compare_exchange(self.process, 0, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// Tries whether the kernel has soft-dirty bits, on a page of this process: a page just written has its bit set.
/// Nothing is cleared, so no other user of the bits is disturbed.
///
/// # Errors
/// [`TrackError::Unavailable`]: it has none.
pub fn check_kernel() -> Result<(), TrackError> {
    let page = Scratch::new(1);
    page.write(0, 1);
    let mut is_set = false;
    Pagemap::of_this_process()
        .and_then(|pagemap| pagemap.entries(&page.range(), |_, entry| is_set = entry.is_soft_dirty()))
        .map_err(|error| TrackError::from_io(error, || "reading our own pagemap".to_owned()))?;
    if is_set {
        return Ok(());
    }
    Err(TrackError::Unavailable {
        mechanism: Mechanism::SoftDirty,
        reason: "the kernel has no soft-dirty bits; one built with CONFIG_MEM_SOFT_DIRTY does".to_owned(),
    })
}

impl Tracker for SoftDirty {
    fn mechanism(&self) -> Mechanism {
        Mechanism::SoftDirty
    }

    fn populated(&self) -> Option<&RangeSet> {
        Some(self.seen.pages())
    }

    fn collect(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<(), TrackError> {
        let (mut now, mut zeros) = (RangeSet::new(), RangeSet::new());
        each_populated(&self.pagemap, self.pages, ranges, ZERO, |run, categories| {
            if categories & ZERO != 0 {
                zeros.insert(run.clone());
            }
            now.insert(run);
        })?;
        // A page that was dropped and is read again has changed to zeros, and no bit tells.
        let mut written = zeros.clone();
        written.subtract(&self.zeros);
        for run in now.iter() {
            self.pagemap
                .entries(&run, |address, entry| {
                    if entry.is_soft_dirty() || !self.seen.pages().contains(address) {
                        written.insert(address..address + crate::PAGE_SIZE as u64);
                    }
                })
                .map_err(|error| TrackError::from_io(error, || format!("reading the pagemap of {run:#x?}")))?;
        }
        dirty.extend(&written);
        self.clear_refs
            .write_at(b"4", 0)
            .map_err(|error| TrackError::from_io(error, || "clearing soft-dirty bits".to_owned()))?;
        dirty.extend(&self.seen.advance(ranges, now));
        self.zeros = zeros;
        Ok(())
    }
}
