//! The error type of this crate.

use std::path::{Path, PathBuf};

/// The result of an operation of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An operation that failed, the object that it failed on, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file operation failed.
    #[error("cannot {operation} {}: {source}", path.display())]
    File {
        /// A verb, such as "read".
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// A program could not be started.
    #[error("cannot start {program}: {source}\nhelp: install the package that contains it")]
    Start {
        /// The program's name.
        program: String,
        /// The reason.
        source: std::io::Error,
    },
    /// A program was started and failed.
    #[error("{operation} failed ({status})\n{output}\nhelp: {help}")]
    Failed {
        /// What the program was started for.
        operation: String,
        /// Its exit status.
        status: String,
        /// The end of its output, empty if the user has seen it.
        output: String,
        /// What to do.
        help: String,
    },
    /// Something that is needed is missing, or an argument is wrong.
    #[error("{problem}\nhelp: {help}")]
    Unmet {
        /// What is wrong.
        problem: String,
        /// What to do.
        help: String,
    },
}

impl Error {
    /// Something that is needed is missing, or an argument is wrong.
    pub fn unmet(problem: impl Into<String>, help: impl Into<String>) -> Error {
        Error::Unmet { problem: problem.into(), help: help.into() }
    }

    /// For `map_err` of a file operation; `operation` is a verb.
    pub(crate) fn file(operation: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.to_owned();
        move |source| Error::File { operation, path, source }
    }
}
