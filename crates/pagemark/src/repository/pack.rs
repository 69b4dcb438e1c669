//! Packs: files of records, each one piece of content, with a table at their end.

use std::collections::HashMap;
use std::fs::File;
use std::hash::{BuildHasherDefault, Hasher};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::format::{FILE_HEADER_BYTES, FileKind, Format, hash16, number_name, random_number};
use super::storage::{NewFile, Storage, io_error};
use super::table::{Entry, Table, TableWriter, Unreadable};
use crate::{ContentId, Kind, PAGE_SIZE, StoreError};

/// Bytes before each record's content.
pub(super) const RECORD_HEADER_BYTES: usize = 32;
/// The largest piece of content.
pub(super) const MAX_PIECE_BYTES: usize = 64 << 20;
/// A pack with so many records is ended, and another begun: what a writer holds in memory is bounded. In tests packs are
/// small, so that a checkpoint has several.
const MAX_PACK_RECORDS: usize = if cfg!(test) { 64 } else { 128 << 10 };
/// A pack with so many bytes is ended. With one more record it still stays below 4 GiB.
const MAX_PACK_BYTES: u64 = 256 << 20;
/// LZ4 makes a byte into no more than this many.
const MAX_EXPANSION: usize = 255;

/// How content is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Encoding {
    /// As it is.
    Raw = 0,
    /// As an LZ4 block.
    Lz4 = 1,
}

/// What stands before each record's content.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RecordHeader {
    pub(super) id: ContentId,
    pub(super) stored_bytes: u32,
    pub(super) raw_bytes: u32,
    pub(super) kind: Kind,
    pub(super) encoding: Encoding,
}

impl RecordHeader {
    fn encode(&self, key: &[u8; 32]) -> [u8; RECORD_HEADER_BYTES] {
        let mut bytes = [0; RECORD_HEADER_BYTES];
        bytes[..16].copy_from_slice(&self.id.0);
        bytes[16..20].copy_from_slice(&self.stored_bytes.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.raw_bytes.to_le_bytes());
        bytes[24] = match self.kind {
            Kind::Page => 1,
            Kind::Node => 2,
            Kind::Manifest => 3,
        };
        bytes[25] = self.encoding as u8;
        let check = hash16(key, &[&bytes[..26]]);
        bytes[26..].copy_from_slice(&check[..6]);
        bytes
    }

    /// None if it is no header.
    pub(super) fn decode(bytes: &[u8; RECORD_HEADER_BYTES], key: &[u8; 32]) -> Option<RecordHeader> {
        let half = |at: usize| u32::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
        let kind = [Kind::Page, Kind::Node, Kind::Manifest].into_iter().nth(usize::from(bytes[24]).checked_sub(1)?)?;
        let encoding = [Encoding::Raw, Encoding::Lz4].into_iter().nth(usize::from(bytes[25]))?;
        let id = ContentId(std::array::from_fn(|at| bytes[at]));
        let header = RecordHeader { id, stored_bytes: half(16), raw_bytes: half(20), kind, encoding };
        (header.encode(key) == *bytes && header.is_plausible()).then_some(header)
    }

    fn is_plausible(&self) -> bool {
        let (stored, raw) = (self.stored_bytes as usize, self.raw_bytes as usize);
        raw <= MAX_PIECE_BYTES
            && match self.encoding {
                Encoding::Raw => stored == raw,
                Encoding::Lz4 => stored < raw && raw / MAX_EXPANSION <= stored,
            }
    }

    /// Decodes the content into `raw`, whose length is `raw_bytes`, and checks it.
    fn unpack(&self, stored: &[u8], raw: &mut [u8], key: &[u8; 32]) -> Result<(), String> {
        match self.encoding {
            Encoding::Raw => raw.copy_from_slice(stored),
            Encoding::Lz4 => match lz4_flex::block::decompress_into(stored, raw) {
                Ok(bytes) if bytes == raw.len() => {}
                Ok(bytes) => return Err(format!("it unpacks to {bytes} bytes, not {}", raw.len())),
                Err(error) => return Err(format!("it does not unpack: {error}")),
            },
        }
        match ContentId::of(key, raw) == self.id {
            true => Ok(()),
            false => Err("its content is not what was put".into()),
        }
    }
}

