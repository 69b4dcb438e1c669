//! The simulators: what is observed of each instruction.

use std::io;
use std::path::Path;

use crate::access::Access;
use crate::kind::Kind;
use crate::results::Results;

mod cache;
mod hot;
mod mix;
mod trace;

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

/// A new simulator, which has no state yet. A trace is written to the file `trace`.
///
/// # Errors
/// The file cannot be written, or there is none for a trace.
pub(crate) fn simulator(kind: Kind, trace: Option<&Path>) -> io::Result<Box<dyn Simulator>> {
    Ok(match kind {
        Kind::Mix => Box::new(mix::Mix::default()),
        Kind::Hot => Box::new(hot::Hot::default()),
        Kind::Cache => Box::new(cache::Caches::default()),
        Kind::Trace => {
            let no_file = || io::Error::new(io::ErrorKind::InvalidInput, "a trace needs a file");
            Box::new(trace::Tracer::create(trace.ok_or_else(no_file)?)?)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_has_a_simulator() {
        let trace = tempfile::NamedTempFile::new().unwrap();
        for kind in Kind::ALL {
            assert_eq!(simulator(kind, Some(trace.path())).unwrap().results().unwrap().simulator, kind);
        }
        assert!(simulator(Kind::Trace, None).is_err());
    }
}
