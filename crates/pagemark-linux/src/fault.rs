//! The SIGSEGV handler of the process. It passes a write to protected memory to the handler that
//! protected the memory, and any other fault to the previously installed signal handler.
//!
//! The signal handler is async-signal-safe: it looks into a table without locks (`Slots`), and
//! calls only handlers that are async-signal-safe too. All signals are blocked meanwhile.
//!
//! It runs on the thread's alternate stack, if there is one, because the stack itself may be
//! protected. If the previous handler, called for a crash, writes to protected memory itself, the
//! alternate stack needs room for both: about 16 KiB, more than Rust gives its threads.

use std::io;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::at_fork::{hold_off, made_once};
use super::own_memory::{Access, Mapping, set_access};
use super::slots::{SlotIndex, Slots};
use super::this_process::OfThisProcess;
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

/// A handler of write faults.
pub trait WriteFault: Send + Sync {
    /// Handles a write to the armed range. Runs in a signal handler on any thread, on several at
    /// once, and in children made by `fork`. It must be async-signal-safe.
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

/// Held while the handler is installed.
static INSTALLING: Mutex<()> = Mutex::new(());

/// The previous action of SIGSEGV, or null before our handler is installed. It is never freed.
static PREVIOUS: AtomicPtr<libc::sigaction> = AtomicPtr::new(std::ptr::null_mut());

/// Sends the write faults in `range` to `handler`.
///
/// # Errors
/// [`SLOTS`] ranges are armed already, or the signal handler can't be installed.
pub fn arm(range: Range, handler: Arc<dyn WriteFault>) -> io::Result<HandledRange> {
    let _forks = hold_off();
    install()?;
    let full = || io::Error::other(format!("{SLOTS} ranges are tracked by signals already"));
    let process = OfThisProcess::new();
    TABLE.hide_stale(&range, |inherited| !inherited.process.is_here());
    let slot = TABLE.fill(range, Handler { process, handler }).ok_or_else(full)?;
    Ok(HandledRange { slot: Some(slot), process })
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

impl WriteFault for Opens {
    fn handle(&self, fault: &mut Fault<'_>) -> Outcome {
        let start = fault.address.page_aligned_down();
        // SAFETY: the page is that of `check_registers`, which expects it.
        match unsafe { set_access(&(start..start + ByteCount::PAGE), Access::Write) } {
            Ok(()) => Outcome::Resume,
            Err(_) => Outcome::Crash,
        }
    }
}

impl Drop for HandledRange {
    fn drop(&mut self) {
        // In a child made by fork, threads that were in the handler are counted, but are not there
        // to leave it.
        if let Some(slot) = self.slot.take().filter(|_| self.process.is_here()) {
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

/// Installs the handler, once.
fn install() -> io::Result<()> {
    let _installing = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
    if !PREVIOUS.load(Ordering::Acquire).is_null() {
        return Ok(());
    }
    let mut previous = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: the call only writes the structure that it is given.
    check(unsafe { libc::sigaction(libc::SIGSEGV, std::ptr::null(), previous.as_mut_ptr()) })?;
    // SAFETY: the call has filled it in.
    let mut previous = Box::new(unsafe { previous.assume_init() });
    // The handler must find it from its first call on.
    let published = &raw mut *previous;
    PREVIOUS.store(published, Ordering::Release);
    // SAFETY: all zeros are a valid value of this plain structure.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_signal as *const () as usize;
    // Writes to a protected stack are handled on the thread's alternate one, if it has one.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the set is ours to fill.
    unsafe { libc::sigfillset(&mut action.sa_mask) };
    // SAFETY: the handler does only what is async-signal-safe.
    let result = check(unsafe { libc::sigaction(libc::SIGSEGV, &action, std::ptr::null_mut()) });
    match result {
        Ok(()) => std::mem::forget(previous),
        Err(_) => PREVIOUS.store(std::ptr::null_mut(), Ordering::Release),
    }
    result
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

extern "C" fn on_signal(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the location of this thread's errno is always valid.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let errno_before = unsafe { *errno };
    // SAFETY: the kernel gives a handler with SA_SIGINFO valid pointers to both, for the time of
    // the call.
    let (facts, registers) = unsafe { (&*info, &mut *context.cast::<libc::ucontext_t>()) };
    let error_code = registers.uc_mcontext.gregs[libc::REG_ERR as usize];
    let mut outcome = Outcome::Crash;
    if facts.si_code == SEGV_ACCERR && error_code & ERROR_WRITE != 0 {
        // SAFETY: a signal with this code is a fault, for which the address is filled in.
        let address = Address::of(unsafe { facts.si_addr() });
        outcome = dispatch(&mut Fault { address, context: registers });
    }
    if outcome == Outcome::Crash {
        // SAFETY: the arguments are those that the kernel gave.
        unsafe { pass_on(signal, info, context) };
    }
    // SAFETY: as above.
    unsafe { *errno = errno_before };
}

/// Does what the previous action of SIGSEGV would have done.
///
/// # Safety
/// The arguments are those of the signal handler that calls this.
unsafe fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: set before the handler was installed, and never freed.
    let previous = unsafe { &*PREVIOUS.load(Ordering::Acquire) };
    // SAFETY: see the caller's promise.
    let is_fault = unsafe { (*info).si_code } > 0;
    match previous.sa_sigaction {
        libc::SIG_IGN if !is_fault => {}
        // The kernel does not let a fault be ignored either.
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: all zeros with SIG_DFL are a valid action.
            let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
            action.sa_sigaction = libc::SIG_DFL;
            // SAFETY: changes only what the signal does.
            unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) };
            // A fault happens again when the instruction is executed again; what somebody sent is
            // sent again.
            if !is_fault {
                // SAFETY: sends this thread the signal it has just got, with what came with it; it
                // is delivered when the handler returns.
                unsafe {
                    let (process, thread) = (libc::getpid(), libc::gettid());
                    libc::syscall(libc::SYS_rt_tgsigqueueinfo, process, thread, signal, info);
                }
            }
        }
        handler => {
            if previous.sa_flags & libc::SA_RESETHAND != 0 {
                static DEFAULT: MaybeUninit<libc::sigaction> = MaybeUninit::zeroed();
                PREVIOUS.store(DEFAULT.as_ptr().cast_mut(), Ordering::Release);
            }
            // What the handler expects to be blocked: what was, what it asked for, and the signal
            // itself. It may leave by a jump, so that nothing can be put back behind it; returning
            // from the signal does that. SAFETY: the context is the kernel's, and the sets are
            // plain values of ours.
            unsafe {
                let mut mask = (*context.cast::<libc::ucontext_t>()).uc_sigmask;
                for other in 1..=libc::SIGRTMAX() {
                    let blocks_itself = other == signal && previous.sa_flags & libc::SA_NODEFER == 0;
                    if blocks_itself || libc::sigismember(&previous.sa_mask, other) == 1 {
                        libc::sigaddset(&mut mask, other);
                    }
                }
                libc::pthread_sigmask(libc::SIG_SETMASK, &mask, std::ptr::null_mut());
            }
            if previous.sa_flags & libc::SA_SIGINFO != 0 {
                type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
                // SAFETY: the program registered the address as a handler of this kind.
                let handler = unsafe { std::mem::transmute::<usize, Handler>(handler) };
                handler(signal, info, context);
            } else {
                // SAFETY: the program registered the address as a handler of this kind.
                let handler = unsafe { std::mem::transmute::<usize, extern "C" fn(libc::c_int)>(handler) };
                handler(signal);
            }
        }
    }
}
