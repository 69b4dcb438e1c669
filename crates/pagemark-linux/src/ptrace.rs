//! A thin layer over ptrace.
//!
//! No function here allocates or locks, so that all can be used after `fork` in a program with
//! threads. Errors are values of errno.
//!
//! The functions are safe: the kernel lets no thread trace the threads of its own process, so that
//! they change the registers and the memory of other processes alone.

use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use crate::{exit_reports, plain_proc};

/// General registers of a thread.
pub type Registers = libc::user_regs_struct;

/// The type of a request, which differs between C libraries.
#[cfg(not(target_env = "musl"))]
pub type Request = libc::c_uint;
/// The type of a request, which differs between C libraries.
#[cfg(target_env = "musl")]
pub type Request = libc::c_int;

/// Request for the blocked signals.
pub const GET_SIGNAL_MASK: Request = 0x420a;
/// Request that sets the blocked signals.
pub const SET_SIGNAL_MASK: Request = 0x420b;
const GET_RSEQ_CONFIGURATION: Request = 0x420f;
/// Request for how a thread dispatches system calls to itself.
pub const GET_SYSCALL_USER_DISPATCH_CONFIG: Request = 0x4211;

/// Length of the instruction `syscall`.
pub const SYSCALL_BYTES: u64 = 2;

/// Option of [`seize`]: suspends the tracee's seccomp filters. Needs CAP_SYS_ADMIN.
pub const SUSPEND_SECCOMP: usize = 1 << 21;
/// Option of [`seize`]: marks stops at system calls, so that they can be distinguished from others.
pub const TRACE_SYSGOOD: usize = 1;

/// Option of [`seize`]: stops the tracee at its exit, before the kernel releases what it traces.
pub const TRACE_EXIT: usize = 1 << 6;

/// Option of [`seize`]: the tracee is killed when its tracer ends.
pub const EXIT_KILL: usize = 1 << 20;

/// The code segment of 64-bit programs.
pub const CODE_SEGMENT_64: u64 = 0x33;

/// Number of times that a stopping thread is polled before [`wait`] sleeps between polls.
const QUICK_POLLS: u32 = 50;

/// After as many, it is looked whether the thread has exited.
const POLLS_TO_LOOK: u32 = 64;

/// Time between later polls.
const POLL: libc::timespec = libc::timespec { tv_sec: 0, tv_nsec: 30_000 };

/// Limit of the time that the threads of a process or a tree take to stop.
pub const STOP_LIMIT: Duration = Duration::from_secs(10);

type Result<T> = std::result::Result<T, libc::c_int>;

/// A change of a tracee's state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stop {
    /// Stopped by [`interrupt`] or by job control.
    Trap,
    /// Stopped at the entry or the exit of a system call.
    SystemCall,
    /// Stopped before it receives a signal, which [`resume`] delivers or drops.
    Signal(libc::c_int),
    /// Stopped at its exit ([`TRACE_EXIT`]), where it executes nothing of its own any more.
    Exiting,
    /// Stopped by another event.
    Event,
    /// Exited.
    Exited,
}

/// The event until which a tracee is resumed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Until {
    /// Any event.
    Event,
    /// The next entry or exit of a system call.
    SystemCall,
}

/// The error of this thread's last system call.
pub fn errno() -> libc::c_int {
    // SAFETY: the location is this thread's own and always valid.
    unsafe { *libc::__errno_location() }
}

fn check(result: libc::c_long) -> Result<libc::c_long> {
    if result < 0 { Err(errno()) } else { Ok(result) }
}

/// Makes a request whose address and data are plain numbers.
fn request(request: Request, thread: i32, address: usize, data: usize) -> Result<()> {
    #[cfg(any(test, feature = "testing"))]
    deaths::pass();
    // SAFETY: the requests made through this function take numbers alone: they touch no memory of ours.
    check(unsafe { libc::ptrace(request, thread, address, data) }).map(|_| ())
}

/// Makes a request that reads from, or writes to, `data`.
fn transfer<T>(request: Request, thread: i32, address: usize, data: &mut T) -> Result<libc::c_long> {
    #[cfg(any(test, feature = "testing"))]
    deaths::pass();
    // SAFETY: each caller pairs the request with the type that the kernel transfers for it, and with
    // its size in `address` where the request takes one.
    check(unsafe { libc::ptrace(request, thread, address, std::ptr::from_mut(data)) })
}

