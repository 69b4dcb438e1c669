//! The error of this crate: the operation that failed, and why.

use std::fmt;
use std::io;

use pagemark::error::Failure;

/// A heap that could not be made. Its text says what failed, why, and what to do; callers match on
/// [`kind`](Error::kind).
#[derive(Debug)]
pub struct Error(Box<Failure<ErrorKind, &'static str>>);

/// The reasons for errors that callers distinguish.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum ErrorKind {
    /// There is no address space, or no memory, for the heap.
    NoRoom,
    /// The process may open no more files.
    NoDescriptors,
    /// A limit on the size of files is smaller than the heap.
    FileLimit,
    /// The process has as many heaps as are possible.
    TooManyHeaps,
    /// Another system call failed.
    System,
}

impl Error {
    /// Failed to make a heap.
    pub(crate) fn creating(error: io::Error) -> Error {
        let (kind, help) = match error.raw_os_error() {
            Some(libc::ENOMEM) => {
                (ErrorKind::NoRoom, "choose a smaller capacity, or raise RLIMIT_AS or the sysctl vm.max_map_count")
            }
            Some(libc::EMFILE | libc::ENFILE) => (ErrorKind::NoDescriptors, "raise RLIMIT_NOFILE"),
            Some(libc::EFBIG) => (ErrorKind::FileLimit, "choose a smaller capacity, or raise RLIMIT_FSIZE"),
            Some(libc::EUSERS) => (ErrorKind::TooManyHeaps, "drop a heap that is no longer needed"),
            _ => (ErrorKind::System, ""),
        };
        let failure = Failure::new(kind, "a heap");
        Error(Box::new(Failure {
            operation: "making".into(),
            source: Some(error.into()),
            help: help.into(),
            ..failure
        }))
    }

    /// The reason, for callers that react to it.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}
