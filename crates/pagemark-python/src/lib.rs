//! The Python package of Pagemark: [`pagemark::Region`] as a buffer, its transactions and snapshots.
//!
//! The names, types and errors are in `python/pagemark/_native.pyi`. What copies much or may wait does so with the interpreter
//! released.

mod errors;
mod ranges;
mod region;
mod snapshot;
mod store;
mod transaction;
mod writable;

use pyo3::prelude::*;

/// The part of the package that is written in Rust.
#[pymodule]
mod _native {
    use pagemark::Mechanism;
    use pyo3::prelude::*;
    use pyo3::types::PyTuple;

    #[pymodule_export]
    use crate::errors::{Error, ForkedError, MechanismError, SnapshotError, TransactionError};
    #[pymodule_export]
    use crate::region::Region;
    #[pymodule_export]
    use crate::snapshot::Snapshot;
    #[pymodule_export]
    use crate::store::{Store, Usage};
    #[pymodule_export]
    use crate::transaction::Transaction;
    #[pymodule_export]
    use crate::writable::Writable;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        let names = Mechanism::ALL.iter().map(|mechanism| mechanism.name());
        module.add("MECHANISMS", PyTuple::new(module.py(), names)?)?;
        module.add("PAGE_SIZE", pagemark::PAGE_SIZE)?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
