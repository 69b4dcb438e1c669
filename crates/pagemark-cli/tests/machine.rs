//! Programs that run in a machine of `pagemark-kvm` are checkpointed, killed and restored, and
//! check themselves.

mod support;

use std::alloc::{GlobalAlloc, Layout};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pagemark::region::{Region, RegionOptions};
use pagemark::{Address, AddressRangeExt, ByteCount, Mechanism, PAGE_SIZE, RangeSet};
use pagemark_heap::grouping::ByHistory;
use pagemark_heap::{Form, Heap, HeapTracker, Parts};
use pagemark_testing::{
    SplitMix, assert_oracle, assert_unviolated, copy_executable, in_own_session, repetitions, rounds, skip, trackee,
    wait_for, wait_for_described,
};
use support::{Pagemark, Restored, children, is_alive, kill_and_wait, kill_tree, now_unix_us};

/// Why no program runs in a machine here, if so.
fn lacking() -> Option<String> {
    pagemark_kvm::check().err().map(|error| error.to_string())
}

macro_rules! need_machine {
    () => {
        if let Some(reason) = lacking() {
            skip!("no machine under KVM: {reason}");
        }
    };
}

/// The descriptors of a process that are not its program's, and where they lead. Those of KVM are
/// counted: a virtual CPU that is not in use has the machine's file for a while.
fn open_files(pid: i32) -> (Vec<(String, String)>, usize) {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let links = entries.filter_map(|entry| {
        let link = std::fs::read_link(entry.path()).ok()?.to_string_lossy().into_owned();
        Some((entry.file_name().to_string_lossy().into_owned(), link))
    });
    // Programs get the lowest numbers.
    let links = links.filter(|(number, _)| number.parse().is_ok_and(|number: u32| number >= 300));
    let (of_kvm, mut others): (Vec<_>, Vec<_>) = links.partition(|(_, link)| link.starts_with("anon_inode:kvm-v"));
    others.sort();
    (others, of_kvm.len())
}

/// True if a process has a machine of KVM.
fn is_in_machine(pid: i32) -> bool {
    open_files(pid).1 > 0
}

/// The command of the program `machine.c` beside this file, which is compiled, and reports into the
/// directory. None without a compiler.
fn subject(directory: &Path) -> Option<[String; 2]> {
    compiled("machine", directory)
}

fn compiled(name: &str, directory: &Path) -> Option<[String; 2]> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name).with_extension("c");
    let program = directory.join("subject");
    let mut compiler = Command::new("cc");
    let status = compiler.args(["-O1", "-pthread", "-o"]).arg(&program).arg(source).status().ok()?;
    assert!(status.success(), "the subject does not compile");
    Some([program, directory.to_owned()].map(|path| path.display().to_string()))
}

/// A program that reports its rounds into `of`, run in a machine with checkpoints, goes on after it
/// was killed and restored, twice.
fn comes_back(pagemark: &Pagemark, program: &[String], of: &Path) {
    comes_back_tracked_by(pagemark, program, of, "auto");
}

/// Like [`comes_back`], with a mechanism.
fn comes_back_tracked_by(pagemark: &Pagemark, program: &[String], of: &Path, mechanism: &str) {
    run_and_kill(pagemark, program, of, mechanism);
    for when in ["restored", "restored again"] {
        let restored = restore(pagemark, &[]);
        goes_on(pagemark, of, restored.0, when);
        assert!(is_in_machine(restored.0), "{when}: it does not run in a machine");
        checkpoint(pagemark, restored.0, mechanism);
        goes_on(pagemark, of, restored.0, when);
    }
    pagemark.verify(&[]);
}

/// Like [`comes_back`], but it leaves its machine when it is restored with `options`, and is then a
/// program like any other.
fn comes_back_outside(pagemark: &Pagemark, program: &[String], of: &Path, options: &[&str]) {
    run_and_kill(pagemark, program, of, "auto");
    let outside = [&["--without-kvm"], options].concat();
    for (when, options) in [("restored outside", outside.as_slice()), ("restored again", &[])] {
        let restored = restore(pagemark, options);
        goes_on(pagemark, of, restored.0, when);
        for pid in [&[restored.0][..], &children(restored.0)].concat() {
            assert_eq!(remains_of_monitor(pid), Vec::<String>::new(), "{when}: process {pid}");
        }
        checkpoint(pagemark, restored.0, "auto");
        goes_on(pagemark, of, restored.0, when);
    }
    pagemark.verify(&[]);
}

