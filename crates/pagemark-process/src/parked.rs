//! Processes that run in a machine of `pagemark-kvm`. To save their state they give up what they
//! have of KVM ([`pagemark::sys::parking`]), and make it again when they go on.

use std::ffi::OsStr;
use std::io;
use std::mem::offset_of;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use pagemark::Address;
use pagemark::sys::parking::{ADDRESS, CLOSING, DEVICE, Header, MAGIC, PARKED, RELEASED, RUNNING};
use pagemark::sys::proc::descriptors::Descriptor;
use pagemark::sys::proc::{self, Mapping, Stat, maps, tree};

use crate::attach;
use crate::error::{ErrorKind, Result};
use crate::inject;

/// How long it may take until no process changes its machine. For a fault it does so for some
/// microseconds, and a process that executes a program has none for some milliseconds.
const PARK_LIMIT: Duration = Duration::from_secs(2);

/// Pause between two tries.
const PAUSE: Duration = Duration::from_millis(1);

/// True if a process runs in a machine.
pub(crate) fn is_in_machine(pid: i32) -> bool {
    let mut word = [0; 8];
    let read = proc::open_memory(pid).and_then(|memory| memory.read_exact_at(&mut word, ADDRESS));
    read.is_ok() && u64::from_ne_bytes(word) == MAGIC
}

/// Where the file of the program that is in the machine of a process has its first instruction.
/// None if there is no machine, or no program in it yet.
pub(crate) fn program_entry(pid: i32) -> Option<Address> {
    if !is_in_machine(pid) {
        return None;
    }
    let mut word = [0; 8];
    let memory = proc::open_memory(pid).ok()?;
    memory.read_exact_at(&mut word, ADDRESS + offset_of!(Header, program_entry) as u64).ok()?;
    Some(u64::from_ne_bytes(word)).filter(|&entry| entry != 0).map(Address::new)
}

/// The name of the file that a process executes before its program is in a machine.
const MONITOR: &[u8] = b"pagemark-kvm";

/// Waits while a process is about to make the machine in which its program will run, but not for
/// longer than [`PARK_LIMIT`].
pub(crate) fn wait_for_machine(pid: i32) {
    let deadline = Instant::now() + PARK_LIMIT;
    let is_about_to = || !is_in_machine(pid) && (executes_monitor(pid) || holds_kvm(pid));
    while is_about_to() && Instant::now() < deadline {
        std::thread::sleep(PAUSE);
    }
}

/// The processes of a tree, and those that have ended: a thread of KVM may still be in them.
///
/// # Errors
/// Those of [`tree::members`].
pub(crate) fn list_tree(root_pid: i32) -> io::Result<Vec<i32>> {
    let tree = tree::members(root_pid)?;
    let children = tree.iter().flat_map(|member| proc::children(member.pid).unwrap_or_default());
    let mut pids: Vec<i32> = tree.iter().map(|member| member.pid).chain(children).collect();
    pids.sort_unstable();
    pids.dedup();
    Ok(pids)
}

/// Processes that have given up their machines. Dropped, they may make them again.
#[derive(Debug, Default)]
pub(crate) struct Parked {
    pids: Vec<i32>,
    /// Those that were about to give it up when it was last tried.
    closing: Vec<i32>,
}

impl Parked {
    /// As [`Parked::park`], of the tree of a process.
    ///
    /// # Errors
    /// A process cannot give it up, or the tree cannot be listed; all go on.
    pub fn park_tree(root_pid: i32) -> Result<Parked> {
        Parked::park(|| list_tree(root_pid).map_err(attach::failed("list the processes below", root_pid)))
    }

