//! Heaps that survive their program: named arrays and buffers in them.

use std::alloc::{GlobalAlloc, Layout};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_int, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pagemark::ByteCount;
use pagemark_saved_heap::{ErrorKind, HeapOptions, Parts, SavedHeap as CoreHeap, Saving as CoreSaving};
use pyo3::exceptions::{PyBufferError, PyKeyError, PyMemoryError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::buffer::{self, Access};
use crate::errors;
use crate::repository::{Checkpoint, Repository};

/// What the root of the heap leads to: the list of what has a name.
#[repr(C)]
struct Directory {
    magic: u64,
    first: *mut Entry,
}

/// Something with a name. The name and the description follow it.
#[repr(C)]
struct Entry {
    next: *mut Entry,
    data: *mut u8,
    data_bytes: usize,
    name_bytes: usize,
    description_bytes: usize,
}

/// Marks a directory, and the form of the entries.
const MAGIC: u64 = u64::from_le_bytes(*b"pmnames1");

/// Alignment of data: that of the processor's widest loads.
const DATA_ALIGN: usize = 64;

/// Memory that survives the program: named arrays and buffers, whose checkpoints are those of a job
/// in a repository.
///
/// A job without checkpoints gets an empty heap of `capacity_bytes`, which take address space only;
/// otherwise the newest checkpoint is opened, with the capacity that it has, or the checkpoint
/// number `at`. `version` is that of the program's data: a heap of another version raises
/// HeapError.
///
/// `heap.array("name", shape, dtype)` and `heap.buffer("name", size)` return what has the name, and
/// make it, filled with zeros, if nothing has it. Nothing is saved before `checkpoint`.
#[pyclass(frozen, weakref, module = "pagemark")]
pub struct SavedHeap {
    state: Mutex<State>,
    /// Held while names are made and freed, and while a checkpoint copies the memory: it has each
    /// name as a whole or not at all. Locked before `state`, with the interpreter released.
    names: Mutex<()>,
    job: String,
}

struct State {
    /// None when closed.
    held: Option<Held>,
    /// Objects that have given away the address of their data, by its name.
    exports: BTreeMap<String, usize>,
}

struct Held {
    heap: Arc<CoreHeap>,
    directory: NonNull<Directory>,
    entries: BTreeMap<String, NonNull<Entry>>,
}

// SAFETY: the memory is that of the heap, which threads may share; it is accessed under a lock.
unsafe impl Send for Held {}

/// What has a name in a heap: a writable buffer.
#[pyclass(frozen, weakref, module = "pagemark")]
pub struct HeapBuffer {
    heap: Py<SavedHeap>,
    name: String,
    data: Data,
    /// True once somebody has got the address of the data. The data then stays as long as this
    /// object: what is made of a buffer may have its address and no view, but keep the object, as
    /// `numpy.ndarray(shape, buffer=buffer)` does.
    is_known: Mutex<bool>,
}

impl Drop for HeapBuffer {
    fn drop(&mut self) {
        if *self.is_known.get_mut().unwrap_or_else(PoisonError::into_inner) {
            self.heap.get().release(&self.name);
        }
    }
}

/// The memory of something with a name.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Data {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it is an address; Python's views of it are as those of any buffer.
unsafe impl Send for Data {}
// SAFETY: as above.
unsafe impl Sync for Data {}

/// A checkpoint of a heap that is stored while the program goes on.
#[pyclass(frozen, weakref, module = "pagemark")]
pub struct Saving {
    saving: Mutex<Option<CoreSaving>>,
    job: String,
}

impl State {
    /// What is held, in a process that has its memory.
    fn usable(&mut self) -> PyResult<&mut Held> {
        let held = self.held.as_mut().ok_or_else(closed)?;
        held.heap.check_process().map_err(errors::of_heap)?;
        Ok(held)
    }
}

impl Held {
    /// Finds the directory of a heap, or makes it.
    fn new(heap: CoreHeap) -> PyResult<Held> {
        let root = heap.root::<Directory>();
        let is_object = has_bytes(&heap, root, size_of::<Directory>());
        let directory = match NonNull::new(root) {
            // SAFETY: the root is an object of the heap that is long enough, and aligned; any bytes are a
            // number.
            Some(root) if is_object && unsafe { (*root.as_ptr()).magic } == MAGIC => root,
            Some(_) => {
                let reason = "the saved heap was not made in Python: its root leads to something else than names";
                return Err(errors::HeapError::new_err(reason));
            }
            None => {
                let directory = allocate(&heap, Layout::new::<Directory>())?.cast::<Directory>();
                // SAFETY: the object has the size and the alignment.
                unsafe { directory.write(Directory { magic: MAGIC, first: null_mut() }) };
                heap.set_root(directory.as_ptr()).map_err(errors::of_heap)?;
                directory
            }
        };
        let entries = entries(&heap, directory);
        let entries = entries.ok_or_else(|| errors::HeapError::new_err("the names of the saved heap are damaged"))?;
        Ok(Held { heap: Arc::new(heap), directory, entries })
    }

    fn data(&self, name: &str) -> Option<Data> {
        let entry = self.entries.get(name)?;
        // SAFETY: the entry is live, and its data an object or dangling.
        let entry = unsafe { entry.as_ref() };
        Some(Data { start: NonNull::new(entry.data).unwrap_or(NonNull::dangling()), bytes: entry.data_bytes })
    }

    fn description(&self, name: &str) -> Option<String> {
        // SAFETY: the entry is live, and is freed only by a call that has all of this value.
        let description = self.entries.get(name).map(|&entry| unsafe { text(entry, Part::Description) });
        description.map(|text| String::from_utf8_lossy(text).into_owned())
    }

    /// Makes data of zeros. The name is free.
    fn add(&mut self, name: &str, description: &str, bytes: usize) -> PyResult<()> {
        let too_large = || PyMemoryError::new_err(format!("{bytes} bytes are more than a heap can hold"));
        let data_layout = Layout::from_size_align(bytes.max(1), DATA_ALIGN).map_err(|_| too_large())?;
        // SAFETY: the layout has a size.
        let data = NonNull::new(unsafe { self.heap.alloc_zeroed(data_layout) }).ok_or_else(full)?;
        let texts = [name, description].concat();
        let entry = match allocate(&self.heap, entry_layout(texts.len())) {
            Ok(entry) => entry.cast::<Entry>(),
            Err(error) => {
                // SAFETY: nobody has the data.
                unsafe { self.heap.dealloc(data.as_ptr(), data_layout) };
                return Err(error);
            }
        };
        // SAFETY: the object has room for the entry and the texts behind it. The directory is live.
        unsafe {
            let directory = self.directory.as_mut();
            entry.write(Entry {
                next: directory.first,
                data: data.as_ptr(),
                data_bytes: bytes,
                name_bytes: name.len(),
                description_bytes: description.len(),
            });
            entry.add(1).cast::<u8>().copy_from_nonoverlapping(NonNull::from(texts.as_bytes()).cast(), texts.len());
            directory.first = entry.as_ptr();
        }
        self.entries.insert(name.to_owned(), entry);
        Ok(())
    }

    /// Frees what has a name.
    fn remove(&mut self, name: &str) -> bool {
        let Some(entry) = self.entries.remove(name) else { return false };
        // SAFETY: the entries are live, in one list, and this one is not used again. No view of its
        // data exists. The heap knows the sizes of objects.
        unsafe {
            let mut link = &raw mut (*self.directory.as_ptr()).first;
            while *link != entry.as_ptr() {
                link = &raw mut (**link).next;
            }
            let Entry { next, data, .. } = entry.read();
            *link = next;
            self.heap.dealloc(data, Layout::new::<u8>());
            self.heap.dealloc(entry.as_ptr().cast(), Layout::new::<Entry>());
        }
        true
    }
}

/// The entries of a directory, by their names. `None` if the directory leads to anything else than
/// entries and data that are objects of the heap, each once: whoever made the heap decides what is
/// in it.
fn entries(heap: &CoreHeap, directory: NonNull<Directory>) -> Option<BTreeMap<String, NonNull<Entry>>> {
    let mut objects = BTreeSet::from([directory.addr()]);
    let mut entries = BTreeMap::new();
    // SAFETY: the directory is an object of the heap.
    let mut next = unsafe { directory.as_ref().first };
    while let Some(entry) = NonNull::new(next) {
        if !has_bytes(heap, next, size_of::<Entry>()) {
            return None;
        }
        // SAFETY: the entry is an object that is long enough, and aligned; any bytes are numbers.
        let &Entry { next: behind, data, data_bytes, name_bytes, description_bytes } = unsafe { entry.as_ref() };
        let bytes = size_of::<Entry>().checked_add(name_bytes)?.checked_add(description_bytes)?;
        let is_whole = has_bytes(heap, next, bytes) && has_bytes(heap, data, data_bytes);
        if !is_whole || !objects.insert(entry.addr()) || !objects.insert(NonNull::new(data)?.addr()) {
            return None;
        }
        // SAFETY: the object has that many bytes, and the texts are behind the entry.
        let texts = unsafe { [text(entry, Part::Name), text(entry, Part::Description)] };
        let [Ok(name), Ok(_)] = texts.map(|text| str::from_utf8(text).map(str::to_owned)) else { return None };
        if entries.insert(name, entry).is_some() {
            return None;
        }
        next = behind;
    }
    Some(entries)
}

/// True if an address is that of an object of the heap with that many bytes, and aligned.
fn has_bytes<T>(heap: &CoreHeap, object: *const T, bytes: usize) -> bool {
    object.is_aligned() && heap.object_bytes(object).is_some_and(|has| has >= bytes)
}

enum Part {
    Name,
    Description,
}

/// A text of an entry.
///
/// # Safety
/// The entry is live, and nobody frees it as long as the text is used.
unsafe fn text<'a>(entry: NonNull<Entry>, part: Part) -> &'a [u8] {
    // SAFETY: the caller guarantees it; the texts are behind the entry.
    unsafe {
        let (name_bytes, description_bytes) = (entry.as_ref().name_bytes, entry.as_ref().description_bytes);
        let texts = entry.add(1).cast::<u8>();
        match part {
            Part::Name => NonNull::slice_from_raw_parts(texts, name_bytes),
            Part::Description => NonNull::slice_from_raw_parts(texts.add(name_bytes), description_bytes),
        }
        .as_ref()
    }
}

fn entry_layout(text_bytes: usize) -> Layout {
    let text = Layout::array::<u8>(text_bytes);
    // A text that exists is not as long as the address space.
    text.and_then(|text| Layout::new::<Entry>().extend(text)).map_or(Layout::new::<Entry>(), |(layout, _)| layout)
}

fn allocate(heap: &CoreHeap, layout: Layout) -> PyResult<NonNull<u8>> {
    // SAFETY: all layouts here have a size.
    NonNull::new(unsafe { heap.alloc(layout) }).ok_or_else(full)
}

fn full() -> PyErr {
    PyMemoryError::new_err(
        "the heap is full: its capacity was chosen when it was made; a forked child does not have it",
    )
}

fn closed() -> PyErr {
    PyValueError::new_err("the heap is closed")
}

impl SavedHeap {
    /// Call nothing of Python with the lock held; see `Region::lock`.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts an object that gives away the address of data that has a name, if it is to be
    /// counted. False if the name has other data or none.
    fn export(&self, name: &str, data: Data, is_counted: bool) -> bool {
        let mut state = self.lock();
        let held = state.held.as_ref().filter(|held| held.heap.check_process().is_ok());
        let is_there = held.and_then(|held| held.data(name)) == Some(data);
        if is_there && is_counted {
            *state.exports.entry(name.to_owned()).or_default() += 1;
        }
        is_there
    }

    /// Takes an object off the count.
    fn release(&self, name: &str) {
        let mut state = self.lock();
        if let Some(objects) = state.exports.get_mut(name) {
            *objects -= 1;
            if *objects == 0 {
                state.exports.remove(name);
            }
        }
    }

    fn heap(&self) -> PyResult<Arc<CoreHeap>> {
        Ok(self.lock().held.as_ref().ok_or_else(closed)?.heap.clone())
    }

    fn view(slf: &Bound<'_, Self>, name: &str) -> PyResult<HeapBuffer> {
        let data = slf.get().lock().usable()?.data(name);
        let data = data.ok_or_else(|| PyKeyError::new_err(name.to_owned()))?;
        Ok(HeapBuffer { heap: slf.clone().unbind(), name: name.to_owned(), data, is_known: Mutex::new(false) })
    }

    /// The description of what has a name, if something has it.
    fn description(&self, name: &str) -> PyResult<Option<String>> {
        Ok(self.lock().usable()?.description(name))
    }

    fn lock_names(&self) -> MutexGuard<'_, ()> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes data, unless something has the name.
    fn add(&self, py: Python<'_>, name: &str, description: &str, bytes: usize) -> PyResult<()> {
        py.detach(|| {
            let _names = self.lock_names();
            let mut state = self.lock();
            let held = state.usable()?;
            if held.entries.contains_key(name) { Ok(()) } else { held.add(name, description, bytes) }
        })
    }

    /// Frees what has a name.
    fn remove(&self, name: &str) -> PyResult<()> {
        let _names = self.lock_names();
        let mut state = self.lock();
        state.usable()?;
        if let Some(views) = state.exports.get(name) {
            let message = format!("{views} views of {name:?} exist: delete them before it is freed");
            return Err(PyBufferError::new_err(message));
        }
        let held = state.usable()?;
        if held.remove(name) { Ok(()) } else { Err(PyKeyError::new_err(name.to_owned())) }
    }

    /// Runs what copies the memory of the heap, with the interpreter released.
    fn saved<T: Send>(
        &self,
        py: Python<'_>,
        save: impl FnOnce(&CoreHeap) -> Result<T, pagemark_saved_heap::Error> + Send,
    ) -> PyResult<T> {
        let heap = self.heap()?;
        py.detach(|| {
            let names = self.lock_names();
            let saved = save(&heap);
            drop(names);
            // A heap that was closed meanwhile is unmapped here.
            drop(heap);
            saved
        })
        .map_err(errors::of_heap)
    }
}

/// An array over the data that has a name.
fn array_over<'py>(slf: &Bound<'py, SavedHeap>, name: &str, description: &str) -> PyResult<Bound<'py, PyAny>> {
    let view = Bound::new(slf.py(), SavedHeap::view(slf, name)?)?;
    slf.py().import("pagemark.heaps")?.call_method1("array_over", (view, description))
}