/// Attaches to a thread without stopping it.
pub fn seize(thread: i32, options: usize) -> Result<()> {
    request(libc::PTRACE_SEIZE, thread, 0, options)?;
    exit_reports::attached(thread);
    Ok(())
}

/// Requests that a thread stop; [`wait`] returns when it has.
pub fn interrupt(thread: i32) -> Result<()> {
    request(libc::PTRACE_INTERRUPT, thread, 0, 0)
}

/// Resumes a stopped thread and delivers the signal to it, unless that is 0.
pub fn resume(thread: i32, until: Until, signal: libc::c_int) -> Result<()> {
    let how = match until {
        Until::Event => libc::PTRACE_CONT,
        Until::SystemCall => libc::PTRACE_SYSCALL,
    };
    request(how, thread, 0, signal as usize)
}

/// Detaches from a stopped thread, which resumes unless job control has stopped it.
pub fn detach(thread: i32) -> Result<()> {
    request(libc::PTRACE_DETACH, thread, 0, 0)
}

/// Keeps a thread that job control has stopped in its stop, and reports the next event.
pub fn listen(thread: i32) -> Result<()> {
    request(libc::PTRACE_LISTEN, thread, 0, 0)
}

/// The message of the event that has stopped a thread: at an exit, the status of the exit.
pub fn event_message(thread: i32) -> Result<u64> {
    let mut message = 0u64;
    transfer(libc::PTRACE_GETEVENTMSG, thread, 0, &mut message)?;
    Ok(message)
}

/// The signal before which a thread has stopped.
pub fn signal_info(thread: i32) -> Result<libc::siginfo_t> {
    // SAFETY: the structure consists of numbers and bytes, for which zeros are valid.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    transfer(libc::PTRACE_GETSIGINFO, thread, 0, &mut info)?;
    Ok(info)
}

/// True if a stopped thread has stopped at its exit ([`TRACE_EXIT`]).
pub fn is_exiting(thread: i32) -> bool {
    signal_info(thread).is_ok_and(|info| info.si_code == libc::SIGTRAP | libc::PTRACE_EVENT_EXIT << 8)
}

/// Where PTRACE_POKEUSER has the register that enables the hardware breakpoints of a thread.
pub const DEBUG_CONTROL: usize = std::mem::offset_of!(libc::user, u_debugreg) + 7 * size_of::<u64>();

/// Disables the hardware breakpoints of a stopped thread.
pub fn clear_breakpoints(thread: i32) -> Result<()> {
    request(libc::PTRACE_POKEUSER, thread, DEBUG_CONTROL, 0)
}

/// Waits for the next stop of a tracee, and returns its status as `waitpid` does. None when the
/// tracee has ended.
pub fn wait_status(thread: i32) -> Result<Option<libc::c_int>> {
    loop {
        if let ControlFlow::Break(status) = stop_status(thread, 0)? {
            return Ok(status);
        }
    }
}

/// Like [`wait_status`], but goes on if the tracee has not stopped.
pub fn try_wait_status(thread: i32) -> Result<ControlFlow<Option<libc::c_int>>> {
    stop_status(thread, libc::WNOHANG)
}

fn stop_status(thread: i32, options: libc::c_int) -> Result<ControlFlow<Option<libc::c_int>>> {
    match look(thread, options)? {
        Seen::Nothing => return Ok(ControlFlow::Continue(())),
        Seen::Signal(signal) => return Ok(ControlFlow::Break(Some(signal << 8 | STOPPED))),
        Seen::Other => {}
    }
    Ok(match take(thread)? {
        None => ControlFlow::Continue(()),
        Some(status) if libc::WIFSTOPPED(status) => ControlFlow::Break(Some(status)),
        Some(_) => ControlFlow::Break(None),
    })
}

/// The lowest bits of the status of a tracee that has stopped.
const STOPPED: libc::c_int = 0x7f;

/// What the kernel has to report of a tracee.
enum Seen {
    Nothing,
    /// A stop before a signal.
    Signal(libc::c_int),
    Other,
}

