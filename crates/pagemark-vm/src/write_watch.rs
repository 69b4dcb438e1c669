//! Memory whose first writes wait for a thread of this process: the mechanism `uffd` for machines,
//! and what copy-on-write needs.
//!
//! A userfaultfd that is made in QEMU protects the blocks of the machine's memory in synchronous
//! mode. The thread hears of each write to a protected page, be it of the machine, of a device or
//! of the kernel for QEMU, marks the page as written, and lets it be written. A collect takes the
//! marks and protects these pages again; nothing else is looked at, so that its time does not grow
//! with the memory.
//!
//! A page that is kept (PML, section 2.4: incremental copy-on-write) is copied before it is written
//! to, by whoever is first: the reader of kept pages, or the thread, which puts its copy aside. The
//! page stays protected after the reader has copied it, because the next write to it must be known,
//! unless the page was kept in each of the last checkpoints: then it counts as written at once, and
//! the write does not wait. Now and then such a page stays protected, to see whether it is still
//! written to.
//!
//! If this process ends, the kernel closes the userfaultfd: nothing is protected then, and all
//! writes that wait go on. If the thread ends for another reason, it unprotects everything first.

use std::collections::HashMap;
use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use pagemark::sys::memory::Memory;
use pagemark::sys::own_memory;
use pagemark::sys::pagemap::{Filter, PRESENT, Pagemap, SWAPPED};
use pagemark::sys::proc::{self, Status};
use pagemark::sys::userfaultfd::{HOLDING_FLAGS, Synchronous, Userfaultfd};
use pagemark::target::KeptCounts;
use pagemark::{Address, AddressRangeExt, ByteCount, PAGE_SIZE, PageNumber, Range, RangeSet};
use pagemark_process::inject::{self, Call};

use crate::error::{Error, ErrorKind, Object, Result};
use crate::page_set::PageSet;

/// Pages between two runs of written pages that are protected with them although they are
/// protected: that takes less time than another call.
const NEAR_PAGES: usize = 16;

/// Pages that the reader of kept pages copies at a time. A write to one of them waits for all.
const BATCH: ByteCount = ByteCount::of_pages(32);

/// Successive checkpoints that have kept a page before it is left open.
const HOT_CHECKPOINTS: u32 = 3;

/// A page that is left open is protected in every such checkpoint of its series.
const PROBED_CHECKPOINTS: u32 = 8;

/// What to do where memory cannot be watched.
pub(crate) const OTHER_STRATEGY: &str = "use the strategy pre-copy, and another mechanism than uffd";

/// True if a QEMU with the rights of this process can be watched, and
/// [`Strategy::CopyOnWrite`](pagemark::checkpointer::Strategy::CopyOnWrite) be used with it: also
/// writes of system calls, and writes to pages that were never touched, wait for this process.
pub fn can_hold_writes() -> bool {
    Userfaultfd::synchronous().is_ok_and(|made| made.holds_system_calls && made.protects_unpopulated)
}

/// The watched blocks of a QEMU. Dropped, nothing is protected, and all writes go on.
#[derive(Debug)]
pub(crate) struct WriteWatch {
    shared: Arc<Shared>,
    /// Closed to end the thread.
    working: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread shares.
#[derive(Debug)]
struct Shared {
    pid: i32,
    userfaultfd: Userfaultfd,
    pagemap: Pagemap,
    memory: Memory,
    state: Mutex<State>,
    /// Notified when the reader of kept pages has copied a batch.
    copied: Condvar,
}

#[derive(Debug, Default)]
struct State {
    blocks: Vec<Watched>,
    /// What the reader of kept pages copies at this moment.
    in_copy: Option<Range>,
    /// Why a kept page was written to before it was copied.
    lost: Option<io::Error>,
    has_ended: bool,
    counts: KeptCounts,
    /// Number of the checkpoint.
    checkpoint: u32,
}

/// A block that is watched. A page that is not marked as written is protected.
#[derive(Debug)]
struct Watched {
    range: Range,
    /// The mapping that holds the block. A part of a mapping is not registered, since that would
    /// split it.
    mapping: Range,
    /// Pages that were written to since the last collect.
    written: PageSet,
    /// Pages that are kept and not copied yet.
    kept: PageSet,
    /// Kept pages that were copied before a write; None for those that were not there.
    aside: HashMap<usize, Option<Box<[u8; PAGE_SIZE]>>>,
    /// The last checkpoints that kept each page.
    series: Vec<Series>,
}

/// Successive checkpoints that have kept a page.
#[derive(Clone, Copy, Default, Debug)]
struct Series {
    /// The last one.
    last: u32,
    length: u32,
}

impl Series {
    /// The page is kept in this checkpoint.
    fn add(&mut self, checkpoint: u32) {
        self.length = if self.last.wrapping_add(1) == checkpoint { self.length.saturating_add(1) } else { 1 };
        self.last = checkpoint;
    }

