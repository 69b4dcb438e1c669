//! The regular files that a target has open for writing: they belong to its checkpoint.
//!
//! A target that comes back expects them as they were: CRIU refuses a file whose size changed, and a program
//! would find a log or a database from its own future. [`open_for_writing`] finds them, a [`FileTracker`] keeps
//! what they hold from one checkpoint to the next, and [`put_back`] restores them without ever throwing
//! anything away.

mod list;
mod path;
mod put_back;
mod scan;
mod tracker;

use std::io;
use std::path::PathBuf;

use pagemark::StoreError;

pub use list::{Descriptor, OpenFile, SharedMapping, open_for_writing};
pub use path::{decode_path, encode_path};
pub use put_back::{PutBack, What, put_back};
pub use tracker::{Copied, FileTracker, Written};

/// The target's files could not be found, read or put back.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// The open files of a process could not be listed.
    #[error("list the open files of process {pid}: {source} (this needs the process's own user, or root)")]
    Process {
        /// The process.
        pid: i32,
        /// Why it failed.
        source: io::Error,
    },
    /// The name by which the target opened a file does not lead to it from here.
    #[error(
        "{path}, which process {pid} has open for writing, cannot be reached by that name: it was removed or \
         replaced while another link to it exists, or the process has another root directory. Close it, or \
         checkpoint memory alone"
    )]
    OutOfReach {
        /// The process that has it open.
        pid: i32,
        /// Its name, as the kernel tells it.
        path: PathBuf,
    },
    /// The file system below failed.
    #[error("{operation} {path}: {source}")]
    Io {
        /// What was being done, a verb.
        operation: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// The content could not be stored, or read back.
    #[error("content of {path}: {source}")]
    Store {
        /// The file whose content it is.
        path: PathBuf,
        /// Why it failed.
        source: StoreError,
    },
    /// A record's path is none that a checkpoint of ours would hold.
    #[error("the checkpoint names the file {path:?}: {reason}. Nothing was changed; is the repository damaged?")]
    BadPath {
        /// The path as recorded.
        path: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A directory on the way to a file is something else now.
    #[error(
        "{path} was a directory at the checkpoint and is a link or something else now: files below it are not \
         put back through it. Put the directory back and try again"
    )]
    NoDirectory {
        /// What was a directory.
        path: PathBuf,
    },
    /// Putting a file back failed after its present content had been set aside.
    #[error("put back {path}: {source}. What it held is kept as {aside}")]
    HalfWay {
        /// The file.
        path: PathBuf,
        /// Where its content is now.
        aside: PathBuf,
        /// What failed.
        source: Box<FilesError>,
    },
}

impl FilesError {
    /// For `map_err`: `operation` on `path` failed.
    fn io(operation: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> FilesError {
        let path = path.into();
        move |source| FilesError::Io { operation, path, source }
    }

    /// For `map_err`: the content of `path` could not be stored or read back.
    fn store(path: impl Into<PathBuf>) -> impl FnOnce(StoreError) -> FilesError {
        let path = path.into();
        move |source| FilesError::Store { path, source }
    }
}
