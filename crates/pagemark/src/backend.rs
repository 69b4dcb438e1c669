//! Storage below a repository: objects with names, published whole.
//!
//! The repository keeps its promises on any [`Backend`]: [`LocalBackend`] is a directory,
//! [`MemoryBackend`] is for tests and for checkpoints that need not outlive the process. The trait
//! asks only for what an object store can do as well, so it has no rename, no file lock and no
//! modification time. [`conformance`] tests the rules that are stated here.
//!
//! **Names** consist of one or more parts separated by `/`. [`check_name`] says which are valid.
//! `directory` in a method is the empty string or the parts before the last. A directory exists as
//! long as an object in it does; a backend may keep an empty one.
//!
//! **Publication**: a new object is *staged* while it is written: nobody but its writer can see it.
//! [`NewObject::publish`] makes it visible with its whole content. It replaces an object of that
//! name, in one step.
//!
//! **Durability**: after a crash of the machine, an object that was published is there with its
//! whole content or not at all, and one that was removed may be there again, until
//! [`Backend::sync`] of its directory has returned. Of the publications and removals in one
//! directory, a crash undoes the last ones, in any number.
//!
//! **Leases**: a lease on a name ([`Backend::lease`]) is held by one holder alone or is shared.
//! What each name protects, the repository decides; the backend knows no objects of these names. A
//! reader has a lease on the object whose removal would hurt it. A lease ends
//! when it is dropped, and when its process dies: the backend may need some time to notice that. A
//! backend that cannot notice gives a lease a term and extends it while it is held; a holder that
//! was suspended for longer has lost it, so that [`Lease::check`] fails. The repository calls it
//! before each step that others must not see half done.

pub mod conformance;
mod directory;
pub mod faults;
mod local;
mod memory;

use std::io;
use std::path::Path;
use std::sync::Arc;

pub use directory::Exposure;
pub use local::LocalBackend;
pub use memory::MemoryBackend;

/// Storage for objects. See the [module](self) for the rules that hold for all methods.
pub trait Backend: Send + Sync {
    /// Where the objects are, for messages: a directory or a URL.
    fn location(&self) -> &Path;

    /// Makes directories, if the backend has such. Called when a repository is created.
    ///
    /// # Errors
    /// The storage failed.
    fn prepare(&self, directories: &[&str]) -> Result<(), BackendError>;

    /// Lists what is in a directory, in any order; nothing if it does not exist.
    /// An object that is published or removed meanwhile may be missing or not, all others are
    /// there. Staged objects are not listed.
    ///
    /// # Errors
    /// The storage failed.
    fn list(&self, directory: &str) -> Result<Vec<ListEntry>, BackendError>;

    /// A value that is another one after an object was published in or removed from the directory.
    /// None if the backend cannot tell, or not at this moment: then the directory has to be
    /// listed.
    fn stamp(&self, directory: &str) -> Option<Stamp>;

    /// Length of an object in bytes; none if it does not exist.
    ///
    /// # Errors
    /// The storage failed.
    fn bytes(&self, name: &str) -> Result<Option<u64>, BackendError>;

    /// Opens an object to read it; none if it does not exist.
    ///
    /// # Errors
    /// The storage failed.
    fn open(&self, name: &str) -> Result<Option<Arc<dyn Object>>, BackendError>;

    /// Begins to write an object. Staged content that a dead writer left under this name is
    /// discarded.
    ///
    /// # Errors
    /// The storage failed.
    fn create(&self, name: &str) -> Result<Box<dyn NewObject>, BackendError>;

    /// Removes an object. If it does not exist, nothing happens. Who has it open can go on reading,
    /// or gets an error of the kind `NotFound`.
    ///
    /// # Errors
    /// The storage failed.
    fn remove(&self, name: &str) -> Result<(), BackendError>;

    /// Makes durable what was published in and removed from a directory before.
    ///
    /// # Errors
    /// The storage failed. Nothing is known about what is durable then.
    fn sync(&self, directory: &str) -> Result<(), BackendError>;

