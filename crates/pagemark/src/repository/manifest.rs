//! The description of one checkpoint, stored as JSON: see `docs/reference/repository-manifests.md`.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::program::ProgramRecord;
use crate::id::SpaceId;
use crate::{Address, Blob, ByteCount, ContentId, Mechanism, Range};

/// The latest version of manifests that this program knows. It writes version 2 where that says
/// everything, so that earlier programs can read it.
pub const MANIFEST_VERSION: u32 = 3;

/// The version of a manifest that has no shared memory of processes.
const WITHOUT_SHARED_MEMORY: u32 = 2;

/// The description of one checkpoint. The content that it names by id is in the same repository.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Manifest {
    /// Name under which the checkpoints of one target are filed.
    pub job: String,
    /// Number of the checkpoint in its job, from 1.
    pub sequence: u64,
    /// When the target was frozen, microseconds since 1970 UTC.
    pub taken_unix_us: u64,
    /// The program's command line, for people to read.
    pub command: Vec<String>,
    /// What tells the program from others. None in checkpoints of earlier programs, and where the
    /// program itself saves its memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<ProgramRecord>,
    /// How the written pages were found.
    pub mechanism: Mechanism,
    /// What can be restored from it.
    pub kind: TargetKind,
    /// The spaces, each with an id of its own; of a process tree the root's first.
    pub spaces: Vec<SpaceRecord>,
    /// Regular files that the target had open for writing, with their content at the freeze.
    pub files: Vec<FileRecord>,
    /// The target's state besides memory, as files that its restorer understands (CRIU images).
    pub state: Vec<StateRecord>,
    /// What the checkpoint cost.
    pub cost: Cost,
}

/// What can be restored from a checkpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TargetKind {
    /// A process tree with its whole state.
    Process,
    /// Nothing: memory and registers of processes, to be inspected or exported.
    Memory,
    /// Regions of a program's own memory.
    Region,
    /// A virtual machine with its devices.
    VirtualMachine,
}

/// One space: something whose content has addresses.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SpaceRecord {
    /// Tells the space from the checkpoint's others, and finds it again in the job's other
    /// checkpoints. For a process the process id.
    pub id: SpaceId,
    /// A name for people to read; for a process its short name.
    #[serde(rename = "name")]
    pub label: String,
    /// What the space is.
    #[serde(flatten)]
    pub kind: SpaceKind,
    /// Root of the page tree; the number of a page is its address divided by the page size. Pages
    /// that the tree does not name hold zeros or the content of the mapped file.
    pub root: ContentId,
    /// Pages in the tree.
    pub pages: u64,
    /// The mappings of an address space, in ascending order; empty for the other kinds.
    pub mappings: Vec<MappingRecord>,
}

/// What a space is.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum SpaceKind {
    /// The address space of a process.
    Process {
        /// The process id.
        pid: i32,
    },
    /// A block of a virtual machine's memory, by offset.
    RamBlock {
        /// Length of the block.
        bytes: ByteCount,
    },
    /// A disk, by offset.
    Disk {
        /// Length of the disk.
        bytes: ByteCount,
    },
    /// A region of a program's own memory, by offset.
    Region {
        /// Length of the region.
        bytes: ByteCount,
    },
    /// The memory of an allocator, by offset.
    Heap {
        /// Length of the memory.
        bytes: ByteCount,
    },
    /// Shared anonymous memory of processes, by offset. The mappings whose
    /// [`MappingRecord::memory`] is the id of the space show it.
    SharedMemory {
        /// Length of the memory.
        bytes: ByteCount,
        /// The inode that it had, by which the state of the processes names it.
        inode: u64,
    },
}

impl SpaceRecord {
    /// The record of a process.
    pub fn of_process(pid: i32, label: String, root: ContentId, pages: u64, mappings: Vec<MappingRecord>) -> Self {
        let id = SpaceId::try_from(pid).unwrap_or_default();
        SpaceRecord { id, label, kind: SpaceKind::Process { pid }, root, pages, mappings }
    }

