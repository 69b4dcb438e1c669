//! Pages that hold data, and pages that no longer hold data.

use pagemark_linux::pagemap::{FILE, Filter, PRESENT, Pagemap, SWAPPED};

use super::OwnMemory;
use crate::{Error, Range, RangeSet};

/// The pages of a mapping that hold data of their own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pages {
    /// Every page that is populated: for anonymous memory, and for mappings that are shared.
    All,
    /// Only pages that do not belong to a file: for private mappings of files, whose other pages
    /// are as in the file.
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

/// Which pages of a tracker's ranges may hold data.
#[derive(Clone, Debug)]
pub struct DataPages {
    pages: Pages,
    /// Memory of a region in which every page may hold data, whether the page table has the page or
    /// not.
    backed: RangeSet,
}

impl From<Pages> for DataPages {
    fn from(pages: Pages) -> Self {
        DataPages { pages, backed: RangeSet::new() }
    }
}

impl From<&OwnMemory> for DataPages {
    fn from(memory: &OwnMemory) -> Self {
        DataPages { pages: Pages::All, backed: memory.backed().clone() }
    }
}

impl DataPages {
    /// Finds these pages within `ranges`.
    ///
    /// # Errors
    /// Those of [`populated`].
    pub fn find(&self, pagemap: &Pagemap, ranges: &RangeSet) -> Result<RangeSet, Error> {
        let mut rest = ranges.clone();
        rest.subtract(&self.backed);
        let mut found = populated(pagemap, self.pages, &rest)?;
        found.extend(&self.backed.intersection(ranges));
        Ok(found)
    }

    /// The pages that the page table must have to hold data.
    pub(super) fn pages(&self) -> Pages {
        self.pages
    }

    /// The part of `ranges` in which every page may hold data.
    pub(super) fn backed_within(&self, ranges: &RangeSet) -> RangeSet {
        self.backed.intersection(ranges)
    }
}

/// Finds the pages of `ranges` that hold data.
///
/// # Errors
/// `ErrorKind::Gone`, or the pagemap can't be read.
pub fn populated(pagemap: &Pagemap, pages: Pages, ranges: &RangeSet) -> Result<RangeSet, Error> {
    let mut found = RangeSet::new();
    each_populated(pagemap, pages, ranges, 0, |run, _| found.insert(run))?;
    Ok(found)
}

/// Calls `each` for the runs of pages of `ranges` that hold data, with those of the categories
/// `report` that they have.
///
/// # Errors
/// Those of [`populated`].
pub(super) fn each_populated(
    pagemap: &Pagemap,
    pages: Pages,
    ranges: &RangeSet,
    report: u64,
    mut each: impl FnMut(Range, u64),
) -> Result<(), Error> {
    for range in ranges.iter() {
        pagemap
            .find(&range, Filter { report, ..pages.filter() }, &mut each)
            .map_err(|error| Error::while_tracking(error, || format!("finding the populated pages of {range:#x?}")))?;
    }
    check_alive(pagemap)
}

/// Fails if the address space is gone: a scan of it finds nothing, and is not an error.
pub(super) fn check_alive(pagemap: &Pagemap) -> Result<(), Error> {
    match pagemap.is_alive() {
        Ok(true) => Ok(()),
        Ok(false) => Err(Error::gone()),
        Err(error) => Err(Error::while_tracking(error, || "reading the pagemap".to_owned())),
    }
}

/// The pages that held data at the last collect.
#[derive(Debug, Default)]
pub(super) struct Seen(RangeSet);

impl Seen {
    /// Replaces the set by the pages that hold data now, and returns those that are still mapped
    /// and no longer hold data: their content has become zeros, or that of the file, without a
    /// write.
    pub fn advance(&mut self, ranges: &RangeSet, populated: RangeSet) -> RangeSet {
        let mut vanished = std::mem::replace(&mut self.0, populated);
        vanished.subtract(&self.0);
        if vanished.is_empty() { vanished } else { vanished.intersection(ranges) }
    }

    /// Adds pages that hold data, after a collect that failed before its end.
    pub fn add(&mut self, populated: &RangeSet) {
        self.0.extend(populated);
    }

    pub fn pages(&self) -> &RangeSet {
        &self.0
    }
}
