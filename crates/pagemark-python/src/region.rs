//! Regions, and their memory as a buffer.

use std::ffi::{c_int, c_void};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pagemark::Mechanism;
use pagemark::region::{FormerMemory, RegionOptions};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::buffer::{self, Access, Exported};
use crate::errors;
use crate::ranges::{Ranges, set};
use crate::repository::{Checkpoint, Repository};
use crate::snapshot::Snapshot;
use crate::store::Store;

mod changes;
mod transaction;
mod writable;

pub use changes::{Change, Changes};
pub use transaction::Transaction;
pub use writable::Writable;

/// Memory whose writes are tracked: `bytes` of it, rounded up to whole pages, zeros at first.
///
/// It is a writable buffer: `numpy.frombuffer(region, dtype=...)`, `memoryview(region)`.
/// `mechanism` is one of `MECHANISMS`, or "auto" for the fastest that works here. A mechanism that
/// does not work here raises MechanismError; no other takes its place. With `rollback=False` the
/// region keeps no copy for a rollback, and a transaction begins where the last one ended. The
/// snapshots of regions that share a `store` hold equal content once. `sole_use=True` promises that
/// no other process writes the memory, as a debugger does; in a process with one thread, a
/// transaction that writes the same pages as those before it then costs less.
///
/// With the mechanisms `mprotect` and `emulate`, system calls that write into the buffer
/// (`file.readinto`) fail with EFAULT. `read_from` works with every mechanism, and so does every
/// system call in a `with region.writable():` block. These two mechanisms also install a handler of
/// SIGSEGV, which passes crashes on to the handler that was installed before. `faulthandler` must
/// be enabled before a transaction begins: a handler that is installed later and does not pass on
/// the faults of others, as `faulthandler` does not, takes the first write to a page for a crash
/// until the next transaction or region begins. A thread that has SIGSEGV blocked ends the process
/// by its first write to a page.
#[pyclass(frozen, weakref, module = "pagemark")]
pub struct Region {
    state: Mutex<State>,
    mechanism: Mechanism,
    has_rollback: bool,
}

/// A region, and the view of the buffer whose memory it has adopted.
pub struct Held {
    pub region: ManuallyDrop<pagemark::Region>,
    adopted: Option<PyUntypedBuffer>,
    /// True once somebody has got the address of the memory.
    is_known: AtomicBool,
    /// That of the Python object, which exists longer.
    former: Former,
}

/// The memory of a closed region. What is made of a buffer may have its address and no view, but
/// keep the object, as `numpy.ndarray(shape, buffer=region)` does.
type Former = Arc<Mutex<Option<(FormerMemory, Option<PyUntypedBuffer>)>>>;

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: the region is not used again.
        let former = unsafe { ManuallyDrop::take(&mut self.region) }.into_memory();
        if self.is_known.load(Ordering::Relaxed) {
            let former = Some((former, self.adopted.take()));
            *self.former.lock().unwrap_or_else(PoisonError::into_inner) = former;
        }
    }
}

struct State {
    /// None when closed.
    held: Option<Arc<Held>>,
    /// Views of the memory that exist.
    exports: usize,
    /// The memory of a closed region, as long as the object exists. After `held`, which fills it
    /// in.
    _former: Former,
}

impl Region {
    /// Call nothing of Python with the lock held. Where Python has no global lock, it may stop all
    /// threads in any call, and would wait for those that wait for this lock.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a view of the memory. Returns its start and size, or None if the region is closed.
    fn export(&self) -> Option<Exported> {
        let mut state = self.lock();
        let held = state.held.as_ref()?;
        held.is_known.store(true, Ordering::Relaxed);
        let memory = (held.region.as_ptr().cast::<c_void>(), held.region.bytes() as ffi::Py_ssize_t);
        state.exports += 1;
        Some(memory)
    }

    pub(crate) fn held(&self) -> PyResult<Arc<Held>> {
        self.lock().held.clone().ok_or_else(closed)
    }

    fn of(region: pagemark::Region, has_rollback: bool, adopted: Option<PyUntypedBuffer>) -> Region {
        let mechanism = region.mechanism();
        let former = Former::default();
        let (region, is_known) = (ManuallyDrop::new(region), AtomicBool::new(false));
        let held = Some(Arc::new(Held { region, adopted, is_known, former: former.clone() }));
        Region { state: Mutex::new(State { held, exports: 0, _former: former }), mechanism, has_rollback }
    }

