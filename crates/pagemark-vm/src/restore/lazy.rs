//! Memory of a restored machine that comes after the machine has begun to run.
//!
//! A userfaultfd that is made in QEMU reports each access to a page that is not there yet, be it of
//! the machine, of a device or of the kernel for QEMU; the accessing thread waits until the page is
//! filled. Meanwhile all pages are filled in the order in which the repository holds them.
//!
//! If the userfaultfd were closed with pages missing, the kernel would give zeros in their place.
//! Therefore a guard process has a copy of it, and kills QEMU before it closes this copy, unless it
//! was told that all pages are there.

use std::io::{self, PipeReader};
use std::os::fd::AsFd;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use pagemark::{Address, ContentId, PAGE_SIZE, PageNumber, PageTree, Range, Store};
use pagemark_linux::userfaultfd::{MISSING_FLAGS, MissingPages, MissingPagesEvent};
use pagemark_trace::{attach, inject};

use crate::error::{Error, ErrorKind, Object, Result};
use crate::qemu::end_guard::EndGuard;
use crate::restore::images::copy_pages;

/// A block of memory whose pages are missing.
pub(crate) struct LazyBlock {
    /// Where it is in QEMU.
    pub(crate) range: Range,
    /// Its content, by page of the block.
    pub(crate) tree: PageTree,
}

/// The memory of a QEMU of which pages are missing. Dropped before [`LazyMemory::complete`], QEMU
/// is killed.
pub(crate) struct LazyMemory<'a> {
    pid: i32,
    missing: MissingPages,
    blocks: Vec<LazyBlock>,
    store: &'a (dyn Store + Sync),
    guard: EndGuard,
}

impl<'a> LazyMemory<'a> {
    /// Registers the blocks of QEMU, whose pages are missing from then on where there are none yet.
    /// Nothing waits for a page before [`LazyMemory::while_served`], so QEMU must not be made to
    /// use its memory before.
    pub(crate) fn begin(pid: i32, blocks: Vec<LazyBlock>, store: &'a (dyn Store + Sync)) -> Result<LazyMemory<'a>> {
        let refused = |error: io::Error| {
            let error = Error::of(ErrorKind::Process, "deliver memory on demand to", Object::Process(pid), error);
            error.help("restore without --lazy")
        };
        let made = attach::find(pid).and_then(|process| inject::userfaultfd_with(process, MISSING_FLAGS));
        let descriptor = made.map_err(|error| Error::from(error).help("restore without --lazy"))?;
        let for_guard = descriptor.try_clone().map_err(refused)?;
        // SAFETY: the userfaultfd was just made in QEMU.
        let missing = unsafe { MissingPages::from_new(descriptor) }.map_err(refused)?;
        let guard = EndGuard::start(pid, Some(for_guard)).map_err(Error::system("start a guard process"))?;
        for block in &blocks {
            missing.register(&block.range).map_err(refused)?;
        }
        Ok(LazyMemory { pid, missing, blocks, store, guard })
    }

    /// Does `work` while another thread fills the pages that QEMU waits for.
    pub(crate) fn while_served<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let (stop, working) = io::pipe().map_err(Error::system("make a pipe"))?;
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("pagemark-lazy".into());
            let serve = move || serve(&self.missing, &stop, self.pid, &mut |address| self.answer(address));
            let server = thread.spawn_scoped(scope, serve).map_err(Error::system("start a thread"))?;
            let done = work();
            drop(working);
            let served = server.join().unwrap_or_else(|_| Err(Error::damaged("a thread that fills memory panicked")));
            // That a page could not be filled is why the work failed, if it did.
            served.and(done)
        })
    }

    /// Fills all pages that are missing, and lets go of QEMU. Calls `begun` once pages that QEMU
    /// waits for are filled, and `progress` with the pages that were filled since the last call.
    pub(crate) fn complete(self, begun: impl FnOnce(), progress: &(dyn Fn(u64) + Sync)) -> Result<()> {
        self.while_served(|| {
            begun();
            self.fill_all(progress)
        })?;
        let LazyMemory { guard, missing, .. } = self;
        guard.dismiss();
        // What is missing now holds zeros.
        drop(missing);
        Ok(())
    }

    /// Fills the page that has this address.
    fn answer(&self, address: Address) -> Result<()> {
        let page = address.page();
        let Some(block) = self.blocks.iter().find(|block| block.range.contains(&address)) else { return Ok(()) };
        let id = block.tree.get(PageNumber::new(page.get() - block.range.start.page().get()));
        let filled = if id == ContentId::ZERO {
            self.missing.fill_with_zeros(page.address())
        } else {
            let mut content = [0; PAGE_SIZE];
            self.store.get_page(id, &mut content)?;
            self.missing.fill(page.address(), &[content])
        };
        filled.map_err(|error| fill_failed(self.pid, error))
    }

    /// Fills all pages that hold anything.
    fn fill_all(&self, progress: &(dyn Fn(u64) + Sync)) -> Result<()> {
        let (mut targets, mut ids) = (Vec::new(), Vec::new());
        for block in &self.blocks {
            let first = block.range.start.page();
            for (page, id) in block.tree.iter() {
                targets.push(first + page.get());
                ids.push(id);
            }
        }
        let fill = |page: PageNumber, content: &[u8]| {
            let (pages, _) = content.as_chunks();
            self.missing.fill(page.address(), pages)?;
            progress(pages.len() as u64);
            Ok(())
        };
        copy_pages(self.store, &ids, &targets, &fill)?.map_err(|error| fill_failed(self.pid, error))
    }
}

/// Calls `answer` with each address of QEMU for whose page a thread waits, until `stop` is closed.
pub(crate) fn serve(
    missing: &MissingPages,
    stop: &PipeReader,
    pid: i32,
    answer: &mut dyn FnMut(Address) -> Result<()>,
) -> Result<()> {
    loop {
        while let Some(event) = missing.next().map_err(|error| fill_failed(pid, error))? {
            if let MissingPagesEvent::Fault(address) = event {
                answer(address)?;
            }
        }
        let mut watched =
            [PollFd::new(missing.as_fd(), PollFlags::POLLIN), PollFd::new(stop.as_fd(), PollFlags::POLLIN)];
        match poll(&mut watched, PollTimeout::NONE) {
            Ok(_) if watched[1].any().unwrap_or(true) => return Ok(()),
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(fill_failed(pid, error.into())),
        }
    }
}

/// The error of a page that could not be given to QEMU.
pub(crate) fn fill_failed(pid: i32, error: io::Error) -> Error {
    let kind = if error.raw_os_error() == Some(libc::ESRCH) { ErrorKind::Gone } else { ErrorKind::System };
    Error::of(kind, "fill the memory of", Object::Process(pid), error)
}
