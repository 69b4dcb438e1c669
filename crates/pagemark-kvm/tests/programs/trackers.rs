//! Regions of a program in the machine, with each mechanism that its library finds: this test
//! binary is the program.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Seek, Write};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use pagemark::region::{Region, RegionOptions};
use pagemark::{Address, ErrorKind, Mechanism, PAGE_SIZE};
use pagemark_kvm_protocol::machine_calls;
use pagemark_testing::{assert_oracle, assert_oracle_eq};

use super::{MACHINE, lacking, output};

#[path = "calls.rs"]
mod calls;

const PAGES: usize = 300;
const BYTES: usize = PAGES * PAGE_SIZE;
const ROUNDS: usize = 10;

/// Memory is written by four threads and by the kernel; each write must be found, and the
/// content must be the expected one after a rollback too.
#[test]
fn regions_of_programs_in_the_machine() {
    need_machine!();
    let itself = std::env::current_exe().expect("this test");
    let run = |program: &str, arguments: &[&str], keeps: &str| {
        let mut command = Command::new(program);
        command.env("PAGEMARK_KVM_DIRTY", keeps);
        command.args(arguments).args(["--exact", "trackers::regions", "--ignored", "--nocapture"]);
        let output = output(command);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let found: Vec<String> = text.lines().filter(|line| line.starts_with("region ")).map(str::to_owned).collect();
        assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
        found
    };
    let itself = itself.to_str().expect("a path of letters");
    let outside = run(itself, &[], "log");
    assert!(outside.iter().any(|line| line.contains("mprotect: 10 rounds")), "{outside:?}");
    for (keeps, other) in [("log", "kvm-log"), ("rings", "kvm-ring")] {
        if !can_keep(keeps) {
            continue;
        }
        let inside = run(MACHINE, &[itself], keeps);
        for (outside, inside) in outside.iter().zip(&inside) {
            // These mechanisms are of the machine.
            let of_machine = ["kvm-scan", "kvm-emulate", other];
            let expected = match of_machine.iter().find(|name| outside.contains(&format!("{name}:"))) {
                Some(name) => format!("region {name}: 10 rounds"),
                None => outside.clone(),
            };
            assert_eq!(*inside, expected);
        }
        assert_eq!(inside.len(), outside.len());
    }
}

/// Random instructions that store: the processor executes them, and then the monitor.
#[test]
fn stores_that_the_monitor_executes() {
    need_machine!();
    let itself = std::env::current_exe().expect("this test");
    let mut command = Command::new(MACHINE);
    let test = "store_encodings::random_stores_are_those_of_the_processor";
    command.arg(&itself).args(["--exact", test, "--nocapture"]);
    let output = output(command);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("kvm-emulate: 3000 stores"), "{text}");
}

/// Whether KVM has it; a test that does without it says so.
fn can_keep(keeps: &str) -> bool {
    let mut command = Command::new(MACHINE);
    command.env("PAGEMARK_KVM_DIRTY", keeps).arg("--check");
    let output = output(command);
    if !output.status.success() {
        pagemark_testing::skipped(String::from_utf8_lossy(&output.stderr).trim());
    }
    output.status.success()
}

/// The monitor counts what leaves the machine: system calls do, and the functions of the vDSO do
/// not.
#[test]
fn the_machine_counts_what_happens() {
    need_machine!();
    let itself = std::env::current_exe().expect("this test");
    let mut command = Command::new(MACHINE);
    command.arg(&itself).args(["--exact", "trackers::counts", "--ignored", "--nocapture"]);
    let output = output(command);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("counted"), "{text}");
}

#[test]
#[ignore = "is run by the_machine_counts_what_happens, in the machine"]
fn counts() {
    const TIMES: u64 = 20_000;
    let of = |what: &dyn Fn()| {
        let before = machine_calls::counts().expect("a program in a machine");
        (0..TIMES).for_each(|_| what());
        let after = machine_calls::counts().expect("as before");
        let kvm = before.of_kvm.zip(after.of_kvm).map(|(before, after)| after.exits - before.exits);
        (after.calls - before.calls, kvm)
    };
    // SAFETY: asks.
    let (calls, exits) = of(&|| _ = unsafe { libc::syscall(libc::SYS_getppid) });
    // The other thread of the harness may make some.
    assert!((TIMES..TIMES + 1000).contains(&calls), "{calls}");
    assert!(exits.is_none_or(|exits| exits >= TIMES), "{exits:?}");
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let place = &raw mut time;
    // SAFETY: fills the value.
    let (calls, exits) = of(&|| _ = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, place) });
    // SAFETY: reads the auxiliary vector.
    if unsafe { libc::getauxval(libc::AT_SYSINFO_EHDR) } != 0 {
        assert!(calls < 1000, "{calls}");
        assert!(exits.is_none_or(|exits| exits < TIMES / 2), "{exits:?}");
    }
    println!("counted: {calls} {exits:?}");
}

