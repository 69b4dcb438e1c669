//! Pagemark is killed, a call of it fails, or QEMU is killed, at each step of what it does with a
//! virtual machine.

#[path = "support/group.rs"]
mod group;
mod support;

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use group::{Group, below};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use pagemark_testing::{
    Ended, Fault, MachinePaths, Qemu, SplitMix, TestMonitor, assert_oracle, guest_program, run_with_fault, skip,
    wait_for, with_disk,
};
use pagemark_vm::can_hold_writes;
use serde_json::json;
use support::{Pagemark, is_alive, kill_and_wait};

/// Points per kind of fault: of a test in `make test`, and of one in `make test-full`.
const FEW: u64 = 8;
const MANY: u64 = 200;

const ERRORS: [Errno; 4] = [Errno::EIO, Errno::ENOSPC, Errno::ENOMEM, Errno::EPERM];

/// Runs the command with a fault, and returns its end and its messages.
fn run(pagemark: &Pagemark, arguments: &[&str], fault: Fault, at: u64) -> (Ended, String) {
    let log = pagemark.directory().join("faulty.log");
    let mut command = pagemark.command(arguments);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log).expect("a log file"));
    let ended = run_with_fault(&mut command, fault, at).expect("it can be traced");
    let said = fs::read_to_string(log).expect("its messages");
    assert!(!said.contains("panicked"), "{fault:?} at call {at}: {said}");
    (ended, said)
}

/// Calls from the first to the last, `count` of them, each somewhere in its part.
fn points(calls: u64, count: u64) -> impl Iterator<Item = u64> {
    let mut random = SplitMix(count);
    (0..count).map(move |number| 1 + number * calls / count + random.below((calls / count).max(1)))
}

/// A machine with a disk, and what it must be like when it is left alone.
struct Subject {
    qemu: Qemu,
    own: TestMonitor,
    nodes: usize,
}

impl Subject {
    fn start(paths: &MachinePaths) -> Subject {
        let disk = paths.join("disk.raw");
        File::create(&disk).and_then(|file| file.set_len(16 << 20)).expect("an empty image");
        let qemu = Qemu::start(paths, &with_disk(&disk, "raw", ""));
        let mut own = TestMonitor::connect(&paths.join("test.qmp"));
        let nodes = own.run("query-named-block-nodes", json!({})).as_array().map_or(0, Vec::len);
        Subject { qemu, own, nodes }
    }

    /// Asserts that the machine runs, and that QEMU has nothing of Pagemark.
    fn assert_left_alone(&mut self, paths: &MachinePaths, when: &str) {
        let own = &mut self.own;
        wait_for(&format!("{when}: the machine to run"), || own.is_running().then_some(()));
        paths.wait_for_steps(1);
        wait_for(&format!("{when}: QEMU to have nothing of Pagemark"), || {
            let files = own.run("query-fdsets", json!({})).as_array().is_some_and(Vec::is_empty);
            let left = own.run("query-named-block-nodes", json!({}));
            let nodes = left.as_array().map(Vec::len) == Some(self.nodes) && !left.to_string().contains("pagemark");
            let exports = own.run("query-block-exports", json!({})).as_array().is_some_and(Vec::is_empty);
            (files && nodes && exports && !has_userfaultfd(self.qemu.pid())).then_some(())
        });
    }
}

fn has_userfaultfd(pid: i32) -> bool {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let targets = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
    targets.into_iter().any(|target| target.to_string_lossy().contains("userfaultfd"))
}

