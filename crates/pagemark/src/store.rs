//! Where content is held: each page once.

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
