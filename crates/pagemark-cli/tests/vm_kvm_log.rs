//! `pagemark vm run` with `kvm-log` and `kvm-ring`: a machine of the lab runs the tests that need
//! QEMU under KVM.

mod support;

use std::fs::File;
use std::process::{Command, Stdio};

use pagemark_testing::{MachinePaths, QEMU, TestMonitor, guest_program, skip, wait_for};
use serde_json::json;
use support::{Pagemark, children, kill_and_wait};

#[test]
#[ignore = "a machine of the lab runs it"]
fn a_machine_that_is_killed_with_its_pagemark_comes_back() {
    comes_back(&["--mechanism", "kvm-log"], &["-accel", "kvm"]);
}

#[test]
#[ignore = "a machine of the lab runs it"]
fn a_machine_with_rings_that_is_killed_with_its_pagemark_comes_back() {
    comes_back(&["--mechanism", "kvm-ring"], &["-accel", "kvm"]);
}

#[test]
#[ignore = "a machine of the lab runs it"]
fn a_machine_whose_memory_is_copied_on_write_comes_back() {
    let shared = "memory-backend-memfd,id=ram,size=16M,share=on";
    let qemu = ["-accel", "kvm", "-machine", "q35,memory-backend=ram", "-object", shared];
    comes_back(&["--mechanism", "kvm-log", "--strategy", "copy-on-write", "--activation", "late"], &qemu);
}

fn comes_back(options: &[&str], qemu: &[&str]) {
    let pagemark = Pagemark::new();
    let paths = MachinePaths::default();
    let mut command = pagemark.command(&["vm", "run", "--every", "2s", "--job", "vm"]);
    command.args(options).args(["--", QEMU]).args(paths.arguments(qemu)).stdin(Stdio::null()).stdout(Stdio::null());
    let log = File::create(pagemark.directory().join("pagemark.log")).expect("a log file");
    let mut run = command.env("TMPDIR", pagemark.directory()).stderr(log).spawn().expect("it starts");
    wait_for("checkpoints", || (pagemark.checkpoints("vm").len() >= 4).then_some(()));
    assert!(!pagemark.log().contains("✗"), "{}", pagemark.log());
    let qemus = children(run.id() as i32);
    run.kill().unwrap();
    run.wait().unwrap();
    // The machine has gone on, and is attached to by the socket that was made for it.
    paths.wait_for_steps(2);
    let log = pagemark.log();
    let monitor = log.lines().find_map(|line| line.split_once("; monitor ")).expect("a line with the monitor").1;
    let before = pagemark.checkpoints("vm").len();
    wait_for("the library to let go", || {
        let mut once = pagemark.command(&["vm", "checkpoint", "--job", "vm"]);
        once.args(options).arg(monitor).output().expect("it starts").status.success().then_some(())
    });
    assert_eq!(pagemark.checkpoints("vm").len(), before + 1);
    qemus.into_iter().for_each(kill_and_wait);
    let mut restore = pagemark.command(&["restore", "--detach", "vm"]);
    assert!(restore.status().expect("it starts").success());
    paths.wait_for_steps(3);
    TestMonitor::connect(&paths.join("test.qmp")).run("quit", json!({}));
}

#[test]
fn a_program_that_takes_no_library_is_refused_before_it_is_started() {
    let pagemark = Pagemark::new();
    let program = pagemark.directory().join("static-qemu");
    let source = pagemark.directory().join("static.c");
    std::fs::write(&source, "int main(void) { return 3; }\n").unwrap();
    let compiled = Command::new("cc").arg("-static").arg(&source).arg("-o").arg(&program).status();
    if !compiled.is_ok_and(|status| status.success()) {
        skip!("no compiler for static programs");
    }
    let run = |program: &std::path::Path, library: Option<&str>| {
        let mut command = pagemark.command(&["vm", "run", "--mechanism", "kvm-log", "--job", "vm", "--"]);
        command.arg(program);
        if let Some(library) = library {
            command.env("PAGEMARK_KVM_LOG_LIBRARY", library);
        }
        let output = command.output().expect("it starts");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (status, message) = run(&program, None);
    assert!(status == Some(1) && message.contains("linked statically"), "{status:?}: {message}");
    let (status, message) = run(&program, Some("/no/such/library.so"));
    assert!(status == Some(1) && message.contains("/no/such/library.so"), "{status:?}: {message}");
    std::fs::write(pagemark.directory().join("text.so"), "text").unwrap();
    let text = pagemark.directory().join("text.so").display().to_string();
    let (status, message) = run(std::path::Path::new("/bin/true"), Some(&text));
    assert!(status == Some(1) && message.contains("not a library"), "{status:?}: {message}");
}

#[test]
fn a_machine_that_runs_already_is_refused_with_what_enables_it() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let pagemark = Pagemark::new();
    let paths = MachinePaths::default();
    let _qemu = pagemark_testing::Qemu::start(&paths, &pagemark_testing::PLAIN);
    let monitor = paths.monitor().display().to_string();
    for mechanism in ["kvm-log", "kvm-ring"] {
        let mut command = pagemark.command(&["vm", "attach", "--mechanism", mechanism, &monitor]);
        let output = command.output().expect("it starts");
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && message.contains("-accel kvm"), "{mechanism}: {message}");
    }
    paths.wait_for_steps(2);
}
