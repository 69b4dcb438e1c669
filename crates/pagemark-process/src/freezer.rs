//! Stops a whole process tree by ptrace, without CRIU.
//!
//! Should this process die meanwhile, the kernel lets all tracees run on.

use std::collections::{HashSet, VecDeque};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, SigmaskHow, sigprocmask};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, fork};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::family::{self, FamilyError, Member};
use crate::proc::{self, Stat};
use crate::ptrace;

/// How long a tree is given to stop.
const PATIENCE: Duration = Duration::from_secs(10);

/// A wait with a time limit begins anew after a freeze if the limit is at most this, so that freezes in quick succession
/// can't make it last for ever.
const RENEWED_WAIT_MS: u64 = 100;

const NT_X86_XSTATE: libc::c_int = 0x202;

/// Bytes of extended registers at most.
const MOST_XSTATE: usize = 16 << 10;

/// A process tree could not be stopped, or its registers not be read. It runs.
#[derive(Debug, thiserror::Error)]
pub enum FreezeError {
    /// The processes could not be listed.
    #[error(transparent)]
    Family(#[from] FamilyError),
    /// A thread can't be traced.
    #[error("thread {tid} of process {pid} may not be traced: {source}")]
    NotPermitted {
        /// The process.
        pid: i32,
        /// The thread.
        tid: i32,
        /// Why not.
        source: io::Error,
    },
    /// A thread waits in the kernel where nothing interrupts it.
    #[error("thread {tid} of process {pid} did not stop within {} s: it waits in the kernel", PATIENCE.as_secs())]
    DoesNotStop {
        /// The process.
        pid: i32,
        /// The thread.
        tid: i32,
    },
    /// Something else failed.
    #[error("thread {tid} of process {pid}: {operation}: {source}")]
    System {
        /// The process.
        pid: i32,
        /// The thread.
        tid: i32,
        /// What was done.
        operation: String,
        /// Why it failed.
        source: io::Error,
    },
    /// The process that holds the tree could not be started, or has died; then the tree runs.
    #[error("the process that holds the stopped ones is not there: {0}")]
    NoHolder(io::Error),
}

/// Registers of a stopped thread.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct ThreadRegisters {
    /// The process to which it belongs.
    pub pid: i32,
    /// The thread.
    pub tid: i32,
    /// `user_regs_struct`, as `NT_PRSTATUS` has it.
    pub general: Vec<u8>,
    /// `user_fpregs_struct`, as `NT_PRFPREG` has it.
    pub floating_point: Vec<u8>,
    /// The XSAVE area, as `NT_X86_XSTATE` has it; empty where the processor has none.
    pub xstate: Vec<u8>,
    /// Blocked signals, one bit each.
    pub signal_mask: u64,
}

/// Threads that this thread has stopped. They run on when it is dropped.
#[derive(Default)]
pub(crate) struct Held {
    /// Process and thread.
    threads: Vec<(i32, i32)>,
    /// Ptrace belongs to the thread that attached.
    not_send: std::marker::PhantomData<*const ()>,
}

impl Held {
    /// Stops all threads of a process, until no new one appears.
    pub(crate) fn stop_process(&mut self, pid: i32, deadline: Instant) -> Result<(), FreezeError> {
        let mut known: HashSet<i32> = self.threads.iter().filter(|held| held.0 == pid).map(|held| held.1).collect();
        loop {
            // One that is gone has no threads.
            let new: Vec<i32> =
                proc::threads(pid).unwrap_or_default().into_iter().filter(|&t| known.insert(t)).collect();
            if new.is_empty() {
                return Ok(());
            }
            let attached: Vec<i32> = new
                .into_iter()
                .map(|tid| self.attach(pid, tid))
                .filter_map(Result::transpose)
                .collect::<Result<_, _>>()?;
            for tid in attached {
                match ptrace::wait_trap(tid, deadline) {
                    Ok(true) => {}
                    Ok(false) | Err(libc::ESRCH) => self.threads.retain(|held| held.1 != tid),
                    Err(libc::ETIMEDOUT) => return Err(FreezeError::DoesNotStop { pid, tid }),
                    Err(errno) => return Err(system(pid, tid, "waiting for it to stop", errno)),
                }
            }
        }
    }

