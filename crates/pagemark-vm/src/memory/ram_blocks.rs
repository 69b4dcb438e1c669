//! The blocks of a machine's memory, and where in QEMU's address space each is.

use pagemark::{Address, AddressRangeExt, ByteCount, Range};
use pagemark_linux::proc::{Mapping, MappingKind};

use crate::error::{Error, ErrorKind, Object, Result};

/// QEMU places each block without a file at a multiple of this.
const ALIGNMENT: u64 = 2 << 20;

/// A block of memory, as `info ramblock` lists it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct ListedBlock {
    /// QEMU's name of it, the same in each QEMU with the same command line.
    pub id: String,
    /// The part that the machine uses now.
    pub(crate) used: ByteCount,
    /// What is reserved for it, which is mapped.
    pub(crate) total: ByteCount,
    /// Its offset among all blocks.
    pub(crate) offset: u64,
    /// Where it begins; None from versions that do not list it.
    pub(crate) start: Option<Address>,
}

/// A block of memory, and where it is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RamBlock {
    /// QEMU's name of it.
    pub id: String,
    /// The addresses of the used part in QEMU's address space.
    pub range: Range,
    pub(crate) memory: BlockMemory,
}

/// What the pages of a block are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum BlockMemory {
    /// Pages of QEMU alone.
    Private,
    /// Pages of a file, or of memory without a name, which others can share.
    Shared,
    /// Pages of a file that nobody can write to, until QEMU writes to one: then it has its own.
    FixedFile,
}

impl RamBlock {
    /// Length of the block.
    pub fn bytes(&self) -> ByteCount {
        self.range.end - self.range.start
    }

    /// The offsets in the block of a range of QEMU's addresses that is within the block.
    pub(crate) fn offsets(&self, range: &Range) -> Range {
        range.moved_down(self.range.start - Address::MIN)
    }

    /// Where in QEMU's address space a range of offsets in the block is.
    pub(crate) fn addresses(&self, offsets: &Range) -> Range {
        offsets.moved_up(self.range.start - Address::MIN)
    }
}

/// Reads the table of `info ramblock`. Blocks without a name are left out: no device has them, such
/// as memory of `object-add` that is not plugged in.
pub(crate) fn parse(table: &str) -> Option<Vec<ListedBlock>> {
    let mut lines = table.lines().filter(|line| !line.trim().is_empty());
    let header: Vec<&str> = lines.next()?.split_whitespace().collect();
    let has_address = header.contains(&"HVA");
    if header.first() != Some(&"Block") || !header.contains(&"Total") {
        return None;
    }
    let number = |text: Option<&&str>| u64::from_str_radix(text?.strip_prefix("0x")?, 16).ok();
    let blocks: Option<Vec<ListedBlock>> = lines
        .map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            // ID, page size and its unit, offset, used, total, and in later versions the address.
            let at = words.iter().position(|word| word.starts_with("0x"))?;
            let id = words[..at.checked_sub(2)?].join(" ");
            let (offset, used, total) =
                (number(words.get(at))?, number(words.get(at + 1))?, number(words.get(at + 2))?);
            let start = if has_address { Some(Address::new(number(words.get(at + 3))?)) } else { None };
            let is_right = used > 0 && used <= total;
            let (used, total) = (ByteCount::new(used), ByteCount::new(total));
            is_right.then_some(ListedBlock { id, used, total, offset, start })
        })
        .collect();
    let mut blocks = blocks?;
    blocks.retain(|block| !block.id.is_empty());
    Some(blocks)
}

