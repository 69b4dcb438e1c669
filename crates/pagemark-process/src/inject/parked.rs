//! Makes a process give up what it has of KVM, by system calls of one of its threads, while all are
//! stopped. See [`pagemark::sys::parking`].
//!
//! While threads use KVM, the process is only marked, so that no others begin. Then all is saved,
//! which changes nothing, the process is marked as parked, what KVM has noted of the program's
//! writes for a tracker outside is read into its memory, and everything is closed.

use std::mem::offset_of;

use pagemark::PAGE_SIZE;
use pagemark::sys::own_machine::Means;
use pagemark::sys::parking::{
    ADDRESS, CLOSED, CLOSING, DEVICE_WORDS, Header, LOG_BYTES, MAGIC, MOST_SLOTS, MOST_VCPUS, OPEN, PARKED,
    RING_ADDRESS, RING_ENTRIES, RUNNING, VcpuEntry, log_address, vcpu_address, vector_state_address,
};

use super::{Helped, MakeCall, Step};
use crate::ptrace;

/// `KVM_GET_XSAVE`
const GET_VECTOR_STATE: u64 = 0x9000_aea4;
/// `KVM_GET_VCPU_EVENTS`
const GET_EVENTS: u64 = 0x8040_ae9f;
/// `KVM_GET_DIRTY_LOG`
const GET_LOG: u64 = 0x4010_ae42;
/// Where the ring of a virtual CPU is in its file (`KVM_DIRTY_LOG_PAGE_OFFSET`).
const RING_OFFSET: u64 = 64 * PAGE_SIZE as u64;
/// Bytes of a ring.
const RING_BYTES: u64 = RING_ENTRIES as u64 * size_of::<RingEntry>() as u64;
/// The entry is new.
const NEW: u32 = 1;
/// The entry was read.
const READ: u32 = 2;

/// `struct kvm_dirty_gfn`.
#[derive(Clone, Copy)]
#[repr(C)]
struct RingEntry {
    flags: u32,
    slot: u32,
    page: u64,
}

/// As [`MakeCall`]; the call must not fail.
type Done<'c> = &'c dyn Fn(i64, [u64; 6]) -> Helped<u64>;

/// Called for each virtual CPU.
type Visit<'v> = &'v mut dyn FnMut(Vcpu) -> Helped<()>;

/// A virtual CPU that has a descriptor.
struct Vcpu {
    number: usize,
    descriptor: u64,
    is_open: bool,
    /// Where KVM shares memory with the process.
    shared: u64,
}

