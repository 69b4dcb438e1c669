//! Makes a process give up what it has of KVM, by system calls of one of its threads, while all are
//! stopped. See [`crate::description`].
//!
//! While threads use KVM, the process is only marked, so that no others begin. Then all is saved,
//! which changes nothing, the process is marked as parked, what KVM has noted of the program's
//! writes for a tracker outside is read into its memory, and everything is closed.

use std::mem::offset_of;

use pagemark_kvm_log::kernel::{GET_DIRTY_LOG, GET_EVENTS, GET_VECTOR_STATE};
use pagemark_kvm_log::ring;
use pagemark_linux::{PAGE_SIZE, ptrace};

use crate::description::{
    ADDRESS, DEVICE_WORDS, Header, LOG_BYTES, MAGIC, MOST_SLOTS, MOST_VCPUS, RING_ADDRESS, RING_ENTRIES, VcpuEntry,
    log_address, vcpu_address, vector_state_address,
};
use crate::state::{DescriptorState, MachineState};
use crate::write_record::WriteRecord;

/// Where the ring of a virtual CPU is in its file.
const RING_OFFSET: u64 = ring::PAGE_OFFSET * PAGE_SIZE as u64;
/// Bytes of a ring.
const RING_BYTES: u64 = RING_ENTRIES as u64 * size_of::<RingEntry>() as u64;
/// `struct kvm_dirty_gfn`, of which no other thread changes a copy.
#[derive(Clone, Copy)]
#[repr(C)]
struct RingEntry {
    flags: u32,
    slot: u32,
    page: u64,
}

/// Why a process could not give up its machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Failure {
    /// It has none, or says what no monitor says.
    Gone,
    /// Its threads use KVM at this moment. It is unchanged but for a mark, by which no others
    /// begin.
    Busy,
    /// It could not open the device of KVM.
    Device(libc::c_int),
    /// Its memory could not be read or written.
    Memory(libc::c_int),
    /// A system call failed.
    SystemCall(libc::c_int),
    /// A system call could not be made; the caller knows why.
    NotMade,
}

/// Makes a system call in the process. None if it could not be made.
pub type MakeCall<'c> = &'c dyn Fn(i64, [u64; 6]) -> Option<i64>;

type Parked<T> = Result<T, Failure>;

/// Called for each virtual CPU.
type Visit<'v> = &'v mut dyn FnMut(Vcpu) -> Parked<()>;

/// A virtual CPU that has a descriptor.
struct Vcpu {
    number: usize,
    descriptor: u64,
    is_open: bool,
    /// Where KVM shares memory with the process.
    shared: u64,
}

/// What a process has of KVM besides its virtual CPUs, and how many those are.
struct Described {
    device: u32,
    machine: u32,
    /// Bytes that KVM shares for each virtual CPU.
    shared_bytes: u32,
    vcpus: u32,
}

/// A process whose threads are all stopped, and one of which makes system calls.
struct StoppedProcess<'c> {
    thread: i32,
    call: MakeCall<'c>,
}

/// Makes the process of a stopped thread give up what it has of KVM. `parker` is the id there of
/// the process that will release it. Does not allocate.
///
/// # Errors
/// [`Failure`]. It may have been closed in part then: the process makes it again when it is
/// released.
pub fn park(thread: i32, parker: Option<i32>, call: MakeCall<'_>) -> Parked<()> {
    let process = StoppedProcess { thread, call };
    if process.word(ADDRESS)? != MAGIC {
        return Err(Failure::Gone);
    }
    let (state, users) = process.halves(ADDRESS + offset_of!(Header, state) as u64)?;
    let set_state = |state| process.set_state(state, users, parker);
    match MachineState::of(state) {
        state if users != 0 => {
            if state == Some(MachineState::Running) {
                // Those who use it end that soon, and no others begin.
                set_state(MachineState::Closing)?;
            }
            return Err(Failure::Busy);
        }
        Some(MachineState::Running | MachineState::Closing) => {}
        // Not made again since the last time.
        _ => return set_state(MachineState::Parked),
    }
    let described = process.described()?;
    process.check_device()?;
    let own_pid = process.done(libc::SYS_getpid, [0; 6])?;
    process.save(&described, own_pid)?;
    set_state(MachineState::Parked)?;
    // All is closed, whatever fails: the threads make all of it again. The first error is reported.
    let noted = process.read_noted(&described);
    if noted.is_err() {
        // Then everything counts as written.
        process.set_word(ADDRESS + offset_of!(Header, logged) as u64, 0)?;
    }
    process.close(&described, own_pid, noted)
}

