//! Checkpoints on disk: immutable pack files and one small commit record each. See `docs/repository.md`.

mod manifest;

pub use manifest::{Cost, FileRecord, Manifest, MappingRecord, SpaceRecord, StateRecord, TargetKind};
