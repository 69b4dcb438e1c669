//! How the repository in a directory is opened or created.

use std::path::Path;
use std::sync::Arc;

use super::format::{CHECKPOINTS, CONFIG, CONFIG_COPY, INDEXES, PACKS};
use super::{Repository, is_own_name, not_empty};
use crate::backend::{Exposure, LocalBackend};
use crate::error::{Error, ErrorKind};

/// Options to open or create the repository in a directory.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("repository");
/// use pagemark::repository::RepositoryOptions;
///
/// let repository = RepositoryOptions::default().trusted(true).open_or_create(&path)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RepositoryOptions {
    is_trusted: bool,
    stores_whole_pages: bool,
}

impl RepositoryOptions {
    /// Opens the repository although other users can change it: the directory belongs to a user
    /// that is neither this one nor root, or its mode lets others write it. Whoever can change a
    /// repository decides which programs and files a restore from it brings back. By default such
    /// a repository is refused.
    pub fn trusted(mut self, is_trusted: bool) -> Self {
        self.is_trusted = is_trusted;
        self
    }

    /// Stores each page whole, never as what changed in it since an earlier checkpoint. A delta
    /// saves room and writes; its page takes one more read. Versions of Pagemark that do not know
    /// deltas refuse a repository as soon as it has one.
    pub fn whole_pages(mut self, stores_whole_pages: bool) -> Self {
        self.stores_whole_pages = stores_whole_pages;
        self
    }

    pub(super) fn stores_whole_pages(&self) -> bool {
        self.stores_whole_pages
    }

    /// Opens the repository.
    ///
    /// # Errors
    /// [`ErrorKind::NotARepository`], [`ErrorKind::NewerFormat`],
    /// [`ErrorKind::Exposed`], or that it could not be read.
    pub fn open(&self, path: &Path) -> Result<Repository, Error> {
        let backend = LocalBackend::new(path)?;
        let exposure = backend.exposure(&[CONFIG, CONFIG_COPY, PACKS, INDEXES, CHECKPOINTS])?;
        self.check(exposure.as_ref())?;
        Repository::on_exposed(Arc::new(backend), exposure, *self)
    }

    /// Makes a repository in a directory that is not there, or is empty, and makes the directory
    /// its owner's alone.
    ///
    /// # Errors
    /// [`ErrorKind::Exists`], [`ErrorKind::NotEmpty`], [`ErrorKind::Exposed`], or
    /// that it could not be written.
    pub fn create(&self, path: &Path) -> Result<Repository, Error> {
        if !LocalBackend::names_in(path)?.iter().all(|name| is_own_name(name)) {
            return Err(not_empty(path));
        }
        // The mode of a directory of this user's own is about to change.
        let exposure = LocalBackend::new(path)?.exposure(&[])?;
        self.check(exposure.as_ref().filter(|exposure| matches!(exposure, Exposure::ForeignOwner { .. })))?;
        let backend = LocalBackend::create_directory(path)?;
        self.check(backend.exposure(&[])?.as_ref())?;
        Repository::create_with(Arc::new(backend), *self)
    }

    /// Opens the repository, or makes one where there is none.
    ///
    /// # Errors
    /// Those of [`RepositoryOptions::open`] and [`RepositoryOptions::create`].
    pub fn open_or_create(&self, path: &Path) -> Result<Repository, Error> {
        match self.open(path) {
            Err(error) if error.kind() == ErrorKind::NotARepository => match self.create(path) {
                // Another process has created it meanwhile.
                Err(error) if error.kind() == ErrorKind::Exists => self.open(path),
                created => created,
            },
            opened => opened,
        }
    }

    fn check(&self, exposure: Option<&Exposure>) -> Result<(), Error> {
        match exposure {
            Some(exposure) if !self.is_trusted => {
                let reason = format!("other users can change the repository: {exposure}");
                Err(Error::because(ErrorKind::Exposed, reason))
            }
            _ => Ok(()),
        }
    }
}
