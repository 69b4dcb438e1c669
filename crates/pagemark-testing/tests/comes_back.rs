//! Programs that check themselves are checkpointed while they run, killed, and restored: their
//! memory is bitwise that of the freeze, and they continue to check themselves.

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use nix::sys::signal::{SigSet, Signal, kill};
use nix::unistd::Pid;
use pagemark::checkpointer::Strategy;
use pagemark::repository::{Checkpoint, Repository};
use pagemark::{Address, Job, JobOptions, Mechanism, PageTree, Policy, Store};
use pagemark_linux::proc::{Process, Status};
use pagemark_process::criu::{Criu, DumpOptions};
use pagemark_process::files::{ChangedFiles, put_back};
use pagemark_process::restore::{RestoreOptions, Streams, prepare};
use pagemark_process::saver::{CriuSaver, RegisterSaver, StateSaver};
use pagemark_process::spawn::spawn;
use pagemark_process::target::ProcessTarget;
use pagemark_testing::{
    Swap, assert_oracle, assert_unviolated, finding, in_machine, repetitions, skip, skipped, wait_for,
};

const PAGE: usize = 4096;

/// The content of each page, by process and address.
type Image = BTreeMap<(i32, u64), Page>;

struct Page {
    content: Box<[u8; PAGE]>,
    is_shared: bool,
}

/// Reads the memory of a stopped process without Pagemark's code: every page that is in memory or
/// swapped out, except unchanged pages of mapped files.
fn image_of(pid: i32, image: &mut Image) {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("the process lives");
    let pagemap = File::open(format!("/proc/{pid}/pagemap")).expect("its pagemap");
    let memory = File::open(format!("/proc/{pid}/mem")).expect("its memory");
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        let (range, permissions) = (words.next().expect("a range"), words.next().expect("permissions"));
        if ["[vdso]", "[vvar]", "[vvar_vclock]", "[vsyscall]"].iter().any(|name| line.ends_with(name)) {
            continue;
        }
        let (start, end) = range.split_once('-').expect("a range");
        let parse = |text| u64::from_str_radix(text, 16).expect("an address");
        let (start, end) = (parse(start), parse(end));
        let mut entries = vec![0; ((end - start) as usize / PAGE) * 8];
        pagemap.read_exact_at(&mut entries, start / PAGE as u64 * 8).expect("its pagemap");
        for (index, entry) in entries.chunks_exact(8).enumerate() {
            let entry = u64::from_ne_bytes(entry.try_into().expect("eight bytes"));
            let populated = entry & (3 << 62) != 0;
            let of_a_file = entry & (1 << 61) != 0;
            if populated && (!of_a_file || permissions.ends_with('s')) {
                let address = start + (index * PAGE) as u64;
                let mut content = Box::new([0; PAGE]);
                memory
                    .read_exact_at(&mut content[..], address)
                    .unwrap_or_else(|error| panic!("{address:#x} in {line}: {error}"));
                image.insert((pid, address), Page { content, is_shared: permissions.ends_with('s') });
            }
        }
    }
}

/// The memory in which the kernel records the processor of each thread. It writes the processor
/// whenever a thread resumes.
fn restartable_sequences(pid: i32) -> HashSet<u64> {
    let mut addresses = HashSet::new();
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).expect("its threads").flatten() {
        let tid: i32 = task.file_name().to_string_lossy().parse().expect("a thread id");
        let mut configuration = [0u64; 3];
        // SAFETY: PTRACE_SEIZE has no addresses, and the restored threads have no tracer.
        assert_eq!(unsafe { libc::ptrace(libc::PTRACE_SEIZE, tid, 0, 0) }, 0, "seize {tid}");
        // SAFETY: the call has no addresses.
        assert_eq!(unsafe { libc::ptrace(libc::PTRACE_INTERRUPT, tid, 0, 0) }, 0, "interrupt {tid}");
        nix::sys::wait::waitpid(Pid::from_raw(tid), Some(nix::sys::wait::WaitPidFlag::__WALL)).expect("a stop");
        // SAFETY: the kernel writes at most the given length, which is the buffer's.
        let length = unsafe { libc::ptrace(PTRACE_GET_RSEQ_CONFIGURATION, tid, 24, configuration.as_mut_ptr()) };
        // SAFETY: the call has no addresses.
        assert_eq!(unsafe { libc::ptrace(libc::PTRACE_DETACH, tid, 0, 0) }, 0, "detach {tid}");
        if length > 0 && configuration[0] != 0 {
            // Processor, processor once more, node, and the processor's number within the process;
            // between them a pointer and flags that are the program's.
            addresses.extend(configuration[0]..configuration[0] + 8);
            addresses.extend(configuration[0] + 20..configuration[0] + 28);
        }
    }
    addresses
}

