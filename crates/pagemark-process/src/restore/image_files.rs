//! The files that CRIU's images directory gets from a checkpoint: those of the state as they are,
//! and the pages images, which are written from the page trees.

use std::fs::{File, OpenOptions};
use std::ops::ControlFlow;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pagemark::repository::{Manifest, SpaceKind, StateRecord};
use pagemark::store::Piece;
use pagemark::{
    Address, AddressRangeExt, ByteCount, ContentId, Kind, PAGE_SIZE, PageNumber, PageRange, PageRangeExt, RangeSet,
    Store,
};
use pagemark_trace::error::{Error, ErrorKind, Object};

use super::memory::{Pages, ProcessMemory};
use super::{io, reservations};
use crate::criu::images::schema::{CoreEntry, MmEntry, PstreeEntry, VmaEntry};
use crate::criu::images::{Image, ImageKind, PageRun, PageSource, Pagemap, read_first, with_varint};
use crate::criu::notes::InMachine;

/// Time between two reports of progress.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(2);

/// CRIU's status of a private mapping of a file.
const IS_PRIVATE_FILE: u32 = 1 << 6;

/// The memory that the images directory gets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ImageMemory {
    /// All pages.
    Whole,
    /// Only the pages that cannot be delivered into the processes.
    Undeliverable,
}

/// Called with the bytes of memory written so far.
pub(super) type Progress<'a> = &'a mut dyn FnMut(ByteCount);

/// Writes the state files.
pub(super) fn write_states(manifest: &Manifest, store: &dyn Store, directory: &Path) -> Result<(), Error> {
    for record in &manifest.state {
        write_state(record, store, directory)?;
    }
    crate::criu::timers::arm_expired(directory)
}

/// Writes one file of the state.
fn write_state(record: &StateRecord, store: &dyn Store, directory: &Path) -> Result<(), Error> {
    let plain = record.name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
    if !plain || record.name.starts_with('.') || record.name.is_empty() || record.name.len() > 128 {
        return Err(Error::damaged(format!("{:?} is no name of a state file", record.name)));
    }
    let path = directory.join(&record.name);
    let file = create(&path)?;
    record.content.copy_to_file(store, &file).map_err(write_failed(&path))
}

/// A process whose pages image is written.
struct Unwritten<'a> {
    process: &'a PstreeEntry,
    pagemap: Pagemap,
    /// The root of its page tree.
    root: ContentId,
    deliverable: RangeSet,
    /// The pages that must be known to write the images.
    pages: Pages,
}

impl Unwritten<'_> {
    fn is_relative_of(&self, other: &PstreeEntry) -> bool {
        other.pid == self.process.ppid || other.ppid == self.process.pid
    }

    /// Where CRIU has a page from. `relatives` are the pages of the parent and of children.
    fn source(&self, page: PageNumber, run: &PageRun, relatives: &[&Pages]) -> PageSource {
        let is_deliverable = self.deliverable.contains(page.address());
        if run.present {
            // CRIU saved it itself: maybe a page that hides a file's, which has to be there even if it holds zeros.
            return PageSource::Present;
        }
        if is_deliverable && relatives.is_empty() {
            // Pages that are not delivered in the end hold zeros.
            return PageSource::Lazy;
        }
        let id = self.pages.id(page);
        if id.is_zero() {
            PageSource::Absent
        } else if is_deliverable && relatives.iter().all(|other| other.id(page) != id) {
            PageSource::Lazy
        } else {
            // A page that a process may share with its parent since the fork, too: CRIU shares it again.
            PageSource::Present
        }
    }
}

/// Writes the pages images of all processes and of their shared memory, and pagemap images that say
/// so. Returns the memory of the processes.
pub(super) fn write_pages(
    manifest: &Manifest,
    store: &(dyn Store + Sync),
    directory: &Path,
    memory: ImageMemory,
    processes: &[PstreeEntry],
    progress: Progress<'_>,
) -> Result<Vec<ProcessMemory>, Error> {
    let mut all = unwritten(manifest, directory, memory, processes)?;
    read_needed_pages(&mut all, store)?;
    let mut written = 0;
    let mut memories = Vec::new();
    for of in &all {
        let Unwritten { process, pagemap, root, deliverable, pages } = of;
        let relatives: Vec<&Pages> =
            all.iter().filter(|other| other.is_relative_of(process)).map(|other| &other.pages).collect();
        let (image, runs) = pagemap.with_sources(|page, run| of.source(PageNumber::new(page), run, &relatives));
        let path = directory.join(format!("pages-{}.img", pagemap.pages_id));
        let present: Vec<PageRange> = runs.iter().filter(|run| run.present).map(PageRun::page_range).collect();
        written += write_pages_image(&path, &present, pages, store, &mut |pages| {
            progress(ByteCount::of_pages(written + pages));
        })?;
        let path = directory.join(format!("pagemap-{}.img", process.pid));
        std::fs::write(&path, image).map_err(io(format!("write {}", path.display())))?;
        let delivered = runs.iter().filter(|run| !run.present).map(PageRun::page_range).collect();
        let known = Some(pages).filter(|_| !relatives.is_empty());
        memories.push(ProcessMemory::new(process.pid.into(), *root, delivered, deliverable.clone(), known));
    }
    for space in &manifest.spaces {
        if let SpaceKind::SharedMemory { bytes, inode } = space.kind {
            written += write_object(inode, space.root, bytes, store, directory, &mut |pages| {
                progress(ByteCount::of_pages(written + pages));
            })?;
        }
    }
    Ok(memories)
}

