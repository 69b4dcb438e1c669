//! The trace of a machine: its instructions and accesses, in a file.

use std::fs::File;
use std::io::{self, BufWriter};
use std::path::Path;

use super::Simulator;
use crate::access::Access;
use crate::kind::Kind;
use crate::results::Results;
use crate::trace::TraceWriter;

/// Writes a trace, and counts what is in it.
pub(super) struct Tracer {
    writer: TraceWriter<BufWriter<File>>,
    instructions: u64,
    loads: u64,
    stores: u64,
    device_accesses: u64,
}

impl Tracer {
    /// Writes to a file, whose content is replaced.
    pub(super) fn create(path: &Path) -> io::Result<Tracer> {
        let writer = TraceWriter::new(BufWriter::new(File::create(path)?))?;
        Ok(Tracer { writer, instructions: 0, loads: 0, stores: 0, device_accesses: 0 })
    }
}

impl Simulator for Tracer {
    /// The token is the address.
    fn translated(&mut self, address: u64, _: &dyn Fn() -> Option<String>) -> usize {
        address as usize
    }

    fn begun(&mut self, token: usize) -> io::Result<()> {
        self.instructions += 1;
        self.writer.begin(token as u64)
    }

    fn accessed(&mut self, access: Access) -> io::Result<()> {
        match access {
            Access { physical: None, .. } => self.device_accesses += 1,
            Access { is_store: true, .. } => self.stores += 1,
            Access { is_store: false, .. } => self.loads += 1,
        }
        self.writer.access(access)
    }

    fn results(&mut self) -> io::Result<Results> {
        self.writer.finish()?;
        let counts = [
            ("instructions", self.instructions),
            ("loads", self.loads),
            ("stores", self.stores),
            ("device-accesses", self.device_accesses),
        ];
        let counts = counts.map(|(name, count)| (name.to_owned(), count)).into();
        Ok(Results { simulator: Kind::Trace, counts })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Trace;

    #[test]
    fn what_is_observed_is_in_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("trace");
        let mut tracer = Tracer::create(&path).unwrap();
        let token = tracer.translated(0xffff_ffff_8000_0000, &|| None);
        tracer.begun(token).unwrap();
        let access = Access { bytes: 4, is_store: true, address: 0x1_0000_2000, physical: Some(0x2000) };
        for access in [access, Access { is_store: false, ..access }, Access { physical: None, ..access }] {
            tracer.accessed(access).unwrap();
        }
        let results = tracer.results().unwrap();
        let counts: Vec<u64> = results.counts.values().copied().collect();
        assert_eq!(counts, [1, 1, 1, 1]);
        let trace = Trace::open(&path).unwrap();
        let block = trace.read(0).unwrap();
        assert_eq!((block.instructions[0], trace.accesses()), (0xffff_ffff_8000_0000, 3));
        assert_eq!(block.accesses[0].physical_address, Some(0x2000));
        assert!(block.accesses[0].is_store && block.accesses[2].physical_address.is_none());
        assert!(Tracer::create(&directory.path().join("none/trace")).is_err());
    }
}
