//! Regions of a program in the machine, with each mechanism that its library finds: this test
//! binary is the program.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Seek, Write};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use pagemark::region::{Region, RegionOptions};
use pagemark::{Address, ErrorKind, Mechanism, PAGE_SIZE};

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
    let run = |program: &str, arguments: &[&str]| {
        let mut command = Command::new(program);
        command.args(arguments).args(["--exact", "trackers::regions", "--ignored", "--nocapture"]);
        let output = output(command);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let found: Vec<String> = text.lines().filter(|line| line.starts_with("region ")).map(str::to_owned).collect();
        assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
        found
    };
    let itself = itself.to_str().expect("a path of letters");
    let (outside, inside) = (run(itself, &[]), run(MACHINE, &[itself]));
    assert!(outside.iter().any(|line| line.contains("mprotect: 10 rounds")), "{outside:?}");
    for (outside, inside) in outside.iter().zip(&inside) {
        // Two mechanisms are of the machine.
        let expected = outside.replace("region kvm-scan: not here", "region kvm-scan: 10 rounds");
        let expected = expected.replace("region kvm-log: not here", "region kvm-log: 10 rounds");
        assert_eq!(*inside, expected);
    }
    assert_eq!(inside.len(), outside.len());
}

/// The machine's own mechanisms find what the kernel writes in each kind of call.
#[test]
fn calls_that_write_to_regions() {
    need_machine!();
    let itself = std::env::current_exe().expect("this test");
    let mut command = Command::new(MACHINE);
    command.arg(itself).args(["--exact", "trackers::calls::calls", "--ignored", "--nocapture"]);
    let output = output(command);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(text.matches(" calls are found").count(), 2, "{text}");
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
            assert_eq!(missed, None, "{mechanism}, round {round}");
        }
        let mut content = vec![0; BYTES];
        region.read(0, &mut content).expect("the content");
        assert!(content == expected, "{mechanism}, round {round}: other content");
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
