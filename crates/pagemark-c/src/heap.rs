//! Heaps that survive their program.

use std::alloc::{GlobalAlloc, Layout};
use std::ffi::{c_char, c_void};
use std::mem::MaybeUninit;
use std::ptr::null_mut;

use pagemark::ByteCount;
use pagemark::repository::Repository as CoreRepository;
use pagemark_saved_heap::{HeapOptions as CoreOptions, Parts, SavedHeap as CoreHeap, Saving as CoreSaving};

use crate::repository::{Repository, job_name};
use crate::status::{Failure, Status, guard, make, present, value_or};

/// A heap whose checkpoints are those of a job in a repository, and that is mapped where it was
/// when it is opened again, so that the pointers in it hold.
///
/// Objects may point to each other, and the root leads to them. What they must not hold are the
/// addresses of anything else: other memory, functions, virtual tables.
pub struct SavedHeap {
    heap: CoreHeap,
}

/// A checkpoint of a heap that is being stored.
pub struct Saving {
    saving: CoreSaving,
}

/// How a heap is made. All zeros is the default.
#[repr(C)]
pub struct HeapOptions {
    /// The bytes that a new heap can hold, rounded up to a power of two from 2 MiB to 1 TiB; 0 for
    /// 16 GiB. They take address space only. A saved heap keeps its capacity.
    pub capacity_bytes: u64,
    /// The version of the program's data. A heap that was made with another version is not opened.
    pub version: u64,
    /// Number of parts of each page whose writes are told apart: 1, 2, 4 or 8; 0 for 1. A heap that
    /// was made with another number is not opened.
    pub parts: usize,
}

/// The alignment of objects for which none is given: that of C's malloc().
const ALIGN_BYTES: usize = 16;

fn options(options: Option<&HeapOptions>) -> Result<CoreOptions, Failure> {
    let mut result = CoreOptions::default();
    if let Some(HeapOptions { capacity_bytes, version, parts }) = options {
        if *capacity_bytes > 0 {
            result.capacity = ByteCount::new(*capacity_bytes);
        }
        if *parts > 0 {
            let unknown =
                || Failure::new(Status::InvalidArgument, format!("pages have 1, 2, 4 or 8 parts, not {parts}"));
            result.parts = Parts::from_count(*parts).ok_or_else(unknown)?;
        }
        result.version = *version;
    }
    Ok(result)
}

/// Makes or opens the heap of a job.
fn map(
    repository: Option<&Repository>,
    job: *const c_char,
    options: Option<&HeapOptions>,
    heap: Option<&mut MaybeUninit<Option<Box<SavedHeap>>>>,
    map: impl FnOnce(&CoreRepository, &str, CoreOptions) -> Result<CoreHeap, pagemark_saved_heap::Error>,
) -> Status {
    make(heap, "heap", || {
        let repository = &present(repository, "repository")?.repository;
        Ok(SavedHeap { heap: map(repository, &job_name(job)?, self::options(options)?)? })
    })
}

/// Makes a heap for a job that has no checkpoints: `PAGEMARK_STATUS_EXISTS` if it has some. Nothing
/// is saved yet. `options` may be null.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_saved_heap_create(
    repository: Option<&Repository>,
    job: *const c_char,
    options: Option<&HeapOptions>,
    heap: Option<&mut MaybeUninit<Option<Box<SavedHeap>>>>,
) -> Status {
    map(repository, job, options, heap, CoreHeap::create)
}

/// Opens the newest checkpoint of a job: maps the heap where it was. `PAGEMARK_STATUS_NEVER_SAVED`
/// if the job has no checkpoint, `PAGEMARK_STATUS_ADDRESS_TAKEN` if something else is mapped there,
/// `PAGEMARK_STATUS_OTHER_HEAP` if the heap was made with another version, number of parts, or
/// allocator. `options` may be null.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_saved_heap_open(
    repository: Option<&Repository>,
    job: *const c_char,
    options: Option<&HeapOptions>,
    heap: Option<&mut MaybeUninit<Option<Box<SavedHeap>>>>,
) -> Status {
    map(repository, job, options, heap, CoreHeap::open)
}

