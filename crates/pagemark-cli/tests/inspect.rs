//! Tests of the commands that show, compare, verify and prune checkpoints, on a repository that the
//! test writes itself.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::Duration;

use pagemark::repository::{
    Cost, FileRecord, Manifest, MappingException, MappingRecord, Repository, SpaceRecord, TargetKind,
};
use pagemark::{Address, Blob, ByteCount, ContentId, Kind, Mechanism, PAGE_SIZE, PageTree, Store};
use serde_json::Value;
use tempfile::TempDir;

/// First address of the one mapping.
const BASE: u64 = 0x7000_0000_0000;

struct Fixture {
    directory: TempDir,
}

impl Fixture {
    /// Two checkpoints of the job `work`. In the second, one byte of the page at `BASE + 0x1000`
    /// has changed, the page after it is new, and a file has grown.
    fn new() -> Self {
        let fixture = Fixture { directory: TempDir::new().expect("a temporary directory") };
        let repository = Repository::create(&fixture.path()).expect("an empty directory");
        let noise: Vec<u8> = (0..PAGE_SIZE as u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let mut changed = noise.clone();
        changed[0x123] ^= 0xff;
        commit(&repository, &[(0, &noise), (1, &noise)], 5);
        commit(&repository, &[(0, &noise), (1, &changed), (2, &changed)], 9);
        fixture
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("repository")
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagemark"));
        command.args(arguments).arg("--repo").arg(self.path()).output().expect("pagemark starts")
    }

    /// Runs the command, asserts that it succeeds, and returns its stdout.
    #[track_caller]
    fn text(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {stderr}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    #[track_caller]
    fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.text(arguments)).expect("one JSON document")
    }
}

fn commit(repository: &Repository, pages: &[(u64, &[u8])], file_size: u64) {
    let mut writer = repository.writer("the test", Duration::from_secs(10)).expect("nobody else writes");
    let mut tree = PageTree::new();
    for (page, content) in pages {
        let id = writer.put(Kind::Page, content).expect("there is room");
        tree.set(Address::new(BASE).page() + *page, id);
    }
    let root = tree.save(&mut writer).expect("there is room");
    let mapping = MappingRecord {
        start: BASE,
        end: BASE + 0x10000,
        permissions: "rw-p".into(),
        offset: 0,
        name: "evil \x1b[2J name".into(),
        exception: None,
        memory: None,
    };
    let droppable = MappingRecord {
        start: BASE + 0x10000,
        end: BASE + 0x20000,
        name: String::new(),
        exception: Some(MappingException::Droppable),
        ..mapping.clone()
    };
    let manifest = Manifest {
        job: "work".into(),
        sequence: 0,
        taken_unix_us: 1_700_000_000_000_000,
        command: vec!["/bin/work".into(), "hard".into()],
        program: None,
        mechanism: Mechanism::PagemapScan,
        kind: TargetKind::Memory,
        spaces: vec![SpaceRecord::of_process(42, "work".into(), root, pages.len() as u64, vec![mapping, droppable])],
        files: vec![FileRecord {
            path: "/var/log/work".into(),
            content: Blob { bytes: ByteCount::new(file_size), root: ContentId::ZERO },
            mode: 0o644,
            uid: 0,
            gid: 0,
            modified_unix_ns: 1_700_000_000_000_000_000,
            is_shared: false,
        }],
        state: vec![],
        cost: Cost { dirty_pages: 1234, downtime_us: 9_800, rounds: 2, ..Cost::default() },
    };
    writer.commit(manifest).expect("there is room");
}

#[test]
fn log_lists_jobs_and_checkpoints() {
    let fixture = Fixture::new();
    let jobs = fixture.json(&["log", "--json"]);
    assert_eq!((&jobs[0]["job"], &jobs[0]["checkpoints"], &jobs[0]["newest"]), (&"work".into(), &2.into(), &2.into()));
    let checkpoints = fixture.json(&["log", "work", "--json"]);
    assert_eq!(checkpoints.as_array().map(Vec::len), Some(2));
    assert_eq!(checkpoints[1]["sequence"], 2);
    assert_eq!(checkpoints[1]["downtime_us"], 9_800);
    assert!(checkpoints[1]["written_bytes"].as_u64() > Some(0), "{checkpoints}");
    let table = fixture.text(&["log", "work"]);
    assert!(table.lines().count() == 3 && table.contains("work@2") && table.contains("1 234"), "{table}");
    let missing = fixture.run(&["log", "other"]);
    assert_eq!(missing.status.code(), Some(1));
    let told = String::from_utf8_lossy(&missing.stderr).into_owned();
    assert!(
        told.contains("job other has no checkpoints") && told.contains("help: these jobs have some: work"),
        "{told}"
    );
}

