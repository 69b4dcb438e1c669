//! Gives CRIU the flags of mappings without a walk of the page tables.
//!
//! CRIU reads `/proc/PID/smaps` while the tree is frozen. It uses the flags of the mappings, but
//! the kernel also counts their pages, some 20 ms for each GiB. Where the kernel can list the flags
//! alone ([`mapping_flags::LIST`]), Pagemark answers the `openat` by which CRIU opens that file
//! with a file that has the same lines without the counts.
//!
//! Large mappings are [shortened](super::shortened) in it.
//!
//! The filter cannot see which file is opened, so every such `openat` is handed over. Each costs a
//! change to Pagemark and back, so this is done only for trees that hold or reserve much memory.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::time::Duration;

use nix::sys::memfd::{MFdFlags, memfd_create};
use pagemark::{AddressRangeExt, ByteCount, RangeSet};
use pagemark_linux::mapping_flags;
use pagemark_linux::proc::{self, Fields, descriptors, smaps, threads};

use super::shortened::{self, ShortenedMapping};
use super::sysv_memory;

/// The name of the file in the directory of a process.
pub(super) const NAME: &str = "smaps";

/// What the kernel takes to count a page.
const COUNT_TIME: Duration = Duration::from_nanos(75);

/// What CRIU takes for a page of a mapping that could be shortened.
const PAGE_TIME: Duration = Duration::from_nanos(20);

/// What it takes to hand over a call.
const HANDOVER_TIME: Duration = Duration::from_micros(30);

/// Files that CRIU opens for each process, and for each thread.
const OPENED_OF_PROCESS: usize = 24;
const OPENED_OF_THREAD: usize = 4;

/// True if it saves time to list the mappings of these processes for CRIU.
pub(super) fn pays(tree: &[i32]) -> bool {
    let (mut counting, mut whole_mappings, mut handing_over) = (Duration::ZERO, Duration::ZERO, Duration::ZERO);
    for &pid in tree {
        counting += count_time(pid);
        let mappings = proc::maps::read(pid).unwrap_or_default();
        let large = mappings.iter().filter(|mapping| shortened::is_large(mapping));
        let pages: u64 = large.map(|mapping| mapping.range().byte_count().pages_rounded_up()).sum();
        whole_mappings += times(PAGE_TIME, pages);
        handing_over += handover_time(pid, mappings.len());
    }
    // The program that lists flags is loaded only where it decides.
    whole_mappings > handing_over || counting + whole_mappings > handing_over && mapping_flags::LIST.is_there()
}

fn times(duration: Duration, count: u64) -> Duration {
    duration.saturating_mul(u32::try_from(count).unwrap_or(u32::MAX))
}

fn count_time(pid: i32) -> Duration {
    let Ok(fields) = Fields::read(proc::path(pid, "status")) else { return Duration::ZERO };
    let bytes: u64 = ["VmRSS", "VmSwap"].iter().filter_map(|name| fields.bytes(name)).sum();
    times(COUNT_TIME, ByteCount::new(bytes).pages_rounded_down())
}

fn handover_time(pid: i32, mapping_count: usize) -> Duration {
    let descriptor_count = descriptors(pid).map_or(0, |found| found.len());
    let thread_count = threads(pid).map_or(0, |found| found.len());
    let count = OPENED_OF_PROCESS + descriptor_count + OPENED_OF_THREAD * thread_count + mapping_count;
    times(HANDOVER_TIME, count as u64)
}

/// A file that has what CRIU needs of `/proc/PID/smaps`, with the mappings in `withheld` shortened;
/// those as they are.
pub(super) fn file(pid: i32, withheld: &RangeSet) -> io::Result<(File, Vec<ShortenedMapping>)> {
    // Where the kernel cannot list the flags alone, it counts the pages here instead of for CRIU.
    let text = smaps::without_figures(pid).or_else(|_| smaps::with_figures(pid))?;
    let (text, shortened) = shortened::shorten(&text, withheld);
    let lines = text.split_inclusive(|&byte| byte == b'\n').map(sysv_memory::renamed);
    let text = lines.collect::<Vec<_>>().concat();
    let mut file = File::from(memfd_create(c"smaps", MFdFlags::MFD_CLOEXEC)?);
    file.write_all(&text)?;
    file.rewind()?;
    Ok((file, shortened))
}
