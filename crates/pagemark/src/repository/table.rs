//! Sorted tables that find content: one at the end of each pack, and index files with those of
//! several packs.

use std::sync::Arc;

use pagemark_linux::room;

use super::format::{FILE_HEADER_BYTES, FileKind, Format, hash16, index_name, pack_name};
use crate::backend::{Backend, BackendError, NewObject, Object};
use crate::{ContentId, Error, ErrorKind, error};

/// Bytes of an entry.
pub(super) const ENTRY_BYTES: usize = 32;
/// Entries of a block, which is read and checked at once.
const BLOCK_ENTRIES: usize = 64;
const BLOCK_BYTES: usize = BLOCK_ENTRIES * ENTRY_BYTES;
/// Bytes of a block's line in the directory.
const DIRECTORY_BYTES: usize = 16;
/// Bytes of a block of the filter.
const FILTER_BYTES: usize = 64;
/// Bits of the filter for an entry; with 6 of them set about one in 150 ids that are not there
/// seems to be.
const FILTER_BITS_PER_ENTRY: u64 = 12;
/// Tables with more entries have no filter, which would have to be held in memory.
const MAX_FILTERED_ENTRIES: u64 = 4 << 20;
/// Blocks of the longest filter.
const MOST_FILTER_BLOCKS: u64 = (MAX_FILTERED_ENTRIES * FILTER_BITS_PER_ENTRY).div_ceil(512);
const TAIL_BYTES: usize = 64;
const TAIL_MAGIC: &[u8; 8] = b"pmtable\0";

/// Set in the stored bytes of an entry whose record is a delta. No record is that long.
const DELTA_BIT: u32 = 1 << 31;

/// The location of one piece of content.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Entry {
    pub(super) id: ContentId,
    /// The record has a base, without which it cannot be read. Of several copies, those that are
    /// stored whole come first.
    pub(super) is_delta: bool,
    /// The pack's number.
    pub(super) pack: u64,
    /// Of the record in the pack.
    pub(super) offset: u32,
    /// Of the record's content as it is stored.
    pub(super) stored_bytes: u32,
}

impl Entry {
    fn encode(&self) -> [u8; ENTRY_BYTES] {
        let mut bytes = [0; ENTRY_BYTES];
        bytes[..16].copy_from_slice(&self.id.0);
        bytes[16..24].copy_from_slice(&self.pack.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.offset.to_le_bytes());
        let flag = if self.is_delta { DELTA_BIT } else { 0 };
        bytes[28..].copy_from_slice(&(self.stored_bytes | flag).to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; ENTRY_BYTES]) -> Entry {
        let [id, rest] = [&bytes[..16], &bytes[16..]];
        let length = u32::from_le_bytes(std::array::from_fn(|at| rest[12 + at]));
        Entry {
            id: ContentId(std::array::from_fn(|at| id[at])),
            pack: u64::from_le_bytes(std::array::from_fn(|at| rest[at])),
            offset: u32::from_le_bytes(std::array::from_fn(|at| rest[8 + at])),
            stored_bytes: length & !DELTA_BIT,
            is_delta: length & DELTA_BIT != 0,
        }
    }
}

fn prefix_of(id: ContentId) -> u64 {
    u64::from_be_bytes(std::array::from_fn(|at| id.0[at]))
}

/// A blocked Bloom filter: says of most ids that are not in a table that they are not.
#[derive(Clone, Default)]
struct Filter {
    blocks: Vec<[u64; 8]>,
}

impl Filter {
    fn for_entries(count: u64) -> Filter {
        let blocks = if count > MAX_FILTERED_ENTRIES { 0 } else { (count * FILTER_BITS_PER_ENTRY).div_ceil(512) };
        Filter { blocks: vec![[0; 8]; blocks as usize] }
    }

    /// The block of an id and the bits that it sets there. Ids are hashes, so their own bits serve.
    fn place(&self, id: ContentId) -> (usize, [u64; 8]) {
        let block = u64::from_le_bytes(std::array::from_fn(|at| id.0[8 + at]));
        let bits = u64::from_le_bytes(std::array::from_fn(|at| id.0[at]));
        let mut mask = [0; 8];
        for bit in (0..6).map(|index| bits >> (9 * index) & 511) {
            mask[(bit / 64) as usize] |= 1 << (bit % 64);
        }
        (((u128::from(block) * self.blocks.len() as u128) >> 64) as usize, mask)
    }

