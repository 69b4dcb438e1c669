//! Shared anonymous memory: each page once, however many processes map it, and every write of each.

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use pagemark::repository::{Checkpoint, Manifest, MappingException, Repository, SpaceKind, SpaceRecord};
use pagemark::track::Scope;
use pagemark::{Job, JobOptions, Mechanism};
use pagemark_process::criu::DumpOptions;
use pagemark_process::restore::{Restore, RestoreEvent};
use pagemark_process::saver::CriuSaver;
use pagemark_process::target::ProcessTarget;
use pagemark_testing::{patience, skip, wait_until};
use support::{Checkpoints, Program};

const FAMILY: &str = include_str!("trackee/family.c");

/// The processes of the family that stay.
const MEMBERS: usize = 4;

fn objects(manifest: &Manifest) -> Vec<&SpaceRecord> {
    manifest.spaces.iter().filter(|space| matches!(space.kind, SpaceKind::SharedMemory { .. })).collect()
}

/// How often each process of the family has compared its memory. Fails if one found a difference.
fn rounds(program: &Program) -> [u64; MEMBERS] {
    if let Some(bad) = program.read("bad") {
        panic!("{bad}");
    }
    std::array::from_fn(|number| program.read(&format!("round.{number}")).map_or(0, |text| text.parse().unwrap_or(0)))
}

