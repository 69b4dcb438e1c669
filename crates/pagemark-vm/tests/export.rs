//! Checkpoints of machines for other programs. The oracles are QEMU's own dump of the same machine,
//! and a QEMU without Pagemark, whose program checks its memory and its disk.

#[path = "support/dump.rs"]
mod dump;

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use dump::{assert_same_dump, dump_by_qemu};
use pagemark::repository::{Checkpoint, Repository};
use pagemark::track::Scope;
use pagemark::{Job, JobOptions, Mechanism};
use pagemark_testing::{
    MachinePaths, PLAIN, Qemu, RAM_BYTES, TestMonitor, assert_oracle_eq, guest_program, skip, with_disk,
};
use pagemark_vm::{ErrorKind, Restore, VmTarget, export_core, export_qemu};
use serde_json::json;

/// Kinds of machines and of memory.
const MACHINES: [&[&str]; 3] = [
    &["-machine", "q35", "-smp", "2", "-vga", "std"],
    &["-machine", "pc", "-object", "memory-backend-memfd,id=ram,size=16M", "-machine", "memory-backend=ram"],
    &["-machine", "q35,acpi=off", "-device", "virtio-rng-pci", "-device", "virtio-serial"],
];

/// A QEMU that an exported script has started, killed when dropped.
struct Plain(Child);

impl Drop for Plain {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Plain {
    fn start(script: &Path) -> Plain {
        Plain(Command::new(script).stdin(Stdio::null()).spawn().unwrap())
    }
}

/// Takes a checkpoint of a machine that runs, and one of the machine while it is paused, at which
/// `at_pause` looks.
fn checkpoints(paths: &MachinePaths, at_pause: impl FnOnce(&mut TestMonitor)) -> [Checkpoint; 2] {
    let mut own = TestMonitor::connect(&paths.join("test.qmp"));
    let target = VmTarget::attach(&paths.monitor(), Mechanism::choose(Scope::Process)).unwrap();
    let repository = Repository::create(&paths.join("repository")).unwrap();
    let mut job = Job::new(target, repository, JobOptions::new("vm"));
    job.checkpoint().unwrap();
    paths.wait_for_steps(20);
    own.run("stop", json!({}));
    job.checkpoint().unwrap();
    at_pause(&mut own);
    job.detach();
    let repository = Repository::open(&paths.join("repository")).unwrap();
    [1, 2].map(|sequence| repository.read("vm", sequence).unwrap())
}

#[test]
fn a_core_file_is_the_dump_of_the_machine_by_qemu() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    for further in MACHINES {
        let paths = MachinePaths::default();
        let qemu = Qemu::start(&paths, further);
        let (ours, by_qemu) = (paths.join("ours"), paths.join("by-qemu"));
        let [running, paused] = checkpoints(&paths, |own| dump_by_qemu(own, &by_qemu));
        drop(qemu);
        export_core(&paused, &File::create_new(&ours).unwrap()).unwrap();
        assert_same_dump(&ours, &by_qemu);

        // Of the machine that ran, QEMU dumps what was restored.
        let restored = Restore::new(&running).detach(true).paused(true).start(&mut |_, _| {}).unwrap();
        dump_by_qemu(&mut TestMonitor::connect(&paths.join("test.qmp")), &by_qemu);
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(restored.pid()), nix::sys::signal::Signal::SIGKILL).unwrap();
        restored.wait().unwrap();
        std::fs::remove_file(&ours).unwrap();
        export_core(&running, &File::create_new(&ours).unwrap()).unwrap();
        assert_same_dump(&ours, &by_qemu);
    }
}