impl StoppedProcess<'_> {
    fn word(&self, address: u64) -> Parked<u64> {
        ptrace::word(self.thread, address).map_err(Failure::Memory)
    }

    /// The word of the header at `offset`.
    fn field(&self, offset: usize) -> Parked<u64> {
        self.word(ADDRESS + offset as u64)
    }

    /// A word as two numbers.
    fn halves(&self, address: u64) -> Parked<(u32, u32)> {
        self.word(address).map(|word| (word as u32, (word >> 32) as u32))
    }

    fn set_word(&self, address: u64, word: u64) -> Parked<()> {
        ptrace::set_word(self.thread, address, word).map_err(Failure::Memory)
    }

    fn set_state(&self, state: MachineState, users: u32, parker: Option<i32>) -> Parked<()> {
        let parker = u64::from(parker.unwrap_or(0).cast_unsigned());
        self.set_word(ADDRESS + offset_of!(Header, parker) as u64, parker)?;
        // The number of users is in the same word.
        let word = u64::from(users) << 32 | u64::from(state.word());
        self.set_word(ADDRESS + offset_of!(Header, state) as u64, word)
    }

    /// Makes a system call in the process, which must not fail.
    fn done(&self, number: i64, arguments: [u64; 6]) -> Parked<u64> {
        match (self.call)(number, arguments).ok_or(Failure::NotMade)? {
            result if result < 0 => Err(Failure::SystemCall(result.unsigned_abs() as libc::c_int)),
            result => Ok(result as u64),
        }
    }

    fn described(&self) -> Parked<Described> {
        let (device, machine) = self.halves(ADDRESS + offset_of!(Header, device) as u64)?;
        let (shared_bytes, vcpus) = self.halves(ADDRESS + offset_of!(Header, shared_bytes) as u64)?;
        Ok(Described { device, machine, shared_bytes, vcpus })
    }

    /// The virtual CPU of that number, if it has a descriptor.
    fn vcpu(&self, number: usize) -> Parked<Option<Vcpu>> {
        let at = vcpu_address(number);
        let (descriptor, state) = self.halves(at + offset_of!(VcpuEntry, descriptor) as u64)?;
        let shared = self.word(at + offset_of!(VcpuEntry, shared) as u64)?;
        let is_open = state == DescriptorState::Open.word();
        let vcpu = Vcpu { number, descriptor: descriptor.into(), is_open, shared };
        Ok((state != DescriptorState::Closed.word()).then_some(vcpu))
    }

    fn each_vcpu(&self, described: &Described, visit: Visit<'_>) -> Parked<()> {
        let numbers = 0..(described.vcpus as usize).min(MOST_VCPUS);
        numbers.into_iter().try_for_each(|number| self.vcpu(number)?.map_or(Ok(()), &mut *visit))
    }

    /// Fails if the process could not open the device of KVM again.
    fn check_device(&self) -> Parked<()> {
        let path = ADDRESS + offset_of!(Header, device_path) as u64;
        // A process could otherwise have any file opened, although its seccomp filter forbids it.
        if [self.word(path)?, self.word(path + 8)?] != DEVICE_WORDS {
            return Err(Failure::Gone);
        }
        let flags = (libc::O_RDWR | libc::O_CLOEXEC) as u64;
        let arguments = [libc::AT_FDCWD as u64, path, flags, 0, 0, 0];
        let opened = (self.call)(libc::SYS_openat, arguments).ok_or(Failure::NotMade)?;
        if opened < 0 {
            return Err(Failure::Device(-opened as libc::c_int));
        }
        self.done(libc::SYS_close, [opened as u64, 0, 0, 0, 0, 0]).map(drop)
    }

    /// Copies within the process, whose own id is `own_pid`, what the fields of a virtual CPU say.
    fn copy(&self, own_pid: u64, entry: u64, to: usize, from: usize) -> Parked<()> {
        let [to, from] = [to, from].map(|offset| entry + offset as u64);
        self.done(libc::SYS_process_vm_readv, [own_pid, to, 1, from, 1, 0]).map(drop)
    }

    /// Saves the state of the virtual CPUs in the memory of the process.
    fn save(&self, described: &Described, own_pid: u64) -> Parked<()> {
        self.each_vcpu(described, &mut |vcpu| {
            if !vcpu.is_open {
                return Ok(());
            }
            let entry = vcpu_address(vcpu.number);
            let ask =
                |request: u32, to| self.done(libc::SYS_ioctl, [vcpu.descriptor, request.into(), to, 0, 0, 0]).map(drop);
            ask(GET_VECTOR_STATE, vector_state_address(vcpu.number))?;
            ask(GET_EVENTS, entry + offset_of!(VcpuEntry, events) as u64)?;
            self.copy(own_pid, entry, offset_of!(VcpuEntry, copy), offset_of!(VcpuEntry, shared))
        })
    }

    /// Reads what KVM has noted of the program's writes for a tracker outside.
    fn read_noted(&self, described: &Described) -> Parked<()> {
        if self.field(offset_of!(Header, logged))? == 0 {
            return Ok(());
        }
        if WriteRecord::of(self.field(offset_of!(Header, keeps))?) == Some(WriteRecord::Rings) {
            let read = &mut |vcpu: Vcpu| if vcpu.is_open { self.read_ring(vcpu.descriptor) } else { Ok(()) };
            return self.each_vcpu(described, read);
        }
        let slots = (self.field(offset_of!(Header, slots))? as usize).min(MOST_SLOTS);
        let request = ADDRESS + offset_of!(Header, request) as u64;
        (1..=slots).try_for_each(|slot| {
            for (at, word) in [(request, slot as u64), (request + 8, log_address(slot))] {
                self.set_word(at, word)?;
            }
            let arguments = [described.machine.into(), u64::from(GET_DIRTY_LOG), request, 0, 0, 0];
            self.done(libc::SYS_ioctl, arguments).map(drop)
        })
    }

    /// Notes the pages that are in the ring of a virtual CPU.
    fn read_ring(&self, descriptor: u64) -> Parked<()> {
        let flags = (libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE) as u64;
        let arguments = [RING_ADDRESS, RING_BYTES, libc::PROT_READ as u64, flags, descriptor, RING_OFFSET];
        self.done(libc::SYS_mmap, arguments)?;
        let noted = note_ring(self.thread).map_err(Failure::Memory);
        self.done(libc::SYS_munmap, [RING_ADDRESS, RING_BYTES, 0, 0, 0, 0]).and(noted)
    }

    /// Closes all that the process has of KVM, and has private memory in place of what that shares.
    /// Returns the first error, `closed` if that is one.
    fn close(&self, described: &Described, own_pid: u64, mut closed: Parked<()>) -> Parked<()> {
        let close = |descriptor: u64| self.done(libc::SYS_close, [descriptor, 0, 0, 0, 0, 0]).map(drop);
        self.each_vcpu(described, &mut |vcpu| {
            let entry = vcpu_address(vcpu.number);
            if vcpu.is_open {
                let protection = (libc::PROT_READ | libc::PROT_WRITE) as u64;
                let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED) as u64;
                let arguments = [vcpu.shared, described.shared_bytes.into(), protection, flags, u64::MAX, 0];
                let mapped = self.done(libc::SYS_mmap, arguments);
                let copy = |_| self.copy(own_pid, entry, offset_of!(VcpuEntry, shared), offset_of!(VcpuEntry, copy));
                closed = closed.and(mapped.and_then(copy));
            }
            let descriptor = u64::from(DescriptorState::Closed.word()) << 32 | vcpu.descriptor;
            closed = closed.and(self.set_word(entry + offset_of!(VcpuEntry, descriptor) as u64, descriptor));
            closed = closed.and(close(vcpu.descriptor));
            Ok(())
        })?;
        for descriptor in [described.machine, described.device] {
            closed = closed.and(close(descriptor.into()));
        }
        closed
    }
}

