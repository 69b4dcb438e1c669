//! Which bytes of a heap were written.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use pagemark::track::view_log::ViewLog;
use pagemark::track::view_scan::ViewScan;
use pagemark::{
    Address, AddressRangeExt, ByteCount, Error, Mechanism, PAGE_SIZE, PageNumber, PageRangeExt, Range, RangeSet,
    Tracker,
};

#[cfg(feature = "jemalloc")]
use crate::allocator::Allocator;
use crate::grouping::{Grouping, PageGroups, PartSet, Seen};
use crate::tracked::Tracked;
#[cfg(feature = "jemalloc")]
use crate::{GlobalHeap, Heap, heap};

mod two_level;

/// What tells the parts of a page apart.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Form {
    /// The protection of the views (FPM, section 3.1). It works everywhere.
    #[default]
    UserLevel,
    /// The second level of page tables, in a program that `pagemark-kvm` runs (FPM, section 3.2):
    /// merged parts are one page to the log of the machine, so that a write to any of them opens
    /// all, and what is not written is not reported.
    TwoLevel,
}

/// Finds the bytes of a heap that were written, by the parts of pages.
///
/// It reports addresses of the first view, which shows all memory of the heap. What it reports are
/// the bytes of whole parts, except where objects reach from one part into the next: an object is
/// reported whole, in steps of 8 bytes, with the part in which it begins. In an object that spans
/// pages, each page is reported by itself.
///
/// A tracker never misses a write to an object that is live when it collects. What was written to
/// objects that were freed since is reported or not. The first collect reports all memory that
/// holds data. A heap has one tracker at a time.
pub struct HeapTracker<G> {
    /// Dropped before the heap, whose views it has registered.
    level: Level,
    heap: Owner,
    grouping: G,
    groups: PageGroups,
    /// The part of the views that the last collect has protected, from their beginning on.
    protected: ByteCount,
    /// The part of which data may have been reported: more than is protected after a collect that
    /// has failed.
    reported: ByteCount,
    /// For each page, the views through which it was written.
    views: Vec<PartSet>,
    seen: Vec<Seen>,
    last: Interval,
}

/// What tracks the views.
#[derive(Debug)]
enum Level {
    User(ViewScan),
    Second(two_level::Second),
}

impl Level {
    fn check_process(&self) -> Result<(), Error> {
        match self {
            Level::User(scan) => scan.check_process(),
            Level::Second(second) => second.log.check_process(),
        }
    }
}

/// Keeps the memory of a heap mapped.
#[derive(Debug)]
enum Owner {
    #[cfg(feature = "jemalloc")]
    Own(Arc<heap::Shared>),
    #[cfg(feature = "jemalloc")]
    Global(&'static Allocator),
    Saved(Arc<dyn Tracked + Send + Sync>),
}

impl Deref for Owner {
    type Target = dyn Tracked;

    fn deref(&self) -> &(dyn Tracked + 'static) {
        match self {
            #[cfg(feature = "jemalloc")]
            Owner::Own(shared) => shared.allocator(),
            #[cfg(feature = "jemalloc")]
            Owner::Global(allocator) => *allocator,
            Owner::Saved(heap) => &**heap,
        }
    }
}

/// What one interval has cost.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Interval {
    /// Armed parts that were written: each raised a page fault, with [`Form::TwoLevel`] one in KVM.
    /// Parts of memory that is new, or was freed and is used again, are populated without one.
    pub faults: u64,
    /// Parts that are no longer armed after the interval.
    pub merges: u64,
    /// Parts that are armed again.
    pub splits: u64,
    /// Bytes that were reported.
    pub written_bytes: ByteCount,
}

#[cfg(feature = "jemalloc")]
impl<G: Grouping> HeapTracker<G> {
    /// Tracks a heap.
    ///
    /// # Errors
    /// `ErrorKind::Unavailable`: the kernel is older than 6.7, or refuses userfaultfd.
    /// `ErrorKind::System`: the heap has a tracker already.
    pub fn new(heap: &Heap, grouping: G) -> Result<HeapTracker<G>, Error> {
        HeapTracker::with_form(heap, grouping, Form::UserLevel)
    }

    /// Tracks a heap in the form that is named.
    ///
    /// # Errors
    /// Those of [`HeapTracker::new`]. `ErrorKind::Unavailable` for [`Form::TwoLevel`]: the program
    /// does not run in the machine of `pagemark-kvm`, or that machine keeps no log.
    pub fn with_form(heap: &Heap, grouping: G, form: Form) -> Result<HeapTracker<G>, Error> {
        HeapTracker::of(Owner::Own(heap.shared().clone()), grouping, form)
    }

