//! A pseudo-terminal for a program, relayed to the terminal of the calling process.
//!
//! A terminal belongs to one session, and a program that leads a session of its own cannot have the
//! caller's: it has no `/dev/tty`, and Ctrl-Z does not stop it. The program therefore gets a
//! pseudo-terminal. Two processes serve it, so that the program is unharmed if the caller is
//! killed:
//!
//! - the *relay* (`terminal/relay.rs`) copies between the pseudo-terminal and the caller's
//!   terminal. It is in the caller's process group, sets the caller's terminal to raw mode, and
//!   puts the mode back;
//! - the *leader* (`terminal/leader.rs`) leads the session of the pseudo-terminal and is the parent
//!   of the program. Without a parent in its session, the kernel would not stop the program at
//!   Ctrl-Z.

use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::pty::{Winsize, openpty};
use nix::sys::termios::tcgetattr;
use nix::sys::wait::waitpid;
use nix::unistd::{Pid, getpgrp, tcgetpgrp, ttyname};
use pagemark_trace::error::{Error, Object, Result};

mod leader;
mod relay;

pub(crate) use leader::{Leader, Session};

/// The longest time for which the caller waits until the relay holds input back.
const HOLD_LIMIT: Duration = Duration::from_millis(200);

nix::ioctl_read_bad!(
    /// Reads the size of a terminal.
    window_size,
    libc::TIOCGWINSZ,
    Winsize
);
nix::ioctl_write_ptr_bad!(
    /// Sets the size of a terminal.
    set_window_size,
    libc::TIOCSWINSZ,
    Winsize
);

/// A pseudo-terminal and its relay. Dropped, the terminal of the calling process has its mode
/// again, and what the program wrote has been copied.
#[derive(Debug)]
pub struct Terminal {
    /// The program's end, until the program has it.
    slave: Option<OwnedFd>,
    /// Where the leader reports that the program was stopped, until the leader has it.
    stops: Option<OwnedFd>,
    master: OwnedFd,
    relay: Option<Pid>,
    input: Input,
    /// The standard streams of this process that are its terminal.
    streams: [bool; 3],
}

/// What the user types.
#[derive(Clone, Debug)]
pub struct Input(Arc<Mutex<UnixStream>>);

impl Input {
    /// Has the relay hold back what the user types: a key such as Ctrl-C sends a signal. Returns
    /// when all that was typed before has reached the program, or after 200 ms.
    pub fn hold(&self) {
        self.send(relay::HOLD);
        let mut stream = self.lock();
        // An earlier answer may have come too late.
        while matches!(stream.read(&mut [0; 16]), Ok(1..)) {
            if stream.set_nonblocking(true).is_err() {
                break;
            }
        }
        let _ = stream.set_nonblocking(false);
    }

    /// Has the relay hold back what the user types, however long it takes until
    /// [`pass`](Input::pass): processes that are being restored must not get signals.
    pub(crate) fn keep(&self) {
        self.send(relay::KEEP);
    }

    /// Has the relay pass on what the user types.
    pub fn pass(&self) {
        self.send(relay::PASS);
    }

