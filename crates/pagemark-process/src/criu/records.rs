//! The records of threads in CRIU's memory: the registers and the blocked signals with which CRIU
//! lets them resume.

use std::io::IoSliceMut;
use std::os::unix::fs::FileExt;

use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;
use pagemark_linux::proc::{self, maps};
use pagemark_linux::ptrace::Registers;

/// What follows the registers in CRIU's record of a 64-bit thread.
const NATIVE_MARK: u16 = 0x0a;

/// The identifier of the thread precedes the registers in CRIU's records by at most this, bytes.
const RECORD_HEAD: usize = 1024;

/// Mappings of CRIU that are larger than this hold no records of threads, bytes.
const MAX_RECORDS: u64 = 64 << 20;

/// Registers and blocked signals of a thread as CRIU recorded them.
#[derive(Debug)]
pub(super) struct Record {
    pub registers: Registers,
    pub signal_mask: u64,
}

/// The memory of CRIU that holds its records of threads.
pub(super) struct Records {
    memory: Vec<Vec<u8>>,
}

impl Records {
    pub fn read(criu_pid: i32) -> Records {
        let Ok(file) = proc::open_memory(criu_pid) else { return Records { memory: Vec::new() } };
        let mappings = maps::read(criu_pid).unwrap_or_default();
        let heaps = mappings.iter().filter(|mapping| {
            let is_heap = mapping.name.is_empty() || mapping.name == b"[heap]";
            is_heap && mapping.writable && mapping.is_private_anonymous()
        });
        let read = |mapping: &maps::Mapping| {
            let length = mapping.end.get() - mapping.start.get();
            let mut content = vec![0; usize::try_from(length).ok().filter(|_| length <= MAX_RECORDS)?];
            file.read_exact_at(&mut content, mapping.start.get()).ok()?;
            Some(content)
        };
        Records { memory: heaps.filter_map(read).collect() }
    }

    /// Finds the record of a thread. CRIU stops a thread once, so that all its records of the
    /// thread are of the same stop. `keeps_registers`: the thread has `now` but for the registers
    /// of a system call.
    pub fn find(&self, tid: i32, now: &Registers, keeps_registers: bool) -> Option<Record> {
        self.memory.iter().find_map(|memory| find_record(memory, tid, now, keeps_registers))
    }
}

/// Finds the record of a thread in memory of CRIU: the thread's id, the blocked signals, the
/// registers, and a mark.
fn find_record(memory: &[u8], tid: i32, now: &Registers, keeps_registers: bool) -> Option<Record> {
    const LENGTH: usize = size_of::<Registers>();
    let word = |offset: usize| {
        memory.get(offset..offset + 8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_ne_bytes)
    };
    let last = memory.len().checked_sub(LENGTH + 2)?;
    (8..=last).step_by(8).find_map(|offset| {
        if word(offset + std::mem::offset_of!(Registers, fs_base)) != now.fs_base
            || memory[offset + LENGTH..offset + LENGTH + 2] != NATIVE_MARK.to_ne_bytes()
        {
            return None;
        }
        let bytes = memory[offset..offset + LENGTH].as_ptr();
        // SAFETY: the structure consists of numbers, for which every bit pattern is valid, and the slice
        // has its length.
        let registers: Registers = unsafe { bytes.cast::<Registers>().read_unaligned() };
        let segments = |r: &Registers| [r.cs, r.ss, r.gs_base, r.ds, r.es, r.fs, r.gs];
        let kept = |r: &Registers| [r.rbx, r.rbp, r.rsp, r.r12, r.r13, r.r14, r.r15];
        let is_same = segments(&registers) == segments(now) && (!keeps_registers || kept(&registers) == kept(now));
        let is_named = (offset.saturating_sub(RECORD_HEAD)..offset).step_by(8).any(|at| word(at) as u32 == tid as u32);
        (is_same && is_named).then(|| Record { registers, signal_mask: word(offset - 8) })
    })
}

/// Reads the registers of the record of a 64-bit thread, which are at an address of CRIU's.
pub(super) fn read_registers(criu: i32, address: u64) -> Option<Registers> {
    const LENGTH: usize = size_of::<Registers>();
    let mut bytes = [0; LENGTH + size_of_val(&NATIVE_MARK)];
    let there = [RemoteIoVec { base: usize::try_from(address).ok()?, len: bytes.len() }];
    let length = bytes.len();
    let read = process_vm_readv(Pid::from_raw(criu), &mut [IoSliceMut::new(&mut bytes)], &there).ok()?;
    let is_native = bytes[LENGTH..] == NATIVE_MARK.to_ne_bytes();
    // SAFETY: the structure consists of numbers, for which every bit pattern is valid, and the array is
    // longer.
    let registers = unsafe { bytes.as_ptr().cast::<Registers>().read_unaligned() };
    (read == length && is_native).then_some(registers)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registers(fs_base: u64, rip: u64) -> Registers {
        // SAFETY: the structure consists of numbers, for which zeros are valid.
        let zeros: Registers = unsafe { std::mem::zeroed() };
        Registers { rbx: 7, rsp: 0x7fff_0000, cs: 0x33, ss: 0x2b, fs_base, rip, ..zeros }
    }

    /// A record of CRIU: the identifier, a pointer, the blocked signals, the registers, the mark.
    fn record(tid: i32, signal_mask: u64, registers: &Registers) -> Vec<u8> {
        let pointer = std::ptr::from_ref(registers).cast::<u8>();
        // SAFETY: the structure consists of numbers without padding, and lives through the call.
        let bytes = unsafe { std::slice::from_raw_parts(pointer, size_of::<Registers>()) };
        let head = [u64::from(tid as u32), 0x5555_0000, signal_mask].map(u64::to_ne_bytes).concat();
        [&head, bytes, &NATIVE_MARK.to_ne_bytes(), &[0; 6]].concat()
    }

    #[test]
    fn the_record_of_a_thread_is_found_among_others() {
        let mine = registers(0x1000, 0x40_1000);
        let mut heap = record(11, 1, &registers(0x2000, 0x40_2000));
        heap.extend(vec![0; RECORD_HEAD]);
        // A forked process has the same thread pointer, but another identifier.
        heap.extend(record(12, 2, &registers(0x1000, 0x40_3000)));
        heap.extend(vec![0; RECORD_HEAD]);
        heap.extend(record(13, 3, &mine));
        heap.extend(vec![0xff; 100]);
        let now = Registers { rip: 0x40_0002, rax: 9, ..mine };
        let found = find_record(&heap, 13, &now, true).unwrap();
        assert_eq!((found.registers.rip, found.signal_mask), (0x40_1000, 3));
        assert_eq!(find_record(&heap, 12, &now, true).unwrap().signal_mask, 2);
        assert!(find_record(&heap, 14, &now, true).is_none());
        assert!(find_record(&heap, 13, &Registers { rbx: 8, ..now }, true).is_none());
        assert!(find_record(&heap, 13, &Registers { rbx: 8, ..now }, false).is_some());
        assert!(find_record(&[1; 7], 13, &now, false).is_none());
    }
}
