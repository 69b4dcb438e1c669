//! `soft-dirty`: the kernel's soft-dirty bits (`CONFIG_MEM_SOFT_DIRTY`). LDT's and SPM's baseline.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use super::populated::{Pages, Seen, populated};
use crate::sys::pagemap::Pagemap;
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
}

impl SoftDirty {
    /// Tracks the address space of `pagemap`; `clear_refs` is that of the same process, open for writing.
    ///
    /// # Errors
    /// [`TrackError::Unavailable`]: the kernel has no soft-dirty bits.
    pub fn new(pagemap: Arc<Pagemap>, clear_refs: File, pages: Pages) -> Result<Self, TrackError> {
        check_kernel()?;
        Ok(SoftDirty { pagemap, clear_refs, pages, seen: Seen::default() })
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
        let now = populated(&self.pagemap, self.pages, ranges)?;
        let mut written = RangeSet::new();
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
        Ok(())
    }
}
