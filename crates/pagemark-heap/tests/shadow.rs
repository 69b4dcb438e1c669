//! Random programs of malloc, free, realloc and writes, beside a copy of the memory that is brought
//! up to date with what the tracker reports, and nothing else.

use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use pagemark::{Address, AddressRangeExt, ByteCount, ErrorKind, Range, RangeSet};
use pagemark_heap::grouping::{ByCost, ByHistory, Costs, Grouping, Groups, PageGroups, PartSet, Seen, Separate};
use pagemark_heap::{Form, Heap, HeapTracker, Parts};
use pagemark_linux::interface;
use pagemark_linux::pagemap::{Filter, PRESENT, Pagemap};
use pagemark_testing::{SplitMix, assert_oracle};
use proptest::prelude::*;

const CAPACITY: ByteCount = ByteCount::new(64 << 20);

/// A live object: its address in its view, and what the program has written to it.
struct Object {
    address: *mut u8,
    layout: Layout,
    content: Vec<u8>,
}

/// A copy of the first view, made of what was reported.
struct Shadow {
    start: Address,
    bytes: Vec<u8>,
}

impl Shadow {
    fn new(heap: &Heap) -> Shadow {
        let addresses = heap.addresses();
        Shadow { start: addresses.start, bytes: vec![0; addresses.byte_count().to_usize()] }
    }

    fn update(&mut self, written: &RangeSet) {
        for range in written.iter() {
            let at = (range.start - self.start).to_usize();
            let length = range.byte_count().to_usize();
            // SAFETY: the range is memory of the first view, which is mapped.
            let now = unsafe { std::slice::from_raw_parts(range.start.as_mut_ptr::<u8>(), length) };
            self.bytes[at..at + length].copy_from_slice(now);
        }
    }

    fn check(&self, heap: &Heap, object: &Object) -> Result<(), String> {
        let at = (heap.canonical(object.address) - self.start).to_usize();
        let saved = &self.bytes[at..at + object.content.len()];
        match saved.iter().zip(&object.content).position(|(saved, written)| saved != written) {
            None => Ok(()),
            Some(offset) => Err(format!(
                "byte {offset} of {} at {:?} ({:x?}) was written and not reported",
                object.content.len(),
                object.address,
                heap.canonical(object.address)
            )),
        }
    }
}

/// The program: objects, and numbers that decide what it does.
struct Program<'a> {
    heap: &'a Heap,
    objects: Vec<Object>,
    random: SplitMix,
}

impl Program<'_> {
    fn number(&mut self, below: usize) -> usize {
        self.random.below(below as u64) as usize
    }

    /// Small sizes, sizes about those of parts and pages, and large ones.
    fn size(&mut self) -> usize {
        match self.number(10) {
            0..=4 => 1 + self.number(200),
            5..=6 => 300 + self.number(900),
            7 => 1000 + self.number(4000),
            8 => 4000 + self.number(12000),
            _ => 14000 + self.number(60000),
        }
    }

    fn step(&mut self) {
        match self.number(12) {
            0..=2 => self.allocate(),
            3 if !self.objects.is_empty() => {
                let index = self.number(self.objects.len());
                let object = self.objects.swap_remove(index);
                // SAFETY: the object is live, and forgotten now.
                unsafe { self.heap.dealloc(object.address, object.layout) };
            }
            4 if !self.objects.is_empty() => self.reallocate(),
            _ if !self.objects.is_empty() => self.write(),
            _ => self.allocate(),
        }
    }

    fn allocate(&mut self) {
        let align = [1, 8, 16, 64, 1024, 4096, 16384][if self.number(4) == 0 { self.number(7) } else { 0 }];
        let layout = Layout::from_size_align(self.size(), align).unwrap();
        let is_zeroed = self.number(3) == 0;
        // SAFETY: the layout has a size; the bytes are the object's.
        unsafe {
            let address = if is_zeroed { self.heap.alloc_zeroed(layout) } else { self.heap.alloc(layout) };
            assert!(!address.is_null() && address.addr().is_multiple_of(align), "{layout:?} {address:?}");
            if is_zeroed {
                assert!(std::slice::from_raw_parts(address, layout.size()).iter().all(|&byte| byte == 0));
            } else {
                let fill = self.random.draw() as u8;
                address.write_bytes(fill, layout.size());
            }
            let content = std::slice::from_raw_parts(address, layout.size()).to_vec();
            self.objects.push(Object { address, layout, content });
        }
    }

    fn reallocate(&mut self) {
        let (index, size) = (self.number(self.objects.len()), self.size());
        let object = &mut self.objects[index];
        // SAFETY: the object is live, and has its bytes.
        unsafe {
            let address = self.heap.realloc(object.address, object.layout, size);
            assert!(!address.is_null());
            let kept = size.min(object.content.len());
            assert_eq!(std::slice::from_raw_parts(address, kept), &object.content[..kept]);
            object.address = address;
            object.layout = Layout::from_size_align(size, object.layout.align()).unwrap();
            address.add(kept).write_bytes(7, size - kept);
            object.content.resize(size, 7);
        }
    }

    /// Writes 1, 2, 4, 8 or more bytes anywhere in an object, also across the borders of parts.
    fn write(&mut self) {
        let index = self.number(self.objects.len());
        let width = [1, 2, 4, 8, 32, 3000][self.number(6)];
        let size = self.objects[index].content.len();
        let width = width.min(size);
        let at = self.number(size - width + 1);
        let value = self.random.draw();
        let object = &mut self.objects[index];
        // SAFETY: the bytes are the object's.
        unsafe {
            let to = object.address.add(at);
            match width {
                2 => to.cast::<u16>().write_unaligned(value as u16),
                4 => to.cast::<u32>().write_unaligned(value as u32),
                8 => to.cast::<u64>().write_unaligned(value),
                _ => to.write_bytes(value as u8, width),
            }
            object.content[at..at + width].copy_from_slice(std::slice::from_raw_parts(to, width));
        }
    }
}

