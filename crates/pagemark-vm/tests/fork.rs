//! Several machines from one checkpoint.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pagemark::repository::{Checkpoint, Repository};
use pagemark::track::Scope;
use pagemark::{Job, JobOptions, Mechanism};
use pagemark_testing::{
    MachinePaths, Qemu, RAM_BYTES, TestMonitor, assert_oracle, assert_oracle_eq, guest_program, skip, wait_for,
    with_disk,
};
use pagemark_vm::{ErrorKind, ForkedMachine, Replacement, Restore, VmTarget};
use serde_json::json;

/// Machines that are killed when dropped.
struct Forked(Vec<ForkedMachine>);

impl Drop for Forked {
    fn drop(&mut self) {
        for machine in &self.0 {
            let _ = kill(Pid::from_raw(machine.pid), Signal::SIGKILL);
        }
    }
}

fn attach(monitor: &Path) -> VmTarget {
    VmTarget::attach(monitor, Mechanism::choose(Scope::Process)).unwrap()
}

/// Takes a checkpoint of a paused machine, and returns the content of its memory.
fn checkpoint(paths: &MachinePaths, further: &[impl AsRef<str>]) -> (Checkpoint, Vec<u8>) {
    let qemu = Qemu::start(paths, further);
    let mut own = TestMonitor::connect(&paths.join("test.qmp"));
    let repository = Repository::create(&paths.join("repository")).unwrap();
    let mut job = Job::new(attach(&paths.monitor()), repository, JobOptions::new("vm"));
    own.run("stop", json!({}));
    let memory = own.physical_memory(RAM_BYTES, &paths.join("dump"));
    job.checkpoint().unwrap();
    job.detach();
    drop(qemu);
    (Repository::open(&paths.join("repository")).unwrap().read("vm", 1).unwrap(), memory)
}

/// Waits until the program of machine `number` has made more steps, which write to a file of its
/// own.
fn wait_for_steps(paths: &MachinePaths, number: u32, more: usize) {
    let steps = || {
        let text = std::fs::read_to_string(paths.join(&format!("serial.{number}"))).unwrap_or_default();
        assert_oracle!(!text.contains("WRONG"), "machine {number} has found its data wrong: {text}");
        text.lines().count()
    };
    let before = steps();
    wait_for("the machine to go on", || (steps() > before + more).then_some(()));
}

/// A process's memory from the files that the machines share.
#[derive(Default, Debug)]
struct ForkMemory {
    resident_kb: u64,
    proportional_kb: u64,
    /// Pages that the machine has written to.
    own_kb: u64,
}

fn fork_memory(pid: i32) -> ForkMemory {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let mut memory = ForkMemory::default();
    let mut is_shared = false;
    for line in text.lines() {
        if line.split(' ').next().is_some_and(|word| word.contains('-')) {
            is_shared = line.contains("memfd:pagemark-fork");
        }
        let number = |key| line.strip_prefix(key).and_then(|rest: &str| rest.trim().strip_suffix(" kB")?.parse().ok());
        if is_shared {
            memory.resident_kb += number("Rss:").unwrap_or(0u64);
            memory.proportional_kb += number("Pss:").unwrap_or(0u64);
            memory.own_kb += number("Anonymous:").unwrap_or(0u64);
        }
    }
    memory
}

#[test]
fn machines_of_one_checkpoint_share_memory_and_run_by_themselves() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let (checkpoint, memory) = checkpoint(&paths, &["-name", "box"]);
    let forked = Forked(Restore::new(&checkpoint).fork(3, &[]).unwrap());
    assert_eq!(forked.0.iter().map(|machine| &*machine.name).collect::<Vec<_>>(), ["box-1", "box-2", "box-3"]);
    for number in 1..=3 {
        let mut own = TestMonitor::connect(&paths.join(&format!("test.qmp.{number}")));
        let restored = own.physical_memory(RAM_BYTES, &paths.join("dump"));
        let differs = memory.chunks(4096).zip(restored.chunks(4096)).position(|(one, other)| one != other);
        assert_oracle_eq!(differs, None, "machine {number}: a page that differs");
        own.run("cont", json!({}));
    }
    (1..=3).for_each(|number| wait_for_steps(&paths, number, 5));
    let sizes: Vec<ForkMemory> = forked.0.iter().map(|machine| fork_memory(machine.pid)).collect();
    let resident: u64 = sizes.iter().map(|memory| memory.resident_kb).sum();
    let proportional: u64 = sizes.iter().map(|memory| memory.proportional_kb).sum();
    // Each has read most of its memory, and written some pages.
    assert!(resident * 4 > 9 * (RAM_BYTES >> 10) && proportional * 2 < resident, "{sizes:?}");
}