    fn send(&self, message: u8) {
        use std::io::Write;
        // A relay that is gone holds and passes nothing.
        let _ = self.lock().write(&[message]);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, UnixStream> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn failed(operation: &'static str) -> impl FnOnce(io::Error) -> Error {
    Error::system(operation, Object::None)
}

impl Terminal {
    /// Makes a pseudo-terminal with the mode and the size of the terminal of this process, and
    /// starts the relay. None if standard input is not the controlling terminal of this process.
    ///
    /// # Errors
    /// [`System`](crate::ErrorKind::System)
    pub fn open() -> Result<Option<Terminal>> {
        let Some(outer) = own_terminal() else { return Ok(None) };
        let mode = tcgetattr(&outer).map_err(|e| failed("read the mode of the terminal")(e.into()))?;
        let pair = openpty(None, &mode).map_err(|e| failed("make a pseudo-terminal")(e.into()))?;
        copy_size(&outer, &pair.master);
        for end in [&pair.master, &pair.slave] {
            fcntl(end, FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC))
                .map_err(|e| failed("set up a pseudo-terminal")(e.into()))?;
        }
        // The relay must not wait for a program that does not read.
        fcntl(&pair.master, FcntlArg::F_SETFL(OFlag::O_NONBLOCK | OFlag::O_RDWR))
            .map_err(|e| failed("set up a pseudo-terminal")(e.into()))?;
        let (stopped, stops) = io::pipe().map_err(failed("make a pipe"))?;
        let (control, far_control) = UnixStream::pair().map_err(failed("make a socket pair"))?;
        control.set_read_timeout(Some(HOLD_LIMIT)).map_err(failed("set up a socket"))?;
        let streams = same_terminal(&outer);
        let ends = [outer.as_raw_fd(), pair.master.as_raw_fd(), far_control.as_raw_fd(), stopped.as_raw_fd()];
        let relay = relay::start(ends, mode).map_err(failed("start the relay of a pseudo-terminal"))?;
        Ok(Some(Terminal {
            slave: Some(pair.slave),
            stops: Some(stops.into()),
            master: pair.master,
            relay: Some(relay),
            input: Input(Arc::new(Mutex::new(control))),
            streams,
        }))
    }

    /// What the user types.
    pub fn input(&self) -> Input {
        self.input.clone()
    }

    /// The end of the pseudo-terminal that is not the program's; its mode is the program's, too.
    ///
    /// # Errors
    /// [`System`](crate::ErrorKind::System)
    pub fn master(&self) -> Result<OwnedFd> {
        self.master.try_clone().map_err(failed("duplicate a descriptor"))
    }

    /// The program's end, in place of each standard stream of this process that is its terminal.
    pub(crate) fn streams(&self) -> io::Result<[Option<OwnedFd>; 3]> {
        let Some(slave) = &self.slave else { return Ok([None, None, None]) };
        let one = |is_terminal: bool| is_terminal.then(|| slave.try_clone()).transpose();
        Ok([one(self.streams[0])?, one(self.streams[1])?, one(self.streams[2])?])
    }

    /// The session of the pseudo-terminal, which a process that this one starts is to begin.
    pub(crate) fn session(&self, reports: RawFd) -> Option<Session> {
        let (slave, stops) = (self.slave.as_ref()?.as_raw_fd(), self.stops.as_ref()?.as_raw_fd());
        Some(Session { slave, stops, reports, restored: None })
    }

    /// Gives up the program's end, which the program has by now.
    pub(crate) fn is_given(&mut self) {
        (self.slave, self.stops) = (None, None);
    }

    /// Lets the relay pass on what the user types, and continue for as long as the session of the
    /// program lasts or this process lives. Returns the relay, a child of this process that ends
    /// after the program.
    pub(crate) fn leave(mut self) -> Option<Pid> {
        self.input.pass();
        // The relay takes the end of the connection for the end of this process.
        std::mem::forget(self.input.clone());
        self.is_given();
        self.relay.take()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.is_given();
        if let Some(relay) = self.relay.take() {
            // The relay ends with the leader, whose end of the pipe is the last one.
            let _ = waitpid(relay, None);
        }
    }
}

/// Standard input, if it is the controlling terminal of this process and can be written.
fn own_terminal() -> Option<OwnedFd> {
    let input = io::stdin();
    let flags = fcntl(&input, FcntlArg::F_GETFL).ok()?;
    let is_ours = input.is_terminal() && tcgetpgrp(&input).is_ok() && flags & libc::O_ACCMODE == libc::O_RDWR;
    if !is_ours {
        return None;
    }
    input.as_fd().try_clone_to_owned().ok()
}

/// Which standard streams of this process are the terminal.
fn same_terminal(terminal: &OwnedFd) -> [bool; 3] {
    let name = ttyname(terminal).ok();
    let is_same = |stream: &dyn AsFd| name.is_some() && ttyname(stream.as_fd()).ok() == name;
    [is_same(&io::stdin()), is_same(&io::stdout()), is_same(&io::stderr())]
}

/// The size of a terminal. None if it has none.
pub(crate) fn size_of(terminal: &impl AsRawFd) -> Option<Winsize> {
    let mut size = Winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the call writes the structure, which lives through it.
    unsafe { window_size(terminal.as_raw_fd(), &mut size) }.ok()?;
    Some(size)
}

/// Gives a terminal the size of another, if that has one.
fn copy_size(from: &impl AsRawFd, to: &impl AsRawFd) {
    if let Some(size) = size_of(from) {
        // SAFETY: the call reads the structure, which lives through it.
        let _ = unsafe { set_window_size(to.as_raw_fd(), &size) };
    }
}

/// True if the terminal belongs to the process group of this process.
fn is_in_foreground(terminal: &impl AsFd) -> bool {
    tcgetpgrp(terminal) == Ok(getpgrp())
}

/// Takes a descriptor that a helper has under a number.
///
/// # Safety
/// The descriptor is open, and nothing else owns it.
unsafe fn take(number: RawFd) -> File {
    // SAFETY: as for this function.
    unsafe { File::from_raw_fd(number) }
}
