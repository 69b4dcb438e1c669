//! Runs a program with all that it starts, and leaves no process of it.
//!
//! Processes whose parents have ended become children of this one, as they would become children of
//! the first process of the system. A test binary has a session of its own, so that groups of
//! processes whose parents have ended are orphaned for the kernel, too.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::prctl;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::time::TimeValLike;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::{Error, Result, command, progress};

/// The exit status after the limit, as that of timeout(1).
pub const TIMED_OUT: i32 = 124;
/// How long the processes that a program has left may take to end.
const GRACE: Duration = Duration::from_secs(10);
/// How long killed processes may take to end.
const DEATH: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(5);
/// How long a program is stopped at a time, and how long it runs between.
const STALL: Duration = Duration::from_millis(100);
const BETWEEN_STALLS: Duration = Duration::from_millis(700);

/// The words before a program that let `suite` run it with all that it starts, see [`run`].
///
/// # Errors
/// If `suite` is not built.
pub fn prefix(limit: Duration, stalls: bool, report: &Path) -> Result<Vec<OsString>> {
    let mut words: Vec<OsString> = vec![command::built("suite")?.into(), "contained".into()];
    if stalls {
        words.push("--stalls".into());
    }
    words.extend([limit.as_secs().to_string().into(), report.into(), "--".into()]);
    Ok(words)
}

/// Writes a report for [`read_report`].
///
/// # Errors
/// If it cannot be written.
pub fn write_report(report: &Path, ended: &Ended) -> Result<()> {
    let lines = [vec![ended.processor_time.as_millis().to_string()], ended.left.clone()].concat();
    std::fs::write(report, lines.join("\n")).map_err(Error::file("write", report))
}

/// The processor time and the processes that a program has left, a line each. There is nothing in
/// it if the program's container was killed.
pub fn read_report(report: &Path) -> (Duration, Vec<String>) {
    let text = std::fs::read_to_string(report).unwrap_or_default();
    let mut lines = text.lines();
    let milliseconds = lines.next().and_then(|first| first.parse().ok()).unwrap_or(0);
    (Duration::from_millis(milliseconds), lines.map(str::to_owned).collect())
}

/// How a program is contained.
#[derive(Clone, Copy, Debug, Default)]
pub struct Manner {
    /// It is killed after this time. None lets it run for ever.
    pub limit: Option<Duration>,
    /// The processes of its group are stopped for 100 ms at a time.
    pub stalls: bool,
    /// It also ends when the thread ends that has started this process.
    pub ends_with_parent: bool,
    /// It has a session of its own, and so no terminal, at which sudo(8) asks for a password.
    pub own_session: bool,
}

/// How a contained program has ended.
#[derive(Debug)]
pub struct Ended {
    /// The exit status as a shell gives it, or [`TIMED_OUT`].
    pub status: i32,
    /// The processes that remained for longer than `GRACE` and were killed, a line each.
    pub left: Vec<String>,
    /// The time that processors have spent on it and on all that it has started.
    pub processor_time: Duration,
}

/// Runs the program with the arguments. When this process gets SIGHUP, SIGINT or SIGTERM, it kills
/// all processes below it and ends with 128 and the number of the signal.
///
/// # Errors
/// If the program cannot be started.
pub fn run(manner: Manner, program: &[OsString]) -> Result<Ended> {
    let failed = |errno: Errno| Error::Start { program: "a contained program".to_owned(), source: errno.into() };
    prctl::set_child_subreaper(true).map_err(failed)?;
    if manner.ends_with_parent {
        prctl::set_pdeathsig(Signal::SIGTERM).map_err(failed)?;
    }
    // It ends with this process, also where this process is killed.
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]).args(if manner.own_session { &["setsid"][..] } else { &[] }).args(program);
    let child = command::start(&mut command)?;
    // Not before: a child inherits the signals that are blocked.
    end_on_signals().map_err(failed)?;
    let id = i32::try_from(child.id()).expect("ids of processes are positive");
    let has_timed_out = Arc::new(AtomicBool::new(false));
    if let Some(limit) = manner.limit {
        let has_timed_out = Arc::clone(&has_timed_out);
        // It ends with this process.
        std::thread::spawn(move || {
            limit_and_stall(id, limit, manner.stalls);
            has_timed_out.store(true, Ordering::Relaxed);
            // It may have ended.
            let _ = kill(Pid::from_raw(id), Signal::SIGKILL);
        });
    }
    let status = loop {
        // Those whose parents have ended are reaped at once, as the first process of a system does it.
        match waitpid(None, None) {
            Ok(WaitStatus::Exited(ended, status)) if ended.as_raw() == id => break status,
            Ok(WaitStatus::Signaled(ended, ..)) if ended.as_raw() == id && has_timed_out.load(Ordering::Relaxed) => {
                break TIMED_OUT;
            }
            Ok(WaitStatus::Signaled(ended, signal, _)) if ended.as_raw() == id => break 128 + signal as i32,
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(failed(errno)),
        }
    };
    let grace = if status == TIMED_OUT { Duration::ZERO } else { GRACE };
    let left = if reap_within(grace) { Vec::new() } else { kill_all() };
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN).map_err(failed)?;
    let [user, system] = [usage.user_time(), usage.system_time()].map(|time| {
        let microseconds = time.num_microseconds();
        Duration::from_micros(u64::try_from(microseconds).unwrap_or(0))
    });
    Ok(Ended { status, left, processor_time: user + system })
}

