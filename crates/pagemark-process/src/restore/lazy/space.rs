//! The memory of a process that runs, of which pages are missing.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use pagemark::{Address, AddressRangeExt, ByteCount, PAGE_SIZE, PageNumber, RangeSet};
use pagemark_linux::userfaultfd::{MissingPages, MissingPagesEvent};
use pagemark_trace::RecordedPid;
use pagemark_trace::error::Error;

use super::layout::{Change, Layout};
use crate::restore::connection::not_filled;
use crate::restore::memory::Pages;

/// Pages that are put at their places before their neighbours, in one piece of memory.
const NEIGHBOURS: u64 = 16;

/// A process to which pages are delivered: one of the checkpoint, or one that was forked since.
pub(super) struct Space {
    /// The process of the checkpoint.
    pid: RecordedPid,
    pub(super) pages: Arc<Pages>,
    pub(super) missing: Arc<MissingPages>,
    /// Written by the thread that reads the events, before it reads the next one. Whoever fills a
    /// page holds it meanwhile, so that no event is read between the look at a page's place and the
    /// copy.
    layout: RwLock<Layout>,
    /// A bit for each page that was delivered, or is nowhere any more.
    done: Vec<AtomicU64>,
    /// Pages without such a bit.
    left: AtomicUsize,
    is_forked: bool,
    is_gone: AtomicBool,
}

/// What the events of a process ask for.
#[derive(Default)]
pub(super) struct Requests {
    /// Pages for which threads wait.
    pub(super) faults: Vec<PageNumber>,
    pub(super) forked: Vec<Space>,
}

/// What became of an attempt to fill pages.
pub(super) enum Filled {
    /// As many of the first pages are there, or belong nowhere any more.
    Pages(usize),
    /// An event must be read first.
    Changing,
    /// The process is gone.
    Gone,
}

