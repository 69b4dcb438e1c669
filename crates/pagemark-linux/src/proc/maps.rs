//! `/proc/PID/maps`: the mappings of a process.

use std::fs;
use std::io::{self, Read};
use std::path::PathBuf;

use crate::{Address, Range, RangeSet};

/// The kind of a mapping, as far as tracking is concerned.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum MappingKind {
    /// Private memory without a file: heap, stacks and the rest.
    Anonymous,
    /// A private mapping of a file: pages that were modified belong to the process, the others are
    /// as in the file.
    PrivateFile,
    /// A shared mapping of a regular file.
    SharedFile,
    /// Shared memory without a file on disk: anonymous, System V, memfd, or a file in `/dev/shm`
    /// that is deleted.
    SharedMemory,
    /// A mapping that the kernel made (vdso, vvar, vsyscall, …), or of a device: no memory of the
    /// process.
    Special,
}

/// A mapping of a process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mapping {
    /// First address.
    pub start: Address,
    /// First address after the mapping.
    pub end: Address,
    /// May be read.
    pub readable: bool,
    /// May be written.
    pub writable: bool,
    /// May be executed.
    pub executable: bool,
    /// Shared, not private.
    pub shared: bool,
    /// Offset in the file, bytes.
    pub offset: u64,
    /// The file's device: major and minor number. 0 and 0 without a file.
    pub device: (u32, u32),
    /// The file's inode; 0 without a file.
    pub inode: u64,
    /// The file's path as the kernel writes it (newlines as `\012`, ` (deleted)` after the path of
    /// a deleted file), or a name in brackets, or nothing.
    pub name: Vec<u8>,
    /// Its kind.
    pub kind: MappingKind,
}

impl Mapping {
    /// Its addresses.
    pub fn range(&self) -> Range {
        self.start..self.end
    }

    /// `rwxp` and the like, as in `/proc/PID/maps`.
    pub fn permissions(&self) -> String {
        let flag = |set, letter| if set { letter } else { '-' };
        [
            flag(self.readable, 'r'),
            flag(self.writable, 'w'),
            flag(self.executable, 'x'),
            if self.shared { 's' } else { 'p' },
        ]
        .iter()
        .collect()
    }

    /// True for private memory, whose content belongs to a checkpoint. Also for memory that may not
    /// be written now: it may have been written before its protection was changed, or may be
    /// written after the next change.
    pub fn is_private(&self) -> bool {
        matches!(self.kind, MappingKind::Anonymous | MappingKind::PrivateFile)
    }

    /// True for a shared mapping of a file that may be written.
    pub fn writes_file(&self) -> bool {
        self.kind == MappingKind::SharedFile && self.writable
    }

    /// True for private memory without a file: heap, stacks, and memory of `mmap`. Unlike
    /// [`MappingKind::Anonymous`] it does not include private mappings of `/dev/zero`.
    pub fn is_private_anonymous(&self) -> bool {
        self.kind == MappingKind::Anonymous && self.inode == 0
    }

    /// True if the mapping may be read and written, and not executed.
    pub fn is_data(&self) -> bool {
        self.readable && self.writable && !self.executable
    }

    /// True if writes to it are tracked.
    pub fn is_tracked(&self) -> bool {
        self.is_private() || self.writes_file()
    }

