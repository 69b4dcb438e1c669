//! Repairs the threads of a process tree if CRIU ends while it dumps the tree: if it is killed, or
//! gives up at once, as it does if one of them stops unexpectedly. SIGCONT makes them.
//!
//! While CRIU injects a system call, a thread has registers, blocked signals and a piece of code
//! that belong to CRIU. If CRIU ends in this moment, the kernel resumes the thread as it is. The
//! guard is a process that traces CRIU. The kernel stops CRIU at its exit
//! (`PTRACE_O_TRACEEXIT`), before it releases the threads, and while the memory of CRIU still
//! holds the registers that CRIU saved. The guard reads these, sends SIGSTOP to each thread, lets
//! CRIU exit, attaches to the threads, which have not executed an instruction since, and repairs
//! them. Then it has each process unmap the code that CRIU has left there. A process that job
//! control had stopped stays stopped, unless its user has continued it ([`job_stops`]).
//!
//! A CRIU that ends by itself without success may leave sockets in repair mode ([`Sockets`]). The
//! guard resets them at its exit, too.
//!
//! A CRIU that waits for the first process of a container that was killed waits for ever
//! ([`MissedEnd`]). The guard kills it.
//!
//! If the guard itself is killed, CRIU continues as without a guard. If it is killed while it holds
//! threads by SIGSTOP, the kernel sends SIGCONT in its place ([`LastSignal`]). Who kills all of a
//! control group kills CRIU too; the guard leaves its groups where that is permitted.

use std::collections::{HashMap, HashSet};
use std::io::{self, PipeReader, Read};
use std::ops::ControlFlow;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigHandler, Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use pagemark_linux::exit_reports::ExitReports;
use pagemark_linux::helper;
use pagemark_linux::last_signal::LastSignal;
use pagemark_linux::proc::{self, Fields, Process, Status, tree};
use pagemark_linux::ptrace;
use pagemark_trace::cgroups;
use pagemark_trace::error::{Error, ErrorKind};
use pagemark_trace::inject;

use super::connections::Sockets;
use super::injected::{
    BLOCKED_BY_CRIU, CODE_FILE, CODE_LENGTH, INJECTED_CALL, INJECTED_LENGTH, bit, code_of_criu, first_code,
    first_code_of_file, injected_call, is_code_file,
};
use super::job_stops;
use super::leave_code::leave_code;
use super::memory_copies::{self, Copier, Copies};
use super::records::Records;
use super::releases;
use super::traced_stops::TracedStops;
use crate::container::{self, MissedEnd};
use crate::spawn;

/// The signals that SIGCONT removes, and that remove it.
const STOP_SIGNALS: [Signal; 4] = [Signal::SIGSTOP, Signal::SIGTSTP, Signal::SIGTTIN, Signal::SIGTTOU];

/// Pause between two polls of the guard.
const POLL: Duration = Duration::from_micros(200);

/// The guard of a CRIU. Dropped, it is waited for, unless CRIU does not end.
#[derive(Debug)]
pub(super) struct Guard {
    pid: Pid,
    copier: Copier,
}

/// What the guard has to know of a process before CRIU changes it.
#[derive(Debug)]
struct Original {
    process: Process,
    /// Address and content of the begin of the first executable mapping, where CRIU injects code.
    code: Option<(u64, [u8; CODE_LENGTH])>,
    /// Job control has stopped the process, and nobody has continued it since, as far as is known.
    is_stopped: bool,
    /// SIGSTOP has come to the process, and CRIU may have dropped it.
    lacks_stop: bool,
    /// The first thread ran when it was sent SIGSTOP, and takes this signal while CRIU still traces
    /// it.
    takes_stop: bool,
    /// The process is the first of a container, or of a container within another.
    is_first: bool,
}

impl Original {
    fn read(process: Process) -> Original {
        let status = Status::read(process.pid).ok();
        let is_stopped = status.as_ref().is_some_and(|status| status.state == 'T');
        let is_first = status.as_ref().is_some_and(Status::is_first_of_namespace);
        let code = first_code(process.pid);
        Original { process, code, is_stopped, lacks_stop: false, takes_stop: false, is_first }
    }

