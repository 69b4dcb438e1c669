//! A virtual machine monitor with the library, under this host's KVM. The oracle is what the test
//! has the machine write, or the monitor's memory.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use pagemark_kvm_log::kernel::{self, Keeping, Lack};
use pagemark_kvm_log::machine::Refusal;
use pagemark_kvm_log::protocol::{LIBRARY, RINGS, Request, SOCKET, Status, receive_greeting, receive_reply};
use pagemark_linux::{proc, ptrace};
use pagemark_testing::{assert_oracle, assert_oracle_eq, directory_until_exit, repetitions, skip, wait_for};

const PAGE: u64 = 4096;
const LOGGED: u32 = 1;

/// The library, which Cargo puts beside the tests.
fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let library = test.parent().unwrap().join(LIBRARY);
    assert!(library.exists(), "{} was not built", library.display());
    library
}

/// The monitor's program; None where KVM makes no machine, or has no log.
fn monitor_program() -> Option<&'static Path> {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    let made = PROGRAM.get_or_init(|| {
        if let Err(lack) = kernel::check(Keeping::Log) {
            assert!(!matches!(lack, Lack::Log), "this KVM has no log");
            return None;
        }
        let program = directory_until_exit().join("monitor");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/monitor.c");
        let mut compiler = Command::new("cc");
        compiler.args(["-O1", "-Wall", "-Werror", "-pthread", source, "-o"]).arg(&program);
        assert!(compiler.status().ok()?.success(), "monitor.c does not compile");
        Some(program)
    });
    made.as_deref()
}

/// What this host's KVM can keep.
fn keepings() -> Vec<Keeping> {
    [Keeping::Log, Keeping::Rings].into_iter().filter(|&keeping| kernel::check(keeping).is_ok()).collect()
}

/// A monitor that runs, killed when dropped.
struct Monitor {
    child: Child,
    answers: BufReader<ChildStdout>,
    directory: tempfile::TempDir,
}

impl Drop for Monitor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Monitor {
    fn start(program: &Path) -> Monitor {
        Monitor::keeping(program, Keeping::Log)
    }

    fn keeping(program: &Path, keeping: Keeping) -> Monitor {
        let (monitor, started) = Monitor::start_with(program, &[], keeping);
        assert_eq!(started, Ok(Vec::new()));
        monitor
    }

    fn start_with(program: &Path, arguments: &[&str], keeping: Keeping) -> (Monitor, Result<Vec<u64>, i32>) {
        let directory = tempfile::tempdir().unwrap();
        let mut command = Command::new(program);
        command.env("LD_PRELOAD", library()).env(SOCKET, directory.path().join("socket")).env_remove(RINGS);
        if keeping == Keeping::Rings {
            command.env(RINGS, "4096");
        }
        let mut child = command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        let mut monitor = Monitor { child, answers, directory };
        let started = monitor.answer();
        (monitor, started)
    }

    fn answer(&mut self) -> Result<Vec<u64>, i32> {
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        let mut words = line.split_whitespace();
        let kind = words.next().expect("the monitor answers");
        let numbers: Vec<u64> = words.map(|word| word.parse().unwrap()).collect();
        if kind == "ok" { Ok(numbers) } else { Err(numbers[0] as i32) }
    }

    fn begin(&mut self, command: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{command}").unwrap();
    }

    fn run(&mut self, command: &str) -> Result<Vec<u64>, i32> {
        self.begin(command);
        self.answer()
    }

    fn slot(&mut self, slot: u32, address: u64, pages: u64, buffer: usize, flags: u32) {
        assert_eq!(self.run(&format!("slot {slot} {address:x} {pages} {buffer} {flags}")), Ok(Vec::new()));
    }

    fn write(&mut self, address: u64, count: u64, stride: u64) {
        assert_eq!(self.run(&format!("write {address:x} {count} {stride}")), Ok(Vec::new()));
    }