/// Finds each block among the mappings of QEMU. A version that does not list addresses is known to
/// map each block with an inaccessible page behind it, and at a multiple of 2 MiB if it has no
/// file. Where several places fit, QEMU's own record of the block decides. It is searched in what
/// `heap` returns: the parts of QEMU's private memory, of which no more are read than are needed.
/// `is_fixed` says of a private mapping of a file whether nobody can write to the file.
///
/// # Errors
/// [`ErrorKind::Memory`] if a block is not found, or several places fit;
/// [`ErrorKind::Unsupported`] if a block is a private mapping of a file that can be written to.
pub(crate) fn locate<Parts: Iterator<Item = Vec<u8>>>(
    listed: &[ListedBlock],
    mappings: &[Mapping],
    heap: impl FnOnce() -> Result<Parts>,
    is_fixed: impl Fn(&Mapping) -> Result<bool>,
) -> Result<Vec<RamBlock>> {
    let (mut heap, mut unread, mut read) = (Some(heap), None, Vec::new());
    let mut blocks = Vec::with_capacity(listed.len());
    for block in listed {
        let fitting = || fitting_starts(mappings, block.total);
        let is_like = |other: &&ListedBlock| other.total == block.total;
        let start = match block.start {
            Some(start) => start,
            None if fitting().count() == 1 && listed.iter().filter(is_like).count() == 1 => {
                fitting().next().unwrap_or_default()
            }
            None => {
                if let Some(heap) = heap.take() {
                    unread = Some(heap()?);
                }
                let starts: Vec<Address> = fitting().collect();
                let in_part = |part: &Vec<u8>| recorded_address(part, block, &starts);
                let mut found = read.iter().find_map(in_part);
                while found.is_none()
                    && let Some(part) = unread.as_mut().and_then(Iterator::next)
                {
                    found = in_part(&part);
                    read.push(part);
                }
                found.ok_or_else(|| {
                    let reason = format!(
                        "cannot be found in QEMU's address space: it could be in {} places, and QEMU's record of it \
                         is not in the {} parts of the heap",
                        starts.len(),
                        read.len()
                    );
                    let error = Error::about(ErrorKind::Memory, Object::Block(block.id.clone()), reason);
                    error.help("later versions of QEMU list the addresses of their memory")
                })?
            }
        };
        let range = start..start + block.used;
        let mapping = mappings.iter().find(|mapping| mapping.start <= range.start && range.end <= mapping.end);
        let mapping = mapping.ok_or_else(|| {
            Error::about(ErrorKind::Memory, Object::Block(block.id.clone()), "is not mapped where QEMU says")
        })?;
        let memory = match mapping.kind {
            MappingKind::PrivateFile if is_fixed(mapping)? => BlockMemory::FixedFile,
            _ if mapping.is_private() => BlockMemory::Private,
            _ => BlockMemory::Shared,
        };
        if mapping.kind == MappingKind::PrivateFile && memory != BlockMemory::FixedFile {
            let reason = "is a private mapping of a file, whose content is not the machine's alone";
            let error = Error::about(ErrorKind::Unsupported, Object::Block(block.id.clone()), reason);
            return Err(error.help("use `memory-backend-file` with `share=on`, or `memory-backend-ram`"));
        }
        blocks.push(RamBlock { id: block.id.clone(), range, memory });
    }
    let mut starts: Vec<Address> = blocks.iter().map(|block| block.range.start).collect();
    starts.sort_unstable();
    if starts.windows(2).any(|pair| pair[0] == pair[1]) {
        return Err(Error::about(ErrorKind::Memory, Object::None, "two memory blocks of QEMU have one address"));
    }
    Ok(blocks)
}

/// The address of a block according to QEMU's record of it, if `content` has the record and the
/// address is among `starts`. In all versions the record has the offset, the used and the reserved
/// length one after the other, the address shortly before and the name shortly behind.
fn recorded_address(content: &[u8], block: &ListedBlock, starts: &[Address]) -> Option<Address> {
    const NEAR: usize = 64;
    const WORD: usize = 8;
    let lengths = [block.offset, block.used.get(), block.total.get()];
    let (words, _) = content.as_chunks::<WORD>();
    let name = [block.id.as_bytes(), b"\0"].concat();
    let found = words
        .windows(lengths.len())
        .enumerate()
        .filter(|(_, window)| window.iter().zip(lengths).all(|(word, length)| u64::from_le_bytes(*word) == length));
    found
        .filter(|(at, _)| {
            let behind = &content[(at + lengths.len()) * WORD..];
            let behind = &behind[..behind.len().min(NEAR + name.len())];
            behind.windows(name.len()).any(|window| window == name)
        })
        .find_map(|(at, _)| {
            let before = words[at.saturating_sub(NEAR / WORD)..at].iter().rev();
            before.map(|word| Address::new(u64::from_le_bytes(*word))).find(|address| starts.contains(address))
        })
}

