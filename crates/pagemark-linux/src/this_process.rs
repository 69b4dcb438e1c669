//! Whether a process is the one that it was, or a child made by `fork`, without a system call.
//!
//! The process id does not tell. A child that begins a new namespace of process ids is number 1
//! there, as its parent may be in the namespace above; and ids are given again.
//!
//! Each process has a number instead, in a page that the kernel fills with zeros in children
//! (`MADV_WIPEONFORK`, Linux 4.14), also in those that are made by the system call itself. A child
//! takes the next number when it first asks, so that no process has the number of an ancestor.
//! Where the kernel refuses to clear the page, the handlers of `pthread_atfork` clear it, and the
//! process id tells of children that are made without them.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, Ordering};

use crate::PAGE_SIZE;

/// The process that has made the value.
///
/// Making and asking is async-signal-safe. Children made by `vfork` share the memory of their
/// parent, and count as the parent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OfThisProcess(u64);

impl OfThisProcess {
    /// Of the process that calls this.
    #[inline]
    #[expect(clippy::new_without_default, reason = "a default value would depend on the process")]
    pub fn new() -> OfThisProcess {
        OfThisProcess(number())
    }

    /// True in the process that made the value; false in a child made by `fork`.
    #[inline]
    pub fn is_here(self) -> bool {
        number() == self.0
    }
}

/// The process that has done something last, as threads, signal handlers and children see it.
#[derive(Debug)]
pub struct LastProcess(AtomicU64);

impl Default for LastProcess {
    fn default() -> Self {
        LastProcess::none()
    }
}

impl LastProcess {
    /// No process yet.
    pub const fn none() -> LastProcess {
        LastProcess(AtomicU64::new(0))
    }

    /// The process that calls this.
    pub fn this() -> LastProcess {
        LastProcess(AtomicU64::new(number()))
    }

    /// Records the process that calls this. Returns true if it was recorded already.
    pub fn set(&self) -> bool {
        let own = number();
        self.0.swap(own, Ordering::AcqRel) == own
    }

