//! Freezes a process tree by ptrace, without CRIU.
//!
//! If the freezing process is killed, the kernel resumes all tracees.

use std::collections::{HashSet, VecDeque};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, SigmaskHow, sigprocmask};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, fork};
use pagemark::sys::proc::tree::{self, Member};
use pagemark::sys::proc::{self, Stat};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::attach;
use crate::error::{Error, ErrorKind, Object, Result, SentError};
use crate::ptrace;

/// Longest time limit of a system call that starts again after a freeze with its full limit. A
/// longer limit would let frequent freezes extend the call for ever.
const RESTARTED_WAIT_MS: u64 = 100;

const NT_X86_XSTATE: libc::c_int = 0x202;

/// Limit of the size of the extended registers, bytes.
const MAX_XSTATE: usize = 16 << 10;

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

/// Threads that the calling thread has stopped by ptrace. They resume when it is dropped.
#[derive(Default)]
pub(crate) struct Held {
    /// Process and thread.
    threads: Vec<(i32, i32)>,
    /// Threads that were asked to stop, and have perhaps stopped before a signal.
    stopping: Vec<i32>,
    /// Ptrace requests must come from the thread that attached.
    not_send: std::marker::PhantomData<*const ()>,
}

impl Held {
    /// Stops all threads of a process, until no new thread appears.
    pub(crate) fn stop_process(&mut self, pid: i32, deadline: Instant) -> Result<()> {
        let mut known: HashSet<i32> = self.threads.iter().filter(|held| held.0 == pid).map(|held| held.1).collect();
        loop {
            // A process that is gone has no threads.
            let new: Vec<i32> =
                proc::threads(pid).unwrap_or_default().into_iter().filter(|&t| known.insert(t)).collect();
            if new.is_empty() {
                return Ok(());
            }
            for tid in new {
                self.attach(pid, tid)?;
            }
            while let Some(&tid) = self.stopping.last() {
                match ptrace::wait_trap(tid, Some(deadline)) {
                    Ok(true) => self.threads.push((pid, tid)),
                    Ok(false) | Err(libc::ESRCH) => {}
                    Err(libc::ETIMEDOUT) => return Err(attach::does_not_stop(pid, tid)),
                    Err(errno) => return Err(system("wait for", pid, tid, errno)),
                }
                self.stopping.pop();
            }
        }
    }

    /// Requests that a thread stop, unless it has exited.
    fn attach(&mut self, pid: i32, tid: i32) -> Result<()> {
        match ptrace::seize(tid, 0) {
            Ok(()) => self.stopping.push(tid),
            Err(libc::ESRCH) => return Ok(()),
            // The kernel returns the same error for a thread that has exited.
            Err(libc::EPERM) if Stat::read(tid).is_ok_and(|stat| !stat.is_zombie()) => {
                let error = Error::about(ErrorKind::NotPermitted, Object::Thread { tid, pid }, "may not be traced");
                return Err(error.caused_by(io::Error::from_raw_os_error(libc::EPERM)));
            }
            Err(libc::EPERM) => return Ok(()),
            Err(errno) => return Err(system("attach to", pid, tid, errno)),
        }
        match ptrace::interrupt(tid) {
            Ok(()) | Err(libc::ESRCH) => Ok(()),
            Err(errno) => Err(system("interrupt", pid, tid, errno)),
        }
    }

    /// Stops a process and all its descendants.
    fn stop_tree(&mut self, root_pid: i32, deadline: Instant) -> Result<()> {
        loop {
            // A process is stopped before its children are listed, so that the list is complete. A parent that
            // waits in vfork for its child stops only when the child continues, so the child must
            // not be stopped first.
            let before = self.threads.len();
            let mut seen = HashSet::new();
            let mut todo = VecDeque::from([root_pid]);
            while let Some(pid) = todo.pop_front() {
                if seen.insert(pid) {
                    self.stop_process(pid, deadline)?;
                    todo.extend(proc::children(pid).unwrap_or_default());
                }
            }
            // The loop repeats for children that were given another parent within the tree meanwhile.
            if self.threads.len() == before {
                return members(root_pid).map(drop);
            }
        }
    }

    fn registers(&self) -> Result<Vec<ThreadRegisters>> {
        self.threads.iter().filter_map(|&(pid, tid)| registers(pid, tid).transpose()).collect()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // Only a stopped thread can be detached. One that has stopped before a signal loses it.
        let deadline = ptrace::deadline(Duration::from_millis(100));
        let stopping = self.stopping.iter().filter(|&&tid| ptrace::wait_trap(tid, Some(deadline)) == Ok(true));
        for &tid in self.threads.iter().map(|(_, tid)| tid).chain(stopping) {
            // An error here means that the thread is gone.
            let _ = ptrace::registers(tid).and_then(|mut registers| {
                if ptrace::restart_interrupted_call(tid, &mut registers, RESTARTED_WAIT_MS)? {
                    ptrace::set_registers(tid, &registers)?;
                }
                Ok(())
            });
            let _ = ptrace::detach(tid);
        }
    }
}

/// Reads the registers of a stopped thread. None if the thread is gone.
fn registers(pid: i32, tid: i32) -> Result<Option<ThreadRegisters>> {
    let mut buffer = vec![0; MAX_XSTATE];
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
        Err(errno) => Err(system("read the registers of", pid, tid, errno)),
    }
}

