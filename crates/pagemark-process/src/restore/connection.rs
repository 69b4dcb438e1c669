//! CRIU's side of a delivery: the userfaultfds of the processes, and the gate in which CRIU waits.

use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use pagemark::{Address, PAGE_SIZE, Store};
use pagemark_linux::proc::Process;
use pagemark_linux::userfaultfd::{MissingPages, MissingPagesEvent};
use pagemark_trace::error::{Error, ErrorKind, Object};
use pagemark_trace::{RecordedPid, attach};

use super::gate::Gate;
use super::memory::ProcessMemory;
use super::running::below;
use crate::criu::descriptors::receive_descriptor;

/// The socket in the images directory to which CRIU connects.
const SOCKET: &str = "lazy-pages.socket";

/// What CRIU sends in place of a process id when the restore is complete.
const RESTORE_FINISHED: i32 = 0x5253_5446;

/// Milliseconds that a wait for CRIU takes at most, so that its end is noticed.
pub(super) const POLL_MS: u16 = 1;

/// The connection with a CRIU that restores.
pub(super) struct Connection<'a> {
    listener: UnixListener,
    /// CRIU's end is open until it exits: it sends a last message before the processes run.
    stream: Option<UnixStream>,
    processes: Vec<Recipient<'a>>,
    /// None once it is open, or abandoned.
    gate: Option<Gate>,
    /// CRIU waits in the gate.
    is_reached: bool,
    /// The root process, once CRIU waits, if CRIU reports it.
    root: Option<Process>,
    store: &'a (dyn Store + Sync),
}

/// A gate in which CRIU waits. Dropped, CRIU fails, and kills the processes.
pub(super) struct ReachedGate {
    gate: Gate,
    /// CRIU's end is open until it exits.
    stream: Option<UnixStream>,
}

impl ReachedGate {
    /// A gate of a restore without a connection.
    pub(super) fn without_connection(gate: Gate) -> ReachedGate {
        ReachedGate { gate, stream: None }
    }

    /// Lets the processes run. The result is kept until CRIU has ended.
    pub(super) fn open(self) -> Result<Option<UnixStream>, Error> {
        self.gate.open().map_err(Error::criu_io("let CRIU continue"))?;
        Ok(self.stream)
    }
}

/// A process whose memory is delivered.
struct Recipient<'a> {
    memory: &'a ProcessMemory,
    /// None until CRIU has sent it.
    missing: Option<Arc<MissingPages>>,
}

