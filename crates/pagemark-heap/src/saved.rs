//! A heap that survives its program: its memory is saved to a repository, and mapped again where it
//! was, so that the pointers in it hold.

use std::alloc::{GlobalAlloc, Layout};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::ops::ControlFlow;
use std::ptr::without_provenance_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};

use pagemark::checkpointer::{Checkpointer, Strategy};
use pagemark::job::Taken;
use pagemark::repository::{Checkpoint, Repository, SpaceKind, SpaceRecord};
use pagemark::{Address, ByteCount, Job, JobOptions, Kind, PAGE_SIZE, PageNumber, PageTree, Policy, Range, Store};
use pagemark_linux::random::random;
use pagemark_linux::shared_bytes::SharedBytes;

use crate::tracked::Tracked;
use crate::{Error, Parts};

#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod memory;
mod objects;
mod runs;
mod saving;
mod sizes;
mod target;

pub(crate) use objects::Objects;
pub use saving::Saving;

use memory::{Field, Header, Memory};
use target::HeapTarget;

/// The label of a heap in its checkpoints.
const LABEL: &str = "heap";

/// Heaps begin at a multiple of this, which is the largest alignment of objects.
const ALIGN_BYTES: usize = 1 << 30;
/// New heaps are put here, where neither the kernel nor the loader puts anything by itself: below
/// programs, and far above the lowest addresses.
const PLACES: std::ops::Range<u64> = 0x1000_0000_0000..0x5000_0000_0000;
/// How many places are tried.
const ATTEMPTS: u64 = 64;

/// What a heap is made with. It is part of what is saved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HeapOptions {
    /// Number of parts of each page. With one part, as by default, a write costs the fewest faults.
    /// A checkpoint stores of a page what changed in it, whatever the number.
    pub parts: Parts,
    /// The bytes that a new heap can hold, tables included; rounded up to a power of two from 2 MiB
    /// to 1 TiB. They take address space only, once for each part, also under `mlockall`. A saved
    /// heap keeps its capacity.
    pub capacity: ByteCount,
    /// The version of the program's data, which is compared when the heap is opened. A program
    /// whose types have changed gives another one.
    pub version: u64,
}

impl Default for HeapOptions {
    /// Whole pages, 16 GiB, version 0.
    fn default() -> Self {
        HeapOptions { parts: Parts::One, capacity: ByteCount::new(16 << 30), version: 0 }
    }
}

/// A heap whose checkpoints are those of a job in a repository, and that is mapped where it was
/// when it is opened again. Threads share it by reference.
///
/// It allocates as [`GlobalAlloc`] does. All that is needed to go on is in its memory: its objects
/// may point to each other, and the [root](SavedHeap::root) leads to them. What they must not hold
/// are addresses of anything else, also in hidden form: references to other memory, functions, the
/// tables of `dyn` types. The names of types and the places of fields are those of the program that
/// wrote them: use `#[repr(C)]` types, and change [`HeapOptions::version`] with them.
///
/// ```
/// use std::alloc::{GlobalAlloc, Layout};
///
/// use pagemark::repository::Repository;
/// use pagemark_heap::{HeapOptions, SavedHeap};
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("repository");
///
/// #[repr(C)]
/// struct Node {
///     value: u64,
///     next: *mut Node,
/// }
///
/// let repository = Repository::open_or_create(&path)?;
/// let heap = SavedHeap::create(&repository, "list", HeapOptions::default())?;
/// for value in 1..=3 {
///     // SAFETY: the layout has a size, and the heap has room.
///     unsafe {
///         let node = heap.alloc(Layout::new::<Node>()).cast::<Node>();
///         node.write(Node { value, next: heap.root() });
///         heap.set_root(node)?;
///     }
/// }
/// heap.checkpoint()?;
/// drop(heap);
///
/// let heap = SavedHeap::open(&repository, "list", HeapOptions::default())?;
/// let (mut node, mut sum) = (heap.root::<Node>(), 0);
/// // SAFETY: the nodes were saved, and are where they were.
/// while let Some(here) = unsafe { node.as_ref() } {
///     sum += here.value;
///     node = here.next;
/// }
/// assert_eq!(sum, 6);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A child made by `fork` does not have the heap: it gets null instead of objects, and SIGSEGV
/// where it uses one. A process that frees what is not an object of the heap is ended (SIGABRT),
/// before the heap is changed.
///
/// Dropped, the heap is unmapped: none of its objects may be used after that. What was not saved is
/// lost.
pub struct SavedHeap {
    objects: Arc<Objects>,
    /// A checkpoint in the background has it, too.
    job: Arc<Mutex<Job<HeapTarget>>>,
    name: String,
}

