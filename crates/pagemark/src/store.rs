//! Stores of content, which hold each page once.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::ops::{ControlFlow, Range};

use crate::id::pages::is_zero_page;
use crate::{ContentId, Error, ErrorKind, PAGE_SIZE};

/// The kind of a piece of content. It is part of the stored record, not of the id.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Kind {
    /// A page: exactly [`PAGE_SIZE`] bytes.
    Page,
    /// A node of a page tree.
    Node,
    /// The description of a checkpoint.
    Manifest,
}

/// Content by id: each piece is held once, however often it is put (same-page merging, SPM).
///
/// A store holds content. The store of a repository writes objects to a
/// [`Backend`](crate::backend::Backend).
///
/// Implementations return [`ContentId::ZERO`] for a page of zeros and store nothing.
pub trait Store {
    /// Holds `content` and returns its id. For content that the store already holds, the cost is a
    /// hash and a look-up.
    ///
    /// # Errors
    /// [`ErrorKind::Storage`] if the content could not be written.
    fn put(&mut self, kind: Kind, content: &[u8]) -> Result<ContentId, Error>;

    /// Holds a page whose content was `last` in an earlier checkpoint, and returns its id. A store
    /// may hold only what changed in it. `last` need not be held any more.
    ///
    /// # Errors
    /// Those of [`Store::put`].
    fn put_changed(&mut self, last: ContentId, page: &[u8; PAGE_SIZE]) -> Result<ContentId, Error> {
        let _ = last;
        self.put(Kind::Page, page)
    }

    /// Like [`Store::put_changed`] for many pages. Returns their ids in the same order. A store may
    /// do more of the work at once.
    ///
    /// # Errors
    /// Those of [`Store::put`]. Some of the pages may have been put before.
    fn put_changed_pages(&mut self, pages: &[ChangedPage<'_>]) -> Result<Vec<ContentId>, Error> {
        pages.iter().map(|page| self.put_changed(page.last, page.content)).collect()
    }

    /// The content of `id`, checked against the id.
    ///
    /// # Errors
    /// [`ErrorKind::Missing`] if the store does not hold the content, [`ErrorKind::Damaged`] if
    /// the bytes do not match the id.
    fn get(&self, kind: Kind, id: ContentId) -> Result<Vec<u8>, Error>;

    /// Like [`Store::get`] for a page, into a buffer of [`PAGE_SIZE`] bytes. [`ContentId::ZERO`]
    /// gives zeros.
    ///
    /// # Errors
    /// Those of [`Store::get`].
    fn get_page(&self, id: ContentId, page: &mut [u8; PAGE_SIZE]) -> Result<(), Error>;

    /// Reads many pieces of one kind, and passes them to `visit` in the order that is fastest for
    /// the store, several at once. A store may call `visit` in several threads at a time. Every
    /// piece was checked against its id. The content of an id that `ids` has several times may be
    /// read once. If `visit` breaks, the read ends early, without an error.
    ///
    /// # Errors
    /// Those of [`Store::get`]. Pieces may have been visited before.
    ///
    /// ```
    /// use std::ops::ControlFlow;
    /// use std::sync::Mutex;
    /// use pagemark::{Kind, MemoryStore, PAGE_SIZE, Store};
    ///
    /// let mut store = MemoryStore::new();
    /// let ids = [store.put(Kind::Page, &[1; PAGE_SIZE])?, store.put(Kind::Page, &[2; PAGE_SIZE])?];
    /// let first_bytes = Mutex::new([0; 2]);
    /// store.get_many(Kind::Page, &ids, &|pieces, content| {
    ///     for piece in pieces {
    ///         first_bytes.lock().unwrap()[piece.position] = content[piece.bytes.start];
    ///     }
    ///     ControlFlow::Continue(())
    /// })?;
    /// assert_eq!(*first_bytes.lock().unwrap(), [1, 2]);
    /// # Ok::<(), pagemark::Error>(())
    /// ```
    fn get_many(&self, kind: Kind, ids: &[ContentId], visit: Visit<'_>) -> Result<(), Error> {
        for (position, &id) in ids.iter().enumerate() {
            let content = self.get(kind, id)?;
            if visit(&[Piece { position, bytes: 0..content.len() }], &content).is_break() {
                break;
            }
        }
        Ok(())
    }
}

/// A page that [`Store::put_changed_pages`] holds.
#[derive(Clone, Copy, Debug)]
pub struct ChangedPage<'a> {
    /// The content that it had in an earlier checkpoint.
    pub last: ContentId,
    /// Its content now.
    pub content: &'a [u8; PAGE_SIZE],
}

/// A piece of content that [`Store::get_many`] has read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Piece {
    /// The position of its id among those that were asked for.
    pub position: usize,
    /// The part of the content that is this piece. Several pieces may be the same part.
    pub bytes: Range<usize>,
}

/// Takes pieces that [`Store::get_many`] has read, and their content.
pub type Visit<'a> = &'a (dyn Fn(&[Piece], &[u8]) -> ControlFlow<()> + Sync);

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

    /// An empty store with the given key: stores with the same key give the same content the same
    /// id.
    pub fn with_key(key: [u8; 32]) -> Self {
        MemoryStore { key, content: HashMap::new() }
    }

    /// Number of pieces of content.
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
    fn put(&mut self, kind: Kind, content: &[u8]) -> Result<ContentId, Error> {
        if kind == Kind::Page && is_zero_page(content) {
            return Ok(ContentId::ZERO);
        }
        let id = ContentId::of(&self.key, content);
        self.content.entry(id).or_insert_with(|| content.into());
        Ok(id)
    }

    fn get(&self, kind: Kind, id: ContentId) -> Result<Vec<u8>, Error> {
        if kind == Kind::Page && id.is_zero() {
            return Ok(vec![0; PAGE_SIZE]);
        }
        self.content.get(&id).map(|content| content.to_vec()).ok_or_else(|| Error::missing(id))
    }

    fn get_page(&self, id: ContentId, page: &mut [u8; PAGE_SIZE]) -> Result<(), Error> {
        if id.is_zero() {
            page.fill(0);
            return Ok(());
        }
        let content = self.content.get(&id).ok_or_else(|| Error::missing(id))?;
        *page = <[u8; PAGE_SIZE]>::try_from(&content[..])
            .map_err(|_| Error::damaged_content(id, format!("a page of {} bytes", content.len())))?;
        Ok(())
    }
}

impl Error {
    /// Content that is longer than a store holds in one piece.
    pub(crate) fn too_large(bytes: usize, limit_bytes: usize) -> Error {
        let reason = format!("a piece of {bytes} bytes is more than a store holds in one piece, {limit_bytes} bytes");
        Error::because(ErrorKind::TooLarge, reason)
    }

    /// A store of which content is only read.
    pub(crate) fn read_only() -> Error {
        let reason = "the checkpoint was opened for reading: content cannot be put into it";
        Error::because(ErrorKind::ReadOnly, reason)
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
        assert!(matches!(store.get(Kind::Page, ContentId([1; 16])), Err(error) if error.kind() == ErrorKind::Missing));
    }

    #[test]
    fn a_piece_that_is_no_page_is_not_read_as_one() {
        let mut store = MemoryStore::new();
        let id = store.put(Kind::Manifest, b"{}").unwrap();
        assert!(matches!(store.get_page(id, &mut [0; PAGE_SIZE]), Err(error) if error.kind() == ErrorKind::Damaged));
    }
}
