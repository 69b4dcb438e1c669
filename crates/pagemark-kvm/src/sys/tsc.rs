//! The time-stamp counter of virtual CPUs, by which the functions of the vDSO tell the time.

use std::arch::x86_64::{_mm_lfence, _rdtsc};
use std::os::fd::AsRawFd;

use kvm_bindings::{KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, Msrs, kvm_device_attr, kvm_msr_entry};
use kvm_ioctls::VcpuFd;

/// `KVM_SET_DEVICE_ATTR`, which this version of the library has for other processors.
const SET_DEVICE_ATTR: libc::c_ulong = 0x4018_aee1;
const MSR_TSC: u32 = 0x10;

/// Gives a virtual CPU the counter of the host, which is otherwise 0 when it is made. Returns
/// whether it has it: KVM can since Linux 5.16.
pub fn follow_host(vcpu: &VcpuFd) -> bool {
    let offset = 0u64;
    let attribute = kvm_device_attr {
        flags: 0,
        group: KVM_VCPU_TSC_CTRL,
        attr: KVM_VCPU_TSC_OFFSET.into(),
        addr: &raw const offset as u64,
    };
    // SAFETY: KVM reads the attribute, and the offset from its address.
    let result = unsafe { libc::ioctl(vcpu.as_raw_fd(), SET_DEVICE_ATTR, &raw const attribute) };
    result >= 0 && is_that_of_host(vcpu)
}

/// Whether the counter of a virtual CPU is between two values of the host's.
fn is_that_of_host(vcpu: &VcpuFd) -> bool {
    let entry = kvm_msr_entry { index: MSR_TSC, ..kvm_msr_entry::default() };
    let Ok(mut msrs) = Msrs::from_entries(&[entry]) else { return false };
    let before = of_host();
    let read = vcpu.get_msrs(&mut msrs);
    read == Ok(1) && (before..=of_host()).contains(&msrs.as_slice()[0].data)
}

fn of_host() -> u64 {
    // SAFETY: all processors of 64 bits have the instructions.
    unsafe {
        _mm_lfence();
        let now = _rdtsc();
        _mm_lfence();
        now
    }
}

/// How long the host has been suspended since it began, in nanoseconds. After a suspension KVM may
/// go on with another counter.
pub fn suspended() -> i64 {
    suspended_by(|clock| {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: fills the value.
        unsafe { libc::clock_gettime(clock, &mut time) };
        time.tv_sec * 1_000_000_000 + time.tv_nsec
    })
}

/// Like [`suspended`], with clocks that `now` reads. A thread may be preempted between two of them,
/// or stopped for a checkpoint: then they are read again.
fn suspended_by(mut now: impl FnMut(libc::clockid_t) -> i64) -> i64 {
    const SHORT: i64 = 100_000;
    const MOST_TRIES: usize = 100;
    let mut read = || {
        let before = now(libc::CLOCK_MONOTONIC);
        let boot = now(libc::CLOCK_BOOTTIME);
        (now(libc::CLOCK_MONOTONIC) - before, boot - before)
    };
    let mut best = read();
    for _ in 1..MOST_TRIES {
        if best.0 <= SHORT {
            break;
        }
        best = best.min(read());
    }
    best.1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_between_two_clocks_is_no_suspension() {
        const SUSPENDED: i64 = 7_000_000_000;
        // The thread is stopped for a second before one of its first reads.
        for stopped_before in 0..6 {
            let (mut time, mut reads) = (1_000_000, 0);
            let found = suspended_by(|clock| {
                time += if reads == stopped_before { 1_000_000_000 } else { 50 };
                reads += 1;
                time + if clock == libc::CLOCK_BOOTTIME { SUSPENDED } else { 0 }
            });
            assert!((SUSPENDED..SUSPENDED + 1000).contains(&found), "{stopped_before}: {found}");
        }
        assert!((suspended() - suspended()).abs() < 1_000_000);
    }
}
