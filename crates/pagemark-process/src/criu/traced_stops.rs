//! Lets a dump go on where SIGCONT stops a thread in CRIU's code.
//!
//! To a thread that is traced, SIGCONT is a stop of its own, also where the signal is blocked. CRIU
//! does not expect that stop while the thread makes a system call for it: the dump fails, and the
//! thread, whose call ends by the instruction `int3`, may be left with the SIGTRAP of that
//! instruction, which ends the program. A shell sends SIGCONT to each job that it continues.
//!
//! The guard, which traces CRIU, learns of each stop before CRIU does, by the SIGCHLD that CRIU
//! gets. It makes CRIU resume such a thread, and wait for it again.
//!
//! SIGSTOP cannot be blocked: it stops such a thread before it is delivered, and a CRIU that fails
//! for this drops it. The guard makes CRIU deliver it. So the kernel stops the process: the thread
//! stops once more, and the guard makes CRIU resume it as above. Where CRIU detaches, the kernel
//! stops the thread again, unless SIGCONT has come since.
//!
//! One SIGCHLD can stand for several changes: the kernel has one of them pending at most. Where
//! the process was stopped before, the SIGCHLD that says that it was continued hides that of the
//! stop. Where SIGCONT was sent to a process group, the stop of one process hides those of others.
//! So the guard looks at the thread that CRIU waits for, too.
//!
//! CRIU follows the first thread to the end of CRIU's code from one system call to the next. Until
//! then, a stop is resumed in the same way.
//!
//! The kernel lets CRIU wait for a stop before it sends SIGCHLD for it. Where CRIU fails for this,
//! [`Releases`](super::releases::Releases) keeps the thread from dying of it.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::os::unix::fs::FileExt;

use pagemark_linux::proc::{self, Fields, Status};
use pagemark_linux::ptrace::{self, Registers};

use super::injected::{BLOCKED_BY_CRIU, code_of_criu};
use super::job_stops::{self, unreported};

/// The stops of the threads that CRIU traces.
#[derive(Debug)]
pub(super) struct TracedStops {
    /// Where CRIU injects system calls into each process.
    injected: HashMap<i32, Range<u64>>,
    /// The threads that have stopped for CRIU.
    stopped: HashSet<i32>,
    /// The processes to which SIGSTOP came while they worked for CRIU, and whether CRIU has
    /// delivered it.
    asked_to_stop: HashMap<i32, bool>,
    /// The address of an instruction `syscall` of CRIU's.
    instruction: Option<u64>,
}

impl TracedStops {
    /// `injected`: where CRIU injects system calls into a process.
    pub fn new(injected: impl Iterator<Item = (i32, Range<u64>)>) -> TracedStops {
        let (stopped, asked_to_stop) = (HashSet::new(), HashMap::new());
        TracedStops { injected: injected.collect(), stopped, asked_to_stop, instruction: None }
    }

    /// True if SIGSTOP came to a process while that worked for CRIU, or is about to be delivered to
    /// it. SIGCONT may have come since.
    pub fn was_asked_to_stop(&self, pid: i32) -> bool {
        self.asked_to_stop.contains_key(&pid) || unreported(pid) == Some(libc::SIGSTOP as u64)
    }

    /// True if CRIU may have dropped the SIGSTOP that came to a process. What is delivered, the
    /// kernel remembers.
    pub fn may_lack_stop(&self, pid: i32) -> bool {
        self.asked_to_stop.get(&pid) == Some(&false)
    }

