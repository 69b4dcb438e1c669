//! A correct repository with some bytes changed, with and without checks computed anew.

#![no_main]

mod common;

use std::sync::LazyLock;

use common::{Storage, checkpoints, create, put, sign_commit, sign_record, sign_table, use_repository};
use libfuzzer_sys::fuzz_target;

/// The objects of a repository.
static WHOLE: LazyLock<Vec<(String, Vec<u8>)>> = LazyLock::new(|| checkpoints(7, 2));

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