    fn get(&mut self, slot: u32, pages: u64) -> BTreeSet<u64> {
        self.run(&format!("get {slot} {pages}")).unwrap().into_iter().collect()
    }

    fn buffer(&mut self, index: usize) -> u64 {
        self.run("where").unwrap()[index]
    }

    fn maps(&self) -> String {
        std::fs::read_to_string(format!("/proc/{}/maps", self.child.id())).unwrap()
    }

    /// How many views there are.
    fn views(&self) -> usize {
        let maps = self.maps();
        let reserved: Vec<_> = maps.lines().map(|line| line.contains("/memfd:pagemark-views")).collect();
        let (first, last) = (reserved.iter().position(|is| *is), reserved.iter().rposition(|is| *is));
        first.zip(last).map_or(0, |(first, last)| reserved[first..=last].iter().filter(|is| !**is).count())
    }

    fn connect(&self) -> Log {
        let stream = wait_for("the library", || UnixStream::connect(self.directory.path().join("socket")).ok());
        Log(stream)
    }

    /// A connection whose log is read.
    fn log(&self) -> Log {
        let mut log = self.connect();
        assert_eq!(receive_greeting(&mut log.0).unwrap(), Status::Done);
        assert_eq!(log.ask(Request::Begin).0, Status::Done);
        log
    }
}

struct Log(UnixStream);

impl Log {
    fn ask(&mut self, request: Request) -> (Status, BTreeSet<u64>) {
        request.send(&mut self.0).unwrap();
        let (status, parts) = receive_reply(&mut self.0).unwrap();
        let pages = parts.iter().flat_map(|part| {
            let is_set = |page: &u64| part.pages[(page / 64) as usize] & 1 << (page % 64) != 0;
            (0..part.pages.len() as u64 * 64).filter(is_set).map(|page| part.host_address / PAGE + page)
        });
        (status, pages.collect())
    }

    /// The numbers of the pages within a buffer.
    fn collect(&mut self, buffer: u64) -> BTreeSet<u64> {
        let (status, pages) = self.ask(Request::Collect);
        assert_eq!(status, Status::Done);
        pages.into_iter().filter_map(|page| page.checked_sub(buffer / PAGE)).filter(|page| *page < 1024).collect()
    }
}

fn pages(of: impl IntoIterator<Item = u64>) -> BTreeSet<u64> {
    of.into_iter().collect()
}

#[test]
fn what_the_machine_writes_is_collected_once_in_each_slot() {
    let Some(program) = monitor_program() else { skip!("no machine under KVM") };
    keepings().into_iter().for_each(|keeping| each_slot_is_collected_once(Monitor::keeping(program, keeping)));
}

