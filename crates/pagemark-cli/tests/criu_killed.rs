//! CRIU is asked to end, or killed, while it saves the state of a process that checks itself.

#[path = "support/subject.rs"]
mod subject;
mod support;

use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pagemark_testing::{SplitMix, assert_oracle, skip, wait_for};
use subject::{Subject, criu_on, has_criu, status_field, stderr, verifies, wait_until_left_alone};
use support::{Pagemark, children, is_alive};

fn checkpoint(pagemark: &Pagemark, subject: &Subject) -> Child {
    let mut command = pagemark.command(&["checkpoint", "--job", "subject", &subject.pid_text()]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("pagemark starts")
}

/// CRIU's process as soon as it begins to save the subject. None if the checkpoint ends before.
fn criu_of(subject: &Subject, checkpoint: &mut Child) -> Option<Pid> {
    while checkpoint.try_wait().expect("our child").is_none() {
        if let Some(pid) = criu_on(subject.pid()).first() {
            return Some(Pid::from_raw(*pid));
        }
    }
    None
}

/// True once the subject has checked all its data again. It ends if the data are wrong.
fn continues(subject: &Subject, file: &Path) -> bool {
    let length = || std::fs::metadata(file).map_or(0, |metadata| metadata.len());
    let before = length();
    wait_for("the subject to go on or to end", || (!is_alive(subject.pid()) || length() > before + 2).then_some(()));
    is_alive(subject.pid())
}

/// Service managers, terminals and users ask processes to end. CRIU completes its dump.
#[test]
fn requests_to_end_harm_nothing() {
    if !has_criu() {
        skip!("no CRIU");
    }
    let pagemark = Pagemark::new();
    let file = pagemark.directory().join("data");
    let Some(subject) = Subject::start(&["data", "8", &file.display().to_string()]) else { skip!("no C compiler") };
    let mut random = SplitMix(3);
    let mut sent = 0;
    for round in 0..12 {
        let mut child = checkpoint(&pagemark, &subject);
        let Some(criu) = criu_of(&subject, &mut child) else { panic!("there was no CRIU in round {round}") };
        // Before it executes CRIU, the process is a copy of Pagemark.
        std::thread::sleep(Duration::from_millis(random.below(40)));
        for signal in [Signal::SIGTERM, Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGUSR1] {
            sent += u32::from(kill(criu, signal).is_ok());
            std::thread::sleep(Duration::from_millis(random.below(4)));
        }
        let output = child.wait_with_output().expect("it ends");
        assert!(output.status.success(), "round {round}: {}", stderr(&output));
        subject.is_untouched();
        assert_oracle!(continues(&subject, &file), "round {round}: the subject has found its data wrong");
    }
    assert!(sent > 30, "CRIU was gone too soon: {sent} signals were sent");
    verifies(&pagemark);
}

/// The process that guards a checkpoint's CRIU, if there is one yet.
fn guard_of(checkpoint: &Child) -> Option<Pid> {
    let is_guard = |pid: &i32| {
        std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim_end() == "pagemark-guard")
    };
    children(checkpoint.id() as i32).into_iter().find(is_guard).map(Pid::from_raw)
}

/// CRIU is killed, and sometimes the guard of CRIU instead. If the guard is killed, the checkpoint
/// succeeds. If CRIU is killed, the process continues.
///
/// Between the end of an injected system call and the moment in which CRIU sees this end, a killed
/// CRIU leaves a SIGTRAP that ends the process. The test limits how often.
#[test]
#[ignore = "some minutes; PAGEMARK_KILLS is the number of kills"]
fn killed_at_any_instant_criu_harms_no_process() {
    if !has_criu() {
        skip!("no CRIU");
    }
    let kills: u32 = std::env::var("PAGEMARK_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(1000);
    let pagemark = Pagemark::new();
    let file = pagemark.directory().join("data");
    let start = || Subject::start(&["data", "8", &file.display().to_string()]);
    let Some(mut subject) = start() else { skip!("no C compiler") };
    let mut random = SplitMix(Instant::now().elapsed().as_nanos() as u64 + u64::from(std::process::id()));
    let (mut killed, mut guards, mut harmed) = (0, 0, 0);
    while killed < kills {
        let mut child = checkpoint(&pagemark, &subject);
        let mut is_guard_killed = false;
        if let Some(criu) = criu_of(&subject, &mut child) {
            std::thread::sleep(Duration::from_micros(random.below(90_000)));
            let guard = guard_of(&child).filter(|_| random.below(4) == 0);
            is_guard_killed = guard.is_some();
            let is_sent = kill(guard.unwrap_or(criu), Signal::SIGKILL).is_ok();
            killed += u32::from(is_sent);
            guards += u32::from(is_sent && is_guard_killed);
        }
        let output = child.wait_with_output().expect("it ends");
        assert!(output.status.success() || !is_guard_killed, "no checkpoint without a guard: {}", stderr(&output));
        // Helper processes that CRIU had stopped stay stopped.
        for helper in criu_on(subject.pid()) {
            let _ = kill(Pid::from_raw(helper), Signal::SIGKILL);
        }
        if is_alive(subject.pid()) {
            wait_until_left_alone(subject.pid());
        }
        if continues(&subject, &file) {
            let blocked = status_field(subject.pid(), "SigBlk");
            assert_eq!(blocked.as_deref(), Some("0000000000000000"), "signals are blocked");
        } else {
            harmed += 1;
            let victim = if is_guard_killed { "the guard" } else { "CRIU" };
            eprintln!("kill {killed}, of {victim}: the process has ended with {:?}", subject.status());
            subject = start().expect("as before");
        }
    }
    eprintln!("{killed} kills, {guards} of them of guards; {harmed} processes were harmed");
    assert!(harmed * 200 <= kills, "{harmed} of {kills} kills harmed the process");
    verifies(&pagemark);
}
