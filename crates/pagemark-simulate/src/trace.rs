//! Traces: each instruction that was begun, and each access to memory, in the order of the run
//! (what Simutrace keeps for SimuBoost; PML, section 2.2).
//!
//! # The file
//!
//! All numbers are little-endian. A *varint* has 7 bits of a number in each byte, the lowest first,
//! and the highest bit of each byte but the last set. A *signed* varint holds a difference of two
//! numbers modulo 2^64, as 0, -1, 1, -2, ...
//!
//! ```text
//! header   8 bytes: "PMTRACE1"
//! blocks   LZ4 blocks, one after the other
//! index    40 bytes for each block:
//!          offset u64, first instruction u64, XXH3 of the stored bytes u64,
//!          instructions u32, accesses u32, stored bytes u32, bytes u32
//! footer   40 bytes: offset of the index u64, blocks u64, XXH3 of the index u64,
//!          XXH3 of these 24 bytes u64, "PMTRACE1"
//! ```
//!
//! The footer is written last, so a file without one is not complete. A block is read without the
//! others. It has five columns, each behind its length (u32):
//!
//! 1. for each instruction the signed difference of its address to that of the one before, or to 0;
//! 2. for each access the number of instructions begun since the access before, or since the begin
//!    of the block;
//! 3. for each access a byte: the logarithm of its length, 32 for a store, 64 for a device;
//! 4. for each access the signed difference of its virtual address to the last one of the same
//!    instruction: of [`CODE_SLOTS`] slots, by the address of the instruction;
//! 5. for each access to memory its physical less its virtual address, as the signed difference to
//!    the last such number: of [`PAGE_SLOTS`] slots, by the virtual page.

mod columns;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod reader;
mod writer;

pub use reader::Trace;
pub(crate) use writer::TraceWriter;

const MAGIC: [u8; 8] = *b"PMTRACE1";

/// The slots by addresses of instructions. In a slot is what was last seen by it, first 0.
pub const CODE_SLOTS: usize = 4096;

/// The slots by virtual pages.
pub const PAGE_SLOTS: usize = 1024;

/// A block ends before the next instruction when it has as many instructions or accesses.
const BLOCK_EVENTS: u32 = 1 << 16;

/// No block is longer.
const MAX_BLOCK_BYTES: usize = 64 << 20;

const ENTRY_BYTES: usize = 40;
const FOOTER_BYTES: usize = 40;

/// A part of a trace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TraceBlock {
    /// How many instructions were begun before, since the begin of the trace.
    pub first: u64,
    /// The virtual addresses of the instructions that were begun.
    pub instructions: Vec<u64>,
    /// The accesses, in their order.
    pub accesses: Vec<TracedAccess>,
}

