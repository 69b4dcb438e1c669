//! Machines under KVM, tracked by KVM's log or rings and by what QEMU's own page table knows. The
//! oracles are the program in the machine, which checks its memory, and QEMU's own dump of the
//! machine's memory.
//!
//! A machine of the lab runs these, whose emulated processor has hardware virtualization.

#[path = "support/own.rs"]
mod own;
#[path = "support/restored.rs"]
mod restored;

use std::collections::BTreeSet;
use std::os::unix::net::UnixStream;
use std::path::Path;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use own::Own;
use pagemark::repository::Repository;
use pagemark::track::Scope;
use pagemark::{Job, JobOptions, Mechanism};
use pagemark_kvm_log::protocol::{Request, SOCKET, Status, receive_greeting, receive_reply};
use pagemark_testing::{
    MachinePaths, QEMU, Qemu, RAM_BYTES, TestMonitor, assert_oracle, assert_oracle_eq, guest_program, skip, wait_for,
};
use pagemark_vm::{ErrorKind, VmTarget};
use restored::{Restored, restore};
use serde_json::json;

/// Kinds of machines and of memory. Each has a machine of the second address space, for SMM.
const MACHINES: [&[&str]; 3] = [
    &["-machine", "q35", "-accel", "kvm"],
    &["-machine", "pc", "-vga", "std", "-accel", "kvm"],
    &[
        "-machine",
        "q35,memory-backend=ram",
        "-object",
        "memory-backend-memfd,id=ram,size=16M,share=on",
        "-accel",
        "kvm",
    ],
];

fn restored(repository: &Path, sequence: u64) -> Restored {
    restore(&Repository::open(repository).unwrap().read("vm", sequence).unwrap()).unwrap()
}

fn job(paths: &MachinePaths, target: VmTarget) -> Job<VmTarget> {
    Job::new(target, Repository::create(&paths.join("repository")).unwrap(), JobOptions::new("vm"))
}

fn assert_same(memory: &[u8], dump: &[u8], what: &str) {
    let differs = dump.chunks(4096).zip(memory.chunks(4096)).position(|(one, other)| one != other);
    assert_oracle_eq!(differs, None, "{what}: a page that differs");
}

#[test]
#[ignore = "a machine of the lab runs it"]
fn the_restored_memory_is_the_memory_at_the_checkpoint() {
    restored_memory_is_that_of_checkpoints_by(Mechanism::KvmLog);
}

#[test]
#[ignore = "a machine of the lab runs it"]
fn the_restored_memory_is_the_memory_at_the_checkpoint_by_rings() {
    restored_memory_is_that_of_checkpoints_by(Mechanism::KvmRing);
}

fn restored_memory_is_that_of_checkpoints_by(mechanism: Mechanism) {
    pagemark_vm::check_kvm(mechanism).unwrap();
    for further in MACHINES {
        let paths = MachinePaths::default();
        let mut qemu = Own::start(mechanism, &paths, further);
        let mut job = job(&paths, qemu.attach().unwrap());
        let mut own = TestMonitor::connect(&paths.join("test.qmp"));
        assert_eq!(own.run("query-kvm", json!({}))["enabled"], true);
        // Shared memory has mappings for the machine alone.
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", job.target().pid())).unwrap();
        assert_eq!(maps.contains("pagemark-views"), further.concat().contains("share=on"));
        wait_for("the machine to start", || (paths.steps() > 3).then_some(()));
        let mut dumps = Vec::new();
        for round in 0..4 {
            job.checkpoint().unwrap();
            assert!(own.is_running());
            paths.wait_for_steps(10);
            own.run("stop", json!({}));
            let dump = own.physical_memory(RAM_BYTES, &paths.join("dump"));
            let taken = job.checkpoint().unwrap();
            assert!(round == 0 || taken.cost.dirty_pages < 3500, "{further:?}: {taken:?}");
            eprintln!("{further:?}: {} dirty pages, {} us", taken.cost.dirty_pages, taken.cost.downtime_us);
            dumps.push((taken.sequence, dump));
            own.run("cont", json!({}));
            paths.wait_for_steps(1);
        }
        job.detach();
        drop(qemu);
        for (sequence, dump) in &dumps {
            let restored = restored(&paths.join("repository"), *sequence);
            let mut own = TestMonitor::connect(&paths.join("test.qmp"));
            let memory = own.physical_memory(RAM_BYTES, &paths.join("dump"));
            assert_same(&memory, dump, &format!("{further:?}: checkpoint {sequence}"));
            // The program itself checks the rest.
            own.run("cont", json!({}));
            paths.wait_for_steps(5);
            drop(restored);
        }
    }
}

