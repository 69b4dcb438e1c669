//! KVM's own calls on a machine.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::machine::{Kernel, Region, Taken};
use crate::ring::{self, Ring};

/// `KVM_CREATE_VM`.
pub const CREATE_VM: u32 = 0xae01;
/// `KVM_CHECK_EXTENSION`.
pub const CHECK_EXTENSION: u32 = 0xae03;
/// `KVM_CREATE_VCPU`.
pub const CREATE_PROCESSOR: u32 = 0xae41;
/// `KVM_RUN`.
pub const RUN: u32 = 0xae80;
/// `KVM_SET_USER_MEMORY_REGION`.
pub const SET_REGION: u32 = 0x4020_ae46;
/// `KVM_SET_USER_MEMORY_REGION2`.
pub const SET_REGION2: u32 = 0x40a0_ae49;
/// `KVM_GET_DIRTY_LOG`.
pub const GET_DIRTY_LOG: u32 = 0x4010_ae42;
/// `KVM_CLEAR_DIRTY_LOG`.
pub const CLEAR_DIRTY_LOG: u32 = 0xc018_aec0;
/// `KVM_ENABLE_CAP`.
pub const ENABLE_CAP: u32 = 0x4068_aea3;
/// `KVM_GET_XSAVE`.
pub const GET_VECTOR_STATE: u32 = 0x9000_aea4;
/// `KVM_GET_VCPU_EVENTS`.
pub const GET_EVENTS: u32 = 0x8040_ae9f;

/// `UFFDIO_REGISTER`.
pub const USERFAULT_REGISTER: u32 = 0xc020_aa00;

/// `KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2`.
pub const CAP_MANUAL_PROTECT: u32 = 168;
/// `KVM_CAP_DIRTY_LOG_RING`.
pub const CAP_RING: u32 = 192;
/// `KVM_CAP_DIRTY_LOG_RING_ACQ_REL`.
pub const CAP_RING_ACQUIRE: u32 = 223;

/// The argument of `KVM_SET_USER_MEMORY_REGION`, and the begin of that of
/// `KVM_SET_USER_MEMORY_REGION2`.
pub type RawRegion = Region;

/// The argument of `KVM_GET_DIRTY_LOG`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RawGet {
    /// The slot.
    pub slot: u32,
    /// Nothing.
    pub padding: u32,
    /// Where a bit for each page is written.
    pub bits: *mut u64,
}

/// The argument of `KVM_CLEAR_DIRTY_LOG`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RawClear {
    /// The slot.
    pub slot: u32,
    /// The number of pages.
    pub pages: u32,
    /// The first of them.
    pub first: u64,
    /// A bit for each, from the first on.
    pub bits: *const u64,
}

/// The argument of `KVM_ENABLE_CAP`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RawCapability {
    /// Which.
    pub capability: u32,
    /// None are defined.
    pub flags: u32,
    /// Its own.
    pub arguments: [u64; 4],
    /// Nothing.
    pub padding: [u8; 64],
}

/// Makes the system call itself, so that no library in between is asked again.
///
/// # Errors
/// Those of the call.
///
/// # Safety
/// As of `ioctl` with that request.
pub unsafe fn call(fd: RawFd, request: u32, argument: usize) -> Result<i32, i32> {
    // SAFETY: the caller guarantees it.
    let result = unsafe { libc::syscall(libc::SYS_ioctl, fd, libc::c_ulong::from(request), argument) };
    match result {
        0.. => Ok(i32::try_from(result).unwrap_or(i32::MAX)),
        _ => Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)),
    }
}

/// The machine behind a descriptor, which may be closed at any time: then the calls fail.
#[derive(Debug)]
pub struct KvmMachine {
    fd: RawFd,
    rings: Mutex<Rings>,
}

/// The rings of a machine that keeps them.
#[derive(Debug, Default)]
struct Rings {
    /// One for each virtual CPU, of `entries` entries.
    rings: Vec<KeptRing>,
    entries: u32,
    /// True after a reset that may have left pages unprotected, until that is reported.
    have_unprotected: bool,
}

