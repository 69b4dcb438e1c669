//! Errors of snapshots. After one, all snapshots are unchanged.

use std::io;

use crate::error::{Error, ErrorKind};
use crate::{ByteCount, Range};

impl Error {
    pub(super) fn chunk_size(chunk_bytes: usize) -> Error {
        let reason = format!("a chunk cannot have {chunk_bytes} bytes: choose a power of two from 256 to 65536");
        Error::because(ErrorKind::ChunkSize, reason)
    }

    pub(super) fn wrong_store() -> Error {
        Error::because(ErrorKind::WrongStore, "the snapshot belongs to another store")
    }

    pub(super) fn length_differs(snapshot_bytes: ByteCount, bytes: ByteCount) -> Error {
        let reason = format!("the snapshot is of an area of {snapshot_bytes} bytes, not of {bytes} bytes");
        Error::because(ErrorKind::LengthDiffers, reason)
    }

    pub(super) fn beyond_snapshot(range: &Range, bytes: ByteCount) -> Error {
        let reason = format!("offsets {range:?} are not within an area of {bytes} bytes");
        Error::because(ErrorKind::OutOfRange, reason)
    }

    pub(super) fn budget_exceeded(budget_bytes: u64, needed_bytes: u64) -> Error {
        let reason = format!(
            "holding the snapshot takes {needed_bytes} bytes and the budget is {budget_bytes} bytes: drop snapshots, or \
             give the store more"
        );
        Error::because(ErrorKind::BudgetExceeded { budget_bytes, needed_bytes }, reason)
    }

    pub(crate) fn no_memory(source: io::Error) -> Error {
        Error::because(ErrorKind::NoMemory, "no memory for a snapshot's content").caused_by(source)
    }

    pub(super) fn store_full() -> Error {
        let reason = "the store is full: drop snapshots, or use larger chunks or a second store";
        Error::because(ErrorKind::StoreFull, reason)
    }
}