/// As pagemark_saved_heap_open(), for a checkpoint that need not be the newest. The next checkpoint
/// of the heap is the newest then.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_saved_heap_open_at(
    repository: Option<&Repository>,
    job: *const c_char,
    sequence: u64,
    options: Option<&HeapOptions>,
    heap: Option<&mut MaybeUninit<Option<Box<SavedHeap>>>>,
) -> Status {
    map(repository, job, options, heap, |repository, job, options| {
        CoreHeap::open_at(repository, job, sequence, options)
    })
}

/// Unmaps a heap: none of its objects may be used after that. What was not saved is lost.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_saved_heap_free(heap: Option<Box<SavedHeap>>) {
    guard(|| {
        drop(heap);
        Ok(())
    });
}

/// Saves the heap as the next checkpoint of its job. When this returns, the checkpoint is durable;
/// after a crash at any instant the newest checkpoint is this one or the one before it, whole. What
/// was written since the last checkpoint is stored. No other thread may write objects meanwhile;
/// threads may allocate and free. The number of the checkpoint is stored in `sequence`, which may
/// be null. After an error nothing is lost: the next checkpoint includes it.
/// `PAGEMARK_STATUS_SAVED_ELSEWHERE` if another program has saved to the job since the heap was
/// opened.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_saved_heap_checkpoint(
    heap: Option<&SavedHeap>,
    sequence: Option<&mut MaybeUninit<u64>>,
) -> Status {
    guard(|| {
        let sequence = sequence.map(|sequence| sequence.write(0));
        let taken = present(heap, "heap")?.heap.checkpoint()?;
        if let Some(sequence) = sequence {
            *sequence = taken.sequence;
        }
        Ok(())
    })
}

/// As pagemark_saved_heap_checkpoint(), in the background: returns when the memory is copied, after
/// which the program may write again, and stores the copy in a thread. Errors are those of
/// pagemark_saving_wait(). The first checkpoint of a new heap is stored before this returns.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_saved_heap_checkpoint_begin(
    heap: Option<&SavedHeap>,
    saving: Option<&mut MaybeUninit<Option<Box<Saving>>>>,
) -> Status {
    make(saving, "saving", || Ok(Saving { saving: present(heap, "heap")?.heap.checkpoint_in_background()? }))
}

/// Waits until the checkpoint is durable, frees `saving`, also after an error, and stores the
/// number of the checkpoint in `sequence`, which may be null. After an error nothing is lost: the
/// next checkpoint includes it. The heap may have been freed meanwhile.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_saving_wait(saving: Option<Box<Saving>>, sequence: Option<&mut MaybeUninit<u64>>) -> Status {
    guard(|| {
        let sequence = sequence.map(|sequence| sequence.write(0));
        let taken = present(saving, "saving")?.saving.wait()?;
        if let Some(sequence) = sequence {
            *sequence = taken.sequence;
        }
        Ok(())
    })
}

/// True if pagemark_saving_wait() returns at once; false if `saving` is null.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_saving_is_done(saving: Option<&Saving>) -> bool {
    value_or(false, || Ok(present(saving, "saving")?.saving.is_done()))
}

/// Waits as pagemark_saving_wait(), for those who do not want to know how the checkpoint went.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_saving_free(saving: Option<Box<Saving>>) {
    guard(|| {
        drop(saving);
        Ok(())
    });
}

/// The address that pagemark_saved_heap_set_root() was given last, also by an earlier program; null
/// in a new heap. Null, with a message in pagemark_last_error(), in a child made by fork.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_saved_heap_root(heap: Option<&SavedHeap>) -> *mut c_void {
    value_or(null_mut(), || {
        let heap = &present(heap, "heap")?.heap;
        heap.check_process()?;
        Ok(heap.root())
    })
}