/// A record read from a pack, checked, still packed.
pub(super) struct Record {
    pub(super) header: RecordHeader,
    /// Header and content as they are stored.
    pub(super) stored: Vec<u8>,
    /// The content.
    pub(super) raw: Vec<u8>,
}

/// Where records can be read.
pub(super) trait RecordSource {
    /// Fills `bytes`; an end before that is an error of the kind `UnexpectedEof`.
    fn read(&self, bytes: &mut [u8], offset: u64) -> Result<(), StoreError>;
}

impl RecordSource for (&File, &Path) {
    fn read(&self, bytes: &mut [u8], offset: u64) -> Result<(), StoreError> {
        self.0.read_exact_at(bytes, offset).map_err(|source| io_error("read", self.1, source))
    }
}

impl RecordSource for NewFile {
    fn read(&self, bytes: &mut [u8], offset: u64) -> Result<(), StoreError> {
        self.read_at(bytes, offset)
    }
}

fn damaged(entry: &Entry, reason: impl Into<String>) -> StoreError {
    let (pack, offset) = (number_name(entry.pack), entry.offset);
    StoreError::Damaged { id: entry.id, reason: format!("{} (pack {pack}, offset {offset})", reason.into()) }
}

/// Fills `stored` with a record's header and content, and checks the header.
fn read_stored(
    source: &dyn RecordSource,
    key: &[u8; 32],
    entry: &Entry,
    stored: &mut [u8],
) -> Result<RecordHeader, StoreError> {
    source.read(stored, entry.offset.into()).map_err(|error| match error {
        StoreError::Io { source, .. } if source.kind() == std::io::ErrorKind::UnexpectedEof => {
            damaged(entry, "the file ends before it")
        }
        error => error,
    })?;
    let header = stored.first_chunk().and_then(|bytes| RecordHeader::decode(bytes, key));
    match header {
        Some(header) if header.id == entry.id && header.stored_bytes == entry.stored_bytes => Ok(header),
        _ => Err(damaged(entry, "its header is damaged")),
    }
}

/// Reads a record and checks it.
pub(super) fn read_record(source: &dyn RecordSource, key: &[u8; 32], entry: &Entry) -> Result<Record, StoreError> {
    if entry.stored_bytes as usize > MAX_PIECE_BYTES {
        return Err(damaged(entry, "it is larger than any piece of content"));
    }
    let mut stored = vec![0; RECORD_HEADER_BYTES + entry.stored_bytes as usize];
    let header = read_stored(source, key, entry, &mut stored)?;
    let mut raw = vec![0; header.raw_bytes as usize];
    let content = &stored[RECORD_HEADER_BYTES..];
    header.unpack(content, &mut raw, key).map_err(|reason| damaged(entry, reason))?;
    Ok(Record { header, stored, raw })
}

/// Reads a page and checks it.
pub(super) fn read_page(
    source: &dyn RecordSource,
    key: &[u8; 32],
    entry: &Entry,
    page: &mut [u8; PAGE_SIZE],
) -> Result<(), StoreError> {
    let mut buffer = [0; RECORD_HEADER_BYTES + PAGE_SIZE];
    let Some(stored) = buffer.get_mut(..RECORD_HEADER_BYTES + entry.stored_bytes as usize) else {
        return Err(damaged(entry, "it is no page"));
    };
    let header = read_stored(source, key, entry, stored)?;
    if header.raw_bytes as usize != PAGE_SIZE {
        return Err(damaged(entry, "it is no page"));
    }
    header.unpack(&stored[RECORD_HEADER_BYTES..], page, key).map_err(|reason| damaged(entry, reason))
}

/// Finds a pack's records without its table, up to the first that is damaged.
pub(super) fn scan(
    source: &dyn RecordSource,
    key: &[u8; 32],
    pack: u64,
    file_bytes: u64,
) -> Result<Vec<Entry>, StoreError> {
    let mut entries = Vec::new();
    let mut offset = FILE_HEADER_BYTES as u64;
    let mut bytes = [0; RECORD_HEADER_BYTES];
    while offset + RECORD_HEADER_BYTES as u64 <= file_bytes {
        source.read(&mut bytes, offset)?;
        let Some(header) = RecordHeader::decode(&bytes, key) else { break };
        let end = offset + (RECORD_HEADER_BYTES as u64) + u64::from(header.stored_bytes);
        let Ok(at) = u32::try_from(offset) else { break };
        if end > file_bytes {
            break;
        }
        entries.push(Entry { id: header.id, pack, offset: at, stored_bytes: header.stored_bytes });
        offset = end;
    }
    Ok(entries)
}