#[test]
#[ignore = "a machine of the lab runs it"]
fn qemu_migrates_the_machine_between_checkpoints_and_neither_loses_a_page() {
    // With private memory, and with views.
    migrate_between_checkpoints(Mechanism::KvmLog, MACHINES[0]);
    migrate_between_checkpoints(Mechanism::KvmLog, MACHINES[2]);
    migrate_between_checkpoints(Mechanism::KvmRing, MACHINES[2]);
}

fn migrate_between_checkpoints(mechanism: Mechanism, machine: &[&str]) {
    let paths = MachinePaths::default();
    let mut qemu = Own::start(mechanism, &paths, machine);
    let mut job = job(&paths, qemu.attach().unwrap());
    let mut own = TestMonitor::connect(&paths.join("test.qmp"));
    wait_for("the machine to start", || (paths.steps() > 3).then_some(()));
    job.checkpoint().unwrap();
    let stream = paths.join("stream").display().to_string();
    own.run("migrate-set-parameters", json!({"downtime-limit": 20000, "max-bandwidth": 4 << 20}));
    own.run("migrate", json!({"uri": format!("exec:cat >{stream}")}));
    // While QEMU reads the log, a checkpoint is refused, and what is written then belongs to the next.
    let error = job.checkpoint().err();
    wait_for("the migration", || {
        let status = own.run("query-migrate", json!({}))["status"].clone();
        assert_ne!(status, "failed");
        (status == "completed").then_some(())
    });
    if let Some(error) = error {
        assert!(error.to_string().contains("migrated"), "{error}");
    }
    let dump = own.physical_memory(RAM_BYTES, &paths.join("dump"));
    // The stream is the machine as it is now.
    let arrived = MachinePaths::default();
    let incoming = format!("exec:cat {stream}");
    let further = [machine, &["-incoming", &incoming, "-S"]].concat();
    let other = std::process::Command::new(QEMU).args(arrived.arguments(&further)).spawn().unwrap();
    let mut other = Killed(other);
    let mut theirs = TestMonitor::connect(&arrived.join("test.qmp"));
    wait_for("the machine to arrive", || (theirs.run("query-status", json!({}))["status"] == "paused").then_some(()));
    assert_same(&theirs.physical_memory(RAM_BYTES, &arrived.join("dump")), &dump, "the migrated machine");
    theirs.run("cont", json!({}));
    arrived.wait_for_steps(5);
    assert!(other.0.try_wait().unwrap().is_none());
    drop(other);
    // The machine goes on here, and so do its checkpoints.
    own.run("cont", json!({}));
    paths.wait_for_steps(5);
    own.run("stop", json!({}));
    let dump = own.physical_memory(RAM_BYTES, &paths.join("dump"));
    let taken = job.checkpoint().unwrap();
    job.detach();
    drop(qemu);
    let restored = restored(&paths.join("repository"), taken.sequence);
    let mut own = TestMonitor::connect(&paths.join("test.qmp"));
    assert_same(&own.physical_memory(RAM_BYTES, &paths.join("dump")), &dump, "behind the migration");
    own.run("cont", json!({}));
    paths.wait_for_steps(5);
    drop(restored);
}

#[test]
#[ignore = "a machine of the lab runs it"]
fn a_machine_that_is_reset_is_logged_and_one_that_gets_memory_is_refused() {
    is_tracked_through_a_reset(Mechanism::KvmLog, "kvm");
    is_tracked_through_a_reset(Mechanism::KvmRing, "kvm");
}

#[test]
fn a_machine_that_is_reset_is_tracked_without_kvm_too() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    is_tracked_through_a_reset(Mechanism::choose(Scope::Machine), "tcg");
}

