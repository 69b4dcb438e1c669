//! Which ranges were written since I last asked? One mechanism a file.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{Range, RangeSet};

pub mod adaptive;
pub mod compare;
#[cfg(feature = "emulate")]
pub mod emulate;
pub mod full;
pub mod ldt;
pub mod mprotect;
mod page_bits;
pub mod pagemap_scan;
mod pins;
mod populated;
pub mod probe;
mod protected;
pub mod region_scan;
pub mod soft_dirty;
#[cfg(test)]
mod tests;
pub mod uffd;

pub use populated::{Pages, populated};
pub use probe::{Cost, Probe, of_region, own, probe};

/// Finds the ranges of one address space that were written.
///
/// A tracker may over-report and must never miss a write. Its first `collect` of a range reports all of it
/// that holds data, so that a mapping which is new is dirty as a whole.
pub trait Tracker: Send {
    /// Which mechanism this is.
    fn mechanism(&self) -> Mechanism;

    /// Smallest unit in which a write is reported, in bytes.
    fn granularity_bytes(&self) -> u64 {
        crate::PAGE_SIZE as u64
    }

    /// Adds to `dirty` what was written in `ranges` since the last `collect` that covered it (all of it that
    /// holds data, the first time), and starts the next interval there. `ranges` is what the target has mapped now,
    /// whole mappings; ranges that are no longer named are forgotten.
    ///
    /// The next interval starts before this returns: whoever reads a reported page afterwards reads it with
    /// all writes of the interval that ended, and a later write is reported by the next `collect`.
    ///
    /// # Errors
    /// [`TrackError`]; then what was collected is in `dirty` and nothing is lost, but the interval may have
    /// started for part of `ranges` only.
    fn collect(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<(), TrackError>;

    /// The pages that held data at the last `collect`, for trackers that know.
    fn populated(&self) -> Option<&RangeSet> {
        None
    }

    /// Lets the kernel write to `range` on behalf of system calls, until [`Tracker::unpin`]: each collect reports the pages
    /// around it. Mechanisms that see what system calls write have nothing to do; for the others such a call fails with
    /// `EFAULT` where nothing is pinned. The same range may be pinned several times.
    ///
    /// # Errors
    /// As [`Tracker::collect`]; then nothing is pinned.
    fn pin(&mut self, _range: &Range) -> Result<(), TrackError> {
        Ok(())
    }

    /// Ends one [`Tracker::pin`] of the same range.
    fn unpin(&mut self, _range: &Range) {}

    /// Says that a long interval begins, in which the target should run at its own speed. `adaptive` unprotects here what
    /// will be written anyway; for other trackers there is nothing to do.
    ///
    /// # Errors
    /// As [`Tracker::collect`].
    fn relax(&mut self) -> Result<(), TrackError> {
        Ok(())
    }
}

/// A way to find out what was written.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mechanism {
    /// Everything counts as written.
    Full,
    /// Compare with what was there before.
    Compare,
    /// Read-only pages and a signal handler; own memory only.
    Mprotect,
    /// Read-only pages, and stores that are emulated and told by the word; own memory only.
    Emulate,
    /// Linux 6.4: userfaultfd with a thread that handles its faults; own memory only.
    Uffd,
    /// Linux 6.7: userfaultfd WP_ASYNC and the PAGEMAP_SCAN ioctl.
    PagemapScan,
    /// `CONFIG_MEM_SOFT_DIRTY`.
    SoftDirty,
    /// `CONFIG_MEM_LDT`: the dirty bits of the page table.
    Ldt,
    /// `pagemap-scan`, with pages that are written in every interval left unprotected.
    Adaptive,
}

impl Mechanism {
    /// Every mechanism, the preferred one first.
    pub const ALL: [Mechanism; 9] = [
        Mechanism::Ldt,
        Mechanism::Adaptive,
        Mechanism::PagemapScan,
        Mechanism::SoftDirty,
        Mechanism::Uffd,
        Mechanism::Mprotect,
        Mechanism::Emulate,
        Mechanism::Compare,
        Mechanism::Full,
    ];

    /// True if it can track other processes too, and not only this one's own memory.
    pub fn reaches_other_processes(self) -> bool {
        !matches!(self, Mechanism::Uffd | Mechanism::Mprotect | Mechanism::Emulate)
    }

    /// The name in commands and reports.
    pub fn name(self) -> &'static str {
        match self {
            Mechanism::Full => "full",
            Mechanism::Compare => "compare",
            Mechanism::Mprotect => "mprotect",
            Mechanism::Emulate => "emulate",
            Mechanism::Uffd => "uffd",
            Mechanism::PagemapScan => "pagemap-scan",
            Mechanism::SoftDirty => "soft-dirty",
            Mechanism::Ldt => "ldt",
            Mechanism::Adaptive => "adaptive",
        }
    }
}

impl fmt::Display for Mechanism {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Mechanism {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Mechanism::ALL.into_iter().find(|mechanism| mechanism.name() == name).ok_or_else(|| {
            let names: Vec<_> = Mechanism::ALL.iter().map(|mechanism| mechanism.name()).collect();
            format!("no mechanism is called {name}; there are {}", names.join(", "))
        })
    }
}

/// A tracker could not do its work.
#[derive(Debug, thiserror::Error)]
pub enum TrackError {
    /// The tracked address space is gone: its process has exited or executed another program.
    #[error("the tracked memory is gone: its process has exited or executed another program")]
    Gone,
    /// The kernel lacks the mechanism or refuses it.
    #[error("{mechanism} does not work here: {reason}")]
    Unavailable {
        /// The mechanism.
        mechanism: Mechanism,
        /// Why, and what would enable it.
        reason: String,
    },
    /// A system call failed.
    #[error("{operation}: {source}")]
    System {
        /// The call, and on what.
        operation: String,
        /// Why it failed.
        source: std::io::Error,
    },
}