    /// The addresses of the mappings of one kind.
    pub fn ranges<'a>(mappings: impl IntoIterator<Item = &'a Mapping>, kind: MappingKind) -> RangeSet {
        mappings.into_iter().filter(|mapping| mapping.kind == kind).map(Mapping::range).collect()
    }

    /// Parses a line of a `maps` file.
    pub fn parse(line: &[u8]) -> Option<Mapping> {
        let mut fields = line.splitn(6, |&byte| byte == b' ');
        let mut field = || std::str::from_utf8(fields.next()?).ok();
        let (start, end) = field()?.split_once('-')?;
        let permissions = field()?.as_bytes();
        let offset = u64::from_str_radix(field()?, 16).ok()?;
        let (major, minor) = field()?.split_once(':')?;
        let inode = field()?.parse().ok()?;
        let name = fields.next().unwrap_or_default().trim_ascii_start().to_vec();
        let [read, write, execute, share, ..] = *permissions else { return None };
        let device = (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?);
        let shared = share == b's';
        let address = |digits| u64::from_str_radix(digits, 16).ok().map(Address::new);
        let (start, end) = (address(start)?, address(end)?);
        if start >= end {
            return None;
        }
        Some(Mapping {
            start,
            end,
            readable: read == b'r',
            writable: write == b'w',
            executable: execute == b'x',
            shared,
            offset,
            device,
            inode,
            kind: kind(&name, shared, inode),
            name,
        })
    }
}

fn kind(name: &[u8], shared: bool, inode: u64) -> MappingKind {
    // The rings of asynchronous I/O and of packet sockets are buffers that the kernel made.
    let is_special = [
        &b"[vdso]"[..],
        b"[vvar]",
        b"[vvar_vclock]",
        b"[vsyscall]",
        b"[uprobes]",
        b"anon_inode:",
        b"/[aio]",
        b"socket:",
    ]
    .iter()
    .any(|special| name.starts_with(special));
    // A private mapping of /dev/zero is anonymous memory.
    let is_zero = name == b"/dev/zero";
    let is_memory = [&b"/dev/zero"[..], b"/memfd:", b"/SYSV", b"/dev/shm/", b"/anon_hugepage"]
        .iter()
        .any(|memory| name.starts_with(memory));
    let is_deleted = name.ends_with(b" (deleted)");
    match (shared, inode) {
        _ if is_special => MappingKind::Special,
        (true, _) if inode == 0 || name.starts_with(b"[") || is_memory && (is_deleted || is_zero) => {
            MappingKind::SharedMemory
        }
        _ if name.starts_with(b"/dev/") && !is_memory => MappingKind::Special,
        (true, _) => MappingKind::SharedFile,
        (false, 0) => MappingKind::Anonymous,
        (false, _) if is_zero => MappingKind::Anonymous,
        (false, _) => MappingKind::PrivateFile,
    }
}

/// Reads the mappings of a process, in ascending order. A process that is exiting has none.
///
/// # Errors
/// `NotFound`: there is no such process. `PermissionDenied`: tracing the process is not permitted.
/// `InvalidData`: the text is not as the kernel writes it.
pub fn read(pid: i32) -> io::Result<Vec<Mapping>> {
    let mut text = Vec::new();
    read_into(pid, &mut text)
}

/// Like [`read`], with a buffer for the text, so that repeated calls allocate it once.
///
/// # Errors
/// Those of [`read`].
pub fn read_into(pid: i32, text: &mut Vec<u8>) -> io::Result<Vec<Mapping>> {
    read_file(super::path(pid, "maps"), text)
}

/// Reads the mappings of this process, in ascending order.
///
/// # Errors
/// `/proc` is not mounted.
pub fn of_this_process() -> io::Result<Vec<Mapping>> {
    read_file(super::thread_path("maps"), &mut Vec::new())
}

fn read_file(path: PathBuf, text: &mut Vec<u8>) -> io::Result<Vec<Mapping>> {
    text.clear();
    fs::File::open(&path)?.read_to_end(text)?;
    parse(text).ok_or_else(|| super::garbled(path))
}

