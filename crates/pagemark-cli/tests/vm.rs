//! Stories with virtual machines.

#[path = "support/small_disk.rs"]
mod small_disk;
mod support;

use std::process::Stdio;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pagemark_testing::{
    MachinePaths, Qemu, SplitMix, TestMonitor, assert_oracle, guest_program, repetitions, skip, wait_for, with_disk,
};
use pagemark_vm::can_hold_writes;
use serde_json::json;
use small_disk::SmallDisk;
use support::{Pagemark, children, kill_and_wait};

#[test]
fn a_machine_is_checkpointed_inspected_and_restored() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let (pagemark, paths) = (Pagemark::new(), MachinePaths::default());
    let qemu = Qemu::start(&paths, &["-name", "box"]);
    let monitor = paths.monitor().display().to_string();
    pagemark.done(&["vm", "checkpoint", &monitor]);
    paths.wait_for_steps(10);
    let taken = pagemark.json(&["vm", "checkpoint", "--json", &monitor]);
    assert_eq!((&taken["job"], &taken["sequence"]), (&"box".into(), &2.into()));
    paths.wait_for_steps(1);

    let shown = pagemark.done(&["show", "box@2"]);
    assert!(shown.contains("virtual machine") && shown.contains("pc.ram"), "{shown}");
    assert!(pagemark.done(&["log", "box"]).contains("box@2") || pagemark.checkpoints("box").len() == 2);
    pagemark.done(&["diff", "box@1", "box@2"]);
    pagemark.verify(&[]);

    let core = paths.join("core").display().to_string();
    pagemark.done(&["export", "box@2", "--core", &core]);
    assert!(std::fs::read(&core).expect("it was written").starts_with(b"\x7fELF"));
    let export = paths.join("export");
    let told = pagemark.done(&["export", "box@2", "--qemu", &export.display().to_string()]);
    assert!(told.contains("run.sh") && export.join("migration").is_file(), "{told}");
    for wrong in [&["--core", &core][..], &["--core", "x", "--pid", "1"], &["--qemu", &export.display().to_string()]] {
        let output = pagemark.output(&[&["export", "box@2"], wrong].concat());
        assert!(!output.status.success() && !output.stderr.is_empty(), "{wrong:?}");
    }

    // Beside the original, nothing is started.
    let output = pagemark.output(&["restore", "--detach", "box"]);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && message.contains("in use"), "{message}");
    paths.wait_for_steps(1);
    drop(qemu);
    let restored = pagemark.json(&["restore", "--detach", "--json", "box@1"]);
    paths.wait_for_steps(10);
    let pid = restored["pid"].as_i64().expect("a process id") as i32;
    assert!(TestMonitor::connect(&paths.join("test.qmp")).is_running());
    kill_and_wait(pid);

    let output = pagemark.output(&["vm", "checkpoint", &monitor]);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && message.contains("-qmp unix:PATH"), "{message}");

    let forked = pagemark.json(&["fork", "--json", "--count", "2", "--replace", "/serial", "/of-{}", "box@1"]);
    for (machine, number) in forked["machines"].as_array().expect("machines").iter().zip(1..) {
        assert_eq!(machine["name"], format!("box-{number}"));
        let steps = || std::fs::read_to_string(paths.join(&format!("of-{number}"))).unwrap_or_default();
        wait_for("the machine to go on", || (steps().lines().count() > 5).then_some(()));
        assert_oracle!(!steps().contains("WRONG"), "the machine has found its data wrong");
        assert!(TestMonitor::connect(&paths.join(&format!("test.qmp.{number}"))).is_running());
        kill_and_wait(machine["pid"].as_i64().expect("a process id") as i32);
    }
    let output = pagemark.output(&["fork", "--replace", "a", "b", "box"]);
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn a_machine_is_found_by_its_process() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let (pagemark, paths) = (Pagemark::new(), MachinePaths::default());
    let qemu = Qemu::start(&paths, &["-name", "box"]);
    let pid = qemu.pid().to_string();
    // One of its sockets has a client, so the other one is taken.
    let mut first = TestMonitor::connect(&paths.monitor());
    let taken = pagemark.json(&["vm", "checkpoint", "--json", "--pid", &pid]);
    assert_eq!((&taken["job"], &taken["sequence"]), (&"box".into(), &1.into()));
    assert!(first.is_running());
    let second = TestMonitor::connect(&paths.join("test.qmp"));
    let refused = |arguments: &[&str], expected: &str| {
        let output = pagemark.output(arguments);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && message.contains(expected), "{arguments:?}: {message}");
    };
    refused(&["vm", "checkpoint", "--pid", &pid], "one client at a time");
    drop((first, second));
    let advice = pagemark.done(&["vm", "advise", "--observe", "1s", "--pid", &pid]);
    assert!(advice.contains("virtual machine box"), "{advice}");
    let own = std::process::id().to_string();
    refused(&["vm", "attach", "--pid", &own], "no monitor socket on its command line");
    refused(&["vm", "attach", "--pid", "0"], "--pid");
    refused(&["vm", "attach"], "required");
    refused(&["vm", "attach", "--pid", &pid, "vm.qmp"], "cannot be used with");
    paths.wait_for_steps(2);
}

