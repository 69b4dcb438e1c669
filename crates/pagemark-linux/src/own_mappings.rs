//! The mappings of this process within a range, by the `PROCMAP_QUERY` ioctl (Linux 6.11), whose
//! cost follows the mappings in the range. On an older kernel `/proc/self/maps` is read, whose cost
//! follows all mappings of the process.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::os::fd::AsRawFd;

use super::interface::Interface;
use super::own_memory::Mapping;
use super::proc::{self, maps};
use crate::{Address, ByteCount, PAGE_SIZE, Range};

/// `PROCMAP_QUERY`.
pub static QUERY: Interface = Interface::new(
    "PROCMAP_QUERY",
    "6.11",
    "the list of all mappings is read at each commit, rollback and snapshot of a region under mprotect, emulate or uffd",
    || {
        let page = Mapping::new(PAGE_SIZE)?;
        OwnMappings::open()?.query(&page.range()).map(drop)
    },
);

const PROCMAP_QUERY: libc::Ioctl = 0xc068_6611_u32 as libc::Ioctl;
/// The mapping of the address, or the next one.
const COVERING_OR_NEXT: u64 = 1 << 4;
const FLAG_READABLE: u64 = 1 << 0;
const FLAG_WRITABLE: u64 = 1 << 1;
const FLAG_EXECUTABLE: u64 = 1 << 2;
const FLAG_SHARED: u64 = 1 << 3;

/// `struct procmap_query`.
#[repr(C)]
#[derive(Default)]
struct Query {
    size: u64,
    flags: u64,
    address: u64,
    start: u64,
    end: u64,
    mapping_flags: u64,
    page_bytes: u64,
    offset: u64,
    inode: u64,
    device: [u32; 2],
    name_bytes: u32,
    build_id_bytes: u32,
    name: u64,
    build_id: u64,
}

/// A mapping of this process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OwnMapping {
    /// All of its addresses.
    pub range: Range,
    /// May be read.
    pub is_readable: bool,
    /// May be written.
    pub is_writable: bool,
    /// May be executed.
    pub is_executable: bool,
    /// Shared, not private.
    pub is_shared: bool,
    /// Device and inode of the file; `None` for private anonymous memory.
    pub file: Option<([u32; 2], u64)>,
    /// Size of the pages of the mapping: larger than [`PAGE_SIZE`] for hugetlb pages only.
    pub page_bytes: ByteCount,
}

impl OwnMapping {
    /// True if the mapping may be read and written, and not executed.
    pub fn is_data(&self) -> bool {
        self.is_readable && self.is_writable && !self.is_executable
    }

    /// True for private memory without a file: a page that the page table does not have holds
    /// zeros.
    pub fn is_private_anonymous(&self) -> bool {
        !self.is_shared && self.file.is_none()
    }
}

/// Lists mappings of the process that opened it.
#[derive(Debug)]
pub struct OwnMappings {
    file: File,
}

impl OwnMappings {
    /// Opens the list of this process's mappings.
    ///
    /// # Errors
    /// `/proc` is not mounted.
    pub fn open() -> io::Result<OwnMappings> {
        Ok(OwnMappings { file: File::open(proc::own_path("maps"))? })
    }

    /// The mappings that overlap `range`, in ascending order. On a kernel before 6.11, the page
    /// size of each is stated as [`PAGE_SIZE`]; [`describe`] finds it out.
    ///
    /// # Errors
    /// `/proc` is not mounted.
    pub fn within(&self, range: &Range) -> io::Result<Vec<OwnMapping>> {
        if QUERY.is_there() { self.query(range) } else { read_within(range) }
    }

    fn query(&self, range: &Range) -> io::Result<Vec<OwnMapping>> {
        let mut mappings = Vec::new();
        let mut address = range.start;
        while address < range.end {
            let mut query = Query {
                size: size_of::<Query>() as u64,
                flags: COVERING_OR_NEXT,
                address: address.get(),
                ..Query::default()
            };
            // SAFETY: the argument is the structure that this request takes, of the size that it
            // states, and it names no buffers.
            let result = unsafe { libc::ioctl(self.file.as_raw_fd(), PROCMAP_QUERY, &raw mut query) };
            if result < 0 {
                match io::Error::last_os_error() {
                    error if error.raw_os_error() == Some(libc::ENOENT) => break,
                    error if error.kind() == io::ErrorKind::Interrupted => continue,
                    error => return Err(error),
                }
            }
            if query.start >= range.end.get() {
                break;
            }
            let has = |flag| query.mapping_flags & flag != 0;
            mappings.push(OwnMapping {
                range: Address::new(query.start)..Address::new(query.end),
                is_readable: has(FLAG_READABLE),
                is_writable: has(FLAG_WRITABLE),
                is_executable: has(FLAG_EXECUTABLE),
                is_shared: has(FLAG_SHARED),
                file: (query.inode != 0).then_some((query.device, query.inode)),
                page_bytes: ByteCount::new(query.page_bytes),
            });
            address = Address::new(query.end);
        }
        Ok(mappings)
    }
}

