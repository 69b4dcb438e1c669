//! A repository that was whole, changed in places, with checks made to fit the change or not.

#![no_main]

mod common;

use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

use common::{lay_down, manifest, sign_commit, sign_record, sign_table, use_it};
use libfuzzer_sys::fuzz_target;
use pagemark::repository::Repository;
use pagemark::{Kind, PAGE_SIZE, PageTree, Store};

/// The files of a repository of some checkpoints: path and content. They are in an order that stays the same.
static WHOLE: LazyLock<Vec<(PathBuf, Vec<u8>)>> = LazyLock::new(|| {
    let directory = tempfile::tempdir().unwrap();
    lay_down(directory.path());
    let repository = Repository::open(directory.path()).unwrap();
    let mut tree = PageTree::new();
    for round in 0..7u8 {
        let mut writer = repository.writer("making it", Duration::ZERO).unwrap();
        for page in 0..2 {
            let content: [u8; PAGE_SIZE] = std::array::from_fn(|at| (at as u8 / 64).wrapping_mul(round + 1) ^ page);
            tree.set(u64::from(page) * 300, writer.put(Kind::Page, &content).unwrap());
        }
        let root = tree.save(&mut writer).unwrap();
        writer.commit(manifest(root)).unwrap();
    }
    let mut files = Vec::new();
    for part in ["packs", "index", "checkpoints/job"] {
        for file in std::fs::read_dir(directory.path().join(part)).unwrap() {
            let path = file.unwrap().path();
            let content = std::fs::read(&path).unwrap();
            files.push((path.strip_prefix(directory.path()).unwrap().to_owned(), content));
        }
    }
    files.sort_by_key(|(path, content)| (path.parent().map(PathBuf::from), content.len()));
    files
});

fuzz_target!(|data: &[u8]| {
    let Some((mode, changes)) = data.split_first() else { return };
    let directory = tempfile::tempdir().unwrap();
    lay_down(directory.path());
    let mut files = WHOLE.clone();
    for change in changes.chunks_exact(5).take(32) {
        let [file, low, high, what, value] = *change else { continue };
        let at = usize::from(file) % files.len();
        let (path, content) = &mut files[at];
        let offset = usize::from(u16::from_le_bytes([low, high]));
        // Half of the changes count from the end, where the table is.
        let offset = if what & 64 == 0 { offset } else { content.len().saturating_sub(1 + offset % 400) };
        match what % 4 {
            0 => content.truncate(offset),
            1 => content.insert(offset.min(content.len()), value),
            _ => content.get_mut(offset).into_iter().for_each(|byte| *byte ^= value),
        }
        if what & 32 != 0 {
            match path.starts_with("checkpoints") {
                true => sign_commit(content),
                false => sign_table(content),
            }
        }
        if what & 16 != 0 && path.starts_with("packs") {
            sign_record(content, offset);
        }
    }
    for (number, (path, content)) in files.iter().enumerate() {
        // Some files are gone.
        if usize::from(mode & 31) != number + 1 {
            std::fs::write(directory.path().join(path), content).unwrap();
        }
    }
    use_it(directory.path(), mode & 128 != 0);
});
