//! When the memory of a process is collected.

/// What a process does while its memory is collected, and whether it is collected once more while
/// it is frozen. What has stopped holding data may be left to that collect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Moment {
    /// It runs, and no freeze follows. It is stopped for a fraction of a millisecond if there is
    /// much in new mappings, which can be registered only then.
    Running,
    /// It runs, and a freeze follows. It is stopped as in [`Moment::Running`].
    BeforeFreeze,
    /// It runs, is not stopped here, since something else may be stopping it, and a freeze follows.
    /// Memory in mappings that are not registered yet is left to that.
    Freezing,
    /// It runs, is not stopped, and no freeze follows. Memory in mappings that are not registered
    /// yet is left to the next collect in a stop.
    Unstopped,
    /// It runs, and is stopped meanwhile, for a fraction of a millisecond.
    InStop,
    /// It is frozen.
    Frozen,
}

impl Moment {
    /// True if the process may be stopped for the collect.
    pub fn may_stop(self) -> bool {
        matches!(self, Moment::Running | Moment::BeforeFreeze | Moment::InStop)
    }

    /// True if the process is collected once more while it is frozen.
    pub fn precedes_freeze(self) -> bool {
        matches!(self, Moment::BeforeFreeze | Moment::Freezing)
    }

    /// True if the process is frozen.
    pub fn is_frozen(self) -> bool {
        self == Moment::Frozen
    }
}
