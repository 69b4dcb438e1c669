//! Writes to protected memory, which raise SIGSEGV: each goes to the handler of who has protected
//! the memory. The signal's own handler is in `segv`.
//!
//! What runs in it is async-signal-safe: it looks into a table without locks (`Slots`), and calls
//! only handlers that are async-signal-safe too.

use std::io;
use std::sync::{Arc, OnceLock};

use super::at_fork::{hold_off, made_once};
use super::own_memory::{Access, Mapping, set_access};
use super::segv;
use super::slots::{SlotIndex, Slots};
use super::this_process::{LastProcess, OfThisProcess};
use super::valgrind;
use super::write_access::is_writable;
use crate::{Address, ByteCount, PAGE_SIZE, Range};

/// Most ranges that can be armed at once.
pub const SLOTS: usize = 4096;

/// The bit of the processor's error code that is set for a write.
const ERROR_WRITE: i64 = 1 << 1;

/// `si_code` of an access that the mapping does not permit.
const SEGV_ACCERR: libc::c_int = 2;

/// A write to memory that does not permit it.
pub struct Fault<'a> {
    /// The first byte that faulted. The write may begin before it, in another page.
    pub address: Address,
    /// The registers of the thread, which resumes with the changes that are made here.
    pub context: &'a mut libc::ucontext_t,
}

/// Result of the handling of a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// The thread resumes: the write is done, or will now succeed.
    Resume,
    /// The write is not permitted for another reason: the program crashes.
    Crash,
}

