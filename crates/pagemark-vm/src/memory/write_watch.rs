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
//! Where the machine reaches a block by mappings of its own ([`View`]), KVM's log says what it
//! writes there, and only kept pages are protected in them. [`Activation`] says until when.
//!
//! If this process ends, the kernel closes the userfaultfd: nothing is protected then, and all
//! writes that wait go on. If the thread ends for another reason, it unprotects everything first.

use std::collections::HashMap;
use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use pagemark::target::KeptCounts;
use pagemark::{Address, AddressRangeExt, ByteCount, PAGE_SIZE, PageNumber, Range, RangeSet};
use pagemark_linux::memory::Memory;
use pagemark_linux::own_memory;
use pagemark_linux::pagemap::{Filter, PRESENT, Pagemap, SWAPPED};
use pagemark_linux::proc::{self, Status};
use pagemark_linux::userfaultfd::{HOLDING_FLAGS, Synchronous, Userfaultfd};
use pagemark_trace::attach;
use pagemark_trace::inject::{self, Call};

use crate::error::{Error, ErrorKind, Object, Result};
use crate::memory::page_set::PageSet;
use crate::memory::views::View;

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

/// Until when a page that a copy-on-write checkpoint keeps is protected from the machine, where
/// KVM's log says what the machine writes (PML, sections 4.3 to 4.5).
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Activation {
    /// Until it is copied. The next write to it waits for nobody.
    #[default]
    Early,
    /// Until the next stop: the first write to it waits for Pagemark also if it is copied. Fewer
    /// calls open pages, each for many of them, but within the downtime.
    Late,
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
    activation: Activation,
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
    /// How the machine reaches it, if not as QEMU does.
    views: Vec<View>,
    /// Pages that may be protected in the views.
    held: PageSet,
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

    /// The page with an address of QEMU or of a view.
    fn find(&self, address: Address) -> Option<usize> {
        if self.range.contains(&address) {
            return Some(self.page(address));
        }
        let view = self.views.iter().find(|view| view.range.contains(&address))?;
        Some(self.page(view.of.start + (address - view.range.start)))
    }

    /// Protects pages in all views, or opens them.
    fn protect_views(&self, userfaultfd: &Userfaultfd, pages: std::ops::Range<usize>, protect: bool) -> io::Result<()> {
        let wanted = self.addresses(pages);
        for view in &self.views {
            let part = wanted.overlap(&view.of);
            if !part.is_empty() {
                let start = view.range.start + (part.start - view.of.start);
                userfaultfd.write_protect(&(start..start + part.byte_count()), protect)?;
            }
        }
        Ok(())
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
    pub(crate) fn start(pid: i32, activation: Activation) -> Result<WriteWatch> {
        let refused = |error: io::Error| failed("watch the writes of", pid)(error).help(OTHER_STRATEGY);
        let thread = proc::live_thread(pid).ok_or_else(|| refused(io::Error::from_raw_os_error(libc::ESRCH)))?;
        let pagemap = Pagemap::of_process(thread).map_err(refused)?;
        let memory = Memory::open(thread).map_err(refused)?;
        let made = attach::find(pid).and_then(|process| inject::userfaultfd_with(process, HOLDING_FLAGS));
        let descriptor = made.map_err(|error| Error::from(error).help(OTHER_STRATEGY))?;
        let made = Userfaultfd::synchronous_from_new(descriptor).map_err(refused)?;
        WriteWatch::with(pid, pagemap, memory, made, activation)
    }

    /// Watches memory of this process, which must have another thread than those that write to it:
    /// to measure what it costs.
    ///
    /// # Errors
    /// Those of [`WriteWatch::start`].
    pub(crate) fn of_this_process(activation: Activation) -> Result<WriteWatch> {
        let pid = std::process::id() as i32;
        let refused = || failed("watch the writes of", pid);
        let pagemap = Pagemap::of_this_process().map_err(refused())?;
        let memory = Memory::of_this_process().map_err(refused())?;
        WriteWatch::with(pid, pagemap, memory, Userfaultfd::synchronous().map_err(refused())?, activation)
    }

    fn with(
        pid: i32,
        pagemap: Pagemap,
        memory: Memory,
        made: Synchronous,
        activation: Activation,
    ) -> Result<WriteWatch> {
        let Synchronous { userfaultfd, protects_shared, protects_unpopulated, .. } = made;
        if !protects_shared || !protects_unpopulated {
            let error =
                Error::about(ErrorKind::Unsupported, Object::Process(pid), "cannot be watched before Linux 6.4");
            return Err(error.help(OTHER_STRATEGY));
        }
        let (state, copied) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { pid, userfaultfd, pagemap, memory, activation, state, copied });
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
            let (views, held) = (Vec::new(), PageSet::new(pages));
            state.blocks.push(Watched { range: range.clone(), mapping, written, kept, aside, series, views, held });
        }
        // What became data meanwhile.
        let has_swapped = Status::read(*pid).map_or(true, |status| status.swapped_bytes > 0);
        find(if has_swapped { PRESENT | SWAPPED } else { PRESENT }).map_err(&failed)?;
        Ok(data)
    }

    /// True if the block is watched.
    pub(crate) fn has(&self, range: &Range) -> bool {
        self.shared.state().blocks.iter().any(|block| block.range == *range)
    }

    /// Sets by which mappings of its own the machine reaches a block. The machine is stopped, and
    /// gets no others until all pages that are kept then are copied or forgotten.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if pages cannot be protected in them one by one.
    pub(crate) fn set_views(&self, id: &str, range: &Range, views: Vec<View>) -> Result<()> {
        let mut state = self.shared.state();
        let Some(block) = state.blocks.iter_mut().find(|block| block.range == *range) else { return Ok(()) };
        for view in &views {
            // Also one that is known: another may have taken its place in the meantime.
            self.shared.userfaultfd.register(&view.range).map_err(|error| {
                let reason = format!("cannot be protected where the machine reaches it: {error}");
                Error::about(ErrorKind::Unsupported, Object::Block(id.to_owned()), reason).help(OTHER_STRATEGY)
            })?;
        }
        block.views = views;
        Ok(())
    }

    /// Ends to watch the blocks that are not among `ranges`.
    pub(crate) fn retain(&self, ranges: &[Range]) {
        self.shared.state().blocks.retain(|block| {
            let stays = ranges.contains(&block.range);
            if !stays {
                // An error means that nothing is mapped there any more.
                // Another block may be in the same mapping.
                let _ = self.shared.userfaultfd.write_protect(&block.range, false);
                block.views.iter().for_each(|view| drop(self.shared.userfaultfd.unregister(&view.range)));
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
        for span in spans(&runs) {
            let span = block.addresses(span);
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
        self.shared.hold_in_views(block).map_err(failed("protect", self.shared.pid))
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
            let (mut hot, mut copied) = (RangeSet::new(), PageSet::new(block.series.len()));
            for number in to_read.iter().flat_map(|part| part.pages().collect::<Vec<PageNumber>>()) {
                let page = block.page(number.address());
                if !block.kept.remove(page) {
                    continue;
                }
                counts.concurrent_pages += 1;
                if !block.views.is_empty() {
                    // What the machine writes is in KVM's log.
                    copied.insert(page);
                } else if block.series.get(page).is_some_and(|series| series.is_hot()) {
                    block.written.insert(page);
                    hot.insert(number.addresses());
                }
            }
            if self.shared.activation == Activation::Early {
                for run in copied.runs() {
                    run.clone().for_each(|page| _ = block.held.remove(page));
                    // As below.
                    let _ = block.protect_views(&self.shared.userfaultfd, run, false);
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

    /// Protects the pages of a block that are kept, and no others, in its views. The machine is
    /// stopped.
    fn hold_in_views(&self, block: &mut Watched) -> io::Result<()> {
        if block.views.is_empty() {
            return Ok(());
        }
        for span in spans(&block.held.runs()) {
            block.protect_views(&self.userfaultfd, span, false)?;
        }
        block.held.clear();
        for span in spans(&block.kept.runs()) {
            block.protect_views(&self.userfaultfd, span.clone(), true)?;
            span.for_each(|page| block.held.insert(page));
        }
        Ok(())
    }

    /// Lets the page with this address be written, after it was copied if it is kept.
    fn open(&self, address: Address) {
        let range = address.page().addresses();
        let mut state = self.state();
        let find = |state: &State| {
            let mut places = state.blocks.iter().enumerate();
            places.find_map(|(index, block)| Some((index, block.find(address)?)))
        };
        let mut place = find(&state);
        while let Some((index, page)) = place
            && let Some(in_copy) = &state.in_copy
            && in_copy.contains(&state.blocks[index].addresses(page..page + 1).start)
        {
            state = self.copied.wait(state).unwrap_or_else(PoisonError::into_inner);
            place = find(&state);
        }
        let State { blocks, lost, counts, .. } = &mut *state;
        if let Some((index, page)) = place
            && let Some(block) = blocks.get_mut(index)
        {
            counts.write_faults += 1;
            // In a view it was the machine, which KVM's log has.
            if block.range.contains(&address) {
                block.written.insert(page);
            }
            if block.kept.remove(page) {
                counts.cow_pages += 1;
                let mut content = Box::new([0; PAGE_SIZE]);
                let own = block.addresses(page..page + 1);
                match self.memory.read(std::slice::from_ref(&own), &mut *content) {
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
            block.views.iter().for_each(|view| drop(self.0.userfaultfd.unregister(&view.range)));
        }
    }
}

/// The runs, near ones joined with the pages between them.
fn spans(runs: &[std::ops::Range<usize>]) -> impl Iterator<Item = std::ops::Range<usize>> {
    let near = runs.chunk_by(|one, next| next.start - one.end <= NEAR_PAGES);
    near.filter_map(|near| Some(near.first()?.start..near.last()?.end))
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
    let call = Call { number: libc::SYS_madvise, arguments };
    let made = attach::find(pid).and_then(|process| inject::system_calls(process, vec![call]));
    made.map_err(|error| Error::from(error).help(OTHER_STRATEGY))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use pagemark_linux::own_memory::Mapping;
    use pagemark_testing::{Merging, assert_oracle, assert_oracle_eq};

    use super::*;

    #[test]
    fn the_kernel_merges_no_pages_that_are_watched() {
        const PAGES: usize = 64;
        let Some(merging) = Merging::start() else {
            pagemark_testing::skip!("merging of equal pages cannot be started")
        };
        // The kernel passes over some pages in some of its scans.
        for value in 1..5 {
            let watch = WriteWatch::of_this_process(Activation::default()).unwrap();
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
                assert_oracle!(written.contains(address), "the write to page {page} is not known");
            }
        }
    }

    /// Memory that two mappings share, as a machine and its QEMU do.
    struct Twice {
        watch: WriteWatch,
        own: Range,
        view: Range,
        next: u64,
    }

    impl Twice {
        const PAGES: usize = 64;

        fn new(activation: Activation) -> Twice {
            let bytes = Self::PAGES * PAGE_SIZE;
            let (rights, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
            // SAFETY: new memory, and a second mapping of it, which an old length of 0 makes; they are never
            // removed.
            let mapped = unsafe {
                let own = libc::mmap(std::ptr::null_mut(), bytes, rights, kind, -1, 0);
                [own, libc::mremap(own, 0, bytes, libc::MREMAP_MAYMOVE)]
            };
            assert!(!mapped.contains(&libc::MAP_FAILED), "{}", io::Error::last_os_error());
            let [own, view] = mapped.map(|start| {
                let start = Address::new(start as u64);
                start..start + ByteCount::new(bytes as u64)
            });
            let watch = WriteWatch::of_this_process(activation).unwrap();
            watch.add("memory", &own, own.clone()).unwrap();
            let twice = Twice { watch, own, view, next: 0 };
            // Without its last pages, and with the first in two views.
            let part = |pages: std::ops::Range<u64>| {
                let at = |range: &Range| {
                    range.start + ByteCount::of_pages(pages.start)..range.start + ByteCount::of_pages(pages.end)
                };
                View { range: at(&twice.view), of: at(&twice.own) }
            };
            twice.watch.set_views("memory", &twice.own, vec![part(0..20), part(20..60)]).unwrap();
            twice
        }

        /// Writes to a page by a mapping, in another thread as the watch demands. Returns what was
        /// written.
        fn write(&mut self, by_view: bool, page: usize) -> u64 {
            self.next += 1;
            let mapping = if by_view { &self.view } else { &self.own };
            let word: *mut AtomicU64 = (mapping.start + ByteCount::of_pages(page as u64)).as_mut_ptr();
            // SAFETY: the page is within the mapping, and its words are accessed as atomic ones alone.
            let word = unsafe { &*word };
            std::thread::scope(|scope| scope.spawn(|| word.store(self.next, Ordering::Relaxed)).join().unwrap());
            self.next
        }

        fn faults(&self) -> u64 {
            self.watch.counts().write_faults
        }

        fn keep(&self, pages: std::ops::Range<u64>) -> Range {
            let start = self.own.start;
            let range = start + ByteCount::of_pages(pages.start)..start + ByteCount::of_pages(pages.end);
            self.watch.keep(&self.own, &RangeSet::from(range.clone())).unwrap();
            range
        }

        /// The first words of kept pages, as they were when they were kept.
        fn read_kept(&self, range: Range) -> Vec<u64> {
            let mut buffer = vec![0; range.byte_count().to_usize()];
            assert!(self.watch.read_kept(&[range], &mut buffer).unwrap().is_empty());
            buffer.chunks(PAGE_SIZE).map(|page| u64::from_ne_bytes(page[..8].try_into().unwrap())).collect()
        }

        fn written(&self) -> u64 {
            let mut written = RangeSet::new();
            self.watch.collect(&self.own, &mut written).unwrap();
            written.page_count()
        }
    }

    #[test]
    fn writes_by_views_wait_until_a_kept_page_is_copied() {
        for activation in [Activation::Early, Activation::Late] {
            let mut twice = Twice::new(activation);
            let first: Vec<u64> = (0..Twice::PAGES).map(|page| twice.write(true, page)).collect();
            // Nothing is kept: no write by a view waits, and none is reported.
            assert_eq!((twice.faults(), twice.written()), (0, 0));
            let kept = twice.keep(16..24);
            let second = [twice.write(true, 17), twice.write(false, 18), twice.write(true, 22)];
            // Again: it waits only by the other mapping.
            twice.write(true, 17);
            twice.write(false, 22);
            twice.write(true, 30);
            assert_eq!(twice.faults(), 4, "{activation:?}");
            assert_eq!(twice.watch.counts().cow_pages, 3);
            assert_oracle_eq!(twice.read_kept(kept), first[16..24], "what was kept");
            assert_eq!(twice.watch.counts().concurrent_pages, 5);
            // Of what was copied, and of what was not written since.
            twice.write(true, 16);
            twice.write(true, 23);
            assert_eq!(twice.faults(), if activation == Activation::Early { 4 } else { 6 }, "{activation:?}");
            twice.watch.end_checkpoint();
            assert_eq!(twice.written(), 2, "what was written by the other mapping");
            // The next checkpoint keeps other pages: what was kept before waits no longer.
            let kept = twice.keep(40..42);
            twice.write(true, 19);
            twice.write(true, 20);
            assert_eq!(twice.faults(), 0, "{activation:?}");
            let third = twice.write(true, 41);
            assert_eq!((twice.faults(), twice.read_kept(kept)), (1, first[40..42].to_vec()));
            assert!(third > second[2]);
            twice.watch.end_checkpoint();
            // Without a watch nothing waits.
            let kept = twice.keep(0..64);
            twice.watch.retain(&[]);
            assert!(twice.watch.read_kept(&[kept], &mut vec![0; 64 * PAGE_SIZE]).is_err());
            (0..60).for_each(|page| _ = twice.write(true, page));
            assert_eq!(twice.faults(), 0);
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
