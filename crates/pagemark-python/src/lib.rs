//! The Python package of Pagemark: [`pagemark::Region`] as a buffer, its transactions and
//! snapshots; heaps that survive their program; jobs, which checkpoint process trees, and their
//! restore.
//!
//! `python/pagemark/_native.pyi` has the names, types and errors. Functions that copy much memory
//! or may block release the interpreter.
//!
//! # Example
//!
//! From Python; `examples/python/rewind.py` is a complete program:
//!
//! ```python
//! region = pagemark.Region(64 << 20)
//! table = numpy.frombuffer(region, dtype="f8")
//! with region.transaction() as transaction:  # an exception rolls it back
//!     table[:1000] += 1
//! transaction.written
//! ```

mod buffer;
mod errors;
mod heap;
mod job;
mod ranges;
mod region;
mod repository;
mod restore;
mod signals;
mod snapshot;
mod store;

use pyo3::prelude::*;

/// The part of the package that is written in Rust.
#[pymodule]
mod _native {
    use pagemark::Mechanism;
    use pyo3::prelude::*;
    use pyo3::types::PyTuple;

    #[pymodule_export]
    use crate::errors::{
        CriuError, Error, ForkedError, HeapError, MechanismError, PidInUseError, ProcessError, ProcessGoneError,
        RepositoryError, RestoreError, SnapshotError, TransactionError,
    };
    #[pymodule_export]
    use crate::heap::{HeapBuffer, SavedHeap, Saving};
    #[pymodule_export]
    use crate::job::Job;
    #[pymodule_export]
    use crate::ranges::Ranges;
    #[pymodule_export]
    use crate::region::{Change, Changes, Region, Transaction, Writable};
    #[pymodule_export]
    use crate::repository::{Checkpoint, Cost, Repository};
    #[pymodule_export]
    use crate::restore::{Restored, RestoredFile, restore};
    #[pymodule_export]
    use crate::snapshot::Snapshot;
    #[pymodule_export]
    use crate::store::{Store, Usage};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        let names = Mechanism::ALL.iter().map(|mechanism| mechanism.name());
        module.add("MECHANISMS", PyTuple::new(module.py(), names)?)?;
        module.add("PAGE_SIZE", pagemark::PAGE_SIZE)?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
