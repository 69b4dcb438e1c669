//! Where the blocks of a machine's memory are among its physical addresses.

use pagemark::ByteCount;
use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Object, Result};

/// QEMU's name of what the processors address.
const PHYSICAL_MEMORY: &str = " AS \"memory\", root: system";

/// Kinds of ranges that are memory, as QEMU's own dump has them: ROM and flash are.
const MEMORY_KINDS: [&str; 3] = ["ram", "rom", "romd"];

/// The ranges of physical addresses that are memory, in ascending order.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct MemoryMap {
    ranges: Vec<MappedRange>,
}

/// A range of physical addresses that is memory.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct MappedRange {
    /// The first address.
    start: u64,
    /// The last address.
    last: u64,
    /// QEMU's name of the memory, which is the end of the block's name.
    memory: String,
    /// Where the range begins in the memory.
    offset: u64,
}

/// A part of a block that has physical addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Segment {
    /// The first physical address.
    pub(crate) start: u64,
    pub(crate) bytes: u64,
    /// The position of the block among those that were given.
    pub(crate) block: usize,
    /// Where the part begins in the block.
    pub(crate) offset: u64,
}

impl MemoryMap {
    /// Reads the output of `info mtree -f`. None if its form is unknown.
    pub(crate) fn parse(text: &str) -> Option<MemoryMap> {
        let mut lines = text.lines().map(str::trim_end).skip_while(|line| *line != PHYSICAL_MEMORY);
        lines.next()?;
        let view = lines.take_while(|line| !line.is_empty() && !line.starts_with("FlatView"));
        let mut ranges: Vec<MappedRange> = Vec::new();
        for line in view.filter(|line| line.starts_with("  ")) {
            let range = parse_range(line.trim_start())?;
            let Some(range) = range else { continue };
            if ranges.last().is_some_and(|previous| previous.last >= range.start) {
                return None;
            }
            ranges.push(range);
        }
        (!ranges.is_empty()).then_some(MemoryMap { ranges })
    }

    /// The parts of `blocks` (name and length) that have physical addresses. Neighbours are one, as
    /// in QEMU's own dump.
    ///
    /// # Errors
    /// [`ErrorKind::Memory`] if it is not certain which block is meant; [`ErrorKind::Damaged`].
    pub(crate) fn segments(&self, blocks: &[(&str, ByteCount)]) -> Result<Vec<Segment>> {
        let mut segments: Vec<Segment> = Vec::new();
        for range in &self.ranges {
            let has_name = |id: &str| {
                id.strip_suffix(range.memory.as_str()).is_some_and(|device| device.is_empty() || device.ends_with('/'))
            };
            let mut named = blocks.iter().enumerate().filter(|(_, (id, _))| has_name(id));
            let (block, length) = match (named.next(), named.next()) {
                (Some((block, (_, length))), None) => (block, length.get()),
                (first, _) => {
                    let what = if first.is_some() { "several blocks have" } else { "no block has" };
                    let reason = format!("is mapped at {:#x}, but {what} this name", range.start);
                    return Err(Error::about(ErrorKind::Memory, Object::Block(range.memory.clone()), reason));
                }
            };
            let bytes = range.last.checked_sub(range.start).and_then(|bytes| bytes.checked_add(1));
            let part = bytes.and_then(|bytes| Some((bytes, range.offset.checked_add(bytes)?)));
            let Some((bytes, _)) = part.filter(|&(_, end)| end <= length) else {
                return Err(Error::damaged(format!("the memory block {} is mapped behind its end", range.memory)));
            };
            match segments.last_mut() {
                Some(last)
                    if last.block == block
                        && last.start + last.bytes == range.start
                        && last.offset + last.bytes == range.offset =>
                {
                    last.bytes += bytes;
                }
                _ => segments.push(Segment { start: range.start, bytes, block, offset: range.offset }),
            }
        }
        Ok(segments)
    }
}

