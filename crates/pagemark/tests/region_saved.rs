//! A program that saves its regions is killed at any moment: the newest checkpoint is whole, and is
//! the last completed save or a later one.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use pagemark::backend::MemoryBackend;
use pagemark::backend::faults::{Fault, FaultyBackend};
use pagemark::error::{ErrorKind, Object};
use pagemark::region::{Region, RegionOptions, RegionTarget};
use pagemark::repository::Repository;
use pagemark::{Job, JobOptions, Mechanism, PAGE_SIZE};
use pagemark_testing::assert_oracle;
use proptest::prelude::*;

/// Set in the process that is killed.
const ROLE: &str = "PAGEMARK_TEST_REGION";

const PAGES: usize = 64;

fn repository() -> (tempfile::TempDir, Repository) {
    let directory = tempfile::tempdir().unwrap();
    let repository = Repository::create(&directory.path().join("repository")).unwrap();
    (directory, repository)
}

fn content(region: &Region) -> Vec<u8> {
    let mut content = vec![0; region.bytes()];
    region.read(0, &mut content).unwrap();
    content
}

fn with_mechanism(mechanism: Mechanism) -> RegionOptions {
    RegionOptions { mechanism: Some(mechanism), ..RegionOptions::default() }
}

/// Writes step `number`: the number, and values at a few offsets.
fn step(region: &Region, number: u64) {
    region.write(0, &number.to_le_bytes()).unwrap();
    for part in 0..5 {
        let place = (number * 7919 + part * 104_729) as usize % (PAGES * PAGE_SIZE - 8);
        region.write(place.max(8), &(number * 31 + part).to_le_bytes()).unwrap();
    }
}

fn save_for_ever(path: &Path) -> ! {
    let repository = Repository::open(path).unwrap();
    let region = match Region::open(&repository, "steps", RegionOptions::default()) {
        Err(error) if error.kind() == ErrorKind::NeverSaved => Region::new(PAGES * PAGE_SIZE).unwrap(),
        opened => opened.unwrap(),
    };
    let mut number = [0; 8];
    region.read(0, &mut number).unwrap();
    for number in u64::from_le_bytes(number) + 1.. {
        step(&region, number);
        region.save(&repository, "steps").unwrap();
        println!("saved {number}");
        std::io::stdout().flush().unwrap();
    }
    unreachable!("there are enough numbers");
}

#[test]
fn the_last_save_of_a_killed_program_is_there() {
    if let Some(path) = std::env::var_os(ROLE) {
        save_for_ever(Path::new(&path));
    }
    let (directory, repository) = repository();
    let model = Region::new(PAGES * PAGE_SIZE).unwrap();
    let (mut last, mut modelled) = (0, 0);
    for round in 0..40u64 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["the_last_save_of_a_killed_program_is_there", "--exact", "--nocapture"])
            .env(ROLE, directory.path().join("repository"))
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let mut saved = lines.by_ref().filter_map(|line| line.strip_prefix("saved ")?.parse::<u64>().ok());
        for _ in 0..1 + round % 5 {
            last = saved.next().expect("the program does not save");
        }
        std::thread::sleep(Duration::from_micros(round * 700 % 9000));
        child.kill().unwrap();
        child.wait().unwrap();
        last = lines.filter_map(|line| line.strip_prefix("saved ")?.parse().ok()).last().unwrap_or(last);

        let region = Region::open(&repository, "steps", RegionOptions::default()).unwrap();
        let mut number = [0; 8];
        region.read(0, &mut number).unwrap();
        let number = u64::from_le_bytes(number);
        assert_oracle!(number == last || number == last + 1, "{last} was saved, {number} is there");
        (modelled + 1..=number).for_each(|number| step(&model, number));
        modelled = number;
        assert_oracle!(content(&region) == content(&model), "step {number} is not as it was saved");
    }
}

#[derive(Clone, Debug)]
enum Act {
    Write(usize, Vec<u8>),
    Discard(usize, usize),
    Transaction(usize, Vec<u8>),
    Save,
    /// Saves to another job, after which the next save is complete.
    SaveElsewhere,
    Reopen,
    Load,
}

fn act() -> impl Strategy<Value = Act> {
    let place = 0..(PAGES - 3) * PAGE_SIZE;
    let bytes = prop::collection::vec(any::<u8>(), 1..3 * PAGE_SIZE);
    let short = prop::collection::vec(any::<u8>(), 1..24);
    prop_oneof![
        4 => (place.clone(), short).prop_map(|(at, bytes)| Act::Write(at, bytes)),
        2 => (place.clone(), bytes.clone()).prop_map(|(at, bytes)| Act::Write(at, bytes)),
        1 => (0..PAGES - 8, 1usize..8).prop_map(|(page, pages)| Act::Discard(page, pages)),
        1 => (place, bytes).prop_map(|(at, bytes)| Act::Transaction(at, bytes)),
        4 => Just(Act::Save),
        1 => Just(Act::SaveElsewhere),
        2 => Just(Act::Reopen),
        1 => Just(Act::Load),
    ]
}