#[test]
fn a_machine_is_observed_and_its_interval_follows_the_costs() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let (pagemark, paths) = (Pagemark::new(), MachinePaths::default());
    let disk = paths.join("disk.raw");
    std::fs::File::create(&disk).and_then(|file| file.set_len(16 << 20)).expect("an empty image");
    let qemu = Qemu::start(&paths, &with_disk(&disk, "raw", ""));
    let monitor = paths.monitor().display().to_string();
    let advice = pagemark.json(&["vm", "advise", "--json", "--observe", "1s", "--overhead", "50%", &monitor]);
    let measured = advice["measured"].as_array().expect("points");
    // 64 slices, and each interval twice as long as the one before.
    assert_eq!(measured.len(), 7, "{advice}");
    let pages: Vec<f64> = measured.iter().filter_map(|point| point["pages"].as_f64()).collect();
    assert!(pages[6] > 1.0 && pages.is_sorted(), "the machine writes: {advice}");
    assert!(advice["stop_us"].as_u64() > Some(0) && advice["forecasts"].as_array().is_some_and(|rows| rows.len() > 5));
    let told = pagemark.done(&["vm", "advise", "--observe", "1s", "--overhead", "100%", &monitor]);
    assert!(told.contains("overhead") && told.contains("keeps the overhead below 100%"), "{told}");

    // The observation leaves nothing behind, and the machine runs.
    let mut own = TestMonitor::connect(&paths.join("test.qmp"));
    assert!(own.is_running() && !own.run("query-named-block-nodes", json!({})).to_string().contains("pagemark"));
    let mut command =
        pagemark.command(&["vm", "attach", "--every", "auto", "--overhead", "20%", "--job", "auto", &monitor]);
    let mut attached = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("it starts");
    wait_for("some checkpoints", || (pagemark.checkpoints("auto").len() > 4).then_some(()));
    kill(Pid::from_raw(attached.id() as i32), Signal::SIGINT).expect("our child");
    assert!(attached.wait().expect("our child").success());
    paths.wait_for_steps(1);
    drop(qemu);
    let output = pagemark.output(&["vm", "attach", "--overhead", "3%", &monitor]);
    assert_eq!(output.status.code(), Some(2), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn without_room_for_what_a_machine_overwrites_the_checkpoint_fails_and_not_the_machine() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let (pagemark, paths) = (Pagemark::new(), MachinePaths::default());
    let Some(room) = SmallDisk::mount("size=64k") else { skip!("no file system can be mounted") };
    let disk = paths.join("disk.raw");
    // Data everywhere, so that reading takes some time.
    std::fs::write(&disk, vec![0; 16 << 20]).expect("an image");
    let qemu = Qemu::start(&paths, &with_disk(&disk, "raw", ""));
    let monitor = paths.monitor().display().to_string();
    std::fs::write(room.path().join("filler"), [1; 65536]).expect("it fits exactly");
    let message = wait_for("a checkpoint during which the machine writes", || {
        let mut command = pagemark.command(&["vm", "checkpoint", &monitor]);
        let output = command.env("TMPDIR", room.path()).output().expect("it starts");
        (!output.status.success()).then(|| String::from_utf8_lossy(&output.stderr).into_owned())
    });
    assert!(message.contains("the disk ide0-hd0") && message.contains("TMPDIR"), "{message}");
    paths.wait_for_steps(5);
    let taken = pagemark.json(&["vm", "checkpoint", "--json", &monitor]);
    drop(qemu);
    let restored = pagemark.json(&["restore", "--detach", "--json", &format!("vm@{}", taken["sequence"])]);
    // The machine compares its disk with its memory.
    paths.wait_for_steps(40);
    kill_and_wait(restored["pid"].as_i64().expect("a process id") as i32);
}

