//! The repository as a whole: against a model, under faults, with damaged files, by several at once.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use proptest::prelude::*;
use tempfile::TempDir;

use super::storage::faults::{Faults, Plan};
use super::*;
use crate::{Kind, Mechanism, PageTree, Store};

/// What a checkpoint holds: page number to the number that its content is made of.
type Pages = BTreeMap<u64, u64>;
/// All checkpoints.
type Model = BTreeMap<(String, u64), Pages>;

fn manifest(job: &str, root: ContentId, pages: u64) -> Manifest {
    Manifest {
        job: job.into(),
        sequence: 0,
        taken_unix_us: 0,
        command: vec!["program".into()],
        mechanism: Mechanism::Full,
        kind: TargetKind::Memory,
        spaces: vec![SpaceRecord { pid: 17, name: "program".into(), root, pages, mappings: Vec::new() }],
        files: Vec::new(),
        state: Vec::new(),
        cost: Cost::default(),
    }
}

/// Content made of a number: zeros for 0, half of the others can be compressed.
fn page(number: u64) -> [u8; PAGE_SIZE] {
    thread_local! {
        static MADE: RefCell<HashMap<u64, [u8; PAGE_SIZE]>> = RefCell::default();
    }
    let make = || {
        let mut random = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        std::array::from_fn(|at| {
            if number.is_multiple_of(2) {
                return number.to_le_bytes()[at % 8];
            }
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            (random >> 24) as u8
        })
    };
    MADE.with_borrow_mut(|made| *made.entry(number).or_insert_with(make))
}

fn commit(repository: &Repository, job: &str, pages: &Pages) -> Result<CheckpointInfo, RepositoryError> {
    let mut writer = repository.writer("a test", Duration::ZERO)?;
    let mut tree = PageTree::new();
    for (&number, &content) in pages {
        tree.set(number, writer.put(Kind::Page, &page(content))?);
    }
    let root = tree.save(&mut writer)?;
    writer.commit(manifest(job, root, tree.page_count()))
}

fn read(repository: &Repository, job: &str, sequence: u64) -> Result<Vec<(u64, [u8; PAGE_SIZE])>, RepositoryError> {
    let checkpoint = repository.read(job, sequence)?;
    let tree = PageTree::load(checkpoint.manifest.spaces[0].root, &checkpoint)?;
    let mut pages = Vec::new();
    for (number, id) in tree.iter() {
        let mut content = [0; PAGE_SIZE];
        checkpoint.get_page(id, &mut content)?;
        pages.push((number, content));
    }
    Ok(pages)
}

fn content(pages: &Pages) -> Vec<(u64, [u8; PAGE_SIZE])> {
    pages.iter().filter(|(_, content)| **content != 0).map(|(&number, &content)| (number, page(content))).collect()
}

/// The checkpoints that are there, each compared with what it was made of.
fn check(repository: &Repository, model: &Model) -> BTreeSet<(String, u64)> {
    let mut found = BTreeSet::new();
    for job in repository.jobs().unwrap() {
        for info in repository.checkpoints(&job).unwrap() {
            let expected = &model[&(job.clone(), info.sequence)];
            assert!(
                read(repository, &job, info.sequence).unwrap() == content(expected),
                "{job}@{} differs",
                info.sequence
            );
            found.insert((job.clone(), info.sequence));
        }
    }
    found
}

fn files(path: &Path) -> BTreeSet<PathBuf> {
    let mut files = BTreeSet::new();
    for entry in std::fs::read_dir(path).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(self::files(&path));
        }
        files.insert(path);
    }
    files
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &target),
            false => drop(std::fs::copy(entry.path(), target).unwrap()),
        }
    }
}

/// Storage that works, and does not wait for the disk.
fn unsynced() -> Storage {
    Storage { faults: Some(Faults::new(Plan::Nothing, 0)) }
}

/// A repository of two jobs with some checkpoints each, most of which share content.
fn example(checkpoints: u64) -> (TempDir, Repository, Model) {
    let directory = tempfile::tempdir().unwrap();
    let repository = Repository::create_on(&directory.path().join("repository"), unsynced()).unwrap();
    let mut model = Model::new();
    for round in 0..checkpoints {
        let job = ["one", "two"][(round % 2) as usize];
        let pages: Pages = (0..24).map(|number| (number * 700, number * (round / 3 + 1) % 97)).collect();
        let info = commit(&repository, job, &pages).unwrap();
        model.insert((job.into(), info.sequence), pages);
    }
    (directory, repository, model)
}