/// The form that is tested. The tests of `pagemark-kvm` run these in the machine, in both forms.
fn form() -> Form {
    if std::env::var_os("PAGEMARK_TEST_TWO_LEVEL").is_some() { Form::TwoLevel } else { Form::UserLevel }
}

/// `None` where the kernel lacks the mechanism.
fn tracked<G: Grouping>(heap: &Heap, grouping: G) -> Option<HeapTracker<G>> {
    match HeapTracker::with_form(heap, grouping, form()) {
        Ok(tracker) => Some(tracker),
        Err(error) if error.kind() == ErrorKind::Unavailable && form() == Form::UserLevel => {
            pagemark_testing::skipped(&error.to_string());
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn run(parts: Parts, grouping: impl Grouping, seed: u64, intervals: &[usize]) -> Result<(), String> {
    let heap = Heap::new(parts, CAPACITY).unwrap();
    let mut shadow = Shadow::new(&heap);
    let Some(mut tracker) = tracked(&heap, grouping) else { return Ok(()) };
    let mut program = Program { heap: &heap, objects: Vec::new(), random: SplitMix(seed) };
    for &steps in intervals {
        (0..steps).for_each(|_| program.step());
        let mut written = RangeSet::new();
        let interval = tracker.collect_written(&mut written).unwrap();
        assert_eq!(interval.written_bytes, written.total_bytes());
        shadow.update(&written);
        program.objects.iter().try_for_each(|object| shadow.check(&heap, object))?;
    }
    // Nothing was written since. To KVM, the first read of a page that was moved is a write.
    for round in 0..2 * parts.count() {
        let interval = tracker.collect_written(&mut RangeSet::new()).unwrap();
        assert!(interval.faults == 0 || round == 0 && form() == Form::TwoLevel, "{interval:?}");
    }
    Ok(())
}

/// Merges, separates and releases parts at random.
struct AtRandom {
    random: SplitMix,
    parts: usize,
    separates: bool,
}

impl Grouping for AtRandom {
    fn separates_all(&mut self) -> bool {
        self.separates = self.random.below(6) == 0;
        self.separates
    }

    fn decide(&mut self, seen: &[Seen], groups: &mut PageGroups) {
        if self.separates {
            return groups.clear();
        }
        for &Seen { page, .. } in seen {
            let mut set = || self.random.below(1 << self.parts) as PartSet;
            let (merged, released) = (set(), set() & set());
            let merged = merged & !released;
            let merged = if merged.count_ones() < 2 { 0 } else { merged };
            if merged | released == 0 {
                groups.remove(&page);
            } else {
                groups.insert(page, Groups { merged, released });
            }
        }
    }
}

proptest! {
    #![proptest_config(pagemark_testing::cases(12))]
    #[test]
    fn nothing_that_was_written_is_missing(
        parts in prop::sample::select(&Parts::ALL[..]),
        strategy in 0..4,
        seed in any::<u64>(),
        intervals in prop::collection::vec(0..300usize, 1..24),
    ) {
        let result = match strategy {
            0 => run(parts, Separate, seed, &intervals),
            1 => run(parts, ByHistory::new(parts), seed, &intervals),
            2 => run(parts, ByCost::new(parts, Costs::default()), seed, &intervals),
            _ => {
                let random = SplitMix(seed ^ 1);
                run(parts, AtRandom { random, parts: parts.count(), separates: false }, seed, &intervals)
            }
        };
        prop_assert_eq!(result, Ok(()));
    }
}

/// Writes objects for the first time, and collects. Linux 6.12 counts the pages around one that is
/// written as written, too, as long as they hold no data.
fn write_first<G: Grouping>(tracker: &mut HeapTracker<G>, objects: &[*mut u8], write: impl Fn(*mut u8)) {
    let mut collect = || tracker.collect_written(&mut RangeSet::new()).unwrap();
    collect();
    objects.iter().for_each(|&object| write(object));
    collect();
    collect();
}

#[test]
fn a_write_is_reported_with_its_part_only() {
    for parts in Parts::ALL {
        let heap = Heap::new(parts, CAPACITY).unwrap();
        let layout = Layout::from_size_align(64, 64).unwrap();
        // SAFETY: the layout has a size.
        let objects: Vec<*mut u8> = (0..64).map(|_| unsafe { heap.alloc(layout) }).collect();
        let Some(mut tracker) = tracked(&heap, Separate) else { return };
        // SAFETY: the objects have 64 bytes.
        write_first(&mut tracker, &objects, |object| unsafe { object.write_volatile(1) });
        for &object in &objects {
            // SAFETY: the object has 64 bytes.
            unsafe { object.add(63).write_volatile(1) };
            let mut written = RangeSet::new();
            let interval = tracker.collect_written(&mut written).unwrap();
            assert_eq!((interval.faults, written.total_bytes()), (1, parts.part_bytes()));
            assert_oracle!(written.contains(heap.canonical(object)), "a write to {object:?} was missed");
        }
        // Objects of all parts of a page.
        let page = heap.canonical(objects[0]).get() / 4096;
        let (mut views, mut bytes) = (RangeSet::new(), 0);
        for &object in objects.iter().filter(|&&object| heap.canonical(object).get() / 4096 == page) {
            // SAFETY: as above.
            unsafe { object.write_volatile(2) };
            bytes += 64;
            views.insert(Address::of(object)..Address::of(object) + ByteCount::new(64));
        }
        let interval = tracker.collect_written(&mut RangeSet::new()).unwrap();
        assert_eq!(interval.faults as usize, (bytes / parts.part_bytes().to_usize()).max(1).min(parts.count()));
    }
}

#[test]
fn an_object_that_reaches_into_other_parts_is_reported_whole() {
    for parts in Parts::ALL {
        let heap = Heap::new(parts, CAPACITY).unwrap();
        let layout = Layout::from_size_align(640, 8).unwrap();
        // SAFETY: the layout has a size.
        let objects: Vec<*mut u8> = (0..64).map(|_| unsafe { heap.alloc(layout) }).collect();
        let Some(mut tracker) = tracked(&heap, Separate) else { return };
        // SAFETY: the objects have 640 bytes.
        write_first(&mut tracker, &objects, |object| unsafe { object.write_bytes(1, 640) });
        for &object in &objects {
            // SAFETY: the object has 640 bytes, on one page or two.
            unsafe { object.write_bytes(1, 640) };
            let mut written = RangeSet::new();
            let interval = tracker.collect_written(&mut written).unwrap();
            let start = heap.canonical(object);
            assert_oracle!(
                written.covers(start..start + ByteCount::new(640)),
                "{parts:?}: a write to {start:x} was missed: {written:x?}"
            );
            assert!(interval.faults <= 2);
            // On each page, the part with its number, and the rest of the object that begins last there.
            assert!(written.total_bytes().get() <= interval.faults * (parts.part_bytes().get() + 640));
        }
    }
}

#[test]
fn threads_write_while_their_memory_is_collected() {
    for parts in [Parts::Two, Parts::Eight] {
        let heap = Heap::new(parts, CAPACITY).unwrap();
        let mut shadow = Shadow::new(&heap);
        let Some(mut tracker) = tracked(&heap, ByHistory::new(parts)) else { return };
        let (is_over, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
        struct Handed(Vec<Object>);
        // SAFETY: any thread may use the objects; they are handed over when their thread ends.
        unsafe impl Send for Handed {}
        let left: Vec<Handed> = std::thread::scope(|scope| {
            let (heap, is_over, rounds) = (&heap, &is_over, &rounds);
            let run = move |seed| {
                let mut program = Program { heap, objects: Vec::new(), random: SplitMix(seed) };
                while !is_over.load(Ordering::Relaxed) {
                    (0..50).for_each(|_| program.step());
                    if program.objects.len() > 200 {
                        for object in program.objects.drain(100..) {
                            // SAFETY: the object is live, and forgotten now.
                            unsafe { heap.dealloc(object.address, object.layout) };
                        }
                    }
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
                Handed(program.objects)
            };
            let threads: Vec<_> = (0..3).map(|seed| scope.spawn(move || run(seed))).collect();
            while rounds.load(Ordering::Relaxed) < 400 {
                let mut written = RangeSet::new();
                tracker.collect_written(&mut written).unwrap();
                shadow.update(&written);
            }
            is_over.store(true, Ordering::Relaxed);
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let mut written = RangeSet::new();
        tracker.collect_written(&mut written).unwrap();
        shadow.update(&written);
        for object in left.iter().flat_map(|handed| &handed.0) {
            shadow.check(&heap, object).unwrap();
        }
    }
}

/// Releases the first part of all pages, and arms it again when `grow` is called.
struct ArmsAgain<F> {
    grow: F,
    interval: u32,
}

impl<F: FnMut() + Send> Grouping for ArmsAgain<F> {
    fn decide(&mut self, seen: &[Seen], groups: &mut PageGroups) {
        self.interval += 1;
        if self.interval == 3 {
            (self.grow)();
            return groups.clear();
        }
        groups.extend(seen.iter().map(|seen| (seen.page, Groups { merged: 0, released: 1 })));
    }
}

/// The report of the interval must not take the object for one that ends where it ended before.
#[test]
fn what_is_written_before_its_part_is_armed_again_is_reported() {
    struct Handed(*mut u8);
    // SAFETY: the object is used by one thread.
    unsafe impl Send for Handed {}
    let heap = Heap::new(Parts::Two, CAPACITY).unwrap();
    let layout = Layout::from_size_align(520, 8).unwrap();
    // SAFETY: the layout has a size.
    let mut objects = (0..64).map(|_| unsafe { heap.alloc(layout) });
    // It begins in the first part of its page, and ends in the second.
    let object = objects.find(|object| (1536..2040).contains(&(object.addr() % 4096))).unwrap();
    let (handed, grown) = (Handed(object), &heap);
    let grow = move || {
        let Handed(object) = { &handed };
        // SAFETY: the object is live, and jemalloc has room for 640 bytes there.
        unsafe {
            assert_eq!(grown.realloc(*object, layout, 640), *object);
            object.add(520).write_bytes(7, 120);
        }
    };
    let mut shadow = Shadow::new(&heap);
    let Some(mut tracker) = tracked(&heap, ArmsAgain { grow, interval: 0 }) else { return };
    for _ in 0..3 {
        // SAFETY: the object has 520 bytes.
        unsafe { object.write_bytes(1, 520) };
        let mut written = RangeSet::new();
        tracker.collect_written(&mut written).unwrap();
        shadow.update(&written);
    }
    assert!(tracker.last_interval().splits > 0);
    let content = [[1; 520].as_slice(), &[7; 120]].concat();
    shadow.check(&heap, &Object { address: object, layout, content }).unwrap();
}

/// The pages of `ranges` that are in the page table.
fn present_pages(ranges: impl Iterator<Item = Range>) -> u64 {
    let (mut pages, pagemap) = (0, Pagemap::of_this_process().unwrap());
    let filter = Filter { all: PRESENT, ..Filter::default() };
    ranges.for_each(|range| pagemap.find(&range, filter, |run, _| pages += run.byte_count().get() / 4096).unwrap());
    pages
}

#[test]
fn memory_of_small_objects_is_populated_before_its_use() {
    let populate = interface::ALL.iter().find(|interface| interface.name.starts_with("MADV_POPULATE")).unwrap();
    if let Some(error) = populate.refusal() {
        return pagemark_testing::skipped(&error.to_string());
    }
    for parts in [Parts::Two, Parts::Four] {
        let heap = Heap::new(parts, CAPACITY).unwrap();
        let view = |view: u64| {
            let first = heap.addresses();
            let offset = ByteCount::new(view * first.byte_count().get());
            first.start + offset..first.end + offset
        };
        let present = || present_pages((0..parts.count() as u64).map(view));
        // Larger objects are used through the first view, and maybe not at all.
        let large = Layout::from_size_align(1 << 20, 4096).unwrap();
        // SAFETY: the layouts have sizes.
        let large = unsafe { heap.alloc(large) };
        assert!(!large.is_null());
        assert_eq!(present(), 0);
        let layout = Layout::from_size_align(48, 8).unwrap();
        // SAFETY: as above.
        let objects: Vec<*mut u8> = (0..10_000).map(|_| unsafe { heap.alloc(layout) }).collect();
        let before = present();
        assert!(before >= 10_000 * 48 / 4096 * parts.count() as u64, "{before}");
        // SAFETY: the objects have 48 bytes.
        objects.iter().for_each(|object| unsafe { object.write_bytes(1, 48) });
        assert_eq!(present(), before);
    }
}

/// Page faults of this thread so far that needed no disk.
fn page_faults() -> u64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::uninit();
    // SAFETY: the call fills in the structure.
    unsafe {
        assert_eq!(libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()), 0);
        usage.assume_init().ru_minflt as u64
    }
}

#[test]
fn merged_parts_raise_fewer_faults() {
    let parts = Parts::Four;
    let write_all = |objects: &[*mut u8]| {
        // SAFETY: the objects have 512 bytes.
        objects.iter().for_each(|object| unsafe { object.write_volatile(1) })
    };
    let mut totals = Vec::new();
    for strategy in 0..3 {
        let heap = Heap::new(parts, CAPACITY).unwrap();
        let layout = Layout::from_size_align(512, 512).unwrap();
        // SAFETY: the layout has a size.
        let objects: Vec<*mut u8> = (0..1024).map(|_| unsafe { heap.alloc(layout) }).collect();
        let grouping: Box<dyn Grouping> = match strategy {
            0 => Box::new(Separate),
            1 => Box::new(ByHistory::new(parts)),
            _ => Box::new(ByCost::new(parts, Costs::default())),
        };
        let Some(mut tracker) = tracked(&heap, grouping) else { return };
        // The first write to a page that was protected before it was in the page table raises two.
        write_all(&objects);
        tracker.collect_written(&mut RangeSet::new()).unwrap();
        let mut total = (0, 0);
        for _ in 0..40 {
            let before = page_faults();
            write_all(&objects);
            let raised = page_faults() - before;
            let interval = tracker.collect_written(&mut RangeSet::new()).unwrap();
            assert_eq!(interval.written_bytes, ByteCount::new(512 * 1024));
            // What the tracker counts is what the kernel counts, but for a few of the program itself.
            // Those of the second level are in KVM.
            let is_same = (interval.faults..=interval.faults + 8).contains(&raised);
            assert!(is_same || form() == Form::TwoLevel, "{raised} {interval:?}");
            total.0 += interval.faults;
            total.1 += interval.merges;
        }
        totals.push(total);
    }
    let (separate, history, cost) = (totals[0], totals[1], totals[2]);
    assert_eq!(separate, (40 * 512, 0));
    assert!(history.0 < separate.0 * 6 / 10 && history.1 > 0, "{history:?} {separate:?}");
    assert!(cost.0 < history.0, "{cost:?} {history:?}");
}