    /// Takes what has come to the process since, before this process sends it a stop signal.
    fn take_continuation(&mut self, stops: &mut Stops) {
        if self.is_stopped && job_stops::is_continued(self.process.pid) {
            (self.is_stopped, self.lacks_stop) = (false, false);
            stops.add(self.process);
        }
    }
}

impl Guard {
    /// Starts to guard the processes below `root_pid` against the end of CRIU, which must not have
    /// changed any of them yet. None if CRIU has ended already. `sockets`: those that CRIU may set
    /// to repair mode.
    ///
    /// # Errors
    /// CRIU cannot be traced.
    pub fn start(criu_pid: i32, root_pid: i32, members: &[i32], sockets: Option<Sockets>) -> io::Result<Option<Guard>> {
        let (copier, copies) = memory_copies::pair()?;
        let mut originals: Vec<Original> = Process::find_all(members).into_iter().map(Original::read).collect();
        let ways_out = cgroups::ways_out();
        let (reader, writer) = io::pipe()?;
        // SAFETY: the guard takes no lock of this program.
        let pid = unsafe {
            helper::start(|| {
                cgroups::take(&ways_out);
                let descriptors = [writer.as_raw_fd(), copies.as_raw_fd()];
                guard(criu_pid, root_pid, &mut originals, sockets.as_ref(), descriptors);
                libc::EXIT_SUCCESS
            })
        }?;
        drop((writer, copies));
        let guard = Guard { pid, copier };
        match receive_errno(reader)? {
            0 => Ok(Some(guard)),
            libc::ESRCH => Ok(None),
            // The kernel returns the same error for a process that has exited.
            libc::EPERM if Status::read(criu_pid).is_ok_and(|status| status.is_dead()) => Ok(None),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }
}

impl Guard {
    /// Makes a copy of the memory of a process that CRIU holds, when CRIU has saved the state.
    ///
    /// # Errors
    /// Those of [`Copier::copy`].
    pub fn copy_memory(&self, criu_pid: i32, pid: i32) -> Result<Process, Error> {
        self.copier.copy(criu_pid, pid)
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

/// The main function of the guard, in which all signals are blocked. `descriptors`: for its report,
/// and for requests of copies.
fn guard(criu_pid: i32, root_pid: i32, originals: &mut [Original], sockets: Option<&Sockets>, descriptors: [RawFd; 2]) {
    let mut copies = stand_apart(descriptors);
    let mut stops = Stops::prepare(originals);
    if !seize_and_report(criu_pid) {
        return;
    }
    // CRIU waits for the guard at each of its signals.
    prefer(0);
    let mut is_preferred = false;
    let injected = |original: &Original| Some((original.process.pid, injected_call(original.code?.0)));
    let mut continued = TracedStops::new(originals.iter().filter_map(injected));
    let first: Vec<i32> =
        originals.iter().filter(|original| original.is_first).map(|original| original.process.pid).collect();
    let next_status = || match &first[..] {
        [] => ptrace::wait_status(criu_pid),
        first => wait_status_unless_one_exits(criu_pid, first),
    };
    // The end of CRIU, or an error, which means that CRIU is not traced any more.
    let mut next = next_status();
    let tree = Tree { criu_pid, root_pid, sockets };
    let mut has_exited = false;
    while let Ok(Some(status)) = next {
        let signal = libc::WSTOPSIG(status);
        let mut is_exiting = false;
        // A CRIU that is killed in a stop goes on to that of its exit, from which it must not be resumed.
        let mut resume_criu = |signal| {
            is_exiting = ptrace::is_exiting(criu_pid);
            if is_exiting { Ok(()) } else { ptrace::resume(criu_pid, ptrace::Until::Event, signal) }
        };
        let _ = match status >> 16 {
            libc::PTRACE_EVENT_EXIT => {
                let status = ptrace::event_message(criu_pid).unwrap_or(0);
                if status & 0x7f != 0 && !is_preferred {
                    end_children(criu_pid);
                }
                has_exited = true;
                if tree.take_exit(status, is_preferred, originals, &continued, &mut stops) {
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
                let is_undone = copies.take_signal(criu_pid, signal)
                    || releases::take_signal(criu_pid, signal)
                    || signal == libc::SIGCHLD && continued.resume(criu_pid);
                resume_criu(if is_undone { 0 } else { signal })
            }
            _ => resume_criu(0),
        };
        next = if is_exiting { Ok(Some(libc::PTRACE_EVENT_EXIT << 16)) } else { next_status() };
    }
    // A CRIU that is killed between the look at its stop and the request to resume is resumed from
    // the stop at its exit. Its records are gone; its code, which ends by itself, is removed.
    if !has_exited && next == Ok(None) {
        tree.take_exit(libc::SIGKILL as u64, is_preferred, originals, &continued, &mut stops);
    }
}

/// Makes this process, which was just forked, independent of its caller. Returns its side of the
/// copies.
fn stand_apart(descriptors: [RawFd; 2]) -> Copies {
    let _ = spawn::outlive_requests_to_end();
    // The kernel reports nothing to a process that ignores it.
    // SAFETY: this process is the guard alone, and has no handlers.
    let _ = unsafe { nix::sys::signal::signal(Signal::SIGCHLD, SigHandler::SigDfl) };
    // SAFETY: this process is the guard alone, and ends by _exit.
    unsafe { helper::detach_from_caller(c"pagemark-guard", descriptors) };
    // SAFETY: the descriptor was just made, and nothing else owns it.
    unsafe { Copies::new(helper::DESCRIPTOR + 1) }
}

/// Begins to trace CRIU, and reports the error, or 0. False if there is an error.
fn seize_and_report(criu_pid: i32) -> bool {
    let seized = ptrace::seize(criu_pid, ptrace::TRACE_EXIT | ptrace::TRACE_SYSGOOD);
    let errno = seized.err().unwrap_or(0).to_ne_bytes();
    // SAFETY: the descriptor is open, and the buffer lives through the call.
    unsafe {
        libc::write(helper::DESCRIPTOR, errno.as_ptr().cast(), errno.len());
        libc::close(helper::DESCRIPTOR);
    }
    seized.is_ok()
}

/// What CRIU was to save.
struct Tree<'a> {
    criu_pid: i32,
    root_pid: i32,
    /// Those that CRIU may have set to repair mode.
    sockets: Option<&'a Sockets>,
}

impl Tree<'_> {
    /// Takes the end of CRIU, which is held at its exit. `status` is that of `wait`: the signal is
    /// in the lowest bits. If CRIU `has_stopped` processes and did not succeed, they are rescued;
    /// true if it did not succeed.
    fn take_exit(
        &self,
        status: u64,
        has_stopped: bool,
        originals: &mut [Original],
        continued: &TracedStops,
        stops: &mut Stops,
    ) -> bool {
        if status == 0 {
            return false;
        }
        let is_killed = status & 0x7f != 0;
        for original in originals.iter_mut() {
            let pid = original.process.pid;
            original.lacks_stop = continued.may_lack_stop(pid);
            // A killed CRIU leaves no time for the second.
            original.is_stopped |= continued.was_asked_to_stop(pid) || !is_killed && job_stops::is_stopped(pid);
            original.take_continuation(stops);
        }
        if is_killed && has_stopped {
            // At once: a thread must not reach the SIGTRAP at the end of a system call.
            originals.iter().for_each(|original| stops.stop(original.process, original.process.pid));
            for original in originals.iter_mut() {
                original.takes_stop = !job_stops::is_held_before_stop(original.process.pid);
            }
        }
        if let Some(sockets) = self.sockets {
            let members = tree::members(self.root_pid).unwrap_or_default();
            sockets.reset(&members.iter().map(|member| member.process.pid).collect::<Vec<i32>>());
        }
        rescue(self.criu_pid, self.root_pid, originals, is_killed && has_stopped, stops);
        originals.iter().filter(|original| original.lacks_stop).for_each(stop_again);
        true
    }
}

/// Ends the children of a CRIU that was killed before it stopped anything, and is held at its exit.
/// While CRIU examines the kernel, it has some that stop themselves, until CRIU kills them. None of
/// their ids is another's, because CRIU cannot wait for them any more.
fn end_children(criu_pid: i32) {
    for child in proc::children(criu_pid).unwrap_or_default() {
        let _ = kill(Pid::from_raw(child), Signal::SIGKILL);
    }
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

/// Stops processes. If this process dies before it has resumed them, the kernel resumes them.
struct Stops {
    /// For the processes that job control has not stopped.
    resumed: HashMap<Process, LastSignal>,
}

impl Stops {
    fn prepare(originals: &[Original]) -> Stops {
        raise_descriptor_limit();
        let running = originals.iter().filter(|original| !original.is_stopped);
        Stops {
            resumed: running
                .filter_map(|original| Some((original.process, resumed_at_death(original.process)?)))
                .collect(),
        }
    }

    /// Sends SIGSTOP to a thread.
    fn stop(&mut self, process: Process, tid: i32) {
        if let Some(last) = self.resumed.get(&process) {
            let _ = last.arm();
        }
        // SAFETY: a system call with numbers as arguments. A thread that has exited is no failure.
        unsafe { libc::syscall(libc::SYS_tgkill, process.pid, tid, libc::SIGSTOP) };
    }

    /// Like [`Stops::prepare`], for a process that has come since.
    fn add(&mut self, process: Process) {
        if !self.resumed.contains_key(&process) {
            self.resumed.extend(resumed_at_death(process).map(|last| (process, last)));
        }
    }
}

/// None if there are no descriptors left: then the process is not resumed.
fn resumed_at_death(process: Process) -> Option<LastSignal> {
    LastSignal::new(process.pid, libc::SIGCONT, helper::DESCRIPTOR + 2).ok()
}

/// Raises the limit of the number of descriptors of this process as far as it may.
fn raise_descriptor_limit() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        // Without it there are fewer descriptors.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
}

/// Repairs what CRIU leaves, which is stopped at its exit. `are_stopped`: all processes were sent
/// SIGSTOP.
fn rescue(criu_pid: i32, root_pid: i32, originals: &mut [Original], are_stopped: bool, stops: &mut Stops) {
    let records = Records::read(criu_pid);
    let traced = |tid: &i32| Status::read(*tid).is_ok_and(|status| status.tracer_pid == criu_pid);
    let members = tree::members(root_pid).unwrap_or_default();
    let processes: Vec<(Process, Vec<i32>)> = members
        .iter()
        .map(|member| {
            let threads = proc::threads(member.process.pid).unwrap_or_default();
            (member.process, threads.into_iter().filter(traced).collect())
        })
        .collect();
    for (process, threads) in processes.iter().filter(|(_, threads)| !threads.is_empty()) {
        match originals.iter_mut().find(|original| original.process == *process) {
            // Once more, since the above takes a while.
            Some(original) => original.take_continuation(stops),
            None => stops.add(*process),
        }
        for tid in threads {
            stops.stop(*process, *tid);
        }
    }
    // Nobody resumes them any more.
    let all = processes.iter().flat_map(|(_, threads)| threads.iter().copied());
    let held: HashSet<i32> = all.filter(|&tid| job_stops::is_held_before_stop(tid)).collect();
    let _ = ptrace::resume(criu_pid, ptrace::Until::Event, 0);
    while let Ok(Some(_)) = ptrace::wait_status(criu_pid) {
        let _ = ptrace::resume(criu_pid, ptrace::Until::Event, 0);
    }
    let deadline = ptrace::deadline(ptrace::STOP_LIMIT);
    let has_stopped = |tid: &i32| {
        ptrace::seize(*tid, 0).is_ok()
            && ptrace::interrupt(*tid).is_ok()
            && ptrace::wait_trap(*tid, Some(deadline)) == Ok(true)
    };
    for (process, threads) in &processes {
        let original = originals.iter().find(|original| original.process == *process);
        // A thread that executes a program waits for those that this process has attached to.
        let reports = ExitReports::take();
        let stopped: Vec<i32> = threads.iter().copied().filter(has_stopped).collect();
        drop(reports);
        let is_in_code = repair(process.pid, &stopped, original, &records);
        // A second SIGSTOP is pending for a thread that has taken the first, though nobody held it.
        let were_held = stopped == *threads
            && threads.iter().all(|tid| held.contains(tid))
            && original.is_none_or(|original| !original.takes_stop);
        let stays = match threads[..] {
            // It was sent no signal, or by its first thread.
            [] => !are_stopped || original.is_none() || job_stops::stays_stopped(process.pid, deadline),
            _ if were_held => job_stops::was_stopped_before(threads) || original.is_some_and(|known| known.lacks_stop),
            _ => original.is_some_and(|known| known.is_stopped),
        };
        if !stays {
            resume(*process);
        }
        if is_in_code {
            leave_code(process.pid);
        }
        for tid in stopped {
            let _ = ptrace::detach(tid);
        }
    }
    // Processes that have left the tree since CRIU was started.
    if are_stopped {
        let left =
            originals.iter().filter(|original| processes.iter().all(|(process, _)| *process != original.process));
        let left = left.map(|original| original.process);
        left.filter(|process| !job_stops::stays_stopped(process.pid, deadline)).for_each(resume);
    }
    processes.iter().for_each(|(process, _)| remove_code(*process));
}

/// Unmaps the code that CRIU has left in a process which runs, and closes its file. The code ends
/// by itself where a thread executes it. What cannot be removed stays, and nobody uses it.
fn remove_code(process: Process) {
    let pid = process.pid;
    let deadline = ptrace::deadline(ptrace::STOP_LIMIT);
    loop {
        let ranges = code_of_criu(pid);
        if ranges.is_empty() {
            break;
        }
        match inject::unmap_code(process, ranges) {
            Err(error) if error.kind() == ErrorKind::Busy && Instant::now() < deadline => std::thread::sleep(POLL),
            _ => break,
        }
    }
    let open = proc::descriptors(pid).unwrap_or_default();
    let files = open.iter().filter(|open| is_code_file(&open.link)).map(|open| open.number as u64);
    let closing: Vec<inject::Call> =
        files.map(|number| inject::Call { number: libc::SYS_close, arguments: [number, 0, 0, 0, 0, 0] }).collect();
    if !closing.is_empty() {
        let _ = inject::system_calls(process, closing);
    }
}

/// Stops a process that SIGSTOP has not stopped.
fn stop_again(original: &Original) {
    if original.process.stat().is_some_and(|stat| stat.state != 'T') {
        let _ = original.process.signal(libc::SIGSTOP);
    }
}

/// Sends SIGCONT to a process, which removes its stop signals. Those that others have sent to the
/// process are sent again: this program sends them to threads.
fn resume(process: Process) {
    let status = Fields::read(proc::path(process.pid, "status")).ok();
    let asked = status.and_then(|status| status.in_base("ShdPnd", 16)).unwrap_or(0);
    // A process that has exited is no failure.
    let _ = process.signal(libc::SIGCONT);
    for signal in STOP_SIGNALS.into_iter().filter(|&signal| asked & bit(signal as i32) != 0) {
        let _ = process.signal(signal as i32);
    }
}

/// Repairs the stopped threads of a process. True if the first one is in CRIU's code, which it has
/// to execute to its end.
fn repair(pid: i32, threads: &[i32], original: Option<&Original>, records: &Records) -> bool {
    let (mut injected, mut is_left_in_code) = (None, false);
    // A process that was born since CRIU was started has the code of its file.
    let code = original.map_or_else(|| first_code_of_file(pid), |original| original.code);
    if let Some((start, code)) = code
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
            is_left_in_code = true;
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
    is_left_in_code
}

#[cfg(test)]
mod tests;