/// A machine keeps a log or rings. What it does not keep is refused, with what would have it.
#[test]
fn a_log_excludes_rings() {
    need_machine!();
    let itself = std::env::current_exe().expect("this test");
    for (keeps, refused, help) in
        [("log", "kvm-ring", "with PAGEMARK_KVM_DIRTY=rings"), ("rings", "kvm-log", "without PAGEMARK_KVM_DIRTY")]
    {
        if !can_keep(keeps) {
            continue;
        }
        let mut command = Command::new(MACHINE);
        command.env("PAGEMARK_KVM_DIRTY", keeps).env("MECHANISM", refused);
        command.arg(&itself).args(["--exact", "trackers::refused", "--ignored", "--nocapture"]);
        let output = output(command);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
        assert!(text.contains(&format!("refused: {refused}")) && text.contains(help), "{text}");
    }
    let mut command = Command::new(MACHINE);
    command.env("PAGEMARK_KVM_DIRTY", "both").arg("--check");
    let output = output(command);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && text.contains("\"both\"") && text.contains("PAGEMARK_KVM_DIRTY"), "{text}");
}

#[test]
#[ignore = "is run by a_log_excludes_rings, in the machine"]
fn refused() {
    let mechanism = std::env::var("MECHANISM").expect("its name").parse().expect("a mechanism");
    let error = Region::with_options(BYTES, RegionOptions { mechanism: Some(mechanism), ..RegionOptions::default() })
        .expect_err("the machine keeps the other");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    println!("refused: {error}");
}

/// More pages than a ring has room for, by several threads that end, and by a child.
#[test]
fn rings_that_are_full() {
    need_machine!();
    if !can_keep("rings") {
        return;
    }
    let itself = std::env::current_exe().expect("this test");
    let mut command = Command::new(MACHINE);
    command.env("PAGEMARK_KVM_DIRTY", "rings");
    command.arg(&itself).args(["--exact", "trackers::many_pages", "--ignored", "--nocapture"]);
    let output = output(command);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("all pages were found"), "{text}");
}

