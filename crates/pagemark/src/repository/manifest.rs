//! The description of one checkpoint, stored as JSON.

use serde::{Deserialize, Serialize};

use crate::{ContentId, Mechanism};

/// All that is known of one checkpoint. What it names by id is in the same repository.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Manifest {
    /// What the checkpoints of one target are filed under.
    pub job: String,
    /// Counts the checkpoints of a job, from 1.
    pub sequence: u64,
    /// When the target was frozen, microseconds since 1970 UTC.
    pub taken_unix_us: u64,
    /// The program's command line, for people to read.
    pub command: Vec<String>,
    /// How the written pages were found.
    pub mechanism: Mechanism,
    /// The kind of target that can restore it: `process` (with its state) or `memory` (memory and registers alone).
    pub kind: TargetKind,
    /// The address spaces; for a process tree one a process, the root first.
    pub spaces: Vec<SpaceRecord>,
    /// Regular files that the target had open for writing, with their content at the freeze.
    pub files: Vec<FileRecord>,
    /// The target's state besides memory, as files that its restorer understands (CRIU images).
    pub state: Vec<StateRecord>,
    /// What the checkpoint cost.
    pub cost: Cost,
}

/// What a checkpoint can be restored to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TargetKind {
    /// A process tree with its whole state.
    Process,
    /// Memory and registers alone: to look at, not to restore.
    Memory,
}

/// One address space.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SpaceRecord {
    /// The process id.
    pub pid: i32,
    /// The process's short name.
    pub name: String,
    /// Root of the page tree; the number of a page is its address divided by the page size. Pages that the tree
    /// does not name hold zeros or what the mapped file holds.
    pub root: ContentId,
    /// Pages in the tree.
    pub pages: u64,
    /// The mappings, in ascending order.
    pub mappings: Vec<MappingRecord>,
}

/// One mapping.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MappingRecord {
    /// First address.
    pub start: u64,
    /// Address after the last.
    pub end: u64,
    /// As in `/proc/PID/maps`: `rwxp` with `-` for what is not allowed, `s` for shared.
    pub permissions: String,
    /// Offset in the mapped file, bytes.
    pub offset: u64,
    /// The mapped file, `[heap]`, `[stack]` …, or empty.
    pub name: String,
}

/// A regular file with its content at the freeze.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FileRecord {
    /// Absolute path. Bytes that are not UTF-8 are escaped as `\xNN`, a backslash as `\\`.
    pub path: String,
    /// Bytes.
    pub size: u64,
    /// Root of the page tree of its content; the last page is filled with zeros.
    pub root: ContentId,
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Last modification, nanoseconds since 1970 UTC.
    pub modified_unix_ns: i64,
}

/// One file of the target's state.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StateRecord {
    /// A file name without directories.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// Root of the page tree of its content; the last page is filled with zeros.
    pub root: ContentId,
}

/// What a checkpoint cost.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Cost {
    /// Pages found written since the last checkpoint and copied, pre-copy rounds included.
    pub dirty_pages: u64,
    /// Those of them that were copied while the target was frozen.
    pub frozen_pages: u64,
    /// Pre-copy rounds.
    pub rounds: u32,
    /// How long the target was frozen, microseconds.
    pub downtime_us: u64,
    /// The part of it for memory: collecting and copying the last dirty pages.
    pub memory_downtime_us: u64,
    /// The part of it for everything else.
    pub state_downtime_us: u64,
    /// Bytes that the checkpoint added to the repository, known only after it was written: zero in the stored
    /// manifest, filled from the commit record when read.
    pub written_bytes: u64,
}

impl Manifest {
    /// The roots of all page trees that it names.
    pub(crate) fn roots(&self) -> impl Iterator<Item = ContentId> + '_ {
        let spaces = self.spaces.iter().map(|space| space.root);
        let files = self.files.iter().map(|file| file.root);
        spaces.chain(files).chain(self.state.iter().map(|state| state.root))
    }
}
