//! Keeps a thread from dying of CRIU's code when CRIU releases it.
//!
//! The code by which CRIU makes a thread work for it ends by the instruction `int3`, or is followed
//! to a breakpoint. If the thread stops for another reason, such as SIGCONT, CRIU takes that stop
//! for the end, gives up, restores the registers, and releases the thread. If the thread had
//! reached `int3`, the SIGTRAP of that instruction is still pending, and ends the program; if it
//! had not reached the breakpoint, the breakpoint does.
//!
//! CRIU submits each request that releases a thread (PTRACE_DETACH). A thread that CRIU must not
//! release as it is shows by its pending or its blocked signals. Pagemark then interrupts the
//! request by SIGURG, which CRIU ignores. The guard, which traces CRIU, makes CRIU resume the
//! thread up to the delivery of SIGTRAP, before which the thread executes no instruction, or
//! disable the breakpoints. Then CRIU makes its request again, which drops the signal.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pagemark_linux::proc::{self, Fields, Status};
use pagemark_linux::ptrace::{self, Registers};

use super::injected::{BLOCKED_BY_CRIU, bit, code_of_criu};
use super::job_stops::unreported;
use super::memory_copies::REQUEST;
use super::notify::{Call, DETACH, Listener};

/// Pause between two looks at a thread, or at CRIU.
const POLL: Duration = Duration::from_micros(200);
/// How long the guard may take, which resumes a thread for some microseconds.
const LIMIT: Duration = Duration::from_secs(2);
/// Stops of a thread before it takes its SIGTRAP. Each SIGCONT makes one.
const MAX_STOPS: usize = 100;
/// Distance from CRIU's stack pointer of memory that CRIU does not use, bytes.
const UNUSED_STACK: u64 = 4096;

/// The threads that CRIU was not to release as they were.
#[derive(Debug, Default)]
pub(super) struct Releases {
    interrupted: HashSet<i32>,
}

impl Releases {
    /// CRIU is about to release a thread. If it must not, has the guard change that, and interrupts
    /// the call, which CRIU then makes again.
    pub fn releasing(&mut self, call: &Call, listener: &Listener) {
        let (criu_pid, thread) = (call.pid as i32, call.arguments[1] as i32);
        if Danger::of(thread).is_none() || !self.interrupted.insert(thread) || !listener.is_valid(call) {
            return;
        }
        // CRIU waits for an answer, so the id is its own.
        if kill(Pid::from_raw(criu_pid), Signal::SIGURG).is_err() {
            return;
        }
        // Without a guard, the signal interrupts nothing that matters.
        let begin = Instant::now();
        while listener.is_valid(call) && begin.elapsed() < LIMIT {
            std::thread::sleep(POLL);
        }
    }
}

/// Why a thread must not be released as it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Danger {
    /// The SIGTRAP of CRIU's code is pending.
    Trap,
    /// The thread is in CRIU's code, before a breakpoint.
    Breakpoint,
}

impl Danger {
    fn of(thread: i32) -> Option<Danger> {
        if has_trap(thread) {
            return Some(Danger::Trap);
        }
        let status = Status::read(thread).ok()?;
        if status.blocked_signals != BLOCKED_BY_CRIU {
            return None;
        }
        let address = proc::next_instruction(thread)?;
        code_of_criu(status.process_id).iter().any(|code| code.contains(&address)).then_some(Danger::Breakpoint)
    }
}

/// True if SIGTRAP is pending for a thread, and not only for its process.
fn has_trap(thread: i32) -> bool {
    let status = Fields::read(proc::path(thread, "status")).ok();
    status.and_then(|status| status.in_base("SigPnd", 16)).is_some_and(|pending| pending & bit(libc::SIGTRAP) != 0)
}

/// If CRIU, which has stopped before a signal, is about to release a thread, changes what would end
/// the program. True if CRIU is not to get the signal.
pub(super) fn take_signal(criu_pid: i32, signal: i32) -> bool {
    if signal != REQUEST {
        return false;
    }
    let Ok(original) = ptrace::registers(criu_pid) else { return false };
    if original.orig_rax as i64 != libc::SYS_ptrace || original.rdi != u64::from(DETACH) {
        return false;
    }
    let thread = original.rsi as i32;
    if let Some(danger) = Danger::of(thread) {
        // What fails leaves CRIU with its request.
        let _ = Requests::begin(criu_pid, original).and_then(|requests| {
            let result = match danger {
                Danger::Trap => requests.take_trap(thread),
                Danger::Breakpoint => requests.make(libc::PTRACE_POKEUSER, thread, ptrace::DEBUG_CONTROL as u64, 0),
            };
            requests.end()?;
            result
        });
    }
    true
}

