//! The action of SIGSEGV, which regions and heaps share: one handler, which passes on what is not
//! theirs to the action that was there before.
//!
//! The handler is async-signal-safe. All signals are blocked meanwhile. It runs on the thread's
//! alternate stack, if there is one, because the stack itself may be protected. If the previous
//! handler, called for a crash, writes to protected memory itself, the alternate stack needs room
//! for both: about 16 KiB, more than Rust gives its threads.
//!
//! Another part of the program may replace the action later. `install` then installs the handler
//! once more, and passes on to what has replaced it. If that passes on to this handler, as a
//! handler should, the one before it is next: `Passing` tells. The next `install` then gives it
//! its place back. The handler itself changes no action, so that a fault on one thread takes
//! nothing from the others.

use std::cell::UnsafeCell;
use std::io;
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use super::fault::{self, Outcome};

/// Most different actions that are remembered, in all orders in which they replaced each other.
const MOST_ACTIONS: usize = 64;

/// An action of SIGSEGV, and the one that it replaced. Never changed once it is published.
struct Previous {
    action: UnsafeCell<MaybeUninit<libc::sigaction>>,
    below: AtomicPtr<Previous>,
    /// True if the action was taken once, and is to be taken once only (`SA_RESETHAND`).
    is_used_up: AtomicBool,
    /// True if it was seen to pass on to our handler.
    passes_on: AtomicBool,
}

// SAFETY: the action is written under a lock, before the value is published.
unsafe impl Sync for Previous {}

impl Previous {
    const fn unused() -> Previous {
        Previous {
            action: UnsafeCell::new(MaybeUninit::zeroed()),
            below: AtomicPtr::new(null_mut()),
            is_used_up: AtomicBool::new(false),
            passes_on: AtomicBool::new(false),
        }
    }

    fn action(&self) -> &libc::sigaction {
        // SAFETY: zeros are a valid action, and nobody writes it any more.
        unsafe { (*self.action.get()).assume_init_ref() }
    }

    fn below(&self) -> Option<&'static Previous> {
        // SAFETY: the pointer is null or of the static table.
        unsafe { self.below.load(Ordering::Acquire).as_ref() }
    }
}

static TABLE: [Previous; MOST_ACTIONS] = [const { Previous::unused() }; MOST_ACTIONS];

/// How many of the table are used.
static USED: AtomicUsize = AtomicUsize::new(0);

/// What the handler passes on to.
static NEXT: AtomicPtr<Previous> = AtomicPtr::new(null_mut());

/// Held while the action is changed. Taken only while forks are held off, or in one.
static CHANGING: Mutex<()> = Mutex::new(());

/// What maps memory that is missing in a child made by `fork`, during a fork: true if it has mapped
/// some.
static MAPS_MISSING: AtomicPtr<()> = AtomicPtr::new(null_mut());

fn next() -> Option<&'static Previous> {
    // SAFETY: the pointer is null or of the static table.
    unsafe { NEXT.load(Ordering::Acquire).as_ref() }
}

/// Makes sure that the handler is the action of SIGSEGV, or is passed on to by it. Allocates
/// nothing. Forks are held off.
///
/// # Errors
/// The action cannot be changed, or has changed too often (`ENOSPC`).
pub(super) fn install() -> io::Result<()> {
    let _changing = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
    let current = current()?;
    let passes_on = |known: &&Previous| known.passes_on.load(Ordering::Acquire);
    if is_ours(&current) {
        let Some(above) = next().filter(passes_on) else { return Ok(()) };
        NEXT.store(above.below.load(Ordering::Relaxed), Ordering::Release);
        return set(above.action());
    }
    let mut known = TABLE[..USED.load(Ordering::Relaxed)].iter().filter(passes_on);
    if known.any(|known| is_equal(known.action(), &current)) { Ok(()) } else { set_above(&current, true) }
}

/// How the thread that forks handles SIGSEGV without the heap.
#[derive(Clone, Copy)]
pub struct BeforeFork {
    /// The action that was replaced, if it was.
    action: Option<libc::sigaction>,
    /// What the handler passed on to.
    next: *mut Previous,
    was_blocked: bool,
}