/// Kills Pagemark, and makes calls fail, at `count` points each of checkpoints by a strategy.
fn faults_in_checkpoints(strategy: &str, count: u64) {
    let (pagemark, paths) = (Pagemark::new(), MachinePaths::default());
    let mut subject = Subject::start(&paths);
    let monitor = paths.monitor().display().to_string();
    let checkpoint = ["vm", "checkpoint", "--job", "vm", "--strategy", strategy, &monitor];
    pagemark.done(&checkpoint);
    let mut committed = 1;
    for fault in [Fault::Killed, Fault::Fails(Errno::EIO)] {
        let (whole, said) = run(&pagemark, &checkpoint, fault, u64::MAX);
        assert_eq!(whole.code, Some(0), "{said}");
        committed += 1;
        let mut came = 0;
        for (at, error) in points(whole.calls, count).zip(ERRORS.iter().cycle()) {
            let fault = if fault == Fault::Killed { fault } else { Fault::Fails(*error) };
            let when = format!("{fault:?} at call {at} of {}", whole.calls);
            let (mut ended, mut said) = run(&pagemark, &checkpoint, fault, at);
            if !ended.came {
                // It made fewer calls than the whole one, which has waited longer: the same place in those.
                (ended, said) = run(&pagemark, &checkpoint, fault, at * ended.calls / whole.calls);
            }
            came += u64::from(ended.came);
            match (fault, ended.code) {
                // Of a call that fails, some are of no account.
                (_, Some(0)) => {}
                (Fault::Killed, None) => {}
                (Fault::Fails(_), Some(1 | 127)) => assert!(!said.is_empty(), "{when}: nothing said"),
                (_, other) => panic!("{when}: {other:?}: {said}"),
            }
            subject.assert_left_alone(&paths, &when);
            let now = pagemark.checkpoints("vm").len();
            assert_oracle!(now >= committed, "{when}: {now} of {committed} checkpoints");
            committed = now;
        }
        // No two checkpoints make the same number of calls, so that many of them may have too few.
        assert!(came * 2 >= count, "{came} of {count} faults came");
        pagemark.verify(&[]);
    }
    // The next checkpoint has everything, whatever became of those before.
    pagemark.done(&checkpoint);
    let before = paths.steps();
    drop(subject);
    let restored = pagemark.json(&["restore", "--detach", "--json", "vm"]);
    wait_for("the machine to go on", || (paths.steps() > before + 3).then_some(()));
    kill_and_wait(restored["pid"].as_i64().expect("a process id") as i32);
}

/// Makes each third call fail of the last two fifths of a checkpoint: most of what is done there
/// undoes what was changed in QEMU.
fn faults_at_the_end(strategy: &str) {
    let (pagemark, paths) = (Pagemark::new(), MachinePaths::default());
    let mut subject = Subject::start(&paths);
    let monitor = paths.monitor().display().to_string();
    let checkpoint = ["vm", "checkpoint", "--job", "vm", "--strategy", strategy, &monitor];
    pagemark.done(&checkpoint);
    let fault = Fault::Fails(Errno::EPERM);
    let calls = run(&pagemark, &checkpoint, fault, u64::MAX).0.calls;
    for at in (calls * 3 / 5..calls).step_by(3) {
        let (ended, said) = run(&pagemark, &checkpoint, fault, at);
        let when = format!("call {at} of {calls} failed");
        assert!(matches!(ended.code, Some(0 | 1)), "{when}: {ended:?}: {said}");
        subject.assert_left_alone(&paths, &when);
    }
    pagemark.verify(&[]);
}

/// Kills QEMU at `count` points of a checkpoint.
fn ends_of_qemu(count: u64) {
    let (pagemark, paths) = (Pagemark::new(), MachinePaths::default());
    let monitor = paths.monitor().display().to_string();
    let checkpoint = ["vm", "checkpoint", "--job", "vm", &monitor];
    let subject = Subject::start(&paths);
    let whole = run(&pagemark, &checkpoint, Fault::Killed, u64::MAX).0;
    assert_eq!(whole.code, Some(0));
    drop(subject);
    let mut committed = 1;
    for at in points(whole.calls, count) {
        for socket in ["vm.qmp", "test.qmp"] {
            let _ = fs::remove_file(paths.join(socket));
        }
        let subject = Subject::start(&paths);
        let (ended, said) = run(&pagemark, &checkpoint, Fault::Kills(subject.qemu.pid()), at);
        let when = format!("QEMU was killed at call {at} of {}", whole.calls);
        match ended.code {
            Some(0) => committed += 1,
            Some(1) => assert!(said.starts_with("pagemark: ") || said.starts_with("error: "), "{when}: {said}"),
            other => panic!("{when}: {other:?}: {said}"),
        }
        let now = pagemark.checkpoints("vm").len();
        assert_oracle!(now >= committed, "{when}: {now} of {committed} checkpoints");
        assert_eq!(now, committed, "{when}: {said}");
    }
    pagemark.verify(&[]);
}

