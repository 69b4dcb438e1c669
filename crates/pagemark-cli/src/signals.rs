//! Signals that Pagemark gets while it has a target: passed on, or a reason to end.

use std::os::fd::AsFd;
use std::sync::mpsc::Sender;
use std::thread;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill, pthread_sigmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::{Pid, getpid};
use pagemark::sys::pidfd;

use crate::failure::Failure;

/// What ends Pagemark's work on a target.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// The target has exited.
    Exited,
    /// Somebody asked Pagemark to end.
    Stop,
}

/// What is passed on to a program that Pagemark runs.
const PASSED_ON: [Signal; 9] = [
    Signal::SIGHUP,
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGTERM,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGWINCH,
    Signal::SIGTSTP,
    Signal::SIGCONT,
];

/// Signals that are held back from their usual effect since [`Signals::hold`], waiting to be passed on.
pub struct Signals {
    held: SigSet,
    before: SigSet,
}

impl Signals {
    /// Holds back `signals` in this thread and every later one. Call before any other thread exists.
    fn hold(signals: &[Signal]) -> Result<Self, Failure> {
        let held: SigSet = signals.iter().copied().collect();
        let mut before = SigSet::empty();
        pthread_sigmask(SigmaskHow::SIG_BLOCK, Some(&held), Some(&mut before))
            .map_err(|error| Failure::new("cannot hold signals back", error))?;
        Ok(Signals { held, before })
    }

    /// For a program that Pagemark runs: what would reach it if it ran by itself.
    pub fn hold_for_target() -> Result<Self, Failure> {
        Self::hold(&PASSED_ON)
    }

    /// For a target that Pagemark visits: what asks Pagemark to end.
    pub fn hold_for_stop() -> Result<Self, Failure> {
        Self::hold(&[Signal::SIGHUP, Signal::SIGINT, Signal::SIGTERM])
    }

    /// The mask of blocked signals as it was before, for the program that is started.
    pub fn before(&self) -> SigSet {
        self.before
    }

    /// Passes signals on to `target`, in a thread of its own, until the process ends.
    ///
    /// What the terminal sends goes to the target's process group, as it would go to a foreground job; what
    /// somebody sends to Pagemark goes to the target alone.
    pub fn pass_on_to(self, target: Pid) -> Result<(), Failure> {
        self.each(move |signal, from_kernel| {
            // A shell stops and continues whole jobs.
            let to_all = from_kernel || matches!(signal, Signal::SIGTSTP | Signal::SIGCONT);
            let whom = if to_all { Pid::from_raw(-target.as_raw()) } else { target };
            // The target leads a session without a terminal, where SIGTSTP stops nothing.
            let passed = if signal == Signal::SIGTSTP { Signal::SIGSTOP } else { signal };
            match kill(whom, passed) {
                // No such group: the target is about to exit.
                Ok(()) | Err(Errno::ESRCH) => {}
                Err(error) => eprintln!("pagemark: cannot pass {passed} on to {target}: {error}"),
            }
            if signal == Signal::SIGTSTP {
                // Goes on with SIGCONT, which is passed on in turn.
                let _ = kill(getpid(), Signal::SIGSTOP);
            }
        })
    }

    /// Sends [`Event::Stop`] for every signal, in a thread of its own.
    pub fn stop_at(self, events: Sender<Event>) -> Result<(), Failure> {
        self.each(move |_, _| {
            // The receiver is gone when Pagemark is about to exit anyway.
            let _ = events.send(Event::Stop);
        })
    }

    fn each(self, mut act: impl FnMut(Signal, bool) + Send + 'static) -> Result<(), Failure> {
        let fd = SignalFd::with_flags(&self.held, SfdFlags::SFD_CLOEXEC)
            .map_err(|error| Failure::new("cannot wait for signals", error))?;
        thread::spawn(move || {
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
                        eprintln!("pagemark: signals are no longer seen: {error}");
                        return;
                    }
                }
            }
        });
        Ok(())
    }
}

/// Sends [`Event::Exited`] when process `pid` exits. The status of a child is left to be waited for.
pub fn announce_exit(pid: Pid, events: Sender<Event>) -> Result<(), Failure> {
    let process =
        pidfd::open(pid.as_raw(), 0).map_err(|error| Failure::new(format!("cannot watch process {pid}"), error))?;
    thread::spawn(move || {
        let mut exit = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
        while poll(&mut exit, PollTimeout::NONE) == Err(Errno::EINTR) {}
        // The receiver is gone when Pagemark is about to exit anyway.
        let _ = events.send(Event::Exited);
    });
    Ok(())
}