#[derive(Debug)]
struct KeptRing {
    ring: Ring,
    /// Entries that were read and whose pages are not protected again yet.
    unprotected: u32,
}

impl KvmMachine {
    /// The machine of a descriptor.
    ///
    /// # Safety
    /// Regions that are set have memory that the machine may write, and a log is read into as many
    /// words as the slot has. [`Machine`](crate::machine::Machine) sees to both, if all calls of
    /// its owner pass through it.
    pub unsafe fn new(fd: RawFd) -> KvmMachine {
        KvmMachine { fd, rings: Mutex::default() }
    }

    /// Enables rings of `entries` entries for the machine, in place of its log.
    ///
    /// # Errors
    /// Those of [`ring::enable`].
    pub fn enable_rings(&self, entries: u32) -> Result<(), i32> {
        ring::enable(self.fd, entries)?;
        self.rings().entries = entries;
        Ok(())
    }

    /// Takes note of a virtual CPU that was made, of a machine that keeps rings.
    ///
    /// # Errors
    /// Its ring cannot be mapped.
    pub fn add_ring(&self, processor: RawFd) -> io::Result<()> {
        let mut rings = self.rings();
        let ring = Ring::of(processor, rings.entries, 0)?;
        rings.rings.push(KeptRing { ring, unprotected: 0 });
        Ok(())
    }

    fn rings(&self) -> MutexGuard<'_, Rings> {
        self.rings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The descriptor.
    pub fn fd(&self) -> RawFd {
        self.fd
    }

    /// True if the descriptor is that of a machine.
    pub fn is_there(&self) -> bool {
        let link = std::fs::read_link(format!("/proc/self/fd/{}", self.fd));
        link.is_ok_and(|link| link.as_os_str() == "anon_inode:kvm-vm")
    }
}

impl Kernel for KvmMachine {
    fn manual_options(&self) -> u64 {
        // SAFETY: reads a number.
        let found = unsafe { call(self.fd, CHECK_EXTENSION, CAP_MANUAL_PROTECT as usize) };
        found.map_or(0, |options| u64::from(options.unsigned_abs()))
    }

    fn set_manual(&self, options: u64) -> Result<(), i32> {
        let request =
            RawCapability { capability: CAP_MANUAL_PROTECT, flags: 0, arguments: [options, 0, 0, 0], padding: [0; 64] };
        // SAFETY: KVM reads the request.
        unsafe { call(self.fd, ENABLE_CAP, (&raw const request) as usize) }.map(drop)
    }

    fn set_region(&self, region: &Region) -> Result<(), i32> {
        // SAFETY: KVM reads the request; the rest by the contract of `new`.
        unsafe { call(self.fd, SET_REGION, (region as *const Region) as usize) }.map(drop)
    }

    fn dirty_log(&self, slot: u32, bits: &mut [u64]) -> Result<(), i32> {
        let request = RawGet { slot, padding: 0, bits: bits.as_mut_ptr() };
        // SAFETY: KVM writes a bit for each page of the slot; there is room by the contract of `new`.
        unsafe { call(self.fd, GET_DIRTY_LOG, (&raw const request) as usize) }.map(drop)
    }

    fn clear(&self, slot: u32, first: u64, pages: u32, bits: &[u64]) -> Result<(), i32> {
        if bits.len() < crate::slot_log::words_of(pages.into()) {
            return Err(libc::EINVAL);
        }
        let request = RawClear { slot, pages, first, bits: bits.as_ptr() };
        // SAFETY: KVM reads a bit for each page.
        unsafe { call(self.fd, CLEAR_DIRTY_LOG, (&raw const request) as usize) }.map(drop)
    }

