//! The PAGEMAP_SCAN ioctl.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;

use super::{Filter, PRESENT, Pagemap};
use crate::interface::Interface;
use crate::own_memory::Mapping;
use crate::valgrind::written_by_kernel;
use crate::{Address, PAGE_SIZE, Range};

/// `PAGEMAP_SCAN`.
pub static SCAN: Interface = Interface::new(
    "PAGEMAP_SCAN",
    "6.7",
    "an entry is read for each page to find the populated ones (about 4 ms for each GiB that is mapped), and CRIU does the \
     same while a process is frozen",
    || {
        let page = Mapping::new(PAGE_SIZE)?;
        let filter = Filter { all: PRESENT, ..Filter::default() };
        Pagemap::of_this_process()?.scan(&page.range(), filter, |_, _| {})
    },
);

const PAGEMAP_SCAN: libc::Ioctl = 0xc060_6610_u32 as libc::Ioctl;
const PM_SCAN_WP_MATCHING: u64 = 1 << 0;
const PM_SCAN_CHECK_WPASYNC: u64 = 1 << 1;
const PM_SCAN_LDT_RESTART: u64 = 1 << 2;

/// How often a restart is repeated that another tracker has got ahead of.
const TRIES: usize = 1000;

/// Most regions that the kernel returns at once.
const REGIONS: usize = 2048;

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
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

impl Pagemap {
    /// Calls `each` for the runs of pages in `range` that pass the filter, with the reported
    /// categories, in ascending order. A filter without `protect` and `restart` changes nothing. No
    /// page table is allocated.
    ///
    /// # Errors
    /// `ENOTTY`: the kernel is older than 6.7. `EINVAL`: the range is not made of pages. `ENOMEM`,
    /// only with `restart`: the kernel had lost what was written ([`Pagemap::losses`]). `ESTALE`:
    /// another tracker has restarted dirty tracking since this one did, and the filter has no
    /// `restart`; or it does so all the time. A restart is repeated otherwise, and counts as a
    /// loss.
    pub fn scan(&self, range: &Range, filter: Filter, mut each: impl FnMut(Range, u64)) -> io::Result<()> {
        let mut regions = [const { MaybeUninit::<PageRegion>::uninit() }; REGIONS];
        let mut start = range.start;
        let mut tries = 0;
        while start < range.end {
            let mut argument = ScanArgument {
                size: size_of::<ScanArgument>() as u64,
                flags: if filter.protect { PM_SCAN_WP_MATCHING } else { 0 }
                    | if filter.registered_only { PM_SCAN_CHECK_WPASYNC } else { 0 }
                    | if filter.restart { PM_SCAN_LDT_RESTART } else { 0 },
                start: start.get(),
                end: range.end.get(),
                vector: regions.as_mut_ptr() as u64,
                vector_length: REGIONS as u64,
                category_inverted: filter.none,
                category_mask: filter.all | filter.none,
                category_anyof_mask: filter.any,
                return_mask: filter.report,
                ..ScanArgument::default()
            };
            // SAFETY: the argument is the structure that this request takes, and its vector points
            // to REGIONS regions that live through the call.
            let found = unsafe { libc::ioctl(self.file.as_raw_fd(), PAGEMAP_SCAN, std::ptr::from_mut(&mut argument)) };
            let error = io::Error::last_os_error();
            match usize::try_from(found) {
                Ok(found) => {
                    written_by_kernel(regions.as_ptr(), found);
                    regions.iter().take(found).for_each(|region| {
                        // SAFETY: the kernel has filled in as many as it returned.
                        let region = unsafe { region.assume_init() };
                        start = Address::new(region.end);
                        each(Address::new(region.start)..start, region.categories);
                    });
                    // The whole range was walked, although `walk_end` may be lower: the kernel sets
                    // it where its own buffer of 512 regions was last full.
                    if found < REGIONS {
                        return Ok(());
                    }
                }
                Err(_) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => {
                    let code = error.raw_os_error();
                    if filter.restart && matches!(code, Some(libc::ENOMEM | libc::ESTALE)) {
                        self.losses.fetch_add(1, Ordering::AcqRel);
                    }
                    tries += 1;
                    if !filter.restart || code != Some(libc::ESTALE) || tries > TRIES {
                        return Err(error);
                    }
                    // Nothing was restarted that is not reported now or counts as lost.
                    continue;
                }
            }
            // `walk_end` can be at the start only after an interrupted call.
            start = Address::new(argument.walk_end).max(start);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::own_memory::{self, Mapping};
    use crate::pagemap::SWAPPED;
    use crate::{ByteCount, PAGE_SIZE};

    #[test]
    fn each_run_is_reported_once_however_many_there_are() {
        // More than the kernel's buffer holds, then more than ours.
        for runs in [500, 513, 1500, REGIONS, 2 * REGIONS + 100] {
            let mapping = Mapping::new(2 * runs * PAGE_SIZE).unwrap();
            let start = mapping.range().start;
            let page = |index: usize| start + ByteCount::from(index * PAGE_SIZE);
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
            Pagemap::of_this_process().unwrap().find(&mapping.range(), filter, |run, _| found.push(run)).unwrap();
            let expected: Vec<_> = (0..2 * runs).step_by(2).map(|index| page(index)..page(index + 1)).collect();
            assert!(found == expected, "{runs} runs, {} reported", found.len());
        }
    }
}