/// Before a fork, by the thread that forks: has a child map the memory that it misses, by
/// `maps_missing`, when it touches it. `is_stack_missing` says whether the child will miss the
/// alternate stack. Allocates nothing.
///
/// # Safety
/// `maps_missing` is async-signal-safe, and [`after_fork`] is called by the same thread, in the
/// parent and in the child. No other thread is between the two.
pub unsafe fn before_fork(maps_missing: fn() -> bool, is_stack_missing: bool) -> BeforeFork {
    let _changing = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
    MAPS_MISSING.store(maps_missing as *mut (), Ordering::Release);
    let next = NEXT.load(Ordering::Acquire);
    let replaced = current().ok().filter(|current| is_stack_missing || !is_ours(current));
    let action = replaced.filter(|current| match is_ours(current) {
        true => set(&own_action(!is_stack_missing)).is_ok(),
        false => set_above(current, !is_stack_missing).is_ok(),
    });
    // A fault while SIGSEGV is blocked ends the process.
    BeforeFork { action, next, was_blocked: block(false) }
}

/// After a fork, in the parent and in the child.
///
/// # Safety
/// `before` is of the fork that this thread has just made, and was not given to this function in
/// this process.
pub unsafe fn after_fork(before: &BeforeFork) {
    let _changing = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
    MAPS_MISSING.store(null_mut(), Ordering::Release);
    if let Some(action) = &before.action
        && let Ok(replaced) = exchange(action)
    {
        if !is_ours(&replaced) {
            // Another thread has installed it meanwhile.
            let _ = set(&replaced);
        } else if !before.next.is_null() {
            NEXT.store(before.next, Ordering::Release);
        }
    }
    if before.was_blocked {
        block(true);
    }
}

