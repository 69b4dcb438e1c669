//! ELF files of x86-64: what kind a file is, and the head of a core file.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;

use object::elf::{
    ELFCLASS64, ELFDATA2LSB, ELFMAG, ELFOSABI_NONE, EM_X86_64, ET_CORE, ET_DYN, EV_CURRENT, FileHeader64, Ident,
    NoteHeader64, PN_XNUM, PT_INTERP, PT_LOAD, PT_NOTE, ProgramHeader64, SectionHeader64,
};
use object::{LittleEndian, U16, U32, U64, pod};

use crate::Address;

type FileHeader = FileHeader64<LittleEndian>;
type ProgramHeader = ProgramHeader64<LittleEndian>;
type SectionHeader = SectionHeader64<LittleEndian>;
type NoteHeader = NoteHeader64<LittleEndian>;

/// The most program headers that are looked at.
const MAX_HEADERS: usize = 64;

/// True for a library of x86-64.
///
/// # Errors
/// It cannot be read.
pub fn is_library(file: &File) -> io::Result<bool> {
    let header = read_header(file)?;
    Ok(header.is_some_and(|header| {
        (header.e_type.get(LittleEndian), header.e_machine.get(LittleEndian)) == (ET_DYN, EM_X86_64)
    }))
}

/// True for a program of 64 bits that names no dynamic linker.
///
/// # Errors
/// It cannot be read, or lacks the program headers that it announces.
pub fn is_static(file: &File) -> io::Result<bool> {
    // None: a script, for example.
    let Some(header) = read_header(file)? else { return Ok(false) };
    if usize::from(header.e_phentsize.get(LittleEndian)) != size_of::<ProgramHeader>() {
        return Ok(false);
    }
    let count = usize::from(header.e_phnum.get(LittleEndian)).min(MAX_HEADERS);
    let mut bytes = vec![0; count * size_of::<ProgramHeader>()];
    file.read_exact_at(&mut bytes, header.e_phoff.get(LittleEndian))?;
    let headers = pod::slice_from_all_bytes::<ProgramHeader>(&bytes).unwrap_or_default();
    Ok(!headers.iter().any(|header| header.p_type.get(LittleEndian) == PT_INTERP))
}

/// The header of an ELF file of 64 bits, little-endian. None if the file is another.
fn read_header(file: &File) -> io::Result<Option<FileHeader>> {
    let mut start = Vec::new();
    file.take(size_of::<FileHeader>() as u64).read_to_end(&mut start)?;
    let header = pod::from_bytes::<FileHeader>(&start).ok().map(|(header, _)| *header);
    let is_of_64_bits = |header: &FileHeader| {
        let Ident { magic, class, data, .. } = header.e_ident;
        (magic, class, data) == (ELFMAG, ELFCLASS64, ELFDATA2LSB)
    };
    Ok(header.filter(is_of_64_bits))
}

/// A part of memory in a core file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CoreSegment {
    /// `PF_R`, `PF_W`, `PF_X`.
    pub flags: u32,
    /// Address of the program.
    pub address: u64,
    /// Physical address; zero for memory of a process.
    pub physical: u64,
    /// Bytes in memory.
    pub bytes: u64,
    /// Bytes of them that the core file has: all or none.
    pub file_bytes: u64,
    /// What the addresses are multiples of; zero if nothing is said of that.
    pub alignment: u64,
}

/// The begin of a core file of a processor `machine` (`EM_…`): headers and notes. The bytes of the
/// segments follow in their order, without gaps, and begin at a page.
pub fn core_head(machine: u16, notes: &[u8], segments: &[CoreSegment]) -> Vec<u8> {
    let count = segments.len() + 1;
    // With more program headers, a section header has their number.
    let has_section = count >= usize::from(PN_XNUM);
    let notes_at = size_of::<FileHeader>() + count * size_of::<ProgramHeader>();
    let section_at = notes_at + notes.len();
    let end = section_at + if has_section { size_of::<SectionHeader>() } else { 0 };
    let memory_at = Address::new(end as u64).page_aligned_up().get();

    let mut head = Vec::with_capacity(memory_at as usize);
    let section_at = if has_section { section_at as u64 } else { 0 };
    head.extend_from_slice(pod::bytes_of(&file_header(machine, count, section_at)));
    let notes_header = CoreSegment { file_bytes: notes.len() as u64, alignment: 4, ..CoreSegment::default() };
    head.extend_from_slice(pod::bytes_of(&program_header(PT_NOTE, &notes_header, notes_at as u64)));
    let mut offset = memory_at;
    for segment in segments {
        head.extend_from_slice(pod::bytes_of(&program_header(PT_LOAD, segment, offset)));
        offset += segment.file_bytes;
    }
    head.extend_from_slice(notes);
    if has_section {
        head.extend_from_slice(pod::bytes_of(&section_header(count as u32)));
    }
    head.resize(memory_at as usize, 0);
    head
}

