//! A QEMU that Pagemark starts, with a monitor connection of its own.

use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};

use crate::command_line::MONITOR_DESCRIPTOR;
use crate::end_guard::EndGuard;
use crate::error::{Error, ErrorKind, Object, Result};
use crate::machine::{Machine, Startup};
use crate::qmp::Monitor;

/// The most that is quoted of QEMU's messages.
const MAX_MESSAGE_BYTES: u64 = 4096;

/// The standard streams of a new QEMU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Streams {
    /// Those of this process.
    OfCaller,
    /// `/dev/null`, in a session of its own; messages are kept for an error.
    Detached,
}

/// A QEMU that is being prepared. Dropped, or if this process dies, it is killed.
#[derive(Debug)]
pub(crate) struct Started {
    /// None once it was given away.
    child: Option<Child>,
    monitor: Option<UnixStream>,
    guard: Option<EndGuard>,
}

impl Started {
    /// Starts the program of `startup` in its directory.
    pub(crate) fn start(startup: &Startup, arguments: &[String], streams: Streams) -> Result<Started> {
        let (ours, theirs) = UnixStream::pair().map_err(Error::system("make a monitor connection"))?;
        let mut command = Command::new(&startup.program);
        command.args(arguments).current_dir(&startup.directory);
        let is_detached = streams == Streams::Detached;
        if is_detached {
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        }
        let number = theirs.as_raw_fd();
        // SAFETY: only system calls are made between fork and exec, which is allowed in a child of a
        // process with threads.
        unsafe {
            command.pre_exec(move || {
                let result = match number == MONITOR_DESCRIPTOR {
                    true => libc::fcntl(number, libc::F_SETFD, 0),
                    false => libc::dup2(number, MONITOR_DESCRIPTOR),
                };
                if is_detached {
                    libc::setsid();
                }
                if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
            });
        }
        let child = command.spawn().map_err(|error| {
            Error::of(ErrorKind::Start, format!("start {}", startup.program.display()), Object::None, error)
        })?;
        let pid = child.id() as i32;
        let mut started = Started { child: Some(child), monitor: Some(ours), guard: None };
        started.guard = match EndGuard::start(pid, None) {
            // Before Linux 5.3, a QEMU that is being prepared stays, paused, if this process is killed.
            Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => None,
            guard => Some(guard.map_err(Error::system("start a guard process"))?),
        };
        Ok(started)
    }

    /// The machine of the QEMU. Called once.
    pub(crate) fn machine(&mut self, startup: &Startup) -> Result<Machine> {
        let (Some(child), Some(monitor)) = (&self.child, self.monitor.take()) else {
            return Err(Error::damaged("no QEMU"));
        };
        let pid = child.id() as i32;
        let monitor = Monitor::over(monitor).map_err(|error| self.describe(error, startup))?;
        Machine::of(monitor, pid)
    }

    /// The process, which is no longer killed.
    pub(crate) fn into_child(mut self) -> Result<Child> {
        let mut child = self.child.take().ok_or_else(|| Error::damaged("no QEMU"))?;
        if let Some(guard) = self.guard.take() {
            guard.dismiss();
        }
        // QEMU ignores that nobody reads its later messages.
        drop(child.stderr.take());
        Ok(child)
    }

    /// The error of a QEMU that has closed its monitor.
    fn describe(&mut self, error: Error, startup: &Startup) -> Error {
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
        let operation = format!("start {}", startup.program.display());
        let error = Error::of(ErrorKind::Start, operation, Object::None, reason);
        error.help(format!("the checkpoint is of QEMU {}", startup.version))
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