/// Blocks SIGSEGV in this thread or lets it through. Returns true if it was blocked.
fn block(is_blocked: bool) -> bool {
    let how = if is_blocked { libc::SIG_BLOCK } else { libc::SIG_UNBLOCK };
    let (mut signals, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: the sets are filled in before they are read.
    unsafe {
        libc::sigemptyset(signals.as_mut_ptr());
        libc::sigaddset(signals.as_mut_ptr(), libc::SIGSEGV);
        libc::sigemptyset(before.as_mut_ptr());
        libc::pthread_sigmask(how, signals.as_ptr(), before.as_mut_ptr());
        libc::sigismember(before.as_ptr(), libc::SIGSEGV) == 1
    }
}

fn own_action(on_stack: bool) -> libc::sigaction {
    // SAFETY: all zeros are a valid value of this plain structure.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_signal as *const () as usize;
    // Writes to a protected stack are handled on the thread's alternate one, if it has one.
    action.sa_flags = libc::SA_SIGINFO | if on_stack { libc::SA_ONSTACK } else { 0 };
    // SAFETY: the set is ours to fill.
    unsafe { libc::sigfillset(&mut action.sa_mask) };
    action
}

fn is_ours(action: &libc::sigaction) -> bool {
    action.sa_sigaction == on_signal as *const () as usize
}

fn is_equal(one: &libc::sigaction, other: &libc::sigaction) -> bool {
    // SAFETY: the call only reads the sets.
    let blocks = |action: &libc::sigaction, signal| unsafe { libc::sigismember(&action.sa_mask, signal) };
    (one.sa_sigaction, one.sa_flags) == (other.sa_sigaction, other.sa_flags)
        && (1..=libc::SIGRTMAX()).all(|signal| blocks(one, signal) == blocks(other, signal))
}

fn current() -> io::Result<libc::sigaction> {
    let mut current = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: the call only writes the structure that it is given.
    check(unsafe { libc::sigaction(libc::SIGSEGV, null(), current.as_mut_ptr()) })?;
    // SAFETY: the call has filled it in.
    Ok(unsafe { current.assume_init() })
}

fn set(action: &libc::sigaction) -> io::Result<()> {
    exchange(action).map(drop)
}

/// Sets the action, and returns the one that it replaces.
fn exchange(action: &libc::sigaction) -> io::Result<libc::sigaction> {
    let mut replaced = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: our handler does only what is async-signal-safe, and other actions were there before.
    check(unsafe { libc::sigaction(libc::SIGSEGV, action, replaced.as_mut_ptr()) })?;
    // SAFETY: the call has filled it in.
    Ok(unsafe { replaced.assume_init() })
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Installs the handler above an action that is not ours. The lock is held.
fn set_above(current: &libc::sigaction, on_stack: bool) -> io::Result<()> {
    // The handler must find it from its first call on.
    let above = above(current, next())?;
    NEXT.store((&raw const *above).cast_mut(), Ordering::Release);
    set(&own_action(on_stack))
}

/// The action, above those that were replaced before. It is there once: what is installed again
/// and again makes no longer chain.
fn above(action: &libc::sigaction, below: Option<&'static Previous>) -> io::Result<&'static Previous> {
    let below = without(action, below)?;
    let pointer = below.map_or(null_mut(), |below| (&raw const *below).cast_mut());
    let used = USED.load(Ordering::Relaxed);
    let is_same = |known: &&Previous| {
        let is_fresh = !known.is_used_up.load(Ordering::Relaxed);
        is_fresh && known.below.load(Ordering::Relaxed) == pointer && is_equal(known.action(), action)
    };
    if let Some(known) = TABLE[..used].iter().find(is_same) {
        return Ok(known);
    }
    let new = TABLE.get(used).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOSPC))?;
    // SAFETY: nobody knows the entry yet, and the lock is held.
    unsafe { (*new.action.get()).write(*action) };
    new.below.store(pointer, Ordering::Release);
    USED.store(used + 1, Ordering::Relaxed);
    Ok(new)
}

/// The chain without an action.
fn without(action: &libc::sigaction, chain: Option<&'static Previous>) -> io::Result<Option<&'static Previous>> {
    let Some(first) = chain else { return Ok(None) };
    if is_equal(first.action(), action) {
        return Ok(first.below());
    }
    let below = without(action, first.below())?;
    let is_unchanged = match (below, first.below()) {
        (Some(one), Some(other)) => std::ptr::eq(one, other),
        (one, other) => one.is_none() && other.is_none(),
    };
    if is_unchanged { Ok(Some(first)) } else { above(first.action(), below).map(Some) }
}

/// What a handler passes on, as long as it does so. It hangs on the context of the signal, where
/// the kernel has null: a handler that is reached by the one that it passes on to finds it, also if
/// there are several such handlers, of several copies of this module.
#[repr(C)]
struct Passing {
    mark: [u64; 2],
    /// The handler: `on_signal` of its copy of this module.
    handler: usize,
    to: *const Previous,
    outer: *mut Passing,
}

const MARK: [u64; 2] = [0x6b72_616d_6567_6170, 0x5652_4553_7373_6170];

/// Where a handler passes on to that was itself reached by another one, or by the kernel.
///
/// # Safety
/// The context is that of the signal.
unsafe fn target(context: *mut libc::ucontext_t) -> Option<&'static Previous> {
    // SAFETY: the context is valid, and what hangs on it are values of handlers that have not
    // returned, or null.
    unsafe {
        let mut passing = (&raw const (*context).uc_link).read().cast::<Passing>();
        while let Some(found) = passing.as_ref().filter(|found| found.mark == MARK) {
            if found.handler == on_signal as *const () as usize {
                (*found.to).passes_on.store(true, Ordering::Release);
                return (*found.to).below();
            }
            passing = found.outer;
        }
    }
    next()
}

pub(super) extern "C" fn on_signal(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the location of this thread's errno is always valid.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let errno_before = unsafe { *errno };
    let maps_missing = MAPS_MISSING.load(Ordering::Acquire);
    // SAFETY: it is null or a function of this type.
    let maps_missing = unsafe { std::mem::transmute::<*mut (), Option<fn() -> bool>>(maps_missing) };
    // SAFETY: the kernel gives a handler with SA_SIGINFO valid pointers to both, for the time of
    // the call.
    unsafe {
        let is_handled = maps_missing.is_some_and(|map| map())
            || fault::handle(info, context.cast::<libc::ucontext_t>()) == Outcome::Resume;
        if !is_handled {
            pass_on(signal, info, context.cast());
        }
        *errno = errno_before;
    }
}

/// Does what the previous action of SIGSEGV would have done.
///
/// # Safety
/// The arguments are those of the signal handler that calls this.
unsafe fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::ucontext_t) {
    // SAFETY: see the caller's promise.
    let (is_fault, target) = unsafe { ((*info).si_code > 0, target(context)) };
    let action = target.filter(|target| !target.is_used_up.load(Ordering::Acquire)).map(|target| *target.action());
    let handler = action.map_or(libc::SIG_DFL, |action| action.sa_sigaction);
    match (handler, target, action) {
        (libc::SIG_IGN, ..) if !is_fault => {}
        // The kernel does not let a fault be ignored either.
        (libc::SIG_DFL | libc::SIG_IGN, ..) | (_, None, _) | (_, _, None) => {
            // SAFETY: see the caller's promise.
            unsafe { end_by_default(signal, info, is_fault) };
        }
        (_, Some(target), Some(action)) => {
            if action.sa_flags & libc::SA_RESETHAND != 0 {
                target.is_used_up.store(true, Ordering::Release);
            }
            // SAFETY: see the caller's promise. The record is taken off again before it ends; a
            // handler that leaves by a jump leaves the context, too.
            unsafe {
                set_mask(signal, context, &action);
                let link = (&raw mut (*context).uc_link).cast::<*mut Passing>();
                let outer = link.read();
                let mut passing =
                    Passing { mark: MARK, handler: on_signal as *const () as usize, to: &raw const *target, outer };
                link.write(&raw mut passing);
                call(&action, signal, info, context);
                link.write(outer);
            }
        }
    }
}