    fn insert(&mut self, id: ContentId) {
        let (block, mask) = self.place(id);
        if let Some(block) = self.blocks.get_mut(block) {
            block.iter_mut().zip(mask).for_each(|(word, mask)| *word |= mask);
        }
    }

    fn may_contain(&self, id: ContentId) -> bool {
        let (block, mask) = self.place(id);
        self.blocks.get(block).is_none_or(|block| block.iter().zip(mask).all(|(word, mask)| word & mask == mask))
    }
}

/// Writes a table at the end of a file.
pub(super) struct TableWriter<'a> {
    object: &'a mut dyn NewObject,
    format: &'a Format,
    kind: FileKind,
    entries_offset: u64,
    entry_count: u64,
    block: Vec<u8>,
    directory: Vec<u8>,
    filter: Filter,
}

impl<'a> TableWriter<'a> {
    /// `max_entries` is a bound, which the filter is made for.
    pub(super) fn new(object: &'a mut dyn NewObject, format: &'a Format, kind: FileKind, max_entries: u64) -> Self {
        TableWriter {
            entries_offset: object.bytes(),
            object,
            format,
            kind,
            entry_count: 0,
            block: Vec::with_capacity(BLOCK_BYTES),
            directory: Vec::new(),
            filter: Filter::for_entries(max_entries),
        }
    }

    /// Adds an entry. Ids ascend.
    pub(super) fn push(&mut self, entry: &Entry) -> Result<(), BackendError> {
        if self.block.is_empty() {
            self.directory.extend_from_slice(&entry.id.0[..8]);
        }
        self.block.extend_from_slice(&entry.encode());
        self.filter.insert(entry.id);
        self.entry_count += 1;
        if self.block.len() == BLOCK_BYTES { self.end_block() } else { Ok(()) }
    }

    fn end_block(&mut self) -> Result<(), BackendError> {
        if !self.block.is_empty() {
            self.directory.extend_from_slice(&hash16(&self.format.key, &[&self.block])[..8]);
            self.object.append(&[&self.block])?;
            self.block.clear();
        }
        Ok(())
    }

    /// Ends the table, which covers the given packs, in ascending order.
    pub(super) fn finish(mut self, packs: &[u64]) -> Result<(), BackendError> {
        self.end_block()?;
        let packs_bytes: Vec<u8> = packs.iter().flat_map(|pack| pack.to_le_bytes()).collect();
        let filter_bytes: Vec<u8> = self.filter.blocks.iter().flatten().flat_map(|word| word.to_le_bytes()).collect();
        let parts: [&[u8]; 3] = [&packs_bytes, &self.directory, &filter_bytes];
        let mut tail = [0; TAIL_BYTES];
        tail[..8].copy_from_slice(TAIL_MAGIC);
        tail[8..16].copy_from_slice(&self.entries_offset.to_le_bytes());
        tail[16..24].copy_from_slice(&self.entry_count.to_le_bytes());
        tail[24..28].copy_from_slice(&(packs.len() as u32).to_le_bytes());
        tail[28..32].copy_from_slice(&(self.filter.blocks.len() as u32).to_le_bytes());
        tail[32..48].copy_from_slice(&hash16(&self.format.key, &parts));
        let header = self.format.file_header(self.kind);
        let check = hash16(&self.format.key, &[&header, &tail[..48]]);
        tail[48..].copy_from_slice(&check);
        for part in parts {
            self.object.append(&[part])?;
        }
        self.object.append(&[&tail])
    }
}

/// A table that can be searched.
pub(super) struct Table {
    /// The number in the file's name; no number is ever used again.
    pub(super) number: u64,
    /// Whether it ends a pack or is an index file.
    pub(super) kind: FileKind,
    /// The packs whose content it names, in ascending order.
    pub(super) packs: Vec<u64>,
    /// How many entries it has.
    pub(super) entry_count: u64,
    /// Where the entries begin, and the records before them end.
    pub(super) entries_offset: u64,
    /// Bytes of the file.
    pub(super) file_bytes: u64,
    key: [u8; 32],
    source: Source,
    filter: Filter,
}

