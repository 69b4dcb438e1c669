//! Where snapshots are held.

use pagemark::snapshot::{SnapshotOptions, SnapshotStore};
use pyo3::prelude::*;

use crate::errors;

/// Holds snapshots of any number of regions: each chunk of content once, whichever snapshots hold it, and zeros not at all.
///
/// `chunk_bytes` is a power of two from 256 to 65536; smaller chunks share more and cost more, some 40 bytes a chunk. Where
/// `budget_bytes` are not enough, chunks are compressed, or held as a difference; where that is not enough either, a
/// snapshot raises SnapshotError.
#[pyclass(frozen, module = "pagemark")]
pub struct Store {
    pub(crate) store: SnapshotStore,
}

#[pymethods]
impl Store {
    #[new]
    #[pyo3(signature = (chunk_bytes = pagemark::PAGE_SIZE, budget_bytes = None))]
    fn new(chunk_bytes: usize, budget_bytes: Option<u64>) -> PyResult<Self> {
        let options = SnapshotOptions { chunk_bytes, budget_bytes };
        Ok(Store { store: SnapshotStore::with_options(options).map_err(errors::of_snapshot)? })
    }

    /// What the store holds, and what that takes.
    fn usage(&self) -> Usage {
        let held = self.store.usage();
        Usage {
            chunks: held.chunks,
            compressed_chunks: held.compressed_chunks,
            delta_chunks: held.delta_chunks,
            content_bytes: held.content_bytes,
            overhead_bytes: held.overhead_bytes,
            held_bytes: held.held_bytes,
        }
    }
}

/// What a store holds.
#[pyclass(frozen, get_all, module = "pagemark")]
pub struct Usage {
    /// Different chunks, without that of zeros.
    chunks: u64,
    /// Those of them that are compressed.
    compressed_chunks: u64,
    /// Those of them that are held as the difference from another one.
    delta_chunks: u64,
    /// Bytes of memory that the content takes.
    content_bytes: u64,
    /// Bytes of memory that everything else takes.
    overhead_bytes: u64,
    /// What the budget limits.
    held_bytes: u64,
}