#[test]
fn what_is_committed_is_read() {
    let (_directory, repository, model) = example(30);
    for repository in [&repository, &Repository::open(repository.path()).unwrap()] {
        assert_eq!(repository.jobs().unwrap(), ["one", "two"]);
        assert!(check(repository, &model).iter().eq(model.keys()));
    }
    let info = repository.checkpoints("one").unwrap()[0];
    let checkpoint = repository.read("one", 1).unwrap();
    assert_eq!(checkpoint.manifest.cost.written_bytes, info.written_bytes);
    let tree = PageTree::load(checkpoint.manifest.spaces[0].root, &checkpoint).unwrap();
    assert_eq!(checkpoint.get(Kind::Page, tree.get(700)).unwrap(), page(1));
    assert!(matches!(repository.read("one", 99), Err(RepositoryError::NoSuchCheckpoint { .. })));
    assert!(repository.checkpoints("three").unwrap().is_empty());
    assert!(repository.inner.view().tables.len() < 12, "tables are not merged");
    let report = repository.verify(&mut |_| {}).unwrap();
    assert_eq!((report.damaged, report.checkpoints), (Vec::new(), 30));
}

#[test]
fn content_is_written_once() {
    let (_directory, repository, mut model) = example(0);
    let pages: Pages = (0..200).map(|number| (number, 2 * number + 1)).collect();
    let first = commit(&repository, "one", &pages).unwrap();
    assert!(first.written_bytes > 200 * PAGE_SIZE as u64);
    let again = commit(&repository, "two", &pages).unwrap();
    assert!(again.written_bytes < 2048, "{} bytes for what was there", again.written_bytes);
    let zeros = commit(&repository, "two", &(0..200).map(|number| (number, 0)).collect()).unwrap();
    assert!(zeros.written_bytes < 2048, "{} bytes for zeros", zeros.written_bytes);
    model.insert(("one".into(), 1), pages.clone());
    model.insert(("two".into(), 1), pages);
    model.insert(("two".into(), 2), Pages::new());
    check(&repository, &model);
}

#[test]
fn only_the_owner_reads() {
    let (_directory, repository, _) = example(8);
    for path in files(repository.path()).into_iter().chain([repository.path().to_owned()]) {
        let mode = std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, if path.is_dir() { 0o700 } else { 0o600 }, "{}", path.display());
    }
}

#[test]
fn only_one_writes() {
    let (_directory, repository, _) = example(1);
    let writer = repository.writer("holds it", Duration::ZERO).unwrap();
    let error = match repository.writer("waits", Duration::from_millis(30)) {
        Err(error @ RepositoryError::Locked { .. }) => error.to_string(),
        _ => panic!("two writers"),
    };
    assert!(error.contains(&format!("process {} (holds it)", std::process::id())), "{error}");
    drop(writer);
    repository.writer("waits", Duration::ZERO).unwrap();
}

#[test]
fn what_is_not_committed_leaves_nothing() {
    let (_directory, repository, model) = example(3);
    let before = files(repository.path());
    let mut writer = repository.writer("a test", Duration::ZERO).unwrap();
    for number in 1000..1200 {
        let id = writer.put(Kind::Page, &page(number)).unwrap();
        assert_eq!(writer.get(Kind::Page, id).unwrap(), page(number));
        let mut content = [0; PAGE_SIZE];
        writer.get_page(id, &mut content).unwrap();
        assert_eq!(content, page(number));
    }
    assert_ne!(files(repository.path()), before);
    drop(writer);
    assert_eq!(files(repository.path()), before);
    check(&repository, &model);
}

#[test]
fn a_checkpoint_names_only_what_is_there() {
    let (_directory, repository, _) = example(1);
    let writer = repository.writer("a test", Duration::ZERO).unwrap();
    let nowhere = ContentId([9; 16]);
    let refused = writer.commit(manifest("one", nowhere, 1));
    assert!(matches!(refused, Err(RepositoryError::Store(StoreError::Missing { id })) if id == nowhere));
}

