//! The registers with which CRIU lets threads resume.
//!
//! CRIU reads the registers of a thread when it has stopped it, and sets them again when its own
//! code has run in the thread. In between they are in a record in CRIU's memory, where Pagemark
//! changes those of interrupted calls ([`InterruptedCalls::resume`]). The record is complete, and
//! not used, while CRIU makes these calls, which wait for Pagemark (`notify.rs`):
//!
//! * `ptrace(PTRACE_GETSIGMASK)` of a thread: tells the address of the record.
//! * `ptrace(PTRACE_GETREGSET)` of vector registers: CRIU has made the result EINTR. The record of
//!   a thread that is not the first of its process is changed.
//! * The first `prlimit` about a process: CRIU has made the frame of a signal, by which CRIU's code
//!   ends, from the record of the first thread. The result in this frame stays EINTR, because the
//!   kernel does not look at it; the record is changed.
//!
//! These calls read and put nothing back. If Pagemark is killed, they fail, and CRIU cancels the
//! dump; threads get the result of their record, changed or not.

use std::collections::HashMap;
use std::io::IoSlice;
use std::mem::offset_of;

use nix::sys::uio::{RemoteIoVec, process_vm_writev};
use nix::unistd::Pid;
use pagemark_linux::proc::{Call, Status};
use pagemark_linux::ptrace::Registers;

use super::interrupted_calls::{self, InterruptedCalls};
use super::records;

/// The registers follow the blocked signals.
const OFFSET: u64 = 8;

/// The records of threads.
#[derive(Debug)]
pub(super) struct RecordChanges {
    interrupted: InterruptedCalls,
    /// The address of the registers, by thread.
    records: HashMap<i32, u64>,
    /// The registers of first threads that are to be changed.
    first: HashMap<i32, Registers>,
}

impl RecordChanges {
    pub fn new(interrupted: InterruptedCalls) -> RecordChanges {
        RecordChanges { interrupted, records: HashMap::new(), first: HashMap::new() }
    }

    /// CRIU reads the blocked signals of a thread to this address.
    pub fn begin(&mut self, thread: i32, address: u64) {
        self.records.insert(thread, address.wrapping_add(OFFSET));
    }

    /// CRIU has recorded the registers of a thread.
    pub fn recorded(&mut self, criu: i32, thread: i32) -> Option<()> {
        let registers = records::read_registers(criu, *self.records.get(&thread)?)?;
        if !interrupted_calls::has_failed(&registers) || !is_in_call(thread, &registers) {
            return None;
        }
        if Status::read(thread).ok()?.process_id == thread {
            self.first.insert(thread, registers);
            return None;
        }
        self.change(criu, thread, false, registers)
    }

    /// CRIU's code runs in the first thread of a process.
    pub fn entered(&mut self, criu: i32, process: i32) -> Option<()> {
        let recorded = self.first.remove(&process)?;
        let registers = records::read_registers(criu, *self.records.get(&process)?)?;
        let call = |r: &Registers| [r.rax, r.orig_rax, r.rip, r.rsp, r.rdi, r.rsi, r.fs_base];
        (call(&registers) == call(&recorded)).then_some(())?;
        self.change(criu, process, true, registers)
    }

    fn change(&self, criu: i32, thread: i32, is_first: bool, registers: Registers) -> Option<()> {
        let mut changed = registers;
        if !self.interrupted.resume(thread, is_first, &mut changed) {
            return None;
        }
        let record = *self.records.get(&thread)?;
        // The result last: with the result EINTR, the number of the call has no effect.
        write_word(criu, record + offset_of!(Registers, orig_rax) as u64, changed.orig_rax)?;
        write_word(criu, record + offset_of!(Registers, rax) as u64, changed.rax)
    }
}

/// True if a stopped thread has these registers, as far as the kernel lists them: then they are the
/// record of the thread.
fn is_in_call(thread: i32, registers: &Registers) -> bool {
    let Registers { orig_rax, rdi, rsi, rdx, r10, r8, r9, rsp, rip, .. } = *registers;
    let expected = Call { number: orig_rax as i64, arguments: [rdi, rsi, rdx, r10, r8, r9], rsp, rip };
    Call::of_thread(thread).is_ok_and(|call| call == Some(expected))
}

fn write_word(criu: i32, address: u64, word: u64) -> Option<()> {
    let bytes = word.to_ne_bytes();
    let there = [RemoteIoVec { base: usize::try_from(address).ok()?, len: bytes.len() }];
    let written = process_vm_writev(Pid::from_raw(criu), &[IoSlice::new(&bytes)], &there).ok()?;
    (written == bytes.len()).then_some(())
}
