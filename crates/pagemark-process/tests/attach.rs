//! Tests that attach to processes, which check that they are not disturbed.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::{Duration, Instant};

use nix::sys::ptrace;
use nix::unistd::Pid;
use pagemark::repository::Repository;
use pagemark::target::TargetMemory;
use pagemark::track::Scope;
use pagemark::{
    Address, AddressRangeExt, ByteCount, Job, JobOptions, Mechanism, PAGE_SIZE, PageNumber, PageRangeExt, RangeSet,
};
use pagemark_linux::proc::{self, Process};
use pagemark_process::ErrorKind;
use pagemark_process::saver::RegisterSaver;
use pagemark_process::target::ProcessTarget;
use pagemark_testing::{
    Swap, assert_oracle, assert_oracle_eq, directory_until_exit, patience, pause_32, repetitions, skip, wait_until,
};
use pagemark_trace::freezer::Freezer;
use pagemark_trace::inject;
use pagemark_trace::space::{AddressSpace, Moment};

/// The compiled trackee; none where there is no C compiler.
fn steady() -> Option<&'static PathBuf> {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    let compile = || {
        let program = directory_until_exit().join("steady");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/trackee/steady.c");
        let done = Command::new("cc").args(["-O2", "-pthread", "-o"]).arg(&program).arg(source).status().ok()?;
        assert!(done.success(), "the trackee does not compile");
        Some(program)
    };
    PROGRAM.get_or_init(compile).as_ref()
}

/// The mechanisms for other processes that work here; reports those that do not.
fn mechanisms() -> Vec<Mechanism> {
    let works = |mechanism: &Mechanism| match pagemark::track::check(*mechanism, Scope::Process) {
        Ok(_) => true,
        Err(error) => {
            pagemark_testing::skipped(&error.to_string());
            false
        }
    };
    Mechanism::of_scope(Scope::Process).filter(works).collect()
}

/// A running trackee, killed when dropped.
struct Steady {
    child: Child,
    rounds: File,
    _directory: tempfile::TempDir,
}

