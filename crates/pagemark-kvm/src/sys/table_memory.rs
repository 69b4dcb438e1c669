//! The memory of the guest's kernel: page tables, descriptor tables, stubs and kernel stacks.

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::layout::{PAGE, Physical, TABLE_MEMORY};

/// [`TABLE_MEMORY`] bytes of private anonymous memory, guest-physical addresses `0..TABLE_MEMORY`.
/// Pages are handed out once and never taken back. A child made by `fork` has a copy.
pub struct TableMemory {
    base: NonNull<AtomicU64>,
    next: AtomicU64,
    /// As many bytes can be accessed. All of them would count as data of the program
    /// (`RLIMIT_DATA`), and as memory that the host must have where it promises no more than that.
    usable: AtomicU64,
}

/// As many more bytes can be accessed each time.
const STEP: u64 = 2 << 20;

// SAFETY: the memory stays mapped for the life of the value, and all accesses are atomic.
unsafe impl Send for TableMemory {}
// SAFETY: as above.
unsafe impl Sync for TableMemory {}

impl TableMemory {
    /// Memory that is all zeros. The first page is never handed out, so that 0 is no table.
    pub fn new() -> io::Result<TableMemory> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), TABLE_MEMORY as usize, libc::PROT_NONE, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // A core file of the program would be a gibibyte longer.
        // SAFETY: the mapping that was just made.
        unsafe { libc::madvise(base, TABLE_MEMORY as usize, libc::MADV_DONTDUMP) };
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        let memory = TableMemory { base, next: AtomicU64::new(PAGE), usable: AtomicU64::new(0) };
        memory.make_usable(PAGE)?;
        Ok(memory)
    }

    /// The first `bytes` can be accessed. There is no lock that a killed child which shares the
    /// memory could leave: it does no harm if several threads do the same.
    fn make_usable(&self, bytes: u64) -> io::Result<()> {
        let (usable, bytes) = (self.usable.load(Ordering::Acquire), bytes.next_multiple_of(STEP));
        if bytes <= usable {
            return Ok(());
        }
        let start = self.host_address() + usable;
        // SAFETY: within the mapping; what can be accessed already stays so.
        let result = unsafe {
            libc::mprotect(start as *mut libc::c_void, (bytes - usable) as usize, libc::PROT_READ | libc::PROT_WRITE)
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        self.usable.fetch_max(bytes, Ordering::AcqRel);
        Ok(())
    }

    /// The address of guest-physical address 0 in this process.
    pub fn host_address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    /// The guest-physical address of a page of zeros; `None` if there is no memory left.
    pub fn allocate(&self) -> Option<Physical> {
        let page = self.next.fetch_add(PAGE, Ordering::Relaxed);
        (page < TABLE_MEMORY && self.make_usable(page + PAGE).is_ok()).then_some(Physical::new(page))
    }

    /// The eight bytes at guest-physical address `address`.
    ///
    /// # Panics
    /// If `address` is not a multiple of 8 or not within the memory; callers pass addresses of
    /// pages that they allocated.
    pub fn word(&self, address: Physical) -> &AtomicU64 {
        let address = address.get();
        assert!(address.is_multiple_of(8) && address < TABLE_MEMORY, "{address:#x} is no word of the guest's tables");
        // SAFETY: within the mapping, aligned, and only accessed atomically.
        unsafe { self.base.add(address as usize / 8).as_ref() }
    }

    /// Writes `bytes` at `address`, in words of eight bytes; the rest of the last word is zeros.
    pub fn write(&self, address: Physical, bytes: &[u8]) {
        for (index, chunk) in bytes.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.word(address.plus(index as u64 * 8)).store(u64::from_le_bytes(word), Ordering::Relaxed);
        }
    }
}

/// Whether this process can map `bytes` more.
///
/// # Errors
/// It cannot.
pub fn check_room(bytes: usize) -> io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice, which nothing uses.
    unsafe {
        let at = libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0);
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        libc::munmap(at, bytes);
    }
    Ok(())
}

impl Drop for TableMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, which nothing uses any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), TABLE_MEMORY as usize) };
    }
}
