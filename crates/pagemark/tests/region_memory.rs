//! The memory that regions take. Alone in their process, whose resident memory is measured.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pagemark::region::{Region, RegionOptions};
use pagemark::track::Scope;
use pagemark::{ErrorKind, Mechanism, PAGE_SIZE};
use pagemark_testing::{assert_oracle, assert_oracle_eq};

const MIB: usize = 1 << 20;

fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A region of a mechanism, if the mechanism works here.
fn region(bytes: usize, mechanism: Mechanism) -> Option<Region> {
    let options = RegionOptions { mechanism: Some(mechanism), ..RegionOptions::default() };
    match Region::with_options(bytes, options) {
        Ok(region) => Some(region),
        Err(error) if error.kind() == ErrorKind::Unavailable => {
            pagemark_testing::skipped(&format!("{error}"));
            None
        }
        Err(error) => panic!("{mechanism}: {error}"),
    }
}

/// The resident memory of this process, bytes.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().trim().parse::<usize>().unwrap() << 10
}

/// Page faults of this thread.
fn faults() -> i64 {
    // SAFETY: all zeros are a valid value, which the call overwrites.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the call only writes the structure.
    assert_eq!(unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) }, 0);
    usage.ru_minflt
}

#[test]
fn memory_that_was_never_written_is_not_read() {
    let _turn = turn();
    for mechanism in Mechanism::ALL {
        let Some(region) = region(1 << 30, mechanism) else { continue };
        region.write(100 * MIB, &[1]).unwrap();
        let before = faults();
        region.begin().unwrap();
        region.write(200 * MIB, &[1]).unwrap();
        region.rollback().unwrap();
        let first = region.snapshot().unwrap();
        region.begin().unwrap();
        region.commit().unwrap();
        region.restore(&first).unwrap();
        let faults = faults() - before;
        assert!(faults < 5000, "{mechanism}: {faults} pages were touched, of 262,144");
        assert_eq!(first.content().holding().total_bytes().to_usize(), PAGE_SIZE, "{mechanism}");
    }
}

/// A region, its snapshots and what it can be rolled back to take the memory of two copies.
#[test]
fn a_snapshot_is_what_a_transaction_is_rolled_back_to() {
    let _turn = turn();
    const BYTES: usize = 64 * MIB;
    for mechanism in [Mechanism::choose(pagemark::track::Scope::OwnMemory), Mechanism::Full] {
        let before = resident();
        let Some(region) = region(BYTES, mechanism) else { continue };
        let mut number = 0u64;
        for page in 0..BYTES / PAGE_SIZE {
            number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            region.write(page * PAGE_SIZE, &number.to_ne_bytes().repeat(PAGE_SIZE / 8)).unwrap();
        }
        let check = |when: &str| {
            let taken = resident().saturating_sub(before);
            assert!(taken < BYTES * 21 / 10 + 4 * MIB, "{mechanism}, {when}: {} MiB", taken / MIB);
        };
        // The first transaction has no snapshot that it could use.
        region.begin().unwrap();
        region.commit().unwrap();
        check("before the snapshot");
        let first = region.snapshot().unwrap();
        check("after the snapshot");
        for round in 1..4u8 {
            region.begin().unwrap();
            for page in (0..BYTES / PAGE_SIZE).step_by(100) {
                region.write(page * PAGE_SIZE + 9, &[round]).unwrap();
            }
            region.rollback().unwrap();
            check("after a rollback");
            assert_oracle!(
                region.snapshot().unwrap() == first,
                "{mechanism}: other content than in the snapshot after the rollback"
            );
        }
        region.write(5, &[1]).unwrap();
        region.begin().unwrap();
        region.write(5, &[2]).unwrap();
        region.write(PAGE_SIZE, &[3]).unwrap();
        region.restore(&first).unwrap();
        region.rollback().unwrap();
        let mut found = [0; 2];
        region.read(5, &mut found[..1]).unwrap();
        region.read(PAGE_SIZE, &mut found[1..]).unwrap();
        let mut expected = [1, 0];
        first.content().read_at(pagemark::Address::new(PAGE_SIZE as u64), &mut expected[1..]).unwrap();
        assert_oracle_eq!(found, expected, "{mechanism}: the transaction began after a write that the snapshot lacks");
        check("in the end");
    }
}

#[test]
fn locked_memory_is_discarded() {
    let _turn = turn();
    for mechanism in Mechanism::of_scope(Scope::OwnMemory) {
        let Some(region) = region(64 * PAGE_SIZE, mechanism) else { continue };
        // The second half is locked.
        // SAFETY: the pages are those of the region; locking changes no content.
        let locked = unsafe { libc::mlock(region.as_ptr().add(32 * PAGE_SIZE).cast(), 32 * PAGE_SIZE) };
        assert_eq!(locked, 0, "{}", std::io::Error::last_os_error());
        let content = |page: usize| {
            let mut byte = [0];
            region.read(page * PAGE_SIZE + 5, &mut byte).unwrap();
            byte[0]
        };
        (0..64).for_each(|page| region.write(page * PAGE_SIZE + 5, &[9]).unwrap());
        region.begin().unwrap();
        region.discard(30 * PAGE_SIZE..40 * PAGE_SIZE).unwrap();
        assert_oracle!(
            (0..64).all(|page| content(page) == if (30..40).contains(&page) { 0 } else { 9 }),
            "{mechanism}: the discarded pages"
        );
        let written = region.commit().unwrap();
        assert_oracle!(
            (30..40u64).all(|page| written.contains(pagemark::Address::new(page * PAGE_SIZE as u64))),
            "{mechanism}: a write was missed"
        );
        region.begin().unwrap();
        region.discard(30 * PAGE_SIZE..40 * PAGE_SIZE).unwrap();
        region.write(35 * PAGE_SIZE + 5, &[3]).unwrap();
        region.rollback().unwrap();
        assert_oracle_eq!(content(35), 0, "{mechanism}: the content after the rollback");
    }
}