/// What a process has that programs outside of a machine have not. A process that is about to
/// execute another program has nothing for a moment.
fn remains_of_monitor(pid: i32) -> Vec<String> {
    let link = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
    let executable = link.to_string_lossy().into_owned();
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let (files, of_kvm) = open_files(pid);
    let files = files.into_iter().map(|(_, link)| link).chain((of_kvm > 0).then(|| "KVM".to_owned()));
    let of_kvm = files.chain([executable.clone()]).filter(|what| what.contains("kvm") || what.contains("KVM"));
    // In the machine programs are at lower addresses than the monitor's file and heap, the description of
    // the machine and its tables of pages. Those that were executed since are anywhere.
    let start = |line: &str| u64::from_str_radix(line.split('-').next().unwrap_or_default(), 16).unwrap_or(0);
    let was_in_machine = maps.lines().any(|line| line.ends_with(&executable) && start(line) < 0x5000_0000_0000);
    let is_of_monitor = |line: &&str| {
        let is_there = (0x5000_0000_0000..0x6000_0000_0000).contains(&start(line));
        line.contains("kvm") || was_in_machine && is_there
    };
    of_kvm.chain(maps.lines().filter(is_of_monitor).map(str::to_owned)).collect()
}

/// Restores the newest checkpoint of the job.
fn restore(pagemark: &Pagemark, options: &[&str]) -> Restored {
    let restored = pagemark.json(&[&["restore", "--detach", "--json", "job"], options].concat());
    let pid = restored["pid"].as_i64().expect("a process id") as i32;
    Restored::new(pid)
}

/// The program makes further rounds.
fn goes_on(pagemark: &Pagemark, of: &Path, pid: i32, when: &str) {
    let before = rounds(of);
    wait_for(&format!("{when}: the program to go on"), || {
        assert_unviolated(of);
        assert_oracle!(is_alive(pid), "{when}: the program has ended: {}{}", pagemark.log(), pagemark.target_log());
        (rounds(of) > before + 3).then_some(())
    });
}

/// Runs a program in a machine with checkpoints, and kills it.
fn run_and_kill(pagemark: &Pagemark, program: &[String], of: &Path, mechanism: &str) {
    let options = ["--kvm", "--every", "300ms", "--job", "job", "--mechanism", mechanism];
    let mut runner = pagemark.run(&options, program);
    let target = runner.target();
    wait_for("the machine", || is_in_machine(target).then_some(()));
    goes_on(pagemark, of, target, "at the begin");
    let files = open_files(target);
    for _ in 0..repetitions(2, 4) {
        pagemark.checkpoint_after("job", now_unix_us());
        goes_on(pagemark, of, target, "after a checkpoint");
    }
    assert!(!pagemark.log().contains("failed"), "{}", pagemark.log());
    // One that starts programs has more or fewer virtual CPUs for a moment.
    let differs = || format!("what is open is the same: it was {files:?}, and is {:?}", open_files(target));
    wait_for_described(differs, || (open_files(target) == files).then_some(()));
    runner.kill();
    kill_tree(target);
}

/// Checkpoints a process that runs in a machine. One that starts programs all the time may do so at
/// each try for two seconds on a loaded host: then the command fails, and may be repeated.
fn checkpoint(pagemark: &Pagemark, pid: i32, mechanism: &str) {
    for _ in 0..10 {
        let output = pagemark.output(&["checkpoint", "--job", "job", "--mechanism", mechanism, &pid.to_string()]);
        let message = String::from_utf8_lossy(&output.stderr);
        if output.status.success() {
            return;
        }
        // A program that has found a missed write ends.
        assert_unviolated(pagemark.directory());
        assert!(message.contains("starts a program in one"), "{message}");
    }
    panic!("the process was busy in each of ten tries");
}

#[test]
fn threads_in_every_state_come_back() {
    need_machine!();
    let pagemark = Pagemark::new();
    let Some(program) = subject(pagemark.directory()) else { skip!("no C compiler") };
    comes_back(&pagemark, &program, pagemark.directory());
}

#[test]
fn threads_in_every_state_leave_their_machine() {
    need_machine!();
    for options in [&[][..], &["--lazy"]] {
        let pagemark = Pagemark::new();
        let Some(program) = subject(pagemark.directory()) else { skip!("no C compiler") };
        comes_back_outside(&pagemark, &program, pagemark.directory(), options);
    }
}

