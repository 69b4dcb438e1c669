//! The content of transactions: replicas, and encoded changes.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use pagemark::address::offsets;
use pagemark::region::{Changes, Region, RegionOptions};
use pagemark::{ErrorKind, Mechanism, PAGE_SIZE, RangeSet};
use pagemark_testing::{assert_oracle, cases};
use proptest::prelude::*;

const PAGES: usize = 40;
const BYTES: usize = PAGES * PAGE_SIZE;

/// A region with each mechanism that works here, except those of which an address space has only
/// one.
fn regions(without_rollback: bool) -> impl Iterator<Item = Region> {
    let all = Mechanism::ALL.into_iter().filter(|one| ![Mechanism::SoftDirty, Mechanism::Ldt].contains(one));
    all.filter_map(move |mechanism| {
        let options = RegionOptions { mechanism: Some(mechanism), without_rollback, ..RegionOptions::default() };
        match Region::with_options(BYTES, options) {
            Ok(region) => Some(region),
            Err(error) if error.kind() == ErrorKind::Unavailable => {
                pagemark_testing::skipped(&error.to_string());
                None
            }
            Err(error) => panic!("{mechanism}: {error}"),
        }
    })
}

fn content(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.bytes()];
    region.read(0, &mut bytes).unwrap();
    bytes
}

fn changes(writes: &[(usize, &[u8])]) -> Changes {
    let region = Region::new(BYTES).unwrap();
    region.begin().unwrap();
    writes.iter().for_each(|(offset, bytes)| region.write(*offset, bytes).unwrap());
    region.commit_changes().unwrap()
}

#[test]
fn pages_that_hold_the_same_content_as_before_are_left_out() {
    for region in regions(false) {
        region.write(7 * PAGE_SIZE, &[3; 100]).unwrap();
        region.begin().unwrap();
        region.write(7 * PAGE_SIZE, &[3; 100]).unwrap();
        region.write(9 * PAGE_SIZE, &[0; PAGE_SIZE]).unwrap();
        region.write(11 * PAGE_SIZE + 8, &[5; 8]).unwrap();
        let changes = region.commit_changes().unwrap();
        assert_eq!(changes.offsets().whole_pages(), RangeSet::from(offsets(11 * PAGE_SIZE..12 * PAGE_SIZE)));
        assert!(!region.in_transaction());
    }
}

#[test]
fn what_is_applied_belongs_to_the_transaction_of_the_replica() {
    let changes = changes(&[(10, b"ten"), (5 * PAGE_SIZE - 3, b"borders"), (BYTES - 1, b"x")]);
    for replica in regions(false) {
        let before = replica.snapshot().unwrap();
        replica.begin().unwrap();
        changes.apply(&replica).unwrap();
        let after = content(&replica);
        let written = replica.rollback().unwrap();
        assert_oracle!(changes.offsets().iter().all(|range| written.covers(range)), "a write was missed: {written:?}");
        assert_oracle!(content(&replica).iter().all(|&byte| byte == 0), "other content after the rollback");
        changes.apply(&replica).unwrap();
        assert_oracle!(
            content(&replica) == after && replica.snapshot().unwrap() != before,
            "the changes were not applied"
        );
        changes.revert(&replica).unwrap();
        assert_oracle!(replica.snapshot().unwrap() == before, "the changes were not reverted");
    }
}