impl Steady {
    fn start(mode: &str) -> Option<Steady> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("rounds");
        fs::write(&path, [0; 4096]).unwrap();
        let mut command = Command::new(steady()?);
        command.arg(mode).arg(&path).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Some(Steady { child, rounds: File::open(path).unwrap(), _directory: directory })
    }

    fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    fn rounds(&self) -> u64 {
        let mut bytes = [0; 8];
        self.rounds.read_exact_at(&mut bytes, 0).unwrap();
        u64::from_ne_bytes(bytes)
    }

    /// Waits until the trackee has completed some rounds, and asserts that it has reported no
    /// error.
    fn goes_on(&mut self) {
        let before = self.rounds();
        let deadline = Instant::now() + patience();
        while self.rounds() < before + 5 {
            assert_oracle_eq!(self.child.try_wait().unwrap(), None, "the trackee has complained");
            assert!(Instant::now() < deadline, "the trackee makes no progress");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn signal(&self, signal: i32) {
        // SAFETY: a signal to a child of ours that has not been waited for.
        assert_eq!(unsafe { libc::kill(self.pid(), signal) }, 0);
    }

    fn is_stopped(&self) -> bool {
        proc::Stat::read(self.pid()).unwrap().state == 'T'
    }
}

impl Drop for Steady {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn userfaultfd_in(pid: i32) -> Result<OwnedFd, pagemark_process::Error> {
    inject::userfaultfd(Process::find(pid).unwrap())
}

fn no_userfaultfd_within(pid: i32) -> bool {
    proc::descriptors(pid).unwrap().iter().all(|descriptor| descriptor.link != b"anon_inode:[userfaultfd]")
}

#[test]
fn many_injections_disturb_no_process() {
    let number = repetitions(50, 200);
    for mode in ["sleep", "compute", "sequence", "poll", "threads", "signals", "filter"] {
        let Some(mut steady) = Steady::start(mode) else { skip!("no C compiler") };
        steady.goes_on();
        let begin = Instant::now();
        for _ in 0..number {
            match userfaultfd_in(steady.pid()) {
                Ok(descriptor) => drop(descriptor),
                Err(error) => panic!("{mode}: {error}"),
            }
        }
        eprintln!("{mode}: {:?} an injection", begin.elapsed() / number);
        assert!(no_userfaultfd_within(steady.pid()) || mode == "threads");
        steady.goes_on();
    }
}

#[test]
fn a_system_call_that_takes_long_is_waited_for() {
    // Longer than threads may take to stop.
    const DURATION_MS: u64 = 12_000;
    for mode in ["compute", "threads"] {
        let Some(mut steady) = Steady::start(mode) else { skip!("no C compiler") };
        steady.goes_on();
        let poll = inject::Call { number: libc::SYS_poll, arguments: [0, 0, DURATION_MS, 0, 0, 0] };
        let begin = Instant::now();
        let done = inject::system_calls(Process::find(steady.pid()).unwrap(), vec![poll]);
        assert!(done.is_ok(), "{mode}: {done:?}");
        assert!(begin.elapsed() >= Duration::from_millis(DURATION_MS), "{mode}: it was not carried out");
        steady.goes_on();
    }
}

#[test]
fn a_thread_that_does_not_stop_is_named() {
    let Some(mut steady) = Steady::start("vfork") else { skip!("no C compiler") };
    let pid = steady.pid();
    wait_until("the process waits for its child", || proc::Stat::read(pid).unwrap().state == 'D');
    let refused = userfaultfd_in(pid).map(drop).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::DoesNotStop);
    let thread = format!("thread {pid} of process {pid} did not stop within 10 s: it is in state D");
    assert!(refused.to_string().contains(&thread), "{refused}");
    assert!(!refused.to_string().contains("traced by"), "{refused}");
    // Only root is told where in the kernel it waits.
    let is_told = !proc::call::kernel_functions(pid).is_empty();
    assert_eq!(refused.to_string().contains("in the kernel's functions"), is_told, "{refused}");
    drop(steady.child.stdin.take());
    steady.goes_on();
    drop(userfaultfd_in(pid).unwrap());
    steady.goes_on();
}

#[test]
fn a_thread_with_another_tracer_is_not_passed_over() {
    let Some(mut steady) = Steady::start("threads") else { skip!("no C compiler") };
    steady.goes_on();
    let first = proc::live_thread(steady.pid()).unwrap();
    let other = proc::threads(steady.pid()).unwrap().into_iter().rfind(|&thread| thread != first).unwrap();
    let (seized, is_seized) = mpsc::channel();
    let (done, is_done) = mpsc::channel::<()>();
    let tracer = std::thread::spawn(move || {
        let other = nix::unistd::Pid::from_raw(other);
        seized.send(nix::sys::ptrace::seize(other, nix::sys::ptrace::Options::empty())).unwrap();
        let _ = is_done.recv();
    });
    is_seized.recv().unwrap().unwrap();
    // The traced thread runs, and would see the descriptor.
    let refused = userfaultfd_in(steady.pid()).map(drop);
    // The kernel detaches the tracees of a thread that exits, without the stop that would interrupt a
    // system call.
    drop(done);
    tracer.join().unwrap();
    wait_until("the kernel detaches the thread", || proc::Status::read(other).unwrap().tracer_pid == 0);
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::NotPermitted);
    steady.goes_on();
    drop(userfaultfd_in(steady.pid()).unwrap());
    steady.goes_on();
}

#[test]
fn a_main_thread_that_exits_meanwhile_is_no_hindrance() {
    for _ in 0..10 {
        // It exits as soon as it has reported that it is ready.
        let Some(mut steady) = Steady::start("threads") else { skip!("no C compiler") };
        let descriptor = userfaultfd_in(steady.pid());
        assert!(descriptor.is_ok(), "{descriptor:?}");
        drop(descriptor);
        steady.goes_on();
        let mut steady = Steady::start("threads").expect("as before");
        let call = inject::Call { number: libc::SYS_getpid, arguments: [0; 6] };
        let done = inject::system_calls(Process::find(steady.pid()).unwrap(), vec![call]);
        assert!(done.is_ok(), "{done:?}");
        steady.goes_on();
    }
}