/// Runs this program once more with its arguments, of which `word` is the first, contained and
/// without a limit. Returns its exit status.
///
/// # Errors
/// If it cannot be started.
pub fn run_this_program(word: &str) -> Result<i32> {
    let program = std::env::current_exe().map_err(Error::file("find", "this program".as_ref()))?;
    let words = [program.into(), word.into()].into_iter().chain(std::env::args_os().skip(1));
    let ended = run(Manner::default(), &words.collect::<Vec<OsString>>())?;
    ended.left.iter().for_each(|left| progress!("this was left, and was ended: {left}"));
    Ok(ended.status)
}

/// Returns when the limit has passed; stops the processes of the group meanwhile, if it is to.
fn limit_and_stall(group: i32, limit: Duration, stalls: bool) {
    let end = Instant::now() + limit;
    while let Some(left) = end.checked_duration_since(Instant::now()) {
        std::thread::sleep(left.min(if stalls { BETWEEN_STALLS } else { left }));
        if stalls {
            stall(group);
        }
    }
}

/// Lets a thread wait for the signals that end a program, and end all processes below this one.
/// Those that this process ignores, as nohup(1) has it, end nothing.
fn end_on_signals() -> nix::Result<()> {
    let ending = [Signal::SIGHUP, Signal::SIGINT, Signal::SIGTERM];
    let signals: SigSet = ending.into_iter().filter(|&signal| !is_ignored(signal)).collect();
    // All threads that begin after this one block them, too.
    signals.thread_block()?;
    std::thread::spawn(move || {
        let Ok(signal) = signals.wait() else { return };
        progress!("{signal}: ending all that was started");
        kill_all();
        std::process::exit(128 + signal as i32);
    });
    Ok(())
}

/// Stops the processes of a group that are not stopped, and lets them go on after a while.
fn stall(group: i32) {
    let has_group = |process: &Stat| process.group == group && !['T', 't', 'Z'].contains(&process.state);
    let stopped: Vec<Pid> =
        processes().into_iter().filter(has_group).map(|process| Pid::from_raw(process.pid)).collect();
    let send = |signal| {
        for &pid in &stopped {
            // It may have ended.
            let _ = kill(pid, signal);
        }
    };
    send(Signal::SIGSTOP);
    std::thread::sleep(STALL);
    send(Signal::SIGCONT);
}

fn is_ignored(signal: Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask & 1 << (signal as i32 - 1) != 0
}

/// Waits until this process has no children any more. Returns whether that is so.
fn reap_within(limit: Duration) -> bool {
    let end = Instant::now() + limit;
    loop {
        match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
            Err(Errno::ECHILD) => return true,
            Ok(WaitStatus::StillAlive) if Instant::now() >= end => return false,
            Ok(WaitStatus::StillAlive) => std::thread::sleep(PAUSE),
            _ => {}
        }
    }
}

/// Kills all processes below this one. Returns a line for each.
fn kill_all() -> Vec<String> {
    let mut lines = BTreeMap::new();
    let end = Instant::now() + DEATH;
    // A process may start another one before it ends.
    while Instant::now() < end {
        for pid in descendants(std::process::id()) {
            let arguments = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let words = String::from_utf8_lossy(&arguments).replace('\0', " ");
            lines.entry(pid).or_insert_with(|| format!("process {pid}: {}", words.trim_end()));
            // It may have ended.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        if reap_within(Duration::from_millis(100)) {
            break;
        }
    }
    lines.into_values().collect()
}

/// A process, as the kernel describes it in `/proc/PID/stat`.
struct Stat {
    pid: i32,
    state: char,
    parent: i32,
    group: i32,
}

fn processes() -> Vec<Stat> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let stat = |entry: std::fs::DirEntry| -> Option<Stat> {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        let text = std::fs::read_to_string(entry.path().join("stat")).ok()?;
        let mut fields = text.rsplit_once(") ")?.1.split(' ');
        let state = fields.next()?.chars().next()?;
        Some(Stat { pid, state, parent: fields.next()?.parse().ok()?, group: fields.next()?.parse().ok()? })
    };
    entries.filter_map(stat).collect()
}

/// The processes below a process.
fn descendants(root: u32) -> Vec<i32> {
    let processes = processes();
    let mut found = vec![i32::try_from(root).expect("ids of processes are positive")];
    let mut next = 0;
    while let Some(&above) = found.get(next) {
        found.extend(processes.iter().filter(|process| process.parent == above).map(|process| process.pid));
        next += 1;
    }
    found.split_off(1)
}
