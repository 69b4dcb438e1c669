//! Commit records: the small files that make a checkpoint exist.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::RepositoryError;
use super::format::{FORMAT, Format, hash16};
use super::storage::{NewFile, Storage, io_error};
use crate::{ContentId, StoreError};

const RECORD_BYTES: usize = 88;
const MAGIC: &[u8; 8] = b"pmcommit";

/// A checkpoint as the list of a job's checkpoints has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CheckpointInfo {
    /// Counts the checkpoints of a job, from 1. A number is not used again while a later checkpoint exists.
    pub sequence: u64,
    /// When the target was frozen, microseconds since 1970 UTC.
    pub taken_unix_us: u64,
    /// Bytes that the checkpoint added to the repository.
    pub written_bytes: u64,
    /// The stored [`Manifest`](super::Manifest).
    pub manifest: ContentId,
}

impl CheckpointInfo {
    fn encode(&self, job: &str, format: &Format) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&FORMAT.to_le_bytes());
        bytes[16..32].copy_from_slice(&format.id);
        bytes[32..40].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.taken_unix_us.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.written_bytes.to_le_bytes());
        bytes[56..72].copy_from_slice(&self.manifest.0);
        let check = hash16(&format.key, &[&bytes[..72], job.as_bytes()]);
        bytes[72..].copy_from_slice(&check);
        bytes
    }

    fn decode(bytes: &[u8; RECORD_BYTES], job: &str, format: &Format) -> Option<CheckpointInfo> {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
        let manifest = ContentId(std::array::from_fn(|at| bytes[56 + at]));
        let info = CheckpointInfo { sequence: word(32), taken_unix_us: word(40), written_bytes: word(48), manifest };
        (info.encode(job, format) == *bytes).then_some(info)
    }
}

/// A file name that [`parse_name`] reads.
pub(super) fn name(sequence: u64) -> String {
    format!("{sequence:010}")
}

pub(super) fn parse_name(file: &str) -> Option<u64> {
    let sequence = file.parse().ok()?;
    (name(sequence) == file).then_some(sequence)
}

/// Reads a commit record. Gives the open file too, which can be locked. None if there is no such file.
pub(super) fn open(
    path: &Path,
    job: &str,
    sequence: u64,
    format: &Format,
) -> Result<Option<(File, CheckpointInfo)>, RepositoryError> {
    let damaged = |reason: &str| RepositoryError::DamagedRecord { path: path.to_owned(), reason: reason.into() };
    let file = match OpenOptions::new().read(true).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(io_error("open", path, source).into()),
    };
    let mut bytes = Vec::with_capacity(RECORD_BYTES + 1);
    (&file).take(RECORD_BYTES as u64 + 1).read_to_end(&mut bytes).map_err(|source| io_error("read", path, source))?;
    let bytes = bytes.try_into().map_err(|_| damaged("its length is wrong"))?;
    let info = CheckpointInfo::decode(&bytes, job, format).ok_or_else(|| damaged("its check does not fit"))?;
    match info.sequence == sequence {
        true => Ok(Some((file, info))),
        false => Err(damaged("it is another checkpoint's")),
    }
}

/// True if the file was removed since it was opened.
pub(super) fn is_removed(file: &File) -> std::io::Result<bool> {
    Ok(file.metadata()?.nlink() == 0)
}

/// A commit record that is durable but has not its name yet.
pub(super) struct NewRecord<'a> {
    file: NewFile,
    directory: &'a Path,
    storage: &'a Storage,
    info: CheckpointInfo,
}

impl<'a> NewRecord<'a> {
    pub(super) fn write(
        directory: &'a Path,
        job: &str,
        format: &Format,
        storage: &'a Storage,
        mut info: CheckpointInfo,
    ) -> Result<NewRecord<'a>, StoreError> {
        info.written_bytes += RECORD_BYTES as u64;
        let mut file = storage.create(&directory.join(name(info.sequence)).with_extension("tmp"))?;
        match file.append(&[&info.encode(job, format)]).and_then(|()| file.sync()) {
            Ok(()) => Ok(NewRecord { file, directory, storage, info }),
            Err(error) => {
                // What cannot be removed, the next writer removes.
                let _ = file.remove();
                Err(error)
            }
        }
    }

    /// Makes the checkpoint exist, durably. What it names is durable already. After a failure it is removed, but
    /// it may yet appear after a crash, so what it names must stay.
    pub(super) fn publish(mut self) -> Result<CheckpointInfo, StoreError> {
        let path = self.directory.join(name(self.info.sequence));
        let published = self.file.rename(&path).and_then(|()| self.storage.sync_dir(self.directory));
        if published.is_err() {
            let _ = self.file.remove().and_then(|()| self.storage.sync_dir(self.directory));
        }
        published.map(|()| self.info)
    }
}