    /// Tracks all memory of the program. The memory that the tracker needs itself is part of it.
    ///
    /// # Errors
    /// Those of [`HeapTracker::with_form`].
    pub fn of_program(heap: &'static GlobalHeap, grouping: G, form: Form) -> Result<HeapTracker<G>, Error> {
        let allocator = heap.allocator().map_err(|error| {
            Error::unavailable(Mechanism::PagemapScan, format!("the program has no heap with views: {error}"))
        })?;
        HeapTracker::of(Owner::Global(allocator), grouping, form)
    }
}

impl<G: Grouping> HeapTracker<G> {
    /// Tracks a saved heap.
    ///
    /// # Errors
    /// Those of [`HeapTracker::new`].
    pub(crate) fn of_saved(heap: Arc<dyn Tracked + Send + Sync>, grouping: G) -> Result<HeapTracker<G>, Error> {
        HeapTracker::of(Owner::Saved(heap), grouping, Form::UserLevel)
    }

    fn of(heap: Owner, grouping: G, form: Form) -> Result<HeapTracker<G>, Error> {
        // SAFETY: the owner keeps the views mapped, and is dropped after what tracks them.
        let level = unsafe {
            match form {
                Form::UserLevel => Level::User(ViewScan::new(heap.views())?),
                Form::TwoLevel => Level::Second(two_level::Second::new(ViewLog::new(heap.views())?)),
            }
        };
        heap.views().begin_tracking();
        Ok(HeapTracker {
            level,
            heap,
            grouping,
            groups: PageGroups::new(),
            protected: ByteCount::ZERO,
            reported: ByteCount::ZERO,
            views: Vec::new(),
            seen: Vec::new(),
            last: Interval::default(),
        })
    }

    /// Adds to `written` what was written since the last call (all that holds data, the first
    /// time), and starts the next interval. Returns what the interval has cost.
    ///
    /// # Errors
    /// Those of [`Tracker::collect`]; then what was found is in `written`, and nothing is lost.
    /// `ErrorKind::ForkedChild`: a child has to make its own tracker.
    pub fn collect_written(&mut self, written: &mut RangeSet) -> Result<Interval, Error> {
        self.level.check_process()?;
        let used = self.heap.used();
        self.views.clear();
        self.views.resize(self.protected.to_usize() / PAGE_SIZE, 0);
        let separates_all = self.grouping.separates_all();
        let (mut found, mut interval) = (RangeSet::new(), Interval::default());
        // Some pages may be protected again, also if this fails: they are reported now, after the
        // last part was armed. Objects that are handed out later are written later.
        let armed = match &self.level {
            Level::User(_) => {
                let scanned = self.scan_views(used, separates_all);
                self.list_written(&mut interval);
                scanned.and_then(|()| self.regroup(separates_all, &mut interval))
            }
            Level::Second(_) => self.read_log(used).and_then(|()| self.arrange(separates_all, &mut interval)),
        };
        self.report(&mut found);
        // The memory that is new is reported wherever it holds data, however it was written.
        let new = self.data_between(self.protected, used);
        self.reported = used;
        found.extend(new.as_ref().unwrap_or(&RangeSet::new()));
        interval.written_bytes = found.total_bytes();
        written.append(&mut found);
        new?;
        armed?;
        self.protected = used;
        self.last = interval;
        Ok(interval)
    }

    /// Scans all views, and protects them.
    fn scan_views(&mut self, used: ByteCount, separates_all: bool) -> Result<(), Error> {
        let HeapTracker { level, groups, views, protected, .. } = self;
        let Level::User(scan) = level else { return Ok(()) };
        for (number, view) in scan.views().iter().enumerate() {
            let first = view.start.page();
            let unarmed = groups.iter().filter(|(_, groups)| groups.unarmed() >> number & 1 != 0 && !separates_all);
            let released: RangeSet = unarmed.map(|(&page, _)| addresses(first, page)).collect();
            scan.collect(&(view.start..view.start + *protected), &released, |run| {
                let pages = run.page_range();
                let pages = (pages.start - first) as usize..(pages.end - first) as usize;
                views[pages].iter_mut().for_each(|views| *views |= 1 << number);
            })?;
            scan.collect(&(view.start + *protected..view.start + used), &RangeSet::new(), |_| ())?;
        }
        Ok(())
    }

