//! Regions.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::ops::Range as Span;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use pagemark::region::{RegionError, RegionOptions};
use pagemark::{Mechanism, RangeSet};

use crate::ranges::{Range, Ranges, report};
use crate::snapshot::Snapshot;
use crate::status::{Failure, Status, guard, make, present, value_or};
use crate::store::Store;

/// A piece of this process's memory whose writes are tracked.
pub struct Region {
    region: pagemark::Region,
    mechanism: CString,
}

/// How a region is tracked. All zeros is the default.
#[repr(C)]
pub struct Options {
    /// The name of a mechanism, as in "pagemap-scan"; null or "auto" for the one that serves best. One that does not work
    /// here is an error, never replaced by another one.
    ///
    /// Under `mprotect` and `emulate` writes arrive as SIGSEGV. Everything else goes on to the handler that was there before
    /// the first region; a handler that comes later must call the one that it replaces for what is not its own.
    pub mechanism: *const c_char,
    /// No transaction will be rolled back. Then no copy of the region is kept, and a transaction begins where the last one
    /// ended.
    pub without_rollback: bool,
    /// Where snapshots are held; null for a store of the region's own. It may be freed while the region exists.
    pub store: *const Store,
}

/// Lets system calls write to a part of a region as long as it exists.
pub struct Writable {
    _writable: pagemark::region::Writable<'static>,
}

fn options(options: Option<&Options>) -> Result<RegionOptions, Failure> {
    let Some(options) = options else { return Ok(RegionOptions::default()) };
    // SAFETY: what the caller passes is null or a store.
    let store = unsafe { options.store.as_ref() };
    let mechanism = match NonNull::new(options.mechanism.cast_mut()) {
        None => None,
        // SAFETY: what the caller passes is a string that ends with NUL, and lives until this call ends.
        Some(name) => match &*unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy() {
            "auto" => None,
            name => {
                let invalid = |message| Failure::new(Status::InvalidArgument, message);
                Some(name.parse::<Mechanism>().map_err(invalid)?)
            }
        },
    };
    Ok(RegionOptions {
        mechanism,
        without_rollback: options.without_rollback,
        store: store.map(|store| store.store.clone()),
    })
}

impl From<pagemark::Region> for Region {
    fn from(region: pagemark::Region) -> Self {
        let mechanism = CString::new(region.mechanism().name()).unwrap_or_default();
        Region { region, mechanism }
    }
}

/// The offsets of `bytes` bytes from `offset` on; beyond every region's end if they are more than there are numbers for.
fn span(offset: usize, bytes: usize) -> Span<usize> {
    offset..offset.saturating_add(bytes)
}

/// Maps a region of `bytes`, rounded up to whole pages. It holds zeros, and takes memory only as it is written. `options` may be
/// null.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_new(
    bytes: usize,
    options: Option<&Options>,
    region: Option<&mut MaybeUninit<Option<Box<Region>>>>,
) -> Status {
    make(region, "region", || Ok(pagemark::Region::with_options(bytes, self::options(options)?)?.into()))
}

/// Makes memory that is there already a region: whole pages, readable and writable and not executable, that belong to no
/// other region. While the region exists, the memory must stay mapped, and nobody else may change its mapping or protection.
/// `options` may be null.
///
/// When the region is freed the memory is as it was before, except that `emulate` turns private memory into shared anonymous
/// memory that children made by fork do not have.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_adopt(
    start: *mut c_void,
    bytes: usize,
    options: Option<&Options>,
    region: Option<&mut MaybeUninit<Option<Box<Region>>>>,
) -> Status {
    make(region, "region", || {
        let start = present(NonNull::new(start.cast()), "start")?;
        // SAFETY: the caller leaves the mapping alone while the region exists, and there are no Rust references to it.
        let adopted = unsafe { pagemark::Region::adopt(start, bytes, self::options(options)?) };
        Ok(adopted?.into())
    })
}

/// Frees a region: memory that Pagemark mapped is unmapped, and adopted memory is no longer tracked. An open transaction ends
/// without a rollback. Snapshots of the region stay readable.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_free(region: Option<Box<Region>>) {
    guard(|| {
        drop(region);
        Ok(())
    });
}

