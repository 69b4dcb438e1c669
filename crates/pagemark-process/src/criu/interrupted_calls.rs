//! System calls that a dump interrupts.
//!
//! To stop a thread that waits in a system call, the kernel takes it out of the call. Most calls
//! start again when the thread resumes. `poll`, `nanosleep`, `clock_nanosleep` and `futex` go on by
//! the call `restart_syscall`, with the time that is left of their limit. The kernel keeps that
//! time for the thread, and drops it when CRIU's code ends in the first thread of a process. CRIU
//! therefore lets these calls fail with EINTR, in its images and in the threads that resume. Some
//! other calls, such as `epoll_wait`, return EINTR after any stop.
//!
//! Programs do not expect EINTR if they have not handled a signal.
//!
//! * The images are changed after the dump: a thread makes its call again, with its whole limit,
//!   unless a signal that it does not block is pending.
//! * Threads that resume (`record_changes.rs`): the result becomes one of the kernel's own results
//!   of interrupted calls. If the thread has a signal to handle, the kernel makes it EINTR, else it
//!   makes the call again. Of a thread that is not the first of its process, the kernel has kept
//!   the time that is left. For others the limit begins anew. So that checkpoints in short
//!   intervals do not extend a call without end, a call that lasts longer than its limit since it
//!   was first seen gets EINTR, which each of these calls may return at any time. A program that
//!   makes the same call again and again is not meant by that: a call that began anew has ended
//!   once its limit has passed since the thread ran again ([`InterruptedCalls::resumed`]).
//!
//! `restart_syscall` has replaced the number of the first call in the registers. The number is
//! found in the code that makes the call, or, if the code has it in a register, by the kernel's
//! function in which the thread waits before it is frozen.

use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::socket::{getsockopt, sockopt::ReceiveTimeout};
use nix::sys::time::TimeValLike;
use pagemark_linux::pidfd;
use pagemark_linux::proc::{self, Call, Status};
use pagemark_linux::ptrace::{self, CODE_SEGMENT_64, Registers};
use pagemark_trace::RecordedPid;
use pagemark_trace::error::Error;
use prost::Message;

use super::images::schema::{CoreEntry, PstreeEntry, SignalQueueEntry, ThreadInfoX86, UserX86RegsEntry};
use super::images::{Image, ImageKind, bytes_of, read_all, with_bytes, with_varint};

/// Results of the kernel that no program sees: make the call again unless a signal is handled.
const ERESTARTNOHAND: i64 = 514;
/// As above, with the time that is left.
const ERESTART_RESTARTBLOCK: i64 = 516;

/// The instruction `syscall`.
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// First byte of the instruction that sets the number of a system call, which follows in four.
const SET_NUMBER: u8 = 0xb8;
/// Bytes before the end of a `syscall` in which its number is looked for.
const CODE: usize = 48;

/// How long a call may wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Limit {
    /// Without a limit, or until a point in time.
    Fixed,
    /// This long since the call was made.
    For(Duration),
    /// Unknown. The call begins anew once.
    Once,
}

/// The calls that are restarted, as far as they have to be remembered.
#[derive(Clone, Debug, Default)]
pub(super) struct InterruptedCalls {
    /// By thread.
    seen: Arc<Mutex<HashMap<i32, Seen>>>,
    /// The calls in which threads waited before a freeze, as far as their numbers get lost.
    numbers: Arc<Mutex<HashMap<ProcessSite, i64>>>,
}

/// A system call that a thread makes, as far as a restart leaves it in the registers. A program may
/// make all its calls by the same instruction, with the same depth of the stack.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Site {
    /// Address behind the instruction.
    rip: u64,
    rsp: u64,
    arguments: [u64; 6],
}

/// The process, and the call. No two threads of a process have the same stack.
type ProcessSite = (i32, Site);

/// A call with a limit that begins anew.
#[derive(Clone, Copy, Debug)]
struct Seen {
    /// What distinguishes it: number, stack, and arguments.
    call: [u64; 6],
    limit: Limit,
    /// When a dump interrupted it first.
    first: Instant,
    /// When the thread ran again after the last dump. None while it is frozen.
    resumed: Option<Instant>,
}

