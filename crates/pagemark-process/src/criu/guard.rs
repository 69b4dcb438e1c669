//! Repairs the threads of a process tree if CRIU ends while it dumps the tree: if it is killed, or
//! gives up at once, as it does if one of them stops unexpectedly. SIGCONT makes them.
//!
//! While CRIU injects a system call, a thread has registers, blocked signals and a piece of code
//! that belong to CRIU. If CRIU ends in this moment, the kernel resumes the thread as it is. The
//! guard is a process that traces CRIU. The kernel stops CRIU at its exit
//! (`PTRACE_O_TRACEEXIT`), before it releases the threads, and while the memory of CRIU still
//! holds the registers that CRIU saved. The guard reads these, sends SIGSTOP to each thread, lets
//! CRIU exit, attaches to the threads, which have not executed an instruction since, and repairs
//! them.
//!
//! A CRIU that ends by itself without success may leave sockets in repair mode ([`Sockets`]). The
//! guard resets them at its exit, too.
//!
//! A CRIU that waits for the first process of a container that was killed waits for ever
//! ([`MissedEnd`]). The guard kills it.
//!
//! If the guard itself is killed, CRIU continues as without a guard.

use std::fs::File;
use std::io::{self, BufRead, BufReader, PipeReader, Read};
use std::ops::{ControlFlow, Range};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigHandler, SigSet, SigmaskHow, Signal, kill, sigprocmask};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork};
use pagemark::sys::proc::{self, Status, maps, tree};

use super::connections::Sockets;
use super::continued::Continued;
use crate::container::{self, MissedEnd};
use crate::helper;
use crate::ptrace::{self, Registers};

/// The code that CRIU writes into a process to make a system call, without its end.
const INJECTED_CALL: [u8; 3] = [0x0f, 0x05, 0xcc];

/// Length of that code, bytes. The name of a file in memory can follow it.
const INJECTED_LENGTH: usize = 8;

/// Name of the file in memory that holds CRIU's code.
const CODE_FILE: &[u8] = b"CRIUMFD";

/// Length of the code at the begin of the first executable mapping that CRIU may replace, bytes.
const CODE_LENGTH: usize = 16;

/// The blocked signals of a thread that executes CRIU's code: all but SIGTRAP, and those that
/// cannot be blocked.
pub(super) const BLOCKED_BY_CRIU: u64 =
    !(1 << (libc::SIGTRAP - 1) | 1 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1));

/// What follows the registers in CRIU's record of a 64-bit thread.
pub(super) const NATIVE_MARK: u16 = 0x0a;

/// The identifier of the thread precedes the registers in CRIU's records by at most this, bytes.
const RECORD_HEAD: usize = 1024;

/// Mappings of CRIU that are larger than this hold no records of threads, bytes.
const MAX_RECORDS: u64 = 64 << 20;

/// Pause between two polls of the guard.
const POLL: Duration = Duration::from_micros(200);

/// The guard of a CRIU. Dropped, it is waited for, unless CRIU does not end.
#[derive(Debug)]
pub(super) struct Guard {
    pid: Pid,
}

/// What the guard has to know of a process before CRIU changes it.
#[derive(Debug)]
struct Original {
    pid: i32,
    /// Address and content of the begin of the first executable mapping, where CRIU injects code.
    code: Option<(u64, [u8; CODE_LENGTH])>,
    /// Job control has stopped the process.
    is_stopped: bool,
    /// It is the first process of a container, or of one within another.
    is_first: bool,
}

impl Original {
    fn read(pid: i32) -> Original {
        let status = Status::read(pid).ok();
        let is_stopped = status.as_ref().is_some_and(|status| status.state == 'T');
        let is_first = status.as_ref().is_some_and(Status::is_first_of_namespace);
        Original { pid, code: first_code(pid), is_stopped, is_first }
    }
}

/// The addresses of the instructions that a thread may have before it in a system call that CRIU
/// has injected at `start`.
fn injected_call(start: u64) -> Range<u64> {
    start..start + INJECTED_LENGTH as u64 + 1
}

/// Reads the begin of the first executable mapping, up to which the list of mappings is read.
fn first_code(pid: i32) -> Option<(u64, [u8; CODE_LENGTH])> {
    let lines = BufReader::with_capacity(4096, File::open(proc::path(pid, "maps")).ok()?).split(b'\n');
    let mappings = lines.map_while(Result::ok).filter_map(|line| maps::Mapping::parse(&line));
    let start = mappings.into_iter().find(|mapping| mapping.executable)?.start.get();
    let mut code = [0; CODE_LENGTH];
    proc::open_memory(pid).ok()?.read_exact_at(&mut code, start).ok()?;
    Some((start, code))
}

