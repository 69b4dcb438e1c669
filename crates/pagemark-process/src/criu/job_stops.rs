//! What job control has done to a process that is traced.
//!
//! The kernel does not say of a process whose threads a tracer has stopped whether job control has
//! stopped it, too. It shows by the signals that are pending, and by the signal that has stopped a
//! thread, or the process.
//!
//! SIGCONT takes effect when it is sent. Of a process that is traced, it then stays pending until a
//! thread takes it, or until a stop signal comes, which removes it. So whoever sends a stop signal
//! can lose what it has to know. In one case it shows afterwards: of a thread that its tracer holds
//! in a stop and never resumes, and that was sent SIGSTOP there. Once the tracer is gone, a thread
//! whose process was stopped before stops without taking the signal, which stays pending; another
//! one stops by taking it.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use pagemark_linux::proc::{self, Fields, Status, stat};
use pagemark_linux::ptrace;

use super::injected::bit;

/// Field of the file `stat`: what `wait` returns for the last change.
const EXIT_CODE: usize = 52;

/// Pause between two looks at a process that is about to stop.
const POLL: Duration = Duration::from_micros(200);

/// The signals by which job control stops.
const STOP_SIGNALS: [i32; 4] = [libc::SIGSTOP, libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU];

/// What `wait` will return for the stop of a thread, without the lowest byte. 0 if somebody has
/// waited for it.
pub(super) fn unreported(thread: i32) -> Option<u64> {
    // The file of the process has the signal that stopped the process there.
    exit_code(proc::path(thread, &format!("task/{thread}/stat")))
}

fn exit_code(path: PathBuf) -> Option<u64> {
    stat::number(&std::fs::read(path).ok()?, EXIT_CODE)
}

/// True if SIGCONT has come to a process that is traced, which has not taken it yet, or of which a
/// thread has stopped before it.
pub(super) fn is_continued(pid: i32) -> bool {
    let is_pending = Status::read(pid).is_ok_and(|status| status.pending_signals & bit(libc::SIGCONT) != 0);
    is_pending || unreported(pid) == Some(libc::SIGCONT as u64)
}

/// True if job control has stopped a process whose tracer does not run now: the kernel stops the
/// process again when the tracer releases it. False also where that cannot be known, because the
/// parent of the process has waited for the stop.
pub(super) fn is_stopped(pid: i32) -> bool {
    let of_process = exit_code(proc::path(pid, "stat"));
    let is_stop = STOP_SIGNALS.into_iter().any(|signal| of_process == Some(signal as u64));
    // Without a stop of the process both are those of the thread.
    is_stop && of_process != unreported(pid)
}

/// True if a thread has SIGSTOP pending in a stop in which a tracer holds it.
pub(super) fn is_held_before_stop(thread: i32) -> bool {
    state_before_stop(thread) == Some('t')
}

/// True if job control had stopped the process of these threads, all that were traced, when they
/// were sent SIGSTOP. All were [held then](is_held_before_stop), by a tracer that is gone. This
/// process has stopped them since.
pub(super) fn was_stopped_before(threads: &[i32]) -> bool {
    // A thread that takes its signal stops the others, too.
    threads.iter().all(|&thread| ptrace::is_in_group_stop(thread) == Ok(true) && is_held_before_stop(thread))
}

/// True if a process that is not traced, and that was sent SIGSTOP by its first thread, was stopped
/// before: then it does not take the signal. Waits until it has stopped, but not beyond `deadline`.
pub(super) fn stays_stopped(pid: i32, deadline: Instant) -> bool {
    loop {
        match state_before_stop(pid) {
            Some('T') => return true,
            Some(_) if Instant::now() < deadline => std::thread::sleep(POLL),
            _ => return false,
        }
    }
}

/// The state of a thread for which SIGSTOP is pending, and not only for its process. None if it is
/// not, or there is no such thread.
fn state_before_stop(thread: i32) -> Option<char> {
    let status = Fields::read(proc::path(thread, "status")).ok()?;
    let is_pending = status.in_base("SigPnd", 16)? & bit(libc::SIGSTOP) != 0;
    status.get("State")?.chars().next().filter(|_| is_pending)
}