    /// Runs an operation on the region that may take long, or wait for one, with the interpreter
    /// released.
    pub(crate) fn detached<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&pagemark::Region) -> Result<T, pagemark::Error> + Send,
    ) -> PyResult<T> {
        let held = self.held()?;
        py.detach(|| {
            let result = work(&held.region);
            // A region that was closed meanwhile is unmapped here.
            drop(held);
            result
        })
        .map_err(errors::of_error)
    }

    pub(crate) fn has_rollback(&self) -> bool {
        self.has_rollback
    }

    pub(crate) fn begin_detached(&self, py: Python<'_>) -> PyResult<()> {
        self.detached(py, pagemark::Region::begin)
    }

    pub(crate) fn commit_detached(&self, py: Python<'_>) -> PyResult<pagemark::RangeSet> {
        self.detached(py, pagemark::Region::commit)
    }

    pub(crate) fn commit_changes_detached(&self, py: Python<'_>) -> PyResult<Arc<pagemark::region::Changes>> {
        Ok(Arc::new(self.detached(py, pagemark::Region::commit_changes)?))
    }

    pub(crate) fn rollback_detached(&self, py: Python<'_>) -> PyResult<pagemark::RangeSet> {
        self.detached(py, pagemark::Region::rollback)
    }
}

#[pymethods]
impl Region {
    #[new]
    #[pyo3(signature = (bytes, mechanism = "auto", *, rollback = true, store = None, sole_use = false))]
    fn new(
        py: Python<'_>,
        bytes: usize,
        mechanism: &str,
        rollback: bool,
        store: Option<&Store>,
        sole_use: bool,
    ) -> PyResult<Self> {
        if bytes == 0 {
            return Err(PyValueError::new_err("a region has at least one byte"));
        }
        let options = RegionOptions { sole_use, ..options(mechanism, rollback, store)? };
        // The first `auto` tries the mechanisms.
        let region = py.detach(|| pagemark::Region::with_options(bytes, options)).map_err(errors::of_error)?;
        Ok(Region::of(region, rollback, None))
    }

    /// Makes existing memory a region: a writable, contiguous buffer of whole pages, such as an
    /// `mmap` or a NumPy array over one. The region holds a view of the buffer until it is closed
    /// or, where the region itself was viewed (`memoryview(region)`), as long as the object exists.
    /// Once it is closed the memory is as it was before, except that `emulate` turns private memory
    /// into shared anonymous memory that children made by `os.fork` do not have. No other code may
    /// change the mapping meanwhile, or make a mapped file shorter. With `emulate`, no other thread
    /// may access the buffer during this call.
    ///
    /// Shared memory (`mmap.mmap` by default, `numpy.memmap` in mode "r+") raises ValueError,
    /// because most mechanisms do not see writes of other processes. `sole_use=True` promises that
    /// only this process writes the memory, only through this buffer, and not through the file. The
    /// mechanisms "compare" and "full" see all writes and need no promise.
    #[staticmethod]
    #[pyo3(signature = (buffer, mechanism = "auto", *, rollback = true, store = None, sole_use = false))]
    fn adopt(
        buffer: &Bound<'_, PyAny>,
        mechanism: &str,
        rollback: bool,
        store: Option<&Store>,
        sole_use: bool,
    ) -> PyResult<Self> {
        let options = options(mechanism, rollback, store)?;
        let buffer = PyUntypedBuffer::get(buffer)?;
        if buffer.readonly() || !buffer.is_c_contiguous() {
            return Err(PyBufferError::new_err("only a writable, contiguous buffer can become a region"));
        }
        let start = NonNull::new(buffer.buf_ptr().cast()).unwrap_or(NonNull::dangling());
        // SAFETY: the view keeps the memory there while the region exists, and Rust has no
        // references to it. With `sole_use`, the caller promises the sole use.
        let adopted = unsafe {
            match sole_use {
                true => pagemark::Region::adopt_shared(start, buffer.len_bytes(), options),
                false => pagemark::Region::adopt(start, buffer.len_bytes(), options),
            }
        };
        Ok(Region::of(adopted.map_err(errors::of_error)?, rollback, Some(buffer)))
    }

