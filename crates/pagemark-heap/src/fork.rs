//! `fork`: the heap of a child is its own, although views are shared mappings.
//!
//! Before a fork, the memory of each heap is copied to a new file; the child maps its views of the
//! copy. The views themselves are not inherited (`MADV_DONTFORK`): a child that is made without the
//! handlers of `pthread_atfork`, by the system call itself, has no heap, and never the memory of
//! its parent.
//!
//! The handlers before a fork run in the reverse order of their registration, and the copy must be
//! made last: when no thread allocates or frees, because jemalloc's handler has its locks, and when
//! a lock of the program that its own handler takes keeps others from what it protects. Ours are
//! therefore registered first.
//!
//! The C library touches objects (open streams) in a child before it calls the handlers. The signal
//! that this raises maps the views: SIGSEGV is not blocked meanwhile, and goes to the handler that
//! regions have, too.

use std::cell::UnsafeCell;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};

use pagemark::Address;
use pagemark_linux::at_fork::call_at_fork;
use pagemark_linux::segv::{self, BeforeFork};
use pagemark_linux::this_process::LastProcess;

use crate::jemalloc;
use crate::space::Space;

/// Most heaps that a process can have at a time.
const MOST_HEAPS: usize = 64;

/// No copy was made.
const NO_COPY: i32 = -1;

/// The heaps of this process.
static HEAPS: [Entry; MOST_HEAPS] =
    [const { Entry { space: AtomicPtr::new(null_mut()), copy: AtomicI32::new(NO_COPY) } }; MOST_HEAPS];

struct Entry {
    space: AtomicPtr<Space>,
    /// The descriptor of the copy during a fork.
    copy: AtomicI32,
}

/// The process that forks.
static FORKING: LastProcess = LastProcess::none();

/// What is shared by the handlers of one fork at a time.
struct Shared {
    lock: UnsafeCell<libc::pthread_mutex_t>,
    /// How SIGSEGV was handled before the fork.
    segv: UnsafeCell<Option<BeforeFork>>,
}

// SAFETY: the mutex is made for threads, and protects the rest.
unsafe impl Sync for Shared {}

static SHARED: Shared = Shared { lock: UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER), segv: UnsafeCell::new(None) };

fn lock() {
    // SAFETY: the mutex is initialized and never destroyed.
    unsafe { libc::pthread_mutex_lock(SHARED.lock.get()) };
}

fn unlock() {
    // SAFETY: the calling thread has locked it; in a child, its copy of the thread has.
    unsafe { libc::pthread_mutex_unlock(SHARED.lock.get()) };
}

/// Not tried yet.
const UNTRIED: i32 = -1;

/// Registers the handlers before jemalloc does so, which its own constructor may have it do. This
/// one has a priority, and comes before those that have none.
#[cfg(not(miri))]
#[used]
#[unsafe(link_section = ".init_array.00101")]
static AT_START: extern "C" fn() = at_start;

extern "C" fn at_start() {
    // An error is reported where a heap is made.
    let _ = prepare();
}

