//! Pages that stay open although they are tracked, because system calls are about to write them.

use std::io;

use super::protected::{Lock, Protected};
use crate::{PAGE_SIZE, Range, RangeSet, TrackError};

/// What is pinned now; the same pages may be pinned more than once.
#[derive(Debug, Default)]
pub(super) struct Pins(Vec<Range>);

impl Pins {
    /// Opens the pages that `range` touches in any of `areas`, and keeps them open.
    pub fn add<'a, L: Lock + 'a>(
        &mut self,
        range: &Range,
        areas: impl IntoIterator<Item = &'a Protected<L>>,
    ) -> Result<(), TrackError> {
        let pages = pages_around(range);
        for area in areas {
            open(area, &pages).map_err(|error| TrackError::from_io(error, || format!("unprotecting {pages:#x?}")))?;
        }
        self.0.push(pages);
        Ok(())
    }

    /// Takes one pin of these pages away.
    pub fn remove(&mut self, range: &Range) {
        let pages = pages_around(range);
        if let Some(index) = self.0.iter().position(|pin| *pin == pages) {
            self.0.swap_remove(index);
        }
    }

    /// Opens what is pinned of an area that is tracked from now on.
    pub fn open_in<L: Lock>(&self, area: &Protected<L>) -> io::Result<()> {
        self.0.iter().try_for_each(|pin| open(area, pin))
    }

    /// All pinned pages.
    pub fn pages(&self) -> RangeSet {
        self.0.iter().cloned().collect()
    }
}

/// Opens the pages among `pages` that belong to the area.
fn open<L: Lock>(area: &Protected<L>, pages: &Range) -> io::Result<()> {
    RangeSet::from(area.range().clone()).within(pages.clone()).try_for_each(|part| area.open(&part))
}

/// The pages that a range touches.
pub(super) fn pages_around(range: &Range) -> Range {
    let page = PAGE_SIZE as u64;
    range.start / page * page..range.end.next_multiple_of(page)
}
