//! The parts of an ELF file that matter for loading a program.

/// A segment that is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Where it begins in the file.
    pub offset: u64,
    /// Its address, before the program is moved.
    pub address: u64,
    /// Bytes from the file.
    pub file_bytes: u64,
    /// Bytes in memory: the rest is zeros.
    pub memory_bytes: u64,
    /// `PROT_…`.
    pub protection: u64,
}

/// A program or a dynamic linker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Elf {
    /// Whether it can lie anywhere.
    pub is_movable: bool,
    /// Where it starts, before it is moved.
    pub entry: u64,
    /// The address of the program headers in memory, before it is moved.
    pub headers: u64,
    /// How many program headers there are.
    pub header_count: u64,
    /// In ascending order of addresses.
    pub segments: Vec<Segment>,
    /// Largest alignment of a segment.
    pub align: u64,
    /// Where the file has the path of the dynamic linker, and how long that is.
    pub linker: Option<(u64, usize)>,
    /// Whether the stack is executable.
    pub executable_stack: bool,
}

/// Bytes of the file's header.
pub const HEADER_BYTES: usize = 64;
/// Bytes of a program header.
pub const PROGRAM_HEADER_BYTES: usize = 56;
/// As many program headers as fit into 64 KiB, as for Linux.
const MOST_HEADERS: u16 = (65_536 / PROGRAM_HEADER_BYTES) as u16;

/// Why a file is no program for the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotElf {
    /// No ELF file.
    Other,
    /// A program for another processor or of 32 bits.
    Foreign,
    /// An ELF file whose headers contradict each other.
    Damaged,
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// Where the program headers are, and how many bytes they have. `header` are the first
/// [`HEADER_BYTES`] of the file, or fewer if it is shorter.
pub fn program_headers(header: &[u8]) -> Result<(u64, usize), NotElf> {
    if !header.starts_with(b"\x7fELF") {
        return Err(NotElf::Other);
    }
    let machine = u16_at(header, 18).ok_or(NotElf::Damaged)?;
    if header.get(4) != Some(&2) || header.get(5) != Some(&1) || machine != 62 {
        return Err(NotElf::Foreign);
    }
    let (offset, size, count) = (u64_at(header, 32), u16_at(header, 54), u16_at(header, 56));
    match (offset, size, count) {
        (Some(offset), Some(56), Some(count @ 1..=MOST_HEADERS)) => {
            Ok((offset, usize::from(count) * PROGRAM_HEADER_BYTES))
        }
        _ => Err(NotElf::Damaged),
    }
}

/// Reads the program from its two kinds of headers.
pub fn parse(header: &[u8], program_headers: &[u8]) -> Result<Elf, NotElf> {
    parse_fields(header, program_headers).unwrap_or(Err(NotElf::Damaged))
}

