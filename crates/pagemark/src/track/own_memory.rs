//! Memory of this process that trackers of regions may track.

use std::ptr::NonNull;

use pagemark_linux::own_mappings::{self, OwnMapping};
use pagemark_linux::pagemap::Pagemap;

use super::populated::DataPages;
use crate::error::{Error, ErrorKind, Object};
use crate::{AddressRangeExt, ByteCount, PAGE_SIZE, Range, RangeSet};

/// Memory of this process, which its owner permits to be tracked.
///
/// Trackers write-protect memory, replace mappings and unprotect memory when they are dropped. They
/// do so to memory of this type only, so that safe code cannot have the memory of other code
/// tracked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OwnMemory {
    range: Range,
    /// The part that is not private anonymous memory. There, a page that the page table does not
    /// have may hold data: in the page cache, in a file, or in swap.
    backed: RangeSet,
    /// The part that is shared memory.
    shared: RangeSet,
    page_bytes: ByteCount,
    has_sole_use: bool,
}

impl OwnMemory {
    /// The memory at `range`, with the kinds of its mappings.
    ///
    /// # Errors
    /// `/proc` is not mounted.
    ///
    /// # Safety
    /// `range` consists of whole pages (of hugetlb: huge pages) that are mapped, readable and
    /// writable, not executable, and within the ends of their files. As long as this value or a
    /// tracker that was made with a clone of it exists, no other code changes the mappings or their
    /// protection, or shortens their files. No other code accesses the memory while a tracker of
    /// `emulate` collects it for the first time. While a tracker of `compare` collects, other
    /// threads write the memory only by atomic operations, or in ways that the compiler does not
    /// see.
    pub unsafe fn new(range: Range) -> Result<OwnMemory, Error> {
        let mappings = own_mappings::describe(&range).map_err(Error::system("reading /proc/self/maps"))?;
        // SAFETY: the caller guarantees it.
        Ok(unsafe { OwnMemory::of_mappings(range, &mappings) })
    }

    /// Like [`OwnMemory::new`]; `mappings` are those of the range.
    ///
    /// # Safety
    /// Those of [`OwnMemory::new`].
    pub(crate) unsafe fn of_mappings(range: Range, mappings: &[OwnMapping]) -> OwnMemory {
        let parts = |belongs: fn(&OwnMapping) -> bool| -> RangeSet {
            let parts = mappings.iter().filter(|mapping| belongs(mapping)).map(|mapping| mapping.range.overlap(&range));
            parts.filter(|part| !part.is_empty()).collect()
        };
        let (backed, shared) = (parts(|mapping| !mapping.is_private_anonymous()), parts(|mapping| mapping.is_shared));
        let page_bytes = mappings.iter().map(|mapping| mapping.page_bytes).max().unwrap_or(ByteCount::PAGE);
        OwnMemory { range, backed, shared, page_bytes, has_sole_use: false }
    }

    /// Private anonymous memory.
    ///
    /// # Safety
    /// Those of [`OwnMemory::new`], and the memory is private and anonymous.
    pub(crate) unsafe fn anonymous(range: Range) -> OwnMemory {
        let (backed, shared) = (RangeSet::new(), RangeSet::new());
        OwnMemory { range, backed, shared, page_bytes: ByteCount::PAGE, has_sole_use: false }
    }

    /// The same memory, with or without the promise that only threads of this process write it.
    #[must_use]
    pub fn with_sole_use(self, has_sole_use: bool) -> OwnMemory {
        OwnMemory { has_sole_use, ..self }
    }

    /// True if only threads of this process write the memory: no debugger, and no child that shares
    /// it.
    pub(super) fn has_sole_use(&self) -> bool {
        self.has_sole_use
    }

    /// Its addresses.
    pub fn range(&self) -> &Range {
        &self.range
    }

    /// Where it begins.
    pub(super) fn start(&self) -> NonNull<u8> {
        NonNull::new(self.range.start.as_mut_ptr()).unwrap_or(NonNull::dangling())
    }

    /// The part in which a page that the page table does not have may hold data: everything except
    /// private anonymous memory.
    pub(crate) fn backed(&self) -> &RangeSet {
        &self.backed
    }

    /// The part that is shared memory.
    pub(crate) fn shared(&self) -> &RangeSet {
        &self.shared
    }

    /// Number of pages of [`PAGE_SIZE`] whose protection changes together: more than one in memory
    /// of hugetlb.
    pub(super) fn pages_per_unit(&self) -> usize {
        self.page_bytes.to_usize() / PAGE_SIZE
    }

    /// Checks that a range belongs to the memory.
    ///
    /// # Errors
    /// `ErrorKind::NotOwned`
    pub(super) fn check(&self, range: &Range) -> Result<(), Error> {
        if self.range.start <= range.start && range.end <= self.range.end {
            return Ok(());
        }
        let reason = format!("is not within {:#x?}, the memory that the tracker was made for", self.range);
        Err(Error::about(ErrorKind::NotOwned, Object::Range(range.clone()), reason))
    }

    /// The pages of `ranges` that may hold anything else than zeros.
    ///
    /// # Errors
    /// Those of [`populated`](super::populated()).
    pub(crate) fn holding(&self, pagemap: &Pagemap, ranges: &RangeSet) -> Result<RangeSet, Error> {
        DataPages::from(self).find(pagemap, ranges)
    }
}
