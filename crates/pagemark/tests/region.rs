//! Regions against a byte-by-byte shadow copy, with each mechanism.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use pagemark::address::offsets;
use pagemark::region::{Change, Changes, Region, RegionOptions, RegionSnapshot};
use pagemark::snapshot::{SnapshotOptions, SnapshotStore};
use pagemark::{Address, ErrorKind, Mechanism, PAGE_SIZE, PageNumber, RangeSet};
use pagemark_testing::{assert_oracle, assert_oracle_eq, cases};
use proptest::prelude::*;

const PAGES: usize = 40;
const BYTES: usize = PAGES * PAGE_SIZE;

/// A region, or none where this machine lacks the mechanism.
fn region(bytes: usize, mechanism: Mechanism, without_rollback: bool) -> Option<Region> {
    let options = RegionOptions { mechanism: Some(mechanism), without_rollback, ..RegionOptions::default() };
    region_with(bytes, options)
}

fn region_with(bytes: usize, options: RegionOptions) -> Option<Region> {
    let mechanism = options.mechanism;
    match Region::with_options(bytes, options) {
        Ok(region) => Some(region),
        Err(error) if error.kind() == ErrorKind::Unavailable => {
            pagemark_testing::skipped(&format!("{error}"));
            None
        }
        Err(error) => panic!("{mechanism:?}: {error}"),
    }
}

fn word(region: &Region, index: usize) -> &AtomicU64 {
    assert!(index < region.bytes() / 8);
    // SAFETY: the word lies in the region, which lives as long as the reference, and is accessed
    // atomically by all.
    unsafe { &*region.as_ptr().cast::<AtomicU64>().add(index) }
}

fn content(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.bytes()];
    region.read(0, &mut bytes).unwrap();
    bytes
}

#[derive(Clone, Debug)]
enum Step {
    /// Single stores, as programs make them.
    Store {
        word: usize,
        value: u64,
        count: usize,
        stride: usize,
    },
    Write {
        offset: usize,
        length: usize,
        value: u8,
    },
    ReadFrom {
        offset: usize,
        length: usize,
        value: u8,
    },
    Discard {
        offset: usize,
        length: usize,
    },
    Begin,
    Commit,
    CommitChanges,
    Rollback,
    Snapshot,
    Restore {
        which: usize,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let part = || (0usize..BYTES, prop_oneof![3 => 1usize..100, 1 => 1usize..20_000]);
    let part = move || part().prop_map(|(offset, length)| (offset, length.min(BYTES - offset)));
    prop_oneof![
        6 => (0usize..BYTES / 8, any::<u64>(), 1usize..8, 1usize..600)
            .prop_map(|(word, value, count, stride)| Step::Store { word, value, count, stride }),
        4 => (part(), any::<u8>()).prop_map(|((offset, length), value)| Step::Write { offset, length, value }),
        1 => (part(), any::<u8>()).prop_map(|((offset, length), value)| Step::ReadFrom { offset, length, value }),
        1 => part().prop_map(|(offset, length)| Step::Discard { offset, length }),
        4 => Just(Step::Begin),
        2 => Just(Step::Commit),
        2 => Just(Step::CommitChanges),
        3 => Just(Step::Rollback),
        1 => Just(Step::Snapshot),
        1 => (0usize..4).prop_map(|which| Step::Restore { which }),
    ]
}

/// A region and its expected content.
struct Machine {
    region: Region,
    now: Vec<u8>,
    /// The content at the beginning of the open transaction.
    before: Option<Vec<u8>>,
    snapshots: Vec<(RegionSnapshot, Vec<u8>)>,
    without_rollback: bool,
    at_last_commit: Vec<u8>,
}

impl Machine {
    fn new(region: Region, without_rollback: bool) -> Machine {
        let now = content(&region);
        let at_last_commit = now.clone();
        Machine { region, now, before: None, snapshots: Vec::new(), without_rollback, at_last_commit }
    }