impl Seen {
    /// True if the call, begun anew when its thread ran again, may last until now. Later, the
    /// thread makes another call like it.
    fn may_last_until(&self, now: Instant) -> bool {
        match (self.resumed, self.limit) {
            // The kernel wakes a thread at most 1 % of the limit later.
            (Some(resumed), Limit::For(limit)) => {
                now.saturating_duration_since(resumed) <= limit.saturating_add(limit / 100)
            }
            _ => true,
        }
    }
}

/// True for registers of a 64-bit program with the result EINTR.
pub(super) fn has_failed(registers: &Registers) -> bool {
    registers.rax as i64 == -i64::from(libc::EINTR) && registers.orig_rax as i64 >= 0 && registers.cs == CODE_SEGMENT_64
}

impl InterruptedCalls {
    /// Changes the registers with which CRIU lets a thread resume, if it waits in a system call.
    /// Returns whether they were changed. `is_first`: the thread is the first of its process.
    pub fn resume(&self, thread: i32, is_first: bool, registers: &mut Registers) -> bool {
        if !has_failed(registers) {
            return false;
        }
        let number = registers.orig_rax as i64;
        if !is_first && (keeps_time(number) || number == libc::SYS_restart_syscall) {
            registers.rax = (-ERESTART_RESTARTBLOCK) as u64;
            return true;
        }
        let number = match number {
            libc::SYS_restart_syscall => {
                let Registers { rip, rsp, rdi, rsi, rdx, r10, r8, r9, .. } = *registers;
                self.restarted(thread, Site { rip, rsp, arguments: [rdi, rsi, rdx, r10, r8, r9] })
            }
            number => Some(number),
        };
        let Some(number) = number else { return false };
        let call = Registers { orig_rax: number as u64, ..*registers };
        let Some(limit) = limit(thread, &call) else { return false };
        if !self.may_wait(thread, &call, limit, Instant::now()) {
            return false;
        }
        *registers = Registers { rax: (-ERESTARTNOHAND) as u64, ..call };
        true
    }

    /// True if a call may begin anew.
    fn may_wait(&self, thread: i32, registers: &Registers, limit: Limit, now: Instant) -> bool {
        let mut all = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let earlier = all.remove(&thread);
        if limit == Limit::Fixed {
            return true;
        }
        let Registers { orig_rax, rsp, rdi, rsi, rdx, r10, .. } = *registers;
        let call = [orig_rax, rsp, rdi, rsi, rdx, r10];
        let same = earlier.filter(|seen| seen.call == call && seen.limit == limit && seen.may_last_until(now));
        let has_passed = same.is_some_and(|seen| match limit {
            Limit::For(limit) => now.saturating_duration_since(seen.first) >= limit,
            Limit::Fixed | Limit::Once => true,
        });
        if !has_passed {
            let first = same.map_or(now, |seen| seen.first);
            all.insert(thread, Seen { call, limit, first, resumed: None });
        }
        !has_passed
    }

    /// The threads of a dump run again.
    pub fn resumed(&self) {
        self.resumed_at(Instant::now());
    }

    fn resumed_at(&self, now: Instant) {
        let mut all = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        all.values_mut().for_each(|seen| {
            seen.resumed.get_or_insert(now);
        });
    }

    /// Finds out in which calls the threads of a tree wait, before the tree is frozen, and forgets
    /// all others.
    pub fn observe(&self, tree: &[i32]) {
        let threads: Vec<(i32, i32)> = tree
            .iter()
            .flat_map(|pid| proc::threads(*pid).unwrap_or_default().into_iter().map(|thread| (*pid, thread)))
            .collect();
        let mut numbers = self.numbers.lock().unwrap_or_else(PoisonError::into_inner);
        *numbers = threads.iter().filter_map(|(pid, thread)| observe_thread(*pid, *thread, &numbers)).collect();
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.retain(|seen, _| threads.iter().any(|(_, thread)| thread == seen));
    }

    /// The number of the call that a thread of a process goes on with by `restart_syscall`. None if
    /// it is unknown.
    fn restarted(&self, pid: i32, site: Site) -> Option<i64> {
        let mut code = [0; CODE];
        let memory = proc::open_memory(pid).ok()?;
        memory.read_exact_at(&mut code, site.rip.checked_sub(CODE as u64)?).ok()?;
        number_in(&code).or_else(|| self.observed(pid, site))
    }

