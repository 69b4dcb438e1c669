//! What a call answers, and the words for it.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

use pagemark::{Error, ErrorKind};

/// How a call went.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Status {
    /// As asked.
    Ok = 0,
    /// A pointer that is needed is null.
    NullPointer,
    /// An argument that can't be: a mechanism of that name, a chunk of that size, a range that ends
    /// before it starts.
    InvalidArgument,
    /// Commit or rollback without begin.
    NoTransaction,
    /// Begin in a transaction.
    TransactionOpen,
    /// The region was made without rollback, or the changes have no old content.
    NoRollback,
    /// Memory to adopt that is not made of whole pages.
    Unaligned,
    /// Memory to adopt that belongs to a region already.
    Overlaps,
    /// Not everything is mapped.
    NotMapped,
    /// Memory to adopt that is not readable, writable and not executable.
    NotData,
    /// A mapping to adopt that is longer than its file.
    BeyondFile,
    /// Shared memory to adopt, without the promise of its sole use.
    Shared,
    /// The memory of a region was mapped anew, or its protection was changed.
    Remapped,
    /// Offsets beyond the end, or an address outside of the heap.
    OutOfRange,
    /// The process was forked from the one that made the region, or that has the heap.
    ForkedChild,
    /// The snapshot belongs to another region.
    WrongRegion,
    /// The snapshots are held by different stores.
    WrongStore,
    /// Two things are of different lengths: snapshots, regions, changes.
    LengthDiffers,
    /// The store's budget can't be kept.
    BudgetExceeded,
    /// The store has no numbers left for more.
    StoreFull,
    /// The mechanism does not work here.
    Unavailable,
    /// The job has no checkpoint of a region, or of a heap.
    NeverSaved,
    /// A new heap for a job that has checkpoints already.
    Exists,
    /// The saved heap was made with another version, another number of parts, or by another version
    /// of the allocator.
    OtherHeap,
    /// Something else is mapped where the saved heap has to be.
    AddressTaken,
    /// Another program has saved to the job since the heap was opened.
    SavedElsewhere,
    /// Bytes to decode that are cut or damaged, or that a later version of Pagemark has encoded; a
    /// saved heap whose tables the program has overwritten.
    Damaged,
    /// The repository could not be read or written.
    Repository,
    /// The kernel gives no memory.
    NoMemory,
    /// A system call failed.
    System,
    /// A defect of Pagemark. The region and its handles should not be used any more.
    Internal,
}

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// The message of the last failed call of this thread: what failed, and what to do. An empty string
/// if no call has failed. The string lives until another call of this thread fails or the thread
/// ends.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_last_error() -> *const c_char {
    LAST_ERROR.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// A call that failed.
#[derive(Debug)]
pub(crate) struct Failure {
    status: Status,
    message: String,
}

impl Failure {
    pub fn new(status: Status, message: impl Into<String>) -> Failure {
        Failure { status, message: message.into() }
    }

    fn of_panic(panic: &(dyn Any + Send)) -> Failure {
        let said = panic.downcast_ref::<&str>().copied().or(panic.downcast_ref::<String>().map(String::as_str));
        Failure::new(Status::Internal, format!("a defect of Pagemark: {}", said.unwrap_or("it says nothing")))
    }

    fn remember(self) -> Status {
        // A message holds no NUL but for one in a name that came from outside.
        let message = CString::new(self.message.replace('\0', " ")).unwrap_or_default();
        // A thread that is about to end has no place for messages any more.
        let _ = LAST_ERROR.try_with(|last| last.replace(message));
        self.status
    }
}

impl From<ErrorKind> for Status {
    fn from(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::NoTransaction => Status::NoTransaction,
            ErrorKind::TransactionOpen => Status::TransactionOpen,
            ErrorKind::NoRollback => Status::NoRollback,
            ErrorKind::Unaligned => Status::Unaligned,
            ErrorKind::Overlaps => Status::Overlaps,
            ErrorKind::NotMapped => Status::NotMapped,
            ErrorKind::NotData => Status::NotData,
            ErrorKind::BeyondFile => Status::BeyondFile,
            ErrorKind::Shared => Status::Shared,
            ErrorKind::Remapped => Status::Remapped,
            ErrorKind::OutOfRange => Status::OutOfRange,
            ErrorKind::ForkedChild => Status::ForkedChild,
            ErrorKind::WrongRegion => Status::WrongRegion,
            ErrorKind::WrongStore => Status::WrongStore,
            ErrorKind::LengthDiffers | ErrorKind::SavedLengthDiffers => Status::LengthDiffers,
            ErrorKind::BudgetExceeded { .. } => Status::BudgetExceeded,
            ErrorKind::StoreFull => Status::StoreFull,
            ErrorKind::NoMemory => Status::NoMemory,
            ErrorKind::Unavailable => Status::Unavailable,
            ErrorKind::NeverSaved | ErrorKind::NoRegion => Status::NeverSaved,
            ErrorKind::ChunkSize | ErrorKind::InvalidName | ErrorKind::NotDistinct => Status::InvalidArgument,
            ErrorKind::Gone | ErrorKind::System => Status::System,
            _ => Status::Repository,
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::new(error.kind().into(), error.to_string())
    }
}

