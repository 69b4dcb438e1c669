//! Stores of snapshots.

use pagemark::snapshot::{SnapshotOptions, SnapshotStore};
use pyo3::prelude::*;

use crate::errors;

/// Holds snapshots of any number of regions. A chunk of content that several snapshots share is
/// held once, and zeros take no memory.
///
/// `chunk_bytes` is a power of two from 256 to 65536; smaller chunks share more and have more
/// overhead, some 40 bytes a chunk. If the content exceeds `budget_bytes`, chunks are compressed or
/// held as differences; if that does not suffice, a snapshot raises SnapshotError.
#[pyclass(frozen, weakref, module = "pagemark")]
pub struct Store {
    pub(crate) store: SnapshotStore,
}

#[pymethods]
impl Store {
    #[new]
    #[pyo3(signature = (chunk_bytes = pagemark::PAGE_SIZE, budget_bytes = None))]
    fn new(chunk_bytes: usize, budget_bytes: Option<u64>) -> PyResult<Self> {
        let options = SnapshotOptions { chunk_bytes, budget_bytes };
        Ok(Store { store: SnapshotStore::with_options(options).map_err(errors::of_error)? })
    }

    /// What the store holds, and how much memory that takes.
    fn usage(&self, py: Python<'_>) -> Usage {
        // It waits for a snapshot that another thread takes.
        let held = py.detach(|| self.store.usage());
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

/// The content of a store.
#[pyclass(frozen, get_all, module = "pagemark")]
pub struct Usage {
    /// Distinct chunks, without the chunk of zeros.
    chunks: u64,
    /// Chunks that are compressed.
    compressed_chunks: u64,
    /// Chunks that are held as the difference from another chunk.
    delta_chunks: u64,
    /// Memory for the content, bytes.
    content_bytes: u64,
    /// Memory for everything else, bytes.
    overhead_bytes: u64,
    /// The memory that the budget limits, bytes.
    held_bytes: u64,
}