/// `linux/ptrace.h`
const PTRACE_GET_RSEQ_CONFIGURATION: libc::c_uint = 0x420f;

/// Compares the page trees of a checkpoint with the processes' private memory at the freeze.
/// `executes`: a thread of each process executes something in the freeze, for which the kernel
/// records its processor once more.
fn assert_same_pages(frozen: &Image, checkpoint: &Checkpoint, executes: bool) {
    for space in &checkpoint.manifest.spaces {
        // What processes share is compared when they are back.
        let Some(pid) = space.pid() else { continue };
        let tree = PageTree::load(space.root, checkpoint).expect("the page tree");
        let mut page = [0; PAGE];
        let mut differing = Vec::new();
        let private = frozen.range((pid, 0)..(pid + 1, 0)).filter(|(_, page)| !page.is_shared);
        for ((pid, address), expected) in private {
            checkpoint.get_page(tree.get(Address::new(*address).page()), &mut page).expect("the page");
            let differs = (0..PAGE).filter(|&at| page[at] != expected.content[at]);
            differing.extend(differs.map(|at| address + at as u64));
            assert_oracle!(
                differing.is_empty() || executes && is_of_one_sequence(&differing),
                "process {pid}: page {address:#x} of the checkpoint is not as it was at the freeze: {differing:x?}"
            );
        }
    }
}

/// True if all these addresses are in what the kernel writes to one thread's memory for restartable
/// sequences: processor, processor once more, node, and the processor's number within the process.
fn is_of_one_sequence(addresses: &[u64]) -> bool {
    const LENGTH: u64 = 32;
    let begin = addresses[0] / LENGTH * LENGTH;
    addresses.iter().all(|address| matches!(address.wrapping_sub(begin), 0..8 | 20..28))
}

/// Compares the memory below `end` with that at the freeze.
fn assert_same_memory(frozen: &Image, pids: &[i32], end: u64) {
    for &pid in pids {
        let memory = File::open(format!("/proc/{pid}/mem")).expect("the restored process's memory");
        let written_by_kernel = restartable_sequences(pid);
        let mut page = [0; PAGE];
        for ((_, address), expected) in frozen.range((pid, 0)..(pid + 1, 0)) {
            memory.read_exact_at(&mut page, *address).unwrap_or_else(|e| panic!("{pid} at {address:#x}: {e}"));
            let changed = (0..PAGE)
                .find(|&at| page[at] != expected.content[at] && !written_by_kernel.contains(&(address + at as u64)));
            if let Some(at) = changed {
                let (is, was) = (page[at], expected.content[at]);
                let address = address + at as u64;
                finding(&format!("process {pid}: {address:#x} is {is:#x}, was {was:#x} at the freeze"));
            }
        }
        let mut restored = Image::new();
        image_of(pid, &mut restored);
        restored.retain(|(_, address), _| *address < end);
        for (key, page) in &restored {
            let known = frozen.contains_key(key) || page.content.iter().all(|&byte| byte == 0);
            assert_oracle!(known, "process {pid}: page {:#x} holds something, and was not there", key.1);
        }
    }
}

/// A program that reports into a directory.
struct Program {
    directory: tempfile::TempDir,
    pid: i32,
}

