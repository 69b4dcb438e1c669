//! Packs whose tables have correct checks and false entries: no error but a typed one.

use super::*;
use crate::repository::format::{FileKind, hash16};
use crate::repository::pack::scan;
use crate::repository::table::{Entry, TableWriter};

/// Exchanges the table of a pack for one with other entries, with correct checks.
fn forge(bed: &Bed, repository: &Repository, number: u64, change: &dyn Fn(usize, &mut Entry)) {
    let (name, format) = (pack_name(number), &repository.inner.format);
    let content = get(&*bed.backend, &name);
    let object = bed.backend.open(&name).unwrap().unwrap();
    let mut entries = scan(&*object, &format.key, number, content.len() as u64).unwrap();
    let header = pack::RECORD_HEADER_BYTES;
    let end = entries.iter().map(|entry| entry.offset as usize + header + entry.stored_bytes as usize).max();
    entries.iter_mut().enumerate().for_each(|(index, entry)| change(index, entry));
    entries.sort_unstable_by_key(|entry| entry.id);
    bed.backend.remove(&name).unwrap();
    let mut object = bed.backend.create(&name).unwrap();
    object.append(&[&content[..end.unwrap()]]).unwrap();
    let mut table = TableWriter::new(&mut *object, format, FileKind::Pack, entries.len() as u64);
    entries.iter().for_each(|entry| table.push(entry).unwrap());
    table.finish(&[number]).unwrap();
    object.publish().unwrap();
}

fn packs(bed: &Bed) -> Vec<u64> {
    let names = bed.backend.list(PACKS).unwrap().into_iter().map(|entry| entry.name);
    names.filter_map(|name| format::parse_number(name.strip_suffix(".pack")?)).collect()
}

/// Uses all of a repository, in whatever state.
fn use_all(repository: &Repository) {
    for job in repository.jobs().unwrap_or_default() {
        for info in repository.checkpoints(&job).unwrap_or_default() {
            let Ok(checkpoint) = repository.read(&job, info.sequence) else { continue };
            if let Ok(tree) = PageTree::load(checkpoint.manifest.spaces[0].root, &checkpoint) {
                let _ = read_many(&checkpoint, &tree);
            }
        }
    }
    let _ = repository.verify(&mut |_| {});
    let _ = repository.prune(&Retention { keep_last: Some(1), ..Retention::default() }, None, &mut |_| {});
}

#[test]
fn entries_that_lie_are_no_panic() {
    const LENGTHS: [u32; 6] = [0, 7, 300_000, 500_000, (64 << 20) + 1, (1 << 31) - 1];
    let (bed, repository, _) = example(Kept::InMemory, 4);
    for (place, length) in (0..8).flat_map(|place| LENGTHS.map(|length| (place, length))) {
        for offset in [None, Some(0), Some(40), Some(u32::MAX)] {
            let copy = bed.copy();
            for number in packs(&bed) {
                forge(&copy, &repository, number, &|index, entry| {
                    if index % 8 == place {
                        entry.stored_bytes = length;
                        entry.offset = offset.unwrap_or(entry.offset);
                    }
                });
            }
            use_all(&copy.open());
        }
    }
}

/// A table that says it is as long as the file, which takes no room on the disk.
#[test]
fn a_table_longer_than_memory_is_an_error() {
    let (bed, repository, _) = example(Kept::Locally, 2);
    let directory = bed.directory.as_ref().unwrap().path().join("repository");
    let format = &repository.inner.format;
    for number in packs(&bed) {
        let path = directory.join(pack_name(number));
        let content = std::fs::read(&path).unwrap();
        let entries_offset = content.len() as u64;
        let (pack_count, filter_blocks) = (u32::MAX, u32::MAX);
        let parts_bytes = u64::from(pack_count) * 8 + u64::from(filter_blocks) * 64;
        let mut tail = [0; 64];
        tail[..8].copy_from_slice(b"pmtable\0");
        tail[8..16].copy_from_slice(&entries_offset.to_le_bytes());
        tail[24..28].copy_from_slice(&pack_count.to_le_bytes());
        tail[28..32].copy_from_slice(&filter_blocks.to_le_bytes());
        let header: [u8; 32] = content[..32].try_into().unwrap();
        let check = hash16(&format.key, &[&header, &tail[..48]]);
        tail[48..].copy_from_slice(&check);
        let mut permissions = std::fs::metadata(&path).unwrap().permissions();
        permissions.set_mode(0o600);
        std::fs::set_permissions(&path, permissions).unwrap();
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &tail, entries_offset + parts_bytes).unwrap();
    }
    use_all(&bed.open());
}
