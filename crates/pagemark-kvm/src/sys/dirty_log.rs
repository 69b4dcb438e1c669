//! KVM's log of dirty pages, whose pages are protected again one by one (Linux 5.0).

use std::io;
use std::os::fd::AsRawFd;

use kvm_bindings::{
    KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_DIRTY_LOG_INITIALLY_SET, KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE,
    kvm_clear_dirty_log, kvm_clear_dirty_log__bindgen_ty_1, kvm_enable_cap,
};
use kvm_ioctls::VmFd;

/// `KVM_CLEAR_DIRTY_LOG`.
const CLEAR: libc::c_ulong = 0xc018_aec0;

/// Has reads of the log leave pages unprotected. Where KVM can, logs begin with all pages dirty, so
/// that nothing is protected until it is cleared.
///
/// # Errors
/// `EOPNOTSUPP`: KVM has no such log.
pub fn enable(vm: &VmFd) -> Result<(), i32> {
    let has = vm.check_extension_raw(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2.into());
    let options = has.max(0) as u32 & (KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE | KVM_DIRTY_LOG_INITIALLY_SET);
    if options & KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE == 0 {
        return Err(libc::EOPNOTSUPP);
    }
    let mut capability = kvm_enable_cap { cap: KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, ..kvm_enable_cap::default() };
    capability.args[0] = options.into();
    vm.enable_cap(&capability).map_err(|error| error.errno())
}

/// Protects pages of a slot again: those with a bit in `bits`, whose first is that of page
/// `first`, a multiple of 64.
///
/// # Errors
/// Those of KVM.
pub fn clear(vm: &VmFd, slot: u32, first: u64, bits: &[u64]) -> Result<(), i32> {
    let request = kvm_clear_dirty_log {
        slot,
        num_pages: bits.len() as u32 * 64,
        first_page: first,
        __bindgen_anon_1: kvm_clear_dirty_log__bindgen_ty_1 { dirty_bitmap: bits.as_ptr().cast_mut().cast() },
    };
    // SAFETY: KVM reads the request, and a bit for each page from `bits`.
    let result = unsafe { libc::ioctl(vm.as_raw_fd(), CLEAR, &raw const request) };
    if result < 0 { Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)) } else { Ok(()) }
}