impl Program {
    fn start(command: &[&str]) -> Program {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let mut words: Vec<OsString> = vec!["sh".into(), "-c".into()];
        // The streams lead nowhere, and the working directory stays.
        let script = "exec \"$@\" < /dev/null > \"$0/output\" 2>&1".to_owned();
        words.push(script.into());
        words.push(directory.path().into());
        words.extend(
            command.iter().map(|word| word.replace("DIRECTORY", &directory.path().display().to_string()).into()),
        );
        let child = spawn(&words, &[], SigSet::empty()).expect("the program starts");
        let program = Program { directory, pid: child.id() as i32 };
        // Reaped when it is killed, so that its id is free for the restore.
        std::thread::spawn(move || {
            let mut child = child;
            child.wait()
        });
        program
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn progress(&self) -> u64 {
        std::fs::metadata(self.path("progress")).map_or(0, |file| file.len())
    }

    fn wait_for_progress(&self) {
        let before = self.progress();
        wait_for("progress", || {
            self.assert_well();
            (self.progress() > before + 26).then_some(())
        });
    }

    fn assert_well(&self) {
        assert_unviolated(self.directory.path());
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
        let output = std::fs::read_to_string(self.path("output"));
        assert_oracle!(!stat.is_empty() && !stat.contains(") Z"), "the program has ended: {output:?}");
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid), signal).expect("the program lives");
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        kill_all(&descendants(self.pid));
    }
}

fn descendants(pid: i32) -> Vec<i32> {
    let mut pids = vec![pid];
    let mut next = 0;
    while let Some(&pid) = pids.get(next) {
        for task in std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
            let children = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
            pids.extend(children.split_whitespace().filter_map(|pid| pid.parse::<i32>().ok()));
        }
        next += 1;
    }
    pids
}

fn kill_all(pids: &[i32]) {
    for &pid in pids {
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
    }
    for &pid in pids {
        wait_for("a killed process to go", || {
            // Restored processes are no children of this process.
            let _ = nix::sys::wait::waitpid(Pid::from_raw(pid), Some(nix::sys::wait::WaitPidFlag::WNOHANG));
            (!Path::new(&format!("/proc/{pid}")).exists()).then_some(())
        });
    }
}

/// The steps of each test: checkpoints while the program runs and `between` disturbs it, a kill,
/// and a restore.
fn comes_back(command: &[&str], mechanism: Mechanism, strategy: Strategy, between: impl FnMut(&Program, u32)) {
    if let Err(error) = pagemark::track::check(mechanism, pagemark::track::Scope::Process) {
        skip!("{error}");
    }
    comes_back_below(command, (mechanism, strategy), u64::MAX, between);
}

/// The program in a machine of `pagemark-kvm`, tracked by what the machine knows. The monitor's own
/// memory is not compared: it changes while the freeze is captured.
///
/// Returns how many pages the last checkpoint copied.
fn comes_back_in_machine(
    command: &[&str],
    (mechanism, strategy): (Mechanism, Strategy),
    between: impl FnMut(&Program, u32),
) -> Option<u64> {
    let command = in_machine(command, kept_for(mechanism))?;
    let command: Vec<&str> = command.iter().map(String::as_str).collect();
    comes_back_below(&command, (mechanism, strategy), PROGRAM_END, between)
}

/// Like [`comes_back_in_machine`], with checkpoints of memory alone, from which nothing comes back:
/// the last one is compared.
fn memory_in_machine(
    command: &[&str],
    (mechanism, strategy): (Mechanism, Strategy),
    between: impl FnMut(&Program, u32),
) -> Option<u64> {
    let command = in_machine(command, kept_for(mechanism))?;
    let command: Vec<&str> = command.iter().map(String::as_str).collect();
    let program = Program::start(&command);
    let captured = capture(&program, (mechanism, strategy), Arc::new(RegisterSaver), PROGRAM_END, between);
    assert_same_pages(&captured.image, &captured.checkpoint, strategy == Strategy::CopyOnWrite);
    Some(captured.dirty_pages)
}

/// What the machine keeps for a mechanism.
fn kept_for(mechanism: Mechanism) -> &'static str {
    if mechanism == Mechanism::KvmRing { "rings" } else { "log" }
}

/// The end of a program's addresses in a machine of `pagemark-kvm`.
const PROGRAM_END: u64 = 0x5000_0000_0000;

