//! Targets with references to processes outside, such as in containers or by sockets: they are
//! saved whole, or refused with a remedy and left alone.

#[path = "support/subject.rs"]
mod subject;
mod support;

use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use pagemark_testing::{skip, wait_for};
use subject::{Steps, assert_fails, descriptors, has_criu, subject, untouched};
use support::{Pagemark, children, kill_and_wait};

/// A child that is killed with what it has started.
struct Surrounded(Child);

impl Surrounded {
    fn start(command: &mut Command) -> Surrounded {
        command.current_dir("/");
        // SAFETY: only system calls are made between fork and exec.
        unsafe {
            command.pre_exec(|| {
                nix::unistd::setsid()?;
                // Descriptors of the test runner lead out of the container too.
                match libc::close_range(3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC as i32) {
                    0 => Ok(()),
                    _ => Err(std::io::Error::last_os_error()),
                }
            });
        }
        Surrounded(command.spawn().expect("it starts"))
    }

    fn pid(&self) -> i32 {
        self.0.id() as i32
    }
}

impl Drop for Surrounded {
    fn drop(&mut self) {
        children(self.pid()).into_iter().for_each(kill_and_wait);
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_part_of_a_container_is_refused_with_the_places_to_run() {
    if !has_criu() {
        skip!("whole checkpoints need root and CRIU");
    }
    let Some(program) = subject() else { skip!("no C compiler") };
    let pagemark = Pagemark::new();
    let steps = Steps::new(pagemark.directory());
    let mut unshare = Command::new("unshare");
    unshare.args(["--fork", "--pid", "--mount-proc", "sh", "-c", "\"$@\" & wait", "sh"]);
    unshare.arg(&program).args(steps.arguments(1));
    unshare.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let container = Surrounded::start(&mut unshare);
    let first = wait_for("the container", || children(container.pid()).first().copied());
    let pid = wait_for("the target", || children(first).first().copied());
    steps.goes_on(pid);
    let before = descriptors(pid);
    let text = pid.to_string();
    for command in ["checkpoint", "attach"] {
        let output = pagemark.output(&[command, "--job", "inner", &text]);
        let (whole, way_out) = (format!("name process {first}"), format!("nsenter --target {pid} --all"));
        assert_fails(&output, &["not in part", &whole, "run pagemark inside", &way_out, "--memory-only"]);
        untouched(pid, &before);
    }
    // The command that the message names works.
    pagemark.done(&["checkpoint", "--memory-only", "--job", "inner", &text]);
    untouched(pid, &before);
    steps.goes_on(pid);
    drop(container);

    // Standard streams from outside of its mounts, which Pagemark gets too, cannot be saved, and are
    // reported.
    let inside = Steps::new(&pagemark.directory().join("inside"));
    std::fs::create_dir(pagemark.directory().join("inside")).expect("a directory");
    let mut run = vec![env!("CARGO_BIN_EXE_pagemark"), "run", "--every", "100ms", "--job", "inside", "--"];
    run.push(program.to_str().expect("UTF-8"));
    let start = |script: &str| {
        let log = std::fs::File::create(pagemark.directory().join("pagemark.log")).expect("a log file");
        let mut unshare = Command::new("unshare");
        unshare
            .args(["--fork", "--pid", "--mount-proc", "sh", "-c", script, "sh"])
            .args(&run)
            .args(inside.arguments(1));
        unshare.env("PAGEMARK_REPO", pagemark.repository()).stdin(Stdio::null()).stdout(Stdio::null());
        Surrounded::start(unshare.stderr(log))
    };
    let container = start("exec \"$@\"");
    wait_for("a refusal", || pagemark.log().contains("redirect these inside").then_some(()));
    drop(container);
    let container = start("exec < /dev/null > /dev/null 2>&1; exec \"$@\"");
    wait_for("checkpoints from inside", || (pagemark.checkpoints("inside").len() > 2).then_some(()));
    drop(container);
    pagemark.done(&["verify"]);
}

#[test]
fn a_connection_to_a_process_outside_is_reported_as_closed() {
    if !has_criu() {
        skip!("whole checkpoints need root and CRIU");
    }
    let Some(program) = subject() else { skip!("no C compiler") };
    let pagemark = Pagemark::new();
    let steps = Steps::new(pagemark.directory());
    // As a service that is started for one connection.
    let (mut client, service) = UnixStream::pair().expect("a pair of sockets");
    let input = OwnedFd::from(service.try_clone().expect("a second descriptor"));
    let mut command = Command::new(program);
    command.args(steps.arguments(1)).stdin(input).stdout(OwnedFd::from(service)).stderr(Stdio::null());
    let target = Surrounded::start(&mut command);
    drop(command);
    let pid = target.pid();
    steps.goes_on(pid);
    let before = descriptors(pid);
    for _ in 0..2 {
        pagemark.done(&["checkpoint", "--job", "target", &pid.to_string()]);
        untouched(pid, &before);
        steps.goes_on(pid);
    }
    drop(target);
    client.read_to_string(&mut String::new()).expect("the end");
    let restored = pagemark.json(&["restore", "--detach", "--yes", "--json", "target"]);
    assert_eq!(restored["closed_connections"], serde_json::json!(["of descriptor 0 by a socket without a name"]));
    steps.goes_on(pid);
    kill_and_wait(pid);
}
