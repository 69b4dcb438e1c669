//! Content of any length, held as a tree of its pages: files, state, anything that is not memory.

mod difference;
mod history;

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;

use pagemark_linux::sparse::{next_data, read_full};
use serde::{Deserialize, Serialize};

use crate::{
    Address, AddressRangeExt, ByteCount, ContentId, Error, ErrorKind, PAGE_SIZE, PageNumber, PageRange, PageRangeExt,
    PageTree, Range, Store,
};

pub use difference::Difference;
pub use history::BlobHistory;

/// Maximum length of a blob for [`Blob::read_all`].
const MAX_READ: ByteCount = ByteCount::new(1 << 30);
/// Pages that are read or written at once.
const BATCH_PAGES: usize = 64;

/// Content of any length in a [`Store`]: its length, and the page tree that names its pages. The
/// last page is filled up with zeros; pages of zeros cost nothing. Two blobs of one store are equal
/// exactly if their content is.
///
/// ```
/// use std::io::{Read, Seek, SeekFrom};
/// use pagemark::{Blob, MemoryStore};
///
/// let mut store = MemoryStore::new();
/// let blob = Blob::write(&mut store, &mut &b"some content"[..])?;
/// assert_eq!(blob.bytes.get(), 12);
/// let mut reader = blob.reader(&store)?;
/// reader.seek(SeekFrom::Start(5))?;
/// let mut end = String::new();
/// reader.read_to_string(&mut end)?;
/// assert_eq!(end, "content");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Blob {
    /// Length of the content.
    #[serde(rename = "size")]
    pub bytes: ByteCount,
    /// Root of the page tree.
    pub root: ContentId,
}

impl Error {
    /// The reader, writer or file on the other side failed.
    fn stream(source: io::Error) -> Error {
        Error::because(ErrorKind::Stream, "").caused_by(source)
    }
}

impl Blob {
    /// Blob without content.
    pub const EMPTY: Blob = Blob { bytes: ByteCount::ZERO, root: ContentId::ZERO };

    /// Puts the whole content of `reader` into `store`.
    ///
    /// # Errors
    /// [`ErrorKind::Stream`] if `reader` failed, the errors of [`Store::put`].
    pub fn write(store: &mut dyn Store, reader: &mut dyn Read) -> Result<Blob, Error> {
        Blob::write_changed(store, reader, &mut PageTree::new())
    }

    /// Like [`Blob::write`]. `tree` has the pages of an earlier content and gets those of the new
    /// one, each of which is stored as a page that may have changed.
    fn write_changed(store: &mut dyn Store, reader: &mut dyn Read, tree: &mut PageTree) -> Result<Blob, Error> {
        let mut bytes = ByteCount::ZERO;
        let mut buffer = vec![0; BATCH_PAGES * PAGE_SIZE];
        loop {
            let mut filled = 0;
            while filled < buffer.len() {
                match reader.read(&mut buffer[filled..]) {
                    Ok(0) => break,
                    Ok(read) => filled += read,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(Error::stream(error)),
                }
            }
            let padded = filled.next_multiple_of(PAGE_SIZE);
            buffer[filled..padded].fill(0);
            let first = PageNumber::new(bytes.pages_rounded_down());
            for (number, page) in (first.get()..).map(PageNumber::new).zip(buffer[..padded].as_chunks().0) {
                tree.set(number, store.put_changed(tree.get(number), page)?);
            }
            bytes += ByteCount::from(filled);
            if filled < buffer.len() {
                tree.clear(PageNumber::new(bytes.pages_rounded_up())..PageNumber::MAX);
                return Ok(Blob { bytes, root: tree.save(store)? });
            }
        }
    }

    /// Number of pages, the last of which may be filled up with zeros.
    pub fn page_count(&self) -> u64 {
        self.bytes.pages_rounded_up()
    }

    fn pages(&self) -> PageRange {
        PageNumber::MIN..PageNumber::new(self.page_count())
    }

