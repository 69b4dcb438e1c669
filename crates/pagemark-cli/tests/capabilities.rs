//! Root without CAP_SYS_RESOURCE, as in most containers, and the processes of other users.

#[path = "support/subject.rs"]
mod subject;
mod support;

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output, Stdio};

use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use pagemark_testing::{assert_oracle, in_own_session, skip};
use subject::{NOBODY, Subject, assert_fails, has_criu, is_root, status_field, stderr};
use support::{Pagemark, is_alive, kill_and_wait};

const CAP_SYS_RESOURCE: libc::c_ulong = 24;

/// Runs the command without CAP_SYS_RESOURCE, whether this process has it or not.
fn without_capability(pagemark: &Pagemark, arguments: &[&str]) -> Output {
    without(CAP_SYS_RESOURCE, pagemark, arguments)
}

/// Runs the command without a capability, whether this process has it or not.
fn without(capability: libc::c_ulong, pagemark: &Pagemark, arguments: &[&str]) -> Output {
    let mut command = pagemark.command(arguments);
    command.stdin(Stdio::null());
    // SAFETY: only system calls are made between fork and exec.
    unsafe {
        command.pre_exec(move || match libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    command.output().expect("the command runs")
}

/// The resource limits of a process, as the kernel prints them.
fn limits(pid: i32) -> String {
    fs::read_to_string(format!("/proc/{pid}/limits")).expect("its limits")
}

#[test]
fn a_capability_that_criu_needs_is_named() {
    if !has_criu() {
        skip!("no CRIU that works with all capabilities");
    }
    let pagemark = Pagemark::new();
    let mut program = Command::new("sleep").arg("600").spawn().expect("sleep");
    for (number, name) in [(19, "CAP_SYS_PTRACE"), (21, "CAP_SYS_ADMIN")] {
        let output = without(number, &pagemark, &["checkpoint", &program.id().to_string()]);
        assert_fails(&output, &[name]);
    }
    program.kill().expect("our child");
    program.wait().expect("our child");
}

#[test]
fn a_process_of_another_user_comes_back_with_its_limits() {
    if !has_criu() {
        skip!("no CRIU to restore with");
    }
    let Some(program) = subject::subject() else { skip!("no C compiler") };
    let pagemark = Pagemark::new();
    let mut command = Command::new(program);
    command.arg("plain").uid(NOBODY).gid(NOBODY);
    // SAFETY: only system calls are made between fork and exec.
    unsafe {
        command.pre_exec(|| {
            for (resource, soft, hard) in [
                (Resource::RLIMIT_NOFILE, 77, 99),
                (Resource::RLIMIT_CORE, 0, 4096),
                (Resource::RLIMIT_FSIZE, 123_456_789, 123_456_790),
                (Resource::RLIMIT_CPU, 1000, 2000),
            ] {
                setrlimit(resource, soft, hard)?;
            }
            Ok(())
        });
    }
    let mut subject = Subject::spawn(&mut command);
    let (pid, before) = (subject.pid(), limits(subject.pid()));
    assert!(before.contains("123456789"), "{before}");
    for strategy in ["pre-copy", "stop-and-copy", "copy-on-write"] {
        let arguments = ["checkpoint", "--job", "subject", "--strategy", strategy, &subject.pid_text()];
        let output = without_capability(&pagemark, &arguments);
        assert!(output.status.success(), "{strategy}: {}", stderr(&output));
        subject.is_untouched();
    }
    subject.kill();
    let output = without_capability(&pagemark, &["restore", "--detach", "subject"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_oracle!(is_alive(pid), "the restored program has ended");
    assert_eq!(limits(pid), before);
    assert_eq!(status_field(pid, "Uid").as_deref(), Some("65534\t65534\t65534\t65534"));
    kill_and_wait(pid);
}

/// CRIU is started while the program runs, so that some of the processes are unknown then.
#[test]
fn processes_of_another_user_may_be_forked_all_the_time() {
    if !has_criu() {
        skip!("no CRIU to save with");
    }
    let pagemark = Pagemark::new();
    let mut command = Command::new("sh");
    command.args(["-c", "while :; do sleep 0.3 & sleep 0.01; done"]).current_dir("/").uid(NOBODY).gid(NOBODY);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut program = in_own_session(&mut command).spawn().expect("sh");
    let checkpoint = |_| without_capability(&pagemark, &["checkpoint", "--job", "sh", &program.id().to_string()]);
    let outputs: Vec<Output> = (0..3).map(checkpoint).collect();
    killpg(Pid::from_raw(program.id() as i32), Signal::SIGKILL).expect("our group of processes");
    program.wait().expect("our child");
    for output in outputs {
        assert!(output.status.success(), "{}", stderr(&output));
    }
}

/// A filtered CRIU may not suspend the filters of the target, so its calls cannot be answered.
#[test]
fn what_is_missing_is_named() {
    if !is_root() {
        skip!("only root can be without a capability");
    }
    let pagemark = Pagemark::new();
    let output = without_capability(&pagemark, &["doctor"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let found = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(found.contains("CAP_SYS_RESOURCE is missing") && found.contains("--cap-add SYS_RESOURCE"), "{found}");
    if !has_criu() {
        skip!("no CRIU to save with");
    }
    let Some(subject) = Subject::start_as(Some(NOBODY), &["refuses"]) else { skip!("no C compiler") };
    let output = without_capability(&pagemark, &["checkpoint", &subject.pid_text()]);
    assert_fails(
        &output,
        &["of another user that has seccomp filters needs CAP_SYS_RESOURCE", "--cap-add SYS_RESOURCE"],
    );
    subject.is_untouched();
}
