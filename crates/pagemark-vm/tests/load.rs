//! Many checkpoints of machines that write to memory all the time: each holds the memory as it was
//! in its freeze. The oracle is QEMU's own dump of the memory, taken in the freeze.

#[path = "support/own.rs"]
mod own;

use std::fs;
use std::path::{Path, PathBuf};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use own::Own;
use pagemark::checkpointer::Strategy;
use pagemark::repository::{Repository, Retention};
use pagemark::target::{SpaceId, Target, TargetDescription, TargetMemory, WhileFreezing};
use pagemark::track::Scope;
use pagemark::{Job, JobOptions, Mechanism, PAGE_SIZE, PageNumber, PageTree, Range, RangeSet, Store};
use pagemark_testing::{
    MachinePaths, Qemu, TestMonitor, assert_oracle, assert_oracle_eq, load_program, skip, wait_for,
};
use pagemark_vm::{Activation, Restore, VmTarget, can_hold_writes};
use serde_json::json;

const RAM_BYTES: usize = 64 << 20;
/// Memory behind this address is that of the block alone: no video memory or ROM is over it.
const FIRST_BYTE: usize = 1 << 20;

/// A machine whose memory QEMU dumps in each freeze.
struct Witnessed {
    target: VmTarget,
    monitor: TestMonitor,
    dump: PathBuf,
}

impl TargetMemory for Witnessed {
    type Error = pagemark_vm::Error;

    fn spaces(&mut self) -> Result<Vec<SpaceId>, Self::Error> {
        TargetMemory::spaces(&mut self.target)
    }

    fn collect(&mut self, space: SpaceId, dirty: &mut RangeSet) -> Result<(), Self::Error> {
        self.target.collect(space, dirty)
    }

    fn read(&mut self, space: SpaceId, ranges: &[Range], buffer: &mut [u8]) -> Result<RangeSet, Self::Error> {
        self.target.read(space, ranges, buffer)
    }
}

impl Target for Witnessed {
    type Frozen<'target> = <VmTarget as Target>::Frozen<'target>;

    fn description(&self) -> TargetDescription {
        self.target.description()
    }

    fn precopy(&mut self, store: &mut dyn Store) -> Result<(), pagemark::Error> {
        self.target.precopy(store)
    }

