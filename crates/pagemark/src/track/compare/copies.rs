//! `compare` for memory of this process: compares each page with a copy of it, which takes a
//! seventh of the time that hashing takes, and as much memory again.

use std::sync::Arc;

use pagemark_linux::own_memory::{self, Mapping};
use pagemark_linux::pagemap::Pagemap;
use pagemark_linux::shared_bytes::SharedBytes;

use crate::track::OwnMemory;
use crate::track::populated::{DataPages, Seen};
use crate::{AddressRangeExt, Error, Mechanism, PAGE_SIZE, RangeSet, Tracker};

/// Reports the pages that differ from their copies.
#[derive(Debug)]
pub struct CompareCopies {
    pagemap: Arc<Pagemap>,
    memory: OwnMemory,
    data: DataPages,
    seen: Seen,
    /// The content of the pages in `seen` at the last collect.
    copy: Mapping,
}

impl CompareCopies {
    /// Tracks memory of this process, of which `pagemap` is the pagemap.
    ///
    /// # Errors
    /// `ErrorKind::System`: there is no room for the copy.
    pub fn new(pagemap: Arc<Pagemap>, memory: &OwnMemory) -> Result<Self, Error> {
        let bytes = memory.range().byte_count().to_usize();
        let copy = Mapping::new(bytes).map_err(Error::system(format!("mapping a copy of {bytes} bytes")))?;
        Ok(CompareCopies { pagemap, memory: memory.clone(), data: memory.into(), seen: Seen::default(), copy })
    }

    /// Gives the copies of pages that hold no data any more back to the kernel.
    fn forget_all_but(&self, populated: &RangeSet) {
        let mut gone = self.seen.pages().clone();
        gone.subtract(populated);
        for run in gone.iter() {
            let start = self.copy.range().start + (run.start - self.memory.range().start);
            // SAFETY: these pages are part of our own mapping, and nobody reads them before they
            // are written again. A failure leaves them where they are.
            let _ = unsafe { own_memory::free(&(start..start + run.byte_count()), false) };
        }
    }
}

impl Tracker for CompareCopies {
    fn mechanism(&self) -> Mechanism {
        Mechanism::Compare
    }

    fn populated(&self) -> Option<&RangeSet> {
        Some(self.seen.pages())
    }

    fn collect(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<(), Error> {
        ranges.iter().try_for_each(|range| self.memory.check(&range))?;
        let now = self.data.find(&self.pagemap, ranges)?;
        self.forget_all_but(&now);
        let owned = self.memory.range();
        // SAFETY: the maker of the `OwnMemory` keeps it mapped and readable while this tracker
        // exists, and lets other code write it only in ways that may race with atomic accesses.
        let memory = unsafe { SharedBytes::new(self.memory.start(), owned.byte_count().to_usize()) };
        let known = self.seen.pages();
        let mut changed = RangeSet::new();
        for page in now.iter().flat_map(|run| run.pages()) {
            let offset = (page.address() - owned.start).to_usize();
            let copy = &mut self.copy.content_mut()[offset..offset + PAGE_SIZE];
            // A write between the comparison and the copy differs from the next copy, or is in
            // this one, whose page is reported.
            if !known.contains(page.address()) || !memory.equals(offset, copy) {
                memory.read(offset, copy);
                changed.insert(page.addresses());
            }
        }
        dirty.extend(&changed);
        dirty.extend(&self.seen.advance(ranges, now));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use pagemark_linux::scratch::Scratch;
    use pagemark_testing::assert_oracle_eq;

    use super::*;
    use crate::track::own_pagemap;
    use crate::{ErrorKind, Range};

    #[test]
    fn pages_are_reported_if_their_content_differs() {
        let scratch = Scratch::new(8);
        // SAFETY: the memory outlives the tracker, and this thread alone uses it.
        let memory = unsafe { OwnMemory::anonymous(scratch.range()) };
        let mut tracker = CompareCopies::new(own_pagemap().unwrap(), &memory).unwrap();
        let mut collect = |range: Range| {
            let mut dirty = RangeSet::new();
            tracker.collect(&range.into(), &mut dirty).map(|()| dirty)
        };
        let page = |page: usize| RangeSet::from(scratch.address(page)..scratch.address(page + 1));
        assert!(collect(scratch.range()).unwrap().is_empty());
        scratch.write(3, 7);
        assert_oracle_eq!(collect(scratch.range()).unwrap(), page(3), "what was written");
        scratch.write(3, 7);
        assert!(collect(scratch.range()).unwrap().is_empty(), "the same content");
        scratch.write(3, 8);
        scratch.write(3, 7);
        assert!(collect(scratch.range()).unwrap().is_empty(), "the same content again");
        scratch.advise(3, 1, libc::MADV_DONTNEED);
        assert_oracle_eq!(collect(scratch.range()).unwrap(), page(3), "freed");
        scratch.write(3, 7);
        assert_oracle_eq!(collect(scratch.range()).unwrap(), page(3), "the content from before it was freed");
        let beyond = scratch.address(7)..scratch.address(8) + crate::ByteCount::PAGE;
        assert_eq!(collect(beyond).unwrap_err().kind(), ErrorKind::NotOwned);
    }
}
