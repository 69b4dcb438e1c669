//! The error of this crate: the operation that failed, the object that it failed on, and why.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::path::PathBuf;

use crate::backend::BackendError;
use crate::{ContentId, Range};

/// A failed operation. The error types of the workspace's crates have this shape: callers match on
/// the kind, and people read the text.
///
/// The text is `OPERATION OBJECT: REASON: SOURCE; HELP`, without the parts that are empty. An
/// object without an operation is the subject of the reason: `OBJECT REASON: SOURCE`.
#[derive(Debug)]
pub struct Failure<Kind, Object> {
    /// The reason, for callers that react to it.
    pub kind: Kind,
    /// The operation; empty if the object and the reason say it.
    pub operation: Cow<'static, str>,
    /// The object of the operation. Its text may be empty.
    pub object: Object,
    /// The reason, for people; may be empty.
    pub reason: Cow<'static, str>,
    /// The error that caused this one.
    pub source: Option<Source>,
    /// What to do about it; may be empty.
    pub help: Cow<'static, str>,
}

/// The cause of an error.
pub type Source = Box<dyn std::error::Error + Send + Sync>;

impl<Kind, Object> Failure<Kind, Object> {
    /// A failure of which only the kind and the object are known.
    pub fn new(kind: Kind, object: Object) -> Self {
        let (operation, reason, help) = (Cow::default(), Cow::default(), Cow::default());
        Failure { kind, operation, object, reason, source: None, help }
    }

    /// The error that caused this one.
    pub fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }

    /// The cause as text, without the operation and the object.
    pub fn reason(&self) -> String {
        self.source.as_ref().map_or_else(|| self.reason.to_string(), ToString::to_string)
    }

    /// The error of the system call that failed, if one did, here or in an operation below.
    pub fn io_error(&self) -> Option<&io::Error> {
        std::iter::successors(self.source(), |error| error.source()).find_map(|error| error.downcast_ref())
    }
}

impl<Kind, Object: fmt::Display> fmt::Display for Failure<Kind, Object> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Failure { operation, object, reason, source, help, .. } = self;
        let object = object.to_string();
        let subject = [operation.as_ref(), &object].into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>();
        f.write_str(&subject.join(" "))?;
        if !reason.is_empty() {
            let separator = match (operation.is_empty(), subject.is_empty()) {
                (_, true) => "",
                (true, false) => " ",
                (false, false) => ": ",
            };
            write!(f, "{separator}{reason}")?;
        }
        if let Some(source) = source {
            let separator = if subject.is_empty() && reason.is_empty() { "" } else { ": " };
            write!(f, "{separator}{source}")?;
        }
        if help.is_empty() { Ok(()) } else { write!(f, "; {help}") }
    }
}

/// A failed operation of this crate, on a repository, a tracker, a region, a snapshot or a target.
///
/// Its text says what failed, on which object, why, and what to do. Callers that react to errors
/// match on [`kind`](Error::kind):
///
/// ```
/// use pagemark::ErrorKind;
/// use pagemark::repository::Repository;
///
/// # let directory = tempfile::tempdir().unwrap();
/// # let path = directory.path();
/// let error = Repository::open(path).err().unwrap();
/// assert_eq!(error.kind(), ErrorKind::NotARepository);
/// assert!(error.to_string().contains("is no repository"));
/// ```
#[derive(Debug)]
pub struct Error(Box<Failure<ErrorKind, Object>>);

