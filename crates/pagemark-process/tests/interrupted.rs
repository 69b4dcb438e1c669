//! Programs that wait in system calls: a checkpoint interrupts none of the calls, neither in the
//! program that keeps running nor in the restored one.

mod support;

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use pagemark_process::criu::{Criu, Dump, DumpOptions};
use pagemark_process::restore::RestoreOptions;
use pagemark_testing::{SplitMix, patience, wait_until};
use support::{
    Program, criu, executable_mappings, is_alive, is_running, memory, populated, status_field, take, tracer, tree,
};

/// Each call is made by a process and by a second thread of it. A call that ends writes its name
/// and its error into the file `ended`.
const WAITING: &str = r#"
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/inotify.h>
#include <sys/prctl.h>
#include <sys/select.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static int word, ends[2];

static void ended(const char *name)
{
	char text[100];
	int length = snprintf(text, sizeof(text), "%s: %s\n", name, strerror(errno));
	int file = open("ended", O_WRONLY | O_CREAT | O_APPEND, 0600);
	write(file, text, length);
	close(file);
}

static void *wait_in(void *number)
{
	struct pollfd set = { ends[0], POLLIN, 0 };
	struct timespec long_time = { 1000, 0 }, rest;
	struct epoll_event event;
	fd_set descriptors;
	for (;;) {
		switch ((long)number) {
		case 0:
			poll(&set, 1, -1);
			ended("poll");
			break;
		case 1:
			poll(&set, 1, 1000000);
			ended("poll with a limit");
			break;
		case 2:
			syscall(SYS_nanosleep, &long_time, &rest);
			ended("nanosleep");
			break;
		case 3:
			errno = clock_nanosleep(CLOCK_MONOTONIC, 0, &long_time, NULL);
			ended("clock_nanosleep");
			break;
		case 4:
			syscall(SYS_futex, &word, FUTEX_WAIT, 0, &long_time, NULL, 0);
			ended("futex");
			break;
		case 5:
			epoll_wait(epoll_create1(0), &event, 1, -1);
			ended("epoll_wait");
			break;
		case 6:
			FD_ZERO(&descriptors);
			FD_SET(ends[0], &descriptors);
			select(ends[0] + 1, &descriptors, NULL, NULL, NULL);
			ended("select");
			break;
		}
	}
	return NULL;
}

static void handle(int signal)
{
}

int main(void)
{
	pipe(ends);
	for (long number = 0; number < 7; number++) {
		if (fork() == 0) {
			pthread_t thread;
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			pthread_create(&thread, NULL, wait_in, (void *)number);
			wait_in((void *)number);
		}
	}
	// SIGUSR1 does interrupt.
	struct sigaction action = { .sa_handler = handle };
	struct pollfd set = { ends[0], POLLIN, 0 };
	sigaction(SIGUSR1, &action, NULL);
	close(open("ready", O_CREAT | O_WRONLY, 0600));
	for (;;) {
		poll(&set, 1, -1);
		ended("signal");
	}
}
"#;

/// A time in which an interrupted call would have ended.
const A_WHILE: Duration = Duration::from_millis(300);

fn waiting() -> Option<Program> {
    let program = Program::c(WAITING)?;
    wait_until("the processes wait", || {
        let pids = tree(program.pid());
        program.read("ready").is_some() && pids.len() == 8 && pids.iter().all(|pid| sleeps(*pid))
    });
    Some(program)
}

/// True if each thread of a process waits in a system call.
fn sleeps(pid: i32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let stats = threads.map(|thread| std::fs::read_to_string(thread.unwrap().path().join("stat")).unwrap());
    let states: Vec<bool> = stats.map(|stat| stat.contains(") S ")).collect();
    !states.is_empty() && states.iter().all(|sleeps| *sleeps)
}

/// Stops all processes and resumes them: the kernel then carries the calls on by `restart_syscall`.
fn stop_and_resume(program: &Program) {
    let pids = tree(program.pid());
    for signal in [Signal::SIGSTOP, Signal::SIGCONT] {
        pids.iter().for_each(|pid| kill(Pid::from_raw(*pid), signal).unwrap());
        std::thread::sleep(A_WHILE);
    }
}

