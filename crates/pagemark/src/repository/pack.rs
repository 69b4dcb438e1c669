//! Packs: files of records, each one piece of content, with a table at their end.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;
use std::sync::Arc;

use super::delta::{self, BASE_ID_BYTES};
use super::format::{FILE_HEADER_BYTES, FileKind, Format, PACKS, hash16, number_name, pack_name, random_number};
use super::table::{Entry, Table, TableWriter, Unreadable};
use crate::backend::{Backend, BackendError, NewObject, ReadAt};
use crate::{ContentId, Error, ErrorKind, Kind, PAGE_SIZE};

/// Bytes before each record's content.
pub(super) const RECORD_HEADER_BYTES: usize = 32;
/// The largest piece of content.
pub(super) const MAX_PIECE_BYTES: usize = 64 << 20;
/// A pack with this many records is ended, and another begun: that bounds the memory of a writer.
/// In tests packs are small, so that a checkpoint has several.
const MAX_PACK_RECORDS: usize = if cfg!(test) { 64 } else { 128 << 10 };
/// A pack with this many bytes is ended. With one more record it still stays below 4 GiB.
const MAX_PACK_BYTES: u64 = 256 << 20;
/// A pack with this many bytes takes longer to make durable than to do so twice.
const LONG_SYNC_BYTES: u64 = if cfg!(test) { 32 << 10 } else { 8 << 20 };
/// LZ4 makes a byte into no more than this many.
const MAX_EXPANSION: usize = 255;

/// How content is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Encoding {
    /// As it is.
    Raw = 0,
    /// As an LZ4 block.
    Lz4 = 1,
    /// As what differs from another page, which is not stored so itself.
    Delta = 2,
}

/// Where the bases of deltas are read.
pub(super) trait ReadBase {
    /// Reads a page that is stored whole, and checks it.
    ///
    /// # Errors
    /// [`ErrorKind::Missing`], or [`ErrorKind::Damaged`], also if it is there only as a delta.
    fn read_base(&self, id: ContentId, page: &mut [u8; PAGE_SIZE]) -> Result<(), Error>;
}