    /// Asks one thread to stop. None if it has exited.
    fn attach(&mut self, pid: i32, tid: i32) -> Result<Option<i32>, FreezeError> {
        match ptrace::seize(tid, 0) {
            Ok(()) => self.threads.push((pid, tid)),
            Err(libc::ESRCH) => return Ok(None),
            // A thread that has exited answers the same.
            Err(libc::EPERM) if Stat::read(tid).is_ok_and(|stat| !stat.is_zombie()) => {
                return Err(FreezeError::NotPermitted { pid, tid, source: io::Error::from_raw_os_error(libc::EPERM) });
            }
            Err(libc::EPERM) => return Ok(None),
            Err(errno) => return Err(system(pid, tid, "attaching", errno)),
        }
        match ptrace::interrupt(tid) {
            Ok(()) | Err(libc::ESRCH) => Ok(Some(tid)),
            Err(errno) => Err(system(pid, tid, "interrupting", errno)),
        }
    }

    /// Stops a process and all its descendants.
    fn stop_tree(&mut self, root_pid: i32, deadline: Instant) -> Result<(), FreezeError> {
        loop {
            // A process is stopped before its children are listed: then they are all there. And a parent waiting in vfork for
            // its child stops only once the child has gone on, so the child must not be stopped first.
            let before = self.threads.len();
            let mut seen = HashSet::new();
            let mut todo = VecDeque::from([root_pid]);
            while let Some(pid) = todo.pop_front() {
                if seen.insert(pid) {
                    self.stop_process(pid, deadline)?;
                    todo.extend(proc::children(pid).unwrap_or_default());
                }
            }
            // Once more, for children that were given another parent within the tree meanwhile.
            if self.threads.len() == before {
                return family::members(root_pid).map(drop).map_err(FreezeError::from);
            }
        }
    }

    fn registers(&self) -> Result<Vec<ThreadRegisters>, FreezeError> {
        self.threads.iter().filter_map(|&(pid, tid)| registers(pid, tid).transpose()).collect()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        for &(_, tid) in &self.threads {
            // What fails here fails because the thread is gone.
            let again = ptrace::registers(tid).and_then(|mut registers| {
                if ptrace::make_interrupted_call_again(tid, &mut registers, RENEWED_WAIT_MS)? {
                    ptrace::set_registers(tid, &registers)?;
                }
                Ok(())
            });
            if again.is_err() && ptrace::poll(tid) == Ok(None) {
                // It has not stopped yet, and only a stopped thread can be let go.
                let _ = ptrace::wait_trap(tid, ptrace::deadline(Duration::from_millis(100)));
            }
            let _ = ptrace::detach(tid);
        }
    }
}

/// None if the thread is gone.
fn registers(pid: i32, tid: i32) -> Result<Option<ThreadRegisters>, FreezeError> {
    let mut buffer = vec![0; MOST_XSTATE];
    let mut set = |set| ptrace::register_set(tid, set, &mut buffer).map(|length| buffer[..length].to_vec());
    let read = || -> Result<ThreadRegisters, libc::c_int> {
        Ok(ThreadRegisters {
            pid,
            tid,
            general: set(libc::NT_PRSTATUS)?,
            floating_point: set(libc::NT_PRFPREG)?,
            xstate: match set(NT_X86_XSTATE) {
                Err(libc::EINVAL | libc::ENODEV) => Vec::new(),
                other => other?,
            },
            signal_mask: ptrace::signal_mask(tid)?,
        })
    };
    match { read }() {
        Ok(registers) => Ok(Some(registers)),
        Err(libc::ESRCH) => Ok(None),
        Err(errno) => Err(system(pid, tid, "reading its registers", errno)),
    }
}

