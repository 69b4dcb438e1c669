//! `/proc/PID/pagemap`: which pages are there, and by the PAGEMAP_SCAN ioctl (Linux 6.7) which were written.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::{PAGE_SIZE, Range};

const PAGEMAP_SCAN: libc::c_ulong = 0xc060_6610;
const PM_SCAN_WP_MATCHING: u64 = 1 << 0;
const PM_SCAN_LDT_RESTART: u64 = 1 << 16;

/// The mapping is registered for asynchronous write-protection.
pub const WP_ALLOWED: u64 = 1 << 0;
/// Written since it was protected, or never protected.
pub const WRITTEN: u64 = 1 << 1;
/// Belongs to a file or to shared memory: in a private mapping, not modified.
pub const FILE: u64 = 1 << 2;
/// In memory.
pub const PRESENT: u64 = 1 << 3;
/// In swap, or another entry that is neither empty nor in memory.
pub const SWAPPED: u64 = 1 << 4;
/// The page of zeros, which is mapped where memory is read before it was written.
pub const ZERO: u64 = 1 << 5;

/// Written since dirty tracking was restarted, or never restarted. Only a kernel with the patches of `kernel/ldt` knows it.
pub const LDT_DIRTY: u64 = 1 << 16;

/// Regions taken from the kernel at once.
const REGIONS: usize = 2048;

/// Pages whose entries are read at once.
const ENTRIES: usize = 8192;

/// An entry of pagemap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry(u64);

impl Entry {
    /// In memory or in swap.
    pub fn is_populated(self) -> bool {
        self.0 & (1 << 63 | 1 << 62) != 0
    }

    /// In swap, or moved from one page to another at this moment.
    pub fn is_swapped(self) -> bool {
        self.0 & 1 << 62 != 0
    }

    /// Belongs to a file or to shared memory.
    pub fn is_file(self) -> bool {
        self.0 & 1 << 61 != 0
    }

    /// Written since `clear_refs`, where the kernel has soft-dirty bits.
    pub fn is_soft_dirty(self) -> bool {
        self.0 & 1 << 55 != 0
    }
}

/// Which pages a scan reports. The masks combine the categories of this module.
#[derive(Clone, Copy, Debug, Default)]
pub struct Filter {
    /// All of these.
    pub all: u64,
    /// None of these.
    pub none: u64,
    /// At least one of these, unless it is 0.
    pub any: u64,
    /// What to say of a reported page; a region ends where this changes.
    pub report: u64,
    /// Protect the written ones among them in the same step. Mappings that are not registered are skipped.
    pub protect: bool,
    /// Restart dirty tracking of those among them that were written, in the same step. Only for kernels that know
    /// [`LDT_DIRTY`].
    pub restart: bool,
}

#[repr(C)]
#[derive(Default)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vector: u64,
    vector_length: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// The open pagemap of one address space. It stays with that address space: once the process has exited or executed
/// another program, it is empty.
#[derive(Debug)]
pub struct Pagemap {
    file: File,
}

impl Pagemap {
    /// That of this process.
    ///
    /// # Errors
    /// `/proc` is not mounted.
    pub fn of_this_process() -> io::Result<Self> {
        Self::open(Path::new("/proc/self/pagemap"))
    }

    /// Opens `/proc/PID/pagemap`.
    ///
    /// # Errors
    /// There is no such process, or its memory is not ours to see.
    pub fn open(path: &Path) -> io::Result<Self> {
        Ok(Pagemap { file: File::open(path)? })
    }

    /// False once the process has exited or executed another program. (A scan then finds nothing, without an error.)
    ///
    /// # Errors
    /// The file can't be read.
    pub fn is_alive(&self) -> io::Result<bool> {
        Ok(self.file.read_at(&mut [0; 8], 0)? != 0)
    }