fn behaves_like_memory_and_a_list_of_copies(mechanism: Mechanism, acts: Vec<Act>) -> Result<(), TestCaseError> {
    let (_directory, repository) = repository();
    let mut region = match Region::with_options(PAGES * PAGE_SIZE, with_mechanism(mechanism)) {
        Ok(region) => region,
        Err(error) => {
            pagemark_testing::skipped(&format!("{mechanism}: {error}"));
            return Ok(());
        }
    };
    let mut model = vec![0; PAGES * PAGE_SIZE];
    let mut saved: Vec<Vec<u8>> = Vec::new();
    for act in acts {
        match act {
            Act::Write(at, bytes) => {
                region.write(at, &bytes).unwrap();
                model[at..at + bytes.len()].copy_from_slice(&bytes);
            }
            Act::Discard(page, pages) => {
                let offsets = page * PAGE_SIZE..(page + pages) * PAGE_SIZE;
                region.discard(offsets.clone()).unwrap();
                model[offsets].fill(0);
            }
            Act::Transaction(at, bytes) => {
                region.begin().unwrap();
                region.write(at, &bytes).unwrap();
                prop_assert!(
                    matches!(region.save(&repository, "job"), Err(error) if error.kind() == ErrorKind::TransactionOpen)
                );
                region.rollback().unwrap();
            }
            Act::Save => {
                saved.push(model.clone());
                prop_assert_eq!(region.save(&repository, "job").unwrap().sequence, saved.len() as u64);
            }
            Act::SaveElsewhere => drop(region.save(&repository, "elsewhere").unwrap()),
            Act::Reopen => {
                let Some(last) = saved.last() else { continue };
                region = Region::open(&repository, "job", with_mechanism(mechanism)).unwrap();
                model.clone_from(last);
            }
            Act::Load => {
                let Some(last) = saved.last() else { continue };
                region.load(&repository, "job").unwrap();
                model.clone_from(last);
            }
        }
    }
    prop_assert!(content(&region) == model);
    for (sequence, expected) in (1..).zip(saved) {
        let checkpoint = repository.read("job", sequence).unwrap();
        let opened = Region::from_checkpoint(&checkpoint, "region", with_mechanism(mechanism)).unwrap();
        prop_assert!(content(&opened) == expected, "checkpoint {}", sequence);
    }
    Ok(())
}

proptest! {
    #![proptest_config(pagemark_testing::cases(24))]

    #[test]
    fn saves_and_opens_like_copies_with_adaptive(acts in prop::collection::vec(act(), 0..24)) {
        behaves_like_memory_and_a_list_of_copies(Mechanism::Adaptive, acts)?;
    }

    #[test]
    fn saves_and_opens_like_copies_with_pagemap_scan(acts in prop::collection::vec(act(), 0..24)) {
        behaves_like_memory_and_a_list_of_copies(Mechanism::PagemapScan, acts)?;
    }

    #[test]
    fn saves_and_opens_like_copies_with_emulate(acts in prop::collection::vec(act(), 0..24)) {
        behaves_like_memory_and_a_list_of_copies(Mechanism::Emulate, acts)?;
    }

    #[test]
    fn saves_and_opens_like_copies_with_mprotect(acts in prop::collection::vec(act(), 0..24)) {
        behaves_like_memory_and_a_list_of_copies(Mechanism::Mprotect, acts)?;
    }

    #[test]
    fn saves_and_opens_like_copies_with_compare(acts in prop::collection::vec(act(), 0..24)) {
        behaves_like_memory_and_a_list_of_copies(Mechanism::Compare, acts)?;
    }
}

/// Saves with a fault at one step. Afterwards the newest checkpoint is that of the previous save or
/// of this save. Unless the fault is the death of the process, the next save of the region saves
/// all changes.
fn survives(fault: Fault, seed: u64) -> usize {
    let backend = Arc::new(MemoryBackend::new());
    let repository = Repository::create_on(backend.clone()).unwrap();
    let region = Region::new(PAGES * PAGE_SIZE).unwrap();
    step(&region, 1);
    region.save(&repository, "job").unwrap();
    let before = content(&region);

    let faulty = FaultyBackend::new(backend.clone(), fault, seed);
    step(&region, 2);
    let now = content(&region);
    let saved = Repository::on(Arc::new(faulty.clone())).and_then(|faulty| {
        // A save by another handle of the same repository is incremental.
        region.save(&faulty, "job")
    });
    let steps = faulty.steps();
    let is_dead = faulty.is_dead();
    if is_dead {
        faulty.lose_power().unwrap();
    }
    let repository = Repository::on(backend).unwrap();
    let opened = content(&Region::open(&repository, "job", RegionOptions::default()).unwrap());
    match saved {
        Ok(_) => assert_oracle!(opened == now, "{fault:?}, {seed}: what was saved is lost"),
        Err(_) => assert_oracle!(opened == before || opened == now, "{fault:?}, {seed}: neither checkpoint is there"),
    }
    assert_oracle!(content(&region) == now, "{fault:?}, {seed}: the region itself has changed");
    if !is_dead {
        step(&region, 3);
        region.save(&repository, "job").unwrap();
        let opened = Region::open(&repository, "job", RegionOptions::default()).unwrap();
        assert_oracle!(content(&opened) == content(&region), "{fault:?}, {seed}: a later save lacks something");
    }
    let report = repository.verify(&mut |_| {}).unwrap();
    assert_oracle!(report.damaged.is_empty(), "{fault:?}, {seed}: damaged: {:?}", report.damaged);
    steps
}