/// The header before the content of each record.
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

    /// None if the bytes are not a header.
    pub(super) fn decode(bytes: &[u8; RECORD_HEADER_BYTES], key: &[u8; 32]) -> Option<RecordHeader> {
        let half = |at: usize| u32::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
        let kind = [Kind::Page, Kind::Node, Kind::Manifest].into_iter().nth(usize::from(bytes[24]).checked_sub(1)?)?;
        let encodings = [Encoding::Raw, Encoding::Lz4, Encoding::Delta];
        let encoding = encodings.into_iter().nth(usize::from(bytes[25]))?;
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
                Encoding::Delta => {
                    self.kind == Kind::Page && raw == PAGE_SIZE && BASE_ID_BYTES <= stored && stored < raw
                }
            }
    }

    /// Decodes the content of the entry's record into `raw`, whose length is `raw_bytes`, and
    /// checks it.
    fn unpack_checked(
        &self,
        entry: &Entry,
        stored: &[u8],
        raw: &mut [u8],
        key: &[u8; 32],
        bases: &dyn ReadBase,
    ) -> Result<(), Error> {
        self.unpack(entry, stored, raw, bases)?;
        match ContentId::of(key, raw) == self.id {
            true => Ok(()),
            false => Err(damaged(entry, "its content is not what was put")),
        }
    }

    /// Like [`RecordHeader::unpack_checked`], but the content is not checked.
    fn unpack(&self, entry: &Entry, stored: &[u8], raw: &mut [u8], bases: &dyn ReadBase) -> Result<(), Error> {
        match self.encoding {
            Encoding::Raw => raw.copy_from_slice(stored),
            Encoding::Lz4 => match lz4_flex::block::decompress_into(stored, raw) {
                Ok(bytes) if bytes == raw.len() => {}
                Ok(bytes) => return Err(damaged(entry, format!("it unpacks to {bytes} bytes, not {}", raw.len()))),
                Err(error) => return Err(damaged(entry, format!("it does not unpack: {error}"))),
            },
            Encoding::Delta => {
                let (Some((base, runs)), Some(page)) = (delta::split(stored), raw.first_chunk_mut()) else {
                    return Err(damaged(entry, "it is no change of a page"));
                };
                bases.read_base(base, page).map_err(|error| match error.kind() {
                    ErrorKind::Damaged | ErrorKind::Missing => damaged(entry, format!("the page before it: {error}")),
                    _ => error,
                })?;
                delta::apply(runs, page).map_err(|reason| damaged(entry, reason))?;
            }
        }
        Ok(())
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

fn aborted() -> Error {
    Error::because(ErrorKind::Aborted, "an earlier write failed: the checkpoint cannot be completed")
}

fn damaged(entry: &Entry, reason: impl Into<String>) -> Error {
    let (pack, offset) = (number_name(entry.pack), entry.offset);
    Error::damaged_content(entry.id, format!("{} (pack {pack}, offset {offset})", reason.into()))
}

/// Fills `stored` with a record's header and content, and checks the header.
fn read_stored(source: &dyn ReadAt, key: &[u8; 32], entry: &Entry, stored: &mut [u8]) -> Result<RecordHeader, Error> {
    source.read_at(stored, entry.offset.into()).map_err(|error| match error.source.kind() {
        std::io::ErrorKind::UnexpectedEof => damaged(entry, "the file ends before it"),
        _ => error.into(),
    })?;
    checked_header(stored, key, entry)
}

/// The header of a record, which must be the record of the entry.
fn checked_header(stored: &[u8], key: &[u8; 32], entry: &Entry) -> Result<RecordHeader, Error> {
    let header = stored.first_chunk().and_then(|bytes| RecordHeader::decode(bytes, key));
    match header {
        Some(header)
            if header.id == entry.id
                && header.stored_bytes == entry.stored_bytes
                && (header.encoding == Encoding::Delta) == entry.is_delta =>
        {
            Ok(header)
        }
        _ => Err(damaged(entry, "its header is damaged")),
    }
}

/// Reads a record and checks it.
pub(super) fn read_record(
    source: &dyn ReadAt,
    key: &[u8; 32],
    entry: &Entry,
    bases: &dyn ReadBase,
) -> Result<Record, Error> {
    if entry.stored_bytes as usize > MAX_PIECE_BYTES {
        return Err(damaged(entry, "it is larger than any piece of content"));
    }
    let mut stored = vec![0; RECORD_HEADER_BYTES + entry.stored_bytes as usize];
    let header = read_stored(source, key, entry, &mut stored)?;
    let mut raw = vec![0; header.raw_bytes as usize];
    header.unpack_checked(entry, &stored[RECORD_HEADER_BYTES..], &mut raw, key, bases)?;
    Ok(Record { header, stored, raw })
}

/// Reads a page and checks it.
pub(super) fn read_page(
    source: &dyn ReadAt,
    key: &[u8; 32],
    entry: &Entry,
    page: &mut [u8; PAGE_SIZE],
    bases: &dyn ReadBase,
) -> Result<(), Error> {
    let mut buffer = [0; RECORD_HEADER_BYTES + PAGE_SIZE];
    let Some(stored) = buffer.get_mut(..RECORD_HEADER_BYTES + entry.stored_bytes as usize) else {
        return Err(damaged(entry, "it is no page"));
    };
    let header = read_stored(source, key, entry, stored)?;
    if header.raw_bytes as usize != PAGE_SIZE {
        return Err(damaged(entry, "it is no page"));
    }
    header.unpack_checked(entry, &stored[RECORD_HEADER_BYTES..], page, key, bases)
}

/// The id of the base of the entry's record, which is a delta.
pub(super) fn read_base_id(source: &dyn ReadAt, key: &[u8; 32], entry: &Entry) -> Result<ContentId, Error> {
    let mut bytes = [0; RECORD_HEADER_BYTES + BASE_ID_BYTES];
    read_stored(source, key, entry, &mut bytes)?;
    delta::split(&bytes[RECORD_HEADER_BYTES..])
        .map(|(base, _)| base)
        .ok_or_else(|| damaged(entry, "it is no change of a page"))
}

/// Decodes a record, checks it, and writes its content into `raw` from the start of `place` on.
/// `raw` is extended if it is too short. Returns the length of the content.
///
/// # Errors
/// [`ErrorKind::TooLarge`] if the content does not fit into `place`; [`ErrorKind::Damaged`]
pub(super) fn decode_record(
    stored: &[u8],
    key: &[u8; 32],
    entry: &Entry,
    raw: &mut Vec<u8>,
    place: Range<usize>,
    bases: &dyn ReadBase,
) -> Result<usize, Error> {
    let header = checked_header(stored, key, entry)?;
    let (at, length) = (place.start, header.raw_bytes as usize);
    if length > place.len() {
        return Err(Error::too_large(length, place.len()));
    }
    if raw.len() < at + length {
        raw.resize(at + length, 0);
    }
    header.unpack_checked(entry, &stored[RECORD_HEADER_BYTES..], &mut raw[at..at + length], key, bases)?;
    Ok(length)
}

/// Decodes the record of a page that is stored whole. The content is not checked: that of the page
/// that a delta makes of it is.
pub(super) fn decode_base(
    stored: &[u8],
    key: &[u8; 32],
    entry: &Entry,
    page: &mut [u8; PAGE_SIZE],
) -> Result<(), Error> {
    /// A page that is stored whole has no base.
    struct NoBase;
    impl ReadBase for NoBase {
        fn read_base(&self, id: ContentId, _: &mut [u8; PAGE_SIZE]) -> Result<(), Error> {
            Err(Error::missing(id))
        }
    }
    let header = checked_header(stored, key, entry)?;
    if header.raw_bytes as usize != PAGE_SIZE {
        return Err(damaged(entry, "it is no page"));
    }
    header.unpack(entry, &stored[RECORD_HEADER_BYTES..], page, &NoBase)
}

/// Finds a pack's records without its table, up to the first that is damaged.
pub(super) fn scan(
    source: &dyn ReadAt,
    key: &[u8; 32],
    pack: u64,
    file_bytes: u64,
) -> Result<Vec<Entry>, BackendError> {
    let mut entries = Vec::new();
    let mut offset = FILE_HEADER_BYTES as u64;
    let mut bytes = [0; RECORD_HEADER_BYTES];
    while offset + RECORD_HEADER_BYTES as u64 <= file_bytes {
        source.read_at(&mut bytes, offset)?;
        let Some(header) = RecordHeader::decode(&bytes, key) else { break };
        let end = offset + (RECORD_HEADER_BYTES as u64) + u64::from(header.stored_bytes);
        let Ok(at) = u32::try_from(offset) else { break };
        if end > file_bytes {
            break;
        }
        let is_delta = header.encoding == Encoding::Delta;
        entries.push(Entry { id: header.id, pack, offset: at, stored_bytes: header.stored_bytes, is_delta });
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

/// Packs that are being written. What is not published leaves nothing behind. What is stays, though
/// no commit record may name it in the end: other writers rely on content that they see.
pub(super) struct NewPacks {
    backend: Arc<dyn Backend>,
    format: Format,
    current: Option<CurrentPack>,
    finished: Vec<FinishedPack>,
    /// Where content is encoded.
    scratch: Vec<u8>,
    has_deltas: bool,
    /// A write failed, so that the content of the current pack is unknown.
    failed: bool,
}

/// A pack with its table.
struct FinishedPack {
    object: Box<dyn NewObject>,
    table: Arc<Table>,
    is_synced: bool,
}

impl FinishedPack {
    fn sync(&mut self) -> Result<(), BackendError> {
        if !self.is_synced {
            self.object.sync()?;
            self.is_synced = true;
        }
        Ok(())
    }
}

/// A record in one of the new packs.
type Found<'a> = (Entry, &'a dyn ReadAt);

struct CurrentPack {
    number: u64,
    object: Box<dyn NewObject>,
    /// The entries of its records.
    entries: IdMap<Entry>,
}

impl NewPacks {
    pub(super) fn new(backend: Arc<dyn Backend>, format: Format) -> Self {
        NewPacks {
            backend,
            format,
            current: None,
            finished: Vec::new(),
            scratch: Vec::new(),
            has_deltas: false,
            failed: false,
        }
    }

    /// The entry of an id in the new packs, and the pack that has it.
    fn find(&self, id: ContentId) -> Result<Option<Found<'_>>, Error> {
        if let Some(current) = &self.current
            && let Some(entry) = current.entries.get(&id)
        {
            return Ok(Some((*entry, &*current.object)));
        }
        for FinishedPack { object, table, .. } in &self.finished {
            match table.find(id)? {
                Ok(Some((_, entry))) => return Ok(Some((entry, &**object))),
                Ok(None) => {}
                Err(Unreadable(reason)) => return Err(Error::damaged_content(id, reason)),
            }
        }
        Ok(None)
    }

    pub(super) fn contains(&self, id: ContentId) -> Result<bool, Error> {
        Ok(self.find(id)?.is_some())
    }

    /// Reads from the new packs; none if the id is not there.
    pub(super) fn read(&self, id: ContentId, bases: &dyn ReadBase) -> Result<Option<Record>, Error> {
        self.find(id)?.map(|(entry, pack)| read_record(pack, &self.format.key, &entry, bases)).transpose()
    }

    /// True if a record is a delta.
    pub(super) fn has_deltas(&self) -> bool {
        self.has_deltas
    }

    /// Adds content that is not there. Compresses it if that is worth it. Returns its entry.
    pub(super) fn add(&mut self, kind: Kind, id: ContentId, raw: &[u8]) -> Result<Entry, Error> {
        if raw.len() > MAX_PIECE_BYTES {
            return Err(Error::too_large(raw.len(), MAX_PIECE_BYTES));
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
        let added = self.append(id, &[&header, stored], false);
        self.scratch = scratch;
        added
    }

    /// Adds a page that is not there as a delta, which begins with the id of its base. The base is
    /// in the repository already, whole.
    pub(super) fn add_delta(&mut self, id: ContentId, delta: &[u8]) -> Result<Entry, Error> {
        let (stored_bytes, raw_bytes) = (delta.len() as u32, PAGE_SIZE as u32);
        let (kind, encoding) = (Kind::Page, Encoding::Delta);
        let header = RecordHeader { id, stored_bytes, raw_bytes, kind, encoding }.encode(&self.format.key);
        self.append(id, &[&header, delta], true)
    }

    /// Adds a record from another pack as it is.
    pub(super) fn copy(&mut self, record: &Record) -> Result<(), Error> {
        self.append(record.header.id, &[&record.stored], record.header.encoding == Encoding::Delta).map(drop)
    }

    fn append(&mut self, id: ContentId, parts: &[&[u8]], is_delta: bool) -> Result<Entry, Error> {
        if self.failed {
            return Err(aborted());
        }
        self.failed = true;
        let stored_bytes: usize = parts.iter().map(|part| part.len()).sum::<usize>() - RECORD_HEADER_BYTES;
        let current = match &mut self.current {
            Some(current) => current,
            None => {
                let number = random_number()?;
                let object = self.backend.create(&pack_name(number))?;
                let current = self.current.insert(CurrentPack { number, object, entries: IdMap::default() });
                current.object.append(&[&self.format.file_header(FileKind::Pack)])?;
                current
            }
        };
        // Below 4 GiB by the limits above.
        let offset = current.object.bytes() as u32;
        current.object.append(parts)?;
        let entry = Entry { id, pack: current.number, offset, stored_bytes: stored_bytes as u32, is_delta };
        current.entries.insert(id, entry);
        self.has_deltas |= is_delta;
        if current.entries.len() >= MAX_PACK_RECORDS || current.object.bytes() >= MAX_PACK_BYTES {
            self.finish_current()?;
        }
        self.failed = false;
        Ok(entry)
    }

    /// Ends the current pack with its table.
    fn finish_current(&mut self) -> Result<(), Error> {
        let Some(current) = &mut self.current else { return Ok(()) };
        let number = current.number;
        let mut entries: Vec<Entry> = std::mem::take(&mut current.entries).into_values().collect();
        entries.sort_unstable_by_key(|entry| entry.id);
        // The table is searched for each page of the next checkpoints.
        current.object.expect_reads()?;
        let mut writer = TableWriter::new(&mut *current.object, &self.format, FileKind::Pack, entries.len() as u64);
        for entry in &entries {
            writer.push(entry)?;
        }
        writer.finish(&[number])?;
        let object = current.object.finish()?;
        let table = Table::open(object, &self.backend, &self.format, FileKind::Pack, number)?;
        let table = Arc::new(table.map_err(|unreadable| unreadable.of(&pack_name(number)))?);
        if let Some(CurrentPack { object, .. }) = self.current.take() {
            self.finished.push(FinishedPack { object, table, is_synced: false });
        }
        Ok(())
    }

    /// Makes durable what was added so far, though not yet visible, so that little is left for
    /// [`NewPacks::publish`].
    pub(super) fn sync(&mut self) -> Result<(), Error> {
        if self.failed {
            return Err(aborted());
        }
        self.failed = true;
        for pack in &mut self.finished {
            pack.sync()?;
        }
        if let Some(current) = self.current.as_mut().filter(|current| current.object.bytes() >= LONG_SYNC_BYTES) {
            current.object.expect_reads()?;
            current.object.sync()?;
        }
        self.failed = false;
        Ok(())
    }

    /// Ends the last pack, and makes all of them durable, though not yet visible. Returns the bytes
    /// of the files. From now on no more room is needed.
    pub(super) fn finish(&mut self) -> Result<u64, Error> {
        if self.failed {
            return Err(aborted());
        }
        self.finish_current()?;
        for pack in &mut self.finished {
            pack.sync()?;
        }
        Ok(self.finished.iter().map(|pack| pack.object.bytes()).sum())
    }

    /// Makes all of it durable under its names. Returns the tables.
    pub(super) fn publish(&mut self) -> Result<Vec<Arc<Table>>, Error> {
        self.finish()?;
        let mut tables = Vec::new();
        for FinishedPack { object, table, .. } in self.finished.drain(..) {
            object.publish()?;
            tables.push(table);
        }
        if !tables.is_empty() {
            self.backend.sync(PACKS)?;
        }
        Ok(tables)
    }
}