    /// The number of a call that was observed.
    fn observed(&self, pid: i32, site: Site) -> Option<i64> {
        self.numbers.lock().unwrap_or_else(PoisonError::into_inner).get(&(pid, site)).copied()
    }

    /// Changes the images in a directory so that the threads make the interrupted calls again.
    /// `pid_here` gives the id here of a process, by its id in the images.
    ///
    /// # Errors
    /// An image cannot be read or written.
    pub fn repair_images(&self, directory: &Path, pid_here: impl Fn(RecordedPid) -> Option<i32>) -> Result<(), Error> {
        let processes: Vec<PstreeEntry> = read_all(&directory.join("pstree.img"), ImageKind::Pstree)?;
        for process in processes {
            let first = directory.join(format!("core-{}.img", process.pid));
            if !first.exists() {
                continue;
            }
            let image = Image::read(&first, ImageKind::Core)?;
            let core = decode(&first, &image)?;
            // A zombie has no registers, and in a container any number as the id of its thread.
            if core.thread_info.is_none() {
                continue;
            }
            let shared = core.tc.and_then(|process| process.signals_s).unwrap_or_default();
            for thread in process.threads {
                let path = directory.join(format!("core-{thread}.img"));
                let mut image = Image::read(&path, ImageKind::Core)?;
                let core = decode(&path, &image)?;
                let number = |site| self.restarted(pid_here(process.pid.into())?, site);
                let Some(message) = repaired(&image.messages[0], &core, &shared, number) else { continue };
                image.messages[0] = message;
                let failed = Error::criu_io(format!("write {}", path.display()));
                std::fs::write(&path, image.encode()).map_err(failed)?;
            }
        }
        Ok(())
    }
}

/// The place and the number of the call in which a thread waits, if the call keeps time. `known`
/// are the calls that were observed before.
fn observe_thread(pid: i32, thread: i32, known: &HashMap<ProcessSite, i64>) -> Option<(ProcessSite, i64)> {
    let Call { number, arguments, rsp, rip } = Call::of_thread(thread).ok()??;
    let place = (pid, Site { rip, rsp, arguments });
    if number != libc::SYS_restart_syscall {
        return keeps_time(number).then_some((place, number));
    }
    if let Some(number) = known.get(&place) {
        return Some((place, *number));
    }
    Some((place, number_by_function(&proc::wait_function(thread)?, arguments[0])))
}

/// The number of a call that keeps time, by the kernel's function in which its thread waits and its
/// first argument.
fn number_by_function(function: &str, first_argument: u64) -> i64 {
    /// No program has memory below this address.
    const LOWEST: u64 = 1 << 16;
    match function {
        _ if function.contains("poll") => libc::SYS_poll,
        _ if function.contains("futex") => libc::SYS_futex,
        // The first argument is a clock or an address.
        _ if first_argument < LOWEST => libc::SYS_clock_nanosleep,
        _ => libc::SYS_nanosleep,
    }
}

/// True for the calls that the kernel goes on with by `restart_syscall`.
fn keeps_time(number: i64) -> bool {
    matches!(number, libc::SYS_poll | libc::SYS_nanosleep | libc::SYS_clock_nanosleep | libc::SYS_futex)
}