#[test]
fn killed_at_any_instant_it_leaves_the_machine_running() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let (pagemark, paths) = (Pagemark::new(), MachinePaths::default());
    let disk = paths.join("disk.raw");
    std::fs::File::create(&disk).and_then(|file| file.set_len(16 << 20)).expect("an empty image");
    let _qemu = Qemu::start(&paths, &with_disk(&disk, "raw", ""));
    let monitor = paths.monitor().display().to_string();
    let mut own = TestMonitor::connect(&paths.join("test.qmp"));
    let nodes = own.run("query-named-block-nodes", json!({})).as_array().map(Vec::len);
    let mut random = SplitMix(7);
    // As a command leaves it that is killed in the microseconds in which the socket in it has a name.
    let temporary = tempfile::tempdir().expect("a directory");
    std::fs::create_dir(temporary.path().join("pagemark-nbd-left")).expect("it is new");
    let rounds = repetitions(14, 40);
    for round in 0..rounds {
        let strategy = if round % 2 == 1 && can_hold_writes() { "copy-on-write" } else { "pre-copy" };
        let every = ["--every", "1ms", "--keep-last", "3", "--strategy", strategy];
        let mut command = pagemark.command(&[&["vm", "attach"], &every[..], &[&monitor]].concat());
        command.env("TMPDIR", temporary.path());
        let mut child =
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
        std::thread::sleep(Duration::from_millis(random.below(150 + 200 * round / rounds)));
        kill(Pid::from_raw(child.id() as i32), Signal::SIGKILL).expect("our child");
        child.wait().expect("our child");
        wait_for("the machine to run", || own.is_running().then_some(()));
        paths.wait_for_steps(1);
        // The guard has removed what QEMU was given.
        let mut has_files = || own.run("query-fdsets", json!({})).as_array().is_some_and(|sets| !sets.is_empty());
        wait_for("QEMU to have no file of Pagemark", || (!has_files()).then_some(()));
        wait_for("QEMU to have no bitmap and no node of Pagemark", || {
            let left = own.run("query-named-block-nodes", json!({}));
            (!left.to_string().contains("pagemark") && left.as_array().map(Vec::len) == nodes).then_some(())
        });
        // QEMU serves the disk to nobody: another can be served.
        let address = json!({"type": "unix", "data": {"path": paths.join("nbd").display().to_string()}});
        own.run("nbd-server-start", json!({ "addr": address }));
        own.run("nbd-server-stop", json!({}));
    }
    let mut last = pagemark.command(&["vm", "checkpoint", "--job", "last", &monitor]);
    let last = last.env("TMPDIR", temporary.path()).output().expect("it runs");
    assert!(last.status.success(), "{}", String::from_utf8_lossy(&last.stderr));
    let left: Vec<_> = std::fs::read_dir(temporary.path()).expect("a directory").map(Result::ok).collect();
    assert!(left.is_empty(), "{left:?}");
    pagemark.verify(&[]);
}

