//! The content of a region at the beginning of its transaction.

use std::io;

use crate::sys::own_memory::{self, Mapping};
use crate::sys::shared_bytes::SharedBytes;
use crate::{Address, AddressRangeExt, PAGE_SIZE, PageNumber, PageRangeExt, Range, RangeSet};

/// Pages of a range from which it is asked which of them the region holds. Trackers report the
/// surroundings of what was written in memory that is otherwise unused, in long runs; asking costs
/// a system call.
const LONG_RUN_PAGES: u64 = 32;

/// A copy of the region, to roll back to. It takes memory only where the region held data.
#[derive(Debug)]
pub(super) struct Base {
    copy: Mapping,
    /// Offsets at which the copy may be out of date.
    stale: RangeSet,
    /// A bit for each page of the copy that may hold anything else than zeros.
    data: Vec<u64>,
}

impl Base {
    /// A copy that holds zeros.
    pub fn new(bytes: usize) -> io::Result<Base> {
        let copy = Mapping::new(bytes)?;
        let data = vec![0; (copy.bytes() / PAGE_SIZE).div_ceil(64)];
        Ok(Base { copy, stale: RangeSet::new(), data })
    }

    /// Records offsets that were written.
    pub fn add_stale(&mut self, offsets: &RangeSet) {
        self.stale.extend(offsets);
    }

    /// Copies the content that was written since the previous call. `holding` returns the pages, of
    /// those given to it, at which the region may hold anything else than zeros.
    ///
    /// # Errors
    /// Those of `holding`; the next call then copies the content.
    pub fn refresh<E>(
        &mut self,
        region: &SharedBytes<'_>,
        holding: impl FnOnce(&RangeSet) -> Result<RangeSet, E>,
    ) -> Result<(), E> {
        let zeros = zeros_within(&self.stale, holding)?;
        let mut stale = std::mem::take(&mut self.stale);
        for range in zeros.iter() {
            self.free(&range);
        }
        stale.subtract(&zeros);
        for part in stale.iter().flat_map(by_page) {
            let page = part.start.page();
            let offset = part.start.to_usize();
            if self.holds_data(page) || !region.is_zero(part.to_offsets()) {
                region.read(offset, &mut self.copy.content_mut()[part.to_offsets()]);
                self.data[page.to_usize() / 64] |= 1 << (page.to_usize() % 64);
            }
        }
        Ok(())
    }

    /// Writes the copy back to `region` at `offsets`. `holding` is as for [`Base::refresh`].
    ///
    /// # Errors
    /// Those of `holding`; then nothing was written.
    pub fn put_back<E>(
        &mut self,
        region: &SharedBytes<'_>,
        offsets: &RangeSet,
        holding: impl FnOnce(&RangeSet) -> Result<RangeSet, E>,
    ) -> Result<(), E> {
        let zeros = zeros_within(offsets, holding)?;
        for part in offsets.iter().flat_map(by_page) {
            let is_zero_in_both = !self.holds_data(part.start.page())
                && (zeros.contains(part.start) || region.is_zero(part.to_offsets()));
            if !is_zero_in_both {
                region.write(part.start.to_usize(), &self.copy.content_mut()[part.to_offsets()]);
            }
        }
        Ok(())
    }

