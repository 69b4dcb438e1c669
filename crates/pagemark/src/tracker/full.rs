//! `full`: everything counts as written. The baseline of every paper.

use std::sync::Arc;

use super::populated::{Pages, Seen, populated};
use crate::sys::pagemap::Pagemap;
use crate::{Mechanism, RangeSet, TrackError, Tracker};

/// Reports every page that holds data, each time.
#[derive(Debug)]
pub struct Full {
    pagemap: Arc<Pagemap>,
    pages: Pages,
    seen: Seen,
}

impl Full {
    /// Tracks the address space of `pagemap`.
    pub fn new(pagemap: Arc<Pagemap>, pages: Pages) -> Self {
        Full { pagemap, pages, seen: Seen::default() }
    }
}

impl Tracker for Full {
    fn mechanism(&self) -> Mechanism {
        Mechanism::Full
    }

    fn populated(&self) -> Option<&RangeSet> {
        Some(self.seen.pages())
    }

    fn collect(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<(), TrackError> {
        let now = populated(&self.pagemap, self.pages, ranges)?;
        dirty.extend(&now);
        dirty.extend(&self.seen.advance(ranges, now));
        Ok(())
    }
}