#[test]
fn copies_on_write_need_a_mechanism_that_can_and_are_counted() {
    if guest_program().is_none() || !can_hold_writes() {
        skip!("no QEMU, no compiler for its guest, or no userfaultfd that holds the kernel's own writes");
    }
    let (pagemark, paths) = (Pagemark::new(), MachinePaths::default());
    let _qemu = Qemu::start(&paths, &["-name", "box"]);
    let monitor = paths.monitor().display().to_string();
    let own_pid = std::process::id().to_string();
    for (arguments, said) in [
        (&["advise", "--strategy", "copy-on-write", &*own_pid][..], "for virtual machines alone"),
        (&["checkpoint", "--memory-only", "--strategy", "copy-on-write", &*own_pid], "has no strategy copy-on-write"),
        (
            &["vm", "checkpoint", "--strategy", "copy-on-write", "--mechanism", "full", &*monitor],
            "needs the mechanism uffd",
        ),
        (&["checkpoint", "--activation", "late", &*own_pid], "for virtual machines alone"),
        (&["vm", "checkpoint", "--activation", "late", &*monitor], "for the strategy copy-on-write with"),
    ] {
        let output = pagemark.output(arguments);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && text.contains(said), "{text}");
    }
    let first = pagemark.json(&["vm", "checkpoint", "--json", "--strategy", "copy-on-write", &monitor]);
    let number = |name: &str| first[name].as_u64().expect("a number");
    // What the machine was about to write to, the thread that handles its writes copied.
    assert_eq!(number("frozen_pages"), 0, "{first}");
    assert_eq!(number("concurrent_pages") + number("cow_pages"), number("dirty_pages"), "{first}");
    let shown = pagemark.done(&["show", "box"]);
    assert!(shown.contains("pages copied after the freeze"), "{shown}");
}

#[test]
fn a_machine_restored_lazily_never_runs_without_its_memory() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let (pagemark, paths) = (Pagemark::new(), MachinePaths::default());
    let qemu = Qemu::start(&paths, &["-name", "box"]);
    pagemark.done(&["vm", "checkpoint", &paths.monitor().display().to_string()]);
    drop(qemu);
    let restored = pagemark.json(&["restore", "--lazy", "--detach", "--json", "box"]);
    paths.wait_for_steps(5);
    kill_and_wait(restored["pid"].as_i64().expect("a process id") as i32);
    let mut random = SplitMix(11);
    for _ in 0..8 {
        let mut command = pagemark.command(&["restore", "--lazy", "--detach", "--quiet", "box"]);
        let mut child = command.stdin(Stdio::null()).spawn().expect("it starts");
        // Its guard is the second child.
        let qemu = wait_for("QEMU and its guard, or the end", || match children(child.id() as i32)[..] {
            [qemu, _, ..] => Some(Some(qemu)),
            _ => child.try_wait().expect("our child").map(|_| None),
        });
        std::thread::sleep(Duration::from_millis(random.below(400)));
        kill(Pid::from_raw(child.id() as i32), Signal::SIGKILL).expect("our child");
        child.wait().expect("our child");
        // Either the machine has all of its memory, or QEMU ends. It checks each page.
        let before = paths.steps();
        let is_qemu =
            |pid: i32| std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|c| c.starts_with("qemu"));
        wait_for("the machine to go on, or to end", || {
            (qemu.is_none_or(|qemu| !is_qemu(qemu)) || paths.steps() > before + 5).then_some(())
        });
        qemu.into_iter().filter(|&qemu| is_qemu(qemu)).for_each(kill_and_wait);
    }
}

#[test]
fn a_machine_of_the_same_name_beside_a_restored_one_has_another_job() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let (pagemark, paths, others) = (Pagemark::new(), MachinePaths::default(), MachinePaths::default());
    let job_of = |paths: &MachinePaths| {
        let said = pagemark.done(&["vm", "checkpoint", "--json", &paths.monitor().display().to_string()]);
        let line = said.lines().find(|line| line.contains(r#""event":"checkpoint""#)).expect("a checkpoint");
        let taken: serde_json::Value = serde_json::from_str(line).expect("JSON");
        taken["job"].as_str().expect("a name").to_owned()
    };
    let qemu = Qemu::start(&paths, &["-name", "box"]);
    assert_eq!(job_of(&paths), "box");
    drop(qemu);
    let restored = pagemark.json(&["restore", "--detach", "--json", "box"]);
    let pid = restored["pid"].as_i64().expect("a process id") as i32;
    let other = Qemu::start(&others, &["-name", "box"]);
    let jobs = (job_of(&others), job_of(&paths), job_of(&others));
    kill_and_wait(pid);
    assert_eq!((jobs.0.as_str(), jobs.1.as_str(), jobs.2.as_str()), ("box-2", "box", "box-2"));
    drop(other);
    // When both have ended, a machine of the name that is started again continues.
    let third = MachinePaths::default();
    let _again = Qemu::start(&third, &["-name", "box"]);
    assert_eq!(job_of(&third), "box");
}
