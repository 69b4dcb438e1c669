//! Memory of this process under a tracker, or under none.

use pagemark::tracker::adaptive::HOT_AFTER;
use pagemark::tracker::own;
use pagemark::{Mechanism, RangeSet, Tracker};

use super::area::Area;
use crate::BenchError;

/// Intervals before one that is measured, in which `adaptive` learns what is hot. The others go through them too.
const WARM_UP: usize = HOT_AFTER + 1;

/// An area and what tracks it.
pub(super) struct Tracked<'a> {
    area: &'a Area,
    ranges: RangeSet,
    tracker: Option<Box<dyn Tracker>>,
}

impl<'a> Tracked<'a> {
    /// Tracks the area, and rewrites all of it in some intervals. When it returns, an interval has just begun.
    pub fn new(area: &'a Area, mechanism: Option<Mechanism>) -> Result<Tracked<'a>, BenchError> {
        let tracker = mechanism.map(own).transpose().map_err(|error| BenchError::Pagemark(error.into()))?;
        let mut tracked = Tracked { area, ranges: area.range().into(), tracker };
        tracked.restart()?;
        for round in 0..WARM_UP {
            area.touch(round as u8);
            tracked.restart()?;
        }
        Ok(tracked)
    }

    /// Ends the interval and begins the next. Returns what was written.
    fn restart(&mut self) -> Result<RangeSet, BenchError> {
        let mut dirty = RangeSet::new();
        if let Some(tracker) = &mut self.tracker {
            tracker
                .collect(&self.ranges, &mut dirty)
                .and_then(|()| tracker.relax())
                .map_err(|error| BenchError::Pagemark(error.into()))?;
        }
        Ok(dirty)
    }

    /// Ends an interval in which each page was written; a figure about a mechanism that misses one would be worth nothing.
    pub fn end_of_full_interval(&mut self) -> Result<(), BenchError> {
        let dirty = self.restart()?;
        if self.tracker.is_none() || dirty.covers(self.area.range()) {
            return Ok(());
        }
        Err(BenchError::Missed { pages: self.area.pages(), found: dirty.total_bytes() / pagemark::PAGE_SIZE as u64 })
    }
}