    /// Reads the content from any offset, with one page in memory.
    ///
    /// # Errors
    /// Those of [`PageTree::load`].
    pub fn reader<'a>(&self, store: &'a dyn Store) -> Result<BlobReader<'a>, Error> {
        let tree = PageTree::load(self.root, store)?;
        let page = Box::new([0; PAGE_SIZE]);
        Ok(BlobReader { store, tree, bytes: self.bytes, position: 0, page, loaded: None })
    }

    /// Reads the whole content into memory.
    ///
    /// # Errors
    /// [`ErrorKind::TooLarge`] for more than 1 GiB, and the errors of [`Store::get`].
    pub fn read_all(&self, store: &dyn Store) -> Result<Vec<u8>, Error> {
        if self.bytes > MAX_READ {
            return Err(Error::too_large(self.bytes.to_usize(), MAX_READ.to_usize()));
        }
        let mut content = vec![0; self.page_count() as usize * PAGE_SIZE];
        for (number, id) in PageTree::load(self.root, store)?.range(self.pages()) {
            if let Some(page) = content[number.address().to_usize()..].first_chunk_mut() {
                store.get_page(id, page)?;
            }
        }
        content.truncate(self.bytes.to_usize());
        Ok(content)
    }

    /// Writes the content into `file`, which must be empty; pages of zeros become holes.
    ///
    /// # Errors
    /// [`ErrorKind::Stream`] if `file` could not be written, and the errors of [`Store::get`].
    pub fn copy_to_file(&self, store: &dyn Store, file: &File) -> Result<(), Error> {
        self.reader(store)?.copy_to_file(file)
    }

    /// The ranges of bytes in which two blobs of `store` differ, in ascending order: whole pages,
    /// cut to the longer blob. Content behind the end of the shorter blob differs. Shared subtrees
    /// are not read.
    ///
    /// # Errors
    /// Those of [`PageTree::diff`].
    pub fn diff(&self, other: &Blob, store: &dyn Store) -> Result<Vec<Range>, Error> {
        let end = |bytes: ByteCount| Address::MIN + bytes;
        let (shorter, longer) = (end(self.bytes.min(other.bytes)), end(self.bytes.max(other.bytes)));
        let mut ranges: Vec<Range> = Vec::new();
        let mut add = |range: Range| match ranges.last_mut() {
            Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
            _ => ranges.push(range),
        };
        PageTree::diff(store, self.root, other.root, &mut |page, _, _| {
            let page = page.addresses();
            if page.start < shorter {
                add(page.start..page.end.min(longer));
            }
            Ok(())
        })?;
        if shorter < longer {
            add(shorter..longer);
        }
        Ok(ranges)
    }
}

/// Writes pages of a store one after the other into an empty file; pages of zeros become holes.
pub struct SparseWriter<'a> {
    file: &'a File,
    /// Where the buffer begins in the file.
    start: Address,
    buffer: Vec<u8>,
}

impl<'a> SparseWriter<'a> {
    /// Begins at the beginning of `file`.
    pub fn new(file: &'a File) -> SparseWriter<'a> {
        SparseWriter { file, start: Address::MIN, buffer: Vec::with_capacity(BATCH_PAGES * PAGE_SIZE) }
    }

    fn position(&self) -> Address {
        self.start + ByteCount::from(self.buffer.len())
    }

    fn flush(&mut self, end: Address) -> Result<(), Error> {
        let bytes = self.buffer.len().min((self.start..end).byte_count().to_usize());
        self.file.write_all_at(&self.buffer[..bytes], self.start.get()).map_err(Error::stream)?;
        self.start = self.position();
        self.buffer.clear();
        Ok(())
    }

    /// Continues at `offset`, which is not before the written end, and leaves a hole up to it.
    fn skip_to(&mut self, offset: Address) -> Result<(), Error> {
        if offset != self.position() {
            self.flush(Address::MAX)?;
            self.start = offset;
        }
        Ok(())
    }

    /// Appends a page.
    ///
    /// # Errors
    /// [`ErrorKind::Stream`] if the file could not be written, and the errors of [`Store::get`].
    pub fn page(&mut self, store: &dyn Store, id: ContentId) -> Result<(), Error> {
        if id.is_zero() {
            return self.skip_to(self.position() + ByteCount::PAGE);
        }
        let mut page = [0; PAGE_SIZE];
        store.get_page(id, &mut page)?;
        self.buffer.extend_from_slice(&page);
        if self.buffer.len() == BATCH_PAGES * PAGE_SIZE {
            self.flush(Address::MAX)?;
        }
        Ok(())
    }

    /// Writes the buffer, and sets the length of the file to `bytes`.
    ///
    /// # Errors
    /// [`ErrorKind::Stream`]
    pub fn finish(mut self, bytes: ByteCount) -> Result<(), Error> {
        self.flush(Address::MIN + bytes)?;
        self.file.set_len(bytes.get()).map_err(Error::stream)
    }
}

/// Reads a [`Blob`] that was opened with [`Blob::reader`].
pub struct BlobReader<'a> {
    store: &'a dyn Store,
    tree: PageTree,
    bytes: ByteCount,
    position: u64,
    page: Box<[u8; PAGE_SIZE]>,
    /// Number of the page that `page` holds.
    loaded: Option<PageNumber>,
}