    /// The process id if the space is a process's.
    pub fn pid(&self) -> Option<i32> {
        match self.kind {
            SpaceKind::Process { pid } => Some(pid),
            _ => None,
        }
    }
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
    /// How its memory was treated, if not as that of other mappings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exception: Option<MappingException>,
    /// The space that has the content of shared memory; [`offset`](Self::offset) is the first
    /// address in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<SpaceId>,
}

/// Why the memory of a mapping was not tracked as that of others.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MappingException {
    /// The kernel does not protect it against writes. All of it that held data counts as written in
    /// each checkpoint.
    Unregistrable,
    /// The kernel may drop its content at any moment (`MAP_DROPPABLE`), which programs use for the
    /// state of random-number generators. The checkpoint holds none of it, and a restore leaves it
    /// filled with zeros.
    Droppable,
    /// Shared memory that is not tracked, because it can be written by descriptor (`memfd_create`),
    /// is System V's or huge, or its writers cannot be followed. The saved state has all of it.
    SavedWhole,
    /// Shared memory that a process outside of the tree maps too. The saved state has all of it.
    SharedOutside,
}

impl MappingException {
    /// True if the memory is shared, and the saved state has it.
    pub fn is_of_shared_memory(self) -> bool {
        matches!(self, MappingException::SavedWhole | MappingException::SharedOutside)
    }
}

impl MappingRecord {
    /// Where it is.
    pub fn range(&self) -> Range {
        Address::new(self.start)..Address::new(self.end)
    }
}

/// A regular file with its content at the freeze.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FileRecord {
    /// Absolute path. Bytes that are not UTF-8 are escaped as `\xNN`, a backslash as `\\`.
    pub path: String,
    /// Its content.
    #[serde(flatten)]
    pub content: Blob,
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Last modification, nanoseconds since 1970 UTC.
    pub modified_unix_ns: i64,
    /// True for an output, such as a log, that other programs write too. A restore leaves its
    /// present content in place.
    #[serde(default, skip_serializing_if = "is_false")]
    pub is_shared: bool,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// One file of the target's state.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StateRecord {
    /// A file name without directories.
    pub name: String,
    /// Its content.
    #[serde(flatten)]
    pub content: Blob,
}

/// What a checkpoint cost.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Cost {
    /// Pages found written since the last checkpoint and copied, pre-copy rounds included.
    pub dirty_pages: u64,
    /// Those of them that were copied while the target was frozen.
    pub frozen_pages: u64,
    /// Pages that were kept as they were in the freeze and copied afterwards, before the target
    /// wrote to them. Zero in checkpoints of earlier programs.
    #[serde(default)]
    pub concurrent_pages: u64,
    /// Pages that were kept and copied because the target was about to write to them.
    #[serde(default)]
    pub cow_pages: u64,
    /// The target's writes since the last checkpoint that waited for Pagemark.
    #[serde(default)]
    pub write_faults: u64,
    /// Pre-copy rounds.
    pub rounds: u32,
    /// How long the target was frozen, microseconds.
    pub downtime_us: u64,
    /// The part of it for memory: collecting and copying the last dirty pages.
    pub memory_downtime_us: u64,
    /// The part of it for everything else.
    pub state_downtime_us: u64,
    /// The most memory that copied pages took up until they were stored, bytes. Zero in checkpoints
    /// of earlier programs.
    #[serde(default)]
    pub peak_flight_bytes: u64,
    /// Bytes that the checkpoint added to the repository, known only after it was written: zero in
    /// the stored manifest, filled from the commit record when read.
    pub written_bytes: u64,
}

impl Cost {
    /// Pages that were kept as they were in the freeze, and copied when the target ran again.
    pub fn kept_pages(&self) -> u64 {
        self.concurrent_pages + self.cow_pages
    }
}

/// Bytes are not a manifest that this program understands.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Undecodable {
    /// A later program wrote it.
    Newer {
        /// Its version.
        found: u64,
    },
    /// The manifest is not what a program wrote.
    Damaged(String),
}

