//! The C ABI of Pagemark: [`pagemark::Region`] and its snapshots.
//!
//! The header `include/pagemark.h` is made from this crate, comments included, and says at its top what C programs owe. Because
//! they owe it, functions take nullable references and boxes where C passes pointers. Nothing panics across the boundary:
//! see [`status`].

pub mod ranges;
pub mod region;
pub mod snapshot;
pub mod status;
pub mod store;

use std::ffi::c_char;

/// The library's version, such as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
