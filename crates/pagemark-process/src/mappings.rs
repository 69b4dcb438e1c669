//! The mappings of a process, as `/proc/PID/maps` tells them.

use std::fs;
use std::io;

use pagemark::{Range, RangeSet};

/// What a mapping is, as far as tracking goes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum MappingKind {
    /// Private memory without a file: heap, stacks and the rest.
    Anonymous,
    /// A private mapping of a file: pages that were modified belong to the process, the others are as in the file.
    PrivateFile,
    /// A shared mapping of a regular file.
    SharedFile,
    /// Shared memory without a file on disk: anonymous, System V, memfd, or a file in `/dev/shm` that is deleted.
    SharedMemory,
    /// Made by the kernel (vdso, vvar, vsyscall, …), or a device: no memory of the process.
    Special,
}

/// One mapping.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mapping {
    /// First address.
    pub start: u64,
    /// First address behind it.
    pub end: u64,
    /// Can be read.
    pub readable: bool,
    /// Can be written.
    pub writable: bool,
    /// Can be executed.
    pub executable: bool,
    /// Shared, not private.
    pub shared: bool,
    /// Where in the file it begins, bytes.
    pub offset: u64,
    /// The file's device: major and minor number. 0 and 0 without a file.
    pub device: (u32, u32),
    /// The file's inode; 0 without a file.
    pub inode: u64,
    /// The file's path as the kernel writes it (newlines as `\012`, ` (deleted)` behind a file that is), or a name in
    /// brackets, or nothing.
    pub name: Vec<u8>,
    /// What it is.
    pub kind: MappingKind,
}

impl Mapping {
    /// Where it is.
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

    /// True for private memory, whose content belongs to a checkpoint. Also what can't be written now: it may have been
    /// written, or may yet be, before its protection was changed.
    pub fn is_private(&self) -> bool {
        matches!(self.kind, MappingKind::Anonymous | MappingKind::PrivateFile)
    }

    /// True for a shared mapping of a file through which the file can be written now.
    pub fn writes_file(&self) -> bool {
        self.kind == MappingKind::SharedFile && self.writable
    }

    /// True if writes to it are tracked.
    pub fn is_tracked(&self) -> bool {
        self.is_private() || self.writes_file()
    }

    /// The addresses of the mappings that are of this kind.
    pub fn ranges<'a>(mappings: impl IntoIterator<Item = &'a Mapping>, kind: MappingKind) -> RangeSet {
        mappings.into_iter().filter(|mapping| mapping.kind == kind).map(Mapping::range).collect()
    }

    fn parse(line: &[u8]) -> Option<Mapping> {
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
        Some(Mapping {
            start: u64::from_str_radix(start, 16).ok()?,
            end: u64::from_str_radix(end, 16).ok()?,
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
    let is_special = [&b"[vdso]"[..], b"[vvar]", b"[vvar_vclock]", b"[vsyscall]", b"[uprobes]", b"anon_inode:"]
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
/// `NotFound`: there is no such process. `PermissionDenied`: it is not ours to see. `InvalidData`: the kernel's text
/// is not understood.
pub fn read(pid: i32) -> io::Result<Vec<Mapping>> {
    let mut text = Vec::new();
    read_into(pid, &mut text)
}

/// As [`read`], with a buffer that is used again.
pub(crate) fn read_into(pid: i32, text: &mut Vec<u8>) -> io::Result<Vec<Mapping>> {
    text.clear();
    io::Read::read_to_end(&mut fs::File::open(format!("/proc/{pid}/maps"))?, text)?;
    parse(text).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("/proc/{pid}/maps is garbled")))
}

fn parse(text: &[u8]) -> Option<Vec<Mapping>> {
    text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()).map(Mapping::parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

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
7ffd00000000-7ffd00002000 r-xp 00000000 00:00 0                          [vdso]
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
";
        use MappingKind::*;
        let mappings = parse(text).unwrap();
        let kinds: Vec<_> = mappings.iter().map(|mapping| mapping.kind).collect();
        assert_eq!(
            kinds,
            [Anonymous, PrivateFile, SharedMemory, SharedFile, Special, Anonymous, SharedFile, Special, Special]
        );
        assert_eq!(mappings[1].name, b"/usr/lib/a b\\012c.so");
        assert_eq!((mappings[1].offset, mappings[1].device, mappings[1].inode), (0x1000, (0xfe, 1), 131));
        assert_eq!(mappings[0].permissions(), "rw-p");
        assert!(mappings[1].is_tracked() && mappings[3].is_tracked() && !mappings[2].is_tracked());
        assert_eq!(parse(b"nonsense"), None);
        assert_eq!(parse(b"1-2 rw 0 0:0 0"), None);
    }

    #[test]
    fn own_mappings_hold_this_function() {
        let address = own_mappings_hold_this_function as *const () as u64;
        let mappings = read(std::process::id() as i32).unwrap();
        assert!(mappings.iter().any(|mapping| mapping.executable && mapping.range().contains(&address)));
        assert!(mappings.windows(2).all(|pair| pair[0].end <= pair[1].start));
    }
}