/// Notes the pages that are in the ring that is mapped.
fn note_ring(thread: i32) -> Result<(), libc::c_int> {
    const PIECE: usize = PAGE_SIZE / size_of::<RingEntry>();
    // The word of bits that is changed, and its address.
    let mut bits: Option<(u64, u64)> = None;
    for at in (RING_ADDRESS..RING_ADDRESS + RING_BYTES).step_by(PAGE_SIZE) {
        let mut entries = [RingEntry { flags: 0, slot: 0, page: 0 }; PIECE];
        let here = libc::iovec { iov_base: entries.as_mut_ptr().cast(), iov_len: PAGE_SIZE };
        let there = libc::iovec { iov_base: at as *mut libc::c_void, iov_len: PAGE_SIZE };
        // SAFETY: the kernel writes to the entries, which are numbers, as many bytes as they have.
        match unsafe { libc::process_vm_readv(thread, &raw const here, 1, &raw const there, 1, 0) } {
            read if read == PAGE_SIZE as isize => {}
            read => return Err(if read < 0 { ptrace::errno() } else { libc::EFAULT }),
        }
        for RingEntry { slot, page, .. } in
            entries.into_iter().filter(|entry| entry.flags & (ring::DIRTY | ring::READ) == ring::DIRTY)
        {
            // What is not described counts as written in any case.
            if !(1..=MOST_SLOTS).contains(&(slot as usize)) || page >= LOG_BYTES * 8 {
                continue;
            }
            let (address, bit) = (log_address(slot as usize) + page / 64 * 8, 1 << (page % 64));
            bits = Some(match bits {
                Some((last, word)) if last == address => (address, word | bit),
                last => {
                    last.map_or(Ok(()), |(last, word)| ptrace::set_word(thread, last, word))?;
                    (address, ptrace::word(thread, address)? | bit)
                }
            });
        }
    }
    bits.map_or(Ok(()), |(address, word)| ptrace::set_word(thread, address, word))
}

const _: () = {
    assert!(offset_of!(Header, users) == offset_of!(Header, state) + 4);
    assert!(offset_of!(Header, machine) == offset_of!(Header, device) + 4);
    assert!(offset_of!(Header, vcpus) == offset_of!(Header, shared_bytes) + 4);
    assert!(offset_of!(VcpuEntry, descriptor_state) == offset_of!(VcpuEntry, descriptor) + 4);
};
