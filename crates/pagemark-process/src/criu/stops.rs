//! Keeps a dump from stopping a process again that has been continued, and from losing a signal of
//! a stopped one.
//!
//! CRIU lets a process that job control has stopped run its code, and sends the process the stop
//! signal again at the end of the dump. If SIGCONT came during the dump, the process would stay
//! stopped. If it did not, the kernel stops the process by itself when CRIU detaches; the signal
//! stays pending, and the next dump counts it. For each stop signal that it counts, CRIU resumes
//! the process and drops the signal that stops the process next, be it another one. So these stop
//! signals are not sent:
//!
//! * to a process that was stopped when CRIU attached to it, or is stopped, as far as that can be
//!   known;
//! * to a process that has SIGCONT pending. The kernel keeps this signal pending for a process that
//!   is traced, and removes it when a stop signal comes later.
//!
//! What is left is a stop signal that the process had not taken when CRIU attached. To make this
//! rare, CRIU attaches to a process when it has taken its stop signals. It is sent in CRIU's place
//! as soon as that is decided: on a busy machine, CRIU would send it much later, and a SIGCONT that
//! came meanwhile would be lost.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pagemark_linux::proc::Status;

use super::injected::bit;
use super::job_stops;

/// How long an attach waits for a process to take its stop signals. A process that waits for a
/// disk takes none.
const TAKING_LIMIT: Duration = Duration::from_millis(20);

/// Pause between two looks at the pending signals.
const POLL: Duration = Duration::from_micros(200);

/// The stops of a tree that is being dumped.
#[derive(Debug, Default)]
pub(super) struct Stops {
    /// Processes that job control had stopped when CRIU attached to one of their threads.
    stopped: HashSet<i32>,
}

impl Stops {
    /// CRIU is about to attach to a thread.
    pub fn attaching(&mut self, thread: i32) {
        let begin = Instant::now();
        while let Ok(status) = Status::read(thread) {
            if status.state == 'T' {
                self.stopped.insert(status.process_id);
                return;
            }
            let untaken = status.pending_signals & !status.blocked_signals;
            if untaken & STOP_SIGNALS == 0 || begin.elapsed() > TAKING_LIMIT {
                return;
            }
            std::thread::sleep(POLL);
        }
    }

    /// Sends a stop signal to a process that CRIU traces and is about to release, unless that would
    /// stop the process against the will of its user. Returns the result of CRIU's call. None for
    /// another process, to which the kernel sends it: CRIU has children that stop themselves, and
    /// would make the call again if they were stopped in it.
    pub fn send(&self, criu_pid: i32, pid: i32, signal: i32) -> Option<i64> {
        if Status::read(pid).ok()?.tracer_pid != criu_pid {
            return None;
        }
        if self.stopped.contains(&pid) || job_stops::is_stopped(pid) || job_stops::is_continued(pid) {
            return Some(0);
        }
        let sent = Signal::try_from(signal).and_then(|signal| kill(Pid::from_raw(pid), signal));
        Some(sent.map_or_else(|errno| -i64::from(errno as i32), |()| 0))
    }
}

/// The stop signals that CRIU knows.
const STOP_SIGNALS: u64 = bit(libc::SIGSTOP) | bit(libc::SIGTSTP);
