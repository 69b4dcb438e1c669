//! Why a region could not do what was asked.

use std::io;

use crate::snapshot::SnapshotError;
use crate::{PAGE_SIZE, Range, TrackError};

/// A region could not do what was asked. Its content, and what was written so far, are as they were before.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// Commit or rollback without begin.
    #[error("no transaction is open: call begin first")]
    NoTransaction,
    /// Begin within a transaction.
    #[error("a transaction is open already: commit it or roll it back first; transactions do not nest")]
    TransactionOpen,
    /// The region keeps nothing to roll back to.
    #[error("the region was made without rollback, so it keeps no content to go back to")]
    NoRollback,
    /// Memory to adopt that is not made of whole pages.
    #[error(
        "a region consists of whole pages of {PAGE_SIZE} bytes, at least one; {start:#x} with {bytes} bytes does not"
    )]
    Unaligned {
        /// Where it would begin.
        start: u64,
        /// How long it would be.
        bytes: usize,
    },
    /// Memory to adopt that belongs to a region.
    #[error("{range:#x?} overlaps a region at {other:#x?}; a page belongs to one region at most")]
    Overlaps {
        /// What was to be adopted.
        range: Range,
        /// The region that is there.
        other: Range,
    },
    /// Nothing is mapped in a part of it.
    #[error("in {range:#x?} not everything is mapped: it was unmapped, or never was")]
    NotMapped {
        /// Where the region is, or was to be.
        range: Range,
    },
    /// Memory to adopt that is not plain data.
    #[error("in {range:#x?} not everything is readable, writable and not executable, as a region must be")]
    NotData {
        /// What was to be adopted.
        range: Range,
    },
    /// Offsets beyond the region's end.
    #[error("offsets {offsets:?} are not within a region of {bytes} bytes")]
    OutOfRange {
        /// What was named.
        offsets: std::ops::Range<usize>,
        /// The region's length.
        bytes: usize,
    },
    /// The process is a child of the one that made the region.
    #[error(
        "this process was forked from the one that made the region and tracks it; a child makes regions of its own"
    )]
    ForkedChild,
    /// A snapshot of another region.
    #[error("the snapshot is one of another region")]
    WrongRegion,
    /// The snapshot could not be taken or restored.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// The mechanism failed, or does not work here.
    #[error(transparent)]
    Track(#[from] TrackError),
    /// A system call failed.
    #[error("{operation}: {source}")]
    System {
        /// The call, and on what.
        operation: String,
        /// Why it failed.
        source: io::Error,
    },
}

impl RegionError {
    pub(super) fn system(operation: impl Into<String>) -> impl FnOnce(io::Error) -> RegionError {
        move |source| RegionError::System { operation: operation.into(), source }
    }
}
