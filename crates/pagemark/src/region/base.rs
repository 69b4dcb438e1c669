//! The content of a region at the beginning of its transaction.

use std::io;

use pagemark_linux::own_memory::{self, Mapping};
use pagemark_linux::room;
use pagemark_linux::shared_bytes::SharedBytes;

use crate::snapshot::Snapshot;
use crate::track::page_bits::{for_words, runs};
use crate::{Address, AddressRangeExt, Error, PAGE_SIZE, PageNumber, PageRangeExt, Range, RangeSet};

/// Pages of a range from which it is asked which of them the region holds. Trackers report the
/// surroundings of what was written in memory that is otherwise unused, in long runs; asking costs
/// a system call.
const LONG_RUN_PAGES: u64 = 32;

/// The part of the region's pages, as a divisor, up to which copies stay in memory when a snapshot
/// takes their place: the next transactions likely copy the same pages.
const KEPT_SHARE: usize = 32;

static ZERO_PAGE: [u8; PAGE_SIZE] = [0; PAGE_SIZE];

/// The content of the region, to roll back to: that of a snapshot, and copies of the pages that
/// differ from it. The copies take memory only where the region held data.
#[derive(Debug)]
pub(super) struct Base {
    /// The content of pages that were not copied; zeros if there is no snapshot.
    snapshot: Option<Snapshot>,
    copy: Mapping,
    /// Offsets at which the base may be out of date.
    stale: RangeSet,
    /// The pages that have their content in the copy.
    copied: PageSet,
    /// The pages of the copy that may hold anything else than zeros.
    data: PageSet,
}

/// The content of a page of the base.
enum PageContent<'a> {
    Zeros,
    Bytes(&'a [u8]),
}

impl Base {
    /// A base that holds zeros.
    pub fn new(bytes: usize) -> io::Result<Base> {
        let copy = Mapping::new(bytes)?;
        let pages = copy.bytes() / PAGE_SIZE;
        let (copied, data) = (PageSet::new(pages)?, PageSet::new(pages)?);
        Ok(Base { snapshot: None, copy, stale: RangeSet::new(), copied, data })
    }

    /// Records offsets that were written.
    pub fn add_stale(&mut self, offsets: &RangeSet) {
        self.stale.extend(offsets);
    }

    /// Replaces the content by that of a snapshot, which the region holds except at the offsets
    /// `differing`. What was written since the last refresh must have been named by
    /// [`Base::add_stale`]: the copies stay if the snapshot has the content of the one before.
    pub fn replace(&mut self, snapshot: &Snapshot, differing: &RangeSet) {
        if self.snapshot.as_ref() != Some(snapshot) {
            self.free_copies();
            self.snapshot = Some(snapshot.clone());
            self.stale = differing.clone();
        }
    }

    /// Frees the copies before a snapshot takes their place, if they take much memory. Until then,
    /// all of the region counts as written since.
    pub fn make_room(&mut self) {
        if self.data.count > self.pages() / KEPT_SHARE {
            self.free_copies();
            self.snapshot = None;
            self.stale = (Address::MIN..Address::MIN + self.copy.range().byte_count()).into();
        }
    }

    /// Makes the content that of the snapshot alone. Keeps the memory of a few copies.
    fn free_copies(&mut self) {
        self.copied.clear();
        if self.data.count > self.pages() / KEPT_SHARE {
            // SAFETY: the mapping is ours, and `&mut self` shows that no reference to it exists.
            if unsafe { own_memory::free(&self.copy.range(), false) }.is_err() {
                // Locked memory, for example.
                self.copy.content_mut().fill(0);
            }
            self.data.clear();
        }
    }

    fn pages(&self) -> usize {
        self.copy.bytes() / PAGE_SIZE
    }

    /// Copies the content that was written since the previous call. `holding` returns the pages, of
    /// those given to it, at which the region may hold anything else than zeros.
    ///
    /// # Errors
    /// Those of `holding`; the next call then copies the content.
    pub fn refresh(
        &mut self,
        region: &SharedBytes<'_>,
        holding: impl FnOnce(&RangeSet) -> Result<RangeSet, Error>,
    ) -> Result<(), Error> {
        let zeros = zeros_within(&self.stale, holding)?;
        let mut stale = std::mem::take(&mut self.stale);
        for range in zeros.iter() {
            self.free(&range);
            self.copied.insert(&range);
        }
        stale.subtract(&zeros);
        self.copy_from(region, &stale).inspect_err(|_| self.stale.extend(&stale))
    }