/// Has the signal do what it does by default, when the handler has returned.
///
/// # Safety
/// The arguments are those of the signal handler that calls this.
unsafe fn end_by_default(signal: libc::c_int, info: *mut libc::siginfo_t, is_fault: bool) {
    // SAFETY: all zeros with SIG_DFL are a valid action.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = libc::SIG_DFL;
    // SAFETY: changes only what the signal does.
    unsafe { libc::sigaction(signal, &action, null_mut()) };
    // A fault happens again when the instruction is executed again; what somebody sent is sent
    // again.
    if !is_fault {
        // SAFETY: sends this thread the signal it has just got, with what came with it; it is
        // delivered when the handler returns.
        unsafe {
            let (process, thread) = (libc::getpid(), libc::gettid());
            libc::syscall(libc::SYS_rt_tgsigqueueinfo, process, thread, signal, info);
        }
    }
}

/// Blocks what the handler of an action expects to be blocked: what was, what it asked for, and the
/// signal itself. It may leave by a jump, so that nothing can be put back behind it; returning from
/// the signal does that.
///
/// # Safety
/// The context is that of the signal.
unsafe fn set_mask(signal: libc::c_int, context: *mut libc::ucontext_t, action: &libc::sigaction) {
    // SAFETY: the context is the kernel's, and the sets are plain values of ours.
    unsafe {
        let mut mask = (&raw const (*context).uc_sigmask).read();
        for other in 1..=libc::SIGRTMAX() {
            let blocks_itself = other == signal && action.sa_flags & libc::SA_NODEFER == 0;
            if blocks_itself || libc::sigismember(&action.sa_mask, other) == 1 {
                libc::sigaddset(&mut mask, other);
            }
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &mask, null_mut());
    }
}

/// Calls the handler of an action.
///
/// # Safety
/// It is one, and the other arguments are those of the signal handler that calls this.
unsafe fn call(
    action: &libc::sigaction,
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::ucontext_t,
) {
    if action.sa_flags & libc::SA_SIGINFO != 0 {
        type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
        // SAFETY: the program registered the address as a handler of this kind.
        let handler = unsafe { std::mem::transmute::<usize, Handler>(action.sa_sigaction) };
        handler(signal, info, context.cast());
    } else {
        // SAFETY: the program registered the address as a handler of this kind.
        let handler = unsafe { std::mem::transmute::<usize, extern "C" fn(libc::c_int)>(action.sa_sigaction) };
        handler(signal);
    }
}
