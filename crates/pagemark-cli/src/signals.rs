//! Signals that Pagemark gets while it has a target: passed on, or a reason to end.

use std::sync::mpsc::Sender;
use std::thread;

use nix::errno::Errno;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill, pthread_sigmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::{Pid, getpid};
use pagemark::job::End;
use pagemark_linux::exit_watch::ExitWatch;
use pagemark_linux::proc::Process;
use pagemark_process::saver::SignalGate;
use pagemark_process::spawn::FROM_OUTSIDE;
use pagemark_report::message;

use crate::failure::Failure;

/// The signals that stop and resume a program are passed on to a program that Pagemark runs, as
/// [`FROM_OUTSIDE`].
const JOB_CONTROL: [Signal; 2] = [Signal::SIGTSTP, Signal::SIGCONT];

/// Signals that are held back from their usual effect since [`Signals::hold`], waiting to be passed
/// on.
pub struct Signals {
    held: SigSet,
    before: SigSet,
}

impl Signals {
    /// Holds back `signals` in this thread and every later one. Call before any other thread
    /// exists.
    fn hold(signals: &[Signal]) -> Result<Self, Failure> {
        let held: SigSet = signals.iter().copied().collect();
        let mut before = SigSet::empty();
        pthread_sigmask(SigmaskHow::SIG_BLOCK, Some(&held), Some(&mut before))
            .map_err(|error| Failure::new("cannot hold signals back", error))?;
        Ok(Signals { held, before })
    }

    /// For a program that Pagemark runs: what would reach it if it ran by itself.
    pub fn hold_for_target() -> Result<Self, Failure> {
        Self::hold(&[&FROM_OUTSIDE[..], &JOB_CONTROL].concat())
    }

    /// For a target that Pagemark visits: what asks Pagemark to end.
    pub fn hold_for_stop() -> Result<Self, Failure> {
        Self::hold(&[Signal::SIGHUP, Signal::SIGINT, Signal::SIGTERM])
    }

    /// Like [`Signals::hold_for_stop`], for a command that sets the mode of its terminal.
    pub fn hold_for_terminal() -> Result<Self, Failure> {
        Self::hold(&[&[Signal::SIGHUP, Signal::SIGINT, Signal::SIGTERM][..], &JOB_CONTROL].concat())
    }

    /// The mask of blocked signals as it was before, for the program that is started.
    pub fn before(&self) -> SigSet {
        self.before
    }

    /// Forwards signals to `target` outside of the freezes of `gate`, in a thread of its own, until
    /// the process ends.
    ///
    /// What the terminal sends goes to the target's process group, as it would go to a foreground
    /// job; what another process sends to Pagemark goes to the target alone.
    pub fn pass_on_to(self, target: Pid, gate: SignalGate) -> Result<(), Failure> {
        self.each(move |signal, from_kernel| {
            // A shell stops and continues whole jobs.
            let to_all = from_kernel || matches!(signal, Signal::SIGTSTP | Signal::SIGCONT);
            let whom = if to_all { Pid::from_raw(-target.as_raw()) } else { target };
            // The target leads a session without a terminal, where SIGTSTP stops nothing.
            let passed = if signal == Signal::SIGTSTP { Signal::SIGSTOP } else { signal };
            match gate.forward(target.as_raw(), passed as i32, || kill(whom, passed)) {
                // No such group: the target is about to exit.
                Ok(()) | Err(Errno::ESRCH) => {}
                Err(error) => message!("pagemark: cannot pass {passed} on to {target}: {error}"),
            }
            if signal == Signal::SIGTSTP {
                // Goes on with SIGCONT, which is passed on in turn.
                let _ = kill(getpid(), Signal::SIGSTOP);
            }
        })
    }

