//! The error of this crate.

use std::borrow::Cow;
use std::fmt;
use std::io;

use pagemark::error::Failure;

/// Why the machine does not work, or a program cannot be run in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// KVM cannot be used: the device, a right or a capability is missing.
    Unavailable,
    /// A call to KVM or to the kernel failed.
    System,
    /// The file is not a program that the machine can run.
    NotRunnable,
    /// The program's addresses are taken by mappings of the monitor.
    Layout,
    /// The machine has no memory slots, virtual CPUs or page tables left.
    Exhausted,
}

/// An error of the machine. Its text is `OPERATION OBJECT: REASON; HELP`.
#[derive(Debug)]
pub struct Error(Box<Failure<ErrorKind, Cow<'static, str>>>);

impl Error {
    pub(crate) fn new(
        kind: ErrorKind,
        operation: impl Into<Cow<'static, str>>,
        object: impl Into<Cow<'static, str>>,
    ) -> Error {
        Error(Box::new(Failure { operation: operation.into(), ..Failure::new(kind, object.into()) }))
    }

    pub(crate) fn reason(mut self, reason: impl Into<Cow<'static, str>>) -> Error {
        self.0.reason = reason.into();
        self
    }

    pub(crate) fn help(mut self, help: impl Into<Cow<'static, str>>) -> Error {
        self.0.help = help.into();
        self
    }

    pub(crate) fn source(mut self, source: io::Error) -> Error {
        self.0.source = Some(Box::new(source));
        self
    }

    /// A failed call to KVM: the name of the call, and its error.
    pub(crate) fn kvm(call: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> Error {
        move |error| Error::new(ErrorKind::System, call, "").source(io::Error::from_raw_os_error(error.errno()))
    }

    /// A failed operation on `object`.
    pub(crate) fn system(
        operation: &'static str,
        object: impl Into<Cow<'static, str>>,
    ) -> impl FnOnce(io::Error) -> Error {
        move |error| Error::new(ErrorKind::System, operation, object).source(error)
    }

    /// Why it failed, for callers that react to it.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The error of the system call that failed, if one did.
    pub fn io_error(&self) -> Option<&io::Error> {
        self.0.io_error()
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
