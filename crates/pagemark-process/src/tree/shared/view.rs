//! Mappings of shared memory in this process, by which freed pages are noticed.
//!
//! When a process frees a page (`MADV_REMOVE`, `fallocate` or `ftruncate` of the object), the
//! kernel takes the page out of all page tables. Where writes are tracked, the entry becomes the
//! marker of an unwritten page; a process that then reads there gets a new page of zeros, which
//! counts as unwritten too. The page table of a mapping that is not tracked has no markers: the
//! entry of a freed page is empty there, and stays so until this process maps the page again.
//!
//! The times of the object do not tell: the first write to a page after it was protected changes
//! them, too.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, munmap};
use pagemark::{Address, AddressRangeExt, ByteCount, Range, RangeSet};
use pagemark_linux::pagemap::{Filter, PRESENT, Pagemap};
use pagemark_linux::this_process::OfThisProcess;
use pagemark_trace::objects::ObjectId;

use super::{Mapped, is_mapped_by};

/// How often objects are looked for that no process maps any more. This takes at most a hundredth
/// of the time.
const SWEEP: Duration = Duration::from_secs(1);
const SWEEP_SHARE: u32 = 100;

/// The views of the objects of a tree. A view holds the memory of its object, and is unmapped about
/// a second after the last process has ended or unmapped the object.
#[derive(Debug)]
pub(super) struct Views {
    views: Arc<Mutex<HashMap<ObjectId, View>>>,
    pagemap: Pagemap,
}

/// A view, and the mappings of the object in other processes.
#[derive(Debug)]
struct View {
    /// In this process.
    range: Range,
    process: OfThisProcess,
    mapped: Vec<Mapped>,
}

impl Views {
    pub(super) fn new() -> io::Result<Views> {
        let views = Arc::new(Mutex::new(HashMap::new()));
        let swept = Arc::downgrade(&views);
        std::thread::Builder::new().name("views".into()).spawn(move || {
            let mut pause = SWEEP;
            loop {
                std::thread::sleep(pause);
                let Some(views) = swept.upgrade() else { return };
                let begin = Instant::now();
                sweep(&views);
                pause = SWEEP.max(begin.elapsed() * SWEEP_SHARE);
            }
        })?;
        Ok(Views { views, pagemap: Pagemap::of_this_process()? })
    }

    /// Drops the views of other objects than these.
    pub(super) fn retain(&self, has: impl Fn(ObjectId) -> bool) {
        lock(&self.views).retain(|&object, _| has(object));
    }

    /// Takes the mappings of an object. False if it has no view of this length.
    pub(super) fn follow(&self, object: ObjectId, bytes: ByteCount, mapped: &[Mapped]) -> bool {
        let mut views = lock(&self.views);
        let Some(view) = views.get_mut(&object).filter(|view| view.range == view.range_of(bytes)) else { return false };
        view.mapped = mapped.to_vec();
        true
    }

    /// Maps an object.
    pub(super) fn begin(&self, object: ObjectId, file: &File, bytes: ByteCount, mapped: Vec<Mapped>) -> io::Result<()> {
        let view = View::new(file, bytes, mapped)?;
        lock(&self.views).insert(object, view);
        Ok(())
    }

    /// The pages among `data` that are not mapped in the view: all, if there is none.
    pub(super) fn find_freed(&self, object: ObjectId, data: &RangeSet) -> io::Result<RangeSet> {
        let views = lock(&self.views);
        let Some(view) = views.get(&object) else { return Ok(data.clone()) };
        let (known, mut freed) = view.split(data);
        let filter = Filter { none: PRESENT, ..Filter::default() };
        for part in known.iter() {
            self.pagemap.find(&view.addresses(&part), filter, |run, _| freed.insert(view.offsets(&run)))?;
        }
        Ok(freed)
    }

    /// Maps pages of the object, and perhaps neighbours of them.
    pub(super) fn map(&self, object: ObjectId, pages: &RangeSet) -> io::Result<()> {
        let views = lock(&self.views);
        let Some(view) = views.get(&object) else { return Ok(()) };
        let (known, _) = view.split(pages);
        known.iter().try_for_each(|part| view.advise(&view.addresses(&part), MmapAdvise::MADV_POPULATE_READ))
    }

    /// Drops the view of an object.
    pub(super) fn forget(&self, object: ObjectId) {
        lock(&self.views).remove(&object);
    }
}

/// Drops the views of objects that no other process maps. Nobody waits meanwhile.
fn sweep(views: &Mutex<HashMap<ObjectId, View>>) {
    let mapped: Vec<_> = lock(views).iter().map(|(&object, view)| (object, view.mapped.clone())).collect();
    for (object, mapped) in mapped {
        if !mapped.iter().any(|(pid, mapping)| is_mapped_by(*pid, object, &mapping.range)) {
            lock(views).remove(&object);
        }
    }
}

fn lock(views: &Mutex<HashMap<ObjectId, View>>) -> MutexGuard<'_, HashMap<ObjectId, View>> {
    views.lock().unwrap_or_else(PoisonError::into_inner)
}

impl View {
    fn new(file: &File, bytes: ByteCount, mapped: Vec<Mapped>) -> io::Result<View> {
        let length = NonZeroUsize::new(bytes.to_usize()).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe { mmap(None, length, ProtFlags::PROT_READ, MapFlags::MAP_SHARED, file, 0) }?;
        let at = Address::of(start.as_ptr().cast::<u8>());
        let mut view = View { range: at..at, process: OfThisProcess::new(), mapped };
        view.range = view.range_of(bytes);
        view.advise(&view.range, MmapAdvise::MADV_DONTFORK)?;
        view.advise(&view.range, MmapAdvise::MADV_DONTDUMP)?;
        Ok(view)
    }

    /// Where an object of that length is mapped.
    fn range_of(&self, bytes: ByteCount) -> Range {
        self.range.start..(self.range.start + bytes).page_aligned_up()
    }

    /// The parts of `offsets` that the view shows, and the others.
    fn split(&self, offsets: &RangeSet) -> (RangeSet, RangeSet) {
        let all = self.offsets(&self.range);
        let mut others = offsets.clone();
        others.remove(all.clone());
        (offsets.within(all).collect(), others)
    }

    fn addresses(&self, offsets: &Range) -> Range {
        offsets.moved_up(self.range.start - Address::MIN)
    }

    fn offsets(&self, addresses: &Range) -> Range {
        addresses.moved_down(self.range.start - Address::MIN)
    }

    fn advise(&self, part: &Range, advice: MmapAdvise) -> io::Result<()> {
        let start = NonNull::new(part.start.as_mut_ptr()).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: none of the kinds of advice that are given here changes content, and the part is in a
        // mapping of this process.
        Ok(unsafe { madvise(start, part.byte_count().to_usize(), advice) }?)
    }
}

impl Drop for View {
    fn drop(&mut self) {
        let Some(start) = NonNull::new(self.range.start.as_mut_ptr()) else { return };
        // A child made by fork does not have the mapping.
        if self.process.is_here() {
            // SAFETY: the mapping is this view's alone, and nothing refers to it any more.
            let _ = unsafe { munmap(start, self.range.byte_count().to_usize()) };
        }
    }
}
