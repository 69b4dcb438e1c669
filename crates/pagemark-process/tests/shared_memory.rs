//! Shared anonymous memory: each page once, however many processes map it, and every write of each.

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use pagemark::repository::{Checkpoint, Manifest, MappingException, Repository, SpaceKind, SpaceRecord};
use pagemark::track::Scope;
use pagemark::{AddressRangeExt, Job, JobOptions, Mechanism};
use pagemark_linux::proc::Process;
use pagemark_process::criu::DumpOptions;
use pagemark_process::restore::{Restore, RestoreEvent};
use pagemark_process::saver::CriuSaver;
use pagemark_process::target::ProcessTarget;
use pagemark_testing::{finding, patience, repetitions, skip, wait_until};
use pagemark_trace::objects::is_shared_memory;
use support::{Checkpoints, Program};

/// Skips the test where the mechanism does not find what is written to shared memory.
macro_rules! need_tracking {
    ($mechanism:expr) => {
        if !$mechanism.process_tracking().is_ok_and(|tracking| tracking.needs_userfaultfd) {
            skip!("writes to shared memory are not tracked by the mechanism of this kernel");
        }
    };
}

const FAMILY: &str = include_str!("trackee/family.c");

/// The processes of the family that stay.
const MEMBERS: usize = 4;

fn objects(manifest: &Manifest) -> Vec<&SpaceRecord> {
    manifest.spaces.iter().filter(|space| matches!(space.kind, SpaceKind::SharedMemory { .. })).collect()
}