/// A reset gives the machine other slots for its ROM and for the memory of its screen. The program
/// does not come again: QEMU loads it once, and the firmware runs.
fn is_tracked_through_a_reset(mechanism: Mechanism, accel: &str) {
    let paths = MachinePaths::default();
    let further = ["-machine", "q35", "-vga", "std", "-accel", accel, "-m", "16,slots=2,maxmem=1G"];
    let mut qemu = Own::start(mechanism, &paths, &further);
    let mut job = job(&paths, qemu.attach().unwrap());
    let mut own = TestMonitor::connect(&paths.join("test.qmp"));
    wait_for("the machine to start", || (paths.steps() > 3).then_some(()));
    job.checkpoint().unwrap();
    own.run("stop", json!({}));
    let before = own.physical_memory(RAM_BYTES, &paths.join("dump"));
    own.run("system_reset", json!({}));
    let dump = wait_for("the firmware to write", || {
        own.run("cont", json!({}));
        own.run("stop", json!({}));
        Some(own.physical_memory(RAM_BYTES, &paths.join("dump"))).filter(|dump| *dump != before)
    });
    let taken = job.checkpoint().unwrap();
    own.run("cont", json!({}));
    own.run("object-add", json!({"qom-type": "memory-backend-ram", "id": "more", "size": 16 << 20}));
    own.run("device_add", json!({"driver": "pc-dimm", "memdev": "more", "id": "dimm"}));
    let error = job.checkpoint().unwrap_err();
    assert!(error.to_string().contains("plugged in"), "{error}");
    assert!(own.is_running());
    job.detach();
    drop(qemu);
    let restored = restored(&paths.join("repository"), taken.sequence);
    let mut own = TestMonitor::connect(&paths.join("test.qmp"));
    let memory = own.physical_memory(RAM_BYTES, &paths.join("dump"));
    assert_same(&memory, &dump, &format!("{mechanism}: behind the reset"));
    own.run("cont", json!({}));
    assert!(own.is_running());
    drop(restored);
}

/// Each half finds what the other does not need to: the log has all that the machine's processors
/// write, and what a device writes is in QEMU's page table alone.
#[test]
#[ignore = "a machine of the lab runs it"]
fn the_log_has_what_the_processors_write_and_not_what_devices_write() {
    for mechanism in [Mechanism::KvmLog, Mechanism::KvmRing] {
        has_what_processors_write(mechanism);
    }
}

fn has_what_processors_write(mechanism: Mechanism) {
    let paths = MachinePaths::default();
    let mut qemu = Own::start(mechanism, &paths, MACHINES[2]);
    let mut own = TestMonitor::connect(&paths.join("test.qmp"));
    wait_for("the machine to start", || (paths.steps() > 8).then_some(()));
    let pid = qemu.qemu().pid();
    let socket = environment(pid, SOCKET);
    let mut log = UnixStream::connect(socket).unwrap();
    assert_eq!(receive_greeting(&mut log).unwrap(), Status::Done);
    let mut ask = |request: Request| {
        request.send(&mut log).unwrap();
        let (status, parts) = receive_reply(&mut log).unwrap();
        assert_eq!(status, Status::Done);
        parts
    };
    ask(Request::Begin);
    let ram = ram_address(pid);
    let mut stopped = |own: &mut TestMonitor| {
        own.run("stop", json!({}));
        let dump = own.physical_memory(RAM_BYTES, &paths.join("dump"));
        let found = ask(Request::Collect);
        let found = found.iter().flat_map(|part| {
            let is_set = |page: &u64| part.pages[(page / 64) as usize] & 1 << (page % 64) != 0;
            let pages = (0..part.pages.len() as u64 * 64).filter(is_set);
            pages.filter_map(|page| (part.host_address / 4096 + page).checked_sub(ram / 4096))
        });
        let found: BTreeSet<u64> = found.filter(|page| *page < RAM_BYTES / 4096).collect();
        own.run("cont", json!({}));
        (dump, found)
    };
    let (before, _) = stopped(&mut own);
    paths.wait_for_steps(5);
    let (after, found) = stopped(&mut own);
    let pages = before.chunks(4096).zip(after.chunks(4096)).zip(0u64..);
    let changed: BTreeSet<u64> = pages.filter(|((one, other), _)| one != other).map(|(_, page)| page).collect();
    // The program has a device write the same word again and again, to memory that it only reads.
    let is_received =
        |page: &u64| after[(page * 4096) as usize..].chunks(4).skip(1).take(8).all(|word| word == b"QEMU");
    let (received, computed): (BTreeSet<u64>, BTreeSet<u64>) = changed.iter().partition(|page| is_received(page));
    assert_eq!(received.len(), 1, "{changed:?}");
    assert!(computed.len() > 3, "{computed:?}");
    assert_oracle!(computed.is_subset(&found), "{:?} are not in the log", &computed - &found);
    assert!(received.is_disjoint(&found), "{received:?} are in the log: {found:?}");
    assert!(found.len() < 100, "{found:?}");
}

