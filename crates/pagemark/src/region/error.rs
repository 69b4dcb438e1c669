//! Errors of regions. After one, the content of the region and the record of its writes are
//! unchanged, unless the operation says otherwise.

use std::io;

use crate::error::{Error, ErrorKind, Object};
use crate::{Address, ByteCount, Mechanism, Range};

impl Error {
    pub(super) fn no_transaction() -> Error {
        Error::because(ErrorKind::NoTransaction, "no transaction is open: call begin first")
    }

    pub(super) fn transaction_open() -> Error {
        let reason = "a transaction is open already: commit it or roll it back first; transactions do not nest";
        Error::because(ErrorKind::TransactionOpen, reason)
    }

    pub(super) fn no_rollback() -> Error {
        let reason = "the region was made without rollback, so there is no content to restore";
        Error::because(ErrorKind::NoRollback, reason)
    }

    pub(super) fn no_old_content() -> Error {
        let reason = "the changes lack the content before the transaction, so there is no content to restore";
        Error::because(ErrorKind::NoRollback, reason)
    }

    pub(super) fn no_memory_for_changes(source: io::Error) -> Error {
        Error::because(ErrorKind::NoMemory, "no memory for the content of changes").caused_by(source)
    }

    pub(super) fn changes_of_another_length(changes_bytes: ByteCount, bytes: ByteCount) -> Error {
        let reason = format!("the changes are of a region of {changes_bytes} bytes, and this one has {bytes} bytes");
        Error::because(ErrorKind::LengthDiffers, reason)
    }

    pub(super) fn unaligned(start: Address, bytes: usize, page_bytes: ByteCount) -> Error {
        let reason = format!(
            "a region consists of whole pages, here of {page_bytes} bytes, at least one; {start:#x} with {bytes} bytes does \
             not"
        );
        Error::because(ErrorKind::Unaligned, reason)
    }

    pub(super) fn unaligned_view(offset: usize, alignment: usize) -> Error {
        let reason = format!("values with an alignment of {alignment} bytes cannot begin at byte {offset}");
        Error::because(ErrorKind::Unaligned, reason)
    }

    pub(super) fn overlaps(range: Range, other: &Range) -> Error {
        let reason = format!("overlaps a region at {other:#x?}; a page belongs to one region at most");
        Error::about(ErrorKind::Overlaps, Object::Range(range), reason)
    }

    pub(super) fn not_mapped(range: Range) -> Error {
        let error = Error::about(ErrorKind::NotMapped, Object::None, "it was unmapped, or never was mapped");
        error.during(format!("part of {range:#x?} is not mapped"))
    }

    pub(super) fn not_data(range: Range) -> Error {
        let error = Error::about(ErrorKind::NotData, Object::None, "a region needs plain data");
        error.during(format!("part of {range:#x?} is not readable, not writable, or executable"))
    }

    /// A mapping to adopt that is longer than its file.
    pub(super) fn beyond_file(range: Range) -> Error {
        let error = Error::because(ErrorKind::BeyondFile, "adopt the pages that the file has, or make the file longer");
        error.during(format!("the file mapped at {range:#x?} ends before the mapping does"))
    }

    /// Shared memory to adopt with a mechanism that does not see writes of other processes.
    pub(super) fn shared(range: Range, mechanism: Mechanism) -> Error {
        let reason = format!("is shared memory, and {mechanism} does not see what other processes write to it");
        Error::about(ErrorKind::Shared, Object::Range(range), reason)
            .help("promise its sole use, or choose the mechanism compare or full")
    }

    /// Offsets that exceed a region of this length.
    pub fn beyond_region(offsets: std::ops::Range<usize>, bytes: usize) -> Error {
        let reason = format!("offsets {offsets:?} are not within a region of {bytes} bytes");
        Error::because(ErrorKind::OutOfRange, reason)
    }

    pub(super) fn forked_child() -> Error {
        let reason =
            "this process was forked from the one that made the region and tracks it; a child makes regions of its own";
        Error::because(ErrorKind::ForkedChild, reason)
    }

    pub(super) fn wrong_region() -> Error {
        Error::because(ErrorKind::WrongRegion, "the snapshot belongs to another region")
    }

    pub(super) fn not_distinct(label: String) -> Error {
        let reason = "is given twice: the regions of one target, and their labels, are all different";
        Error::about(ErrorKind::NotDistinct, Object::Name(label), reason)
    }

    pub(super) fn saved_elsewhere() -> Error {
        let reason = "the region is saved by another job since: a region belongs to the target that was made last";
        Error::because(ErrorKind::SavedElsewhere, reason)
    }

    pub(super) fn never_saved(job: &str) -> Error {
        let reason = "has no checkpoint to open: save a region to it first";
        Error::about(ErrorKind::NeverSaved, Object::Job(job.to_owned()), reason)
    }

    pub(super) fn no_region(job: &str, sequence: u64, label: &str) -> Error {
        let object = Object::Checkpoint { job: job.to_owned(), sequence };
        Error::about(ErrorKind::NoRegion, object, format!("holds no region called {label:?}"))
    }

    pub(super) fn saved_length_differs(saved_bytes: usize, bytes: usize) -> Error {
        let reason = format!(
            "the saved region has {saved_bytes} bytes and this one has {bytes}: only a region of the same length can be loaded"
        );
        Error::because(ErrorKind::SavedLengthDiffers, reason)
    }
}
