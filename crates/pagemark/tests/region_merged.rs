//! Regions of a process whose equal pages the kernel merges (KSM), as a service manager can have it
//! for all memory of a service. Alone in its process, whose memory this concerns.

use std::sync::atomic::{AtomicU64, Ordering};

use pagemark::region::{Region, RegionOptions};
use pagemark::{Mechanism, PAGE_SIZE, PageNumber};
use pagemark_testing::{Merging, assert_oracle, assert_oracle_eq};

const PAGES: usize = 64;

/// `PR_SET_MEMORY_MERGE`, Linux 6.4.
const SET_MEMORY_MERGE: libc::c_int = 67;

#[test]
fn merged_pages_are_tracked() {
    // SAFETY: the content of the process's memory stays as it is.
    if unsafe { libc::prctl(SET_MEMORY_MERGE, 1, 0, 0, 0) } != 0 {
        pagemark_testing::skip!(
            "the kernel does not merge the memory of a process: {}",
            std::io::Error::last_os_error()
        );
    }
    let Some(merging) = Merging::start() else { pagemark_testing::skip!("merging of equal pages cannot be started") };
    // The kernel passes over some pages in some of its scans.
    for (mechanism, fill) in (0..3).flat_map(|_| Mechanism::ALL).zip(10..) {
        let options = RegionOptions { mechanism: Some(mechanism), ..RegionOptions::default() };
        let Ok(region) = Region::with_options(PAGES * PAGE_SIZE, options) else { continue };
        // Content that the kernel has merged nowhere, and therefore merges after the begin only.
        region.write(0, &[fill; PAGES * PAGE_SIZE]).unwrap();
        let write = |page: usize, value: u64| {
            // SAFETY: the word lies within the region.
            unsafe { (*region.as_ptr().add(page * PAGE_SIZE).cast::<AtomicU64>()).store(value, Ordering::Relaxed) };
        };
        let transaction = |value: u64| {
            region.begin().unwrap();
            merging.wait();
            (0..PAGES).step_by(3).for_each(|page| write(page, value));
        };
        transaction(u64::from(fill));
        let written = region.commit().unwrap();
        for page in (0..PAGES).step_by(3) {
            let address = PageNumber::from(page).address();
            assert_oracle!(written.contains(address), "{mechanism}: the write to page {page} is not reported");
        }
        // What was written is equal again, and merged.
        transaction(2);
        region.rollback().unwrap();
        let mut content = vec![0; PAGES * PAGE_SIZE];
        region.read(0, &mut content).unwrap();
        let expected =
            |page: usize| if page.is_multiple_of(3) { u64::from(fill) } else { u64::from_ne_bytes([fill; 8]) };
        for page in 0..PAGES {
            let word = content[page * PAGE_SIZE..][..8].try_into().map(u64::from_ne_bytes).unwrap();
            assert_oracle_eq!(word, expected(page), "{mechanism}: page {page}");
        }
    }
}
