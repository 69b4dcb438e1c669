//! The reports of tracees that exit while their tracer waits for another thread of their process.
//!
//! A thread that executes a program ends all other threads of its process, and waits in `execve`
//! until their tracers have taken the reports of their exits. Meanwhile the kernel lets nobody
//! attach to that thread (`cred_guard_mutex`), and it does not stop. A tracer that has attached to
//! some of the threads, and then attaches to this one or waits for its stop, would wait for ever.
//!
//! `PTRACE_SEIZE` does wait for ever there, but handles signals. So a timer's signal takes the
//! reports.

use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

use crate::ptrace;

/// How often the reports are taken. The signal also has an attach begin anew that waits for an
/// `execve` of a process without other threads, which takes some milliseconds.
const PERIOD: Duration = Duration::from_millis(200);

/// The threads that this process has attached to since an [`ExitReports`] was made. A process that
/// has more than these waits for the reports of the others as before.
static TRACED: [AtomicI32; 1 << 16] = [const { AtomicI32::new(0) }; 1 << 16];
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// This process has attached to a thread.
pub(crate) fn attached(thread: i32) {
    if let Some(entry) = TRACED.get(COUNT.load(Ordering::Relaxed)) {
        entry.store(thread, Ordering::Relaxed);
        COUNT.fetch_add(1, Ordering::Release);
    }
}

/// While this exists, the reports of the exits of threads to which this process attaches are taken
/// as they come. To the functions of [`ptrace`], such a thread has exited.
///
/// Only for a process that was forked to trace others: it must have one thread, and not use
/// SIGALRM.
#[derive(Debug)]
pub struct ExitReports(());

impl ExitReports {
    /// Begins to take the reports. Does not allocate.
    ///
    /// # Errors
    /// Those of `sigaction`, `setitimer` and `sigprocmask`, which do not fail on Linux.
    pub fn take() -> nix::Result<ExitReports> {
        COUNT.store(0, Ordering::Relaxed);
        let action = SigAction::new(SigHandler::Handler(take_all), SaFlags::SA_RESTART, SigSet::empty());
        // SAFETY: the handler makes only system calls.
        unsafe { sigaction(Signal::SIGALRM, &action)? };
        set_timer(PERIOD)?;
        SigSet::from(Signal::SIGALRM).thread_unblock()?;
        Ok(ExitReports(()))
    }
}

impl Drop for ExitReports {
    fn drop(&mut self) {
        // Neither fails with such arguments.
        let _ = set_timer(Duration::ZERO);
        let _ = SigSet::from(Signal::SIGALRM).thread_block();
    }
}

fn set_timer(period: Duration) -> nix::Result<()> {
    let every = libc::timeval { tv_sec: 0, tv_usec: i64::from(period.subsec_micros()) };
    let timer = libc::itimerval { it_interval: every, it_value: every };
    // SAFETY: the value lives through the call, and the old one is not asked for.
    Errno::result(unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut()) }).map(drop)
}

extern "C" fn take_all(_: libc::c_int) {
    let errno = ptrace::errno();
    let count = COUNT.load(Ordering::Acquire).min(TRACED.len());
    for entry in &TRACED[..count] {
        let thread = entry.load(Ordering::Relaxed);
        if thread != 0 && take_one(thread) {
            entry.store(0, Ordering::Relaxed);
        }
    }
    // SAFETY: the location is this thread's own and always valid.
    unsafe { *libc::__errno_location() = errno };
}

/// Takes the report of the exit of a tracee. True if the thread is not traced any more. A stop of
/// a tracee would be taken, too, whatever the options say, so the report is looked at first.
fn take_one(thread: i32) -> bool {
    let report = |options| {
        // SAFETY: zeros are a valid value, and the kernel writes to it during the call.
        unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let options = libc::WEXITED | libc::WNOHANG | libc::__WALL | options;
            let result = libc::waitid(libc::P_PID, thread as libc::id_t, &raw mut info, options);
            (result, info.si_pid(), info.si_code)
        }
    };
    let (result, pid, code) = report(libc::WNOWAIT);
    let has_exited = pid != 0 && [libc::CLD_EXITED, libc::CLD_KILLED, libc::CLD_DUMPED].contains(&code);
    if result == 0 && has_exited {
        report(0);
    }
    result != 0 || has_exited
}