/// Where the region begins. The program reads and writes there as it likes, from any thread, in a transaction or not. Null
/// if `region` is.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_data(region: Option<&Region>) -> *mut c_void {
    value_or(std::ptr::null_mut(), || Ok(present(region, "region")?.region.as_ptr().cast()))
}

/// How long the region is; 0 if it is null.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_bytes(region: Option<&Region>) -> usize {
    value_or(0, || Ok(present(region, "region")?.region.bytes()))
}

/// The name of the mechanism that finds what is written, for as long as the region exists; null if the region is.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_mechanism(region: Option<&Region>) -> *const c_char {
    value_or(std::ptr::null(), || Ok(present(region, "region")?.mechanism.as_ptr()))
}

/// Smallest unit in which a write is reported, bytes; 0 if the region is null.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_granularity_bytes(region: Option<&Region>) -> u64 {
    value_or(0, || Ok(present(region, "region")?.region.granularity_bytes()))
}

/// True between begin and commit or rollback; false if the region is null.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_in_transaction(region: Option<&Region>) -> bool {
    value_or(false, || Ok(present(region, "region")?.region.in_transaction()))
}

/// Begins a transaction. Transactions do not nest.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_begin(region: Option<&Region>) -> Status {
    guard(|| Ok(present(region, "region")?.region.begin()?))
}

/// Ends the transaction and stores what was written in it, and more where the mechanism can't tell. `written` may be
/// null. After an error the transaction, if there is one, is still open.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_commit(region: Option<&Region>, written: Option<&mut MaybeUninit<Ranges>>) -> Status {
    report(written, || Ok(present(region, "region")?.region.commit()?))
}

/// Ends the transaction, puts back what the region held when it began, and stores where that was. `put_back` may be null. After an
/// error the transaction, if there is one, is still open.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_rollback(
    region: Option<&Region>,
    put_back: Option<&mut MaybeUninit<Ranges>>,
) -> Status {
    report(put_back, || Ok(present(region, "region")?.region.rollback()?))
}

/// Copies `bytes` bytes of the region from `offset` on. `to` must lie outside of the region; it may be null if `bytes` is 0.
/// Unlike an access through pagemark_region_data(), it may race with others' writes, and is an error where the region was
/// unmapped.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_read(
    region: Option<&Region>,
    offset: usize,
    to: *mut c_void,
    bytes: usize,
) -> Status {
    guard(|| {
        let region = &present(region, "region")?.region;
        let mut none = [];
        let to = if bytes == 0 {
            &mut none[..]
        } else {
            let to: NonNull<u8> = present(NonNull::new(to.cast()), "to")?;
            check_within(region, offset, bytes)?;
            // SAFETY: the caller owns so many bytes there, and any bytes are valid numbers to be overwritten.
            unsafe { std::slice::from_raw_parts_mut(to.as_ptr(), bytes) }
        };
        Ok(region.read(offset, to)?)
    })
}

/// Copies `bytes` bytes into the region, from `offset` on. `from` must lie outside of the region; it may be null if `bytes` is
/// 0. See pagemark_region_read().
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_write(
    region: Option<&Region>,
    offset: usize,
    from: *const c_void,
    bytes: usize,
) -> Status {
    guard(|| {
        let region = &present(region, "region")?.region;
        let from = if bytes == 0 {
            &[][..]
        } else {
            let from: NonNull<u8> = present(NonNull::new(from.cast_mut().cast()), "from")?;
            check_within(region, offset, bytes)?;
            // SAFETY: the caller passes so many bytes.
            unsafe { std::slice::from_raw_parts(from.as_ptr(), bytes) }
        };
        Ok(region.write(offset, from)?)
    })
}

/// A Rust slice can't be of any length that C may name, so what is too long for the region is refused before one is made.
fn check_within(region: &pagemark::Region, offset: usize, bytes: usize) -> Result<(), Failure> {
    let (offsets, region_bytes) = (span(offset, bytes), region.bytes());
    if offsets.end <= region_bytes && offsets.len() == bytes {
        return Ok(());
    }
    Err(RegionError::OutOfRange { offsets, bytes: region_bytes }.into())
}

