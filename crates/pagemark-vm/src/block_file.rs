//! The file behind a block of memory, read without a mapping.

use std::fs::File;
use std::os::unix::fs::FileExt;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use pagemark::sys::proc::{self, Mapping};
use pagemark::sys::sparse;
use pagemark::{Address, AddressRangeExt, Range, RangeSet};

use crate::error::{Error, ErrorKind, Object, Result};
use crate::ram_blocks::RamBlock;

/// The seals of a file whose content stays as it is.
pub(crate) const FIXED: SealFlag =
    SealFlag::F_SEAL_WRITE.union(SealFlag::F_SEAL_SHRINK).union(SealFlag::F_SEAL_GROW).union(SealFlag::F_SEAL_SEAL);

/// The part of a file that is mapped as a block.
#[derive(Debug)]
pub(crate) struct BlockFile {
    file: File,
    /// The part, as offsets of the file.
    range: Range,
    id: String,
}

/// True if nobody can write to the file behind a mapping, nor change its length.
pub(crate) fn is_fixed(pid: i32, mapping: &Mapping) -> Result<bool> {
    // What has no seals is a file of a disk, or must not be opened.
    let seals = open(pid, mapping).ok().and_then(|file| fcntl(&file, FcntlArg::F_GET_SEALS).ok());
    let needed = FIXED.difference(SealFlag::F_SEAL_SEAL).bits();
    Ok(seals.is_some_and(|seals| seals & needed == needed))
}

fn open(pid: i32, mapping: &Mapping) -> std::io::Result<File> {
    let name = format!("map_files/{:x}-{:x}", mapping.start.get(), mapping.end.get());
    File::open(proc::path(pid, &name))
}

impl BlockFile {
    /// Opens the file behind `mapping`, which holds `block`.
    pub(crate) fn open(pid: i32, mapping: &Mapping, block: &RamBlock) -> Result<BlockFile> {
        let file = open(pid, mapping).map_err(|error| failed(&block.id, error))?;
        let start = Address::new(mapping.offset) + (block.range.start - mapping.start);
        Ok(BlockFile { file, range: start..start + block.bytes(), id: block.id.clone() })
    }

    /// The pages that hold data, as offsets of the block.
    pub(crate) fn content(&self) -> Result<RangeSet> {
        let Range { start, end } = self.range;
        let (mut at, mut content) = (start, RangeSet::new());
        while at < end {
            let data = sparse::next_data(&self.file, at, end).map_err(|error| failed(&self.id, error))?;
            if data.is_empty() {
                break;
            }
            let from = Address::MIN + (data.start - start);
            content.insert(from..from + data.byte_count());
            at = data.end;
        }
        Ok(content.into_whole_pages())
    }

    /// Reads the pages `missing` of what a buffer should hold: `wanted`, one after the other.
    pub(crate) fn read_missing(&self, wanted: &[Range], missing: &RangeSet, mut buffer: &mut [u8]) -> Result<()> {
        for range in wanted {
            let Some(mine) = buffer.split_off_mut(..range.byte_count().to_usize()) else {
                return Err(Error::damaged("a buffer is shorter than what is read into it"));
            };
            for part in missing.within(range.clone()) {
                let place = (part.start - range.start).to_usize()..(part.end - range.start).to_usize();
                let offset = self.range.start + (part.start - Address::MIN);
                self.file.read_exact_at(&mut mine[place], offset.get()).map_err(|error| failed(&self.id, error))?;
            }
        }
        Ok(())
    }
}

fn failed(id: &str, error: std::io::Error) -> Error {
    Error::of(ErrorKind::System, "read the file of", Object::Block(id.to_owned()), error)
}