#[test]
fn a_blocked_reader_is_not_interrupted() {
    for mode in ["read", "strict"] {
        let Some(mut steady) = Steady::start(mode) else { skip!("no C compiler") };
        let mut input = steady.child.stdin.take().unwrap();
        for byte in 0..200 {
            let descriptor = userfaultfd_in(steady.pid());
            assert!(descriptor.is_ok(), "{mode}: {descriptor:?}");
            input.write_all(&[byte]).unwrap();
        }
        drop(input);
        let status = steady.child.wait().unwrap();
        assert_eq!(status.code(), Some(0), "{mode}: {status}");
        assert_eq!(steady.rounds(), 200);
    }
}

#[test]
fn a_stopped_process_stays_stopped() {
    for mode in ["sleep", "threads"] {
        let Some(mut steady) = Steady::start(mode) else { skip!("no C compiler") };
        steady.goes_on();
        steady.signal(libc::SIGSTOP);
        let threads = || proc::threads(steady.pid()).unwrap();
        let all_stopped =
            || threads().iter().all(|&thread| matches!(proc::Stat::read(thread).unwrap().state, 'T' | 'Z'));
        while !all_stopped() {
            std::thread::yield_now();
        }
        for _ in 0..20 {
            userfaultfd_in(steady.pid()).unwrap();
        }
        let deadline = Instant::now() + patience();
        while !all_stopped() {
            assert!(Instant::now() < deadline, "it has been woken");
        }
        let before = steady.rounds();
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(steady.rounds(), before, "it runs");
        assert!(steady.is_stopped() || mode == "threads");
        steady.signal(libc::SIGCONT);
        steady.goes_on();
    }
}

#[test]
fn a_process_that_cannot_be_tracked_is_refused_with_the_reason() {
    let Some(steady) = Steady::start("userfaultfd") else { skip!("no C compiler") };
    let refused = AddressSpace::attach(Process::find(steady.pid()).unwrap(), Mechanism::PagemapScan).err();
    assert_eq!(refused.unwrap().kind(), ErrorKind::UsesUserfaultfd);

    let mut full = Steady::start("full").unwrap();
    let refused = AddressSpace::attach(Process::find(full.pid()).unwrap(), Mechanism::Adaptive).err();
    let refused = refused.unwrap();
    assert_eq!(refused.kind(), ErrorKind::Refused);
    assert!(refused.to_string().contains("prlimit"), "{refused}");
    let refused = AddressSpace::attach(Process::find(full.pid()).unwrap(), Mechanism::Mprotect).err();
    assert!(refused.unwrap().to_string().contains("only a program's own memory"));
    full.goes_on();

    let mut twice = Steady::start("sleep").unwrap();
    let first = AddressSpace::attach(Process::find(twice.pid()).unwrap(), Mechanism::PagemapScan).unwrap();
    let refused = AddressSpace::attach(Process::find(twice.pid()).unwrap(), Mechanism::PagemapScan).err();
    assert_eq!(refused.unwrap().kind(), ErrorKind::UsesUserfaultfd);
    drop(first);
    // A child that another thread is just starting has the descriptor until it executes its program.
    wait_until("the descriptor to be closed", || {
        AddressSpace::attach(Process::find(twice.pid()).unwrap(), Mechanism::PagemapScan).is_ok()
    });
    twice.goes_on();
}

#[test]
fn a_32_bit_program_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let Some(mut child) = pause_32(directory.path()) else { return };
    let refused = AddressSpace::attach(Process::find(child.id() as i32).unwrap(), Mechanism::PagemapScan).err();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(refused.unwrap().kind(), ErrorKind::Is32Bit);
}

/// Not a test by itself: the process of the next test that is killed.
#[test]
fn injects_until_it_is_killed() {
    let Ok(pid) = std::env::var("PAGEMARK_INJECT_INTO") else { return };
    let pid = pid.parse().unwrap();
    println!("\nbegins");
    let mut held = Vec::new();
    loop {
        // The attach is refused while a helper process still runs whose parent was killed.
        if let Ok(descriptor) = userfaultfd_in(pid) {
            held.push(descriptor);
        }
        held.truncate(16);
    }
}