impl<'a> Connection<'a> {
    /// Waits for CRIU in its images directory.
    pub(super) fn new(
        directory: &Path,
        memory: &'a [ProcessMemory],
        gate: Gate,
        store: &'a (dyn Store + Sync),
    ) -> Result<Connection<'a>, Error> {
        let listener = listen(directory).map_err(Error::criu_io("make a socket for CRIU"))?;
        let processes = memory.iter().map(|memory| Recipient { memory, missing: None }).collect();
        Ok(Connection { listener, stream: None, processes, gate: Some(gate), is_reached: false, root: None, store })
    }

    /// Waits a moment for something to do, and does it. True if CRIU has reached the gate.
    pub(super) fn step(&mut self) -> Result<bool, Error> {
        let source = match &self.stream {
            Some(stream) => stream.as_fd(),
            None => self.listener.as_fd(),
        };
        let mut watched = vec![PollFd::new(source, PollFlags::POLLIN)];
        let notice = self.gate.as_ref().filter(|_| !self.is_reached).map(Gate::reached);
        watched.extend(notice.map(|gate| PollFd::new(gate, PollFlags::POLLIN)));
        let missing = self.processes.iter().filter_map(|process| process.missing.as_deref());
        watched.extend(missing.map(|missing| PollFd::new(missing.as_fd(), PollFlags::POLLIN)));
        match poll(&mut watched, PollTimeout::from(POLL_MS)) {
            Ok(0) | Err(Errno::EINTR) => return Ok(false),
            Ok(_) => {}
            Err(error) => return Err(Error::criu_io("wait for CRIU")(error.into())),
        }
        let is_ready = |at: usize| watched.get(at).and_then(PollFd::any).unwrap_or_default();
        let is_message = is_ready(0);
        // CRIU has sent all userfaultfds before it reaches the gate. They are taken first.
        let is_reached = notice.is_some() && is_ready(1) && !is_message;
        if is_message {
            self.receive()?;
        }
        for process in &self.processes {
            self.answer_faults(process)?;
        }
        if is_reached && let Some(gate) = &mut self.gate {
            self.root = gate.take_root().map_err(Error::criu_io("wait for CRIU"))?;
            self.is_reached = true;
        }
        Ok(is_reached)
    }

    /// Takes a message of CRIU: a process id, and the userfaultfd of that process.
    fn receive(&mut self) -> Result<(), Error> {
        let broken = |error| Error::criu_io("receive a userfaultfd from CRIU")(error);
        let Some(stream) = &mut self.stream else {
            let (stream, _) = match self.listener.accept() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                accepted => accepted.map_err(broken)?,
            };
            stream.set_nonblocking(false).map_err(broken)?;
            self.stream = Some(stream);
            return Ok(());
        };
        let mut number = [0; 4];
        match stream.read_exact(&mut number) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                // CRIU has ended, which is noticed elsewhere.
                std::thread::sleep(std::time::Duration::from_millis(u64::from(POLL_MS)));
                return Ok(());
            }
            received => received.map_err(broken)?,
        }
        let number = i32::from_ne_bytes(number);
        // A zombie has no memory; its number is negative.
        if number < 0 || number == RESTORE_FINISHED {
            return Ok(());
        }
        let pid = RecordedPid::new(number);
        let descriptor = receive_descriptor(stream, 0).map_err(broken)?;
        if let Some(process) = self.processes.iter_mut().find(|process| process.memory.pid == pid) {
            // SAFETY: CRIU sends the userfaultfd that it has made in the process that it restores.
            process.missing = Some(Arc::new(unsafe { MissingPages::from_registered(descriptor) }));
            return Ok(());
        }
        Err(Error::damaged(format!("CRIU restores process {pid}, whose memory the checkpoint does not have")))
    }

    /// Fills the pages for which threads of a process wait. CRIU's code in the processes touches
    /// few pages before they run.
    fn answer_faults(&self, process: &Recipient<'_>) -> Result<(), Error> {
        let Recipient { memory, missing: Some(missing) } = process else { return Ok(()) };
        while let Some(event) = missing.next().map_err(Error::criu_io("read a userfaultfd"))? {
            let address = match event {
                MissingPagesEvent::Fault(address) => address,
                event => {
                    let reason = format!("the mappings of process {} changed ({event:?})", memory.pid);
                    return Err(Error::criu_failed("restore mappings", reason));
                }
            };
            let page = address.page();
            let pages = memory.pages(self.store)?;
            let filled = match pages.position(page) {
                Some(position) => {
                    let mut content = [0; PAGE_SIZE];
                    self.store.get_page(pages.ids[position], &mut content)?;
                    missing.fill(page.address(), &[content])
                }
                None => missing.fill_with_zeros(page.address()),
            };
            filled.map_err(|error| not_filled(memory.pid, page.address(), error))?;
        }
        Ok(())
    }

    /// All processes, once CRIU waits in the gate: those with the `known` ids here, or those of a
    /// container.
    pub(super) fn all_processes(&self, known: Option<&[i32]>) -> Result<Vec<Process>, Error> {
        let unknown = || Error::criu_failed("restore a container", "it did not report the first process");
        match known {
            Some(pids) => pids.iter().map(|&pid| attach::find(pid)).collect(),
            None => self.root.map(below).ok_or_else(unknown),
        }
    }

    /// The root process, once CRIU waits in the gate, if CRIU reports it.
    pub(super) fn root(&self) -> Option<Process> {
        self.root
    }

    /// The processes that have missing pages. CRIU must wait in the gate, so that they have their
    /// mappings.
    pub(super) fn targets(&self) -> Result<Vec<(RecordedPid, Arc<MissingPages>)>, Error> {
        let incomplete = self.processes.iter().filter(|process| !process.memory.delivered.is_empty());
        incomplete.map(|process| Ok((process.memory.pid, process.missing()?.clone()))).collect()
    }

    /// Like [`Connection::targets`], with their memory. Their faults are answered no longer.
    pub(super) fn take_processes(&mut self) -> Result<Vec<(&'a ProcessMemory, Arc<MissingPages>)>, Error> {
        let processes = std::mem::take(&mut self.processes).into_iter();
        let incomplete = processes.filter(|process| !process.memory.delivered.is_empty());
        let with_missing = |process: Recipient<'a>| {
            let missing = process.missing()?.clone();
            Ok((process.memory, missing))
        };
        incomplete.map(with_missing).collect()
    }

    /// The gate in which CRIU waits. The kernel ends the registrations of the processes that were
    /// not taken; a page of them that is missing then holds zeros.
    ///
    /// # Errors
    /// The gate was given up.
    pub(super) fn take_gate(&mut self) -> Result<ReachedGate, Error> {
        self.processes.clear();
        let gate = self.gate.take().ok_or_else(no_script)?;
        Ok(ReachedGate { gate, stream: self.stream.take() })
    }

    /// Gives up: the gate fails, and nothing waits for a page any more.
    pub(super) fn abandon(&mut self) {
        self.gate = None;
        self.processes.clear();
    }
}

