//! A QEMU that Pagemark starts, with a monitor connection of its own.

use std::ffi::CString;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{SigSet, SigmaskHow, sigprocmask};

use crate::error::{Error, ErrorKind, Object, Result};
use crate::qemu::command_line::{MONITOR_DESCRIPTOR, without_user};
use crate::qemu::end_guard::EndGuard;
use crate::qemu::machine::{BIRTH, Machine, Startup};
use crate::qemu::owner::Owner;
use crate::qemu::qmp::Monitor;

/// The most that is quoted of QEMU's messages.
const MAX_MESSAGE_BYTES: u64 = 4096;

/// The standard streams of a new QEMU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Streams {
    /// Those of this process.
    OfCaller,
    /// `/dev/null`, in a session of its own; messages are kept for an error.
    Detached,
}

/// A QEMU that is being prepared. Dropped, or if this process dies, it is killed.
#[derive(Debug)]
pub struct NewQemu {
    /// None once it was given away.
    child: Option<Child>,
    monitor: Option<UnixStream>,
    guard: Option<EndGuard>,
    /// What was started, for errors.
    program: PathBuf,
    /// The version of the QEMU that was saved, for errors.
    saved_version: String,
}

impl NewQemu {
    /// Starts the program of `startup` in its directory, with `signal_mask` as its mask of blocked
    /// signals.
    ///
    /// Root starts it as the user whose process it was, with the rights of that user from the first
    /// instruction on, and in a session of its own: what is in root's session could type at its
    /// terminal.
    pub fn start(startup: &Startup, arguments: &[String], streams: Streams, signal_mask: SigSet) -> Result<NewQemu> {
        let (ours, theirs) = UnixStream::pair().map_err(Error::system("make a monitor connection"))?;
        let (gate, gate_of_child) = UnixStream::pair().map_err(Error::system("make a pair of sockets"))?;
        let mut command = command(startup, arguments, streams)?;
        let ends = [gate.as_raw_fd(), gate_of_child.as_raw_fd()];
        prepare_child(&mut command, startup, streams, signal_mask, theirs.as_raw_fd(), ends)?;
        // The call returns once QEMU runs, which waits for its guard.
        let (spawned, guard) = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("pagemark-admit".into());
            let guard = thread.spawn_scoped(scope, move || admit(gate))?;
            let spawned = command.spawn();
            // The other end sees that no child came.
            drop(gate_of_child);
            Ok((spawned, guard.join()))
        })
        .map_err(Error::system("start a thread"))?;
        let guard = guard.unwrap_or_else(|_| Err(io::Error::other("a thread panicked")));
        let refused = |error: io::Error| {
            Error::of(ErrorKind::Start, format!("start {}", startup.program.display()), Object::None, error)
        };
        let started = |child, guard| NewQemu {
            child: Some(child),
            monitor: Some(ours),
            guard,
            program: startup.program.clone(),
            saved_version: startup.version.clone(),
        };
        match (spawned, guard) {
            (Ok(child), Ok(guard)) => Ok(started(child, guard)),
            (Ok(child), Err(error)) => {
                drop(started(child, None));
                Err(Error::system("start a guard process")(error))
            }
            // Without a guard the child has not become QEMU, whatever it says.
            (Err(_), Err(error)) if error.kind() != io::ErrorKind::UnexpectedEof => {
                Err(Error::system("start a guard process")(error))
            }
            (Err(error), _) => Err(refused(error)),
        }
    }

    /// The machine of the QEMU. Called once.
    pub fn machine(&mut self) -> Result<Machine> {
        let (Some(child), Some(monitor)) = (&self.child, self.monitor.take()) else {
            return Err(Error::damaged("no QEMU"));
        };
        let pid = child.id() as i32;
        let monitor = Monitor::over(monitor).map_err(|error| self.describe(error))?;
        Machine::of(monitor, pid)
    }

    /// The process, which is no longer killed.
    pub fn into_child(mut self) -> Result<Child> {
        let mut child = self.child.take().ok_or_else(|| Error::damaged("no QEMU"))?;
        if let Some(guard) = self.guard.take() {
            guard.dismiss();
        }
        // QEMU ignores that nobody reads its later messages.
        drop(child.stderr.take());
        Ok(child)
    }

    /// An error of its monitor: if QEMU has ended, with its status and its last message. Waits for
    /// its end then.
    pub fn describe(&mut self, error: Error) -> Error {
        if !error.is_gone() {
            return error;
        }
        let status = self.child.as_mut().and_then(|child| child.wait().ok());
        let how = match status.map(|status| (status.code(), status.signal())) {
            Some((Some(code), _)) => format!("ended with status {code}"),
            Some((_, Some(signal))) => format!("was ended by signal {signal}"),
            _ => "ended".to_owned(),
        };
        let mut message = String::new();
        if let Some(stream) = self.child.as_mut().and_then(|child| child.stderr.as_mut()) {
            // Without it the error says only that QEMU has ended.
            let _ = stream.take(MAX_MESSAGE_BYTES).read_to_string(&mut message);
        }
        let separator = if message.is_empty() { "" } else { ": " };
        let reason = format!("it {how}{separator}{}", message.trim_end());
        let operation = format!("start {}", self.program.display());
        let error = Error::of(ErrorKind::Start, operation, Object::None, reason);
        error.help(format!("the checkpoint is of QEMU {}", self.saved_version))
    }
}