/// The processes that have a pagemap image, whose mappings are made in their places.
fn unwritten<'a>(
    manifest: &Manifest,
    directory: &Path,
    memory: ImageMemory,
    processes: &'a [PstreeEntry],
) -> Result<Vec<Unwritten<'a>>, Error> {
    let mut all: Vec<Unwritten<'a>> = Vec::new();
    for process in processes {
        let path = directory.join(format!("pagemap-{}.img", process.pid));
        if !path.exists() {
            continue;
        }
        let pid = process.pid as i32;
        let space = manifest.process(pid);
        let space = space.ok_or_else(|| Error::damaged(format!("the memory of process {pid} is missing")))?;
        let deliverable = if memory == ImageMemory::Whole { RangeSet::new() } else { deliverable(directory, process)? };
        let (pagemap, pages) = (Pagemap::read(&path)?, Pages::default());
        all.push(Unwritten { process, pagemap, root: space.root, deliverable, pages });
    }
    let held: RangeSet = all.iter().flat_map(|of| of.pagemap.runs()).map(|run| run.page_range().addresses()).collect();
    let divides = reservations::divides(directory, all.iter().map(|of| of.process))?;
    for of in &all {
        reservations::map_in_place(directory, of.process, &held, divides)?;
    }
    Ok(all)
}

/// Reads which pages must be known. Of a process without a parent or child, only the part of the
/// page tree is read that names pages which are not delivered: the rest is read while CRIU starts.
fn read_needed_pages(all: &mut [Unwritten<'_>], store: &(dyn Store + Sync)) -> Result<(), Error> {
    for index in 0..all.len() {
        let is_alone = !all.iter().any(|other| other.is_relative_of(all[index].process));
        let of = &mut all[index];
        let runs = of.pagemap.runs();
        let needed: RangeSet<PageNumber> = match is_alone {
            true => runs.flat_map(|run| undeliverable(&run, &of.deliverable)).collect(),
            false => runs.map(|run| run.page_range()).collect(),
        };
        of.pages = Pages::read(of.root, &needed, store)?;
    }
    Ok(())
}

/// Writes the images of an object of shared memory, which the processes fill it from. Calls
/// `progress` with the pages written so far. Returns the pages written.
fn write_object(
    inode: u64,
    root: ContentId,
    bytes: ByteCount,
    store: &(dyn Store + Sync),
    directory: &Path,
    progress: &mut dyn FnMut(u64),
) -> Result<u64, Error> {
    // CRIU names it by the lower half.
    let path = directory.join(format!("pagemap-shmem-{}.img", inode as u32));
    let mut pagemap = Pagemap::read(&path)?;
    let all = PageNumber::new(0)..Address::new(bytes.get()).page_aligned_up().page();
    let pages = Pages::read(root, &[all].into_iter().collect(), store)?;
    let held: RangeSet = pages.numbers.iter().map(|page| page.addresses()).collect();
    pagemap.add_withheld(&held);
    let (image, runs) = pagemap.with_sources(|_, _| PageSource::Present);
    let runs: Vec<PageRange> = runs.iter().map(PageRun::page_range).collect();
    std::fs::write(&path, image).map_err(io(format!("write {}", path.display())))?;
    let path = directory.join(format!("pages-{}.img", pagemap.pages_id));
    // CRIU made it, without a page.
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        removed => removed.map_err(io(format!("remove {}", path.display())))?,
    }
    write_pages_image(&path, &runs, &pages, store, progress)
}

/// The pages of a run that the images directory must have.
fn undeliverable(run: &PageRun, deliverable: &RangeSet) -> Vec<PageRange> {
    let mut rest: RangeSet = [run.page_range().addresses()].into_iter().collect();
    if !run.present {
        rest.subtract(deliverable);
    }
    rest.iter().map(|range| range.page_range()).collect()
}

