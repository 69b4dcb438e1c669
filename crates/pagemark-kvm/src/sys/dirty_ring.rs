//! KVM's rings of dirty pages (Linux 5.11): each virtual CPU has one, in which KVM notes the pages
//! that it writes first.
//!
//! A ring is mapped only while it is read. So a process that is saved has nothing of it.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use kvm_bindings::{KVM_CAP_DIRTY_LOG_RING, KVM_CAP_DIRTY_LOG_RING_ACQ_REL, kvm_dirty_gfn, kvm_enable_cap};
use kvm_ioctls::VmFd;

use crate::layout::PAGE;

/// `KVM_RESET_DIRTY_RINGS`.
const RESET: libc::c_ulong = 0xaec7;

/// The page of a virtual CPU's file at which its ring begins (`KVM_DIRTY_LOG_PAGE_OFFSET`).
const PAGE_OFFSET: u64 = 64;

/// Entries of a ring: a program that writes much leaves the machine once for as many pages, and a
/// thread takes 64 KiB of the kernel's memory.
const ENTRIES: u64 = 4096;

const ENTRY_BYTES: u64 = size_of::<kvm_dirty_gfn>() as u64;
const RING_BYTES: usize = (ENTRIES * ENTRY_BYTES) as usize;

/// The entry is new: KVM has written it.
const DIRTY: u32 = 1;
/// The entry was read: KVM may protect the page again, and use the entry anew.
const READ: u32 = 2;

/// No slot has this number: KVM passes over the entry.
const NO_SLOT: u32 = u32::MAX;

/// Where the pages of Intel's log wait until the virtual CPU leaves the machine.
const PAGE_MODIFICATION_LOGGING: &str = "/sys/module/kvm_intel/parameters/pml";

/// Has the machine keep rings, and no log. To be called before it has virtual CPUs.
///
/// # Errors
/// `EOPNOTSUPP`: KVM has no rings, or such that do not have all writes of other threads. Otherwise
/// those of KVM.
pub fn enable(vm: &VmFd) -> Result<(), i32> {
    // The processor's own log is emptied into the ring only when its virtual CPU leaves the machine,
    // and nothing here has it do so.
    if std::fs::read_to_string(PAGE_MODIFICATION_LOGGING).is_ok_and(|text| text.starts_with('Y')) {
        return Err(libc::EOPNOTSUPP);
    }
    // Both are the same on x86; newer kernels may have the second alone.
    let capabilities = [KVM_CAP_DIRTY_LOG_RING, KVM_CAP_DIRTY_LOG_RING_ACQ_REL];
    let has = |capability: &u32| vm.check_extension_raw((*capability).into()) as i64 >= RING_BYTES as i64;
    let capability = capabilities.into_iter().find(has).ok_or(libc::EOPNOTSUPP)?;
    let mut request = kvm_enable_cap { cap: capability, ..kvm_enable_cap::default() };
    request.args[0] = RING_BYTES as u64;
    vm.enable_cap(&request).map_err(|error| error.errno())
}

/// Has KVM protect all pages again whose entries were read.
///
/// # Errors
/// Those of KVM.
pub fn reset(vm: &VmFd) -> Result<(), i32> {
    // SAFETY: the call has no argument, and changes no memory of this process.
    match unsafe { libc::ioctl(vm.as_raw_fd(), RESET, 0) } {
        result if result < 0 => Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)),
        _ => Ok(()),
    }
}

/// The ring of a virtual CPU.
#[derive(Clone, Copy, Debug)]
pub struct Ring {
    /// The virtual CPU.
    descriptor: RawFd,
    /// That of the machine to which it belongs.
    generation: u32,
    /// The entry that KVM writes next.
    next: u64,
}

impl Ring {
    /// That of a new virtual CPU.
    pub fn new(descriptor: RawFd, generation: u32) -> Ring {
        Ring { descriptor, generation, next: 0 }
    }

    /// The generation of the machine to which it belongs.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// Whoever read it last may have been killed at any instant, before a reset. To be called once.
    ///
    /// # Errors
    /// It cannot be mapped.
    pub fn recover(&mut self) -> Result<(), i32> {
        let ring = Mapped::new(self.descriptor)?;
        if ring.flags(self.next).load(Ordering::Acquire) & READ != 0 {
            self.next += 1;
        }
        Ok(())
    }

    /// Reads the entries that are new. `each` gets a slot and the number of a page in it, and
    /// returns whether the page is to be protected again.
    ///
    /// # Errors
    /// It cannot be mapped; then nothing is read.
    pub fn read(&mut self, mut each: impl FnMut(u32, u64) -> bool) -> Result<(), i32> {
        let ring = Mapped::new(self.descriptor)?;
        while ring.flags(self.next).load(Ordering::Acquire) & (DIRTY | READ) == DIRTY {
            let (slot, page) = (ring.slot(self.next), ring.page(self.next).load(Ordering::Relaxed));
            if !each(slot.load(Ordering::Relaxed), page) {
                slot.store(NO_SLOT, Ordering::Relaxed);
            }
            ring.flags(self.next).store(DIRTY | READ, Ordering::Release);
            self.next += 1;
        }
        Ok(())
    }
}

struct Mapped {
    start: NonNull<u8>,
}

impl Mapped {
    fn new(descriptor: RawFd) -> Result<Mapped, i32> {
        let (protection, offset) = (libc::PROT_READ | libc::PROT_WRITE, (PAGE_OFFSET * PAGE) as i64);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), RING_BYTES, protection, libc::MAP_SHARED, descriptor, offset) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO));
        }
        NonNull::new(start.cast()).map(|start| Mapped { start }).ok_or(libc::ENOMEM)
    }

    fn at(&self, entry: u64, offset: usize) -> *mut u8 {
        let offset = (entry % ENTRIES * ENTRY_BYTES) as usize + offset;
        // SAFETY: within the mapping.
        unsafe { self.start.add(offset).as_ptr() }
    }

    fn flags(&self, entry: u64) -> &AtomicU32 {
        // SAFETY: within the mapping and aligned; KVM and this process access it atomically.
        unsafe { &*self.at(entry, std::mem::offset_of!(kvm_dirty_gfn, flags)).cast() }
    }

    fn slot(&self, entry: u64) -> &AtomicU32 {
        // SAFETY: as above.
        unsafe { &*self.at(entry, std::mem::offset_of!(kvm_dirty_gfn, slot)).cast() }
    }

    fn page(&self, entry: u64) -> &AtomicU64 {
        // SAFETY: as above.
        unsafe { &*self.at(entry, std::mem::offset_of!(kvm_dirty_gfn, offset)).cast() }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, which nothing uses any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), RING_BYTES) };
    }
}
