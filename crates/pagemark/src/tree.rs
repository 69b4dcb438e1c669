//! The page tree: a snapshot is an immutable radix tree whose leaves name pages.

/// Which page of a space holds what: page number to content.
#[derive(Clone, Default)]
pub struct PageTree {}
