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
use subject::{Steps, assert_fails, descriptors, has_criu, status_field, subject, untouched};
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
    pagemark.verify(&[]);
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

#[test]
fn a_connection_of_a_program_with_itself_is_announced() {
    if !has_criu() {
        skip!("whole checkpoints need root and CRIU");
    }
    let pagemark = Pagemark::new();
    let ready = pagemark.directory().join("ready");
    let text = format!(
        "import socket, time\n\
         server = socket.create_server(('127.0.0.1', 0))\n\
         client = socket.create_connection(server.getsockname())\n\
         accepted = server.accept()\n\
         open({ready:?}, 'w').close()\n\
         time.sleep(1000)\n"
    );
    let mut command = Command::new("python3");
    command.args(["-c", &text]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let target = Surrounded::start(&mut command);
    wait_for("a connection", || ready.exists().then_some(()));
    let output = pagemark.output(&["checkpoint", "--job", "target", &target.pid().to_string()]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("a restore closes the connection of the program with itself, 127.0.0.1:"), "{said}");
}

#[test]
fn as_the_first_process_of_a_container_a_restore_takes_the_ends_of_orphans() {
    if !has_criu() {
        skip!("whole checkpoints need root and CRIU");
    }
    let pagemark = Pagemark::new();
    // Each round leaves a process without a parent, which ends at once.
    let script = "n=0; while :; do (true &); n=$((n + 1)); echo $n > rounds; sleep 0.02; done";
    let rounds = || std::fs::read_to_string(pagemark.directory().join("rounds")).ok()?.trim().parse::<u64>().ok();
    let ten_more = || {
        let before = rounds().unwrap_or(0);
        wait_for("ten more rounds", || rounds().filter(|&now| now > before + 10))
    };
    let mut shell = Command::new("sh");
    shell.args(["-c", script]).current_dir(pagemark.directory());
    shell.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // SAFETY: a system call is made between fork and exec.
    unsafe { shell.pre_exec(|| Ok(nix::unistd::setsid().map(drop)?)) };
    let mut target = shell.spawn().expect("it starts");
    ten_more();
    pagemark.done(&["checkpoint", "--job", "orphans", &target.id().to_string()]);
    target.kill().and_then(|()| target.wait()).expect("it ends");

    let mut unshare = Command::new("unshare");
    unshare.args(["--fork", "--pid", "--mount-proc", env!("CARGO_BIN_EXE_pagemark"), "restore", "--yes", "orphans"]);
    unshare.env("PAGEMARK_REPO", pagemark.repository()).stdin(Stdio::null()).stdout(Stdio::null());
    let container = Surrounded::start(unshare.stderr(Stdio::null()));
    let first = wait_for("the container", || children(container.pid()).first().copied());
    ten_more();
    ten_more();
    let has_ended = |&pid: &i32| status_field(pid, "State:").is_some_and(|state| state.starts_with('Z'));
    let ended = children(first).into_iter().filter(has_ended).count();
    assert!(ended < 10, "{ended} processes have ended and are still there");
}