/// How long a call may wait which can be made again. None for other calls.
fn limit(thread: i32, registers: &Registers) -> Option<Limit> {
    let time_at = |address: u64| match address {
        0 => Limit::Fixed,
        address => read_time(thread, address).map_or(Limit::Once, Limit::For),
    };
    let milliseconds =
        |limit: u64| u64::try_from(limit as i32).map_or(Limit::Fixed, |ms| Limit::For(Duration::from_millis(ms)));
    match registers.orig_rax as i64 {
        libc::SYS_poll => Some(milliseconds(registers.rdx)),
        libc::SYS_nanosleep => Some(time_at(registers.rdi)),
        libc::SYS_clock_nanosleep if registers.rsi as i32 & libc::TIMER_ABSTIME != 0 => Some(Limit::Fixed),
        libc::SYS_clock_nanosleep => Some(time_at(registers.rdx)),
        libc::SYS_futex => Some(match registers.rsi as i32 & libc::FUTEX_CMD_MASK {
            libc::FUTEX_WAIT => time_at(registers.r10),
            // The other operations that wait have a point in time.
            _ => Limit::Fixed,
        }),
        libc::SYS_epoll_pwait2 | libc::SYS_semtimedop => Some(time_at(registers.r10)),
        libc::SYS_rt_sigtimedwait => Some(time_at(registers.rdx)),
        libc::SYS_io_getevents => Some(time_at(registers.r8)),
        _ => match ptrace::wait_limit_ms(registers)? {
            0 => Some(Limit::Fixed),
            u64::MAX => Some(receive_limit(thread, registers.rdi as i32).map_or(Limit::Once, Limit::For)),
            ms => Some(Limit::For(Duration::from_millis(ms))),
        },
    }
}

/// A `struct timespec` of a thread.
fn read_time(thread: i32, address: u64) -> Option<Duration> {
    let mut time = [0; 16];
    proc::open_memory(thread).ok()?.read_exact_at(&mut time, address).ok()?;
    let [seconds, nanoseconds] = [0, 8].map(|at| u64::from_ne_bytes(time[at..at + 8].try_into().unwrap_or_default()));
    Some(Duration::from_secs(seconds).saturating_add(Duration::from_nanos(nanoseconds)))
}

/// How long a thread waits to receive from its socket `number` (`SO_RCVTIMEO`).
fn receive_limit(thread: i32, number: i32) -> Option<Duration> {
    let socket = pidfd::duplicate(Status::read(thread).ok()?.process_id, number).ok()?;
    let limit = getsockopt(&socket, ReceiveTimeout).ok()?;
    let micros = Duration::from_micros(u64::try_from(limit.num_microseconds()).ok()?);
    (!micros.is_zero()).then_some(micros)
}

/// The number that code which ends with `syscall` sets last, if the call is one that keeps time.
fn number_in(code: &[u8]) -> Option<i64> {
    let code = code.strip_suffix(&SYSCALL)?;
    let numbers = code.windows(5).rev().filter(|window| window[0] == SET_NUMBER);
    let mut numbers = numbers.filter_map(|window| Some(i64::from(i32::from_le_bytes(window[1..].try_into().ok()?))));
    numbers.find(|number| keeps_time(*number))
}

fn decode(path: &Path, image: &Image) -> Result<CoreEntry, Error> {
    let message = image.messages.first().ok_or_else(|| Error::image(path, "it has no message"))?;
    CoreEntry::decode(message.as_slice()).map_err(|error| Error::image(path, error.to_string()))
}

/// The encoded message of a thread that makes its interrupted call again. None if it is as it
/// should be. `shared` are the signals that are pending for the process; `number` finds the number
/// of a restarted call.
fn repaired(
    message: &[u8],
    core: &CoreEntry,
    shared: &SignalQueueEntry,
    number: impl Fn(Site) -> Option<i64>,
) -> Option<Vec<u8>> {
    let registers = &core.thread_info.as_ref()?.gpregs;
    let result = registers.ax as i64;
    // CRIU saves the registers of threads other than the first after they were changed.
    let is_interrupted = [-i64::from(libc::EINTR), -ERESTARTNOHAND, -ERESTART_RESTARTBLOCK].contains(&result);
    if !is_interrupted || registers.cs != CODE_SEGMENT_64 || (registers.orig_ax as i64) < 0 {
        return None;
    }
    let (ax, ip) = match call_to_make(core, registers, shared, number) {
        Some(call) => (call as u64, registers.ip.wrapping_sub(SYSCALL.len() as u64)),
        None if result == -i64::from(libc::EINTR) => return None,
        None => (-i64::from(libc::EINTR) as u64, registers.ip),
    };
    let thread_info = bytes_of(message, CoreEntry::THREAD_INFO)?;
    let mut general = bytes_of(thread_info, ThreadInfoX86::GPREGS)?.to_vec();
    for (field, value) in [(UserX86RegsEntry::AX, ax), (UserX86RegsEntry::IP, ip)] {
        general = with_varint(&general, field, value);
    }
    let thread_info = with_bytes(thread_info, ThreadInfoX86::GPREGS, &general);
    Some(with_bytes(message, CoreEntry::THREAD_INFO, &thread_info))
}