/// Where a block of `total` bytes can begin. The kernel may have joined it with the mapping before
/// it.
fn fitting_starts(mappings: &[Mapping], total: ByteCount) -> impl Iterator<Item = Address> {
    mappings.windows(2).filter_map(move |pair| {
        let (mapping, next) = (&pair[0], &pair[1]);
        let is_guarded = next.start == mapping.end && !next.readable && !next.writable;
        let is_memory = mapping.readable && mapping.writable && !mapping.executable;
        let is_large_enough = mapping.end - mapping.start >= total;
        let start = mapping.end.get().checked_sub(total.get())?;
        let is_at_its_place = match mapping.inode {
            0 => start.is_multiple_of(ALIGNMENT),
            _ => start == mapping.start.get(),
        };
        (is_memory && is_large_enough && is_at_its_place && is_guarded).then_some(Address::new(start))
    })
}

#[cfg(test)]
mod tests {
    use pagemark_linux::proc::maps;

    use super::*;

    const OLD: &str = "              Block Name    PSize              Offset               Used              Total\n                          pc.ram    4 KiB  0x0000000000000000 0x0000000004000000 0x0000000004000000\n            /rom@etc/acpi/tables    4 KiB  0x0000000004080000 0x0000000000020000 0x0000000000200000\n";
    const NEW: &str = "Block Name    PSize              Offset               Used              Total                HVA  RO\npc.ram    4 KiB  0x0000000000000000 0x0000000004000000 0x0000000004000000 0x00007f71c3e00000  rw\n";

    fn block(id: &str, offset: u64, used: u64, total: u64) -> ListedBlock {
        let (used, total) = (ByteCount::new(used), ByteCount::new(total));
        ListedBlock { id: id.into(), used, total, offset, start: None }
    }

    fn none_is_fixed(_: &Mapping) -> Result<bool> {
        Ok(false)
    }

