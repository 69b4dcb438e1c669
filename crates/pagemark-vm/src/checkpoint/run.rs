//! A QEMU that its user's command line starts, with a monitor socket for Pagemark.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::signal::{SigSet, SigmaskHow, sigprocmask};
use pagemark::Mechanism;
use pagemark_kvm_log::protocol::RINGS;
use pagemark_linux::scratch_directory::{self, Purpose, ScratchDirectory, hold};

use crate::checkpoint::target::VmTarget;
use crate::error::{Error, ErrorKind, Object, Result};
use crate::memory::write_watch::Activation;
use crate::memory::{kvm_log, preloaded};
use crate::qemu::command_line::{is_daemon, listening_monitor};

/// How long QEMU may take until it listens on the socket.
const LISTEN_LIMIT: Duration = Duration::from_secs(10);
const LISTEN_POLL: Duration = Duration::from_millis(2);

/// A QEMU that was started by its user's command line. It is a child of this process, in the same
/// session and process group, with the same standard streams, as if a shell had started it.
/// Pagemark adds a monitor socket (QMP) to the command line, in a directory that only this user can
/// enter. Dropped, or if this process dies, QEMU keeps running, and the socket stays. A later
/// command removes it once QEMU has ended.
///
/// ```no_run
/// use std::ffi::OsString;
///
/// use nix::sys::signal::SigSet;
/// use pagemark::Mechanism;
/// use pagemark_vm::OwnQemu;
///
/// let command = ["qemu-system-x86_64", "-m", "2G"].map(OsString::from);
/// let mut qemu = OwnQemu::start(&command, "vm1", SigSet::empty())?;
/// let target = qemu.attach(Mechanism::Full)?;
/// # drop(target);
/// println!("it ended with {}", qemu.wait()?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct OwnQemu {
    child: Child,
    /// The directory of the socket. None once QEMU has ended.
    directory: Option<ScratchDirectory>,
    monitor: PathBuf,
}

impl OwnQemu {
    /// Starts `command`, a program with its arguments. The file name of the socket is made of
    /// `label`. `signal_mask` is the new process's mask of blocked signals.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], [`ErrorKind::Start`], [`ErrorKind::Unsupported`] for a QEMU that
    /// makes itself a daemon; nothing was started.
    pub fn start(command: &[OsString], label: &str, signal_mask: SigSet) -> Result<OwnQemu> {
        OwnQemu::start_for(Mechanism::Full, command, label, signal_mask)
    }

    /// Like [`OwnQemu::start`], of a machine that can be tracked by `mechanism`: for `kvm-log` and
    /// `kvm-ring`, a library is preloaded into QEMU.
    ///
    /// # Errors
    /// Those of [`OwnQemu::start`]; [`ErrorKind::KvmLog`] if there is no library, or the program
    /// takes none; as [`check_kvm`](crate::check_kvm).
    pub fn start_for(mechanism: Mechanism, command: &[OsString], label: &str, signal_mask: SigSet) -> Result<OwnQemu> {
        let (program, arguments) = command
            .split_first()
            .map_or((OsStr::new(""), command), |(program, arguments)| (program.as_os_str(), arguments));
        let words: Vec<String> = arguments.iter().filter_map(|word| word.to_str().map(str::to_owned)).collect();
        if is_daemon(&words) {
            let reason = "-daemonize leaves nothing to wait for";
            let error = Error::of(ErrorKind::Unsupported, "run QEMU", Object::None, reason);
            return Err(error.help("leave -daemonize out, or use `pagemark vm attach` with a QEMU that runs"));
        }
        let parent = std::env::temp_dir();
        // Those of machines that outlived their commands, and have ended.
        scratch_directory::sweep(&parent);
        let directory = ScratchDirectory::new_in(&parent, Purpose::Machine);
        let directory = directory.map_err(Error::system("make a directory for a monitor socket"))?;
        // QEMU holds it, too: the machine may outlive this process, and is reached by the socket then.
        let held = hold(directory.path()).map_err(Error::system("hold the directory of a monitor socket"))?;
        let monitor = directory.path().join(format!("{label}.qmp"));
        let path = monitor.to_str().ok_or_else(|| {
            let reason = "has a name that is no text: TMPDIR names another directory";
            Error::about(ErrorKind::Monitor, Object::Monitor(monitor.clone()), reason)
        })?;
        let variables = match kvm_log::keeping(mechanism) {
            Some(keeping) => {
                let variables = preloaded::variables(program, &directory.path().join("kvm-log"), keeping)?;
                kvm_log::check_kvm(mechanism)?;
                variables
            }
            None => Vec::new(),
        };
        let mut command = Command::new(program);
        command.env_remove(RINGS).envs(variables).args(arguments).args(listening_monitor(path));
        let inherit = move || {
            fcntl(&held, FcntlArg::F_SETFD(FdFlag::empty()))?;
            Ok(sigprocmask(SigmaskHow::SIG_SETMASK, Some(&signal_mask), None)?)
        };
        // SAFETY: between fork and exec this calls fcntl and sigprocmask alone, which are async-signal-safe.
        unsafe {
            command.pre_exec(inherit);
        }
        let child = command.spawn().map_err(|error| {
            let is_missing = error.kind() == io::ErrorKind::NotFound;
            let kind = if is_missing { ErrorKind::NotFound } else { ErrorKind::Start };
            Error::of(kind, format!("start {}", Path::new(program).display()), Object::None, error)
        })?;
        Ok(OwnQemu { child, directory: Some(directory), monitor })
    }

