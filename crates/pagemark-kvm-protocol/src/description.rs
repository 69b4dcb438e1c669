//! How a process that runs in a machine of `pagemark-kvm` gives up all that it has of KVM, so that
//! its state can be saved, and makes it anew.
//!
//! The monitor of the machine describes what it has in memory at [`ADDRESS`]: a page with a
//! [`Header`], and for each virtual CPU [`VCPU_PAGES`] pages: a [`VcpuEntry`], its vector state,
//! and a copy of the page that KVM shares with the monitor. Whoever saves the state stops all
//! threads, and *parks* the process by system calls that a thread makes for it: the state of the
//! virtual CPUs goes into these pages, private memory takes the place of what KVM shares, and the
//! descriptors are closed. A thread that needs KVM then waits until the process is *released*, or
//! the process that parked it is gone, and makes a new machine. A process that is restored from the
//! saved state does the same.
//!
//! The description also says what the program has written, for whoever tracks it from outside. It
//! has the address of the guest's page tables, whose dirty bits show which pages the program's
//! instructions have written; or it has a bit for each page that is in KVM's log, or in its rings.
//! All other writes are in a list. While the process is parked and nobody changes them,
//! [`crate::guest_tables`] reads them.
//!
//! A restored process can also continue without a machine, and without the monitor. It is
//! [`MachineState::Leaving`] then until all of its threads wait where they would enter the
//! machine, and then [`MachineState::Left`]: each thread takes the program's registers, and
//! whoever restored the process removes what is left of the monitor.

use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64};

use pagemark_linux::PAGE_SIZE;

use crate::machine_calls::Means;
#[cfg(doc)]
use crate::state::{DescriptorState, MachineState};
#[cfg(doc)]
use crate::write_record::WriteRecord;

/// Where the description is: above the addresses of the program, and below those that Linux gives
/// to the monitor.
pub const ADDRESS: u64 = 0x5400_0000_0000;

/// The first word of the description: its form.
pub const MAGIC: u64 = u64::from_le_bytes(*b"PMKVMp01");

/// The path of the device of KVM.
pub const DEVICE: &str = "/dev/kvm";

/// The same as words, with zeros behind it.
pub const DEVICE_WORDS: [u64; 2] = [u64::from_le_bytes(*b"/dev/kvm"), 0];

/// Most virtual CPUs that are described.
pub const MOST_VCPUS: usize = 4096;

/// Pages of the description of a virtual CPU.
pub const VCPU_PAGES: u64 = 3;

/// The begin of the description.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Header {
    /// [`MAGIC`].
    pub magic: AtomicU64,
    /// A [`MachineState`].
    pub state: AtomicU32,
    /// How many threads use KVM otherwise than to run. The process cannot be parked meanwhile.
    pub users: AtomicU32,
    /// The descriptor of `/dev/kvm`.
    pub device: AtomicI32,
    /// The descriptor of the virtual machine.
    pub machine: AtomicI32,
    /// Bytes that KVM shares for each virtual CPU.
    pub shared_bytes: AtomicU32,
    /// How many virtual CPUs are described.
    pub vcpus: AtomicU32,
    /// [`DEVICE_WORDS`], for a system call that takes the path.
    pub device_path: [AtomicU64; 2],
    /// The process that parked this one and will release it. 0 if it has no id here.
    pub parker: AtomicI32,
    /// Not 0 if the kernel may write anywhere at any time.
    pub always: AtomicU64,
    /// Who tracks the program's memory from outside: a number of its own ([`tracker_number`]), or
    /// 0. The monitor lists writes as long as somebody does.
    pub tracker: AtomicU64,
    /// The address of guest-physical address 0. 0 if the monitor does not list writes.
    pub tables: AtomicU64,
    /// The guest-physical address of the highest page table.
    pub root: AtomicU64,
    /// The end of the program's addresses. What lies behind is the monitor's.
    pub program_end: AtomicU64,
    /// How many ranges are listed at [`WRITTEN_ADDRESS`].
    pub written: AtomicU64,
    /// What the machine has besides the page tables, a [`WriteRecord`]. 0 if the monitor logs
    /// nothing for trackers outside.
    pub keeps: AtomicU64,
    /// The tracker for which KVM notes all that the machine's processors write, since the machine
    /// was made, or 0.
    pub logged: AtomicU64,
    /// How many memory slots there are besides the slot 0. The first [`MOST_SLOTS`] are described
    /// at [`SLOTS_ADDRESS`].
    pub slots: AtomicU64,
    /// Room for a `struct kvm_dirty_log`.
    pub request: [AtomicU64; 2],
    /// While the process is [`MachineState::Leaving`]: how many threads wait to continue outside.
    pub waiting: AtomicU32,
    /// How many of them are about to, behind which no thread needs the monitor.
    pub left: AtomicU32,
    /// The monitor's instruction behind the `syscall` of a call that may block, and where a thread
    /// goes on instead if the call is not to be made: the thread then waits, too.
    pub blocking_call: [AtomicU64; 2],
    /// Where the program's file has its first instruction. 0 as long as no program is loaded.
    pub program_entry: AtomicU64,
    /// Not 0 if another process has written somewhere to the program's memory since the machine's
    /// own trackers were last asked ([`OF_MACHINE`]), and since a tracker outside was
    /// ([`OF_OUTSIDE`]). The monitor of that process says so before the write and behind it.
    pub written_by_others: [AtomicU64; 2],
}