/// The processes of QEMU that have a path in `directory` on their command line.
fn qemus_of(directory: &Path) -> Vec<i32> {
    let directory = directory.display().to_string();
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|&pid: &i32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        is_alive(pid)
            && line.starts_with(b"qemu") | line.starts_with(b"/usr/bin/qemu")
            && String::from_utf8_lossy(&line).contains(&directory)
    })
    .collect()
}

/// Kills Pagemark at `count` points of each way to bring a machine back: no QEMU stays behind whose
/// machine does not run with all of its memory.
fn deaths_in_restores(count: u64) {
    let (pagemark, paths) = (Pagemark::new(), MachinePaths::default());
    let subject = Subject::start(&paths);
    pagemark.done(&["vm", "checkpoint", "--job", "vm", &paths.monitor().display().to_string()]);
    drop(subject);
    let directory = paths.join("");
    let ways: [&[&str]; 3] = [
        &["restore", "--detach", "--quiet", "vm"],
        &["restore", "--detach", "--quiet", "--lazy", "vm"],
        &["fork", "--count", "2", "--replace", "/serial", "/of-{}", "vm"],
    ];
    for way in ways {
        let end = |when: &str| {
            // Those of a restore that was complete go on, and each checks its memory; the others end.
            wait_for(&format!("{when}: each QEMU to run, or to end"), || {
                (qemus_of(&directory).is_empty() || run_all(&paths)).then_some(())
            });
            let left = qemus_of(&directory);
            left.iter().copied().for_each(kill_and_wait);
            wait_for("the sockets to be free", || {
                let served = |name: &&str| UnixStream::connect(paths.join(name)).is_ok();
                (!["vm.qmp", "test.qmp", "vm.qmp.1", "vm.qmp.2"].iter().any(served)).then_some(())
            });
            left.len()
        };
        let (whole, said) = run(&pagemark, way, Fault::Killed, u64::MAX);
        assert_eq!(whole.code, Some(0), "{said}");
        assert!(end("the whole restore") > 0);
        for at in points(whole.calls, count) {
            run(&pagemark, way, Fault::Killed, at);
            end(&format!("{way:?} was killed at call {at} of {}", whole.calls));
        }
    }
}

/// True if there is a machine with a monitor for the test, and each such machine runs.
fn run_all(paths: &MachinePaths) -> bool {
    let served = ["test.qmp", "test.qmp.1", "test.qmp.2"].map(|name| UnixStream::connect(paths.join(name)).ok());
    let mut served = served.into_iter().flatten().peekable();
    served.peek().is_some() && served.all(|monitor| is_running(monitor).unwrap_or(false))
}

/// Whether the machine of a monitor runs; an error if QEMU ends meanwhile.
fn is_running(mut monitor: UnixStream) -> std::io::Result<bool> {
    monitor.write_all(b"{\"execute\": \"qmp_capabilities\"}\n{\"execute\": \"query-status\"}\n")?;
    for line in BufReader::new(monitor).lines() {
        let line = line?;
        if line.contains("\"running\"") {
            return Ok(line.replace(' ', "").contains("\"running\":true"));
        }
    }
    Ok(false)
}

/// Who is killed while a command is attached to a machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Victim {
    Command,
    /// The process that looks after the machine.
    Guard,
    /// The process group of the command.
    Group,
    /// All processes of the command's control group at once, or one after the other.
    ControlGroup,
    EachOfControlGroup,
}

/// Kills `victim`. False if it was not found.
fn strike(victim: Victim, attached: &Child, group: Option<&Group>) -> bool {
    let command = Pid::from_raw(attached.id() as i32);
    let is_guard =
        |pid: &i32| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "pagemark-vm\n");
    match (victim, group) {
        (Victim::Command, _) => kill(command, Signal::SIGKILL).is_ok(),
        (Victim::Guard, _) => below(command.as_raw()).into_iter().find(is_guard).is_some_and(group::end),
        (Victim::ControlGroup, Some(group)) => group.kill(),
        (Victim::EachOfControlGroup, Some(group)) => group.kill_each(),
        _ => killpg(command, Signal::SIGKILL).is_ok(),
    }
}