    /// Lists the pages of the written parts for the strategy, and counts their faults.
    fn list_written(&mut self, interval: &mut Interval) {
        self.seen.clear();
        for (page, &views) in self.views.iter().enumerate().filter(|&(_, &views)| views != 0) {
            let armed = views & !unarmed(&self.groups, page);
            interval.faults += u64::from(armed.count_ones());
            self.seen.push(Seen { page, written: armed });
        }
        self.heap.views().take_populated(self.protected, &mut |offsets| {
            let page = (offsets.start - Address::MIN).to_usize() / PAGE_SIZE;
            let armed = self.views[page] & !unarmed(&self.groups, page);
            interval.faults = interval.faults.saturating_sub(u64::from(armed.count_ones()));
        });
    }

    /// Adds the bytes of the written parts and of freed pages to `found`.
    fn report(&mut self, found: &mut RangeSet) {
        self.heap.crossings().begin_report();
        let first = self.heap.views().view(0).start.page();
        for (page, &views) in self.views.iter().enumerate().filter(|&(_, &views)| views != 0) {
            let start = addresses(first, page).start;
            self.heap.crossings().written(page, views, |bytes| {
                found.insert(start + ByteCount::from(bytes.start)..start + ByteCount::from(bytes.end));
            });
        }
        let origin = self.heap.views().view(0).start;
        // Pages beyond were never reported with another content.
        self.heap.views().take_freed(self.reported, &mut |offsets| {
            found.insert(origin + (offsets.start - Address::MIN)..origin + (offsets.end - Address::MIN));
        });
    }

    /// The pages between two offsets that hold data, by their addresses in the first view.
    fn data_between(&self, start: ByteCount, end: ByteCount) -> Result<RangeSet, Error> {
        let views = self.heap.views();
        let (origin, end) = (views.view(0).start, Address::MIN + end);
        let (mut found, mut at) = (RangeSet::new(), Address::MIN + start);
        while at < end {
            let data = views.next_data(at, end).map_err(Error::system("looking for data in the memory of a heap"))?;
            at = data.end;
            found.insert(origin + (data.start - Address::MIN)..origin + (data.end - Address::MIN));
        }
        Ok(found)
    }

    /// At user level: has the strategy decide, and arms or disarms the parts for which that is new.
    /// `are_armed`: all parts are armed already.
    fn regroup(&mut self, are_armed: bool, interval: &mut Interval) -> Result<(), Error> {
        let Level::User(scan) = &self.level else { return Ok(()) };
        let before: Vec<PartSet> = self.seen.iter().map(|seen| unarmed(&self.groups, seen.page)).collect();
        self.grouping.decide(&self.seen, &mut self.groups);
        let pages = self.seen.iter().map(|seen| seen.page).zip(before);
        let changes = pages.map(|(page, before)| (page, before, unarmed(&self.groups, page)));
        let changes: Vec<_> = changes.filter(|(_, before, after)| before != after).collect();
        for (_, before, after) in &changes {
            interval.merges += u64::from((after & !before).count_ones());
            interval.splits += u64::from((before & !after).count_ones());
        }
        for (number, view) in scan.views().iter().enumerate() {
            let first = view.start.page();
            let pages = |is_in: &dyn Fn(PartSet, PartSet) -> PartSet| -> RangeSet {
                let changed = changes.iter().filter(|(_, before, after)| is_in(*before, *after) >> number & 1 != 0);
                changed.map(|&(page, _, _)| addresses(first, page)).collect()
            };
            // What is armed here is reported by this collect, also what is written at this moment.
            if !are_armed {
                scan.protect(&pages(&|before, after| before & !after))?;
            }
            scan.release(&pages(&|before, after| after & !before))?;
        }
        Ok(())
    }

    /// What the last interval has cost.
    pub fn last_interval(&self) -> Interval {
        self.last
    }

    /// Tells the strategy what it has cost to save a number of bytes.
    pub fn learn_cost(&mut self, saved: ByteCount, time: Duration) {
        if saved > ByteCount::ZERO {
            self.grouping.learn_cost(time.as_nanos() as f64 / saved.get() as f64);
        }
    }
}

/// The parts of a page that are not armed.
fn unarmed(groups: &PageGroups, page: usize) -> PartSet {
    groups.get(&page).copied().unwrap_or_default().unarmed()
}

/// The addresses of a page of a view, by its number in the heap.
fn addresses(first: PageNumber, page: usize) -> Range {
    (first + page as u64..first + page as u64 + 1).addresses()
}

impl<G> Drop for HeapTracker<G> {
    fn drop(&mut self) {
        self.heap.views().end_tracking();
    }
}