impl std::fmt::Debug for SavedHeap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SavedHeap").field("job", &self.name).finish_non_exhaustive()
    }
}

impl SavedHeap {
    /// Makes a heap for a job that has no checkpoints. Nothing is saved yet.
    ///
    /// # Errors
    /// `ErrorKind::Exists`; as [`Heap::new`](crate::Heap::new); `ErrorKind::Core` if the repository
    /// could not be read, or the kernel is older than 6.7 or refuses userfaultfd.
    pub fn create(repository: &Repository, job: &str, options: HeapOptions) -> Result<SavedHeap, Error> {
        let newest = repository.newest(job).map_err(Error::core("making", job))?;
        if newest.is_some() {
            return Err(Error::exists(job));
        }
        let capacity = Header::capacity(options.capacity).map_err(Error::creating)?;
        let (header, memory) = place(repository, job, capacity, &options).map_err(Error::creating)?;
        memory.write_header(&header);
        let objects = Arc::new(Objects::new(memory).map_err(Error::creating)?);
        let target = HeapTarget::new(objects.clone(), repository.clone(), job, None, &header)?;
        // All that the heap holds by then is stored piece by piece: there may not be memory for a copy.
        let strategy = Strategy::PreCopy { max_rounds: 1, enough_pages: 0 };
        let job_options = job_options(job, strategy);
        Ok(SavedHeap::of(objects, Job::new(target, repository.clone(), job_options), job))
    }

    /// Opens the newest checkpoint of a job, whole: maps the heap where it was.
    ///
    /// # Errors
    /// `ErrorKind::NeverSaved`, and as [`SavedHeap::open_at`].
    pub fn open(repository: &Repository, job: &str, options: HeapOptions) -> Result<SavedHeap, Error> {
        let newest = repository.newest(job).map_err(Error::core("opening", job))?;
        SavedHeap::open_at(repository, job, newest.ok_or_else(|| Error::never_saved(job))?, options)
    }

    /// Opens a checkpoint of a job, which need not be the newest. The next checkpoint of the heap
    /// is the newest then.
    ///
    /// # Errors
    /// - `ErrorKind::NotAHeap`
    /// - `ErrorKind::OtherAllocator`, `ErrorKind::OtherParts`, `ErrorKind::OtherProgram`
    /// - `ErrorKind::AddressTaken`
    /// - `ErrorKind::Damaged`
    /// - as [`SavedHeap::create`]; `ErrorKind::Core` also if the checkpoint is not there or is
    ///   damaged.
    pub fn open_at(
        repository: &Repository,
        job: &str,
        sequence: u64,
        options: HeapOptions,
    ) -> Result<SavedHeap, Error> {
        let core = |error| Error::core("opening", job)(error);
        let newest = repository.newest(job).map_err(core)?;
        let checkpoint = repository.read(job, sequence).map_err(core)?;
        let (space, bytes) = heap_space(&checkpoint).ok_or_else(|| Error::not_a_heap(job, sequence))?;
        let tree = PageTree::load(space.root, &checkpoint).map_err(core)?;
        let header = header_of(&checkpoint, &tree, bytes, job)?;
        if header.parts != options.parts {
            return Err(Error::other_parts(header.parts, options.parts));
        }
        if header.program_version != options.version {
            return Err(Error::other_program(header.program_version, options.version));
        }
        let memory = Memory::map(&header).map_err(|error| Error::mapping(error, &header.place()))?;
        load(&checkpoint, &tree, &memory, job)?;
        let objects = Arc::new(Objects::load(memory)?);
        let header = Header { session: session().map_err(Error::creating)?, ..header };
        let mut target = HeapTarget::new(objects.clone(), repository.clone(), job, newest, &header)?;
        target.count_as_saved()?;
        objects.memory.field(Field::Session).store(header.session, Ordering::Relaxed);
        let mut checkpointer = Checkpointer::new();
        checkpointer.resume_space(space.id, tree);
        let options = job_options(job, Strategy::StopAndCopy);
        Ok(SavedHeap::of(objects, Job::resumed(target, repository.clone(), options, checkpointer), job))
    }

    fn of(objects: Arc<Objects>, job: Job<HeapTarget>, name: &str) -> SavedHeap {
        SavedHeap { objects, job: Arc::new(Mutex::new(job)), name: name.to_owned() }
    }

