//! Snapshots.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr::NonNull;

use pagemark::Address;
use pagemark::region::RegionSnapshot;

use crate::ranges::{Ranges, report};
use crate::status::{Failure, Status, guard, present, value_or};

/// What a region held at one time.
pub struct Snapshot {
    pub(crate) snapshot: RegionSnapshot,
}

/// Frees a snapshot. What no other snapshot holds is given back.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_snapshot_free(snapshot: Option<Box<Snapshot>>) {
    guard(|| {
        drop(snapshot);
        Ok(())
    });
}

/// How long the region is that it was taken of; 0 if it is null.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_snapshot_bytes(snapshot: Option<&Snapshot>) -> u64 {
    value_or(0, || Ok(present(snapshot, "snapshot")?.snapshot.content().bytes().get()))
}

/// Reads bytes of the snapshot without restoring it. `to` must lie outside of every region that is
/// tracked, or not be written by other code meanwhile; it may be null if `bytes` is 0.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_snapshot_read(
    snapshot: Option<&Snapshot>,
    offset: u64,
    to: *mut c_void,
    bytes: usize,
) -> Status {
    guard(|| {
        let content = present(snapshot, "snapshot")?.snapshot.content();
        let mut none = [];
        let to = if bytes == 0 {
            &mut none[..]
        } else {
            let to: NonNull<u8> = present(NonNull::new(to.cast()), "to")?;
            check_length(bytes, content.bytes().get())?;
            // SAFETY: the caller owns `bytes` bytes at the address, and any bytes are valid numbers
            // to overwrite.
            unsafe { std::slice::from_raw_parts_mut(to.as_ptr(), bytes) }
        };
        Ok(content.read_at(Address::new(offset), to)?)
    })
}

/// The length of a Rust slice is limited, so a length that exceeds the snapshot is refused before a
/// slice is made.
fn check_length(bytes: usize, snapshot_bytes: u64) -> Result<(), Failure> {
    if bytes as u64 <= snapshot_bytes {
        return Ok(());
    }
    Err(Failure::new(Status::OutOfRange, format!("{bytes} bytes are not within a snapshot of {snapshot_bytes} bytes")))
}

/// True if both hold the same bytes, even if they are of different regions. The cost is O(1),
/// because equal content of one store is held once. Snapshots of different stores are never equal;
/// null is equal to no snapshot.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_snapshot_equal(a: Option<&Snapshot>, b: Option<&Snapshot>) -> bool {
    value_or(false, || Ok(present(a, "a")?.snapshot == present(b, "b")?.snapshot))
}

/// Stores where two snapshots of one store differ, by the chunk. It costs what differs.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_snapshot_diff(
    a: Option<&Snapshot>,
    b: Option<&Snapshot>,
    differing: Option<&mut MaybeUninit<Ranges>>,
) -> Status {
    report(differing, || {
        let (a, b) = (present(a, "a")?, present(b, "b")?);
        Ok(a.snapshot.content().diff(b.snapshot.content())?)
    })
}