#[test]
fn refuses_what_is_no_repository_of_its_own() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a");
    assert!(matches!(Repository::open(&path), Err(RepositoryError::NotARepository { .. })));
    Repository::open_or_create(&path).unwrap();
    assert!(matches!(Repository::create(&path), Err(RepositoryError::Exists { .. })));
    Repository::open_or_create(&path).unwrap();
    assert!(matches!(Repository::create(directory.path()), Err(RepositoryError::NotEmpty { .. })));
    let config = std::fs::read_to_string(path.join("config")).unwrap();
    std::fs::write(path.join("config"), config.replace("\"format\": 1", "\"format\": 2")).unwrap();
    assert!(matches!(Repository::open(&path), Err(RepositoryError::NewerFormat { found: 2, known: 1, .. })));
    std::fs::write(path.join("config"), &config[..config.len() / 2]).unwrap();
    assert!(matches!(Repository::open(&path), Err(RepositoryError::DamagedConfig { .. })));
    let repository = {
        std::fs::write(path.join("config"), &config).unwrap();
        Repository::open(&path).unwrap()
    };
    std::fs::remove_dir_all(&path).unwrap();
    Repository::create(&path).unwrap();
    assert!(matches!(repository.writer("a test", Duration::ZERO), Err(RepositoryError::Replaced { .. })));
    for name in ["", ".", "..", ".hidden", "a/b", "a\0b", "ä", &"a".repeat(65)] {
        assert!(matches!(repository.checkpoints(name), Err(RepositoryError::BadJobName { .. })), "{name:?}");
    }
}

#[test]
fn without_index_files_everything_is_found() {
    let (_directory, repository, mut model) = example(20);
    let indexes = || files(&repository.path().join("index"));
    assert!(!indexes().is_empty());
    indexes().iter().for_each(|path| std::fs::remove_file(path).unwrap());
    for repository in [&repository, &Repository::open(repository.path()).unwrap()] {
        assert!(check(repository, &model).iter().eq(model.keys()));
        let before = files(&repository.path().join("packs")).len();
        let pages = model[&("one".into(), 1)].clone();
        let info = commit(repository, "one", &pages).unwrap();
        model.insert(("one".into(), info.sequence), pages);
        assert_eq!(files(&repository.path().join("packs")).len(), before + 1);
    }
}

#[test]
fn a_pack_whose_table_is_damaged_is_read_and_then_written_anew() {
    let (_directory, repository, model) = example(3);
    let packs = files(&repository.path().join("packs"));
    for path in &packs {
        let file = File::options().write(true).open(path).unwrap();
        file.set_len(file.metadata().unwrap().len() - 1).unwrap();
    }
    let repository = Repository::open(repository.path()).unwrap();
    check(&repository, &model);
    let report = repository.verify(&mut |_| {}).unwrap();
    assert_eq!(report.damaged.len(), packs.len());
    assert!(report.damaged.iter().all(|damage| damage.touched.is_empty()));
    repository.prune(&Policy::default(), None, &mut |_| {}).unwrap();
    assert_eq!(repository.verify(&mut |_| {}).unwrap().damaged, []);
    check(&repository, &model);
}

#[test]
fn a_prune_gives_space_back_and_leaves_what_is_read() {
    let (_directory, repository, mut model) = example(30);
    let reading = repository.read("one", 2).unwrap();
    let other = Repository::open(repository.path()).unwrap();
    let policy = Policy { keep_last: Some(1), keep_every: None };
    let report = other.prune(&policy, None, &mut |_| {}).unwrap();
    assert_eq!((report.removed.len(), &report.in_use[..]), (27, &[("one".to_owned(), 2)][..]));
    assert!(report.freed_bytes > 0);
    model.retain(|(job, sequence), _| *sequence == 15 || (job == "one" && *sequence == 2));
    assert!(check(&repository, &model).iter().eq(model.keys()), "another's view is out of date");
    PageTree::load(reading.manifest.spaces[0].root, &reading).unwrap();
    drop(reading);
    assert_eq!(repository.prune(&policy, Some("one"), &mut |_| {}).unwrap().removed, [("one".to_owned(), 2)]);
    assert!(repository.prune(&policy, None, &mut |_| {}).unwrap().removed.is_empty());
    assert_eq!(repository.verify(&mut |_| {}).unwrap().damaged, []);
    assert!(matches!(repository.read("one", 2), Err(RepositoryError::NoSuchCheckpoint { .. })));
    let info = commit(&repository, "one", &Pages::new()).unwrap();
    assert_eq!(info.sequence, 16);
}