/// Parses the content of a `maps` file. None if any line is not as the kernel writes it.
pub fn parse(text: &[u8]) -> Option<Vec<Mapping>> {
    text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()).map(Mapping::parse).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_bytes_are_parsed_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes);
            let _ = parse(&[b"1-2 rw-p 0 00:00 0 ", &bytes[..]].concat());
        }

        #[test]
        fn a_line_is_parsed_as_it_was_written(
            start in any::<u32>(), length in 1_u32.., offset in any::<u64>(), inode in any::<u64>(), access in 0_u8..16,
            name in "[/\\[\u{80}-\u{10ffff}][^\n]{0,20}( \\(deleted\\))?",
        ) {
            let (start, end) = (Address::new(start.into()), Address::new(u64::from(start) + u64::from(length)));
            let bit = |number: u8, letter| if access & 1 << number != 0 { letter } else { '-' };
            let share = if access & 8 != 0 { 's' } else { 'p' };
            let permissions: String = [bit(0, 'r'), bit(1, 'w'), bit(2, 'x'), share].iter().collect();
            let line = format!("{start:08x}-{end:08x} {permissions} {offset:08x} fe:1a {inode} {name}\n");
            let mappings = parse(line.as_bytes()).unwrap();
            prop_assert_eq!(mappings.len(), 1);
            let mapping = &mappings[0];
            prop_assert_eq!((mapping.start, mapping.end, mapping.offset, mapping.inode), (start, end, offset, inode));
            prop_assert_eq!((mapping.permissions(), mapping.device), (permissions, (0xfe, 0x1a)));
            prop_assert_eq!(&mapping.name, name.as_bytes());
        }
    }

    #[test]
    fn lines_of_the_kernel_are_understood() {
        let text = b"\
55e0c0a00000-55e0c0a21000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000001000 r--p 00001000 fe:01 131                        /usr/lib/a b\\012c.so
7f0000002000-7f0000003000 rw-s 00000000 00:01 5                          /dev/zero (deleted)
7f0000003000-7f0000004000 rw-s 00000000 fe:01 132                        /var/db
7f0000004000-7f0000005000 rw-s 00000000 00:05 9                          /dev/nvidia0
7f0000005000-7f0000006000 rw-p 00000000 00:00 0 
7f0000006000-7f0000007000 rw-s 00000000 00:1c 77                         /dev/shm/file
7f0000008000-7f0000009000 rw-s 00000000 00:0e 78                         /[aio] (deleted)
7f000000a000-7f000000b000 rw-s 00000000 00:08 79                         socket:[79]
7ffd00000000-7ffd00002000 r-xp 00000000 00:00 0                          [vdso]
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
";
        use MappingKind::*;
        let mappings = parse(text).unwrap();
        let kinds: Vec<_> = mappings.iter().map(|mapping| mapping.kind).collect();
        assert_eq!(
            kinds,
            [
                Anonymous,
                PrivateFile,
                SharedMemory,
                SharedFile,
                Special,
                Anonymous,
                SharedFile,
                Special,
                Special,
                Special,
                Special
            ]
        );
        assert_eq!(mappings[1].name, b"/usr/lib/a b\\012c.so");
        assert_eq!((mappings[1].offset, mappings[1].device, mappings[1].inode), (0x1000, (0xfe, 1), 131));
        assert_eq!(mappings[0].permissions(), "rw-p");
        assert!(mappings[1].is_tracked() && mappings[3].is_tracked() && !mappings[2].is_tracked());
        assert!(mappings[0].is_data() && !mappings[1].is_data());
        let private_anonymous: Vec<_> = mappings.iter().map(Mapping::is_private_anonymous).collect();
        assert_eq!(private_anonymous, [true, false, false, false, false, true, false, false, false, false, false]);
        assert_eq!(parse(b"nonsense"), None);
        assert_eq!(parse(b"2-1 rw-p 0 0:0 0"), None);
        assert_eq!(parse(b"1-2 rw 0 0:0 0"), None);
    }

    #[test]
    fn own_mappings_hold_this_function() {
        let address = Address::of(own_mappings_hold_this_function as *const ());
        let mappings = of_this_process().unwrap();
        assert!(mappings.iter().any(|mapping| mapping.executable && mapping.range().contains(&address)));
        assert!(mappings.windows(2).all(|pair| pair[0].end <= pair[1].start));
    }
}