/// It cannot change the link to its program's file itself.
#[test]
fn a_program_without_rights_leaves_its_machine() {
    need_machine!();
    if !nix::unistd::geteuid().is_root() {
        skip!("not root");
    }
    let pagemark = Pagemark::new();
    let of = pagemark.directory().to_owned();
    let Some(program) = subject(&of) else { skip!("no C compiler") };
    let command = ["setpriv", "--bounding-set=-sys_admin,-checkpoint_restore", "--inh-caps=-all", "--"];
    let command = [command.map(str::to_owned).as_slice(), &program].concat();
    comes_back_outside(&pagemark, &command, &of, &[]);
}

/// The link to its program's file leads there, although the path does not.
#[test]
fn a_program_whose_file_is_gone_leaves_its_machine() {
    need_machine!();
    for another_is_there in [false, true] {
        let pagemark = Pagemark::new();
        let path = pagemark.directory().join("subject");
        copy_executable(Path::new("/bin/sleep"), &path);
        let program = std::fs::read(&path).expect("a program");
        let mut runner =
            pagemark.run(&["--kvm", "--every", "300ms", "--job", "job"], &[path.as_os_str(), "1000".as_ref()]);
        let target = runner.target();
        wait_for("the machine", || is_in_machine(target).then_some(()));
        std::fs::remove_file(&path).expect("the program's file");
        if another_is_there {
            std::fs::write(&path, "another").expect("a file");
        }
        pagemark.checkpoint_after("job", now_unix_us());
        runner.kill();
        kill_tree(target);
        let restored = restore(&pagemark, &["--without-kvm"]);
        assert_eq!(remains_of_monitor(restored.0), Vec::<String>::new());
        let content = std::fs::read(format!("/proc/{}/exe", restored.0)).expect("the program's file");
        assert!(content == program, "another file");
    }
}

/// If Pagemark is killed while processes leave their machine, all of them have left, or none is
/// there.
#[test]
fn a_restore_out_of_the_machine_that_is_killed_leaves_no_part() {
    need_machine!();
    let pagemark = Pagemark::new();
    let Some(program) = subject(pagemark.directory()) else { skip!("no C compiler") };
    let of = pagemark.directory().to_owned();
    run_and_kill(&pagemark, &program, &of, "auto");
    let processes = || -> Vec<i32> {
        let is_one = |pid: &i32| {
            let arguments = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            is_alive(*pid) && arguments.starts_with(program[0].as_bytes())
        };
        pagemark_linux::proc::processes().expect("/proc").into_iter().filter(is_one).collect()
    };
    for after_ms in [40, 70, 90, 110, 130, 150, 180, 220, 300].into_iter().step_by(repetitions(2, 1)) {
        let mut restoring =
            pagemark.command(&["restore", "--without-kvm", "--detach", "job"]).spawn().expect("a restore");
        std::thread::sleep(Duration::from_millis(after_ms));
        restoring.kill().expect("a child");
        restoring.wait().expect("a child");
        wait_for("all processes to be outside, or to end", || {
            let pids = processes();
            let are_outside = pids.len() == 2 && pids.iter().all(|&pid| remains_of_monitor(pid).is_empty());
            (pids.is_empty() || are_outside).then_some(())
        });
        if let Some(&pid) = processes().first() {
            goes_on(&pagemark, &of, pid, "outside");
        }
        processes().into_iter().for_each(kill_and_wait);
    }
}

fn threads_come_back_tracked_by(mechanism: &str) {
    need_machine!();
    let pagemark = Pagemark::new();
    let Some(program) = subject(pagemark.directory()) else { skip!("no C compiler") };
    comes_back_tracked_by(&pagemark, &program, pagemark.directory(), mechanism);
}

#[test]
fn threads_that_their_machine_tracks_come_back() {
    threads_come_back_tracked_by("kvm-scan");
}

/// Neither the log nor the tables of a machine have what another process writes.
#[test]
fn what_others_write_to_a_process_comes_back() {
    need_machine!();
    let mut keepers = vec!["kvm-scan"];
    keepers.extend(cannot_keep("log").is_none().then_some("kvm-log"));
    for mechanism in keepers {
        let pagemark = Pagemark::new();
        let Some(program) = compiled("machine_peers", pagemark.directory()) else { skip!("no C compiler") };
        comes_back_tracked_by(&pagemark, &program, pagemark.directory(), mechanism);
    }
}

