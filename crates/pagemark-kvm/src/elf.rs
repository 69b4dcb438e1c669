//! The parts of an ELF file that matter for loading a program.

use object::elf::{
    ELFCLASS64, ELFDATA2LSB, ELFMAG, EM_X86_64, ET_DYN, ET_EXEC, FileHeader64, PF_R, PF_W, PF_X, PT_GNU_STACK,
    PT_INTERP, PT_LOAD, PT_PHDR, ProgramHeader64,
};
use object::{LittleEndian, pod};

type Header = FileHeader64<LittleEndian>;
type ProgramHeader = ProgramHeader64<LittleEndian>;

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
pub const HEADER_BYTES: usize = size_of::<Header>();
/// Bytes of a program header.
pub const PROGRAM_HEADER_BYTES: usize = size_of::<ProgramHeader>();
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

/// Where the program headers are, and how many bytes they have. `header` are the first
/// [`HEADER_BYTES`] of the file, or fewer if it is shorter.
pub fn program_headers(header: &[u8]) -> Result<(u64, usize), NotElf> {
    if !header.starts_with(&ELFMAG) {
        return Err(NotElf::Other);
    }
    let header = read_header(header)?;
    let is_native = header.e_ident.class == ELFCLASS64 && header.e_ident.data == ELFDATA2LSB;
    if !is_native || header.e_machine.get(LittleEndian) != EM_X86_64 {
        return Err(NotElf::Foreign);
    }
    let (size, count) = (header.e_phentsize.get(LittleEndian), header.e_phnum.get(LittleEndian));
    if usize::from(size) != PROGRAM_HEADER_BYTES || !(1..=MOST_HEADERS).contains(&count) {
        return Err(NotElf::Damaged);
    }
    Ok((header.e_phoff.get(LittleEndian), usize::from(count) * PROGRAM_HEADER_BYTES))
}

fn read_header(header: &[u8]) -> Result<&Header, NotElf> {
    pod::from_bytes(header).map(|(header, _)| header).map_err(|()| NotElf::Damaged)
}

/// Reads the program from its two kinds of headers.
pub fn parse(header: &[u8], program_headers: &[u8]) -> Result<Elf, NotElf> {
    let header = read_header(header)?;
    let count = program_headers.len() / PROGRAM_HEADER_BYTES;
    let (program_headers, _) =
        pod::slice_from_bytes::<ProgramHeader>(program_headers, count).map_err(|()| NotElf::Damaged)?;
    let is_movable = match header.e_type.get(LittleEndian) {
        ET_EXEC => false,
        ET_DYN => true,
        _ => return Err(NotElf::Damaged),
    };
    let headers_offset = header.e_phoff.get(LittleEndian);
    let mut elf = Elf {
        is_movable,
        entry: header.e_entry.get(LittleEndian),
        headers: 0,
        header_count: count as u64,
        segments: Vec::new(),
        align: 4096,
        linker: None,
        executable_stack: true,
    };
    let mut headers = None;
    for entry in program_headers {
        let (offset, address) = (entry.p_offset.get(LittleEndian), entry.p_vaddr.get(LittleEndian));
        let flags = entry.p_flags.get(LittleEndian);
        match entry.p_type.get(LittleEndian) {
            PT_LOAD if entry.p_memsz.get(LittleEndian) > 0 => {
                let segment = segment_of(entry).ok_or(NotElf::Damaged)?;
                if elf.segments.last().is_some_and(|last| last.address + last.memory_bytes > segment.address) {
                    return Err(NotElf::Damaged);
                }
                let align = entry.p_align.get(LittleEndian);
                if align.is_power_of_two() && align <= 1 << 30 {
                    elf.align = elf.align.max(align);
                }
                if (offset..offset + segment.file_bytes).contains(&headers_offset) {
                    headers = headers.or(Some(address + (headers_offset - offset)));
                }
                elf.segments.push(segment);
            }
            PT_INTERP => {
                let length = usize::try_from(entry.p_filesz.get(LittleEndian)).unwrap_or(usize::MAX);
                if !(2..=4096).contains(&length) {
                    return Err(NotElf::Damaged);
                }
                elf.linker = Some((offset, length));
            }
            PT_PHDR => headers = Some(address),
            PT_GNU_STACK => elf.executable_stack = flags & PF_X != 0,
            _ => {}
        }
    }
    elf.headers = headers.unwrap_or(0);
    if elf.segments.is_empty() { Err(NotElf::Damaged) } else { Ok(elf) }
}

/// The segment that a program header describes. None if its numbers contradict each other.
fn segment_of(entry: &ProgramHeader) -> Option<Segment> {
    let (offset, address) = (entry.p_offset.get(LittleEndian), entry.p_vaddr.get(LittleEndian));
    let (file_bytes, memory_bytes) = (entry.p_filesz.get(LittleEndian), entry.p_memsz.get(LittleEndian));
    let end = address.checked_add(memory_bytes)?;
    let file_end = offset.checked_add(file_bytes)?;
    // Before 2^47, so that sums with other addresses of programs do not overflow.
    let is_possible =
        file_bytes <= memory_bytes && end <= 1 << 47 && file_end <= i64::MAX as u64 && offset % 4096 == address % 4096;
    let flags = entry.p_flags.get(LittleEndian);
    let bits = [(PF_R, libc::PROT_READ), (PF_W, libc::PROT_WRITE), (PF_X, libc::PROT_EXEC)];
    let protection = bits.iter().filter(|(flag, _)| flags & flag != 0).map(|(_, bit)| *bit as u64).sum();
    is_possible.then_some(Segment { offset, address, file_bytes, memory_bytes, protection })
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