    /// Records no process, if the one that calls this is recorded.
    pub fn clear(&self) {
        // Otherwise there is nothing to clear.
        let _ = self.0.compare_exchange(number(), 0, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// True if the process that calls this is recorded.
    #[inline]
    pub fn is_here(&self) -> bool {
        self.0.load(Ordering::Acquire) == number()
    }
}

/// Set in the numbers of processes whose children keep the page as it is.
const IS_KEPT: u64 = 1 << 63;

/// Where the number of this process is, or 0 as long as it has none. Null at first.
static PLACE: AtomicPtr<AtomicU64> = AtomicPtr::new(null_mut());

/// The place where the kernel clears no page.
static KEPT: AtomicU64 = AtomicU64::new(0);

/// The process id that belongs to [`KEPT`].
static KEPT_ID: AtomicI32 = AtomicI32::new(0);

/// How many numbers the process and its ancestors have taken.
static TAKEN: AtomicU64 = AtomicU64::new(0);

/// The number of this process, which is never 0.
#[inline]
fn number() -> u64 {
    // SAFETY: the pointer is null, or that of a place that stays for ever.
    let place = unsafe { PLACE.load(Ordering::Acquire).as_ref() };
    match place.map_or(0, |place| place.load(Ordering::Acquire)) {
        0 => take(),
        number if number & IS_KEPT != 0 => check_id(number),
        number => number,
    }
}

/// Takes a number, if no other thread has done so meanwhile.
#[cold]
fn take() -> u64 {
    let place = place();
    let kept = if std::ptr::eq(place, &raw const KEPT) { IS_KEPT } else { 0 };
    if kept != 0 {
        KEPT_ID.store(id(), Ordering::Release);
    }
    let new = (TAKEN.fetch_add(1, Ordering::AcqRel) + 1) | kept;
    place.compare_exchange(0, new, Ordering::AcqRel, Ordering::Acquire).map_or_else(|other| other, |_| new)
}

/// The number, or a new one if it is that of another process, whose page was not cleared.
#[cold]
fn check_id(number: u64) -> u64 {
    if KEPT_ID.load(Ordering::Acquire) == id() {
        return number;
    }
    clear_kept();
    take()
}

fn id() -> i32 {
    // SAFETY: the call only returns a number.
    unsafe { libc::getpid() }
}

/// Has this process take a new number where the kernel clears no page: in a child, by the handler
/// of `pthread_atfork`.
pub(super) fn clear_kept() {
    KEPT.store(0, Ordering::Release);
}

/// The place of the number. Makes it if need be.
fn place() -> &'static AtomicU64 {
    let known = PLACE.load(Ordering::Acquire);
    // SAFETY: as in `number`.
    if let Some(known) = unsafe { known.as_ref() } {
        return known;
    }
    let made = map_cleared_page();
    let new = if made.is_null() { (&raw const KEPT).cast_mut() } else { made };
    match PLACE.compare_exchange(null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: the page stays for ever, as the static value does.
        Ok(_) => unsafe { &*new },
        Err(other) => {
            unmap(made);
            // SAFETY: as in `number`.
            unsafe { &*other }
        }
    }
}

/// Maps a page that is cleared in children; null if there is none.
fn map_cleared_page() -> *mut AtomicU64 {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at an address that the kernel chooses touches no other memory.
    let page = unsafe { libc::mmap(null_mut(), PAGE_SIZE, protection, flags, -1, 0) };
    if page == libc::MAP_FAILED {
        return null_mut();
    }
    // SAFETY: the page is ours, and only what a child sees of it changes.
    if unsafe { libc::madvise(page, PAGE_SIZE, libc::MADV_WIPEONFORK) } == 0 {
        return page.cast();
    }
    unmap(page.cast());
    null_mut()
}

fn unmap(page: *mut AtomicU64) {
    if !page.is_null() {
        // SAFETY: the page was just mapped, and nobody knows it.
        unsafe { libc::munmap(page.cast(), PAGE_SIZE) };
    }
}

/// Fails if `work` changes what a child made by fork has mapped at a place where its parent has
/// something that the child did not inherit.
#[cfg(test)]
pub(crate) fn keeps_what_a_child_maps(place: &crate::Range, work: impl FnOnce()) {
    use crate::AddressRangeExt;
    let (start, bytes) = (place.start.as_mut_ptr::<libc::c_void>(), place.byte_count().to_usize());
    tests::in_child(tests::fork, || {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: nothing is mapped at the place.
        let mapped = unsafe { libc::mmap(start, bytes, libc::PROT_READ, flags, -1, 0) };
        let is_mapped = mapped == start;
        work();
        is_mapped && crate::own_memory::is_mapped(place) && !crate::write_access::is_writable(place.start)
    });
}

/// Fails if `run` returns false in a child made by fork.
#[cfg(test)]
pub(crate) fn in_child(run: impl FnOnce() -> bool) {
    tests::in_child(tests::fork, run);
}

/// Fails if `run` returns false in a child that is number 1 of a namespace of its own. Does nothing
/// where the process may make none.
#[cfg(test)]
pub(crate) fn in_namespace_of_ids(run: impl FnOnce() -> bool) {
    in_child(|| {
        // SAFETY: only the children of this child are in another namespace.
        if unsafe { libc::unshare(libc::CLONE_NEWPID) } == 0 {
            in_child(|| id() == 1 && run());
        }
        true
    });
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    /// What a child made by `make` returns, as the status of its exit.
    pub(super) fn in_child(make: impl FnOnce() -> libc::pid_t, run: impl FnOnce() -> bool) {
        let child = make();
        if child == 0 {
            // A panic that left this function would end the only thread of the child, with success.
            let is_right = catch_unwind(AssertUnwindSafe(run)).unwrap_or(false);
            // SAFETY: ends the child without its handlers.
            unsafe { libc::_exit(i32::from(!is_right)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child that was just made.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "status {status:#x}");
    }

    pub(super) fn fork() -> libc::pid_t {
        // SAFETY: the child reads memory, forks and exits.
        unsafe { libc::fork() }
    }

    fn bare_fork() -> libc::pid_t {
        // SAFETY: as for `fork`.
        unsafe { libc::syscall(libc::SYS_fork) as libc::pid_t }
    }

    #[test]
    fn neither_children_nor_their_children_are_the_process() {
        let (own, last) = (OfThisProcess::new(), LastProcess::this());
        assert!(own.is_here() && last.is_here() && OfThisProcess::new() == own);
        for make in [fork, bare_fork] {
            in_child(make, || {
                let of_child = OfThisProcess::new();
                let is_right = !own.is_here() && !last.is_here() && of_child.is_here();
                in_child(make, || !own.is_here() && !of_child.is_here() && OfThisProcess::new().is_here());
                is_right && !last.set() && last.set() && last.is_here()
            });
        }
        assert!(own.is_here() && last.is_here());
        last.clear();
        assert!(!last.is_here() && !last.set());
    }

    #[test]
    fn a_child_with_the_same_id_is_another_process() {
        let own = OfThisProcess::new();
        // A process that is number 1 makes another one that is number 1.
        // SAFETY: the calls take numbers; only the children of the calling child are in another
        // namespace.
        let begins_namespace = || unsafe { libc::unshare(libc::CLONE_NEWPID) } == 0;
        in_child(fork, || {
            if !begins_namespace() {
                return true;
            }
            in_child(fork, || {
                let first = OfThisProcess::new();
                assert!(id() == 1 && begins_namespace());
                in_child(fork, || id() == 1 && !first.is_here() && !own.is_here());
                first.is_here()
            });
            true
        });
    }

    #[test]
    fn without_a_cleared_page_the_handlers_and_the_id_tell() {
        // In a child, because the page of this process is shared by all tests.
        in_child(fork, || {
            PLACE.store((&raw const KEPT).cast_mut(), Ordering::Release);
            let own = OfThisProcess::new();
            for make in [fork, bare_fork] {
                in_child(make, || !own.is_here() && OfThisProcess::new().is_here());
            }
            own.0 & IS_KEPT != 0 && own.is_here()
        });
    }
}
