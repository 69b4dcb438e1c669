//! Where snapshots are held.

use std::mem::MaybeUninit;

use pagemark::snapshot::{SnapshotOptions, SnapshotStore};

use crate::status::{Status, guard, make, present};

/// Holds snapshots of any number of regions: each chunk of content once, even if several snapshots
/// have it, and no chunks of zeros.
pub struct Store {
    pub(crate) store: SnapshotStore,
}

/// How a store holds snapshots. All zeros is the default.
#[repr(C)]
pub struct StoreOptions {
    /// Bytes of a chunk, a power of two from 256 to 65536; 0 for a page. Smaller chunks share more
    /// content, and take more memory for tables: about 40 bytes a chunk.
    pub chunk_bytes: usize,
    /// Maximum number of bytes that the store holds; 0 for no budget. Where it does not suffice,
    /// chunks are compressed, or held as a difference.
    pub budget_bytes: u64,
}

/// What a store holds.
#[repr(C)]
pub struct Usage {
    /// Different chunks, without that of zeros.
    pub chunks: u64,
    /// Those of them that are compressed.
    pub compressed_chunks: u64,
    /// Those of them that are held as the difference from another one.
    pub delta_chunks: u64,
    /// Bytes of memory that the content takes.
    pub content_bytes: u64,
    /// Bytes of memory that everything else takes.
    pub overhead_bytes: u64,
    /// What the budget limits.
    pub held_bytes: u64,
}

/// Makes an empty store. `options` may be null.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_store_new(
    options: Option<&StoreOptions>,
    store: Option<&mut MaybeUninit<Option<Box<Store>>>>,
) -> Status {
    make(store, "store", || {
        let mut chosen = SnapshotOptions::default();
        if let Some(options) = options {
            if options.chunk_bytes != 0 {
                chosen.chunk_bytes = options.chunk_bytes;
            }
            chosen.budget_bytes = (options.budget_bytes != 0).then_some(options.budget_bytes);
        }
        Ok(Store { store: SnapshotStore::with_options(chosen)? })
    })
}

/// Frees a store. Regions and snapshots that use it go on doing so.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_store_free(store: Option<Box<Store>>) {
    guard(|| {
        drop(store);
        Ok(())
    });
}

/// Stores what a store holds, and what that takes.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_store_usage(store: Option<&Store>, usage: Option<&mut MaybeUninit<Usage>>) -> Status {
    guard(|| {
        let held = present(store, "store")?.store.usage();
        present(usage, "usage")?.write(Usage {
            chunks: held.chunks,
            compressed_chunks: held.compressed_chunks,
            delta_chunks: held.delta_chunks,
            content_bytes: held.content_bytes,
            overhead_bytes: held.overhead_bytes,
            held_bytes: held.held_bytes,
        });
        Ok(())
    })
}
