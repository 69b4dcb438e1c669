//! `/proc/PID/pagemap`: which pages of an address space are populated, and which were written.
//!
//! [`Pagemap::scan`] is the PAGEMAP_SCAN ioctl of Linux 6.7, which alone knows what was written.
//! [`Pagemap::find`] needs no more than what every kernel says of a page. Where the kernel has no
//! PAGEMAP_SCAN, it reads an entry for each page.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use super::proc;
use crate::Range;

mod entries;
mod scan;

pub use entries::Entry;
pub use scan::SCAN;

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
/// The zero page, which the kernel maps where memory is read before it was written.
pub const ZERO: u64 = 1 << 5;
/// Written since `clear_refs`, where the kernel has soft-dirty bits.
pub const SOFT_DIRTY: u64 = 1 << 7;

/// Written since dirty tracking was restarted, or never restarted. Only kernels with the patches of
/// `kernel/ldt` have it.
pub const LDT_DIRTY: u64 = 1 << 9;

/// Perhaps the zero page: the kernel does not say, because it has no PAGEMAP_SCAN and hides page
/// frames from this process, which lacks CAP_SYS_ADMIN. No category of the kernel.
pub const MAYBE_ZERO: u64 = 1 << 63;

/// Which pages a scan reports. The masks combine the categories of this module.
#[derive(Clone, Copy, Debug, Default)]
pub struct Filter {
    /// A page must have all of these.
    pub all: u64,
    /// A page must have none of these.
    pub none: u64,
    /// A page must have at least one of these, unless the mask is 0.
    pub any: u64,
    /// The categories that are reported. A run of pages ends where these change.
    pub report: u64,
    /// Protect the written pages among them in the same step. Mappings that are not registered are
    /// skipped.
    pub protect: bool,
    /// Fail with `EPERM` at a mapping that is not registered for asynchronous write-protection.
    pub registered_only: bool,
    /// Restart dirty tracking of the written pages among them in the same step. Only for kernels
    /// that have [`LDT_DIRTY`].
    pub restart: bool,
}

/// The open pagemap of one address space. It stays with that address space, and is empty once the
/// process has exited or executed another program.
#[derive(Debug)]
pub struct Pagemap {
    file: File,
    /// How often a restart has failed with `ENOMEM` or `ESTALE`.
    losses: AtomicU64,
}

impl Pagemap {
    /// The pagemap of this process.
    ///
    /// # Errors
    /// `/proc` is not mounted.
    pub fn of_this_process() -> io::Result<Self> {
        Self::open(&proc::own_path("pagemap"))
    }

    /// Opens the pagemap of a process, by its id or that of any of its threads.
    ///
    /// # Errors
    /// There is no such process, or tracing it is not permitted.
    pub fn of_process(pid: i32) -> io::Result<Self> {
        Self::open(&proc::path(pid, "pagemap"))
    }

    /// Opens `/proc/PID/pagemap`.
    ///
    /// # Errors
    /// There is no such process, or tracing it is not permitted.
    pub fn open(path: &Path) -> io::Result<Self> {
        Ok(Pagemap { file: File::open(path)?, losses: AtomicU64::new(0) })
    }

    /// How often a scan that restarts dirty tracking has found that what was written is lost: the
    /// kernel had no memory to note it, or another tracker has collected it, which has a file of
    /// its own. The kernel says so to one scan, but what is lost may be anywhere in the address
    /// space.
    pub fn losses(&self) -> u64 {
        self.losses.load(Ordering::Acquire)
    }

    /// False once the process has exited or executed another program. (A scan then finds nothing,
    /// without an error.)
    ///
    /// # Errors
    /// The file can't be read.
    pub fn is_alive(&self) -> io::Result<bool> {
        Ok(self.file.read_at(&mut [0; 8], 0)? != 0)
    }

    /// Calls `each` for the runs of pages in `range` that pass the filter, with the reported
    /// categories, in ascending order. Of the categories, the filter may have those that every
    /// kernel knows: [`FILE`], [`PRESENT`], [`SWAPPED`], and among the reported ones [`ZERO`],
    /// [`MAYBE_ZERO`] and [`SOFT_DIRTY`]. Nothing changes, and no page table is allocated.
    ///
    /// Without PAGEMAP_SCAN, the time follows the length of the range and not what is populated
    /// there, and a huge page of a file may lack the category [`FILE`] before Linux 6.11.
    ///
    /// # Errors
    /// `EINVAL`: the range is not made of pages, or the filter has other categories.
    /// `UnexpectedEof`: the process has exited or executed another program (not reported by
    /// PAGEMAP_SCAN).
    pub fn find(&self, range: &Range, filter: Filter, each: impl FnMut(Range, u64)) -> io::Result<()> {
        let matched = FILE | PRESENT | SWAPPED;
        let is_known = (filter.all | filter.none | filter.any) & !matched == 0
            && filter.report & !(matched | ZERO | MAYBE_ZERO | SOFT_DIRTY) == 0
            && !filter.protect
            && !filter.registered_only
            && !filter.restart;
        if !is_known {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        if SCAN.is_there() {
            self.scan(range, Filter { report: filter.report & !MAYBE_ZERO, ..filter }, each)
        } else {
            self.find_in_entries(range, filter, each)
        }
    }
}
