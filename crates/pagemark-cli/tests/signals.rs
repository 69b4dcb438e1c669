//! Signals that reach `pagemark run` and its program while it takes a checkpoint.

#[path = "support/subject.rs"]
mod subject;
mod support;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use pagemark_linux::proc::{Stat, stat};
use pagemark_testing::{assert_oracle, skip, wait_for};
use subject::{Subject, criu_on, has_criu, status_field};
use support::{Pagemark, Runner, is_alive, kill_and_wait};

/// Field of the file `stat`: processor time in user mode.
const USER_TIME: usize = 14;

/// The subject, which appends to a file, as the program of `pagemark run`.
struct Run {
    runner: Runner,
    data: PathBuf,
}

impl Run {
    /// Starts it as the job `subject`. None where there is no C compiler.
    fn start(pagemark: &Pagemark, every: &str) -> Option<Run> {
        let data = pagemark.directory().join("data");
        let program = subject::subject()?;
        let command = [program.to_str(), Some("data"), Some("8"), data.to_str()].map(|word| word.expect("UTF-8"));
        Some(Run { runner: pagemark.run(&["--job", "subject", "--every", every], &command), data })
    }

    /// Like [`Run::start`], until there is a checkpoint.
    fn start_saved(pagemark: &Pagemark, every: &str) -> Option<Run> {
        let run = Run::start(pagemark, every)?;
        wait_for("a checkpoint", || (!pagemark.checkpoints("subject").is_empty()).then_some(()));
        Some(run)
    }

    fn target(&self) -> i32 {
        self.runner.target()
    }

    /// Waits until the program has appended something, and calls `check` before each look.
    fn goes_on(&self, what: &str, check: impl Fn()) {
        let before = length(&self.data);
        wait_for(what, || {
            check();
            (length(&self.data) > before + 2).then_some(())
        });
    }
}

fn length(file: &Path) -> u64 {
    std::fs::metadata(file).map_or(0, |metadata| metadata.len())
}

/// Stops CRIU while the target is frozen, and returns the process id of CRIU.
fn stop_criu_in_a_freeze(target: i32) -> Pid {
    wait_for("a freeze", || {
        let tracer = || status_field(target, "TracerPid")?.parse::<i32>().ok().filter(|&tracer| tracer != 0);
        let criu = tracer().filter(|tracer| criu_on(target).contains(tracer)).map(Pid::from_raw)?;
        kill(criu, Signal::SIGSTOP).ok()?;
        wait_for("CRIU to stop or to end", || {
            let state = status_field(criu.as_raw(), "State").unwrap_or_default();
            (!state.starts_with(['R', 'S', 'D'])).then_some(())
        });
        if tracer() == Some(criu.as_raw()) {
            return Some(criu);
        }
        let _ = kill(criu, Signal::SIGCONT);
        None
    })
}

/// Like [`stop_criu_in_a_freeze`], but while the target executes nothing for CRIU, and CRIU knows
/// that: a call that ends behind a CRIU that is killed then leaves a signal that ends the program.
fn stop_criu_between_its_calls(target: i32) -> Pid {
    /// Field of the file `stat`: what the tracer has not waited for.
    const EXIT_CODE: usize = 52;
    loop {
        let criu = stop_criu_in_a_freeze(target);
        // In one read: a thread that works for CRIU may stop between two.
        let text = std::fs::read(format!("/proc/{target}/task/{target}/stat")).expect("it is frozen");
        if Stat::parse(&text).is_some_and(|stat| stat.state == 't') && stat::number(&text, EXIT_CODE) == Some(0) {
            return criu;
        }
        kill(criu, Signal::SIGCONT).expect("it is stopped");
    }
}

fn is_pending(pid: i32, signal: Signal) -> bool {
    let pending = status_field(pid, "ShdPnd").unwrap_or_default();
    u64::from_str_radix(&pending, 16).is_ok_and(|set| set >> (signal as u64 - 1) & 1 == 1)
}

fn wait_until_stopped(pid: i32) {
    wait_for("a stop", || status_field(pid, "State")?.starts_with('T').then_some(()));
}

/// A signal that asks the program to end would end the restored program again, if the checkpoint
/// had it as pending.
#[test]
fn a_signal_that_comes_during_a_freeze_is_not_part_of_the_checkpoint() {
    if !has_criu() {
        skip!("no CRIU");
    }
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        let pagemark = Pagemark::new();
        let Some(mut run) = Run::start_saved(&pagemark, "100ms") else { skip!("no C compiler") };
        let target = run.target();
        let criu = stop_criu_in_a_freeze(target);
        kill(Pid::from_raw(run.runner.child.id() as i32), signal).expect("it runs");
        // Long enough for a signal that is not held back to become pending.
        let until = Instant::now() + Duration::from_millis(300);
        while Instant::now() < until && !is_pending(target, signal) {
            std::thread::sleep(Duration::from_millis(5));
        }
        kill(criu, Signal::SIGCONT).expect("it is stopped");
        let status = wait_for("the run to end", || run.runner.child.try_wait().expect("our child"));
        assert_eq!(status.code(), Some(128 + signal as i32), "{}", pagemark.log());
        assert!(!is_alive(target));

        pagemark.done(&["restore", "--detach", "subject"]);
        run.goes_on("the restored program to go on", || {
            assert_oracle!(is_alive(target), "{signal} ended the restored program: {}", pagemark.log());
        });
        kill_and_wait(target);
    }
}

