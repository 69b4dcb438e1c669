//! The helper dies at every instant: between any two of its requests.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use pagemark_linux::proc;
use pagemark_linux::ptrace::deaths;
use pagemark_testing::{assert_oracle, assert_unviolated, repetitions, rounds, trackee, wait_for};

use super::*;

/// A program whose threads check that nothing disturbs them. The main thread, which makes the
/// calls, has a role.
pub(super) struct States {
    child: Child,
    directory: tempfile::TempDir,
}

impl States {
    pub(super) fn start(role: &str) -> States {
        let directory = tempfile::tempdir().unwrap();
        let mut command = Command::new(trackee("states"));
        command.arg(directory.path()).arg(role).stdin(Stdio::null());
        let states = States { child: command.spawn().unwrap(), directory };
        states.go_on("the start");
        states
    }

    pub(super) fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// All threads complete another round.
    pub(super) fn go_on(&self, after: &str) {
        // A round that is reported next may have been completed before.
        let before = rounds(self.path()) + 1;
        let is_over = || {
            assert_unviolated(self.path());
            assert_oracle!(proc::live_thread(self.pid()).is_some(), "the program has ended after {after}");
            (rounds(self.path()) > before).then_some(())
        };
        wait_for("all threads to go on", is_over);
        for thread in proc::threads(self.pid()).unwrap() {
            let status = proc::Status::read(thread).unwrap();
            assert!(status.tracer_pid == 0 && status.state != 'T', "{after}: {status:?}");
        }
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    /// How many calls have returned EINTR that do so after any stop.
    fn interrupted(&self) -> usize {
        std::fs::read_to_string(self.path().join("interrupted")).map_or(0, |text| text.lines().count())
    }

    fn userfaultfds(&self) -> usize {
        let descriptors = proc::descriptors(self.pid()).unwrap();
        descriptors.iter().filter(|descriptor| descriptor.link == b"anon_inode:[userfaultfd]").count()
    }
}

impl Drop for States {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Kills the helper before its request `first` and each `step` later, and at last lets it live.
/// Returns how often.
fn die(states: &States, (first, step): (u32, usize), work: impl Fn() -> Result<()>) -> usize {
    // The threads that wait are other ones each time, so the number of requests varies.
    for (count, number) in (first..).step_by(step).enumerate() {
        deaths::before_request(number);
        let done = work();
        deaths::before_request(u32::MAX);
        states.go_on(&format!("a death before request {number}"));
        match done {
            Ok(()) => return count,
            Err(error) => assert!(error.to_string().contains("helper"), "{number}: {error}"),
        }
    }
    0
}

pub(super) const ROLES: [&str; 8] = ["compute", "sleep", "futex", "epoll", "read", "sigwait", "sigsuspend", "stack"];

fn die_in_each_role(step: usize) {
    for (first, role) in (0..).zip(ROLES) {
        let states = States::start(role);
        let deaths = die(&states, (2 * first % step as u32, step), || {
            userfaultfd(Process::find(states.pid()).unwrap()).map(drop)
        });
        eprintln!("{role}: {deaths} deaths, {} calls interrupted", states.interrupted());
        assert!(deaths * step > 100, "{deaths} deaths");
        // A signal that comes between the copy of a descriptor and its end.
        assert!(states.userfaultfds() <= 2, "{} descriptors are left", states.userfaultfds());
    }
}

#[test]
fn a_helper_that_dies_between_two_requests_harms_no_thread() {
    die_in_each_role(2 * ROLES.len());
}

#[test]
#[ignore = "some minutes"]
fn a_helper_that_dies_between_any_two_requests_harms_no_thread() {
    die_in_each_role(1);
}

/// How a process waits for signals.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Waits {
    /// It blocks the signal but in `sigsuspend`, and counts how often this call returns.
    Sigsuspend,
    /// The same with `epoll_pwait`. It does not count a return without a handled signal.
    Epoll,
    /// The same with a signal that is not blocked.
    OpenEpoll,
    /// It waits in `pause`, and its handler counts how often it runs.
    Pause,
}

/// A process that waits for signals, and writes a byte for each that it counts.
pub(super) struct Waiting {
    pub(super) pid: i32,
    call: i64,
    counted: File,
}

/// Where the process writes.
static WRITER: AtomicI32 = AtomicI32::new(-1);

/// Writes a byte.
extern "C" fn count(_: i32) {
    // SAFETY: the byte is constant.
    unsafe { libc::write(WRITER.load(Ordering::SeqCst), c"x".as_ptr().cast(), 1) };
}

static IS_HANDLED: AtomicBool = AtomicBool::new(false);

extern "C" fn handle(_: i32) {
    IS_HANDLED.store(true, Ordering::SeqCst);
}

impl Waiting {
    pub(super) fn start(waits: Waits) -> Waiting {
        let (reader, writer) = io::pipe().unwrap();
        // SAFETY: the child makes only system calls, until it is killed.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            WRITER.store(writer.as_raw_fd(), Ordering::SeqCst);
            // SAFETY: the sets and the action live through the calls, and the handlers make only what they may.
            unsafe {
                let none: libc::sigset_t = std::mem::zeroed();
                let (mut blocked, mut action) = (none, std::mem::zeroed::<libc::sigaction>());
                let handler: extern "C" fn(i32) = if waits == Waits::Pause { count } else { handle };
                action.sa_sigaction = handler as *const () as usize;
                libc::sigaction(libc::SIGUSR2, &action, std::ptr::null_mut());
                if matches!(waits, Waits::Sigsuspend | Waits::Epoll) {
                    libc::sigaddset(&mut blocked, libc::SIGUSR2);
                }
                libc::sigprocmask(libc::SIG_SETMASK, &blocked, std::ptr::null_mut());
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                let poller = libc::epoll_create1(0);
                loop {
                    match waits {
                        Waits::Sigsuspend => libc::sigsuspend(&none),
                        Waits::Epoll | Waits::OpenEpoll => {
                            libc::epoll_pwait(poller, &mut libc::epoll_event { events: 0, u64: 0 }, 1, -1, &none)
                        }
                        Waits::Pause => libc::pause(),
                    };
                    if IS_HANDLED.swap(false, Ordering::SeqCst) {
                        count(0);
                    }
                }
            }
        }
        let counted = File::from(OwnedFd::from(reader));
        // SAFETY: changes the flags of an open file.
        unsafe { libc::fcntl(counted.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
        let call = match waits {
            Waits::Sigsuspend => libc::SYS_rt_sigsuspend,
            Waits::Epoll | Waits::OpenEpoll => libc::SYS_epoll_pwait,
            Waits::Pause => libc::SYS_pause,
        };
        Waiting { pid, call, counted }
    }

    /// It waits in its call, and nobody traces it. Returns what it has counted.
    pub(super) fn wait(&mut self, after: &str) -> usize {
        wait_for(&format!("it to wait after {after}"), || {
            let call = std::fs::read_to_string(proc::path(self.pid, "syscall")).unwrap();
            let status = proc::Status::read(self.pid).unwrap();
            let is_in_call = call.starts_with(&format!("{} ", self.call)) && status.state == 'S';
            (is_in_call && status.tracer_pid == 0).then_some(())
        });
        let mut bytes = [0; 64];
        self.counted.read(&mut bytes).unwrap_or(0)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        // SAFETY: a signal to a child that was not waited for, and the wait for it.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, std::ptr::null_mut(), 0);
        }
    }
}

/// Has the helper send a signal before its request `signal`, and die before its request `death`.
/// Returns whether it has ended without that, and what the process has counted at last: one if the
/// helper has sent the signal.
fn try_signal(waiting: &mut Waiting, signal: u32, death: u32) -> (bool, usize) {
    let after = format!("a signal before request {signal} and a death before request {death}");
    deaths::signal_before_request(signal, waiting.pid, libc::SIGUSR2);
    deaths::before_request(death);
    let is_done = userfaultfd(Process::find(waiting.pid).unwrap()).is_ok();
    deaths::before_request(u32::MAX);
    deaths::signal_before_request(u32::MAX, 0, 0);
    let mut counted = waiting.wait(&after);
    // One that goes on may have made fewer requests.
    if !is_done || death == u32::MAX {
        wait_for(&format!("the signal to be handled after {after}"), || {
            counted += waiting.wait(&after);
            (counted > 0).then_some(())
        });
    }
    assert!(counted <= 1, "{counted} counted after {after}");
    (is_done, counted)
}

/// The helper sends a signal before any of its requests, and dies before this request or a later
/// one, or not at all. In the short run of the tests, it sends it before a quarter of the requests,
/// which are others for each death, and always before the last one.
fn signal_and_die(waits: Waits) {
    let step = repetitions(4, 1);
    let mut waiting = Waiting::start(waits);
    assert_eq!(waiting.wait("its start"), 0);
    for death in 0u32.. {
        let is_due = |signal: &u32| (signal + death).is_multiple_of(step) || *signal == death;
        let are_done = (0..=death).filter(is_due).filter(|&signal| try_signal(&mut waiting, signal, death).0).count();
        if are_done > 0 {
            // A signal changes the number of requests.
            (0..death / 2).for_each(|signal| assert!(try_signal(&mut waiting, signal, u32::MAX).0));
            return eprintln!("{waits:?}: {death} requests");
        }
    }
}

#[test]
fn a_helper_that_dies_leaves_no_thread_waiting_whose_signal_came() {
    signal_and_die(Waits::Sigsuspend);
    signal_and_die(Waits::Epoll);
}

#[test]
fn a_helper_that_dies_loses_no_signal() {
    signal_and_die(Waits::Pause);
}

#[test]
fn a_signal_that_comes_in_a_stop_ends_the_call_that_waits_for_it() {
    for waits in [Waits::Sigsuspend, Waits::Epoll, Waits::OpenEpoll, Waits::Pause] {
        let mut waiting = Waiting::start(waits);
        assert_eq!(waiting.wait("its start"), 0);
        let pid = waiting.pid;
        let process = pagemark_linux::proc::Process::find(pid).unwrap();
        // SAFETY: a signal to a child that was not waited for.
        crate::freezer::while_stopped(process, || unsafe { libc::kill(pid, libc::SIGUSR2) }).unwrap();
        wait_for(&format!("the call to return: {waits:?}"), || (waiting.wait("the stop") == 1).then_some(()));
    }
}