enum Source {
    /// With the directory: a block's first id (its first 8 bytes) and its check. The object is
    /// opened when it is read if it is not kept open.
    Stored { backend: Arc<dyn Backend>, object: Option<Arc<dyn Object>>, directory: Vec<(u64, u64)> },
    /// For a pack whose table is damaged.
    Memory(Vec<Entry>),
}

/// A file is damaged, for this reason.
pub(super) struct Unreadable(pub(super) String);

impl Unreadable {
    /// The error for those who need the table of that name.
    pub(super) fn of(self, name: &str) -> Error {
        Error::damaged(ErrorKind::DamagedTable, error::Object::Table(name.to_owned()), self.0)
    }
}

impl Table {
    /// Reads what is needed to search. The outer error is of the storage, the inner says that the
    /// file is damaged.
    pub(super) fn open(
        object: Arc<dyn Object>,
        backend: &Arc<dyn Backend>,
        format: &Format,
        kind: FileKind,
        number: u64,
    ) -> Result<Result<Table, Unreadable>, BackendError> {
        let unreadable = |reason: &str| Ok(Err(Unreadable(reason.to_owned())));
        let file_bytes = object.bytes()?;
        if file_bytes < (FILE_HEADER_BYTES + TAIL_BYTES) as u64 {
            return unreadable("it is too short");
        }
        let (mut header, mut tail) = ([0; FILE_HEADER_BYTES], [0; TAIL_BYTES]);
        object.read_at(&mut header, 0)?;
        object.read_at(&mut tail, file_bytes - TAIL_BYTES as u64)?;
        if header != format.file_header(kind) {
            return unreadable("its header is damaged, or of another repository");
        }
        if tail[..8] != *TAIL_MAGIC || tail[48..] != hash16(&format.key, &[&header, &tail[..48]]) {
            return unreadable("it was not written to its end");
        }
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| tail[at + index]));
        let half = |at: usize| u64::from(u32::from_le_bytes(std::array::from_fn(|index| tail[at + index])));
        let (entries_offset, entry_count, pack_count, filter_blocks) = (word(8), word(16), half(24), half(28));
        let block_count = entry_count.div_ceil(BLOCK_ENTRIES as u64);
        let lengths = || {
            let entries = entry_count.checked_mul(ENTRY_BYTES as u64)?;
            let parts = pack_count.checked_mul(8)? + filter_blocks.checked_mul(FILTER_BYTES as u64)?;
            let parts = parts.checked_add(block_count.checked_mul(DIRECTORY_BYTES as u64)?)?;
            let parts_offset = entries_offset.checked_add(entries)?;
            let end = parts_offset.checked_add(parts)?.checked_add(TAIL_BYTES as u64)?;
            (end == file_bytes && entries_offset >= FILE_HEADER_BYTES as u64).then_some((parts_offset, parts))
        };
        let Some((parts_offset, parts_bytes)) = lengths() else {
            return unreadable("its table is not as long as it says");
        };
        // A sparse file has any length without a cost.
        let is_possible = filter_blocks <= MOST_FILTER_BLOCKS && (kind == FileKind::Index || pack_count == 1);
        if !is_possible {
            return unreadable("its table has more parts than any");
        }
        let mut parts = room::zeros(parts_bytes as usize).map_err(|error| {
            let name = if kind == FileKind::Pack { pack_name(number) } else { index_name(number) };
            BackendError::new("read the table of", name)(error)
        })?;
        object.read_at(&mut parts, parts_offset)?;
        if tail[32..48] != hash16(&format.key, &[&parts]) {
            return unreadable("its table is damaged");
        }
        let (packs, parts) = parts.split_at(pack_count as usize * 8);
        let (directory, filter) = parts.split_at(block_count as usize * DIRECTORY_BYTES);
        let packs: Vec<u64> = packs.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
        if !packs.is_sorted_by(|a, b| a < b) || (kind == FileKind::Pack && packs != [number]) {
            return unreadable("its table is another file's");
        }
        let halves = |bytes: &[u8; 16]| {
            let [first, check] = [&bytes[..8], &bytes[8..]];
            let first = u64::from_be_bytes(std::array::from_fn(|at| first[at]));
            (first, u64::from_le_bytes(std::array::from_fn(|at| check[at])))
        };
        let directory: Vec<(u64, u64)> = directory.as_chunks().0.iter().map(halves).collect();
        let words = |bytes: &[u8; FILTER_BYTES]| {
            std::array::from_fn(|word| u64::from_le_bytes(std::array::from_fn(|at| bytes[8 * word + at])))
        };
        let filter = Filter { blocks: filter.as_chunks().0.iter().map(words).collect() };
        let key = format.key;
        let source = Source::Stored { backend: backend.clone(), object: Some(object), directory };
        Ok(Ok(Table { number, kind, packs, entry_count, entries_offset, file_bytes, key, source, filter }))
    }

    /// A table for a pack whose own is damaged.
    pub(super) fn of_entries(mut entries: Vec<Entry>, pack: u64, file_bytes: u64) -> Table {
        entries.sort_unstable_by_key(|entry| entry.id);
        entries.dedup_by_key(|entry| entry.id);
        Table {
            number: pack,
            kind: FileKind::Pack,
            packs: vec![pack],
            entry_count: entries.len() as u64,
            entries_offset: file_bytes,
            file_bytes,
            key: [0; 32],
            source: Source::Memory(entries),
            filter: Filter::default(),
        }
    }

    /// True if the file's own table is damaged.
    pub(super) fn is_rebuilt(&self) -> bool {
        matches!(self.source, Source::Memory(_))
    }

    /// Keeps the object open no longer.
    pub(super) fn close(&mut self) {
        if let Source::Stored { object, .. } = &mut self.source {
            *object = None;
        }
    }

    /// The name of the object that the table is in.
    pub(super) fn name(&self) -> String {
        match self.kind {
            FileKind::Pack => pack_name(self.number),
            FileKind::Index => index_name(self.number),
        }
    }

    /// The position and the entry of an id. The inner error says that the table is damaged there.
    pub(super) fn find(&self, id: ContentId) -> Result<Result<Option<(u64, Entry)>, Unreadable>, Error> {
        self.find_by(id, Self::read_block)
    }

    /// Like [`Table::find`], but the entry is not checked: it may be damaged. Checking takes longer
    /// than all else.
    pub(super) fn find_unchecked(&self, id: ContentId) -> Result<Result<Option<(u64, Entry)>, Unreadable>, Error> {
        self.find_by(id, Self::read_unchecked_block)
    }

    fn find_by(
        &self,
        id: ContentId,
        read: for<'a, 'b> fn(&'a Table, usize, &'b mut [u8; BLOCK_BYTES]) -> BlockRead<'b>,
    ) -> Result<Result<Option<(u64, Entry)>, Unreadable>, Error> {
        if !self.filter.may_contain(id) {
            return Ok(Ok(None));
        }
        let directory = match &self.source {
            Source::Memory(entries) => {
                let found = entries.binary_search_by_key(&id, |entry| entry.id).ok();
                return Ok(Ok(found.map(|position| (position as u64, entries[position]))));
            }
            Source::Stored { directory, .. } => directory,
        };
        let prefix = prefix_of(id);
        let first = directory.partition_point(|(first, _)| *first < prefix).saturating_sub(1);
        let behind = directory.partition_point(|(first, _)| *first <= prefix);
        let mut buffer = [0; BLOCK_BYTES];
        for block in first..behind {
            let entries = match read(self, block, &mut buffer)? {
                Ok(entries) => entries,
                Err(unreadable) => return Ok(Err(unreadable)),
            };
            if let Ok(found) = entries.binary_search_by(|entry| entry[..16].cmp(&id.0)) {
                return Ok(Ok(Some(((block * BLOCK_ENTRIES + found) as u64, Entry::decode(&entries[found])))));
            }
        }
        Ok(Ok(None))
    }

    /// Calls `found` with the index and the entry of each of `ids` that the table names. The ids
    /// ascend. Each block is read at most once. The inner error says that the table is damaged
    /// somewhere; what was found before is valid.
    pub(super) fn find_all(
        &self,
        ids: &[ContentId],
        found: &mut dyn FnMut(usize, Entry),
    ) -> Result<Result<(), Unreadable>, Error> {
        let candidates = ids.iter().enumerate().filter(|(_, id)| self.filter.may_contain(**id));
        let directory = match &self.source {
            Source::Memory(entries) => {
                for (index, id) in candidates {
                    if let Ok(at) = entries.binary_search_by_key(id, |entry| entry.id) {
                        found(index, entries[at]);
                    }
                }
                return Ok(Ok(()));
            }
            Source::Stored { directory, .. } => directory,
        };
        let (mut buffer, mut held, mut next) = ([0; BLOCK_BYTES], None, 0);
        for (index, id) in candidates {
            let prefix = prefix_of(*id);
            // The last block that begins with a lower prefix may contain the id, too.
            while directory.get(next + 1).is_some_and(|(first, _)| *first < prefix) {
                next += 1;
            }
            for (block, _) in directory.iter().enumerate().skip(next).take_while(|(_, (first, _))| *first <= prefix) {
                if held != Some(block) {
                    if let Err(unreadable) = self.read_block(block, &mut buffer)? {
                        return Ok(Err(unreadable));
                    }
                    held = Some(block);
                }
                let entries = buffer.as_chunks::<ENTRY_BYTES>().0;
                let begin = (block * BLOCK_ENTRIES) as u64;
                let entries = &entries[..(self.entry_count - begin).min(BLOCK_ENTRIES as u64) as usize];
                if let Ok(at) = entries.binary_search_by(|entry| entry[..16].cmp(&id.0)) {
                    found(index, Entry::decode(&entries[at]));
                    break;
                }
            }
        }
        Ok(Ok(()))
    }

    fn read_block<'b>(&self, block: usize, buffer: &'b mut [u8; BLOCK_BYTES]) -> BlockRead<'b> {
        let entries = match self.read_unchecked_block(block, buffer)? {
            Ok(entries) => entries,
            Err(unreadable) => return Ok(Err(unreadable)),
        };
        if let Source::Stored { directory, .. } = &self.source
            && hash16(&self.key, &[entries.as_flattened()])[..8] != directory[block].1.to_le_bytes()
        {
            return Ok(Err(Unreadable(format!("block {block} of its table is damaged"))));
        }
        Ok(Ok(entries))
    }

    fn read_unchecked_block<'b>(&self, block: usize, buffer: &'b mut [u8; BLOCK_BYTES]) -> BlockRead<'b> {
        let begin = (block * BLOCK_ENTRIES) as u64;
        let bytes = &mut buffer[..(self.entry_count - begin).min(BLOCK_ENTRIES as u64) as usize * ENTRY_BYTES];
        let Source::Stored { backend, object, .. } = &self.source else {
            return Ok(Err(Unreadable("it has no blocks".into())));
        };
        let gone = || Ok(Err(Unreadable("it is gone".into())));
        let object = match object {
            Some(object) => object.clone(),
            None => match backend.open(&self.name())? {
                Some(object) => object,
                None => return gone(),
            },
        };
        match object.read_at(bytes, self.entries_offset + begin * ENTRY_BYTES as u64) {
            Ok(()) => {}
            Err(error) if error.is_not_found() => return gone(),
            Err(error) => return Err(error.into()),
        }
        Ok(Ok(bytes.as_chunks().0))
    }

    /// All entries, by ascending id. Ends after the first error.
    pub(super) fn entries(&self) -> Entries<'_> {
        Entries { table: self, next: 0, block: Vec::new(), failed: false }
    }
}

