//! Processes that are forked from the caller's to act on others.

use std::ffi::CStr;
use std::os::fd::RawFd;

/// Number of the descriptor that a helper has. All others are closed.
pub(crate) const DESCRIPTOR: RawFd = 0;

/// Makes this process, which was just forked, independent of its caller: it gets a session of its
/// own and a name, and of its descriptors keeps `descriptor` alone, as [`DESCRIPTOR`]. Makes only
/// system calls. Before Linux 5.9 the other descriptors stay open.
///
/// # Safety
/// No value of this process that is used or dropped later owns a descriptor: the process ends by
/// `_exit`.
pub(crate) unsafe fn detach_from_caller(name: &CStr, descriptor: RawFd) {
    // SAFETY: plain system calls on this process; the name lives through the call, and the caller uses
    // none of the descriptors that are closed.
    unsafe {
        libc::setsid();
        libc::prctl(libc::PR_SET_NAME, name.as_ptr());
        libc::dup2(descriptor, DESCRIPTOR);
        libc::syscall(libc::SYS_close_range, DESCRIPTOR + 1, libc::c_uint::MAX, 0);
    }
}