/// The reasons for errors that callers distinguish.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum ErrorKind {
    // Storage
    /// A backend has no such object.
    NotFound,
    /// The disk is full, or a quota is used up.
    NoRoom,
    /// A backend failed.
    Storage,
    /// The reader, writer or file that content was copied from or to failed.
    Stream,
    /// A store does not hold the content.
    Missing,
    /// Content does not match its id.
    Damaged,
    /// A look-up table of a repository is damaged. Content can be found without it.
    DamagedTable,
    /// A piece of content is larger than a store holds in one piece.
    TooLarge,
    /// Content was put into a store that was opened for reading.
    ReadOnly,
    /// An earlier write failed, so that the content put since the last commit is lost.
    Aborted,

    // Repositories
    /// The directory is no repository.
    NotARepository,
    /// There is a repository already.
    Exists,
    /// The directory for a new repository holds something else.
    NotEmpty,
    /// The repository was moved, removed or replaced since it was opened.
    Replaced,
    /// Other users can change the repository: they could have content restored that no program of
    /// its owner ever had.
    /// [`RepositoryOptions::trusted`](crate::repository::RepositoryOptions::trusted) opens it
    /// nevertheless.
    Exposed,
    /// A later version of Pagemark wrote the repository or the checkpoint.
    NewerFormat {
        /// The version that was found.
        found: u64,
        /// The newest known version.
        known: u64,
    },
    /// The file `config` of a repository is damaged, and so is its copy or there is none. Without
    /// the key nothing can be checked.
    DamagedConfig,
    /// A commit record is damaged.
    DamagedRecord,
    /// Another process keeps others from writing to the repository.
    InUse,
    /// The job belongs to another program, which runs.
    JobInUse,
    /// The text cannot be the name of a job.
    InvalidName,
    /// There is no such checkpoint, or no longer.
    NoCheckpoint,
    /// A manifest that was to be committed gives two spaces one id.
    DuplicateSpace,

    // Trackers
    /// The tracked address space is gone: its process has exited or executed another program.
    Gone,
    /// The kernel lacks the mechanism or refuses it. The text says what would enable it.
    Unavailable,
    /// A system call failed: [`Error::io_error`].
    System,

    // Regions
    /// Commit or rollback without an open transaction.
    NoTransaction,
    /// An operation that an open transaction excludes.
    TransactionOpen,
    /// Rollback of a region that was made without it, or reverting changes without old content.
    NoRollback,
    /// The range does not belong to the memory that the tracker was made for.
    NotOwned,
    /// The memory of a region was mapped anew, or its protection was changed. The writes since then
    /// are unknown.
    Remapped,
    /// The memory to adopt does not consist of whole pages, or a view begins within a number.
    Unaligned,
    /// The memory to adopt overlaps a region.
    Overlaps,
    /// Part of the memory is not mapped.
    NotMapped,
    /// The memory to adopt is not readable, not writable, or executable.
    NotData,
    /// The memory to adopt is a mapping that is longer than its file.
    BeyondFile,
    /// The memory to adopt is shared, and the mechanism does not see writes of other processes.
    Shared,
    /// Offsets exceed a region or a snapshot.
    OutOfRange,
    /// The process is a forked child of the process that made the region.
    ForkedChild,
    /// The snapshot is of another region.
    WrongRegion,
    /// A target names a region or a label twice.
    NotDistinct,
    /// The region belongs to a target that was made later.
    SavedElsewhere,
    /// The job has no checkpoint of a region.
    NeverSaved,
    /// The checkpoint holds no region of that label.
    NoRegion,
    /// The saved region has another length.
    SavedLengthDiffers,

    // Snapshots
    /// The size is not a possible size of chunks.
    ChunkSize,
    /// The snapshot belongs to another store.
    WrongStore,
    /// The snapshot, or the changes, are of memory of another length.
    LengthDiffers,
    /// The content exceeds the budget, even with all chunks packed.
    BudgetExceeded {
        /// The budget.
        budget_bytes: u64,
        /// A budget that suffices. Less may suffice if chunks of the snapshot are equal to each
        /// other or can be compressed.
        needed_bytes: u64,
    },
    /// The kernel has no memory.
    NoMemory,
    /// The store has no numbers for more chunks or nodes.
    StoreFull,

    // Targets
    /// The target failed: [`Error::target_error`].
    Target,
}

/// The object of a failed operation.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Object {
    /// None: the operation or the reason names it.
    None,
    /// A file or directory.
    Path(PathBuf),
    /// A piece of content.
    Content(ContentId),
    /// The commit record in a file.
    Record(PathBuf),
    /// The look-up table in an object of a backend.
    Table(String),
    /// A checkpoint.
    Checkpoint {
        /// The job.
        job: String,
        /// Number of the checkpoint in the job.
        sequence: u64,
    },
    /// A job.
    Job(String),
    /// Text of the caller, which may be anything. It is shown quoted.
    Name(String),
    /// Addresses.
    Range(Range),
    /// Another object, by its text.
    Other(Cow<'static, str>),
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Object::None => Ok(()),
            Object::Path(path) => path.display().fmt(f),
            Object::Content(id) => id.fmt(f),
            Object::Record(path) => write!(f, "the commit record {}", path.display()),
            Object::Table(name) => write!(f, "the table of {name}"),
            Object::Checkpoint { job, sequence } => write!(f, "checkpoint {sequence} of the job {job}"),
            Object::Job(name) => write!(f, "the job {name}"),
            Object::Name(name) => write!(f, "{name:?}"),
            Object::Range(range) => write!(f, "{range:#x?}"),
            Object::Other(text) => f.write_str(text),
        }
    }
}

impl Error {
    /// An error whose text is `OBJECT REASON`.
    pub(crate) fn about(kind: ErrorKind, object: Object, reason: impl Into<Cow<'static, str>>) -> Error {
        let failure = Failure { reason: reason.into(), ..Failure::new(kind, object) };
        Error(Box::new(failure))
    }

    /// An error whose text is `REASON`.
    pub(crate) fn because(kind: ErrorKind, reason: impl Into<Cow<'static, str>>) -> Error {
        Error::about(kind, Object::None, reason)
    }

    /// For `map_err`: a failed system call. Its text is `OPERATION: SOURCE`.
    pub fn system(operation: impl Into<Cow<'static, str>>) -> impl FnOnce(io::Error) -> Error {
        let operation = operation.into();
        move |source| Error::because(ErrorKind::System, "").during(operation).caused_by(source)
    }

    /// An error whose text is `OBJECT is damaged: CHECK`, with the check that failed.
    pub(crate) fn damaged(kind: ErrorKind, object: Object, check: impl Into<String>) -> Error {
        Error::about(kind, object, "is damaged").caused_by(check.into())
    }