    fn run(&mut self, step: &Step) {
        match *step {
            Step::Store { word: first, value, count, stride } => {
                for index in (0..count).map(|number| (first + number * stride) % (BYTES / 8)) {
                    word(&self.region, index).store(value ^ index as u64, Ordering::Relaxed);
                    self.now[index * 8..index * 8 + 8].copy_from_slice(&(value ^ index as u64).to_ne_bytes());
                }
            }
            Step::Write { offset, length, value } => {
                self.region.write(offset, &vec![value; length]).unwrap();
                self.now[offset..offset + length].fill(value);
            }
            Step::ReadFrom { offset, length, value } => {
                let mut file = tempfile::tempfile().unwrap();
                file.write_all(&vec![value; length]).unwrap();
                std::io::Seek::rewind(&mut file).unwrap();
                assert_eq!(self.region.read_from(&file, offset..offset + length).unwrap(), length);
                self.now[offset..offset + length].fill(value);
            }
            Step::Discard { offset, length } => {
                self.region.discard(offset..offset + length).unwrap();
                let end = (offset + length) / PAGE_SIZE * PAGE_SIZE;
                let start = offset.next_multiple_of(PAGE_SIZE).min(end);
                self.now[start..end].fill(0);
            }
            Step::Begin => match &self.before {
                None => {
                    self.region.begin().unwrap();
                    self.before = Some(self.now.clone());
                }
                Some(_) => {
                    assert!(matches!(self.region.begin(), Err(error) if error.kind() == ErrorKind::TransactionOpen))
                }
            },
            Step::Commit => match self.before.take() {
                Some(before) => {
                    let written = self.region.commit().unwrap();
                    let before = if self.without_rollback { &self.at_last_commit } else { &before };
                    self.check_written(before, &written);
                    self.at_last_commit = self.now.clone();
                }
                None => assert!(matches!(self.region.commit(), Err(error) if error.kind() == ErrorKind::NoTransaction)),
            },
            Step::CommitChanges => match self.before.take() {
                Some(before) => {
                    let changes = self.region.commit_changes().unwrap();
                    let before = if self.without_rollback { &self.at_last_commit } else { &before };
                    self.check_changes(before, &changes);
                    self.at_last_commit = self.now.clone();
                }
                None => {
                    let refused = self.region.commit_changes().unwrap_err();
                    assert_eq!(refused.kind(), ErrorKind::NoTransaction);
                }
            },
            Step::Rollback if self.without_rollback => {
                let expected = self.before.is_some();
                let refused = self.region.rollback().unwrap_err();
                assert_eq!(refused.kind() == ErrorKind::NoRollback, expected, "{refused}");
            }
            Step::Rollback => match self.before.take() {
                Some(before) => {
                    let written = self.region.rollback().unwrap();
                    self.check_written(&before, &written);
                    self.now = before;
                }
                None => {
                    assert!(matches!(self.region.rollback(), Err(error) if error.kind() == ErrorKind::NoTransaction))
                }
            },
            Step::Snapshot => {
                let snapshot = self.region.snapshot().unwrap();
                for (other, held) in &self.snapshots {
                    assert_oracle_eq!(*other == snapshot, *held == self.now, "equality is not that of the content");
                }
                self.snapshots.push((snapshot, self.now.clone()));
            }
            Step::Restore { which } => {
                if let Some((snapshot, held)) = self.snapshots.get(which) {
                    let restored = self.region.restore(snapshot).unwrap();
                    self.check_written(held, &restored);
                    self.now = held.clone();
                }
            }
        }
        if matches!(step, Step::Rollback | Step::Restore { .. } | Step::Commit | Step::CommitChanges) {
            assert_oracle!(content(&self.region) == self.now, "the content is wrong after {step:?}");
        }
    }

    /// Asserts that `written` contains all offsets whose content differs from `before`.
    fn check_written(&self, before: &[u8], written: &RangeSet) {
        assert!(written.iter().all(|range| range.end <= Address::from(BYTES)), "{written:?}");
        for (offset, (old, new)) in before.iter().zip(&self.now).enumerate() {
            assert_oracle!(
                old == new || written.contains(Address::from(offset)),
                "a write to {offset:#x} was missed: {written:x?}"
            );
        }
    }