    /// Copies the content at the offsets `stale`, where it differs from that of the base.
    fn copy_from(&mut self, region: &SharedBytes<'_>, stale: &RangeSet) -> Result<(), Error> {
        let (mut copied, uncopied) = self.by_place(stale);
        let mut differing = RangeSet::new();
        self.each_uncopied(region, &uncopied, |part, content| {
            if !region.equals(part.start.to_usize(), content) {
                // The rest of the page is as in the region, too.
                differing.insert(part.whole_pages());
            }
        })?;
        copied.extend(&differing);
        for part in copied.iter().flat_map(by_page) {
            let page = part.start.page();
            self.copied.insert(&page.addresses());
            if self.data.contains(page) || !region.is_zero(part.to_offsets()) {
                region.read(part.start.to_usize(), &mut self.copy.content_mut()[part.to_offsets()]);
                self.data.insert(&page.addresses());
            }
        }
        Ok(())
    }

    /// Writes the base back to `region` at `offsets`. `holding` is as for [`Base::refresh`].
    ///
    /// # Errors
    /// Those of `holding`; then nothing was written.
    pub fn put_back(
        &self,
        region: &SharedBytes<'_>,
        offsets: &RangeSet,
        holding: impl FnOnce(&RangeSet) -> Result<RangeSet, Error>,
    ) -> Result<(), Error> {
        let zeros = zeros_within(offsets, holding)?;
        let (copied, uncopied) = self.by_place(offsets);
        self.each_uncopied(region, &uncopied, |part, content| put_back_part(region, &zeros, part, content))?;
        for part in copied.iter().flat_map(by_page) {
            let content = self.copied_content(part.start.page()).unwrap_or(&ZERO_PAGE);
            put_back_part(region, &zeros, part.clone(), &content[within_page(&part)]);
        }
        Ok(())
    }