/// Reads from a file, a pipe or a socket into the region, once, as read(2) does, and stores how many bytes were read; 0 is the
/// end. Under `mprotect` and `emulate` a plain read(2) into a region fails with EFAULT, and this does not.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_read_from(
    region: Option<&Region>,
    file: c_int,
    offset: usize,
    bytes: usize,
    read: Option<&mut MaybeUninit<usize>>,
) -> Status {
    guard(|| {
        let read = present(read, "read")?.write(0);
        let region = &present(region, "region")?.region;
        if file < 0 {
            return Err(Failure::new(Status::InvalidArgument, format!("{file} is no file descriptor")));
        }
        // SAFETY: not negative; whether it is open is for the system call to say.
        let file = unsafe { BorrowedFd::borrow_raw(file) };
        *read = region.read_from(file, span(offset, bytes))?;
        Ok(())
    })
}

/// Lets system calls write to a part of the region until pagemark_writable_free(), for those that
/// pagemark_region_read_from() does not make. The pages there count as written meanwhile.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_make_writable(
    region: Option<&'static Region>,
    offset: usize,
    bytes: usize,
    writable: Option<&mut MaybeUninit<Option<Box<Writable>>>>,
) -> Status {
    make(writable, "writable", || {
        let region = &present(region, "region")?.region;
        Ok(Writable { _writable: region.writable(span(offset, bytes))? })
    })
}

/// Ends what pagemark_region_make_writable() began.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_writable_free(writable: Option<Box<Writable>>) {
    guard(|| {
        drop(writable);
        Ok(())
    });
}

/// Frees the memory behind the whole pages in a part of the region: they hold zeros afterwards, which counts as a write.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_discard(region: Option<&Region>, offset: usize, bytes: usize) -> Status {
    guard(|| Ok(present(region, "region")?.region.discard(span(offset, bytes))?))
}

/// Takes a snapshot. It costs what was written since the last one was taken or restored.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_snapshot(
    region: Option<&Region>,
    snapshot: Option<&mut MaybeUninit<Option<Box<Snapshot>>>>,
) -> Status {
    make(snapshot, "snapshot", || Ok(Snapshot { snapshot: present(region, "region")?.region.snapshot()? }))
}

/// Takes a snapshot in which the `count` ranges at `forget`, in any order, need not be saved: memory that is free, or stack
/// that is not in use. It holds zeros there. `forget` may be null if `count` is 0.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_snapshot_without(
    region: Option<&Region>,
    forget: *const Range,
    count: usize,
    snapshot: Option<&mut MaybeUninit<Option<Box<Snapshot>>>>,
) -> Status {
    make(snapshot, "snapshot", || {
        let region = &present(region, "region")?.region;
        let forget = if count == 0 {
            &[]
        } else {
            let forget = present(NonNull::new(forget.cast_mut()), "forget")?;
            // SAFETY: the caller passes so many ranges.
            unsafe { std::slice::from_raw_parts(forget.as_ptr(), count) }
        };
        if let Some(Range { start, end }) = forget.iter().find(|range| range.start > range.end) {
            return Err(Failure::new(
                Status::InvalidArgument,
                format!("the range {start}..{end} ends before it starts"),
            ));
        }
        let forget: RangeSet = forget.iter().map(|range| range.start..range.end).collect();
        Ok(Snapshot { snapshot: region.snapshot_without(&forget)? })
    })
}

/// Makes the region hold what the snapshot holds, in place, and stores what was written for that: only what differed.
/// `written` may be null. In a transaction, it counts as written in it.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_restore(
    region: Option<&Region>,
    snapshot: Option<&Snapshot>,
    written: Option<&mut MaybeUninit<Ranges>>,
) -> Status {
    report(written, || {
        let region = &present(region, "region")?.region;
        Ok(region.restore(&present(snapshot, "snapshot")?.snapshot)?)
    })
}