    /// Asserts that the changes lead from `before` to the present content, and back.
    fn check_changes(&self, before: &[u8], changes: &Changes) {
        assert_eq!(&Changes::from_bytes(&changes.to_bytes()).unwrap(), changes);
        self.check_written(before, changes.offsets());
        let mut copy = before.to_vec();
        for Change { offset, new, old } in changes.iter() {
            assert_eq!(old.is_some(), !self.without_rollback);
            assert_oracle!(
                old.is_none_or(|old| old == &copy[offset..offset + new.len()]),
                "old content at {offset:#x}"
            );
            copy[offset..offset + new.len()].copy_from_slice(new);
        }
        assert_oracle!(copy == self.now, "the changes do not lead to the present content");
        if let Some(replica) = region(BYTES, Mechanism::Mprotect, true) {
            replica.write(0, before).unwrap();
            changes.apply(&replica).unwrap();
            assert_oracle!(content(&replica) == self.now, "the replica has other content");
            let reverted = changes.revert(&replica);
            let expected = if self.without_rollback { &self.now } else { before };
            assert_eq!(reverted.is_err(), self.without_rollback, "{reverted:?}");
            assert_oracle!(content(&replica) == expected, "the replica has other content after it was reverted");
        }
    }
}

fn behaves(mechanism: Mechanism, without_rollback: bool, steps: &[Step]) {
    behaves_with(RegionOptions { mechanism: Some(mechanism), without_rollback, ..RegionOptions::default() }, steps);
}

fn behaves_with(options: RegionOptions, steps: &[Step]) {
    let without_rollback = options.without_rollback;
    let Some(region) = region_with(BYTES, options) else { return };
    let mut machine = Machine::new(region, without_rollback);
    steps.iter().for_each(|step| machine.run(step));
    assert_oracle!(content(&machine.region) == machine.now, "the content is wrong in the end");
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 300, ..cases(64) })]

    #[test]
    fn pagemap_scan_behaves(steps in prop::collection::vec(step(), 1..60), without_rollback in any::<bool>()) {
        behaves(Mechanism::PagemapScan, without_rollback, &steps);
    }

    #[test]
    fn adaptive_behaves(
        steps in prop::collection::vec(step(), 1..120),
        without_rollback in any::<bool>(),
        sole_use in any::<bool>(),
    ) {
        let mechanism = Some(Mechanism::Adaptive);
        behaves_with(RegionOptions { mechanism, without_rollback, sole_use, store: None }, &steps);
    }

    #[test]
    fn mprotect_behaves(steps in prop::collection::vec(step(), 1..60), without_rollback in any::<bool>()) {
        behaves(Mechanism::Mprotect, without_rollback, &steps);
    }

    #[test]
    fn uffd_behaves(steps in prop::collection::vec(step(), 1..60), without_rollback in any::<bool>()) {
        behaves(Mechanism::Uffd, without_rollback, &steps);
    }

    #[test]
    fn emulate_behaves(steps in prop::collection::vec(step(), 1..60), without_rollback in any::<bool>()) {
        behaves(Mechanism::Emulate, without_rollback, &steps);
    }

    #[test]
    fn the_others_behave(steps in prop::collection::vec(step(), 1..40), without_rollback in any::<bool>()) {
        behaves(Mechanism::Compare, without_rollback, &steps);
        behaves(Mechanism::Full, without_rollback, &steps);
    }
}

/// Mechanisms of which an address space has only one, and which are tested in a process of their
/// own.
const ONCE_ONLY: [Mechanism; 2] = [Mechanism::SoftDirty, Mechanism::Ldt];

/// Names the mechanism in such a process.
const ONLY: &str = "PAGEMARK_ONLY_MECHANISM";

