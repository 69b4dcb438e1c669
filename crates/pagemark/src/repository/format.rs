//! The names of a repository's objects, and what packs, index files and records have in common.

use crate::backend::BackendError;

/// The format of packs, index files and commit records.
pub(super) const FORMAT: u32 = 1;
/// The format of a repository in which every space is a process. Programs that know only manifests
/// of version 1 can use it.
pub(super) const PROCESSES_ONLY: u32 = 1;
/// The format of a repository with spaces of every kind.
pub(super) const ANY_SPACES: u32 = 2;
/// The format of a repository with deltas, too. This program reads no later one.
pub(super) const DELTAS: u32 = 3;
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

/// The values that distinguish the objects of this repository from those of others.
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

/// The object that makes a backend a repository.
pub(super) const CONFIG: &str = "config";
/// The copy of it.
pub(super) const CONFIG_COPY: &str = "config.copy";
/// The directory of the packs.
pub(super) const PACKS: &str = "packs";
/// The directory of the index files.
pub(super) const INDEXES: &str = "index";
/// The directory with a directory of commit records for each job.
pub(super) const CHECKPOINTS: &str = "checkpoints";

/// The name of a pack.
pub(super) fn pack_name(number: u64) -> String {
    format!("{PACKS}/{}.pack", number_name(number))
}

/// The name of an index file.
pub(super) fn index_name(number: u64) -> String {
    format!("{INDEXES}/{}.idx", number_name(number))
}

/// The directory of a job's commit records.
pub(super) fn job_directory(job: &str) -> String {
    format!("{CHECKPOINTS}/{job}")
}

/// Random bytes that nobody can guess.
pub(super) fn random<const BYTES: usize>() -> Result<[u8; BYTES], BackendError> {
    pagemark_linux::random::random().map_err(BackendError::new("read", "/dev/urandom"))
}

/// A number that no other file has or had.
pub(super) fn random_number() -> Result<u64, BackendError> {
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
