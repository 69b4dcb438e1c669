//! What the guard leaves of a process, where another program stands for CRIU, and ends without
//! success.

use std::fs::File;
use std::io::Write;
use std::os::fd::FromRawFd;
use std::process::{Child, Command};

use pagemark_linux::ptrace::{Stop, Until};
use pagemark_testing::wait_until;

use super::*;

/// How the process that stands for CRIU leaves the threads of the target.
#[derive(Clone, Copy)]
enum Leaves {
    /// In a stop.
    Stopped,
    /// In a stop before SIGCONT, which is sent when they have stopped.
    BeforeContinuation,
    /// It runs them.
    Running,
}

/// A target, and a guarded process that will trace it.
struct Case {
    target: Child,
    tracer: Pid,
    /// A byte lets the tracer go on.
    go: io::PipeWriter,
    /// A byte says that the tracer holds the target.
    held: PipeReader,
    guard: Guard,
}

/// The state of a thread, one letter.
fn state(pid: i32) -> char {
    Status::read(pid).unwrap().state
}

fn send(pid: i32, signal: Signal) {
    kill(Pid::from_raw(pid), signal).unwrap();
}

/// True if all threads of a process are in a state. They come to it one after another.
fn are_all(pid: i32, wanted: char) -> bool {
    proc::threads(pid).unwrap().into_iter().all(|thread| state(thread) == wanted)
}

fn stop(pid: i32) {
    send(pid, Signal::SIGSTOP);
    wait_until("the stop", || are_all(pid, 'T'));
}

fn proceed(pid: i32) {
    send(pid, Signal::SIGCONT);
    wait_until("the continuation", || are_all(pid, 'S'));
}

/// A program with some threads.
fn target() -> Child {
    let program = "import threading, time\n\
                   for _ in range(2): threading.Thread(target=time.sleep, args=(1000,)).start()\n\
                   time.sleep(1000)";
    let target = Command::new("python3").args(["-c", program]).spawn().unwrap();
    let pid = target.id() as i32;
    wait_until("its threads", || proc::threads(pid).unwrap().len() == 3 && are_all(pid, 'S'));
    target
}

/// Stops all threads as CRIU does. Makes only system calls.
fn hold(threads: &[i32]) -> Result<(), i32> {
    for &thread in threads {
        ptrace::seize(thread, 0)?;
        ptrace::interrupt(thread)?;
        until(thread, Stop::Trap)?;
    }
    // In a process that is stopped, the request makes a second stop.
    threads.iter().try_for_each(|&thread| {
        if ptrace::is_in_group_stop(thread)? {
            ptrace::resume(thread, Until::Event, 0)?;
            until(thread, Stop::Trap)?;
        }
        Ok(())
    })
}

fn until(thread: i32, stop: Stop) -> Result<(), i32> {
    if ptrace::wait(thread, None)? == stop { Ok(()) } else { Err(libc::EINVAL) }
}

/// The work of the process that stands for CRIU. Each byte of `go` lets it go on.
fn trace(threads: &[i32], leaves: Leaves, go: &mut impl Read, held: &mut impl Write) -> Result<(), i32> {
    let failed = |error: io::Error| error.raw_os_error().unwrap_or(libc::EIO);
    go.read_exact(&mut [0]).map_err(failed)?;
    hold(threads)?;
    held.write_all(&[0]).map_err(failed)?;
    go.read_exact(&mut [0]).map_err(failed)?;
    match leaves {
        Leaves::Stopped => Ok(()),
        Leaves::BeforeContinuation => {
            let first = threads[0];
            // To a traced thread, SIGCONT is a stop of its own.
            ptrace::resume(first, Until::Event, 0)?;
            until(first, Stop::Trap)?;
            ptrace::resume(first, Until::Event, 0)?;
            until(first, Stop::Signal(libc::SIGCONT))
        }
        Leaves::Running => threads.iter().try_for_each(|&thread| ptrace::resume(thread, Until::Event, 0)),
    }
}

impl Case {
    /// `prepare` acts on the target before the guard looks at it.
    fn start(leaves: Leaves, prepare: fn(i32)) -> Case {
        let target = target();
        let pid = target.id() as i32;
        prepare(pid);
        let mut threads = proc::threads(pid).unwrap();
        // The first one has the lowest id, unless ids have begun anew since.
        threads.sort_by_key(|&thread| thread != pid);
        let (wait_to_go, go) = io::pipe().unwrap();
        let (held, report) = io::pipe().unwrap();
        // SAFETY: the process makes only system calls. It drops no value of this one.
        let tracer = unsafe {
            helper::start(|| {
                // Other tests look at what has their files open.
                helper::keep_only(c"tracer", [wait_to_go.as_raw_fd(), report.as_raw_fd()]);
                let [mut go, mut held] = [0, 1].map(|number| File::from_raw_fd(helper::DESCRIPTOR + number));
                let is_done = trace(&threads, leaves, &mut go, &mut held).is_ok();
                if is_done { 1 } else { 2 }
            })
        };
        let tracer = tracer.unwrap();
        let guard = Guard::start(tracer.as_raw(), pid, &[pid], None).unwrap().unwrap();
        Case { target, tracer, go, held, guard }
    }

    fn pid(&self) -> i32 {
        self.target.id() as i32
    }

    /// The tracer stops the target.
    fn hold(mut self) -> Case {
        self.go.write_all(&[0]).unwrap();
        self.held.read_exact(&mut [0]).unwrap();
        self
    }

    /// The tracer ends. Returns whether the target is stopped when the guard has ended, too.
    fn ends_stopped(mut self) -> bool {
        self.go.write_all(&[0]).unwrap();
        assert_eq!(waitpid(self.tracer, None), Ok(WaitStatus::Exited(self.tracer, 1)));
        let pid = self.pid();
        drop(self.guard);
        let is_settled = || proc::threads(pid).unwrap().into_iter().all(|thread| matches!(state(thread), 'S' | 'T'));
        wait_until("the threads to stop, or to wait again", is_settled);
        let is_stopped = state(pid) == 'T';
        // One SIGCONT is enough.
        proceed(pid);
        self.target.kill().unwrap();
        self.target.wait().unwrap();
        is_stopped
    }
}

fn leave(_: i32) {}

#[test]
fn a_process_stays_stopped_or_running() {
    for leaves in [Leaves::Stopped, Leaves::Running] {
        assert!(Case::start(leaves, stop).hold().ends_stopped());
        assert!(!Case::start(leaves, leave).hold().ends_stopped());
    }
}

#[test]
fn a_continuation_of_a_traced_process_is_kept() {
    for leaves in [Leaves::Stopped, Leaves::BeforeContinuation] {
        let case = Case::start(leaves, stop).hold();
        send(case.pid(), Signal::SIGCONT);
        assert!(!case.ends_stopped());
    }
}

#[test]
fn what_comes_before_the_tracer_attaches_is_kept() {
    let case = Case::start(Leaves::Stopped, stop);
    proceed(case.pid());
    assert!(!case.hold().ends_stopped());

    let case = Case::start(Leaves::Stopped, leave);
    stop(case.pid());
    assert!(case.hold().ends_stopped());
}
