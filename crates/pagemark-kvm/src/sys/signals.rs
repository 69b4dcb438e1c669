//! Signals of this process: the handler that takes note of a signal for the program.

use std::cell::{Cell, UnsafeCell};
use std::ops::Range;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use super::host_call;

/// Bytes of `siginfo_t`.
pub const INFO_BYTES: usize = 128;

/// A signal that came for the program on this thread, and was not yet delivered to it.
#[derive(Clone, Copy, Debug)]
pub struct ArrivedSignal {
    /// Its number.
    pub number: u32,
    /// `siginfo_t`.
    pub info: [u8; INFO_BYTES],
    /// The thread's signal mask before it came.
    pub mask: u64,
}

/// Where the handler puts the signal of one thread. At most one waits: the handler leaves all
/// signals blocked until the monitor has delivered this one.
pub struct Slot {
    number: AtomicU32,
    info: UnsafeCell<[u8; INFO_BYTES]>,
    mask: UnsafeCell<u64>,
    /// `immediate_exit` of the thread's virtual CPU: makes the next entry return at once.
    immediate_exit: AtomicPtr<u8>,
}

// SAFETY: the cells are written by the handler on the slot's own thread, before `number`, and read
// on that thread after it, while all signals are blocked.
unsafe impl Sync for Slot {}

thread_local! {
    static CURRENT: Cell<*const Slot> = const { Cell::new(std::ptr::null()) };
}

impl Slot {
    /// An empty slot; `immediate_exit` is that byte of the shared page of the thread's virtual CPU.
    pub fn new(immediate_exit: *mut u8) -> Box<Slot> {
        Box::new(Slot {
            number: AtomicU32::new(0),
            info: UnsafeCell::new([0; INFO_BYTES]),
            mask: UnsafeCell::new(0),
            immediate_exit: AtomicPtr::new(immediate_exit),
        })
    }

    /// The calling thread's signals go to this slot.
    ///
    /// # Safety
    /// The slot and the virtual CPU's page stay where they are until the thread calls this for
    /// another slot, or ends with all signals blocked.
    pub unsafe fn make_current(&self) {
        CURRENT.set(self);
    }

    /// Not 0 if a signal waits.
    pub fn flag(&self) -> &AtomicU32 {
        &self.number
    }

    /// Whether a signal waits.
    pub fn waits(&self) -> bool {
        self.number.load(Ordering::Acquire) != 0
    }

    /// The signal that waits; the slot is empty then. All signals remain blocked.
    pub fn take(&self) -> Option<ArrivedSignal> {
        let number = self.number.load(Ordering::Acquire);
        if number == 0 {
            return None;
        }
        // SAFETY: the handler has written them, and does not run until signals are unblocked.
        let (info, mask) = unsafe { (*self.info.get(), *self.mask.get()) };
        self.number.store(0, Ordering::Release);
        // SAFETY: the page of the virtual CPU is mapped by the contract of `make_current`.
        unsafe { self.immediate_exit.load(Ordering::Relaxed).write_volatile(0) };
        Some(ArrivedSignal { number, info, mask })
    }
}

/// Takes note of the signal and blocks all others. Calls nothing but what is atomic.
extern "C" fn on_signal(number: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let slot = CURRENT.get();
    if slot.is_null() {
        return;
    }
    // SAFETY: the kernel passes valid pointers; the slot is valid by `make_current`.
    unsafe {
        let slot = &*slot;
        let context = &mut *context.cast::<libc::ucontext_t>();
        let mask = (&raw mut context.uc_sigmask).cast::<u64>();
        *slot.mask.get() = *mask;
        *slot.info.get() = *info.cast::<[u8; INFO_BYTES]>();
        *mask = u64::MAX;
        let instruction = &mut context.uc_mcontext.gregs[libc::REG_RIP as usize];
        *instruction = host_call::after_signal(*instruction as u64) as i64;
        slot.number.store(number as u32, Ordering::Release);
        slot.immediate_exit.load(Ordering::Relaxed).write_volatile(1);
    }
}

/// The kernel's `struct sigaction`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Action {
    /// `SIG_DFL` (0), `SIG_IGN` (1) or an address.
    pub handler: u64,
    /// `SA_…`.
    pub flags: u64,
    /// Where a handler returns to.
    pub restorer: u64,
    /// Signals that are blocked while the handler runs.
    pub mask: u64,
}

const SA_RESTORER: u64 = 0x0400_0000;
/// Flags that concern the kernel also where the handler is the monitor's.
const PASSED_FLAGS: u64 = (libc::SA_RESTART | libc::SA_NOCLDSTOP | libc::SA_NOCLDWAIT) as u64;

std::arch::global_asm!(
    ".pushsection .text.pagemark_kvm_restorer, \"ax\", @progbits",
    ".globl pagemark_kvm_restorer",
    ".type pagemark_kvm_restorer, @function",
    "pagemark_kvm_restorer:",
    "mov eax, 15",
    "syscall",
    ".popsection",
);