/// Makes the process of a stopped thread give up what it has of KVM. `parker` is the id there of
/// the process that will release it. Does not allocate.
pub(super) fn park(thread: i32, parker: Option<i32>, call: MakeCall<'_>) -> Helped<()> {
    let word = |address| ptrace::word(thread, address).map_err(|errno| (Step::Inspect, errno));
    let halves = |word: u64| (word as u32, (word >> 32) as u32);
    if word(ADDRESS)? != MAGIC {
        return Err((Step::Gone, 0));
    }
    let state_at = ADDRESS + offset_of!(Header, state) as u64;
    let (state, users) = halves(word(state_at)?);
    let set_word = |address, word| ptrace::set_word(thread, address, word).map_err(|errno| (Step::Inspect, errno));
    let set_state = |state: u32| {
        set_word(ADDRESS + offset_of!(Header, parker) as u64, u64::from(parker.unwrap_or(0).cast_unsigned()))?;
        // The number of users is in the same word.
        set_word(state_at, u64::from(users) << 32 | u64::from(state))
    };
    if users != 0 {
        if state == RUNNING {
            // Those who use it end that soon, and no others begin.
            set_state(CLOSING)?;
        }
        return Err((Step::Busy, libc::EAGAIN));
    }
    if state != RUNNING && state != CLOSING {
        // Not made again since the last time.
        return set_state(PARKED);
    }
    let (device, machine) = halves(word(ADDRESS + offset_of!(Header, device) as u64)?);
    let (shared_bytes, vcpus) = halves(word(ADDRESS + offset_of!(Header, shared_bytes) as u64)?);
    let vcpu = |number: usize| -> Helped<Option<Vcpu>> {
        let at = vcpu_address(number);
        let (descriptor, state) = halves(word(at + offset_of!(VcpuEntry, descriptor) as u64)?);
        let shared = word(at + offset_of!(VcpuEntry, shared) as u64)?;
        let is_open = state == OPEN;
        Ok((state != CLOSED).then_some(Vcpu { number, descriptor: descriptor.into(), is_open, shared }))
    };
    let each = |visit: Visit<'_>| {
        (0..(vcpus as usize).min(MOST_VCPUS)).try_for_each(|number| vcpu(number)?.map_or(Ok(()), &mut *visit))
    };
    let done = |number, arguments| match call(number, arguments)? {
        result if result < 0 => Err((Step::SystemCall, -result as libc::c_int)),
        result => Ok(result as u64),
    };
    let copy = |own_pid: u64, entry: u64, to: usize, from: usize| {
        let [to, from] = [to, from].map(|offset| entry + offset as u64);
        done(libc::SYS_process_vm_readv, [own_pid, to, 1, from, 1, 0]).map(drop)
    };
    let (shared_at, copy_at) = (offset_of!(VcpuEntry, shared), offset_of!(VcpuEntry, copy));

    let path = ADDRESS + offset_of!(Header, device_path) as u64;
    // A process could otherwise have any file opened, although its seccomp filter forbids it.
    if [word(path)?, word(path + 8)?] != DEVICE_WORDS {
        return Err((Step::Gone, 0));
    }
    let here = libc::AT_FDCWD as u64;
    let opened = call(libc::SYS_openat, [here, path, (libc::O_RDWR | libc::O_CLOEXEC) as u64, 0, 0, 0])?;
    if opened < 0 {
        return Err((Step::Device, -opened as libc::c_int));
    }
    done(libc::SYS_close, [opened as u64, 0, 0, 0, 0, 0])?;
    let own_pid = done(libc::SYS_getpid, [0; 6])?;
    each(&mut |vcpu| {
        if !vcpu.is_open {
            return Ok(());
        }
        let entry = vcpu_address(vcpu.number);
        let events = entry + offset_of!(VcpuEntry, events) as u64;
        done(libc::SYS_ioctl, [vcpu.descriptor, GET_VECTOR_STATE, vector_state_address(vcpu.number), 0, 0, 0])?;
        done(libc::SYS_ioctl, [vcpu.descriptor, GET_EVENTS, events, 0, 0, 0])?;
        copy(own_pid, entry, copy_at, shared_at)
    })?;

    set_state(PARKED)?;
    // All is closed, whatever fails: the threads make all of it again. The first error is reported.
    let mut closed = read_noted(thread, machine, &done, &each);
    if closed.is_err() {
        // Then everything counts as written.
        set_word(ADDRESS + offset_of!(Header, logged) as u64, 0)?;
    }
    each(&mut |vcpu| {
        let entry = vcpu_address(vcpu.number);
        if vcpu.is_open {
            let protection = (libc::PROT_READ | libc::PROT_WRITE) as u64;
            let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED) as u64;
            let mapped = done(libc::SYS_mmap, [vcpu.shared, shared_bytes.into(), protection, flags, u64::MAX, 0]);
            closed = closed.and(mapped.and_then(|_| copy(own_pid, entry, shared_at, copy_at)));
        }
        let descriptor = u64::from(CLOSED) << 32 | vcpu.descriptor;
        let at = entry + offset_of!(VcpuEntry, descriptor) as u64;
        closed = closed.and(set_word(at, descriptor));
        closed = closed.and(done(libc::SYS_close, [vcpu.descriptor, 0, 0, 0, 0, 0]).map(drop));
        Ok(())
    })?;
    for descriptor in [machine, device] {
        closed = closed.and(done(libc::SYS_close, [descriptor.into(), 0, 0, 0, 0, 0]).map(drop));
    }
    closed
}

/// Reads what KVM has noted of the program's writes for a tracker outside.
fn read_noted(thread: i32, machine: u32, done: Done<'_>, each: &dyn Fn(Visit<'_>) -> Helped<()>) -> Helped<()> {
    let field = |offset: usize| ptrace::word(thread, ADDRESS + offset as u64).map_err(|errno| (Step::Inspect, errno));
    if field(offset_of!(Header, logged))? == 0 {
        return Ok(());
    }
    if field(offset_of!(Header, keeps))? == Means::Ring as u64 + 1 {
        return each(&mut |vcpu| if vcpu.is_open { read_ring(thread, vcpu.descriptor, done) } else { Ok(()) });
    }
    let slots = (field(offset_of!(Header, slots))? as usize).min(MOST_SLOTS);
    let request = ADDRESS + offset_of!(Header, request) as u64;
    (1..=slots).try_for_each(|slot| {
        for (at, word) in [(request, slot as u64), (request + 8, log_address(slot))] {
            ptrace::set_word(thread, at, word).map_err(|errno| (Step::Inspect, errno))?;
        }
        done(libc::SYS_ioctl, [machine.into(), GET_LOG, request, 0, 0, 0]).map(drop)
    })
}

/// Notes the pages that are in the ring of a virtual CPU.
fn read_ring(thread: i32, descriptor: u64, done: Done<'_>) -> Helped<()> {
    let flags = (libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE) as u64;
    done(libc::SYS_mmap, [RING_ADDRESS, RING_BYTES, libc::PROT_READ as u64, flags, descriptor, RING_OFFSET])?;
    let noted = note_ring(thread).map_err(|errno| (Step::Inspect, errno));
    done(libc::SYS_munmap, [RING_ADDRESS, RING_BYTES, 0, 0, 0, 0]).and(noted)
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
        for RingEntry { slot, page, .. } in entries.into_iter().filter(|entry| entry.flags & (NEW | READ) == NEW) {
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
