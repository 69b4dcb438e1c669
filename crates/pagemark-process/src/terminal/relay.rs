//! The relay of a pseudo-terminal.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::termios::{OutputFlags, SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};
use nix::unistd::{Pid, getpgid, getpgrp, getppid, getsid, tcgetpgrp};
use pagemark_linux::helper;
use pagemark_linux::proc::Stat;

use super::{copy_size, is_in_foreground, take};

/// The caller asks that what the user types is held back. The answer is the same byte.
pub(super) const HOLD: u8 = b'h';
/// Like [`HOLD`], until the caller asks that it is passed on. There is no answer.
pub(super) const KEEP: u8 = b'k';
/// The caller asks that what the user types is passed on.
pub(super) const PASS: u8 = b'p';

/// Input is passed on after this time even if the caller does not ask for it.
const HOLD_LIMIT: Duration = Duration::from_secs(5);
/// How long a key may take to become a signal.
const KEY_TIME: Duration = Duration::from_millis(20);
/// A program that continues within this time after a stop was not stopped by its user.
const STOP_TIME: Duration = Duration::from_millis(100);
/// How often the relay looks whether it is in the foreground again.
const FOREGROUND_POLL: Duration = Duration::from_millis(200);
/// How long output may be missing after the program has ended, if other programs have the terminal.
const LAST_OUTPUT: Duration = Duration::from_millis(200);
/// Limit of input that the program has not read.
const MAX_PENDING: usize = 4096;

/// Forks the relay. `ends` are: the outer terminal, the master, the connection to the caller, and
/// the pipe on which the leader reports stops. `mode` is that of the outer terminal.
pub(super) fn start(ends: [RawFd; 4], mode: Termios) -> io::Result<Pid> {
    let caller = nix::unistd::getpid();
    // SAFETY: the relay takes no lock of this program.
    let started = unsafe {
        helper::start(|| {
            // This process uses no other descriptors.
            helper::keep_only(c"pagemark-relay", ends);
            // These are the numbers that the ends have now, and only this owns them.
            let [outer, master, control, stops] = [0, 1, 2, 3].map(|n| take(helper::DESCRIPTOR + n));
            let mut relay = Relay {
                caller,
                outer: Some(outer),
                master,
                control: Some(control),
                stops: Some(stops),
                before: mode,
                own_mode: None,
                pending: Vec::new(),
                held_since: None,
                is_kept: false,
                last_key: None,
            };
            let _ = relay.run();
            relay.put_mode_back();
            libc::EXIT_SUCCESS
        })
    };
    Ok(started?)
}

struct Relay {
    caller: Pid,
    /// None once the terminal has hung up.
    outer: Option<File>,
    master: File,
    /// None once the caller is gone.
    control: Option<File>,
    /// None once the leader is gone.
    stops: Option<File>,
    /// The mode of the outer terminal before.
    before: Termios,
    /// The mode that the relay has set.
    own_mode: Option<Termios>,
    /// Input that is not yet in the pseudo-terminal.
    pending: Vec<u8>,
    held_since: Option<Instant>,
    /// Input is held back until the caller asks for it.
    is_kept: bool,
    /// When a control character was passed on.
    last_key: Option<Instant>,
}