    /// The process id of QEMU.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// The monitor socket.
    pub fn monitor(&self) -> &Path {
        &self.monitor
    }

    /// The machine as a target, once QEMU listens on the socket.
    ///
    /// # Errors
    /// [`ErrorKind::Gone`] if QEMU has ended; else as [`VmTarget::attach`].
    pub fn attach(&mut self, mechanism: Mechanism) -> Result<VmTarget> {
        self.attach_by(|monitor| VmTarget::attach(monitor, mechanism))
    }

    /// Like [`OwnQemu::attach`], by [`VmTarget::attach_to_hold`].
    ///
    /// # Errors
    /// Those of [`OwnQemu::attach`].
    pub fn attach_to_hold(&mut self, mechanism: Mechanism, activation: Activation) -> Result<VmTarget> {
        self.attach_by(|monitor| VmTarget::attach_to_hold(monitor, mechanism, activation))
    }

    fn attach_by(&mut self, attach: impl Fn(&Path) -> Result<VmTarget>) -> Result<VmTarget> {
        let deadline = Instant::now() + LISTEN_LIMIT;
        loop {
            match attach(&self.monitor) {
                Err(_) if self.has_ended()? => {
                    return Err(Error::about(ErrorKind::Gone, Object::Process(self.pid()), "has ended"));
                }
                Err(error) if is_not_listening(&error) && Instant::now() < deadline => std::thread::sleep(LISTEN_POLL),
                attached => return attached,
            }
        }
    }

    /// Ends QEMU at once, and waits until it has ended.
    ///
    /// # Errors
    /// [`ErrorKind::System`]
    pub fn kill(mut self) -> Result<ExitStatus> {
        self.child.kill().map_err(Error::system("end QEMU"))?;
        self.wait()
    }

    fn has_ended(&mut self) -> Result<bool> {
        Ok(self.child.try_wait().map_err(Error::system("wait for QEMU"))?.is_some())
    }

    /// Waits until QEMU ends, and removes the socket.
    ///
    /// # Errors
    /// [`ErrorKind::System`]
    pub fn wait(mut self) -> Result<ExitStatus> {
        let status = self.child.wait().map_err(Error::system("wait for QEMU"));
        self.directory = None;
        status
    }
}

/// True if the socket does not exist yet, or QEMU has bound it and does not listen yet.
fn is_not_listening(error: &Error) -> bool {
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref::<io::Error>());
    source.is_some_and(|source| matches!(source.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused))
}

impl Drop for OwnQemu {
    fn drop(&mut self) {
        if let Some(directory) = self.directory.take() {
            // QEMU still listens there.
            directory.leave_to_holders();
        }
    }
}