#[test]
fn killed_at_any_instant_it_leaves_the_target_alone() {
    for mode in ["sleep", "threads", "compute"] {
        let Some(mut steady) = Steady::start(mode) else { skip!("no C compiler") };
        let rounds = repetitions(20u64, 60);
        for round in 0..rounds {
            let mut injector = Command::new(std::env::current_exe().unwrap());
            injector.args(["--exact", "injects_until_it_is_killed", "--nocapture"]).process_group(0);
            injector.env("PAGEMARK_INJECT_INTO", steady.pid().to_string()).stdout(Stdio::piped());
            let mut injector = injector.spawn().unwrap();
            let mut lines = BufReader::new(injector.stdout.take().unwrap()).lines();
            while lines.next().unwrap().unwrap() != "begins" {}
            // The instants are spread over somewhat more than the time of an injection.
            std::thread::sleep(Duration::from_micros(round * 2220 / rounds % 2000));
            injector.kill().unwrap();
            injector.wait().unwrap();
            steady.goes_on();
        }
        // The last helper process ends soon.
        let deadline = Instant::now() + patience();
        while proc::threads(steady.pid())
            .unwrap()
            .iter()
            .any(|&thread| proc::Status::read(thread).is_ok_and(|status| status.tracer_pid != 0))
        {
            assert!(Instant::now() < deadline, "it is still traced");
        }
        steady.goes_on();
    }
}

#[test]
fn a_frozen_tree_stops_and_resumes() {
    for mode in ["sleep", "threads", "signals", "compute"] {
        let Some(mut steady) = Steady::start(mode) else { skip!("no C compiler") };
        for _ in 0..repetitions(15, 50) {
            steady.goes_on();
            let freezer = Freezer::freeze(Process::find(steady.pid()).unwrap()).unwrap();
            let before = steady.rounds();
            let registers = freezer.registers().unwrap();
            let live = proc::threads(steady.pid()).unwrap();
            assert!(registers.len() + 1 >= live.len() && !registers.is_empty());
            assert!(registers.iter().all(|thread| thread.general.len() == size_of::<libc::user_regs_struct>()));
            std::thread::sleep(Duration::from_millis(2));
            assert_eq!(steady.rounds(), before, "{mode}: it runs");
            freezer.thaw().unwrap();
        }
        drop(Freezer::freeze(Process::find(steady.pid()).unwrap()).unwrap());
        steady.goes_on();
    }
}

/// Signals of this number are queued, so that each of them counts.
#[test]
fn a_freeze_loses_no_signal_where_it_fails() {
    const SIGNALS: u64 = 20_000;
    let Some(steady) = Steady::start("queued") else { skip!("no C compiler") };
    let send = || {
        for _ in 0..SIGNALS {
            // SAFETY: as in `Steady::signal`.
            while unsafe { libc::kill(steady.pid(), libc::SIGRTMIN()) } < 0 {
                std::thread::yield_now();
            }
        }
    };
    let pending = || proc::Status::read(steady.pid()).unwrap().pending_signals;
    // A thread that is traced already is not stopped, after the first one was asked to.
    let threads = proc::threads(steady.pid()).unwrap();
    let [first, other] = threads[..] else { panic!("{threads:?}") };
    assert_eq!(first, steady.pid());
    let (seized, is_seized) = mpsc::channel();
    let (_end, is_over) = mpsc::channel::<()>();
    std::thread::spawn(move || {
        seized.send(ptrace::seize(Pid::from_raw(other), ptrace::Options::empty())).unwrap();
        let _ = is_over.recv();
    });
    is_seized.recv().unwrap().unwrap();
    std::thread::scope(|scope| {
        let sender = scope.spawn(send);
        while !sender.is_finished() {
            assert_eq!(
                Freezer::freeze(Process::find(steady.pid()).unwrap()).unwrap_err().kind(),
                ErrorKind::NotPermitted
            );
        }
    });
    wait_until("all signals", || pending() == 0);
    let before = steady.rounds();
    wait_until("the last handler", || steady.rounds() == before && proc::Stat::read(first).unwrap().state == 'S');
    assert_eq!(steady.rounds(), SIGNALS);
}