    fn freeze(&mut self, meanwhile: WhileFreezing<'_, Self::Error>) -> Result<Self::Frozen<'_>, Self::Error> {
        let frozen = self.target.freeze(meanwhile)?;
        dump(&mut self.monitor, &self.dump);
        Ok(frozen)
    }

    fn capture_failed(&mut self) {
        self.target.capture_failed();
    }
}

fn dump(monitor: &mut TestMonitor, path: &Path) {
    let _ = fs::remove_file(path);
    let (from, length) = (FIRST_BYTE, RAM_BYTES - FIRST_BYTE);
    monitor.run("pmemsave", json!({"val": from, "size": length, "filename": path.display().to_string()}));
}

/// Compares the memory of a checkpoint with a dump. Returns the number of its pages that hold data.
fn compare(repository: &Repository, sequence: u64, dump: &[u8]) -> usize {
    let checkpoint = repository.read("load", sequence).unwrap();
    let ram = checkpoint.manifest.spaces.iter().find(|space| space.label == "pc.ram").unwrap();
    let tree = PageTree::load(ram.root, &checkpoint).unwrap();
    let mut page = [0; PAGE_SIZE];
    let mut held = 0;
    for (number, expected) in (FIRST_BYTE / PAGE_SIZE..).zip(dump.chunks(PAGE_SIZE)) {
        let id = tree.get(PageNumber::new(number as u64));
        checkpoint.get_page(id, &mut page).unwrap();
        assert_oracle!(page == *expected, "checkpoint {sequence}: page {number} is not that of the freeze");
        held += usize::from(id != pagemark::ContentId::ZERO);
    }
    held
}

/// A machine that runs, killed when dropped.
#[expect(dead_code, reason = "each is dropped")]
enum Running {
    Plain(Qemu),
    Own(Own),
}

/// How memory is tracked and copied.
#[derive(Clone, Copy)]
struct Way {
    mechanism: Mechanism,
    strategy: Strategy,
    /// For copy-on-write with what KVM keeps.
    activation: Option<Activation>,
}

/// The mechanism that is chosen, and the default strategy.
fn pre_copy() -> Way {
    Way { mechanism: Mechanism::choose(Scope::Process), strategy: Strategy::default(), activation: None }
}

/// What KVM keeps, and the default strategy.
fn by_kvm(mechanism: Mechanism) -> Way {
    Way { mechanism, ..pre_copy() }
}

/// What KVM keeps, and copy-on-write.
const fn on_write_by_kvm(mechanism: Mechanism, activation: Activation) -> Way {
    Way { mechanism, activation: Some(activation), ..COPY_ON_WRITE }
}

const STOP: Way = Way { mechanism: Mechanism::PagemapScan, strategy: Strategy::StopAndCopy, activation: None };
const COPY_ON_WRITE: Way = Way { mechanism: Mechanism::Uffd, strategy: Strategy::CopyOnWrite, activation: None };

/// A machine under KVM, with private memory, and with memory that KVM reaches by a mapping of its
/// own.
const UNDER_KVM: [&str; 2] = ["-accel", "kvm"];
const WITH_VIEWS: [&str; 6] = [
    "-accel",
    "kvm",
    "-machine",
    "memory-backend=pc.ram",
    "-object",
    "memory-backend-memfd,id=pc.ram,size=64M,share=on",
];

/// Takes `count` checkpoints of a machine with this many processors under load.
fn checkpoints_under_load(way: Way, processors: u32, count: u64) {
    checkpoints_of(&[], way, processors, count);
}

/// Like [`checkpoints_under_load`], of a machine with these arguments besides.
fn checkpoints_of(arguments: &[&str], way: Way, processors: u32, count: u64) {
    let Way { mechanism, strategy, activation } = way;
    let Some(program) = load_program() else { skip!("no QEMU, or no compiler for its guest") };
    let paths = MachinePaths::default();
    let (program, processors) = (program.display().to_string(), processors.to_string());
    let further = ["-kernel", &program, "-append", &processors, "-smp", &processors, "-m", "64"];
    let further = [&further[..], arguments].concat();
    let (qemu, target) = match mechanism {
        Mechanism::KvmLog | Mechanism::KvmRing => {
            let mut own = Own::start(mechanism, &paths, &further);
            let target = own.attach_by(|qemu| match activation {
                Some(activation) => qemu.attach_to_hold(mechanism, activation),
                None => qemu.attach(mechanism),
            });
            let target = target.unwrap();
            wait_for("the machine to start", || (paths.steps() > 3).then_some(()));
            (Running::Own(own), target)
        }
        _ => {
            let qemu = Qemu::start(&paths, &further);
            (Running::Plain(qemu), VmTarget::attach(&paths.monitor(), mechanism).unwrap())
        }
    };
    let witnessed =
        Witnessed { target, monitor: TestMonitor::connect(&paths.join("test.qmp")), dump: paths.join("dump") };
    let repository = Repository::create(&paths.join("repository")).unwrap();
    let mut job = Job::new(witnessed, repository.clone(), JobOptions::new("load"));
    job.policy_mut().strategy = strategy;
    let (mut written, mut cow_pages, mut concurrent_pages, mut write_faults) = (0, 0, 0, 0);
    for sequence in 1..=count {
        let taken = job.checkpoint().unwrap();
        assert_eq!(taken.sequence, sequence);
        let in_freeze = fs::read(paths.join("dump")).unwrap();
        let held = compare(&repository, sequence, &in_freeze);
        assert!(held > 50, "the machine has memory: {held}");
        let cost = taken.cost;
        let held_in_freeze = cost.frozen_pages + cost.cow_pages + cost.concurrent_pages;
        written += u64::from(sequence > 1 && held_in_freeze > 0);
        cow_pages += cost.cow_pages;
        concurrent_pages += cost.concurrent_pages;
        write_faults += cost.write_faults;
        // Only the last few are of use later.
        let retention = Retention { keep_last: Some(4), keep_every: None };
        if sequence % 16 == 0 {
            repository.prune(&retention, Some("load"), &mut |_| {}).unwrap();
        }
    }
    assert!(written * 4 > count, "the machine writes also while it is being copied: {written} of {count}");
    if strategy == Strategy::CopyOnWrite {
        println!(
            "{mechanism}, {activation:?}, {processors} processors: {concurrent_pages} pages concurrently, {cow_pages} \
             before a write; {write_faults} writes waited"
        );
        assert!(concurrent_pages > 0 && cow_pages > 0, "pages are copied by both: {concurrent_pages} {cow_pages}");
    }
    paths.wait_for_steps(1);
    let in_freeze = fs::read(paths.join("dump")).unwrap();
    job.detach();
    drop(qemu);

    // The restored machine has the memory of the freeze, and goes on.
    let checkpoint = repository.read("load", count).unwrap();
    let machine = Restore::new(&checkpoint).detach(true).paused(true).start(&mut |_, _| {}).unwrap();
    let mut monitor = TestMonitor::connect(&paths.join("test.qmp"));
    dump(&mut monitor, &paths.join("dump"));
    let restored = fs::read(paths.join("dump")).unwrap();
    let differs = in_freeze.chunks(PAGE_SIZE).zip(restored.chunks(PAGE_SIZE)).position(|(one, other)| one != other);
    assert_oracle_eq!(differs, None, "a page of the restored machine");
    monitor.run("cont", json!({}));
    paths.wait_for_steps(5);
    kill(Pid::from_raw(machine.pid()), Signal::SIGKILL).unwrap();
    machine.wait().unwrap();
}

/// Checkpoints of each machine in each run of the tests and in a machine of the lab, where each
/// takes a minute, and in a full run.
const FEW: u64 = 6;
const MANY: u64 = 200;

#[test]
fn checkpoints_under_load_hold_the_memory_of_the_freeze() {
    for processors in [1, 4] {
        checkpoints_under_load(pre_copy(), processors, FEW);
    }
}

#[test]
fn copies_on_write_hold_the_memory_of_the_freeze() {
    if !can_hold_writes() {
        skip!("no userfaultfd that holds the kernel's own writes");
    }
    for processors in [1, 4] {
        checkpoints_under_load(COPY_ON_WRITE, processors, FEW);
    }
}

#[test]
fn writes_to_pages_that_each_checkpoint_keeps_do_not_wait() {
    let Some(program) = load_program() else { skip!("no QEMU, or no compiler for its guest") };
    if !can_hold_writes() {
        skip!("no userfaultfd that holds the kernel's own writes");
    }
    let paths = MachinePaths::default();
    let qemu = Qemu::start(&paths, &["-kernel", &program.display().to_string(), "-append", "1", "-m", "64"]);
    let repository = Repository::create(&paths.join("repository")).unwrap();
    let target = VmTarget::attach(&paths.monitor(), Mechanism::Uffd).unwrap();
    let mut job = Job::new(target, repository, JobOptions::new("load"));
    job.policy_mut().strategy = Strategy::CopyOnWrite;
    let (mut dirty, mut waited) = (0, 0);
    for sequence in 1..=8 {
        let cost = job.checkpoint().unwrap().cost;
        // Before that, no page is known well.
        if sequence > 4 {
            dirty += cost.dirty_pages;
            // Besides those that were copied before the write.
            waited += cost.write_faults - cost.cow_pages;
        }
        // Two writes for each page of the machine's program.
        paths.wait_for_steps(16);
    }
    assert!(dirty > 4000 && waited * 2 < dirty, "{waited} of {dirty} pages were waited for");
    assert!(!may_be_merged(&qemu), "the kernel forgets the protection of pages that it merges");
    job.detach();
    drop(qemu);
}

/// True if the kernel may merge pages of the machine's 64 MiB of memory with equal ones (KSM).
fn may_be_merged(qemu: &Qemu) -> bool {
    let smaps = fs::read_to_string(format!("/proc/{}/smaps", qemu.pid())).unwrap();
    let mut kib = 0u64;
    smaps.lines().any(|line| match line.split_once(':') {
        Some(("Size", size)) => {
            kib = size.trim().trim_end_matches(" kB").parse().unwrap();
            false
        }
        Some(("VmFlags", flags)) => kib >= 64 << 10 && flags.split_whitespace().any(|flag| flag == "mg"),
        _ => false,
    })
}

macro_rules! many_checkpoints {
    ($($name:ident: $way:expr, $processors:expr;)+) => {
        $(
            #[test]
            #[ignore = "some minutes"]
            fn $name() {
                checkpoints_under_load($way, $processors, MANY);
            }
        )+
    };
}

many_checkpoints! {
    many_checkpoints_under_load_with_one_processor: pre_copy(), 1;
    many_checkpoints_under_load_with_two_processors: pre_copy(), 2;
    many_checkpoints_under_load_with_four_processors: pre_copy(), 4;
    many_stops_under_load_with_two_processors: STOP, 2;
    many_copies_on_write_under_load_with_one_processor: COPY_ON_WRITE, 1;
    many_copies_on_write_under_load_with_two_processors: COPY_ON_WRITE, 2;
    many_copies_on_write_under_load_with_four_processors: COPY_ON_WRITE, 4;
}

// The machine of the lab has one processor, which machines with more would not leave to QEMU.

#[test]
#[ignore = "a machine of the lab runs it"]
fn private_memory_is_checkpointed_by_the_log_of_kvm() {
    checkpoints_of(&UNDER_KVM, by_kvm(Mechanism::KvmLog), 1, FEW);
}

#[test]
#[ignore = "a machine of the lab runs it"]
fn shared_memory_is_checkpointed_by_the_log_of_kvm() {
    checkpoints_of(&WITH_VIEWS, by_kvm(Mechanism::KvmLog), 1, FEW);
}

#[test]
#[ignore = "a machine of the lab runs it"]
fn private_memory_is_copied_on_write_without_the_log_of_kvm() {
    checkpoints_of(&UNDER_KVM, COPY_ON_WRITE, 1, FEW);
}

#[test]
#[ignore = "a machine of the lab runs it"]
fn private_memory_is_copied_on_write_by_the_log_of_kvm() {
    checkpoints_of(&UNDER_KVM, on_write_by_kvm(Mechanism::KvmLog, Activation::Early), 1, FEW);
}

#[test]
#[ignore = "a machine of the lab runs it"]
fn shared_memory_is_copied_on_write_by_the_log_of_kvm_with_early_activation() {
    checkpoints_of(&WITH_VIEWS, on_write_by_kvm(Mechanism::KvmLog, Activation::Early), 1, FEW);
}

#[test]
#[ignore = "a machine of the lab runs it"]
fn shared_memory_is_copied_on_write_by_the_log_of_kvm_with_late_activation() {
    checkpoints_of(&WITH_VIEWS, on_write_by_kvm(Mechanism::KvmLog, Activation::Late), 1, FEW);
}

#[test]
#[ignore = "a machine of the lab runs it"]
fn shared_memory_is_checkpointed_by_the_rings_of_kvm() {
    checkpoints_of(&WITH_VIEWS, by_kvm(Mechanism::KvmRing), 1, FEW);
}

#[test]
#[ignore = "a machine of the lab runs it"]
fn shared_memory_is_copied_on_write_by_the_rings_of_kvm() {
    checkpoints_of(&WITH_VIEWS, on_write_by_kvm(Mechanism::KvmRing, Activation::Early), 1, FEW);
}