/// Looks what the kernel has to report of a tracee, and leaves the report. A report of a stop
/// before a signal must not be taken: the kernel would then drop the signal if the tracer died
/// before it resumes the tracee, which ends the report, too.
fn look(thread: i32, options: libc::c_int) -> Result<Seen> {
    // SAFETY: the structure consists of numbers and bytes, for which zeros are valid.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let options = libc::WSTOPPED | libc::WEXITED | libc::WNOWAIT | libc::__WALL | options;
    // SAFETY: the kernel writes to the structure, which lives through the call.
    if unsafe { libc::waitid(libc::P_PID, thread as libc::id_t, &mut info, options) } != 0 {
        return if errno() == libc::EINTR { Ok(Seen::Nothing) } else { Err(errno()) };
    }
    // SAFETY: the kernel has filled in these fields, or left zeros where it has nothing to report.
    let (pid, status) = unsafe { (info.si_pid(), info.si_status()) };
    Ok(match info.si_code {
        _ if pid == 0 => Seen::Nothing,
        // A stop of another kind has higher bits: those of its event, or the mark of a system call.
        libc::CLD_TRAPPED if status & !STOPPED == 0 => Seen::Signal(status),
        _ => Seen::Other,
    })
}

/// Takes the report that [`look`] has left: its status as `waitpid` returns it. None if the tracee
/// was killed meanwhile, of which the kernel reports later.
fn take(thread: i32) -> Result<Option<libc::c_int>> {
    let mut status = 0;
    // SAFETY: the kernel writes a status to the integer, which lives through the call.
    match unsafe { libc::waitpid(thread, &mut status, libc::__WALL | libc::WNOHANG) } {
        0 => Ok(None),
        -1 if errno() == libc::EINTR => Ok(None),
        -1 => Err(errno()),
        _ => Ok(Some(status)),
    }
}

/// True if job control has stopped the process of a thread that [`interrupt`] has stopped.
pub fn is_in_group_stop(thread: i32) -> Result<bool> {
    Ok(signal_info(thread)?.si_signo != libc::SIGTRAP)
}

/// Reads the general registers of a stopped thread.
pub fn registers(thread: i32) -> Result<Registers> {
    // SAFETY: the structure consists of numbers, for which zeros are valid.
    let mut registers: Registers = unsafe { std::mem::zeroed() };
    transfer(libc::PTRACE_GETREGS, thread, 0, &mut registers)?;
    Ok(registers)
}

/// Sets the general registers of a stopped thread.
pub fn set_registers(thread: i32, registers: &Registers) -> Result<()> {
    transfer(libc::PTRACE_SETREGS, thread, 0, &mut { *registers }).map(|_| ())
}

/// Reads a register set (`NT_PRSTATUS`, `NT_X86_XSTATE`, …) of a stopped thread into `buffer`;
/// returns its length.
pub fn register_set(thread: i32, set: libc::c_int, buffer: &mut [u8]) -> Result<usize> {
    let mut vector = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    transfer(libc::PTRACE_GETREGSET, thread, set as usize, &mut vector)?;
    Ok(vector.iov_len)
}

/// Reads the blocked signals of a stopped thread, one bit each.
pub fn signal_mask(thread: i32) -> Result<u64> {
    let mut mask = 0u64;
    transfer(GET_SIGNAL_MASK, thread, size_of::<u64>(), &mut mask)?;
    Ok(mask)
}

/// Sets the blocked signals of a stopped thread.
pub fn set_signal_mask(thread: i32, mut mask: u64) -> Result<()> {
    transfer(SET_SIGNAL_MASK, thread, size_of::<u64>(), &mut mask).map(|_| ())
}

/// Reads a word of a stopped thread's memory.
pub fn word(thread: i32, address: u64) -> Result<u64> {
    let mut word = 0u64;
    // The system call stores the word through the pointer, unlike the function of the C library, which
    // returns it. SAFETY: the kernel writes one word to `word`, which lives through the call.
    let result = unsafe {
        libc::syscall(libc::SYS_ptrace, libc::PTRACE_PEEKDATA, thread, address as usize, std::ptr::from_mut(&mut word))
    };
    check(result)?;
    Ok(word)
}

/// True if the memory of a stopped thread has the instruction `syscall` at an address.
pub fn is_system_call(thread: i32, address: u64) -> Result<bool> {
    word(thread, address).map(|code| code & 0xffff == 0x050f)
}

