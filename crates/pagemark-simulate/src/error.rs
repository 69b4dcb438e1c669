//! The error of this crate. Its text has the form that `pagemark::error::Failure` documents; the
//! plugin does not depend on the core, because QEMU loads it.

use std::fmt;
use std::io;
use std::path::Path;

/// A failed operation on the results or the trace of an interval.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    operation: &'static str,
    object: String,
    reason: &'static str,
    source: Option<io::Error>,
    help: &'static str,
}

/// The reason of an error, for callers that react to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A system call failed.
    System,
    /// A file is not a complete, undamaged trace, or the recorded inputs are damaged.
    Damaged,
    /// Results of different simulators cannot be merged.
    OtherSimulator,
}

impl Error {
    /// For `map_err`: a system call failed at `operation`, a verb.
    pub(crate) fn system(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
        let object = path.display().to_string();
        move |error| {
            let source = Some(error);
            Error { kind: ErrorKind::System, operation, object, reason: "", source, help: "" }
        }
    }

    pub(crate) fn damaged(path: &Path, reason: &'static str) -> Error {
        let object = path.display().to_string();
        let help = "simulate its interval again";
        Error { kind: ErrorKind::Damaged, operation: "read the trace", object, reason, source: None, help }
    }

    pub(crate) fn damaged_inputs(reason: &'static str) -> Error {
        let (operation, object) = ("read the inputs of", "the machine".to_owned());
        Error { kind: ErrorKind::Damaged, operation, object, reason, source: None, help: "" }
    }

    pub(crate) fn other_simulator(name: &str) -> Error {
        let (operation, reason) = ("merge the results of", "they are of different simulators");
        Error { kind: ErrorKind::OtherSimulator, operation, object: name.to_owned(), reason, source: None, help: "" }
    }

    /// The reason, for callers that react to it.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Error { operation, object, reason, source, help, .. } = self;
        write!(f, "{operation} {object}")?;
        if !reason.is_empty() {
            write!(f, ": {reason}")?;
        }
        if let Some(source) = source {
            write!(f, ": {source}")?;
        }
        if help.is_empty() { Ok(()) } else { write!(f, "; {help}") }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|source| source as _)
    }
}