/// Makes CRIU, which is stopped, make requests of `ptrace`.
struct Requests {
    criu_pid: i32,
    original: Registers,
    mask: u64,
    instruction: u64,
}

impl Requests {
    fn begin(criu_pid: i32, original: Registers) -> Option<Requests> {
        let instruction = original.rip.checked_sub(ptrace::SYSCALL_BYTES)?;
        if !ptrace::is_system_call(criu_pid, instruction).ok()? {
            return None;
        }
        let mask = ptrace::signal_mask(criu_pid).ok()?;
        ptrace::set_signal_mask(criu_pid, u64::MAX).ok()?;
        Some(Requests { criu_pid, original, mask, instruction })
    }

    fn make(&self, request: libc::c_uint, thread: i32, address: u64, data: u64) -> Option<()> {
        let arguments = [u64::from(request), thread as u64, address, data, 0, 0];
        let result = ptrace::system_call(self.criu_pid, self.instruction, &self.original, libc::SYS_ptrace, arguments);
        (result == Ok(Some(0))).then_some(())
    }

    /// Has a thread take its SIGTRAP up to the stop before the delivery.
    fn take_trap(&self, thread: i32) -> Option<()> {
        let blocked = Status::read(thread).ok()?.blocked_signals;
        if blocked & bit(libc::SIGTRAP) != 0 {
            self.set_blocked(thread, blocked & !bit(libc::SIGTRAP))?;
        }
        let deadline = Instant::now() + LIMIT;
        let mut is_taken = false;
        for _ in 0..MAX_STOPS {
            self.make(libc::PTRACE_CONT, thread, 0, 0)?;
            while unreported(thread)? == 0 && Instant::now() < deadline {
                std::thread::sleep(POLL);
            }
            is_taken = unreported(thread)? == libc::SIGTRAP as u64;
            if is_taken || !has_trap(thread) {
                break;
            }
        }
        if blocked & bit(libc::SIGTRAP) != 0 {
            self.set_blocked(thread, blocked)?;
        }
        is_taken.then_some(())
    }

    fn set_blocked(&self, thread: i32, blocked: u64) -> Option<()> {
        use std::os::unix::fs::FileExt;
        let address = (self.original.rsp & !7).checked_sub(UNUSED_STACK)?;
        let memory = proc::open_memory_for_writing(self.criu_pid).ok()?;
        memory.write_all_at(&blocked.to_ne_bytes(), address).ok()?;
        self.make(ptrace::SET_SIGNAL_MASK as libc::c_uint, thread, size_of_val(&blocked) as u64, address)
    }

