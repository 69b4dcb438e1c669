//! A process that kills a restored tree if the process that restores it dies before all is there
//! that the tree needs: memory that is delivered while it runs, or the way out of its machine.
//!
//! In place of a page that nobody delivers, the kernel gives a program zeros as soon as the last
//! copy of its userfaultfd is closed. The guard therefore shares the table of descriptors with the
//! delivering process (`CLONE_FILES`): every userfaultfd stays open when that process dies, also
//! that of a process which was forked at the same moment. Threads that wait for a page wait on,
//! until the guard has killed them. If a process is not found, the guard stays, and that process
//! waits for its memory for ever; it never reads zeros.
//!
//! A kill of a whole control group kills the delivering process; the guard leaves its groups where
//! that is permitted. If both die, the kernel kills the tree ([`LastSignal`]): the signals belong
//! to descriptors of high numbers, which it closes before the userfaultfds.
//!
//! The guard executes no other program, and another thread may have held the lock of the allocator
//! when the guard was made. It therefore does not allocate.

use std::collections::HashMap;
use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, getppid};
use pagemark_linux::last_signal::LastSignal;
use pagemark_linux::pidfd;
use pagemark_linux::plain_proc::{StatText, each_number};
use pagemark_linux::proc::{Process, stat};
use pagemark_linux::userfaultfd::MissingPages;
use pagemark_trace::cgroups;

use crate::spawn::outlive_requests_to_end;

/// How many processes the list has room for.
const MAX_MEMBERS: usize = 1 << 16;

/// How often the list is completed at most while the tree is stopped: it may fork meanwhile.
const MAX_SCANS: u32 = 100;

/// How long processes that were killed may take to exit before they are looked for again.
const EXIT_LIMIT: Duration = Duration::from_secs(2);

/// Pause between two looks at processes that were killed.
const EXIT_POLL: Duration = Duration::from_millis(1);

/// Milliseconds between two looks at the delivering process, with and without a descriptor of it.
const WATCH_MS: [i32; 2] = [1000, 20];

/// Pause between two looks at processes that were not found.
const LEFT_POLL: Duration = Duration::from_millis(100);

/// The processes that depend on the delivery, in memory that the guard shares.
struct Members {
    memory: NonNull<Table>,
}

struct Table {
    count: AtomicUsize,
    entries: [Entry; MAX_MEMBERS],
}

/// A [`Process`] that another process can read.
struct Entry {
    pid: AtomicI32,
    start_ticks: AtomicU64,
}

// SAFETY: the table consists of atomic numbers, and only the owner unmaps it.
unsafe impl Send for Members {}
// SAFETY: as above.
unsafe impl Sync for Members {}

impl Members {
    fn new() -> io::Result<Members> {
        let length = NonZeroUsize::new(size_of::<Table>()).ok_or(io::ErrorKind::InvalidInput)?;
        let flags = MapFlags::MAP_SHARED | MapFlags::MAP_NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let memory = unsafe { mmap_anonymous(None, length, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, flags)? };
        Ok(Members { memory: memory.cast() })
    }

    fn table(&self) -> &Table {
        // SAFETY: the mapping has the size of the table, is aligned to pages, and lives as long as this value; zeros are
        // an empty table.
        unsafe { self.memory.as_ref() }
    }

    fn processes(&self) -> impl Iterator<Item = Process> {
        let table = self.table();
        let entries = &table.entries[..table.count.load(Ordering::Acquire).min(MAX_MEMBERS)];
        entries.iter().map(|entry| Process {
            pid: entry.pid.load(Ordering::Relaxed),
            start_ticks: entry.start_ticks.load(Ordering::Relaxed),
        })
    }

    /// The last process with an id, which is the one that may be alive.
    fn start_of(&self, pid: i32) -> Option<u64> {
        self.processes().filter(|process| process.pid == pid).map(|process| process.start_ticks).max()
    }

    /// Adds a process. One thread of one process adds at a time.
    fn add(&self, process: Process) {
        let table = self.table();
        let count = table.count.load(Ordering::Relaxed);
        if let Some(entry) = table.entries.get(count) {
            entry.pid.store(process.pid, Ordering::Relaxed);
            entry.start_ticks.store(process.start_ticks, Ordering::Relaxed);
            table.count.store(count + 1, Ordering::Release);
        }
    }

