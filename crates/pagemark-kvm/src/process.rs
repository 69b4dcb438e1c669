//! What the threads of the program share apart from the machine: its name, signal actions, reports.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::os::fd::{AsRawFd, IntoRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::call_table;
use crate::error::Error;
use crate::image::Image;
use crate::sys::signals::{self, Action};
use crate::sys::{descriptors, execution, reports};

/// The program that a process runs.
#[derive(Clone, Debug)]
pub struct Program {
    /// Its path, without links.
    path: CString,
    /// Its file, among the monitor's descriptors: the path may lead to another one by now.
    file: RawFd,
}

impl Program {
    /// The program of `image`, whose descriptor is above those of programs already if it
    /// `is_raised`.
    ///
    /// # Errors
    /// There is no number above those of the program.
    pub fn of(image: Image, is_raised: bool) -> Result<Program, Error> {
        let path = CString::new(image.path.as_os_str().as_bytes()).unwrap_or_default();
        let file = if is_raised {
            descriptors::take_over(image.file.into_raw_fd())
        } else {
            descriptors::raise(image.file.as_raw_fd(), false)
        };
        let file = file.map_err(Error::system("keep", "the program's file"))?;
        Ok(Program { path, file })
    }
}

/// The process in the machine.
pub struct Process {
    program: Program,
    /// The actions of signals 1 to 64 that the program has set.
    actions: Mutex<[Action; 65]>,
    /// What was reported; each is reported once.
    reported: Mutex<BTreeSet<(u64, String)>>,
    /// How many threads of the program there are.
    threads: AtomicUsize,
    /// The exit status of the first thread of the process, once it has ended.
    status: AtomicI32,
    /// The file of the monitor, among its descriptors, for `exec`.
    monitor: RawFd,
    /// The arguments before the program's with which the monitor enters a program.
    again: Vec<CString>,
    /// Where the stack pointer was when the program began.
    stack: u64,
    /// Whether its memory is that of its parent.
    shares_memory: bool,
}