#[test]
fn a_stopped_process_keeps_a_pending_signal_through_checkpoints() {
    if !has_criu() {
        skip!("no CRIU");
    }
    let pagemark = Pagemark::new();
    let data = pagemark.directory().join("data").display().to_string();
    let Some(subject) = Subject::start(&["data", "8", &data]) else { skip!("no C compiler") };
    let target = Pid::from_raw(subject.pid());
    kill(target, Signal::SIGSTOP).expect("it runs");
    wait_until_stopped(subject.pid());
    let checkpoint = || {
        pagemark.done(&["checkpoint", "--job", "subject", &subject.pid_text()]);
        wait_until_stopped(subject.pid());
        assert!(!is_pending(subject.pid(), Signal::SIGSTOP), "the stop signal came again");
    };
    checkpoint();
    kill(target, Signal::SIGTERM).expect("it is stopped");
    for _ in 0..3 {
        checkpoint();
        assert!(is_pending(subject.pid(), Signal::SIGTERM), "a checkpoint lost the signal");
    }
    kill(target, Signal::SIGCONT).expect("it is stopped");
    wait_for("its end", || (!is_alive(subject.pid())).then_some(()));
}

#[test]
fn a_process_that_is_continued_during_a_freeze_is_not_stopped_again() {
    if !has_criu() {
        skip!("no CRIU");
    }
    let pagemark = Pagemark::new();
    let Some(run) = Run::start_saved(&pagemark, "100ms") else { skip!("no C compiler") };
    let target = run.target();
    kill(Pid::from_raw(target), Signal::SIGSTOP).expect("it runs");
    wait_until_stopped(target);
    let criu = stop_criu_in_a_freeze(target);
    kill(Pid::from_raw(target), Signal::SIGCONT).expect("it is frozen");
    kill(criu, Signal::SIGCONT).expect("it is stopped");
    run.goes_on("the program to go on", || {});
    pagemark.checkpoint_after("subject", support::now_unix_us());
    kill_and_wait(target);
}

/// What the guard of CRIU stops to repair it is in the end as its user has asked for meanwhile.
#[test]
fn a_killed_criu_undoes_no_stop_and_no_continuation() {
    if !has_criu() {
        skip!("no CRIU");
    }
    let pagemark = Pagemark::new();
    let Some(run) = Run::start_saved(&pagemark, "100ms") else { skip!("no C compiler") };
    let target = Pid::from_raw(run.target());
    let is_there = || assert_oracle!(is_alive(target.as_raw()), "the program has ended");
    for _ in 0..5 {
        kill(target, Signal::SIGSTOP).expect("it runs");
        wait_until_stopped(target.as_raw());
        let criu = stop_criu_between_its_calls(target.as_raw());
        kill(target, Signal::SIGCONT).expect("it is frozen");
        kill(criu, Signal::SIGKILL).expect("it is stopped");
        run.goes_on("the program to go on", is_there);

        let criu = stop_criu_between_its_calls(target.as_raw());
        kill(target, Signal::SIGSTOP).expect("it is frozen");
        kill(criu, Signal::SIGKILL).expect("it is stopped");
        // A checkpoint of a stopped program succeeds, and leaves it stopped.
        pagemark.checkpoint_after("subject", support::now_unix_us());
        wait_until_stopped(target.as_raw());
        kill(target, Signal::SIGCONT).expect("it is stopped");
        run.goes_on("the program to go on", is_there);
    }
    kill_and_wait(target.as_raw());
}

/// CRIU, which expects no stop, drops the signal. It may come before a call that CRIU injects, and
/// while CRIU's code runs.
#[test]
fn a_stop_that_comes_during_a_freeze_is_not_lost() {
    if !has_criu() {
        skip!("no CRIU");
    }
    let pagemark = Pagemark::new();
    let Some(run) = Run::start_saved(&pagemark, "50ms") else { skip!("no C compiler") };
    let target = Pid::from_raw(run.target());
    for round in 0..12 {
        let criu = stop_criu_in_a_freeze(run.target());
        kill(target, Signal::SIGSTOP).expect("it is frozen");
        kill(criu, Signal::SIGCONT).expect("it is stopped");
        if round % 2 == 0 {
            pagemark.checkpoint_after("subject", support::now_unix_us());
        }
        wait_until_stopped(run.target());
        kill(target, Signal::SIGCONT).expect("it is stopped");
        run.goes_on("the program to go on", || {});
    }
    let failed = pagemark.log().matches("no checkpoint of").count();
    assert!(failed <= 3, "{failed} have failed: {}", pagemark.log());
    kill_and_wait(run.target());
}