    fn mappings(text: &str) -> Vec<Mapping> {
        maps::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn the_tables_of_old_and_new_versions_are_read() {
        let ram = block("pc.ram", 0, 64 << 20, 64 << 20);
        let tables = block("/rom@etc/acpi/tables", 0x4080000, 0x20000, 0x200000);
        assert_eq!(parse(OLD), Some(vec![ram.clone(), tables]));
        assert_eq!(parse(NEW), Some(vec![ListedBlock { start: Some(Address::new(0x7f71c3e00000)), ..ram }]));
    }

    #[test]
    fn any_other_table_is_refused() {
        let broken = [
            "",
            "no table",
            "Block Name PSize Offset Used Total\nram 4 KiB 0x0 0x1000",
            "Block Name PSize Offset Used Total\nram 4 KiB 0x0 0x2000 0x1000",
            "Block Name PSize Offset Used Total HVA RO\nram 4 KiB 0x0 0x1000 0x1000",
        ];
        broken.iter().for_each(|text| assert_eq!(parse(text), None, "{text}"));
    }

    #[test]
    fn a_block_that_no_device_has_is_left_out() {
        let table = OLD.to_owned() + "    4 KiB  0x0000000004300000 0x0000000001000000 0x0000000001000000\n";
        assert_eq!(parse(&table), parse(OLD));
    }

    #[test]
    fn a_block_is_found_by_its_size_alignment_and_guard() {
        let text = "\
            7f0000000000-7f0000100000 rw-p 00000000 00:00 0 \n\
            7f0000200000-7f0000300000 rw-p 00000000 00:00 0 \n\
            7f0000300000-7f0000301000 ---p 00000000 00:00 0 \n\
            7f0000401000-7f0000501000 rw-p 00000000 00:00 0 \n\
            7f0000501000-7f0000502000 ---p 00000000 00:00 0 \n";
        let listed = [block("ram", 0, 0x80000, 0x100000)];
        let unneeded = || -> Result<std::vec::IntoIter<Vec<u8>>> { panic!("one mapping fits") };
        let found = locate(&listed, &mappings(text), unneeded, none_is_fixed).unwrap();
        let start = Address::new(0x7f0000200000);
        assert_eq!(
            found,
            [RamBlock {
                id: "ram".into(),
                range: start..start + ByteCount::new(0x80000),
                memory: BlockMemory::Private
            }]
        );
    }

    #[test]
    fn blocks_of_equal_size_are_found_by_their_addresses_or_refused() {
        let text = "\
            7f0000200000-7f0000300000 rw-p 00000000 00:00 0 \n\
            7f0000300000-7f0000301000 ---p 00000000 00:00 0 \n\
            7f0000400000-7f0000500000 rw-s 00000000 00:01 7 /memfd:ram (deleted)\n\
            7f0000500000-7f0000501000 ---p 00000000 00:00 0 \n";
        let listed = [block("a", 0, 0x100000, 0x100000), block("b", 0x200000, 0x100000, 0x100000)];
        let record = |address: u64, block: &ListedBlock| {
            let numbers = [7, address, 0, block.offset, block.used.get(), block.total.get(), 8];
            let mut record: Vec<u8> = numbers.iter().flat_map(|number: &u64| number.to_le_bytes()).collect();
            record.extend([0; 4]);
            record.extend(block.id.as_bytes());
            record.resize(record.len().next_multiple_of(8) + 8, 0);
            record
        };
        let heap = |a: u64, b: u64| vec![vec![1; 100], [record(a, &listed[0]), record(b, &listed[1])].concat()];
        let mut parts = heap(0x7f0000400000, 0x7f0000200000);
        // What is behind the records is not read.
        parts.push(Vec::new());
        let mut reads = 0;
        let counted = parts.into_iter().inspect(|_| reads += 1);
        let found = locate(&listed, &mappings(text), || Ok(counted), none_is_fixed).unwrap();
        assert_eq!(reads, 2);
        assert_eq!(
            found.iter().map(|block| (&*block.id, block.memory)).collect::<Vec<_>>(),
            [("a", BlockMemory::Shared), ("b", BlockMemory::Private)]
        );

        let unknown = [heap(0, 0), heap(0x7f0000200000, 0x7f0000200000), heap(0x1000, 0x2000), Vec::new()];
        for heap in unknown {
            let error = locate(&listed, &mappings(text), || Ok(heap.into_iter()), none_is_fixed).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Memory);
        }
    }

    #[test]
    fn a_block_is_found_in_a_mapping_that_begins_before_it() {
        let text = "\
            7f00001f0000-7f0000300000 rw-p 00000000 00:00 0 \n\
            7f0000300000-7f0000301000 ---p 00000000 00:00 0 \n";
        let found =
            locate(&[block("a", 0, 0x100000, 0x100000)], &mappings(text), || Ok(std::iter::empty()), none_is_fixed)
                .unwrap();
        assert_eq!(found[0].range.start, Address::new(0x7f0000200000));
    }

    #[test]
    fn a_private_mapping_of_a_file_is_refused_unless_the_file_is_fixed() {
        let text =
            "7f0000200000-7f0000300000 rw-p 00000000 08:01 7 /ram\n7f0000300000-7f0000301000 ---p 00000000 00:00 0 \n";
        let listed = [block("a", 0, 0x100000, 0x100000)];
        let error = locate(&listed, &mappings(text), || Ok(std::iter::empty()), none_is_fixed).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        let found = locate(&listed, &mappings(text), || Ok(std::iter::empty()), |_| Ok(true)).unwrap();
        assert_eq!(found[0].memory, BlockMemory::FixedFile);
    }
}