fn system(pid: i32, tid: i32, operation: &'static str, errno: libc::c_int) -> FreezeError {
    FreezeError::System { pid, tid, operation: operation.into(), source: io::Error::from_raw_os_error(errno) }
}

/// What is stopped.
#[derive(Clone, Copy)]
enum Scope {
    /// A process and all its descendants.
    Tree(i32),
    /// One process.
    Process(i32),
}

/// A stopped process tree. It runs on when this is dropped, and when this process dies.
///
/// The tree is held by a process of its own. The kernel tells of a tracee's stops also whoever waits for it as its parent,
/// if that is in the tracer's process; a program that waits for a child which it has started would take the stop for the end.
#[derive(Debug)]
pub struct Freezer {
    members: Vec<Member>,
    frozen_at: Instant,
    holder: Holder,
}

impl Freezer {
    /// Stops a process and all its descendants, every thread of them. None of them may be traced already.
    ///
    /// # Errors
    /// [`FreezeError`]; the tree runs.
    pub fn freeze(root_pid: i32) -> Result<Freezer, FreezeError> {
        let frozen_at = Instant::now();
        let holder = Holder::start(Scope::Tree(root_pid))?;
        Ok(Freezer { members: family::members(root_pid)?, frozen_at, holder })
    }

    /// The stopped processes, the root first.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// When the first thread was about to be stopped.
    pub fn frozen_at(&self) -> Instant {
        self.frozen_at
    }

    /// The registers of every thread.
    ///
    /// # Errors
    /// They can't be read; the tree stays stopped.
    pub fn registers(&self) -> Result<Vec<ThreadRegisters>, FreezeError> {
        self.holder.ask(&Order::Registers)
    }

    /// Lets the tree run on. Returns how long it was stopped, from the first thread on.
    ///
    /// # Errors
    /// [`FreezeError::NoHolder`]: it ran already.
    pub fn thaw(self) -> Result<Duration, FreezeError> {
        self.holder.ask::<()>(&Order::Thaw)?;
        Ok(self.frozen_at.elapsed())
    }
}

/// Runs `work` while all threads of one process are stopped.
pub(crate) fn while_stopped<T>(pid: i32, work: impl FnOnce() -> T) -> Result<T, FreezeError> {
    let holder = Holder::start(Scope::Process(pid))?;
    let result = work();
    holder.ask::<()>(&Order::Thaw)?;
    Ok(result)
}

/// What the holder is told to do.
#[derive(Serialize, Deserialize)]
enum Order {
    Registers,
    Thaw,
}

/// A failure as the holder reports it.
#[derive(Serialize, Deserialize)]
enum Failure {
    Gone { pid: i32 },
    NotPermitted { pid: i32, tid: i32, errno: i32 },
    DoesNotStop { pid: i32, tid: i32 },
    System { pid: i32, tid: i32, operation: String, errno: i32 },
}

impl From<FreezeError> for Failure {
    fn from(error: FreezeError) -> Failure {
        let errno = |error: &io::Error| error.raw_os_error().unwrap_or(libc::EIO);
        match error {
            FreezeError::Family(FamilyError::Gone { pid }) => Failure::Gone { pid },
            FreezeError::Family(FamilyError::System { pid, source }) => {
                Failure::System { pid, tid: pid, operation: "listing its children".into(), errno: errno(&source) }
            }
            FreezeError::NotPermitted { pid, tid, source } => Failure::NotPermitted { pid, tid, errno: errno(&source) },
            FreezeError::DoesNotStop { pid, tid } => Failure::DoesNotStop { pid, tid },
            FreezeError::System { pid, tid, operation, source } => {
                Failure::System { pid, tid, operation, errno: errno(&source) }
            }
            FreezeError::NoHolder(source) => {
                Failure::System { pid: 0, tid: 0, operation: "holding".into(), errno: errno(&source) }
            }
        }
    }
}

