//! Regions.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::ops::Range as Span;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use pagemark::region::RegionOptions;
use pagemark::{Mechanism, RangeSet};

use crate::ranges::{Range, Ranges, report};
use crate::snapshot::Snapshot;
use crate::status::{Failure, Status, guard, guard_quick, make, present, slice, value_or};
use crate::store::Store;

/// A piece of this process's memory whose writes are tracked.
pub struct Region {
    pub(crate) region: pagemark::Region,
    mechanism: CString,
}

/// How a region is tracked. All zeros is the default.
#[repr(C)]
pub struct Options {
    /// The name of a mechanism, as in "pagemap-scan"; null or "auto" for the best mechanism of this
    /// machine. A mechanism that does not work is an error; no other mechanism replaces it.
    ///
    /// Under `mprotect` and `emulate` writes arrive as SIGSEGV. All other faults are passed to the
    /// handler that was installed before. Where another part of the program has replaced the action
    /// of SIGSEGV, the next pagemark_region_begin, or the next region, installs the handler again
    /// and passes such faults to what has replaced it. Until then, a handler that is installed
    /// later must pass faults that are not its own to the handler that it replaces. A thread that
    /// has SIGSEGV blocked, also by the mask of a signal handler, ends the process by its first
    /// write to a page.
    pub mechanism: *const c_char,
    /// True if no transaction will be rolled back. The region then has no copy of its content, and
    /// a transaction begins where the previous transaction ended.
    pub without_rollback: MaybeUninit<bool>,
    /// The store of the snapshots; null for a store of the region's own. It may be freed while the
    /// region exists.
    pub store: *const Store,
    /// True if the memory is written only by threads of this process (by no debugger, no
    /// `process_vm_writev` of another process and no child of `vfork`), only at these addresses,
    /// and not through a file descriptor, while the region exists. Without this promise shared
    /// memory is refused by all mechanisms except `compare` and `full`, because the others do not
    /// see writes of other processes. With it, `adaptive` looks at no page in a commit if the
    /// process has one thread and had no page fault in the transaction.
    pub sole_use: MaybeUninit<bool>,
}

/// A `bool` of the caller, whose byte may be any: memory that was not cleared has others than 0 and
/// 1, which a `bool` of Rust must not have.
fn checked(value: &MaybeUninit<bool>, name: &str) -> Result<bool, Failure> {
    // SAFETY: the caller passes a structure whose bytes are all set. Each is a number.
    match unsafe { value.as_ptr().cast::<u8>().read() } {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Failure::new(
            Status::InvalidArgument,
            format!("{name} is neither true nor false, but {other}: set all fields of the options"),
        )),
    }
}

/// Lets system calls write to a part of a region as long as it exists.
pub struct Writable {
    _writable: pagemark::region::Writable<'static>,
}

pub(crate) fn options(options: Option<&Options>) -> Result<RegionOptions, Failure> {
    let Some(options) = options else { return Ok(RegionOptions::default()) };
    // SAFETY: what the caller passes is null or a store.
    let store = unsafe { options.store.as_ref() };
    let mechanism = match NonNull::new(options.mechanism.cast_mut()) {
        None => None,
        // SAFETY: the caller passes a string that ends with NUL and lives until this call ends.
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
        without_rollback: checked(&options.without_rollback, "without_rollback")?,
        store: store.map(|store| store.store.clone()),
        sole_use: checked(&options.sole_use, "sole_use")?,
    })
}

impl From<pagemark::Region> for Region {
    fn from(region: pagemark::Region) -> Self {
        let mechanism = CString::new(region.mechanism().name()).unwrap_or_default();
        Region { region, mechanism }
    }
}

/// The offsets of `bytes` bytes from `offset` on; beyond every region's end if they are more than
/// there are numbers for.
fn span(offset: usize, bytes: usize) -> Span<usize> {
    offset..offset.saturating_add(bytes)
}