fn system(operation: &'static str, pid: i32, tid: i32, errno: libc::c_int) -> Error {
    Error::system(operation, Object::Thread { tid, pid })(io::Error::from_raw_os_error(errno))
}

/// The processes that a holder stops.
#[derive(Clone, Copy)]
enum Scope {
    /// A process and all its descendants.
    Tree(i32),
    /// One process.
    Process(i32),
}

/// A frozen process tree. It resumes when this is dropped and when this process dies.
///
/// A process of its own, the holder, traces the tree. If the tracer were in the process of a
/// tracee's parent, the kernel would report the stops also to the parent's `wait`; a program that
/// waits for a child that it started would take a stop for the exit.
#[derive(Debug)]
pub struct Freezer {
    members: Vec<Member>,
    frozen_at: Instant,
    holder: Holder,
}

/// The processes of a tree.
pub(crate) fn members(root_pid: i32) -> Result<Vec<Member>> {
    tree::members(root_pid).map_err(attach::failed("list the processes below", root_pid))
}

impl Freezer {
    /// Stops every thread of a process and of all its descendants. None of them may be traced
    /// already.
    ///
    /// # Errors
    /// [`ErrorKind::Gone`], [`ErrorKind::NotPermitted`], [`ErrorKind::DoesNotStop`] and others; the
    /// tree keeps running.
    pub fn freeze(root_pid: i32) -> Result<Freezer> {
        let frozen_at = Instant::now();
        let holder = Holder::start(Scope::Tree(root_pid))?;
        Ok(Freezer { members: members(root_pid)?, frozen_at, holder })
    }

    /// The frozen processes, the root first.
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
    /// They cannot be read; the tree stays frozen.
    pub fn registers(&self) -> Result<Vec<ThreadRegisters>> {
        self.holder.ask(&Order::Registers)
    }

    /// Resumes the tree. Returns the time since the first thread was about to be stopped.
    ///
    /// # Errors
    /// [`ErrorKind::NoHolder`]: the holder has died, so the tree was running already.
    pub fn thaw(self) -> Result<Duration> {
        self.holder.ask::<()>(&Order::Thaw)?;
        Ok(self.frozen_at.elapsed())
    }
}

/// Runs `work` while all threads of one process are stopped.
pub(crate) fn while_stopped<T>(pid: i32, work: impl FnOnce() -> T) -> Result<T> {
    let holder = Holder::start(Scope::Process(pid))?;
    let result = work();
    holder.ask::<()>(&Order::Thaw)?;
    Ok(result)
}

/// A command to the holder.
#[derive(Serialize, Deserialize)]
enum Order {
    Registers,
    Thaw,
}

/// The process that holds others stopped. They resume when this is dropped.
#[derive(Debug)]
struct Holder {
    pid: Pid,
    /// When it is closed, the holder resumes the processes and exits.
    socket: Option<UnixStream>,
}

impl Holder {
    fn start(scope: Scope) -> Result<Holder> {
        let (socket, other) = UnixStream::pair().map_err(no_holder)?;
        // SAFETY: the child has a copy of this thread alone. It allocates, which the C library allows after
        // a fork, takes no lock of this program, does not return from here, and ends without
        // running destructors or exit handlers.
        match unsafe { fork() }.map_err(|error| no_holder(error.into()))? {
            ForkResult::Child => {
                drop(socket);
                // A panic must not unwind into the copy of the caller.
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

    fn ask<T: DeserializeOwned>(&self, order: &Order) -> Result<T> {
        let mut socket = self.socket.as_ref().ok_or_else(holder_is_dead)?;
        send(&mut socket, order).map_err(no_holder)?;
        self.answer()
    }

    fn answer<T: DeserializeOwned>(&self) -> Result<T> {
        let mut socket = self.socket.as_ref().ok_or_else(holder_is_dead)?;
        let answer: Result<T, SentError> = receive(&mut socket).map_err(no_holder)?;
        Ok(answer?)
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.socket = None;
        // An error means that the holder was already waited for.
        let _ = waitpid(self.pid, None);
    }
}

fn no_holder(source: io::Error) -> Error {
    Error::of(ErrorKind::NoHolder, "start or reach the process that holds the frozen ones", Object::None, source)
}

fn holder_is_dead() -> Error {
    no_holder(io::ErrorKind::BrokenPipe.into())
}

/// The main function of the holder.
fn hold(scope: Scope, mut socket: &UnixStream) {
    // Signals of the terminal are blocked: a holder that is interrupted would leave calls of the
    // stopped processes interrupted.
    let _ = sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), None);
    let mut held = Held::default();
    let deadline = ptrace::deadline(ptrace::STOP_LIMIT);
    let stopped = match scope {
        Scope::Tree(root_pid) => held.stop_tree(root_pid, deadline),
        Scope::Process(pid) => held.stop_process(pid, deadline),
    };
    if stopped.is_err() {
        // The processes resume before the error is reported.
        held = Held::default();
    }
    if send(&mut socket, &stopped.map_err(SentError::from)).is_err() {
        return;
    }
    while let Ok(order) = receive(&mut socket) {
        let sent = match order {
            Order::Registers => send(&mut socket, &held.registers().map_err(SentError::from)),
            Order::Thaw => {
                drop(held);
                let _ = send(&mut socket, &Ok::<(), SentError>(()));
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