    /// Saves the heap as the next checkpoint of its job. When this returns, the checkpoint is
    /// durable; after a crash at any instant the newest checkpoint is this one or the one before
    /// it, whole (FPM, section 5: application-initiated checkpoints).
    ///
    /// What was written since the last checkpoint is copied and stored. The first checkpoint of a
    /// new heap stores everything.
    ///
    /// Call it where the data is consistent, and while no other thread writes objects: what is
    /// written during the call is in this checkpoint or in the next one. Threads that allocate or
    /// free meanwhile wait until the memory is copied; the tables of the heap are consistent in any
    /// case.
    ///
    /// # Errors
    /// `ErrorKind::SavedElsewhere`, `ErrorKind::ForkedChild`; `ErrorKind::Core` if the repository
    /// or the tracker failed. Nothing is lost: the next checkpoint includes what this one would
    /// have saved.
    pub fn checkpoint(&self) -> Result<Taken, Error> {
        self.check_process()?;
        save(&self.job, &self.name, None)
    }

    /// Like [`SavedHeap::checkpoint`], in the background: returns when the memory is copied, after
    /// which the program may write again. The copy is stored in a thread; [`Saving::wait`] returns
    /// when the checkpoint is durable. The first checkpoint of a new heap is stored before this
    /// returns, and so is what does not fit into the memory for copied pages.
    ///
    /// # Errors
    /// `ErrorKind::ForkedChild`; `ErrorKind::Core` if no thread could be started. All others are
    /// those of `wait`.
    pub fn checkpoint_in_background(&self) -> Result<Saving, Error> {
        self.check_process()?;
        let (job, name) = (self.job.clone(), self.name.clone());
        let started = Saving::start(&self.objects, move |copied| save(&job, &name, Some(copied)));
        started.map_err(|error| {
            Error::core("saving", &self.name)(pagemark::Error::system("starting a thread that saves a heap")(error))
        })
    }

    /// Checks that the process is the one that has the heap.
    ///
    /// # Errors
    /// `ErrorKind::ForkedChild`: a child made by `fork` does not have it.
    pub fn check_process(&self) -> Result<(), Error> {
        if self.objects.is_here() { Ok(()) } else { Err(Error::forked_child()) }
    }

    /// The address that the program finds its data by: what [`SavedHeap::set_root`] was given last,
    /// also by an earlier program, or null. Null in a forked child, which does not have the heap.
    pub fn root<T>(&self) -> *mut T {
        if !self.objects.is_here() {
            return std::ptr::null_mut();
        }
        let address = self.objects.memory.field(Field::Root).load(Ordering::Acquire) as usize;
        match self.objects.memory.offset(without_provenance_mut(address)) {
            // The pointer may be used for all objects of the heap, as those that it returned.
            Some(_) => {
                let start = self.objects.memory.views.start().as_ptr();
                start.wrapping_add(address.wrapping_sub(start.addr())).cast()
            }
            None => std::ptr::null_mut(),
        }
    }

    /// Sets the address that [`SavedHeap::root`] returns, which belongs to the next checkpoint.
    ///
    /// # Errors
    /// `ErrorKind::NotInHeap`, unless it is null or in the heap. `ErrorKind::ForkedChild`
    pub fn set_root<T>(&self, root: *const T) -> Result<(), Error> {
        self.check_process()?;
        if !root.is_null() && !self.contains(root) {
            return Err(Error::not_in_heap(root.addr()));
        }
        self.objects.memory.field(Field::Root).store(root.addr() as u64, Ordering::Release);
        Ok(())
    }

    /// True if an address is in the heap, in any of its views.
    pub fn contains<T>(&self, address: *const T) -> bool {
        self.objects.memory.offset(address.cast()).is_some()
    }

    /// The name of the job.
    pub fn job(&self) -> &str {
        &self.name
    }

    /// Number of parts of each page.
    pub fn parts(&self) -> Parts {
        self.objects.parts()
    }

    /// The addresses of the first view, which shows all memory of the heap. The other views are
    /// behind it.
    pub fn addresses(&self) -> Range {
        self.objects.views().view(0)
    }

    /// The bytes of the live object at an address that the heap has handed out, for programs that
    /// read addresses in a heap that others may have made. `None` where there is none, and in a
    /// forked child.
    pub fn object_bytes<T>(&self, address: *const T) -> Option<usize> {
        self.objects.object_bytes(address.cast())
    }

    /// The bytes that an object has, all of which may be written.
    ///
    /// # Safety
    /// `object` is a live object of this heap.
    pub unsafe fn usable_size(&self, object: *mut u8) -> usize {
        // SAFETY: the caller guarantees it.
        unsafe { self.objects.usable_size(object) }
    }
}