/// Maps a region of `bytes`, rounded up to whole pages. The region holds zeros, and takes memory
/// only where it is written. `options` may be null.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_new(
    bytes: usize,
    options: Option<&Options>,
    region: Option<&mut MaybeUninit<Option<Box<Region>>>>,
) -> Status {
    make(region, "region", || Ok(pagemark::Region::with_options(bytes, self::options(options)?)?.into()))
}

/// Makes existing memory a region: whole pages, readable, writable and not executable, that belong
/// to no other region. The content stays as it is. While the region exists, the memory must stay
/// mapped, no other code may change its mapping or protection, no mapped file may become shorter,
/// and the file of a private mapping must not be written. Shared memory needs
/// pagemark_options.sole_use. `options` may be null.
///
/// Freeing the region ends tracking and keeps the memory, except that `emulate` turns private
/// memory into shared anonymous memory, which children made by fork do not inherit, and which is
/// not locked and has no advice of before (mlock, madvise, mbind). Under `emulate`, no other thread
/// may access the memory during this call. Under `mprotect`, `emulate` and `uffd`, it must hold
/// nothing that the program's allocator or a handler of SIGSEGV writes. Under `mprotect`, children
/// made by fork must inherit it (no MADV_DONTFORK).
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_adopt(
    start: *mut c_void,
    bytes: usize,
    options: Option<&Options>,
    region: Option<&mut MaybeUninit<Option<Box<Region>>>>,
) -> Status {
    make(region, "region", || {
        let start = present(NonNull::new(start.cast()), "start")?;
        let options = self::options(options)?;
        // SAFETY: the caller leaves the mapping alone while the region exists, and there are no
        // Rust references to it. With `sole_use`, the caller promises the sole use.
        let adopted = unsafe {
            match options.sole_use {
                true => pagemark::Region::adopt_shared(start, bytes, options),
                false => pagemark::Region::adopt(start, bytes, options),
            }
        };
        Ok(adopted?.into())
    })
}

/// Maps a region that holds the content of a snapshot, of whichever region it was taken. `options`
/// may be null.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_from_snapshot(
    snapshot: Option<&Snapshot>,
    options: Option<&Options>,
    region: Option<&mut MaybeUninit<Option<Box<Region>>>>,
) -> Status {
    make(region, "region", || {
        let snapshot = &present(snapshot, "snapshot")?.snapshot;
        Ok(pagemark::Region::from_snapshot(snapshot, self::options(options)?)?.into())
    })
}

/// Frees a region: memory that Pagemark mapped is unmapped, and adopted memory is no longer
/// tracked. An open transaction ends without a rollback. Snapshots of the region stay readable.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_free(region: Option<Box<Region>>) {
    guard(|| {
        drop(region);
        Ok(())
    });
}

/// The address of the region. The program reads and writes the memory from any thread, in a
/// transaction or not. Null if `region` is null.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_data(region: Option<&Region>) -> *mut c_void {
    value_or(std::ptr::null_mut(), || Ok(present(region, "region")?.region.as_ptr().cast()))
}

/// How long the region is; 0 if it is null.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_bytes(region: Option<&Region>) -> usize {
    value_or(0, || Ok(present(region, "region")?.region.bytes()))
}

/// The name of the mechanism that finds writes. The string lives as long as the region. Null if
/// `region` is null.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_mechanism(region: Option<&Region>) -> *const c_char {
    value_or(std::ptr::null(), || Ok(present(region, "region")?.mechanism.as_ptr()))
}

/// Smallest unit in which a write is reported, bytes; 0 if the region is null.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_granularity_bytes(region: Option<&Region>) -> u64 {
    value_or(0, || Ok(present(region, "region")?.region.granularity().get()))
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

/// Ends the transaction and stores the offsets that were written in it. A mechanism may report more
/// than was written, never less. `written` may be null. After an error, an open transaction is
/// still open.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_commit(region: Option<&Region>, written: Option<&mut MaybeUninit<Ranges>>) -> Status {
    report(written, || Ok(present(region, "region")?.region.commit()?))
}