    /// Has those processes of a tree that run in a machine give it up. `list` lists the tree. Until
    /// they are released, or this process is gone, their threads wait when they need it. In another
    /// namespace of process ids they wait for 10 s at most.
    ///
    /// # Errors
    /// A process cannot give it up; all go on.
    pub fn park(list: impl Fn() -> Result<Vec<i32>>) -> Result<Parked> {
        let deadline = Instant::now() + PARK_LIMIT;
        let mut parked = Parked::default();
        loop {
            let (mut busy, known) = (None, parked.pids.len());
            for pid in list()? {
                if parked.pids.contains(&pid) {
                    continue;
                }
                match park(pid) {
                    Ok(true) => parked.pids.push(pid),
                    Ok(false) => {}
                    Err(error) if error.kind() == ErrorKind::Busy => {
                        if !parked.closing.contains(&pid) {
                            parked.closing.push(pid);
                        }
                        busy = Some(error);
                    }
                    Err(error) => {
                        // It may have been closed in part.
                        parked.pids.push(pid);
                        return Err(error);
                    }
                }
            }
            // A process that has given up its machine makes no child; one may have come before.
            match busy {
                None if parked.pids.len() == known => return Ok(parked),
                None => {}
                Some(error) if Instant::now() > deadline => return Err(error),
                Some(_) => std::thread::sleep(PAUSE),
            }
        }
    }

    /// The processes go on when they run. They may be frozen: memory that is saved after this is
    /// that of released processes.
    pub fn release(&mut self) {
        for pid in self.pids.drain(..).chain(self.closing.drain(..)) {
            // A process that is gone needs nothing; others go on by themselves after a while.
            let _ = release(pid);
        }
    }
}

impl Drop for Parked {
    fn drop(&mut self) {
        self.release();
    }
}

fn release(pid: i32) -> io::Result<()> {
    let at = ADDRESS + offset_of!(Header, state) as u64;
    let memory = proc::open_memory_for_writing(pid)?;
    let mut state = [0; 4];
    memory.read_exact_at(&mut state, at)?;
    // A process that could not be parked has its machine.
    let state = match u32::from_ne_bytes(state) {
        PARKED => RELEASED,
        CLOSING => RUNNING,
        _ => return Ok(()),
    };
    memory.write_all_at(&state.to_ne_bytes(), at)
}

/// Has a process give up its machine. False if it has nothing of KVM.
fn park(pid: i32) -> Result<bool> {
    if !is_in_machine(pid) {
        return if executes_monitor(pid) || holds_kvm(pid) || ends_with_machine(pid) {
            Err(inject::busy(pid))
        } else {
            Ok(false)
        };
    }
    let is_same = proc::is_in_own_pid_namespace(pid).unwrap_or(false);
    match inject::park(pid, is_same.then(|| std::process::id() as i32)) {
        // It executes another program, or ends.
        Err(error) if error.kind() == ErrorKind::Gone => Err(inject::busy(pid)),
        parked => parked.map(|()| true),
    }
}

/// True if a process executes the monitor, which may not have opened KVM yet. A process that has
/// left its machine does not have the monitor's code any more, whatever `/proc/PID/exe` says.
pub(crate) fn executes_monitor(pid: i32) -> bool {
    let is_named = |path: &Path| path.file_name().is_some_and(|name| name.as_bytes() == MONITOR);
    if !proc::executable(pid).is_ok_and(|path| is_named(&path)) {
        return false;
    }
    let is_code = |mapping: &Mapping| mapping.executable && is_named(Path::new(OsStr::from_bytes(&mapping.name)));
    maps::read(pid).is_ok_and(|mappings| mappings.iter().any(is_code))
}

/// True if a process has ended but for the thread that KVM had in it.
fn ends_with_machine(pid: i32) -> bool {
    Stat::read(pid).is_ok_and(|stat| stat.is_zombie()) && proc::threads(pid).is_ok_and(|threads| threads.len() > 1)
}

/// True if a process has a file of KVM open, as one has that executes another program in a machine.
fn holds_kvm(pid: i32) -> bool {
    let is_of_kvm = |open: &Descriptor| open.link == DEVICE.as_bytes() || open.link.starts_with(b"anon_inode:kvm-");
    proc::descriptors(pid).is_ok_and(|descriptors| descriptors.iter().any(is_of_kvm))
}