/// The mechanisms that work here, except those of which an address space has only one, because
/// tests run at the same time.
fn mechanisms() -> Vec<Mechanism> {
    if let Ok(only) = std::env::var(ONLY) {
        return vec![only.parse().unwrap()];
    }
    let all = Mechanism::ALL.into_iter().filter(|mechanism| !ONCE_ONLY.contains(mechanism));
    all.filter(|&mechanism| region(PAGE_SIZE, mechanism, false).is_some()).collect()
}

/// The mechanisms with which threads can write several regions at any time.
fn mechanisms_at_any_time() -> impl Iterator<Item = Mechanism> {
    mechanisms().into_iter().filter(|&mechanism| mechanism != Mechanism::SoftDirty)
}

/// The tests that run each of [`mechanisms`], for each mechanism of which an address space has only
/// one, in a process of its own.
#[test]
fn those_of_which_there_is_one_behave() {
    if let Ok(only) = std::env::var(ONLY) {
        let mechanism: Mechanism = only.parse().unwrap();
        let config = ProptestConfig { source_file: Some(file!()), ..cases(64) };
        proptest::test_runner::TestRunner::new(config)
            .run(&(prop::collection::vec(step(), 1..40), any::<bool>()), |(steps, without_rollback)| {
                behaves(mechanism, without_rollback, &steps);
                Ok(())
            })
            .unwrap();
        if mechanism == Mechanism::SoftDirty {
            one_region_at_a_time_has_the_soft_dirty_bits();
        }
        return;
    }
    for mechanism in ONCE_ONLY {
        if region(PAGE_SIZE, mechanism, false).is_none() {
            continue;
        }
        let tests = [
            "those_of_which_there_is_one_behave",
            "eight_threads_that_write_all_the_time_lose_nothing",
            "chained_transactions_of_eight_threads_lose_nothing",
            "eight_threads_roll_back_their_own_regions",
            "only_written_pages_are_returned",
            "a_page_that_was_put_back_and_is_written_again_is_found",
        ];
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--test-threads=1", "--nocapture", "--exact"])
            .args(tests)
            .env(ONLY, mechanism.name())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.contains("6 passed"), "{mechanism}: {said}");
    }
}

fn one_region_at_a_time_has_the_soft_dirty_bits() {
    let options = RegionOptions { mechanism: Some(Mechanism::SoftDirty), ..RegionOptions::default() };
    let first = Region::with_options(PAGE_SIZE, options.clone()).unwrap();
    let second = Region::with_options(PAGE_SIZE, options.clone());
    assert!(matches!(&second, Err(error) if error.kind() == ErrorKind::Unavailable), "{second:?}");
    drop(first);
    Region::with_options(PAGE_SIZE, options).unwrap();
}

#[test]
fn snapshots_are_equal_if_their_content_is_whichever_region_they_are_of() {
    let store = SnapshotStore::new();
    let options = RegionOptions { store: Some(store), ..RegionOptions::default() };
    let (a, b) = (Region::with_options(BYTES, options.clone()).unwrap(), Region::with_options(BYTES, options).unwrap());
    [&a, &b].into_iter().for_each(|region| region.write(5000, b"equal").unwrap());
    let (of_a, of_b) = (a.snapshot().unwrap(), b.snapshot().unwrap());
    assert_eq!(of_a, of_b);
    assert!(std::collections::HashSet::from([of_a.clone()]).contains(&of_b));
    assert!(matches!(a.restore(&of_b), Err(error) if error.kind() == ErrorKind::WrongRegion));
    b.write(5000, b"other").unwrap();
    assert_ne!(of_a, b.snapshot().unwrap());
    let elsewhere = Region::new(BYTES).unwrap();
    elsewhere.write(5000, b"equal").unwrap();
    assert_ne!(of_a, elsewhere.snapshot().unwrap(), "in a store of its own");
}

