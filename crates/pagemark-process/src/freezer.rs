//! Stops a whole process tree by ptrace, without CRIU.
//!
//! Should this process die meanwhile, the kernel lets all tracees run on.

use std::collections::{HashSet, VecDeque};
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

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
        operation: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The thread that holds the tree could not be started, or has died; then the tree runs.
    #[error("the thread that holds the tree is not there: {0}")]
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
    fn stop_tree(&mut self, root_pid: i32, deadline: Instant) -> Result<Vec<Member>, FreezeError> {
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
                return Ok(family::members(root_pid)?);
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
    FreezeError::System { pid, tid, operation, source: io::Error::from_raw_os_error(errno) }
}

enum Request {
    Registers(Sender<Result<Vec<ThreadRegisters>, FreezeError>>),
    Thaw(Sender<Duration>),
}

/// A stopped process tree. It runs on when this is dropped.
#[derive(Debug)]
pub struct Freezer {
    members: Vec<Member>,
    frozen_at: Instant,
    requests: Option<Sender<Request>>,
    holder: Option<JoinHandle<()>>,
}

impl Freezer {
    /// Stops a process and all its descendants, every thread of them. None of them may be traced already.
    ///
    /// # Errors
    /// [`FreezeError`]; the tree runs.
    pub fn freeze(root_pid: i32) -> Result<Freezer, FreezeError> {
        let (frozen, is_frozen) = channel();
        let (requests, orders) = channel();
        let holder = std::thread::Builder::new()
            .name("pagemark-freeze".to_owned())
            .spawn(move || hold(root_pid, &frozen, &orders))
            .map_err(FreezeError::NoHolder)?;
        let members = is_frozen.recv().map_err(|_| dead())??;
        Ok(Freezer { members, frozen_at: Instant::now(), requests: Some(requests), holder: Some(holder) })
    }

    /// The stopped processes, the root first.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// When the last thread had stopped.
    pub fn frozen_at(&self) -> Instant {
        self.frozen_at
    }

    /// The registers of every thread.
    ///
    /// # Errors
    /// They can't be read; the tree stays stopped.
    pub fn registers(&self) -> Result<Vec<ThreadRegisters>, FreezeError> {
        let (answer, answered) = channel();
        self.request(Request::Registers(answer))?;
        answered.recv().map_err(|_| dead())?
    }

    /// Lets the tree run on. Returns how long it was stopped, from the first thread on.
    ///
    /// # Errors
    /// [`FreezeError::NoHolder`]: it ran already.
    pub fn thaw(self) -> Result<Duration, FreezeError> {
        let (answer, answered) = channel();
        self.request(Request::Thaw(answer))?;
        answered.recv().map_err(|_| dead())
    }

    fn request(&self, request: Request) -> Result<(), FreezeError> {
        self.requests.as_ref().and_then(|requests| requests.send(request).ok()).ok_or_else(dead)
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        drop(self.requests.take());
        if let Some(holder) = self.holder.take() {
            // Its panic would have been told by the request that met it.
            let _ = holder.join();
        }
    }
}

fn dead() -> FreezeError {
    FreezeError::NoHolder(io::Error::from(io::ErrorKind::BrokenPipe))
}

/// The life of the thread that holds a tree: ptrace obeys only the thread that attached.
fn hold(root_pid: i32, frozen: &Sender<Result<Vec<Member>, FreezeError>>, orders: &Receiver<Request>) {
    let since = Instant::now();
    let mut held = Held::default();
    let stopped = held.stop_tree(root_pid, ptrace::deadline(PATIENCE));
    if stopped.is_err() {
        // The tree runs before anybody hears of it.
        drop(held);
        let _ = frozen.send(stopped);
        return;
    }
    if frozen.send(stopped).is_err() {
        return;
    }
    for order in orders {
        match order {
            // Whoever asked may have gone away.
            Request::Registers(answer) => drop(answer.send(held.registers())),
            Request::Thaw(answer) => {
                drop(held);
                let _ = answer.send(since.elapsed());
                return;
            }
        }
    }
}

/// Runs `work` while all threads of one process are stopped.
pub(crate) fn while_stopped<T>(pid: i32, work: impl FnOnce() -> T) -> Result<T, FreezeError> {
    let mut held = Held::default();
    held.stop_process(pid, ptrace::deadline(PATIENCE))?;
    Ok(work())
}