    /// True if the page need not be protected once it is copied.
    fn is_hot(self) -> bool {
        self.length >= HOT_CHECKPOINTS && !self.length.is_multiple_of(PROBED_CHECKPOINTS)
    }
}

impl Watched {
    fn page(&self, address: Address) -> usize {
        (address.page() - self.range.start.page()) as usize
    }

    fn addresses(&self, pages: std::ops::Range<usize>) -> Range {
        let first = self.range.start.page();
        (first + pages.start as u64).address()..(first + pages.end as u64).address()
    }

    fn forget_kept(&mut self) {
        self.kept.clear();
        self.aside.clear();
    }
}

impl WriteWatch {
    /// Makes a userfaultfd in QEMU, which is stopped for that for a fraction of a millisecond.
    ///
    /// # Errors
    /// [`ErrorKind::Process`]; QEMU is unchanged.
    pub(crate) fn start(pid: i32) -> Result<WriteWatch> {
        let refused = |error: io::Error| failed("watch the writes of", pid)(error).help(OTHER_STRATEGY);
        let thread = proc::live_thread(pid).ok_or_else(|| refused(io::Error::from_raw_os_error(libc::ESRCH)))?;
        let pagemap = Pagemap::of_process(thread).map_err(refused)?;
        let memory = Memory::open(thread).map_err(refused)?;
        let made = inject::userfaultfd_with(pid, HOLDING_FLAGS);
        let descriptor = made.map_err(|error| Error::from(error).help(OTHER_STRATEGY))?;
        let made = Userfaultfd::synchronous_from_new(descriptor).map_err(refused)?;
        WriteWatch::with(pid, pagemap, memory, made)
    }

    /// Watches memory of this process, which must have another thread than those that write to it:
    /// to measure what it costs.
    ///
    /// # Errors
    /// As [`WriteWatch::start`].
    pub(crate) fn of_this_process() -> Result<WriteWatch> {
        let pid = std::process::id() as i32;
        let refused = || failed("watch the writes of", pid);
        let pagemap = Pagemap::of_this_process().map_err(refused())?;
        let memory = Memory::of_this_process().map_err(refused())?;
        WriteWatch::with(pid, pagemap, memory, Userfaultfd::synchronous().map_err(refused())?)
    }

    fn with(pid: i32, pagemap: Pagemap, memory: Memory, made: Synchronous) -> Result<WriteWatch> {
        let Synchronous { userfaultfd, protects_shared, protects_unpopulated, .. } = made;
        if !protects_shared || !protects_unpopulated {
            let error =
                Error::about(ErrorKind::Unsupported, Object::Process(pid), "cannot be watched before Linux 6.4");
            return Err(error.help(OTHER_STRATEGY));
        }
        let (state, copied) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { pid, userfaultfd, pagemap, memory, state, copied });
        let (stop, working) = io::pipe().map_err(Error::system("make a pipe"))?;
        let for_thread = Release(shared.clone());
        let thread = std::thread::Builder::new().name("pagemark-writes".to_owned());
        let thread = thread.spawn(move || for_thread.serve(&stop)).map_err(Error::system("start a thread"))?;
        Ok(WriteWatch { shared, working: Some(working), thread: Some(thread) })
    }