/// Like [`comes_back`], comparing the memory below `end`. Returns how many pages the last
/// checkpoint copied.
fn comes_back_below(
    command: &[&str],
    (mechanism, strategy): (Mechanism, Strategy),
    end: u64,
    between: impl FnMut(&Program, u32),
) -> Option<u64> {
    let criu = match Criu::find() {
        Ok(criu) => criu,
        Err(error) => {
            skipped(&error.to_string());
            return None;
        }
    };
    let program = Program::start(command);
    let saver = Arc::new(CriuSaver::new(criu.clone(), DumpOptions::default()));
    let captured = capture(&program, (mechanism, strategy), saver, end, between);
    let Captured { image, pids, checkpoint, dirty_pages, place } = captured;
    let images = tempfile::tempdir().expect("a temporary directory");
    assert_same_pages(&image, &checkpoint, strategy == Strategy::CopyOnWrite);
    let prepared = prepare(&checkpoint.manifest, &checkpoint, images.path()).expect("prepare the restore");
    let files = put_back(&checkpoint.manifest.files, &[], &checkpoint, "test", &place.path().join("asides"));
    files.and_then(ChangedFiles::keep).expect("put files back");
    let options =
        RestoreOptions { stopped: true, streams: Streams::Null, as_child: false, ..RestoreOptions::default() };
    let restored = prepared.run(&criu, &options).expect("restore");
    assert_eq!(restored.root_pid, program.pid);
    assert_eq!(restored.pids.iter().collect::<std::collections::BTreeSet<_>>(), pids.iter().collect());
    // A program with timers gets their signals before it can be stopped again, and their handlers
    // write memory.
    if !command.contains(&TORTURE) {
        assert_same_memory(&image, &restored.pids, end);
    }
    for &pid in &restored.pids {
        kill(Pid::from_raw(pid), Signal::SIGCONT).expect("the restored process lives");
    }
    program.wait_for_progress();
    program.wait_for_progress();
    Some(dirty_pages)
}

/// The last checkpoint of a program that was killed.
struct Captured {
    /// The memory in its freeze.
    image: Image,
    pids: Vec<i32>,
    checkpoint: Checkpoint,
    /// How many pages it copied.
    dirty_pages: u64,
    /// Where the repository is.
    place: tempfile::TempDir,
}

/// Takes checkpoints of a program, which is killed then.
fn capture(
    program: &Program,
    (mechanism, strategy): (Mechanism, Strategy),
    saver: Arc<dyn StateSaver>,
    end: u64,
    mut between: impl FnMut(&Program, u32),
) -> Captured {
    program.wait_for_progress();
    let place = tempfile::tempdir().expect("a temporary directory");
    let repository = Repository::create(&place.path().join("repository")).expect("a repository");
    let target = ProcessTarget::attach(Process::find(program.pid).unwrap(), mechanism, saver).expect("attach");
    let policy = Policy { strategy, ..Policy::default() };
    let mut job = Job::new(target, repository, JobOptions { policy, ..JobOptions::new("test") });

    let frozen = Arc::new(Mutex::new((Image::new(), Vec::new())));
    let witness = frozen.clone();
    job.target_mut().set_fewest_kept_pages(1);
    let mut hook = Some(Box::new(move |pids: &[i32]| {
        let mut image = Image::new();
        pids.iter().for_each(|&pid| image_of(pid, &mut image));
        image.retain(|(_, address), _| *address < end);
        *witness.lock().expect("no panic") = (image, pids.to_vec());
    }));
    let mut taken = job.checkpoint().unwrap_or_else(|error| {
        program.assert_well();
        panic!("the first checkpoint: {error}")
    });
    // What `between` does differs between even and odd rounds.
    let rounds = repetitions(2, 4);
    for round in 0..rounds {
        between(program, round);
        program.wait_for_progress();
        if round + 1 == rounds {
            // The last checkpoint is the one that is compared.
            job.target_mut().set_freeze_hook(hook.take().expect("there is one last round"));
        }
        taken = job.checkpoint().unwrap_or_else(|error| panic!("checkpoint after round {round}: {error}"));
    }
    program.wait_for_progress();
    job.detach();
    program.wait_for_progress();
    let (image, pids) = std::mem::take(&mut *frozen.lock().expect("no panic"));
    kill_all(&pids);

    let repository = Repository::open(&place.path().join("repository")).expect("the repository");
    let checkpoint = repository.read("test", taken.sequence).expect("the checkpoint");
    Captured { image, pids, checkpoint, dirty_pages: taken.cost.dirty_pages, place }
}

const TORTURE: &str = env!("CARGO_BIN_EXE_torture");
const FAMILY: &str = env!("CARGO_BIN_EXE_family");
const PAGES: &str = env!("CARGO_BIN_EXE_pages");

fn undisturbed(_: &Program, _: u32) {}

