//! Makes a process give up what it has of KVM ([`pagemark_kvm_protocol::park`]), while all of its
//! threads are stopped.

use std::cell::Cell;

use pagemark_kvm_protocol::park::{self, Failure};

use super::{Helped, MakeCall, Step};

/// Makes the process of a stopped thread give up what it has of KVM. `parker` is the id there of
/// the process that will release it. Does not allocate.
pub(super) fn park(thread: i32, parker: Option<i32>, call: MakeCall<'_>) -> Helped<()> {
    let not_made = Cell::new((Step::SystemCall, 0));
    let make = |number, arguments| call(number, arguments).map_err(|failure| not_made.set(failure)).ok();
    park::park(thread, parker, &make).map_err(|failure| match failure {
        Failure::Gone => (Step::Gone, 0),
        Failure::Busy => (Step::Busy, libc::EAGAIN),
        Failure::Device(errno) => (Step::Device, errno),
        Failure::Memory(errno) => (Step::Inspect, errno),
        Failure::SystemCall(errno) => (Step::SystemCall, errno),
        Failure::NotMade => not_made.get(),
    })
}
