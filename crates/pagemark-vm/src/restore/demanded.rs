//! Memory of a machine that runs again, which is read from the store when the machine first needs
//! it. Where intervals on a node share a base, what one of them has read is there for all.
//!
//! A userfaultfd that is made in QEMU reports each access to a page that is missing. A page of a
//! base is missing while it is a hole of the base's file, which QEMU maps privately: it is filled
//! in the file, for all that have it mapped. If the userfaultfd were closed while QEMU runs, QEMU
//! would make holes zeros, for all. Therefore a guard process has a copy of it, and closes that
//! only when QEMU has ended.

use std::fs::File;
use std::io::{self, PipeReader, PipeWriter};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use nix::errno::Errno;
use nix::sys::statvfs::statvfs;
use pagemark::{Address, ByteCount, ContentId, PageNumber, PageTree, Range, Store};
use pagemark_linux::file_pages::FilePages;
use pagemark_linux::sparse::next_data;
use pagemark_linux::userfaultfd::{MISSING_FLAGS, MissingPages};
use pagemark_trace::{attach, inject};

use crate::error::{Error, ErrorKind, Object, Result};
use crate::qemu::end_guard::EndGuard;
use crate::restore::images::copy_pages;
use crate::restore::lazy::{fill_failed, serve};

/// Where a page is missing, its neighbours are read, too: this number of pages, of which the first
/// has a multiple of the number.
const READ_AT_ONCE: u64 = 16;

/// A block of memory whose pages are missing.
pub struct DemandedBlock {
    /// Where it is in QEMU.
    pub range: Range,
    /// What is missing, by page of the block.
    pub tree: PageTree,
    /// The file that QEMU maps there. None for memory of its own.
    pub base: Option<SharedPages>,
}

/// The file of a base whose pages are filled when they are needed.
pub struct SharedPages {
    /// Its path.
    pub path: PathBuf,
    /// The file.
    pub file: File,
    /// The pages that it has.
    pub pages: FilePages,
}

/// The memory of a QEMU of which pages are missing, before they are given to it.
pub struct MissingMemory {
    pid: i32,
    missing: MissingPages,
    guard: EndGuard,
}

/// The memory of a QEMU of which pages are missing, and come when QEMU needs them. When this is
/// dropped, QEMU is killed.
pub struct DemandedMemory {
    failure: Arc<Mutex<Option<Error>>>,
    state: Arc<State>,
    /// None once it was closed.
    working: Option<PipeWriter>,
    server: Option<JoinHandle<()>>,
}

/// What a server does.
#[derive(Default)]
struct State {
    /// Pages that were read from the store.
    count: AtomicU64,
    /// True while a thread of QEMU waits for a page that is being read.
    is_busy: AtomicBool,
}

impl MissingMemory {
    /// Makes a userfaultfd in QEMU. None if QEMU may have none that also serves its system calls.
    pub fn of(pid: i32) -> Result<Option<MissingMemory>> {
        let made = attach::find(pid).and_then(|process| inject::userfaultfd_with(process, MISSING_FLAGS));
        let descriptor = match made {
            Err(error) if error.is_gone() => return Err(error.into()),
            Err(_) => return Ok(None),
            Ok(descriptor) => descriptor,
        };
        let failed = Error::system("watch the memory of QEMU");
        let Ok(for_guard) = descriptor.try_clone() else { return Err(failed(Errno::EMFILE.into())) };
        // SAFETY: the userfaultfd was just made in QEMU.
        let missing = unsafe { MissingPages::from_new(descriptor) }.map_err(failed)?;
        let guard = EndGuard::start(pid, Some(for_guard)).map_err(Error::system("start a guard process"))?;
        Ok(Some(MissingMemory { pid, missing, guard }))
    }

    /// Has the pages of a range missing that are not there. QEMU must not use them before
    /// [`MissingMemory::serve`].
    pub fn register(&self, range: &Range) -> Result<()> {
        self.missing.register(range).map_err(|error| fill_failed(self.pid, error))
    }

    /// Gives pages to this QEMU alone.
    pub fn fill(&self, page: PageNumber, content: &[u8]) -> io::Result<()> {
        self.missing.fill(page.address(), content.as_chunks().0)
    }

    /// Gives pages of the blocks to QEMU from now on, when it needs them.
    pub fn serve(
        self,
        blocks: Vec<DemandedBlock>,
        store: impl Store + Send + Sync + 'static,
    ) -> Result<DemandedMemory> {
        let (stop, working) = io::pipe().map_err(Error::system("make a pipe"))?;
        let (failure, state) = (Arc::new(Mutex::new(None)), Arc::new(State::default()));
        let server = Server { memory: self, blocks, store: Box::new(store), state: Arc::clone(&state) };
        let seen = Arc::clone(&failure);
        let thread = std::thread::Builder::new().name("pagemark-demand".into());
        let server = thread.spawn(move || server.run(&stop, &seen)).map_err(Error::system("start a thread"))?;
        Ok(DemandedMemory { failure, state, working: Some(working), server: Some(server) })
    }
}

