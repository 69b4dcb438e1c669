//! What the threads of the program share apart from the machine: its name, signal actions, reports.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString};
use std::io::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::call_table;
use crate::sys::signals::{self, Action};

/// The process in the machine.
pub struct Process {
    /// The path of the program, without links.
    program: Mutex<CString>,
    /// The actions of signals 1 to 64 that the program has set.
    actions: Mutex<[Action; 65]>,
    /// What was reported; each is reported once.
    reported: Mutex<BTreeSet<(u64, String)>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Process {
    /// A process that runs `program`. Ignored signals stay ignored, as the kernel does it for
    /// `execve`; all other actions become the default.
    pub fn new(program: CString) -> Process {
        let mut actions = [Action::default(); 65];
        for number in 1..=64 {
            let Ok(own) = signals::action(number) else { continue };
            match own.handler {
                0 => {}
                1 => actions[number as usize].handler = 1,
                _ => {
                    // A handler of this process itself, for example of Rust's library.
                    let _ = signals::set_action(number, &Action::default());
                }
            }
        }
        Process { program: Mutex::new(program), actions: Mutex::new(actions), reported: Mutex::default() }
    }

    /// The path of the program.
    pub fn program(&self) -> CString {
        lock(&self.program).clone()
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

    /// Reports `text` on the standard error stream, once.
    pub fn report(&self, kind: u64, text: &str) {
        if lock(&self.reported).insert((kind, text.to_owned())) {
            report(&self.program(), text);
        }
    }

    /// Ends the process, whatever the other threads do.
    pub fn exit(&self, status: i32) -> ! {
        // SAFETY: ends the process; nothing of the monitor outlives it.
        unsafe { libc::syscall(libc::SYS_exit_group, status) };
        std::process::abort()
    }
}

/// Writes a line about `program` to the standard error stream.
pub fn report(program: &CStr, text: &str) {
    let _ = writeln!(std::io::stderr(), "pagemark-kvm: {}: {text}", program.to_string_lossy().escape_debug());
}
