//! Lets a dump go on where SIGCONT stops a thread in CRIU's code.
//!
//! To a thread that is traced, SIGCONT is a stop of its own, also where the signal is blocked. CRIU
//! does not expect that stop while the thread makes a system call for it: the dump fails, and the
//! thread, whose call ends by the instruction `int3`, may be left with the SIGTRAP of that
//! instruction, which ends the program. A shell sends SIGCONT to each job that it continues.
//!
//! The guard, which traces CRIU, learns of each stop before CRIU does, by the SIGCHLD that CRIU
//! gets. It makes CRIU resume such a thread, and wait for it again.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use pagemark::sys::proc::{self, Fields, Status, stat};

use super::guard::{BLOCKED_BY_CRIU, code_of_criu};
use crate::ptrace::{self, Registers};

/// Length of the instruction `syscall`.
const SYSCALL_BYTES: u64 = 2;

/// The stops of the threads that CRIU traces.
#[derive(Debug)]
pub(super) struct Continued {
    /// Where CRIU injects system calls into each process.
    injected: HashMap<i32, Range<u64>>,
    /// The threads that have stopped for CRIU.
    stopped: HashSet<i32>,
    /// The address of an instruction `syscall` of CRIU's.
    instruction: Option<u64>,
}

impl Continued {
    /// `injected`: where CRIU injects system calls into a process.
    pub fn new(injected: impl Iterator<Item = (i32, Range<u64>)>) -> Continued {
        Continued { injected: injected.collect(), stopped: HashSet::new(), instruction: None }
    }

    /// If SIGCONT has stopped a thread that works for CRIU, makes CRIU resume it. CRIU has stopped
    /// before SIGCHLD, and does not get that signal if this returns true.
    pub fn resume(&mut self, criu_pid: i32) -> bool {
        let Ok(info) = ptrace::signal_info(criu_pid) else { return false };
        if info.si_code != libc::CLD_STOPPED {
            return false;
        }
        // SAFETY: the kernel has filled in a SIGCHLD.
        let thread = unsafe { info.si_pid() };
        self.instruction = self.instruction.or_else(|| {
            let before = ptrace::registers(criu_pid).ok()?.rip.checked_sub(SYSCALL_BYTES)?;
            ptrace::is_system_call(criu_pid, before).ok()?.then_some(before)
        });
        // The first time, CRIU has stopped it.
        !self.stopped.insert(thread) && self.resume_thread(criu_pid, thread).is_some()
    }

    /// Makes CRIU resume a thread, if that has stopped unexpectedly.
    fn resume_thread(&self, criu_pid: i32, thread: i32) -> Option<()> {
        let Status { process_id, tracer_pid, blocked_signals, .. } = Status::read(thread).ok()?;
        if tracer_pid != criu_pid || blocked_signals != BLOCKED_BY_CRIU {
            return None;
        }
        let address = next_instruction(thread)?;
        let is_call = self.injected.get(&process_id).is_some_and(|injected| injected.contains(&address));
        // The first thread carries out CRIU's commands. At their end, CRIU stops it.
        let is_commanded = !is_call && thread == process_id;
        if is_commanded && !expects_no_stop(criu_pid)
            || !is_call && !code_of_criu(process_id).iter().any(|code| code.contains(&address))
        {
            return None;
        }
        resume_by(criu_pid, self.instruction?, thread, !is_commanded)
    }
}

/// The address of the next instruction of a stopped thread.
fn next_instruction(thread: i32) -> Option<u64> {
    let text = std::fs::read_to_string(proc::path(thread, "syscall")).ok()?;
    let last = text.split_ascii_whitespace().next_back()?;
    u64::from_str_radix(last.strip_prefix("0x")?, 16).ok()
}

/// True if nobody has waited for the stop of a thread yet.
fn is_unreported(thread: i32) -> Option<bool> {
    // The status that `wait` returns.
    const EXIT_CODE: usize = 52;
    let text = std::fs::read(proc::path(thread, "stat")).ok()?;
    stat::number(&text, EXIT_CODE).map(|status| status != 0)
}

/// True if CRIU has a handler for SIGCHLD, which ends CRIU: it expects no thread to stop.
fn expects_no_stop(criu_pid: i32) -> bool {
    const CHILD: u64 = 1 << (libc::SIGCHLD - 1);
    let caught = Fields::read(proc::path(criu_pid, "status")).ok().and_then(|status| status.in_base("SigCgt", 16));
    caught.is_some_and(|caught| caught & CHILD != 0)
}

/// Makes CRIU, which is stopped, resume a thread that it traces, by the instruction `syscall` at an
/// address. If CRIU has waited for the thread, which it may have if `is_waited_for`, it waits
/// again. None if that is not possible, and CRIU is as it was.
fn resume_by(criu_pid: i32, instruction: u64, thread: i32, is_waited_for: bool) -> Option<()> {
    let original = ptrace::registers(criu_pid).ok()?;
    let is_result = original.orig_rax as i64 == libc::SYS_wait4 && original.rax as i64 == i64::from(thread);
    let has_waited = is_waited_for && is_result;
    if !has_waited && !is_unreported(thread)? {
        return None;
    }
    let mask = ptrace::signal_mask(criu_pid).ok()?;
    ptrace::set_signal_mask(criu_pid, u64::MAX).ok()?;
    let arguments = [u64::from(libc::PTRACE_CONT), thread as u64, 0, 0, 0, 0];
    let result = ptrace::system_call(criu_pid, instruction, &original, libc::SYS_ptrace, arguments);
    let is_resumed = result == Ok(Some(0));
    let again = original.rip.wrapping_sub(SYSCALL_BYTES);
    let waits_again = Registers { rax: libc::SYS_wait4 as u64, orig_rax: u64::MAX, rip: again, ..original };
    let after = if is_resumed && has_waited { waits_again } else { original };
    ptrace::restore(criu_pid, &after, mask).ok()?;
    is_resumed.then_some(())
}
