//! Runs a program with all that it starts, and leaves no process of it.
//!
//! Processes whose parents have ended become children of this one, as they would become children of
//! the first process of the system. The program has a session of its own, so that groups of
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
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::{Error, Result, command};

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

/// Runs the program with the arguments, for at most `limit`. With `stalls`, the processes of its
/// group are stopped for 100 ms at a time. Processes that remain for longer than `GRACE` are
/// written to `report`, a line each, and killed.
///
/// Returns the exit status as a shell gives it, or [`TIMED_OUT`].
///
/// # Errors
/// If the program cannot be started, or the report cannot be written.
pub fn run(limit: Duration, stalls: bool, report: &Path, program: &[OsString]) -> Result<i32> {
    let failed = |errno: Errno| Error::Start { program: "a contained program".to_owned(), source: errno.into() };
    prctl::set_child_subreaper(true).map_err(failed)?;
    let mut command = Command::new("setsid");
    // It ends with this process, also where this process is killed.
    command.args(["setpriv", "--pdeathsig", "KILL"]).args(program);
    let child = command::start(&mut command)?;
    let id = i32::try_from(child.id()).expect("ids of processes are positive");
    let has_timed_out = Arc::new(AtomicBool::new(false));
    // It ends with this process.
    std::thread::spawn({
        let has_timed_out = Arc::clone(&has_timed_out);
        move || {
            let end = Instant::now() + limit;
            while let Some(left) = end.checked_duration_since(Instant::now()) {
                std::thread::sleep(left.min(if stalls { BETWEEN_STALLS } else { left }));
                if stalls {
                    stall(id);
                }
            }
            has_timed_out.store(true, Ordering::Relaxed);
            // It may have ended.
            let _ = kill(Pid::from_raw(id), Signal::SIGKILL);
        }
    });
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
    std::fs::write(report, left.concat()).map_err(Error::file("write", report))?;
    Ok(status)
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
            lines.entry(pid).or_insert_with(|| format!("process {pid}: {}\n", words.trim_end()));
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
