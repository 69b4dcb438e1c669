//! Pagemark is killed at any instant: the target continues undisturbed, and the repository holds
//! the last complete checkpoint.

#[path = "support/subject.rs"]
mod subject;
mod support;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use pagemark::repository::Repository;
use pagemark_testing::{
    SplitMix, assert_oracle, assert_unviolated, finding, patience, repetitions, rounds, skip, trackee, wait_for,
};
use subject::{Subject, continues, descriptors, has_criu, is_root, untouched, verifies, wait_until_left_alone};
use support::{Pagemark, Runner, is_alive, kill_and_wait};

/// Directories with the state of a process that no process uses any more.
fn left_over() -> BTreeSet<PathBuf> {
    let entries = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("pagemark-state-"))
        .map(|entry| entry.path())
        .filter(|path| File::open(path).is_ok_and(|directory| directory.try_lock().is_ok()))
        .collect()
}

/// The program `torture`, which checks itself, and its state that must not change.
struct Tortured {
    pid: i32,
    directory: PathBuf,
    descriptors: Vec<String>,
}

impl Tortured {
    /// Asserts that the program continues without a violation, and has no traces of Pagemark.
    #[track_caller]
    fn assert_continues(&self, when: &str) {
        wait_until_left_alone(self.pid);
        let before = rounds(&self.directory);
        wait_for(&format!("{when}: the target to go on"), || {
            assert_unviolated(&self.directory);
            assert_oracle!(is_alive(self.pid), "{when}: the target has ended");
            (rounds(&self.directory) > before + 3).then_some(())
        });
        untouched(self.pid, &self.descriptors);
    }
}