/// Where the machine's memory is in QEMU.
fn ram_address(pid: i32) -> u64 {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let bounds = maps.lines().filter(|line| line.contains("memory-backend")).filter_map(|line| {
        let (start, end) = line.split_whitespace().next()?.split_once('-')?;
        Some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?))
    });
    bounds.into_iter().find(|(start, end)| end - start == RAM_BYTES).expect("the memory").0
}

/// A variable of a process.
fn environment(pid: i32, name: &str) -> String {
    let variables = std::fs::read_to_string(format!("/proc/{pid}/environ")).unwrap();
    let value = |variable: &str| Some(variable.strip_prefix(name)?.strip_prefix('=')?.to_owned());
    variables.split('\0').find_map(value).expect("the variable")
}

/// A process, killed when dropped.
struct Killed(std::process::Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "a machine of the lab runs it"]
fn what_has_no_log_is_refused_and_goes_on() {
    let refused = |target: pagemark_vm::Result<VmTarget>, expected: &str| {
        let error = target.err().expect("it is refused");
        assert_eq!(error.kind(), ErrorKind::KvmLog, "{error}");
        assert!(error.to_string().contains(expected), "{error}");
        assert!(!error.advice().is_empty());
    };
    // A QEMU that was started by somebody else.
    let paths = MachinePaths::default();
    let qemu = Qemu::start(&paths, MACHINES[0]);
    refused(VmTarget::attach(&paths.monitor(), Mechanism::KvmLog), "without the library");
    paths.wait_for_steps(1);
    drop(qemu);
    // One that emulates its processors.
    let paths = MachinePaths::default();
    let mut emulated = Own::start(Mechanism::KvmLog, &paths, &["-accel", "tcg"]);
    refused(emulated.attach(), "under KVM");
    paths.wait_for_steps(1);
    drop(emulated);
    // One with a ring.
    let paths = MachinePaths::default();
    let mut ring = Own::start(Mechanism::KvmLog, &paths, &["-accel", "kvm,dirty-ring-size=4096"]);
    refused(ring.attach(), "ring");
    paths.wait_for_steps(1);
    drop(ring);
    // What is tracked by a mapping that the machine does not use.
    let paths = MachinePaths::default();
    let mut shared = Own::start(Mechanism::KvmLog, &paths, MACHINES[2]);
    drop(shared.attach().unwrap());
    for mechanism in [Mechanism::PagemapScan, Mechanism::Uffd] {
        let error = VmTarget::attach(&paths.monitor(), mechanism).err().expect("it is refused");
        assert!(error.kind() == ErrorKind::Unsupported && error.to_string().contains("kvm-log"), "{error}");
    }
    let mut own = TestMonitor::connect(&paths.join("test.qmp"));
    let capability = json!({"capabilities": [{"capability": "background-snapshot", "state": true}]});
    let refusal = own.try_run("migrate-set-capabilities", capability).unwrap_err();
    assert!(refusal.contains("ackground-snapshot"), "{refusal}");
    drop(VmTarget::attach(&paths.monitor(), Mechanism::Full).unwrap());
    paths.wait_for_steps(1);
    drop(shared);
    // Two at a time; and the machine outlives both, and is attached to anew.
    let paths = MachinePaths::default();
    let mut qemu = Own::start(Mechanism::KvmLog, &paths, MACHINES[0]);
    let first = qemu.attach().unwrap();
    refused(VmTarget::attach(&paths.monitor(), Mechanism::KvmLog), "another Pagemark");
    refused(VmTarget::attach(&paths.monitor(), Mechanism::KvmRing), "for kvm-log");
    drop(first);
    let again = wait_for("the library to let go", || VmTarget::attach(&paths.monitor(), Mechanism::KvmLog).ok());
    let mut job = job(&paths, again);
    job.checkpoint().unwrap();
    paths.wait_for_steps(2);
    // QEMU dies in between.
    kill(Pid::from_raw(job.target().pid()), Signal::SIGKILL).unwrap();
    let error = job.checkpoint().unwrap_err();
    eprintln!("{error}");
    assert!(Repository::open(&paths.join("repository")).unwrap().read("vm", 1).is_ok());
}
