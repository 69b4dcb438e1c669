//! Where things are: the program's addresses, the guest's kernel addresses, guest-physical memory.

use pagemark_kvm_protocol::description;

/// The lowest address of the program. Linux maps nothing below it either (`vm.mmap_min_addr`).
pub const PROGRAM_START: u64 = 0x1_0000;

/// The end of the program's addresses. All that the kernel itself maps for this process (its image,
/// libraries, heap and stacks) lies far above.
pub const PROGRAM_END: u64 = 0x5000_0000_0000;

/// The end of the addresses that a process can have on x86-64 with four levels of page tables.
pub const USER_END: u64 = 0x8000_0000_0000;

/// The largest stack that is mapped, whatever the limit says.
pub const MOST_STACK: u64 = 1 << 30;

/// The stack ends at most so far below [`PROGRAM_END`].
pub const STACK_SPAN: u64 = 1 << 30;

/// Mappings without an address of their own are placed below this address, the highest first. The
/// stack is above it, and has room to grow.
pub const MMAP_TOP: u64 = 0x4fff_0000_0000;

const _: () = assert!(MMAP_TOP + 2 * MOST_STACK + STACK_SPAN < PROGRAM_END);

/// Programs that can lie anywhere are loaded above this address, and their heap above them.
pub const PROGRAM_BASE: u64 = 0x4500_0000_0000;

/// How far random placement moves [`MMAP_TOP`] down and [`PROGRAM_BASE`] up, at most.
pub const RANDOM_SPAN: u64 = 1 << 38;

/// Bytes of a page of the guest's tables.
pub const PAGE: u64 = 4096;

/// Bytes that one page of the lowest level maps.
pub const TABLE_SPAN: u64 = 2 << 20;

/// Memory slots cover aligned parts of the program's addresses of this size. 1 GiB is small enough
/// that a slot costs KVM little (2 MiB with shadow page tables), and large enough that few
/// programs have more than a dozen.
pub const SLOT_SPAN: u64 = description::SLOT_SPAN;

/// What the guest's kernel pages and page tables can take at most: the memory slot 0, at
/// guest-physical address 0.
pub const TABLE_MEMORY: u64 = 1 << 30;

/// The virtual address of guest-physical address 0 for the guest's kernel stubs. Only the pages of
/// the stubs, descriptor tables and kernel stacks are mapped there, for the supervisor only. The
/// address is where this process has its own mappings, which the guest does not have. It is in the
/// lower half because a stub in the upper half cannot be entered by `syscall` under PVM.
pub const KERNEL_BASE: u64 = 0x6000_0000_0000;

/// A guest-physical address. It is a type, so that it is not taken for an address of the program or
/// of this process, which are plain numbers, as they are in system calls.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Physical(u64);

impl Physical {
    /// The beginning of the memory, and of [`TABLE_MEMORY`].
    pub const ZERO: Physical = Physical(0);

    /// Gives a number its meaning: an entry of a table, or what KVM is told.
    pub const fn new(address: u64) -> Physical {
        Physical(address)
    }

    /// The bare number.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The address `bytes` behind this one.
    pub const fn plus(self, bytes: u64) -> Physical {
        Physical(self.0 + bytes)
    }

    /// Where memory of slot 0 is in the guest's kernel, if it is mapped there.
    pub const fn in_kernel(self) -> u64 {
        KERNEL_BASE + self.0
    }

    /// The beginning of a memory slot other than 0.
    pub const fn of_slot(slot: u32) -> Physical {
        Physical(slot as u64 * SLOT_SPAN)
    }
}

/// `address` rounded down to a page.
pub const fn page_floor(address: u64) -> u64 {
    address & !(PAGE - 1)
}

/// `address` rounded up to a page; `None` if that overflows.
pub const fn page_ceil(address: u64) -> Option<u64> {
    match address.checked_add(PAGE - 1) {
        Some(sum) => Some(page_floor(sum)),
        None => None,
    }
}

/// Whether `start..start + len` lies within the program's addresses.
pub const fn is_program(start: u64, len: u64) -> bool {
    match start.checked_add(len) {
        Some(end) => start >= PROGRAM_START && end <= PROGRAM_END,
        None => false,
    }
}