/// The number of the interrupted call that a thread makes again. None if it does not: a signal is
/// delivered first, the number is unknown, or the call is none that can simply be made again.
fn call_to_make(
    core: &CoreEntry,
    registers: &UserX86RegsEntry,
    shared: &SignalQueueEntry,
    number: impl Fn(Site) -> Option<i64>,
) -> Option<i64> {
    let thread = core.thread_core.as_ref()?;
    let blocked = thread.blk_sigset.unwrap_or(0);
    let own = thread.signals_p.iter().flat_map(|queue| &queue.signals);
    let is_delivered = |info: &[u8]| {
        let signal = info.first_chunk().map_or(0, |number| i32::from_ne_bytes(*number));
        blocked.checked_shr(signal.wrapping_sub(1) as u32).unwrap_or(0) & 1 == 0
    };
    if own.chain(&shared.signals).any(|signal| is_delivered(&signal.siginfo)) {
        return None;
    }
    let call = match registers.orig_ax as i64 {
        libc::SYS_restart_syscall => {
            let UserX86RegsEntry { ip: rip, sp: rsp, di, si, dx, r10, r8, r9, .. } = *registers;
            number(Site { rip, rsp, arguments: [di, si, dx, r10, r8, r9] })?
        }
        call => call,
    };
    // SAFETY: the structure consists of numbers, for which zeros are valid.
    let zeros: Registers = unsafe { std::mem::zeroed() };
    let (rdx, r10, r8) = (registers.dx, registers.r10, registers.r8);
    let now = Registers { orig_rax: call as u64, rdx, r10, r8, ..zeros };
    (keeps_time(call) || ptrace::wait_limit_ms(&now).is_some()).then_some(call)
}

#[cfg(test)]
mod tests {
    use super::super::images::schema::{SiginfoEntry, TaskCoreEntry, ThreadCoreEntry};
    use std::os::fd::AsRawFd;

    use super::*;

    fn interrupted(number: i64) -> Registers {
        // SAFETY: the structure consists of numbers, for which zeros are valid.
        let zeros: Registers = unsafe { std::mem::zeroed() };
        let rax = (-i64::from(libc::EINTR)) as u64;
        Registers { rax, orig_rax: number as u64, cs: CODE_SEGMENT_64, rip: 0x1000, ..zeros }
    }

    #[test]
    fn a_first_thread_makes_its_call_again_and_others_go_on_with_theirs() {
        let calls = InterruptedCalls::default();
        let poll = Registers { rdx: u64::from(u32::MAX), ..interrupted(libc::SYS_poll) };
        let mut registers = poll;
        assert!(calls.resume(1, true, &mut registers));
        assert_eq!((registers.rax as i64, registers.orig_rax, registers.rip), (-514, 7, 0x1000));
        registers = poll;
        assert!(calls.resume(1, false, &mut registers));
        assert_eq!((registers.rax as i64, registers.orig_rax, registers.rip), (-516, 7, 0x1000));
    }

    #[test]
    fn what_is_not_interrupted_or_not_known_is_left_alone() {
        let calls = InterruptedCalls::default();
        let poll = interrupted(libc::SYS_poll);
        let others = [
            Registers { rax: 0, ..poll },
            Registers { cs: 0x23, ..poll },
            Registers { orig_rax: u64::MAX, ..poll },
            Registers { orig_rax: libc::SYS_connect as u64, ..poll },
        ];
        for other in others {
            let mut registers = other;
            assert!(!calls.resume(1, true, &mut registers));
            assert_eq!((registers.rax, registers.orig_rax), (other.rax, other.orig_rax));
        }
    }