/// A handler of write faults. Safe code cannot make one:
///
/// ```compile_fail,E0200
/// use pagemark_linux::fault::{Fault, Outcome, WriteFault};
/// struct Other;
/// impl WriteFault for Other {
///     fn handle(&self, _: &mut Fault<'_>) -> Outcome {
///         Outcome::Resume
///     }
/// }
/// ```
///
/// # Safety
/// [`WriteFault::handle`] is async-signal-safe, and changes the registers of the thread only so
/// that it goes on as if the write had been executed.
pub unsafe trait WriteFault: Send + Sync {
    /// Handles a write to the armed range. Runs in a signal handler on any thread, on several at
    /// once, and in children made by `fork`.
    fn handle(&self, fault: &mut Fault<'_>) -> Outcome;
}

/// A range whose write faults go to a handler until this is dropped.
#[derive(Debug)]
pub struct HandledRange {
    /// `None` once the slot is empty.
    slot: Option<SlotIndex>,
    process: OfThisProcess,
}

#[cfg(not(feature = "loom"))]
static TABLE: Slots<Handler, SLOTS> = Slots::new();
#[cfg(feature = "loom")]
loom::lazy_static! { static ref TABLE: Slots<Handler, SLOTS> = Slots::new(); }

/// A handler, and the process that armed it. A child made by `fork` inherits the table, and may
/// have other memory at the addresses.
struct Handler {
    process: OfThisProcess,
    handler: Arc<dyn WriteFault>,
}

/// Sends the write faults in `range` to `handler`.
///
/// # Errors
/// [`SLOTS`] ranges are armed already, or the signal handler can't be installed.
pub fn arm(range: Range, handler: Arc<dyn WriteFault>) -> io::Result<HandledRange> {
    let _forks = hold_off();
    segv::install()?;
    let full = || io::Error::other(format!("{SLOTS} ranges are tracked by signals already"));
    let process = OfThisProcess::new();
    TABLE.hide_stale(&range, |inherited| !inherited.process.is_here());
    let slot = TABLE.fill(range, Handler { process, handler }).ok_or_else(full)?;
    Ok(HandledRange { slot: Some(slot), process })
}

/// Makes sure that the signals of writes to armed ranges are handled, also where another part of
/// the program has replaced the action of SIGSEGV since.
///
/// # Errors
/// The signal handler can't be installed.
pub fn install() -> io::Result<()> {
    let _forks = hold_off();
    segv::install()
}

/// Checks that a thread resumes with its registers after a handled fault, which it does not under
/// valgrind by default.
///
/// # Errors
/// It does not, and what to do; or as [`arm`].
pub fn check_registers() -> io::Result<()> {
    static ARE_KEPT: OnceLock<bool> = OnceLock::new();
    if !valgrind::is_running() {
        return Ok(());
    }
    let are_kept = match ARE_KEPT.get() {
        Some(are_kept) => *are_kept,
        None => {
            let page = Mapping::new(PAGE_SIZE)?;
            // SAFETY: nobody has the page.
            unsafe { set_access(&page.range(), Access::Read)? };
            let armed = arm(page.range(), Arc::new(Opens))?;
            use_stack();
            // SAFETY: nobody has the page, and the handler makes it writable.
            let are_kept = unsafe { valgrind::resumes_with_registers(page.start().as_ptr()) };
            drop(armed);
            *made_once(&ARE_KEPT, || are_kept)
        }
    };
    let option = valgrind::REGISTERS_OPTION;
    let lost =
        || io::Error::other(format!("a program under valgrind loses its registers: start valgrind with {option}"));
    if are_kept { Ok(()) } else { Err(lost()) }
}

/// Has the pages below this stack frame mapped: valgrind cannot add a page to a stack where it puts
/// the frame of a signal.
#[inline(never)]
fn use_stack() {
    std::hint::black_box(&mut [0u8; 32 << 10]);
}

/// Makes the page writable.
struct Opens;

// SAFETY: the handler makes one system call, and changes no register.
unsafe impl WriteFault for Opens {
    fn handle(&self, fault: &mut Fault<'_>) -> Outcome {
        let start = fault.address.page_aligned_down();
        // SAFETY: the page is that of `check_registers`, which expects it.
        match unsafe { set_access(&(start..start + ByteCount::PAGE), Access::Write) } {
            Ok(()) => Outcome::Resume,
            Err(_) => Outcome::Crash,
        }
    }
}

/// The last process made by `fork` whose table counts only threads that it has.
static COUNTED: LastProcess = LastProcess::none();

/// Forgets the threads of the parent that were in a handler, so that the child can empty the slots
/// that it inherits: otherwise they would be full after some generations. Called in the child by
/// the handler of `pthread_atfork`. The thread that has forked was in no handler, where all signals
/// are blocked.
pub(super) fn in_child() {
    TABLE.forget_readers();
    COUNTED.set();
}

impl Drop for HandledRange {
    fn drop(&mut self) {
        // In a child that was made by the system call itself, threads that were in the handler are
        // counted, but are not there to leave it.
        let is_counted = || self.process.is_here() || COUNTED.is_here();
        if let Some(slot) = self.slot.take().filter(|_| is_counted()) {
            let _forks = hold_off();
            TABLE.empty(slot);
        }
    }
}

/// Calls the handler in whose range the fault lies.
fn dispatch(fault: &mut Fault<'_>) -> Outcome {
    let address = fault.address;
    TABLE.with(address, |armed| armed.handler.handle(fault)).unwrap_or_else(|| {
        // The range may have ceased to be armed, and its memory to be protected, since the fault
        // happened.
        if is_writable(address) { Outcome::Resume } else { Outcome::Crash }
    })
}

/// Handles a signal if it is a write to memory that does not permit it. Async-signal-safe.
///
/// # Safety
/// The arguments are those of the signal handler that calls this.
pub(super) unsafe fn handle(info: *const libc::siginfo_t, context: *mut libc::ucontext_t) -> Outcome {
    // The structure of the context is longer than what the kernel has of it: the facts behind it are
    // read before it is borrowed.
    // SAFETY: the caller's pointers are valid. The address is filled in for a signal with this code.
    unsafe {
        let error_code = (&raw const (*context).uc_mcontext.gregs[libc::REG_ERR as usize]).read();
        if (*info).si_code != SEGV_ACCERR || error_code & ERROR_WRITE == 0 {
            return Outcome::Crash;
        }
        let address = Address::of((*info).si_addr());
        dispatch(&mut Fault { address, context: &mut *context })
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;
    use crate::this_process::in_child;

    /// Each generation could otherwise arm less than the one before.
    #[test]
    fn children_have_the_slots_of_what_they_drop() {
        let page = Mapping::new(PAGE_SIZE).unwrap();
        // In a child, because all tests of this process have one table.
        in_child(|| {
            let fill = || std::iter::from_fn(|| arm(page.range(), Arc::new(Opens)).ok()).collect::<Vec<_>>();
            let inherited = fill();
            in_child(|| {
                let count = inherited.len();
                drop(inherited);
                count > SLOTS / 2 && fill().len() == count
            });
            true
        });
    }
}
