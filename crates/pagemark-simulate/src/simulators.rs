//! The simulators: what is observed of each instruction.

use std::fmt;
use std::io;
use std::path::Path;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::results::Results;

mod cache;
mod hot;
mod mix;
mod trace;

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
            Kind::Cache => cache::ERRORS,
        }
    }

    /// True if it keeps a state that a warm-up before the interval can improve.
    pub fn has_warm_up(self) -> bool {
        !self.errors().is_empty()
    }

    /// A new simulator, which has no state yet. A trace is written to the file `trace`.
    ///
    /// # Errors
    /// The file cannot be written, or there is none for a trace.
    pub(crate) fn simulator(self, trace: Option<&Path>) -> io::Result<Box<dyn Simulator>> {
        Ok(match self {
            Kind::Mix => Box::new(mix::Mix::default()),
            Kind::Hot => Box::new(hot::Hot::default()),
            Kind::Cache => Box::new(cache::Caches::default()),
            Kind::Trace => {
                let no_file = || io::Error::new(io::ErrorKind::InvalidInput, "a trace needs a file");
                Box::new(trace::Tracer::create(trace.ok_or_else(no_file)?)?)
            }
        })
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

/// An access of an instruction to memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Access {
    /// How long it is.
    pub(crate) bytes: u32,
    /// False for a read.
    pub(crate) is_store: bool,
    /// The virtual address.
    pub(crate) address: u64,
    /// The physical address; None for an access to a device.
    pub(crate) physical: Option<u64>,
}

/// What observes a machine of one processor.
pub(crate) trait Simulator: Send {
    /// An instruction is translated: its virtual address, and its text, which QEMU may be unable to
    /// give. Returns a number for [`Simulator::begun`].
    fn translated(&mut self, address: u64, text: &dyn Fn() -> Option<String>) -> usize;

    /// An instruction begins. A fault may interrupt it, and it begins again later.
    ///
    /// # Errors
    /// A file cannot be written. What is observed is of no use then.
    fn begun(&mut self, token: usize) -> io::Result<()>;

    /// The instruction that began last accesses memory.
    ///
    /// # Errors
    /// Those of [`Simulator::begun`].
    fn accessed(&mut self, access: Access) -> io::Result<()>;

    /// The interval begins now, behind a warm-up: the state stays, the counts begin. For those that
    /// have one ([`Kind::has_warm_up`]).
    fn end_warm_up(&mut self) {}

    /// What was observed, at the end of the interval.
    ///
    /// # Errors
    /// Those of [`Simulator::begun`].
    fn results(&mut self) -> io::Result<Results>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn simulators_have_names() {
        let trace = tempfile::NamedTempFile::new().unwrap();
        for kind in Kind::ALL {
            assert_eq!(kind.name().parse(), Ok(kind));
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
            assert_eq!(kind.simulator(Some(trace.path())).unwrap().results().unwrap().simulator, kind);
        }
        assert!(Kind::Trace.simulator(None).is_err());
        assert!("caches".parse::<Kind>().unwrap_err().contains("mix, hot, cache, trace"));
    }
}
