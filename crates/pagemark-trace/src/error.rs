//! The error of this crate: the operation that failed, the object that it failed on, and why.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::path::PathBuf;

use pagemark::error::Failure;
pub use pagemark::error::Source;
use pagemark_linux::proc;
use serde::{Deserialize, Serialize};

/// The result of an operation on processes.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failed operation on a process, on its files, or on a checkpoint of them.
///
/// Its text says what failed, on which object, why, and what to do: `cannot track process 7: …; use
/// --mechanism compare`. Callers that react to errors use [`kind`](Error::kind) and
/// [`is_gone`](Error::is_gone).
///
/// ```
/// use pagemark_process::{ErrorKind, attach};
///
/// let error = attach::check(i32::MAX).unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::Gone);
/// assert_eq!(error.to_string(), "there is no process 2147483647");
/// ```
#[derive(Debug)]
pub struct Error(Box<Failure<ErrorKind, Object>>);

type Text = Cow<'static, str>;

/// The reasons for errors that callers distinguish.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ErrorKind {
    /// There is no such process, or it has exited or executed another program.
    Gone,
    /// The process has exited, and its parent has not waited for it yet.
    Zombie,
    /// The first thread of the process has exited, and others run.
    FirstThreadExited,
    /// The id is that of a thread of another process.
    Thread,
    /// The process is a thread of the kernel.
    KernelThread,
    /// The process is the first one of the system.
    FirstProcess,
    /// The process is this one.
    OwnProcess,
    /// The process has started this one, directly or through others.
    Ancestor,
    /// Tracing the process is not permitted, or no user of the job may do what a checkpoint or a
    /// restore would do to a file.
    NotPermitted,
    /// The process, or a thread of it, executes 32-bit code.
    Is32Bit,
    /// Another process traces the process.
    Traced,
    /// The process uses userfaultfd itself.
    UsesUserfaultfd,
    /// Another Pagemark tracks the process.
    Watched,
    /// The process is in another namespace of process ids.
    PidNamespace,
    /// Seccomp filters of the process cannot be suspended.
    Seccomp,
    /// A thread of the process does not stop.
    DoesNotStop,
    /// The process changes its virtual machine, and cannot give it up at this moment.
    Busy,
    /// The restored processes cannot continue without their virtual machine.
    StaysInMachine,
    /// The process has no free bytes behind its code, where a thread could make a system call.
    NoRoom,
    /// The process turns its system calls into signals.
    Dispatch,
    /// A process has something open, or mapped, that no checkpoint can have.
    CannotSave,
    /// A thread confines itself, or has keys of its own, in a way that no restore gives back.
    Confined,
    /// The process may not create a userfaultfd.
    Refused,
    /// The memory of the process cannot be kept as it is in a freeze.
    CannotKeep,
    /// The process that holds a frozen tree has died.
    NoHolder,
    /// The program to start was not found.
    NotFound,
    /// The library with the heap was not found, or cannot be preloaded.
    NoHeap,
    /// There is no CRIU, or it is too old or does not work on this machine.
    NoCriu,
    /// CRIU failed, or refused.
    Criu,
    /// An image of CRIU's is damaged or of an unknown kind.
    Image,
    /// The process was killed while it was frozen.
    Killed,
    /// A tracker failed.
    Track,
    /// The store of pages failed.
    Store,
    /// The checkpoint lacks the process.
    NoProcess,
    /// The checkpoint is damaged.
    Damaged,
    /// The checkpoint holds memory alone, so that no process can be restored from it.
    MemoryOnly,
    /// The restore would change files that its user may not expect to change, and
    /// `Restore::allow_unusual_files` does not
    /// allow it.
    NoConsent,
    /// A socket would have root as its peer that had another user, and
    /// `Restore::root_peers` does not allow it.
    PeerIsRoot,
    /// Another process or thread has an id that the restored tree needs.
    PidInUse,
    /// Another process or thread got an id that the restored tree needs, which was free before.
    PidTaken,
    /// A file cannot be reached by its path, or by the path that the checkpoint records.
    BadPath,
    /// A file was changed and could not be changed back. Its previous content was set aside.
    NotUndone,
    /// Something that the restored processes need is in use or missing.
    InTheWay,
    /// A file has a lease that a checkpoint would break.
    Leased,
    /// A process has the file open for writing.
    FileInUse,
    /// There is not enough space on a file system.
    NoSpace,
    /// There are no asides of that name.
    NoAside,
    /// A system call failed.
    System,
}

/// The object of a failed operation.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Object {
    /// None: the operation names it.
    None,
    /// A process, by its id.
    Process(i32),
    /// A process, by its id and the name of its command.
    Command(i32, String),
    /// A thread.
    Thread {
        /// Its id.
        tid: i32,
        /// The process that it belongs to.
        pid: i32,
    },
    /// A process id.
    Id(i32),
    /// A file or directory.
    File(PathBuf),
    /// A socket, by a process that has it and its descriptor there. None has one that waits in the
    /// queue of another.
    Socket(Option<(i32, u32)>),
    /// The CRIU image in a file.
    Image(PathBuf),
    /// Text from a checkpoint, which may be anything. It is shown quoted.
    Recorded(String),
}