unsafe extern "C" {
    fn pagemark_kvm_restorer();
}

/// The signals that C libraries keep for themselves: the kernel's first realtime signal, up to the
/// first that the library leaves to programs.
pub fn of_libraries() -> Range<u32> {
    32..libc::SIGRTMIN() as u32
}

/// Sets what this process does on signal `number` so that the program gets what `action` says:
/// default and ignored signals are the kernel's business, all others are noted for the program.
pub fn set_action(number: u32, action: &Action) -> Result<(), i32> {
    let own = match action.handler {
        0 | 1 => Action { handler: action.handler, flags: action.flags & PASSED_FLAGS, ..Action::default() },
        _ => Action {
            handler: on_signal as extern "C" fn(_, _, _) as usize as u64,
            flags: action.flags & PASSED_FLAGS | SA_RESTORER | libc::SA_SIGINFO as u64,
            restorer: pagemark_kvm_restorer as unsafe extern "C" fn() as usize as u64,
            mask: u64::MAX,
        },
    };
    // SAFETY: the handler above is safe to run at any instruction of this process.
    let result =
        unsafe { host_call::immediate(libc::SYS_rt_sigaction, [u64::from(number), &raw const own as u64, 0, 8, 0, 0]) };
    host_call::errno(result).map_or(Ok(()), Err)
}

/// Sets the action of the program itself, whose handler is then called on the program's stack:
/// outside of the machine.
pub fn set_program_action(number: u32, action: &Action) -> Result<(), i32> {
    // SAFETY: the handler is code of the program, which no thread of the monitor executes: all signals
    // are blocked in those.
    let result = unsafe {
        host_call::immediate(libc::SYS_rt_sigaction, [u64::from(number), std::ptr::from_ref(action) as u64, 0, 8, 0, 0])
    };
    host_call::errno(result).map_or(Ok(()), Err)
}

/// What this process does on signal `number`.
pub fn action(number: u32) -> Result<Action, i32> {
    let mut own = Action::default();
    // SAFETY: fills `own`.
    let result =
        unsafe { host_call::immediate(libc::SYS_rt_sigaction, [u64::from(number), 0, &raw mut own as u64, 8, 0, 0]) };
    host_call::errno(result).map_or(Ok(own), Err)
}

/// The thread's signal mask; it becomes `new` if that is given.
pub fn mask(new: Option<u64>) -> u64 {
    let mut old = 0u64;
    let new_at = new.as_ref().map_or(0, |new| std::ptr::from_ref(new) as u64);
    let arguments = [libc::SIG_SETMASK as u64, new_at, &raw mut old as u64, 8, 0, 0];
    // SAFETY: reads and fills the two values.
    unsafe { host_call::immediate(libc::SYS_rt_sigprocmask, arguments) };
    old
}

/// Calls `write`. A SIGPIPE that comes of it is taken back.
pub fn without_broken_pipes(write: impl FnOnce()) {
    let pipe = 1u64 << (libc::SIGPIPE - 1);
    let before = mask(None);
    mask(Some(before | pipe));
    let mut pending = 0u64;
    // SAFETY: fills the value.
    unsafe { host_call::immediate(libc::SYS_rt_sigpending, [&raw mut pending as u64, 8, 0, 0, 0, 0]) };
    write();
    if pending & pipe == 0 {
        let none = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let arguments = [&raw const pipe as u64, 0, &raw const none as u64, 8, 0, 0];
        // SAFETY: reads the two values.
        unsafe { host_call::immediate(libc::SYS_rt_sigtimedwait, arguments) };
    }
    mask(Some(before));
}

/// Sends signal `number` with `info` to the calling thread.
pub fn send_to_self(number: u32, info: &[u8; INFO_BYTES]) {
    // SAFETY: no memory is concerned; what the signal does is what the program has set.
    unsafe {
        let (process, thread) = (libc::syscall(libc::SYS_getpid) as u64, libc::syscall(libc::SYS_gettid) as u64);
        let arguments = [process, thread, u64::from(number), info.as_ptr() as u64, 0, 0];
        let sent = host_call::immediate(libc::SYS_rt_tgsigqueueinfo, arguments);
        if host_call::errno(sent).is_some() {
            host_call::immediate(libc::SYS_tgkill, [process, thread, u64::from(number), 0, 0, 0]);
        }
    }
}

/// Ends this process by signal `number`, as its default action does. `info` is what a tracer sees.
pub fn die(number: u32, info: &[u8; INFO_BYTES]) -> ! {
    let _ = set_action(number, &Action::default());
    send_to_self(number, info);
    mask(Some(!(1 << (number - 1))));
    // Only a signal whose default action does not end the process gets here.
    // SAFETY: ends the process.
    unsafe { host_call::immediate(libc::SYS_exit_group, [128 + u64::from(number), 0, 0, 0, 0, 0]) };
    std::process::abort()
}