impl Guard {
    /// Starts to guard the processes below `root_pid` against the end of CRIU, which must not have
    /// changed any of them yet. None if CRIU has ended already. `sockets`: those that CRIU may set
    /// to repair mode.
    ///
    /// # Errors
    /// CRIU cannot be traced.
    pub fn start(criu_pid: i32, root_pid: i32, members: &[i32], sockets: Option<Sockets>) -> io::Result<Option<Guard>> {
        let originals: Vec<Original> = members.iter().map(|&pid| Original::read(pid)).collect();
        let (reader, writer) = io::pipe()?;
        // SAFETY: the child has a copy of this thread alone. It allocates, which the C library allows after
        // a fork, takes no lock of this program, does not return from here, and ends without running
        // destructors or exit handlers.
        match unsafe { fork() }? {
            ForkResult::Child => {
                drop(reader);
                // A panic must not unwind into the copy of the caller.
                let _ = std::panic::catch_unwind(AssertUnwindSafe(|| {
                    guard(criu_pid, root_pid, &originals, sockets.as_ref(), writer.as_raw_fd());
                }));
                // SAFETY: it only ends the process.
                unsafe { libc::_exit(0) }
            }
            ForkResult::Parent { child } => {
                drop(writer);
                let guard = Guard { pid: child };
                match receive_errno(reader)? {
                    0 => Ok(Some(guard)),
                    libc::ESRCH => Ok(None),
                    // The kernel returns the same error for a process that has exited.
                    libc::EPERM if Status::read(criu_pid).is_ok_and(|status| status.is_dead()) => Ok(None),
                    errno => Err(io::Error::from_raw_os_error(errno)),
                }
            }
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // CRIU has ended, unless it does not answer; the guard then ends with CRIU.
        let deadline = Instant::now() + ptrace::STOP_LIMIT + Duration::from_secs(2);
        while matches!(waitpid(self.pid, Some(WaitPidFlag::WNOHANG)), Ok(WaitStatus::StillAlive))
            && Instant::now() < deadline
        {
            std::thread::sleep(POLL);
        }
    }
}

fn receive_errno(mut reader: PipeReader) -> io::Result<i32> {
    let mut errno = [0; 4];
    reader.read_exact(&mut errno)?;
    Ok(i32::from_ne_bytes(errno))
}

/// The main function of the guard.
fn guard(criu_pid: i32, root_pid: i32, originals: &[Original], sockets: Option<&Sockets>, report: i32) {
    let _ = sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), None);
    let _ = super::dump::outlive_requests_to_end();
    // The kernel reports nothing to a process that ignores it.
    // SAFETY: this process is the guard alone, and has no handlers.
    let _ = unsafe { nix::sys::signal::signal(Signal::SIGCHLD, SigHandler::SigDfl) };
    // SAFETY: this process is the guard alone, and ends by _exit.
    unsafe { helper::detach_from_caller(c"pagemark-guard", [report]) };
    let seized = ptrace::seize(criu_pid, ptrace::TRACE_EXIT | ptrace::TRACE_SYSGOOD);
    let errno = seized.err().unwrap_or(0).to_ne_bytes();
    // SAFETY: the descriptor is open, and the buffer lives through the call.
    unsafe {
        libc::write(helper::DESCRIPTOR, errno.as_ptr().cast(), errno.len());
        libc::close(helper::DESCRIPTOR);
    }
    if seized.is_err() {
        return;
    }
    // CRIU waits for the guard at each of its signals.
    prefer(0);
    let mut is_preferred = false;
    let injected = |original: &Original| Some((original.pid, injected_call(original.code?.0)));
    let mut continued = Continued::new(originals.iter().filter_map(injected));
    let first: Vec<i32> = originals.iter().filter(|original| original.is_first).map(|original| original.pid).collect();
    let next_status = || match &first[..] {
        [] => ptrace::wait_status(criu_pid),
        first => wait_status_unless_one_exits(criu_pid, first),
    };
    // The end of CRIU, or an error, which means that CRIU is not traced any more.
    while let Ok(Some(status)) = next_status() {
        let signal = libc::WSTOPSIG(status);
        let _ = match status >> 16 {
            libc::PTRACE_EVENT_EXIT => {
                // An exit status is that of `wait`: the signal is in the lowest bits.
                let status = ptrace::event_message(criu_pid).unwrap_or(0);
                let is_killed = status & 0x7f != 0;
                if is_killed && is_preferred {
                    // At once: a thread must not reach the SIGTRAP at the end of a system call.
                    originals.iter().for_each(|original| stop(original.pid, original.pid));
                }
                if let Some(sockets) = sockets.filter(|_| status != 0) {
                    let members = tree::members(root_pid).unwrap_or_default();
                    sockets.reset(&members.iter().map(|member| member.pid).collect::<Vec<i32>>());
                }
                if status != 0 {
                    rescue(criu_pid, root_pid, originals, is_killed && is_preferred);
                    return;
                }
                ptrace::resume(criu_pid, ptrace::Until::Event, 0)
            }
            // Job control stops CRIU, or resumes it.
            libc::PTRACE_EVENT_STOP if signal != libc::SIGTRAP => ptrace::listen(criu_pid),
            0 => {
                // The first process of the tree has stopped for CRIU.
                if !is_preferred && Status::read(root_pid).is_ok_and(|status| status.tracer_pid == criu_pid) {
                    prefer(criu_pid);
                    is_preferred = true;
                }
                let is_undone = signal == libc::SIGCHLD && continued.resume(criu_pid);
                ptrace::resume(criu_pid, ptrace::Until::Event, if is_undone { 0 } else { signal })
            }
            _ => ptrace::resume(criu_pid, ptrace::Until::Event, 0),
        };
    }
}