    /// Begins to watch a block, which is in `mapping`. Returns what may hold data in it; what is
    /// written from now on is collected.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if its pages cannot be protected one by one.
    pub(crate) fn add(&self, id: &str, range: &Range, mapping: Range) -> Result<RangeSet> {
        let Shared { pid, userfaultfd, pagemap, .. } = &*self.shared;
        let refused = |error: io::Error| {
            let reason = match error.raw_os_error() {
                Some(libc::EBUSY) => "is watched by another userfaultfd, of QEMU or another Pagemark".to_owned(),
                Some(libc::EINVAL) => "is in huge pages or in a file, and cannot be protected page by page".to_owned(),
                _ => format!("cannot be protected: {error}"),
            };
            Error::about(ErrorKind::Unsupported, Object::Block(id.to_owned()), reason).help(OTHER_STRATEGY)
        };
        let failed = failed("find the pages of", *pid);
        let mut data = RangeSet::new();
        let mut find = |any: u64| {
            let filter = Filter { any, ..Filter::default() };
            pagemap.find(range, filter, |run, _| data.insert(run))
        };
        keep_unmerged(*pid, &mapping)?;
        // Protection makes entries for pages that are not there, which look as if they were swapped out.
        find(PRESENT | SWAPPED).map_err(&failed)?;
        {
            // Writes wait until the block is known.
            let mut state = self.shared.state();
            userfaultfd.register(&mapping).map_err(refused)?;
            let first = range.start..range.start + ByteCount::PAGE;
            let protected =
                userfaultfd.write_protect(&first, true).and_then(|()| userfaultfd.write_protect(range, true));
            if let Err(error) = protected {
                let _ = userfaultfd.unregister(&mapping);
                return Err(refused(error));
            }
            let pages = range.byte_count().pages_rounded_up() as usize;
            let (written, kept) = (PageSet::new(pages), PageSet::new(pages));
            let (aside, series) = (HashMap::new(), vec![Series::default(); pages]);
            state.blocks.push(Watched { range: range.clone(), mapping, written, kept, aside, series });
        }
        // What became data meanwhile.
        let has_swapped = Status::read(*pid).map_or(true, |status| status.swapped_bytes > 0);
        find(if has_swapped { PRESENT | SWAPPED } else { PRESENT }).map_err(&failed)?;
        Ok(data)
    }

    /// Ends to watch the blocks that are not among `ranges`.
    pub(crate) fn retain(&self, ranges: &[Range]) {
        self.shared.state().blocks.retain(|block| {
            let stays = ranges.contains(&block.range);
            if !stays {
                // An error means that nothing is mapped there any more.
                // Another block may be in the same mapping.
                let _ = self.shared.userfaultfd.write_protect(&block.range, false);
            }
            stays
        });
    }

    /// Adds the pages of a block that were written to since the last call to `written`, and
    /// protects them again.
    ///
    /// # Errors
    /// QEMU has ended, or the thread; nothing is lost.
    pub(crate) fn collect(&self, range: &Range, written: &mut RangeSet) -> Result<()> {
        let mut state = self.shared.state();
        if state.has_ended {
            let reason = "is no longer watched: the thread that did so has ended";
            return Err(Error::about(ErrorKind::System, Object::Process(self.shared.pid), reason));
        }
        let Some(block) = state.blocks.iter_mut().find(|block| block.range == *range) else { return Ok(()) };
        let runs = block.written.runs();
        for near in runs.chunk_by(|one, next| next.start - one.end <= NEAR_PAGES) {
            let (Some(first), Some(last)) = (near.first(), near.last()) else { continue };
            let span = block.addresses(first.start..last.end);
            self.shared.userfaultfd.write_protect(&span, true).map_err(failed("protect", self.shared.pid))?;
        }
        block.written.clear();
        for run in runs {
            written.insert(block.addresses(run));
        }
        Ok(())
    }

    /// Reads as [`Memory::read`]. Pages that are not there must not be among `ranges`, as far as
    /// reading them would fill them.
    pub(crate) fn read(&self, ranges: &[Range], buffer: &mut [u8]) -> Result<RangeSet> {
        let has_swapped = Status::read(self.shared.pid).is_ok_and(|status| status.swapped_bytes > 0);
        self.shared.memory.set_has_swapped(has_swapped);
        let missing = self.shared.memory.read(ranges, buffer).map_err(failed("read the memory of", self.shared.pid))?;
        self.check_alive()?;
        Ok(missing)
    }

    /// Keeps pages of a block as they are now, until they are read by [`WriteWatch::read_kept`] or
    /// forgotten. The machine is stopped.
    ///
    /// # Errors
    /// QEMU has ended; some pages may be kept.
    pub(crate) fn keep(&self, range: &Range, pages: &RangeSet) -> Result<()> {
        let mut state = self.shared.state();
        let State { blocks, checkpoint, .. } = &mut *state;
        let Some(block) = blocks.iter_mut().find(|block| block.range == *range) else { return Ok(()) };
        let numbers: Vec<_> =
            pages.within(range.clone()).map(|part| block.page(part.start)..block.page(part.end)).collect();
        for page in numbers.into_iter().flatten() {
            // QEMU itself may have written to it since it was collected.
            if block.written.contains(page) {
                let range = block.addresses(page..page + 1);
                self.shared.userfaultfd.write_protect(&range, true).map_err(failed("protect", self.shared.pid))?;
                block.written.remove(page);
            }
            block.kept.insert(page);
            if let Some(series) = block.series.get_mut(page) {
                series.add(*checkpoint);
            }
        }
        Ok(())
    }

