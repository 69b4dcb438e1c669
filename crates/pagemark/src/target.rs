//! What is checkpointed: a region, a process tree, a virtual machine.

use std::time::Duration;

use crate::{Range, RangeSet};

/// One address space of a target. For processes it counts the spaces met, so that a process id which is used
/// again is another space.
pub type SpaceId = u64;

/// Something whose memory is checkpointed while it runs.
///
/// The [`Checkpointer`](crate::checkpointer::Checkpointer) calls the methods in the order in which they stand here. A target that
/// is dropped at any point runs on, untouched.
pub trait Target {
    /// Why the target could not do what was asked.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Finds out what belongs to the target now, and names its address spaces. Called before each round of
    /// collecting, also while the target is frozen.
    ///
    /// # Errors
    /// The target is gone or could not be followed.
    fn spaces(&mut self) -> Result<Vec<SpaceId>, Self::Error>;

    /// Adds to `dirty` what was written in `space` since the last call, as [`Tracker::collect`](crate::Tracker::collect) does.
    ///
    /// # Errors
    /// The space could not be tracked. A space that vanished while the target runs is no error: it has nothing dirty.
    fn collect(&mut self, space: SpaceId, dirty: &mut RangeSet) -> Result<(), Self::Error>;

    /// Reads `ranges` one after the other into `buffer`, whose length is their sum. Returns what could not be read
    /// because it is no longer mapped; the buffer's content for it is unspecified.
    ///
    /// # Errors
    /// The memory could not be read for another reason than that it is gone.
    fn read(&mut self, space: SpaceId, ranges: &[Range], buffer: &mut [u8]) -> Result<RangeSet, Self::Error>;

    /// Begins to freeze the target and returns at once; the target may run on for a while.
    ///
    /// # Errors
    /// It can't be frozen. It runs on.
    fn begin_freeze(&mut self) -> Result<(), Self::Error>;

    /// Waits until the target is frozen, at most for the given time. True if it is.
    ///
    /// # Errors
    /// It can't be frozen. It runs on.
    fn wait_frozen(&mut self, at_most: Duration) -> Result<bool, Self::Error>;

    /// Waits until everything of the frozen target but its memory is saved.
    ///
    /// # Errors
    /// It could not be saved. The target runs on.
    fn save_state(&mut self) -> Result<(), Self::Error>;

    /// Lets the target run on. Returns how long it was frozen.
    ///
    /// # Errors
    /// It is not known whether the target runs.
    fn thaw(&mut self) -> Result<Duration, Self::Error>;

    /// Says that a long interval begins, as [`Tracker::relax`](crate::Tracker::relax) does.
    ///
    /// # Errors
    /// As [`Target::collect`].
    fn relax(&mut self) -> Result<(), Self::Error>;
}