#[test]
fn readers_go_on_while_others_commit_and_prune() {
    let (_directory, repository, model) = example(6);
    let path = repository.path().to_owned();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let repository = Repository::open(&path).unwrap();
                    let mut rounds = 0;
                    while rounds < 3 || !stop.load(std::sync::atomic::Ordering::Relaxed) {
                        for job in ["one", "two"] {
                            let Some(info) = repository.checkpoints(job).unwrap().pop() else { continue };
                            match read(&repository, job, info.sequence) {
                                Ok(pages) => assert!(pages == content(&model[&(job.into(), 3)])),
                                // Pruned between the two calls.
                                Err(RepositoryError::NoSuchCheckpoint { .. }) => {}
                                Err(error) => panic!("{error}"),
                            }
                        }
                        rounds += 1;
                    }
                })
            })
            .collect();
        for round in 0..25 {
            // Content that goes again, beside content that stays: packs are written anew.
            commit(&repository, "three", &(0..100).map(|number| (number, 1000 * round + number)).collect()).unwrap();
            for job in ["one", "two"] {
                commit(&repository, job, &model[&(job.into(), 3)]).unwrap();
            }
            repository.prune(&Policy { keep_last: Some(1), keep_every: None }, None, &mut |_| {}).unwrap();
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        readers.into_iter().for_each(|reader| reader.join().unwrap());
    });
    assert_eq!(repository.verify(&mut |_| {}).unwrap().damaged, []);
}

#[derive(Debug, Clone)]
enum Action {
    /// Changes some pages of a job and commits.
    Commit {
        job: usize,
        changes: Vec<(u64, u64)>,
    },
    Abort {
        contents: Vec<u64>,
    },
    Prune {
        keep_last: u32,
        job: Option<usize>,
    },
    Reopen,
}

fn action() -> impl Strategy<Value = Action> {
    let changes = prop::collection::vec((0u64..300, 0u64..120), 0..30);
    prop_oneof![
        6 => (0usize..2, changes).prop_map(|(job, changes)| Action::Commit { job, changes }),
        1 => prop::collection::vec(any::<u64>(), 0..10).prop_map(|contents| Action::Abort { contents }),
        2 => (0u32..4, prop::option::of(0usize..2)).prop_map(|(keep_last, job)| Action::Prune { keep_last, job }),
        1 => Just(Action::Reopen),
    ]
}

proptest! {
    #![proptest_config(pagemark_testing::cases(60))]

    #[test]
    fn behaves_like_a_map_of_checkpoints(actions in prop::collection::vec(action(), 1..25)) {
        let (_directory, mut repository, mut model) = example(0);
        let mut present: Vec<Pages> = vec![Pages::new(); 2];
        let jobs = ["one", "two"];
        for action in actions {
            match action {
                Action::Commit { job, changes } => {
                    present[job].extend(changes);
                    let info = commit(&repository, jobs[job], &present[job]).unwrap();
                    model.insert((jobs[job].into(), info.sequence), present[job].clone());
                }
                Action::Abort { contents } => {
                    let mut writer = repository.writer("a test", Duration::ZERO).unwrap();
                    for content in contents {
                        writer.put(Kind::Page, &page(content)).unwrap();
                    }
                }
                Action::Prune { keep_last, job } => {
                    let job = job.map(|job| jobs[job]);
                    let policy = Policy { keep_last: Some(keep_last), keep_every: None };
                    let report = repository.prune(&policy, job, &mut |_| {}).unwrap();
                    let mut expected = Vec::new();
                    for name in jobs.iter().filter(|name| job.is_none_or(|job| job == **name)) {
                        let all: Vec<_> = model.keys().filter(|(job, _)| job == name).cloned().collect();
                        expected.extend(all[..all.len().saturating_sub(keep_last.max(1) as usize)].to_vec());
                    }
                    model.retain(|key, _| !expected.contains(key));
                    prop_assert_eq!(report.removed, expected);
                    prop_assert!(report.unreadable.is_empty());
                }
                Action::Reopen => repository = Repository::open_on(repository.path(), unsynced()).unwrap(),
            }
            prop_assert!(check(&repository, &model).iter().eq(model.keys()));
            prop_assert_eq!(repository.verify(&mut |_| {}).unwrap().damaged, vec![]);
        }
    }
}

/// What is done when a fault strikes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Work {
    Commit,
    Prune,
    Create,
}

struct Struck {
    failed: Option<RepositoryError>,
    steps: usize,
}