/// A shell continues all processes of a job at once. CRIU gets one SIGCHLD for all.
#[test]
fn a_job_that_is_continued_during_a_freeze_is_saved() {
    if !has_criu() {
        skip!("no CRIU");
    }
    let Some(subject) = subject::subject() else { skip!("no C compiler") };
    let pagemark = Pagemark::new();
    let lengths = || [1, 2, 3].map(|number| length(&pagemark.directory().join(format!("data{number}"))));
    let directory = pagemark.directory().display();
    let subjects = [1, 2, 3].map(|number| format!("{} data 2 {directory}/data{number} &", subject.display()));
    let command = format!("{} wait", subjects.join(" "));
    let runner = pagemark.run(&["--job", "subject", "--every", "100ms"], &["sh", "-c", &command]);
    let target = runner.target();
    wait_for("a checkpoint", || (!pagemark.checkpoints("subject").is_empty()).then_some(()));
    let group = nix::unistd::getpgid(Some(Pid::from_raw(target))).expect("it runs");
    for _ in 0..10 {
        killpg(group, Signal::SIGSTOP).expect("it runs");
        wait_until_stopped(target);
        let criu = stop_criu_in_a_freeze(target);
        let before = lengths();
        killpg(group, Signal::SIGCONT).expect("it is frozen");
        kill(criu, Signal::SIGCONT).expect("it is stopped");
        wait_for("all to go on", || {
            let now = lengths();
            now.iter().zip(before).all(|(now, before)| *now > before + 2).then_some(())
        });
    }
    // The end of CRIU's code in a first thread is a stop that the guard cannot tell from that of SIGCONT.
    let failed = pagemark.log().matches("no checkpoint of").count();
    assert!(failed <= 3, "{failed} have failed: {}", pagemark.log());
    let _ = killpg(group, Signal::SIGKILL);
    kill_and_wait(target);
}

/// To a traced thread, SIGCONT is a stop that CRIU does not expect.
#[test]
fn a_process_that_is_continued_all_the_time_is_saved() {
    if !has_criu() {
        skip!("no CRIU");
    }
    let pagemark = Pagemark::new();
    let Some(run) = Run::start(&pagemark, "50ms") else { skip!("no C compiler") };
    let target = run.target();
    let taken = wait_for("40 checkpoints", || {
        for _ in 0..100 {
            assert_oracle!(is_alive(target), "a checkpoint has ended the program: {}", pagemark.log());
            kill(Pid::from_raw(target), Signal::SIGCONT).expect("it runs");
            std::thread::sleep(Duration::from_millis(1));
        }
        Some(pagemark.checkpoints("subject").len()).filter(|&taken| taken >= 40)
    });
    let failed = pagemark.log().matches("no checkpoint of").count();
    assert!(failed < taken / 2, "{failed} have failed, {taken} not: {}", pagemark.log());
    run.goes_on("the program to go on", || {});
    kill_and_wait(target);
    pagemark.done(&["restore", "--detach", "subject"]);
    kill_and_wait(target);
}

/// Programs that limit the processor time of others, as cpulimit does, stop and continue them all
/// the time. A quarter of CRIU's dumps then fails, which are repeated; what such a dump leaves must
/// not end the program.
#[test]
fn a_process_that_is_stopped_and_continued_all_the_time_goes_on() {
    const THREADS: &str = "import threading, time\n\
        for _ in range(6): threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n\
        open('ready', 'w').close()\n\
        while True: pass";
    if !has_criu() {
        skip!("no CRIU");
    }
    let pagemark = Pagemark::new();
    let runner = pagemark.run(&["--job", "limited", "--every", "10ms"], &["python3", "-c", THREADS]);
    let target = runner.target();
    let send = |signal| {
        assert_oracle!(is_alive(target), "a checkpoint has ended the program: {}", pagemark.log());
        kill(Pid::from_raw(target), signal).expect("it runs");
    };
    let begin = Instant::now();
    let mut round = 0;
    wait_for("checkpoints", || {
        for _ in 0..20 {
            round += 1;
            send(Signal::SIGSTOP);
            std::thread::sleep(Duration::from_millis(round % 11));
            send(Signal::SIGCONT);
            std::thread::sleep(Duration::from_millis(round * 7 % 31));
        }
        let taken = pagemark.checkpoints("limited").len();
        (taken >= 10 && begin.elapsed() > Duration::from_secs(8)).then_some(())
    });
    let (taken, failed) = (pagemark.checkpoints("limited").len(), pagemark.log().matches("no checkpoint of").count());
    assert!(failed * 8 < taken, "{failed} have failed, {taken} not: {}", pagemark.log());
    let used = || stat::number(&std::fs::read(format!("/proc/{target}/stat")).expect("it runs"), USER_TIME);
    let before = used();
    wait_for("the program to go on", || (used() > before).then_some(()));
    kill_and_wait(target);
}
