//! Machines that run before their memory is there.

use std::sync::atomic::{AtomicBool, Ordering};

use pagemark::repository::{Checkpoint, Repository};
use pagemark::restore::{Gated, Prepared, Running};
use pagemark::store::Visit;
use pagemark::track::Scope;
use pagemark::{ContentId, Job, JobOptions, Kind, Mechanism, PAGE_SIZE, Store};
use pagemark_testing::{
    MachinePaths, PLAIN, Qemu, RAM_BYTES, TestMonitor, assert_oracle_eq, guest_program, skip, wait_for,
};
use pagemark_vm::{ErrorKind, Restore, RunningMachine, VmTarget};
use serde_json::json;

/// Takes a checkpoint of a paused machine, and returns the content of its memory.
fn checkpoint(paths: &MachinePaths, further: &[&str]) -> (Checkpoint, Vec<u8>) {
    let qemu = Qemu::start(paths, further);
    let mut own = TestMonitor::connect(&paths.join("test.qmp"));
    let target = VmTarget::attach(&paths.monitor(), Mechanism::choose(Scope::Process)).unwrap();
    let repository = Repository::create(&paths.join("repository")).unwrap();
    let mut job = Job::new(target, repository, JobOptions::new("vm"));
    own.run("stop", json!({}));
    let memory = own.physical_memory(RAM_BYTES, &paths.join("dump"));
    job.checkpoint().unwrap();
    job.detach();
    drop(qemu);
    (Repository::open(&paths.join("repository")).unwrap().read("vm", 1).unwrap(), memory)
}

fn end(machine: RunningMachine) {
    let pid = nix::unistd::Pid::from_raw(machine.pid());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
    machine.wait().unwrap();
}

/// A checkpoint of which single pages can be read, and many only after the machine has used its
/// memory.
struct Slow<'a> {
    checkpoint: &'a Checkpoint,
    paths: &'a MachinePaths,
    is_slow: AtomicBool,
}

impl Store for Slow<'_> {
    fn put(&mut self, _: Kind, _: &[u8]) -> Result<ContentId, pagemark::Error> {
        unreachable!("a restore writes nothing")
    }

    fn get(&self, kind: Kind, id: ContentId) -> Result<Vec<u8>, pagemark::Error> {
        self.checkpoint.get(kind, id)
    }

    fn get_page(&self, id: ContentId, page: &mut [u8; PAGE_SIZE]) -> Result<(), pagemark::Error> {
        self.checkpoint.get_page(id, page)
    }

    fn get_many(&self, kind: Kind, ids: &[ContentId], visit: Visit<'_>) -> Result<(), pagemark::Error> {
        if self.is_slow.load(Ordering::Relaxed) {
            TestMonitor::connect(&self.paths.join("test.qmp")).run("cont", json!({}));
            // In each step, the program checks all of its pages.
            self.paths.wait_for_steps(5);
        }
        self.checkpoint.get_many(kind, ids, visit)
    }
}

#[test]
fn the_machine_runs_before_its_memory_is_there() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let (checkpoint, _) = checkpoint(&paths, &PLAIN);
    let store = Slow { checkpoint: &checkpoint, paths: &paths, is_slow: AtomicBool::new(false) };
    let lazy = Restore::from_store(&checkpoint.manifest, &store).detach(true).start_lazily(&mut |_, _| {}).unwrap();
    store.is_slow.store(true, Ordering::Relaxed);
    let machine = lazy.complete(&|_| {}).unwrap();
    paths.wait_for_steps(5);
    end(machine);
}

#[test]
fn memory_that_came_late_is_the_memory_at_the_checkpoint() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let shared = ["-object", "memory-backend-memfd,id=ram,size=16M,share=on", "-machine"];
    for further in [&["-vga", "std"][..], &[&shared[..], &["pc,memory-backend=ram"]].concat()] {
        let paths = MachinePaths::default();
        let (checkpoint, memory) = checkpoint(&paths, further);
        let lazy = Restore::new(&checkpoint).detach(true).start_lazily(&mut |_, _| {}).unwrap();
        let delivered_pages = std::sync::atomic::AtomicU64::new(0);
        let count = |pages| {
            delivered_pages.fetch_add(pages, Ordering::Relaxed);
        };
        let machine = lazy.complete(&count).unwrap();
        assert!(delivered_pages.load(Ordering::Relaxed) > 100);
        let mut own = TestMonitor::connect(&paths.join("test.qmp"));
        let restored = own.physical_memory(RAM_BYTES, &paths.join("dump"));
        let differs = memory.chunks(4096).zip(restored.chunks(4096)).position(|(one, other)| one != other);
        assert_oracle_eq!(differs, None, "{further:?}: a page that differs");
        own.run("cont", json!({}));
        paths.wait_for_steps(5);
        // Nothing of the delivery is left: the machine is checkpointed like any other.
        let target = VmTarget::attach(&paths.monitor(), Mechanism::choose(Scope::Process)).unwrap();
        let repository = Repository::open(&paths.join("repository")).unwrap();
        Job::new(target, repository, JobOptions::new("vm")).checkpoint().unwrap();
        end(machine);
    }
}

#[test]
fn a_machine_whose_memory_does_not_come_is_killed() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let (checkpoint, _) = checkpoint(&paths, &PLAIN);
    let lazy = Restore::new(&checkpoint).detach(true).start_lazily(&mut |_, _| {}).unwrap();
    let pid = lazy.machine().pid();
    TestMonitor::connect(&paths.join("test.qmp")).run("cont", json!({}));
    drop(lazy);
    wait_for("QEMU to end", || {
        let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        (state.is_empty() || state.contains(") Z ")).then_some(())
    });
    // It has seen no wrong page.
    paths.steps();
}

#[test]
fn nothing_is_left_of_a_machine_that_was_made_and_may_not_run() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let (checkpoint, _) = checkpoint(&paths, &PLAIN);
    for is_lazy in [false, true] {
        let prepared = Restore::new(&checkpoint).lazy(is_lazy).detach(true).prepare().unwrap();
        let gated = prepared.make(&mut |_, _| {}).unwrap();
        let mut own = TestMonitor::connect(&paths.join("test.qmp"));
        assert_eq!(own.run("query-status", json!({}))["running"], json!(false));
        drop(gated);
        assert!(std::os::unix::net::UnixStream::connect(paths.join("test.qmp")).is_err(), "{is_lazy}");
    }
    let prepared = Restore::new(&checkpoint).lazy(true).detach(true).prepare().unwrap();
    let machine = prepared.make(&mut |_, _| {}).unwrap().open(&mut |_| {}).unwrap();
    assert_eq!(machine.pids(), [machine.pid()]);
    end(machine);
}

#[test]
fn a_machine_that_gives_memory_back_is_not_restored_lazily() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let (checkpoint, _) = checkpoint(&paths, &["-device", "virtio-balloon-pci"]);
    let error = Restore::new(&checkpoint).detach(true).start_lazily(&mut |_, _| {}).err().unwrap();
    assert!(error.kind() == ErrorKind::Unsupported && error.to_string().contains("virtio-balloon"), "{error}");
    end(Restore::new(&checkpoint).detach(true).start(&mut |_, _| {}).unwrap());
}