/// Waits until each process has compared its memory some times more.
fn compare_again(program: &Program, what: &str) {
    let before = rounds(program);
    let deadline = Instant::now() + patience();
    while rounds(program).iter().zip(before).any(|(now, before)| *now < before + 3) {
        assert!(Instant::now() < deadline, "{what}: not compared");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn job(program: &Program, checkpoints: &Checkpoints, mechanism: Mechanism) -> (Job<ProcessTarget>, Repository) {
    let repository = Repository::open_or_create(&checkpoints.directory.path().join("repository")).unwrap();
    let saver = Arc::new(CriuSaver::new(checkpoints.criu.clone(), DumpOptions::default()));
    let target = ProcessTarget::attach(program.pid(), mechanism, saver).unwrap();
    (Job::new(target, repository.clone(), JobOptions::new("job")), repository)
}

/// Restores the program and has it compare its memory.
fn restore(program: &mut Program, checkpoints: &Checkpoints, checkpoint: &Checkpoint, is_lazy: bool) {
    let what = format!("checkpoint {}, lazy {is_lazy}", checkpoint.manifest.sequence);
    for number in 0..MEMBERS {
        let _ = std::fs::remove_file(program.directory().join(format!("round.{number}")));
    }
    let restore = Restore::new(checkpoint).criu(checkpoints.criu.clone()).asides_in(checkpoints.asides());
    let restored = restore.detach(true).lazy(is_lazy).run(&mut |event| {
        if let RestoreEvent::Running(restored) = event {
            program.adopt(restored);
        }
    });
    program.adopt(&restored.unwrap_or_else(|failure| panic!("{what}: {failure}")));
    compare_again(program, &what);
    program.kill();
}

fn every_write_comes_back(mechanism: Mechanism, count: u64) {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let Some(mut program) = Program::c(FAMILY) else { return };
    compare_again(&program, "at the start");
    let (mut job, repository) = job(&program, &checkpoints, mechanism);
    for taken in 0..count {
        let taken_cost = job.checkpoint().unwrap().cost;
        eprintln!("{mechanism}: {taken_cost:?}");
        std::thread::sleep(Duration::from_millis(20 + 25 * (taken % 4)));
    }
    job.detach();
    compare_again(&program, "at the end");
    program.kill();
    for sequence in 1..=count {
        let checkpoint = repository.read("job", sequence).unwrap();
        let largest = objects(&checkpoint.manifest).iter().map(|space| space.pages).max();
        assert_eq!(largest, Some(1500), "checkpoint {sequence}");
        restore(&mut program, &checkpoints, &checkpoint, sequence % 2 == 0);
    }
}

#[test]
fn every_write_of_a_family_of_processes_comes_back() {
    every_write_comes_back(Mechanism::choose(Scope::Process), 8);
}

#[test]
fn every_write_comes_back_without_tracking() {
    every_write_comes_back(Mechanism::Full, 2);
}

#[test]
#[ignore = "some minutes"]
fn every_write_of_a_family_comes_back_from_many_checkpoints() {
    for mechanism in [Mechanism::PagemapScan, Mechanism::Adaptive, Mechanism::SoftDirty, Mechanism::Compare] {
        match pagemark::track::check(mechanism, Scope::Process) {
            Ok(_) => every_write_comes_back(mechanism, 40),
            Err(error) => pagemark_testing::skipped(&error.to_string()),
        }
    }
}

/// A process that holds 32 MiB of shared memory, and writes a page of it for each number.
fn holder() -> Program {
    Program::counter(
        r#"
import mmap
shared = mmap.mmap(-1, 32 << 20)
for i in range(8192):
    shared[i * 4096] = 1 + i % 251
"#,
        r#"
shared[n % 8192 * 4096 + 8:n % 8192 * 4096 + 16] = n.to_bytes(8, 'little')
show(n)
time.sleep(0.002)
"#,
    )
}

fn state_bytes(manifest: &Manifest) -> u64 {
    manifest.state.iter().map(|record| record.content.bytes.get()).sum()
}

#[test]
fn only_what_was_written_is_copied_again() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    if !Mechanism::choose(Scope::Process).process_tracking().is_ok_and(|tracking| tracking.needs_userfaultfd) {
        skip!("writes to shared memory are not tracked by the mechanism of this kernel");
    }
    let program = holder();
    let (mut job, repository) = job(&program, &checkpoints, Mechanism::choose(Scope::Process));
    let mut last = 0;
    for _ in 0..3 {
        last = job.checkpoint().unwrap().cost.dirty_pages;
    }
    job.detach();
    assert!(last < 4000, "{last} pages");
    let checkpoint = repository.read("job", 3).unwrap();
    let found = objects(&checkpoint.manifest);
    let [object] = &found[..] else { panic!("{found:?}") };
    assert_eq!(object.pages, 8192);
    let SpaceKind::SharedMemory { bytes, .. } = object.kind else { unreachable!() };
    assert_eq!(bytes.get(), 32 << 20);
    assert!(state_bytes(&checkpoint.manifest) < 4 << 20, "CRIU saved it too");
    let shown = |mapping: &&pagemark::repository::MappingRecord| mapping.memory == Some(object.id);
    assert_eq!(checkpoint.manifest.spaces[0].mappings.iter().filter(shown).count(), 1);
}

#[test]
fn memory_that_a_process_outside_maps_is_left_to_criu() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    // The checkpointed process is a child of the one that made the memory.
    let program = Program::python(
        r#"
import mmap, os, time
shared = mmap.mmap(-1, 1 << 20)
child = os.fork()
if child == 0:
    os.setsid()
    for fd in (0, 1, 2):
        os.dup2(os.open('/dev/null', os.O_RDWR), fd)
    while True:
        shared[0:8] = (int.from_bytes(shared[0:8], 'little') + 1).to_bytes(8, 'little')
        time.sleep(0.001)
open('child.new', 'w').write(str(child))
os.rename('child.new', 'child')
time.sleep(1000)
"#,
    );
    wait_until("the program has forked", || program.read("child").is_some());
    let child: i32 = program.read("child").unwrap().parse().unwrap();
    let repository = Repository::open_or_create(&checkpoints.directory.path().join("repository")).unwrap();
    let saver = Arc::new(CriuSaver::new(checkpoints.criu.clone(), DumpOptions::default()));
    let target = ProcessTarget::attach(child, Mechanism::choose(Scope::Process), saver).unwrap();
    let mut job = Job::new(target, repository.clone(), JobOptions::new("job"));
    for _ in 0..2 {
        job.checkpoint().unwrap();
    }
    job.detach();
    let checkpoint = repository.read("job", 2).unwrap();
    assert!(objects(&checkpoint.manifest).is_empty());
    let mappings = &checkpoint.manifest.spaces[0].mappings;
    let exceptions: Vec<_> =
        mappings.iter().filter(|mapping| mapping.permissions == "rw-s").map(|mapping| mapping.exception).collect();
    assert_eq!(exceptions, [Some(MappingException::SharedOutside)]);
}

#[test]
fn shared_memory_of_a_restored_program_is_tracked_again() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let mut program = holder();
    program.wait_until_count_exceeds(10);
    let first = checkpoints.take(&program, &[]);
    program.kill();
    program.adopt(&checkpoints.restore(&first).unwrap());
    let count = program.count();
    program.wait_until_count_exceeds(count + 10);
    let second = checkpoints.take(&program, &[&|| program.wait_until_count_exceeds(program.count() + 10)]);
    for checkpoint in [&first, &second] {
        assert_eq!(objects(&checkpoint.manifest).iter().map(|space| space.pages).collect::<Vec<_>>(), [8192]);
    }
    program.kill();
    program.adopt(&checkpoints.restore(&second).unwrap());
    program.wait_until_count_exceeds(program.count() + 5);
}