    /// Calls `each` for the parts of `offsets` that may differ between the base and `region`, with
    /// the content of the base, in ascending order and split at the borders of pages. `holding` is
    /// as for [`Base::refresh`].
    ///
    /// # Errors
    /// Those of `holding` and `each`.
    pub fn each_differing(
        &self,
        region: &SharedBytes<'_>,
        offsets: &RangeSet,
        holding: impl FnOnce(&RangeSet) -> Result<RangeSet, Error>,
        mut each: impl FnMut(Range, &[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let zeros = zeros_within(offsets, holding)?;
        let mut scratch = [0; PAGE_SIZE];
        for part in offsets.iter().flat_map(by_page) {
            let page = part.start.page();
            let within = within_page(&part);
            match self.content(page, &mut scratch)? {
                PageContent::Bytes(content) => each(part, &content[within])?,
                PageContent::Zeros if zeros.contains(part.start) || region.is_zero(part.to_offsets()) => {}
                PageContent::Zeros => each(part, &ZERO_PAGE[within])?,
            }
        }
        Ok(())
    }

    /// The offsets whose content is in the copy, and those whose content is in the snapshot.
    fn by_place(&self, offsets: &RangeSet) -> (RangeSet, RangeSet) {
        let (mut copied, mut uncopied) = (RangeSet::new(), RangeSet::new());
        for part in offsets.iter().flat_map(by_page) {
            let place = if self.copied.contains(part.start.page()) { &mut copied } else { &mut uncopied };
            place.insert(part);
        }
        (copied, uncopied)
    }

    /// Calls `each` with the parts of `uncopied`, which lie within pages, and the content of the
    /// snapshot there.
    fn each_uncopied(
        &self,
        region: &SharedBytes<'_>,
        uncopied: &RangeSet,
        mut each: impl FnMut(Range, &[u8]),
    ) -> Result<(), Error> {
        let mut by_pages = |range: Range, content: &[u8]| {
            for part in by_page(range.clone()) {
                let within = (part.start - range.start).to_usize()..(part.end - range.start).to_usize();
                each(part, &content[within]);
            }
        };
        match &self.snapshot {
            Some(snapshot) => snapshot.each_part(uncopied, region, by_pages),
            None => {
                uncopied.iter().flat_map(by_page).for_each(|part| {
                    let length = part.byte_count().to_usize();
                    by_pages(part, &ZERO_PAGE[..length]);
                });
                Ok(())
            }
        }
    }

    /// The content of a page in the copy; `None` for zeros.
    fn copied_content(&self, page: PageNumber) -> Option<&[u8]> {
        self.data.contains(page).then(|| &self.copy.content()[page.addresses().to_offsets()])
    }

    /// The content of a page.
    fn content<'a>(&'a self, page: PageNumber, scratch: &'a mut [u8; PAGE_SIZE]) -> Result<PageContent<'a>, Error> {
        match &self.snapshot {
            Some(snapshot) if !self.copied.contains(page) => {
                snapshot.read_at(page.address(), scratch)?;
                Ok(PageContent::Bytes(scratch))
            }
            _ if self.copied.contains(page) => {
                Ok(self.copied_content(page).map_or(PageContent::Zeros, PageContent::Bytes))
            }
            _ => Ok(PageContent::Zeros),
        }
    }

    /// Makes whole pages of the copy hold zeros.
    fn free(&mut self, pages: &Range) {
        let held: RangeSet = self.data.within(pages);
        for run in held.iter() {
            let start = self.copy.range().start + (run.start - Address::MIN);
            // SAFETY: the pages are part of our own mapping, and `&mut self` shows that no
            // reference to them exists.
            if unsafe { own_memory::free(&(start..start + run.byte_count()), false) }.is_err() {
                // Locked memory, for example.
                self.copy.content_mut()[run.to_offsets()].fill(0);
            }
            self.data.remove(&run);
        }
    }
}

/// A set of pages, with a bit for each page that may be in it.
#[derive(Debug)]
struct PageSet {
    words: Box<[u64]>,
    count: usize,
}

impl PageSet {
    /// None of `pages` pages.
    ///
    /// # Errors
    /// `ENOMEM`
    fn new(pages: usize) -> io::Result<PageSet> {
        Ok(PageSet { words: room::zeros(pages.div_ceil(64))?, count: 0 })
    }

    fn contains(&self, page: PageNumber) -> bool {
        let page = page.to_usize();
        self.words[page / 64] >> (page % 64) & 1 == 1
    }

    fn insert(&mut self, pages: &Range) {
        self.change(pages, |word, mask| word | mask);
    }

    fn remove(&mut self, pages: &Range) {
        self.change(pages, |word, mask| word & !mask);
    }

    fn clear(&mut self) {
        if self.count > 0 {
            self.words.fill(0);
            self.count = 0;
        }
    }

    fn change(&mut self, pages: &Range, new: impl Fn(u64, u64) -> u64) {
        for_words(indexes(pages), |index, mask| {
            let word = &mut self.words[index];
            self.count -= word.count_ones() as usize;
            *word = new(*word, mask);
            self.count += word.count_ones() as usize;
        });
    }

    /// The pages of a range that are in the set.
    fn within(&self, pages: &Range) -> RangeSet {
        let mut found = RangeSet::new();
        for_words(indexes(pages), |index, mask| {
            runs(self.words[index] & mask, |bits| {
                let page = |bit: usize| PageNumber::from(index * 64 + bit);
                found.insert((page(bits.start)..page(bits.end)).addresses());
            });
        });
        found
    }
}

/// The indexes of the bits of whole pages.
fn indexes(pages: &Range) -> std::ops::Range<usize> {
    let pages = pages.page_range();
    pages.start.to_usize()..pages.end.to_usize()
}

/// The pages in long runs of `offsets` at which the region holds zeros.
fn zeros_within(
    offsets: &RangeSet,
    holding: impl FnOnce(&RangeSet) -> Result<RangeSet, Error>,
) -> Result<RangeSet, Error> {
    let whole_pages = |range: Range| range.start.page_aligned_up()..range.end.page_aligned_down();
    let is_long = |range: &Range| range.start < range.end && range.page_range().page_count() >= LONG_RUN_PAGES;
    let mut long: RangeSet = offsets.iter().map(whole_pages).filter(is_long).collect();
    if !long.is_empty() {
        let holding = holding(&long)?;
        long.subtract(&holding);
    }
    Ok(long)
}

/// Writes content back to a part of a page. Zeros are not written over zeros, of which `zeros` is
/// known: that would take memory.
fn put_back_part(region: &SharedBytes<'_>, zeros: &RangeSet, part: Range, content: &[u8]) {
    let is_zeros = content.first() == Some(&0) && content == &ZERO_PAGE[..content.len()];
    if is_zeros && (zeros.contains(part.start) || region.is_zero(part.to_offsets())) {
        return;
    }
    region.write(part.start.to_usize(), content);
}

/// The offsets of a part of a page within the page.
fn within_page(part: &Range) -> std::ops::Range<usize> {
    let start = part.start.page().address();
    (part.start - start).to_usize()..(part.end - start).to_usize()
}

/// Splits a range at the borders of pages.
fn by_page(range: Range) -> impl Iterator<Item = Range> {
    range.page_range().pages().map(move |page| page.addresses().overlap(&range))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::address::offsets;
    use crate::snapshot::SnapshotStore;

    const PAGES: usize = 200;

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Refresh,
        PutBack,
        /// A snapshot takes the place of the copies.
        Snapshot,
        /// The snapshot before takes their place, and the base is refreshed.
        EarlierSnapshot,
    }

    proptest! {
        /// Against a copy of all memory. The caller may name a page of zeros as such, or not.
        #[test]
        fn the_base_is_the_content_at_the_last_refresh(
            writes in prop::collection::vec(
                (
                    0usize..PAGES * PAGE_SIZE,
                    1usize..60 * PAGE_SIZE,
                    prop_oneof![Just(0u8), any::<u8>()],
                    prop_oneof![
                        Just(Step::Refresh),
                        Just(Step::PutBack),
                        Just(Step::Snapshot),
                        Just(Step::EarlierSnapshot),
                    ],
                ),
                1..12,
            ),
            tells_zeros in any::<bool>(),
        ) {
            let mut memory = vec![0u8; PAGES * PAGE_SIZE];
            let mut base = Base::new(memory.len()).unwrap();
            let store = SnapshotStore::new();
            let snapshot = |memory: &mut [u8]| {
                store.snapshot(None, &SharedBytes::of(memory), &RangeSet::new(), &RangeSet::new()).unwrap()
            };
            let mut earlier = (snapshot(&mut memory), RangeSet::new());
            let mut at_refresh = memory.clone();
            let mut written = RangeSet::new();
            for (start, length, value, step) in writes {
                let end = (start + length).min(memory.len());
                memory[start..end].fill(value);
                written.insert(offsets(start..end));
                earlier.1.insert(offsets(start..end));
                let holding = |memory: &[u8], asked: &RangeSet| -> Result<RangeSet, Error> {
                    let is_held = |page: &PageNumber| {
                        let bytes = &memory[page.addresses().to_offsets()];
                        !tells_zeros || bytes.iter().any(|&byte| byte != 0)
                    };
                    let pages = asked.iter().flat_map(|range| range.pages().collect::<Vec<_>>());
                    Ok(pages.filter(is_held).map(|page| page.addresses()).collect())
                };
                let held = memory.clone();
                match step {
                    Step::PutBack => {
                        base.put_back(&SharedBytes::of(&mut memory), &written, |asked| holding(&held, asked)).unwrap();
                        prop_assert!(memory == at_refresh, "put back");
                        written.clear();
                        continue;
                    }
                    Step::Refresh => base.add_stale(&std::mem::take(&mut written)),
                    Step::Snapshot => {
                        base.add_stale(&std::mem::take(&mut written));
                        base.make_room();
                        earlier = (snapshot(&mut memory), RangeSet::new());
                        base.replace(&earlier.0, &earlier.1);
                    }
                    Step::EarlierSnapshot => {
                        base.add_stale(&std::mem::take(&mut written));
                        base.replace(&earlier.0, &earlier.1);
                    }
                }
                base.refresh(&SharedBytes::of(&mut memory), |asked| holding(&held, asked)).unwrap();
                written.clear();
                at_refresh.clone_from(&memory);
                for set in [&base.copied, &base.data] {
                    let count = set.within(&offsets(0..memory.len())).total_bytes().get() / PAGE_SIZE as u64;
                    prop_assert_eq!(set.count as u64, count);
                }
            }
        }
    }

    #[test]
    fn a_snapshot_leaves_nothing_to_copy() {
        let mut memory = vec![7u8; PAGES * PAGE_SIZE];
        let all = RangeSet::from(offsets(0..memory.len()));
        let mut base = Base::new(memory.len()).unwrap();
        base.add_stale(&all);
        base.refresh(&SharedBytes::of(&mut memory), |asked| Ok(asked.clone())).unwrap();
        assert_eq!((base.copied.count, base.data.count), (PAGES, PAGES));
        base.make_room();
        assert_eq!((base.copied.count, base.data.count), (0, 0));
        let snapshot =
            SnapshotStore::new().snapshot(None, &SharedBytes::of(&mut memory), &all, &RangeSet::new()).unwrap();
        base.replace(&snapshot, &RangeSet::new());
        memory[3 * PAGE_SIZE] = 1;
        // Page 5 is as in the snapshot, so it needs no copy.
        base.add_stale(&offsets(3 * PAGE_SIZE..3 * PAGE_SIZE + 1).into());
        base.add_stale(&offsets(5 * PAGE_SIZE..6 * PAGE_SIZE).into());
        base.refresh(&SharedBytes::of(&mut memory), |asked| Ok(asked.clone())).unwrap();
        assert_eq!((base.copied.count, base.data.count), (1, 1));
    }
}
