//! Reads a trace, from any block on.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use lz4_flex::block::decompress;
use xxhash_rust::xxh3::xxh3_64;

use super::{ENTRY_BYTES, FOOTER_BYTES, MAGIC, MAX_BLOCK_BYTES, TraceBlock, columns};
use crate::error::Error;

/// The place of a block.
#[derive(Clone, Copy, Debug)]
struct Entry {
    offset: u64,
    first: u64,
    checksum: u64,
    instructions: u32,
    accesses: u32,
    stored_bytes: u32,
    bytes: u32,
}

/// A complete trace of an interval.
///
/// ```no_run
/// use std::path::Path;
///
/// use pagemark_simulate::trace::Trace;
///
/// // How often each physical page is written.
/// let trace = Trace::open(Path::new("vm1-results/trace/3-4.trace"))?;
/// let mut stores = std::collections::HashMap::new();
/// for block in 0..trace.blocks() {
///     for access in trace.read(block)?.accesses {
///         if let (true, Some(address)) = (access.is_store, access.physical_address) {
///             *stores.entry(address / 4096).or_insert(0) += 1;
///         }
///     }
/// }
/// # Ok::<(), pagemark_simulate::Error>(())
/// ```
#[derive(Debug)]
pub struct Trace {
    file: File,
    path: PathBuf,
    entries: Vec<Entry>,
}

/// The number at a place of 8 bytes.
fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

/// The number at a place of 4 bytes.
fn half(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

impl Trace {
    /// Opens a trace, and reads its index.
    ///
    /// # Errors
    /// The file cannot be read, is not complete, or is damaged.
    pub fn open(path: &Path) -> Result<Trace, Error> {
        let damaged = |what| Error::damaged(path, what);
        let failed = || Error::system("read the trace", path);
        let file = File::open(path).map_err(failed())?;
        let length = file.metadata().map_err(failed())?.len();
        let end = length.checked_sub(FOOTER_BYTES as u64).filter(|&end| end >= MAGIC.len() as u64);
        let end = end.ok_or_else(|| damaged("it is not complete"))?;
        let mut magic = [0; MAGIC.len()];
        let mut footer = [0; FOOTER_BYTES];
        file.read_exact_at(&mut magic, 0).map_err(failed())?;
        file.read_exact_at(&mut footer, end).map_err(failed())?;
        if magic != MAGIC {
            return Err(damaged("it is another file"));
        }
        if footer[32..] != MAGIC || xxh3_64(&footer[..24]) != word(&footer, 24) {
            return Err(damaged("it is not complete"));
        }
        let (index_offset, blocks) = (word(&footer, 0), word(&footer, 8));
        let index_bytes = end.checked_sub(index_offset);
        let index_bytes = index_bytes.filter(|&bytes| blocks.checked_mul(ENTRY_BYTES as u64) == Some(bytes));
        let mut index = vec![0; index_bytes.ok_or_else(|| damaged("its index has another length"))? as usize];
        file.read_exact_at(&mut index, index_offset).map_err(failed())?;
        if xxh3_64(&index) != word(&footer, 16) {
            return Err(damaged("its index is damaged"));
        }
        let entries: Vec<Entry> = index
            .chunks_exact(ENTRY_BYTES)
            .map(|entry| Entry {
                offset: word(entry, 0),
                first: word(entry, 8),
                checksum: word(entry, 16),
                instructions: half(entry, 24),
                accesses: half(entry, 28),
                stored_bytes: half(entry, 32),
                bytes: half(entry, 36),
            })
            .collect();
        let (mut offset, mut first) = (MAGIC.len() as u64, 0);
        for entry in &entries {
            let has_room = entry.bytes as usize <= MAX_BLOCK_BYTES && entry.instructions > 0;
            if (entry.offset, entry.first) != (offset, first) || !has_room {
                return Err(damaged("its index contradicts itself"));
            }
            offset += u64::from(entry.stored_bytes);
            first += u64::from(entry.instructions);
        }
        if offset != index_offset {
            return Err(damaged("its index contradicts itself"));
        }
        Ok(Trace { file, path: path.to_owned(), entries })
    }

    /// Instructions that were begun.
    pub fn instructions(&self) -> u64 {
        self.entries.last().map_or(0, |last| last.first + u64::from(last.instructions))
    }

    /// Accesses to memory and to devices.
    pub fn accesses(&self) -> u64 {
        self.entries.iter().map(|entry| u64::from(entry.accesses)).sum()
    }

    /// How many blocks it has.
    pub fn blocks(&self) -> usize {
        self.entries.len()
    }

    /// The number of the block with an instruction. None behind the end of the trace.
    pub fn block_of(&self, instruction: u64) -> Option<usize> {
        let later = self.entries.partition_point(|entry| entry.first <= instruction);
        (instruction < self.instructions()).then(|| later - 1)
    }

    /// Reads a block.
    ///
    /// # Errors
    /// The file cannot be read, or the block is damaged.
    ///
    /// # Panics
    /// There is no block of this number.
    pub fn read(&self, block: usize) -> Result<TraceBlock, Error> {
        let entry = self.entries[block];
        let damaged = || Error::damaged(&self.path, "a block is damaged");
        let mut stored = vec![0; entry.stored_bytes as usize];
        self.file.read_exact_at(&mut stored, entry.offset).map_err(Error::system("read the trace", &self.path))?;
        if xxh3_64(&stored) != entry.checksum {
            return Err(damaged());
        }
        let raw = decompress(&stored, entry.bytes as usize).map_err(|_| damaged())?;
        columns::decode(&raw, entry.first, entry.instructions, entry.accesses).ok_or_else(damaged)
    }
}