    /// Reads pages that are kept, as [`WriteWatch::read`] reads, while the machine runs. They are
    /// not kept any longer.
    ///
    /// # Errors
    /// Memory could not be read, now or before a write.
    pub(crate) fn read_kept(&self, ranges: &[Range], buffer: &mut [u8]) -> Result<RangeSet> {
        let mut missing = RangeSet::new();
        let mut rest = buffer;
        for batch in pagemark::ranges::split(ranges.iter().cloned(), BATCH) {
            for range in batch {
                let mine = rest.split_off_mut(..range.byte_count().to_usize());
                let mine = mine.ok_or_else(|| Error::damaged("a buffer is shorter than what is read into it"))?;
                self.read_kept_range(&range, mine, &mut missing)?;
            }
        }
        self.check_alive()?;
        Ok(missing)
    }

    /// Reads a range of one block that is kept.
    fn read_kept_range(&self, range: &Range, buffer: &mut [u8], missing: &mut RangeSet) -> Result<()> {
        let failed = || failed("read the memory of", self.shared.pid);
        let mut to_read = RangeSet::new();
        {
            let mut state = self.shared.state();
            let State { blocks, lost, in_copy, .. } = &mut *state;
            if let Some(error) = lost.take() {
                return Err(failed()(error));
            }
            let block =
                blocks.iter_mut().find(|block| block.range.start <= range.start && range.end <= block.range.end);
            let block = block.ok_or_else(|| Error::damaged("memory was to be kept that is not watched"))?;
            for (number, content) in range.pages().zip(buffer.as_chunks_mut::<PAGE_SIZE>().0) {
                let page = block.page(number.address());
                match block.aside.remove(&page) {
                    Some(Some(copy)) => content.copy_from_slice(&*copy),
                    Some(None) => missing.insert(number.addresses()),
                    None if block.kept.contains(page) => to_read.insert(number.addresses()),
                    None => return Err(Error::damaged("a page was to be read that is not kept")),
                }
            }
            *in_copy = Some(range.clone());
        }
        let read = to_read.iter().try_for_each(|part| {
            let place = (part.start - range.start).to_usize()..(part.end - range.start).to_usize();
            missing.extend(&self.shared.memory.read(&[part], &mut buffer[place])?);
            Ok(())
        });
        let mut state = self.shared.state();
        let State { blocks, in_copy, counts, .. } = &mut *state;
        *in_copy = None;
        self.shared.copied.notify_all();
        read.map_err(failed())?;
        if let Some(block) = blocks.iter_mut().find(|block| block.range.contains(&range.start)) {
            let mut hot = RangeSet::new();
            for number in to_read.iter().flat_map(|part| part.pages().collect::<Vec<PageNumber>>()) {
                let page = block.page(number.address());
                if !block.kept.remove(page) {
                    continue;
                }
                counts.concurrent_pages += 1;
                if block.series.get(page).is_some_and(|series| series.is_hot()) {
                    block.written.insert(page);
                    hot.insert(number.addresses());
                }
            }
            for part in hot.iter() {
                // If it stays protected, a write to it waits, and that is all.
                let _ = self.shared.userfaultfd.write_protect(&part, false);
            }
        }
        Ok(())
    }

    /// What was counted since the last checkpoint.
    pub(crate) fn counts(&self) -> KeptCounts {
        self.shared.state().counts
    }

    /// Keeps no page any longer, and counts anew.
    pub(crate) fn end_checkpoint(&self) {
        let mut state = self.shared.state();
        state.blocks.iter_mut().for_each(Watched::forget_kept);
        state.lost = None;
        state.counts = KeptCounts::default();
        state.checkpoint = state.checkpoint.wrapping_add(1);
    }

    fn check_alive(&self) -> Result<()> {
        match self.shared.pagemap.is_alive() {
            Ok(true) => Ok(()),
            Ok(false) => Err(gone(self.shared.pid)),
            Err(error) => Err(failed("read the pagemap of", self.shared.pid)(error)),
        }
    }
}

