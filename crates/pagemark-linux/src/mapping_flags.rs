//! The flags of mappings, which `/proc/PID/smaps` shows as `VmFlags`, without the walk of the page
//! tables that this file costs.
//!
//! A BPF program of type `iter/task_vma` writes the addresses and the flags of each mapping of a
//! process. Where the kernel keeps them is taken from its BTF. The name of each bit is compared
//! with what `smaps` shows for mappings of this process that have it: a bit that no such mapping
//! has is unknown, and a process with such a mapping cannot be listed here.

use std::io::{self, Read};
use std::sync::OnceLock;

use super::at_fork::made_once;
use super::bpf::{Instruction, Iterator, Register};
use super::btf::Btf;
use super::interface::{Interface, kernel_version};
use super::proc::smaps::{self, NamedFlags};
use super::proc::{self, Mapping};
use crate::{Address, Range};

mod samples;

use samples::Samples;

/// The list of mappings by BPF.
pub static LIST: Interface = Interface::new(
    "BPF iterator task_vma",
    "6.1",
    "a checkpoint freezes a process some 20 ms longer for each GiB that it holds; the list needs CAP_BPF, CAP_PERFMON \
     and a kernel with BTF",
    || loaded().map(drop),
);

/// Name of the mapping that the kernel adds to every process.
const VSYSCALL: &[u8] = b"[vsyscall]";

/// Names of the bits, as `smaps` writes them: nothing for an empty name. Of bits whose meaning
/// differs between kernels, one of the meanings.
const NAMES: [(u32, &str); 42] = [
    (0, "rd"),
    (1, "wr"),
    (2, "ex"),
    (3, "sh"),
    (4, "mr"),
    (5, "mw"),
    (6, "me"),
    (7, "ms"),
    (8, "gd"),
    (9, "um"),
    (10, "pf"),
    (12, "uw"),
    (13, "lo"),
    (14, "io"),
    (15, "sr"),
    (16, "rr"),
    (17, "dc"),
    (18, "de"),
    (19, "lf"),
    (20, "ac"),
    (21, "nr"),
    (22, "ht"),
    (23, "sf"),
    (24, "ar"),
    (25, "wf"),
    (26, "dd"),
    (27, "sd"),
    (28, "mm"),
    (29, "hg"),
    (30, "nh"),
    (31, "mg"),
    (32, ""),
    (33, ""),
    (34, ""),
    (35, ""),
    (36, ""),
    (37, "ss"),
    (38, "ui"),
    (40, "dp"),
    (41, "ui"),
    (42, "sl"),
    (63, "sl"),
];

/// The first version of Linux that lists the mappings of one process.
const FIRST_VERSION: (u32, u32) = (6, 1);

/// Bytes that the program writes for a mapping: begin, end and flags.
const RECORD_BYTES: usize = 24;

/// Bytes of a read: as many as the kernel collects at once, or more.
const READ_BYTES: usize = 64 << 10;

/// Places in the program's stack for a record.
const RECORD: i16 = -(RECORD_BYTES as i16);

/// A mapping and the bits of its flags.
#[derive(Clone, PartialEq, Eq, Debug)]
struct FlaggedMapping {
    range: Range,
    bits: u64,
}

impl From<&[u8; RECORD_BYTES]> for FlaggedMapping {
    fn from(record: &[u8; RECORD_BYTES]) -> FlaggedMapping {
        let word = |at: usize| record[at..].first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes));
        FlaggedMapping { range: Address::new(word(0))..Address::new(word(8)), bits: word(16) }
    }
}

/// The list of mappings.
#[derive(Debug)]
pub(super) struct MappingFlags {
    program: Iterator,
    /// The bits whose names are known.
    known_bits: u64,
    /// The mapping that the kernel adds to every process is not in the list.
    vsyscall: Option<NamedFlags>,
}

/// The list, loaded and compared with `smaps` once in the life of this process.
///
/// # Errors
/// The kernel cannot list mappings, or it is not permitted.
pub(super) fn loaded() -> io::Result<&'static MappingFlags> {
    static LOADED: OnceLock<Result<MappingFlags, i32>> = OnceLock::new();
    let load = || MappingFlags::load().map_err(|error| error.raw_os_error().unwrap_or(libc::EOPNOTSUPP));
    made_once(&LOADED, load).as_ref().map_err(|&number| io::Error::from_raw_os_error(number))
}

impl MappingFlags {
    fn load() -> io::Result<MappingFlags> {
        // Before, the kernel would list the mappings of all processes, and no error would say so.
        if kernel_version()? < FIRST_VERSION {
            return Err(io::Error::from_raw_os_error(libc::ENOSYS));
        }
        let program = load_program(&Btf::of_kernel()?)?;
        let samples = Samples::make()?;
        let shown = smaps::own_flags()?;
        let mut flags = MappingFlags { program, known_bits: 0, vsyscall: None };
        let listed = flags.list(nix::unistd::gettid().as_raw())?;
        for mapping in &shown {
            if let Some(found) = listed.iter().find(|found| found.range == mapping.range)
                && names(found.bits).is_some_and(|names| names == mapping.names)
            {
                flags.known_bits |= found.bits;
            }
        }
        drop(samples);
        flags.vsyscall = shown.into_iter().find(|mapping| mapping.name == VSYSCALL);
        // Read, write, execute, and that the protection may be changed.
        if flags.known_bits & 0b0111_0111 == 0b0111_0111 { Ok(flags) } else { Err(io::ErrorKind::InvalidData.into()) }
    }