/// An access of an instruction to memory or to a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TracedAccess {
    /// How many instructions were begun before its own, since the begin of the trace.
    pub instruction: u64,
    /// How many bytes: a power of two.
    pub bytes: u32,
    /// False for a read.
    pub is_store: bool,
    /// Where the guest sees the first byte.
    pub virtual_address: u64,
    /// Where the machine has it; None for a device.
    pub physical_address: Option<u64>,
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{self, Write};
    use std::path::PathBuf;

    use proptest::prelude::*;

    use super::*;
    use crate::access::Access;
    use crate::error::{Error, ErrorKind};

    /// An instruction, and its accesses.
    type Executed = (u64, Vec<Access>);

    fn address() -> impl Strategy<Value = u64> {
        prop_oneof![any::<u64>(), 0x1000u64..0x3000, Just(u64::MAX)]
    }

    fn access() -> impl Strategy<Value = Access> {
        let parts = (0u32..7, any::<bool>(), address(), prop::option::of(address()));
        parts.prop_map(|(shift, is_store, address, physical)| Access { bytes: 1 << shift, is_store, address, physical })
    }

    fn executed() -> impl Strategy<Value = Vec<Executed>> {
        prop::collection::vec((address(), prop::collection::vec(access(), 0..4)), 0..200)
    }

    fn write(out: impl Write, run: &[Executed], block_events: u32) -> io::Result<()> {
        let mut writer = TraceWriter::with_blocks_of(out, block_events)?;
        for (address, accesses) in run {
            writer.begin(*address)?;
            accesses.iter().try_for_each(|access| writer.access(*access))?;
        }
        writer.finish()
    }

    fn file(run: &[Executed], block_events: u32) -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("trace");
        write(fs::File::create(&path).unwrap(), run, block_events).unwrap();
        (directory, path)
    }

    fn read(trace: &Trace) -> Result<Vec<Executed>, Error> {
        let mut run = Vec::new();
        for number in 0..trace.blocks() {
            let block = trace.read(number)?;
            assert_eq!(block.first, run.len() as u64);
            run.extend(block.instructions.iter().map(|&address| (address, Vec::new())));
            for access in block.accesses {
                run[access.instruction as usize].1.push(Access {
                    bytes: access.bytes,
                    is_store: access.is_store,
                    address: access.virtual_address,
                    physical: access.physical_address,
                });
            }
        }
        Ok(run)
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(run in executed(), block_events in 1u32..50) {
            let (_directory, path) = file(&run, block_events);
            let trace = Trace::open(&path).unwrap();
            prop_assert_eq!(trace.instructions(), run.len() as u64);
            prop_assert_eq!(trace.accesses(), run.iter().map(|(_, accesses)| accesses.len() as u64).sum::<u64>());
            for instruction in 0..run.len() as u64 {
                let block = trace.read(trace.block_of(instruction).unwrap()).unwrap();
                let at = (instruction - block.first) as usize;
                prop_assert_eq!(block.instructions[at], run[instruction as usize].0);
            }
            prop_assert_eq!(trace.block_of(run.len() as u64), None);
            prop_assert_eq!(read(&trace).unwrap(), run);
        }

        /// Each byte is covered by a checksum, or by a comparison.
        #[test]
        fn damage_is_found(run in executed(), at in any::<prop::sample::Index>(), bit in 0u8..8, cut in any::<bool>()) {
            let (_directory, path) = file(&run, 20);
            let mut content = fs::read(&path).unwrap();
            let at = at.index(content.len());
            if cut { content.truncate(at) } else { content[at] ^= 1 << bit }
            fs::write(&path, content).unwrap();
            let error = Trace::open(&path).and_then(|trace| read(&trace)).unwrap_err();
            prop_assert!(error.kind() == ErrorKind::Damaged && error.to_string().contains("simulate its interval again"));
        }

        /// Whoever writes a file can make its checksums fit.
        #[test]
        fn any_columns_are_read_without_a_panic(
            raw in prop::collection::vec(prop_oneof![Just(0u8), any::<u8>()], 0..200),
            counts in (0u32..40, 0u32..40),
        ) {
            let _ = columns::decode(&raw, u64::MAX - 3, counts.0, counts.1);
        }
    }

    /// A file of which so many bytes can be written.
    struct Full(usize);

    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let written = bytes.len().min(self.0);
            self.0 -= written;
            if written == 0 { Err(io::ErrorKind::StorageFull.into()) } else { Ok(written) }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_full_disk_is_reported() {
        let run: Vec<Executed> = (0..100u64)
            .map(|at| (at * 5, vec![Access { bytes: 8, is_store: true, address: at * 8, physical: Some(at * 8) }]))
            .collect();
        let mut whole = Vec::new();
        write(&mut whole, &run, 10).unwrap();
        for room in 0..whole.len() {
            let error = write(Full(room), &run, 10).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::StorageFull, "room for {room} bytes");
        }
        write(Full(whole.len()), &run, 10).unwrap();
    }

    #[test]
    fn an_access_without_an_instruction_is_refused() {
        let mut writer = TraceWriter::with_blocks_of(Vec::new(), 10).unwrap();
        let access = Access { bytes: 1, is_store: false, address: 0, physical: None };
        assert_eq!(writer.access(access).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_loop_takes_little_room() {
        let run: Vec<Executed> = (0..30_000u64)
            .map(|at| {
                let access = Access { bytes: 4, is_store: at % 3 == 0, address: at * 4, physical: Some(at * 4) };
                (0x1000 + at % 3 * 4, if at % 3 < 2 { vec![access] } else { Vec::new() })
            })
            .collect();
        let (_directory, path) = file(&run, BLOCK_EVENTS);
        assert_eq!(read(&Trace::open(&path).unwrap()).unwrap(), run);
        assert!(fs::metadata(&path).unwrap().len() < 3000, "50,000 events");
    }

    #[test]
    fn other_files_are_no_traces() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("trace");
        let error = Trace::open(&path).unwrap_err();
        assert!(error.kind() == ErrorKind::System && error.to_string().contains("No such file"), "{error}");
        for content in [Vec::new(), b"PMTRACE1".to_vec(), vec![0; 100], [MAGIC; 6].concat(), vec![0xff; 100]] {
            fs::write(&path, content).unwrap();
            assert_eq!(Trace::open(&path).unwrap_err().kind(), ErrorKind::Damaged);
        }
    }
}
