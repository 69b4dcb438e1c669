//! Repositories with a known key, and everything that can be done to one.

#![allow(dead_code, reason = "each target uses a part")]

use std::path::Path;
use std::time::Duration;

use pagemark::content::ContentReader;
use pagemark::repository::{Manifest, Policy, Repository};
use pagemark::{Kind, PAGE_SIZE, PageTree, Store};

pub const KEY: [u8; 32] = [7; 32];
pub const ID: [u8; 16] = [9; 16];

pub fn hash(parts: &[&[u8]]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_keyed(&KEY);
    for part in parts {
        hasher.update(part);
    }
    *hasher.finalize().as_bytes()
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Lays down an empty repository, as `docs/repository.md` says.
pub fn lay_down(path: &Path) {
    for part in ["packs", "index", "checkpoints", "checkpoints/job"] {
        std::fs::create_dir_all(path.join(part)).unwrap();
    }
    let check = hash(&[b"pagemark config", &1u32.to_le_bytes(), &ID]);
    let (id, key, check) = (hex(&ID), hex(&KEY), hex(&check[..16]));
    let config = serde_json::json!({"format": 1, "id": id, "key": key, "check": check});
    std::fs::write(path.join("config"), config.to_string()).unwrap();
}

/// The header of a pack or an index file.
pub fn file_header(magic: &[u8; 8]) -> Vec<u8> {
    [&magic[..], &1u32.to_le_bytes(), &[0; 4], &ID].concat()
}

/// Makes the checks of a table fit what it says now, as far as it fits into the file: then what is checked behind them is reached.
pub fn sign_table(file: &mut [u8]) {
    let Some(tail_at) = file.len().checked_sub(64).filter(|at| *at >= 32) else { return };
    let word = |file: &[u8], at: usize| u64::from_le_bytes(file[at..at + 8].try_into().unwrap());
    let half = |file: &[u8], at: usize| u32::from_le_bytes(file[at..at + 4].try_into().unwrap()) as usize;
    file[tail_at..tail_at + 8].copy_from_slice(b"pmtable\0");
    let (offset, count) = (word(file, tail_at + 8) as usize, word(file, tail_at + 16) as usize);
    let (packs, filters) = (half(file, tail_at + 24), half(file, tail_at + 28));
    let parts_bytes = packs * 8 + count.min(1 << 20).div_ceil(64) * 16 + filters * 64;
    if let Some(parts_at) = tail_at.checked_sub(parts_bytes) {
        let directory_at = parts_at + packs * 8;
        for block in 0..count.min(1 << 20).div_ceil(64) {
            let from = offset.saturating_add(block * 2048);
            let to = from.saturating_add(2048).min(offset.saturating_add(count.saturating_mul(32))).min(parts_at);
            if from < to {
                let check = hash(&[&file[from..to]]);
                let first: [u8; 8] = file[from..to].first_chunk().copied().unwrap_or_default();
                file[directory_at + block * 16..][..8].copy_from_slice(&first);
                file[directory_at + block * 16 + 8..][..8].copy_from_slice(&check[..8]);
            }
        }
        let check = hash(&[&file[parts_at..tail_at]]);
        file[tail_at + 32..tail_at + 48].copy_from_slice(&check[..16]);
    }
    let check = hash(&[&file[..32], &file[tail_at..tail_at + 48]]);
    file[tail_at + 48..].copy_from_slice(&check[..16]);
}

/// Makes the check of the record header at `at` fit.
pub fn sign_record(file: &mut [u8], at: usize) {
    if let Some(header) = file.get_mut(at..).and_then(|rest| rest.first_chunk_mut::<32>()) {
        let check = hash(&[&header[..26]]);
        header[26..].copy_from_slice(&check[..6]);
    }
}

/// Makes the check of a commit record of the job `job` fit.
pub fn sign_commit(file: &mut [u8]) {
    if let Some(record) = file.first_chunk_mut::<88>() {
        let check = hash(&[&record[..72], b"job"]);
        record[72..].copy_from_slice(&check[..16]);
    }
}

pub fn manifest(root: pagemark::ContentId) -> Manifest {
    let cost = serde_json::json!({"dirty_pages": 0, "frozen_pages": 0, "rounds": 0, "downtime_us": 0,
        "memory_downtime_us": 0, "state_downtime_us": 0, "written_bytes": 0});
    let space = serde_json::json!({"pid": 1, "name": "a", "root": root, "pages": 1, "mappings": []});
    let manifest = serde_json::json!({"job": "job", "sequence": 0, "taken_unix_us": 0, "command": [], "mechanism": "full",
        "kind": "memory", "spaces": [space], "files": [], "state": [], "cost": cost});
    serde_json::from_value(manifest).unwrap()
}

/// Opens, lists, reads, verifies, prunes and commits. Nothing of it may panic or hang.
pub fn use_it(path: &Path, also_write: bool) {
    let Ok(repository) = Repository::open(path) else { return };
    for job in repository.jobs().unwrap_or_default() {
        for info in repository.checkpoints(&job).unwrap_or_default() {
            let Ok(checkpoint) = repository.read(&job, info.sequence) else { continue };
            for space in &checkpoint.manifest.spaces {
                let mut page = [0; PAGE_SIZE];
                if let Ok(tree) = PageTree::load(space.root, &checkpoint) {
                    for (_, id) in tree.iter().take(100) {
                        let _ = checkpoint.get_page(id, &mut page);
                    }
                }
                let _ = ContentReader::new(&checkpoint, space.root, space.pages)
                    .map(|mut reader| std::io::Read::read(&mut reader, &mut page));
                let _ = checkpoint.get(Kind::Node, space.root);
            }
        }
    }
    let report = repository.verify(&mut |_| {});
    if let Ok(report) = report {
        let _ = report.to_string();
    }
    if also_write {
        let _ = repository.prune(&Policy { keep_last: Some(1), keep_every: None }, None, &mut |_| {});
        if let Ok(mut writer) = repository.writer("fuzzing", Duration::ZERO)
            && let Ok(page) = writer.put(Kind::Page, &[3; PAGE_SIZE])
        {
            let mut tree = PageTree::new();
            tree.set(1, page);
            let committed = tree.save(&mut writer).map(|root| writer.commit(manifest(root)));
            if let Ok(Ok(info)) = committed {
                let checkpoint = repository.read("job", info.sequence).unwrap();
                let tree = PageTree::load(checkpoint.manifest.spaces[0].root, &checkpoint);
                // What was there under the same id may be damaged, but never wrong.
                let mut content = [0; PAGE_SIZE];
                if let Ok(tree) = tree
                    && checkpoint.get_page(tree.get(1), &mut content).is_ok()
                {
                    assert_eq!(content, [3; PAGE_SIZE]);
                }
            }
        }
    }
}