/// In a new child: tells its process id, and waits until it has a guard. If there is none, because
/// its parent has died or failed, it must not become QEMU. Makes only system calls.
fn wait_for_guard(ours: RawFd, gate: RawFd) -> io::Result<()> {
    let mut admitted = 0u8;
    // SAFETY: the end of the parent is closed in the child alone, which does not use it; the buffers live
    // through the calls.
    unsafe {
        // Otherwise this process would keep its own wait from ending.
        libc::close(ours);
        let pid = libc::getpid().to_ne_bytes();
        if libc::send(gate, pid.as_ptr().cast(), pid.len(), libc::MSG_NOSIGNAL) != pid.len() as isize {
            return Err(io::Error::last_os_error());
        }
        loop {
            match libc::read(gate, std::ptr::from_mut(&mut admitted).cast(), 1) {
                1 => return Ok(()),
                0 => return Err(io::Error::from_raw_os_error(libc::EPIPE)),
                _ if *libc::__errno_location() == libc::EINTR => {}
                _ => return Err(io::Error::last_os_error()),
            }
        }
    }
}

/// The command that starts the program of `startup`.
fn command(startup: &Startup, arguments: &[String], streams: Streams) -> Result<Command> {
    let mut command = Command::new(&startup.program);
    match startup.owner_for_root()? {
        // The user is set already.
        Some(_) => command.args(without_user(arguments)).env_clear().envs(startup.environment()),
        None => command.args(arguments),
    };
    command.env_remove(BIRTH).envs(startup.birth.as_ref().map(|birth| (BIRTH, birth)));
    if streams == Streams::Detached {
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    }
    Ok(command)
}

/// Has the child wait for its guard, take its end of the `monitor`, and become what the program of
/// `startup` was.
fn prepare_child(
    command: &mut Command,
    startup: &Startup,
    streams: Streams,
    signal_mask: SigSet,
    monitor: RawFd,
    [ours, own_end]: [RawFd; 2],
) -> Result<()> {
    let directory = CString::new(startup.directory.as_os_str().as_bytes()).map_err(Error::damaged)?;
    let rights = startup.owner.clone();
    let leads_session = streams == Streams::Detached || startup.owner_for_root()?.is_some();
    // SAFETY: only system calls are made between fork and exec, which is allowed in a child of a
    // process with threads.
    unsafe {
        command.pre_exec(move || {
            wait_for_guard(ours, own_end)?;
            let result = match monitor == MONITOR_DESCRIPTOR {
                true => libc::fcntl(monitor, libc::F_SETFD, 0),
                false => libc::dup2(monitor, MONITOR_DESCRIPTOR),
            };
            if leads_session {
                libc::setsid();
            }
            if result < 0 {
                return Err(io::Error::last_os_error());
            }
            rights.as_ref().map_or(Ok(()), Owner::set)?;
            // Not before: the user may not enter it any more.
            if libc::chdir(directory.as_ptr()) < 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(sigprocmask(SigmaskHow::SIG_SETMASK, Some(&signal_mask), None)?)
        });
    }
    Ok(())
}

/// Starts a guard of the child that waits at the other end of `gate`, and lets it go on. None on
/// kernels without descriptors of processes: before Linux 5.3, a QEMU that is being prepared stays,
/// paused, if this process is killed.
fn admit(mut gate: UnixStream) -> io::Result<Option<EndGuard>> {
    let mut pid = [0; size_of::<libc::pid_t>()];
    gate.read_exact(&mut pid)?;
    let guard = match EndGuard::start(libc::pid_t::from_ne_bytes(pid), None) {
        Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => None,
        guard => Some(guard?),
    };
    gate.write_all(&[1])?;
    Ok(guard)
}

impl NewQemu {
    /// Kills the process, and waits until it has ended.
    pub fn kill(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for NewQemu {
    fn drop(&mut self) {
        self.kill();
    }
}