    /// CRIU then makes the interrupted call again.
    fn end(&self) -> Option<()> {
        ptrace::restore(self.criu_pid, &self.original, self.mask).ok()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use nix::sys::wait::waitpid;
    use pagemark_linux::helper;
    use pagemark_linux::ptrace::{Stop, Until};
    use pagemark_testing::wait_until;

    use super::super::notify::{self, Answer, SubmittedCalls};
    use super::*;

    /// A process that is killed at the end of the test.
    struct Target(Pid);

    impl Drop for Target {
        fn drop(&mut self) {
            let _ = kill(self.0, Signal::SIGKILL);
            let _ = waitpid(self.0, None);
        }
    }

    /// A process with a pending SIGTRAP of the kernel's kind, which it blocks.
    fn trapped() -> Target {
        // SAFETY: the process makes only system calls.
        let pid = unsafe {
            helper::start(|| {
                let mut set: libc::sigset_t = std::mem::zeroed();
                libc::sigaddset(&mut set, libc::SIGTRAP);
                libc::sigprocmask(libc::SIG_SETMASK, &raw const set, std::ptr::null_mut());
                let mut info: libc::siginfo_t = std::mem::zeroed();
                info.si_signo = libc::SIGTRAP;
                info.si_code = 0x80;
                let pid = libc::getpid();
                libc::syscall(libc::SYS_rt_tgsigqueueinfo, pid, pid, libc::SIGTRAP, &raw const info);
                loop {
                    libc::pause();
                }
            })
        };
        let target = Target(pid.unwrap());
        wait_until("its signal", || has_trap(target.0.as_raw()));
        target
    }

    /// A process that attaches to a thread as CRIU does, and releases it with these signals
    /// blocked.
    /// It submits its calls to the socket, and begins when it gets a byte.
    fn releases(thread: i32, blocked: u64, socket: &UnixStream) -> Pid {
        let calls =
            SubmittedCalls { limits: false, files: false, mappings: false, registers: false, data: false, stops: true };
        let mut filter = notify::filter(calls, &[]);
        let socket = socket.as_raw_fd();
        let mut work = move || {
            let mut byte = 0_u8;
            // SAFETY: the buffer and the set, for which zeros are valid, live through the calls.
            unsafe {
                let none: libc::sigset_t = std::mem::zeroed();
                libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
                libc::read(socket, (&raw mut byte).cast(), 1);
            }
            notify::submit(socket, &mut filter).ok()?;
            ptrace::seize(thread, 0).ok()?;
            ptrace::interrupt(thread).ok()?;
            (ptrace::wait(thread, None) == Ok(Stop::Trap)).then_some(())?;
            ptrace::set_signal_mask(thread, blocked).ok()?;
            ptrace::detach(thread).ok()
        };
        // SAFETY: the process makes only system calls.
        unsafe { helper::start(|| i32::from(work().is_none())) }.unwrap()
    }

    /// Answers all calls, as Pagemark does.
    fn answer(socket: &UnixStream) {
        let mut listener = None;
        wait_until("the listener", || {
            listener = Listener::receive(socket).unwrap();
            listener.is_some()
        });
        let (listener, mut releases) = (listener.unwrap(), Releases::default());
        loop {
            let mut fds = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
            poll(&mut fds, PollTimeout::NONE).unwrap();
            if !fds[0].revents().unwrap().contains(PollFlags::POLLIN) {
                return;
            }
            let Some(call) = listener.next().unwrap() else { continue };
            if call.arguments[0] == u64::from(DETACH) {
                releases.releasing(&call, &listener);
            }
            listener.answer(&call, Answer::Continue).unwrap();
        }
    }

    /// Traces a process as the guard does, until it ends, and returns its status.
    fn guard(pid: i32, ready: &UnixStream) -> i32 {
        use std::io::Write;
        ptrace::seize(pid, ptrace::TRACE_EXIT | ptrace::TRACE_SYSGOOD).unwrap();
        (&mut &*ready).write_all(&[0]).unwrap();
        let mut exit_status = -1;
        while let Some(status) = ptrace::wait_status(pid).unwrap() {
            let signal = if status >> 16 == 0 { libc::WSTOPSIG(status) } else { 0 };
            if status >> 16 == libc::PTRACE_EVENT_EXIT {
                exit_status = ptrace::event_message(pid).unwrap() as i32;
            }
            let is_taken = signal != 0 && take_signal(pid, signal);
            ptrace::resume(pid, Until::Event, if is_taken { 0 } else { signal }).unwrap();
        }
        exit_status
    }

    fn is_released_without_its_trap(blocked: u64) {
        let target = trapped();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let pid = target.0.as_raw();
        let tracer = releases(pid, blocked, &theirs);
        let (for_guard, for_answers) = (ours.try_clone().unwrap(), ours);
        std::thread::scope(|scope| {
            let guard = scope.spawn(move || guard(tracer.as_raw(), &for_guard));
            answer(&for_answers);
            assert_eq!(guard.join().unwrap(), 0, "the tracer has released the process");
        });
        // A process that dies of the signal does it at once.
        std::thread::sleep(Duration::from_millis(20));
        let status = Status::read(pid).unwrap();
        assert_eq!((status.state, status.tracer_pid), ('S', 0));
        assert_eq!((status.blocked_signals, has_trap(pid)), (blocked, false));
    }

    #[test]
    fn the_trap_of_criu_does_not_end_the_program() {
        is_released_without_its_trap(0);
    }

    #[test]
    fn the_trap_of_criu_does_not_stay_where_it_is_blocked() {
        is_released_without_its_trap(bit(libc::SIGTRAP) | bit(libc::SIGUSR1));
    }
}
