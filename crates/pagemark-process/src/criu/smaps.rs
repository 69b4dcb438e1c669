//! Gives CRIU the flags of mappings without a walk of the page tables.
//!
//! CRIU reads `/proc/PID/smaps` while the tree is frozen. It uses the flags of the mappings, but
//! the kernel also counts their pages, some 20 ms for each GiB. Where the kernel can list the flags
//! alone ([`mapping_flags::LIST`]), Pagemark answers the `openat` by which CRIU opens that file
//! with a file that has the same lines without the counts.
//!
//! The filter cannot see which file is opened, so every such `openat` is handed over. Each costs a
//! change to Pagemark and back, so this is done only for trees that hold much memory.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::time::Duration;

use nix::sys::memfd::{MFdFlags, memfd_create};
use pagemark::PAGE_SIZE;
use pagemark::sys::mapping_flags;
use pagemark::sys::proc::{self, Fields, descriptors, smaps, threads};

/// The name of the file in the directory of a process.
pub(super) const NAME: &str = "smaps";

/// What the kernel takes to count a page.
const COUNT_TIME: Duration = Duration::from_nanos(75);

/// What it takes to hand over a call.
const HANDOVER_TIME: Duration = Duration::from_micros(30);

/// Files that CRIU opens for each process, and for each thread.
const OPENED_OF_PROCESS: usize = 24;
const OPENED_OF_THREAD: usize = 4;

/// True if the kernel can list flags, and it saves time for these processes.
pub(super) fn pays(tree: &[i32]) -> bool {
    let (counted, handed_over) = tree.iter().fold((Duration::ZERO, Duration::ZERO), |(counted, handed_over), &pid| {
        (counted + count_time(pid), handed_over + handover_time(pid))
    });
    counted > handed_over && mapping_flags::LIST.is_there()
}

fn count_time(pid: i32) -> Duration {
    let Ok(fields) = Fields::read(proc::path(pid, "status")) else { return Duration::ZERO };
    let bytes: u64 = ["VmRSS", "VmSwap"].iter().filter_map(|name| fields.bytes(name)).sum();
    let pages = bytes / PAGE_SIZE as u64;
    COUNT_TIME * u32::try_from(pages).unwrap_or(u32::MAX)
}

fn handover_time(pid: i32) -> Duration {
    let descriptor_count = descriptors(pid).map_or(0, |found| found.len());
    let thread_count = threads(pid).map_or(0, |found| found.len());
    let mapping_count = proc::maps::read(pid).map_or(0, |found| found.len());
    let count = OPENED_OF_PROCESS + descriptor_count + OPENED_OF_THREAD * thread_count + mapping_count;
    HANDOVER_TIME * u32::try_from(count).unwrap_or(u32::MAX)
}

/// A file that has what CRIU needs of `/proc/PID/smaps`.
pub(super) fn file(pid: i32) -> io::Result<File> {
    let text = smaps::without_figures(pid)?;
    let mut file = File::from(memfd_create(c"smaps", MFdFlags::MFD_CLOEXEC)?);
    file.write_all(&text)?;
    file.rewind()?;
    Ok(file)
}