#[test]
fn a_budget_that_is_exceeded_costs_no_content() {
    let of_store = SnapshotOptions { budget_bytes: Some(100_000), ..SnapshotOptions::default() };
    let store = SnapshotStore::with_options(of_store).unwrap();
    let options = RegionOptions { store: Some(store), ..RegionOptions::default() };
    let region = Region::with_options(64 * PAGE_SIZE, options).unwrap();
    let empty = region.snapshot().unwrap();
    // The content cannot be compressed.
    let mut random = 1u64;
    let mut content = Vec::new();
    while content.len() < region.bytes() {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        content.push((random >> 56) as u8);
    }
    region.write(0, &content).unwrap();
    region.begin().unwrap();
    region.write(9, &[!content[9]]).unwrap();
    let refused = region.snapshot();
    let Err(ErrorKind::BudgetExceeded { budget_bytes, needed_bytes }) = refused.as_ref().map_err(|error| error.kind())
    else {
        panic!("{refused:?}")
    };
    assert!(budget_bytes == 100_000 && needed_bytes > 64 * PAGE_SIZE as u64, "{needed_bytes}");
    assert!(region.in_transaction());
    let mut found = vec![0; content.len()];
    region.read(0, &mut found).unwrap();
    assert_oracle!(
        found[9] == !content[9] && found[10..] == content[10..] && found[..9] == content[..9],
        "other content after a refused snapshot"
    );
    region.rollback().unwrap();
    region.read(0, &mut found).unwrap();
    assert_oracle!(found == content, "other content after the rollback");
    region.restore(&empty).unwrap();
    region.read(0, &mut found).unwrap();
    assert_oracle!(found.iter().all(|&byte| byte == 0), "other content after the restore");
}

#[test]
fn eight_threads_that_write_all_the_time_lose_nothing() {
    const WRITERS: usize = 8;
    /// Words of each writer, in pages that writers share.
    const EACH: usize = 64;
    for mechanism in mechanisms_at_any_time() {
        let region = Arc::new(region(BYTES, mechanism, false).unwrap());
        let stop = Arc::new(AtomicBool::new(false));
        let words = |writer: usize| (0..EACH).map(move |index| (writer + index * 71) * 8 % (BYTES / 8) + writer);
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let (region, stop) = (region.clone(), stop.clone());
                std::thread::spawn(move || {
                    let mut version = 0;
                    while !stop.load(Ordering::Relaxed) {
                        version += 1;
                        words(writer).for_each(|index| word(&region, index).store(version, Ordering::Relaxed));
                    }
                })
            })
            .collect();
        let mut copy: BTreeMap<usize, u64> = BTreeMap::new();
        let take = |copy: &mut BTreeMap<usize, u64>, written: &RangeSet| {
            for index in (0..WRITERS).flat_map(words).filter(|index| written.contains(Address::from(*index * 8))) {
                let version = word(&region, index).load(Ordering::Relaxed);
                let old = copy.insert(index, version).unwrap_or(0);
                assert_oracle!(old <= version, "{mechanism}: time ran backwards at word {index}");
            }
        };
        // Each transaction begins where the previous one ended, as without rollback.
        let all = RangeSet::from(offsets(0..BYTES));
        region.begin().unwrap();
        take(&mut copy, &all);
        for _ in 0..60 {
            let written = region.commit().unwrap();
            take(&mut copy, &written);
            region.begin().unwrap();
            // Writes between the two transactions belong to neither.
            take(&mut copy, &all);
        }
        stop.store(true, Ordering::Relaxed);
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        let written = region.commit().unwrap();
        take(&mut copy, &written);
        for index in (0..WRITERS).flat_map(words) {
            let now = word(&region, index).load(Ordering::Relaxed);
            assert_oracle_eq!(copy.get(&index).copied().unwrap_or(0), now, "{mechanism}: word {index}");
        }
    }
}