#[test]
fn waiting_calls_go_on_in_the_running_and_in_the_restored_program() {
    let Some(criu) = criu() else { return };
    for is_restarted in [false, true] {
        let Some(mut program) = waiting() else { return };
        if is_restarted {
            stop_and_resume(&program);
            let _ = std::fs::remove_file(program.directory().join("ended"));
        }
        for _ in 0..3 {
            let taken = take(&criu, program.pid(), &DumpOptions::default());
            std::thread::sleep(A_WHILE);
            assert_eq!(program.read("ended"), None, "in the running program, restarted before: {is_restarted}");
            drop(taken);
        }
        let taken = take(&criu, program.pid(), &DumpOptions::default());
        program.kill();
        let restored = taken.restore(&criu, &RestoreOptions { as_child: true, stopped: true, ..Default::default() });
        program.adopt(&restored);
        program.resume();
        std::thread::sleep(A_WHILE);
        assert_eq!(program.read("ended"), None, "in the restored program, restarted before: {is_restarted}");
        assert!(restored.pids.iter().all(|pid| is_alive(*pid)));
        // The call is made indeed, and a signal ends it.
        kill(Pid::from_raw(program.pid()), Signal::SIGUSR1).unwrap();
        wait_until("the signal is handled", || program.read("ended").is_some());
        std::thread::sleep(A_WHILE);
        assert_eq!(program.read("ended").unwrap(), "signal: Interrupted system call");
    }
}

/// Makes the same call again and again, and counts the calls, and those that were interrupted.
const REPEATED: &str = r#"
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int main(void)
{
	int file = open("counts", O_RDWR | O_CREAT, 0600);
	ftruncate(file, 4096);
	volatile unsigned *counts = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	struct timespec some_time = { 0, 50 * 1000 * 1000 };
	for (;;) {
		if (syscall(SYS_nanosleep, &some_time, NULL))
			counts[1]++;
		counts[0]++;
	}
}
"#;

/// A call that a dump has interrupted, and one like it that the next dump interrupts, are not the
/// same call, which would have lasted longer than its limit.
#[test]
fn a_call_that_is_made_again_and_again_is_never_interrupted() {
    let Some(criu) = criu() else { return };
    let Some(program) = Program::c(REPEATED) else { return };
    let counts = || {
        let bytes = std::fs::read(program.directory().join("counts")).unwrap_or_default();
        let count = |at: usize| Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?));
        Some((count(0)?, count(4)?))
    };
    let go_on = || {
        let before = counts().map_or(0, |(calls, _)| calls);
        wait_until("whole calls are made", || counts().is_some_and(|(calls, _)| calls > before + 3));
    };
    for _ in 0..6 {
        go_on();
        drop(take(&criu, program.pid(), &DumpOptions::default()));
    }
    go_on();
    assert_eq!(counts().unwrap().1, 0);
}

/// A signal that arrives in the freeze interrupts the call.
#[test]
fn a_signal_in_the_freeze_interrupts_the_call() {
    let Some(criu) = criu() else { return };
    let Some(program) = waiting() else { return };
    let directory = tempfile::tempdir().unwrap();
    let mut dump = Dump::start(&criu, program.pid(), directory.path(), &DumpOptions::default()).unwrap();
    while !dump.wait_frozen(Duration::from_millis(5)).unwrap() {}
    dump.wait_state_saved().unwrap();
    kill(Pid::from_raw(program.pid()), Signal::SIGUSR1).unwrap();
    let populated = populated(&tree(program.pid()).into_iter().map(|pid| (pid, memory(pid))).collect());
    dump.thaw(|| populated).unwrap();
    wait_until("the signal is handled", || program.read("ended").is_some());
    std::thread::sleep(A_WHILE);
    assert_eq!(program.read("ended").unwrap(), "signal: Interrupted system call");
}