    /// Discards what dead writers left staged, in all directories. Only while nobody else writes:
    /// what living writers have staged is discarded as well.
    ///
    /// # Errors
    /// The storage failed.
    fn discard_staged(&self) -> Result<(), BackendError>;

    /// Tries to take the lease `name`, without waiting: alone, or shared with others who share it.
    /// `owner` says who holds it, for those who do not get it. [`check_lease`] says which names are
    /// valid.
    ///
    /// # Errors
    /// The storage failed. That another holds the lease is no error.
    fn lease(&self, name: &str, mode: LeaseMode, owner: &str) -> Result<Leased, BackendError>;

    /// Takes a reader's lease on an object, which any number of readers can have. Waits for a
    /// removal that is under way. None if the object does not exist.
    ///
    /// # Errors
    /// The storage failed.
    fn lease_reader(&self, name: &str) -> Result<Option<Box<dyn Lease>>, BackendError>;

    /// Removes an object unless a reader has a lease on it. False if one has.
    ///
    /// # Errors
    /// The storage failed.
    fn remove_unleased(&self, name: &str) -> Result<bool, BackendError>;
}

/// Content that can be read at any offset.
pub trait ReadAt {
    /// Fills `buffer` with what begins at `offset`.
    ///
    /// # Errors
    /// The content ends before that (kind `UnexpectedEof`), the object was removed (kind
    /// `NotFound`), or the storage failed.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), BackendError>;
}

/// An object that can be read. Its content never changes.
pub trait Object: ReadAt + Send + Sync {
    /// Length in bytes.
    ///
    /// # Errors
    /// The object was removed (kind `NotFound`), or the storage failed.
    fn bytes(&self) -> Result<u64, BackendError>;

    /// Announces that `bytes` bytes from `offset` on will be read soon, so that the storage can
    /// read them in advance. Does not wait. A backend may ignore it.
    fn read_ahead(&self, offset: u64, bytes: u64) {
        let _ = (offset, bytes);
    }
}

/// An object that is being written, from its beginning to its end. Dropping it discards what is
/// staged, if it was not published. What was appended can be read.
pub trait NewObject: ReadAt + Send {
    /// Bytes appended so far.
    fn bytes(&self) -> u64;

    /// Appends all of `parts`. After a failure the object can only be dropped.
    ///
    /// # Errors
    /// The storage failed, or is full.
    fn append(&mut self, parts: &[&[u8]]) -> Result<(), BackendError>;

    /// Says that what is appended from now on is read soon.
    ///
    /// # Errors
    /// The storage failed.
    fn expect_reads(&mut self) -> Result<(), BackendError> {
        Ok(())
    }

    /// Ends the content, and gives the object to read from, before and after the publication.
    ///
    /// # Errors
    /// The storage failed, or is full.
    fn finish(&mut self) -> Result<Arc<dyn Object>, BackendError>;

    /// Makes the content durable, though not yet the name. [`NewObject::publish`] does it too;
    /// several objects can be published sooner one after the other if their content is durable
    /// already.
    ///
    /// # Errors
    /// The storage failed, or is full.
    fn sync(&mut self) -> Result<(), BackendError>;

    /// Makes the object visible under its name, whole. The name is durable after [`Backend::sync`]
    /// of its directory.
    ///
    /// # Errors
    /// The storage failed. The object may be visible then.
    fn publish(self: Box<Self>) -> Result<(), BackendError>;
}

/// A lease, held until it is dropped.
pub trait Lease: Send + Sync {
    /// Makes sure that the lease is still held.
    ///
    /// # Errors
    /// It was lost, or the storage failed so that this is unknown.
    fn check(&self) -> Result<(), BackendError>;

    /// Shows those who wait for the lease that its holder goes on: [`Leased::Held::stamp`] changes.
    fn show_progress(&self) {}
}