/// Sets the address by which the program finds its data: null or an address in the heap, else
/// `PAGEMARK_STATUS_OUT_OF_RANGE`. It belongs to the next checkpoint.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_saved_heap_set_root(heap: Option<&SavedHeap>, root: *const c_void) -> Status {
    guard(|| Ok(present(heap, "heap")?.heap.set_root(root)?))
}

/// True if an address is in the heap, in any of its views.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_saved_heap_contains(heap: Option<&SavedHeap>, address: *const c_void) -> bool {
    value_or(false, || Ok(present(heap, "heap")?.heap.contains(address)))
}

/// Allocates an object. `alignment` is a power of two up to 1 GiB; 0 for that of malloc(). Null,
/// with a message in pagemark_last_error(), if the heap is full, and in a child made by fork, which
/// does not have the heap.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_saved_heap_allocate(
    heap: Option<&SavedHeap>,
    bytes: usize,
    alignment: usize,
) -> *mut c_void {
    allocate(heap, bytes, alignment, |heap, layout| {
        // SAFETY: the layout has a size.
        unsafe { heap.alloc(layout) }
    })
}

/// As pagemark_saved_heap_allocate(), filled with zeros.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_saved_heap_allocate_zeroed(
    heap: Option<&SavedHeap>,
    bytes: usize,
    alignment: usize,
) -> *mut c_void {
    allocate(heap, bytes, alignment, |heap, layout| {
        // SAFETY: the layout has a size.
        unsafe { heap.alloc_zeroed(layout) }
    })
}

/// Resizes an object that was allocated with this alignment, and moves it if needed. Null if there
/// is no room, as pagemark_saved_heap_allocate(); then the object is as it was. Allocates an object
/// if `object` is null.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_saved_heap_reallocate(
    heap: Option<&SavedHeap>,
    object: *mut c_void,
    bytes: usize,
    alignment: usize,
) -> *mut c_void {
    if object.is_null() {
        return pagemark_saved_heap_allocate(heap, bytes, alignment);
    }
    allocate(heap, bytes, alignment, |heap, layout| {
        // SAFETY: the caller passes an object of this heap. The heap knows its size, and looks at the
        // alignment of the layout only.
        unsafe { heap.realloc(object.cast(), layout, layout.size()) }
    })
}

/// Frees an object; nothing if it is null. A process that frees what is no object of the heap is
/// ended (SIGABRT) before the heap is changed.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_saved_heap_deallocate(heap: Option<&SavedHeap>, object: *mut c_void) {
    if object.is_null() {
        return;
    }
    guard(|| {
        let heap = &present(heap, "heap")?.heap;
        // SAFETY: the caller passes an object of this heap. The heap knows its layout.
        unsafe { heap.dealloc(object.cast(), Layout::new::<u8>()) };
        Ok(())
    });
}

/// The bytes that an object has, all of which may be written; 0 if it is null.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_saved_heap_usable_bytes(heap: Option<&SavedHeap>, object: *mut c_void) -> usize {
    if object.is_null() {
        return 0;
    }
    value_or(0, || {
        // SAFETY: the caller passes an object of this heap.
        Ok(unsafe { present(heap, "heap")?.heap.usable_size(object.cast()) })
    })
}

fn allocate(
    heap: Option<&SavedHeap>,
    bytes: usize,
    alignment: usize,
    allocate: impl FnOnce(&CoreHeap, Layout) -> *mut u8,
) -> *mut c_void {
    value_or(null_mut(), || {
        let heap = &present(heap, "heap")?.heap;
        let alignment = if alignment == 0 { ALIGN_BYTES } else { alignment };
        if !alignment.is_power_of_two() {
            return Err(Failure::new(Status::InvalidArgument, format!("{alignment} is no alignment")));
        }
        let no_room = || Failure::new(Status::NoMemory, format!("the heap has no room for {bytes} bytes"));
        let object = allocate(heap, Layout::from_size_align(bytes.max(1), alignment).map_err(|_| no_room())?);
        if object.is_null() { Err(no_room()) } else { Ok(object.cast()) }
    })
}