#[pymethods]
impl SavedHeap {
    #[new]
    #[pyo3(signature = (repository, job, *, capacity_bytes = 17_179_869_184, parts = 1, version = 0, at = None))]
    fn new(
        py: Python<'_>,
        repository: &Repository,
        job: &str,
        capacity_bytes: u64,
        parts: usize,
        version: u64,
        at: Option<u64>,
    ) -> PyResult<Self> {
        let unknown = || PyValueError::new_err(format!("a page has 1, 2, 4 or 8 parts, not {parts}"));
        let parts = Parts::from_count(parts).ok_or_else(unknown)?;
        let options = HeapOptions { parts, capacity: ByteCount::new(capacity_bytes), version };
        let repository = &repository.repository;
        let opened = py.detach(|| match at {
            Some(sequence) => CoreHeap::open_at(repository, job, sequence, options),
            None => match CoreHeap::open(repository, job, options) {
                Err(error) if error.kind() == ErrorKind::NeverSaved => CoreHeap::create(repository, job, options),
                opened => opened,
            },
        });
        let held = Held::new(opened.map_err(errors::of_heap)?)?;
        let state = State { held: Some(held), exports: BTreeMap::new() };
        Ok(SavedHeap { state: Mutex::new(state), names: Mutex::new(()), job: job.to_owned() })
    }

