//! Content of any length, held as pages: files and the like.

use std::io::{self, Read, Seek, SeekFrom};

use crate::{ContentId, Kind, PAGE_SIZE, PageTree, Store, StoreError};

/// The most that [`read_bytes`] reads at once.
const MAX_READ_BYTES: u64 = 1 << 30;

/// Content could not be stored.
#[derive(Debug, thiserror::Error)]
pub enum ContentError {
    /// What was to be stored could not be read.
    #[error("it could not be read: {0}")]
    Read(#[source] io::Error),
    /// It could not be put.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Puts everything that `reader` gives, page by page; the last is filled up with zeros. Returns how many bytes it were, and
/// the root of the page tree that names them. Pages of zeros cost nothing.
///
/// # Errors
/// Reading or putting failed.
pub fn store_bytes(store: &mut dyn Store, reader: &mut dyn Read) -> Result<(u64, ContentId), ContentError> {
    let mut tree = PageTree::new();
    let mut size = 0;
    let mut buffer = vec![0; 64 * PAGE_SIZE];
    loop {
        let mut filled = 0;
        while filled < buffer.len() {
            match reader.read(&mut buffer[filled..]) {
                Ok(0) => break,
                Ok(bytes) => filled += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(ContentError::Read(error)),
            }
        }
        let padded = filled.next_multiple_of(PAGE_SIZE);
        buffer[filled..padded].fill(0);
        for (number, page) in buffer[..padded].chunks_exact(PAGE_SIZE).enumerate() {
            tree.set(size / PAGE_SIZE as u64 + number as u64, store.put(Kind::Page, page)?);
        }
        size += filled as u64;
        if filled < buffer.len() {
            return Ok((size, tree.save(store)?));
        }
    }
}

/// Reads all of what [`store_bytes`] put. For what may be large there is [`ContentReader`].
///
/// # Errors
/// [`StoreError::TooLarge`] for more than 1 GiB, and what [`Store::get`] gives.
pub fn read_bytes(store: &dyn Store, root: ContentId, size: u64) -> Result<Vec<u8>, StoreError> {
    if size > MAX_READ_BYTES {
        return Err(StoreError::TooLarge { bytes: size as usize, limit_bytes: MAX_READ_BYTES as usize });
    }
    let mut bytes = vec![0; (size as usize).next_multiple_of(PAGE_SIZE)];
    let tree = PageTree::load(root, store)?;
    for (number, id) in tree.range(0..(bytes.len() / PAGE_SIZE) as u64) {
        let at = number as usize * PAGE_SIZE;
        if let Some(page) = bytes[at..].first_chunk_mut() {
            store.get_page(id, page)?;
        }
    }
    bytes.truncate(size as usize);
    Ok(bytes)
}

/// Reads what [`store_bytes`] put, from the beginning or from anywhere, one page in memory.
pub struct ContentReader<'a> {
    store: &'a dyn Store,
    tree: PageTree,
    size: u64,
    position: u64,
    page: Box<[u8; PAGE_SIZE]>,
    /// The number of the page that `page` holds.
    loaded: Option<u64>,
}

impl<'a> ContentReader<'a> {
    /// Begins at the beginning.
    ///
    /// # Errors
    /// As [`PageTree::load`].
    pub fn new(store: &'a dyn Store, root: ContentId, size: u64) -> Result<Self, StoreError> {
        let tree = PageTree::load(root, store)?;
        Ok(ContentReader { store, tree, size, position: 0, page: Box::new([0; PAGE_SIZE]), loaded: None })
    }
}

impl Read for ContentReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.size.saturating_sub(self.position);
        if left == 0 || buffer.is_empty() {
            return Ok(0);
        }
        let number = self.position / PAGE_SIZE as u64;
        if self.loaded != Some(number) {
            self.loaded = None;
            self.store.get_page(self.tree.get(number), &mut self.page).map_err(io::Error::other)?;
            self.loaded = Some(number);
        }
        let from = (self.position % PAGE_SIZE as u64) as usize;
        let bytes = buffer.len().min(PAGE_SIZE - from).min(usize::try_from(left).unwrap_or(usize::MAX));
        buffer[..bytes].copy_from_slice(&self.page[from..from + bytes]);
        self.position += bytes as u64;
        Ok(bytes)
    }
}

impl Seek for ContentReader<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let position = match to {
            SeekFrom::Start(position) => Some(position),
            SeekFrom::End(offset) => self.size.checked_add_signed(offset),
            SeekFrom::Current(offset) => self.position.checked_add_signed(offset),
        };
        self.position = position.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.position)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryStore;

    #[test]
    fn what_was_stored_is_read_whole_and_in_parts() {
        let mut store = MemoryStore::new();
        for size in [0, 1, PAGE_SIZE - 1, PAGE_SIZE, 64 * PAGE_SIZE, 64 * PAGE_SIZE + 1, 300_000] {
            let bytes: Vec<u8> = (0..size).map(|at| if at / PAGE_SIZE % 3 == 1 { 0 } else { (at / 7) as u8 }).collect();
            let (stored, root) = store_bytes(&mut store, &mut &bytes[..]).unwrap();
            assert_eq!(stored, size as u64);
            assert_eq!(read_bytes(&store, root, stored).unwrap(), bytes);
            let mut reader = ContentReader::new(&store, root, stored).unwrap();
            let mut read = Vec::new();
            reader.read_to_end(&mut read).unwrap();
            assert_eq!(read, bytes);
            for start in [0, size / 3, size.saturating_sub(5), size + 10] {
                reader.seek(SeekFrom::Start(start as u64)).unwrap();
                read.clear();
                reader.by_ref().take(5000).read_to_end(&mut read).unwrap();
                assert_eq!(read, bytes[start.min(size)..size.min(start + 5000).max(start.min(size))]);
            }
        }
    }

    #[test]
    fn a_size_that_is_not_true_allocates_nothing() {
        let store = MemoryStore::new();
        assert!(matches!(read_bytes(&store, ContentId::ZERO, u64::MAX), Err(StoreError::TooLarge { .. })));
        let mut reader = ContentReader::new(&store, ContentId::ZERO, u64::MAX).unwrap();
        assert_eq!(reader.seek(SeekFrom::End(-3)).unwrap(), u64::MAX - 3);
        assert_eq!(reader.read(&mut [1; 10]).unwrap(), 3);
        assert!(reader.seek(SeekFrom::Start(0)).is_ok() && reader.seek(SeekFrom::Current(-1)).is_err());
    }
}
