//! Why a measurement failed.

use std::borrow::Cow;
use std::io;

/// A measurement failed.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// A system call failed.
    #[error("could not {operation}: {source}")]
    System {
        /// What the call was for.
        operation: Cow<'static, str>,
        /// Error of the kernel.
        source: io::Error,
    },
    /// The measured program did not start, or failed.
    #[error("the measured program failed; it printed {output:?}")]
    Workload {
        /// What it printed.
        output: String,
    },
    /// CRIU, the peer of `process`, failed.
    #[error("CRIU's full dump failed: {reason}")]
    Criu {
        /// Its log.
        reason: String,
    },
    /// A part of a measurement that runs in a process of its own failed.
    #[error("a measurement failed in its process: {reason}")]
    Task {
        /// The part, and what it printed.
        reason: String,
    },
    /// A mechanism reports fewer or more pages than were written.
    #[error("of {pages} pages that were written, {found} were found")]
    WrongPages {
        /// Number of written pages.
        pages: usize,
        /// Number of reported pages.
        found: u64,
    },
    /// A measured program has checked its result, and it is wrong.
    #[error("{program} has a wrong result: {reason}")]
    WrongResult {
        /// The program.
        program: &'static str,
        /// What is wrong.
        reason: Cow<'static, str>,
    },
    /// There is no Redis server.
    #[error("redis-server does not start: {0}; install Redis")]
    NoServer(#[source] io::Error),
    /// The file of `--against` is not one that `--figure helpers` has written.
    #[error("the file given by --against has no numbers; give the helpers.csv that another run has written")]
    NoNumbers,
    /// An operation of Pagemark itself failed.
    #[error(transparent)]
    Pagemark(Box<dyn std::error::Error + Send + Sync>),
}

impl BenchError {
    /// Makes an error of a system call that was made to do `operation`, an infinitive.
    pub(crate) fn on(operation: impl Into<Cow<'static, str>>) -> impl FnOnce(io::Error) -> BenchError {
        move |source| BenchError::System { operation: operation.into(), source }
    }

    /// Makes an error of a program that has checked its result.
    pub(crate) fn wrong_result(program: &'static str, reason: impl Into<Cow<'static, str>>) -> BenchError {
        BenchError::WrongResult { program, reason: reason.into() }
    }

    /// Makes an error of one of Pagemark's, or of a message.
    pub(crate) fn pagemark(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> BenchError {
        BenchError::Pagemark(error.into())
    }
}

impl From<pagemark::Error> for BenchError {
    fn from(error: pagemark::Error) -> BenchError {
        BenchError::pagemark(error)
    }
}