fn parse_fields(header: &[u8], program_headers: &[u8]) -> Option<Result<Elf, NotElf>> {
    let is_movable = match u16_at(header, 16)? {
        2 => false,
        3 => true,
        _ => return None,
    };
    let headers_offset = u64_at(header, 32)?;
    let mut elf = Elf {
        is_movable,
        entry: u64_at(header, 24)?,
        headers: 0,
        header_count: (program_headers.len() / PROGRAM_HEADER_BYTES) as u64,
        segments: Vec::new(),
        align: 4096,
        linker: None,
        executable_stack: true,
    };
    let mut headers = None;
    for entry in program_headers.chunks_exact(PROGRAM_HEADER_BYTES) {
        let (kind, flags) = (u32_at(entry, 0)?, u32_at(entry, 4)?);
        let (offset, address) = (u64_at(entry, 8)?, u64_at(entry, 16)?);
        let (file_bytes, memory_bytes, align) = (u64_at(entry, 32)?, u64_at(entry, 40)?, u64_at(entry, 48)?);
        match kind {
            1 if memory_bytes > 0 => {
                let end = address.checked_add(memory_bytes)?;
                let file_end = offset.checked_add(file_bytes)?;
                // Before 2^47, so that sums with other addresses of programs do not overflow.
                if file_bytes > memory_bytes
                    || end > 1 << 47
                    || file_end > i64::MAX as u64
                    || offset % 4096 != address % 4096
                {
                    return None;
                }
                if elf.segments.last().is_some_and(|last| last.address + last.memory_bytes > address) {
                    return None;
                }
                if align.is_power_of_two() && align <= 1 << 30 {
                    elf.align = elf.align.max(align);
                }
                if (offset..file_end).contains(&headers_offset) {
                    headers = headers.or(Some(address + (headers_offset - offset)));
                }
                let protection = [(4, 1), (2, 2), (1, 4)];
                let protection = protection.iter().filter(|(flag, _)| flags & flag != 0).map(|(_, bit)| bit).sum();
                elf.segments.push(Segment { offset, address, file_bytes, memory_bytes, protection });
            }
            3 => elf.linker = Some((offset, usize::try_from(file_bytes).ok().filter(|len| (2..=4096).contains(len))?)),
            6 => headers = Some(address),
            0x6474_e551 => elf.executable_stack = flags & 1 != 0,
            _ => {}
        }
    }
    elf.headers = headers.unwrap_or(0);
    (!elf.segments.is_empty()).then_some(Ok(elf))
}

impl Elf {
    /// The first and the last page boundary of what is loaded, before it is moved.
    pub fn span(&self) -> (u64, u64) {
        let start = self.segments.first().map_or(0, |segment| segment.address & !4095);
        let end = self.segments.last().map_or(0, |segment| (segment.address + segment.memory_bytes + 4095) & !4095);
        (start, end)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(path: &str) -> Result<Elf, NotElf> {
        let bytes = std::fs::read(path).expect("the file is there");
        let (offset, len) = program_headers(&bytes[..HEADER_BYTES])?;
        parse(&bytes[..HEADER_BYTES], &bytes[offset as usize..offset as usize + len])
    }

    #[test]
    fn this_test_is_a_movable_program_with_a_linker() {
        let elf = read("/proc/self/exe").expect("a program");
        assert!(elf.is_movable && elf.linker.is_some() && !elf.executable_stack);
        assert!(elf.segments.iter().any(|segment| segment.protection == 5));
        assert!(elf.headers > 0 && elf.span().1 > elf.entry);
    }

    #[test]
    fn files_that_are_no_programs_are_told() {
        assert_eq!(program_headers(b"#!/bin/sh\n"), Err(NotElf::Other));
        let mut header = [0; HEADER_BYTES];
        header[..6].copy_from_slice(b"\x7fELF\x01\x01");
        header[18] = 3;
        assert_eq!(program_headers(&header), Err(NotElf::Foreign));
        assert_eq!(program_headers(b"\x7fELF\x02\x01"), Err(NotElf::Damaged));
    }

    proptest! {
        #[test]
        fn damaged_headers_are_refused_or_in_order(changes in prop::collection::vec((0usize..600, any::<u8>()), 0..12)) {
            let bytes = std::fs::read("/proc/self/exe").expect("this program");
            let mut head = bytes[..700].to_vec();
            for (at, value) in changes {
                head[at] = value;
            }
            if let Ok((offset, len)) = program_headers(&head[..HEADER_BYTES])
                && let Some(end) = (offset as usize).checked_add(len)
                && let Some(headers) = head.get(offset as usize..end)
                && let Ok(elf) = parse(&head[..HEADER_BYTES], headers)
            {
                let (start, end) = elf.span();
                prop_assert!(start < end && end <= (1 << 47) + 4096);
                for pair in elf.segments.windows(2) {
                    prop_assert!(pair[0].address + pair[0].memory_bytes <= pair[1].address);
                }
            }
        }
    }
}
