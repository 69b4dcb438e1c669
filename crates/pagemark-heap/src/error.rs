//! The error of this crate: the operation that failed, and why.

use std::borrow::Cow;
use std::fmt;
use std::io;

use pagemark::Range;
use pagemark::error::Failure;
use pagemark::target::TargetError;

use crate::Parts;

/// A heap that could not be made, opened or saved. Its text says what failed, why, and what to do;
/// callers match on [`kind`](Error::kind).
#[derive(Debug)]
pub struct Error(Box<Failure<ErrorKind, Cow<'static, str>>>);

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

    // Saved heaps
    /// Something else is mapped where the heap has to be.
    AddressTaken,
    /// The saved heap has another number of parts of a page. The pointers in it would not hold.
    OtherParts {
        /// The number that it has.
        saved: Parts,
        /// The number that was asked for.
        wanted: Parts,
    },
    /// Another version of the allocator made the heap, which has its tables in another form.
    OtherAllocator {
        /// The version that made it.
        saved: u64,
        /// The version that this program has.
        known: u64,
    },
    /// Another version of the program made the heap:
    /// [`HeapOptions::version`](crate::HeapOptions::version).
    OtherProgram {
        /// The version that the heap was made with.
        saved: u64,
        /// The version that was asked for.
        wanted: u64,
    },
    /// The job has no checkpoint.
    NeverSaved,
    /// The job has checkpoints already.
    Exists,
    /// The checkpoint holds something else than a heap.
    NotAHeap,
    /// The tables of the saved heap contradict each other: the program has overwritten them.
    Damaged,
    /// Somebody else has saved to the job since the heap was opened.
    SavedElsewhere,
    /// The address is outside of the heap.
    NotInHeap,
    /// The process is a forked child of the one that has the heap.
    ForkedChild,
    /// The repository or the tracker failed: [`Error::core_error`].
    Core(pagemark::ErrorKind),
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
        let failure = Failure::new(kind, "a heap".into());
        Error(Box::new(Failure {
            operation: "making".into(),
            source: Some(error.into()),
            help: help.into(),
            ..failure
        }))
    }

    fn about(kind: ErrorKind, object: impl Into<Cow<'static, str>>, reason: impl Into<Cow<'static, str>>) -> Error {
        Error(Box::new(Failure { reason: reason.into(), ..Failure::new(kind, object.into()) }))
    }

    fn help(mut self, help: impl Into<Cow<'static, str>>) -> Error {
        self.0.help = help.into();
        self
    }

    fn during(mut self, operation: impl Into<Cow<'static, str>>) -> Error {
        self.0.operation = operation.into();
        self
    }

    /// For `map_err`: the repository or the tracker failed.
    pub(crate) fn core(operation: &'static str, job: &str) -> impl FnOnce(pagemark::Error) -> Error {
        let job = format!("the heap of the job {job}");
        move |error| {
            // A checkpoint reports our own errors through the core.
            let kind = error.target_error::<Error>().map_or(ErrorKind::Core(error.kind()), Error::kind);
            let mut failed = Error::about(kind, job, "").during(operation);
            failed.0.source = Some(error.into());
            failed
        }
    }

    /// The views of a saved heap could not be mapped.
    pub(crate) fn mapping(error: io::Error, place: &Range) -> Error {
        if error.raw_os_error() != Some(libc::EEXIST) {
            return Error::creating(error);
        }
        let object = format!("the addresses {place:#x?} of the heap");
        Error::about(ErrorKind::AddressTaken, object, "are taken: something else is mapped there")
            .help("open the heap before the program maps other memory, and once in a process")
    }

    pub(crate) fn other_parts(saved: Parts, wanted: Parts) -> Error {
        let reason = format!("has {} parts in each page, and {} were asked for", saved.count(), wanted.count());
        Error::about(ErrorKind::OtherParts { saved, wanted }, "the saved heap", reason)
            .help("open it with the number that it was made with")
    }

    pub(crate) fn other_allocator(saved: u64, known: u64) -> Error {
        let reason =
            format!("was made by version {saved} of the allocator, and this program has version {known} of it");
        Error::about(ErrorKind::OtherAllocator { saved, known }, "the saved heap", reason)
            .help("use the version of Pagemark that made it")
    }

    pub(crate) fn other_program(saved: u64, wanted: u64) -> Error {
        let reason = format!("holds the data of version {saved} of the program, and version {wanted} was asked for");
        Error::about(ErrorKind::OtherProgram { saved, wanted }, "the saved heap", reason)
    }

    pub(crate) fn never_saved(job: &str) -> Error {
        Error::about(ErrorKind::NeverSaved, format!("the job {job}"), "has no checkpoint of a heap")
            .help("make a heap with SavedHeap::create")
    }

    pub(crate) fn exists(job: &str) -> Error {
        Error::about(ErrorKind::Exists, format!("the job {job}"), "has checkpoints already")
            .help("open the heap with SavedHeap::open, or choose another name")
    }

    pub(crate) fn not_a_heap(job: &str, sequence: u64) -> Error {
        Error::about(ErrorKind::NotAHeap, format!("checkpoint {sequence} of the job {job}"), "holds no heap")
    }

    pub(crate) fn damaged(what: impl Into<Cow<'static, str>>) -> Error {
        Error::about(ErrorKind::Damaged, "the tables of the saved heap", what)
            .help("the program has written outside of its objects: open an older checkpoint with SavedHeap::open_at")
    }

    pub(crate) fn saved_elsewhere(job: &str, newest: Option<u64>) -> Error {
        let reason = match newest {
            Some(newest) => format!("has the checkpoint {newest}, which this heap did not write"),
            None => "has lost the checkpoint that this heap has written".to_owned(),
        };
        Error::about(ErrorKind::SavedElsewhere, format!("the job {job}"), reason)
            .help("one program at a time can have the heap of a job")
    }

    pub(crate) fn not_in_heap(address: usize) -> Error {
        Error::about(ErrorKind::NotInHeap, format!("the address {address:#x}"), "is outside of the heap")
    }

    pub(crate) fn forked_child() -> Error {
        Error::about(ErrorKind::ForkedChild, "", "the heap belongs to the parent of this process")
    }

    /// The reason, for callers that react to it.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The error of the repository or the tracker, if one of them failed.
    pub fn core_error(&self) -> Option<&pagemark::Error> {
        self.0.source()?.downcast_ref()
    }
}

/// A checkpoint of a heap failed. The heap is never gone.
impl TargetError for Error {
    fn is_gone(&self) -> bool {
        false
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