impl From<pagemark_saved_heap::Error> for Failure {
    fn from(error: pagemark_saved_heap::Error) -> Self {
        use pagemark_saved_heap::ErrorKind;
        let status = match error.kind() {
            ErrorKind::NoRoom => Status::NoMemory,
            ErrorKind::AddressTaken => Status::AddressTaken,
            ErrorKind::OtherParts { .. } | ErrorKind::OtherAllocator { .. } | ErrorKind::OtherProgram { .. } => {
                Status::OtherHeap
            }
            ErrorKind::NeverSaved | ErrorKind::NotAHeap => Status::NeverSaved,
            ErrorKind::Exists => Status::Exists,
            ErrorKind::Damaged => Status::Damaged,
            ErrorKind::SavedElsewhere => Status::SavedElsewhere,
            ErrorKind::NotInHeap => Status::OutOfRange,
            ErrorKind::ForkedChild => Status::ForkedChild,
            ErrorKind::Core(kind) => kind.into(),
            _ => Status::System,
        };
        Failure::new(status, error.to_string())
    }
}

/// Does what a call asks for. A failure is remembered, and so is a panic, which ends here. The
/// thread is not cancelled meanwhile: that would unwind what cannot be unwound, and end the
/// process.
pub(crate) fn guard(call: impl FnOnce() -> Result<(), Failure>) -> Status {
    let _whole = WithoutCancellation::begin();
    guard_quick(call)
}

/// Like [`guard`], for calls that cannot wait and make no system call.
#[inline]
pub(crate) fn guard_quick(call: impl FnOnce() -> Result<(), Failure>) -> Status {
    match catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| Err(Failure::of_panic(&*panic))) {
        Ok(()) => Status::Ok,
        Err(failure) => failure.remember(),
    }
}

/// While a thread has it, `pthread_cancel` waits.
struct WithoutCancellation {
    before: c_int,
}

impl WithoutCancellation {
    fn begin() -> WithoutCancellation {
        const PTHREAD_CANCEL_DISABLE: c_int = 1;
        WithoutCancellation { before: set_cancellation(PTHREAD_CANCEL_DISABLE) }
    }
}

impl Drop for WithoutCancellation {
    fn drop(&mut self) {
        set_cancellation(self.before);
    }
}

/// Sets whether the thread can be cancelled, and returns how that was.
fn set_cancellation(state: c_int) -> c_int {
    unsafe extern "C" {
        // Not in the crate libc for all C libraries.
        fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
    }
    let mut before = state;
    // SAFETY: the call writes the number.
    unsafe { pthread_setcancelstate(state, &raw mut before) };
    before
}

/// Like [`guard`], for calls that answer with a value; `otherwise` after a failure.
pub(crate) fn value_or<T>(otherwise: T, call: impl FnOnce() -> Result<T, Failure>) -> T {
    let mut value = otherwise;
    guard(|| {
        value = call()?;
        Ok(())
    });
    value
}

/// Like [`guard`], for calls that make a handle.
pub(crate) fn make<T>(
    out: Option<&mut MaybeUninit<Option<Box<T>>>>,
    name: &str,
    call: impl FnOnce() -> Result<T, Failure>,
) -> Status {
    guard(|| {
        let out = present(out, name)?.write(None);
        *out = Some(Box::new(call()?));
        Ok(())
    })
}

/// An array of the caller, which may be null if it is empty.
///
/// # Safety
/// The pointer is that of so many values, which nobody changes as long as they are used.
pub(crate) unsafe fn slice<'a, T>(pointer: Option<NonNull<T>>, count: usize, name: &str) -> Result<&'a [T], Failure> {
    if count == 0 {
        return Ok(&[]);
    }
    let pointer = present(pointer, name)?;
    // No array is longer, and Rust does not allow one.
    if count.checked_mul(size_of::<T>()).is_none_or(|bytes| bytes > isize::MAX as usize) {
        return Err(Failure::new(Status::OutOfRange, format!("no memory has {count} values for {name}")));
    }
    // SAFETY: the caller passes an array of this length.
    Ok(unsafe { std::slice::from_raw_parts(pointer.as_ptr(), count) })
}

/// What a pointer of that name points to.
pub(crate) fn present<T>(pointer: Option<T>, name: &str) -> Result<T, Failure> {
    pointer.ok_or_else(|| Failure::new(Status::NullPointer, format!("{name} is null")))
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    fn last_error() -> String {
        // SAFETY: the string lives until the next failure on this thread.
        unsafe { CStr::from_ptr(pagemark_last_error()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_panic_becomes_a_status_with_its_message() {
        assert_eq!(guard(|| panic!("number {}", 7)), Status::Internal);
        assert_eq!(last_error(), "a defect of Pagemark: number 7");
        assert_eq!(guard(|| panic!("plain")), Status::Internal);
        assert_eq!(last_error(), "a defect of Pagemark: plain");
        assert_eq!(value_or(3, || panic!("again")), 3);
        let mut out = MaybeUninit::new(Some(Box::new(5)));
        assert_eq!(make(Some(&mut out), "out", || panic!("and again")), Status::Internal);
        // SAFETY: it was initialized.
        assert_eq!(unsafe { out.assume_init() }, None);
    }

    #[test]
    fn each_thread_has_its_own_last_error() {
        assert_eq!(guard(|| Err(Failure::new(Status::System, "here"))), Status::System);
        std::thread::spawn(|| assert_eq!(last_error(), "")).join().unwrap();
        assert_eq!(guard(|| Ok(())), Status::Ok);
        assert_eq!(last_error(), "here", "a call that goes well leaves it");
    }

    #[test]
    fn a_name_with_anything_in_it_can_be_told() {
        guard(|| Err(Failure::new(Status::System, "a\0b")));
        assert_eq!(last_error(), "a b");
    }
}