#[test]
fn show_describes_a_checkpoint() {
    let fixture = Fixture::new();
    let told = fixture.text(&["show", "work"]);
    for part in [
        "work@2",
        "/bin/work hard",
        "3 pages",
        "process 42 work",
        "700000000000",
        "/var/log/work",
        "9.8 ms",
        "(droppable: ",
    ] {
        assert!(told.contains(part), "{part:?} is not in {told}");
    }
    assert!(!told.contains('\x1b'), "a name steers the terminal: {told:?}");
    let manifest = fixture.json(&["show", "work@1", "--json"]);
    assert_eq!(manifest["sequence"], 1);
    let space = &manifest["spaces"][0];
    assert_eq!((&space["pages"], &space["pid"], &space["name"]), (&2.into(), &42.into(), &"work".into()));
    assert_eq!(space["mappings"][1]["exception"], "droppable");
    assert_eq!(manifest["files"][0]["size"], 5);
    assert_eq!(fixture.run(&["show", "work@3"]).status.code(), Some(1));
}

#[test]
fn diff_finds_exactly_the_changed_pages() {
    let fixture = Fixture::new();
    let difference = fixture.json(&["diff", "work@1", "work@2", "--json"]);
    assert_eq!(difference["differing_pages"], 2);
    let process = &difference["processes"][0];
    assert_eq!(process["pid"], 42);
    assert_eq!(process["mappings"][0]["start"], BASE);
    assert_eq!(process["mappings"][0]["differing_pages"], 2);
    assert_eq!((&difference["files"][0]["size_in_a"], &difference["files"][0]["size_in_b"]), (&5.into(), &9.into()));

    let hex = fixture.text(&["diff", "work@1", "work@2", "--hex"]);
    // One line for the changed page, all lines of the new page.
    let changed = format!("{:012x}", BASE + 0x1120);
    let lines: Vec<_> = hex.lines().filter(|line| line.starts_with(&changed)).collect();
    assert!(lines.len() == 2 && lines[0].contains(" - ") && lines[1].contains(" + "), "{hex}");
    assert_eq!(hex.lines().filter(|line| line.starts_with(&format!("{:09x}", (BASE + 0x1000) >> 12))).count(), 2);
    assert_eq!(hex.lines().filter(|line| line.starts_with(&format!("{:09x}", (BASE + 0x2000) >> 12))).count(), 512);

    assert!(fixture.text(&["diff", "work@2", "work"]).contains("hold the same memory and files"));
}

#[test]
fn verify_reports_damage_and_fails() {
    let fixture = Fixture::new();
    assert_eq!(fixture.json(&["verify", "--json"])["damaged"].as_array().map(Vec::len), Some(0));
    assert!(fixture.text(&["verify"]).contains("nothing is damaged"));
    let pack = fs::read_dir(fixture.path().join("packs")).expect("packs").flatten().next().expect("one").path();
    let mut content = fs::read(&pack).expect("a file");
    let middle = content.len() / 2;
    content[middle] ^= 1;
    fs::write(&pack, content).expect("a file");
    let output = fixture.run(&["verify"]);
    assert_eq!(output.status.code(), Some(1));
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(told.contains("damaged") && told.contains("work@"), "{told}");
}

#[test]
fn prune_keeps_the_requested_checkpoints() {
    let fixture = Fixture::new();
    assert!(fixture.text(&["prune", "--keep-last", "5"]).starts_with("0 checkpoints removed"));
    assert_eq!(fixture.json(&["prune", "--keep-last", "1", "--json"])["removed"], serde_json::json!([["work", 1]]));
    assert_eq!(fixture.json(&["log", "work", "--json"]).as_array().map(Vec::len), Some(1));
    assert_eq!(fixture.json(&["show", "work", "--json"])["sequence"], 2);
}

#[test]
fn a_checkpoint_of_memory_alone_is_not_restored() {
    let output = Fixture::new().run(&["restore", "--detach"]);
    assert_eq!(output.status.code(), Some(1));
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(told.contains("cannot restore work@2") && told.contains("\nhelp: "), "{told}");
}
