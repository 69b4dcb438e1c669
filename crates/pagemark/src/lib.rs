//! Finds out which memory a program writes, and checkpoints only that.
//!
//! The modules stand in the order in which a page travels: a [`target`] is tracked by a [`tracker`], which
//! names written [`ranges`]; the [`checkpointer`] reads them from the target and puts them into a
//! [`store`], whose ids enter a [`tree`]; the tree and the target's state become a checkpoint in the
//! [`repository`].

pub mod id;
pub mod ranges;
pub mod target;
pub mod tracker;

pub mod checkpointer;
pub mod content;
pub mod region;
pub mod snapshot;
pub mod store;
pub mod tree;

pub mod repository;

pub mod sys;

pub use id::ContentId;
pub use ranges::{Range, RangeSet};
pub use region::Region;
pub use store::{Kind, MemoryStore, Store, StoreError};
pub use tracker::{Mechanism, TrackError, Tracker};
pub use tree::PageTree;

/// Bytes of a page: the unit in which memory is tracked, stored and restored.
pub const PAGE_SIZE: usize = 4096;
