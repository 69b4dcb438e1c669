//! The C ABI of Pagemark: [`pagemark::Region`] and its snapshots, and `pagemark_heap::SavedHeap`.
//!
//! `scripts/header.sh` generates the header `include/pagemark.h` from this crate, including the
//! comments. The top of the header states the obligations of C programs. Relying on these
//! obligations, functions take nullable references and boxes where C passes pointers. No panic
//! crosses the boundary: see [`status`].
//!
//! # Example
//!
//! From C; `examples/c/bank.c` is a complete program:
//!
//! ```c
//! pagemark_region_begin(region);
//! account[17].balance -= 100;
//! pagemark_region_rollback(region, NULL);
//! ```

pub mod changes;
pub mod heap;
pub mod ranges;
pub mod region;
pub mod repository;
pub mod snapshot;
pub mod status;
pub mod store;

use std::ffi::c_char;

/// The library's version, such as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