/// Ends the transaction, restores the content from its beginning, and stores the restored offsets.
/// `put_back` may be null. After an error, an open transaction is still open.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_rollback(
    region: Option<&Region>,
    put_back: Option<&mut MaybeUninit<Ranges>>,
) -> Status {
    report(put_back, || Ok(present(region, "region")?.region.rollback()?))
}

/// Copies `bytes` bytes of the region from `offset` on. `to` must lie outside of the region; it may
/// be null if `bytes` is 0. Unlike an access through pagemark_region_data(), the copy may race with
/// writes of other threads.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_read(
    region: Option<&Region>,
    offset: usize,
    to: *mut c_void,
    bytes: usize,
) -> Status {
    guard_quick(|| {
        let region = &present(region, "region")?.region;
        let mut none = [];
        let to = if bytes == 0 {
            &mut none[..]
        } else {
            let to: NonNull<u8> = present(NonNull::new(to.cast()), "to")?;
            check_within(region, offset, bytes)?;
            // SAFETY: the caller owns `bytes` bytes at the address, and any bytes are valid numbers
            // to overwrite.
            unsafe { std::slice::from_raw_parts_mut(to.as_ptr(), bytes) }
        };
        Ok(region.read(offset, to)?)
    })
}

/// Copies `bytes` bytes into the region, from `offset` on. `from` must lie outside of the region;
/// it may be null if `bytes` is
/// 0. See pagemark_region_read().
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_write(
    region: Option<&Region>,
    offset: usize,
    from: *const c_void,
    bytes: usize,
) -> Status {
    guard_quick(|| {
        let region = &present(region, "region")?.region;
        let from = if bytes == 0 {
            &[][..]
        } else {
            let from: NonNull<u8> = present(NonNull::new(from.cast_mut().cast()), "from")?;
            check_within(region, offset, bytes)?;
            // SAFETY: the caller passes memory of this length.
            unsafe { std::slice::from_raw_parts(from.as_ptr(), bytes) }
        };
        Ok(region.write(offset, from)?)
    })
}

/// The length of a Rust slice is limited, so a length that exceeds the region is refused before a
/// slice is made.
fn check_within(region: &pagemark::Region, offset: usize, bytes: usize) -> Result<(), Failure> {
    let (offsets, region_bytes) = (span(offset, bytes), region.bytes());
    if offsets.end <= region_bytes && offsets.len() == bytes {
        return Ok(());
    }
    Err(pagemark::Error::beyond_region(offsets, region_bytes).into())
}

/// Reads from a file, a pipe or a socket into the region, once, as read(2) does, and stores the
/// number of bytes that were read; 0 at the end of the file. Under `mprotect` and `emulate` a plain
/// read(2) into a region fails with EFAULT; this call does not.
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

/// Makes the whole pages within a part of the region hold zeros, which counts as a write, and frees
/// their memory. In a shared mapping of a file this makes a hole in the file. In a private mapping
/// of a file, in parts of huge pages and in locked memory, zeros are written and nothing is freed.
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

/// Takes a snapshot without the content of the `count` ranges at `forget`, which may be in any
/// order: free memory, or unused stack. The snapshot holds zeros there. `forget` may be null if
/// `count` is 0.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_region_snapshot_without(
    region: Option<&Region>,
    forget: *const Range,
    count: usize,
    snapshot: Option<&mut MaybeUninit<Option<Box<Snapshot>>>>,
) -> Status {
    make(snapshot, "snapshot", || {
        let region = &present(region, "region")?.region;
        // SAFETY: the caller passes an array of this length.
        let forget = unsafe { slice(NonNull::new(forget.cast_mut()), count, "forget")? };
        if let Some(Range { start, end }) = forget.iter().find(|range| range.start > range.end) {
            return Err(Failure::new(
                Status::InvalidArgument,
                format!("the range {start}..{end} ends before it starts"),
            ));
        }
        let forget: RangeSet = forget.iter().map(|range| range.to_rust()).collect();
        Ok(Snapshot { snapshot: region.snapshot_without(&forget)? })
    })
}

/// Restores a snapshot in place. Only differing content is written; stores the offsets of it.
/// `written` may be null. In a transaction, these writes belong to the transaction.
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