    /// The name of the job.
    #[getter]
    fn job(&self) -> &str {
        &self.job
    }

    /// True once the heap is closed.
    #[getter]
    fn closed(&self) -> bool {
        self.lock().held.is_none()
    }

    /// The NumPy array that has a name. If nothing has it, an array of this shape and data type is
    /// made, filled with zeros; without a shape that raises KeyError. An array that is there must
    /// have the shape and the data type, where they are given: otherwise ValueError is raised, as
    /// it is for a buffer with this name.
    #[pyo3(signature = (name, shape = None, dtype = None))]
    fn array<'py>(
        slf: &Bound<'py, Self>,
        name: &str,
        shape: Option<Bound<'py, PyAny>>,
        dtype: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let this = slf.get();
        let heaps = slf.py().import("pagemark.heaps")?;
        let missing = || PyKeyError::new_err(name.to_owned());
        if this.description(name)?.is_none() {
            let shape = shape.as_ref().ok_or_else(missing)?;
            let (description, bytes): (String, usize) =
                heaps.call_method1("describe", (shape, dtype.as_ref()))?.extract()?;
            this.add(slf.py(), name, &description, bytes)?;
        }
        // Another thread may have made something else with this name meanwhile.
        let description = this.description(name)?.ok_or_else(missing)?;
        heaps.call_method1("check", (name, &description, shape, dtype))?;
        array_over(slf, name, &description)
    }

    /// The buffer that has a name, as a memoryview of bytes. If nothing has it, a buffer of `size`
    /// bytes is made, filled with zeros; without a size that raises KeyError. What is there must
    /// have the size, where it is given: otherwise ValueError is raised. An array is a buffer, too.
    #[pyo3(signature = (name, size = None))]
    fn buffer<'py>(slf: &Bound<'py, Self>, name: &str, size: Option<usize>) -> PyResult<Bound<'py, PyAny>> {
        if let (None, Some(size)) = (slf.get().description(name)?, size) {
            slf.get().add(slf.py(), name, "", size)?;
        }
        let view = SavedHeap::view(slf, name)?;
        let bytes = view.data.bytes;
        if let Some(size) = size.filter(|&size| size != bytes) {
            return Err(PyValueError::new_err(format!("{name:?} has {bytes} bytes, not {size}")));
        }
        let view = Bound::new(slf.py(), view)?;
        slf.py().import("builtins")?.getattr("memoryview")?.call1((view,))
    }

    /// What has a name: an array, or the memoryview of a buffer.
    fn __getitem__<'py>(slf: &Bound<'py, Self>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        match slf.get().description(name)?.as_deref() {
            None | Some("") => SavedHeap::buffer(slf, name, None),
            Some(description) => array_over(slf, name, description),
        }
    }

    /// Frees what has a name. Raises BufferError as long as views of it exist, or a `HeapBuffer`
    /// that has been viewed.
    fn __delitem__(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        py.detach(|| self.remove(name))
    }

    fn __contains__(&self, name: &str) -> PyResult<bool> {
        Ok(self.description(name)?.is_some())
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(self.lock().held.as_ref().ok_or_else(closed)?.entries.len())
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(PyTuple::new(py, self.names()?)?.try_iter()?.into_any())
    }

    /// The names, sorted.
    fn names(&self) -> PyResult<Vec<String>> {
        Ok(self.lock().held.as_ref().ok_or_else(closed)?.entries.keys().cloned().collect())
    }

    fn __repr__(&self) -> String {
        match &self.lock().held {
            Some(held) => format!("<pagemark.SavedHeap {} with {} names>", self.job, held.entries.len()),
            None => format!("<pagemark.SavedHeap {}, closed>", self.job),
        }
    }

    /// Saves the heap as the next checkpoint of its job. When this returns, the checkpoint is
    /// durable; after a crash at any instant the newest checkpoint is this one or the one before
    /// it, whole. What was written since the last checkpoint is stored. No other thread may write
    /// the data meanwhile. After an error nothing is lost: the next checkpoint includes it.
    fn checkpoint(&self, py: Python<'_>) -> PyResult<Checkpoint> {
        Ok(Checkpoint::taken(&self.job, &self.saved(py, CoreHeap::checkpoint)?))
    }

    /// As `checkpoint`, in the background: returns when the memory is copied, after which the
    /// program may write again. `Saving.wait` returns when the checkpoint is durable. The first
    /// checkpoint of a new heap is stored before this returns.
    fn checkpoint_in_background(&self, py: Python<'_>) -> PyResult<Saving> {
        let saving = self.saved(py, CoreHeap::checkpoint_in_background)?;
        Ok(Saving { saving: Mutex::new(Some(saving)), job: self.job.clone() })
    }

    /// Unmaps the heap. What was not saved is lost. Raises BufferError as long as views of its data
    /// exist, or a `HeapBuffer` that has been viewed.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let held = {
            let mut state = self.lock();
            if let Some((name, views)) = state.exports.first_key_value() {
                let message = format!("{views} views of {name:?} exist: delete them before the heap is closed");
                return Err(PyBufferError::new_err(message));
            }
            state.held.take()
        };
        py.detach(|| drop(held));
        Ok(())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }
}