fn each_slot_is_collected_once(mut monitor: Monitor) {
    monitor.slot(1, 0x1000_0000, 300, 1, 0);
    let (one, two) = (monitor.buffer(1), monitor.buffer(2));
    monitor.write(0x1000_0000, 20, 2);
    let mut log = monitor.log();
    assert_eq!(log.collect(one), pages([]), "what was written before is not in it");
    monitor.write(0x1000_0000, 10, 3);
    // A slot that is new, and one that is an alias.
    monitor.slot(2, 0x2000_0000, 1000, 2, 0);
    monitor.slot(3, 0x3000_0000, 300, 1, 0);
    monitor.write(0x2000_0000, 1000, 1);
    monitor.write(0x3000_0000 + 299 * PAGE, 1, 1);
    // What the monitor writes itself is not in KVM's log.
    monitor.run("poke 1 17").unwrap();
    request_and_compare(&mut log, one, two, pages((0..10).map(|page| page * 3).chain([299])), pages(0..1000));
    request_and_compare(&mut log, one, two, pages([]), pages([]));
    // It is found again.
    monitor.write(0x2000_0000 + 5 * PAGE, 2, 1);
    request_and_compare(&mut log, one, two, pages([]), pages([5, 6]));
    // Moved, and dropped: nothing of before is lost.
    monitor.write(0x2000_0000, 2, 1);
    monitor.slot(2, 0x2800_0000, 1000, 2, 0);
    monitor.write(0x2800_0000 + 8 * PAGE, 1, 1);
    monitor.write(0x1000_0000 + 100 * PAGE, 1, 1);
    monitor.slot(1, 0, 0, 0, 0);
    request_and_compare(&mut log, one, two, pages([100]), pages([0, 1, 8]));
    // Longer than it was.
    monitor.slot(1, 0x1000_0000, 600, 1, 0);
    monitor.write(0x1000_0000 + 599 * PAGE, 1, 1);
    request_and_compare(&mut log, one, two, pages([599]), pages([]));
    drop(log);
    monitor.write(0x1000_0000, 4, 1);
    let mut log = wait_for("the library to begin anew", || {
        let mut log = monitor.connect();
        (receive_greeting(&mut log.0).unwrap() == Status::Done).then_some(log)
    });
    assert_eq!(log.ask(Request::Collect).0, Status::Refused(Refusal::NotBegun));
    assert_eq!(log.ask(Request::Begin).0, Status::Done);
    request_and_compare(&mut log, one, two, pages([]), pages([]));
}

fn request_and_compare(log: &mut Log, one: u64, two: u64, expected_one: BTreeSet<u64>, expected_two: BTreeSet<u64>) {
    let (status, found) = log.ask(Request::Collect);
    assert_eq!(status, Status::Done);
    for (buffer, expected) in [(one, expected_one), (two, expected_two)] {
        let first = buffer / PAGE;
        let within: BTreeSet<u64> =
            found.iter().filter_map(|page| page.checked_sub(first)).filter(|page| *page < 1024).collect();
        assert_eq!(within, expected, "in the buffer at {buffer:#x}");
    }
}

#[test]
fn the_monitors_own_log_is_as_without_the_library() {
    let Some(program) = monitor_program() else { skip!("no machine under KVM") };
    for (keeping, mode) in keepings().into_iter().flat_map(|keeping| [0, 1, 3].map(|mode| (keeping, mode))) {
        let mut monitor = Monitor::keeping(program, keeping);
        monitor.run(&format!("mode {mode}")).unwrap();
        monitor.slot(1, 0x1000_0000, 300, 1, LOGGED);
        let one = monitor.buffer(1);
        let first = if mode == 3 { pages(0..300) } else { pages([]) };
        assert_eq!(monitor.get(1, 300), first);
        if mode != 0 {
            monitor.run("clear 1 0 300").unwrap();
        }
        monitor.write(0x1000_0000, 3, 1);
        let mut log = monitor.log();
        monitor.write(0x1000_0000 + 10 * PAGE, 3, 1);
        // The other reader takes them, and the monitor is told all the same.
        assert!(log.collect(one).is_superset(&pages([10, 11, 12])));
        let expected = pages([0, 1, 2, 10, 11, 12]);
        assert_eq!(monitor.get(1, 300), expected, "mode {mode}");
        if mode == 0 {
            assert_eq!(monitor.get(1, 300), pages([]), "the read has cleared");
        } else {
            assert_eq!(monitor.get(1, 300), expected, "a read does not clear");
            monitor.run("clear 1 0 64").unwrap();
            assert_eq!(monitor.get(1, 300), pages([]));
        }
        // And the other way round.
        monitor.write(0x1000_0000 + 70 * PAGE, 2, 1);
        assert_eq!(monitor.get(1, 300), pages([70, 71]));
        if mode != 0 {
            monitor.run("clear 1 64 236").unwrap();
        }
        assert_eq!(monitor.get(1, 300), pages([]));
        assert_eq!(log.collect(one), pages([70, 71]), "mode {mode}");
        // As the kernel refuses it.
        assert_eq!(monitor.run("clear 1 1 64"), Err(libc::EINVAL));
        assert_eq!(monitor.run("clear 1 0 65"), Err(libc::EINVAL));
        assert_eq!(monitor.run("get 9 1"), Err(libc::ENOENT));
        // The monitor's log ends and begins; the other one goes on.
        monitor.write(0x1000_0000 + 90 * PAGE, 1, 1);
        monitor.slot(1, 0x1000_0000, 300, 1, 0);
        assert_eq!(log.collect(one), pages([90]));
        monitor.slot(1, 0x1000_0000, 300, 1, LOGGED);
        let again = if mode == 3 { pages(0..300) } else { pages([]) };
        assert_eq!(monitor.get(1, 300), again, "mode {mode}");
        if mode != 0 {
            monitor.run("clear 1 0 300").unwrap();
        }
        monitor.write(0x1000_0000 + 91 * PAGE, 1, 1);
        drop(log);
        // Whether the library has noticed that or not.
        assert_eq!(monitor.get(1, 300), pages([91]));
    }
}