    /// Calls `each` for the runs of pages in `range` that the filter lets through, with the categories asked for, in
    /// ascending order. A filter without `protect` and `restart` changes nothing. No page table is allocated.
    ///
    /// # Errors
    /// `ENOTTY`: the kernel is older than 6.7. `EINVAL`: the range is not made of pages.
    pub fn scan(&self, range: &Range, filter: Filter, mut each: impl FnMut(Range, u64)) -> io::Result<()> {
        let mut regions = [const { MaybeUninit::<Region>::uninit() }; REGIONS];
        let mut start = range.start;
        while start < range.end {
            let mut argument = ScanArgument {
                size: size_of::<ScanArgument>() as u64,
                flags: if filter.protect { PM_SCAN_WP_MATCHING } else { 0 }
                    | if filter.restart { PM_SCAN_LDT_RESTART } else { 0 },
                start,
                end: range.end,
                vector: regions.as_mut_ptr() as u64,
                vector_length: REGIONS as u64,
                category_inverted: filter.none,
                category_mask: filter.all | filter.none,
                category_anyof_mask: filter.any,
                return_mask: filter.report,
                ..ScanArgument::default()
            };
            // SAFETY: the argument is the structure that this request takes, and its vector points to REGIONS regions
            // that live through the call.
            let found = unsafe { libc::ioctl(self.file.as_raw_fd(), PAGEMAP_SCAN, std::ptr::from_mut(&mut argument)) };
            let error = io::Error::last_os_error();
            match usize::try_from(found) {
                Ok(found) => {
                    regions.iter().take(found).for_each(|region| {
                        // SAFETY: the kernel has filled in as many as it returned.
                        let region = unsafe { region.assume_init() };
                        each(region.start..region.end, region.categories);
                        start = region.end;
                    });
                    // Then all was walked. `walk_end` may say less: the kernel leaves it where its own buffer of 512
                    // regions was full last.
                    if found < REGIONS {
                        return Ok(());
                    }
                }
                Err(_) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Err(error),
            }
            // Only after an interrupted call can it be that nothing was walked.
            start = argument.walk_end.max(start);
        }
        Ok(())
    }

    /// Calls `each` for every page of `range` with its entry, in ascending order.
    ///
    /// # Errors
    /// The file can't be read; `UnexpectedEof`: the process has exited or executed another program.
    pub fn entries(&self, range: &Range, mut each: impl FnMut(u64, Entry)) -> io::Result<()> {
        let mut page = range.start / PAGE_SIZE as u64;
        let end = range.end.div_ceil(PAGE_SIZE as u64);
        let mut buffer = vec![0; (end.saturating_sub(page) as usize).min(ENTRIES) * 8];
        while page < end {
            let wanted = ((end - page) as usize).min(ENTRIES) * 8;
            self.file.read_exact_at(&mut buffer[..wanted], page * 8)?;
            let (entries, _) = buffer[..wanted].as_chunks::<8>();
            for entry in entries {
                each(page * PAGE_SIZE as u64, Entry(u64::from_ne_bytes(*entry)));
                page += 1;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::own_memory::{self, Mapping};

    #[test]
    fn each_run_is_reported_once_however_many_there_are() {
        // More than the kernel's buffer holds, then more than ours.
        for runs in [500, 513, 1500, REGIONS, 2 * REGIONS + 100] {
            let mapping = Mapping::new(2 * runs * PAGE_SIZE).unwrap();
            let start = mapping.range().start;
            let page = |index: usize| start + (index * PAGE_SIZE) as u64;
            for index in 0..2 * runs {
                // SAFETY: the page is ours, and nobody else uses it.
                unsafe { mapping.start().as_ptr().add(index * PAGE_SIZE).write_volatile(1) };
            }
            for index in (1..2 * runs).step_by(2) {
                // SAFETY: nobody needs the page's content.
                unsafe { own_memory::free(&(page(index)..page(index + 1)), false).unwrap() };
            }
            let mut found = Vec::new();
            let filter = Filter { any: PRESENT | SWAPPED, ..Filter::default() };
            Pagemap::of_this_process().unwrap().scan(&mapping.range(), filter, |run, _| found.push(run)).unwrap();
            let expected: Vec<_> = (0..2 * runs).step_by(2).map(|index| page(index)..page(index + 1)).collect();
            assert!(found == expected, "{runs} runs, {} reported", found.len());
        }
    }
}