/// Writes a word of a stopped thread's memory.
pub fn set_word(thread: i32, address: u64, word: u64) -> Result<()> {
    request(libc::PTRACE_POKEDATA, thread, address as usize, word as usize)
}

/// If a stopped thread with these registers is within a restartable sequence, moves them to its
/// abort handler, as the kernel does when it resumes the thread. A thread may leave a sequence only
/// by its end or its abort handler.
pub fn abort_restartable_sequence(thread: i32, registers: &mut Registers) -> Result<()> {
    #[repr(C)]
    #[derive(Default)]
    struct Configuration {
        pointer: u64,
        size: u32,
        signature: u32,
        flags: u32,
        padding: u32,
    }
    let mut configuration = Configuration::default();
    let size = size_of::<Configuration>();
    match transfer(GET_RSEQ_CONFIGURATION, thread, size, &mut configuration) {
        // The kernel has no restartable sequences or, before 5.13, does not report them.
        Err(libc::EIO | libc::EINVAL) => return Ok(()),
        other => other?,
    };
    if configuration.pointer == 0 {
        return Ok(());
    }
    let sequence = word(thread, configuration.pointer + 8)?;
    if sequence == 0 {
        return Ok(());
    }
    // `struct rseq_cs`: version and flags, first address, length, abort handler. The kernel kills a
    // program whose pointer is invalid.
    let field = |offset| word(thread, sequence + offset);
    if let (Ok(start), Ok(length), Ok(abort_handler)) = (field(8), field(16), field(24))
        && registers.rip.wrapping_sub(start) < length
    {
        registers.rip = abort_handler;
    }
    Ok(())
}

/// True if system calls of a stopped thread are turned into signals
/// (`PR_SET_SYSCALL_USER_DISPATCH`).
pub fn dispatches_system_calls(thread: i32) -> bool {
    let mut configuration = [0u64; 4];
    let size = size_of_val(&configuration);
    transfer(GET_SYSCALL_USER_DISPATCH_CONFIG, thread, size, &mut configuration).is_ok() && configuration[0] != 0
}

/// Returns a change of a tracee's state, if there is any. A stop before a signal is returned until
/// the tracee is resumed.
pub fn poll(thread: i32) -> Result<Option<Stop>> {
    let status = match look(thread, libc::WNOHANG) {
        Ok(Seen::Nothing) => return Ok(None),
        Ok(Seen::Signal(signal)) => return Ok(Some(Stop::Signal(signal))),
        Ok(Seen::Other) => take(thread),
        Err(errno) => Err(errno),
    };
    Ok(match status {
        Ok(None) => None,
        Err(libc::ECHILD) => Some(Stop::Exited),
        Err(error) => return Err(error),
        Ok(Some(status)) if !libc::WIFSTOPPED(status) => Some(Stop::Exited),
        Ok(Some(status)) => Some(match (status >> 16, libc::WSTOPSIG(status)) {
            (libc::PTRACE_EVENT_STOP, _) => Stop::Trap,
            (0, signal) if signal == libc::SIGTRAP | 0x80 => Stop::SystemCall,
            (0, signal) => Stop::Signal(signal),
            (libc::PTRACE_EVENT_EXIT, _) => Stop::Exiting,
            _ => Stop::Event,
        }),
    })
}

/// Waits until a tracee changes its state. Fails with `ETIMEDOUT` at the deadline, if there is one.
pub fn wait(thread: i32, deadline: Option<Instant>) -> Result<Stop> {
    #[cfg(any(test, feature = "testing"))]
    deaths::pass();
    for tries in 0u32.. {
        if let Some(stop) = poll(thread)? {
            return Ok(stop);
        }
        if tries < QUICK_POLLS {
            // Most threads stop as soon as they are scheduled.
            std::thread::yield_now();
            continue;
        }
        if deadline.is_some_and(|deadline| Instant::now() > deadline) {
            return Err(libc::ETIMEDOUT);
        }
        if tries.is_multiple_of(POLLS_TO_LOOK) && has_exited(thread) {
            return Ok(poll(thread)?.unwrap_or(Stop::Exited));
        }
        // SAFETY: the time lives through the call, and no remainder is asked for.
        unsafe { libc::nanosleep(&POLL, std::ptr::null_mut()) };
    }
    Err(libc::ETIMEDOUT)
}

