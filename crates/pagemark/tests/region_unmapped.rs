//! A region that loses a page. Alone in its process: where the page was, anything may be mapped by whoever else is there.

use pagemark::region::{Region, RegionError, RegionOptions};
use pagemark::{Mechanism, PAGE_SIZE, TrackError};

#[test]
fn memory_that_was_unmapped_is_noticed() {
    for mechanism in Mechanism::ALL {
        let options = RegionOptions { mechanism: Some(mechanism), ..RegionOptions::default() };
        let region = match Region::with_options(8 * PAGE_SIZE, options) {
            Ok(region) => region,
            Err(RegionError::Track(TrackError::Unavailable { reason, .. })) => {
                pagemark_testing::skipped(&format!("{mechanism}: {reason}"));
                continue;
            }
            Err(error) => panic!("{mechanism}: {error}"),
        };
        region.begin().unwrap();
        region.write(0, &[1]).unwrap();
        // SAFETY: the page is the region's; that it is missed is what is tested.
        assert_eq!(unsafe { libc::munmap(region.as_ptr().add(4 * PAGE_SIZE).cast(), PAGE_SIZE) }, 0);
        for refused in [region.commit().map(drop), region.rollback().map(drop), region.snapshot().map(drop)] {
            assert!(matches!(refused, Err(RegionError::NotMapped { .. })), "{mechanism}: {refused:?}");
        }
        assert!(matches!(region.read(0, &mut [0]), Err(RegionError::NotMapped { .. })));
        assert!(region.in_transaction());
        // SAFETY: the first page is still there.
        assert_eq!(unsafe { region.as_ptr().read_volatile() }, 1, "{mechanism}");
    }
}
