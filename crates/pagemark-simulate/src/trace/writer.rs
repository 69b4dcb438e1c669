//! Writes a trace, block by block.

use std::io::{self, Write};

use lz4_flex::block::compress;
use xxhash_rust::xxh3::xxh3_64;

use super::columns::Encoder;
use super::{BLOCK_EVENTS, MAGIC, MAX_BLOCK_BYTES};
use crate::access::Access;

/// A trace that is being written.
pub(crate) struct TraceWriter<W: Write> {
    out: W,
    block_events: u32,
    block: Encoder,
    /// The index of the blocks that were written.
    index: Vec<u8>,
    blocks: u64,
    /// Bytes that were written, and instructions in them.
    bytes: u64,
    instructions: u64,
}

impl<W: Write> TraceWriter<W> {
    pub(crate) fn new(out: W) -> io::Result<TraceWriter<W>> {
        TraceWriter::with_blocks_of(out, BLOCK_EVENTS)
    }

    /// A block ends when it has so many instructions or accesses.
    pub(super) fn with_blocks_of(mut out: W, block_events: u32) -> io::Result<TraceWriter<W>> {
        out.write_all(&MAGIC)?;
        let bytes = MAGIC.len() as u64;
        Ok(TraceWriter {
            out,
            block_events,
            block: Encoder::new(),
            index: Vec::new(),
            blocks: 0,
            bytes,
            instructions: 0,
        })
    }

    /// An instruction begins.
    pub(crate) fn begin(&mut self, address: u64) -> io::Result<()> {
        if self.block.instructions.max(self.block.accesses) >= self.block_events {
            self.end_block()?;
        }
        self.block.begin(address);
        Ok(())
    }

    /// The instruction that began last accesses memory.
    pub(crate) fn access(&mut self, access: Access) -> io::Result<()> {
        if self.block.instructions == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "an access without an instruction"));
        }
        self.block.access(access);
        Ok(())
    }

    fn end_block(&mut self) -> io::Result<()> {
        let (instructions, accesses) = (self.block.instructions, self.block.accesses);
        let raw = self.block.take();
        if raw.len() > MAX_BLOCK_BYTES {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, "an instruction with too many accesses"));
        }
        let stored = compress(&raw);
        self.out.write_all(&stored)?;
        [self.bytes, self.instructions, xxh3_64(&stored)].iter().for_each(|word| self.index.extend(word.to_le_bytes()));
        let counts = [instructions, accesses, stored.len() as u32, raw.len() as u32];
        counts.iter().for_each(|count| self.index.extend(count.to_le_bytes()));
        self.bytes += stored.len() as u64;
        self.instructions += u64::from(instructions);
        self.blocks += 1;
        Ok(())
    }

    /// Writes what is left, the index and the footer.
    pub(crate) fn finish(&mut self) -> io::Result<()> {
        if self.block.instructions > 0 {
            self.end_block()?;
        }
        self.out.write_all(&self.index)?;
        let mut footer: Vec<u8> =
            [self.bytes, self.blocks, xxh3_64(&self.index)].iter().flat_map(|word| word.to_le_bytes()).collect();
        footer.extend(xxh3_64(&footer).to_le_bytes());
        footer.extend(MAGIC);
        self.out.write_all(&footer)?;
        self.out.flush()
    }
}
