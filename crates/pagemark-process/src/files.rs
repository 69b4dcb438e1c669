//! The files that a target has written: they belong to its checkpoint.
//!
//! A restored target expects them as they were: CRIU refuses a file whose size changed, and a
//! program would find a log or a database from its own future. [`open_for_writing`] finds them, a
//! [`FileTracker`] saves their content from one checkpoint to the next, and [`put_back`] restores
//! them and keeps their present content in [`asides`]. A [`FileWatch`] finds the files that the
//! target has written and closed; a [`DataTree`] is a directory that belongs to it whole.

pub mod asides;
mod change;
mod copy;
mod data_tree;
mod directory;
#[cfg(test)]
mod hostile;
mod list;
mod mounts;
mod output_directory;
mod path;
mod put_back;
mod put_back_tree;
mod scan;
mod tracker;
mod unusual;
pub(crate) mod user;
mod users;
pub(crate) mod walk;
mod watch;
mod writers;
mod written;

use std::io;
use std::path::PathBuf;

use pagemark_trace::error::{Error, ErrorKind, Object};

pub use data_tree::{DataTree, DirectoryRecord, LinkRecord, Origin, TREES, TreeRecord};
pub(crate) use data_tree::{read as read_trees, record as record_trees, with_closed};
pub use list::{Descriptor, OpenFile, SharedMapping, open_for_writing};
pub use output_directory::OutputDirectory;
pub use path::{decode_path, encode_path};
pub(crate) use put_back::put_back_for;
pub use put_back::{ChangedFiles, FileAction, PutBack, put_back};
pub use writers::FrozenMembers;
pub(crate) use writers::is_own_output;

pub use tracker::{CopyCost, FileTracker, Written};
pub(crate) use unusual::unusual_removals;
pub use unusual::{UnusualFile, UnusualReason, unusual_files};
pub(crate) use users::{Users, read as read_users, record as record_users};
pub use watch::FileWatch;

/// For `map_err`: `operation` on `path` failed.
fn io(operation: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Error {
    Error::system(operation, Object::File(path.into()))
}

/// For `map_err`: `operation` on `path` failed, or its content could not be stored or read back.
fn content(operation: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(pagemark::Error) -> Error {
    let path = path.into();
    move |error| match error.kind() {
        pagemark::ErrorKind::Stream => Error::of(ErrorKind::System, operation, Object::File(path), error),
        _ => store(path)(error),
    }
}

/// For `map_err`: the content of `path` could not be stored or read back.
fn store(path: impl Into<PathBuf>) -> impl FnOnce(pagemark::Error) -> Error {
    let object = Object::File(path.into());
    move |source| Error::of(ErrorKind::Store, "content of", object, source)
}