/// Not a test by itself: the process of the next test that is killed.
#[test]
fn saves_until_it_is_killed() {
    let Some(pid) = std::env::var("PAGEMARK_TEST_TARGET").ok().and_then(|pid| pid.parse().ok()) else { return };
    let criu = Criu::find().unwrap();
    loop {
        drop(take(&criu, pid, &DumpOptions::default()));
    }
}

/// The call in which a process waits: its number, and for `ptrace` the request.
fn call_of(pid: i32) -> Option<(i64, u64)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/syscall")).ok()?;
    let mut fields = text.split_ascii_whitespace();
    let number = fields.next()?.parse().ok()?;
    let argument = u64::from_str_radix(fields.next()?.strip_prefix("0x")?, 16).ok()?;
    Some((number, if number == libc::SYS_ptrace { argument } else { 0 }))
}

/// While CRIU waits for Pagemark in each of the calls that Pagemark answers, Pagemark is killed.
#[test]
fn killed_while_criu_waits_for_it_it_harms_no_program() {
    const ROUNDS: u32 = 60;
    const AWAITED: [(i64, u64); 4] =
        [(libc::SYS_ptrace, 0x420a), (libc::SYS_ptrace, 0x4204), (libc::SYS_prlimit64, 0), (libc::SYS_ioctl, 0)];
    let Some(criu) = criu() else { return };
    let Some(program) = waiting() else { return };
    let pids = tree(program.pid());
    let executable: Vec<_> = pids.iter().map(|pid| executable_mappings(*pid)).collect();
    let mut random = SplitMix(u64::from(std::process::id()));
    let mut killed = BTreeMap::new();
    let deadline = Instant::now() + patience();
    let mut rounds = 0;
    while rounds < ROUNDS || (AWAITED.iter().any(|call| !killed.contains_key(call)) && Instant::now() < deadline) {
        rounds += 1;
        let mut saver = Command::new(std::env::current_exe().unwrap());
        saver.args(["--exact", "saves_until_it_is_killed", "--nocapture"]).process_group(0);
        saver.env("PAGEMARK_TEST_TARGET", program.pid().to_string()).env("PAGEMARK_CRIU", criu.path());
        // What is killed leaves its images.
        saver.env("TMPDIR", program.directory());
        let mut saver = saver.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        wait_until("CRIU freezes the program", || tracer(program.pid()) != 0);
        let criu_pid = tracer(program.pid());
        std::thread::sleep(Duration::from_micros(random.below(60_000)));
        let saver_pid = Pid::from_raw(saver.id() as i32);
        kill(saver_pid, Signal::SIGSTOP).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        let call = call_of(criu_pid).filter(|call| AWAITED.contains(call));
        saver.kill().unwrap();
        saver.wait().unwrap();
        if let Some(call) = call {
            *killed.entry(call).or_insert(0) += 1;
        }
        wait_until("CRIU leaves the program", || {
            pids.iter().flat_map(|pid| threads(*pid)).all(|thread| tracer(thread) == 0) && !is_alive(criu_pid)
        });
        std::thread::sleep(Duration::from_millis(20));
        for (pid, executable) in pids.iter().zip(&executable) {
            assert!(is_running(*pid), "{pid} does not run: {call:?}");
            assert_eq!(threads(*pid).len(), if *pid == program.pid() { 1 } else { 2 }, "{call:?}");
            assert_eq!(&executable_mappings(*pid), executable, "{call:?}");
            for thread in threads(*pid) {
                assert_eq!(status_field(thread, "SigBlk:").as_deref(), Some("0000000000000000"), "{call:?}");
            }
        }
        let ended = program.read("ended").unwrap_or_default();
        assert!(ended.lines().all(|line| line.ends_with(": Interrupted system call")), "{call:?}: {ended}");
    }
    eprintln!("{rounds} kills; while CRIU waited: {killed:x?}");
    for call in AWAITED {
        // Older kernels have no PAGEMAP_SCAN.
        assert!(killed.contains_key(&call) || call.0 == libc::SYS_ioctl, "never killed in {call:x?}");
    }
    let _ = std::fs::remove_file(program.directory().join("ended"));
    kill(Pid::from_raw(program.pid()), Signal::SIGUSR1).unwrap();
    wait_until("the signal is handled", || program.read("ended").is_some());
}