#[test]
#[ignore = "is run by rings_that_are_full, in the machine"]
fn many_pages() {
    // A ring has 4096 entries.
    const MANY: usize = 20_000;
    let options =
        || RegionOptions { mechanism: Some(Mechanism::KvmRing), without_rollback: true, ..Default::default() };
    let region = Region::with_options(MANY * PAGE_SIZE, options()).expect("a region");
    let other = Region::with_options(MANY * PAGE_SIZE, options()).expect("a region");
    let write = |region: &Region, page: usize| {
        // SAFETY: within the region, which lives longer, and accessed atomically by all.
        unsafe { (*region.as_ptr().add(page * PAGE_SIZE).cast::<AtomicU64>()).fetch_add(1, Ordering::Relaxed) };
    };
    let pages = |set: &pagemark::RangeSet| set.page_count() as usize;
    for round in 0..3 {
        region.begin().expect("a transaction");
        other.begin().expect("a transaction");
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let (region, other) = (&region, &other);
                scope.spawn(move || {
                    (thread..MANY).step_by(3).for_each(|page| write(region, page));
                    (thread..MANY).step_by(30).for_each(|page| write(other, page));
                });
            }
        });
        let found = pages(&region.commit().expect("the written pages"));
        assert_oracle!(found >= MANY, "round {round}: only {found} pages of {MANY} were found");
        assert_eq!(found, MANY, "round {round}");
        let found = other.commit().expect("the written pages");
        assert_oracle!(
            (0..3).all(|thread| found.contains(Address::new((thread * PAGE_SIZE) as u64))),
            "round {round}: a write was missed"
        );
        assert!(pages(&found) < MANY / 2, "round {round}: {}", pages(&found));
        // Nothing is left in the rings.
        region.begin().expect("a transaction");
        assert!(region.commit().expect("no page").is_empty(), "round {round}");
    }
    // A child has rings of its own.
    // SAFETY: the child only uses what this thread has, and ends at once.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let of_child = Region::with_options(100 * PAGE_SIZE, options()).expect("a region");
        of_child.begin().expect("a transaction");
        write(&of_child, 7);
        write(&region, 5);
        let found = pages(&of_child.commit().expect("the written pages"));
        // SAFETY: ends the child.
        unsafe { libc::_exit(if found == 1 { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: waits for the child.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the child");
    region.begin().expect("a transaction");
    write(&region, 9);
    assert_eq!(pages(&region.commit().expect("the written pages")), 1);
    println!("all pages were found");
}

/// The machine's own mechanisms find what the kernel writes in each kind of call.
#[test]
fn calls_that_write_to_regions() {
    need_machine!();
    let itself = std::env::current_exe().expect("this test");
    for keeps in ["log", "rings"].into_iter().filter(|keeps| can_keep(keeps)) {
        let mut command = Command::new(MACHINE);
        command.env("PAGEMARK_KVM_DIRTY", keeps);
        command.arg(&itself).args(["--exact", "trackers::calls::calls", "--ignored", "--nocapture"]);
        let output = output(command);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(text.matches(" calls are found").count(), 3, "{text}");
    }
}

#[test]
#[ignore = "is run by regions_of_programs_in_the_machine, in the machine"]
fn regions() {
    for mechanism in Mechanism::ALL {
        let options = RegionOptions { mechanism: Some(mechanism), ..RegionOptions::default() };
        let region = match Region::with_options(BYTES, options) {
            Ok(region) => region,
            Err(error) if error.kind() == ErrorKind::Unavailable => {
                println!("region {mechanism}: not here");
                continue;
            }
            Err(error) => panic!("{mechanism}: {error}"),
        };
        println!("region {mechanism}: {} rounds", check(&region, mechanism));
    }
}

fn check(region: &Region, mechanism: Mechanism) -> usize {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let word = |index: usize| {
        assert!(index < BYTES / 8);
        // SAFETY: within the region, which lives longer, and accessed atomically by all.
        unsafe { &*region.as_ptr().cast::<AtomicU64>().add(index) }
    };
    let mut expected = vec![0u8; BYTES];
    for round in 0..ROUNDS {
        region.begin().expect("a transaction");
        let before = expected.clone();
        let mut offsets = BTreeSet::new();
        let stores: Vec<(usize, u64)> = (0..200).map(|_| (random(BYTES / 8), random(1 << 30) as u64 + 1)).collect();
        // Each thread has its own words, so that the content is known.
        std::thread::scope(|scope| {
            for part in 0..4 {
                let stores = stores.iter().filter(move |(index, _)| index % 4 == part);
                scope.spawn(move || stores.for_each(|&(index, value)| word(index).store(value, Ordering::Relaxed)));
            }
        });
        for (index, value) in stores {
            expected[index * 8..index * 8 + 8].copy_from_slice(&value.to_ne_bytes());
            offsets.insert(index * 8);
        }
        let (offset, length) = (random(BYTES - 20_000), 1 + random(20_000));
        let value = round as u8 + 1;
        region.read_from(file(length, value), offset..offset + length).expect("a file");
        expected[offset..offset + length].fill(value);
        offsets.extend((offset..offset + length).step_by(1000));
        offsets.insert(offset + length - 1);
        if round % 5 == 4 {
            region.rollback().expect("the content before");
            expected = before;
        } else {
            let written = region.commit().expect("the written pages");
            let missed = offsets.iter().find(|&&offset| !written.contains(Address::new(offset as u64)));
            assert_oracle_eq!(missed, None, "{mechanism}, round {round}: an offset that was missed");
        }
        let mut content = vec![0; BYTES];
        region.read(0, &mut content).expect("the content");
        assert_oracle!(content == expected, "{mechanism}, round {round}: other content");
    }
    ROUNDS
}

/// A file of `length` equal bytes, at its start.
fn file(length: usize, value: u8) -> File {
    let mut file = tempfile::tempfile().expect("a file");
    file.write_all(&vec![value; length]).expect("room for it");
    file.rewind().expect("a file");
    file
}