/// Where a process has CRIU's code.
pub(super) fn code_of_criu(pid: i32) -> Vec<Range<u64>> {
    let mappings = maps::read(pid).unwrap_or_default();
    let code = mappings.iter().filter(|mapping| mapping.name.starts_with(b"/memfd:CRIUMFD"));
    code.map(|mapping| mapping.start.get()..mapping.end.get()).collect()
}

/// Waits for the next stop of CRIU as [`ptrace::wait_status`] does. Kills CRIU if it does not
/// notice that one of `first`, the first processes of containers, exits.
fn wait_status_unless_one_exits(criu_pid: i32, first: &[i32]) -> Result<Option<i32>, i32> {
    let mut end = MissedEnd::default();
    loop {
        match ptrace::try_wait_status(criu_pid)? {
            ControlFlow::Break(status) => return Ok(status),
            ControlFlow::Continue(()) => wait_for_child(container::LOOK),
        }
        if end.is_there(|| first.to_vec()) {
            let _ = kill(Pid::from_raw(criu_pid), Signal::SIGKILL);
        }
    }
}

/// Waits until the kernel has reported a change of a child or a tracee, at most this long. The
/// signal must be blocked, and not ignored.
fn wait_for_child(at_most: Duration) {
    // SAFETY: a set of signals consists of numbers, for which zeros are valid.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    let time = libc::timespec { tv_sec: 0, tv_nsec: i64::from(at_most.subsec_nanos()) };
    // SAFETY: the set and the time live through the calls; nothing is asked about the signal.
    unsafe {
        libc::sigaddset(&mut set, libc::SIGCHLD);
        libc::sigtimedwait(&set, std::ptr::null_mut(), &time);
    }
}

/// Has a process scheduled before all others where that is permitted (CAP_SYS_NICE). Between the
/// end of an injected system call and the moment in which CRIU sees this end, a killed CRIU
/// leaves a SIGTRAP, against which no guard helps; the sooner CRIU runs, the shorter is this
/// time.
fn prefer(pid: i32) {
    let priority = libc::sched_param { sched_priority: 1 };
    // SAFETY: the parameter lives through the call. The process is this one, or CRIU, which this process
    // traces and has not waited for.
    unsafe { libc::sched_setscheduler(pid, libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, &raw const priority) };
}

/// Sends SIGSTOP to a thread.
fn stop(pid: i32, tid: i32) {
    // SAFETY: a system call with numbers as arguments. A thread that has exited is no failure.
    unsafe { libc::syscall(libc::SYS_tgkill, pid, tid, libc::SIGSTOP) };
}