fn file_header(machine: u16, headers: usize, section_at: u64) -> FileHeader {
    let size = |bytes: usize| U16::new(LittleEndian, bytes as u16);
    FileHeader {
        e_ident: Ident {
            magic: ELFMAG,
            class: ELFCLASS64,
            data: ELFDATA2LSB,
            version: EV_CURRENT,
            os_abi: ELFOSABI_NONE,
            abi_version: 0,
            padding: [0; 7],
        },
        e_type: U16::new(LittleEndian, ET_CORE),
        e_machine: U16::new(LittleEndian, machine),
        e_version: U32::new(LittleEndian, EV_CURRENT.into()),
        e_entry: U64::default(),
        e_phoff: U64::new(LittleEndian, size_of::<FileHeader>() as u64),
        e_shoff: U64::new(LittleEndian, section_at),
        e_flags: U32::default(),
        e_ehsize: size(size_of::<FileHeader>()),
        e_phentsize: size(size_of::<ProgramHeader>()),
        e_phnum: size(headers.min(PN_XNUM.into())),
        e_shentsize: size(if section_at > 0 { size_of::<SectionHeader>() } else { 0 }),
        e_shnum: size(usize::from(section_at > 0)),
        e_shstrndx: U16::default(),
    }
}

fn program_header(kind: u32, segment: &CoreSegment, offset: u64) -> ProgramHeader {
    let CoreSegment { flags, address, physical, bytes, file_bytes, alignment } = *segment;
    ProgramHeader {
        p_type: U32::new(LittleEndian, kind),
        p_flags: U32::new(LittleEndian, flags),
        p_offset: U64::new(LittleEndian, offset),
        p_vaddr: U64::new(LittleEndian, address),
        p_paddr: U64::new(LittleEndian, physical),
        p_filesz: U64::new(LittleEndian, file_bytes),
        p_memsz: U64::new(LittleEndian, bytes),
        p_align: U64::new(LittleEndian, alignment),
    }
}

fn section_header(program_headers: u32) -> SectionHeader {
    SectionHeader {
        sh_name: U32::default(),
        sh_type: U32::default(),
        sh_flags: U64::default(),
        sh_addr: U64::default(),
        sh_offset: U64::default(),
        sh_size: U64::default(),
        sh_link: U32::default(),
        sh_info: U32::new(LittleEndian, program_headers),
        sh_addralign: U64::default(),
        sh_entsize: U64::default(),
    }
}

/// Adds a note. `kind` is one of the numbers that `owner` has assigned.
pub fn add_note(notes: &mut Vec<u8>, owner: &str, kind: u32, content: &[u8]) {
    let header = NoteHeader {
        n_namesz: U32::new(LittleEndian, owner.len() as u32 + 1),
        n_descsz: U32::new(LittleEndian, content.len() as u32),
        n_type: U32::new(LittleEndian, kind),
    };
    notes.extend_from_slice(pod::bytes_of(&header));
    // The name ends with a zero byte, and both begin at a multiple of four.
    notes.extend_from_slice(owner.as_bytes());
    notes.push(0);
    notes.resize(notes.len().next_multiple_of(4), 0);
    notes.extend_from_slice(content);
    notes.resize(notes.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_and_programs_are_told_apart() {
        let open = |path: &str| File::open(path).unwrap();
        let own = std::env::current_exe().unwrap();
        assert!(is_library(&File::open(&own).unwrap()).unwrap(), "a program that can lie anywhere is one");
        assert!(!is_static(&File::open(own).unwrap()).unwrap());
        assert!(!is_library(&open("/dev/null")).unwrap());
        assert!(!is_library(&open("/proc/self/maps")).unwrap());
    }

    #[test]
    fn the_head_of_a_core_file_names_notes_and_memory() {
        let mut notes = Vec::new();
        add_note(&mut notes, "CORE", 1, &[7; 5]);
        assert_eq!(notes, [&[5, 0, 0, 0, 5, 0, 0, 0, 1, 0, 0, 0][..], b"CORE\0\0\0\0", &[7; 5], &[0; 3]].concat());
        let segment = CoreSegment { address: 0x1000, bytes: 0x2000, file_bytes: 0x2000, ..Default::default() };
        let head = core_head(EM_X86_64, &notes, &[segment, segment]);
        assert_eq!(head.len(), 4096);
        let word = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().unwrap());
        assert_eq!((head[16], head[18], head[56], word(40)), (4, 62, 3, 0));
        let (notes_at, first, second) = (word(64 + 8) as usize, word(120 + 8), word(176 + 8));
        assert_eq!(head[notes_at..notes_at + notes.len()], notes);
        assert_eq!((first, second), (4096, 4096 + 0x2000));
    }

    #[test]
    fn more_segments_than_the_file_header_can_count_are_counted_in_a_section_header() {
        for (segments, has_section) in [(65_533, false), (65_534, true), (70_000, true)] {
            let head = core_head(EM_X86_64, &[1, 2, 3, 4], &vec![CoreSegment::default(); segments]);
            let half = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
            let section_at = u64::from_le_bytes(head[40..48].try_into().unwrap()) as usize;
            assert_eq!((section_at > 0, half(60)), (has_section, u16::from(has_section)));
            if has_section {
                assert_eq!((half(56), half(58)), (0xffff, 64));
                assert_eq!(head[section_at + 44..section_at + 48], (segments as u32 + 1).to_le_bytes());
            } else {
                assert_eq!(usize::from(half(56)), segments + 1);
            }
        }
    }
}
