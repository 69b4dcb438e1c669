//! Restored processes that continue without the machine of `pagemark-kvm` in which they were.
//!
//! Before they run, they are marked: none of their threads enters the machine, and none makes it
//! anew ([`pagemark_kvm_protocol::description`]). When all threads of a process wait for that,
//! those included that waited in a system call of the program, they take the program's registers,
//! and what is left of the monitor is removed from the process.

use std::borrow::Cow;
use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::time::{Duration, Instant};

use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;
use pagemark_kvm_protocol::description::ADDRESS;
use pagemark_kvm_protocol::outside::ProcessDescription;
use pagemark_kvm_protocol::state::MachineState;
use pagemark_linux::proc::{self, Process, Stat, maps};

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
pub fn begin(processes: &[Process]) -> Result<()> {
    for pid in processes.iter().map(|process| process.pid).filter(|&pid| has_description(pid)) {
        let is_same = proc::is_in_own_pid_namespace(pid).unwrap_or(false);
        let parker = if is_same { std::process::id() as i32 } else { 0 };
        let description = ProcessDescription::of(pid);
        if description.state().map_err(inaccessible(pid))? != Some(MachineState::Released) {
            return Err(stays(pid, "was saved while it had its machine"));
        }
        description.begin_leaving(parker).map_err(inaccessible(pid))?;
    }
    Ok(())
}

/// Like [`is_in_machine`], also where the page comes on demand: the first read waits for it.
fn has_description(pid: i32) -> bool {
    let mut byte = [0];
    let place = RemoteIoVec { base: ADDRESS as usize, len: 1 };
    process_vm_readv(Pid::from_raw(pid), &mut [IoSliceMut::new(&mut byte)], &[place]).is_ok() && is_in_machine(pid)
}

/// Has the marked processes, which run, leave their machines.
///
/// # Errors
/// One cannot. It may be neither in its machine nor outside.
pub fn complete(processes: &[Process]) -> Result<()> {
    for &process in processes.iter().filter(|process| is_in_machine(process.pid)) {
        match leave(process) {
            // It has ended, or executes another program.
            Err(_) if !is_in_machine(process.pid) => {}
            left => left?,
        }
    }
    Ok(())
}

fn leave(process: Process) -> Result<()> {
    let pid = process.pid;
    let description = ProcessDescription::of(pid);
    let state = || description.state().map_err(inaccessible(pid));
    let set_state = |state| description.set_state(state).map_err(inaccessible(pid));
    if state()? != Some(MachineState::Leaving) {
        return Err(stays(pid, "has its machine"));
    }
    let deadline = Instant::now() + LEAVE_LIMIT;
    let waiting = wait_for_all(process, deadline)?;
    set_state(MachineState::Preparing)?;
    until(pid, deadline, || Ok(state()? == Some(MachineState::Prepared)))?;
    let mappings = mappings_of_monitor(pid)?;
    set_state(MachineState::Left)?;
    until(pid, deadline, || Ok(description.left().map_err(inaccessible(pid))? == waiting))?;
    until(pid, deadline, || match inject::remove_monitor(process, mappings.clone()) {
        Err(error) if error.kind() == ErrorKind::Busy => Ok(false),
        removed => removed.map(|()| true),
    })
}

/// Waits until all threads of a process wait to leave. Returns how many they are.
fn wait_for_all(process: Process, deadline: Instant) -> Result<u32> {
    let pid = process.pid;
    let description = ProcessDescription::of(pid);
    let place = description.blocking_call().map_err(inaccessible(pid))?;
    let mut count = 0;
    until(pid, deadline, || {
        let threads = proc::threads(pid).map_err(failed(pid))?;
        let is_live = |thread: &i32| Stat::read(*thread).is_ok_and(|stat| !stat.is_zombie());
        let live = threads.into_iter().filter(is_live).count();
        count = description.waiting().map_err(inaccessible(pid))?;
        if count as usize >= live {
            return Ok(true);
        }
        inject::interrupt_calls(process, place).map(|()| false)
    })?;
    Ok(count)
}

/// The mappings of the monitor: all that the program cannot have, but for those of the kernel.
fn mappings_of_monitor(pid: i32) -> Result<Vec<Range<u64>>> {
    let program_end = ProcessDescription::of(pid).program_end().map_err(inaccessible(pid))?;
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

/// The error of a description that cannot be accessed. A process that ends loses its memory before
/// it is a zombie.
fn inaccessible(pid: i32) -> impl FnOnce(io::Error) -> Error {
    move |error| if proc::live_thread(pid).is_none() { Error::no_process(pid) } else { failed(pid)(error) }
}
