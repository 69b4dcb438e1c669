//! The encodings of changes and of snapshots accept any bytes: they come from other processes.

#![no_main]

use libfuzzer_sys::fuzz_target;
use pagemark::region::{Changes, Region, RegionOptions, RegionSnapshot};
use pagemark::snapshot::SnapshotStore;
use pagemark::Mechanism;
use xxhash_rust::xxh3::xxh3_64;

/// The longest region that is made of an encoding, bytes.
const MOST_BYTES: u64 = 1 << 20;

fuzz_target!(|input: &[u8]| {
    // The first byte chooses the encoding, and the checksum is made right, so that the fuzzer
    // reaches the code behind both.
    let Some((kind, rest)) = input.split_first() else { return };
    let mut bytes = rest.to_vec();
    let header = match kind % 3 {
        0 => Some(*b"PMCHANGE\x01\0\0\0\0\0\0\0"),
        1 => Some(*b"PMSNAPSH\x01\0\0\0\0\0\0\0"),
        _ => None,
    };
    if let Some(header) = header {
        bytes.splice(0..0, header);
        let checksum = xxh3_64(&bytes).to_le_bytes();
        bytes.extend(checksum);
    }
    if let Ok(changes) = Changes::from_bytes(&bytes) {
        assert_eq!(changes.to_bytes(), bytes, "an encoding has one form");
        assert!(changes.iter().all(|change| change.old.is_none_or(|old| old.len() == change.new.len())));
        apply(&changes);
    }
    let store = SnapshotStore::new();
    if let Ok(snapshot) = RegionSnapshot::from_bytes(&bytes, &store) {
        let again = RegionSnapshot::from_bytes(&snapshot.to_bytes().unwrap(), &store).unwrap();
        assert!(again == snapshot, "the content is the same after another encoding");
    }
});

/// Applies changes to a region, if it may be made, and reverts them.
fn apply(changes: &Changes) {
    let bytes = changes.region_bytes();
    if bytes.get() == 0 || bytes.get() > MOST_BYTES || !bytes.is_whole_pages() {
        return;
    }
    let options = RegionOptions { mechanism: Some(Mechanism::Full), ..RegionOptions::default() };
    let region = Region::with_options(bytes.to_usize(), options).unwrap();
    changes.apply(&region).unwrap();
    for change in changes.iter() {
        let mut found = vec![0; change.new.len()];
        region.read(change.offset, &mut found).unwrap();
        assert_eq!(found, change.new);
    }
    assert_eq!(changes.revert(&region).is_ok(), changes.has_old());
}
