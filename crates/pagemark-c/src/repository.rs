//! Regions in a repository.

use std::ffi::{CStr, OsStr, c_char};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::NonNull;

use pagemark::job::Taken;
use pagemark::region::RegionSnapshot;
use pagemark::repository::Repository as CoreRepository;
use pagemark::snapshot::SnapshotStore;

use crate::ranges::{Ranges, report};
use crate::region::{Options, Region, options};
use crate::snapshot::Snapshot;
use crate::status::{Failure, Status, guard, make, present};
use crate::store::Store;

/// A directory of checkpoints.
pub struct Repository {
    pub(crate) repository: CoreRepository,
}

/// The string that a pointer of that name points to.
fn text<'a>(pointer: *const c_char, name: &str) -> Result<&'a CStr, Failure> {
    let pointer = present(NonNull::new(pointer.cast_mut()), name)?;
    // SAFETY: the caller passes a string that ends with NUL, and lives until the call ends.
    Ok(unsafe { CStr::from_ptr(pointer.as_ptr()) })
}

/// The name of a job. What is no text is no name of a job either, as the repository says.
pub(crate) fn job_name(job: *const c_char) -> Result<String, Failure> {
    Ok(text(job, "job")?.to_string_lossy().into_owned())
}

/// Saves a handle of that name as the next checkpoint of a job, and stores its number.
fn save<T>(
    handle: Option<&T>,
    name: &str,
    repository: Option<&Repository>,
    job: *const c_char,
    sequence: Option<&mut MaybeUninit<u64>>,
    save: impl FnOnce(&T, &CoreRepository, &str) -> Result<Taken, pagemark::Error>,
) -> Status {
    guard(|| {
        let sequence = sequence.map(|sequence| sequence.write(0));
        let handle = present(handle, name)?;
        let taken = save(handle, &present(repository, "repository")?.repository, &job_name(job)?)?;
        if let Some(sequence) = sequence {
            *sequence = taken.sequence;
        }
        Ok(())
    })
}

/// Opens the repository in a directory, or creates one where there is none.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_repository_open(
    path: *const c_char,
    repository: Option<&mut MaybeUninit<Option<Box<Repository>>>>,
) -> Status {
    make(repository, "repository", || {
        let path = Path::new(OsStr::from_bytes(text(path, "path")?.to_bytes()));
        Ok(Repository { repository: CoreRepository::open_or_create(path)? })
    })
}

/// Closes a repository. Regions that were opened from it or saved to it stay.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_repository_free(repository: Option<Box<Repository>>) {
    guard(|| {
        drop(repository);
        Ok(())
    });
}

/// Saves a region as the next checkpoint of a job. When this returns, the checkpoint is durable;
/// after a crash at any instant the newest checkpoint is this one or the one before it, whole. Only
/// what was written since the last save to the same job is read and stored. The region must not be
/// in a transaction. The number of the checkpoint is stored in `sequence`, which may be null.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_save(
    region: Option<&Region>,
    repository: Option<&Repository>,
    job: *const c_char,
    sequence: Option<&mut MaybeUninit<u64>>,
) -> Status {
    save(region, "region", repository, job, sequence, |region, repository, job| region.region.save(repository, job))
}

/// Opens the newest checkpoint of a job that pagemark_region_save() has written: a new region, at
/// whatever address, that holds what was saved. `PAGEMARK_STATUS_NEVER_SAVED` if the job has no
/// checkpoint. `options` may be null.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_open(
    repository: Option<&Repository>,
    job: *const c_char,
    options: Option<&Options>,
    region: Option<&mut MaybeUninit<Option<Box<Region>>>>,
) -> Status {
    make(region, "region", || {
        let repository = &present(repository, "repository")?.repository;
        Ok(pagemark::Region::open(repository, &job_name(job)?, self::options(options)?)?.into())
    })
}

/// Saves a snapshot as the next checkpoint of a job, as pagemark_region_save() saves a region. All
/// of its content is read; what the repository holds already is not stored again. The number of
/// the checkpoint is stored in `sequence`, which may be null.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_snapshot_save(
    snapshot: Option<&Snapshot>,
    repository: Option<&Repository>,
    job: *const c_char,
    sequence: Option<&mut MaybeUninit<u64>>,
) -> Status {
    save(snapshot, "snapshot", repository, job, sequence, |snapshot, repository, job| {
        snapshot.snapshot.save(repository, job)
    })
}

/// Reads the newest checkpoint of a job that pagemark_snapshot_save() or pagemark_region_save() has
/// written into a store; null for a store of the snapshot's own. The snapshot belongs to no region:
/// pagemark_region_from_snapshot() makes one. `PAGEMARK_STATUS_NEVER_SAVED` if the job has no
/// checkpoint.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_snapshot_open(
    repository: Option<&Repository>,
    job: *const c_char,
    store: Option<&Store>,
    snapshot: Option<&mut MaybeUninit<Option<Box<Snapshot>>>>,
) -> Status {
    make(snapshot, "snapshot", || {
        let repository = &present(repository, "repository")?.repository;
        let store = store.map_or_else(SnapshotStore::new, |store| store.store.clone());
        Ok(Snapshot { snapshot: RegionSnapshot::open(repository, &job_name(job)?, &store)? })
    })
}

/// Makes a region hold what was saved last in a job, in place: for memory that was adopted. The
/// region must be as long as the saved one. Only pages that differ are written; where that was is
/// stored in `loaded`, which may be null.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_load(
    region: Option<&Region>,
    repository: Option<&Repository>,
    job: *const c_char,
    loaded: Option<&mut MaybeUninit<Ranges>>,
) -> Status {
    report(loaded, || {
        let region = &present(region, "region")?.region;
        Ok(region.load(&present(repository, "repository")?.repository, &job_name(job)?)?)
    })
}
