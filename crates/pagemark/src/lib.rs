//! Finds the memory pages that a program writes, and checkpoints only those.
//!
//! This crate is the core of Pagemark: everything that does not depend on the kind of target. The
//! other crates of the workspace have the targets, and the interfaces for people and languages:
//!
//! | crate | content |
//! |---|---|
//! | [`pagemark-process`](../pagemark_process/index.html) | targets that are process trees; CRIU saves their other state |
//! | [`pagemark-vm`](../pagemark_vm/index.html) | targets that are virtual machines of QEMU |
//! | [`pagemark-kvm-log`](../pagemark_kvm_log/index.html) | KVM's log of such a machine, shared with QEMU |
//! | [`pagemark-simulate`](../pagemark_simulate/index.html) | simulates the run of such a machine between two checkpoints |
//! | [`pagemark-replay`](../pagemark_replay/index.html) | runs of such a machine again, from its checkpoints: for simulators, and for gdb |
//! | [`pagemark-heap`](../pagemark_heap/index.html) | a heap that is tracked by parts of pages; a heap that survives its program |
//! | [`pagemark-malloc`](../pagemark_malloc/index.html) | that heap as `malloc` of any program |
//! | [`pagemark-kvm`](../pagemark_kvm/index.html) | a virtual machine for one unmodified program |
//! | [`pagemark-explore`](../pagemark_explore/index.html) | a model checker whose states are snapshots of a region |
//! | [`pagemark-c`](../pagemark_c/index.html), [`pagemark-python`](../pagemark_python/index.html) | regions, snapshots and heaps from C, C++ and Python; jobs and restores from Python |
//! | `pagemark-cli`, [`pagemark-bench`](../pagemark_bench/index.html) | the commands `pagemark` and `pagemark-bench` |
//!
//! `docs/design.md` explains how the parts fit together, and which may depend on which.
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

pub mod error;
pub mod id;
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
pub mod restore;

#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;

pub use blob::Blob;
pub use bytemuck::Pod;
pub use error::{Error, ErrorKind};
pub use id::ContentId;
pub use job::{Job, JobOptions, Policy};
pub use pagemark_linux::{
    Address, AddressRangeExt, ByteCount, PAGE_SIZE, PageNumber, PageRange, PageRangeExt, Range, RangeSet, address,
    ranges,
};
pub use region::Region;
pub use store::{ChangedPage, Kind, MemoryStore, Store};
pub use track::{Mechanism, Tracker};
pub use tree::PageTree;