/// Ids are hashes already.
#[derive(Default)]
pub(super) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        if let Some(first) = bytes.first_chunk() {
            self.0 = u64::from_le_bytes(*first);
        }
    }

    fn write_usize(&mut self, _: usize) {}
}

/// A map by id.
pub(super) type IdMap<V> = HashMap<ContentId, V, BuildHasherDefault<IdHasher>>;

/// Packs that are being written. What is dropped before it is published leaves nothing behind.
pub(super) struct NewPacks {
    directory: PathBuf,
    format: Format,
    storage: Storage,
    current: Option<CurrentPack>,
    finished: Vec<(NewFile, Arc<Table>)>,
    /// Where content is encoded.
    scratch: Vec<u8>,
    /// A write failed, so that it is not known what is in the current pack.
    failed: bool,
}

struct CurrentPack {
    number: u64,
    file: NewFile,
    /// Offset and stored bytes of its records.
    places: IdMap<(u32, u32)>,
}

impl CurrentPack {
    fn entry(&self, id: ContentId) -> Option<Entry> {
        let (offset, stored_bytes) = *self.places.get(&id)?;
        Some(Entry { id, pack: self.number, offset, stored_bytes })
    }
}

impl NewPacks {
    pub(super) fn new(directory: PathBuf, format: Format, storage: Storage) -> Self {
        NewPacks { directory, format, storage, current: None, finished: Vec::new(), scratch: Vec::new(), failed: false }
    }

    /// Where an id is among the new packs, and the finished pack it is in.
    fn find(&self, id: ContentId) -> Result<Option<(Entry, Option<&NewFile>)>, StoreError> {
        if let Some(entry) = self.current.as_ref().and_then(|current| current.entry(id)) {
            return Ok(Some((entry, None)));
        }
        for (file, table) in &self.finished {
            match table.find(id)? {
                Ok(Some((_, entry))) => return Ok(Some((entry, Some(file)))),
                Ok(None) => {}
                Err(Unreadable(reason)) => return Err(StoreError::Damaged { id, reason }),
            }
        }
        Ok(None)
    }

    pub(super) fn contains(&self, id: ContentId) -> Result<bool, StoreError> {
        Ok(self.find(id)?.is_some())
    }

    /// Reads from the new packs; none if the id is not there.
    pub(super) fn read(&self, id: ContentId) -> Result<Option<Record>, StoreError> {
        let Some((entry, finished)) = self.find(id)? else { return Ok(None) };
        let source = finished.or(self.current.as_ref().map(|current| &current.file));
        source.map(|source| read_record(source, &self.format.key, &entry)).transpose()
    }

    /// Adds content that is not there. Compresses it if that is worth it.
    pub(super) fn add(&mut self, kind: Kind, id: ContentId, raw: &[u8]) -> Result<(), StoreError> {
        if raw.len() > MAX_PIECE_BYTES {
            return Err(StoreError::TooLarge { bytes: raw.len(), limit_bytes: MAX_PIECE_BYTES });
        }
        let mut scratch = std::mem::take(&mut self.scratch);
        let room = lz4_flex::block::get_maximum_output_size(raw.len());
        if kind != Kind::Node && scratch.len() < room {
            scratch.resize(room, 0);
        }
        // Nodes consist of hashes, which do not compress.
        let compressed = match kind {
            Kind::Node => None,
            _ => lz4_flex::block::compress_into(raw, &mut scratch)
                .ok()
                .filter(|bytes| *bytes <= raw.len() - raw.len() / 16),
        };
        // Less than a sixteenth saved is not worth unpacking.
        let (encoding, stored) = match compressed {
            Some(bytes) if bytes < raw.len() => (Encoding::Lz4, &scratch[..bytes]),
            _ => (Encoding::Raw, raw),
        };
        let (stored_bytes, raw_bytes) = (stored.len() as u32, raw.len() as u32);
        let header = RecordHeader { id, stored_bytes, raw_bytes, kind, encoding }.encode(&self.format.key);
        let added = self.append(id, &[&header, stored]);
        self.scratch = scratch;
        added
    }

