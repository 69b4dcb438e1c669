//! `userfaultfd`, and the `ioctl`s with which a program gets and opens one.
//!
//! The guest's accesses reach the host's page tables through KVM, so write protection, missing
//! pages and asynchronous marks work as outside. Two things differ: these accesses are the
//! kernel's, and calls that change mappings hold the lock that a fault takes.

use crate::sys::host_call::Call;

use super::Refusal;

/// `UFFD_USER_MODE_ONLY`: accesses of the kernel fail. KVM's would.
const USER_MODE_ONLY: u64 = 1;
/// `USERFAULTFD_IOC_NEW` of `/dev/userfaultfd`: its argument is that of `userfaultfd`.
const NEW: u64 = 0xaa00;
/// `UFFDIO_API`: its argument leads to the version and to the features.
pub const API: u64 = 0xc018_aa3f;
/// `UFFD_FEATURE_EVENT_…` of `fork`, `mremap` and `munmap`, which wait until the program has read
/// the event. It may not be able to, as another page that it needs waits for the lock.
const EVENTS: u64 = 1 << 1 | 1 << 2 | 1 << 6;

/// `userfaultfd`, as the kernel is asked for it.
pub fn open(mut call: Call) -> Call {
    call.arguments[0] &= !USER_MODE_ONLY;
    call
}

/// `ioctl`, as the kernel is asked for it.
pub fn ioctl(mut call: Call) -> Call {
    if call.arguments[1] & 0xffff_ffff == NEW {
        call.arguments[2] &= !USER_MODE_ONLY;
    }
    call
}

/// Whether the machine has the features for which [`API`] asks.
///
/// # Errors
/// If it does not.
pub fn check_features(features: u64) -> Result<(), Refusal> {
    if features & EVENTS == 0 {
        return Ok(());
    }
    Err(Refusal::lacking(libc::EINVAL, "events of userfaultfd for changed mappings"))
}