/// Addresses and names of all mappings, and what is open.
fn what_is_there(pid: i32) -> (Vec<String>, Vec<String>) {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let mappings = maps.lines().map(|line| line.split_ascii_whitespace().collect::<Vec<_>>().join(" ")).collect();
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let open = |entry: std::fs::DirEntry| {
        Some(format!("{:?} {:?}", entry.file_name(), std::fs::read_link(entry.path()).ok()?))
    };
    // The program makes another one where the wait for it has ended.
    let mut open: Vec<String> = entries.filter_map(open).filter(|open| !open.contains("eventpoll")).collect();
    open.sort();
    (mappings, open)
}

/// True if a process waits in CRIU's code, and not in a call that CRIU has injected.
fn executes_code_of_criu(pid: i32) -> bool {
    let text = std::fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap_or_default();
    let hexadecimal = |text: &str| u64::from_str_radix(text, 16).ok();
    let place = text.split_ascii_whitespace().last().and_then(|place| hexadecimal(place.strip_prefix("0x")?));
    what_is_there(pid).0.iter().filter(|mapping| mapping.contains("CRIUMFD")).any(|mapping| {
        let range = mapping.split_once(' ').and_then(|(range, _)| range.split_once('-'));
        let range = range.and_then(|(start, end)| Some(hexadecimal(start)?..hexadecimal(end)?));
        range.zip(place).is_some_and(|(range, place)| range.contains(&place))
    })
}

/// CRIU is killed while its code is mapped in a process.
#[test]
fn nothing_of_a_killed_criu_stays_in_a_process() {
    let Some(criu) = criu() else { return };
    let killed = AtomicU32::new(0);
    let mut started: Option<(Program, _)> = None;
    for round in 0..12 {
        let (program, before) = match started.take() {
            Some(started) => started,
            None => {
                let program = Program::c("#include <unistd.h>\nint main(void) { for (;;) pause(); }");
                let Some(program) = program else { return };
                wait_until("the program waits", || waits(program.pid()));
                let before = what_is_there(program.pid());
                (program, before)
            }
        };
        let pid = program.pid();
        let directory = tempfile::tempdir().unwrap();
        let mut dump = Dump::start(&criu, pid, directory.path(), &DumpOptions::default()).unwrap();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let criu_pid = tracer(pid);
                    if executes_code_of_criu(pid) && criu_pid != 0 {
                        killed.fetch_add(1, Ordering::Relaxed);
                        kill(Pid::from_raw(criu_pid), Signal::SIGKILL).unwrap();
                        return;
                    }
                }
            });
            // The code may have ended before it is seen.
            let _ = dump.wait_state_saved();
            is_over.store(true, Ordering::Relaxed);
        });
        // Its guard has ended then.
        drop(dump);
        wait_until("the program goes on", || ended_by(pid).is_some() || tracer(pid) == 0 && waits(pid));
        match ended_by(pid) {
            None => {
                assert_eq!(what_is_there(pid), before, "round {round}");
                started = Some((program, before));
            }
            // A limit: CRIU was killed in the microseconds at the end of a call that it had the process make.
            Some(signal) => {
                eprintln!("round {round}: the program has ended by {signal}");
                assert_eq!(signal, Signal::SIGTRAP, "round {round}");
            }
        }
    }
    let killed = killed.into_inner();
    assert!(killed > 2, "CRIU's code was seen {killed} times alone");
}

/// True if a process of one thread waits in its call. A process that is stopped there does not.
fn waits(pid: i32) -> bool {
    sleeps(pid) && call_of(pid) == Some((libc::SYS_pause, 0))
}

/// The signal by which a child has ended.
fn ended_by(pid: i32) -> Option<Signal> {
    let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
    match waitid(Id::Pid(Pid::from_raw(pid)), flags) {
        Ok(WaitStatus::Signaled(_, signal, _)) => Some(signal),
        other => {
            assert_eq!(other, Ok(WaitStatus::StillAlive));
            None
        }
    }
}

fn threads(pid: i32) -> Vec<i32> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}