/// Writes a pages image: the pages of `runs` one after the other, with holes for pages of zeros.
/// Calls `progress` with the pages written so far. Returns the pages written.
fn write_pages_image(
    path: &Path,
    runs: &[PageRange],
    pages: &Pages,
    store: &(dyn Store + Sync),
    progress: &mut dyn FnMut(u64),
) -> Result<u64, Error> {
    let file = create(path)?;
    let page_count = runs.iter().map(PageRangeExt::page_count).sum();
    file.set_len(ByteCount::of_pages(page_count).get()).map_err(io(format!("write {}", path.display())))?;
    // The number of each page that is not zeros in the image.
    let (mut numbers, mut ids) = (Vec::new(), Vec::new());
    let mut first = 0;
    for run in runs {
        let positions = pages.positions(run);
        numbers.extend(pages.numbers[positions.clone()].iter().map(|page| first + (page.get() - run.start.get())));
        ids.extend_from_slice(&pages.ids[positions]);
        first += run.page_count();
    }
    let written = AtomicU64::new(0);
    let failure = Mutex::new(None);
    let write = |pieces: &[Piece], content: &[u8]| {
        let follows =
            |a: &Piece, b: &Piece| numbers[a.position] + 1 == numbers[b.position] && a.bytes.end == b.bytes.start;
        for run in pieces.chunk_by(follows) {
            let offset = PageNumber::new(numbers[run[0].position]).address().get();
            let content = &content[run[0].bytes.start..run[run.len() - 1].bytes.end];
            let result = match content.len() == run.len() * PAGE_SIZE {
                true => file.write_all_at(content, offset).map_err(io(format!("write {}", path.display()))),
                false => Err(Error::damaged("a page has the wrong length")),
            };
            if let Err(error) = result {
                failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                return ControlFlow::Break(());
            }
            written.fetch_add(run.len() as u64, Ordering::Relaxed);
        }
        ControlFlow::Continue(())
    };
    let read = std::thread::scope(|scope| {
        let (done, is_done) = mpsc::channel::<()>();
        let (ids, write) = (&ids, &write);
        let thread = std::thread::Builder::new().name("pagemark-images".into());
        let reading = thread.spawn_scoped(scope, move || {
            // Dropped at the end, also in a panic.
            let _done = done;
            store.get_many(Kind::Page, ids, write)
        });
        let reading = reading.map_err(io("start a thread"))?;
        while is_done.recv_timeout(PROGRESS_INTERVAL) == Err(RecvTimeoutError::Timeout) {
            progress(written.load(Ordering::Relaxed));
        }
        progress(written.load(Ordering::Relaxed));
        Ok::<_, Error>(reading.join())
    })?;
    read.map_err(|_| Error::criu_io("write images")(std::io::Error::other("a thread panicked")))??;
    match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(page_count),
    }
}

/// Has CRIU restore a process with the link to its program's file that it has outside of a machine.
/// The process itself might lack the right to change the link. The file is the one that is mapped
/// at the program's first instruction, whatever became of its path. Changes nothing if the program
/// has replaced that mapping.
pub(super) fn set_program(directory: &Path, process: &InMachine) -> Result<(), Error> {
    let path = directory.join(format!("mm-{}.img", process.pid));
    let mm: MmEntry = read_first(&path, ImageKind::Mm)?;
    let is_program =
        |vma: &&VmaEntry| vma.status & IS_PRIVATE_FILE != 0 && (vma.start..vma.end).contains(&process.program_entry);
    let Some(mapping) = mm.vmas.iter().find(is_program) else { return Ok(()) };
    let mut image = Image::read(&path, ImageKind::Mm)?;
    for message in &mut image.messages {
        *message = with_varint(message, MmEntry::EXE_FILE_ID, mapping.shmid);
    }
    std::fs::write(&path, image.encode()).map_err(io(format!("write {}", path.display())))
}

/// The mappings of a process whose pages can be delivered, without the pages on which threads have
/// their stacks: private anonymous mappings that are neither locked nor huge.
/// Those that a forked child finds empty are left out too: their missing pages are zeros in every
/// process.
fn deliverable(directory: &Path, process: &PstreeEntry) -> Result<RangeSet, Error> {
    let mm: MmEntry = read_first(&directory.join(format!("mm-{}.img", process.pid)), ImageKind::Mm)?;
    let fits = |vma: &&VmaEntry| {
        let flags = vma.flags as i32;
        let needed = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let is_wiped = vma.madv.unwrap_or(0) & 1 << libc::MADV_WIPEONFORK != 0;
        let is_other = flags & (libc::MAP_LOCKED | libc::MAP_HUGETLB) != 0 || is_wiped;
        let are_pages = [vma.start, vma.end].into_iter().all(|address| Address::new(address).is_page_aligned());
        flags & needed == needed && !is_other && are_pages && vma.start < vma.end
    };
    let mappings = mm.vmas.iter().filter(fits).map(|vma| Address::new(vma.start)..Address::new(vma.end));
    let mut ranges: RangeSet = mappings.collect();
    for thread in &process.threads {
        let core: CoreEntry = read_first(&directory.join(format!("core-{thread}.img")), ImageKind::Core)?;
        if let Some(info) = core.thread_info {
            ranges.remove(Address::new(info.gpregs.sp).page().addresses());
        }
    }
    Ok(ranges)
}

/// Creates a file that is its owner's alone.
pub(super) fn create(path: &Path) -> Result<File, Error> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600).open(path).map_err(io(format!("create {}", path.display())))
}

/// For `map_err`: content could not be written to `path`.
fn write_failed(path: &Path) -> impl Fn(pagemark::Error) -> Error {
    move |error| match error.kind() {
        pagemark::ErrorKind::Stream => Error::of(ErrorKind::System, "write", Object::File(path.to_owned()), error),
        _ => error.into(),
    }
}
