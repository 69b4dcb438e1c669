//! Virtual machines that `pagemark vm run` starts.

#[path = "support/screen.rs"]
mod screen;
mod support;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pagemark_testing::{MachinePaths, PLAIN, QEMU, TestMonitor, assert_oracle, guest_program, skip, wait_for};
use screen::Screen;
use serde_json::json;
use support::{Pagemark, children, is_alive, kill_and_wait};

/// A `pagemark vm run`, killed with its QEMU when dropped.
struct Run(Child);

impl Drop for Run {
    fn drop(&mut self) {
        if self.0.try_wait().is_ok_and(|status| status.is_none()) {
            let qemus = children(self.0.id() as i32);
            let _ = self.0.kill();
            let _ = self.0.wait();
            qemus.into_iter().for_each(kill_and_wait);
        }
    }
}

/// Starts `pagemark vm run`, with its messages in a file.
fn run(pagemark: &Pagemark, paths: &MachinePaths, further: &[&str]) -> Run {
    let mut command = pagemark.command(&["vm", "run", "--every", "200ms", "--", QEMU]);
    command.args(paths.arguments(further)).stdin(Stdio::null()).stdout(Stdio::null());
    let log = File::create(pagemark.directory().join("pagemark.log")).expect("a log file");
    Run(command.env("TMPDIR", pagemark.directory()).stderr(log).spawn().expect("it starts"))
}

/// QEMU, the child of a Pagemark.
fn qemu_of(pagemark: i32) -> i32 {
    let is_qemu = |pid: &i32| std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|c| c.starts_with("qemu"));
    wait_for("QEMU", || children(pagemark).into_iter().find(is_qemu))
}

/// The monitor socket that Pagemark's first line names.
fn monitor(pagemark: &Pagemark) -> PathBuf {
    let log = pagemark.log();
    let line = log.lines().find_map(|line| line.split_once("; monitor ")).expect("a line with the monitor");
    line.1.into()
}

fn wait_for_checkpoints(pagemark: &Pagemark, job: &str, count: usize) {
    wait_for("checkpoints", || (pagemark.checkpoints(job).len() >= count).then_some(()));
}

#[test]
fn a_machine_is_checkpointed_from_its_begin_through_resets_to_its_end() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let (pagemark, paths) = (Pagemark::new(), MachinePaths::default());
    let mut child = run(&pagemark, &paths, &["-name", "box"]);
    wait_for("the machine to start", || (paths.steps() > 20).then_some(()));
    let mut own = TestMonitor::connect(&paths.join("test.qmp"));
    wait_for_checkpoints(&pagemark, "box", 2);
    own.run("system_reset", json!({}));
    wait_for("the reset to be reported", || pagemark.log().contains("box: the machine was reset").then_some(()));
    own.run("stop", json!({}));
    let memory = own.physical_memory(64 << 20, &paths.join("dump"));
    let count = pagemark.checkpoints("box").len();
    // The one that may be on its way is of the machine before.
    wait_for_checkpoints(&pagemark, "box", count + 2);

    // What the command line does not have would be missing in a restored machine.
    own.run("device_add", json!({"driver": "virtio-rng-pci", "id": "late"}));
    wait_for("the device to be reported", || pagemark.log().contains("the device late was plugged in").then_some(()));
    let socket = monitor(&pagemark);
    assert!(socket.exists());
    own.run("quit", json!({}));
    assert!(child.0.wait().expect("our child").success());
    assert!(pagemark.log().contains("box: the machine was powered off"), "{}", pagemark.log());
    assert!(!socket.exists(), "nothing is left of the socket");

    let restored = pagemark.json(&["restore", "--detach", "--json", "box"]);
    let mut own = TestMonitor::connect(&paths.join("test.qmp"));
    assert!(!own.is_running(), "it was paused at the checkpoint");
    assert_oracle!(own.physical_memory(64 << 20, &paths.join("dump")) == memory, "its memory is that after the reset");
    kill_and_wait(restored["pid"].as_i64().expect("a process id") as i32);
}

#[test]
fn the_exit_status_is_that_of_qemu_and_a_daemon_is_refused() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let (pagemark, paths) = (Pagemark::new(), MachinePaths::default());
    let status = |further: &[&str]| {
        let mut child = run(&pagemark, &paths, further);
        (child.0.wait().expect("our child").code(), pagemark.log())
    };
    let (code, log) = status(&["-machine", "none-such"]);
    assert!(code == Some(1) && log.contains("unsupported machine type"), "{code:?}: {log}");
    assert_eq!(status(&["-version"]).0, Some(0));
    let (code, log) = status(&["-daemonize"]);
    assert!(code == Some(2) && log.contains("vm attach"), "{code:?}: {log}");
    let output = pagemark.output(&["vm", "run", "--", "/no/such/qemu"]);
    assert_eq!(output.status.code(), Some(127));

    let mut child = run(&pagemark, &paths, &PLAIN);
    wait_for("the machine to start", || (paths.steps() > 3).then_some(()));
    kill(Pid::from_raw(qemu_of(child.0.id() as i32)), Signal::SIGKILL).expect("it runs");
    assert_eq!(child.0.wait().expect("our child").code(), Some(137));
    // A signal to Pagemark alone is one to QEMU, which ends in order.
    let mut child = run(&pagemark, &paths, &PLAIN);
    let count = pagemark.checkpoints("qemu-system-x86_64").len();
    wait_for_checkpoints(&pagemark, "qemu-system-x86_64", count + 1);
    kill(Pid::from_raw(child.0.id() as i32), Signal::SIGTERM).expect("it runs");
    assert!(child.0.wait().expect("our child").success());
}