    #[test]
    fn a_limit_that_has_passed_is_not_extended() {
        let calls = InterruptedCalls::default();
        let (call, limit) = (interrupted(libc::SYS_poll), Limit::For(Duration::from_secs(10)));
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let other = Registers { rdi: 1, ..call };
        let asked = [(&call, 0, true), (&call, 9, true), (&call, 10, false), (&call, 11, true), (&other, 30, true)];
        for (call, seconds, expected) in asked {
            assert_eq!(calls.may_wait(1, call, limit, at(seconds)), expected, "{seconds}");
        }
        // An unlimited call in between was another call.
        assert!(calls.may_wait(1, &call, Limit::Fixed, at(35)));
        assert!(calls.may_wait(1, &other, limit, at(60)));
        // An unknown limit.
        assert!(calls.may_wait(1, &call, Limit::Once, at(70)));
        assert!(!calls.may_wait(1, &call, Limit::Once, at(70)));
    }

    #[test]
    fn a_call_that_is_made_again_and_again_is_not_taken_for_a_long_one() {
        let calls = InterruptedCalls::default();
        let (call, limit) = (interrupted(libc::SYS_nanosleep), Limit::For(Duration::from_secs(10)));
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        // Frozen at, resumed at: each begins anew at most once more.
        for (frozen, resumed, expected) in
            [(0, 1, true), (12, 13, true), (20, 21, true), (30, 31, false), (32, 33, true), (50, 51, true)]
        {
            assert_eq!(calls.may_wait(1, &call, limit, at(frozen)), expected, "{frozen}");
            calls.resumed_at(at(resumed));
        }
        // Another limit at the same address.
        assert!(calls.may_wait(1, &call, Limit::For(Duration::from_secs(1)), at(52)));
    }

