//! A correct repository with some bytes changed, with and without checks computed anew.

#![no_main]

mod common;

use std::sync::LazyLock;
use std::time::Duration;

use common::{Storage, create, manifest, put, sign_commit, sign_record, sign_table, use_repository};
use libfuzzer_sys::fuzz_target;
use pagemark::repository::Repository;
use pagemark::{Kind, PAGE_SIZE, PageNumber, PageTree, Store};

/// The objects of a repository of some checkpoints: name and content, always in the same order.
static WHOLE: LazyLock<Vec<(String, Vec<u8>)>> = LazyLock::new(|| {
    let Storage { backend, .. } = Storage::new(false);
    create(&*backend);
    let repository = Repository::on(backend.clone()).unwrap();
    let mut tree = PageTree::new();
    for round in 0..7u8 {
        let mut writer = repository.writer("fuzzing", Duration::ZERO).unwrap();
        for page in 0..2 {
            let content: [u8; PAGE_SIZE] = std::array::from_fn(|at| (at as u8 / 64).wrapping_mul(round + 1) ^ page);
            tree.set(PageNumber::new(u64::from(page) * 300), writer.put(Kind::Page, &content).unwrap());
        }
        let root = tree.save(&mut writer).unwrap();
        writer.commit(manifest(root)).unwrap();
    }
    let mut files = Vec::new();
    for part in ["packs", "index", "checkpoints/job"] {
        for entry in backend.list(part).unwrap() {
            let name = format!("{part}/{}", entry.name);
            let object = backend.open(&name).unwrap().unwrap();
            let mut content = vec![0; object.bytes().unwrap() as usize];
            object.read_at(&mut content, 0).unwrap();
            files.push((name, content));
        }
    }
    files.sort_by_key(|(name, content)| (name.split('/').next().map(str::to_owned), content.len()));
    files
});

fuzz_target!(|data: &[u8]| {
    let Some((mode, changes)) = data.split_first() else { return };
    let storage = Storage::new(mode & 64 != 0);
    create(&*storage.backend);
    let mut files = WHOLE.clone();
    for change in changes.chunks_exact(5).take(32) {
        let [file, low, high, operation, value] = *change else { continue };
        let at = usize::from(file) % files.len();
        let (name, content) = &mut files[at];
        let offset = usize::from(u16::from_le_bytes([low, high]));
        // Half of the changes count from the end, where the table is.
        let offset = if operation & 64 == 0 { offset } else { content.len().saturating_sub(1 + offset % 400) };
        match operation % 4 {
            0 => content.truncate(offset),
            1 => content.insert(offset.min(content.len()), value),
            _ => content.get_mut(offset).into_iter().for_each(|byte| *byte ^= value),
        }
        if operation & 32 != 0 {
            match name.starts_with("checkpoints/") {
                true => sign_commit(content),
                false => sign_table(content),
            }
        }
        if operation & 16 != 0 && name.starts_with("packs/") {
            sign_record(content, offset);
        }
    }
    for (number, (name, content)) in files.iter().enumerate() {
        // The mode may name a file that is missing.
        if usize::from(mode & 31) != number + 1 {
            put(&*storage.backend, name, content);
        }
    }
    use_repository(&storage.backend, mode & 128 != 0);
});
