//! The intervals of a recorded run, and which of them are still to be simulated.

use pagemark::repository::Checkpoint;
use pagemark_vm::Result;
use serde::Serialize;

use crate::interval::{SimulatedInterval, instructions_of};
use crate::results::ResultsDirectory;

/// An interval between one checkpoint and the next.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct RecordedInterval {
    /// The number of the checkpoint at its begin.
    pub from: u64,
    /// The number of the checkpoint at its end.
    pub to: u64,
    /// Instructions that were completed before it, since the machine's start.
    pub begin: u64,
    /// Instructions that were completed in it.
    pub instructions: u64,
    /// Microseconds that the machine needed for it, with its checkpoint.
    pub recorded_us: u64,
    /// Microseconds of them for which it was stopped for the checkpoint at the begin.
    pub stopped_us: u64,
}

/// What a checkpoint says of the interval that ends at it, and of the one that begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecordedPoint {
    /// The number of the checkpoint.
    sequence: u64,
    /// Instructions that were completed before it, since the machine's start.
    instructions: u64,
    taken_unix_us: u64,
    stopped_us: u64,
}

impl RecordedPoint {
    /// The point of a checkpoint.
    ///
    /// # Errors
    /// As those of [`instructions_of`].
    pub fn of(checkpoint: &Checkpoint) -> Result<RecordedPoint> {
        let manifest = &checkpoint.manifest;
        Ok(RecordedPoint {
            sequence: manifest.sequence,
            instructions: instructions_of(checkpoint)?,
            taken_unix_us: manifest.taken_unix_us,
            stopped_us: manifest.cost.downtime_us,
        })
    }
}

impl RecordedInterval {
    /// The intervals between points, which are those of a job in their order.
    pub fn between(points: &[RecordedPoint]) -> Vec<RecordedInterval> {
        let pairs = points.iter().zip(points.iter().skip(1));
        let intervals = pairs.map(|(from, to)| RecordedInterval {
            from: from.sequence,
            to: to.sequence,
            begin: from.instructions,
            instructions: to.instructions.saturating_sub(from.instructions),
            recorded_us: to.taken_unix_us.saturating_sub(from.taken_unix_us),
            stopped_us: from.stopped_us,
        });
        intervals.collect()
    }
}

/// The intervals of a recorded run, each with its result if that is kept.
#[derive(Clone, PartialEq, Debug)]
pub struct Plan {
    intervals: Vec<(RecordedInterval, Option<SimulatedInterval>)>,
}

impl Plan {
    /// Looks for the results of `recorded` in a directory. `unusable` is told why the result of an
    /// interval is of no use.
    ///
    /// # Errors
    /// As those of [`ResultsDirectory::find`].
    pub fn new(
        recorded: &[RecordedInterval],
        directory: &ResultsDirectory,
        unusable: &mut dyn FnMut(&str),
    ) -> Result<Plan> {
        let intervals = recorded.iter().map(|interval| {
            let kept = directory.find(interval.from, interval.to, interval.instructions, unusable)?;
            Ok((*interval, kept))
        });
        Ok(Plan { intervals: intervals.collect::<Result<_>>()? })
    }

    /// How many intervals the run has.
    pub fn count(&self) -> usize {
        self.intervals.len()
    }

    /// Those that are still to be simulated.
    pub fn missing(&self) -> Vec<RecordedInterval> {
        self.intervals.iter().filter(|(_, kept)| kept.is_none()).map(|(interval, _)| *interval).collect()
    }

    /// The results that are kept.
    pub fn kept(&self) -> impl Iterator<Item = &SimulatedInterval> {
        self.intervals.iter().filter_map(|(_, kept)| kept.as_ref())
    }
}
