//! The leader of the session of a pseudo-terminal.

use std::fs::File;
use std::io::{self, Read};
use std::process::Child;

use std::os::fd::RawFd;

use pagemark_linux::helper;

/// What the leader reports: a process was started, or has ended.
const STARTED: i32 = 1;
const ENDED: i32 = 2;

/// How long the leader waits between two polls while processes are being restored, in nanoseconds.
const POLL_NS: libc::c_long = 1_000_000;

/// A session to begin in a process that has just been forked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Session {
    /// The program's end of the pseudo-terminal.
    pub(super) slave: RawFd,
    /// Where the leader writes when the program is stopped.
    pub(super) stops: RawFd,
    /// Where the leader reports to its caller.
    pub(super) reports: RawFd,
    /// Set if the process that begins the session restores the program.
    pub(super) restored: Option<RestoredProgram>,
}

/// The program that is restored in a session.
#[derive(Clone, Copy, Debug)]
pub(super) struct RestoredProgram {
    root_pid: i32,
    /// The process group that had the terminal.
    foreground: i32,
}

impl Session {
    /// The session for a process that restores the process `root_pid` as its sibling.
    pub(crate) fn of_restore(self, root_pid: i32, foreground: i32) -> Session {
        Session { restored: Some(RestoredProgram { root_pid, foreground }), ..self }
    }

    /// Makes this process, which was just forked, the leader of the session, and returns in a child
    /// of it. A program to start has a process group of its own, which has the terminal. Makes only
    /// system calls.
    ///
    /// # Safety
    /// This process was just forked, and executes another program soon.
    pub(crate) unsafe fn begin(self) -> io::Result<()> {
        let check = |result: libc::c_int| if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) };
        // SAFETY: plain system calls on this process. After the fork, the parent makes system calls
        // alone and never returns; the sets of signals live through the calls.
        unsafe {
            check(libc::setsid())?;
            check(libc::ioctl(self.slave, libc::TIOCSCTTY, 0))?;
            // The terminal is given to another process group, which would stop this one.
            let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&mut all);
            check(libc::sigprocmask(libc::SIG_SETMASK, &all, &mut before))?;
            let child = check(libc::fork())?;
            if child != 0 {
                self.lead(child);
            }
            if self.restored.is_none() {
                check(libc::setpgid(0, 0))?;
                check(libc::tcsetpgrp(self.slave, libc::getpid()))?;
            }
            check(libc::sigprocmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()))?;
        }
        Ok(())
    }

    /// The leader: waits for `child`, and for the program that it restores, and ends with the
    /// program and its exit status.
    ///
    /// # Safety
    /// Those of [`Session::begin`].
    unsafe fn lead(self, child: i32) -> ! {
        const SLAVE: RawFd = helper::DESCRIPTOR;
        const REPORTS: RawFd = helper::DESCRIPTOR + 1;
        const STOPS: RawFd = helper::DESCRIPTOR + 2;
        let write = |descriptor: RawFd, bytes: &[u8]| {
            // SAFETY: the bytes live through the call. Where nobody reads, nobody has to know.
            unsafe { libc::write(descriptor, bytes.as_ptr().cast(), bytes.len()) };
        };
        let report = |what: i32, value: i32| {
            let (mut message, [a, b]) = ([0; 8], [what.to_ne_bytes(), value.to_ne_bytes()]);
            message[..4].copy_from_slice(&a);
            message[4..].copy_from_slice(&b);
            write(REPORTS, &message);
        };
        // SAFETY: plain system calls; this process ends by `_exit` and uses no other descriptors.
        unsafe {
            helper::keep_only(c"pagemark-term", [self.slave, self.reports, self.stops]);
            report(STARTED, child);
            let program = self.restored.map_or(child, |restored| restored.root_pid);
            let mut restoring = self.restored;
            loop {
                let mut status = 0;
                let patience = if restoring.is_some() { libc::WNOHANG } else { 0 };
                let pid = libc::waitpid(-1, &mut status, libc::WUNTRACED | libc::WCONTINUED | patience);
                if let (0, Some(restored)) = (pid, restoring) {
                    // The group must have the terminal before the program uses it. It exists some time before.
                    libc::tcsetpgrp(SLAVE, restored.foreground);
                    libc::nanosleep(&libc::timespec { tv_sec: 0, tv_nsec: POLL_NS }, std::ptr::null_mut());
                } else if pid < 0 {
                    if *libc::__errno_location() != libc::EINTR {
                        libc::_exit(1);
                    }
                } else if let (true, Some(restored)) = (pid == child, restoring) {
                    if !libc::WIFEXITED(status) && !libc::WIFSIGNALED(status) {
                        continue;
                    }
                    restoring = None;
                    if status != 0 {
                        end_child(restored.root_pid);
                        report(ENDED, status);
                        libc::_exit(1);
                    }
                    libc::tcsetpgrp(SLAVE, restored.foreground);
                    // The size of the terminal may be another.
                    libc::kill(-restored.foreground, libc::SIGWINCH);
                    report(ENDED, status);
                } else if pid == program && restoring.is_none() {
                    if libc::WIFEXITED(status) {
                        libc::_exit(libc::WEXITSTATUS(status));
                    } else if libc::WIFSIGNALED(status) {
                        libc::_exit(128 + libc::WTERMSIG(status));
                    }
                    write(STOPS, if libc::WIFSTOPPED(status) { b"s" } else { b"c" });
                }
            }
        }
    }
}

/// Kills a process and waits for its end, if it is a child of this one.
///
/// # Safety
/// Makes only system calls.
unsafe fn end_child(pid: i32) {
    // SAFETY: plain system calls. The id of a child belongs to it until it has been waited for.
    unsafe {
        if libc::waitpid(pid, std::ptr::null_mut(), libc::WNOHANG) == 0 {
            libc::kill(pid, libc::SIGKILL);
            libc::waitpid(pid, std::ptr::null_mut(), 0);
        }
    }
}

/// The leader of a session, as its caller sees it.
#[derive(Debug)]
pub(crate) struct Leader {
    child: Child,
    reports: File,
}

impl Leader {
    /// Takes the process that began a session, and what it reports.
    pub(crate) fn new(child: Child, reports: File) -> Leader {
        Leader { child, reports }
    }

    /// The process that the leader has started first.
    pub(crate) fn first_child(&mut self) -> io::Result<i32> {
        self.receive(STARTED)
    }

    /// Waits until the process that restores the program has ended. True if that succeeded.
    pub(crate) fn restorer_succeeded(&mut self) -> io::Result<bool> {
        self.receive(ENDED).map(|status| status == 0)
    }

    /// What the leader reports.
    pub(crate) fn reports(&self) -> &File {
        &self.reports
    }

    /// The leader itself.
    pub(crate) fn into_child(self) -> Child {
        self.child
    }

    /// The leader itself.
    pub(crate) fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    fn receive(&mut self, what: i32) -> io::Result<i32> {
        let (mut kind, mut value) = ([0; 4], [0; 4]);
        self.reports.read_exact(&mut kind)?;
        self.reports.read_exact(&mut value)?;
        match i32::from_ne_bytes(kind) == what {
            true => Ok(i32::from_ne_bytes(value)),
            false => Err(io::Error::other("the leader of a session reports something else")),
        }
    }
}
