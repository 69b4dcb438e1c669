//! "Results on same-page-merging snapshots" (SPM): what snapshots cost a page, and what they cost a
//! model checker.

pub mod explore;
mod page_store;
pub mod store;