#[test]
fn neither_loses_a_write_while_the_machine_runs() {
    let Some(program) = monitor_program() else { skip!("no machine under KVM") };
    for keeping in keepings() {
        compare_copies(program, keeping, false);
    }
}

/// Stops all threads of a process again and again, as a tracer does, until it is dropped.
struct Stops {
    has_ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<u32>>,
}

impl Stops {
    fn of(pid: i32) -> Stops {
        let has_ended = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&has_ended);
        let stop_all = move || {
            let mut stops = 0;
            while !ends.load(Ordering::Relaxed) {
                for thread in proc::threads(pid).unwrap_or_default() {
                    // One that has ended meanwhile is not traced.
                    if ptrace::seize(thread, 0).is_ok() {
                        let stopped = ptrace::interrupt(thread).and_then(|()| ptrace::wait_trap(thread, None));
                        stops += u32::from(stopped == Ok(true));
                        let _ = ptrace::detach(thread);
                    }
                }
            }
            stops
        };
        Stops { has_ended, thread: Some(std::thread::spawn(stop_all)) }
    }

    /// Ends them. Returns how many there were.
    fn end(&mut self) -> u32 {
        self.has_ended.store(true, Ordering::Relaxed);
        self.thread.take().map_or(0, |thread| thread.join().unwrap())
    }
}

impl Drop for Stops {
    fn drop(&mut self) {
        self.end();
    }
}

/// Since Linux 6.16, an interrupted reset of rings forgets pages, and reports success.
#[test]
fn neither_loses_a_write_while_a_tracer_stops_all_threads() {
    let Some(program) = monitor_program() else { skip!("no machine under KVM") };
    for keeping in keepings() {
        (0..repetitions(3, 30)).for_each(|_| compare_copies(program, keeping, true));
    }
}

