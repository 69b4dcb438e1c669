//! Where content is held: each page once.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};

use crate::{ContentId, PAGE_SIZE};

/// What a piece of stored content is. It is part of the record, not of the id.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Kind {
    /// A page: exactly [`PAGE_SIZE`] bytes.
    Page,
    /// A node of a page tree.
    Node,
    /// The description of a checkpoint.
    Manifest,
}

/// Content by name: what was put is held once, however often it is put (same-page merging, SPM).
///
/// Implementations hold pages of zeros for free: they answer [`ContentId::ZERO`] without storing anything.
pub trait Store {
    /// Holds `content` and returns its id. Putting what is held already costs a hash and a look-up.
    ///
    /// # Errors
    /// [`StoreError::Io`] if it could not be written.
    fn put(&mut self, kind: Kind, content: &[u8]) -> Result<ContentId, StoreError>;

    /// The content of `id`, checked against the id.
    ///
    /// # Errors
    /// [`StoreError::Missing`] if the store does not hold it, [`StoreError::Damaged`] if what it holds is
    /// not what was put.
    fn get(&self, kind: Kind, id: ContentId) -> Result<Vec<u8>, StoreError>;

    /// Like [`Store::get`] for a page, into a buffer of [`PAGE_SIZE`] bytes. [`ContentId::ZERO`] gives zeros.
    ///
    /// # Errors
    /// As [`Store::get`].
    fn get_page(&self, id: ContentId, page: &mut [u8; PAGE_SIZE]) -> Result<(), StoreError>;
}

/// True for a page of zeros.
pub(crate) fn is_zero_page(content: &[u8]) -> bool {
    static ZEROS: [u8; PAGE_SIZE] = [0; PAGE_SIZE];
    content == ZEROS
}

/// A store in memory.
#[derive(Clone, Debug)]
pub struct MemoryStore {
    key: [u8; 32],
    content: HashMap<ContentId, Box<[u8]>>,
}

impl MemoryStore {
    /// An empty store with a key of its own.
    pub fn new() -> Self {
        let random = RandomState::new();
        let mut key = [0; 32];
        for (index, part) in key.chunks_mut(8).enumerate() {
            part.copy_from_slice(&random.hash_one(index).to_le_bytes());
        }
        Self::with_key(key)
    }

    /// An empty store with the given key: stores with the same key give the same content the same id.
    pub fn with_key(key: [u8; 32]) -> Self {
        MemoryStore { key, content: HashMap::new() }
    }

    /// How many pieces of content are held.
    pub fn content_count(&self) -> usize {
        self.content.len()
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl Store for MemoryStore {
    fn put(&mut self, kind: Kind, content: &[u8]) -> Result<ContentId, StoreError> {
        if kind == Kind::Page && is_zero_page(content) {
            return Ok(ContentId::ZERO);
        }
        let id = ContentId::of(&self.key, content);
        self.content.entry(id).or_insert_with(|| content.into());
        Ok(id)
    }

    fn get(&self, kind: Kind, id: ContentId) -> Result<Vec<u8>, StoreError> {
        if kind == Kind::Page && id.is_zero() {
            return Ok(vec![0; PAGE_SIZE]);
        }
        self.content.get(&id).map(|content| content.to_vec()).ok_or(StoreError::Missing { id })
    }

    fn get_page(&self, id: ContentId, page: &mut [u8; PAGE_SIZE]) -> Result<(), StoreError> {
        if id.is_zero() {
            page.fill(0);
            return Ok(());
        }
        let content = self.content.get(&id).ok_or(StoreError::Missing { id })?;
        *page = <[u8; PAGE_SIZE]>::try_from(&content[..])
            .map_err(|_| StoreError::Damaged { id, reason: format!("a page of {} bytes", content.len()) })?;
        Ok(())
    }
}

/// A store could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The content is not there.
    #[error("the store does not hold {id}")]
    Missing {
        /// What was asked for.
        id: ContentId,
    },
    /// The content is not what was put.
    #[error("{id} is damaged: {reason}")]
    Damaged {
        /// What was asked for.
        id: ContentId,
        /// How it was noticed.
        reason: String,
    },
    /// It was asked to hold more in one piece than it can.
    #[error("a piece of {bytes} bytes is more than a store holds in one piece, {limit_bytes} bytes")]
    TooLarge {
        /// What was put.
        bytes: usize,
        /// What can be.
        limit_bytes: usize,
    },
    /// It was opened to be read.
    #[error("the checkpoint was opened to be read: nothing can be put into it")]
    ReadOnly,
    /// An earlier write failed, so that what was put since the last commit is lost.
    #[error("an earlier write failed: the checkpoint cannot be completed")]
    Aborted,
    /// The storage below failed.
    #[error("{operation} {path}: {source}")]
    Io {
        /// What was being done, a verb.
        operation: &'static str,
        /// The file or directory.
        path: std::path::PathBuf,
        /// Why it failed.
        source: std::io::Error,
    },
}

impl StoreError {
    /// True if there was no room: a full disk, or a quota that is used up.
    pub fn is_disk_full(&self) -> bool {
        use std::io::ErrorKind::{QuotaExceeded, StorageFull};
        matches!(self, StoreError::Io { source, .. } if matches!(source.kind(), StorageFull | QuotaExceeded))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_content_is_held_once_and_zeros_not_at_all() {
        let mut store = MemoryStore::new();
        let mut page = [7; PAGE_SIZE];
        let id = store.put(Kind::Page, &page).unwrap();
        assert_eq!(store.put(Kind::Page, &page).unwrap(), id);
        assert_eq!(store.put(Kind::Page, &[0; PAGE_SIZE]).unwrap(), ContentId::ZERO);
        assert_eq!(store.content_count(), 1);
        assert_eq!(store.get(Kind::Page, id).unwrap(), page);
        store.get_page(ContentId::ZERO, &mut page).unwrap();
        assert_eq!(page, [0; PAGE_SIZE]);
        assert!(matches!(store.get(Kind::Page, ContentId([1; 16])), Err(StoreError::Missing { .. })));
    }

    #[test]
    fn a_piece_that_is_no_page_is_not_read_as_one() {
        let mut store = MemoryStore::new();
        let id = store.put(Kind::Manifest, b"{}").unwrap();
        assert!(matches!(store.get_page(id, &mut [0; PAGE_SIZE]), Err(StoreError::Damaged { .. })));
    }
}
