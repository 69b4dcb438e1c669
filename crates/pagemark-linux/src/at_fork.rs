//! What children made by `fork` inherit is whole: a fork waits until no thread changes it.
//!
//! A child has one thread. What another thread was changing at the moment of the fork would stay
//! half changed there, and the locks that it held would stay locked. Threads hold forks off while
//! they have such locks: `hold_off`. A child that is made without the handlers of
//! `pthread_atfork`, by the system call itself, is not protected.
//!
//! A thread that holds forks off allocates, and so may wait for the allocator's locks. A thread of
//! the program may hold forks off while it has locks of the program. A fork therefore takes the
//! locks of the program first, then waits here, then takes those of the allocator. The handlers
//! before a fork run in the reverse order of their registration: ours are registered when the
//! allocator has registered its own, and before the program begins.
//!
//! A library that the program loads later (`dlopen`) cannot keep this order: what the program has
//! registered before runs behind ours. If such a handler takes a lock in which another thread calls
//! Pagemark, each waits for the other. `docs/how-to/own-memory.md` has the rule for programs.

use std::cell::{Cell, UnsafeCell};
use std::ffi::c_int;
use std::io;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

#[cfg(not(feature = "loom"))]
use super::gate::Gate;
use super::this_process::{self, OfThisProcess};

/// Entered by the threads that hold forks off, and closed during a fork.
#[cfg(not(feature = "loom"))]
static GATE: Gate = Gate::new();

thread_local! {
    /// How many [`HeldOff`] the thread has.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// While a thread has it, no other thread forks. A thread that itself forks has what it was
/// changing in the child, too.
///
/// A thread that has it must not wait for a thread that forks. Locks that a thread keeps while it
/// runs code of the caller are therefore taken before it, and all others after it.
#[must_use]
#[derive(Debug)]
pub struct HeldOff {
    /// It belongs to its thread.
    of_thread: PhantomData<*const ()>,
}

/// A lock of what children inherit, which this thread has. No other thread forks meanwhile.
pub struct Locked<Guard> {
    // Before `_forks`, and therefore dropped before it.
    guard: Guard,
    _forks: HeldOff,
}

impl<Guard> Locked<Guard> {
    /// A guard, and forks that are held off as long as it is there.
    pub fn new(guard: Guard, forks: HeldOff) -> Locked<Guard> {
        Locked { guard, _forks: forks }
    }
}

impl<Guard: Deref> Deref for Locked<Guard> {
    type Target = Guard::Target;

    fn deref(&self) -> &Guard::Target {
        &self.guard
    }
}

impl<Guard: DerefMut> DerefMut for Locked<Guard> {
    fn deref_mut(&mut self) -> &mut Guard::Target {
        &mut self.guard
    }
}

/// Holds forks off. Waits for one that has begun.
pub fn hold_off() -> HeldOff {
    if !IS_REGISTERED.load(Ordering::Relaxed) {
        register_behind_the_allocator();
    }
    DEPTH.with(|depth| {
        if depth.get() == 0 {
            enter();
        }
        depth.set(depth.get() + 1);
    });
    HeldOff { of_thread: PhantomData }
}

impl Drop for HeldOff {
    fn drop(&mut self) {
        DEPTH.with(|depth| {
            depth.set(depth.get() - 1);
            if depth.get() == 0 {
                leave();
            }
        });
    }
}

fn enter() {
    #[cfg(not(feature = "loom"))]
    std::mem::forget(GATE.enter());
}

fn leave() {
    #[cfg(not(feature = "loom"))]
    GATE.leave();
}

/// Held by the thread that forks.
struct Forking(UnsafeCell<libc::pthread_mutex_t>);

// SAFETY: the mutex is made for threads.
unsafe impl Sync for Forking {}

static FORKING: Forking = Forking(UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER));

static IS_REGISTERED: AtomicBool = AtomicBool::new(false);

/// Registers the handlers before the program begins.
#[cfg(not(any(feature = "loom", miri)))]
#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = register_behind_the_allocator;

/// Like [`register`], when the allocator is there.
extern "C" fn register_behind_the_allocator() {
    // Allocators register their handlers at the first allocation, if not earlier.
    drop(std::hint::black_box(Box::new(0u8)));
    register();
}

/// Registers the handlers, once. An allocator that itself needs this crate calls it as soon as it
/// has registered its own handlers, and before it holds forks off.
///
/// The threads that come meanwhile do not wait: their own fork could interrupt the registration.
/// There are such threads only where the constructor of another library calls this crate before
/// this library's own constructor has run: `AT_START` is called before the program begins, or
/// before `dlopen` returns.
pub fn register() {
    if !IS_REGISTERED.swap(true, Ordering::Relaxed) {
        // Before there are threads that could fork meanwhile.
        let _ = OfThisProcess::new();
        // SAFETY: the handlers are functions of this module; the C library forgets them if the
        // library that they are in is unloaded.
        // Without memory for them, forks are not held off.
        let _ = unsafe { call_at_fork(before, after, in_child) };
    }
}

/// The value of a cell, which is made if there is none. A child that is forked meanwhile does not
/// wait for a thread that it does not have.
pub fn made_once<T>(cell: &OnceLock<T>, make: impl FnOnce() -> T) -> &T {
    cell.get().unwrap_or_else(|| {
        let _forks = hold_off();
        cell.get_or_init(make)
    })
}

/// Has functions called in each fork, by the thread that forks: one before, and then one in the
/// parent and one in the child.
///
/// # Errors
/// `ENOMEM`
///
/// # Safety
/// They may be called as long as the library that they are in is not unloaded, at any time.
pub unsafe fn call_at_fork(
    before: unsafe extern "C" fn(),
    in_parent: unsafe extern "C" fn(),
    in_child: unsafe extern "C" fn(),
) -> io::Result<()> {
    unsafe extern "C" {
        // Not in the crate libc for this target.
        fn pthread_atfork(
            prepare: Option<unsafe extern "C" fn()>,
            parent: Option<unsafe extern "C" fn()>,
            child: Option<unsafe extern "C" fn()>,
        ) -> c_int;
    }
    // SAFETY: the caller answers for the functions.
    match unsafe { pthread_atfork(Some(before), Some(in_parent), Some(in_child)) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

unsafe extern "C" fn before() {
    if DEPTH.get() > 0 {
        leave();
    }
    // SAFETY: the mutex is initialized and never destroyed.
    unsafe { libc::pthread_mutex_lock(FORKING.0.get()) };
    #[cfg(not(feature = "loom"))]
    std::mem::forget(GATE.close());
}

unsafe extern "C" fn in_child() {
    this_process::clear_kept();
    super::fault::in_child();
    // SAFETY: this is the thread that has forked.
    unsafe { after() };
}

/// In the parent and in the child, whose only thread is the copy of the one that forked.
unsafe extern "C" fn after() {
    #[cfg(not(feature = "loom"))]
    GATE.open();
    // SAFETY: this thread has locked it; in a child, the thread that it is a copy of.
    unsafe { libc::pthread_mutex_unlock(FORKING.0.get()) };
    if DEPTH.get() > 0 {
        enter();
    }
}