#[test]
fn threads_that_the_log_of_their_machine_tracks_come_back() {
    if let Some(reason) = cannot_keep("log") {
        skip!("{reason}");
    }
    threads_come_back_tracked_by("kvm-log");
}

#[test]
fn threads_that_the_rings_of_their_machine_track_come_back() {
    if let Some(reason) = cannot_keep("rings") {
        skip!("{reason}");
    }
    threads_come_back_tracked_by("kvm-ring");
}

/// A machine notes writes for one: a second tracker is refused. A process without a machine is
/// refused, and so is one whose machine keeps a log where rings are asked for.
#[test]
fn one_tracker_has_the_dirty_bits_of_a_machine() {
    need_machine!();
    let pagemark = Pagemark::new();
    let mut runner = pagemark.run(
        &["--kvm", "--every", "300ms", "--job", "job", "--mechanism", "kvm-scan"],
        &["sleep", "60"].map(str::to_owned),
    );
    let target = runner.target();
    pagemark.checkpoint_after("job", now_unix_us());
    let pid = target.to_string();
    let refused = |mechanism: &str| {
        let output = pagemark.output(&["checkpoint", "--job", "other", "--mechanism", mechanism, &pid]);
        assert!(!output.status.success(), "{mechanism}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let message = refused("kvm-log");
    assert!(message.contains("is tracked by another Pagemark already"), "{message}");
    runner.kill();
    // What the killed Pagemark had started ends a moment later.
    wait_for("the refusal of rings", || refused("kvm-ring").contains("PAGEMARK_KVM_DIRTY=rings").then_some(()));
    // The bits are those of the next tracker.
    let other = ["checkpoint", "--job", "other", "--mechanism", "kvm-log", &pid];
    wait_for("the other checkpoint", || pagemark.output(&other).status.success().then_some(()));
    kill_and_wait(target);

    let mut outside = Command::new("sleep").arg("60").spawn().expect("a program");
    let output =
        pagemark.output(&["checkpoint", "--job", "third", "--mechanism", "kvm-scan", &outside.id().to_string()]);
    outside.kill().expect("our child");
    outside.wait().expect("our child");
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && message.contains("pagemark run --kvm"), "{message}");
}

/// A test of this binary, run in a machine with checkpoints, goes on after it was killed and
/// restored: what KVM notes for a program begins anew with each machine. `variables` are for the
/// test; its machine keeps `keeps`.
fn test_comes_back(test: &str, keeps: &str, variables: &[String]) {
    need_machine!();
    if let Some(reason) = cannot_keep(keeps) {
        skip!("{reason}");
    }
    let pagemark = Pagemark::new();
    let of = pagemark.directory().to_owned();
    let itself = std::env::current_exe().expect("this test").display().to_string();
    let environment = ["env".to_owned(), format!("PAGEMARK_KVM_DIRTY={keeps}"), format!("REPORT={}", of.display())];
    let test = [&itself, "--exact", test, "--ignored", "--nocapture"].map(str::to_owned);
    comes_back(&pagemark, &[&environment, variables, &test].concat(), &of);
}

fn regions_come_back(mechanism: Mechanism, keeps: &str) {
    test_comes_back("regions_in_rounds", keeps, &[format!("MECHANISM={mechanism}")]);
}

/// Why KVM keeps no log, or no rings, if so.
fn cannot_keep(keeps: &str) -> Option<String> {
    let machine = Path::new(env!("CARGO_BIN_EXE_pagemark")).with_file_name("pagemark-kvm");
    let check = Command::new(machine).env("PAGEMARK_KVM_DIRTY", keeps).arg("--check").output().expect("pagemark-kvm");
    (!check.status.success()).then(|| String::from_utf8_lossy(&check.stderr).trim().to_owned())
}

#[test]
fn regions_that_rings_track_come_back() {
    regions_come_back(Mechanism::KvmRing, "rings");
}

#[test]
fn regions_that_a_log_tracks_come_back() {
    regions_come_back(Mechanism::KvmLog, "log");
}

/// Three threads write to a region in each round. All that was written is found. Only a round in
/// which nothing else is found is reported as progress: after a machine was made anew, the first
/// may find more.
#[test]
#[ignore = "is run by the tests of regions that come back, in the machine"]
fn regions_in_rounds() {
    const PAGES: usize = 900;
    if std::env::var_os("REPORT").is_none() {
        skip!("is run by the tests of regions that come back, in the machine");
    }
    let variable = |name| std::env::var(name).expect("is set by the test that runs this one");
    let (mechanism, of) = (variable("MECHANISM").parse().expect("a mechanism"), PathBuf::from(variable("REPORT")));
    let options = RegionOptions { mechanism: Some(mechanism), without_rollback: true, ..RegionOptions::default() };
    let region = Region::with_options(PAGES * PAGE_SIZE, options).expect("a region");
    let (turn, done) = (Barrier::new(4), Barrier::new(4));
    let write = |page: usize, value: u64| {
        // SAFETY: within the region, which lives longer, and accessed atomically by all.
        unsafe { &*region.as_ptr().add(page * PAGE_SIZE).cast::<AtomicU64>() }.store(value, Ordering::Relaxed);
    };
    let written = |round: u64, thread: usize| (0..PAGES).filter(move |page| (page * 7 + round as usize) % 9 == thread);
    std::thread::scope(|scope| {
        let (turn, done, write) = (&turn, &done, &write);
        for thread in 0..3 {
            scope.spawn(move || {
                for round in 1.. {
                    turn.wait();
                    written(round, thread).for_each(|page| write(page, round));
                    done.wait();
                }
            });
        }
        let mut progress = File::create(of.join("progress")).expect("our directory");
        for round in 1u64.. {
            region.begin().expect("a transaction");
            turn.wait();
            done.wait();
            let found = region.commit().expect("the written pages");
            let pages: Vec<usize> = (0..3).flat_map(|thread| written(round, thread)).collect();
            let is_missed = |page: &&usize| !found.contains(Address::new((**page * PAGE_SIZE) as u64));
            let missed: Vec<usize> = pages.iter().filter(is_missed).copied().collect();
            if !missed.is_empty() {
                let (count, all) = (found.page_count(), pages.len());
                std::fs::write(
                    of.join("violated"),
                    format!("round {round}: {count} found, missed {missed:?} of {all}"),
                )
                .expect("our directory");
                std::process::exit(3);
            }
            if found.page_count() == pages.len() as u64 {
                writeln!(progress, "ok {round}").expect("our directory");
            }
        }
    });
}

#[test]
fn a_heap_that_is_tracked_in_two_levels_comes_back() {
    test_comes_back("heap_in_rounds", "log", &[]);
}

/// Objects of a heap are written in each round. A copy that is brought up to date with what the
/// tracker reports alone has all of them. Only a round in which less than the half of all bytes is
/// reported is progress: after a machine was made anew, the first reports all.
#[test]
#[ignore = "is run by a_heap_that_is_tracked_in_two_levels_comes_back, in the machine"]
fn heap_in_rounds() {
    const OBJECTS: usize = 2000;
    let Some(of) = std::env::var_os("REPORT").map(PathBuf::from) else {
        skip!("is run by a_heap_that_is_tracked_in_two_levels_comes_back, in the machine");
    };
    let parts = Parts::Four;
    let heap = Heap::new(parts, ByteCount::new(16 << 20)).expect("address space");
    let mut tracker =
        HeapTracker::with_form(&heap, ByHistory::new(parts), Form::TwoLevel).expect("the machine keeps a log");
    let mut random = SplitMix(1);
    let mut below = |bound: usize| random.below(bound as u64) as usize;
    let layouts: Vec<Layout> =
        (0..OBJECTS).map(|_| Layout::from_size_align(8 + below(3000), 8).expect("a layout")).collect();
    // SAFETY: the layouts have sizes.
    let objects: Vec<*mut u8> = layouts.iter().map(|layout| unsafe { heap.alloc_zeroed(*layout) }).collect();
    let (start, all_bytes) = (heap.addresses().start, layouts.iter().map(|layout| layout.size() as u64).sum::<u64>());
    let mut copy = vec![0u8; heap.addresses().byte_count().to_usize()];
    let mut progress = File::create(of.join("progress")).expect("our directory");
    for round in 1u64.. {
        for _ in 0..OBJECTS / 20 {
            // The same objects more often than others.
            let index = below(OBJECTS) * below(OBJECTS) / OBJECTS;
            let at = below(layouts[index].size());
            // SAFETY: within a live object, which this thread alone uses.
            unsafe { objects[index].add(at).write_volatile(round as u8) };
        }
        let mut written = RangeSet::new();
        tracker.collect_written(&mut written).expect("tracked views");
        let at = |address: Address| (address - start).to_usize();
        for range in written.iter() {
            // SAFETY: memory of the first view, which is mapped.
            let now =
                unsafe { std::slice::from_raw_parts(range.start.as_mut_ptr::<u8>(), range.byte_count().to_usize()) };
            copy[at(range.start)..at(range.end)].copy_from_slice(now);
        }
        for (object, layout) in objects.iter().zip(&layouts) {
            let saved = &copy[at(heap.canonical(*object))..][..layout.size()];
            // SAFETY: a live object, which nobody writes now.
            if saved != unsafe { std::slice::from_raw_parts(*object, layout.size()) } {
                let text = format!("round {round} missed a write to {object:?}");
                std::fs::write(of.join("violated"), text).expect("our directory");
                std::process::exit(3);
            }
        }
        if written.total_bytes().get() < all_bytes / 2 {
            writeln!(progress, "ok {round}").expect("our directory");
        }
    }
}

#[test]
fn a_program_that_checks_its_memory_comes_back() {
    need_machine!();
    let pagemark = Pagemark::new();
    let of = pagemark.directory().join("torture");
    std::fs::create_dir(&of).expect("a directory");
    comes_back(&pagemark, &[trackee("torture").display().to_string(), of.display().to_string()], &of);
}

/// Checkpoints come in the midst of an `execve`, and at the first instructions of a program.
#[test]
fn a_program_that_executes_itself_goes_on() {
    need_machine!();
    let last = repetitions(30, 80);
    let pagemark = Pagemark::new();
    let script = pagemark.directory().join("again");
    std::fs::write(&script, "#!/bin/sh\necho >> rounds\nexec \"$0\"\n").expect("our directory");
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).expect("our file");
    let options = ["--kvm", "--every", "30ms", "--keep-last", "2", "--job", "job"];
    let mut runner = pagemark.run(&options, &[script.display().to_string()]);
    let target = runner.target();
    wait_for("checkpoints", || {
        assert_oracle!(is_alive(target), "it ended: {}", pagemark.log());
        pagemark.checkpoints("job").iter().any(|listed| listed.sequence >= last).then_some(())
    });
    let rounds = || std::fs::metadata(pagemark.directory().join("rounds")).map_or(0, |file| file.len());
    let before = rounds();
    wait_for("the program to go on", || (rounds() > before + 10).then_some(()));
    runner.kill();
    kill_tree(target);
}