#[test]
fn eight_threads_that_do_everything_at_once() {
    comes_back(&[TORTURE, "DIRECTORY"], Mechanism::Adaptive, Strategy::default(), undisturbed);
}

#[test]
fn eight_threads_stopped_and_copied() {
    comes_back(&[TORTURE, "DIRECTORY"], Mechanism::PagemapScan, Strategy::StopAndCopy, undisturbed);
}

#[test]
fn eight_threads_copied_on_write() {
    for mechanism in [Mechanism::Adaptive, Mechanism::PagemapScan] {
        comes_back(&[TORTURE, "DIRECTORY"], mechanism, Strategy::CopyOnWrite, undisturbed);
    }
}

#[test]
fn a_family_copied_on_write() {
    comes_back(&[FAMILY, "DIRECTORY"], Mechanism::Adaptive, Strategy::CopyOnWrite, undisturbed);
}

#[test]
fn a_process_that_maps_and_forks_copied_on_write() {
    comes_back(&[PAGES, "DIRECTORY"], Mechanism::Adaptive, Strategy::CopyOnWrite, |program, round| {
        program.signal(if round % 2 == 0 { Signal::SIGUSR1 } else { Signal::SIGUSR2 });
    });
}

#[test]
fn writes_of_every_kind_copied_on_write() {
    let command = ["python3", "-c", WRITES, "DIRECTORY"];
    comes_back(&command, Mechanism::Adaptive, Strategy::CopyOnWrite, undisturbed);
    comes_back_in_machine(&command, (Mechanism::KvmScan, Strategy::CopyOnWrite), undisturbed);
}

#[test]
fn eight_threads_with_ldt() {
    comes_back(&[TORTURE, "DIRECTORY"], Mechanism::Ldt, Strategy::default(), undisturbed);
}

#[test]
fn eight_threads_stopped_and_copied_with_ldt() {
    comes_back(&[TORTURE, "DIRECTORY"], Mechanism::Ldt, Strategy::StopAndCopy, undisturbed);
}

#[test]
fn eight_threads_with_soft_dirty() {
    comes_back(&[TORTURE, "DIRECTORY"], Mechanism::SoftDirty, Strategy::default(), undisturbed);
}

#[test]
fn eight_threads_compared() {
    comes_back(&[TORTURE, "DIRECTORY"], Mechanism::Compare, Strategy::default(), undisturbed);
}

#[test]
fn eight_threads_copied_in_full() {
    comes_back(&[TORTURE, "DIRECTORY"], Mechanism::Full, Strategy::default(), undisturbed);
}

#[test]
fn a_family_that_talks_through_pipes() {
    comes_back(&[FAMILY, "DIRECTORY"], Mechanism::Adaptive, Strategy::default(), undisturbed);
}

#[test]
fn a_family_with_ldt() {
    comes_back(&[FAMILY, "DIRECTORY"], Mechanism::Ldt, Strategy::default(), undisturbed);
}

#[test]
fn a_family_with_soft_dirty() {
    comes_back(&[FAMILY, "DIRECTORY"], Mechanism::SoftDirty, Strategy::default(), undisturbed);
}

fn maps_and_forks(mechanism: Mechanism) {
    comes_back(&[PAGES, "DIRECTORY"], mechanism, Strategy::default(), |program, round| {
        program.signal(if round % 2 == 0 { Signal::SIGUSR1 } else { Signal::SIGUSR2 });
    });
}

#[test]
fn a_process_that_maps_and_forks_between_checkpoints() {
    maps_and_forks(Mechanism::Adaptive);
}

#[test]
fn a_process_that_maps_and_forks_with_ldt() {
    maps_and_forks(Mechanism::Ldt);
}

#[test]
fn a_process_that_maps_and_forks_with_soft_dirty() {
    maps_and_forks(Mechanism::SoftDirty);
}

fn eight_threads_in_machine(mechanism: Mechanism) {
    comes_back_in_machine(&[TORTURE, "DIRECTORY"], (mechanism, Strategy::default()), undisturbed);
}

#[test]
fn eight_threads_in_a_machine() {
    eight_threads_in_machine(Mechanism::KvmScan);
}

#[test]
fn eight_threads_in_a_machine_with_a_log() {
    eight_threads_in_machine(Mechanism::KvmLog);
}