#[test]
fn chained_transactions_of_eight_threads_lose_nothing() {
    const WRITERS: usize = 8;
    for mechanism in mechanisms_at_any_time() {
        let region = Arc::new(region(BYTES, mechanism, true).unwrap());
        let stop = Arc::new(AtomicBool::new(false));
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let (region, stop) = (region.clone(), stop.clone());
                std::thread::spawn(move || {
                    let mut seed = writer as u64 + 1;
                    while !stop.load(Ordering::Relaxed) {
                        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        let index = (seed >> 33) as usize % (BYTES / 64) * 8 + writer;
                        word(&region, index).fetch_add(1, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        let mut copy = vec![0u64; BYTES / 8];
        let take = |copy: &mut Vec<u64>, written: &RangeSet| {
            for range in written.iter() {
                let words = range.start.to_usize() / 8..range.end.to_usize().div_ceil(8);
                for (index, held) in words.clone().zip(&mut copy[words]) {
                    let value = word(&region, index).load(Ordering::Relaxed);
                    assert_oracle!(*held <= value, "{mechanism}: time ran backwards at word {index}");
                    *held = value;
                }
            }
        };
        for _ in 0..100 {
            region.begin().unwrap();
            std::thread::yield_now();
            take(&mut copy, &region.commit().unwrap());
        }
        stop.store(true, Ordering::Relaxed);
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        region.begin().unwrap();
        take(&mut copy, &region.commit().unwrap());
        for (index, held) in copy.iter().enumerate() {
            assert_oracle_eq!(*held, word(&region, index).load(Ordering::Relaxed), "{mechanism}: word {index}");
        }
    }
}

#[test]
fn eight_threads_roll_back_their_own_regions() {
    for mechanism in mechanisms_at_any_time() {
        std::thread::scope(|scope| {
            for thread in 0..8u64 {
                scope.spawn(move || {
                    let region = region(BYTES, mechanism, false).unwrap();
                    let index = |number: u64| (number * 977 + thread) as usize % (BYTES / 8);
                    (0..100).for_each(|number| word(&region, index(number)).store(number + 1, Ordering::Relaxed));
                    let before = content(&region);
                    for round in 0..20 {
                        region.begin().unwrap();
                        (0..100)
                            .for_each(|number| word(&region, index(number * round)).store(round, Ordering::Relaxed));
                        region.rollback().unwrap();
                        assert_oracle!(content(&region) == before, "{mechanism}: other content after the rollback");
                    }
                });
            }
        });
    }
}

/// Commits, and asserts that exactly `expected` is reported.
#[track_caller]
fn assert_commits(region: &Region, expected: &RangeSet, when: &str) {
    let written = region.commit().unwrap();
    let is_missed = !expected.iter().all(|range| written.covers(range));
    assert_oracle!(!is_missed, "{when}: a write was missed: {written:x?} lacks some of {expected:x?}");
    assert_eq!(written, *expected, "{when}");
}

#[test]
fn only_written_pages_are_returned() {
    for mechanism in mechanisms().into_iter().filter(|&mechanism| mechanism != Mechanism::Full) {
        let region = region(BYTES, mechanism, false).unwrap();
        region.write(0, &[1; BYTES]).unwrap();
        let unit = region.granularity().to_usize();
        for round in 0..40 {
            region.begin().unwrap();
            word(&region, 512 * 3 + 5).store(round + 2, Ordering::Relaxed);
            let offset = (512 * 3 + 5) * 8;
            let expected = RangeSet::from(offsets(offset / unit * unit..(offset / unit + 1) * unit));
            assert_commits(&region, &expected, mechanism.name());
            region.begin().unwrap();
            let written = region.commit().unwrap();
            if mechanism != Mechanism::Adaptive {
                assert!(written.is_empty(), "{mechanism}: {written:x?}");
            }
        }
    }
}

#[test]
fn hot_pages_are_reported_exactly_and_cool_down() {
    const PAGES: usize = 512;
    // The pages are one run, runs of a few, and single pages.
    let patterns: [fn(usize) -> bool; 3] =
        [|page| (100..240).contains(&page), |page| page % 9 < 4 && page > 20, |page| page % 3 == 1];
    let promises = [(false, false), (true, false), (false, true), (true, true)];
    for (is_hot, (without_rollback, sole_use)) in
        patterns.into_iter().flat_map(|pattern| promises.map(|p| (pattern, p)))
    {
        let mechanism = Some(Mechanism::Adaptive);
        let options = RegionOptions { mechanism, without_rollback, sole_use, store: None };
        let Some(region) = region_with(PAGES * PAGE_SIZE, options) else { return };
        region.write(0, &vec![1; region.bytes()]).unwrap();
        region.begin().unwrap();
        region.commit().unwrap();
        let page_range = |page: usize| PageNumber::from(page).addresses();
        let hot: RangeSet = (0..PAGES).filter(|&page| is_hot(page)).map(page_range).collect();
        for round in 0..400 {
            let cold = round * 7 % PAGES;
            let mut expected = hot.clone();
            expected.insert(page_range(cold));
            region.begin().unwrap();
            (0..PAGES)
                .filter(|&page| is_hot(page))
                .for_each(|page| word(&region, page * 512 + 3).store(7, Ordering::Relaxed));
            word(&region, cold * 512).store(round as u64, Ordering::Relaxed);
            assert_commits(&region, &expected, &format!("transaction {round}"));
        }
        // Some intervals after the last write, the pages count as cool.
        let mut rounds = 0;
        loop {
            region.begin().unwrap();
            if region.commit().unwrap().is_empty() {
                break;
            }
            rounds += 1;
            assert!(rounds < 200, "what is no longer written is still told");
        }
        // Cool pages are no longer reported.
        for page in [5, 101, 239] {
            region.begin().unwrap();
            word(&region, page * 512).store(9, Ordering::Relaxed);
            assert_commits(&region, &RangeSet::from(page_range(page)), "a cool page");
        }
    }
}

#[test]
fn hot_pages_cool_down_where_transactions_are_rolled_back() {
    for sole_use in [false, true] {
        let options = RegionOptions { mechanism: Some(Mechanism::Adaptive), sole_use, ..RegionOptions::default() };
        let Some(region) = region_with(BYTES, options) else { return };
        region.write(0, &[1; BYTES]).unwrap();
        let before = content(&region);
        let roll_back = |pages: usize| {
            region.begin().unwrap();
            (0..pages).for_each(|page| word(&region, page * 512).store(7, Ordering::Relaxed));
            let written = region.rollback().unwrap();
            assert_oracle!(content(&region) == before, "other content after the rollback");
            written
        };
        let hot = BYTES / PAGE_SIZE / 2;
        (0..20).for_each(|_| _ = roll_back(hot));
        assert!((0..1000).any(|_| roll_back(0).is_empty()), "pages that nobody writes are put back each time");
    }
}

#[test]
fn a_page_that_was_put_back_and_is_written_again_is_found() {
    for mechanism in mechanisms() {
        let region = region(PAGE_SIZE, mechanism, false).unwrap();
        region.begin().unwrap();
        region.write(0, &[1]).unwrap();
        region.rollback().unwrap();
        region.write(0, &[1]).unwrap();
        region.begin().unwrap();
        region.write(0, &[2]).unwrap();
        region.rollback().unwrap();
        assert_oracle_eq!(content(&region)[0], 1, "{mechanism}: rolled back");
        region.write(0, &[0]).unwrap();
        let empty = region.snapshot().unwrap();
        for _ in 0..2 {
            region.write(0, &[1]).unwrap();
            region.restore(&empty).unwrap();
            assert_oracle_eq!(content(&region)[0], 0, "{mechanism}: restored");
        }
    }
}

/// Runs these tests once more as on older kernels, but for those of threads, which depend less on
/// the kernel and take longest.
#[test]
fn regions_behave_on_older_kernels() {
    pagemark_testing::again_as_older_linux(&["--skip", "threads"], 15);
}

/// Bytes of memory, and of page tables, that the process has.
fn memory_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let kib = |name: &str| -> u64 {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    };
    (kib("VmRSS:") + kib("VmPTE:")) << 10
}

/// A case of [`memory_that_was_never_written_costs_nothing`], alone in its process.
#[test]
fn a_sparse_region() {
    let Ok(only) = std::env::var("PAGEMARK_SPARSE") else { return };
    let mechanism: Mechanism = only.parse().unwrap();
    const BYTES: usize = 4 << 30;
    // A kernel that uses huge pages wherever it can would make one of each page that is written.
    // SAFETY: the call changes how memory is made from now on, not what is in it.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) }, 0);
    // Pages that share a page table with other pages that are never written.
    let offsets_written: Vec<usize> = (0..20).map(|index| index * (200 << 20) + 77 * PAGE_SIZE + 5).collect();
    let before = memory_bytes();
    let region = region(BYTES, mechanism, false).unwrap();
    for &offset in &offsets_written {
        region.write(offset, &[1]).unwrap();
    }
    region.begin().unwrap();
    for &offset in &offsets_written {
        region.write(offset + 1, &[2]).unwrap();
    }
    region.write(BYTES - 1, &[3]).unwrap();
    let rolled_back = region.rollback().unwrap();
    assert!(mechanism == Mechanism::Full || rolled_back.page_count() < 25, "{mechanism}: {rolled_back:x?}");
    let first = region.snapshot().unwrap();
    for &offset in &offsets_written {
        let mut found = [0; 2];
        region.read(offset, &mut found).unwrap();
        assert_oracle_eq!(found, [1, 0], "{mechanism}: the content at {offset:#x}");
        first.content().read_at(Address::from(offset), &mut found).unwrap();
        assert_oracle_eq!(found, [1, 0], "{mechanism}: the content at {offset:#x}");
    }
    let mut last = [9];
    region.read(BYTES - 1, &mut last).unwrap();
    assert_oracle_eq!(last, [0], "{mechanism}: the last byte");
    let used = memory_bytes() - before;
    // Tables of `uffd` and of `emulate` grow with the region.
    let most = if matches!(mechanism, Mechanism::Uffd | Mechanism::Emulate) { 40 << 20 } else { 8 << 20 };
    assert!(used < most, "{mechanism}: {used} bytes for 20 pages");
    println!("a sparse region took {used} bytes");
}

#[test]
fn memory_that_was_never_written_costs_nothing() {
    if std::env::var(ONLY).is_ok() {
        return;
    }
    for mechanism in mechanisms() {
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--test-threads=1", "--nocapture", "--exact", "a_sparse_region"])
            .env("PAGEMARK_SPARSE", mechanism.name())
            .output()
            .unwrap();
        let printed = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && printed.contains("a sparse region took"), "{mechanism}: {printed}");
        eprintln!("{mechanism}: {}", printed.lines().find(|line| line.contains("took")).unwrap_or_default());
    }
}

/// Freed pages hold zeros, which `pagemap-scan` and `adaptive` report as a write, and which a
/// rollback undoes.
#[test]
fn pages_that_the_program_frees_by_itself_are_restored() {
    for mechanism in [Mechanism::PagemapScan, Mechanism::Adaptive] {
        for pages in [1..2, 3..700, 512..1024, 0..1536] {
            let Some(region) = region(1536 * PAGE_SIZE, mechanism, false) else { continue };
            let content = vec![7; region.bytes()];
            region.write(0, &content).unwrap();
            region.begin().unwrap();
            let (start, bytes) = (pages.start * PAGE_SIZE, pages.len() * PAGE_SIZE);
            // SAFETY: the pages belong to the region, and no reference to them exists.
            let freed = unsafe { libc::madvise(region.as_ptr().add(start).cast(), bytes, libc::MADV_DONTNEED) };
            assert_eq!(freed, 0);
            assert_oracle!(
                region.rollback().unwrap().covers(offsets(start..start + bytes)),
                "{mechanism}, {pages:?}: freed pages are not reported"
            );
            assert_oracle!(
                self::content(&region) == content,
                "{mechanism}, {pages:?}: other content after the rollback"
            );
        }
    }
}