/// Does the work on a copy of the example, with a fault, and then what a restart does.
fn strike(base: &Path, model: &Model, work: Work, plan: Plan, seed: u64, power: bool) -> Struck {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("repository");
    let mut model = model.clone();
    let mut surely: BTreeSet<_> = model.keys().cloned().collect();
    let new: Pages = (0..90).map(|number| (number * 3, number + 5000)).collect();
    let new_key = ("one".to_owned(), model.keys().filter(|(job, _)| job == "one").count() as u64 + 1);
    let faults = Faults::new(plan, seed);
    let storage = Storage { faults: Some(faults.clone()) };
    let failed = match work {
        Work::Create => {
            model.clear();
            surely.clear();
            Repository::create_on(&path, storage).err()
        }
        Work::Commit => {
            copy(base, &path);
            model.insert(new_key.clone(), new.clone());
            let before = files(&path);
            let repository = Repository::open_on(&path, storage).unwrap();
            let failed = commit(&repository, "one", &new).err();
            if failed.is_none() {
                surely.insert(new_key.clone());
            } else if !faults.is_dead() {
                let now = check(&repository, &model);
                assert!(now == surely, "{plan:?}: it failed but is there, or something is gone: {failed:?}");
                if matches!(plan, Plan::DiskFull { .. }) {
                    assert_eq!(files(&path), before, "{plan:?} left something behind");
                }
            }
            failed
        }
        Work::Prune => {
            copy(base, &path);
            surely.retain(|(job, sequence)| job == "two" || *sequence > 4);
            let repository = Repository::open_on(&path, storage).unwrap();
            let policy = Policy { keep_last: Some(2), keep_every: None };
            repository.prune(&policy, Some("one"), &mut |_| {}).err()
        }
    };
    if power {
        faults.lose_power();
    }

    let repository = match Repository::open_on(&path, unsynced()) {
        Err(RepositoryError::NotARepository { .. }) if work == Work::Create && failed.is_some() => {
            Repository::create_on(&path, unsynced()).unwrap()
        }
        opened => opened.unwrap(),
    };
    let found = check(&repository, &model);
    assert!(found.is_superset(&surely), "{plan:?}: checkpoints are gone");
    assert_eq!(repository.verify(&mut |_| {}).unwrap().damaged, [], "{plan:?}");
    let last: Pages = (0..20).map(|number| (number, number + 7000)).collect();
    let info = commit(&repository, "one", &last).unwrap();
    model.insert(("one".into(), info.sequence), last);
    repository.prune(&Policy::default(), None, &mut |_| {}).unwrap();
    assert_eq!(check(&repository, &model).len(), found.len() + 1);
    let leftovers: Vec<_> =
        files(&path).into_iter().filter(|path| path.extension().is_some_and(|end| end == "tmp")).collect();
    assert!(leftovers.is_empty(), "{plan:?} left {leftovers:?}");
    Struck { failed, steps: faults.steps() }
}

#[test]
fn killed_at_any_step_it_keeps_every_complete_checkpoint() {
    let (_directory, repository, model) = example(12);
    let base = repository.path();
    let mut points = 0;
    for (work, seeds) in [(Work::Create, 12), (Work::Commit, 20), (Work::Prune, 14)] {
        let steps = strike(base, &model, work, Plan::Nothing, 0, false).steps;
        for at in 1..=steps {
            for seed in 0..seeds {
                // Seed 0: killed only, the machine goes on.
                let struck = strike(base, &model, work, Plan::Kill { at }, seed * 7919 + at as u64, seed > 0);
                assert!(struck.steps == at, "{work:?} does not always take the same steps");
                points += 1;
            }
        }
        eprintln!("{work:?}: {steps} steps");
    }
    assert!(points >= 1000, "only {points} points");
}

#[test]
fn a_full_disk_or_an_error_at_any_step_costs_only_what_was_under_way() {
    let (_directory, repository, model) = example(12);
    let base = repository.path();
    for work in [Work::Commit, Work::Prune] {
        let steps = strike(base, &model, work, Plan::Nothing, 0, false).steps;
        let mut failures = 0;
        for at in 1..=steps {
            let full = strike(base, &model, work, Plan::DiskFull { from: at }, at as u64, false);
            if let Some(error) = full.failed {
                assert!(error.is_disk_full(), "{error}");
                failures += 1;
            }
            strike(base, &model, work, Plan::Error { at }, at as u64, false);
            strike(base, &model, work, Plan::Error { at }, at as u64, true);
        }
        assert!(failures > 10, "{work:?} failed at {failures} of {steps} steps only");
    }
}