impl DemandedMemory {
    /// Pages that were read from the store.
    pub fn count(&self) -> u64 {
        self.state.count.load(Ordering::Relaxed)
    }

    /// True while QEMU waits for a page that is being read.
    pub fn is_busy(&self) -> bool {
        self.state.is_busy.load(Ordering::Relaxed)
    }

    /// Why a page could not be given to QEMU, which was killed then.
    pub fn take_failure(&self) -> Option<Error> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Drop for DemandedMemory {
    fn drop(&mut self) {
        self.working = None;
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
    }
}

/// What a thread needs that gives pages to QEMU.
struct Server {
    memory: MissingMemory,
    blocks: Vec<DemandedBlock>,
    store: Box<dyn Store + Send + Sync>,
    state: Arc<State>,
}

impl Server {
    /// Gives pages to QEMU until `stop` is closed, and then has it killed, if it still runs.
    fn run(self, stop: &PipeReader, failure: &Mutex<Option<Error>>) {
        let MissingMemory { pid, missing, .. } = &self.memory;
        let served = serve(missing, stop, *pid, &mut |address| {
            self.state.is_busy.store(true, Ordering::Relaxed);
            let answered = self.answer(address);
            self.state.is_busy.store(false, Ordering::Relaxed);
            answered
        });
        if let Err(error) = served
            && !error.is_gone()
        {
            *failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        }
        let MissingMemory { missing, guard, .. } = self.memory;
        // It waits until QEMU has ended, which must not find zeros in place of what is missing.
        drop(guard);
        drop(missing);
    }

    /// Gives QEMU the page that has this address.
    fn answer(&self, address: Address) -> Result<()> {
        let MissingMemory { pid, missing, .. } = &self.memory;
        let failed = |error| fill_failed(*pid, error);
        let page = address.page();
        let Some(block) = self.blocks.iter().find(|block| block.range.contains(&address)) else { return Ok(()) };
        let first = block.range.start.page().get();
        let wanted = PageNumber::new(page.get() - first);
        if block.tree.get(wanted) == ContentId::ZERO {
            return missing.fill_with_zeros(page.address()).map_err(failed);
        }
        let last = (wanted.get() / READ_AT_ONCE + 1) * READ_AT_ONCE;
        let pages = (last - READ_AT_ONCE..last).map(PageNumber::new);
        let mut pages: Vec<_> = pages.map(|page| (page, block.tree.get(page))).collect();
        pages.retain(|(_, id)| *id != ContentId::ZERO);
        match &block.base {
            Some(base) => {
                base.retain_missing(&mut pages).map_err(|error| base.failed(error))?;
                self.copy(&pages, &|page, content| base.pages.fill(page, content.as_chunks().0))?
                    .map_err(|error| base.failed(error))?;
                missing.wake(&(page.address()..page.address() + ByteCount::PAGE)).map_err(failed)
            }
            None => self.copy(&pages, &|page, content| self.memory.fill(page + first, content))?.map_err(failed),
        }
    }

    /// Reads pages of a block, and has them written by pages of the block.
    fn copy(
        &self,
        pages: &[(PageNumber, ContentId)],
        write: &(dyn Fn(PageNumber, &[u8]) -> io::Result<()> + Sync),
    ) -> Result<io::Result<()>> {
        let (targets, ids): (Vec<PageNumber>, Vec<ContentId>) = pages.iter().copied().unzip();
        let copied = copy_pages(&*self.store, &ids, &targets, write);
        self.state.count.fetch_add(ids.len() as u64, Ordering::Relaxed);
        copied
    }
}

impl SharedPages {
    /// Keeps those of some pages that are holes of the file. They ascend.
    fn retain_missing(&self, pages: &mut Vec<(PageNumber, ContentId)>) -> io::Result<()> {
        let (Some((first, _)), Some((last, _))) = (pages.first(), pages.last()) else { return Ok(()) };
        let end = (*last + 1).address();
        let mut data = next_data(&self.file, first.address(), end)?;
        let mut is_missing = |page: Address| -> io::Result<bool> {
            while data.end <= page && !data.is_empty() {
                data = next_data(&self.file, page, end)?;
            }
            Ok(!data.contains(&page))
        };
        let mut missing = Vec::new();
        for &(page, id) in pages.iter() {
            if is_missing(page.address())? {
                missing.push((page, id));
            }
        }
        *pages = missing;
        Ok(())
    }

    fn failed(&self, error: io::Error) -> Error {
        // The kernel says it with the error of a host without memory.
        let has_no_room = || statvfs(&self.path).is_ok_and(|system| system.blocks_available() == 0);
        let error = match error.raw_os_error() {
            Some(libc::ENOMEM) if has_no_room() => Errno::ENOSPC.into(),
            _ => error,
        };
        let error = Error::of(ErrorKind::System, "keep memory in", Object::File(self.path.clone()), error);
        error.help("free room there, or name another directory by --share")
    }
}