/// A program in Python that has a thread, and starts another program in each round. None without
/// Python.
fn python_that_starts_others() -> Option<Vec<String>> {
    let python = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output().ok()?;
    let python = String::from_utf8(python.stdout).expect("UTF-8").trim().to_owned();
    let program = "
import hashlib, os, subprocess, sys, threading
def work():
    digest = b''
    while True:
        digest = hashlib.sha256(digest).digest()
threading.Thread(target=work, daemon=True).start()
number = 0
while True:
    number += 1
    said = subprocess.run(['echo', str(number)], capture_output=True, text=True, check=True).stdout
    if said != f'{number}\\n':
        open('violated', 'w').write(said)
        os._exit(1)
    with open('progress', 'a') as progress:
        progress.write(f'ok {number}\\n')
";
    Some(vec![python, "-c".to_owned(), program.to_owned()])
}

#[test]
fn a_python_program_that_starts_others_comes_back() {
    need_machine!();
    let Some(program) = python_that_starts_others() else { skip!("no Python") };
    let pagemark = Pagemark::new();
    comes_back(&pagemark, &program, pagemark.directory());
}

#[test]
fn a_python_program_that_starts_others_leaves_its_machine() {
    need_machine!();
    let Some(program) = python_that_starts_others() else { skip!("no Python") };
    let pagemark = Pagemark::new();
    comes_back_outside(&pagemark, &program, pagemark.directory(), &[]);
}