    #[test]
    fn limits_are_read_from_the_arguments() {
        let me = std::process::id() as i32;
        let time = [3_u64, 500_000_000];
        let address = time.as_ptr() as u64;
        let half = Limit::For(Duration::from_millis(3500));
        let of = |number, change: fn(&mut Registers, u64)| {
            let mut registers = interrupted(number);
            change(&mut registers, address);
            limit(me, &registers)
        };
        assert_eq!(of(libc::SYS_poll, |r, _| r.rdx = 3500), Some(half));
        assert_eq!(of(libc::SYS_poll, |r, _| r.rdx = u64::from(u32::MAX)), Some(Limit::Fixed));
        assert_eq!(of(libc::SYS_nanosleep, |r, at| r.rdi = at), Some(half));
        assert_eq!(of(libc::SYS_clock_nanosleep, |r, at| r.rdx = at), Some(half));
        assert_eq!(of(libc::SYS_clock_nanosleep, |r, at| (r.rsi, r.rdx) = (1, at)), Some(Limit::Fixed));
        assert_eq!(of(libc::SYS_futex, |r, at| (r.rsi, r.r10) = (128, at)), Some(half));
        assert_eq!(of(libc::SYS_futex, |r, at| (r.rsi, r.r10) = (128 | 9, at)), Some(Limit::Fixed));
        assert_eq!(of(libc::SYS_futex, |_, _| {}), Some(Limit::Fixed));
        assert_eq!(of(libc::SYS_epoll_wait, |r, _| r.r10 = 3500), Some(half));
        assert_eq!(of(libc::SYS_epoll_wait, |r, _| r.r10 = u64::from(u32::MAX)), Some(Limit::Fixed));
        assert_eq!(of(libc::SYS_semtimedop, |r, at| r.r10 = at), Some(half));
        assert_eq!(of(libc::SYS_epoll_pwait2, |r, at| r.r10 = at), Some(half));
        assert_eq!(of(libc::SYS_rt_sigtimedwait, |r, at| r.rdx = at), Some(half));
        assert_eq!(of(libc::SYS_rt_sigtimedwait, |_, _| {}), Some(Limit::Fixed));
        assert_eq!(of(libc::SYS_io_getevents, |r, at| r.r8 = at), Some(half));
        assert_eq!(of(libc::SYS_nanosleep, |r, _| r.rdi = 8), Some(Limit::Once));
        assert_eq!(of(libc::SYS_recvmsg, |r, _| r.rdi = u64::MAX), Some(Limit::Once));
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(3500))).unwrap();
        let mut receives = interrupted(libc::SYS_recvmsg);
        receives.rdi = socket.as_raw_fd() as u64;
        assert_eq!(limit(me, &receives), Some(half));
        assert_eq!(of(libc::SYS_write, |_, _| {}), None);
    }

    #[test]
    fn another_call_from_the_same_place_is_not_taken_for_the_observed_one() {
        // A function that makes any call, as `syscall` of the C library.
        let own = |number: i64, arguments: [u64; 3]| {
            let [a, b, c] = arguments;
            // SAFETY: the calls that are made here wait, and change nothing.
            unsafe { libc::syscall(number, a, b, c) };
        };
        let (send, receive) = std::sync::mpsc::channel();
        // Detached: it waits for ever, and ends with the process.
        std::thread::spawn(move || {
            // SAFETY: only asks.
            send.send(unsafe { libc::syscall(libc::SYS_gettid) as i32 }).unwrap();
            own(libc::SYS_poll, [0, 0, u64::from(u32::MAX)]);
        });
        let (pid, thread) = (std::process::id() as i32, receive.recv().unwrap());
        let waits = || observe_thread(pid, thread, &HashMap::new()).filter(|(_, number)| *number == libc::SYS_poll);
        let ((_, site), _) = pagemark_testing::wait_for("the thread to wait", waits);
        let calls = InterruptedCalls::default();
        calls.observe(&[pid]);
        assert_eq!(calls.observed(pid, site), Some(libc::SYS_poll));
        let other = Site { arguments: [1, 0, u64::from(u32::MAX), 0, 0, 0], ..site };
        assert_eq!(calls.observed(pid, other), None);
    }

    #[test]
    fn the_number_of_a_call_is_found_by_where_its_thread_waits() {
        let number = |function, argument| number_by_function(function, argument);
        assert_eq!(number("poll_schedule_timeout.constprop.0", 0x7f00_0000_0000), libc::SYS_poll);
        assert_eq!(number("futex_do_wait", 0x7f00_0000_0000), libc::SYS_futex);
        assert_eq!(number("hrtimer_nanosleep", 1), libc::SYS_clock_nanosleep);
        assert_eq!(number("do_syscall_64", 0x7f00_0000_0000), libc::SYS_nanosleep);
    }

    #[test]
    fn the_number_of_a_call_is_found_in_its_code() {
        // mov $7,%eax; syscall
        assert_eq!(number_in(&[0x90, 0xb8, 7, 0, 0, 0, 0x0f, 0x05]), Some(libc::SYS_poll));
        // mov $230,%eax; xor %r10d,%r10d; syscall
        let code = [0xb8, 230, 0, 0, 0, 0x45, 0x31, 0xd2, 0x0f, 0x05];
        assert_eq!(number_in(&code), Some(libc::SYS_clock_nanosleep));
        assert_eq!(number_in(&[0xb8, 7, 0, 0, 0, 0xb8, 202, 0, 0, 0, 0x0f, 0x05]), Some(libc::SYS_futex));
        // Another number, no number, no call.
        assert_eq!(number_in(&[0xb8, 1, 0, 0, 0, 0x0f, 0x05]), None);
        assert_eq!(number_in(&[0x90; 8]), None);
        assert_eq!(number_in(&[0xb8, 7, 0, 0, 0, 0x90, 0x90]), None);
    }

    /// A thread with these registers, blocked signals, and a pending signal.
    fn thread(ax: i64, orig_ax: i64, blocked: u64, signal: Option<i32>) -> CoreEntry {
        let gpregs =
            UserX86RegsEntry { ax: ax as u64, orig_ax: orig_ax as u64, ip: 0x1000, cs: 0x33, ..Default::default() };
        let signals = signal.map(|number| SignalQueueEntry {
            signals: vec![SiginfoEntry { siginfo: [&number.to_ne_bytes()[..], &[0; 124]].concat() }],
        });
        CoreEntry {
            thread_info: Some(ThreadInfoX86 { gpregs, ..Default::default() }),
            thread_core: Some(ThreadCoreEntry { blk_sigset: Some(blocked), signals_p: signals, ..Default::default() }),
            ..Default::default()
        }
    }

    #[test]
    fn interrupted_calls_are_made_again_in_the_images() {
        let eintr = -i64::from(libc::EINTR);
        let now = |core: &CoreEntry, number: Option<i64>| {
            let message = repaired(&core.encode_to_vec(), core, &SignalQueueEntry::default(), |site| {
                assert_eq!((site.rip, site.rsp), (0x1000, 0));
                number
            })?;
            let registers = CoreEntry::decode(message.as_slice()).unwrap().thread_info.unwrap().gpregs;
            assert_eq!((registers.cs, registers.orig_ax), (0x33, core.thread_info.as_ref().unwrap().gpregs.orig_ax));
            Some((registers.ax as i64, registers.ip))
        };
        let poll = libc::SYS_poll;
        let restart = libc::SYS_restart_syscall;
        let usr1 = 1_u64 << (libc::SIGUSR1 - 1);
        assert_eq!(now(&thread(eintr, poll, 0, None), None), Some((poll, 0xffe)));
        assert_eq!(now(&thread(eintr, libc::SYS_epoll_wait, 0, None), None), Some((libc::SYS_epoll_wait, 0xffe)));
        assert_eq!(now(&thread(eintr, restart, 0, None), Some(poll)), Some((poll, 0xffe)));
        assert_eq!(now(&thread(eintr, poll, usr1, Some(libc::SIGUSR1)), None), Some((poll, 0xffe)));
        for changed in [-ERESTARTNOHAND, -ERESTART_RESTARTBLOCK] {
            assert_eq!(now(&thread(changed, poll, 0, None), None), Some((poll, 0xffe)));
            assert_eq!(now(&thread(changed, poll, 0, Some(libc::SIGUSR1)), None), Some((eintr, 0x1000)));
            assert_eq!(now(&thread(changed, restart, 0, None), None), Some((eintr, 0x1000)));
        }
        // The number is unknown; a signal is delivered first; no call; a call that cannot be made again;
        // another result.
        assert_eq!(now(&thread(eintr, restart, 0, None), None), None);
        assert_eq!(now(&thread(eintr, poll, 0, Some(libc::SIGUSR1)), None), None);
        assert_eq!(now(&thread(eintr, -1, 0, None), None), None);
        assert_eq!(now(&thread(eintr, libc::SYS_connect, 0, None), None), None);
        assert_eq!(now(&thread(0, poll, 0, None), None), None);
    }

    #[test]
    fn any_registers_and_signals_are_examined() {
        let repaired_with =
            |core: &CoreEntry| repaired(&core.encode_to_vec(), core, &SignalQueueEntry::default(), |_| None).is_some();
        for ax in [i64::MIN, i64::MAX, -1] {
            assert!(!repaired_with(&thread(ax, libc::SYS_poll, 0, None)), "{ax}");
        }
        // Of a signal that does not exist it is not known that it is blocked.
        for signal in [i32::MIN, i32::MAX, -1, 0] {
            assert!(!repaired_with(&thread(-i64::from(libc::EINTR), libc::SYS_poll, 0, Some(signal))), "{signal}");
        }
    }

    #[test]
    fn zombies_have_no_calls() {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, kind, messages| {
            let mut image = Image::new(kind);
            image.messages = messages;
            std::fs::write(directory.path().join(name), image.encode()).unwrap();
        };
        let process =
            |pid, thread| PstreeEntry { pid, ppid: 0, pgid: 1, sid: 1, threads: vec![thread] }.encode_to_vec();
        write("pstree.img", ImageKind::Pstree, vec![process(7, 2_346_053_904), process(8, 8)]);
        let zombie = CoreEntry { tc: Some(TaskCoreEntry::default()), ..Default::default() };
        let waits = thread(-i64::from(libc::EINTR), libc::SYS_poll, 0, None);
        write("core-7.img", ImageKind::Core, vec![zombie.encode_to_vec()]);
        write("core-8.img", ImageKind::Core, vec![waits.encode_to_vec()]);
        InterruptedCalls::default().repair_images(directory.path(), |_| None).unwrap();
        let path = directory.path().join("core-8.img");
        let core = decode(&path, &Image::read(&path, ImageKind::Core).unwrap()).unwrap();
        assert_eq!(core.thread_info.unwrap().gpregs.ax as i64, libc::SYS_poll);
    }
}
