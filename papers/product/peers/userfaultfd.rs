//! Transactions by the crate `userfaultfd`: the kernel stops the first write to each protected
//! page, and a thread, which reads the faults, copies the page and opens it.
//!
//! The crate has the write protection of Linux 5.7 (its feature `linux5_7`). It has neither the
//! asynchronous one of Linux 6.7, in which no thread is stopped, nor `PAGEMAP_SCAN`, which would
//! report what was written. Its build needs libclang; this module is therefore part of the feature
//! `userfaultfd` of this crate only.

use std::io::{self, PipeReader, PipeWriter, Write};
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use pagemark::PAGE_SIZE;
use userfaultfd::{Event, EventBuffer, FaultKind, FeatureFlags, RegisterMode, Uffd, UffdBuilder};

use super::undo_log::{UndoLog, UndoneMemory};

/// Faults that are read by one call.
const EVENTS: usize = 16;

/// Memory whose writes a thread records.
#[derive(Debug)]
pub(crate) struct WatchedMemory {
    shared: Arc<Shared>,
    start: NonNull<u8>,
    bytes: usize,
    /// The thread ends when it can read a byte.
    end: PipeWriter,
    thread: Option<JoinHandle<io::Result<()>>>,
}

#[derive(Debug)]
struct Shared {
    faults: Uffd,
    log: Mutex<UndoLog>,
}

impl Shared {
    fn log(&self) -> MutexGuard<'_, UndoLog> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies and opens the pages of faults until `end` can be read.
    fn handle(&self, end: &PipeReader) -> io::Result<()> {
        let mut events = EventBuffer::new(EVENTS);
        loop {
            let mut ready = [self.faults.as_fd(), end.as_fd()].map(|file| PollFd::new(file, PollFlags::POLLIN));
            poll(&mut ready, PollTimeout::NONE)?;
            if ready[1].any() == Some(true) {
                return Ok(());
            }
            for event in self.faults.read_events(&mut events).map_err(io::Error::other)? {
                let Event::Pagefault { kind: FaultKind::WriteProtected, addr, .. } = event.map_err(io::Error::other)?
                else {
                    continue;
                };
                if let Some(page) = self.log().record(addr.addr()) {
                    let page = page.as_ptr().cast();
                    self.faults.remove_write_protection(page, PAGE_SIZE, true).map_err(io::Error::other)?;
                }
            }
        }
    }
}

impl WatchedMemory {
    /// Maps memory and starts the thread.
    ///
    /// # Errors
    /// There is no room, or the kernel refuses userfaultfd or its write protection.
    pub fn new(pages: usize) -> io::Result<WatchedMemory> {
        let faults = UffdBuilder::new()
            .close_on_exec(true)
            .non_blocking(true)
            .user_mode_only(true)
            .require_features(FeatureFlags::PAGEFAULT_FLAG_WP)
            .create()
            .map_err(io::Error::other)?;
        let log = UndoLog::new(pages)?;
        // Of pages that were never touched, this write protection keeps nothing.
        // SAFETY: the bytes lie in the memory.
        (0..pages).for_each(|page| unsafe {
            log.memory().start().add(page * PAGE_SIZE).read_volatile();
        });
        let (start, bytes) = (log.memory().start(), log.memory().bytes());
        faults
            .register_with_mode(start.as_ptr().cast(), bytes, RegisterMode::WRITE_PROTECT)
            .map_err(io::Error::other)?;
        let shared = Arc::new(Shared { faults, log: Mutex::new(log) });
        let (ended, end) = io::pipe()?;
        let thread = std::thread::spawn({
            let shared = shared.clone();
            move || shared.handle(&ended)
        });
        Ok(WatchedMemory { shared, start, bytes, end, thread: Some(thread) })
    }
}

impl UndoneMemory for WatchedMemory {
    fn start(&self) -> NonNull<u8> {
        self.start
    }

    fn begin(&mut self) -> io::Result<()> {
        self.shared.log().clear();
        self.shared.faults.write_protect(self.start.as_ptr().cast(), self.bytes).map_err(io::Error::other)
    }

    fn roll_back(&mut self) -> io::Result<usize> {
        // SAFETY: the thread has opened the pages, and `&mut self` shows that nobody writes them.
        let pages = unsafe { self.shared.log().put_back() };
        let start = self.start.as_ptr().cast();
        self.shared.faults.remove_write_protection(start, self.bytes, false).map_err(io::Error::other)?;
        Ok(pages)
    }
}

impl Drop for WatchedMemory {
    fn drop(&mut self) {
        let ended = self.end.write_all(&[0]);
        if let (Ok(()), Some(thread)) = (ended, self.thread.take())
            && let Ok(Err(error)) = thread.join()
        {
            eprintln!("the thread that handles page faults failed: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::undo_log::tests::undoes_what_a_transaction_writes;
    use super::*;

    #[test]
    fn what_is_written_in_a_transaction_is_undone() {
        undoes_what_a_transaction_writes(&mut WatchedMemory::new(10).unwrap());
    }
}