    /// If SIGCONT or SIGSTOP has stopped a thread that works for CRIU, makes CRIU resume it. CRIU
    /// has stopped before SIGCHLD, and does not get that signal if this returns true.
    pub fn resume(&mut self, criu_pid: i32) -> bool {
        let Ok(info) = ptrace::signal_info(criu_pid) else { return false };
        // Each SIGCONT makes its thread stop once more, so that this sees it while it is pending.
        self.asked_to_stop.retain(|&pid, _| !job_stops::is_continued(pid));
        // SAFETY: the kernel has filled in a SIGCHLD.
        let (thread, status) = unsafe { (info.si_pid(), info.si_status()) };
        let is_asked_to_stop = info.si_code == libc::CLD_TRAPPED && status == libc::SIGSTOP;
        let Ok(registers) = ptrace::registers(criu_pid) else { return false };
        let hidden =
            awaited(&registers).filter(|&awaited| awaited != thread && is_hidden(criu_pid, &registers, awaited));
        let is_other = !is_asked_to_stop && !matches!(info.si_code, libc::CLD_STOPPED | libc::CLD_CONTINUED);
        if is_other && hidden.is_none() {
            return false;
        }
        self.instruction = self.instruction.or_else(|| {
            let before = registers.rip.checked_sub(ptrace::SYSCALL_BYTES)?;
            ptrace::is_system_call(criu_pid, before).ok()?.then_some(before)
        });
        if let Some(hidden) = hidden {
            self.resume_thread(criu_pid, hidden, 0);
        }
        if is_other {
            return false;
        }
        if is_asked_to_stop {
            return self.resume_thread(criu_pid, thread, libc::SIGSTOP).is_some();
        }
        let is_continued = info.si_code == libc::CLD_CONTINUED;
        // The first time, CRIU has stopped it.
        if !is_continued && self.stopped.insert(thread) {
            return false;
        }
        let is_resumed = self.resume_thread(criu_pid, thread, 0).is_some();
        if is_resumed || is_continued {
            let others = self.stopped.iter().copied();
            let others: Vec<i32> = others.filter(|&other| other != thread && is_unreported_stop(other)).collect();
            for other in others {
                self.resume_thread(criu_pid, other, 0);
            }
        }
        // That a process was continued means nothing to CRIU. Its stop may follow in a moment.
        is_resumed || is_continued
    }

    /// Makes CRIU resume a thread, if that has stopped unexpectedly, and deliver a signal to it,
    /// unless that is 0.
    fn resume_thread(&mut self, criu_pid: i32, thread: i32, signal: i32) -> Option<()> {
        let Status { process_id, tracer_pid, blocked_signals, .. } = Status::read(thread).ok()?;
        if tracer_pid != criu_pid || blocked_signals != BLOCKED_BY_CRIU {
            return None;
        }
        if signal == libc::SIGSTOP {
            self.asked_to_stop.insert(process_id, false);
        }
        let address = proc::next_instruction(thread)?;
        let is_call = self.injected.get(&process_id).is_some_and(|injected| injected.contains(&address));
        // The first thread carries out CRIU's commands. At their end, CRIU stops it.
        let is_commanded = !is_call && thread == process_id;
        let is_stepped = is_commanded && waits_for_any(criu_pid);
        if is_commanded && !is_stepped && !expects_no_stop(criu_pid)
            || !is_call && !code_of_criu(process_id).iter().any(|code| code.contains(&address))
        {
            return None;
        }
        let how = if is_stepped {
            How::Stepped
        } else if is_commanded {
            How::Commanded
        } else {
            How::Called
        };
        resume_by(criu_pid, self.instruction?, thread, signal, how)?;
        if signal == libc::SIGSTOP {
            self.asked_to_stop.insert(process_id, true);
        }
        Some(())
    }
}

/// The thread that CRIU waits for, has waited for, or has just resumed.
fn awaited(registers: &Registers) -> Option<i32> {
    let thread = match registers.orig_rax as i64 {
        _ if is_in_wait(registers) => registers.rdi,
        libc::SYS_ptrace if registers.rdi == u64::from(libc::PTRACE_CONT) => registers.rsi,
        _ => return None,
    };
    i32::try_from(thread).ok().filter(|&thread| thread > 0)
}

/// True if a thread has a stop like that of SIGCONT, which CRIU takes next or has just taken.
fn is_hidden(criu_pid: i32, registers: &Registers, thread: i32) -> bool {
    is_unreported_stop(thread) || taken_status(criu_pid, registers, thread).is_some_and(is_event_stop)
}

