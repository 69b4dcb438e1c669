//! Which pages hold data, and which of them stopped to.

use std::io;

use crate::sys::pagemap::{FILE, Filter, PRESENT, Pagemap, SWAPPED};
use crate::{Range, RangeSet, TrackError};

/// Which pages of a mapping hold data of their own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pages {
    /// Every page that is populated: for anonymous memory, and for mappings that are shared.
    All,
    /// Only pages that do not belong to a file: for private mappings of files, whose other pages are as in the file.
    NotOfFile,
}

impl Pages {
    /// The filter that lets these pages through.
    pub(super) fn filter(self) -> Filter {
        let none = match self {
            Pages::All => 0,
            Pages::NotOfFile => FILE,
        };
        Filter { none, any: PRESENT | SWAPPED, ..Filter::default() }
    }
}

/// Finds the pages of `ranges` that hold data.
///
/// # Errors
/// [`TrackError::Gone`], or the pagemap can't be scanned.
pub fn populated(pagemap: &Pagemap, pages: Pages, ranges: &RangeSet) -> Result<RangeSet, TrackError> {
    let mut found = RangeSet::new();
    each_populated(pagemap, pages, ranges, 0, |run, _| found.insert(run))?;
    Ok(found)
}

/// Calls `each` for the runs of pages of `ranges` that hold data, with those of the categories `report` that they have.
///
/// # Errors
/// As [`populated`].
pub(super) fn each_populated(
    pagemap: &Pagemap,
    pages: Pages,
    ranges: &RangeSet,
    report: u64,
    mut each: impl FnMut(Range, u64),
) -> Result<(), TrackError> {
    for range in ranges.iter() {
        pagemap
            .scan(&range, Filter { report, ..pages.filter() }, &mut each)
            .map_err(|error| TrackError::from_io(error, || format!("scanning the pages of {range:#x?}")))?;
    }
    check_alive(pagemap)
}

/// A scan of an address space that is gone finds nothing and is no error; this tells.
pub(super) fn check_alive(pagemap: &Pagemap) -> Result<(), TrackError> {
    match pagemap.is_alive() {
        Ok(true) => Ok(()),
        Ok(false) => Err(TrackError::Gone),
        Err(error) => Err(TrackError::from_io(error, || "reading the pagemap".to_owned())),
    }
}

/// What held data at the last collect.
#[derive(Debug, Default)]
pub(super) struct Seen(RangeSet);

impl Seen {
    /// Takes over what holds data now, and returns what no longer does though it is still mapped: its content has changed
    /// as by a write, to zeros or to what the file holds.
    pub fn advance(&mut self, ranges: &RangeSet, populated: RangeSet) -> RangeSet {
        let mut vanished = std::mem::replace(&mut self.0, populated);
        vanished.subtract(&self.0);
        if vanished.is_empty() { vanished } else { vanished.intersection(ranges) }
    }

    /// Adds to what held data, after a collect that failed half way.
    pub fn add(&mut self, populated: &RangeSet) {
        self.0.extend(populated);
    }

    pub fn pages(&self) -> &RangeSet {
        &self.0
    }
}

impl TrackError {
    /// Tells a process that is gone from other failures.
    pub(crate) fn from_io(error: io::Error, operation: impl FnOnce() -> String) -> Self {
        match error.raw_os_error() {
            Some(libc::ESRCH) => TrackError::Gone,
            _ if error.kind() == io::ErrorKind::UnexpectedEof => TrackError::Gone,
            _ => TrackError::System { operation: operation(), source: error },
        }
    }
}