/// The word of [`Header::written_by_others`] that trackers of the machine take.
pub const OF_MACHINE: usize = 0;

/// The word that a tracker outside takes.
pub const OF_OUTSIDE: usize = 1;

/// The address of [`Header::written_by_others`].
pub const WRITTEN_BY_OTHERS: u64 = ADDRESS + std::mem::offset_of!(Header, written_by_others) as u64;

/// A range of addresses: its start, and its end.
pub type Words = [AtomicU64; 2];

/// Ranges of one system call that are described; a call with more counts as one that writes
/// anywhere.
pub const MOST_ANNOUNCED: usize = 8;

/// The description of a virtual CPU.
#[derive(Debug, Default)]
#[repr(C)]
pub struct VcpuEntry {
    /// Its descriptor.
    pub descriptor: AtomicI32,
    /// A [`DescriptorState`].
    pub descriptor_state: AtomicU32,
    /// The first page of what KVM shares, as a `struct iovec`: address and length.
    pub shared: [AtomicU64; 2],
    /// The page for its copy, as a `struct iovec`.
    pub copy: [AtomicU64; 2],
    /// Exceptions and interrupts that are on their way: `struct kvm_vcpu_events`.
    pub events: [AtomicU64; 8],
    /// Where the system call that its thread is making may write: the first of these ranges, as
    /// many as `announced_count` says.
    pub announced: [Words; MOST_ANNOUNCED],
    /// How many ranges are announced.
    pub announced_count: AtomicU64,
}

/// The address of the description of a virtual CPU.
pub const fn vcpu_address(number: usize) -> u64 {
    ADDRESS + PAGE * (1 + VCPU_PAGES * number as u64)
}

/// Where the vector state of a virtual CPU goes.
pub const fn vector_state_address(number: usize) -> u64 {
    vcpu_address(number) + PAGE
}

/// Where the copy of the shared page of a virtual CPU goes.
pub const fn copy_address(number: usize) -> u64 {
    vcpu_address(number) + 2 * PAGE
}

/// Where the list of ranges is that were written without a trace in the guest's page tables:
/// [`Words`] in ascending order, which neither overlap nor touch.
pub const WRITTEN_ADDRESS: u64 = vcpu_address(MOST_VCPUS);

/// Most ranges of that list.
pub const MOST_WRITTEN: usize = 4096;

/// Bytes of the program's addresses that a memory slot stands for.
pub const SLOT_SPAN: u64 = 1 << 30;

/// Most memory slots that are described, without the slot 0.
pub const MOST_SLOTS: usize = 1024;

/// Where a word for each memory slot is, for the slot 1 first: the number of the [`SLOT_SPAN`] that
/// it stands for.
pub const SLOTS_ADDRESS: u64 = WRITTEN_ADDRESS + (MOST_WRITTEN * size_of::<Words>()) as u64;

/// Where the pages are that KVM noted: [`LOG_BYTES`] for each memory slot, with a bit for each
/// page.
pub const LOGS_ADDRESS: u64 = SLOTS_ADDRESS + (MOST_SLOTS * 8) as u64;

/// Bytes of the bits of a memory slot.
pub const LOG_BYTES: u64 = SLOT_SPAN / PAGE / 8;

/// The address of the bits of the memory slot `slot`, which is not 0.
pub const fn log_address(slot: usize) -> u64 {
    LOGS_ADDRESS + LOG_BYTES * (slot as u64 - 1)
}

/// Entries of the ring of a virtual CPU, if the machine keeps rings: a program that writes much
/// leaves the machine once for as many pages, and a thread takes 64 KiB of the kernel's memory.
pub const RING_ENTRIES: u32 = 4096;

/// Where a ring can be mapped while the process is parked: behind the description.
pub const RING_ADDRESS: u64 = ADDRESS + BYTES;

/// The number of a tracker that tracks by `means`, made of a random one.
pub const fn tracker_number(random: u64, means: Means) -> u64 {
    // 0 is nobody.
    random << MEANS_BITS | (means as u64 + 1)
}

/// True if the tracker of that number tracks by `means`.
pub const fn tracks_by(tracker: u64, means: Means) -> bool {
    tracker & ((1 << MEANS_BITS) - 1) == means as u64 + 1
}

/// Bits of a tracker's number that say by which means it tracks.
const MEANS_BITS: u32 = 3;

/// Bytes of the whole description.
pub const BYTES: u64 = LOGS_ADDRESS - ADDRESS + LOG_BYTES * MOST_SLOTS as u64;

const PAGE: u64 = PAGE_SIZE as u64;

const _: () = assert!(size_of::<VcpuEntry>() <= PAGE_SIZE && size_of::<Header>() <= PAGE_SIZE);
const _: () = assert!(LOGS_ADDRESS.is_multiple_of(PAGE) && SLOTS_ADDRESS.is_multiple_of(PAGE));