    /// For a target in the process group of this process, where the terminal's signals reach it
    /// anyway: forwards what another process sends to Pagemark, in a thread of its own, until the
    /// process ends. To a target that `is_apart`, in a session of its own, also what the terminal
    /// sends. Pagemark is stopped and continued with the target.
    pub fn share_with(self, target: Pid, is_apart: bool) -> Result<(), Failure> {
        self.each(move |signal, from_kernel| {
            if is_apart || !from_kernel {
                // In a session without a terminal, SIGTSTP stops nothing.
                let passed = if is_apart && signal == Signal::SIGTSTP { Signal::SIGSTOP } else { signal };
                match kill(target, passed) {
                    Ok(()) | Err(Errno::ESRCH) => {}
                    Err(error) => message!("pagemark: cannot pass {signal} on to {target}: {error}"),
                }
            }
            if signal == Signal::SIGTSTP {
                // Goes on with SIGCONT.
                let _ = kill(getpid(), Signal::SIGSTOP);
            }
        })
    }

    /// Sends [`End::Stopped`] for every signal, in a thread of its own.
    pub fn stop_at(self, stop: Sender<End>) -> Result<(), Failure> {
        self.each(move |_, _| {
            // The receiver is gone when Pagemark is about to exit anyway.
            let _ = stop.send(End::Stopped);
        })
    }

    /// Like [`Signals::stop_at`]. Behind [`Signals::hold_for_terminal`], `pause` is called with
    /// true before the terminal stops this process, and with false when it is continued.
    pub fn stop_at_or_pause(self, stop: Sender<End>, pause: impl Fn(bool) + Send + 'static) -> Result<(), Failure> {
        self.each(move |signal, _| match signal {
            Signal::SIGTSTP => {
                pause(true);
                // Goes on with SIGCONT.
                let _ = kill(getpid(), Signal::SIGSTOP);
            }
            Signal::SIGCONT => pause(false),
            _ => {
                // The receiver is gone when Pagemark is about to exit anyway.
                let _ = stop.send(End::Stopped);
            }
        })
    }

    fn each(self, mut act: impl FnMut(Signal, bool) + Send + 'static) -> Result<(), Failure> {
        let fd = SignalFd::with_flags(&self.held, SfdFlags::SFD_CLOEXEC)
            .map_err(|error| Failure::new("cannot wait for signals", error))?;
        let thread = thread::Builder::new().name("signals".into());
        let started = thread.spawn(move || {
            loop {
                match fd.read_signal() {
                    Ok(Some(info)) => {
                        let from_kernel = info.ssi_code == libc::SI_KERNEL;
                        if let Ok(signal) = Signal::try_from(info.ssi_signo as i32) {
                            act(signal, from_kernel);
                        }
                    }
                    Ok(None) | Err(Errno::EINTR) => {}
                    Err(error) => {
                        message!("pagemark: signals are no longer seen: {error}");
                        return;
                    }
                }
            }
        });
        started.map(drop).map_err(|error| Failure::new("cannot start a thread that waits for signals", error))
    }
}

/// The signals that are blocked now, for a program that is started later.
pub fn current_mask() -> Result<SigSet, Failure> {
    SigSet::thread_get_mask().map_err(|error| Failure::new("cannot read the mask of blocked signals", error))
}

/// The process that has the id.
pub fn process_to_watch(pid: i32) -> Result<Process, Failure> {
    Process::find(pid).map_err(|error| Failure::new(format!("cannot watch process {pid}"), error))
}

/// Sends [`End::TargetGone`] when the process exits. The status of a child is left to be waited
/// for.
pub fn announce_exit(process: Process, stop: Sender<End>) -> Result<(), Failure> {
    let pid = process.pid;
    let exit = ExitWatch::new(process).map_err(|error| Failure::new(format!("cannot watch process {pid}"), error))?;
    let started = thread::Builder::new().name("exit-watch".into()).spawn(move || {
        exit.wait();
        // The receiver is gone when Pagemark is about to exit anyway.
        let _ = stop.send(End::TargetGone);
    });
    started.map(drop).map_err(|error| Failure::new(format!("cannot start a thread that watches process {pid}"), error))
}
