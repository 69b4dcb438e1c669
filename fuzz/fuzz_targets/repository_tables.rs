//! A correct repository whose tables have false entries with correct checks: entries that overlap,
//! name one record twice, or lead to headers that lie within the content of other records.

#![no_main]

mod common;

use std::sync::LazyLock;

use common::{Storage, checkpoints, create, put, sign_record, sign_table, use_repository};
use libfuzzer_sys::fuzz_target;

const ENTRY_BYTES: usize = 32;

/// The objects of a repository whose packs have many records, so that a block of a table has many
/// entries, and a read of many pages has them in one batch.
static WHOLE: LazyLock<Vec<(String, Vec<u8>)>> = LazyLock::new(|| checkpoints(7, 12));

/// Where the entries of the table at the end of a file are.
fn entries_of(file: &[u8]) -> Option<std::ops::Range<usize>> {
    let tail = file.last_chunk::<64>().filter(|tail| tail.starts_with(b"pmtable\0"))?;
    let word = |at: usize| u64::from_le_bytes(tail[at..at + 8].try_into().unwrap()) as usize;
    Some(word(8)..word(8) + word(16) * ENTRY_BYTES)
}

/// An entry of a table: the parts of it that are changed.
#[derive(Clone, Copy)]
struct Entry([u8; ENTRY_BYTES]);

impl Entry {
    fn half(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.0[at..at + 4].try_into().unwrap())
    }

    fn set_half(&mut self, at: usize, half: u32) {
        self.0[at..at + 4].copy_from_slice(&half.to_le_bytes());
    }

    fn offset(&self) -> u32 {
        self.half(24)
    }

    fn stored_bytes(&self) -> u32 {
        self.half(28) & !(1 << 31)
    }

    /// The record of the entry, as it would have to begin: with a correct check of its own.
    fn put_header(&self, pack: &mut [u8], raw_bytes: u32, kinds: u8) {
        let at = self.offset() as usize;
        let Some(header) = pack.get_mut(at..).and_then(|rest| rest.first_chunk_mut::<32>()) else { return };
        header[..16].copy_from_slice(&self.0[..16]);
        header[16..20].copy_from_slice(&self.stored_bytes().to_le_bytes());
        header[20..24].copy_from_slice(&raw_bytes.to_le_bytes());
        (header[24], header[25]) = (kinds % 4, kinds / 4 % 4);
        sign_record(pack, at);
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((mode, changes)) = data.split_first() else { return };
    let mut files = WHOLE.clone();
    for change in changes.as_chunks::<9>().0.iter().take(64) {
        let [file, one, other, operation, kinds, value @ ..] = *change;
        let value = u32::from_le_bytes(value);
        let at = usize::from(file) % files.len();
        let content = &mut files[at].1;
        let Some(entries) = entries_of(content) else { continue };
        let (begin, count) = (entries.start, entries.len() / ENTRY_BYTES);
        let place = |index: u8| begin + usize::from(index) % count * ENTRY_BYTES;
        let read = |content: &[u8], index: u8| Entry(content[place(index)..][..ENTRY_BYTES].try_into().unwrap());
        let (mut changed, named) = (read(content, one), read(content, other));
        match operation % 8 {
            // Near the begin of another record, or anywhere.
            0 => changed.set_half(24, named.offset().wrapping_add(value % 8192).wrapping_sub(4096)),
            1 => changed.set_half(24, value),
            // To about the end of another record, or of any length.
            2 => {
                let end = named.offset().wrapping_add(named.stored_bytes()).wrapping_add(value % 128);
                changed.set_half(28, end.wrapping_sub(changed.offset()).wrapping_sub(64));
            }
            3 => changed.set_half(28, value),
            4 => changed.0[..16].copy_from_slice(&named.0[..16]),
            5 => changed.0[16..24].copy_from_slice(&named.0[16..24]),
            6 => changed.0[16..20].copy_from_slice(&value.to_le_bytes()),
            _ => changed.0[usize::from(kinds) % 16] ^= value as u8,
        }
        content[place(one)..][..ENTRY_BYTES].copy_from_slice(&changed.0);
        if operation & 64 != 0 {
            // Also where the record is that the entry has: its own pack or, for an index file, the first.
            let pack = if files[at].0.starts_with("packs/") { at } else { 0 };
            changed.put_header(&mut files[pack].1, if operation & 128 != 0 { 4096 } else { value }, kinds);
        }
    }
    let storage = Storage::new(mode & 64 != 0);
    create(&*storage.backend);
    for (number, (name, content)) in files.iter_mut().enumerate() {
        if let Some(entries) = entries_of(content).filter(|_| mode & 32 == 0) {
            let (entries, _) = content[entries].as_chunks_mut::<ENTRY_BYTES>();
            entries.sort_unstable();
        }
        if !name.starts_with("checkpoints/") {
            sign_table(content);
        }
        // The mode may name a file that is missing.
        if usize::from(mode & 31) != number + 1 {
            put(&*storage.backend, name, content);
        }
    }
    use_repository(&storage.backend, mode & 128 != 0);
});