/// The mappings that overlap `range`, in ascending order, with the size of their pages.
///
/// # Errors
/// `/proc` is not mounted.
pub fn describe(range: &Range) -> io::Result<Vec<OwnMapping>> {
    if QUERY.is_there() { OwnMappings::open()?.query(range) } else { read_with_page_sizes(range) }
}

/// Like [`OwnMappings::within`], from `/proc/self/maps`.
fn read_within(range: &Range) -> io::Result<Vec<OwnMapping>> {
    let all = maps::of_this_process()?;
    let within = all.into_iter().filter(|mapping| mapping.start < range.end && range.start < mapping.end);
    let described = within.map(|mapping| OwnMapping {
        range: mapping.range(),
        is_readable: mapping.readable,
        is_writable: mapping.writable,
        is_executable: mapping.executable,
        is_shared: mapping.shared,
        file: (mapping.inode != 0).then_some(([mapping.device.0, mapping.device.1], mapping.inode)),
        page_bytes: ByteCount::PAGE,
    });
    Ok(described.collect())
}

/// Like [`describe`], from `/proc/self/maps` and `/proc/self/smaps`.
fn read_with_page_sizes(range: &Range) -> io::Result<Vec<OwnMapping>> {
    let mut mappings = read_within(range)?;
    // Only mappings of files can have hugetlb pages, and only `smaps` states the size.
    if mappings.iter().all(|mapping| mapping.file.is_none()) {
        return Ok(mappings);
    }
    let mut current = None;
    for line in BufReader::new(File::open(proc::own_path("smaps"))?).split(b'\n') {
        let line = line?;
        if let Some(size) = line.strip_prefix(b"KernelPageSize:") {
            let kib = String::from_utf8_lossy(size).trim().trim_end_matches("kB").trim().parse::<u64>();
            let named = mappings.iter_mut().find(|mapping| Some(mapping.range.start) == current);
            if let (Some(mapping), Ok(kib)) = (named, kib) {
                mapping.page_bytes = ByteCount::new((kib << 10).max(PAGE_SIZE as u64));
            }
        } else if let Some(mapping) = maps::Mapping::parse(&line) {
            current = Some(mapping.start);
        }
    }
    Ok(mappings)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn the_query_and_the_file_agree() {
        let scratch = Scratch::new(14);
        // In memory: of a file on an overlay, the query and the file name different devices.
        // SAFETY: the call reads only the name, and returns a new descriptor or -1.
        let file = unsafe {
            let descriptor = libc::memfd_create(c"mappings-test".as_ptr(), libc::MFD_CLOEXEC);
            assert!(descriptor >= 0);
            <std::fs::File as std::os::fd::FromRawFd>::from_raw_fd(descriptor)
        };
        file.set_len(4 * PAGE_SIZE as u64).unwrap();
        // At both ends, so that the kernel joins the anonymous memory with none of other threads.
        scratch.map_file(0, 1, &file, false);
        scratch.map_file(13, 1, &file, false);
        scratch.map_file(3, 2, &file, false);
        scratch.map_file(5, 2, &file, true);
        scratch.protect(9, 1, libc::PROT_READ);
        scratch.take_out(11, 1);
        let whole = scratch.address(1)..scratch.address(13);
        for range in [whole.clone(), scratch.address(4)..scratch.address(10), scratch.address(12)..scratch.address(13)]
        {
            let read = read_with_page_sizes(&range).unwrap();
            assert_eq!(OwnMappings::open().unwrap().within(&range).unwrap(), read);
            match QUERY.refusal() {
                None => assert_eq!(OwnMappings::open().unwrap().query(&range).unwrap(), read),
                Some(error) => pagemark_testing::skipped(&format!("no PROCMAP_QUERY: {error}")),
            }
        }
        let described = describe(&whole).unwrap();
        assert!(described.iter().all(|mapping| mapping.page_bytes == ByteCount::PAGE));
        let shared: Vec<_> = described.iter().filter(|mapping| mapping.is_shared).collect();
        assert!(matches!(shared[..], [mapping] if mapping.range == (scratch.address(5)..scratch.address(7))));
        let private_anonymous = described.iter().filter(|mapping| mapping.is_private_anonymous());
        assert!(private_anonymous.count() >= 4, "{described:?}");
        assert_eq!(described.iter().filter(|mapping| mapping.file.is_some()).count(), 2);
    }

    #[test]
    fn a_range_without_mappings_has_none() {
        let scratch = Scratch::new(4);
        let range = scratch.range();
        drop(scratch);
        // Another thread may map something there.
        let described = describe(&range).unwrap();
        assert!(described.iter().all(|mapping| mapping.range.start < range.end && range.start < mapping.range.end));
    }
}