/// A machine writes, and the monitor and Pagemark copy what their logs say, perhaps while a tracer
/// stops the threads of the monitor.
fn compare_copies(program: &Path, keeping: Keeping, is_stopped: bool) {
    for (mode, seed) in [(0, 1), (1, 2), (3, 3)] {
        let mut monitor = Monitor::keeping(program, keeping);
        monitor.run(&format!("mode {mode}")).unwrap();
        monitor.slot(2, 0x2000_0000, 1024, 2, LOGGED);
        let two = monitor.buffer(2);
        let memory = File::open(format!("/proc/{}/mem", monitor.child.id())).unwrap();
        let mut log = monitor.log();
        let mut copy = vec![0u8; 1024 * PAGE as usize];
        memory.read_exact_at(&mut copy, two).unwrap();
        let copy_of = |log: &mut Log, copy: &mut [u8]| {
            let found = log.collect(two);
            for page in &found {
                let place = (page * PAGE) as usize..((page + 1) * PAGE) as usize;
                memory.read_exact_at(&mut copy[place], two + page * PAGE).unwrap();
            }
            found.len()
        };
        // The monitor's own copy begins with what the machine's first load writes to all of the memory.
        monitor.write(0x2000_0000, 1024, 1);
        monitor.run("follow 1").unwrap();
        monitor.run(&format!("load {seed}")).unwrap();
        let mut collected = 0;
        let mut stops = is_stopped.then(|| Stops::of(monitor.child.id() as i32));
        for round in 0..6 {
            monitor.begin(if round % 2 == 0 { "follow 40" } else { "drop 60" });
            (0..30).for_each(|_| collected += copy_of(&mut log, &mut copy));
            monitor.answer().unwrap();
        }
        assert!(stops.as_mut().is_none_or(|stops| stops.end() > 0), "no thread was stopped");
        // The monitor compares its own copy.
        assert_oracle_eq!(monitor.run("settle"), Ok(Vec::new()), "mode {mode}: what the monitor has found");
        collected += copy_of(&mut log, &mut copy);
        assert!(collected > 0);
        let mut now = vec![0u8; copy.len()];
        memory.read_exact_at(&mut now, two).unwrap();
        let differs = copy.chunks(PAGE as usize).zip(now.chunks(PAGE as usize)).position(|(one, other)| one != other);
        assert_oracle_eq!(differs, None, "mode {mode}: a page whose write was missed");
        assert_eq!(log.collect(two), pages([]));
    }
}

#[test]
fn shared_memory_is_reached_by_a_view_that_goes_with_its_slot() {
    let Some(program) = monitor_program() else { skip!("no machine under KVM") };
    let mut monitor = Monitor::start(program);
    // Private memory has none.
    monitor.slot(1, 0x1000_0000, 300, 1, 0);
    assert!(!monitor.maps().contains("pagemark-views"));
    monitor.slot(2, 0x2000_0000, 1000, 3, 0);
    monitor.slot(3, 0x3000_0000, 300, 3, 0);
    assert_eq!(monitor.views(), 2);
    let shared = monitor.buffer(3);
    let memory = File::open(format!("/proc/{}/mem", monitor.child.id())).unwrap();
    let byte = |page: u64| {
        let mut byte = [0];
        memory.read_exact_at(&mut byte, shared + page * PAGE).unwrap();
        byte[0]
    };
    let mut log = monitor.log();
    monitor.write(0x2000_0000 + 7 * PAGE, 2, 1);
    monitor.run("poke 3 7").unwrap();
    monitor.write(0x3000_0000 + 7 * PAGE, 1, 1);
    // It is one memory, and reported where the monitor has it.
    assert_eq!((byte(7), byte(8), byte(9)), (4, 2, 1));
    assert_eq!(log.collect(shared), pages([7, 8]));
    // What tells the monitor of accesses would not see those of the machine.
    assert_eq!(monitor.run("protect 3"), Err(libc::EOPNOTSUPP));
    assert_ne!(monitor.run("protect 2"), Err(libc::EOPNOTSUPP));
    // Moved and logged, it keeps the view; other memory is refused as the kernel refuses it.
    monitor.slot(2, 0x2800_0000, 1000, 3, LOGGED);
    assert_eq!(monitor.run("slot 2 28000000 1000 2 1"), Err(libc::EINVAL));
    assert_eq!(monitor.run("slot 2 28000000 900 3 1"), Err(libc::EINVAL));
    monitor.write(0x2800_0000 + 999 * PAGE, 1, 1);
    assert_eq!(log.collect(shared), pages([999]));
    assert_eq!(monitor.views(), 2);
    // Nobody else sees what is written until the drop.
    monitor.slot(3, 0, 0, 0, 0);
    assert_eq!(log.collect(shared), pages(0..320));
    assert_eq!(monitor.views(), 1);
    monitor.slot(2, 0, 0, 0, 0);
    assert_eq!(monitor.views(), 0);
    assert_ne!(monitor.run("protect 3"), Err(libc::EOPNOTSUPP));
    monitor.slot(2, 0x2000_0000, 1000, 3, 0);
    monitor.write(0x2000_0000 + 9 * PAGE, 1, 1);
    assert_eq!((byte(9), monitor.views()), (2, 1));
    // A slot that is refused leaves no view.
    assert_eq!(monitor.run("slot 5 20000000 1000 3 0"), Err(libc::EEXIST));
    assert_eq!(monitor.views(), 1);
    assert_eq!(monitor.run("fork"), Ok(Vec::new()));
}