    fn list(&self, thread: i32) -> io::Result<Vec<FlaggedMapping>> {
        let mut records = self.program.of_thread(thread)?;
        let mut listed: Vec<FlaggedMapping> = Vec::new();
        let mut buffer = vec![0; READ_BYTES];
        loop {
            let bytes = records.read(&mut buffer)?;
            let (found, _) = buffer[..bytes].as_chunks::<RECORD_BYTES>();
            if found.is_empty() {
                return Ok(listed);
            }
            for record in found {
                let record = FlaggedMapping::from(record);
                // At the end some kernels (6.18) list the last mapping again and again.
                if listed.last().is_some_and(|last| record.range.start < last.range.end) {
                    return Ok(listed);
                }
                listed.push(record);
            }
        }
    }

    /// What `/proc/PID/smaps` has of the mappings of a process that does not change them meanwhile:
    /// their lines in `/proc/PID/maps`, each followed by its flags.
    ///
    /// # Errors
    /// `Unsupported`: a mapping has a flag whose name is not known. `InvalidData`: the mappings
    /// have changed, or are not in the list. Others: there is no such process.
    pub(super) fn text(&self, pid: i32) -> io::Result<Vec<u8>> {
        let maps = proc::read(pid, "maps")?;
        let mut listed = self.list(pid)?.into_iter();
        let mut text = Vec::with_capacity(maps.len() * 2);
        for line in maps.split_inclusive(|&byte| byte == b'\n') {
            let mapping = Mapping::parse(line.trim_ascii_end()).ok_or(io::ErrorKind::InvalidData)?;
            let names = match &self.vsyscall {
                Some(vsyscall) if mapping.name == VSYSCALL && vsyscall.range == mapping.range() => {
                    vsyscall.names.clone()
                }
                _ => {
                    let found = listed.next().filter(|found| found.range == mapping.range());
                    let found = found.ok_or(io::ErrorKind::InvalidData)?;
                    let is_known = found.bits & !self.known_bits == 0;
                    names(found.bits).filter(|_| is_known).ok_or(io::ErrorKind::Unsupported)?
                }
            };
            text.extend_from_slice(line);
            text.extend_from_slice(smaps::FLAGS);
            text.extend_from_slice(&names);
            text.push(b'\n');
        }
        if listed.next().is_some() || text.is_empty() { Err(io::ErrorKind::InvalidData.into()) } else { Ok(text) }
    }
}

/// The names of flags, as in `smaps`. None if a bit has no name.
fn names(bits: u64) -> Option<Vec<u8>> {
    let mut names = Vec::new();
    let mut left = bits;
    for (bit, name) in NAMES {
        if left >> bit & 1 == 1 {
            left &= !(1 << bit);
            if !name.is_empty() {
                names.push(b' ');
                names.extend_from_slice(name.as_bytes());
            }
        }
    }
    names.push(b' ');
    (left == 0).then_some(names)
}

/// The program that writes a record for each mapping.
fn load_program(btf: &Btf) -> io::Result<Iterator> {
    use Register::{R0, R1, R2, R3, R6, R7, R10};
    let lacks = || io::Error::from_raw_os_error(libc::ENOSYS);
    let field = |structure, name| {
        let offset = btf.field_offset(structure, name).and_then(|offset| i16::try_from(offset).ok());
        offset.ok_or_else(lacks)
    };
    let mapping = |name| field("vm_area_struct", name);
    let context = "bpf_iter__task_vma";
    let instructions = [
        Instruction::copy(R6, R1),
        Instruction::load(R7, R6, field(context, "vma")?),
        // After the last mapping there is none.
        Instruction::skip_if_zero(R7, 12),
        Instruction::load(R1, R7, mapping("vm_start")?),
        Instruction::store(R10, RECORD, R1),
        Instruction::load(R1, R7, mapping("vm_end")?),
        Instruction::store(R10, RECORD + 8, R1),
        Instruction::load(R1, R7, mapping("vm_flags")?),
        Instruction::store(R10, RECORD + 16, R1),
        Instruction::load(R1, R6, field(context, "meta")?),
        Instruction::load(R1, R1, field("bpf_iter_meta", "seq")?),
        Instruction::copy(R2, R10),
        Instruction::add(R2, RECORD.into()),
        Instruction::set(R3, RECORD_BYTES as i32),
        Instruction::call_seq_write(),
        Instruction::set(R0, 0),
        Instruction::exit(),
    ];
    let list = btf.function("bpf_iter_task_vma").ok_or_else(lacks)?;
    Iterator::load(&instructions, list, "pagemark_vma")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_has_a_name_of_its_own_place() {
        assert!(NAMES.is_sorted_by(|a, b| a.0 < b.0));
        assert_eq!(names(0b11).unwrap(), b" rd wr ");
        assert_eq!(names(1 | 1 << 33).unwrap(), b" rd ");
        assert_eq!(names(1 << 11), None);
        assert_eq!(names(0).unwrap(), b" ");
    }
}