// SAFETY: objects do not overlap, have the size and the alignment that was asked for, and stay where
// they are.
unsafe impl GlobalAlloc for SavedHeap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.objects.allocate(layout.size(), layout.align())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.objects.allocate_zeroed(layout.size(), layout.align())
    }

    unsafe fn dealloc(&self, object: *mut u8, _: Layout) {
        // SAFETY: the caller guarantees it.
        unsafe { self.objects.free(object) }
    }

    unsafe fn realloc(&self, object: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller guarantees it.
        unsafe { self.objects.reallocate(object, size, layout.align()) }
    }
}

/// Saves a heap, and reports when its memory is copied.
fn save(job: &Mutex<Job<HeapTarget>>, name: &str, copied: Option<Sender<()>>) -> Result<Taken, Error> {
    let mut job = job.lock().unwrap_or_else(PoisonError::into_inner);
    job.target_mut().report_copied(copied);
    let taken = job.checkpoint();
    // Whoever waits for it learns that it has failed.
    job.target_mut().report_copied(None);
    let taken = taken.map_err(Error::core("saving", name))?;
    job.target_mut().saved_as(taken.sequence);
    job.policy_mut().strategy = Strategy::StopAndCopy;
    Ok(taken)
}

fn job_options(name: &str, strategy: Strategy) -> JobOptions {
    JobOptions { policy: Policy { strategy, ..Policy::default() }, ..JobOptions::new(name) }
}

/// A number that no other program has, nor a child of this one.
fn session() -> io::Result<u64> {
    random().map(u64::from_ne_bytes)
}

/// Maps a new heap at a place that depends on its name, or at another one if that is taken.
fn place(
    repository: &Repository,
    job: &str,
    capacity: ByteCount,
    options: &HeapOptions,
) -> io::Result<(Header, Memory)> {
    let total = capacity.get() * options.parts.count() as u64;
    let places = (PLACES.end - PLACES.start - total) / ALIGN_BYTES as u64;
    let mut taken = None;
    for attempt in 0..ATTEMPTS {
        let mut hasher = DefaultHasher::new();
        (repository.id(), job, attempt).hash(&mut hasher);
        let start = Address::new(PLACES.start + hasher.finish() % places * ALIGN_BYTES as u64);
        let (parts, program_version, session) = (options.parts, options.version, session()?);
        let header = Header { start, capacity, parts, program_version, session };
        match Memory::map(&header) {
            Ok(memory) => return Ok((header, memory)),
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => taken = Some(error),
            Err(error) => return Err(error),
        }
    }
    Err(taken.unwrap_or_else(|| io::ErrorKind::OutOfMemory.into()))
}

/// The heap of a checkpoint, and its length.
fn heap_space(checkpoint: &Checkpoint) -> Option<(&SpaceRecord, ByteCount)> {
    checkpoint.manifest.spaces.iter().find_map(|space| match space.kind {
        SpaceKind::Heap { bytes } if space.label == LABEL => Some((space, bytes)),
        _ => None,
    })
}

/// The header of a saved heap, which was checked.
fn header_of(checkpoint: &Checkpoint, tree: &PageTree, bytes: ByteCount, job: &str) -> Result<Header, Error> {
    let mut page = [0; PAGE_SIZE];
    checkpoint.get_page(tree.get(PageNumber::new(0)), &mut page).map_err(Error::core("opening", job))?;
    Header::read(&page, bytes)
}

/// Copies what was saved into memory that holds zeros.
fn load(checkpoint: &Checkpoint, tree: &PageTree, memory: &Memory, job: &str) -> Result<(), Error> {
    // Before they are listed: a small tree can name any number of pages.
    if !tree.is_before(PageNumber::new(memory.pages.into())) {
        return Err(Error::damaged("do not fit the length of the heap"));
    }
    let (pages, ids): (Vec<_>, Vec<_>) = tree.range(PageNumber::MIN..PageNumber::new(memory.pages.into())).unzip();
    for page in &pages {
        let page = page.get() as u32;
        memory.open(page..page + 1).map_err(Error::creating)?;
    }
    // SAFETY: the first view is mapped, and nobody else knows it.
    let content = unsafe { SharedBytes::new(memory.views.start(), memory.views.view_bytes().to_usize()) };
    let is_page = AtomicBool::new(true);
    let read = checkpoint.get_many(Kind::Page, &ids, &|pieces, bytes| {
        for piece in pieces {
            if piece.bytes.len() != PAGE_SIZE {
                is_page.store(false, Ordering::Relaxed);
                return ControlFlow::Break(());
            }
            content.write(pages[piece.position].address().to_usize(), &bytes[piece.bytes.clone()]);
        }
        ControlFlow::Continue(())
    });
    read.map_err(Error::core("opening", job))?;
    if is_page.into_inner() { Ok(()) } else { Err(Error::damaged("hold something else than pages")) }
}