impl BlobReader<'_> {
    fn pages(&self) -> PageRange {
        PageNumber::MIN..PageNumber::new(self.bytes.pages_rounded_up())
    }

    /// Writes the content into `file`, which must be empty; pages of zeros become holes. The
    /// position does not matter.
    ///
    /// # Errors
    /// [`ErrorKind::Stream`] if `file` could not be written, and the errors of [`Store::get`].
    pub fn copy_to_file(&self, file: &File) -> Result<(), Error> {
        // Fails early if a file cannot have this length.
        file.set_len(self.bytes.get()).map_err(Error::stream)?;
        let mut writer = SparseWriter::new(file);
        for (number, id) in self.tree.range(self.pages()) {
            writer.skip_to(number.address())?;
            writer.page(self.store, id)?;
        }
        writer.finish(self.bytes)
    }

    /// True if `file` has exactly this content. Holes of the file are not read. The position does
    /// not matter.
    ///
    /// # Errors
    /// [`ErrorKind::Stream`] if `file` could not be read, and the errors of [`Store::get`].
    pub fn is_content_of(&self, file: &File) -> Result<bool, Error> {
        if file.metadata().map_err(Error::stream)?.len() != self.bytes.get() {
            return Ok(false);
        }
        let end = self.pages().addresses().end;
        let (mut held, mut page) = ([0; PAGE_SIZE], [0; PAGE_SIZE]);
        let mut at = Address::MIN;
        while at < end {
            let data = next_data(file, at, end).map_err(Error::stream)?;
            if self.tree.range(at.page()..data.start.page()).next().is_some() {
                return Ok(false);
            }
            for number in data.pages() {
                let read = read_full(file, &mut held, number.address(), self.bytes).map_err(Error::stream)?;
                held[read..].fill(0);
                self.store.get_page(self.tree.get(number), &mut page)?;
                if held != page {
                    return Ok(false);
                }
            }
            at = data.end;
        }
        Ok(true)
    }
}

impl Read for BlobReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.bytes.saturating_sub(ByteCount::new(self.position));
        if left == ByteCount::ZERO || buffer.is_empty() {
            return Ok(0);
        }
        let position = Address::new(self.position);
        let number = position.page();
        if self.loaded != Some(number) {
            self.loaded = None;
            self.store.get_page(self.tree.get(number), &mut self.page).map_err(io::Error::other)?;
            self.loaded = Some(number);
        }
        let from = position.offset_in_page();
        let bytes = buffer.len().min(PAGE_SIZE - from).min(left.to_usize());
        buffer[..bytes].copy_from_slice(&self.page[from..from + bytes]);
        self.position += bytes as u64;
        Ok(bytes)
    }
}