/// A library for the monitor, compiled from C; none without a compiler.
fn library(directory: &Path, code: &str) -> Option<PathBuf> {
    let (source, library) = (directory.join("slow.c"), directory.join("slow.so"));
    std::fs::write(&source, code).expect("our directory");
    let compiled = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status();
    compiled.is_ok_and(|status| status.success()).then_some(library)
}

/// Starts a program in a machine, in the directory of the library that its monitor has loaded.
fn start_with(library: &Path, program: &[&str]) -> Child {
    let monitor = Path::new(env!("CARGO_BIN_EXE_pagemark")).with_file_name("pagemark-kvm");
    let mut command = Command::new(monitor);
    command.args(program).current_dir(library.parent().expect("a directory"));
    // The program has its own, which is none.
    command.env("LD_PRELOAD", library).env(pagemark_kvm::start::PRELOAD, "");
    in_own_session(command.stdin(Stdio::null())).spawn().expect("the monitor")
}

/// A monitor that has not opened KVM yet would open it while CRIU saves the process.
#[test]
fn a_monitor_that_has_just_begun_is_left_alone() {
    need_machine!();
    let pagemark = Pagemark::new();
    let code = "#include <unistd.h>\n__attribute__((constructor)) static void wait_long(void) { sleep(600); }\n";
    let Some(library) = library(pagemark.directory(), code) else { skip!("no C compiler") };
    let mut begun = start_with(&library, &["sleep", "60"]);
    let pid = begun.id() as i32;
    let output = pagemark.output(&["checkpoint", "--job", "job", &pid.to_string()]);
    let message = String::from_utf8_lossy(&output.stderr);
    begun.kill().expect("a child");
    begun.wait().expect("a child");
    assert!(!output.status.success() && message.contains("starts a program in one"), "{message}");
}

