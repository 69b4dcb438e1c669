//! Processes that are forked from the caller's to act on others.

use std::ffi::CStr;
use std::os::fd::RawFd;

/// Number of the first descriptor that a helper has; the others follow it. All others are closed.
pub const DESCRIPTOR: RawFd = 0;

/// Makes this process, which was just forked, independent of its caller: it gets a session of its
/// own and a name, and of its descriptors keeps `descriptors` alone, under the numbers from
/// [`DESCRIPTOR`] on. Makes only system calls. Before Linux 5.9 the other descriptors stay open.
///
/// # Safety
/// No value of this process that is used or dropped later owns a descriptor: the process ends by
/// `_exit`.
pub unsafe fn detach_from_caller<const N: usize>(name: &CStr, descriptors: [RawFd; N]) {
    let count = N as RawFd;
    // SAFETY: plain system calls on this process; the name lives through the call, and the caller uses
    // none of the descriptors that are closed.
    unsafe {
        libc::setsid();
        libc::prctl(libc::PR_SET_NAME, name.as_ptr());
        // First out of the way of each other.
        let copies = descriptors.map(|descriptor| libc::fcntl(descriptor, libc::F_DUPFD, DESCRIPTOR + count));
        for (number, copy) in (DESCRIPTOR..).zip(copies) {
            libc::dup2(copy, number);
        }
        libc::syscall(libc::SYS_close_range, DESCRIPTOR + count, libc::c_uint::MAX, 0);
    }
}