impl Seek for BlobReader<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let position = match to {
            SeekFrom::Start(position) => Some(position),
            SeekFrom::End(offset) => self.bytes.get().checked_add_signed(offset),
            SeekFrom::Current(offset) => self.position.checked_add_signed(offset),
        };
        self.position = position.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.position)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use proptest::prelude::*;

    use super::*;
    use crate::MemoryStore;

    fn content(size: usize) -> Vec<u8> {
        (0..size).map(|at| if at / PAGE_SIZE % 3 == 1 { 0 } else { (at / 7) as u8 }).collect()
    }

    #[test]
    fn what_was_written_is_read_whole_in_parts_and_into_a_file() {
        let mut store = MemoryStore::new();
        for size in [0, 1, PAGE_SIZE - 1, PAGE_SIZE, 64 * PAGE_SIZE, 64 * PAGE_SIZE + 1, 300_000, 1 << 20] {
            let bytes = content(size);
            let blob = Blob::write(&mut store, &mut &bytes[..]).unwrap();
            assert_eq!(blob.bytes, ByteCount::from(size));
            assert!(blob.read_all(&store).unwrap() == bytes);
            let mut reader = blob.reader(&store).unwrap();
            let mut read = Vec::new();
            reader.read_to_end(&mut read).unwrap();
            assert!(read == bytes);
            for start in [0, size / 3, size.saturating_sub(5), size + 10] {
                reader.seek(SeekFrom::Start(start as u64)).unwrap();
                read.clear();
                reader.by_ref().take(5000).read_to_end(&mut read).unwrap();
                assert_eq!(read, bytes[start.min(size)..size.min(start + 5000).max(start.min(size))]);
            }
            let file = tempfile::NamedTempFile::new().unwrap();
            blob.copy_to_file(&store, file.as_file()).unwrap();
            assert!(std::fs::read(file.path()).unwrap() == bytes);
            assert!(blob.reader(&store).unwrap().is_content_of(file.as_file()).unwrap());
        }
    }

    #[test]
    fn zeros_are_holes() {
        let mut store = MemoryStore::new();
        let mut bytes = vec![0; 4 << 20];
        bytes[2 << 20] = 1;
        let blob = Blob::write(&mut store, &mut &bytes[..]).unwrap();
        let file = tempfile::tempfile().unwrap();
        blob.copy_to_file(&store, &file).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 4 << 20);
        assert!(file.metadata().unwrap().blocks() * 512 <= 64 << 10);
        assert!(blob.reader(&store).unwrap().is_content_of(&file).unwrap());
        file.write_all_at(&[0], 2 << 20).unwrap();
        assert!(!blob.reader(&store).unwrap().is_content_of(&file).unwrap());
        file.write_all_at(&[1], 2 << 20).unwrap();
        assert!(blob.reader(&store).unwrap().is_content_of(&file).unwrap());
        file.write_all_at(&[1], 3 << 20).unwrap();
        assert!(!blob.reader(&store).unwrap().is_content_of(&file).unwrap());
        file.set_len(3 << 20).unwrap();
        assert!(!blob.reader(&store).unwrap().is_content_of(&file).unwrap());
    }

    #[test]
    fn a_size_that_is_not_true_allocates_nothing() {
        let store = MemoryStore::new();
        let blob = Blob { bytes: ByteCount::MAX, root: ContentId::ZERO };
        assert!(matches!(blob.read_all(&store), Err(error) if error.kind() == ErrorKind::TooLarge));
        let mut reader = blob.reader(&store).unwrap();
        assert_eq!(reader.seek(SeekFrom::End(-3)).unwrap(), u64::MAX - 3);
        assert_eq!(reader.read(&mut [1; 10]).unwrap(), 3);
        assert!(reader.seek(SeekFrom::Start(0)).is_ok() && reader.seek(SeekFrom::Current(-1)).is_err());
        assert_eq!(blob.diff(&Blob::EMPTY, &store).unwrap(), [Address::MIN..Address::MAX]);
        assert!(!blob.reader(&store).unwrap().is_content_of(&tempfile::tempfile().unwrap()).unwrap());
        assert!(
            matches!(blob.copy_to_file(&store, &tempfile::tempfile().unwrap()), Err(error) if error.kind() == ErrorKind::Stream)
        );
    }

    #[test]
    fn a_blob_is_stored_as_size_and_root() {
        let blob = Blob { bytes: ByteCount::new(5), root: ContentId([1; 16]) };
        let json = format!(r#"{{"size":5,"root":"{}"}}"#, blob.root);
        assert_eq!(serde_json::to_string(&blob).unwrap(), json);
        assert_eq!(serde_json::from_str::<Blob>(&json).unwrap(), blob);
    }

    proptest! {
        #[test]
        fn diff_finds_the_pages_that_differ(
            sizes in (0usize..40_000, 0usize..40_000),
            changes in prop::collection::vec((0usize..40_000, any::<u8>()), 0..6),
        ) {
            let mut store = MemoryStore::new();
            let a = content(sizes.0);
            let mut b = content(sizes.1);
            for (at, value) in changes {
                if let Some(byte) = b.get_mut(at) {
                    *byte = value;
                }
            }
            let blobs = [&a, &b].map(|content| Blob::write(&mut store, &mut &content[..]).unwrap());
            let ranges = blobs[0].diff(&blobs[1], &store).unwrap();
            prop_assert_eq!(&ranges, &blobs[1].diff(&blobs[0], &store).unwrap());
            prop_assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start));
            prop_assert!(ranges.iter().all(|range| !range.is_empty()));
            for page in (0..a.len().max(b.len())).step_by(PAGE_SIZE) {
                let touched = (page..page + PAGE_SIZE).any(|at| a.get(at) != b.get(at));
                for at in page..(page + PAGE_SIZE).min(a.len().max(b.len())) {
                    let within = ranges.iter().any(|range| range.contains(&Address::from(at)));
                    prop_assert!(within || a.get(at) == b.get(at), "byte {} differs", at);
                    prop_assert!(touched || !within, "byte {} does not differ", at);
                }
            }
            prop_assert!(ranges.iter().all(|range| range.end <= Address::from(a.len().max(b.len()))));
            prop_assert_eq!(ranges.is_empty(), blobs[0] == blobs[1]);
        }
    }
}
