//! What all files of a repository have in common.

use std::fs::File;
use std::io::{self, Read};

/// The format that this program writes. It reads no newer one.
pub(super) const FORMAT: u32 = 1;
/// Bytes at the beginning of a pack and of an index file.
pub(super) const FILE_HEADER_BYTES: usize = 32;

/// The files that end with a table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FileKind {
    /// Records, then their table.
    Pack,
    /// The tables of several packs in one.
    Index,
}

/// What tells this repository's files from others'.
#[derive(Clone)]
pub(super) struct Format {
    /// Of every hash.
    pub(super) key: [u8; 32],
    /// The repository's own name.
    pub(super) id: [u8; 16],
}

impl Format {
    /// The beginning of a pack or an index file.
    pub(super) fn file_header(&self, kind: FileKind) -> [u8; FILE_HEADER_BYTES] {
        let mut header = [0; FILE_HEADER_BYTES];
        header[..8].copy_from_slice(match kind {
            FileKind::Pack => b"pmpack\0\0",
            FileKind::Index => b"pmindex\0",
        });
        header[8..12].copy_from_slice(&FORMAT.to_le_bytes());
        header[16..].copy_from_slice(&self.id);
        header
    }
}

/// The first 16 bytes of the keyed BLAKE3 hash of the parts, one after the other.
pub(super) fn hash16(key: &[u8; 32], parts: &[&[u8]]) -> [u8; 16] {
    let mut hasher = blake3::Hasher::new_keyed(key);
    for part in parts {
        hasher.update(part);
    }
    let hash = hasher.finalize();
    std::array::from_fn(|at| hash.as_bytes()[at])
}

/// Bytes that nobody can guess.
pub(super) fn random<const BYTES: usize>() -> io::Result<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// A number that no other file has or had.
pub(super) fn random_number() -> io::Result<u64> {
    random().map(u64::from_le_bytes)
}

/// A pack's or index's number, as its file name begins.
pub(super) fn number_name(number: u64) -> String {
    format!("{number:016x}")
}

/// Reads what [`number_name`] wrote.
pub(super) fn parse_number(name: &str) -> Option<u64> {
    let number = u64::from_str_radix(name, 16).ok()?;
    (number_name(number) == name).then_some(number)
}