/// The checkpoints that cannot be read. What can be is compared.
fn unreadable(repository: &Repository, model: &Model) -> BTreeSet<(String, u64)> {
    let mut failed = BTreeSet::new();
    for ((job, sequence), pages) in model {
        match read(repository, job, *sequence) {
            Ok(read) => assert!(read == content(pages), "{job}@{sequence} is read, but wrong"),
            Err(_) => drop(failed.insert((job.clone(), *sequence))),
        }
    }
    failed
}

fn touched(report: &VerifyReport) -> BTreeSet<(String, u64)> {
    let touched = report.damaged.iter().flat_map(|damage| &damage.touched);
    touched.map(|touched| (touched.job.clone(), touched.sequence)).collect()
}

#[test]
fn damage_anywhere_is_noticed_and_told_exactly() {
    let (_directory, repository, model) = example(9);
    let path = repository.path();
    let mut random = 88172645463325252u64;
    let mut below = |end: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random >> 16) % end
    };
    let (mut lost, mut harmless) = (0, 0);
    for file in files(path).into_iter().filter(|path| path.is_file() && !path.ends_with("lock")) {
        let original = std::fs::read(&file).unwrap();
        for round in 0..24 {
            let mut damaged = original.clone();
            let at = below(original.len() as u64) as usize;
            match round {
                0 => damaged.truncate(at),
                1 => damaged[at..].fill(0),
                2 => damaged.extend_from_slice(&original),
                3 => damaged.clear(),
                // The table and its tail too, which are short.
                4..10 => damaged[original.len() - 1 - at % original.len().min(400)] ^= 1 << below(8),
                _ => damaged[at] ^= 1 << below(8),
            }
            if damaged == original {
                continue;
            }
            std::fs::write(&file, &damaged).unwrap();
            let repository = match Repository::open(path) {
                Ok(repository) => repository,
                Err(error) => {
                    assert!(file.ends_with("config"), "{error}");
                    continue;
                }
            };
            let failed = unreadable(&repository, &model);
            let report = repository.verify(&mut |_| {}).unwrap();
            assert_eq!(touched(&report), failed, "{} changed at {at}:\n{report}", file.display());
            if !file.ends_with("config") {
                assert!(!report.damaged.is_empty(), "{} changed at {at} and nobody noticed", file.display());
            }
            if failed.is_empty() { harmless += 1 } else { lost += 1 }
        }
        std::fs::write(&file, &original).unwrap();
        // A file that is gone is noticed where it is needed.
        if !file.ends_with("config")
            && !file.parent().unwrap().ends_with("one")
            && !file.parent().unwrap().ends_with("two")
        {
            std::fs::remove_file(&file).unwrap();
            let repository = Repository::open(path).unwrap();
            assert_eq!(touched(&repository.verify(&mut |_| {}).unwrap()), unreadable(&repository, &model));
            std::fs::write(&file, &original).unwrap();
        }
    }
    assert!(lost > 50 && harmless > 50, "{lost} {harmless}");
    assert_eq!(Repository::open(path).unwrap().verify(&mut |_| {}).unwrap().damaged, []);
}

#[test]
fn verify_tells_the_page() {
    let (_directory, repository, _) = example(0);
    commit(&repository, "one", &[(3, 1001), (0x7fff0, 1003)].into()).unwrap();
    commit(&repository, "two", &[(9, 1003)].into()).unwrap();
    let tree = {
        let checkpoint = repository.read("two", 1).unwrap();
        PageTree::load(checkpoint.manifest.spaces[0].root, &checkpoint).unwrap()
    };
    let found = repository.inner.view().find(tree.get(9)).unwrap().ok().flatten().unwrap();
    let file = File::options().write(true).open(repository.inner.pack_path(found.entry.pack)).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"damage", u64::from(found.entry.offset) + 100).unwrap();
    let report = repository.verify(&mut |_| {}).unwrap();
    assert_eq!(report.damaged.len(), 1);
    assert_eq!(report.damaged[0].id, Some(tree.get(9)));
    let page =
        |job: &str, address| Touched { job: job.into(), sequence: 1, part: Part::Process(17), address, pages: 1 };
    assert_eq!(report.damaged[0].touched, [page("one", 0x7fff_0000), page("two", 9 * PAGE_SIZE as u64)]);
    let text = report.to_string();
    assert!(text.contains("touches two@1: memory of process 17, the page at 0x9000"), "{text}");
    // Pruning neither stops at the damage nor hides it.
    let pruned = repository.prune(&Policy::default(), None, &mut |_| {}).unwrap();
    assert!(pruned.removed.is_empty());
    assert_eq!(repository.verify(&mut |_| {}).unwrap().damaged, report.damaged);
}