/// Kills what is attached to a machine as often as this, at any instants. The machine is always
/// left alone.
fn kills(count: u64) {
    let group = Group::new();
    if group.is_none() {
        eprintln!("no control group can be made and killed at once");
    }
    let mut victims = vec![Victim::Command, Victim::Guard, Victim::Group];
    victims.extend(group.iter().flat_map(|_| [Victim::ControlGroup, Victim::EachOfControlGroup]));
    let (pagemark, paths) = (Pagemark::new(), MachinePaths::default());
    let mut subject = Subject::start(&paths);
    let monitor = paths.monitor().display().to_string();
    let mut random = SplitMix(u64::from(std::process::id()) << 20 | count);
    let (mut killed, mut round) = (0, 0);
    while killed < count {
        let victim = victims[round % victims.len()];
        round += 1;
        assert!((round as u64) < 10 * count.max(10), "nobody is found to be killed");
        let mut command =
            pagemark.command(&["vm", "attach", "--every", "20ms", "--keep-last", "3", "--job", "vm", &monitor]);
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        group.iter().for_each(|group| group.have(&mut command));
        let mut attached = command.spawn().expect("pagemark starts");
        std::thread::sleep(Duration::from_micros(random.below(1_000_000)));
        killed += u64::from(strike(victim, &attached, group.as_ref()));
        if victim == Victim::Guard {
            // What is left has to undo by itself what it has begun.
            std::thread::sleep(Duration::from_millis(random.below(100)));
            let _ = kill(Pid::from_raw(attached.id() as i32), Signal::SIGINT);
        }
        attached.wait().expect("our child");
        subject.assert_left_alone(&paths, &format!("{victim:?} was killed, in round {round}"));
    }
    pagemark.done(&["vm", "checkpoint", "--job", "vm", &monitor]);
    pagemark.verify(&[]);
}

#[test]
fn some_kills_leave_the_machine_alone() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    kills(15);
}

#[test]
#[ignore = "some minutes; PAGEMARK_KILLS is the number of kills"]
fn kills_leave_the_machine_alone() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    kills(std::env::var("PAGEMARK_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(500));
}

#[test]
fn a_fault_at_some_steps_of_a_checkpoint_harms_nothing() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    faults_in_checkpoints("pre-copy", FEW);
    ends_of_qemu(FEW / 3);
}

#[test]
fn a_fault_at_some_steps_of_a_copy_on_write_harms_nothing() {
    if guest_program().is_none() || !can_hold_writes() {
        skip!("no QEMU, no compiler for its guest, or no userfaultfd that holds the kernel's own writes");
    }
    faults_in_checkpoints("copy-on-write", FEW / 2);
}

#[test]
#[ignore = "some minutes"]
fn a_fault_at_many_steps_of_a_copy_on_write_harms_nothing() {
    if guest_program().is_none() || !can_hold_writes() {
        skip!("no QEMU, no compiler for its guest, or no userfaultfd that holds the kernel's own writes");
    }
    faults_in_checkpoints("copy-on-write", MANY / 2);
}

#[test]
#[ignore = "some minutes"]
fn a_fault_at_the_end_of_a_checkpoint_leaves_nothing_in_qemu() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    faults_at_the_end("pre-copy");
    if can_hold_writes() {
        faults_at_the_end("copy-on-write");
    }
}

#[test]
fn a_death_at_some_steps_of_a_restore_leaves_no_machine_without_memory() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    deaths_in_restores(FEW / 2);
}

#[test]
#[ignore = "some minutes"]
fn a_fault_at_many_steps_of_a_checkpoint_harms_nothing() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    faults_in_checkpoints("pre-copy", MANY);
    ends_of_qemu(MANY / 4);
}

#[test]
#[ignore = "some minutes"]
fn a_death_at_many_steps_of_a_restore_leaves_no_machine_without_memory() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    deaths_in_restores(MANY / 4);
}