/// A manifest as it is stored.
#[derive(Serialize)]
struct Stored<'a> {
    version: u32,
    #[serde(flatten)]
    manifest: &'a Manifest,
}

/// The part that all versions have in common; version 1 has no number.
#[derive(Deserialize)]
struct Version {
    version: Option<u64>,
}

impl Manifest {
    /// The roots of all page trees that it names.
    pub(crate) fn roots(&self) -> impl Iterator<Item = ContentId> + '_ {
        let spaces = self.spaces.iter().map(|space| space.root);
        let files = self.files.iter().map(|file| file.content.root);
        spaces.chain(files).chain(self.state.iter().map(|state| state.content.root))
    }

    /// The address space of a process.
    pub fn process(&self, pid: i32) -> Option<&SpaceRecord> {
        self.spaces.iter().find(|space| space.pid() == Some(pid))
    }

    /// The processes that it has an address space of, the root first.
    pub fn pids(&self) -> impl Iterator<Item = i32> + '_ {
        self.spaces.iter().filter_map(SpaceRecord::pid)
    }

    /// The first id that two spaces have.
    pub(super) fn duplicate_space(&self) -> Option<SpaceId> {
        let mut ids = HashSet::new();
        self.spaces.iter().map(|space| space.id).find(|id| !ids.insert(*id))
    }

    /// The manifest as it is stored.
    pub(super) fn encode(&self) -> serde_json::Result<Vec<u8>> {
        let version = if self.has_shared_memory() { MANIFEST_VERSION } else { WITHOUT_SHARED_MEMORY };
        serde_json::to_vec(&Stored { version, manifest: self })
    }

    /// True if it has what version 2 does not know.
    fn has_shared_memory(&self) -> bool {
        let mut exceptions =
            self.spaces.iter().flat_map(|space| &space.mappings).filter_map(|mapping| mapping.exception);
        self.spaces.iter().any(|space| matches!(space.kind, SpaceKind::SharedMemory { .. }))
            || exceptions.any(MappingException::is_of_shared_memory)
    }

    /// Reads a stored manifest of any known version.
    pub(super) fn decode(bytes: &[u8]) -> Result<Manifest, Undecodable> {
        let damaged = |error: serde_json::Error| Undecodable::Damaged(error.to_string());
        let Version { version } = serde_json::from_slice(bytes).map_err(damaged)?;
        let manifest: Manifest = match version {
            None | Some(1) => {
                let mut document = serde_json::from_slice(bytes).map_err(damaged)?;
                upgrade_version_1(&mut document);
                serde_json::from_value(document).map_err(damaged)?
            }
            Some(2 | 3) => serde_json::from_slice(bytes).map_err(damaged)?,
            Some(found) => return Err(Undecodable::Newer { found }),
        };
        match manifest.duplicate_space() {
            Some(id) => Err(Undecodable::Damaged(format!("two of its spaces have the id {id}"))),
            None => Ok(manifest),
        }
    }
}