/// How often each process of the family has compared its memory. Fails if one found a difference.
fn rounds(program: &Program) -> [u64; MEMBERS] {
    if let Some(bad) = program.read("bad") {
        finding(&bad);
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

fn job(pid: i32, checkpoints: &Checkpoints, mechanism: Mechanism) -> (Job<ProcessTarget>, Repository) {
    let repository = Repository::open_or_create(&checkpoints.directory.path().join("repository")).unwrap();
    let saver = Arc::new(CriuSaver::new(checkpoints.criu.clone(), DumpOptions::default()));
    let target = ProcessTarget::attach(Process::find(pid).unwrap(), mechanism, saver).unwrap();
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
    let (mut job, repository) = job(program.pid(), &checkpoints, mechanism);
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
    every_write_comes_back(Mechanism::choose(Scope::Process), repetitions(4, 8));
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

/// A program with 64 pages of shared memory. It executes the Python text in the file `do`, and
/// shows which pages begin with which byte.
fn obedient(set_up: &str) -> Program {
    let begin = r#"
import ctypes, mmap
libc = ctypes.CDLL(None, use_errno=True)
libc.mremap.restype = ctypes.c_void_p
def remap(old, old_bytes, new_bytes, to=None):
    flags = 1 if to is None else 3
    at = libc.mremap(ctypes.c_void_p(old), ctypes.c_size_t(old_bytes), ctypes.c_size_t(new_bytes), flags, ctypes.c_void_p(to))
    assert at != 2 ** 64 - 1, ctypes.get_errno()
    return at
PAGE, PAGES = 4096, 64
shared = mmap.mmap(-1, PAGES * PAGE)
start = ctypes.addressof(ctypes.c_char.from_buffer(shared))
def poke(address, byte):
    ctypes.memset(address, byte, 1)
def opened(flags):
    return os.open('/proc/self/map_files/%x-%x' % (start, start + PAGES * PAGE), flags)
for page in range(PAGES):
    shared[page * PAGE] = 1 + page
"#;
    let round = r#"
if os.path.exists('do'):
    exec(open('do').read())
    os.unlink('do')
shown = ' '.join(str(shared[page * PAGE]) for page in range(PAGES))
open('shown.new', 'w').write(shown)
try:
    os.rename('shown.new', 'shown')
except FileNotFoundError:
    # Restored between the two lines, from a checkpoint that has only files that were open.
    pass
show(n)
time.sleep(0.002)
"#;
    Program::counter(&format!("{begin}{set_up}"), round)
}

/// Has the program execute a Python text, and then read all of its memory.
fn have_done(program: &Program, text: &str) {
    let path = program.directory().join("do");
    std::fs::write(path.with_extension("new"), text).unwrap();
    std::fs::rename(path.with_extension("new"), path).unwrap();
    wait_until("the program has obeyed", || program.read("do").is_none());
    program.wait_until_count_exceeds(program.count() + 2);
}

fn shown(program: &Program) -> Vec<u64> {
    program.wait_until_count_exceeds(program.count() + 2);
    program.read("shown").unwrap().split(' ').map(|byte| byte.parse().unwrap()).collect()
}

/// Takes checkpoints before and after the program does something, and compares what comes back with
/// what the program had.
fn comes_back_after(set_up: &str, text: &str, expected: impl Fn(u64) -> u64) {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let mut program = obedient(set_up);
    let (mut job, repository) = job(program.pid(), &checkpoints, Mechanism::choose(Scope::Process));
    job.checkpoint().unwrap();
    job.checkpoint().unwrap();
    have_done(&program, text);
    for _ in 0..2 {
        job.checkpoint().unwrap();
    }
    job.detach();
    let expected: Vec<u64> = (0..64).map(expected).collect();
    assert_eq!(shown(&program), expected, "before the restore");
    program.kill();
    for sequence in [3, 4] {
        let checkpoint = repository.read("job", sequence).unwrap();
        let restore = Restore::new(&checkpoint).criu(checkpoints.criu.clone()).asides_in(checkpoints.asides());
        program.adopt(&restore.detach(true).run(&mut |_| {}).unwrap());
        assert_eq!(shown(&program), expected, "checkpoint {sequence}");
        program.kill();
    }
}

#[test]
fn freed_pages_that_are_only_read_come_back_as_zeros() {
    let text = r#"
shared.madvise(mmap.MADV_REMOVE, 10 * PAGE, 20 * PAGE)
_ = [shared[page * PAGE] for page in range(10, 30)]
shared.madvise(mmap.MADV_DONTNEED, 20 * PAGE, 5 * PAGE)
shared[40 * PAGE] = 99
"#;
    comes_back_after("", text, |page| match page {
        10..30 => 0,
        40 => 99,
        _ => 1 + page,
    });
}

#[test]
fn what_is_freed_by_descriptor_comes_back() {
    let text = r#"
file = opened(os.O_RDWR)
assert libc.fallocate(file, 3, ctypes.c_long(3 * PAGE), ctypes.c_long(PAGE)) == 0
os.ftruncate(file, 60 * PAGE)
os.ftruncate(file, PAGES * PAGE)
os.close(file)
"#;
    comes_back_after("", text, |page| match page {
        3 | 60.. => 0,
        _ => 1 + page,
    });
}

#[test]
fn what_was_written_before_another_mapping_took_the_place_comes_back() {
    let text = r#"
poke(start + 7 * PAGE, 77)
other = remap(start, 0, PAGES * PAGE)
poke(other + 8 * PAGE, 88)
assert libc.munmap(ctypes.c_void_p(start), ctypes.c_size_t(PAGES * PAGE)) == 0
remap(other, PAGES * PAGE, PAGES * PAGE, start)
"#;
    comes_back_after("", text, |page| match page {
        7 => 77,
        8 => 88,
        _ => 1 + page,
    });
}

#[test]
fn pages_that_were_written_while_another_part_was_mapped_there_come_back() {
    let text = r#"
assert libc.remap_file_pages(ctypes.c_void_p(start + 4 * PAGE), ctypes.c_size_t(PAGE), 0, ctypes.c_size_t(50), 0) == 0
poke(start + 4 * PAGE, 200)
assert libc.remap_file_pages(ctypes.c_void_p(start + 4 * PAGE), ctypes.c_size_t(PAGE), 0, ctypes.c_size_t(4), 0) == 0
"#;
    comes_back_after("", text, |page| if page == 50 { 200 } else { 1 + page });
}

#[test]
fn memory_does_not_outlive_the_processes_while_they_are_followed() {
    // No other test has an object of this size.
    const BYTES: u64 = 4_567_040;
    let Some(checkpoints) = Checkpoints::new() else { return };
    let mechanism = Mechanism::choose(Scope::Process);
    need_tracking!(mechanism);
    let set_up = "
own, childs = mmap.mmap(-1, BYTES), mmap.mmap(-1, BYTES)
own[0] = childs[0] = 1
child = os.fork()
if child == 0:
    own.close()
    time.sleep(10000)
childs.close()
";
    let program = obedient(&set_up.replace("BYTES", &BYTES.to_string()));
    let views = || {
        let mut mappings = pagemark_linux::proc::maps::read(std::process::id() as i32).unwrap();
        // A heap of the allocator may have this length by chance.
        mappings.retain(|mapping| is_shared_memory(mapping) && mapping.range().byte_count().get() == BYTES);
        mappings
    };
    let (mut job, _repository) = job(program.pid(), &checkpoints, mechanism);
    job.checkpoint().unwrap();
    let both = views();
    assert_eq!(both.len(), 2, "{both:#?}");
    have_done(&program, "own.close()");
    wait_until("what is not mapped any more is given back", || views().len() == 1);
    have_done(&program, "os.kill(child, 9)\nos.waitpid(child, 0)");
    wait_until("what had been mapped by a child is given back", || views().is_empty());
    job.checkpoint().unwrap();
}

#[test]
fn of_memory_that_is_nearly_empty_only_pieces_with_data_are_tracked() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let mechanism = Mechanism::choose(Scope::Process);
    need_tracking!(mechanism);
    let program = obedient("sparse = mmap.mmap(-1, 80 << 30, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | 0x4000)");
    let tables = || {
        let size = support::status_field(program.pid(), "VmPTE:").unwrap();
        size.trim_end_matches(" kB").parse::<u64>().unwrap()
    };
    let before = tables();
    let (mut job, repository) = job(program.pid(), &checkpoints, mechanism);
    have_done(&program, "sparse[40 << 30] = 1");
    job.checkpoint().unwrap();
    assert!(tables() < before + 1024, "{} kB of page tables, before {before} kB", tables());
    let checkpoint = repository.read("job", 1).unwrap();
    let found = objects(&checkpoint.manifest);
    let [_, sparse] = &found[..] else { panic!("{found:?}") };
    assert_eq!(sparse.pages, 1);
    assert!(state_bytes(&checkpoint.manifest) < 4 << 20, "CRIU saved it too");
}

/// The program writes and frees pages all over a large object, which another process maps too, and
/// compares the object with what it knows of it.
#[test]
fn every_write_to_memory_that_is_nearly_empty_comes_back() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let mechanism = Mechanism::choose(Scope::Process);
    need_tracking!(mechanism);
    let mut program = Program::counter(
        r#"
import mmap, random, struct
PAGE, PAGES = 4096, (8 << 30) // 4096
sparse = mmap.mmap(-1, PAGES * PAGE, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | 0x4000)
choose = random.Random(5)
known = {}
def write(page, value):
    sparse[page * PAGE + 8:page * PAGE + 16] = struct.pack('<Q', value)
def any_page():
    return choose.choice(list(known)) if known and choose.random() < 0.7 else choose.randrange(PAGES)
ask, asked = os.pipe()
told, tell = os.pipe()
if os.fork() == 0:
    while True:
        write(*struct.unpack('<QQ', os.read(ask, 16)))
        os.write(tell, b'1')
"#,
        r#"
for i in range(20):
    page, value = any_page(), n * 100 + i
    known[page] = value
    if i % 4 == 0:
        os.write(asked, struct.pack('<QQ', page, value))
        os.read(told, 1)
    else:
        write(page, value)
for i in range(3):
    page = any_page()
    sparse.madvise(mmap.MADV_REMOVE, page * PAGE, PAGE)
    known.pop(page, 0)
    assert sparse[page * PAGE + 8] == 0
for page in known:
    assert sparse[page * PAGE + 8:page * PAGE + 16] == struct.pack('<Q', known[page]), page
show(n)
time.sleep(0.002)
"#,
    );
    let (mut job, repository) = job(program.pid(), &checkpoints, mechanism);
    const COUNT: u64 = 6;
    for _ in 0..COUNT {
        job.checkpoint().unwrap();
        program.wait_until_count_exceeds(program.count() + 5);
    }
    job.detach();
    program.kill();
    for sequence in 2..=COUNT {
        let checkpoint = repository.read("job", sequence).unwrap();
        let [object] = &objects(&checkpoint.manifest)[..] else { panic!("{:?}", checkpoint.manifest.spaces) };
        assert!(object.pages > 20, "{} pages", object.pages);
        let restore = Restore::new(&checkpoint).criu(checkpoints.criu.clone()).asides_in(checkpoints.asides());
        program.adopt(&restore.detach(true).lazy(sequence % 2 == 0).run(&mut |_| {}).unwrap());
        program.wait_until_count_exceeds(program.count() + 5);
        program.kill();
    }
}

#[test]
fn short_memory_is_left_to_criu_if_there_is_much_of_it() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let set_up = "
short, long = [mmap.mmap(-1, PAGE) for _ in range(600)], [mmap.mmap(-1, 1 << 20) for _ in range(3)]
def write(number):
    for index, memory in enumerate(short + long):
        memory[0:8] = (number + index).to_bytes(8, 'little')
def compare(number):
    for index, memory in enumerate(short + long):
        assert int.from_bytes(memory[0:8], 'little') == number + index
write(1000)
";
    let mut program = obedient(set_up);
    let (mut job, repository) = job(program.pid(), &checkpoints, Mechanism::choose(Scope::Process));
    job.checkpoint().unwrap();
    have_done(&program, "write(5000)");
    job.checkpoint().unwrap();
    job.detach();
    program.kill();
    for (sequence, number) in [(1, 1000), (2, 5000)] {
        let checkpoint = repository.read("job", sequence).unwrap();
        // The program's own object, and the long ones.
        assert_eq!(objects(&checkpoint.manifest).len(), 4);
        program.adopt(&checkpoints.restore(&checkpoint).unwrap());
        have_done(&program, &format!("compare({number})"));
        program.kill();
    }
}

fn state_bytes(manifest: &Manifest) -> u64 {
    manifest.state.iter().map(|record| record.content.bytes.get()).sum()
}

#[test]
fn only_what_was_written_is_copied_again() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let mechanism = Mechanism::choose(Scope::Process);
    need_tracking!(mechanism);
    let program = holder();
    let (mut job, repository) = job(program.pid(), &checkpoints, mechanism);
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
    let (mut job, repository) = job(child, &checkpoints, Mechanism::choose(Scope::Process));
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