/// True if a thread has exited. The end of a main thread is reported only after its tracer has
/// waited for all other threads.
fn has_exited(thread: i32) -> bool {
    let proc = plain_proc::open_directory(c"/proc", libc::O_PATH);
    proc.is_ok_and(|proc| plain_proc::has_exited(proc.as_fd(), thread))
}

/// Waits until an interrupted thread has stopped where its registers may be changed, and delivers
/// signals that come first. False if the thread has exited instead, or does.
pub fn wait_trap(thread: i32, deadline: Option<Instant>) -> Result<bool> {
    loop {
        let signal = match wait(thread, deadline)? {
            Stop::Trap => return Ok(true),
            Stop::Exiting | Stop::Exited => return Ok(false),
            Stop::Signal(signal) => signal,
            Stop::SystemCall | Stop::Event => 0,
        };
        // Any stop takes the place of the one that was requested.
        match interrupt(thread).and_then(|()| resume(thread, Until::Event, signal)) {
            Ok(()) | Err(libc::ESRCH) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Makes a stopped thread, which has `original` registers, carry out a system call by the
/// instruction `syscall` at an address. Its signals are blocked. It is left stopped at the exit of
/// the call, until [`restore`]. Returns the result; None if the thread has exited, or does.
///
/// However long that takes: a thread that is released within the call would continue with registers
/// that are not its own.
pub fn system_call(
    thread: i32,
    instruction: u64,
    original: &Registers,
    number: i64,
    arguments: [u64; 6],
) -> Result<Option<i64>> {
    let [rdi, rsi, rdx, r10, r8, r9] = arguments;
    let registers = Registers {
        rip: instruction,
        rax: number as u64,
        // Marks the thread as outside of a system call, so that the kernel does not restart any.
        orig_rax: u64::MAX,
        rdi,
        rsi,
        rdx,
        r10,
        r8,
        r9,
        ..*original
    };
    set_registers(thread, &registers)?;
    for _ in ["entry", "exit"] {
        let mut signal = 0;
        loop {
            // Who is killed in a stop goes on to that of its exit.
            if is_exiting(thread) {
                return Ok(None);
            }
            resume(thread, Until::SystemCall, signal)?;
            signal = match wait(thread, None)? {
                Stop::SystemCall => break,
                Stop::Exiting | Stop::Exited => return Ok(None),
                // Only SIGSTOP cannot be blocked. It takes effect when the thread is detached.
                Stop::Signal(signal) => signal,
                Stop::Trap | Stop::Event => 0,
            };
        }
    }
    Ok(Some(self::registers(thread)?.rax as i64))
}

/// Restores the registers and the blocked signals of a thread after [`system_call`]. Fails with
/// `ESRCH` if the thread exits, and leaves it in its stop.
pub fn restore(thread: i32, original: &Registers, mask: u64) -> Result<()> {
    set_registers(thread, original)?;
    // After a stop of this kind, unlike a stop at the exit of a system call, the kernel restarts an
    // interrupted call.
    interrupt(thread)?;
    if is_exiting(thread) {
        return Err(libc::ESRCH);
    }
    resume(thread, Until::Event, 0)?;
    if !wait_trap(thread, None)? {
        return Err(libc::ESRCH);
    }
    set_registers(thread, original)?;
    set_signal_mask(thread, mask)
}

/// The time limit of a system call, in milliseconds, if the call returns EINTR after a stop without
/// a signal and can then simply be made again. 0: no limit, or a limit that is not shortened by
/// waiting again; `u64::MAX`: an unknown limit.
pub fn wait_limit_ms(registers: &Registers) -> Option<u64> {
    match registers.orig_rax as i64 {
        libc::SYS_epoll_wait | libc::SYS_epoll_pwait => Some(u64::try_from(registers.r10 as i32).unwrap_or(0)),
        libc::SYS_epoll_pwait2 | libc::SYS_semtimedop if registers.r10 == 0 => Some(0),
        libc::SYS_rt_sigtimedwait if registers.rdx == 0 => Some(0),
        libc::SYS_io_getevents if registers.r8 == 0 => Some(0),
        libc::SYS_semop => Some(0),
        libc::SYS_epoll_pwait2 | libc::SYS_semtimedop | libc::SYS_rt_sigtimedwait | libc::SYS_io_getevents => {
            Some(u64::MAX)
        }
        // Limited by SO_RCVTIMEO, whose value is unknown here.
        libc::SYS_recvfrom | libc::SYS_recvmsg | libc::SYS_accept | libc::SYS_accept4 | libc::SYS_read => {
            Some(u64::MAX)
        }
        _ => None,
    }
}

/// Some system calls return EINTR when a stop has interrupted them, although no signal was handled.
/// This changes the registers of the stopped thread so that the kernel makes the call again, unless
/// a handler of a signal runs first. The time limit of the call starts again, so a call whose limit
/// exceeds `limit_ms` is left alone. Returns whether the registers were changed.
pub fn restart_interrupted_call(registers: &mut Registers, limit_ms: u64) -> bool {
    let is_interrupted = registers.rax as i64 == -i64::from(libc::EINTR);
    let is_restarted = is_interrupted && wait_limit_ms(registers).is_some_and(|ms| ms <= limit_ms);
    if is_restarted {
        registers.rax = UNLESS_HANDLED as u64;
    }
    is_restarted
}

/// Result of a call that the kernel makes again, unless a handler of a signal runs first
/// (`ERESTARTNOHAND`).
const UNLESS_HANDLED: i64 = -514;

/// Result of a call that the kernel goes on with, with the time that is left
/// (`ERESTART_RESTARTBLOCK`).
pub const WITH_ITS_TIME: i64 = -516;

/// True for the results with which the kernel has a call made again that a stop has interrupted
/// (`ERESTARTSYS`, `ERESTARTNOINTR`, `ERESTARTNOHAND`, `ERESTART_RESTARTBLOCK`).
pub fn is_restarted(result: i64) -> bool {
    matches!(result, -512 | -513 | UNLESS_HANDLED | WITH_ITS_TIME)
}

/// The deadline of an operation that begins now and may take `time`.
pub fn deadline(time: Duration) -> Instant {
    Instant::now() + time
}

/// Kills the tracer between two of its requests, in tests.
#[cfg(any(test, feature = "testing"))]
pub mod deaths {
    use std::cell::Cell;

    thread_local! {
        /// Requests that are left until the death.
        static LEFT: Cell<u32> = const { Cell::new(u32::MAX) };
        /// Requests that are left until the signal, who gets it, and the signal.
        static SIGNAL: Cell<(u32, i32, i32)> = const { Cell::new((u32::MAX, 0, 0)) };
    }

    /// A process that this thread forks dies before its request of this number, from 0.
    pub fn before_request(number: u32) {
        LEFT.set(number);
    }

    /// A process that this thread forks sends a signal before its request of this number, from 0.
    pub fn signal_before_request(number: u32, pid: i32, signal: i32) {
        SIGNAL.set((number, pid, signal));
    }

    pub(super) fn pass() {
        match SIGNAL.get() {
            (u32::MAX, ..) => {}
            (0, pid, signal) => {
                SIGNAL.set((u32::MAX, 0, 0));
                // SAFETY: a signal to a process of the test.
                unsafe { libc::kill(pid, signal) };
            }
            (left, pid, signal) => SIGNAL.set((left - 1, pid, signal)),
        }
        match LEFT.get() {
            u32::MAX => {}
            // SAFETY: a signal to this process.
            0 => drop(unsafe { libc::kill(libc::getpid(), libc::SIGKILL) }),
            left => LEFT.set(left - 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_killed_main_thread_whose_other_threads_are_traced_has_exited() {
        let threads = "import threading, time\n\
                       for _ in range(3): threading.Thread(target=time.sleep, args=(1000,)).start()\n\
                       time.sleep(1000)";
        let Ok(mut child) = std::process::Command::new("python3").args(["-c", threads]).spawn() else {
            return pagemark_testing::skipped("there is no python3");
        };
        let pid = child.id() as i32;
        let all = || crate::proc::threads(pid).unwrap();
        pagemark_testing::wait_until("its threads", || all().len() == 4);
        for thread in all() {
            seize(thread, 0).unwrap();
        }
        child.kill().unwrap();
        assert!(matches!(wait(pid, None), Ok(Stop::Exited)));
        for thread in all() {
            while poll(thread).is_ok_and(|stop| stop.is_none()) && thread != pid {}
        }
        assert!(!child.wait().is_ok_and(|status| status.success()));
    }

    /// Who is resumed from there releases its own tracees.
    #[test]
    fn a_thread_that_is_killed_in_a_stop_is_left_at_its_exit() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id() as i32;
        seize(pid, TRACE_EXIT | TRACE_SYSGOOD).unwrap();
        interrupt(pid).unwrap();
        assert_eq!(wait_trap(pid, None), Ok(true));
        let (original, mask) = (registers(pid).unwrap(), signal_mask(pid).unwrap());
        child.kill().unwrap();
        pagemark_testing::wait_until("the stop at its exit", || is_exiting(pid));
        assert_eq!(system_call(pid, original.rip, &original, libc::SYS_getpid, [0; 6]), Ok(None));
        assert!(is_exiting(pid));
        assert_eq!(restore(pid, &original, mask), Err(libc::ESRCH));
        assert!(is_exiting(pid));
        assert_eq!(wait(pid, None), Ok(Stop::Exiting));
        resume(pid, Until::Event, 0).unwrap();
        assert!(!child.wait().unwrap().success());
    }

    /// Has another process seize a child, see its stop before a signal, and end.
    fn end_at_stop(sees: fn(i32) -> bool) {
        use std::io::Read;
        use std::os::unix::process::ExitStatusExt;
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id() as i32;
        let (mut reader, writer) = std::io::pipe().unwrap();
        // SAFETY: the child makes only system calls, and ends by `_exit`.
        let tracer = match unsafe { libc::fork() } {
            0 => {
                let is_seized = seize(pid, TRACE_EXIT | TRACE_SYSGOOD).is_ok();
                // SAFETY: the byte is constant.
                unsafe { libc::write(std::os::fd::AsRawFd::as_raw_fd(&writer), c"x".as_ptr().cast(), 1) };
                let has_seen = is_seized && sees(pid);
                // SAFETY: it ends the process.
                unsafe { libc::_exit(i32::from(!has_seen)) }
            }
            tracer => tracer,
        };
        reader.read_exact(&mut [0]).unwrap();
        let mut status = 0;
        // SAFETY: a signal to a child that was not waited for; the kernel writes to the integer, which lives
        // through the call.
        let ended = unsafe {
            libc::kill(pid, libc::SIGUSR1);
            libc::waitpid(tracer, &mut status, 0)
        };
        assert_eq!((ended, status), (tracer, 0), "it has seen something else");
        let ended = pagemark_testing::wait_for("the end by the signal", || child.try_wait().unwrap());
        assert_eq!(ended.signal(), Some(libc::SIGUSR1));
    }

    #[test]
    fn a_tracer_that_dies_at_a_stop_before_a_signal_does_not_lose_the_signal() {
        end_at_stop(|pid| wait(pid, None) == Ok(Stop::Signal(libc::SIGUSR1)));
        end_at_stop(|pid| {
            wait_status(pid).is_ok_and(|seen| seen.is_some_and(|seen| libc::WSTOPSIG(seen) == libc::SIGUSR1))
        });
    }

    #[test]
    fn stops_before_signals_are_told_from_others() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id() as i32;
        seize(pid, TRACE_EXIT | TRACE_SYSGOOD).unwrap();
        for signal in [libc::SIGTRAP, libc::SIGRTMAX(), libc::SIGSTOP] {
            // SAFETY: a signal to a child that was not waited for.
            unsafe { libc::kill(pid, signal) };
            // The kernel reports it until the child is resumed.
            assert_eq!([(); 3].map(|()| wait(pid, None)), [Ok(Stop::Signal(signal)); 3]);
            resume(pid, Until::Event, if signal == libc::SIGSTOP { signal } else { 0 }).unwrap();
        }
        // Stopped by job control, with the number of the signal.
        assert_eq!(wait(pid, None), Ok(Stop::Trap));
        assert_eq!(is_in_group_stop(pid), Ok(true));
        assert_eq!(poll(pid), Ok(None));
        resume(pid, Until::SystemCall, 0).unwrap();
        assert_eq!(wait(pid, None), Ok(Stop::SystemCall));
        child.kill().unwrap();
        assert_eq!(wait(pid, None), Ok(Stop::Exiting));
        resume(pid, Until::Event, 0).unwrap();
        assert!(!child.wait().unwrap().success());
    }
}