#[test]
fn a_forked_machine_is_checkpointed_and_restored() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let (origin, _) = checkpoint(&paths, &["-name", "box"]);
    let forked = Forked(Restore::new(&origin).fork(2, &[]).unwrap());
    let mut own = TestMonitor::connect(&paths.join("test.qmp.2"));
    let mut dumps = Vec::new();
    let mechanisms = Mechanism::of_scope(Scope::Process);
    for mechanism in mechanisms.filter(|mechanism| pagemark::track::check(*mechanism, Scope::Process).is_ok()) {
        let repository = Repository::open(&paths.join("repository")).unwrap();
        let target = VmTarget::attach(&paths.join("vm.qmp.2"), mechanism).unwrap();
        let mut job = Job::new(target, repository, JobOptions::new("box-2"));
        for _ in 0..2 {
            let memory = own.physical_memory(RAM_BYTES, &paths.join("dump"));
            let own_pages = fork_memory(forked.0[1].pid).own_kb;
            dumps.push((mechanism, job.checkpoint().unwrap().sequence, memory));
            // Reading does not give the machine pages of its own.
            assert_eq!(fork_memory(forked.0[1].pid).own_kb, own_pages, "{mechanism}");
            own.run("cont", json!({}));
            wait_for_steps(&paths, 2, 5);
            job.checkpoint().unwrap();
            wait_for_steps(&paths, 2, 1);
            own.run("stop", json!({}));
        }
        job.detach();
    }
    drop((own, forked));
    let served = || UnixStream::connect(paths.join("vm.qmp.2")).is_ok();
    wait_for("the machine to end", || (!served()).then_some(()));

    let repository = Repository::open(&paths.join("repository")).unwrap();
    for (mechanism, sequence, memory) in dumps {
        let checkpoint = repository.read("box-2", sequence).unwrap();
        let machine = Restore::new(&checkpoint).detach(true).start(&mut |_, _| {}).unwrap();
        let mut own = TestMonitor::connect(&paths.join("test.qmp.2"));
        let restored = own.physical_memory(RAM_BYTES, &paths.join("dump"));
        let differs = memory.chunks(4096).zip(restored.chunks(4096)).position(|(one, other)| one != other);
        assert_oracle_eq!(differs, None, "{mechanism}: checkpoint {sequence}: a page that differs");
        own.run("cont", json!({}));
        wait_for_steps(&paths, 2, 5);
        kill(Pid::from_raw(machine.pid()), Signal::SIGKILL).unwrap();
        machine.wait().unwrap();
    }
}

#[test]
fn each_machine_has_a_disk_a_terminal_and_an_address_of_its_own() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    for format in ["raw", "qcow2"] {
        let paths = MachinePaths::default();
        let image = paths.join("disk");
        let made = Command::new("qemu-img").args(["create", "-q", "-f", format]).arg(&image).arg("16M").status();
        if !made.is_ok_and(|status| status.success()) {
            skip!("no qemu-img");
        }
        let mut further = with_disk(&image, format, "");
        let card = "e1000,netdev=n,mac=52:54:00:00:00:09";
        further.extend(["-netdev", "user,id=n", "-device", card, "-monitor", "stdio"].map(str::to_owned));
        let (checkpoint, _) = checkpoint(&paths, &further);
        let forked = Forked(Restore::new(&checkpoint).fork(2, &[]).unwrap());
        for (machine, number) in forked.0.iter().zip(1..) {
            assert_eq!(machine.name, format!("vm-{number}"));
            assert_eq!(machine.disks[0].1, paths.join(&format!("disk.vm-{number}")));
            assert!(machine.terminals[0].1.starts_with("/dev/pts"));
            let mac = format!("e1000,netdev=n,mac=52:54:00:0{number}:00:09");
            assert!(machine.changes.contains(&(card.to_owned(), mac)), "{:?}", machine.changes);
            TestMonitor::connect(&paths.join(&format!("test.qmp.{number}"))).run("cont", json!({}));
        }
        // The machines compare their disks with their memory.
        (1..=2).for_each(|number| wait_for_steps(&paths, number, 40));
    }
}

#[test]
fn what_two_machines_cannot_have_is_refused_before_one_is_started() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let network = format!("user,id=n,hostfwd=tcp:127.0.0.1:{port}-:22");
    let (checkpoint, _) = checkpoint(&paths, &["-netdev", &network, "-device", "e1000,netdev=n"]);
    let error = Restore::new(&checkpoint).fork(2, &[]).unwrap_err();
    assert!(error.kind() == ErrorKind::Start && error.to_string().contains("hostfwd"), "{error}");
    assert!(!paths.join("vm.qmp.1").exists());
    let replacement = Replacement::new(&format!("tcp:127.0.0.1:{port}-"), "tcp:127.0.0.{}:0-").unwrap();
    let forked = Forked(Restore::new(&checkpoint).fork(2, &[replacement]).unwrap());
    (1..=2).for_each(|number| drop(TestMonitor::connect(&paths.join(&format!("test.qmp.{number}")))));
    assert_eq!(forked.0.len(), 2);
}