#[test]
fn a_machine_whose_pagemark_is_killed_is_attached_to_by_its_socket() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let (pagemark, paths) = (Pagemark::new(), MachinePaths::default());
    let mut child = run(&pagemark, &paths, &["-name", "box"]);
    wait_for_checkpoints(&pagemark, "box", 2);
    let qemu = qemu_of(child.0.id() as i32);
    kill(Pid::from_raw(child.0.id() as i32), Signal::SIGKILL).expect("our child");
    child.0.wait().expect("our child");
    let mut own = TestMonitor::connect(&paths.join("test.qmp"));
    wait_for("the machine to run", || own.is_running().then_some(()));
    paths.wait_for_steps(2);
    let socket = monitor(&pagemark);
    let checkpoint = |socket: &Path| {
        let mut command = pagemark.command(&["vm", "checkpoint", "--json", &socket.display().to_string()]);
        let output = command.env("TMPDIR", pagemark.directory()).stdin(Stdio::null()).output().expect("it runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice::<serde_json::Value>(&output.stdout).expect("JSON")
    };
    assert_eq!(checkpoint(&socket)["job"], "box");
    assert_eq!(checkpoint(&socket)["job"], "box", "the first one has left the socket");
    kill_and_wait(qemu);
    assert!(socket.exists());
    let restored = pagemark.json(&["restore", "--detach", "--json", "box"]);
    paths.wait_for_steps(5);
    // Nobody can use the socket any more.
    checkpoint(&paths.join("test.qmp"));
    assert!(!socket.parent().expect("a directory").exists());
    kill_and_wait(restored["pid"].as_i64().expect("a process id") as i32);
}

/// A QEMU may fill and lock all its memory before it answers.
#[test]
fn a_restore_waits_for_a_qemu_that_starts_slowly() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let (pagemark, paths) = (Pagemark::new(), MachinePaths::default());
    let mut child = run(&pagemark, &paths, &["-name", "box"]);
    wait_for_checkpoints(&pagemark, "box", 1);
    kill_and_wait(qemu_of(child.0.id() as i32));
    child.0.wait().expect("it ends");
    let mut command = pagemark.command(&["restore", "box"]);
    let log = File::create(pagemark.directory().join("restore.log")).expect("a log file");
    let restore = Run(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().expect("it starts"));
    let qemu = Pid::from_raw(qemu_of(restore.0.id() as i32));
    let before = paths.steps();
    kill(qemu, Signal::SIGSTOP).expect("QEMU");
    std::thread::sleep(Duration::from_secs(11));
    kill(qemu, Signal::SIGCONT).expect("QEMU");
    wait_for("the machine to go on", || (paths.steps() > before).then_some(()));
}

#[test]
fn on_a_terminal_the_monitor_answers_and_ctrl_z_and_ctrl_c_are_for_both() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let (pagemark, paths) = (Pagemark::new(), MachinePaths::default());
    let arguments = paths.arguments(&["-monitor", "stdio", "-name", "box"]).join(" ");
    let mut screen = Screen::open(&pagemark);
    screen.types(&format!("$PM vm run --every 200ms -- {QEMU} {arguments}\n"));
    screen.expect("(qemu)");
    screen.types("info status\r");
    screen.expect("VM status: running");
    wait_for_checkpoints(&pagemark, "box", 2);
    let job = screen.child("pagemark");
    let qemu = qemu_of(job);
    // The monitor reads single keys, so Ctrl-Z comes as a signal of the shell's own job control.
    kill(Pid::from_raw(-nix::unistd::getpgid(Some(Pid::from_raw(job))).expect("a group").as_raw()), Signal::SIGTSTP)
        .expect("it runs");
    screen.expect("Stopped");
    let stopped = paths.steps();
    screen.types("fg\n");
    screen.expect("vm run");
    wait_for("the machine to go on", || (paths.steps() > stopped + 3).then_some(()));
    let count = pagemark.checkpoints("box").len();
    wait_for_checkpoints(&pagemark, "box", count + 1);
    screen.types("quit\r");
    screen.expect("outer> ");
    wait_for("QEMU to end", || (!is_alive(qemu)).then_some(()));
    screen.types("echo status $?\n");
    screen.expect("status 0");

    // Without the monitor, the terminal is as the shell has it.
    let arguments = paths.arguments(&["-name", "box"]).join(" ");
    let count = pagemark.checkpoints("box").len();
    screen.types(&format!("$PM vm run --every 200ms -- {QEMU} {arguments}\n"));
    wait_for_checkpoints(&pagemark, "box", count + 1);
    screen.types("\x03");
    screen.expect("outer> ");
    screen.types("echo status $?\n");
    screen.expect("status 0");
}
