//! Pagemap images: which pages of a process are saved, and from where a restore takes each.

use std::path::Path;

use pagemark::{Address, AddressRangeExt, PageNumber, PageRange, PageRangeExt};
use pagemark_trace::error::Error;
use prost::Message;

use super::container::{Image, ImageKind, with_varint};
use super::schema::{PAGE_IN_PARENT, PAGE_LAZY, PAGE_PRESENT, PagemapEntry, PagemapHead};

/// A run of consecutive pages of a pagemap image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageRun {
    /// Number of the first page: its address divided by the page size.
    pub page: u64,
    /// Number of pages.
    pub pages: u64,
    /// True if the pages image holds the content.
    pub present: bool,
}

impl PageRun {
    /// The pages of the run.
    pub fn page_range(&self) -> PageRange {
        PageNumber::new(self.page)..PageNumber::new(self.page + self.pages)
    }
}

/// A pagemap image, with its undeclared fields.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pagemap {
    /// N of the `pages-N.img` that holds the content of the present runs.
    pub pages_id: u32,
    head: Vec<u8>,
    entries: Vec<(PageRun, Vec<u8>)>,
}

impl Pagemap {
    /// Reads a pagemap image.
    ///
    /// # Errors
    /// [`Error`]; also if its runs are not in ascending order or refer to a previous image.
    pub fn read(path: &Path) -> Result<Pagemap, Error> {
        let image = Image::read(path, ImageKind::Pagemap)?;
        Pagemap::from_image(image).map_err(|reason| Error::image(path, reason))
    }

    fn from_image(image: Image) -> Result<Pagemap, String> {
        let mut messages = image.messages.into_iter();
        let head = messages.next().ok_or("it has no message")?;
        let pages_id = PagemapHead::decode(head.as_slice()).map_err(|e| e.to_string())?.pages_id;
        let mut entries: Vec<(PageRun, Vec<u8>)> = Vec::new();
        let mut next_page = 0;
        for message in messages {
            let entry = PagemapEntry::decode(message.as_slice()).map_err(|e| e.to_string())?;
            // Runs of old images have no flags and are present.
            let flags = entry.flags.unwrap_or(PAGE_PRESENT);
            if entry.in_parent == Some(true) || flags & PAGE_IN_PARENT != 0 {
                return Err("it refers to pages of another image".into());
            }
            let address = Address::new(entry.vaddr);
            let page = address.page().get();
            let end = page.checked_add(entry.pages()).filter(|&end| end <= 1 << 52);
            let Some(end) = end.filter(|_| page >= next_page && address.is_page_aligned()) else {
                return Err(format!("the run at {:#x} is out of order", entry.vaddr));
            };
            next_page = end;
            entries.push((PageRun { page, pages: entry.pages(), present: flags & PAGE_PRESENT != 0 }, message));
        }
        Ok(Pagemap { pages_id, head, entries })
    }

    /// The runs, in ascending order.
    pub fn runs(&self) -> impl Iterator<Item = PageRun> + '_ {
        self.entries.iter().map(|(run, _)| *run)
    }

    /// Adds lazy runs for the parts of `ranges` (addresses) that the image does not name yet.
    pub fn add_withheld(&mut self, ranges: &pagemark::RangeSet) {
        let named: pagemark::RangeSet = self.runs().map(|run| run.page_range().addresses()).collect();
        let mut added = ranges.clone();
        added.subtract(&named);
        for range in added.iter() {
            let pages = range.page_range();
            let entry = PagemapEntry {
                vaddr: range.start.get(),
                compat_nr_pages: 0,
                in_parent: None,
                flags: Some(PAGE_LAZY),
                nr_pages: Some(pages.page_count()),
            };
            let run = PageRun { page: pages.start.get(), pages: pages.page_count(), present: false };
            self.entries.push((run, entry.encode_to_vec()));
        }
        self.entries.sort_by_key(|(run, _)| run.page);
    }

    /// Encodes the image as it was read, with the added runs. Runs that are not present are lazy.
    pub fn encode(&self) -> Vec<u8> {
        self.with_sources(|_, run| if run.present { PageSource::Present } else { PageSource::Lazy }).0
    }

    /// Encodes an image in which `source` decides where the content of each page comes from, and
    /// returns it with its runs. Arguments of `source` are a page's number and the run that it
    /// belongs to. A run whose pages have different sources is split.
    pub fn with_sources(&self, source: impl Fn(u64, &PageRun) -> PageSource) -> (Vec<u8>, Vec<PageRun>) {
        let mut image = Image::new(ImageKind::Pagemap);
        image.messages.push(self.head.clone());
        let mut runs = Vec::new();
        for (run, message) in &self.entries {
            let end = run.page + run.pages;
            let mut page = run.page;
            while page < end {
                let first = page;
                let first_source = source(page, run);
                page += 1;
                while page < end && source(page, run) == first_source {
                    page += 1;
                }
                let flags = match first_source {
                    PageSource::Absent => continue,
                    PageSource::Lazy => PAGE_LAZY,
                    PageSource::Present => PAGE_PRESENT,
                };
                let part = PageRun { page: first, pages: page - first, present: first_source == PageSource::Present };
                let mut message = with_varint(message, PagemapEntry::FLAGS, u64::from(flags));
                if part.pages != run.pages {
                    message = with_varint(&message, PagemapEntry::VADDR, PageNumber::new(first).address().get());
                    message = with_varint(&message, PagemapEntry::COMPAT_NR_PAGES, 0);
                    message = with_varint(&message, PagemapEntry::NR_PAGES, part.pages);
                }
                image.messages.push(message);
                runs.push(part);
            }
        }
        (image.encode(), runs)
    }
}