impl Drop for WriteWatch {
    fn drop(&mut self) {
        self.working = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the page with this address be written, after it was copied if it is kept.
    fn open(&self, address: Address) {
        let number = address.page();
        let range = number.addresses();
        let mut state = self.state();
        while state.in_copy.as_ref().is_some_and(|range| range.contains(&number.address())) {
            state = self.copied.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let State { blocks, lost, counts, .. } = &mut *state;
        if let Some(block) = blocks.iter_mut().find(|block| block.range.contains(&address)) {
            counts.write_faults += 1;
            let page = block.page(address);
            block.written.insert(page);
            if block.kept.remove(page) {
                counts.cow_pages += 1;
                let mut content = Box::new([0; PAGE_SIZE]);
                match self.memory.read(std::slice::from_ref(&range), &mut *content) {
                    Ok(missing) => drop(block.aside.insert(page, missing.is_empty().then_some(content))),
                    // The machine goes on, and the checkpoint fails.
                    Err(error) => *lost = Some(error),
                }
            }
        }
        if self.userfaultfd.write_protect(&range, false).is_err() {
            // It is not mapped or watched any longer. The writer tries again, and meets what is there now.
            let _ = self.userfaultfd.wake(&range);
        }
    }
}

/// The part of the thread. Dropped, however the thread ends, nothing is protected.
struct Release(Arc<Shared>);

impl Release {
    /// Opens each page that is written to, until `stop` is closed.
    fn serve(&self, stop: &PipeReader) {
        while let Ok(Some(address)) = self.0.userfaultfd.wait(stop.as_fd()) {
            self.0.open(address);
        }
    }
}

impl Drop for Release {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.has_ended = true;
        for block in &state.blocks {
            // An error means that nothing is mapped there any more.
            let _ = self.0.userfaultfd.unregister(&block.mapping);
        }
    }
}

fn gone(pid: i32) -> Error {
    failed("reach", pid)(io::Error::from_raw_os_error(libc::ESRCH))
}

fn failed(operation: &'static str, pid: i32) -> impl Fn(io::Error) -> Error {
    move |error| {
        let kind = if error.raw_os_error() == Some(libc::ESRCH) { ErrorKind::Gone } else { ErrorKind::System };
        Error::of(kind, operation, Object::Process(pid), error)
    }
}

/// Keeps the kernel from merging the pages of a mapping with equal ones (KSM), for which QEMU asks
/// by default: it would forget that they are protected.
fn keep_unmerged(pid: i32, mapping: &Range) -> Result<()> {
    if pid == std::process::id().cast_signed() {
        return own_memory::keep_unmerged(mapping).map_err(failed("separate merged pages of", pid));
    }
    // Without it the kernel has no such merging, and refuses the call.
    if !Path::new("/sys/kernel/mm/ksm").exists() {
        return Ok(());
    }
    let arguments = [mapping.start.get(), mapping.byte_count().get(), libc::MADV_UNMERGEABLE as u64, 0, 0, 0];
    inject::system_calls(pid, vec![Call { number: libc::SYS_madvise, arguments }])
        .map_err(|error| Error::from(error).help(OTHER_STRATEGY))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use pagemark::sys::own_memory::Mapping;
    use pagemark_testing::Merging;

    use super::*;

    #[test]
    fn the_kernel_merges_no_pages_that_are_watched() {
        const PAGES: usize = 64;
        let Some(merging) = Merging::start() else {
            pagemark_testing::skip!("merging of equal pages cannot be started")
        };
        // The kernel passes over some pages in some of its scans.
        for value in 1..5 {
            let watch = WriteWatch::of_this_process().unwrap();
            let mapping = Mapping::new(PAGES * PAGE_SIZE).unwrap();
            let range = mapping.range();
            let write = |page: usize, value: u64| {
                // SAFETY: the word lies within the mapping, which only this test uses.
                unsafe {
                    let page = mapping.start().add(page * PAGE_SIZE);
                    (*page.cast::<AtomicU64>().as_ptr()).store(value, Ordering::Relaxed);
                }
            };
            (0..PAGES).for_each(|page| write(page, value << 32));
            // SAFETY: the content stays as it is.
            let result =
                unsafe { libc::madvise(range.start.as_mut_ptr(), range.byte_count().to_usize(), libc::MADV_MERGEABLE) };
            assert_eq!(result, 0, "{}", io::Error::last_os_error());
            watch.add("memory", &range, range.clone()).unwrap();
            merging.wait();
            (0..PAGES).step_by(3).for_each(|page| write(page, 7));
            let mut written = RangeSet::new();
            watch.collect(&range, &mut written).unwrap();
            for page in (0..PAGES).step_by(3) {
                let address = range.start + ByteCount::of_pages(page as u64);
                assert!(written.contains(address), "the write to page {page} is not known");
            }
        }
    }

    #[test]
    fn a_page_is_hot_after_some_checkpoints_and_protected_now_and_then() {
        let mut series = Series::default();
        let hot: Vec<u32> = (0..20)
            .filter(|&checkpoint| {
                series.add(checkpoint);
                series.is_hot()
            })
            .collect();
        // The third is number 2, and every eighth is number 7, 15.
        assert_eq!(hot, [2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 16, 17, 18, 19]);
        // A checkpoint without it ends the series.
        series.add(21);
        assert!(!series.is_hot());
        assert_eq!(series.length, 1);
    }
}