#[test]
fn eight_threads_in_a_machine_with_rings() {
    eight_threads_in_machine(Mechanism::KvmRing);
}

#[test]
fn eight_threads_in_a_machine_stopped_and_copied() {
    for mechanism in [Mechanism::KvmScan, Mechanism::KvmLog, Mechanism::KvmRing] {
        comes_back_in_machine(&[TORTURE, "DIRECTORY"], (mechanism, Strategy::StopAndCopy), undisturbed);
    }
}

fn family_in_machines(mechanism: Mechanism) {
    comes_back_in_machine(&[FAMILY, "DIRECTORY"], (mechanism, Strategy::default()), undisturbed);
}

#[test]
fn a_family_in_machines() {
    family_in_machines(Mechanism::KvmScan);
}

#[test]
fn a_family_in_machines_with_a_log() {
    family_in_machines(Mechanism::KvmLog);
}

#[test]
fn a_family_in_machines_with_rings() {
    family_in_machines(Mechanism::KvmRing);
}

fn maps_and_forks_in_machine(mechanism: Mechanism) {
    comes_back_in_machine(&[PAGES, "DIRECTORY"], (mechanism, Strategy::default()), |program, round| {
        program.signal(if round % 2 == 0 { Signal::SIGUSR1 } else { Signal::SIGUSR2 });
    });
}

#[test]
fn a_process_that_maps_and_forks_in_a_machine() {
    maps_and_forks_in_machine(Mechanism::KvmScan);
}

#[test]
fn a_process_that_maps_and_forks_in_a_machine_with_a_log() {
    maps_and_forks_in_machine(Mechanism::KvmLog);
}

#[test]
fn a_process_that_maps_and_forks_in_a_machine_with_rings() {
    maps_and_forks_in_machine(Mechanism::KvmRing);
}

/// The most pages that a checkpoint of [`WRITES`] copies, however long its interval is: it holds
/// 32,768 pages, of which it writes a quarter, and has an interpreter.
const MOST_COPIED_PAGES: u64 = 16_384;

/// Each kind of write is in each interval; what is not written is not copied.
fn writes_of_every_kind(mechanism: Mechanism) {
    let by = (mechanism, Strategy::StopAndCopy);
    let copied = comes_back_in_machine(&["python3", "-c", WRITES, "DIRECTORY"], by, undisturbed);
    assert!(copied.is_none_or(|pages| pages < MOST_COPIED_PAGES), "{copied:?}");
}

#[test]
fn writes_of_every_kind_in_a_machine() {
    writes_of_every_kind(Mechanism::KvmScan);
}

#[test]
fn writes_of_every_kind_in_a_machine_with_a_log() {
    writes_of_every_kind(Mechanism::KvmLog);
}

#[test]
fn writes_of_every_kind_in_a_machine_with_rings() {
    writes_of_every_kind(Mechanism::KvmRing);
}

fn memory_of_every_kind_of_write(mechanism: Mechanism) {
    for strategy in [Strategy::StopAndCopy, Strategy::default()] {
        let copied = memory_in_machine(&["python3", "-c", WRITES, "DIRECTORY"], (mechanism, strategy), undisturbed);
        assert!(copied.is_none_or(|pages| pages < MOST_COPIED_PAGES), "{strategy:?}: {copied:?}");
    }
}

#[test]
fn writes_of_every_kind_to_memory_alone_in_a_machine() {
    memory_of_every_kind_of_write(Mechanism::KvmScan);
}

#[test]
fn writes_of_every_kind_to_memory_alone_in_a_machine_with_a_log() {
    memory_of_every_kind_of_write(Mechanism::KvmLog);
}

#[test]
fn writes_of_every_kind_to_memory_alone_in_a_machine_with_rings() {
    memory_of_every_kind_of_write(Mechanism::KvmRing);
}

#[test]
fn memory_alone_of_eight_threads_in_a_machine() {
    for mechanism in [Mechanism::KvmScan, Mechanism::KvmLog, Mechanism::KvmRing] {
        memory_in_machine(&[TORTURE, "DIRECTORY"], (mechanism, Strategy::default()), undisturbed);
    }
}