impl<G: Grouping> Tracker for HeapTracker<G> {
    fn mechanism(&self) -> Mechanism {
        match self.level {
            Level::User(_) => Mechanism::PagemapScan,
            Level::Second(_) => Mechanism::KvmLog,
        }
    }

    fn granularity(&self) -> ByteCount {
        self.heap.parts().part_bytes()
    }

    fn collect(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<(), Error> {
        let mut written = RangeSet::new();
        let result = self.collect_written(&mut written);
        dirty.extend(&written.intersection(ranges));
        result.map(drop)
    }
}

#[cfg(all(test, feature = "jemalloc"))]
mod tests {
    use std::alloc::{GlobalAlloc, Layout};

    use pagemark::ErrorKind;
    use pagemark_testing::assert_oracle;

    use super::*;
    use crate::Parts;
    use crate::grouping::Separate;
    use crate::jemalloc;

    /// `None` where the kernel lacks the mechanism.
    fn tracked(heap: &Heap) -> Option<HeapTracker<Separate>> {
        match HeapTracker::new(heap, Separate) {
            Err(error) if error.kind() == ErrorKind::Unavailable => {
                pagemark_testing::skipped(&error.to_string());
                None
            }
            tracker => Some(tracker.unwrap()),
        }
    }

    /// jemalloc knows that memory which it has freed holds zeros, and does not write them.
    #[test]
    fn freed_memory_that_is_handed_out_as_zeros_is_reported() {
        let layout = Layout::from_size_align(1 << 20, PAGE_SIZE).unwrap();
        for parts in Parts::ALL {
            let heap = Heap::new(parts, ByteCount::new(64 << 20)).unwrap();
            let Some(mut tracker) = tracked(&heap) else { return };
            let mut collect = || {
                let mut written = RangeSet::new();
                tracker.collect_written(&mut written).unwrap();
                written
            };
            // SAFETY: the layout has a size, and the object as many bytes.
            let object = unsafe {
                let object = heap.alloc(layout);
                object.write_bytes(0xaa, layout.size());
                object
            };
            let place = heap.canonical(object)..heap.canonical(object) + ByteCount::from(layout.size());
            assert_oracle!(collect().covers(place.clone()), "a write was missed");
            // SAFETY: the object is live, and not used again.
            unsafe { heap.dealloc(object, layout) };
            jemalloc::purge();
            // SAFETY: the layout has a size.
            let zeroed = unsafe { heap.alloc_zeroed(layout) };
            assert_eq!(heap.canonical(zeroed), place.start, "jemalloc does not use the same memory again");
            assert_oracle!(collect().covers(place.clone()), "{parts:?}: a write was missed");
            // SAFETY: the object has as many bytes.
            let content = unsafe { std::slice::from_raw_parts(zeroed, layout.size()) };
            assert!(content.iter().all(|&byte| byte == 0));
            assert!(!collect().contains(place.start), "reported once");
        }
    }

    /// A collect takes place after jemalloc has filled the object with zeros.
    #[test]
    fn zeros_that_are_written_before_their_object_is_handed_out_are_reported() {
        let layout = Layout::from_size_align(20_000, PAGE_SIZE).unwrap();
        for parts in Parts::ALL {
            let heap = Heap::new(parts, ByteCount::new(64 << 20)).unwrap();
            let allocator = heap.shared().allocator();
            let Some(mut tracker) = tracked(&heap) else { return };
            // SAFETY: the layout has a size.
            let object = unsafe { heap.alloc(layout) };
            let offset = (heap.canonical(object) - heap.addresses().start).to_usize();
            let pages = heap.canonical(object)..heap.canonical(object) + ByteCount::of_pages(5);
            tracker.collect_written(&mut RangeSet::new()).unwrap();
            // The entries of small objects that were in its place.
            (offset..offset + 5 * PAGE_SIZE).step_by(8).for_each(|at| allocator.crossings().record(at, 8));
            let reports = allocator.crossings().reports();
            // SAFETY: the object is in the first view, and has as many bytes.
            unsafe { object.write_bytes(0, layout.size()) };
            let mut written = RangeSet::new();
            tracker.collect_written(&mut written).unwrap();
            allocator.hand_out_written(object, layout.size(), reports);
            tracker.collect_written(&mut written).unwrap();
            assert_oracle!(written.covers(pages), "{parts:?}: a write was missed: {written:x?}");
            written.clear();
            // A report before the object is written says nothing of it.
            let reports = allocator.crossings().reports();
            allocator.hand_out_written(object, layout.size(), reports);
            tracker.collect_written(&mut written).unwrap();
            assert!(written.is_empty(), "{written:x?}");
        }
    }
}