/// The entries of a block.
type BlockRead<'b> = Result<Result<&'b [[u8; ENTRY_BYTES]], Unreadable>, Error>;

/// The entries of a table, one block in memory.
pub(super) struct Entries<'a> {
    table: &'a Table,
    next: u64,
    block: Vec<Entry>,
    failed: bool,
}

impl Iterator for Entries<'_> {
    type Item = Result<Entry, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed || self.next == self.table.entry_count {
            return None;
        }
        let within = match &self.table.source {
            Source::Memory(entries) => {
                self.next += 1;
                return entries.get(self.next as usize - 1).copied().map(Ok);
            }
            Source::Stored { .. } => {
                let within = self.next as usize % BLOCK_ENTRIES;
                if within == 0 {
                    let mut buffer = [0; BLOCK_BYTES];
                    let block = self.next as usize / BLOCK_ENTRIES;
                    match self.table.read_block(block, &mut buffer) {
                        Ok(Ok(entries)) => self.block = entries.iter().map(Entry::decode).collect(),
                        Ok(Err(unreadable)) => {
                            self.failed = true;
                            return Some(Err(unreadable.of(&self.table.name())));
                        }
                        Err(error) => {
                            self.failed = true;
                            return Some(Err(error));
                        }
                    }
                }
                within
            }
        };
        self.next += 1;
        self.block.get(within).copied().map(Ok)
    }
}