    /// Adds a record from another pack as it is.
    pub(super) fn copy(&mut self, record: &Record) -> Result<(), StoreError> {
        self.append(record.header.id, &[&record.stored])
    }

    fn append(&mut self, id: ContentId, parts: &[&[u8]]) -> Result<(), StoreError> {
        if self.failed {
            return Err(StoreError::Aborted);
        }
        self.failed = true;
        let stored_bytes: usize = parts.iter().map(|part| part.len()).sum::<usize>() - RECORD_HEADER_BYTES;
        let current = match &mut self.current {
            Some(current) => current,
            None => {
                let number = random_number().map_err(|source| io_error("read", Path::new("/dev/urandom"), source))?;
                let file = self.storage.create(&self.directory.join(format!("{}.pack.tmp", number_name(number))))?;
                let current = self.current.insert(CurrentPack { number, file, places: IdMap::default() });
                current.file.append(&[&self.format.file_header(FileKind::Pack)])?;
                current
            }
        };
        // Below 4 GiB by the limits above.
        let offset = current.file.len() as u32;
        current.file.append(parts)?;
        current.places.insert(id, (offset, stored_bytes as u32));
        if current.places.len() >= MAX_PACK_RECORDS || current.file.len() >= MAX_PACK_BYTES {
            self.finish_current()?;
        }
        self.failed = false;
        Ok(())
    }

    /// Ends the current pack with its table.
    fn finish_current(&mut self) -> Result<(), StoreError> {
        let Some(current) = &mut self.current else { return Ok(()) };
        let number = current.number;
        let places = std::mem::take(&mut current.places);
        let mut entries: Vec<Entry> = places
            .into_iter()
            .map(|(id, (offset, stored_bytes))| Entry { id, pack: number, offset, stored_bytes })
            .collect();
        entries.sort_unstable_by_key(|entry| entry.id);
        // The table is looked into for each page of the next checkpoints.
        current.file.stay_cached()?;
        let mut writer = TableWriter::new(&mut current.file, &self.format, FileKind::Pack, entries.len() as u64);
        for entry in &entries {
            writer.push(entry)?;
        }
        writer.finish(&[number])?;
        let file = current.file.finish()?;
        let path = self.directory.join(format!("{}.pack", number_name(number)));
        let table = Table::open(file, &path, &self.format, FileKind::Pack, number)?.map_err(|Unreadable(reason)| {
            io_error("read back", &path, std::io::Error::new(std::io::ErrorKind::InvalidData, reason))
        })?;
        if let Some(current) = self.current.take() {
            self.finished.push((current.file, Arc::new(table)));
        }
        Ok(())
    }

    /// Makes all of it durable under its names. Returns the tables and the bytes of the files. The packs stay only if
    /// [`NewPacks::keep`] is called too.
    pub(super) fn publish(&mut self) -> Result<(Vec<Arc<Table>>, u64), StoreError> {
        if self.failed {
            return Err(StoreError::Aborted);
        }
        self.finish_current()?;
        for (file, _) in &mut self.finished {
            file.sync()?;
        }
        for (file, table) in &mut self.finished {
            file.rename(table.path())?;
        }
        if !self.finished.is_empty() {
            self.storage.sync_dir(&self.directory)?;
        }
        let written_bytes = self.finished.iter().map(|(file, _)| file.len()).sum();
        Ok((self.finished.iter().map(|(_, table)| table.clone()).collect(), written_bytes))
    }

    /// Says that what was published is needed.
    pub(super) fn keep(&mut self) {
        self.finished.clear();
    }
}

impl Drop for NewPacks {
    fn drop(&mut self) {
        // Also packs that have their names already: no commit record names what is in them. What cannot be removed,
        // the next writer or prune removes.
        for file in self.current.iter().map(|current| &current.file).chain(self.finished.iter().map(|(file, _)| file)) {
            let _ = file.remove();
        }
    }
}