#[test]
fn no_view_is_made_while_views_are_kept() {
    let Some(program) = monitor_program() else { skip!("no machine under KVM") };
    let mut monitor = Monitor::start(program);
    let mut log = monitor.connect();
    assert_eq!(receive_greeting(&mut log.0).unwrap(), Status::Done);
    assert_eq!(log.ask(Request::KeepViews).0, Status::Refused(Refusal::NotBegun));
    assert_eq!(log.ask(Request::Begin).0, Status::Done);
    monitor.slot(2, 0x2000_0000, 1000, 3, 0);
    let shared = monitor.buffer(3);
    assert_eq!(monitor.views(), 1);
    assert_eq!(log.ask(Request::KeepViews).0, Status::Done);
    // It keeps its view as it moves; a new slot has none, and is logged all the same.
    monitor.slot(2, 0x2800_0000, 1000, 3, 0);
    monitor.slot(3, 0x3000_0000, 300, 3, 0);
    assert_eq!(monitor.views(), 1);
    log.collect(shared);
    monitor.write(0x3000_0000 + 5 * PAGE, 1, 1);
    monitor.write(0x2800_0000 + 6 * PAGE, 1, 1);
    assert_eq!(log.collect(shared), pages([5, 6]));
    monitor.slot(2, 0, 0, 0, 0);
    assert_eq!(monitor.views(), 0);
    assert_eq!(log.ask(Request::ReleaseViews).0, Status::Done);
    monitor.slot(2, 0x2000_0000, 1000, 3, 0);
    assert_eq!(monitor.views(), 1);
    // A Pagemark that is gone keeps nothing.
    assert_eq!(log.ask(Request::KeepViews).0, Status::Done);
    drop(log);
    let mut slot = 4;
    wait_for("the library to notice it", || {
        monitor.slot(slot, 0x1_0000_0000 + u64::from(slot) * 0x1000_0000, 300, 3, 0);
        slot += 1;
        (monitor.views() == 2).then_some(())
    });
}

#[test]
fn a_second_pagemark_is_refused_and_a_machine_outlives_the_first() {
    let Some(program) = monitor_program() else { skip!("no machine under KVM") };
    let mut monitor = Monitor::start(program);
    monitor.slot(1, 0x1000_0000, 300, 1, 0);
    let one = monitor.buffer(1);
    let mut log = monitor.log();
    let mut other = monitor.connect();
    assert_eq!(receive_greeting(&mut other.0).unwrap(), Status::Busy);
    monitor.write(0x1000_0000, 1, 1);
    assert_eq!(log.collect(one), pages([0]));
    // What is no request ends the connection, and nothing else.
    log.0.write_all(&[0xff; 8]).unwrap();
    assert!(receive_reply(&mut log.0).is_err());
    monitor.write(0x1000_0000, 1, 1);
    let mut log = wait_for("the library", || {
        let mut log = monitor.connect();
        (receive_greeting(&mut log.0).unwrap() == Status::Done).then_some(log)
    });
    assert_eq!(log.ask(Request::Begin).0, Status::Done);
    monitor.write(0x1000_0000, 2, 1);
    assert_eq!(log.collect(one), pages([0, 1]));
    // A child has the machine's descriptor, and is not the machine's process; it executes a program with the library.
    assert_eq!(monitor.run("fork"), Ok(Vec::new()));
    // The monitor dies.
    monitor.child.kill().unwrap();
    monitor.child.wait().unwrap();
    assert!(Request::Collect.send(&mut log.0).is_err() || receive_reply(&mut log.0).is_err());
}

