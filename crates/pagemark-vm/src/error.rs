//! The error of this crate: the operation that failed, the object that it failed on, and why.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::path::PathBuf;

use pagemark::error::{Failure, Source};

/// The result of an operation on virtual machines.
pub type Result<T, E = Error> = std::result::Result<T, E>;

type Text = Cow<'static, str>;

/// A failed operation on a virtual machine. Its text says what failed, on which object, why, and
/// what to do; callers match on [`kind`](Error::kind).
///
/// ```
/// use std::path::Path;
///
/// use pagemark::Mechanism;
/// use pagemark_vm::{ErrorKind, VmTarget};
///
/// let error = VmTarget::attach(Path::new("/nowhere.qmp"), Mechanism::Full).err().unwrap();
/// assert_eq!(error.kind(), ErrorKind::Monitor);
/// assert!(error.to_string().contains("/nowhere.qmp"), "{error}");
/// ```
#[derive(Debug)]
pub struct Error(Box<Failure<ErrorKind, Object>>);

/// The reasons for errors that callers distinguish.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum ErrorKind {
    /// QEMU has ended.
    Gone,
    /// The monitor could not be reached, or did not answer as QEMU does.
    Monitor,
    /// QEMU refused a command of the monitor.
    Command,
    /// The machine has something that a checkpoint cannot hold.
    Unsupported,
    /// The place of a memory block in QEMU's address space is not known.
    Memory,
    /// A disk of the machine could not be read, or an image not be written.
    Disk,
    /// The memory of the QEMU process could not be tracked or read.
    Process,
    /// KVM's log of the machine's writes cannot be read.
    KvmLog,
    /// The checkpoint is damaged, or not one of a virtual machine.
    Damaged,
    /// The QEMU that was started has other memory than the checkpoint.
    Mismatch,
    /// A machine that was simulated has not done what it did before.
    Differs,
    /// QEMU did not start.
    Start,
    /// The program of QEMU does not exist.
    NotFound,
    /// The store of pages failed.
    Store,
    /// A system call failed.
    System,
}

/// The object of a failed operation.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Object {
    /// None: the operation names it.
    None,
    /// A QEMU process, by its id.
    Process(i32),
    /// A monitor socket.
    Monitor(PathBuf),
    /// A command of the monitor.
    Command(String),
    /// A memory block of the machine.
    Block(String),
    /// A device of the machine.
    Device(String),
    /// A disk of the machine, by its name.
    Disk(String),
    /// An image of a disk.
    Image(PathBuf),
    /// Another file, or a directory.
    File(PathBuf),
}

/// Words of QEMU, of a user or of the guest, for a terminal.
pub(crate) fn printable(words: &str) -> String {
    let escaped = words.chars().map(|letter| match letter.is_control() {
        true => letter.escape_debug().to_string(),
        false => letter.into(),
    });
    escaped.collect()
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Object::None => Ok(()),
            Object::Process(pid) => write!(f, "QEMU (process {pid})"),
            Object::Monitor(path) => write!(f, "the monitor {}", path.display()),
            Object::Command(command) => f.write_str(command),
            Object::Device(name) => write!(f, "the device {}", name.escape_debug()),
            Object::Disk(label) => write!(f, "the disk {}", label.escape_debug()),
            Object::Image(path) => write!(f, "the image {}", path.display()),
            Object::File(path) => write!(f, "{}", path.display()),
            Object::Block(id) => write!(f, "the memory block {}", id.escape_debug()),
        }
    }
}

impl Error {
    /// An error whose text is `OBJECT REASON`.
    pub fn about(kind: ErrorKind, object: Object, reason: impl Into<Text>) -> Error {
        Error(Box::new(Failure { reason: reason.into(), ..Failure::new(kind, object) }))
    }

    /// An error whose text is `OPERATION OBJECT: SOURCE`.
    pub fn of(kind: ErrorKind, operation: impl Into<Text>, object: Object, source: impl Into<Source>) -> Error {
        let failure = Failure { operation: operation.into(), ..Failure::new(kind, object) };
        Error(Box::new(Failure { source: Some(source.into()), ..failure }))
    }

    /// For `map_err`: a failed system call.
    pub fn system(operation: impl Into<Text>) -> impl FnOnce(io::Error) -> Error {
        let operation = operation.into();
        move |source| Error::of(ErrorKind::System, operation, Object::None, source)
    }

    /// A checkpoint that contradicts itself, or is not of this kind.
    pub fn damaged(reason: impl fmt::Display) -> Error {
        Error::about(ErrorKind::Damaged, Object::None, format!("the checkpoint is damaged: {reason}"))
    }

    /// Adds what to do about it.
    pub fn help(mut self, help: impl Into<Text>) -> Error {
        self.0.help = help.into();
        self
    }

    /// The reason, for callers that react to it.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The object of the failed operation.
    pub fn object(&self) -> &Object {
        &self.0.object
    }

    /// What to do about it; empty where the reason says it.
    pub fn advice(&self) -> &str {
        &self.0.help
    }

    /// True if QEMU has ended.
    pub fn is_gone(&self) -> bool {
        self.kind() == ErrorKind::Gone
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

impl pagemark::target::TargetError for Error {
    fn is_gone(&self) -> bool {
        Error::is_gone(self)
    }
}

impl From<pagemark_trace::Error> for Error {
    fn from(source: pagemark_trace::Error) -> Error {
        let kind = if source.is_gone() { ErrorKind::Gone } else { ErrorKind::Process };
        Error::of(kind, "", Object::None, source)
    }
}

impl From<pagemark::Error> for Error {
    fn from(source: pagemark::Error) -> Error {
        Error::of(ErrorKind::Store, "", Object::None, source)
    }
}

impl From<Error> for pagemark::Error {
    fn from(error: Error) -> pagemark::Error {
        pagemark::target::TargetError::into_error(error)
    }
}