#[test]
fn a_replica_of_chained_transactions_of_eight_threads_misses_nothing() {
    const WRITERS: usize = 8;
    for region in regions(true) {
        let replica = Region::new(BYTES).unwrap();
        let word = |index: usize| {
            // SAFETY: the word lies in the region, which outlives the reference, and is accessed
            // atomically by all.
            unsafe { &*region.as_ptr().cast::<AtomicU64>().add(index) }
        };
        let stop = AtomicBool::new(false);
        let replicate = || {
            region.begin().unwrap();
            std::thread::yield_now();
            let message = region.commit_changes().unwrap().to_bytes();
            Changes::from_bytes(&message).unwrap().apply(&replica).unwrap();
        };
        std::thread::scope(|scope| {
            for writer in 0..WRITERS {
                let (stop, word) = (&stop, &word);
                scope.spawn(move || {
                    let mut seed = writer as u64 + 1;
                    while !stop.load(Ordering::Relaxed) {
                        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        word((seed >> 33) as usize % (BYTES / 8)).fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            (0..50).for_each(|_| replicate());
            stop.store(true, Ordering::Relaxed);
        });
        replicate();
        assert_oracle!(content(&region) == content(&replica), "{}: the replica has other content", region.mechanism());
    }
}

#[test]
fn changes_fit_regions_of_the_same_length_only() {
    let changes = changes(&[(10, b"ten")]);
    assert_eq!((changes.region_bytes().to_usize(), changes.iter().count()), (BYTES, 1));
    let other = Region::new(BYTES + PAGE_SIZE).unwrap();
    assert_eq!(changes.apply(&other).unwrap_err().kind(), ErrorKind::LengthDiffers);
    assert_eq!(changes.revert(&other).unwrap_err().kind(), ErrorKind::LengthDiffers);
    let same = Region::new(BYTES).unwrap();
    let refused = changes.clone().without_old().revert(&same).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NoRollback);
    let small = changes.clone().without_old();
    assert!(small.encoded_bytes() == small.to_bytes().len() && small.encoded_bytes() < changes.encoded_bytes());
}

#[test]
fn every_cut_and_every_flipped_bit_is_found() {
    let bytes = changes(&[(10, b"ten"), (3 * PAGE_SIZE, b"three")]).to_bytes();
    let is_damaged = |bytes: &[u8]| {
        let refused = Changes::from_bytes(bytes).unwrap_err();
        matches!(refused.kind(), ErrorKind::Damaged | ErrorKind::NewerFormat { .. })
    };
    assert!((0..bytes.len()).all(|length| is_damaged(&bytes[..length])));
    // The numbers, some of the content, the checksum.
    for at in (0..100).chain((100..bytes.len()).step_by(97)).chain(bytes.len() - 8..bytes.len()) {
        for bit in 0..8 {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1 << bit;
            assert!(is_damaged(&damaged), "bit {bit} of byte {at}");
        }
    }
}

/// Encoded changes with these numbers and this content, and a checksum that matches.
fn forged(numbers: &[u64], content: &[u8]) -> Vec<u8> {
    let mut bytes = b"PMCHANGE".to_vec();
    bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
    bytes.extend(content);
    bytes.extend(xxhash_rust::xxh3::xxh3_64(&bytes).to_le_bytes());
    bytes
}

#[test]
fn forged_numbers_are_refused() {
    let bytes = BYTES as u64;
    let read = |numbers: &[u64], content: &[u8]| Changes::from_bytes(&forged(numbers, content));
    assert_eq!(read(&[1, 0, bytes, 1, 5, 8], b"abc").unwrap().iter().next().unwrap().new, b"abc");
    let all: [(&[u64], &[u8]); 9] = [
        (&[1, 0, bytes, u64::MAX], b""),
        (&[1, 2, bytes, 0], b""),
        (&[1, 0, bytes, 1, 8, 5], b""),
        (&[1, 0, bytes, 1, 5, bytes + 1], b"abc"),
        (&[1, 0, u64::MAX, 1, 0, u64::MAX], b"abc"),
        (&[1, 0, u64::MAX, 2, 0, u64::MAX, 0, u64::MAX], b"abc"),
        (&[1, 0, bytes, 2, 5, 8, 8, 9], b"abcd"),
        (&[1, 0, bytes, 1, 5, 8], b"abcd"),
        (&[1, 1, bytes, 1, 5, 8], b"abcd"),
    ];
    for (numbers, content) in all {
        assert_eq!(read(numbers, content).unwrap_err().kind(), ErrorKind::Damaged, "{numbers:?}");
    }
    assert!(matches!(read(&[2, 0, bytes, 0], b"").unwrap_err().kind(), ErrorKind::NewerFormat { found: 2, known: 1 }));
}

proptest! {
    #![proptest_config(cases(256))]

    #[test]
    fn any_bytes_are_read_safely(
        numbers in prop::collection::vec(prop_oneof![0..20u64, any::<u64>()], 0..10),
        content in prop::collection::vec(any::<u8>(), 0..20),
    ) {
        let bytes = forged(&[&[1][..], &numbers].concat(), &content);
        if let Ok(changes) = Changes::from_bytes(&bytes) {
            prop_assert_eq!(changes.to_bytes(), bytes);
        }
    }
}