    /// Content that does not match its id, or that is not what refers to it says.
    pub(crate) fn damaged_content(id: ContentId, check: impl Into<String>) -> Error {
        Error::damaged(ErrorKind::Damaged, Object::Content(id), check)
    }

    /// Content that a store does not hold.
    pub(crate) fn missing(id: ContentId) -> Error {
        Error::about(ErrorKind::Missing, Object::Content(id), "").during("the store does not hold")
    }

    /// Copy-on-write of a target that cannot keep pages:
    /// [`Frozen::keep`](crate::target::Frozen::keep).
    pub fn cannot_keep_pages() -> Error {
        let reason = "this target cannot keep the pages of a freeze until they are copied";
        Error::because(ErrorKind::Unavailable, reason).help("use the strategy pre-copy")
    }

    /// A failure of a target: [`TargetError::into_error`](crate::target::TargetError::into_error).
    pub(crate) fn of_target(kind: ErrorKind, source: impl Into<Source>) -> Error {
        Error::because(kind, "").caused_by(source)
    }

    /// Names the operation.
    pub(crate) fn during(mut self, operation: impl Into<Cow<'static, str>>) -> Error {
        self.0.operation = operation.into();
        self
    }

    /// Adds the error that caused this one.
    pub(crate) fn caused_by(mut self, source: impl Into<Source>) -> Error {
        self.0.source = Some(source.into());
        self
    }

    /// Adds what to do about it.
    pub(crate) fn help(mut self, help: impl Into<Cow<'static, str>>) -> Error {
        self.0.help = help.into();
        self
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

    /// True if there is nothing left to track or to checkpoint: the process has exited or executed
    /// another program, the target has ended, or the region's memory was unmapped.
    pub fn is_gone(&self) -> bool {
        matches!(self.kind(), ErrorKind::Gone | ErrorKind::NotMapped)
    }

    /// True if the backend of a repository failed. Another attempt may succeed.
    pub fn is_storage(&self) -> bool {
        matches!(self.kind(), ErrorKind::NotFound | ErrorKind::NoRoom | ErrorKind::Replaced | ErrorKind::Storage)
    }

    /// The error of the target, for kind [`ErrorKind::Target`] and for a target that is gone; none
    /// if the target's errors are of another type.
    pub fn target_error<E: std::error::Error + 'static>(&self) -> Option<&E> {
        self.0.source()?.downcast_ref()
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

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}

impl From<BackendError> for Error {
    fn from(error: BackendError) -> Error {
        let kind = match () {
            () if error.is_not_found() => ErrorKind::NotFound,
            () if error.is_full() => ErrorKind::NoRoom,
            () if error.is_displaced() => ErrorKind::Replaced,
            () => ErrorKind::Storage,
        };
        let BackendError { operation, object, source } = error;
        Error::about(kind, Object::Other(object.into()), "").during(operation).caused_by(source)
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
        let path = || PathBuf::from("/a b");
        let checkpoint = || Object::Checkpoint { job: "web".into(), sequence: 7 };
        let texts = [
            (Error::because(ErrorKind::StoreFull, "the store is full"), "the store is full"),
            (Error::about(ErrorKind::Exists, Object::Path(path()), "is a repository"), "/a b is a repository"),
            (
                Error::damaged(ErrorKind::DamagedRecord, Object::Record(path()), "its length is wrong")
                    .help("read others"),
                "the commit record /a b is damaged: its length is wrong; read others",
            ),
            (
                Error::about(ErrorKind::NoCheckpoint, checkpoint(), "").during("/a b has no"),
                "/a b has no checkpoint 7 of the job web",
            ),
            (
                Error::about(ErrorKind::InvalidName, Object::Name("\n".into()), "it has no letter").during("the name"),
                "the name \"\\n\": it has no letter",
            ),
            (Error::system("map 7 bytes")(denied()), "map 7 bytes: Permission denied (os error 13)"),
            (BackendError::new("open", "/a b")(denied()).into(), "open /a b: Permission denied (os error 13)"),
            (Error::of_target(ErrorKind::Target, "it stopped"), "it stopped"),
        ];
        for (error, text) in texts {
            assert_eq!(error.to_string(), text);
        }
    }

    #[test]
    fn the_error_of_a_backend_has_its_kind_and_its_cause() {
        for (cause, kind) in
            [(libc::ENOENT, ErrorKind::NotFound), (libc::ENOSPC, ErrorKind::NoRoom), (libc::EIO, ErrorKind::Storage)]
        {
            let error = Error::from(BackendError::new("read", "object")(io::Error::from_raw_os_error(cause)));
            assert_eq!((error.kind(), error.is_storage()), (kind, true));
            assert_eq!(error.io_error().and_then(io::Error::raw_os_error), Some(cause));
        }
    }

    #[test]
    fn the_cause_of_damage_is_known_without_the_object() {
        let error = Error::damaged_content(ContentId([1; 16]), "its hash differs");
        assert_eq!((error.kind(), error.reason()), (ErrorKind::Damaged, "its hash differs".to_owned()));
        assert_eq!(error.object(), &Object::Content(ContentId([1; 16])));
    }
}
