//! A buffer of this process under a tracker, or untracked.

use pagemark::track::adaptive::HOT_AFTER;
use pagemark::{Mechanism, RangeSet, Tracker};

use super::page_buffer::PageBuffer;
use crate::BenchError;

/// Intervals before the one that is measured, in which `adaptive` learns which pages are hot. All
/// mechanisms have them.
const WARM_UP_INTERVALS: usize = HOT_AFTER + 1;

/// A buffer and its tracker, if it has one.
pub(super) struct TrackedBuffer<'a> {
    tracker: Option<Box<dyn Tracker>>,
    buffer: &'a PageBuffer,
    ranges: RangeSet,
}

impl<'a> TrackedBuffer<'a> {
    /// Tracks the buffer, and rewrites all of it in the intervals to warm up. On return an interval
    /// has just begun.
    pub fn new(buffer: &'a PageBuffer, mechanism: Option<Mechanism>) -> Result<TrackedBuffer<'a>, BenchError> {
        let tracker =
            mechanism.map(|mechanism| super::tracker(mechanism, buffer)).transpose().map_err(BenchError::pagemark)?;
        let mut tracked = TrackedBuffer { buffer, ranges: buffer.range().into(), tracker };
        tracked.begin_interval()?;
        for round in 0..WARM_UP_INTERVALS {
            buffer.touch(round as u8);
            tracked.begin_interval()?;
        }
        Ok(tracked)
    }

    /// Ends the interval and begins the next. Returns the ranges that were written.
    fn begin_interval(&mut self) -> Result<RangeSet, BenchError> {
        let mut dirty = RangeSet::new();
        if let Some(tracker) = &mut self.tracker {
            tracker
                .collect(&self.ranges, &mut dirty)
                .and_then(|()| tracker.begin_interval())
                .map_err(BenchError::pagemark)?;
        }
        Ok(dirty)
    }

    /// Ends an interval in which every page was written. The time of a mechanism that misses one
    /// would mean nothing.
    ///
    /// # Errors
    /// [`BenchError::WrongPages`]: the tracker does not report all pages.
    pub fn end_full_interval(&mut self) -> Result<(), BenchError> {
        let dirty = self.begin_interval()?;
        if self.tracker.is_none() || dirty.covers(self.buffer.range()) {
            return Ok(());
        }
        Err(BenchError::WrongPages { pages: self.buffer.pages(), found: dirty.page_count() })
    }
}