/// From where a restore takes the content of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageSource {
    /// From nowhere: the page holds zeros, or the content of the mapped file.
    Absent,
    /// From a lazy restore, which delivers it on the first access.
    Lazy,
    /// From the pages image.
    Present,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pagemap(runs: &[(u64, u64, bool)]) -> Image {
        let mut image = Image::new(ImageKind::Pagemap);
        image.messages.push(PagemapHead { pages_id: 3 }.encode_to_vec());
        for &(page, pages, present) in runs {
            let entry = PagemapEntry {
                vaddr: PageNumber::new(page).address().get(),
                compat_nr_pages: 0,
                in_parent: None,
                flags: Some(if present { PAGE_PRESENT } else { PAGE_LAZY }),
                nr_pages: Some(pages),
            };
            image.messages.push(entry.encode_to_vec());
        }
        image
    }

    /// Gaps before runs, lengths, and whether they are present.
    fn runs() -> impl Strategy<Value = Vec<(u64, u64, bool)>> {
        prop::collection::vec((0_u64..5, 1_u64..20, any::<bool>()), 0..20).prop_map(|parts| {
            let mut next = 100;
            let place = |(gap, pages, present)| {
                let page = next + gap;
                next = page + pages;
                (page, pages, present)
            };
            parts.into_iter().map(place).collect()
        })
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_pagemap_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let mut image = Image::new(ImageKind::Pagemap).encode();
            image.extend(&bytes);
            let _ = Image::decode(&image, ImageKind::Pagemap).and_then(Pagemap::from_image);
        }

        #[test]
        fn a_damaged_image_is_read_or_refused(runs in runs(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
            let mut bytes = pagemap(&runs).encode();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            let _ = Image::decode(&bytes, ImageKind::Pagemap).and_then(Pagemap::from_image);
        }

        #[test]
        fn every_page_has_the_source_that_was_chosen(runs in runs(), seed in any::<u64>()) {
            let map = Pagemap::from_image(pagemap(&runs)).unwrap();
            let choose = |page: u64, _: &PageRun| match page.wrapping_mul(seed | 1) >> 13 & 3 {
                0 => PageSource::Absent,
                1 => PageSource::Lazy,
                _ => PageSource::Present,
            };
            let (bytes, placed) = map.with_sources(choose);
            let read = Pagemap::from_image(Image::decode(&bytes, ImageKind::Pagemap).unwrap()).unwrap();
            prop_assert_eq!(read.runs().collect::<Vec<_>>(), placed);
            prop_assert_eq!(read.pages_id, 3);
            for run in map.runs() {
                for page in run.page..run.page + run.pages {
                    let found = read.runs().find(|run| (run.page..run.page + run.pages).contains(&page));
                    let place = match found {
                        None => PageSource::Absent,
                        Some(PageRun { present: true, .. }) => PageSource::Present,
                        Some(_) => PageSource::Lazy,
                    };
                    prop_assert_eq!(place, choose(page, &run));
                }
            }
        }

        #[test]
        fn what_was_withheld_is_added_once(runs in runs(), ranges in prop::collection::vec((90_u64..400, 1_u64..30), 0..8)) {
            let withheld: pagemark::RangeSet =
                ranges.iter().map(|&(page, pages)| (PageNumber::new(page)..PageNumber::new(page + pages)).addresses()).collect();
            let mut map = Pagemap::from_image(pagemap(&runs)).unwrap();
            map.add_withheld(&withheld);
            let read = Pagemap::from_image(Image::decode(&map.encode(), ImageKind::Pagemap).unwrap()).unwrap();
            for page in 90..450 {
                let before = runs.iter().find(|(first, pages, _)| (*first..first + pages).contains(&page));
                let after: Vec<_> = read.runs().filter(|run| (run.page..run.page + run.pages).contains(&page)).collect();
                let expected = before.map(|run| run.2).or(withheld.contains(PageNumber::new(page).address()).then_some(false));
                prop_assert_eq!(after.iter().map(|run| run.present).collect::<Vec<_>>(), expected.into_iter().collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn runs_out_of_order_and_of_a_previous_image_are_refused() {
        assert!(Pagemap::from_image(pagemap(&[(10, 5, true), (12, 1, true)])).is_err());
        assert!(Pagemap::from_image(pagemap(&[(u64::MAX >> 12, u64::MAX, true)])).is_err());
        assert!(Pagemap::from_image(Image::new(ImageKind::Pagemap)).is_err());
        let mut image = pagemap(&[]);
        let parent = PagemapEntry { flags: Some(PAGE_IN_PARENT), nr_pages: Some(1), ..Default::default() };
        image.messages.push(parent.encode_to_vec());
        assert!(Pagemap::from_image(image).is_err());
    }
}