    /// The parts of `offsets` that may differ between the copy and `region`, with the content of
    /// the copy, in ascending order and split at the borders of pages. `holding` is as for
    /// [`Base::refresh`].
    ///
    /// # Errors
    /// Those of `holding`.
    pub fn differing<'a, E>(
        &'a mut self,
        region: &'a SharedBytes<'_>,
        offsets: &'a RangeSet,
        holding: impl FnOnce(&RangeSet) -> Result<RangeSet, E>,
    ) -> Result<impl Iterator<Item = (Range, &'a [u8])>, E> {
        let zeros = zeros_within(offsets, holding)?;
        let (copy, data) = (&*self.copy.content_mut(), &self.data);
        let is_zero_in_both = move |part: &Range| {
            !is_set(data, part.start.page()) && (zeros.contains(part.start) || region.is_zero(part.to_offsets()))
        };
        let parts = offsets.iter().flat_map(by_page).filter(move |part| !is_zero_in_both(part));
        Ok(parts.map(|part| (part.clone(), &copy[part.to_offsets()])))
    }

    fn holds_data(&self, page: PageNumber) -> bool {
        is_set(&self.data, page)
    }

    /// Makes whole pages of the copy hold zeros.
    fn free(&mut self, pages: &Range) {
        let held: RangeSet = pages.pages().filter(|&page| self.holds_data(page)).map(|page| page.addresses()).collect();
        for run in held.iter() {
            let start = self.copy.range().start + (run.start - Address::MIN);
            // SAFETY: the pages are part of our own mapping, and `&mut self` shows that no
            // reference to them exists.
            if unsafe { own_memory::free(&(start..start + run.byte_count()), false) }.is_err() {
                // Locked memory, for example.
                self.copy.content_mut()[run.to_offsets()].fill(0);
            }
            for page in run.pages() {
                self.data[page.to_usize() / 64] &= !(1 << (page.to_usize() % 64));
            }
        }
    }
}

/// True if the bit of a page is set.
fn is_set(bits: &[u64], page: PageNumber) -> bool {
    bits[page.to_usize() / 64] >> (page.to_usize() % 64) & 1 == 1
}

/// The pages in long runs of `offsets` at which the region holds zeros.
fn zeros_within<E>(offsets: &RangeSet, holding: impl FnOnce(&RangeSet) -> Result<RangeSet, E>) -> Result<RangeSet, E> {
    let whole_pages = |range: Range| range.start.page_aligned_up()..range.end.page_aligned_down();
    let is_long = |range: &Range| range.start < range.end && range.page_range().page_count() >= LONG_RUN_PAGES;
    let mut long: RangeSet = offsets.iter().map(whole_pages).filter(is_long).collect();
    if !long.is_empty() {
        let holding = holding(&long)?;
        long.subtract(&holding);
    }
    Ok(long)
}

/// Splits a range at the borders of pages.
fn by_page(range: Range) -> impl Iterator<Item = Range> {
    range.page_range().pages().map(move |page| page.addresses().overlap(&range))
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use proptest::prelude::*;

    use super::*;
    use crate::address::offsets;

    const PAGES: usize = 200;

    proptest! {
        /// Against a copy of all memory. The caller may name a page of zeros as such, or not.
        #[test]
        fn the_copy_is_the_content_at_the_last_refresh(
            writes in prop::collection::vec(
                (0usize..PAGES * PAGE_SIZE, 1usize..60 * PAGE_SIZE, prop_oneof![Just(0u8), any::<u8>()], any::<bool>()),
                1..12,
            ),
            tells_zeros in any::<bool>(),
        ) {
            let mut memory = vec![0u8; PAGES * PAGE_SIZE];
            let mut base = Base::new(memory.len()).unwrap();
            let mut at_refresh = memory.clone();
            let mut written = RangeSet::new();
            for (start, length, value, refreshes) in writes {
                let end = (start + length).min(memory.len());
                memory[start..end].fill(value);
                written.insert(offsets(start..end));
                let holding = |memory: &[u8], asked: &RangeSet| -> Result<RangeSet, Infallible> {
                    let is_held = |page: &PageNumber| {
                        let bytes = &memory[page.addresses().to_offsets()];
                        !tells_zeros || bytes.iter().any(|&byte| byte != 0)
                    };
                    let pages = asked.iter().flat_map(|range| range.pages().collect::<Vec<_>>());
                    Ok(pages.filter(is_held).map(|page| page.addresses()).collect())
                };
                let held = memory.clone();
                if refreshes {
                    base.add_stale(&std::mem::take(&mut written));
                    base.refresh(&SharedBytes::of(&mut memory), |asked| holding(&held, asked)).unwrap();
                    at_refresh.clone_from(&memory);
                } else {
                    base.put_back(&SharedBytes::of(&mut memory), &written, |asked| holding(&held, asked)).unwrap();
                    prop_assert!(memory == at_refresh, "put back");
                    written.clear();
                }
            }
        }
    }
}
