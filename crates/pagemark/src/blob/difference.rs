//! Changing a file in place into the content of a blob.

use std::fs::File;
use std::os::unix::fs::FileExt;

use pagemark_linux::sparse::{next_data, read_full};

use super::{BATCH_PAGES, BlobReader};
use crate::{Address, AddressRangeExt, ByteCount, Error, PAGE_SIZE, PageNumber, PageRange, PageRangeExt, RangeSet};

/// The pages of a file whose content differs from that of a blob.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Difference {
    /// The pages, as ranges of bytes; none after the end of the blob.
    pub pages: RangeSet,
    /// Pages among them that lie in holes of the file, or after its end: writing them takes up
    /// space.
    pub unallocated_pages: u64,
    /// True if the file has another length than the blob.
    pub length_differs: bool,
}

impl Difference {
    /// True if the file has the content of the blob.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty() && !self.length_differs
    }
}

impl BlobReader<'_> {
    /// Compares `file` with this content. Holes of the file are not read. Every page of the content
    /// that differs is read, so a page that cannot be read is found before the file is changed.
    ///
    /// # Errors
    /// [`ErrorKind::Stream`](crate::ErrorKind::Stream) if `file` could not be read, and the errors
    /// of [`Store::get_page`](crate::Store::get_page).
    pub fn difference(&self, file: &File) -> Result<Difference, Error> {
        let length_differs = file.metadata().map_err(Error::stream)?.len() != self.bytes.get();
        let mut difference = Difference { length_differs, ..Difference::default() };
        let end = self.pages().addresses().end;
        let (mut held, mut page) = (vec![0; BATCH_PAGES * PAGE_SIZE], [0; PAGE_SIZE]);
        let mut at = Address::MIN;
        while at < end {
            let data = next_data(file, at, end).map_err(Error::stream)?;
            self.add_unallocated(at.page()..data.start.page(), &mut difference)?;
            at = data.start;
            while at < data.end {
                let bytes = held.len().min((at..data.end).byte_count().to_usize());
                let read = read_full(file, &mut held[..bytes], at, self.bytes).map_err(Error::stream)?;
                held[read..bytes].fill(0);
                for (number, held) in (at.page().get()..).map(PageNumber::new).zip(held[..bytes].chunks(PAGE_SIZE)) {
                    self.store.get_page(self.tree.get(number), &mut page)?;
                    if held != page {
                        difference.pages.insert(number.addresses());
                    }
                }
                at += ByteCount::from(bytes);
            }
        }
        Ok(difference)
    }

    /// Adds the pages of the content in `pages`, which the file does not hold.
    fn add_unallocated(&self, pages: PageRange, difference: &mut Difference) -> Result<(), Error> {
        let mut page = [0; PAGE_SIZE];
        for (number, id) in self.tree.range(pages) {
            self.store.get_page(id, &mut page)?;
            difference.pages.insert(number.addresses());
            difference.unallocated_pages += 1;
        }
        Ok(())
    }

    /// Number of pages that hold something: those that a new file takes up.
    pub fn allocated_pages(&self) -> u64 {
        self.tree.page_count()
    }

    /// Reads each page of the content once, to find out whether all can be read.
    ///
    /// # Errors
    /// Those of [`Store::get_page`](crate::Store::get_page).
    pub fn check(&self) -> Result<(), Error> {
        let mut page = [0; PAGE_SIZE];
        self.tree.range(self.pages()).try_for_each(|(_, id)| self.store.get_page(id, &mut page))
    }

    /// Gives `file` this content in place: cuts it to this length, writes the pages of
    /// `difference`, and extends it.
    ///
    /// # Errors
    /// [`ErrorKind::Stream`](crate::ErrorKind::Stream) if `file` could not be written, and the
    /// errors of [`Store::get_page`](crate::Store::get_page). A part of the file may be changed.
    pub fn apply(&self, difference: &Difference, file: &File) -> Result<(), Error> {
        if file.metadata().map_err(Error::stream)?.len() > self.bytes.get() {
            file.set_len(self.bytes.get()).map_err(Error::stream)?;
        }
        let end = Address::MIN + self.bytes;
        let mut buffer = Vec::with_capacity(BATCH_PAGES * PAGE_SIZE);
        for range in difference.pages.iter() {
            let mut at = range.start;
            while at < range.end {
                buffer.clear();
                for number in (at.page().get()..range.end.page().get()).map(PageNumber::new).take(BATCH_PAGES) {
                    let mut page = [0; PAGE_SIZE];
                    self.store.get_page(self.tree.get(number), &mut page)?;
                    buffer.extend_from_slice(&page);
                }
                let bytes = buffer.len().min((at..end).byte_count().to_usize());
                file.write_all_at(&buffer[..bytes], at.get()).map_err(Error::stream)?;
                at += ByteCount::from(buffer.len());
            }
        }
        file.set_len(self.bytes.get()).map_err(Error::stream)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use proptest::prelude::*;

    use super::*;
    use crate::{Blob, MemoryStore};

    proptest! {
        #[test]
        fn a_file_gets_the_content_in_place(
            blob_pages in prop::collection::vec(0u8..3, 0..8), blob_tail in 0usize..PAGE_SIZE,
            file_pages in prop::collection::vec(0u8..3, 0..8), file_tail in 0usize..PAGE_SIZE,
        ) {
            // A page of zeros becomes a hole of the file.
            let content = |pages: &[u8], tail: usize| -> Vec<u8> {
                pages.iter().flat_map(|byte| [*byte; PAGE_SIZE]).chain(std::iter::repeat_n(2, tail)).collect()
            };
            let (wanted, held) = (content(&blob_pages, blob_tail), content(&file_pages, file_tail));
            let file = tempfile::NamedTempFile::new().unwrap();
            for (number, page) in held.chunks(PAGE_SIZE).enumerate().filter(|(_, page)| page[0] != 0) {
                file.as_file().write_all_at(page, (number * PAGE_SIZE) as u64).unwrap();
            }
            file.as_file().set_len(held.len() as u64).unwrap();
            let mut store = MemoryStore::new();
            let blob = Blob::write(&mut store, &mut &wanted[..]).unwrap();
            let reader = blob.reader(&store).unwrap();
            let inode = file.as_file().metadata().unwrap().ino();

            let difference = reader.difference(file.as_file()).unwrap();
            prop_assert_eq!(difference.is_empty(), wanted == held);
            for (number, page) in wanted.chunks(PAGE_SIZE).enumerate() {
                let start = number * PAGE_SIZE;
                let mut present = [0; PAGE_SIZE];
                let part = held.get(start..held.len().min(start + page.len())).unwrap_or_default();
                present[..part.len()].copy_from_slice(part);
                let differs = present[..page.len()] != *page;
                prop_assert_eq!(difference.pages.contains(Address::from(start)), differs, "page {}", number);
            }
            reader.apply(&difference, file.as_file()).unwrap();
            prop_assert!(std::fs::read(file.path()).unwrap() == wanted);
            prop_assert_eq!(file.as_file().metadata().unwrap().ino(), inode);
            prop_assert!(reader.difference(file.as_file()).unwrap().is_empty());
        }
    }

    #[test]
    fn pages_that_take_up_space_are_counted() {
        let mut store = MemoryStore::new();
        let mut wanted = vec![0; 10 * PAGE_SIZE];
        wanted[2 * PAGE_SIZE] = 1;
        wanted[9 * PAGE_SIZE] = 1;
        let blob = Blob::write(&mut store, &mut &wanted[..]).unwrap();
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[5; 3 * PAGE_SIZE], 0).unwrap();
        let difference = blob.reader(&store).unwrap().difference(&file).unwrap();
        assert_eq!((difference.pages.page_count(), difference.unallocated_pages), (4, 1));
    }
}
