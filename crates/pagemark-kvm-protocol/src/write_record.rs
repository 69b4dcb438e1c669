//! How KVM notes what a program in the machine writes.

use crate::machine_calls::Means;

/// How KVM notes the pages that a program in the machine writes. The one excludes the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteRecord {
    /// In a log for each memory slot.
    Log,
    /// In a ring for each virtual CPU.
    Rings,
}

impl WriteRecord {
    /// The variable of the monitor's environment that says which the machine keeps.
    pub const VARIABLE: &str = "PAGEMARK_KVM_DIRTY";

    /// The value of the variable.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            WriteRecord::Log => "log",
            WriteRecord::Rings => "rings",
        }
    }

    /// The means that it is.
    pub const fn means(self) -> Means {
        match self {
            WriteRecord::Log => Means::Log,
            WriteRecord::Rings => Means::Ring,
        }
    }

    /// The value of [`Header::keeps`](crate::description::Header::keeps).
    pub const fn word(self) -> u64 {
        self.means() as u64 + 1
    }

    /// What the value says. None if the monitor logs nothing for trackers outside.
    pub fn of(word: u64) -> Option<WriteRecord> {
        [WriteRecord::Log, WriteRecord::Rings].into_iter().find(|record| record.word() == word)
    }
}