impl Object {
    /// A process, with the name of its command if it still exists.
    pub fn command(pid: i32) -> Object {
        match proc::Stat::read(pid) {
            Ok(stat) => Object::Command(pid, stat.command),
            Err(_) => Object::Process(pid),
        }
    }
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Object::None => Ok(()),
            Object::Process(pid) => write!(f, "process {pid}"),
            Object::Command(pid, command) => write!(f, "process {pid} ({command})"),
            Object::Thread { tid, pid } => write!(f, "thread {tid} of process {pid}"),
            Object::Id(pid) => write!(f, "process id {pid}"),
            Object::File(path) => path.display().fmt(f),
            Object::Socket(Some((pid, number))) => {
                write!(f, "the socket that process {pid} had as descriptor {number}")
            }
            Object::Socket(None) => f.write_str("a socket in the queue of another"),
            Object::Image(path) => write!(f, "the CRIU image {}", path.display()),
            Object::Recorded(text) => write!(f, "{text:?}"),
        }
    }
}

impl Error {
    /// An error whose text is `OBJECT REASON`.
    pub fn about(kind: ErrorKind, object: Object, reason: impl Into<Text>) -> Error {
        Error(Box::new(Failure { reason: reason.into(), ..Failure::new(kind, object) }))
    }

    /// A checkpoint that contradicts itself, as `reason` says.
    pub fn damaged(reason: impl fmt::Display) -> Error {
        Error::about(ErrorKind::Damaged, Object::None, format!("the checkpoint is damaged: {reason}"))
    }

    /// An error whose text is `OPERATION OBJECT: SOURCE`.
    pub fn of(kind: ErrorKind, operation: impl Into<Text>, object: Object, source: impl Into<Source>) -> Error {
        Error::about(kind, object, Text::default()).during(operation).caused_by(source)
    }

    /// For `map_err`: a failed system call. Its kind is [`ErrorKind::System`].
    pub fn system(operation: impl Into<Text>, object: Object) -> impl FnOnce(io::Error) -> Error {
        let operation = operation.into();
        move |source| Error::of(ErrorKind::System, operation, object, source)
    }

    /// There is no such process.
    pub fn no_process(pid: i32) -> Error {
        let error = Error::about(ErrorKind::Gone, Object::Process(pid), Text::default());
        error.during("there is no")
    }

    /// The process was there, and is gone.
    pub fn gone(pid: i32) -> Error {
        Error::about(ErrorKind::Gone, Object::Process(pid), "has exited or executed another program")
    }

    /// The process was killed in the freeze, so that its memory is gone and its state is not.
    pub fn killed(pid: i32) -> Error {
        Error::about(ErrorKind::Killed, Object::Process(pid), "was killed while it was being saved")
            .help("what is left of its tree can be saved the next time")
    }

    /// Names the operation that failed, if the error did not name any.
    pub fn during(mut self, operation: impl Into<Text>) -> Error {
        self.0.operation = operation.into();
        self
    }

    /// Adds the error that caused this one.
    pub fn caused_by(mut self, source: impl Into<Source>) -> Error {
        self.0.source = Some(source.into());
        self
    }

    /// Adds what to do about it.
    pub fn help(mut self, help: impl Into<Text>) -> Error {
        self.0.help = help.into();
        self
    }

    /// An error of a larger operation that failed because of this one. The kind stays.
    pub fn within(self, operation: impl Into<Text>, object: Object) -> Error {
        Error::of(self.kind(), operation, object, self)
    }

    /// The reason, for callers that react to it.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// What to do about it; empty where the reason says it.
    pub fn advice(&self) -> &str {
        &self.0.help
    }

    /// The object of the failed operation.
    pub fn object(&self) -> &Object {
        &self.0.object
    }

    /// The cause as text, without the operation and the object.
    pub fn reason(&self) -> String {
        self.0.reason()
    }

    /// True if the process is gone, or has exited and only waits for its parent.
    pub fn is_gone(&self) -> bool {
        matches!(self.kind(), ErrorKind::Gone | ErrorKind::Zombie)
    }