impl Relay {
    fn run(&mut self) -> io::Result<()> {
        let watched: SigSet = [Signal::SIGWINCH, Signal::SIGCONT].into_iter().collect();
        let signals = SignalFd::with_flags(&watched, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        let mut last_output = Instant::now();
        loop {
            if !self.is_kept && self.held_since.is_some_and(|since| since.elapsed() > HOLD_LIMIT) {
                self.held_since = None;
            }
            let is_in_front = self.control.is_some() && self.outer.as_ref().is_some_and(is_in_foreground);
            if is_in_front {
                self.follow_mode();
            }
            let reads = is_in_front && self.held_since.is_none() && self.pending.len() < MAX_PENDING;
            let ready = self.wait(&signals, reads, is_in_front)?;
            if ready.signals {
                while let Ok(Some(signal)) = signals.read_signal() {
                    match Signal::try_from(signal.ssi_signo as i32) {
                        // The shell has set the mode meanwhile.
                        Ok(Signal::SIGCONT) => self.own_mode = None,
                        _ => self.outer.iter().for_each(|outer| copy_size(outer, &self.master)),
                    }
                }
            }
            if ready.master && self.copy_output()? {
                last_output = Instant::now();
            }
            if ready.outer {
                self.read_input();
            }
            if ready.control {
                self.obey();
            }
            if ready.stops {
                self.notice_stop();
            }
            self.pass_input();
            if self.stops.is_none() && last_output.elapsed() > LAST_OUTPUT {
                return Ok(());
            }
        }
    }

    /// Waits until something is to do.
    fn wait(&self, signals: &SignalFd, reads: bool, is_in_front: bool) -> io::Result<Ready> {
        let master_events =
            if self.pending.is_empty() { PollFlags::POLLIN } else { PollFlags::POLLIN | PollFlags::POLLOUT };
        let mut polled =
            vec![PollFd::new(signals.as_fd(), PollFlags::POLLIN), PollFd::new(self.master.as_fd(), master_events)];
        let mut add = |file: &'_ Option<File>, wanted: bool| -> Option<usize> {
            let file = file.as_ref().filter(|_| wanted)?;
            // SAFETY: the file outlives the poll below, which is the only use of this borrow.
            let descriptor = unsafe { std::os::fd::BorrowedFd::borrow_raw(file.as_raw_fd()) };
            polled.push(PollFd::new(descriptor, PollFlags::POLLIN));
            Some(polled.len() - 1)
        };
        let outer = add(&self.outer, reads);
        let control = add(&self.control, true);
        let stops = add(&self.stops, true);
        let is_idle = is_in_front && self.held_since.is_none() || self.control.is_none() && self.stops.is_some();
        let timeout = match is_idle {
            true => PollTimeout::NONE,
            false => PollTimeout::try_from(FOREGROUND_POLL).unwrap_or(PollTimeout::ZERO),
        };
        match poll(&mut polled, timeout) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        let is_ready = |index: usize| polled[index].revents().is_some_and(|events| !events.is_empty());
        Ok(Ready {
            signals: is_ready(0),
            master: polled[1].revents().is_some_and(|events| events != PollFlags::POLLOUT && !events.is_empty()),
            outer: outer.is_some_and(is_ready),
            control: control.is_some_and(is_ready),
            stops: stops.is_some_and(is_ready),
        })
    }

    /// Sets the outer terminal to raw mode. Output is processed as in the pseudo-terminal, so that
    /// what the caller itself writes has its line ends, except beside a program that draws the
    /// screen.
    fn follow_mode(&mut self) {
        let (Some(outer), Ok(inner)) = (&self.outer, tcgetattr(&self.master)) else { return };
        let mut raw = self.before.clone();
        cfmakeraw(&mut raw);
        raw.output_flags = inner.output_flags;
        if self.own_mode.as_ref().is_none_or(|mode| mode.output_flags != raw.output_flags)
            && tcsetattr(outer, SetArg::TCSANOW, &raw).is_ok()
        {
            // As the terminal has it now.
            self.own_mode = tcgetattr(outer).ok();
            copy_size(outer, &self.master);
        }
    }

    /// Puts the mode of the outer terminal back, unless another program has set another one.
    fn put_mode_back(&mut self) {
        let (Some(outer), Some(own)) = (&self.outer, self.own_mode.take()) else { return };
        if tcgetattr(outer).is_ok_and(|mode| mode == own) {
            let _ = tcsetattr(outer, SetArg::TCSADRAIN, &self.before);
        }
    }