/// The locks of a process, held during a `fork`.
pub struct Locks<'p> {
    _actions: MutexGuard<'p, [Action; 65]>,
    _reported: MutexGuard<'p, BTreeSet<(u64, String)>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Process {
    /// A process that runs `program`, whose stack pointer is `stack` when it begins. Ignored
    /// signals stay ignored, as the kernel does it for `execve`; all other actions become the
    /// default.
    ///
    /// # Errors
    /// If the monitor's own file cannot be opened, or `monitor`, an open descriptor of it, is none.
    pub fn new(program: Program, again: Vec<CString>, monitor: Option<RawFd>, stack: u64) -> Result<Process, Error> {
        let mut actions = [Action::default(); 65];
        for number in 1..=64 {
            let Ok(own) = signals::action(number) else { continue };
            match own.handler {
                0 => {}
                1 => actions[number as usize].handler = 1,
                _ => {
                    // A handler of this process itself, as a library may set.
                    let _ = signals::set_action(number, &Action::default());
                }
            }
        }
        let monitor = match monitor {
            Some(fd) => descriptors::take_over(fd).map_err(Error::system("take over", format!("descriptor {fd}")))?,
            None => open_monitor()?,
        };
        call_table::prepare();
        reports::begin();
        Ok(Process {
            program,
            actions: Mutex::new(actions),
            reported: Mutex::default(),
            threads: AtomicUsize::new(1),
            status: AtomicI32::new(0),
            monitor,
            again,
            stack,
            shares_memory: false,
        })
    }

    /// The process of a child that shares this memory (`vfork`), but not the signal actions.
    pub fn copy(&self) -> Process {
        Process {
            program: self.program.clone(),
            actions: Mutex::new(*lock(&self.actions)),
            reported: Mutex::new(lock(&self.reported).clone()),
            threads: AtomicUsize::new(1),
            status: AtomicI32::new(0),
            monitor: self.monitor,
            again: self.again.clone(),
            stack: self.stack,
            shares_memory: true,
        }
    }

    /// Locks all that threads share, so that a child made by `fork` finds it whole.
    pub fn lock_for_fork(&self) -> Locks<'_> {
        Locks { _actions: lock(&self.actions), _reported: lock(&self.reported) }
    }

    /// A child made by `fork` has one thread.
    pub fn has_one_thread(&self) {
        self.threads.store(1, Ordering::Relaxed);
    }

    /// The process has one thread more.
    pub fn add_thread(&self) {
        self.threads.fetch_add(1, Ordering::Relaxed);
    }

    /// A thread ends with `status`, which is that of the process if it is the first of the process.
    /// With the last thread the process ends: KVM has threads in it, which would keep it.
    pub fn end_thread(&self, is_first: bool, status: i32) {
        if is_first {
            self.status.store(status, Ordering::Relaxed);
        }
        if self.threads.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.exit(self.status.load(Ordering::Relaxed));
        }
    }

    /// The monitor's file.
    pub fn monitor(&self) -> RawFd {
        self.monitor
    }

    /// The arguments with which the monitor enters another program.
    pub fn again(&self) -> &[CString] {
        &self.again
    }

    /// Where the stack pointer was when the program began: its arguments are there.
    pub fn stack(&self) -> u64 {
        self.stack
    }

    /// Whether its memory is that of its parent, as that of a child made by `vfork`.
    pub fn shares_memory(&self) -> bool {
        self.shares_memory
    }

    /// The path of the program.
    pub fn program(&self) -> &CStr {
        &self.program.path
    }

    /// The file of the program.
    pub fn program_file(&self) -> RawFd {
        self.program.file
    }

    /// A path that leads to the file of the program, as its link in `/proc` does outside.
    pub fn path_of_file(&self) -> CString {
        CString::new(execution::path_of(self.program.file)).unwrap_or_default()
    }

    /// The action of a signal from 1 to 64.
    pub fn action(&self, number: u32) -> Action {
        lock(&self.actions).get(number as usize).copied().unwrap_or_default()
    }

    /// Returns the action of a signal from 1 to 64, and sets it if `action` is one.
    pub fn set_action(&self, number: u32, action: Option<Action>) -> Result<Action, i32> {
        let mut actions = lock(&self.actions);
        let Some(place) = actions.get_mut(number as usize) else { return Err(libc::EINVAL) };
        let before = *place;
        if let Some(mut action) = action {
            let unblockable = 1u64 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1);
            action.mask &= !unblockable;
            // While the lock is held, no other thread sees the one without the other.
            signals::set_action(number, &action)?;
            *place = action;
        }
        Ok(before)
    }

    /// All actions of handlers become the default, as `execve` and `CLONE_CLEAR_SIGHAND` do it.
    pub fn clear_actions(&self) {
        for number in 1..=64 {
            if self.action(number).handler > 1 {
                let _ = self.set_action(number, Some(Action::default()));
            }
        }
    }

    /// Sets the program's actions again for the signals that C libraries keep for themselves. The
    /// monitor's library sets one of its own when it makes its first thread.
    pub fn keep_actions(&self) {
        let actions = lock(&self.actions);
        for number in signals::of_libraries() {
            let _ = signals::set_action(number, &actions[number as usize]);
        }
    }

    /// The kernel gets the program's actions in place of the monitor's.
    ///
    /// # Errors
    /// The kernel refuses one.
    pub fn leave_actions(&self) -> Result<(), i32> {
        let actions = lock(&self.actions);
        let mut of_program = (1..).zip(&actions[1..]).filter(|(_, action)| **action != Action::default());
        of_program.try_for_each(|(number, action)| signals::set_program_action(number, action))
    }

    /// Reports a system call that the machine does not have, with the errno that the program gets.
    pub fn report_call(&self, number: u64, what: &str, errno: i32) {
        let name = call_table::name(number);
        let what = if what.is_empty() { String::new() } else { format!(" ({what})") };
        let error = std::io::Error::from_raw_os_error(errno);
        self.report(
            number,
            &format!("the machine does not have the system call {name}{what}; the program gets: {error}"),
        );
    }

    /// Reports what a program that is executed has outside, and does without here.
    pub fn report_lacking(&self, what: &str) {
        self.report(libc::SYS_execve as u64, &format!("the machine does not have: {what}"));
    }

    /// Reports `text` on the standard error stream, once.
    pub fn report(&self, kind: u64, text: &str) {
        if lock(&self.reported).insert((kind, text.to_owned())) {
            report(self.program(), text);
        }
    }

    /// Ends the process, whatever the other threads do.
    pub fn exit(&self, status: i32) -> ! {
        // SAFETY: ends the process; nothing of the monitor outlives it.
        unsafe { libc::syscall(libc::SYS_exit_group, status) };
        std::process::abort()
    }
}

fn open_monitor() -> Result<RawFd, Error> {
    let path = "/proc/self/exe";
    // CRIU cannot restore a process that has its own file open by O_PATH. Who may execute the file need not have
    // the right to read it.
    let file = File::open(path).or_else(|_| File::options().read(true).custom_flags(libc::O_PATH).open(path));
    file.and_then(|file| descriptors::raise(file.as_raw_fd(), true)).map_err(Error::system("open", path))
}

/// Writes a line about `program` to the standard error stream with which it began.
pub fn report(program: &CStr, text: &str) {
    reports::write(&format!("pagemark-kvm: {}: {text}\n", program.to_string_lossy().escape_debug()));
}
