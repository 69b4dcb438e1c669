//! A virtual machine comes back with another version of QEMU than the one of its checkpoint.

mod support;

use std::ffi::OsString;
use std::process::Command;

use pagemark_testing::{MachinePaths, Qemu, TestMonitor, guest_program, skip};
use serde_json::{Value, json};
use support::{Pagemark, kill_and_wait};

/// Names a program that executes its arguments where another version of QEMU is at the paths of
/// the host's.
const OTHER_QEMU: &str = "PAGEMARK_OTHER_QEMU";

/// Restores the checkpoint `name` where `other` has its QEMU, or where the host's is. Returns the
/// process and what was said.
fn restore(pagemark: &Pagemark, other: Option<&OsString>, name: &str) -> (i32, String) {
    let plain = pagemark.command(&["restore", "--detach", "--json", name]);
    let mut command = match other {
        None => plain,
        Some(other) => {
            let mut command = Command::new(other);
            command.arg(plain.get_program()).args(plain.get_args()).current_dir(pagemark.directory());
            command.envs(plain.get_envs().filter_map(|(name, value)| Some((name, value?))));
            command
        }
    };
    let output = command.output().expect("it starts");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{name}: {said}");
    let restored: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    (restored["pid"].as_i64().expect("a process id") as i32, said)
}

/// The type of the machine, as its QEMU names it.
fn machine_type(paths: &MachinePaths) -> Value {
    let mut monitor = TestMonitor::connect(&paths.join("test.qmp"));
    assert!(monitor.is_running());
    monitor.run("qom-get", json!({"path": "/machine", "property": "type"}))
}

#[test]
#[ignore = "needs another QEMU, see OTHER_QEMU"]
fn a_machine_comes_back_with_another_version_of_qemu() {
    let Some(other) = std::env::var_os(OTHER_QEMU) else { skip!("no other QEMU") };
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    // Names that each version gives to a type of its own.
    for alias in ["pc", "q35"] {
        let (pagemark, paths) = (Pagemark::new(), MachinePaths::default());
        let qemu = Qemu::start(&paths, &["-machine", alias]);
        let before = machine_type(&paths);
        let monitor = paths.monitor().display().to_string();
        pagemark.done(&["vm", "checkpoint", "--job", "box", &monitor]);
        drop(qemu);
        // Forth and back: a version takes what a newer one has saved of a type that it knows.
        for (other, name) in [(Some(&other), "box@1"), (None, "box@2")] {
            let (pid, said) = restore(&pagemark, other, name);
            paths.wait_for_steps(20);
            assert_eq!(machine_type(&paths), before, "{alias}, {name}");
            assert!(said.contains("the checkpoint is of version"), "{alias}, {name}: {said}");
            pagemark.done(&["vm", "checkpoint", "--job", "box", &monitor]);
            kill_and_wait(pid);
        }
        let (pid, said) = restore(&pagemark, None, "box@3");
        assert!(!said.contains("the checkpoint is of version"), "{alias}: {said}");
        kill_and_wait(pid);
    }
}