    /// Copies what the program wrote. False if there was nothing.
    fn copy_output(&mut self) -> io::Result<bool> {
        let mut buffer = [0; 1 << 14];
        match self.master.read(&mut buffer) {
            Ok(0) => Ok(false),
            Ok(length) => {
                let output = self.without_added_returns(&buffer[..length]);
                // A terminal that has hung up takes no output. The program is not to wait for it.
                if self.outer.as_mut().is_some_and(|outer| outer.write_all(&output).is_err()) {
                    self.outer = None;
                }
                Ok(true)
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(false),
            // Nothing has the terminal any more.
            Err(error) => Err(error),
        }
    }

    /// The output without the carriage returns that the outer terminal adds, as the pseudo-terminal
    /// has done.
    fn without_added_returns<'a>(&self, output: &'a [u8]) -> Cow<'a, [u8]> {
        let added = OutputFlags::OPOST | OutputFlags::ONLCR;
        if !self.own_mode.as_ref().unwrap_or(&self.before).output_flags.contains(added) {
            return Cow::Borrowed(output);
        }
        let is_added = |index: &usize| output[*index] == b'\r' && output.get(index + 1) == Some(&b'\n');
        Cow::Owned((0..output.len()).filter(|index| !is_added(index)).map(|index| output[index]).collect())
    }

    fn read_input(&mut self) {
        let Some(outer) = &mut self.outer else { return };
        let mut buffer = [0; 1024];
        match outer.read(&mut buffer) {
            Ok(0) => self.outer = None,
            Ok(length) => self.pending.extend_from_slice(&buffer[..length]),
            // Also EIO: this process is in the background by now, or the terminal has hung up.
            Err(error) if error.raw_os_error() == Some(libc::EIO) && is_in_foreground(outer) => self.outer = None,
            Err(_) => {}
        }
    }

    fn pass_input(&mut self) {
        if self.held_since.is_some() || self.pending.is_empty() {
            return;
        }
        if let Ok(length) = self.master.write(&self.pending) {
            if self.pending[..length].iter().any(u8::is_ascii_control) {
                self.last_key = Some(Instant::now());
            }
            self.pending.drain(..length);
        }
    }

    fn obey(&mut self) {
        let mut message = [0];
        match self.control.as_mut().map(|control| control.read(&mut message)) {
            Some(Ok(1)) if message[0] == HOLD => {
                if let Some(rest) = self.last_key.and_then(|key| KEY_TIME.checked_sub(key.elapsed())) {
                    std::thread::sleep(rest);
                }
                self.held_since = Some(Instant::now());
                let _ = self.control.as_mut().map(|control| control.write(&[HOLD]));
            }
            Some(Ok(1)) if message[0] == KEEP => (self.held_since, self.is_kept) = (Some(Instant::now()), true),
            Some(Ok(1)) => (self.held_since, self.is_kept) = (None, false),
            Some(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
            _ => {
                // The caller is gone. The program keeps running, and its output is still copied.
                self.control = None;
                self.put_mode_back();
            }
        }
    }

    /// Reads what the leader reports.
    fn notice_stop(&mut self) {
        let mut reports = [0; 16];
        match self.stops.as_mut().map(|stops| stops.read(&mut reports)) {
            Some(Ok(length @ 1..)) if reports[length - 1] == b's' => self.stop(),
            Some(Ok(1..)) => {}
            _ => self.stops = None,
        }
    }

    /// The program was stopped: gives the terminal back and stops the job of the caller, as the
    /// shell expects it of a program that is stopped.
    fn stop(&mut self) {
        let Some(stops) = &self.stops else { return };
        let mut polled = [PollFd::new(stops.as_fd(), PollFlags::POLLIN)];
        let limit = PollTimeout::try_from(STOP_TIME).unwrap_or(PollTimeout::ZERO);
        if self.control.is_none() || poll(&mut polled, limit).is_ok_and(|ready| ready > 0) {
            return;
        }
        // What the program wrote last comes before the shell's prompt.
        while self.copy_output().unwrap_or(false) {}
        if has_shell(self.caller) {
            self.put_mode_back();
            let _ = kill(Pid::from_raw(0), Signal::SIGSTOP);
        } else if let Ok(group) = tcgetpgrp(&self.master) {
            // Nobody could continue the job; the kernel would not stop it either.
            let _ = kill(Pid::from_raw(-group.as_raw()), Signal::SIGCONT);
        }
    }
}

/// What there is to do.
struct Ready {
    signals: bool,
    master: bool,
    outer: bool,
    control: bool,
    stops: bool,
}

/// True if the job of a process is one that its parent can continue.
fn has_shell(caller: Pid) -> bool {
    // The caller is the parent of this process.
    let Ok(stat) = Stat::read(caller.as_raw()) else { return false };
    let shell = Some(Pid::from_raw(stat.parent_pid));
    getppid() == caller && getsid(shell) == getsid(None) && getpgid(shell) != Ok(getpgrp())
}
