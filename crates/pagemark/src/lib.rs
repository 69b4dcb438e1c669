//! Finds the memory pages that a program writes, and checkpoints only those.
//!
//! This crate is the core of Pagemark: everything that does not depend on the kind of target.
//! Process trees as targets are in `pagemark-process`, and the command `pagemark` is made of both.
//!
//! # From target to repository
//!
//! | step | module |
//! |---|---|
//! | A target has address spaces. It runs, is frozen, and is captured. | [`target`] |
//! | A tracker reports the address ranges that were written in an interval. | [`track`], [`ranges`], [`address`] |
//! | The checkpointer collects and copies the written ranges, by stop-and-copy or pre-copy. | [`checkpointer`] |
//! | A store holds each page once, under an id computed from its content. | [`store`], [`id`] |
//! | A page tree records the content of each page of a space. Trees share what is equal. | [`tree`] |
//! | A blob is content of any length: a file, or a part of the saved state. | [`blob`] |
//! | A job is the sequence of a target's checkpoints under a policy. | [`job`] |
//! | The repository keeps checkpoints. A commit is complete or absent after a crash. | [`repository`] |
//! | A backend stores the repository's objects: in a directory, in memory. | [`backend`] |
//!
//! # A program's own memory
//!
//! A [`region`] is part of the calling program's memory, with transactions (commit and rollback)
//! and snapshots. The store of snapshots is in [`snapshot`]. Regions need neither root nor another
//! process:
//!
//! ```
//! use pagemark::Region;
//!
//! let region = Region::new(1 << 20)?;
//! region.write(5000, b"first")?;
//! let snapshot = region.snapshot()?;
//!
//! region.begin()?;
//! region.write(5000, b"other")?;
//! let written = region.commit()?;
//! assert_eq!(written.range_count(), 1, "one page was written in the transaction");
//!
//! region.restore(&snapshot)?;
//! let mut content = [0; 5];
//! region.read(5000, &mut content)?;
//! assert_eq!(&content, b"first");
//! # Ok::<(), pagemark::Error>(())
//! ```
//!
//! # Errors
//!
//! All operations return an [`Error`], which names the operation, its object, and the reason.
//! Callers match on its [`kind`](Error::kind).
//!
//! # Requirements
//!
//! Linux on x86-64. Each mechanism states what it needs from the kernel; [`track::probe()`] tries
//! all of them. The papers that the mechanisms come from are listed in `docs/references.md`, and
//! cited by their short names (LDT, SPM, HAC, FPM, PML).

pub mod address;
pub mod error;
pub mod id;
pub mod ranges;
pub mod target;
pub mod track;

pub mod backend;
pub mod blob;
pub mod checkpointer;
pub mod job;
pub mod model;
pub mod region;
pub mod snapshot;
pub mod store;
pub mod tree;

pub mod repository;

pub mod sys;

pub use address::{Address, AddressRangeExt, ByteCount, PAGE_SIZE, PageNumber, PageRange, PageRangeExt, Range};
pub use blob::Blob;
pub use bytemuck::Pod;
pub use error::{Error, ErrorKind};
pub use id::ContentId;
pub use job::{Job, JobOptions, Policy};
pub use ranges::RangeSet;
pub use region::Region;
pub use store::{Kind, MemoryStore, Store};
pub use track::{Mechanism, Tracker};
pub use tree::PageTree;