    /// Adds the children of members. Returns how many were new.
    fn scan(&self) -> usize {
        let mut added = 0;
        let _ = each_number(c"/proc", |proc, pid| {
            if let Ok(text) = StatText::read(proc, pid)
                && let Some((parent_pid, start_ticks)) = stat::parent_and_start(text.text())
                && self.start_of(pid) != Some(start_ticks)
                && self.is_alive(proc, parent_pid)
            {
                self.add(Process { pid, start_ticks });
                added += 1;
            }
            ControlFlow::<()>::Continue(())
        });
        added
    }

    /// True if a member has this id and has not exited.
    fn is_alive(&self, proc: BorrowedFd<'_>, pid: i32) -> bool {
        let Some(expected) = self.start_of(pid) else { return false };
        let Ok(text) = StatText::read(proc, pid) else { return false };
        let is_same = stat::parent_and_start(text.text()).is_some_and(|(_, start_ticks)| start_ticks == expected);
        is_same && stat::state(text.text()).is_some_and(|state| !stat::is_dead(state))
    }

    /// Sends a signal to all members. Returns how many there are.
    fn signal(&self, signal: Signal) -> usize {
        let mut alive = 0;
        let _ = each_number(c"/proc", |proc, pid| {
            if self.is_alive(proc, pid) {
                alive += 1;
                // A process that has exited meanwhile needs no signal.
                let _ = kill(Pid::from_raw(pid), signal);
            }
            ControlFlow::<()>::Continue(())
        });
        alive
    }

    /// Kills all members and their descendants, and waits a while until they have exited.
    fn kill(&self) {
        // Stopped first, so that none forks on.
        for _ in 0..MAX_SCANS {
            self.signal(Signal::SIGSTOP);
            if self.scan() == 0 {
                break;
            }
        }
        let begin = Instant::now();
        while self.signal(Signal::SIGKILL) > 0 && begin.elapsed() < EXIT_LIMIT {
            std::thread::sleep(EXIT_POLL);
        }
    }
}

impl Drop for Members {
    fn drop(&mut self) {
        // SAFETY: the mapping is used no more. That of the guard is its own.
        let _ = unsafe { munmap(self.memory.cast(), size_of::<Table>()) };
    }
}

/// The guard of a tree. Dropped, it ends and lets the tree live.
pub(super) struct Guard {
    process: Pid,
    members: Members,
    /// By process.
    killed_at_death: Mutex<HashMap<i32, LastSignal>>,
    /// The guard uses these: they have one table of descriptors.
    _watched: Option<OwnedFd>,
    _ways_out: Vec<File>,
}

