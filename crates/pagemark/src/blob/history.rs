//! Blobs that are written anew in each checkpoint of a sequence: the state of a target.

use std::collections::HashMap;
use std::io::Read;

use super::Blob;
use crate::{Error, PageTree, Store};

/// What the blobs of the last checkpoint held, by their names. A blob of the same name is stored as
/// what changed in its pages, where the store can do that ([`Store::put_changed`]).
///
/// A history is for one store. If the store may have discarded what was written, call
/// [`BlobHistory::forget`].
///
/// ```
/// use pagemark::MemoryStore;
/// use pagemark::blob::BlobHistory;
///
/// let (mut store, mut history) = (MemoryStore::new(), BlobHistory::default());
/// let first = history.write("registers", &mut store, &mut &b"rip 1"[..])?;
/// history.end_checkpoint();
/// let second = history.write("registers", &mut store, &mut &b"rip 2"[..])?;
/// assert_eq!(first.read_all(&store)?, b"rip 1");
/// assert_eq!(second.read_all(&store)?, b"rip 2");
/// # Ok::<(), pagemark::Error>(())
/// ```
#[derive(Default)]
pub struct BlobHistory {
    last: HashMap<String, PageTree>,
    /// Those of the checkpoint in progress.
    written: HashMap<String, PageTree>,
}

impl BlobHistory {
    /// Puts the whole content of `reader` into `store`.
    ///
    /// # Errors
    /// Those of [`Blob::write`].
    pub fn write(&mut self, name: &str, store: &mut dyn Store, reader: &mut dyn Read) -> Result<Blob, Error> {
        let mut tree = self.last.remove(name).unwrap_or_default();
        let blob = Blob::write_changed(store, reader, &mut tree)?;
        self.written.insert(name.to_owned(), tree);
        Ok(blob)
    }

    /// Ends a checkpoint. Blobs that it does not have are forgotten.
    pub fn end_checkpoint(&mut self) {
        self.last = std::mem::take(&mut self.written);
    }

    /// Forgets all: the next blobs are stored as new ones.
    pub fn forget(&mut self) {
        *self = BlobHistory::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ContentId, Kind, MemoryStore, PAGE_SIZE};

    /// Counts the pages that had content before.
    #[derive(Default)]
    struct Counting {
        store: MemoryStore,
        changed: Vec<ContentId>,
    }

    impl Store for Counting {
        fn put(&mut self, kind: Kind, content: &[u8]) -> Result<ContentId, Error> {
            self.store.put(kind, content)
        }

        fn put_changed(&mut self, last: ContentId, page: &[u8; PAGE_SIZE]) -> Result<ContentId, Error> {
            self.changed.push(last);
            self.store.put(Kind::Page, page)
        }

        fn get(&self, kind: Kind, id: ContentId) -> Result<Vec<u8>, Error> {
            self.store.get(kind, id)
        }

        fn get_page(&self, id: ContentId, page: &mut [u8; PAGE_SIZE]) -> Result<(), Error> {
            self.store.get_page(id, page)
        }
    }

    #[test]
    fn a_page_is_stored_with_what_it_was_in_the_last_checkpoint() {
        let (mut store, mut history) = (Counting::default(), BlobHistory::default());
        let mut content = vec![1; 3 * PAGE_SIZE + 100];
        let mut write = |history: &mut BlobHistory, name: &str, content: &[u8]| {
            let blob = history.write(name, &mut store, &mut &*content).unwrap();
            assert_eq!(blob.read_all(&store).unwrap(), content);
            // What has the same content is the same blob, whatever was written before.
            assert_eq!(blob, Blob::write(&mut store.store, &mut &*content).unwrap());
            std::mem::take(&mut store.changed)
        };
        assert_eq!(write(&mut history, "a", &content), [ContentId::ZERO; 4]);
        history.end_checkpoint();
        content[PAGE_SIZE] = 2;
        let last = write(&mut history, "a", &content);
        assert!(last.iter().all(|id| !id.is_zero()) && last.len() == 4, "{last:?}");
        assert_eq!(write(&mut history, "b", &content[..10]), [ContentId::ZERO]);
        history.end_checkpoint();
        // Shorter, and longer again.
        assert_eq!(write(&mut history, "a", &content[..PAGE_SIZE]).len(), 1);
        history.end_checkpoint();
        let last = write(&mut history, "a", &content);
        assert!(!last[0].is_zero() && last[1..].iter().all(|id| id.is_zero()), "{last:?}");
        assert_eq!(write(&mut history, "b", &content), [ContentId::ZERO; 4], "it was not in the last checkpoint");
        history.forget();
        assert_eq!(write(&mut history, "a", &content), [ContentId::ZERO; 4]);
    }
}