/// Who else can have a lease at the same time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LeaseMode {
    /// Other holders that share it.
    Shared,
    /// No other holder.
    Alone,
}

/// What [`Backend::lease`] gives.
pub enum Leased {
    /// The lease.
    Granted(Box<dyn Lease>),
    /// Another holds it.
    Held {
        /// What the one who got it last gave as `owner`; empty if that is unknown.
        owner: String,
        /// Another value after a holder has shown progress.
        stamp: u128,
    },
}

/// An entry of a list.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ListEntry {
    /// The last part of the name.
    pub name: String,
    /// What has the name.
    pub kind: ListKind,
}

/// What has a name in a list.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum ListKind {
    /// An object.
    Object,
    /// A directory.
    Directory,
    /// Something that the storage did not make, such as a FIFO: opening it fails.
    Other,
}

/// Compares equal as long as a directory did not change. See [`Backend::stamp`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stamp(pub u128);

/// Storage could not do what was asked.
#[derive(Debug, thiserror::Error)]
#[error("{operation} {object}: {source}")]
pub struct BackendError {
    /// What was being done, a verb.
    pub operation: &'static str,
    /// The object or directory, as people find it.
    pub object: String,
    /// Why it failed.
    pub source: io::Error,
}

impl BackendError {
    /// For `map_err`: `operation` on `object` failed.
    pub fn new(operation: &'static str, object: impl Into<String>) -> impl FnOnce(io::Error) -> BackendError {
        let object = object.into();
        move |source| BackendError { operation, object, source }
    }

    /// True if the object does not exist.
    pub fn is_not_found(&self) -> bool {
        self.source.kind() == io::ErrorKind::NotFound
    }

    /// True if something else has the object's name, such as a FIFO or a symbolic link.
    pub fn is_no_object(&self) -> bool {
        self.source.kind() == io::ErrorKind::InvalidInput
    }

    /// True if the storage is not at its location any more: the directory was moved, removed or
    /// replaced since it was opened.
    pub fn is_displaced(&self) -> bool {
        self.source.kind() == io::ErrorKind::StaleNetworkFileHandle
    }

    /// True if there was no room: a full disk, or a quota that is used up.
    pub fn is_full(&self) -> bool {
        matches!(self.source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
    }
}

/// Longest part of a name, in bytes.
const MAX_PART_BYTES: usize = 240;

/// Checks that a name is valid: 1 to 240 bytes of UTF-8 in each part, none of them zero, no part
/// `.` or `..`, none that ends in `.tmp`, and the first one neither `lock` nor `locks`: those are
/// for the backend's own use.
///
/// # Errors
/// The kind is `InvalidInput`.
pub fn check_name(name: &str) -> io::Result<()> {
    let is_valid = |part: &str| {
        (1..=MAX_PART_BYTES).contains(&part.len())
            && part != "."
            && part != ".."
            && !part.contains('\0')
            && !part.ends_with(".tmp")
    };
    let is_own = matches!(name.split('/').next(), Some("lock" | "locks"));
    match !is_own && name.split('/').all(is_valid) {
        true => Ok(()),
        false => Err(io::Error::new(io::ErrorKind::InvalidInput, "this is not a valid name of an object")),
    }
}

/// Checks that a lease can have the name: 1 to 240 letters, digits, `.`, `_` and `-`, which does
/// not begin with `.`.
///
/// # Errors
/// The kind is `InvalidInput`.
pub fn check_lease(name: &str) -> io::Result<()> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    match (1..=MAX_PART_BYTES).contains(&name.len()) && !name.starts_with('.') && name.bytes().all(allowed) {
        true => Ok(()),
        false => Err(io::Error::new(io::ErrorKind::InvalidInput, "this is not a valid name of a lease")),
    }
}

/// The directory that an object is in: the name without its last part.
pub fn directory_of(name: &str) -> &str {
    name.rsplit_once('/').map_or("", |(directory, _)| directory)
}