#[test]
fn a_save_that_fails_at_any_step_loses_nothing() {
    let steps = survives(Fault::None, 1);
    assert!(steps > 8, "a save has only {steps} steps");
    for step in 1..=steps {
        survives(Fault::Error { at: step }, 1);
        survives(Fault::DiskFull { from: step }, 1);
        for seed in 1..6 {
            survives(Fault::Kill { at: step }, seed);
        }
    }
}

#[test]
fn a_save_after_the_first_stores_only_changes() {
    let (_directory, repository) = repository();
    let region = Region::new(1024 * PAGE_SIZE).unwrap();
    for page in 0..1024usize {
        region.write(page * PAGE_SIZE, &page.wrapping_mul(0x9e37_79b9).to_le_bytes()).unwrap();
    }
    assert_eq!(region.save(&repository, "job").unwrap().cost.dirty_pages, 1024);
    let unchanged = region.save(&repository, "job").unwrap();
    assert_eq!(unchanged.cost.dirty_pages, 0);
    region.write(77 * PAGE_SIZE + 5, b"one").unwrap();
    assert_eq!(region.save(&repository, "job").unwrap().cost.dirty_pages, 1);

    let opened = Region::open(&repository, "job", RegionOptions::default()).unwrap();
    opened.write(99 * PAGE_SIZE, b"other").unwrap();
    let saved = opened.save(&repository, "job").unwrap();
    assert_eq!((saved.sequence, saved.cost.dirty_pages), (4, 1));
}

#[test]
fn several_regions_are_saved_at_once() {
    let (_directory, repository) = repository();
    let (grid, counter) = (Region::new(9 * PAGE_SIZE).unwrap(), Region::new(PAGE_SIZE).unwrap());
    let twice = RegionTarget::new([("grid", &grid), ("grid", &counter)]);
    assert!(matches!(twice, Err(error) if error.object() == &Object::Name("grid".into())));
    assert!(
        matches!(RegionTarget::new([("a", &grid), ("b", &grid)]), Err(error) if error.kind() == ErrorKind::NotDistinct)
    );

    let target = RegionTarget::new([("grid", &grid), ("counter", &counter)]).unwrap();
    let mut job = Job::new(target, repository.clone(), JobOptions::new("both"));
    for round in 1..4u8 {
        grid.write(usize::from(round) * PAGE_SIZE, &[round; 100]).unwrap();
        counter.write(0, &[round]).unwrap();
        job.checkpoint().unwrap();
    }
    for sequence in 1..4u8 {
        let checkpoint = repository.read("both", sequence.into()).unwrap();
        let open = |label| Region::from_checkpoint(&checkpoint, label, RegionOptions::default()).unwrap();
        assert_eq!(content(&open("counter"))[0], sequence);
        let grid = content(&open("grid"));
        let written = (0..9u8).filter(|&page| grid[usize::from(page) * PAGE_SIZE] != 0).collect::<Vec<_>>();
        assert_eq!(written, (1..=sequence).collect::<Vec<_>>());
    }
    let checkpoint = repository.read("both", 1).unwrap();
    let missing = Region::from_checkpoint(&checkpoint, "region", RegionOptions::default());
    assert!(matches!(missing, Err(error) if error.kind() == ErrorKind::NoRegion));

    // Only the newest target knows which pages were written since.
    grid.save(&repository, "alone").unwrap();
    let late = job.checkpoint().unwrap_err();
    assert!(late.to_string().contains("another job"), "{late}");
    assert_eq!(repository.checkpoints("both").unwrap().len(), 3);
}

#[test]
fn threads_that_write_while_it_is_saved_lose_nothing() {
    let (_directory, repository) = repository();
    let region = Region::new(PAGES * PAGE_SIZE).unwrap();
    const ROUNDS: u64 = 60;
    std::thread::scope(|scope| {
        for thread in 0..3usize {
            let region = &region;
            scope.spawn(move || {
                for round in 1..=20_000u64 {
                    let page = (round as usize * 17 + thread) % (PAGES / 3) * 3 + thread;
                    region.write(page * PAGE_SIZE + 8 * thread, &round.to_le_bytes()).unwrap();
                }
            });
        }
        for _ in 0..ROUNDS {
            region.save(&repository, "job").unwrap();
        }
    });
    region.save(&repository, "job").unwrap();
    let opened = Region::open(&repository, "job", RegionOptions::default()).unwrap();
    assert_oracle!(content(&opened) == content(&region), "a write is not in the checkpoint");
}
