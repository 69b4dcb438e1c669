//! Which job the checkpoints of a program belong to: programs of one name at once and one after the
//! other, names that are awkward, and a program that is restored.

#[path = "support/subject.rs"]
mod subject;
mod support;

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use pagemark_testing::{copy_executable, in_own_session, skip, wait_for};
use serde_json::Value;
use subject::{assert_fails, has_criu, stderr, verifies};
use support::{Pagemark, children, command_line, kill_and_wait};

/// A process that is ended with this value.
struct Running(Child);

impl Running {
    fn start(program: impl AsRef<Path>, arguments: &[&str], directory: &Path) -> Running {
        let mut command = Command::new(program.as_ref());
        command.args(arguments).current_dir(directory).stdin(Stdio::null());
        command.stdout(Stdio::null()).stderr(Stdio::null());
        Running(in_own_session(&mut command).spawn().expect("it starts"))
    }

    fn pid(&self) -> i32 {
        self.0.id() as i32
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn checkpoint(pagemark: &Pagemark, options: &[&str], pid: i32) -> Output {
    let pid = pid.to_string();
    pagemark.output(&[&["checkpoint", "--memory-only"], options, &[&pid]].concat())
}

/// Takes a checkpoint; the job that it went to.
fn job_of(pagemark: &Pagemark, pid: i32) -> String {
    let output = checkpoint(pagemark, &["--json"], pid);
    assert!(output.status.success(), "{}", stderr(&output));
    let lines = String::from_utf8(output.stdout).expect("text");
    let line = lines.lines().find(|line| line.contains(r#""event":"checkpoint""#)).expect("a checkpoint");
    let line: Value = serde_json::from_str(line).expect("JSON");
    line["job"].as_str().expect("a name").to_owned()
}

/// Runs `pagemark run` in the background until it has a checkpoint; what it has said.
fn run(pagemark: &Pagemark, options: &[&str], program: &[&str]) -> (Running, String) {
    let log = tempfile::NamedTempFile::new().expect("a file");
    let mut command =
        pagemark.command(&[&["run", "--memory-only", "--every", "100ms"], options, &["--"], program].concat());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log.reopen().expect("a file"));
    let running = Running(command.spawn().expect("it starts"));
    let said =
        wait_for("a checkpoint", || fs::read_to_string(log.path()).ok().filter(|said| said.contains("pages dirty")));
    (running, said)
}

#[test]
fn programs_of_one_name_at_once_have_jobs_of_their_own() {
    let pagemark = Pagemark::new();
    let (one, said) = run(&pagemark, &["--keep-last", "1"], &["sleep", "1000"]);
    assert!(said.contains("sleep@") && !said.contains("sleep-2"), "{said}");
    let (two, said) = run(&pagemark, &["--keep-last", "1"], &["sleep", "1001"]);
    let pid = one.pid().to_string();
    for part in ["the job sleep is in use by Pagemark", &pid, "sleep 1000", "the job sleep-2"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    // The same command is another program, too, while the first runs.
    let (three, said) = run(&pagemark, &[], &["sleep", "1000"]);
    assert!(said.contains("the job sleep-3"), "{said}");
    let refused = pagemark.output(&["run", "--memory-only", "--job", "sleep", "--", "sleep", "1002"]);
    assert_fails(&refused, &["the job sleep is in use by Pagemark", &pid, "--job"]);
    let jobs = pagemark.json(&["log", "--json"]);
    let of = |job: &str| {
        let jobs = jobs.as_array().expect("a list").iter();
        jobs.clone().find(|line| line["job"] == job).expect("the job")["command"][0].clone()
    };
    assert_eq!([of("sleep"), of("sleep-2"), of("sleep-3")], ["sleep 1000", "sleep 1001", "sleep 1000"]);
    assert!(!pagemark.repository().join("locks/job.sleep-4").exists());
    // A Pagemark that is killed holds no job any more. Its program runs on, so it is not one that is started again.
    drop((one, two, three));
    let (_again, said) = run(&pagemark, &[], &["sleep", "1001"]);
    assert!(said.contains("the job sleep-4"), "{said}");
    for entry in fs::read_dir("/proc").expect("a list").flatten() {
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let own = |pid: i32| fs::read_to_string(format!("/proc/{pid}/environ")).unwrap_or_default();
        if let (true, Ok(pid)) = (line.starts_with(b"sleep\x00100"), entry.file_name().to_string_lossy().parse())
            && own(pid).contains(&pagemark.repository().display().to_string())
        {
            kill_and_wait(pid);
        }
    }
    verifies(&pagemark);
}

#[test]
fn many_that_begin_at_once_have_different_jobs() {
    let pagemark = Pagemark::new();
    let sleepers: Vec<Running> = (0..8)
        .map(|number| Running::start("/bin/sleep", &[&(2000 + number).to_string()], pagemark.directory()))
        .collect();
    let begin = |sleeper: &Running| {
        let mut command = pagemark.command(&["attach", "--memory-only", "--every", "1h", "--json"]);
        let command = command.arg(sleeper.pid().to_string()).stdin(Stdio::null()).stdout(Stdio::null());
        Running(command.stderr(Stdio::null()).spawn().expect("it starts"))
    };
    let attached: Vec<Running> = sleepers.iter().map(begin).collect();
    let jobs = wait_for("all jobs", || {
        let jobs = pagemark.output(&["log", "--json"]);
        let jobs: Value = serde_json::from_slice(&jobs.stdout).ok()?;
        (jobs.as_array()?.len() == sleepers.len()).then_some(jobs)
    });
    let mut commands: Vec<String> =
        jobs.as_array().expect("a list").iter().map(|job| job["command"][0].to_string()).collect();
    commands.sort();
    commands.dedup();
    assert_eq!(commands.len(), sleepers.len());
    drop(attached);
    verifies(&pagemark);
}

/// Also with another repository, which knows nothing of the first one's job, and whatever mechanism
/// the second one takes.
#[test]
fn a_second_pagemark_for_a_program_names_the_first() {
    let (pagemark, other) = (Pagemark::new(), Pagemark::new());
    let (mut first, _) = run(&pagemark, &[], &["sleep", "1003"]);
    let target =
        wait_for("the program", || children(first.pid()).into_iter().find(|&pid| command_line(pid).contains("1003")));
    let (target_text, first_text) = (target.to_string(), format!("process {} (", first.pid()));
    for arguments in [
        &["checkpoint", "--memory-only"][..],
        &["checkpoint", "--memory-only", "--mechanism", "compare"],
        &["attach", "--memory-only", "--every", "1h"],
        &["advise", "--observe", "1s"],
    ] {
        let refused = other.output(&[arguments, &[&target_text]].concat());
        assert_fails(&refused, &[&target_text, "is tracked by another Pagemark already", &first_text, "Ctrl-C"]);
    }
    first.0.kill().expect("it runs");
    first.0.wait().expect("it is our child");
    wait_for("its helpers to end", || checkpoint(&other, &[], target).status.success().then_some(()));
    kill_and_wait(target);
}

#[test]
fn programs_of_one_name_one_after_the_other_do_not_mix() {
    let pagemark = Pagemark::new();
    let directory = pagemark.directory();
    let first = Running::start("/bin/sleep", &["1000"], directory);
    assert_eq!(job_of(&pagemark, first.pid()), "sleep");
    let second = Running::start("/bin/sleep", &["1001"], directory);
    assert_eq!(job_of(&pagemark, second.pid()), "sleep-2");
    let output = checkpoint(&pagemark, &[], second.pid());
    assert!(stderr(&output).contains("has the checkpoints of another program (/bin/sleep 1000"), "{}", stderr(&output));
    // The same process goes on, and so does the same command where the first has ended.
    assert_eq!(job_of(&pagemark, first.pid()), "sleep");
    let equal = Running::start("/bin/sleep", &["1000"], directory);
    assert_eq!(job_of(&pagemark, equal.pid()), "sleep-3", "the first one runs");
    drop((first, equal));
    let again = Running::start("/bin/sleep", &["1000"], directory);
    assert_eq!(job_of(&pagemark, again.pid()), "sleep");
    let elsewhere = Running::start("/bin/sleep", &["1000"], Path::new("/"));
    assert_eq!(job_of(&pagemark, elsewhere.pid()), "sleep-4");
    // A name that is given is taken, and it is said what the job has had.
    let output = checkpoint(&pagemark, &["--job", "sleep"], elsewhere.pid());
    assert!(stderr(&output).contains("the job sleep has checkpoints of another program"), "{}", stderr(&output));
    let shown = pagemark.done(&["show", "sleep"]);
    assert!(shown.contains("/bin/sleep 1000") && shown.contains("directory"), "{shown}");
    assert!(pagemark.done(&["log", "sleep-2"]).contains("/bin/sleep 1001"));
    let document = pagemark.json(&["show", "--json", "sleep-4"]);
    assert_eq!(document["program"]["directory"], "/");
    verifies(&pagemark);
}

#[test]
fn tasks_of_a_batch_system_are_told_apart() {
    let pagemark = Pagemark::new();
    let job_of_task = |task: &str| {
        let mut command =
            pagemark.command(&["run", "--memory-only", "--json", "--every", "50ms", "--", "sleep", "1.5"]);
        let output = command.env("SLURM_ARRAY_TASK_ID", task).stdin(Stdio::null()).output().expect("it runs");
        let said = stderr(&output);
        let line = said.lines().find(|line| line.contains(r#""event":"checkpoint""#)).expect("a checkpoint");
        serde_json::from_str::<Value>(line).expect("JSON")["job"].as_str().expect("a name").to_owned()
    };
    assert_eq!(job_of_task("1"), "sleep");
    assert_eq!(job_of_task("2"), "sleep-2");
    assert_eq!(job_of_task("1"), "sleep");
}

#[test]
fn a_restored_program_continues_its_job() {
    if !has_criu() {
        skip!("no CRIU works here");
    }
    let pagemark = Pagemark::new();
    let program = Running::start("/bin/sleep", &["1000"], pagemark.directory());
    let take = |pid: i32| pagemark.output(&["checkpoint", &pid.to_string()]);
    let output = take(program.pid());
    assert!(output.status.success(), "{}", stderr(&output));
    // Another program of the name begins meanwhile.
    let other = Running::start("/bin/sleep", &["1001"], pagemark.directory());
    assert_eq!(job_of(&pagemark, other.pid()), "sleep-2");
    drop(program);
    let restored = pagemark.json(&["restore", "--detach", "--json", "sleep"]);
    let pid = restored["pid"].as_i64().expect("a process") as i32;
    let output = take(pid);
    let said = stderr(&output);
    kill_and_wait(pid);
    assert!(said.contains("sleep@2"), "{said}");
    let birth = |name: &str| pagemark.json(&["show", "--json", name])["program"]["process"]["birth"].clone();
    assert!(birth("sleep@1").is_string());
    assert_eq!(birth("sleep@1"), birth("sleep@2"));
}

#[test]
fn the_default_name_of_any_program_is_taken_by_every_command() {
    let pagemark = Pagemark::new();
    for (file, job) in [("-x", "x"), ("--help", "help"), (".a b", "a-b"), ("@3", "3"), ("\x1b]0;P", "0-P")] {
        let program = pagemark.directory().join(file);
        copy_executable(Path::new("/bin/sleep"), &program);
        let running = Running::start(&program, &["1000"], pagemark.directory());
        assert_eq!(job_of(&pagemark, running.pid()), job, "{file:?}");
        for command in [["show", job].as_slice(), &["log", job], &["prune", "--keep-last", "1", job]] {
            pagemark.done(command);
        }
    }
    for option in [&["--job", "-x"][..], &["--job=-x"]] {
        let refused = pagemark.output(&[&["checkpoint"], option, &["1"]].concat());
        assert_eq!(refused.status.code(), Some(2));
        assert!(stderr(&refused).contains("begins with `-`"), "{}", stderr(&refused));
    }
}

#[test]
fn a_program_that_is_started_again_beside_a_restored_one_has_another_job() {
    if !has_criu() {
        skip!("no CRIU works here");
    }
    let pagemark = Pagemark::new();
    let program = Running::start("/bin/sleep", &["1000"], pagemark.directory());
    let output = pagemark.output(&["checkpoint", &program.pid().to_string()]);
    assert!(output.status.success(), "{}", stderr(&output));
    drop(program);
    let restored = pagemark.json(&["restore", "--detach", "--json", "sleep"]);
    let pid = restored["pid"].as_i64().expect("a process") as i32;
    // A second restore of it is none beside it.
    assert_fails(&pagemark.output(&["restore", "--detach", "sleep"]), &["in use"]);
    let again = Running::start("/bin/sleep", &["1000"], pagemark.directory());
    let job = job_of(&pagemark, again.pid());
    let of_restored = job_of(&pagemark, pid);
    kill_and_wait(pid);
    assert_eq!((job.as_str(), of_restored.as_str()), ("sleep-2", "sleep"));
    // When the restored one has ended, its job is continued by one that is started again.
    drop(again);
    let again = Running::start("/bin/sleep", &["1000"], pagemark.directory());
    assert_eq!(job_of(&pagemark, again.pid()), "sleep");
}
