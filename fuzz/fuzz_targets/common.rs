//! Repositories with a known key, and operations on them.

#![allow(dead_code, reason = "each target uses a part")]

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use pagemark::backend::{Backend, LocalBackend, MemoryBackend};
use pagemark::repository::{Manifest, Repository, Retention};
use pagemark::{Blob, ByteCount, Kind, PAGE_SIZE, PageNumber, PageTree, Store};
use tempfile::TempDir;

pub const KEY: [u8; 32] = [7; 32];
pub const ID: [u8; 16] = [9; 16];

/// The format that allows all that Pagemark writes, deltas included.
const FORMAT: u32 = 3;

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

/// The storage of a repository: memory, which is faster, or a directory that is removed afterwards.
pub struct Storage {
    pub backend: Arc<dyn Backend>,
    _directory: Option<TempDir>,
}

impl Storage {
    pub fn new(is_local: bool) -> Storage {
        if !is_local {
            return Storage { backend: Arc::new(MemoryBackend::new()), _directory: None };
        }
        let directory = tempfile::tempdir().unwrap();
        Storage { backend: Arc::new(LocalBackend::new(directory.path()).unwrap()), _directory: Some(directory) }
    }
}

/// Publishes an object.
pub fn put(backend: &dyn Backend, name: &str, content: &[u8]) {
    let mut object = backend.create(name).unwrap();
    object.append(&[content]).unwrap();
    object.publish().unwrap();
}

/// Creates an empty repository in the format of `docs/reference/repository.md`.
pub fn create(backend: &dyn Backend) {
    backend.prepare(&["packs", "index", "checkpoints"]).unwrap();
    let check = hash(&[b"pagemark config", &FORMAT.to_le_bytes(), &ID]);
    let (id, key, check) = (hex(&ID), hex(&KEY), hex(&check[..16]));
    let config = serde_json::json!({"format": FORMAT, "id": id, "key": key, "check": check});
    put(backend, "config", config.to_string().as_bytes());
}

/// The header of a pack or an index file.
pub fn file_header(magic: &[u8; 8]) -> Vec<u8> {
    [&magic[..], &1u32.to_le_bytes(), &[0; 4], &ID].concat()
}

/// Computes the checks of a table anew, as far as the table fits into the file, so that the fuzzer
/// reaches the code behind the checks.
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

/// Computes the check of the record header at `at` anew.
pub fn sign_record(file: &mut [u8], at: usize) {
    if let Some(header) = file.get_mut(at..).and_then(|rest| rest.first_chunk_mut::<32>()) {
        let check = hash(&[&header[..26]]);
        header[26..].copy_from_slice(&check[..6]);
    }
}

/// Computes the check of a commit record of the job `job` anew.
pub fn sign_commit(file: &mut [u8]) {
    if let Some(record) = file.first_chunk_mut::<88>() {
        let check = hash(&[&record[..72], b"job"]);
        record[72..].copy_from_slice(&check[..16]);
    }
}

/// The objects of a repository of some checkpoints of as many pages: name and content, always in
/// the same order. Packs come before index files, and these before commit records.
pub fn checkpoints(rounds: u8, pages: u64) -> Vec<(String, Vec<u8>)> {
    let Storage { backend, .. } = Storage::new(false);
    create(&*backend);
    let repository = Repository::on(backend.clone()).unwrap();
    let mut tree = PageTree::new();
    for round in 0..rounds {
        let mut writer = repository.writer("fuzzing", Duration::ZERO).unwrap();
        for page in 0..pages {
            // One page changes in all its bytes, the other in a few: it becomes a delta.
            let content: [u8; PAGE_SIZE] = std::array::from_fn(|at| match page % 2 {
                0 => (at as u8 / 64).wrapping_mul(round + 1).wrapping_add(page as u8),
                _ if at % 1024 == 0 => round,
                // No compression shortens the others.
                _ => ((at as u64 + page).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 29) as u8,
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
    let part = |name: &str| ["packs", "index", "checkpoints"].iter().position(|part| name.starts_with(part));
    files.sort_by_key(|(name, content)| (part(name), content.len()));
    assert!(files.iter().any(|(_, content)| has_delta(content)), "no page is a delta");
    files
}

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

pub fn manifest(root: pagemark::ContentId) -> Manifest {
    let cost = serde_json::json!({"dirty_pages": 0, "frozen_pages": 0, "rounds": 0, "downtime_us": 0,
        "memory_downtime_us": 0, "state_downtime_us": 0, "written_bytes": 0});
    let space = serde_json::json!({"id": 1, "kind": "process", "pid": 1, "name": "a", "root": root, "pages": 1,
        "mappings": []});
    let manifest = serde_json::json!({"job": "job", "sequence": 0, "taken_unix_us": 0, "command": [], "mechanism": "full",
        "kind": "memory", "spaces": [space], "files": [], "state": [], "cost": cost});
    serde_json::from_value(manifest).unwrap()
}

/// Opens, lists, reads, verifies, prunes and commits. No operation may panic or hang.
pub fn use_repository(backend: &Arc<dyn Backend>, also_write: bool) {
    let Ok(repository) = Repository::on(backend.clone()) else { return };
    for job in repository.jobs().unwrap_or_default() {
        for info in repository.checkpoints(&job).unwrap_or_default() {
            let Ok(checkpoint) = repository.read(&job, info.sequence) else { continue };
            for space in &checkpoint.manifest.spaces {
                let mut page = [0; PAGE_SIZE];
                if let Ok(tree) = PageTree::load(space.root, &checkpoint) {
                    for (_, id) in tree.iter().take(100) {
                        let _ = checkpoint.get_page(id, &mut page);
                    }
                    let ids: Vec<_> = tree.iter().map(|(_, id)| id).collect();
                    let _ = checkpoint.get_many(Kind::Page, &ids, &|pieces, content| {
                        for piece in pieces {
                            assert!(piece.position < ids.len() && content.get(piece.bytes.clone()).is_some());
                        }
                        ControlFlow::Continue(())
                    });
                }
                let blob = Blob { bytes: ByteCount::of_pages(space.pages), root: space.root };
                let _ = blob.reader(&checkpoint).map(|mut reader| std::io::Read::read(&mut reader, &mut page));
                let _ = checkpoint.get(Kind::Node, space.root);
            }
        }
    }
    let report = repository.verify(&mut |_| {});
    if let Ok(report) = report {
        let _ = report.to_string();
    }
    if also_write {
        let _ = repository.prune(&Retention { keep_last: Some(1), keep_every: None }, None, &mut |_| {});
        if let Ok(mut writer) = repository.writer("fuzzing", Duration::ZERO)
            && let Ok(page) = writer.put(Kind::Page, &[3; PAGE_SIZE])
        {
            let mut tree = PageTree::new();
            tree.set(PageNumber::new(1), page);
            let committed = tree.save(&mut writer).map(|root| writer.commit(manifest(root)));
            if let Ok(Ok(info)) = committed {
                let checkpoint = repository.read("job", info.sequence).unwrap();
                let tree = PageTree::load(checkpoint.manifest.spaces[0].root, &checkpoint);
                // An earlier page of the same id may be damaged, but has no other content.
                let mut content = [0; PAGE_SIZE];
                if let Ok(tree) = tree
                    && checkpoint.get_page(tree.get(PageNumber::new(1)), &mut content).is_ok()
                {
                    assert_eq!(content, [3; PAGE_SIZE]);
                }
            }
        }
    }
}
