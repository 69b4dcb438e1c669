//! KVM's rings of dirty pages, one for each virtual CPU.
//!
//! A ring is mapped only while it is read. So a process that is saved has nothing of it.

use std::io;
use std::os::fd::{AsRawFd, RawFd};

use kvm_ioctls::VmFd;
use pagemark_kvm_log::ring;
use pagemark_kvm_protocol::description::RING_ENTRIES;

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
    ring::enable(vm.as_raw_fd(), RING_ENTRIES)
}

/// Has KVM protect all pages again whose entries were read. `rings` are all that have such entries.
/// Returns as [`ring::reset`]. No thread of the machine has io_uring.
///
/// # Errors
/// Those of KVM; then any of the pages may be unprotected.
pub fn reset<'r>(vm: &VmFd, rings: impl Iterator<Item = &'r mut Ring>) -> Result<bool, i32> {
    let rings: Vec<&mut Ring> = rings.collect();
    let unreset = rings.iter().fold(0u32, |sum, ring| sum.saturating_add(ring.unreset));
    let is_whole = ring::reset(vm.as_raw_fd(), unreset)?;
    rings.into_iter().for_each(|ring| ring.unreset = 0);
    Ok(is_whole)
}

/// The ring of a virtual CPU.
#[derive(Clone, Copy, Debug)]
pub struct Ring {
    /// The virtual CPU.
    descriptor: RawFd,
    /// That of the machine to which it belongs.
    generation: u32,
    /// How many entries were read.
    read: u32,
    /// How many of them were not reset since.
    unreset: u32,
}

impl Ring {
    /// That of a new virtual CPU.
    pub fn new(descriptor: RawFd, generation: u32) -> Ring {
        Ring { descriptor, generation, read: 0, unreset: 0 }
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
        let before = self.read;
        self.with_mapped(ring::Ring::pass_over_read)?;
        self.unreset = self.unreset.saturating_add(self.read.wrapping_sub(before));
        Ok(())
    }

    /// Reads the entries that are new. `each` gets a slot and the number of a page in it, and
    /// returns whether the page is to be protected again.
    ///
    /// # Errors
    /// It cannot be mapped; then nothing is read.
    pub fn read(&mut self, each: impl FnMut(u32, u64) -> bool) -> Result<(), i32> {
        let before = self.read;
        self.with_mapped(|mapped| _ = mapped.read(each))?;
        self.unreset = self.unreset.saturating_add(self.read.wrapping_sub(before));
        Ok(())
    }

    fn with_mapped(&mut self, work: impl FnOnce(&mut ring::Ring)) -> Result<(), i32> {
        let errno = |error: io::Error| error.raw_os_error().unwrap_or(libc::EIO);
        let mut mapped = ring::Ring::of(self.descriptor, RING_ENTRIES, self.read).map_err(errno)?;
        work(&mut mapped);
        self.read = mapped.position();
        Ok(())
    }
}