/// `pagemark attach` in the background, with its output in `attach.log`.
fn attach(pagemark: &Pagemark, options: &[&str], pid: i32) -> Child {
    let log = File::create(pagemark.directory().join("attach.log")).expect("a log file");
    let mut command = pagemark.command(&["attach", "--job", "subject"]);
    command.args(options).arg(pid.to_string()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    command.spawn().expect("pagemark starts")
}

fn kill(child: &mut Child, pagemark: &Pagemark, when: &str) {
    let log = || fs::read_to_string(pagemark.directory().join("attach.log")).unwrap_or_default();
    assert_eq!(child.try_wait().expect("our child"), None, "{when}: it has ended before it was killed: {}", log());
    child.kill().expect("our child");
    child.wait().expect("our child");
}

/// Asserts that every checkpoint that is listed can be read, and that none is missing in between.
fn opens(repository: &Path, at_least: usize) -> usize {
    let repository = Repository::open(repository).unwrap_or_else(|error| finding(&error.to_string()));
    let list = repository.checkpoints("subject").unwrap_or_else(|error| finding(&error.to_string()));
    assert_oracle!(list.len() >= at_least, "checkpoints are lost: {} of {at_least}", list.len());
    let numbers: Vec<u64> = list.iter().map(|info| info.sequence).collect();
    assert_oracle!(numbers.windows(2).all(|pair| pair[0] < pair[1]), "checkpoints are not in their order: {numbers:?}");
    if let Some(last) = numbers.last() {
        repository.read("subject", *last).unwrap_or_else(|error| finding(&error.to_string()));
    }
    list.len()
}

#[test]
fn killed_at_any_instant_it_harms_nothing() {
    if !is_root() || !has_criu() {
        skip!("whole checkpoints need root and CRIU");
    }
    let pagemark = Pagemark::new();
    let directory = pagemark.directory().join("torture");
    fs::create_dir(&directory).expect("a directory");
    let program = trackee("torture").display().to_string();
    let mut random = SplitMix(7);

    // Pagemark is killed while it starts the target, and soon after.
    let path = directory.display().to_string();
    let mut tortured = None;
    for ms in [30, 90, 200, 500] {
        if let Some(Tortured { pid, .. }) = tortured {
            kill_and_wait(pid);
        }
        let _ = fs::remove_file(directory.join("progress"));
        let mut runner: Runner = pagemark.run(&["--every", "50ms", "--job", "subject"], &[&program, &path]);
        let pid = runner.target();
        wait_for("the target to begin", || (rounds(&directory) > 3).then_some(()));
        std::thread::sleep(Duration::from_millis(ms));
        runner.kill();
        wait_until_left_alone(pid);
        let now = Tortured { pid, directory: directory.clone(), descriptors: descriptors(pid) };
        now.assert_continues(&format!("run was killed after {ms} ms"));
        assert!(!now.descriptors.iter().any(|line| line.contains("userfaultfd") || line.contains("pagemark-state")));
        tortured = Some(now);
    }
    let tortured = tortured.expect("it was started");

    // Each round attaches again, and kills Pagemark while it attaches, copies, starts CRIU, freezes,
    // saves and commits: within somewhat more time than the first checkpoint takes.
    let begin = Instant::now();
    pagemark.done(&["checkpoint", "--job", "subject", &tortured.pid.to_string()]);
    let spread_ms = 150 + begin.elapsed().as_millis() as u64 * 3 / 2;
    let mut count = opens(&pagemark.repository(), 1);
    let mut seen = BTreeSet::new();
    let all_rounds = repetitions(16, 40);
    for round in 0..all_rounds {
        let ms = round * spread_ms / all_rounds + random.below(20);
        let when = format!("attach was killed after {ms} ms");
        let mut child = attach(&pagemark, &["--every", "50ms"], tortured.pid);
        std::thread::sleep(Duration::from_millis(ms));
        kill(&mut child, &pagemark, &when);
        tortured.assert_continues(&when);
        count = opens(&pagemark.repository(), count);
        seen.extend(left_over());
        if round % 10 == 9 {
            verifies(&pagemark);
        }
    }
    verifies(&pagemark);
    let attached: Vec<_> = pagemark.checkpoints("subject");
    eprintln!("killed within {spread_ms} ms; {count} checkpoints; {} directories were left over", seen.len());

    // The next Pagemark succeeds, and removes the leftovers.
    pagemark.done(&["checkpoint", "--job", "subject", &tortured.pid.to_string()]);
    tortured.assert_continues("a checkpoint was taken");
    let remaining: Vec<_> = seen.intersection(&left_over()).cloned().collect();
    assert!(remaining.is_empty(), "never removed: {remaining:?}");

    kill_and_wait(tortured.pid);
    // The last checkpoint that was complete before Pagemark was killed, and the last of all.
    for sequence in [attached[attached.len() - 1].sequence, pagemark.checkpoints("subject")[attached.len()].sequence] {
        let _ = fs::remove_file(directory.join("progress"));
        let name = format!("subject@{sequence}");
        pagemark.done(&["restore", "--detach", &name]);
        let before = rounds(&directory);
        wait_for(&format!("{name}: the restored target to go on"), || {
            assert_unviolated(&directory);
            (rounds(&directory) > before + 3).then_some(())
        });
        kill_and_wait(tortured.pid);
    }
}

#[test]
fn killed_while_it_commits_it_loses_nothing() {
    let pagemark = Pagemark::new();
    let data = pagemark.directory().join("data");
    let data_text = data.display().to_string();
    let Some(subject) = Subject::start(&["data", "4", &data_text]) else { skip!("no C compiler") };
    let mut random = SplitMix(11);
    let (mut count, mut round, mut is_made) = (0, 0, false);
    let deadline = Instant::now() + patience();
    // A busy machine completes few checkpoints in these rounds: then more and longer rounds follow.
    while round < repetitions(15, 36) || (count < 5 && Instant::now() < deadline) {
        // `full` writes the most. Every third round writes only a little.
        let mechanism = if round % 3 == 0 { "auto" } else { "full" };
        let options = ["--memory-only", "--every", "1ms", "--keep-last", "5", "--mechanism", mechanism];
        let mut child = attach(&pagemark, &options, subject.pid());
        std::thread::sleep(Duration::from_millis(20 + random.below(300.max(10 * round))));
        kill(&mut child, &pagemark, &format!("round {round}"));
        // On a busy machine it may be killed before it has made the repository; the next makes it.
        is_made |= pagemark.repository().join("config").exists();
        if is_made {
            verifies(&pagemark);
            // A prune keeps at least five checkpoints.
            count = opens(&pagemark.repository(), count.min(5));
        }
        wait_until_left_alone(subject.pid());
        subject.is_untouched();
        round += 1;
    }
    assert!(count >= 5, "only {count} checkpoints were ever complete");
    let mut diff = Command::new(env!("CARGO_BIN_EXE_pagemark"));
    diff.args(["show", "subject"]).env("PAGEMARK_REPO", pagemark.repository()).stdout(Stdio::null());
    assert!(diff.status().expect("it runs").success());
}

#[test]
fn a_restore_that_is_killed_leaves_nothing_in_the_way() {
    if !is_root() || !has_criu() {
        skip!("whole checkpoints need root and CRIU");
    }
    let pagemark = Pagemark::new();
    let data = pagemark.directory().join("data");
    let data_text = data.display().to_string();
    let Some(mut subject) = Subject::start(&["data", "48", &data_text]) else { skip!("no C compiler") };
    pagemark.done(&["checkpoint", "--job", "subject", &subject.pid_text()]);
    let pid = subject.pid();
    subject.kill();

    let place = pagemark.directory().join("temporary");
    fs::create_dir(&place).expect("a directory");
    let restore = || {
        let mut command = pagemark.command(&["restore", "--detach", "subject"]);
        command.env("TMPDIR", &place).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command.spawn().expect("pagemark starts")
    };
    let remaining = || fs::read_dir(&place).expect("a directory").count();
    let (mut whole, mut most) = (0, 0);
    for ms in (0..480).step_by(repetitions(60, 30)) {
        let mut child = restore();
        std::thread::sleep(Duration::from_millis(ms));
        let _ = child.kill();
        child.wait().expect("our child");
        most = most.max(remaining());
        // CRIU may have begun. It completes the restore, or kills what it restored, which takes a moment.
        wait_for("CRIU to end", || started_with(&place).is_empty().then_some(()));
        // A process that ends has no environment any more when the kernel closes its descriptors.
        wait_for("the directory to be free", || all_are_free(&place).then_some(()));
        if continues(&data, pid) {
            whole += 1;
            kill_and_wait(pid);
        }
    }
    eprintln!("{whole} restores were complete; at most {most} directories were left over");
    assert!(most <= 1, "left-over directories pile up: {most}");

    let output = restore().wait_with_output().expect("it ends");
    assert!(output.status.success(), "{}", subject::stderr(&output));
    assert_continues(&data, pid);
    assert_eq!(remaining(), 0, "a left-over directory was not removed");
    kill_and_wait(pid);
}

#[test]
fn a_lazy_restore_that_is_killed_takes_the_program_with_it() {
    if !is_root() || !has_criu() {
        skip!("whole checkpoints need root and CRIU");
    }
    let pagemark = Pagemark::new();
    let data = pagemark.directory().join("data");
    let data_text = data.display().to_string();
    let Some(mut subject) = Subject::start(&["data", "64", &data_text]) else { skip!("no C compiler") };
    pagemark.done(&["checkpoint", "--job", "subject", &subject.pid_text()]);
    let pid = subject.pid();
    subject.kill();

    let place = pagemark.directory().join("temporary");
    fs::create_dir(&place).expect("a directory");
    let mut killed = 0;
    for (round, ms) in [0, 0, 2, 5, 10, 20, 40, 80, 160].into_iter().enumerate() {
        let mut command = pagemark.command(&["restore", "--lazy", "subject"]);
        if round > 0 {
            command.arg("--detach");
        }
        command.env("TMPDIR", &place).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("pagemark starts");
        // This is the last message before the delivery of memory.
        let lines = BufReader::new(child.stderr.take().expect("a pipe")).lines().map_while(Result::ok);
        let line = lines.into_iter().find(|line| line.contains("runs as process"));
        assert!(line.is_some(), "it was not restored");
        std::thread::sleep(Duration::from_millis(ms));
        let _ = child.kill();
        let is_complete = child.wait().expect("our child").success();
        // The program never reads zeros, and does not wait for its memory for ever: it ends, or it has all of its
        // memory already.
        wait_for("Pagemark to end", || started_with(&place).is_empty().then_some(()));
        let is_alive = continues(&data, pid);
        assert_oracle!(is_alive || !is_complete, "the restored target has ended");
        killed += u32::from(!is_alive);
        kill_and_wait(pid);
        wait_for("CRIU to end", || criu_in(&place).is_empty().then_some(()));
    }
    eprintln!("{killed} programs ended with the process that delivered their memory");

    // The checkpoint is unchanged. The program checks all its data, and so requests all of it.
    let mut restore = pagemark.command(&["restore", "--lazy", "--detach", "subject"]);
    let output = restore.env("TMPDIR", &place).output().expect("the command runs");
    assert!(output.status.success(), "{}", subject::stderr(&output));
    assert_continues(&data, pid);
    kill_and_wait(pid);
}

/// Asserts that a subject that holds data continues to check it, and that the data are right.
fn assert_continues(data: &Path, pid: i32) {
    assert_oracle!(continues(data, pid), "the restored target has ended");
}

/// The processes that were started with this directory for temporary files, whatever they execute
/// now.
fn started_with(temporary: &Path) -> Vec<i32> {
    let wanted = format!("TMPDIR={}", temporary.display());
    let has_it = |process: &i32| {
        let environment = fs::read(format!("/proc/{process}/environ")).unwrap_or_default();
        environment.split(|&byte| byte == 0).any(|variable| variable == wanted.as_bytes())
    };
    all_processes().filter(has_it).collect()
}

/// Whether no process holds one of the directories in a directory.
fn all_are_free(parent: &Path) -> bool {
    let entries = fs::read_dir(parent).expect("a directory").flatten();
    entries.map(|entry| fs::File::open(entry.path()).expect("a directory")).all(|held| held.try_lock().is_ok())
}

fn all_processes() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_string_lossy().parse().ok())
}

/// CRIU's processes that restore from images below a directory.
fn criu_in(directory: &Path) -> Vec<i32> {
    criu_that("restore", directory)
}

fn criu_that(does: &str, directory: &Path) -> Vec<i32> {
    let wanted = format!(" {does} --no-default-config -D {}", directory.display());
    all_processes().filter(|&process| support::command_line(process).contains(&wanted)).collect()
}