/// A program that is not loaded yet has no registers with which it could go on outside.
#[test]
fn a_program_that_is_being_loaded_is_not_saved() {
    need_machine!();
    let pagemark = Pagemark::new();
    // The program is named when it is loaded, and has no virtual CPU yet.
    let code = "
#define _GNU_SOURCE
#include <stdarg.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
int prctl(int option, ...)
{
    va_list list;
    va_start(list, option);
    unsigned long a = va_arg(list, unsigned long), b = va_arg(list, unsigned long);
    unsigned long c = va_arg(list, unsigned long), d = va_arg(list, unsigned long);
    va_end(list);
    while (option == PR_SET_NAME && access(\"loaded\", F_OK) != 0)
        usleep(1000);
    return syscall(SYS_prctl, option, a, b, c, d);
}
";
    let Some(library) = library(pagemark.directory(), code) else { skip!("no C compiler") };
    let mut begun = start_with(&library, &["sleep", "600"]);
    let pid = begun.id() as i32;
    wait_for("the machine", || is_in_machine(pid).then_some(()));
    let early = pagemark.output(&["checkpoint", "--job", "job", &pid.to_string()]);
    std::fs::write(pagemark.directory().join("loaded"), "").expect("our directory");
    wait_for("the program", || {
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        (name == "sleep\n").then_some(())
    });
    checkpoint(&pagemark, pid, "auto");
    begun.kill().expect("a child");
    begun.wait().expect("a child");
    let restored = restore(&pagemark, &["--without-kvm"]);
    wait_for("the program outside", || remains_of_monitor(restored.0).is_empty().then_some(()));
    assert_oracle!(is_alive(restored.0), "the restored program has ended");
    let message = String::from_utf8_lossy(&early.stderr);
    assert!(!early.status.success() && message.contains("starts a program in one"), "{message}");
}

#[test]
fn a_process_that_lost_the_right_to_kvm_is_left_alone() {
    need_machine!();
    let device = std::fs::metadata("/dev/kvm").expect("the device");
    if device.mode() & 0o007 != 0 || !nix::unistd::geteuid().is_root() {
        skip!("not root, or all may use KVM");
    }
    let pagemark = Pagemark::new();
    let of = pagemark.directory().to_owned();
    let Some(program) = subject(&of) else { skip!("no C compiler") };
    std::fs::set_permissions(&of, std::fs::Permissions::from_mode(0o777)).expect("our directory");
    let command = ["setpriv", "--reuid=65534", "--clear-groups", "--"].map(str::to_owned).to_vec();
    let command = [command, program.to_vec()].concat();
    let mut runner = pagemark.run(&["--kvm", "--every", "300ms", "--job", "job"], &command);
    let target = runner.target();
    wait_for("the report", || pagemark.log().contains("could not open /dev/kvm again").then_some(()));
    let before = rounds(&of);
    wait_for("the program to go on", || {
        assert_unviolated(&of);
        (rounds(&of) > before + 3).then_some(())
    });
    runner.kill();
    kill_tree(target);
}