#[test]
fn writes_of_another_process_are_found_and_read() {
    for mechanism in mechanisms() {
        let Some(mut steady) = Steady::start("threads") else { skip!("no C compiler") };
        let mut space = AddressSpace::attach(Process::find(steady.pid()).unwrap(), mechanism).unwrap();
        // A copy that takes over collected pages only.
        let mut copy = std::collections::BTreeMap::new();
        for _ in 0..20 {
            steady.goes_on();
            let freezer = Freezer::freeze(Process::find(steady.pid()).unwrap()).unwrap();
            let mut dirty = RangeSet::new();
            space.collect(Moment::Running, &mut dirty).unwrap();
            let ranges: Vec<_> = dirty.iter().collect();
            let mut bytes = vec![0; dirty.total_bytes().to_usize()];
            let missing = space.read(&ranges, &mut bytes).unwrap();
            let addresses = ranges.iter().flat_map(AddressRangeExt::pages).map(PageNumber::address);
            for (address, page) in addresses.zip(bytes.chunks(PAGE_SIZE)) {
                if missing.contains(address) {
                    copy.remove(&address);
                } else {
                    copy.insert(address, page.to_vec());
                }
            }
            // All memory, read at once.
            let populated = space.populated();
            let ranges: Vec<_> = populated.iter().collect();
            let mut bytes = vec![0; populated.total_bytes().to_usize()];
            let missing = space.read(&ranges, &mut bytes).unwrap();
            let addresses = ranges.iter().flat_map(AddressRangeExt::pages).map(PageNumber::address);
            for (address, page) in addresses.zip(bytes.chunks(PAGE_SIZE)) {
                if !missing.contains(address) {
                    assert_oracle!(
                        copy.get(&address).is_some_and(|copied| copied == page),
                        "{mechanism}: a write to {address:#x} was missed"
                    );
                }
            }
            freezer.thaw().unwrap();
            space.begin_interval().unwrap();
        }
        steady.child.kill().unwrap();
        steady.child.wait().unwrap();
        assert!(space.collect(Moment::Running, &mut RangeSet::new()).is_err_and(|error| error.is_gone()));
        assert!(space.read(&[], &mut []).is_err_and(|error| error.is_gone()));
    }
}