impl HeapBuffer {
    /// Counts this object, once, as one that has given away the address of its data. False if the
    /// data is not there.
    fn export(&self) -> bool {
        let mut is_known = self.is_known.lock().unwrap_or_else(PoisonError::into_inner);
        let is_there = self.heap.get().export(&self.name, self.data, !*is_known);
        *is_known |= is_there;
        is_there
    }
}

#[pymethods]
impl HeapBuffer {
    /// The name in the heap.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    fn __len__(&self) -> usize {
        self.data.bytes
    }

    fn __repr__(&self) -> String {
        format!("<pagemark.HeapBuffer {:?} of {} bytes>", self.name, self.data.bytes)
    }

    /// # Safety
    /// Called by Python, which passes a view to be filled.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        let exported = if this.export() {
            Ok((this.data.start.as_ptr().cast::<c_void>(), this.data.bytes as ffi::Py_ssize_t))
        } else {
            let reason = format!("{:?} was freed, the heap is closed, or it belongs to the parent process", this.name);
            Err(PyValueError::new_err(reason))
        };
        // SAFETY: Python passes the view. The bytes stay mapped as long as the object, which is counted.
        unsafe { buffer::fill(&slf, view, flags, exported, Access::Writable, || {}) }
    }
}

#[pymethods]
impl Saving {
    /// True if `wait` returns at once.
    #[getter]
    fn done(&self) -> bool {
        let saving = self.saving.lock().unwrap_or_else(PoisonError::into_inner);
        saving.as_ref().is_none_or(CoreSaving::is_done)
    }

    /// Waits until the checkpoint is durable, and returns it. Raises what `checkpoint` raises, and
    /// ValueError the second time.
    fn wait(&self, py: Python<'_>) -> PyResult<Checkpoint> {
        let saving = self.saving.lock().unwrap_or_else(PoisonError::into_inner).take();
        let saving = saving.ok_or_else(|| PyValueError::new_err("the checkpoint was waited for already"))?;
        let taken = py.detach(|| saving.wait()).map_err(errors::of_heap)?;
        Ok(Checkpoint::taken(&self.job, &taken))
    }

    fn __repr__(&self) -> String {
        format!("<pagemark.Saving of {}>", self.job)
    }
}