    /// The error of the system call that failed, if one did, here or in an operation below.
    pub fn io_error(&self) -> Option<&io::Error> {
        self.0.io_error()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl From<pagemark::Error> for Error {
    fn from(source: pagemark::Error) -> Error {
        Error::of(ErrorKind::Store, "", Object::None, source)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}

/// An error as it is sent from one process to another. Of a source only the number of the failed
/// system call's error is kept.
#[derive(Serialize, Deserialize)]
pub struct SentError {
    kind: ErrorKind,
    operation: Text,
    object: Object,
    reason: Text,
    errno: Option<i32>,
    help: Text,
}

impl From<Error> for SentError {
    fn from(error: Error) -> SentError {
        let errno = error.io_error().map(|error| error.raw_os_error().unwrap_or(libc::EIO));
        let Failure { kind, operation, object, reason, help, .. } = *error.0;
        SentError { kind, operation, object, reason, errno, help }
    }
}

impl From<SentError> for Error {
    fn from(sent: SentError) -> Error {
        let SentError { kind, operation, object, reason, errno, help } = sent;
        let source = errno.map(|errno| Source::from(io::Error::from_raw_os_error(errno)));
        Error(Box::new(Failure { kind, operation, object, reason, source, help }))
    }
}

impl pagemark::target::TargetError for Error {
    /// True if the root process has exited.
    fn is_gone(&self) -> bool {
        Error::is_gone(self)
    }
}

impl From<Error> for pagemark::Error {
    fn from(error: Error) -> pagemark::Error {
        pagemark::target::TargetError::into_error(error)
    }
}

/// Errors of CRIU, which the crate above starts.
impl Error {
    /// For `map_err`: a system call for CRIU failed.
    pub fn criu_io(operation: impl Into<Cow<'static, str>>) -> impl FnOnce(std::io::Error) -> Error {
        let operation = operation.into();
        move |source| Error::of(ErrorKind::Criu, operation, Object::None, source)
    }

    /// CRIU failed, or refused: `what` it was to do, and its own words.
    pub fn criu_failed(what: impl fmt::Display, reason: impl Into<String>) -> Error {
        Error::of(ErrorKind::Criu, format!("CRIU could not {what}"), Object::None, reason.into())
    }

    /// CRIU does not answer. It is not killed, because that might harm the process.
    pub fn criu_no_answer(what: impl fmt::Display, criu_pid: u32, limit_s: u64) -> Error {
        let reason = format!("CRIU (process {criu_pid}) did not {what} within {limit_s} s");
        let error = Error::about(ErrorKind::Criu, Object::None, reason);
        error.help("it is not killed, and lets the process resume when it is done")
    }

    /// The first thread of the process has exited.
    pub fn first_thread_exited(pid: i32) -> Error {
        let reason = "cannot be saved whole: its first thread has exited while others run, and CRIU cannot save such a \
                      process";
        Error::about(ErrorKind::FirstThreadExited, Object::command(pid), reason)
            .help("save memory alone with --memory-only, or have the first thread wait for the others")
    }

    /// The process exited before CRIU saved it, or its first thread did.
    pub fn criu_gone(pid: i32) -> Error {
        if proc::has_exited_first(pid) {
            return Error::first_thread_exited(pid);
        }
        Error::about(ErrorKind::Gone, Object::Process(pid), "is gone")
    }

    /// The CRIU image in a file cannot be read.
    pub fn image(path: impl Into<PathBuf>, reason: impl Into<String>) -> Error {
        let object = Object::Image(path.into());
        Error::about(ErrorKind::Image, object, "is damaged or of an unknown kind").caused_by(reason.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn denied() -> io::Error {
        io::Error::from_raw_os_error(libc::EACCES)
    }

    #[test]
    fn the_text_says_what_failed_on_what_and_why() {
        let cat = || Object::Command(7, "cat".into());
        let texts = [
            (Error::no_process(7), "there is no process 7"),
            (Error::about(ErrorKind::OwnProcess, cat(), "is pagemark itself"), "process 7 (cat) is pagemark itself"),
            (
                Error::about(ErrorKind::Damaged, Object::None, "the checkpoint is damaged: no thread"),
                "the checkpoint is damaged: no thread",
            ),
            (
                Error::system("open", Object::File("/a b".into()))(denied()).help("run it as root"),
                "open /a b: Permission denied (os error 13); run it as root",
            ),
            (
                Error::about(ErrorKind::NotPermitted, Object::Thread { tid: 8, pid: 7 }, "may not be traced")
                    .caused_by(denied())
                    .within("cannot track", Object::Process(7)),
                "cannot track process 7: thread 8 of process 7 may not be traced: Permission denied (os error 13)",
            ),
            (
                Error::about(ErrorKind::BadPath, Object::Recorded("/a\n".into()), "it is not plain").during("the file"),
                "the file \"/a\\n\": it is not plain",
            ),
        ];
        for (error, text) in texts {
            assert_eq!(error.to_string(), text);
        }
    }

    #[test]
    fn an_error_is_the_same_after_it_was_sent() {
        let error = Error::system("attach to", Object::Thread { tid: 8, pid: 7 })(denied()).help("try again");
        let sent = serde_json::to_vec(&SentError::from(error)).unwrap();
        let received = Error::from(serde_json::from_slice::<SentError>(&sent).unwrap());
        assert_eq!(received.to_string(), "attach to thread 8 of process 7: Permission denied (os error 13); try again");
        assert_eq!(received.io_error().and_then(io::Error::raw_os_error), Some(libc::EACCES));
    }

    #[test]
    fn the_error_of_a_system_call_is_found_below() {
        let error = Error::system("open", Object::None)(denied()).within("track", Object::Process(7));
        assert_eq!(error.io_error().and_then(io::Error::raw_os_error), Some(libc::EACCES));
        assert!(Error::gone(7).within("track", Object::Process(7)).is_gone());
        assert!(Error::no_process(7).io_error().is_none());
    }
}