/// Registers the handlers, and has jemalloc register its own behind them. Allocates no memory of
/// the program.
///
/// # Errors
/// `ENOMEM`
pub(crate) fn prepare() -> io::Result<()> {
    static RESULT: AtomicI32 = AtomicI32::new(UNTRIED);
    if RESULT.load(Ordering::Relaxed) == UNTRIED && RESULT.swap(0, Ordering::Relaxed) == UNTRIED {
        // SAFETY: the handlers are functions of this module; the C library forgets them if the
        // library that they are in is unloaded.
        if let Err(error) = unsafe { call_at_fork(before, in_parent, in_child) } {
            RESULT.store(error.raw_os_error().unwrap_or(libc::ENOMEM), Ordering::Relaxed);
        }
        jemalloc::start();
    }
    match RESULT.load(Ordering::Relaxed) {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// Gives the children of this process a copy of a heap from now on. Allocates no memory of the
/// program.
///
/// # Errors
/// `EUSERS`: there are too many heaps. As [`prepare`].
///
/// # Safety
/// The space stays where it is until [`unregister`].
pub(crate) unsafe fn register(space: &Space) -> io::Result<()> {
    prepare()?;
    lock();
    let free = HEAPS.iter().find(|entry| entry.space.load(Ordering::Relaxed).is_null());
    let result = free.ok_or_else(|| io::Error::from_raw_os_error(libc::EUSERS));
    let result = result.map(|entry| entry.space.store((&raw const *space).cast_mut(), Ordering::Release));
    unlock();
    result
}

/// Undoes [`register`].
pub(crate) fn unregister(space: &Space) {
    lock();
    for entry in &HEAPS {
        if std::ptr::eq(entry.space.load(Ordering::Relaxed), space) {
            entry.space.store(null_mut(), Ordering::Relaxed);
        }
    }
    unlock();
}

/// The heaps, with their entries. The lock is held, or the process has one thread.
fn heaps() -> impl Iterator<Item = (&'static Entry, &'static Space)> {
    HEAPS.iter().filter_map(|entry| {
        // SAFETY: a registered space stays where it is, and is not unregistered while the lock is
        // held.
        Some((entry, unsafe { entry.space.load(Ordering::Acquire).as_ref()? }))
    })
}

/// True if there are no heaps. The lock is held, from before a fork until after it.
fn has_none() -> bool {
    heaps().next().is_none()
}

/// True if an address is in a view of a heap. The lock is held.
fn is_in_a_heap(address: usize) -> bool {
    let mut views = heaps().flat_map(|(_, space)| (0..space.views.count()).map(|view| space.views.view(view)));
    views.any(|view| view.contains(&Address::from(address)))
}

unsafe extern "C" fn before() {
    lock();
    if has_none() {
        return;
    }
    FORKING.set();
    for (entry, space) in heaps() {
        let copy = space.views.copy(space.used());
        entry.copy.store(copy.map_or(NO_COPY, IntoRawFd::into_raw_fd), Ordering::Release);
    }
    // SAFETY: mapping is async-signal-safe, and the handlers after the fork run on this thread. The lock
    // keeps others out, and protects the value.
    unsafe { *SHARED.segv.get() = Some(segv::before_fork(map_missing, is_alternate_stack_in_a_heap())) };
}

/// True if the alternate stack of the calling thread is in a heap, as that of Python's
/// faulthandler, and its stack is not.
fn is_alternate_stack_in_a_heap() -> bool {
    let mut stack = MaybeUninit::<libc::stack_t>::zeroed();
    // SAFETY: the call fills in the structure, of which zeros are a valid value.
    let stack = unsafe {
        libc::sigaltstack(null(), stack.as_mut_ptr());
        stack.assume_init()
    };
    let is_there = stack.ss_flags & libc::SS_DISABLE == 0 && !stack.ss_sp.is_null();
    is_there && is_in_a_heap(stack.ss_sp.addr()) && !is_in_a_heap((&raw const stack).addr())
}

/// Handles SIGSEGV as before the fork.
fn restore_handler() {
    // SAFETY: the lock is held.
    if let Some(before) = unsafe { (*SHARED.segv.get()).take() } {
        // SAFETY: this thread has made the fork, and the value was taken out.
        unsafe { segv::after_fork(&before) };
    }
}

unsafe extern "C" fn in_parent() {
    if !has_none() {
        restore_handler();
    }
    for (entry, _) in heaps() {
        close_copy(entry);
    }
    unlock();
}

fn close_copy(entry: &Entry) {
    let copy = entry.copy.swap(NO_COPY, Ordering::Acquire);
    if copy != NO_COPY {
        // SAFETY: the descriptor was kept for this entry alone.
        drop(unsafe { OwnedFd::from_raw_fd(copy) });
    }
}

unsafe extern "C" fn in_child() {
    if !has_none() {
        map_copies();
        restore_handler();
    }
    unlock();
}

/// In a child, maps the views that are missing. Async-signal-safe.
fn map_copies() {
    for (entry, space) in heaps() {
        if space.views.are_here() {
            continue;
        }
        let copy = entry.copy.swap(NO_COPY, Ordering::Acquire);
        if copy == NO_COPY {
            end(NO_MEMORY);
        }
        // SAFETY: the descriptor was kept for this entry alone. This is a child.
        match unsafe { space.views.map_again(OwnedFd::from_raw_fd(copy)) } {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => end(TAKEN),
            Err(_) => end(NO_MEMORY),
        }
    }
}

const NO_MEMORY: &str = "pagemark-heap: there is no memory to copy the heap for a forked child, which ends now\n";

/// A handler of `pthread_atfork` that was registered earlier runs before ours.
const TAKEN: &str = "pagemark-heap: something was mapped in the place of the heap of a forked child before its \
                     handler of pthread_atfork ran; the child ends now\n";

/// Ends a child that cannot have its heap. Async-signal-safe.
fn end(message: &str) -> ! {
    // SAFETY: both calls are async-signal-safe, and the message is as long as is said.
    unsafe {
        libc::write(libc::STDERR_FILENO, message.as_ptr().cast(), message.len());
        libc::_exit(127);
    }
}

/// Maps the views in a child that uses them before its handlers have run. True if there were some
/// to map. Async-signal-safe.
fn map_missing() -> bool {
    let is_missing = !FORKING.is_here() && heaps().any(|(_, space)| !space.views.are_here());
    if is_missing {
        map_copies();
    }
    is_missing
}