/// In version 1 every space is a process, and its process id is the only name that it has.
fn upgrade_version_1(document: &mut Value) {
    let spaces = document.get_mut("spaces").and_then(Value::as_array_mut);
    for space in spaces.into_iter().flatten().filter_map(Value::as_object_mut) {
        if let Some(pid) = space.get("pid").cloned() {
            space.insert("id".into(), pid);
            space.insert("kind".into(), "process".into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest(spaces: Vec<SpaceRecord>) -> Manifest {
        Manifest {
            job: "job".into(),
            sequence: 3,
            taken_unix_us: 4,
            command: vec!["a".into()],
            program: None,
            mechanism: Mechanism::Full,
            kind: TargetKind::Memory,
            spaces,
            files: vec![FileRecord {
                path: "/a".into(),
                content: Blob { bytes: ByteCount::new(5), root: ContentId([6; 16]) },
                mode: 0o600,
                uid: 0,
                gid: 0,
                modified_unix_ns: -7,
                is_shared: false,
            }],
            state: vec![StateRecord {
                name: "b".into(),
                content: Blob { bytes: ByteCount::new(8), root: ContentId([9; 16]) },
            }],
            cost: Cost::default(),
        }
    }

    fn space(id: SpaceId, kind: SpaceKind) -> SpaceRecord {
        SpaceRecord { id, label: format!("label {id}"), kind, root: ContentId([1; 16]), pages: 2, mappings: Vec::new() }
    }

    #[test]
    fn every_kind_of_space_is_read_as_it_was_written() {
        let bytes = ByteCount::new(8192);
        let kinds = [
            SpaceKind::Process { pid: 7 },
            SpaceKind::RamBlock { bytes },
            SpaceKind::Disk { bytes },
            SpaceKind::Region { bytes },
            SpaceKind::Heap { bytes },
            SpaceKind::SharedMemory { bytes, inode: 12 },
        ];
        let manifest = manifest((7..).zip(kinds).map(|(id, kind)| space(id, kind)).collect());
        assert_eq!(Manifest::decode(&manifest.encode().unwrap()), Ok(manifest.clone()));
        assert_eq!(manifest.pids().collect::<Vec<_>>(), [7]);
        assert_eq!(manifest.process(7), Some(&manifest.spaces[0]));
        let document: Value = serde_json::from_slice(&manifest.encode().unwrap()).unwrap();
        assert_eq!(document["version"], 3);
        assert_eq!(document["spaces"][5]["kind"], "shared-memory");
        assert_eq!(document["spaces"][1]["kind"], "ram-block");
        assert_eq!(document["spaces"][1]["bytes"], 8192);
        assert_eq!((&document["files"][0]["size"], &document["state"][0]["size"]), (&5.into(), &8.into()));
    }

    #[test]
    fn version_2_is_written_where_it_says_everything() {
        let version = |manifest: &Manifest| {
            let document: Value = serde_json::from_slice(&manifest.encode().unwrap()).unwrap();
            document["version"].as_u64().unwrap()
        };
        let mut manifest = manifest(vec![space(7, SpaceKind::Process { pid: 7 })]);
        let mapping = |exception| MappingRecord {
            start: 0x1000,
            end: 0x2000,
            permissions: "rw-s".into(),
            offset: 0,
            name: "/dev/zero (deleted)".into(),
            exception,
            memory: None,
        };
        let exceptions = [None, Some(MappingException::Unregistrable), Some(MappingException::Droppable)];
        manifest.spaces[0].mappings = exceptions.map(mapping).into();
        assert_eq!(version(&manifest), 2);
        for exception in [MappingException::SavedWhole, MappingException::SharedOutside] {
            manifest.spaces[0].mappings = vec![mapping(Some(exception))];
            assert_eq!(version(&manifest), 3);
            assert_eq!(Manifest::decode(&manifest.encode().unwrap()), Ok(manifest.clone()));
        }
    }

    #[test]
    fn version_1_is_read_and_later_versions_are_refused() {
        let expected = manifest(vec![space(7, SpaceKind::Process { pid: 7 })]);
        let mut document = serde_json::to_value(&expected).unwrap();
        for field in ["id", "kind"] {
            document["spaces"][0].as_object_mut().unwrap().remove(field).unwrap();
        }
        let read = |document: &Value| Manifest::decode(&serde_json::to_vec(document).unwrap());
        assert_eq!(read(&document), Ok(expected));
        document["spaces"][0]["pid"] = (-1).into();
        assert!(matches!(read(&document), Err(Undecodable::Damaged(_))));
        document["version"] = 4.into();
        assert_eq!(read(&document), Err(Undecodable::Newer { found: 4 }));
    }

    #[test]
    fn two_spaces_of_one_id_are_refused() {
        let bytes = ByteCount::new(4096);
        let twice = manifest(vec![space(7, SpaceKind::Region { bytes }), space(7, SpaceKind::Disk { bytes })]);
        assert!(matches!(Manifest::decode(&twice.encode().unwrap()), Err(Undecodable::Damaged(_))));
    }
}
