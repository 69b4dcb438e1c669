//! Registers the mappings of another process with its userfaultfd, for the trackers of its parts.
//!
//! Registering a part of a mapping splits it, and a process that then resizes what it knows as one
//! mapping gets an error. The mappings of a running process may change between reading their list
//! and registering them. They are therefore registered only while the process is stopped. Until
//! then, a collect reports nothing of a mapping that is not registered: the collect in the next
//! stop reports all of it that holds data. That also keeps memory of an unknown kind from being
//! copied: only registering shows that a mapping is droppable.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use pagemark_linux::pagemap::{Filter, Pagemap, WP_ALLOWED, WRITTEN};
use pagemark_linux::userfaultfd::Userfaultfd;

use super::populated::Pages;
use crate::{Error, Range, RangeSet};

/// The registered mappings of a process.
#[derive(Debug)]
pub struct Registration {
    userfaultfd: Arc<Userfaultfd>,
    pagemap: Arc<Pagemap>,
    has_registered: AtomicBool,
    left_pages: AtomicU64,
}

/// The kernel did not register a mapping.
#[derive(Debug, thiserror::Error)]
pub enum RegistrationError {
    /// Another userfaultfd has the mapping.
    #[error("another userfaultfd has the mapping {:x}-{:x}", .0.start, .0.end)]
    Taken(Range),
    /// Anything else.
    #[error(transparent)]
    Track(#[from] Error),
}

impl Registration {
    /// For the process in which `userfaultfd` was made, and whose pagemap is `pagemap`.
    pub fn new(userfaultfd: Arc<Userfaultfd>, pagemap: Arc<Pagemap>) -> Registration {
        Registration { userfaultfd, pagemap, has_registered: AtomicBool::new(false), left_pages: AtomicU64::new(0) }
    }

    /// Registers all of `mappings`, which are whole mappings in ascending order, of a process that
    /// is stopped. Pages of mappings that were not registered before count as written from now on.
    /// Returns the mappings that the kernel does not register with any userfaultfd.
    ///
    /// # Errors
    /// [`RegistrationError`]; some mappings may be registered.
    pub fn register(&self, mappings: &[Range]) -> Result<RangeSet, RegistrationError> {
        let mut refused = RangeSet::new();
        let may_be_moved = self.has_registered.swap(true, Ordering::Relaxed);
        for run in mappings.chunk_by(|one, next| one.end == next.start) {
            let (Some(first), Some(last)) = (run.first(), run.last()) else { continue };
            let range = first.start..last.end;
            let marked = if may_be_moved { self.marked_unregistered(&range)? } else { RangeSet::new() };
            if !self.register_range(&range)? {
                for mapping in run {
                    if !self.register_range(mapping)? {
                        refused.insert(mapping.clone());
                    }
                }
            }
            for pages in marked.iter() {
                match self.userfaultfd.write_protect(&pages, false) {
                    // The mapping was refused.
                    Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
                    other => {
                        other.map_err(|error| Error::while_tracking(error, || format!("unprotecting {pages:#x?}")))?
                    }
                }
            }
        }
        self.left_pages.store(0, Ordering::Relaxed);
        Ok(refused)
    }

    /// Registers a range of whole mappings. False if the kernel refuses any of them.
    fn register_range(&self, range: &Range) -> Result<bool, RegistrationError> {
        match self.userfaultfd.register(range) {
            Ok(()) => Ok(true),
            Err(error) => match error.raw_os_error() {
                Some(libc::EBUSY) => Err(RegistrationError::Taken(range.clone())),
                Some(libc::EINVAL | libc::EPERM) => Ok(false),
                _ => Err(Error::while_tracking(error, || format!("registering {range:#x?}")).into()),
            },
        }
    }

    /// The pages of `range` that have a protection marker although their mappings are not
    /// registered. A kernel before 6.13 leaves the markers on pages that mremap moved, although the
    /// pages may be writable. A write to such a page would not be reported.
    fn marked_unregistered(&self, range: &Range) -> Result<RangeSet, Error> {
        let mut pages = RangeSet::new();
        let filter = Filter { none: WP_ALLOWED | WRITTEN, ..Pages::All.filter() };
        let scanned = self.pagemap.scan(range, filter, |run, _| pages.insert(run));
        scanned.map_err(|error| Error::while_tracking(error, || format!("scanning the pages of {range:#x?}")))?;
        Ok(pages)
    }

    /// Counts pages that a collect has left out because their mappings are not registered.
    pub(super) fn leave(&self, pages: u64) {
        self.left_pages.fetch_add(pages, Ordering::Relaxed);
    }

    /// Number of pages that were left out since the last call because their mappings are not
    /// registered.
    pub fn take_left_pages(&self) -> u64 {
        self.left_pages.swap(0, Ordering::Relaxed)
    }
}
