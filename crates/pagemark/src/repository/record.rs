//! Commit records: the small files that make a checkpoint exist.

use serde::{Deserialize, Serialize};

use super::format::{FORMAT, Format, hash16, job_directory};
use crate::ContentId;
use crate::backend::{Backend, BackendError, NewObject, directory_of};
use crate::error::{Error, ErrorKind, Object};

const RECORD_BYTES: usize = 88;
const RECORD_LENGTH: u64 = RECORD_BYTES as u64;
const MAGIC: &[u8; 8] = b"pmcommit";

/// A checkpoint as the list of a job's checkpoints has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CheckpointInfo {
    /// Counts the checkpoints of a job, from 1. A number is not used again while a later checkpoint
    /// exists.
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

/// The name of a commit record.
pub(super) fn name(job: &str, sequence: u64) -> String {
    format!("{}/{}", job_directory(job), last_part(sequence))
}

fn last_part(sequence: u64) -> String {
    format!("{sequence:010}")
}

/// The sequence number in the last part of a commit record's name.
pub(super) fn parse_name(last: &str) -> Option<u64> {
    let sequence = last.parse().ok()?;
    (last_part(sequence) == last).then_some(sequence)
}

/// Reads a commit record. None if there is none.
pub(super) fn read(
    backend: &dyn Backend,
    job: &str,
    sequence: u64,
    format: &Format,
) -> Result<Option<CheckpointInfo>, Error> {
    let name = name(job, sequence);
    let damaged = |reason: &str| {
        let path = backend.location().join(&name);
        Error::damaged(ErrorKind::DamagedRecord, Object::Record(path), reason).help("other checkpoints can be read")
    };
    let object = match backend.open(&name) {
        Ok(Some(object)) => object,
        Ok(None) => return Ok(None),
        // It hides no other record.
        Err(error) if error.is_no_object() => return Err(damaged(&error.source.to_string())),
        Err(error) => return Err(error.into()),
    };
    let mut bytes = [0; RECORD_BYTES];
    let mut read = || match object.bytes()? {
        RECORD_LENGTH => object.read_at(&mut bytes, 0).map(|()| true),
        _ => Ok(false),
    };
    match read() {
        Ok(true) => {}
        Ok(false) => return Err(damaged("its length is wrong")),
        Err(error) if error.is_not_found() => return Ok(None),
        Err(error) => return Err(error.into()),
    }
    let info = CheckpointInfo::decode(&bytes, job, format).ok_or_else(|| damaged("its check does not fit"))?;
    match info.sequence == sequence {
        true => Ok(Some(info)),
        false => Err(damaged("it is another checkpoint's")),
    }
}

/// A commit record that is durable but not visible yet.
pub(super) struct NewRecord<'a> {
    object: Box<dyn NewObject>,
    backend: &'a dyn Backend,
    name: String,
    info: CheckpointInfo,
}

impl<'a> NewRecord<'a> {
    pub(super) fn write(
        backend: &'a dyn Backend,
        job: &str,
        format: &Format,
        mut info: CheckpointInfo,
    ) -> Result<NewRecord<'a>, BackendError> {
        info.written_bytes += RECORD_LENGTH;
        let name = name(job, info.sequence);
        let mut object = backend.create(&name)?;
        object.append(&[&info.encode(job, format)])?;
        object.sync()?;
        Ok(NewRecord { object, backend, name, info })
    }

    /// Makes the checkpoint exist, durably. The content that it names is durable already. After a
    /// failure the record is removed, but it may still appear after a crash, so the content
    /// must stay.
    pub(super) fn publish(self) -> Result<CheckpointInfo, BackendError> {
        let NewRecord { object, backend, name, info } = self;
        let directory = directory_of(&name);
        let published = object.publish().and_then(|()| backend.sync(directory));
        if published.is_err() {
            let _ = backend.remove(&name).and_then(|()| backend.sync(directory));
        }
        published.map(|()| info)
    }
}