impl Space {
    /// The memory of a process, with the ranges of its mappings that have missing pages.
    pub(super) fn new(pid: RecordedPid, pages: Arc<Pages>, missing: Arc<MissingPages>, mappings: &RangeSet) -> Space {
        let left = AtomicUsize::new(pages.numbers.len());
        let mappings = mappings.iter().map(|range| range.page_range());
        let done = (0..pages.numbers.len().div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        Space {
            pid,
            pages,
            missing,
            layout: RwLock::new(Layout::new(mappings)),
            done,
            left,
            is_forked: false,
            is_gone: AtomicBool::new(false),
        }
    }

    pub(super) fn is_done(&self, position: usize) -> bool {
        self.done[position / 64].load(Ordering::Relaxed) & 1 << (position % 64) != 0
    }

    /// True if nothing is left to be delivered.
    pub(super) fn is_complete(&self) -> bool {
        self.is_gone() || self.left_count() == 0
    }

    /// True if the process has ended.
    pub(super) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Relaxed)
    }

    /// True if the process was forked since the restore.
    pub(super) fn is_forked(&self) -> bool {
        self.is_forked
    }

    /// Number of the pages that are left to be delivered.
    pub(super) fn left_count(&self) -> usize {
        self.left.load(Ordering::Relaxed)
    }

    /// True if the page at the next position has the next number.
    pub(super) fn follows(&self, position: usize) -> bool {
        self.pages.numbers.get(position + 1) == Some(&(self.pages.numbers[position] + 1))
    }

    /// The positions of the pages that are left to be delivered.
    pub(super) fn left(&self) -> impl Iterator<Item = usize> {
        let words = self.done.iter().enumerate();
        let words = words.filter(|(_, word)| word.load(Ordering::Relaxed) != u64::MAX);
        let positions = words.flat_map(|(index, _)| index * 64..(index * 64 + 64).min(self.pages.numbers.len()));
        positions.filter(|&position| !self.is_done(position))
    }

    /// Notes that pages are there, or nowhere. Returns how many were not before.
    fn set_done(&self, positions: std::ops::Range<usize>) -> usize {
        let is_new = |position: &usize| {
            let bit = 1 << (position % 64);
            self.done[position / 64].fetch_or(bit, Ordering::Relaxed) & bit == 0
        };
        let count = positions.filter(is_new).count();
        self.left.fetch_sub(count, Ordering::Relaxed);
        count
    }

    /// Reads the events that wait, and adds what they ask for to `requests`.
    pub(super) fn read_events(&self, requests: &mut Requests) -> Result<(), Error> {
        let mut layout = self.layout.write().unwrap_or_else(PoisonError::into_inner);
        while let Some(event) = self.missing.next().map_err(Error::criu_io("read a userfaultfd"))? {
            match event {
                MissingPagesEvent::Fault(address) => requests.faults.push(address.page()),
                MissingPagesEvent::Fork(missing) => requests.forked.push(Space {
                    pid: self.pid,
                    pages: self.pages.clone(),
                    missing: Arc::new(missing),
                    layout: RwLock::new(layout.of_child()),
                    done: self.done.iter().map(|word| AtomicU64::new(word.load(Ordering::Relaxed))).collect(),
                    left: AtomicUsize::new(self.left_count()),
                    is_forked: true,
                    is_gone: AtomicBool::new(false),
                }),
                MissingPagesEvent::Moved { from, to } => {
                    layout.apply(Change::Moved { from: from.page_range(), to: to.page() });
                }
                MissingPagesEvent::Dropped(range) => layout.apply(Change::Dropped(range.page_range())),
                MissingPagesEvent::Unmapped(range) => layout.apply(Change::Unmapped(range.page_range())),
                MissingPagesEvent::Unknown(event) => {
                    let reason = format!("userfaultfd reports the event {event:#x}, which is not known");
                    return Err(Error::criu_failed("deliver memory on demand", reason));
                }
            }
        }
        if layout.is_expecting() && !self.missing.is_changing() {
            layout.settle();
        }
        Ok(())
    }

    /// True if changes of the mappings are not carried out yet, because another thread's are still
    /// to be read. No page is filled meanwhile. Events have to be read again soon: a change that
    /// fails is not reported.
    pub(super) fn is_unsettled(&self) -> bool {
        self.layout.read().unwrap_or_else(PoisonError::into_inner).has_held()
    }

    /// The position of the page of the checkpoint that belongs to a page of the process. None if
    /// that holds zeros.
    pub(super) fn position(&self, page: PageNumber) -> Option<usize> {
        let in_checkpoint = self.layout.read().unwrap_or_else(PoisonError::into_inner).in_checkpoint(page)?;
        self.pages.position(in_checkpoint)
    }

    /// The positions of pages near another that are not there.
    pub(super) fn neighbours(&self, position: usize) -> impl Iterator<Item = usize> {
        let block = self.pages.numbers[position].get() / NEIGHBOURS;
        let is_near = move |position: &usize| self.pages.numbers[*position].get() / NEIGHBOURS == block;
        let behind = (position + 1..self.pages.numbers.len()).take_while(is_near);
        let before = (0..position).rev().take_while(is_near);
        behind.chain(before).filter(|&position| !self.is_done(position))
    }

    /// Fills the first of some pages, whose positions and numbers in the checkpoint follow each
    /// other. The pages that are there already stay as they are. Also returns how many are new.
    pub(super) fn fill(&self, position: usize, content: &[[u8; PAGE_SIZE]]) -> Result<(Filled, usize), Error> {
        let layout = self.layout.read().unwrap_or_else(PoisonError::into_inner);
        if layout.has_held() {
            return Ok((Filled::Changing, 0));
        }
        let page = self.pages.numbers[position];
        let Some(place) = layout.now(page) else {
            return Ok((Filled::Pages(1), self.set_done(position..position + 1)));
        };
        let mut count = content.len().min((place.end.get() - place.start.get()) as usize);
        loop {
            match self.missing.fill_first(place.start.address(), &content[..count]) {
                Ok(filled) => return Ok((Filled::Pages(filled), self.set_done(position..position + filled))),
                // The kernel copies within one mapping only.
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) && count > 1 => count = count.div_ceil(2),
                // The kernel looks for the mapping before it looks whether mappings are changing.
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) && self.missing.is_changing() => {
                    return Ok((Filled::Changing, 0));
                }
                // A child does not have the mappings with MADV_DONTFORK.
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) && self.is_forked => {
                    return Ok((Filled::Pages(1), self.set_done(position..position + 1)));
                }
                Err(error) => return self.not_filled(place.start.address(), error).map(|filled| (filled, 0)),
            }
        }
    }

    /// Fills a page with zeros that has no page of the checkpoint.
    pub(super) fn fill_with_zeros(&self, page: PageNumber) -> Result<Filled, Error> {
        if self.is_unsettled() {
            return Ok(Filled::Changing);
        }
        match self.missing.try_fill_with_zeros(page.address()) {
            Ok(()) => Ok(Filled::Pages(1)),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {
                // It was unmapped since. The kernel does not wake the threads that wait for it.
                let page = page.address();
                let woken = self.missing.wake(&(page..page + ByteCount::of_pages(1)));
                woken.map_err(Error::criu_io("wake a thread")).map(|()| Filled::Pages(1))
            }
            Err(error) => self.not_filled(page.address(), error),
        }
    }

    fn not_filled(&self, page: Address, error: io::Error) -> Result<Filled, Error> {
        match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EINTR) => Ok(Filled::Changing),
            Some(libc::ESRCH) => {
                self.is_gone.store(true, Ordering::Relaxed);
                Ok(Filled::Gone)
            }
            _ => Err(not_filled(self.pid, page, error)),
        }
    }
}