#[test]
fn a_child_with_the_id_of_the_monitor_is_another_process() {
    let Some(program) = monitor_program() else { skip!("no machine under KVM") };
    for keeping in keepings() {
        let (mut monitor, started) = Monitor::start_with(program, &["first"], keeping);
        if started == Err(libc::EPERM) {
            skip!("no right to make a namespace of process ids");
        }
        assert_eq!(started, Ok(Vec::new()));
        monitor.slot(1, 0x1000_0000, 300, 1, LOGGED);
        let one = monitor.buffer(1);
        let mut log = monitor.log();
        monitor.write(0x1000_0000, 7, 3);
        let socket = monitor.directory.path().join("child");
        let nested = monitor.run(&format!("nest {}", socket.display()));
        // The child takes none of what the machine has written.
        assert_oracle_eq!(log.collect(one), pages((0..7).map(|page| page * 3)), "{keeping:?}");
        assert_eq!(nested, Ok(Vec::new()), "{keeping:?}: the child is no process of its own for the library");
    }
}

#[test]
fn a_ring_is_refused_and_programs_without_a_machine_are_left_alone() {
    let output = Command::new("cat").arg("/proc/self/environ").env("LD_PRELOAD", library()).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let Some(program) = monitor_program() else { skip!("no machine under KVM") };
    let (mut monitor, started) = Monitor::start_with(program, &["65536"], Keeping::Log);
    if started.is_err() {
        skip!("no machine under KVM that has a ring");
    }
    monitor.slot(1, 0x1000_0000, 300, 1, 0);
    let mut log = monitor.connect();
    assert_eq!(receive_greeting(&mut log.0).unwrap(), Status::Done);
    assert_eq!(log.ask(Request::Begin).0, Status::Refused(Refusal::Ring));
    assert_eq!(log.ask(Request::Collect).0, Status::Refused(Refusal::NotBegun));
    monitor.write(0x1000_0000, 1, 1);
    // A monitor that asks for rings gets none beside the library's.
    let (_, refused) = Monitor::start_with(program, &["65536"], Keeping::Rings);
    assert_eq!(refused, Err(libc::EINVAL));
}

#[test]
fn a_ring_that_is_full_is_emptied_and_the_monitor_does_not_notice_it() {
    let Some(program) = monitor_program() else { skip!("no machine under KVM") };
    if !keepings().contains(&Keeping::Rings) {
        skip!("no machine under KVM that has a ring");
    }
    let mut monitor = Monitor::keeping(program, Keeping::Rings);
    for buffer in 0..4 {
        monitor.slot(buffer + 1, 0x1000_0000 + u64::from(buffer) * 0x800_0000, 1024, buffer as usize, 0);
    }
    let mut log = monitor.log();
    for round in 0..3 {
        // As many pages as a ring has entries, so that it is full before the last write at the latest.
        (0..4).for_each(|buffer| monitor.write(0x1000_0000 + buffer * 0x800_0000, 1024, 1));
        monitor.write(0x1000_0000, 1, 1);
        let (status, found) = log.ask(Request::Collect);
        if Path::new("/sys/module/kvm_pvm").exists() && status == Status::Refused(Refusal::Overwritten) {
            // It need not leave a machine whose ring is full; then what was overwritten must be noticed.
            return;
        }
        assert_eq!(status, Status::Done);
        for buffer in 0..4 {
            let first = monitor.buffer(buffer) / PAGE;
            assert_oracle!(
                (first..first + 1024).all(|page| found.contains(&page)),
                "round {round}, buffer {buffer}: a write was missed"
            );
        }
    }
    assert!(log.ask(Request::Collect).1.is_empty());
}