impl Recipient<'_> {
    fn missing(&self) -> Result<&Arc<MissingPages>, Error> {
        self.missing.as_ref().ok_or_else(|| {
            let reason = format!("it sent no userfaultfd of process {}", self.memory.pid);
            Error::criu_failed("leave the memory of the processes out", reason)
        })
    }
}

/// A socket in the images directory. Its path may be longer than the address of a socket.
fn listen(directory: &Path) -> io::Result<UnixListener> {
    let opened = std::fs::File::open(directory)?;
    let listener = UnixListener::bind(format!("/proc/self/fd/{}/{SOCKET}", opened.as_raw_fd()))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// CRIU restored the processes without waiting in the gate.
pub(super) fn no_script() -> Error {
    Error::criu_failed("wait for the memory of the processes", "it did not run its script")
}

pub(super) fn not_filled(pid: RecordedPid, page: Address, error: io::Error) -> Error {
    let kind = if error.raw_os_error() == Some(libc::ESRCH) { ErrorKind::Gone } else { ErrorKind::Criu };
    let operation = format!("fill page {:#x} of", page.get());
    Error::of(kind, operation, Object::Process(pid.get()), error)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::Command;

    use nix::fcntl::OFlag;
    use nix::unistd::pipe2;
    use pagemark::store::MemoryStore;
    use pagemark::{ContentId, PageNumber, RangeSet};

    use super::*;
    use crate::criu::descriptors::send_descriptor;

    #[test]
    fn a_gate_that_is_reached_before_the_connection_is_accepted_has_all_userfaultfds() {
        let directory = tempfile::tempdir().unwrap();
        let (gate, store) = (Gate::new().unwrap(), MemoryStore::new());
        let script = gate.path();
        let first = PageNumber::new(16);
        let delivered = vec![first..first + 1];
        let memory = [7, 8]
            .map(|pid: u32| ProcessMemory::new(pid.into(), ContentId::ZERO, delivered.clone(), RangeSet::new(), None));
        let mut connection = Connection::new(directory.path(), &memory, gate, &store).unwrap();

        let mut criu = UnixStream::connect(directory.path().join(SOCKET)).unwrap();
        // Nothing can be read from it, as from a userfaultfd without events.
        let (silent, _writer) = pipe2(OFlag::O_NONBLOCK).unwrap();
        for pid in [7_i32, 8] {
            criu.write_all(&pid.to_ne_bytes()).unwrap();
            send_descriptor(criu.as_raw_fd(), silent.as_raw_fd()).unwrap();
        }
        let mut waiting = Command::new(script).env("CRTOOLS_SCRIPT_ACTION", "post-restore").spawn().unwrap();
        let reached = connection.gate.as_ref().unwrap().reached();
        poll(&mut [PollFd::new(reached, PollFlags::POLLIN)], PollTimeout::NONE).unwrap();

        while !connection.step().unwrap() {}
        assert_eq!(connection.targets().unwrap().iter().map(|(pid, _)| pid.get()).collect::<Vec<_>>(), [7, 8]);
        let _stream = connection.take_gate().unwrap().open().unwrap();
        assert!(waiting.wait().unwrap().success());
    }
}