impl Guard {
    /// Starts to guard the processes of a tree.
    ///
    /// # Errors
    /// No process can be made.
    pub(super) fn start(processes: &[Process]) -> io::Result<Guard> {
        let members = Members::new()?;
        processes.iter().for_each(|&process| members.add(process));
        let own_pid = std::process::id() as i32;
        let watched = if pidfd::OPEN.is_there() { Some(pidfd::open(own_pid, 0)?) } else { None };
        let ways_out = cgroups::ways_out();
        // No signal when it ends, and only a wait for such children finds it.
        let flags = libc::CLONE_FILES;
        // SAFETY: as fork: the child has a copy of this thread alone, on a copy of its stack. It does not allocate, takes
        // no lock, and does not return.
        let process = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
        match process {
            0 => {
                cgroups::take(&ways_out);
                guard(Pid::from_raw(own_pid), watched.as_ref().map(AsRawFd::as_raw_fd), &members)
            }
            1.. => {
                let guard = Guard {
                    process: Pid::from_raw(process as i32),
                    members,
                    killed_at_death: Mutex::default(),
                    _watched: watched,
                    _ways_out: ways_out,
                };
                guard.arm();
                Ok(guard)
            }
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Adds the children that the processes have now.
    pub(super) fn add_children(&self) {
        while self.members.scan() > 0 {}
        self.arm();
    }

    /// Has the kernel kill all members when this process and the guard die.
    fn arm(&self) {
        let mut armed = self.killed_at_death.lock().unwrap_or_else(PoisonError::into_inner);
        for process in self.members.processes() {
            let pid = process.pid;
            // The guard alone kills a process that has no descriptor left for this. A process that is gone needs
            // no signal, and another process may have its id by now.
            if !armed.contains_key(&pid)
                && let Ok(last) = LastSignal::new(pid, libc::SIGKILL, high_number())
                && process.stat().is_some()
                && last.arm().is_ok()
            {
                armed.insert(pid, last);
            }
        }
    }

    /// Kills the tree, whose userfaultfds must still be open.
    pub(super) fn kill_tree(&self) {
        self.members.kill();
    }

    /// Leaves the guard behind, to hold the userfaultfds of processes that did not exit.
    pub(super) fn leave(self) {
        std::mem::forget(self);
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = kill(self.process, Signal::SIGKILL);
        // SAFETY: a wait for a child without a result.
        while unsafe { libc::waitpid(self.process.as_raw(), std::ptr::null_mut(), libc::__WALL) } < 0
            && Errno::last() == Errno::EINTR
        {}
    }
}

/// A number of descriptors that is higher than those of most others.
fn high_number() -> RawFd {
    let soft = getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(soft, _)| soft);
    RawFd::try_from(soft / 2).unwrap_or(1 << 16).min(1 << 16)
}

/// The main function of the guard.
fn guard(parent: Pid, watched: Option<RawFd>, members: &Members) -> ! {
    let _ = outlive_requests_to_end();
    // SAFETY: system calls on this process alone; the name lives through the call.
    unsafe {
        libc::setsid();
        libc::prctl(libc::PR_SET_NAME, c"pagemark-guard".as_ptr());
    }
    while getppid() == parent {
        let mut exit = libc::pollfd { fd: watched.unwrap_or(-1), events: libc::POLLIN, revents: 0 };
        // SAFETY: one entry, which lives through the call.
        unsafe { libc::poll(&raw mut exit, 1, WATCH_MS[usize::from(watched.is_none())]) };
    }
    members.kill();
    // The reader of the delivering process's output must see its end.
    close_others();
    while has_processes() {
        members.kill();
        std::thread::sleep(LEFT_POLL);
    }
    // SAFETY: it only ends the process.
    unsafe { libc::_exit(0) }
}

const OWN_DESCRIPTORS: &CStr = c"/proc/self/fd";

/// Closes all descriptors but userfaultfds.
fn close_others() {
    let _ = each_number(OWN_DESCRIPTORS, |directory, descriptor| {
        if descriptor != directory.as_raw_fd() && !is_userfaultfd(descriptor) {
            // SAFETY: nothing of this process uses it.
            unsafe { libc::close(descriptor) };
        }
        ControlFlow::<()>::Continue(())
    });
}

/// True if a process still depends on a userfaultfd of this process.
fn has_processes() -> bool {
    let found = each_number(OWN_DESCRIPTORS, |_, descriptor| {
        if !is_userfaultfd(descriptor) {
            return ControlFlow::Continue(());
        }
        // SAFETY: the descriptor is that of a userfaultfd, and is not closed by this value.
        let missing = unsafe { MissingPages::from_registered(OwnedFd::from_raw_fd(descriptor)) };
        let missing = ManuallyDrop::new(missing);
        if missing.has_process() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    matches!(found, Ok(ControlFlow::Break(())))
}

fn is_userfaultfd(descriptor: RawFd) -> bool {
    use std::io::Write;
    const NAME: &[u8] = b"anon_inode:[userfaultfd]";
    let (mut path, mut target) = ([0u8; 32], [0u8; NAME.len() + 1]);
    if write!(&mut path[..31], "/proc/self/fd/{descriptor}").is_err() {
        return false;
    }
    // SAFETY: the path is a terminated string, and the kernel writes at most the buffer's length to it.
    let length = unsafe { libc::readlink(path.as_ptr().cast(), target.as_mut_ptr().cast(), target.len()) };
    usize::try_from(length).is_ok_and(|length| &target[..length] == NAME)
}
