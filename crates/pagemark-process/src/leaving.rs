//! Restored processes that continue without the machine of `pagemark-kvm` in which they were.
//!
//! Before they run, they are marked: none of their threads enters the machine, and none makes it
//! anew ([`pagemark::sys::parking`]). When all threads of a process wait for that, those included
//! that waited in a system call of the program, they take the program's registers, and what is left
//! of the monitor is removed from the process.

use std::borrow::Cow;
use std::io::{self, IoSliceMut};
use std::mem::offset_of;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;
use pagemark::sys::parking::{ADDRESS, Header, LEAVING, LEFT, PREPARED, PREPARING, RELEASED};
use pagemark::sys::proc::{self, Stat, maps};

use crate::error::{Error, ErrorKind, Object, Result};
use crate::inject;
use crate::parked::is_in_machine;

/// How long the threads of a process may take until all wait, and until all have left.
const LEAVE_LIMIT: Duration = Duration::from_secs(10);

/// Pause between two looks.
const PAUSE: Duration = Duration::from_millis(1);

/// Names of mappings that the kernel has made for every process.
const OF_KERNEL: [&[u8]; 3] = [b"[vdso]", b"[vsyscall]", b"[vvar"];

/// Marks those of the processes that are in a machine. None of them runs.
///
/// # Errors
/// Their memory cannot be written.
pub(crate) fn begin(pids: &[i32]) -> Result<()> {
    for &pid in pids.iter().filter(|&&pid| has_description(pid)) {
        let is_same = proc::is_in_own_pid_namespace(pid).unwrap_or(false);
        let parker = if is_same { std::process::id() as i32 } else { 0 };
        let state = Word { pid, offset: offset_of!(Header, state) };
        if state.get()? != RELEASED {
            return Err(stays(pid, "was saved while it had its machine"));
        }
        Word { pid, offset: offset_of!(Header, parker) }.set(parker.cast_unsigned())?;
        for offset in [offset_of!(Header, waiting), offset_of!(Header, left)] {
            Word { pid, offset }.set(0)?;
        }
        state.set(LEAVING)?;
    }
    Ok(())
}

/// As [`is_in_machine`], also where the page comes on demand: the first read waits for it.
fn has_description(pid: i32) -> bool {
    let mut byte = [0];
    let place = RemoteIoVec { base: ADDRESS as usize, len: 1 };
    process_vm_readv(Pid::from_raw(pid), &mut [IoSliceMut::new(&mut byte)], &[place]).is_ok() && is_in_machine(pid)
}

/// Has the marked processes, which run, leave their machines.
///
/// # Errors
/// One cannot. It may be neither in its machine nor outside.
pub(crate) fn complete(pids: &[i32]) -> Result<()> {
    for &pid in pids.iter().filter(|&&pid| is_in_machine(pid)) {
        match leave(pid) {
            // It has ended, or executes another program.
            Err(_) if !is_in_machine(pid) => {}
            left => left?,
        }
    }
    Ok(())
}

fn leave(pid: i32) -> Result<()> {
    let state = Word { pid, offset: offset_of!(Header, state) };
    if state.get()? != LEAVING {
        return Err(stays(pid, "has its machine"));
    }
    let deadline = Instant::now() + LEAVE_LIMIT;
    let waiting = wait_for_all(pid, deadline)?;
    state.set(PREPARING)?;
    until(pid, deadline, || Ok(state.get()? == PREPARED))?;
    let mappings = mappings_of_monitor(pid)?;
    state.set(LEFT)?;
    let left = Word { pid, offset: offset_of!(Header, left) };
    until(pid, deadline, || Ok(left.get()? == waiting))?;
    until(pid, deadline, || match inject::remove_monitor(pid, mappings.clone()) {
        Err(error) if error.kind() == ErrorKind::Busy => Ok(false),
        removed => removed.map(|()| true),
    })
}

/// Waits until all threads of a process wait to leave. Returns how many they are.
fn wait_for_all(pid: i32, deadline: Instant) -> Result<u32> {
    let waiting = Word { pid, offset: offset_of!(Header, waiting) };
    let at = offset_of!(Header, blocking_call);
    let place = [0, 8].map(|further| Word { pid, offset: at + further }.get_both());
    let [first, second] = place;
    let place = [first?, second?];
    let mut count = 0;
    until(pid, deadline, || {
        let threads = proc::threads(pid).map_err(failed(pid))?;
        let is_live = |thread: &i32| Stat::read(*thread).is_ok_and(|stat| !stat.is_zombie());
        let live = threads.into_iter().filter(is_live).count();
        count = waiting.get()?;
        if count as usize >= live {
            return Ok(true);
        }
        inject::interrupt_calls(pid, place).map(|()| false)
    })?;
    Ok(count)
}

/// The mappings of the monitor: all that the program cannot have, but for those of the kernel.
fn mappings_of_monitor(pid: i32) -> Result<Vec<Range<u64>>> {
    let program_end = Word { pid, offset: offset_of!(Header, program_end) }.get_both()?;
    let all = maps::read(pid).map_err(failed(pid))?;
    let of_monitor = all.iter().filter(|mapping| {
        mapping.start.get() >= program_end && !OF_KERNEL.iter().any(|name| mapping.name.starts_with(name))
    });
    Ok(of_monitor.map(|mapping| mapping.start.get()..mapping.end.get()).collect())
}

/// Waits until `is_done`.
fn until(pid: i32, deadline: Instant, mut is_done: impl FnMut() -> Result<bool>) -> Result<()> {
    while !is_done()? {
        if Instant::now() > deadline {
            let reason = format!("has threads that do not leave its machine within {} s", LEAVE_LIMIT.as_secs());
            return Err(stays(pid, reason));
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

fn stays(pid: i32, reason: impl Into<Cow<'static, str>>) -> Error {
    Error::about(ErrorKind::StaysInMachine, Object::Process(pid), reason)
}

fn failed(pid: i32) -> impl FnOnce(io::Error) -> Error {
    move |source| match source {
        gone if proc::is_gone(&gone) => Error::no_process(pid),
        source => Error::about(ErrorKind::System, Object::Process(pid), "cannot leave its machine").caused_by(source),
    }
}

/// A word of the description of the machine of a process.
struct Word {
    pid: i32,
    offset: usize,
}

impl Word {
    fn get(&self) -> Result<u32> {
        let mut bytes = [0; 4];
        self.read(&mut bytes).map(|()| u32::from_ne_bytes(bytes))
    }

    /// The word and the next one, as one number.
    fn get_both(&self) -> Result<u64> {
        let mut bytes = [0; 8];
        self.read(&mut bytes).map(|()| u64::from_ne_bytes(bytes))
    }

    fn read(&self, bytes: &mut [u8]) -> Result<()> {
        let read = proc::open_memory(self.pid).and_then(|memory| memory.read_exact_at(bytes, self.address()));
        read.map_err(|error| self.failed(error))
    }

    fn set(&self, word: u32) -> Result<()> {
        let written = proc::open_memory_for_writing(self.pid)
            .and_then(|memory| memory.write_all_at(&word.to_ne_bytes(), self.address()));
        written.map_err(|error| self.failed(error))
    }

    fn address(&self) -> u64 {
        ADDRESS + self.offset as u64
    }

    /// A process that ends loses its memory before it is a zombie.
    fn failed(&self, error: io::Error) -> Error {
        if proc::live_thread(self.pid).is_none() { Error::no_process(self.pid) } else { failed(self.pid)(error) }
    }
}
