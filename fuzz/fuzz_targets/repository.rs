//! Any bytes as the files of a repository, with and without correct checks.

#![no_main]

mod common;

use common::{Storage, create, file_header, hash, put, sign_commit, sign_record, sign_table, use_repository};
use libfuzzer_sys::fuzz_target;
use pagemark::ContentId;

const PACK: &str = "packs/0000000000000001.pack";

/// A pack with correct records and a correct table, and any content.
fn pack_of(pieces: &[(u8, &[u8])]) -> (Vec<u8>, Vec<ContentId>) {
    let mut file = file_header(b"pmpack\0\0");
    let mut entries = Vec::new();
    for (kind, content) in pieces {
        let id = ContentId::of(&common::KEY, content);
        let (at, length) = (file.len() as u32, content.len() as u32);
        entries.push((id, at, length));
        file.extend_from_slice(&id.0);
        file.extend_from_slice(&length.to_le_bytes());
        file.extend_from_slice(&length.to_le_bytes());
        file.extend_from_slice(&[*kind, 0, 0, 0, 0, 0, 0, 0]);
        sign_record(&mut file, at as usize);
        file.extend_from_slice(content);
    }
    let ids = entries.iter().map(|(id, ..)| *id).collect();
    entries.sort();
    entries.dedup_by_key(|(id, ..)| *id);
    let offset = file.len() as u64;
    for (id, at, length) in &entries {
        file.extend_from_slice(&id.0);
        file.extend_from_slice(&1u64.to_le_bytes());
        file.extend_from_slice(&at.to_le_bytes());
        file.extend_from_slice(&length.to_le_bytes());
    }
    file.extend_from_slice(&1u64.to_le_bytes());
    file.extend(std::iter::repeat_n(0, entries.len().div_ceil(64) * 16));
    let mut tail = [0; 64];
    tail[8..16].copy_from_slice(&offset.to_le_bytes());
    tail[16..24].copy_from_slice(&(entries.len() as u64).to_le_bytes());
    tail[24..28].copy_from_slice(&1u32.to_le_bytes());
    file.extend_from_slice(&tail);
    sign_table(&mut file);
    (file, ids)
}

fn commit_of(manifest: ContentId) -> Vec<u8> {
    let mut record =
        [&b"pmcommit"[..], &1u32.to_le_bytes(), &[0; 4], &common::ID, &1u64.to_le_bytes(), &[0; 16]].concat();
    record.extend_from_slice(&manifest.0);
    record.extend_from_slice(&[0; 16]);
    sign_commit(&mut record);
    record
}

fuzz_target!(|data: &[u8]| {
    let Some(([mode, cut], rest)) = data.split_first_chunk() else { return };
    // Every eighth repository is in a directory.
    let storage = Storage::new(mode >> 2 & 7 == 7);
    create(&*storage.backend);
    let (first, second) = rest.split_at(rest.len() * usize::from(*cut) / 256);
    let write = |name: &str, content: &[u8]| put(&*storage.backend, name, content);
    match mode % 4 {
        // Any bytes.
        0 => {
            write(PACK, first);
            write("index/0000000000000002.idx", second);
            write("checkpoints/job/0000000001", second);
            if mode & 64 != 0 {
                write("config", first);
            }
        }
        // Any bytes with correct checks.
        1 => {
            let mut pack = [&file_header(b"pmpack\0\0"), first].concat();
            sign_record(&mut pack, 32);
            sign_table(&mut pack);
            write(PACK, &pack);
            let mut index = [&file_header(b"pmindex\0"), second].concat();
            sign_table(&mut index);
            write("index/0000000000000002.idx", &index);
            write("checkpoints/job/0000000001", &commit_of(ContentId(hash(&[first])[..16].try_into().unwrap())));
        }
        // Any manifest.
        2 => {
            let (pack, ids) = pack_of(&[(3, first), (2, second)]);
            write(PACK, &pack);
            write("checkpoints/job/0000000001", &commit_of(ids[0]));
        }
        // Any nodes: each two bytes of the input begin a node with some children among those before
        // it.
        _ => {
            let mut nodes: Vec<Vec<u8>> = Vec::new();
            let mut ids = vec![ContentId([1; 16])];
            for step in rest.chunks(4).take(64) {
                let [level, low, high, child] = std::array::from_fn(|at| step.get(at).copied().unwrap_or(0));
                let mut node = vec![level % 17, low, high];
                for number in 0..u16::from_le_bytes([low, high]).count_ones() as usize {
                    let back = (usize::from(child) + number * usize::from(level / 17)) % ids.len();
                    node.extend_from_slice(&ids[ids.len() - 1 - back].0);
                }
                ids.push(ContentId::of(&common::KEY, &node));
                nodes.push(node);
            }
            let root = *ids.last().unwrap();
            let mut manifest = common::manifest(root);
            manifest.sequence = 1;
            let manifest = serde_json::to_vec(&manifest).unwrap();
            let mut pieces: Vec<(u8, &[u8])> = nodes.iter().map(|node| (2, &node[..])).collect();
            pieces.push((3, &manifest));
            let (pack, ids) = pack_of(&pieces);
            write(PACK, &pack);
            write("checkpoints/job/0000000001", &commit_of(*ids.last().unwrap()));
        }
    }
    use_repository(&storage.backend, mode & 128 != 0);
});