    fn take_rings(&self, each: &mut dyn FnMut(u32, u64)) -> Result<Taken, i32> {
        let mut rings = self.rings();
        let Rings { rings, entries, have_unprotected } = &mut *rings;
        for KeptRing { ring, unprotected } in rings.iter_mut() {
            let count = ring.read(|slot, page| {
                each(slot, page);
                true
            });
            *unprotected = unprotected.saturating_add(count);
        }
        // KVM leaves the machine when some entries are still free.
        let is_overwritten = rings.iter().any(|kept| kept.unprotected >= *entries);
        let read = rings.iter().fold(0u32, |sum, kept| sum.saturating_add(kept.unprotected));
        let are_protected = ring::reset_apart(self.fd, read);
        *have_unprotected |= are_protected != Ok(true);
        are_protected?;
        rings.iter_mut().for_each(|kept| kept.unprotected = 0);
        Ok(match (is_overwritten, std::mem::take(have_unprotected)) {
            (true, _) => Taken::Overwritten,
            (false, true) => Taken::Unprotected,
            (false, false) => Taken::All,
        })
    }
}

/// Why KVM's log does not work on this host.
#[derive(Debug)]
pub enum Lack {
    /// `/dev/kvm` cannot be opened.
    Device(io::Error),
    /// KVM makes no machine.
    Machine(io::Error),
    /// KVM has no log with manual protection.
    Log,
    /// KVM has no rings.
    Rings,
}

/// What KVM keeps of the pages that a machine writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Keeping {
    /// A log for each memory slot.
    Log,
    /// A ring for each virtual CPU.
    Rings,
}

/// Checks that this host's KVM makes machines, and keeps this for them.
///
/// # Errors
/// [`Lack`]
pub fn check(keeping: Keeping) -> Result<(), Lack> {
    let device = File::options().read(true).write(true).open("/dev/kvm").map_err(Lack::Device)?;
    // SAFETY: takes a number, and returns a new descriptor.
    let made = unsafe { call(device.as_raw_fd(), CREATE_VM, 0) };
    let made = made.map_err(|error| Lack::Machine(io::Error::from_raw_os_error(error)))?;
    // SAFETY: the descriptor is new, and owned by nothing else.
    let made = unsafe { OwnedFd::from_raw_fd(made) };
    // SAFETY: no region is set, and no log read.
    let machine = unsafe { KvmMachine::new(made.as_raw_fd()) };
    match keeping {
        Keeping::Rings => machine.enable_rings(ring::ENTRIES).map_err(|_| Lack::Rings),
        Keeping::Log if machine.manual_options() & crate::machine::MANUAL_PROTECT == 0 => Err(Lack::Log),
        Keeping::Log => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `_IOC` of the kernel.
    fn number(direction: u32, code: u32, bytes: usize) -> u32 {
        direction << 30 | (bytes as u32) << 16 | 0xae << 8 | code
    }

    #[test]
    fn the_numbers_of_the_calls_have_the_lengths_of_their_arguments() {
        assert_eq!(SET_REGION, number(1, 0x46, size_of::<RawRegion>()));
        assert_eq!(GET_DIRTY_LOG, number(1, 0x42, size_of::<RawGet>()));
        assert_eq!(CLEAR_DIRTY_LOG, number(3, 0xc0, size_of::<RawClear>()));
        assert_eq!(ENABLE_CAP, number(1, 0xa3, size_of::<RawCapability>()));
        // Behind the region: an offset, a descriptor, and room for more.
        assert_eq!(SET_REGION2, number(1, 0x49, size_of::<RawRegion>() + 8 + 4 + 4 + 14 * 8));
    }

    #[test]
    fn a_descriptor_of_something_else_is_no_machine() {
        let file = File::open("/dev/null").unwrap();
        // SAFETY: the descriptor is not that of a machine, and the call fails.
        let machine = unsafe { KvmMachine::new(file.as_raw_fd()) };
        assert!(!machine.is_there() && machine.manual_options() == 0);
        assert!(machine.set_manual(1).is_err() && machine.dirty_log(0, &mut [0]).is_err());
        assert_eq!(machine.clear(0, 0, 64, &[]), Err(libc::EINVAL));
    }
}
