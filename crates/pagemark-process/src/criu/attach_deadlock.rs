//! A CRIU that waits for ever to attach to a thread that executes a program.
//!
//! That thread waits in `execve` until CRIU has taken the reports of the other threads' exits, and
//! the kernel lets nobody attach to it meanwhile; see [`pagemark_linux::exit_reports`]. CRIU takes
//! no reports while it attaches. The kernel ends the wait if CRIU is killed, which has changed
//! nothing in the process yet.

use std::time::{Duration, Instant};

use pagemark_linux::proc::call::Call;
use pagemark_linux::proc::{self, Status};

use super::notify::SEIZE;

/// Time between two looks.
const LOOK: Duration = Duration::from_millis(100);

/// The attach of a CRIU that is looked at.
#[derive(Debug)]
pub(super) struct AttachDeadlock {
    criu_pid: i32,
    looked_at: Instant,
    /// CRIU waited for ever to attach to this thread at the last look, as it seemed.
    thread: Option<i32>,
    /// CRIU waits for ever.
    is_found: bool,
}

impl AttachDeadlock {
    pub fn new(criu_pid: i32) -> AttachDeadlock {
        AttachDeadlock { criu_pid, looked_at: Instant::now(), thread: None, is_found: false }
    }

    /// True if CRIU waits for ever. Looks only now and then.
    pub fn look(&mut self) -> bool {
        if !self.is_found && self.looked_at.elapsed() >= LOOK {
            self.looked_at = Instant::now();
            let before = self.thread;
            self.thread = self.awaited_thread();
            self.is_found = self.thread.is_some() && self.thread == before;
        }
        self.is_found
    }

    /// True if [`AttachDeadlock::look`] has found it.
    pub fn is_found(&self) -> bool {
        self.is_found
    }

    /// The thread to which CRIU attaches, if another thread of its process has exited for which
    /// CRIU has not waited.
    fn awaited_thread(&self) -> Option<i32> {
        let call = Call::of_thread(self.criu_pid).ok().flatten()?;
        let [request, thread, ..] = call.arguments;
        if call.number != libc::SYS_ptrace || request != u64::from(SEIZE) {
            return None;
        }
        let thread = i32::try_from(thread).ok()?;
        let process = Status::read(thread).ok()?.process_id;
        let is_unreported = |&thread: &i32| {
            Status::read(thread).is_ok_and(|status| status.state == 'Z' && status.tracer_pid == self.criu_pid)
        };
        proc::threads(process).ok()?.iter().any(is_unreported).then_some(thread)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::process::Command;

    use nix::sys::signal::{Signal, kill};
    use nix::sys::wait::waitpid;
    use nix::unistd::{ForkResult, fork};
    use pagemark_linux::ptrace;
    use pagemark_testing::wait_until;

    use super::*;

    /// A program with two threads that executes another one when it may.
    const EXECUTES: &str = "
import os, threading, time
other = threading.Thread(target=time.sleep, args=(1000,), daemon=True)
other.start()
open('other.new', 'w').write(str(other.native_id))
os.rename('other.new', 'other')
while not os.path.exists('go'):
    time.sleep(0.01)
os.execvp('sleep', ['sleep', '1000'])
";

    #[test]
    fn a_tracer_that_attaches_in_an_execve_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str| directory.path().join(name);
        let mut command = Command::new("python3");
        let mut program = command.args(["-c", EXECUTES]).current_dir(directory.path()).spawn().unwrap();
        let read = || std::fs::read_to_string(file("other")).ok()?.parse().ok();
        wait_until("the program has a thread", || read().is_some());
        let (pid, other): (i32, i32) = (program.id() as i32, read().unwrap());
        let (mut commands, mut command) = std::io::pipe().unwrap();
        let (mut answers, mut answer) = std::io::pipe().unwrap();
        // SAFETY: the child makes only system calls, and ends by _exit.
        let ForkResult::Parent { child: tracer } = (unsafe { fork() }).unwrap() else {
            let is_attached = ptrace::seize(other, 0).is_ok();
            let _ = answer.write_all(&[u8::from(is_attached)]);
            let _ = commands.read_exact(&mut [0]);
            let _ = ptrace::seize(pid, 0);
            // SAFETY: it only ends the process.
            unsafe { libc::_exit(0) }
        };
        let mut is_attached = [0];
        answers.read_exact(&mut is_attached).unwrap();
        assert_eq!(is_attached, [1]);

        std::fs::write(file("go"), "").unwrap();
        wait_until("the other thread exits", || Status::read(other).is_ok_and(|status| status.state == 'Z'));
        let mut deadlock = AttachDeadlock::new(tracer.as_raw());
        assert_eq!(deadlock.awaited_thread(), None, "it does not attach yet");
        command.write_all(&[0]).unwrap();
        wait_until("it is found", || deadlock.look());

        kill(tracer, Signal::SIGKILL).unwrap();
        waitpid(tracer, None).unwrap();
        wait_until("the program is executed", || {
            proc::executable(pid).is_ok_and(|path| path.to_string_lossy().contains("sleep"))
        });
        program.kill().unwrap();
        program.wait().unwrap();
    }
}
