//! A repository with manifests of version 1 is read, verified, extended and pruned.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pagemark::address::offsets;
use pagemark::repository::{Manifest, Repository, Retention, SpaceKind, TargetKind};
use pagemark::{Kind, PAGE_SIZE, PageNumber, PageTree, Store};
use pagemark_testing::{assert_oracle, assert_oracle_eq};
use serde_json::Value;
use tempfile::TempDir;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/version-1").join(name)
}

/// A copy of the repository.
fn repository() -> (TempDir, Repository) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("repository");
    for part in ["packs", "index", "checkpoints/memory", "checkpoints/process"] {
        fs::create_dir_all(path.join(part)).unwrap();
        for file in fs::read_dir(fixture(part)).into_iter().flatten() {
            let file = file.unwrap();
            fs::copy(file.path(), path.join(part).join(file.file_name())).unwrap();
        }
    }
    fs::copy(fixture("config"), path.join("config")).unwrap();
    let repository = Repository::open(&path).unwrap();
    (directory, repository)
}

/// Asserts that everything that `old` has is in `new`.
#[track_caller]
fn assert_has(new: &Value, old: &Value, at: &str) {
    match (new, old) {
        (Value::Object(new), Value::Object(old)) => {
            for (key, value) in old {
                assert_has(new.get(key).unwrap_or(&Value::Null), value, &format!("{at}.{key}"));
            }
        }
        (Value::Array(new), Value::Array(old)) => {
            assert_eq!(new.len(), old.len(), "{at}");
            for (number, (new, old)) in new.iter().zip(old).enumerate() {
                assert_has(new, old, &format!("{at}[{number}]"));
            }
        }
        _ => assert_eq!(new, old, "{at}"),
    }
}

#[test]
fn manifests_are_read_as_they_were_printed() {
    let (_directory, repository) = repository();
    assert_eq!(repository.jobs().unwrap(), ["memory", "process"]);
    for (job, sequence, kind) in [("memory", 1, TargetKind::Memory), ("process", 2, TargetKind::Process)] {
        let checkpoint = repository.read(job, sequence).unwrap();
        let printed = fs::read(fixture(&format!("{job}-{sequence}.json"))).unwrap();
        let printed: Value = serde_json::from_slice(&printed).unwrap();
        assert_has(&serde_json::to_value(&checkpoint.manifest).unwrap(), &printed, "manifest");
        assert_eq!(checkpoint.manifest.kind, kind);
        let space = &checkpoint.manifest.spaces[0];
        let pid = printed["spaces"][0]["pid"].as_i64().unwrap();
        assert_eq!((space.id as i64, space.label.as_str()), (pid, "counter"));
        assert_eq!(space.kind, SpaceKind::Process { pid: pid as i32 });
    }
}

#[test]
fn content_is_read() {
    let (_directory, repository) = repository();
    assert_oracle_eq!(repository.verify(&mut |_| {}).unwrap().damaged, [], "what is damaged");
    for job in ["memory", "process"] {
        for sequence in [1, 2] {
            let checkpoint = repository.read(job, sequence).unwrap();
            let space = &checkpoint.manifest.spaces[0];
            let tree = PageTree::load(space.root, &checkpoint).unwrap();
            assert_eq!(tree.page_count(), space.pages);
            let mut page = [0; PAGE_SIZE];
            for (_, id) in tree.iter() {
                checkpoint.get_page(id, &mut page).unwrap();
                assert_ne!(page, [0; PAGE_SIZE]);
            }
            for state in &checkpoint.manifest.state {
                assert_eq!(state.content.read_all(&checkpoint).unwrap().len(), state.content.bytes.to_usize());
            }
        }
    }
    let checkpoint = repository.read("memory", 2).unwrap();
    let registers = checkpoint.manifest.state.iter().find(|state| state.name == "registers.json").unwrap();
    let registers: Value = serde_json::from_slice(&registers.content.read_all(&checkpoint).unwrap()).unwrap();
    assert_eq!(registers[0]["pid"], checkpoint.manifest.spaces[0].id);
    let log = |sequence| {
        let checkpoint = repository.read("process", sequence).unwrap();
        let file = &checkpoint.manifest.files[0];
        assert_eq!(file.path, "/tmp/counter/log");
        (file.content, String::from_utf8(file.content.read_all(&checkpoint).unwrap()).unwrap())
    };
    let ((first, text), (second, more)) = (log(1), log(2));
    assert_eq!((text, more), ("a line of the log\n".repeat(8), "a line of the log\n".repeat(12)));
    let checkpoint = repository.read("process", 2).unwrap();
    assert_eq!(first.diff(&second, &checkpoint).unwrap(), [offsets(0..216)]);
}

#[test]
fn a_checkpoint_of_this_version_joins_them() {
    let (_directory, repository) = repository();
    let old: Manifest = repository.read("process", 2).unwrap().manifest;
    let mut writer = repository.writer("the test", Duration::ZERO).unwrap();
    let mut tree = PageTree::load(old.spaces[0].root, &writer).unwrap();
    tree.set(PageNumber::new(7), writer.put(Kind::Page, &[5; PAGE_SIZE]).unwrap());
    let mut new = old.clone();
    new.spaces[0].root = tree.save(&mut writer).unwrap();
    new.spaces[0].pages += 1;
    let info = writer.commit(new.clone()).unwrap();
    assert_eq!(info.sequence, 3);
    let report = repository.prune(&Retention { keep_last: Some(2), keep_every: None }, Some("process"), &mut |_| {});
    let report = report.unwrap();
    assert_eq!((report.removed, report.unreadable), (vec![("process".to_owned(), 1)], vec![]));
    assert_oracle_eq!(repository.verify(&mut |_| {}).unwrap().damaged, [], "what is damaged");
    let read = repository.read("process", 3).unwrap();
    assert_eq!(read.manifest.spaces, new.spaces);
    assert_eq!(repository.read("process", 2).unwrap().manifest, old);
    let mut page = [0; PAGE_SIZE];
    read.get_page(PageTree::load(read.manifest.spaces[0].root, &read).unwrap().get(PageNumber::new(7)), &mut page)
        .unwrap();
    assert_oracle!(page == [5; PAGE_SIZE], "other content");
}
