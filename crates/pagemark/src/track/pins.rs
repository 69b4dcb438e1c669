//! Pages that stay writable although they are tracked, because system calls are about to write to
//! them.

use std::io;

use super::protected::{Protected, WriteProtection};
use crate::{AddressRangeExt, Error, Range, RangeSet};

/// The pinned ranges. The same pages can be pinned more than once.
#[derive(Debug, Default)]
pub(super) struct Pins(Vec<Range>);

impl Pins {
    /// Opens the pages that `range` touches in any of `all`, and keeps them open.
    pub fn add<'a, P: WriteProtection + 'a>(
        &mut self,
        range: &Range,
        all: impl IntoIterator<Item = &'a Protected<P>>,
    ) -> Result<(), Error> {
        let pages = range.whole_pages();
        for protected in all {
            open(protected, &pages)
                .map_err(|error| Error::while_tracking(error, || format!("unprotecting {pages:#x?}")))?;
        }
        self.0.push(pages);
        Ok(())
    }

    /// Removes one pin of these pages.
    pub fn remove(&mut self, range: &Range) {
        let pages = range.whole_pages();
        if let Some(index) = self.0.iter().position(|pin| *pin == pages) {
            self.0.swap_remove(index);
        }
    }

    /// Opens the pinned pages of a range whose tracking begins.
    pub fn open_in<P: WriteProtection>(&self, protected: &Protected<P>) -> io::Result<()> {
        self.0.iter().try_for_each(|pin| open(protected, pin))
    }

    /// All pinned pages.
    pub fn pages(&self) -> RangeSet {
        self.0.iter().cloned().collect()
    }
}

/// Opens the pages among `pages` that belong to `protected`.
fn open<P: WriteProtection>(protected: &Protected<P>, pages: &Range) -> io::Result<()> {
    RangeSet::from(protected.range().clone()).within(pages.clone()).try_for_each(|part| protected.open(&part))
}