/// The status of a thread that CRIU has just taken by `wait4`.
fn taken_status(criu_pid: i32, registers: &Registers, thread: i32) -> Option<u64> {
    if registers.orig_rax as i64 != libc::SYS_wait4 || registers.rax as i64 != i64::from(thread) {
        return None;
    }
    let mut status = [0; 4];
    proc::open_memory(criu_pid).ok()?.read_exact_at(&mut status, registers.rsi).ok()?;
    Some(u64::from(u32::from_ne_bytes(status)) >> 8)
}

/// True if a thread has a stop like that of SIGCONT, for which nobody has waited yet.
fn is_unreported_stop(thread: i32) -> bool {
    unreported(thread).is_some_and(is_event_stop)
}

/// True if this is what `wait` returns, without the lowest byte, for a stop like that of SIGCONT.
fn is_event_stop(code: u64) -> bool {
    code >> 8 == libc::PTRACE_EVENT_STOP as u64
}

/// True if CRIU follows a thread to the end of CRIU's code, from one system call to the next.
fn waits_for_any(criu_pid: i32) -> bool {
    ptrace::registers(criu_pid).is_ok_and(|registers| is_in_wait(&registers) && registers.rdi as i32 == -1)
}

/// True if CRIU waits, has just waited, or is about to wait again.
fn is_in_wait(registers: &Registers) -> bool {
    let number = if registers.orig_rax == u64::MAX { registers.rax } else { registers.orig_rax };
    number as i64 == libc::SYS_wait4
}

/// True if CRIU has a handler for SIGCHLD, which ends CRIU: it expects no thread to stop.
fn expects_no_stop(criu_pid: i32) -> bool {
    const CHILD: u64 = 1 << (libc::SIGCHLD - 1);
    let caught = Fields::read(proc::path(criu_pid, "status")).ok().and_then(|status| status.in_base("SigCgt", 16));
    caught.is_some_and(|caught| caught & CHILD != 0)
}

/// What a thread does for CRIU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum How {
    /// It makes a call, for whose end CRIU waits.
    Called,
    /// It carries out commands, and CRIU expects no stop.
    Commanded,
    /// It goes to the end of CRIU's code, and CRIU waits for each of its system calls.
    Stepped,
}

/// Makes CRIU, which is stopped, resume a thread that it traces, by the instruction `syscall` at an
/// address, and deliver a signal to the thread, unless that is 0. If CRIU has waited for the
/// thread, it waits again. None if that is not possible, and CRIU is as it was.
fn resume_by(criu_pid: i32, instruction: u64, thread: i32, signal: i32, how: How) -> Option<()> {
    let original = ptrace::registers(criu_pid).ok()?;
    let is_result = original.orig_rax as i64 == libc::SYS_wait4 && original.rax as i64 == i64::from(thread);
    let has_waited = how != How::Commanded && is_result;
    if !has_waited && unreported(thread)? == 0 {
        return None;
    }
    let mask = ptrace::signal_mask(criu_pid).ok()?;
    ptrace::set_signal_mask(criu_pid, u64::MAX).ok()?;
    let request = if how == How::Stepped { libc::PTRACE_SYSCALL } else { libc::PTRACE_CONT };
    let arguments = [u64::from(request), thread as u64, 0, signal as u64, 0, 0];
    let result = ptrace::system_call(criu_pid, instruction, &original, libc::SYS_ptrace, arguments);
    if result == Ok(None) {
        // The process is at its exit, and must not be resumed.
        return None;
    }
    let is_resumed = result == Ok(Some(0));
    let again = original.rip.wrapping_sub(ptrace::SYSCALL_BYTES);
    let waits_again = Registers { rax: libc::SYS_wait4 as u64, orig_rax: u64::MAX, rip: again, ..original };
    let after = if is_resumed && has_waited { waits_again } else { original };
    ptrace::restore(criu_pid, &after, mask).ok()?;
    is_resumed.then_some(())
}
