//! Keeps signals that Pagemark forwards out of checkpoints.
//!
//! A signal that arrives in a freeze is pending in the state that is saved. If it ends the program,
//! it ends the restored program too, each time. It is therefore forwarded after the freeze. Neither
//! does a freeze begin between the sending of a signal and its delivery.

use std::collections::HashSet;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pagemark_linux::proc::{Process, Status, tree};
use pagemark_trace::error::Result;
use pagemark_trace::inject::memory_copy::MemoryCopy;
use pagemark_trace::objects::ObjectId;
use pagemark_trace::space::AddressSpace;

use super::{FrozenState, Meanwhile, ResumedTree, StateSaver};
use crate::terminal::Input;

/// A signal is forwarded after this time even if the freeze goes on: a saver that does not answer
/// must not keep a program from being ended.
const FREEZE_LIMIT: Duration = Duration::from_secs(5);

/// Limit of the time that a freeze waits for a signal to be delivered. A stopped process takes
/// none.
const DELIVERY_LIMIT: Duration = Duration::from_millis(200);

/// Pause between two polls of the pending signals.
const POLL: Duration = Duration::from_micros(500);

/// Orders the freezes of a process tree and the signals that are forwarded to the tree.
#[derive(Clone, Default)]
pub struct SignalGate {
    shared: Arc<(Mutex<State>, Condvar)>,
    /// Keys of the terminal send signals, too.
    input: Option<Input>,
}

#[derive(Default)]
struct State {
    is_freezing: bool,
    /// Signals that wait or are being delivered.
    signals: u32,
}

impl SignalGate {
    /// A gate that is open.
    pub fn new() -> SignalGate {
        SignalGate::default()
    }

    /// A gate that also holds back what the user types at a terminal.
    pub fn with_input(input: Input) -> SignalGate {
        SignalGate { input: Some(input), ..SignalGate::default() }
    }

    /// The saver, with freezes that pass this gate.
    pub fn saver(&self, saver: Arc<dyn StateSaver>) -> Arc<dyn StateSaver> {
        Arc::new(GatedSaver { saver, gate: self.clone() })
    }

    /// Calls `send`, which sends a signal with this number to processes below `root_pid`, outside
    /// of freezes. Returns what `send` returns when the signal is delivered, or after 200 ms.
    pub fn forward<T>(&self, root_pid: i32, signal: i32, send: impl FnOnce() -> T) -> T {
        let (_, changed) = &*self.shared;
        let mut state = self.lock();
        state.signals += 1;
        let waited = changed.wait_timeout_while(state, FREEZE_LIMIT, |state| state.is_freezing);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        let result = send();
        let deadline = Instant::now() + DELIVERY_LIMIT;
        while Instant::now() < deadline && is_pending(root_pid, signal) {
            std::thread::sleep(POLL);
        }
        self.lock().signals -= 1;
        changed.notify_all();
        result
    }

    /// Waits until signals that were sent are delivered, and holds later signals back.
    fn close(&self) -> Closed {
        if let Some(input) = &self.input {
            input.hold();
        }
        let (_, changed) = &*self.shared;
        let state = self.lock();
        let mut state = changed.wait_while(state, |state| state.signals > 0).unwrap_or_else(PoisonError::into_inner);
        state.is_freezing = true;
        Closed { gate: self.clone() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// True if a process of the tree has the signal pending and does not block it.
fn is_pending(root_pid: i32, signal: i32) -> bool {
    let members = tree::members(root_pid).unwrap_or_default();
    members.iter().any(|member| {
        Status::read(member.process.pid).is_ok_and(|status| {
            let taken = status.pending_signals & !status.blocked_signals;
            !status.is_dead() && taken >> (signal - 1) & 1 == 1
        })
    })
}

/// A gate that holds signals back. Dropped, the gate is open.
struct Closed {
    gate: SignalGate,
}

impl Drop for Closed {
    fn drop(&mut self) {
        self.gate.lock().is_freezing = false;
        self.gate.shared.1.notify_all();
        if let Some(input) = &self.gate.input {
            input.pass();
        }
    }
}

struct GatedSaver {
    saver: Arc<dyn StateSaver>,
    gate: SignalGate,
}

impl StateSaver for GatedSaver {
    fn is_restorable(&self) -> bool {
        self.saver.is_restorable()
    }

    fn check(&self, root: Process) -> Result<()> {
        self.saver.check(root)
    }

    fn leaves_objects_out(&self, pids: &[i32]) -> bool {
        self.saver.leaves_objects_out(pids)
    }

    fn gives_up_machines(&self) -> bool {
        self.saver.gives_up_machines()
    }

    fn take_notices(&self) -> Vec<String> {
        self.saver.take_notices()
    }

    fn freeze(
        &self,
        root: Process,
        objects: &HashSet<ObjectId>,
        meanwhile: Meanwhile<'_>,
    ) -> Result<Box<dyn FrozenState>> {
        let closed = self.gate.close();
        let frozen = self.saver.freeze(root, objects, meanwhile)?;
        Ok(Box::new(GatedState { frozen, _closed: closed }))
    }
}

struct GatedState {
    // Dropped first: the tree resumes before signals are forwarded.
    frozen: Box<dyn FrozenState>,
    _closed: Closed,
}

impl FrozenState for GatedState {
    fn copy_memory(&self, pid: i32) -> Result<Option<MemoryCopy>> {
        self.frozen.copy_memory(pid)
    }

    fn thaw(self: Box<Self>, spaces: &[&AddressSpace]) -> Result<ResumedTree> {
        let GatedState { frozen, _closed } = *self;
        frozen.thaw(spaces)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;
    use std::sync::atomic::{AtomicBool, Ordering};

    use nix::sys::signal::{Signal, kill};
    use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
    use nix::unistd::Pid;

    use super::*;

    #[test]
    fn a_signal_waits_for_the_end_of_a_freeze() {
        let gate = SignalGate::new();
        let is_open = AtomicBool::new(false);
        let closed = gate.close();
        std::thread::scope(|scope| {
            let was_open = scope.spawn(|| gate.forward(i32::MAX, 1, || is_open.load(Ordering::SeqCst)));
            while gate.lock().signals == 0 {
                std::thread::yield_now();
            }
            is_open.store(true, Ordering::SeqCst);
            drop(closed);
            assert!(was_open.join().unwrap(), "the signal was sent in the freeze");
        });
        drop(gate.close());
    }

    #[test]
    fn a_freeze_waits_for_the_delivery_of_a_signal() {
        let gate = SignalGate::new();
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = Pid::from_raw(child.id() as i32);
        // A stopped process has the signal pending until it is resumed.
        kill(pid, Signal::SIGSTOP).unwrap();
        let stopped = waitpid(pid, Some(WaitPidFlag::WUNTRACED)).unwrap();
        assert_eq!(stopped, WaitStatus::Stopped(pid, Signal::SIGSTOP));
        let begin = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| gate.forward(pid.as_raw(), Signal::SIGTERM as i32, || kill(pid, Signal::SIGTERM).unwrap()));
            while gate.lock().signals == 0 {
                std::thread::yield_now();
            }
            drop(gate.close());
        });
        assert!(begin.elapsed() >= DELIVERY_LIMIT, "the freeze did not wait");
        assert!(is_pending(pid.as_raw(), Signal::SIGTERM as i32));
        kill(pid, Signal::SIGCONT).unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(Signal::SIGTERM as i32));
    }
}
