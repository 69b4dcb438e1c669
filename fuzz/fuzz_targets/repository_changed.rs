//! A correct repository with some bytes changed, with and without checks computed anew.

#![no_main]

mod common;

use std::sync::LazyLock;
use std::time::Duration;

use common::{Storage, create, manifest, put, sign_commit, sign_record, sign_table, use_repository};
use libfuzzer_sys::fuzz_target;
use pagemark::repository::Repository;
use pagemark::{PAGE_SIZE, PageNumber, PageTree, Store};

/// The objects of a repository of some checkpoints: name and content, always in the same order.
static WHOLE: LazyLock<Vec<(String, Vec<u8>)>> = LazyLock::new(|| {
    let Storage { backend, .. } = Storage::new(false);
    create(&*backend);
    let repository = Repository::on(backend.clone()).unwrap();
    let mut tree = PageTree::new();
    for round in 0..7u8 {
        let mut writer = repository.writer("fuzzing", Duration::ZERO).unwrap();
        for page in 0..2_u64 {
            // One page changes in all its bytes, the other in a few: it becomes a delta.
            let content: [u8; PAGE_SIZE] = std::array::from_fn(|at| match page {
                0 => (at as u8 / 64).wrapping_mul(round + 1),
                _ if at % 1024 == 0 => round,
                // No compression shortens the others.
                _ => ((at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 29) as u8,
            });
            let number = PageNumber::new(page * 300);
            let last = tree.get(number);
            tree.set(number, writer.put_changed(last, &content).unwrap());
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
    assert!(files.iter().any(|(_, content)| has_delta(content)), "no page is a delta");
    files
});

/// True if one of the records of a pack is a delta.
fn has_delta(pack: &[u8]) -> bool {
    let mut rest = pack.get(32..).filter(|_| pack.starts_with(b"pmpack")).unwrap_or_default();
    while let Some((header, content)) = rest.split_first_chunk::<32>() {
        let stored = u32::from_le_bytes([header[16], header[17], header[18], header[19]]);
        if !(1..=3).contains(&header[24]) || content.len() < stored as usize {
            break;
        }
        if header[25] == 2 {
            return true;
        }
        rest = &content[stored as usize..];
    }
    false
}

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