impl From<Failure> for FreezeError {
    fn from(failure: Failure) -> FreezeError {
        match failure {
            Failure::Gone { pid } => FreezeError::Family(FamilyError::Gone { pid }),
            Failure::NotPermitted { pid, tid, errno } => {
                FreezeError::NotPermitted { pid, tid, source: io::Error::from_raw_os_error(errno) }
            }
            Failure::DoesNotStop { pid, tid } => FreezeError::DoesNotStop { pid, tid },
            Failure::System { pid, tid, operation, errno } => {
                FreezeError::System { pid, tid, operation, source: io::Error::from_raw_os_error(errno) }
            }
        }
    }
}

/// The process that holds stopped ones. They run on when this is dropped.
#[derive(Debug)]
struct Holder {
    pid: Pid,
    /// Closed, it lets go.
    socket: Option<UnixStream>,
}

impl Holder {
    fn start(scope: Scope) -> Result<Holder, FreezeError> {
        let (socket, other) = UnixStream::pair().map_err(FreezeError::NoHolder)?;
        // SAFETY: the child runs on a copy of this thread alone. It allocates, which the C library allows after a fork, takes no
        // lock of this program's, does not return from here, and ends without running destructors or exit handlers.
        match unsafe { fork() }.map_err(|error| FreezeError::NoHolder(error.into()))? {
            ForkResult::Child => {
                drop(socket);
                // An unwinding panic must not go on in the copy of the caller.
                let _ = std::panic::catch_unwind(AssertUnwindSafe(|| hold(scope, &other)));
                // SAFETY: it only ends the process.
                unsafe { libc::_exit(0) }
            }
            ForkResult::Parent { child } => {
                drop(other);
                let holder = Holder { pid: child, socket: Some(socket) };
                holder.answer::<()>()?;
                Ok(holder)
            }
        }
    }

    fn ask<T: DeserializeOwned>(&self, order: &Order) -> Result<T, FreezeError> {
        let mut socket = self.socket.as_ref().ok_or_else(dead)?;
        send(&mut socket, order).map_err(FreezeError::NoHolder)?;
        self.answer()
    }

    fn answer<T: DeserializeOwned>(&self) -> Result<T, FreezeError> {
        let mut socket = self.socket.as_ref().ok_or_else(dead)?;
        let answer: Result<T, Failure> = receive(&mut socket).map_err(FreezeError::NoHolder)?;
        Ok(answer?)
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.socket = None;
        // Nobody else waits for it; if somebody did, it is gone all the same.
        let _ = waitpid(self.pid, None);
    }
}

fn dead() -> FreezeError {
    FreezeError::NoHolder(io::Error::from(io::ErrorKind::BrokenPipe))
}

/// The life of the process that holds others.
fn hold(scope: Scope, mut socket: &UnixStream) {
    // Not the terminal's business: an interrupted holder would leave calls of the stopped processes interrupted.
    let _ = sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), None);
    let mut held = Held::default();
    let deadline = ptrace::deadline(PATIENCE);
    let stopped = match scope {
        Scope::Tree(root_pid) => held.stop_tree(root_pid, deadline),
        Scope::Process(pid) => held.stop_process(pid, deadline),
    };
    if stopped.is_err() {
        // The processes run before anybody hears of it.
        held = Held::default();
    }
    if send(&mut socket, &stopped.map_err(Failure::from)).is_err() {
        return;
    }
    while let Ok(order) = receive(&mut socket) {
        let sent = match order {
            Order::Registers => send(&mut socket, &held.registers().map_err(Failure::from)),
            Order::Thaw => {
                drop(held);
                let _ = send(&mut socket, &Ok::<(), Failure>(()));
                return;
            }
        };
        if sent.is_err() {
            return;
        }
    }
}

fn send(socket: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_vec(message)?;
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text);
    socket.write_all(&bytes)
}

fn receive<T: DeserializeOwned>(socket: &mut impl Read) -> io::Result<T> {
    let mut length = [0; 8];
    socket.read_exact(&mut length)?;
    let mut text = vec![0; u64::from_le_bytes(length) as usize];
    socket.read_exact(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}
