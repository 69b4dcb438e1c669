//! CRIU's images: files that describe what it saved.
//!
//! An image is a [`container`] of protocol buffers messages, whose [`schema`] is CRIU's. A
//! [`pagemap`] image says which pages of a process are saved. Only the fields that Pagemark needs
//! are declared. An image that is rewritten keeps all others: messages are held as they were read,
//! and a field is changed in place.

pub mod container;
pub(crate) mod mappings;
pub mod pagemap;
pub mod schema;

pub use container::{Image, ImageKind, read_all, read_first};
pub(crate) use container::{bytes_of, with_bytes, with_each, with_varint, without};
pub use pagemap::{PageRun, PageSource, Pagemap};