    /// The name of the mechanism that finds the written pages.
    #[getter]
    fn mechanism(&self) -> &'static str {
        self.mechanism.name()
    }

    /// Smallest unit in which a write is reported.
    #[getter]
    fn granularity_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        self.detached(py, |region| Ok(region.granularity().get()))
    }

    /// True between begin and commit or rollback.
    #[getter]
    fn in_transaction(&self, py: Python<'_>) -> PyResult<bool> {
        self.detached(py, |region| Ok(region.in_transaction()))
    }

    /// True once the region is closed.
    #[getter]
    fn closed(&self) -> bool {
        self.lock().held.is_none()
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(self.held()?.region.bytes())
    }

    fn __repr__(&self) -> String {
        match &self.lock().held {
            Some(held) => format!("<pagemark.Region of {} bytes, {}>", held.region.bytes(), self.mechanism),
            None => "<pagemark.Region, closed>".to_owned(),
        }
    }

    /// Begins a transaction. Transactions do not nest.
    fn begin(&self, py: Python<'_>) -> PyResult<()> {
        self.begin_detached(py)
    }

    /// Ends the transaction and returns the offsets that were written in it. A mechanism may report
    /// more than was written.
    fn commit(&self, py: Python<'_>) -> PyResult<Ranges> {
        Ok(self.commit_detached(py)?.into())
    }

    /// Ends the transaction and returns the content of the written ranges, as it is after the
    /// transaction and, unless the region was made with `rollback=False`, as it was before it.
    fn commit_changes(&self, py: Python<'_>) -> PyResult<Changes> {
        Ok(self.commit_changes_detached(py)?.into())
    }

    /// Ends the transaction, puts back the content that the region had when it began, and returns
    /// the offsets that were put back.
    fn rollback(&self, py: Python<'_>) -> PyResult<Ranges> {
        Ok(self.rollback_detached(py)?.into())
    }

    /// A transaction for a `with` block: committed at its end, rolled back if it raises. With
    /// `changes=True` it has the content of the written ranges afterwards, as `commit_changes`
    /// returns it.
    #[pyo3(signature = (*, changes = false))]
    fn transaction(slf: Py<Self>, changes: bool) -> Transaction {
        Transaction::new(slf, changes)
    }

    /// Takes a snapshot. The cost is proportional to the pages written since the last snapshot was
    /// taken or restored. `without`, an iterable of `range` objects in any order, names offsets
    /// that need not be saved, such as free memory. The snapshot holds zeros there.
    #[pyo3(signature = (*, without = None))]
    fn snapshot(&self, py: Python<'_>, without: Option<&Bound<'_, PyAny>>) -> PyResult<Snapshot> {
        let without = without.map(set).transpose()?.unwrap_or_default();
        Ok(Snapshot::from(self.detached(py, |region| region.snapshot_without(&without))?))
    }

    /// Gives the region the content of the snapshot, in place, and returns the offsets that were
    /// written for that: only those that differed. In a transaction, they count as written in it.
    fn restore(&self, py: Python<'_>, snapshot: &Snapshot) -> PyResult<Ranges> {
        Ok(self.detached(py, |region| region.restore(&snapshot.snapshot))?.into())
    }

    /// Saves the region as the next checkpoint of a job in a repository. When this returns, the
    /// checkpoint is durable; after a crash at any instant the newest checkpoint is this one or the
    /// one before it, whole. Only what was written since the last save to the same job is read and
    /// stored. Raises TransactionError in a transaction.
    fn save(&self, py: Python<'_>, repository: &Repository, job: &str) -> PyResult<Checkpoint> {
        let taken = self.detached(py, |region| region.save(&repository.repository, job))?;
        Ok(Checkpoint::taken(job, &taken))
    }

    /// Opens the newest checkpoint of a job that `save` has written: a new region with the saved
    /// content. Raises RepositoryError if there is none.
    #[staticmethod]
    #[pyo3(signature = (repository, job, mechanism = "auto", *, rollback = true, store = None))]
    fn open(
        py: Python<'_>,
        repository: &Repository,
        job: &str,
        mechanism: &str,
        rollback: bool,
        store: Option<&Store>,
    ) -> PyResult<Self> {
        let options = options(mechanism, rollback, store)?;
        let opened = py.detach(|| pagemark::Region::open(&repository.repository, job, options));
        Ok(Region::of(opened.map_err(errors::of_error)?, rollback, None))
    }

    /// Makes a region that holds the content of a snapshot, of whichever region it was taken.
    #[staticmethod]
    #[pyo3(signature = (snapshot, mechanism = "auto", *, rollback = true, store = None))]
    fn from_snapshot(
        py: Python<'_>,
        snapshot: &Snapshot,
        mechanism: &str,
        rollback: bool,
        store: Option<&Store>,
    ) -> PyResult<Self> {
        let options = options(mechanism, rollback, store)?;
        let made = py.detach(|| pagemark::Region::from_snapshot(&snapshot.snapshot, options));
        Ok(Region::of(made.map_err(errors::of_error)?, rollback, None))
    }

    /// Gives the region the content of the newest checkpoint of a job, in place: for memory that
    /// was adopted. Only pages that differ are written; their offsets are returned. The region must
    /// be as long as the saved region.
    fn load(&self, py: Python<'_>, repository: &Repository, job: &str) -> PyResult<Ranges> {
        Ok(self.detached(py, |region| region.load(&repository.repository, job))?.into())
    }

    /// Reads once from a file, a pipe or a socket (a descriptor, or an object with `fileno`) into
    /// the offsets from `start` up to `stop` (the end, if it is None). Returns how many bytes were
    /// read; 0 is the end of the file.
    #[pyo3(signature = (file, start = 0, stop = None))]
    fn read_from(&self, py: Python<'_>, file: &Bound<'_, PyAny>, start: usize, stop: Option<usize>) -> PyResult<usize> {
        let stop = stop.map_or_else(|| self.__len__(), Ok)?;
        let descriptor: c_int = match file.extract() {
            Ok(descriptor) => descriptor,
            Err(_) => file.call_method0("fileno")?.extract()?,
        };
        if descriptor < 0 {
            return Err(PyValueError::new_err(format!("{descriptor} is no file descriptor")));
        }
        loop {
            // SAFETY: the number is not negative. If it is not open, the system call fails.
            let file = unsafe { BorrowedFd::borrow_raw(descriptor) };
            let read = self.detached(py, move |region| match region.read_from(file, start..stop) {
                Err(error) if error.io_error().is_some_and(|error| error.kind() == io::ErrorKind::Interrupted) => {
                    Ok(None)
                }
                result => result.map(Some),
            });
            match read? {
                Some(count) => return Ok(count),
                None => py.check_signals()?,
            }
        }
    }

    /// Lets system calls write to the offsets from `start` up to `stop` (the end, if it is None) in
    /// a `with` block, with every mechanism: `with region.writable(): file.readinto(region)`. The
    /// pages there count as written meanwhile.
    #[pyo3(signature = (start = 0, stop = None))]
    fn writable(slf: Py<Self>, start: usize, stop: Option<usize>) -> Writable {
        Writable::new(slf, start, stop)
    }

    /// Makes the whole pages from `start` up to `stop` hold zeros, which counts as a write, and
    /// frees their memory. In a shared mapping of a file this makes a hole in the file. In a
    /// private mapping of a file, and in parts of huge pages, zeros are written and nothing is
    /// freed.
    fn discard(&self, py: Python<'_>, start: usize, stop: usize) -> PyResult<()> {
        self.detached(py, |region| region.discard(start..stop))
    }

    /// Ends tracking and unmaps the region; memory that others have had the address of stays
    /// mapped as long as the object exists. Raises BufferError as long as views of it exist.
    /// Snapshots stay readable.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let held = {
            let mut state = self.lock();
            match state.exports {
                0 => Ok(state.held.take()),
                exports => Err(exports),
            }
        };
        let held = held.map_err(|exports| {
            PyBufferError::new_err(format!("{exports} views of the region exist: delete them before it is closed"))
        })?;
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

    /// # Safety
    /// Called by Python, which passes a view to be filled.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let exported = slf.get().export().ok_or_else(closed);
        // SAFETY: Python passes the view. The bytes stay mapped: the view counts as an export.
        unsafe { buffer::fill(&slf, view, flags, exported, Access::Writable, || slf.get().lock().exports -= 1) }
    }

    /// # Safety
    /// Called by Python, once for each view that was filled.
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        self.lock().exports -= 1;
    }
}

fn options(mechanism: &str, rollback: bool, store: Option<&Store>) -> PyResult<RegionOptions> {
    let mechanism = match mechanism {
        "auto" => None,
        name => Some(name.parse::<Mechanism>().map_err(PyValueError::new_err)?),
    };
    let store = store.map(|store| store.store.clone());
    Ok(RegionOptions { mechanism, without_rollback: !rollback, store, ..RegionOptions::default() })
}

fn closed() -> PyErr {
    PyValueError::new_err("the region is closed")
}
