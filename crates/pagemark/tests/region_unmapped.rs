//! Regions whose memory is unmapped, mapped anew or unprotected by other code. Alone in their
//! process, because other threads may map memory where a page was unmapped.

use std::sync::{Mutex, PoisonError};

use pagemark::region::{Region, RegionOptions};
use pagemark::{ErrorKind, Mechanism, PAGE_SIZE};
use pagemark_testing::{assert_oracle, assert_oracle_eq};

static TURN: Mutex<()> = Mutex::new(());

#[test]
fn memory_that_was_unmapped_is_noticed() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    for mechanism in Mechanism::ALL {
        let options = RegionOptions { mechanism: Some(mechanism), ..RegionOptions::default() };
        let region = match Region::with_options(8 * PAGE_SIZE, options) {
            Ok(region) => region,
            Err(error) if error.kind() == ErrorKind::Unavailable => {
                pagemark_testing::skipped(&format!("{error}"));
                continue;
            }
            Err(error) => panic!("{mechanism}: {error}"),
        };
        region.begin().unwrap();
        region.write(0, &[1]).unwrap();
        // SAFETY: the page is the region's; that it is missed is what is tested.
        assert_eq!(unsafe { libc::munmap(region.as_ptr().add(4 * PAGE_SIZE).cast(), PAGE_SIZE) }, 0);
        for refused in [region.commit().map(drop), region.rollback().map(drop), region.snapshot().map(drop)] {
            assert!(matches!(&refused, Err(error) if error.kind() == ErrorKind::NotMapped), "{mechanism}: {refused:?}");
        }
        assert!(region.in_transaction());
        // SAFETY: the first page is still there.
        assert_eq!(unsafe { region.as_ptr().read_volatile() }, 1, "{mechanism}");
    }
}

/// Pages of the regions.
const PAGES: usize = 8;

fn region(mechanism: Mechanism) -> Option<Region> {
    let options = RegionOptions { mechanism: Some(mechanism), ..RegionOptions::default() };
    match Region::with_options(PAGES * PAGE_SIZE, options) {
        Ok(region) => Some(region),
        Err(error) if error.kind() == ErrorKind::Unavailable => None,
        Err(error) => panic!("{mechanism}: {error}"),
    }
}

/// After `change`, which gives some pages other content or makes them writable, the last byte of
/// each page is written. Each write is reported, or an error states that writes are unknown.
fn no_write_is_lost_silently(mechanism: Mechanism, case: &str, written_before: bool, change: impl Fn(*mut u8)) {
    let Some(region) = region(mechanism) else { return };
    region.write(0, &[1; PAGES * PAGE_SIZE]).unwrap();
    region.begin().unwrap();
    let pages = 2..5;
    if written_before {
        region.write(2 * PAGE_SIZE, &[2; 3 * PAGE_SIZE]).unwrap();
    }
    change(region.as_ptr());
    for page in pages.clone() {
        // SAFETY: the page belongs to the region and is mapped, and only this thread uses it.
        unsafe { region.as_ptr().add(page * PAGE_SIZE + PAGE_SIZE - 1).write_volatile(7) };
    }
    for _ in 0..2 {
        match region.commit() {
            Ok(written) => {
                for page in pages.clone() {
                    let last = page * PAGE_SIZE + PAGE_SIZE - 1;
                    assert_oracle!(
                        written.covers(pagemark::address::offsets(last..last + 1)),
                        "{mechanism}, {case}: a write to page {page} was missed: {written:x?}"
                    );
                }
                return;
            }
            // The error stays.
            Err(error) if error.kind() == ErrorKind::Remapped => {}
            Err(error) => panic!("{mechanism}, {case}: {error}"),
        }
    }
}

#[test]
fn memory_that_was_mapped_anew_is_noticed() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let map = |start: *mut u8, pages: usize, flags: libc::c_int| {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = flags | libc::MAP_FIXED | libc::MAP_ANONYMOUS;
        // SAFETY: the pages are the region's; that they are replaced is what is tested.
        let mapped = unsafe { libc::mmap(start.cast(), pages * PAGE_SIZE, protection, flags, -1, 0) };
        assert_ne!(mapped, libc::MAP_FAILED);
    };
    for mechanism in Mechanism::ALL {
        for written_before in [false, true] {
            let check = |case: &str, change: &dyn Fn(*mut u8)| {
                no_write_is_lost_silently(mechanism, case, written_before, change);
            };
            // SAFETY: the third page belongs to the region.
            let third = |start: *mut u8| unsafe { start.add(2 * PAGE_SIZE) };
            check("three pages", &|start| map(third(start), 3, libc::MAP_PRIVATE));
            check("three shared pages", &|start| map(third(start), 3, libc::MAP_SHARED));
            check("all pages", &|start| map(start, PAGES, libc::MAP_PRIVATE));
            check("all shared pages", &|start| map(start, PAGES, libc::MAP_SHARED));
            check("protection", &|start| {
                // SAFETY: the pages are the region's; that their protection is changed is tested.
                let result =
                    unsafe { libc::mprotect(third(start).cast(), 3 * PAGE_SIZE, libc::PROT_READ | libc::PROT_WRITE) };
                assert_eq!(result, 0);
            });
        }
    }
}

/// The kernel lets a write through `/proc/self/mem` ignore the protection of private memory, and
/// raises no signal. `mprotect` cannot see it, which its documentation states.
#[test]
fn writes_through_proc_self_mem_are_reported_or_refused() {
    use std::os::unix::fs::FileExt;
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let memory = std::fs::File::options().write(true).open("/proc/self/mem").unwrap();
    for mechanism in Mechanism::ALL.into_iter().filter(|&mechanism| mechanism != Mechanism::Mprotect) {
        let Some(region) = region(mechanism) else { continue };
        region.write(0, &[1; PAGES * PAGE_SIZE]).unwrap();
        region.begin().unwrap();
        let offset = 3 * PAGE_SIZE + 5;
        let is_written = memory.write_all_at(&[9], region.as_ptr() as u64 + offset as u64).is_ok();
        let written = region.commit().unwrap();
        let mut found = [0];
        region.read(offset, &mut found).unwrap();
        assert_oracle_eq!(found[0], if is_written { 9 } else { 1 }, "{mechanism}: the content");
        let is_reported = written.covers(pagemark::address::offsets(offset..offset + 1));
        assert_oracle!(is_reported || !is_written, "{mechanism}: a write was missed");
    }
}
