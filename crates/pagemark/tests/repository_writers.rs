//! Many writers, prunes and verifies of one repository at once.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pagemark::repository::{Cost, Manifest, Repository, Retention, SpaceRecord, TargetKind};
use pagemark::{ContentId, ErrorKind, Kind, Mechanism, PAGE_SIZE, PageNumber, PageTree, Store};
use pagemark_testing::{assert_oracle, assert_oracle_eq};

const JOBS: u64 = 12;
const CHECKPOINTS: u64 = 25;
const PAGES: u64 = 40;
const KEEP: Retention = Retention { keep_last: Some(2), keep_every: None };

fn manifest(job: &str, root: ContentId, time: u64) -> Manifest {
    Manifest {
        job: job.into(),
        sequence: 0,
        taken_unix_us: time,
        command: Vec::new(),
        program: None,
        mechanism: Mechanism::Full,
        kind: TargetKind::Memory,
        spaces: vec![SpaceRecord::of_process(1, String::new(), root, 0, Vec::new())],
        files: Vec::new(),
        state: Vec::new(),
        cost: Cost::default(),
    }
}

/// The content of page `number` at `time`. Jobs share most of it, and it comes back after it was
/// pruned.
fn page(time: u64, number: u64) -> [u8; PAGE_SIZE] {
    let changed = (time + number) / 5 % 6;
    std::array::from_fn(|at| ((changed * 31 + number) as u8) ^ (at as u8).wrapping_mul(changed as u8 | 1))
}

/// Takes checkpoints as a program of its own would, each of which builds on the last tree.
fn job(path: &Path, number: u64) {
    let repository = Repository::open(path).unwrap();
    let name = format!("job{number}");
    let mut tree = PageTree::new();
    for time in 1..=CHECKPOINTS {
        let mut writer = repository.writer(&name, Duration::from_secs(30)).unwrap();
        for number in 0..PAGES {
            let id = writer.put(Kind::Page, &page(time, number)).unwrap();
            if tree.get(PageNumber::new(number * 100)) != id {
                tree.set(PageNumber::new(number * 100), id);
            }
        }
        let root = tree.save(&mut writer).unwrap();
        assert_eq!(writer.commit(manifest(&name, root, time)).unwrap().sequence, time);
        if (time + number).is_multiple_of(6) {
            repository.prune(&KEEP, Some(&name), &mut |_| {}).unwrap();
        } else {
            repository.expire(&KEEP, Some(&name)).unwrap();
        }
    }
}

/// Reads a checkpoint, which may be pruned before it is opened.
fn read(repository: &Repository, job: &str, sequence: u64) {
    let checkpoint = match repository.read(job, sequence) {
        Err(error) if error.kind() == ErrorKind::NoCheckpoint => return,
        opened => opened.unwrap(),
    };
    let tree = PageTree::load(checkpoint.manifest.spaces[0].root, &checkpoint).unwrap();
    assert_eq!(tree.page_count(), PAGES);
    let mut content = [0; PAGE_SIZE];
    for (number, id) in tree.iter() {
        checkpoint.get_page(id, &mut content).unwrap();
        assert_oracle!(
            content == page(checkpoint.manifest.taken_unix_us, number.get() / 100),
            "{job}@{sequence}: page {number} has other content"
        );
    }
}

#[test]
fn writers_prunes_and_verifies_of_one_repository_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("repository");
    Repository::create(&path).unwrap();
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let jobs: Vec<_> = (0..JOBS)
            .map(|number| {
                (
                    number,
                    scope.spawn({
                        let path = &path;
                        move || job(path, number)
                    }),
                )
            })
            .collect();
        let others = [
            scope.spawn(|| {
                let repository = Repository::open(&path).unwrap();
                while !is_done.load(Ordering::Acquire) {
                    assert_eq!(repository.prune(&KEEP, None, &mut |_| {}).unwrap().unreadable, []);
                }
            }),
            scope.spawn(|| {
                while !is_done.load(Ordering::Acquire) {
                    let repository = Repository::open(&path).unwrap();
                    for job in repository.jobs().unwrap() {
                        repository.newest(&job).unwrap().into_iter().for_each(|last| read(&repository, &job, last));
                    }
                    let damaged = repository.verify(&mut |_| {}).unwrap().damaged;
                    assert_oracle!(damaged.iter().all(|damage| damage.touched.is_empty()), "damaged: {damaged:?}");
                }
            }),
        ];
        let ended: Vec<_> = jobs.into_iter().map(|(number, thread)| (number, thread.join().is_ok())).collect();
        is_done.store(true, Ordering::Release);
        others.into_iter().for_each(|thread| thread.join().unwrap());
        assert!(ended.iter().all(|(_, is_ok)| *is_ok), "jobs failed: {ended:?}");
    });
    let repository = Repository::open(&path).unwrap();
    for number in 0..JOBS {
        let name = format!("job{number}");
        let kept: Vec<u64> = repository.checkpoints(&name).unwrap().iter().map(|info| info.sequence).collect();
        assert_oracle_eq!(kept, [CHECKPOINTS - 1, CHECKPOINTS], "the checkpoints of {name}");
        kept.iter().for_each(|sequence| read(&repository, &name, *sequence));
    }
    assert_oracle_eq!(repository.verify(&mut |_| {}).unwrap().damaged, [], "what is damaged");
    let staged = |name: std::ffi::OsString| name.to_string_lossy().ends_with(".tmp");
    for part in ["packs", "index", "checkpoints/job1"] {
        let mut files = std::fs::read_dir(path.join(part)).unwrap();
        assert!(!files.any(|file| staged(file.unwrap().file_name())), "something is staged in {part}");
    }
}
