//! The file behind a block of memory, read without a mapping.

use std::fs::File;
use std::os::unix::fs::FileExt;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use pagemark::{Address, AddressRangeExt, Range, RangeSet};
use pagemark_linux::proc::{self, Mapping};
use pagemark_linux::sparse;

use crate::error::{Error, ErrorKind, Object, Result};
use crate::memory::ram_blocks::RamBlock;

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
///
/// # Errors
/// This process may not open the file, so that it is not known.
pub(crate) fn is_fixed(pid: i32, mapping: &Mapping) -> Result<bool> {
    let file = match open(pid, mapping) {
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            let operation = "find out whether others can write to the memory of";
            let error = Error::of(ErrorKind::System, operation, Object::Process(pid), error);
            return Err(error.help("run pagemark as root, or with CAP_CHECKPOINT_RESTORE"));
        }
        file => file.ok(),
    };
    // What has no seals is a file of a disk.
    let seals = file.and_then(|file| fcntl(&file, FcntlArg::F_GET_SEALS).ok());
    let needed = FIXED.difference(SealFlag::F_SEAL_SEAL).bits();
    Ok(seals.is_some_and(|seals| seals & needed == needed))
}

fn open(pid: i32, mapping: &Mapping) -> std::io::Result<File> {
    File::open(proc::mapped_file(pid, &mapping.range()))
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

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use nix::sys::memfd::{MFdFlags, memfd_create};
    use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
    use pagemark::ByteCount;
    use pagemark_linux::proc::maps;

    use super::*;
    use crate::memory::ram_blocks::BlockMemory;

    const PAGE: usize = 4096;

    #[test]
    fn a_file_is_fixed_by_its_seals_and_read_around_its_holes() {
        if !nix::unistd::geteuid().is_root() {
            pagemark_testing::skip!("files behind mappings are opened as root");
        }
        let pages = |from: u64, to: u64| Address::new(from * PAGE as u64)..Address::new(to * PAGE as u64);
        for seals in [SealFlag::empty(), SealFlag::F_SEAL_SHRINK, FIXED] {
            let file = File::from(memfd_create(c"block", MFdFlags::MFD_ALLOW_SEALING).unwrap());
            file.set_len(8 * PAGE as u64).unwrap();
            file.write_all_at(&[7; PAGE], 3 * PAGE as u64).unwrap();
            fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).unwrap();
            let (length, access) = (NonZeroUsize::new(8 * PAGE).unwrap(), ProtFlags::PROT_READ | ProtFlags::PROT_WRITE);
            // SAFETY: a new mapping, at an address that the kernel chooses; only its address is used.
            let start = unsafe { mmap(None, length, access, MapFlags::MAP_PRIVATE, &file, 0) }.unwrap();
            let address = Address::new(start.as_ptr() as u64);
            let mappings = maps::of_this_process().unwrap();
            let mapping = mappings.iter().find(|mapping| mapping.start == address).unwrap();
            let pid = std::process::id() as i32;
            assert_eq!(is_fixed(pid, mapping).unwrap(), seals == FIXED, "{seals:?}");
            let range = address + ByteCount::of_pages(1)..address + ByteCount::of_pages(8);
            let block = RamBlock { id: "ram".into(), range, memory: BlockMemory::FixedFile };
            let file = BlockFile::open(pid, mapping, &block).unwrap();
            assert_eq!(file.content().unwrap(), RangeSet::from(pages(2, 3)));
            let mut buffer = [1; 3 * PAGE];
            let missing = [pages(2, 3), pages(5, 6)].into_iter().collect();
            file.read_missing(&[pages(1, 3), pages(5, 6)], &missing, &mut buffer).unwrap();
            assert_eq!([buffer[0], buffer[PAGE], buffer[2 * PAGE]], [1, 7, 0]);
            // SAFETY: the mapping of this test, which nothing uses.
            unsafe { munmap(start, 8 * PAGE) }.unwrap();
        }
    }
}