#[test]
fn gdb_finds_the_processors_of_a_core_file() {
    if guest_program().is_none() || Command::new("gdb").arg("--version").stdout(Stdio::null()).status().is_err() {
        skip!("no QEMU, no compiler for its guest, or no gdb");
    }
    let paths = MachinePaths::default();
    let qemu = Qemu::start(&paths, &["-machine", "q35", "-smp", "2"]);
    let mut registers = String::new();
    let [_, paused] = checkpoints(&paths, |own| {
        let answer = own.run("human-monitor-command", json!({"command-line": "info registers -a"}));
        registers = answer.as_str().expect("a text").to_owned();
    });
    drop(qemu);
    let core = paths.join("core");
    export_core(&paused, &File::create_new(&core).unwrap()).unwrap();
    let mut gdb = Command::new("gdb");
    gdb.args(["-batch", "-nx", "-core"]).arg(&core);
    gdb.args(["-ex", "thread apply all -ascending printf \"at %lx\\n\", (unsigned long)$pc", "-ex", "x/4xb 0x100000"]);
    let output = gdb.stdin(Stdio::null()).output().unwrap();
    let (said, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let number = |text: &str| u64::from_str_radix(text, 16).expect("a number");
    let by_qemu =
        registers.split_whitespace().filter_map(|word| word.strip_prefix("EIP=").or(word.strip_prefix("RIP=")));
    let by_qemu: Vec<u64> = by_qemu.map(number).collect();
    let by_gdb: Vec<u64> = said.lines().filter_map(|line| line.strip_prefix("at ")).map(number).collect();
    assert_eq!((by_gdb.len(), &by_gdb), (2, &by_qemu), "{said}\n{error}");
    // The header of the program, by which QEMU knows it.
    assert!(said.contains("0x100000:\t0x02\t0xb0\t0xad\t0x1b"), "{said}\n{error}");
}

#[test]
fn plain_qemu_continues_from_an_export() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    for further in MACHINES {
        let paths = MachinePaths::default();
        let qemu = Qemu::start(&paths, further);
        let mut memory = Vec::new();
        let [running, paused] =
            checkpoints(&paths, |own| memory = own.physical_memory(RAM_BYTES, &paths.join("memory")));
        drop(qemu);
        for (checkpoint, name) in [(&running, "it's running"), (&paused, "paused")] {
            let directory = paths.join(name);
            std::fs::create_dir(&directory).unwrap();
            let written = export_qemu(checkpoint, &directory).unwrap();
            let plain = Plain::start(&written.script);
            let mut own = TestMonitor::connect(&paths.join("test.qmp"));
            if name == "paused" {
                pagemark_testing::wait_for("QEMU to read the stream", || {
                    (own.run("query-status", json!({}))["status"] == "paused").then_some(())
                });
                let loaded = own.physical_memory(RAM_BYTES, &paths.join("memory"));
                let differs = memory.chunks(4096).zip(loaded.chunks(4096)).position(|(one, other)| one != other);
                assert_oracle_eq!(differs, None, "{further:?}: a page that differs");
                own.run("cont", json!({}));
            }
            // Every page is checked in each step.
            paths.wait_for_steps(20);
            drop(plain);
        }
    }
}

#[test]
fn plain_qemu_continues_with_the_exported_disk() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    for format in ["raw", "qcow2"] {
        let paths = MachinePaths::default();
        let image = paths.join("disk,1");
        let mut command = Command::new("qemu-img");
        let made = command.args(["create", "-q", "-f", format]).arg(&image).arg("16M").status();
        if !made.is_ok_and(|status| status.success()) {
            skip!("no qemu-img");
        }
        // QEMU reads two commas as one.
        let named = paths.join("disk,,1");
        let qemu = Qemu::start(&paths, &with_disk(&named, format, ""));
        let [running, paused] = checkpoints(&paths, |_| {});
        drop(qemu);
        for checkpoint in [&running, &paused] {
            let directory = paths.join(&format!("export-{}", checkpoint.manifest.sequence));
            std::fs::create_dir(&directory).unwrap();
            let written = export_qemu(checkpoint, &directory).unwrap();
            let disk = directory.canonicalize().unwrap().join("disk,1");
            assert_eq!(written.disks, [("ide0-hd0".to_owned(), disk)]);
            let plain = Plain::start(&written.script);
            TestMonitor::connect(&paths.join("test.qmp")).run("cont", json!({}));
            // The machine compares all of its disk with its memory.
            paths.wait_for_steps(40);
            drop(plain);
        }
    }
}

#[test]
fn what_a_checkpoint_does_not_say_is_not_exported() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let qemu = Qemu::start(&paths, &PLAIN);
    let [mut running, mut paused] = checkpoints(&paths, |_| {});
    drop(qemu);
    let core = |checkpoint: &Checkpoint| export_core(checkpoint, &tempfile::tempfile().unwrap());
    core(&paused).unwrap();
    paused.manifest.state.retain(|record| record.name != "qemu-memory-map.json");
    let error = core(&paused).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.advice().contains("another checkpoint"), "{error:?}");

    running.manifest.state.retain(|record| record.name != "qemu-devices");
    assert_eq!(core(&running).unwrap_err().kind(), ErrorKind::Damaged);
    let directory = paths.join("export");
    std::fs::create_dir(&directory).unwrap();
    assert_eq!(export_qemu(&running, &directory).unwrap_err().kind(), ErrorKind::Damaged);
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 0, "nothing is left");
}

#[test]
fn a_checkpoint_of_something_else_is_no_machine() {
    let directory = tempfile::tempdir().unwrap();
    let repository = Repository::create(&directory.path().join("repository")).unwrap();
    pagemark::Region::new(4096).unwrap().save(&repository, "region").unwrap();
    let checkpoint = repository.read("region", 1).unwrap();
    assert_eq!(export_core(&checkpoint, &tempfile::tempfile().unwrap()).unwrap_err().kind(), ErrorKind::Damaged);
    assert_eq!(export_qemu(&checkpoint, directory.path()).unwrap_err().kind(), ErrorKind::Damaged);
    assert!(!directory.path().join("migration").exists());
}