#[test]
fn another_program_in_the_same_process_is_not_taken_for_the_first() {
    let Some(program) = steady() else { skip!("no C compiler") };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("rounds");
    fs::write(&path, [0; 4096]).unwrap();
    // A shell that executes the trackee on request.
    let mut child = Command::new("sh")
        .arg("-c")
        .arg(format!("read line; exec {} sleep {}", program.display(), path.display()))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = child.id() as i32;
    let mut space = AddressSpace::attach(Process::find(pid).unwrap(), Mechanism::Adaptive).unwrap();
    space.collect(Moment::Running, &mut RangeSet::new()).unwrap();
    child.stdin.take().unwrap().write_all(b"go\n").unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    assert!(space.collect(Moment::Running, &mut RangeSet::new()).is_err_and(|error| error.is_gone()));
    let mut anew = AddressSpace::attach(Process::find(pid).unwrap(), Mechanism::Adaptive).unwrap();
    anew.collect(Moment::Running, &mut RangeSet::new()).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_program_that_executes_another_one_is_another_space() {
    for mechanism in mechanisms() {
        let mut child =
            Command::new("sh").args(["-c", "read line; exec sleep 60"]).stdin(Stdio::piped()).spawn().unwrap();
        let pid = child.id() as i32;
        let mut target =
            ProcessTarget::attach(Process::find(pid).unwrap(), mechanism, Arc::new(RegisterSaver)).unwrap();
        let shell = target.spaces().unwrap();
        let mut dirty = RangeSet::new();
        target.collect(shell[0], &mut dirty).unwrap();
        child.stdin.take().unwrap().write_all(b"go\n").unwrap();
        while proc::Stat::read(pid).unwrap().command != "sleep" {
            std::thread::sleep(Duration::from_millis(1));
        }
        // The collected memory is unmapped before it is copied.
        let ranges: Vec<_> = dirty.iter().collect();
        let missing = target.read(shell[0], &ranges, &mut vec![0; dirty.total_bytes().to_usize()]).unwrap();
        assert_eq!(missing, dirty, "{mechanism}");
        let mut dirty = RangeSet::new();
        target.collect(shell[0], &mut dirty).unwrap();
        assert!(dirty.is_empty(), "{mechanism}");
        let sleep = target.spaces().unwrap();
        assert_eq!(sleep.len(), 1);
        assert_ne!(sleep, shell, "{mechanism}: its pages would be taken for the shell's");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(target.spaces().is_err_and(|error| error.is_gone()));
    }
}

#[test]
fn a_tree_that_starts_programs_all_the_time_is_saved() {
    let script = "while :; do sh -c 'sh -c true; exec sh -c true'; done";
    let mut child = Command::new("sh").args(["-c", script]).stdin(Stdio::null()).spawn().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let repository = Repository::create(&directory.path().join("repository")).unwrap();
    let target = ProcessTarget::attach(
        Process::find(child.id() as i32).unwrap(),
        Mechanism::choose(Scope::Process),
        Arc::new(RegisterSaver),
    )
    .unwrap();
    let mut job = Job::new(target, repository, JobOptions::new("programs"));
    let taken: Result<Vec<_>, _> = (0..60).map(|_| job.checkpoint()).collect();
    job.detach();
    let ended = child.try_wait().unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(taken.is_ok(), "{taken:?}");
    assert_eq!(ended, None);
}

#[test]
fn swapped_memory_stays_swapped_after_it_was_read() {
    const BYTES: u64 = 24 << 20;
    let Some(_swap) = Swap::on() else { skip!("there is no zram device to swap to, or no right to use it") };
    // The program fills each page with its number, and swaps out three quarters of the pages.
    let program = "import ctypes, mmap, sys
memory = mmap.mmap(-1, 24 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for page in range(len(memory) // 4096):
    memory[page * 4096:page * 4096 + 8] = (page + 1).to_bytes(8, 'little')
PAGEOUT = 21
for part in (0, 1, 3):
    memory.madvise(PAGEOUT, part * len(memory) // 4, len(memory) // 4)
print(ctypes.addressof(ctypes.c_char.from_buffer(memory)), flush=True)
sys.stdin.read()";
    let mut command = Command::new("python3");
    let mut child =
        command.args(["-c", program]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("python3 starts");
    let pid = child.id() as i32;
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let start = Address::new(line.trim().parse().unwrap());
    let swapped_bytes = || proc::Status::read(pid).unwrap().swapped_bytes;
    let before = swapped_bytes();
    assert!(before >= BYTES / 2, "only {before} bytes were swapped out");

    let mut space = AddressSpace::attach(Process::find(pid).unwrap(), Mechanism::Full).unwrap();
    space.collect(Moment::Running, &mut RangeSet::new()).unwrap();
    // Single pages, and then long ranges.
    for (pages_at_once, step) in [(1, 2), (3000, 3000)] {
        let (first, all_pages) = (start.page(), ByteCount::new(BYTES).pages_rounded_down());
        let ranges: Vec<_> = (0..all_pages)
            .step_by(step)
            .map(|page| (first + page..first + (page + pages_at_once).min(all_pages)).addresses())
            .collect();
        let mut buffer = vec![0xee; ranges.iter().map(|range| range.byte_count().to_usize()).sum()];
        assert!(space.read(&ranges, &mut buffer).unwrap().is_empty());
        let numbers = ranges.iter().flat_map(AddressRangeExt::pages);
        for (number, content) in numbers.zip(buffer.chunks(PAGE_SIZE)) {
            assert_oracle_eq!(content[..8], (number - first + 1).to_ne_bytes(), "the content of page {number:#x}");
        }
        let after = swapped_bytes();
        // No more than is read at once may be left in memory, nor what others' reading has brought in with
        // it.
        assert!(after + (1 << 20) >= before, "{before} bytes were swapped out, now {after}");
        assert!(after <= before + (1 << 20), "more is swapped out than before: {before}, {after}");
    }
    child.kill().unwrap();
    child.wait().unwrap();
}
