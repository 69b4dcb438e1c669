//! Snapshots of regions in one piece, as bytes, and in a repository.

use pagemark::address::offsets;
use pagemark::region::{Region, RegionOptions, RegionSnapshot};
use pagemark::repository::Repository;
use pagemark::snapshot::{SnapshotOptions, SnapshotStore};
use pagemark::{ErrorKind, PAGE_SIZE, RangeSet};
use pagemark_testing::{assert_oracle, cases};
use proptest::prelude::*;

const PAGES: usize = 300;
const BYTES: usize = PAGES * PAGE_SIZE;

fn content(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.bytes()];
    region.read(0, &mut bytes).unwrap();
    bytes
}

proptest! {
    #![proptest_config(cases(48))]

    /// With chunks of all sizes, and with a budget that makes the store pack them.
    #[test]
    fn every_way_out_and_back_leads_to_the_same_content(
        writes in prop::collection::vec((0..BYTES, 1usize..9000, any::<u8>()), 0..12),
        chunk_bytes in prop_oneof![Just(256usize), Just(4096), Just(65536)],
        budget_bytes in prop_oneof![Just(None), Just(Some(60_000))],
    ) {
        let store = SnapshotStore::with_options(SnapshotOptions { chunk_bytes, budget_bytes }).unwrap();
        let options = || RegionOptions { store: Some(store.clone()), ..RegionOptions::default() };
        let region = Region::with_options(BYTES, options()).unwrap();
        for (offset, length, value) in writes {
            region.write(offset, &vec![value; length.min(BYTES - offset)]).unwrap();
        }
        let Ok(snapshot) = region.snapshot() else { return Ok(()) };
        let held = content(&region);

        let copy = snapshot.content().copy().unwrap();
        prop_assert!(*copy == *held, "the copy");
        let holding = snapshot.content().holding();
        prop_assert!(held.iter().enumerate().all(|(at, &byte)| byte == 0 || holding.contains(at.into())));

        let bytes = snapshot.to_bytes().unwrap();
        prop_assert!(RegionSnapshot::from_bytes(&bytes, &store).unwrap() == snapshot, "equal in one store");
        let other_store = SnapshotStore::new();
        let received = RegionSnapshot::from_bytes(&bytes, &other_store).unwrap();
        prop_assert!(received != snapshot && *received.content().copy().unwrap() == *held, "in another store");

        let made = Region::from_snapshot(&received, options()).unwrap();
        prop_assert!(content(&made) == held, "as a region");
        prop_assert!(made.snapshot().unwrap() == snapshot);
        prop_assert_eq!(made.restore(&received).unwrap_err().kind(), ErrorKind::WrongRegion);
    }
}

#[test]
fn a_snapshot_is_saved_and_opened() {
    let directory = tempfile::tempdir().unwrap();
    let repository = Repository::create(&directory.path().join("repository")).unwrap();
    let region = Region::new(BYTES).unwrap();
    region.write(5000, b"first").unwrap();
    let first = region.snapshot().unwrap();
    region.write(5000, b"other").unwrap();
    assert_eq!(first.save(&repository, "job").unwrap().sequence, 1);

    let opened = Region::open(&repository, "job", RegionOptions::default()).unwrap();
    region.restore(&first).unwrap();
    assert_oracle!(content(&opened) == content(&region), "the opened region has other content");
    let store = SnapshotStore::new();
    let snapshot = RegionSnapshot::open(&repository, "job", &store).unwrap();
    assert_oracle!(*snapshot.content().copy().unwrap() == *content(&region), "the opened snapshot has other content");
    assert_eq!(store.usage().chunks, 1);

    region.write(9 * PAGE_SIZE, &[9; 10 * PAGE_SIZE]).unwrap();
    assert_eq!(region.snapshot().unwrap().save(&repository, "job").unwrap().sequence, 2);
    let newest = RegionSnapshot::open(&repository, "job", &store).unwrap();
    let differing = newest.content().diff(snapshot.content()).unwrap();
    assert_eq!(differing, RangeSet::from(offsets(9 * PAGE_SIZE..19 * PAGE_SIZE)));
    assert_eq!(RegionSnapshot::open(&repository, "none", &store).unwrap_err().kind(), ErrorKind::NeverSaved);
}

#[test]
fn what_is_no_encoded_snapshot_is_refused() {
    let region = Region::new(BYTES).unwrap();
    region.begin().unwrap();
    region.write(5000, b"first").unwrap();
    let bytes = region.snapshot().unwrap().to_bytes().unwrap();
    assert!(bytes.len() < 2 * PAGE_SIZE, "zeros take no place");
    let changes = region.commit_changes().unwrap().without_old().to_bytes();
    let store = SnapshotStore::new();
    for damaged in [&bytes[1..], &bytes[..bytes.len() - 1], &changes, b""] {
        let refused = RegionSnapshot::from_bytes(damaged, &store).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Damaged, "{refused}");
    }
    for region_bytes in [0, 1, u64::MAX, u64::MAX / PAGE_SIZE as u64 * PAGE_SIZE as u64] {
        let mut forged = b"PMSNAPSH".to_vec();
        forged.extend([1, 0, region_bytes, 0].into_iter().flat_map(u64::to_le_bytes));
        forged.extend(xxhash_rust::xxh3::xxh3_64(&forged).to_le_bytes());
        let refused = RegionSnapshot::from_bytes(&forged, &store).unwrap_err();
        assert!(matches!(refused.kind(), ErrorKind::Damaged | ErrorKind::NoMemory), "{refused}");
    }
}