/// Repairs what CRIU leaves, which is stopped at its exit. `are_stopped`: all processes were sent
/// SIGSTOP.
fn rescue(criu_pid: i32, root_pid: i32, originals: &[Original], are_stopped: bool) {
    let records = Records::read(criu_pid);
    let traced = |tid: &i32| Status::read(*tid).is_ok_and(|status| status.tracer_pid == criu_pid);
    let members = tree::members(root_pid).unwrap_or_default();
    let processes: Vec<(i32, Vec<i32>)> = members
        .iter()
        .map(|member| {
            let threads = proc::threads(member.pid).unwrap_or_default();
            (member.pid, threads.into_iter().filter(traced).collect())
        })
        .collect();
    for (pid, threads) in &processes {
        for tid in threads {
            stop(*pid, *tid);
        }
    }
    let _ = ptrace::resume(criu_pid, ptrace::Until::Event, 0);
    while let Ok(Some(_)) = ptrace::wait_status(criu_pid) {
        let _ = ptrace::resume(criu_pid, ptrace::Until::Event, 0);
    }
    let deadline = ptrace::deadline(ptrace::STOP_LIMIT);
    let stops = |tid: &i32| {
        ptrace::seize(*tid, 0).is_ok()
            && ptrace::interrupt(*tid).is_ok()
            && ptrace::wait_trap(*tid, Some(deadline)) == Ok(true)
    };
    for (pid, threads) in &processes {
        let original = originals.iter().find(|original| original.pid == *pid);
        let stopped: Vec<i32> = threads.iter().copied().filter(stops).collect();
        repair(*pid, &stopped, original, &records);
        let is_sent_stop = are_stopped || !threads.is_empty();
        if is_sent_stop && original.is_none_or(|original| !original.is_stopped) {
            resume(*pid);
        }
        for tid in stopped {
            let _ = ptrace::detach(tid);
        }
    }
    // Processes that have left the tree since CRIU was started.
    if are_stopped {
        let left = originals.iter().filter(|original| processes.iter().all(|(pid, _)| *pid != original.pid));
        left.filter(|original| !original.is_stopped).for_each(|original| resume(original.pid));
    }
}

/// Sends SIGCONT to a process.
fn resume(pid: i32) {
    // A process that has exited is no failure.
    let _ = kill(Pid::from_raw(pid), Signal::SIGCONT);
}

/// Repairs the stopped threads of a process.
fn repair(pid: i32, threads: &[i32], original: Option<&Original>, records: &Records) {
    let mut injected = None;
    if let Some((start, code)) = original.and_then(|original| original.code)
        && let Ok(memory) = proc::open_memory_for_writing(pid)
    {
        let mut now = [0; CODE_LENGTH];
        let is_read = memory.read_exact_at(&mut now, start).is_ok();
        let has_call = now.starts_with(&INJECTED_CALL) && !code.starts_with(&INJECTED_CALL);
        if is_read && (has_call || now[INJECTED_LENGTH..].starts_with(CODE_FILE)) {
            let _ = memory.write_all_at(&code, start);
        }
        injected = has_call.then(|| injected_call(start));
    }
    let ranges = code_of_criu(pid);
    for &tid in threads {
        let Ok(registers) = ptrace::registers(tid) else { continue };
        let is_injected = injected.as_ref().is_some_and(|injected| injected.contains(&registers.rip));
        let is_in_code = ranges.iter().any(|range| range.contains(&registers.rip));
        if is_in_code && tid == pid {
            // CRIU's code ends by itself here, and restores the registers. It must not meet the breakpoint at its end.
            let _ = ptrace::clear_breakpoints(tid);
            continue;
        }
        let is_blocked = ptrace::signal_mask(tid) == Ok(BLOCKED_BY_CRIU);
        if !(is_injected || is_in_code || is_blocked) {
            continue;
        }
        let Some(record) = records.find(tid, &registers, !is_in_code) else { continue };
        if is_injected || is_in_code {
            let _ = ptrace::set_registers(tid, &record.registers);
        }
        let _ = ptrace::set_signal_mask(tid, record.signal_mask);
    }
}

/// Registers and blocked signals of a thread as CRIU recorded them.
#[derive(Debug)]
struct Record {
    registers: Registers,
    signal_mask: u64,
}

/// The memory of CRIU that holds its records of threads.
struct Records {
    memory: Vec<Vec<u8>>,
}

impl Records {
    fn read(criu_pid: i32) -> Records {
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
    fn find(&self, tid: i32, now: &Registers, keeps_registers: bool) -> Option<Record> {
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