/// Reads `START-LAST (prio N, KIND): NAME [@OFFSET] [KVM]`. The outer None is an unknown form, the
/// inner one a range that is not memory.
fn parse_range(line: &str) -> Option<Option<MappedRange>> {
    let (addresses, rest) = line.split_once(" (prio ")?;
    let (start, last) = addresses.split_once('-')?;
    let (priority_and_kind, name) = rest.split_once("): ")?;
    let (_, kind) = priority_and_kind.split_once(", ")?;
    if !MEMORY_KINDS.contains(&kind) {
        return Some(None);
    }
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    let name = name.strip_suffix(" KVM").unwrap_or(name);
    let (memory, offset) = match name.rsplit_once(" @") {
        Some((memory, offset)) => (memory, number(offset)?),
        None => (name, 0),
    };
    let range = MappedRange { start: number(start)?, last: number(last)?, memory: memory.to_owned(), offset };
    (range.start <= range.last && !memory.is_empty()).then_some(Some(range))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TEXT: &str = "FlatView #0
 AS \"I/O\", root: io
 Root memory region: io
  0000000000000000-0000000000000007 (prio 0, i/o): dma-chan

FlatView #1
 AS \"memory\", root: system
 AS \"cpu-memory-0\", root: system
 Root memory region: system
  0000000000000000-000000000009ffff (prio 0, ram): pc.ram
  00000000000a0000-00000000000bffff (prio 1, i/o): vga-lowmem
  00000000000c0000-00000000000cafff (prio 0, rom): pc.ram @00000000000c0000
  00000000000cb000-0000000003ffffff (prio 0, ram): pc.ram @00000000000cb000 KVM
  00000000f0000000-00000000f0000fff (prio 0, nv-ram): nvdimm
  00000000fd000000-00000000fdffffff (prio 1, ram): vga.vram
  00000000fffc0000-00000000ffffffff (prio 0, romd): pc.bios

FlatView #2
 AS \"cpu-smm-0\", root: memory
 Root memory region: memory
  0000000000000000-00000000000bffff (prio 0, ram): pc.ram
";

    fn blocks(vga: &'static str) -> Vec<(&'static str, ByteCount)> {
        let block = |id, bytes| (id, ByteCount::new(bytes));
        vec![block("pc.bios", 256 << 10), block(vga, 16 << 20), block("pc.ram", 64 << 20)]
    }

    #[test]
    fn the_map_has_what_processors_address_and_neighbours_are_one() {
        let map = MemoryMap::parse(TEXT).unwrap();
        let segments = map.segments(&blocks("0000:00:01.0/vga.vram")).unwrap();
        let segment = |start, bytes, block, offset| Segment { start, bytes, block, offset };
        let expected = [
            segment(0, 0xa0000, 2, 0),
            segment(0xc0000, 0x3f40000, 2, 0xc0000),
            segment(0xfd000000, 16 << 20, 1, 0),
            segment(0xfffc0000, 256 << 10, 0, 0),
        ];
        assert_eq!(segments, expected);
    }

    #[test]
    fn a_block_that_is_not_certain_or_too_short_is_an_error() {
        let map = MemoryMap::parse(TEXT).unwrap();
        assert_eq!(map.segments(&blocks("xvga.vram")).unwrap_err().kind(), ErrorKind::Memory);
        let two = [blocks("1/vga.vram"), blocks("2/vga.vram")[1..2].to_vec()].concat();
        let error = map.segments(&two).unwrap_err();
        assert!(error.to_string().contains("several blocks"), "{error}");
        let mut short = blocks("vga.vram");
        short[2].1 = ByteCount::new(32 << 20);
        assert_eq!(map.segments(&short).unwrap_err().kind(), ErrorKind::Damaged);
        let last = MappedRange { start: 0, last: u64::MAX, memory: "pc.ram".into(), offset: 0 };
        let whole = MemoryMap { ranges: vec![last] };
        assert_eq!(whole.segments(&blocks("vga.vram")).unwrap_err().kind(), ErrorKind::Damaged);
    }

    #[test]
    fn any_other_text_is_no_map() {
        let first = "  0000000000000000-000000000009ffff (prio 0, ram): pc.ram";
        for (from, to) in [
            (" AS \"memory\"", " AS \"other\""),
            ("root: system", "root: x"),
            (first, "  000000000009ffff-0000000000000000 (prio 0, ram): pc.ram"),
            (first, "  0000000000000000-00000000000fffff (prio 0, ram): pc.ram"),
            (first, "  0-z (prio 0, ram): pc.ram"),
            (first, "  0-1 (prio 0, ram): "),
            (first, "  0-1 pc.ram"),
        ] {
            assert_eq!(MemoryMap::parse(&TEXT.replace(from, to)), None, "{to}");
        }
        assert_eq!(MemoryMap::parse(""), None);
    }

    proptest! {
        #[test]
        fn nothing_panics(text in "[ -~\n]{0,200}", at in 0..TEXT.len(), with in "[ -~\n]{0,4}") {
            let _ = MemoryMap::parse(&text);
            let changed = format!("{}{with}{}", &TEXT[..at], TEXT.get(at + with.len()..).unwrap_or(""));
            if let Some(map) = MemoryMap::parse(&changed) {
                let _ = map.segments(&blocks("vga.vram"));
            }
        }
    }
}
