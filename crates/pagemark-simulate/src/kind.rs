//! The simulators by name, and which of their counts are not exact.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The count that each error of a cache is at most.
const CACHE_ERRORS: &[CountError] = &[
    CountError { count: "l1d-hits", too_many: None, too_few: Some("l1d-uncertain-misses") },
    CountError { count: "l1d-misses", too_many: Some("l1d-uncertain-misses"), too_few: None },
    CountError { count: "l2-hits", too_many: Some("l2-uncertain-hits"), too_few: Some("l2-uncertain-misses") },
    CountError { count: "l2-misses", too_many: Some("l2-uncertain-misses"), too_few: Some("l2-uncertain-hits") },
];

/// A simulator that comes with Pagemark.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// How often each kind of instruction is begun, and the accesses to memory.
    Mix,
    /// How many instructions are begun in each line of 64 bytes of code, by virtual address.
    Hot,
    /// Hits and misses in two levels of caches for data.
    Cache,
    /// All instructions that are begun, and all accesses to memory, in a file ([`crate::trace`]).
    Trace,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 4] = [Kind::Mix, Kind::Hot, Kind::Cache, Kind::Trace];

    /// The name, on command lines and in results.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Mix => "mix",
            Kind::Hot => "hot",
            Kind::Cache => "cache",
            Kind::Trace => "trace",
        }
    }

    /// True if the simulator observes accesses to memory.
    pub(crate) fn needs_accesses(self) -> bool {
        self != Kind::Hot
    }

    /// The counts of a later part of a run that differ from its share of one long simulation.
    pub(crate) fn errors(self) -> &'static [CountError] {
        match self {
            Kind::Mix | Kind::Hot | Kind::Trace => &[],
            Kind::Cache => CACHE_ERRORS,
        }
    }

    /// True if it keeps a state that a warm-up before the interval can improve.
    pub fn has_warm_up(self) -> bool {
        !self.errors().is_empty()
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(name: &str) -> Result<Kind, String> {
        let names = || Kind::ALL.map(Kind::name).join(", ");
        Kind::ALL
            .into_iter()
            .find(|kind| kind.name() == name)
            .ok_or_else(|| format!("{name:?} is no simulator; there are {}", names()))
    }
}

/// A count that is not exact in a part of a run, because the simulator begins without the state
/// that one long simulation has there. Its error is at most another count of the same part.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CountError {
    pub(crate) count: &'static str,
    /// The count by which it is too great at most.
    pub(crate) too_many: Option<&'static str>,
    /// The count by which it is too small at most.
    pub(crate) too_few: Option<&'static str>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_have_names() {
        for kind in Kind::ALL {
            assert_eq!(kind.name().parse(), Ok(kind));
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
        }
        assert!("caches".parse::<Kind>().unwrap_err().contains("mix, hot, cache, trace"));
    }
}
