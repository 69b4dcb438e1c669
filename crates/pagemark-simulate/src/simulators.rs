//! The simulators: what is observed of each instruction.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::results::Results;

mod cache;
mod hot;
mod mix;

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
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 3] = [Kind::Mix, Kind::Hot, Kind::Cache];

    /// The name, on command lines and in results.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Mix => "mix",
            Kind::Hot => "hot",
            Kind::Cache => "cache",
        }
    }

    /// True if the simulator observes accesses to memory.
    pub(crate) fn needs_accesses(self) -> bool {
        self != Kind::Hot
    }

    /// How the counts of a later part of a run differ from its share of one long simulation.
    pub(crate) fn errors(self) -> Errors {
        match self {
            Kind::Mix | Kind::Hot => Errors::default(),
            Kind::Cache => cache::ERRORS,
        }
    }

    /// A new simulator, whose caches are empty.
    pub(crate) fn simulator(self) -> Box<dyn Simulator> {
        match self {
            Kind::Mix => Box::new(mix::Mix::default()),
            Kind::Hot => Box::new(hot::Hot::default()),
            Kind::Cache => Box::new(cache::Caches::default()),
        }
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

/// The counts of a simulator that are not exact in a part of a run, because it begins without the
/// state that one long simulation has there.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Errors {
    /// Those that are too great.
    pub(crate) too_many: &'static [&'static str],
    /// Those that are too small.
    pub(crate) too_few: &'static [&'static str],
    /// The count that is at least as great as the error of these.
    pub(crate) bound: &'static str,
    /// Those that can have any error.
    pub(crate) unbounded: &'static [&'static str],
}

/// An access of an instruction to memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Access {
    /// How long it is.
    pub(crate) bytes: u32,
    /// False for a read.
    pub(crate) is_store: bool,
    /// The physical address; None for an access to a device.
    pub(crate) physical: Option<u64>,
}

/// What observes a machine of one processor.
pub(crate) trait Simulator: Send {
    /// An instruction is translated: its virtual address, and its text, which QEMU may be unable to
    /// give. Returns a number for [`Simulator::begun`].
    fn translated(&mut self, address: u64, text: &dyn Fn() -> Option<String>) -> usize;

    /// An instruction begins. A fault may interrupt it, and it begins again later.
    fn begun(&mut self, token: usize);

    /// The instruction that began last accesses memory.
    fn accessed(&mut self, access: Access);

    /// What was observed until now.
    fn results(&self) -> Results;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn simulators_have_names() {
        for kind in Kind::ALL {
            assert_eq!(kind.name().parse(), Ok(kind));
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
            assert_eq!(kind.simulator().results().simulator, kind);
        }
        assert!("caches".parse::<Kind>().unwrap_err().contains("mix, hot, cache"));
    }
}
