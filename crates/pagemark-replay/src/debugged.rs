//! A machine that has run again from a checkpoint to an exact instruction, and waits there for a
//! debugger (SimuBoost; PML, section 2.2).

use std::fmt;
use std::path::{Path, PathBuf};

use pagemark::repository::Checkpoint;
use pagemark_simulate::control::Control;
use pagemark_vm::parts::{DemandedMemory, NewQemu, ServedDisk, option_word, shared_file};
use pagemark_vm::{Error, ErrorKind, Object, Restore, Result};
use serde_json::json;

use crate::interval::{inputs_between, instructions_of};
use crate::run::{Run, control_failed, controller};

/// Where gdb connects to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum GdbAddress {
    /// A host's name or address, and a port: `127.0.0.1:1234`. Whoever reaches it has the machine.
    Tcp(String),
    /// The path of a socket, which is made.
    Socket(PathBuf),
}

/// As the command `target remote` of gdb takes it.
impl fmt::Display for GdbAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GdbAddress::Tcp(address) => f.write_str(address),
            GdbAddress::Socket(path) => path.display().fmt(f),
        }
    }
}

impl GdbAddress {
    /// As QEMU takes it.
    fn device(&self) -> Result<String> {
        Ok(match self {
            GdbAddress::Tcp(address) => format!("tcp:{},server=on,wait=off", address.replace(',', ",,")),
            GdbAddress::Socket(path) => format!("unix:{},server=on,wait=off", option_word(path)?),
        })
    }
}

/// A machine that is paused at an exact instruction, and serves gdb. It has none of its output
/// files. When this is dropped, or this process dies, QEMU is killed.
///
/// ```no_run
/// use std::path::Path;
///
/// use pagemark::repository::Repository;
/// use pagemark_replay::{DebuggedMachine, GdbAddress};
///
/// let repository = Repository::open(Path::new("checkpoints"))?;
/// let (checkpoint, next) = (repository.read("vm1", 3)?, repository.read("vm1", 4)?);
/// let address = GdbAddress::Tcp("127.0.0.1:1234".into());
/// let library = Path::new("libpagemark_simulate.so");
/// let at = 1_234_567_890;
/// let machine = DebuggedMachine::start(&checkpoint, Some(&next), at, &address, library)?;
/// println!("gdb -ex 'target remote {address}', for process {}", machine.pid());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "QEMU is killed when this is dropped"]
pub struct DebuggedMachine {
    started: NewQemu,
    pid: i32,
    socket: Option<PathBuf>,
    /// Its disks and its memory are served as long as QEMU runs.
    _served: (Vec<ServedDisk>, Option<DemandedMemory>),
}

impl DebuggedMachine {
    /// Runs the machine of a checkpoint until it has completed `instructions` since its start, and
    /// has QEMU wait for gdb. `next` is the checkpoint behind that, which has what came to the
    /// machine from outside until then; none comes to it without. `library` is the plugin of the
    /// package `pagemark-simulate`.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the machine does not count its instructions, or had completed
    /// more; [`ErrorKind::Differs`] if it ends before; [`ErrorKind::Command`] if QEMU cannot listen
    /// at the address; others as those of [`Restore::start`](Restore::start). No QEMU is
    /// left.
    pub fn start(
        checkpoint: &Checkpoint,
        next: Option<&Checkpoint>,
        instructions: u64,
        address: &GdbAddress,
        library: &Path,
    ) -> Result<DebuggedMachine> {
        let begin = instructions_of(checkpoint)?;
        if instructions < begin {
            let (job, sequence) = (&checkpoint.manifest.job, checkpoint.manifest.sequence);
            let reason = format!("{job}@{sequence} is of instruction {begin}, behind instruction {instructions}");
            return Err(Error::about(ErrorKind::Unsupported, Object::None, reason).help("take an earlier checkpoint"));
        }
        let device = address.device()?;
        let (control, path) = shared_file()?;
        let control = Control::of(control).map_err(control_failed())?;
        let plugins = controller(library, &path)?;
        let devices = Restore::new(checkpoint).devices()?;
        let inputs = next.map_or(Ok(Vec::new()), |next| inputs_between(checkpoint, next))?;
        let mut run = Run::start(checkpoint, devices, (begin, instructions), plugins, control, &inputs)?;
        run.run_to_the_end()?;
        run.release()?;
        let (started, mut machine, served) = run.into_parts();
        // QEMU 10.0 takes gdb's `kill` for a shutdown of the machine, by which it would not end.
        machine.monitor.execute("set-action", json!({"shutdown": "poweroff"}))?;
        let reply = machine.monitor.human(&format!("gdbserver {device}"))?;
        // It says "Waiting for gdb connection", or why not.
        if !reply.contains("Waiting for gdb") {
            let reason = format!("does not listen at {address} for gdb: {}", reply.trim());
            let error = Error::about(ErrorKind::Command, Object::Process(machine.pid), reason);
            return Err(error.help("name a port that is free, or a socket in a directory that exists"));
        }
        let socket = match address {
            GdbAddress::Socket(path) => Some(path.clone()),
            GdbAddress::Tcp(_) => None,
        };
        Ok(DebuggedMachine { started, pid: machine.pid, socket, _served: served })
    }

    /// The process id of QEMU. It ends when gdb kills the machine.
    pub fn pid(&self) -> i32 {
        self.pid
    }
}

impl Drop for DebuggedMachine {
    fn drop(&mut self) {
        self.started.kill();
        if let Some(socket) = &self.socket {
            // QEMU has removed it if it has ended by itself.
            let _ = std::fs::remove_file(socket);
        }
    }
}
