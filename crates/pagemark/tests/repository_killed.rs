//! A process that commits and prunes is killed at any moment: its completed commits are there.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use pagemark::repository::{Cost, Manifest, Repository, Retention, SpaceRecord, TargetKind};
use pagemark::{ContentId, Error, Kind, Mechanism, PAGE_SIZE, PageNumber, PageTree, Store};
use pagemark_testing::{assert_oracle, assert_oracle_eq, finding};

/// Set in the process that is killed.
const ROLE: &str = "PAGEMARK_TEST_REPOSITORY";

fn manifest(root: ContentId, sequence: u64) -> Manifest {
    Manifest {
        job: "job".into(),
        sequence: 0,
        taken_unix_us: sequence,
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

/// The content of page `number` in checkpoint `sequence`.
fn page(sequence: u64, number: u64) -> [u8; PAGE_SIZE] {
    let changed = (sequence + 4) - (sequence + number) % 5;
    std::array::from_fn(|at| ((changed * 31 + number) as u8) ^ (at as u8).wrapping_mul(changed as u8))
}

/// What was committed is read without an error.
#[track_caller]
fn or_lost<T>(read: Result<T, Error>) -> T {
    read.unwrap_or_else(|error| finding(&error.to_string()))
}

fn commit_for_ever(path: &Path) -> ! {
    let repository = Repository::open(path).unwrap();
    let mut sequence = repository.checkpoints("job").unwrap().last().map_or(0, |last| last.sequence);
    loop {
        sequence += 1;
        let mut writer = repository.writer("is killed", Duration::from_secs(10)).unwrap();
        let mut tree = PageTree::new();
        for number in 0..60 {
            tree.set(PageNumber::new(number * 100), writer.put(Kind::Page, &page(sequence, number)).unwrap());
        }
        let root = tree.save(&mut writer).unwrap();
        assert_eq!(writer.commit(manifest(root, sequence)).unwrap().sequence, sequence);
        println!("{sequence}");
        std::io::stdout().flush().unwrap();
        if sequence.is_multiple_of(4) {
            repository.prune(&Retention { keep_last: Some(3), keep_every: None }, None, &mut |_| {}).unwrap();
        }
    }
}

#[test]
fn the_commits_of_a_killed_process_are_there() {
    if let Some(path) = std::env::var_os(ROLE) {
        commit_for_ever(Path::new(&path));
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("repository");
    Repository::create(&path).unwrap();
    let mut last = 0;
    for round in 0..40u64 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["the_commits_of_a_killed_process_are_there", "--exact", "--nocapture"])
            .env(ROLE, &path)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        // The process is killed after some checkpoints, in any step of the next one.
        let mut told = said.by_ref().filter_map(|line| line.parse::<u64>().ok());
        for _ in 0..1 + round % 5 {
            last = told.next().expect("the process does not commit");
        }
        std::thread::sleep(Duration::from_micros(round * 700 % 9000));
        child.kill().unwrap();
        child.wait().unwrap();
        last = said.filter_map(|line| line.parse().ok()).last().unwrap_or(last);

        let repository = or_lost(Repository::open(&path));
        let checkpoints = or_lost(repository.checkpoints("job"));
        let newest = checkpoints.last().unwrap().sequence;
        assert_oracle!(newest == last || newest == last + 1, "it said {last}, there is {newest}");
        for info in &checkpoints {
            let checkpoint = or_lost(repository.read("job", info.sequence));
            let tree = or_lost(PageTree::load(checkpoint.manifest.spaces[0].root, &checkpoint));
            assert_oracle_eq!(tree.page_count(), 60, "the pages of job@{}", info.sequence);
            let mut content = [0; PAGE_SIZE];
            for (number, id) in tree.iter() {
                or_lost(checkpoint.get_page(id, &mut content));
                let expected = page(info.sequence, number.get() / 100);
                assert_oracle!(content == expected, "job@{}: page {number} has other content", info.sequence);
            }
        }
        assert_oracle_eq!(repository.verify(&mut |_| {}).unwrap().damaged, [], "what is damaged");
        drop(repository.writer("cleans up", Duration::ZERO).unwrap());
        let is_left_over = |path: &Path| path.extension().is_some_and(|ending| ending == "tmp");
        for part in ["packs", "index", "checkpoints/job"] {
            let mut files = std::fs::read_dir(path.join(part)).unwrap();
            assert!(files.all(|file| !is_left_over(&file.unwrap().path())), "something is left in {part}");
        }
    }
}
