//! Freezes a process tree by ptrace, without CRIU.
//!
//! If the freezing process is killed, the kernel resumes all tracees.

use std::collections::{HashSet, VecDeque};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::sys::wait::waitpid;
use nix::unistd::Pid;
use pagemark_linux::exit_reports::ExitReports;
use pagemark_linux::helper;
use pagemark_linux::proc::tree::{self, Member};
use pagemark_linux::proc::{self, Process, Stat};
use pagemark_linux::ptrace;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::attach;
use crate::error::{Error, ErrorKind, Object, Result, SentError};

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
pub struct Held {
    /// Process and thread.
    threads: Vec<(i32, i32)>,
    /// Threads that were asked to stop, and have perhaps stopped before a signal.
    stopping: Vec<i32>,
    /// Ptrace requests must come from the thread that attached.
    not_send: std::marker::PhantomData<*const ()>,
}

impl Held {
    /// Stops all threads of a process, until no new thread appears.
    pub fn stop_process(&mut self, pid: i32, deadline: Instant) -> Result<()> {
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
                if ptrace::restart_interrupted_call(&mut registers, RESTARTED_WAIT_MS) {
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
    Tree(Process),
    /// One process.
    Process(Process),
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
pub fn members(root_pid: i32) -> Result<Vec<Member>> {
    tree::members(root_pid).map_err(attach::failed("list the processes below", root_pid))
}

impl Freezer {
    /// Stops every thread of a process and of all its descendants. None of them may be traced
    /// already.
    ///
    /// # Errors
    /// [`ErrorKind::Gone`], [`ErrorKind::NotPermitted`], [`ErrorKind::DoesNotStop`] and others; the
    /// tree keeps running.
    pub fn freeze(root: Process) -> Result<Freezer> {
        let frozen_at = Instant::now();
        let holder = Holder::start(Scope::Tree(root))?;
        Ok(Freezer { members: members(root.pid)?, frozen_at, holder })
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
pub fn while_stopped<T>(process: Process, work: impl FnOnce() -> T) -> Result<T> {
    let holder = Holder::start(Scope::Process(process))?;
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
        let own_end = socket.as_raw_fd();
        // SAFETY: the holder takes no lock of this program, and does not use the socket that it closes.
        let started = unsafe {
            helper::start(|| {
                // It must see that this process has closed it.
                libc::close(own_end);
                hold(scope, &other);
                libc::EXIT_SUCCESS
            })
        };
        let pid = started.map_err(|error| no_holder(error.into()))?;
        drop(other);
        let holder = Holder { pid, socket: Some(socket) };
        holder.answer::<()>()?;
        Ok(holder)
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

/// The main function of the holder. Signals of the terminal are blocked: a holder that is
/// interrupted would leave calls of the stopped processes interrupted.
fn hold(scope: Scope, mut socket: &UnixStream) {
    let mut held = Held::default();
    let deadline = ptrace::deadline(ptrace::STOP_LIMIT);
    let stop = |held: &mut Held| {
        let (Scope::Tree(process) | Scope::Process(process)) = scope;
        match scope {
            Scope::Tree(root) => held.stop_tree(root.pid, deadline)?,
            Scope::Process(process) => held.stop_process(process.pid, deadline)?,
        }
        // No other process gets the id while this one is stopped.
        process.stat().map(drop).ok_or_else(|| Error::gone(process.pid))
    };
    let stopped = match ExitReports::take() {
        Ok(_reports) => stop(&mut held),
        Err(errno) => Err(no_holder(errno.into())),
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

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::process::Command;
    use std::sync::mpsc;

    use pagemark_testing::{STARTED, skip};

    use super::*;
    use crate::inject;

    /// A program with threads that executes itself again and again.
    #[test]
    #[ignore = "is run by a_process_that_executes_programs_does_not_hold_up_its_tracer"]
    fn executes_itself() {
        if std::env::var_os(STARTED).is_none() {
            skip!("is run by a_process_that_executes_programs_does_not_hold_up_its_tracer");
        }
        for _ in 0..8 {
            std::thread::spawn(|| std::thread::sleep(Duration::from_secs(1000)));
        }
        std::thread::sleep(Duration::from_millis(1));
        panic!("{}", itself().exec());
    }

    fn itself() -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "freezer::tests::executes_itself"]).env(STARTED, "1");
        command.stdout(std::process::Stdio::null());
        command
    }

    #[test]
    fn a_process_that_executes_programs_does_not_hold_up_its_tracer() {
        let mut program = itself().spawn().unwrap();
        let process = Process::find(program.id() as i32).unwrap();
        let (done, rounds) = mpsc::channel();
        std::thread::spawn(move || {
            let mut stopped = 0;
            for _ in 0..1000 {
                // It may be about to execute a program, and have no thread that could make a call.
                stopped += u32::from(while_stopped(process, || ()).is_ok());
                let calls = vec![inject::Call { number: libc::SYS_getpid, arguments: [0; 6] }];
                let _ = inject::system_calls(process, calls);
            }
            done.send(stopped).unwrap();
        });
        // Without an end there is no other sign.
        let stopped = rounds.recv_timeout(Duration::from_secs(120));
        program.kill().unwrap();
        program.wait().unwrap();
        assert!(stopped.unwrap() > 500);
    }
}
