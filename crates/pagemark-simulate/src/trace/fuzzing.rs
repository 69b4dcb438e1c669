//! Traces of any bytes, with right checksums, so that the reader gets behind these.

use std::path::Path;

use lz4_flex::block::compress;
use xxhash_rust::xxh3::xxh3_64;

use super::{MAGIC, Trace, columns};

/// Reads a trace of these blocks: instructions, accesses, and the columns or, if `is_stored`, the
/// compressed columns. The trace is written to `path`.
pub fn trace(path: &Path, blocks: &[(u32, u32, &[u8])], is_stored: bool) {
    let (mut file, mut index, mut first) = (MAGIC.to_vec(), Vec::new(), 0);
    for &(instructions, accesses, columns) in blocks {
        let _ = columns::decode(columns, first, instructions, accesses);
        let stored = if is_stored { columns.to_vec() } else { compress(columns) };
        let numbers = [file.len() as u64, first, xxh3_64(&stored)];
        index.extend(numbers.map(u64::to_le_bytes).concat());
        let numbers = [instructions, accesses, stored.len() as u32, columns.len() as u32];
        index.extend(numbers.map(u32::to_le_bytes).concat());
        file.extend(stored);
        first += u64::from(instructions);
    }
    let footer = [file.len() as u64, blocks.len() as u64, xxh3_64(&index)].map(u64::to_le_bytes).concat();
    file.extend(index);
    file.extend(&footer);
    file.extend(xxh3_64(&footer).to_le_bytes());
    file.extend(MAGIC);
    std::fs::write(path, file).expect("the file can be written");
    let Ok(trace) = Trace::open(path) else { return };
    for block in 0..trace.blocks() {
        let Ok(read) = trace.read(block) else { continue };
        assert_eq!(trace.block_of(read.first), Some(block));
        assert_eq!(read.instructions.len(), blocks[block].0 as usize);
        assert_eq!(read.accesses.len(), blocks[block].1 as usize);
    }
}