#[test]
fn memory_alone_of_a_process_that_maps_and_forks_in_a_machine() {
    for mechanism in [Mechanism::KvmScan, Mechanism::KvmLog, Mechanism::KvmRing] {
        memory_in_machine(&[PAGES, "DIRECTORY"], (mechanism, Strategy::default()), |program, round| {
            program.signal(if round % 2 == 0 { Signal::SIGUSR1 } else { Signal::SIGUSR2 });
        });
    }
}

const WRITES: &str = "\
import mmap, os, random, socket, sys
PAGES = 16384
memory = mmap.mmap(-1, PAGES * 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for page in range(PAGES):
    memory[page * 4096:page * 4096 + 8] = page.to_bytes(8, 'little')
content = bytearray(memory)
one, other = socket.socketpair()
source = os.open(sys.argv[1] + '/source', os.O_RDWR | os.O_CREAT)
log = open(sys.argv[1] + '/progress', 'a', buffering=1)
view = memoryview(memory)
others = []
number = 0
def put(kind, page, at, data):
    start = page * 4096 + at
    if kind == 0:
        memory[start:start + len(data)] = data
    elif kind == 1:
        os.pwrite(source, data, 0)
        os.preadv(source, [view[start:start + 5], view[start + 5:start + len(data)]], 0)
    elif kind == 2:
        one.send(data)
        other.recv_into(view[start:start + len(data)])
    else:
        data = bytes(4096)
        start = page * 4096
        memory.madvise(mmap.MADV_DONTNEED, start, 4096)
    content[start:start + len(data)] = data
while True:
    number += 1
    for kind in range(4):
        put(kind, random.randrange(PAGES // 4), random.randrange(4096), number.to_bytes(8, 'little') * 3)
    # Other memory comes to addresses that were in use.
    other_memory = mmap.mmap(-1, random.randrange(1, 9) * 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if number % 2:
        other_memory[:] = bytes([number % 251]) * len(other_memory)
        other_memory.resize(len(other_memory) * 2)
    others.append((other_memory, bytes(other_memory)))
    if len(others) > 8:
        others.pop(random.randrange(8))
    if number % 20 == 0:
        if content != view or any(bytes(is_there) != was for is_there, was in others):
            open(sys.argv[1] + '/violated', 'w').write(str(number))
            sys.exit(99)
        log.write(f'ok {number:9}\\n')
";
fn partly_swapped_out(mechanism: Mechanism) {
    let Some(_swap) = Swap::on() else { skip!("there is no zram device to swap to, or no right to use it") };
    comes_back(&[PAGES, "DIRECTORY"], mechanism, Strategy::default(), |program, round| {
        if round == 1 {
            program.signal(Signal::SIGUSR1);
        }
        wait_for("something swapped out", || {
            (Status::read(program.pid).expect("it runs").swapped_bytes > 0).then_some(())
        });
    });
}

#[test]
fn a_process_that_is_partly_swapped_out() {
    partly_swapped_out(Mechanism::Adaptive);
}

#[test]
fn a_process_that_is_partly_swapped_out_with_ldt() {
    partly_swapped_out(Mechanism::Ldt);
}

#[test]
fn a_process_that_is_partly_swapped_out_with_soft_dirty() {
    partly_swapped_out(Mechanism::SoftDirty);
}

#[test]
fn an_interpreter() {
    comes_back(&["python3", "-c", SCRIPT, "DIRECTORY"], Mechanism::Adaptive, Strategy::default(), undisturbed);
}

#[test]
fn an_interpreter_in_a_machine() {
    for mechanism in [Mechanism::KvmScan, Mechanism::KvmLog, Mechanism::KvmRing] {
        comes_back_in_machine(&["python3", "-c", SCRIPT, "DIRECTORY"], (mechanism, Strategy::default()), undisturbed);
    }
}

const SCRIPT: &str = "\
import hashlib, sys
state, log = {0: 'seed'}, open(sys.argv[1] + '/progress', 'a', buffering=1)
while True:
    last = len(state) - 1
    state[last + 1] = hashlib.sha256(state[last].encode()).hexdigest()
    if last % 500 == 0:
        check = 'seed'
        for index in range(1, len(state)):
            check = hashlib.sha256(check.encode()).hexdigest()
            if state[index] != check:
                open(sys.argv[1] + '/violated', 'w').write(f'{index}: {state[index]}')
                sys.exit(99)
        log.write(f'ok {last:9}\\n')
";
