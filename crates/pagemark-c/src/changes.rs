//! The content that a transaction changed.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr::NonNull;

use pagemark::ErrorKind;
use pagemark::region::Changes as CoreChanges;

use crate::region::Region;
use crate::status::{Failure, Status, guard, make, present, slice, value_or};

/// The content of the written ranges after a transaction, and before it if it is known.
pub struct Changes {
    /// Points into `changes`.
    items: Vec<Change>,
    changes: CoreChanges,
}

/// The changed content of one range. The pointers are valid as long as the changes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Change {
    /// The first byte, relative to the start of the region.
    pub offset: u64,
    /// How long the range is.
    pub bytes: usize,
    /// The content after the transaction.
    pub new_content: *const u8,
    /// The content before the transaction; null if it is not known, because the region was made
    /// without rollback or the old content was not encoded.
    pub old_content: *const u8,
}

impl From<CoreChanges> for Changes {
    fn from(changes: CoreChanges) -> Self {
        let items = changes.iter().map(|change| Change {
            offset: change.offset as u64,
            bytes: change.new.len(),
            new_content: change.new.as_ptr(),
            old_content: change.old.map_or(std::ptr::null(), <[u8]>::as_ptr),
        });
        Changes { items: items.collect(), changes }
    }
}

/// As pagemark_region_commit(), and makes the content of the written ranges available, as it is
/// after the transaction and, unless the region was made without rollback, as it was before it.
/// Pages that hold the same content as before are left out. After an error, an open transaction is
/// still open.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_commit_changes(
    region: Option<&Region>,
    changes: Option<&mut MaybeUninit<Option<Box<Changes>>>>,
) -> Status {
    guard(|| {
        // Before the transaction ends.
        let out = present(changes, "changes")?.write(None);
        *out = Some(Box::new(present(region, "region")?.region.commit_changes()?.into()));
        Ok(())
    })
}

/// Frees changes.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_changes_free(changes: Option<Box<Changes>>) {
    guard(|| {
        drop(changes);
        Ok(())
    });
}

/// The changes, in ascending order of their offsets; `count` receives how many there are. The array
/// is valid as long as the changes. Null if there are none or if `changes` is null.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_changes_items(
    changes: Option<&Changes>,
    count: Option<&mut MaybeUninit<usize>>,
) -> *const Change {
    value_or(std::ptr::null(), || {
        let count = present(count, "count")?.write(0);
        let items = &present(changes, "changes")?.items;
        *count = items.len();
        Ok(if items.is_empty() { std::ptr::null() } else { items.as_ptr() })
    })
}

/// Writes the new content to a region of the same length, which then counts as written there.
/// Another thread that commits or takes a snapshot of that region has all of the changes or none.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_changes_apply(changes: Option<&Changes>, region: Option<&Region>) -> Status {
    guard(|| Ok(present(changes, "changes")?.changes.apply(&present(region, "region")?.region)?))
}

/// Writes the old content to a region: undoes the changes if they are the last that were made.
/// `PAGEMARK_STATUS_NO_ROLLBACK` if the old content is not known.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_changes_revert(changes: Option<&Changes>, region: Option<&Region>) -> Status {
    guard(|| Ok(present(changes, "changes")?.changes.revert(&present(region, "region")?.region)?))
}

/// Removes the content before the transaction, which a replica does not need.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_changes_forget_old(changes: Option<&mut Changes>) -> Status {
    guard(|| {
        let Changes { items, changes } = present(changes, "changes")?;
        items.iter_mut().for_each(|item| item.old_content = std::ptr::null());
        changes.forget_old();
        Ok(())
    })
}

/// Length of what pagemark_changes_encode() stores; 0 if `changes` is null.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_changes_encoded_bytes(changes: Option<&Changes>) -> usize {
    value_or(0, || Ok(present(changes, "changes")?.changes.encoded_bytes()))
}

/// Stores the changes as bytes at `to`, for another process or a file. `bytes` is the length of the
/// memory there: pagemark_changes_encoded_bytes() or more.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_changes_encode(changes: Option<&Changes>, to: *mut c_void, bytes: usize) -> Status {
    guard(|| {
        let changes = &present(changes, "changes")?.changes;
        let to: NonNull<u8> = present(NonNull::new(to.cast()), "to")?;
        let needed = changes.encoded_bytes();
        if bytes < needed {
            let message = format!("the encoding takes {needed} bytes, and there is room for {bytes}");
            return Err(Failure::new(Status::OutOfRange, message));
        }
        let encoded = changes.try_to_bytes()?;
        // SAFETY: the caller owns `bytes` bytes there, which are at least as many.
        unsafe { std::ptr::copy_nonoverlapping(encoded.as_ptr(), to.as_ptr(), encoded.len()) };
        Ok(())
    })
}

/// Makes changes of the `bytes` bytes at `from` that pagemark_changes_encode() has stored. Any
/// bytes are examined safely: `PAGEMARK_STATUS_DAMAGED` if they are no changes, or were cut or
/// damaged.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_changes_decode(
    from: *const c_void,
    bytes: usize,
    changes: Option<&mut MaybeUninit<Option<Box<Changes>>>>,
) -> Status {
    make(changes, "changes", || {
        let from: NonNull<u8> = present(NonNull::new(from.cast_mut().cast()), "from")?;
        // SAFETY: the caller passes memory of this length.
        let encoded = unsafe { slice(Some(from), bytes, "from")? };
        let decoded = CoreChanges::from_bytes(encoded).map_err(|error| match error.kind() {
            ErrorKind::Damaged | ErrorKind::NewerFormat { .. } => Failure::new(Status::Damaged, error.to_string()),
            _ => error.into(),
        });
        Ok(decoded?.into())
    })
}
