//! A heap that survives its program: what is saved comes back at its addresses, whenever the
//! program ends.

use std::alloc::{GlobalAlloc, Layout};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Lines, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use pagemark::backend::faults::{Fault, FaultyBackend};
use pagemark::backend::{Backend, MemoryBackend};
use pagemark::region::Region;
use pagemark::repository::{Repository, SpaceKind};
use pagemark::{ByteCount, Kind, PAGE_SIZE, PageNumber, PageTree, Store as _};
use pagemark_heap::{Error, ErrorKind, HeapOptions, Parts, SavedHeap};
use pagemark_testing::{SplitMix, assert_oracle, assert_oracle_eq, skipped};
use proptest::prelude::*;

#[path = "../examples/key_value_store.rs"]
mod key_value_store;

const JOB: &str = "heap";

fn options(parts: Parts) -> HeapOptions {
    HeapOptions { parts, capacity: ByteCount::new(64 << 20), version: 3 }
}

fn in_memory() -> (Arc<dyn Backend>, Repository) {
    let backend = Arc::new(MemoryBackend::new());
    let repository = Repository::create_on(backend.clone()).unwrap();
    (backend, repository)
}

/// `None`, and a message, where the kernel lacks what the tracker needs.
fn created(repository: &Repository, job: &str, options: HeapOptions) -> Option<SavedHeap> {
    match SavedHeap::create(repository, job, options) {
        Err(error) if error.kind() == ErrorKind::Core(pagemark::ErrorKind::Unavailable) => {
            skipped(&error.to_string());
            None
        }
        made => Some(made.unwrap()),
    }
}

/// An object that the program knows of, and the bytes that it has written to it.
#[derive(Clone, PartialEq, Debug)]
struct Object {
    layout: Layout,
    content: Vec<u8>,
}

/// The objects of a heap, by their addresses.
type Objects = BTreeMap<usize, Object>;

/// A program that does random things with a heap.
struct Program {
    heap: SavedHeap,
    objects: Objects,
    random: SplitMix,
}

impl Program {
    fn number(&mut self, below: usize) -> usize {
        self.random.below(below as u64) as usize
    }

    fn layout(&mut self) -> Layout {
        let size = match self.number(10) {
            0..=4 => 1 + self.number(200),
            5..=6 => 300 + self.number(900),
            7 => 1000 + self.number(4000),
            8 => 4000 + self.number(12_000),
            _ => 14_000 + self.number(100_000),
        };
        let align = if self.number(4) == 0 { 1 << self.number(16) } else { 1 };
        Layout::from_size_align(size, align).unwrap()
    }

    fn any(&mut self) -> Option<usize> {
        let index = self.number(self.objects.len().max(1));
        self.objects.keys().nth(index).copied()
    }

    fn step(&mut self) {
        match (self.number(12), self.any()) {
            (0..=2, _) | (_, None) => self.allocate(),
            (3 | 4, Some(at)) => {
                let object = self.objects.remove(&at).unwrap();
                // SAFETY: the object is live, and forgotten now.
                unsafe { self.heap.dealloc(at as *mut u8, object.layout) };
            }
            (5, Some(at)) => self.reallocate(at),
            (_, Some(at)) => self.write(at),
        }
    }

    fn allocate(&mut self) {
        let layout = self.layout();
        let (is_zeroed, fill) = (self.number(2) == 0, self.random.draw() as u8);
        // SAFETY: the layout has a size; the bytes are the object's.
        unsafe {
            let object = if is_zeroed { self.heap.alloc_zeroed(layout) } else { self.heap.alloc(layout) };
            assert!(!object.is_null() && object.addr().is_multiple_of(layout.align()), "{layout:?} {object:?}");
            let usable = self.heap.usable_size(object);
            assert!(usable >= layout.size());
            if !is_zeroed {
                object.write_bytes(fill, layout.size());
            }
            let content = std::slice::from_raw_parts(object, layout.size()).to_vec();
            assert!(!is_zeroed || content.iter().all(|&byte| byte == 0), "{layout:?}");
            self.objects.insert(object.addr(), Object { layout, content });
        }
    }

    fn reallocate(&mut self, at: usize) {
        let size = self.layout().size();
        let Object { layout, mut content } = self.objects.remove(&at).unwrap();
        // SAFETY: the object is live, and has its bytes.
        unsafe {
            let object = self.heap.realloc(at as *mut u8, layout, size);
            assert!(!object.is_null() && object.addr().is_multiple_of(layout.align()));
            content.truncate(size);
            assert_eq!(std::slice::from_raw_parts(object, content.len()), content);
            object.add(content.len()).write_bytes(7, size - content.len());
            content.resize(size, 7);
            let layout = Layout::from_size_align(size, layout.align()).unwrap();
            self.objects.insert(object.addr(), Object { layout, content });
        }
    }

    fn write(&mut self, at: usize) {
        let bytes = self.objects[&at].content.len();
        let width = [1, 8, 32, 3000][self.number(4)].min(bytes);
        let (start, value) = (self.number(bytes - width + 1), self.random.draw() as u8);
        let object = self.objects.get_mut(&at).unwrap();
        object.content[start..start + width].fill(value);
        // SAFETY: the bytes are the object's.
        unsafe { (at as *mut u8).add(start).write_bytes(value, width) };
    }
}

/// Checks that a heap holds the objects, and that they do not overlap.
fn check(heap: &SavedHeap, objects: &Objects) {
    let mut taken: Vec<(u64, u64)> = Vec::new();
    let first = heap.addresses();
    let view_bytes = first.end - first.start;
    for (&at, object) in objects {
        // SAFETY: the object is live, and nobody writes it.
        let (content, usable) = unsafe {
            let object_start = at as *mut u8;
            (std::slice::from_raw_parts(object_start, object.content.len()), heap.usable_size(object_start))
        };
        let differs = content.iter().zip(&object.content).position(|(now, then)| now != then);
        assert_oracle_eq!(differs, None, "other content in {} bytes at {at:#x}", object.content.len());
        let offset = (at as u64 - first.start.get()) % view_bytes.get();
        taken.push((offset, offset + usable as u64));
    }
    taken.sort_unstable();
    assert_oracle!(taken.windows(2).all(|pair| pair[0].1 <= pair[1].0), "objects overlap");
}

proptest! {
    #![proptest_config(pagemark_testing::cases(24))]
    #[test]
    fn what_was_saved_comes_back_and_the_program_goes_on(
        seed in any::<u64>(),
        parts in prop::sample::select(Parts::ALL.to_vec()),
        steps in prop::collection::vec(0..300usize, 1..6),
    ) {
        let (_, repository) = in_memory();
        let Some(heap) = created(&repository, JOB, options(parts)) else { return Ok(()) };
        let mut program = Program { heap, objects: Objects::new(), random: SplitMix(seed) };
        for count in steps {
            (0..count).for_each(|_| program.step());
            program.heap.checkpoint().unwrap();
            let saved = program.objects.clone();
            // What follows may not be saved before the program ends.
            (0..program.number(30)).for_each(|_| program.step());
            let is_saved = program.number(3) == 0;
            let Program { heap, objects, random } = program;
            if is_saved {
                heap.checkpoint().unwrap();
            }
            let start = heap.addresses().start;
            drop(heap);
            let heap = SavedHeap::open(&repository, JOB, options(parts)).unwrap();
            prop_assert_eq!(heap.addresses().start, start);
            let objects = if is_saved { objects } else { saved };
            check(&heap, &objects);
            program = Program { heap, objects, random };
        }
        // All memory comes back.
        let Program { heap, objects, .. } = program;
        for (at, object) in objects {
            // SAFETY: the object is live, and forgotten now.
            unsafe { heap.dealloc(at as *mut u8, object.layout) };
        }
        let pages = 64 << 8;
        let layout = Layout::from_size_align(2 * PAGE_SIZE, 1).unwrap();
        // SAFETY: the layout has a size.
        let allocate = || unsafe { heap.alloc(layout) };
        let pairs = std::iter::repeat_with(allocate).take_while(|object| !object.is_null()).count();
        prop_assert!(2 * pairs > pages * 97 / 100, "only {} of {pages} pages can be had", 2 * pairs);
    }
}

/// A heap with a number as its root, which is saved once.
fn with_number(repository: &Repository) -> Option<(SavedHeap, *mut u64)> {
    let heap = created(repository, JOB, options(Parts::Two))?;
    // SAFETY: the layout has a size, and the heap is empty.
    let number = unsafe { heap.alloc_zeroed(Layout::new::<u64>()).cast::<u64>() };
    heap.set_root(number).unwrap();
    heap.checkpoint().unwrap();
    Some((heap, number))
}

fn kind_of<T: std::fmt::Debug>(result: Result<T, Error>) -> ErrorKind {
    let error = result.unwrap_err();
    assert!(error.to_string().len() > 20, "{error}");
    error.kind()
}

#[test]
fn what_does_not_fit_is_a_typed_error() {
    let (_, repository) = in_memory();
    let open = |options| SavedHeap::open(&repository, JOB, options);
    assert_eq!(kind_of(open(options(Parts::Two))), ErrorKind::NeverSaved);
    let Some((heap, number)) = with_number(&repository) else { return };
    assert_eq!(kind_of(open(options(Parts::Two))), ErrorKind::AddressTaken);
    assert_eq!(kind_of(SavedHeap::create(&repository, JOB, options(Parts::Two))), ErrorKind::Exists);
    assert_eq!(kind_of(heap.set_root(&raw const repository)), ErrorKind::NotInHeap);
    assert_eq!(heap.root::<u64>(), number);
    drop(heap);

    let (saved, wanted) = (Parts::Two, Parts::Four);
    assert_eq!(kind_of(open(options(Parts::Four))), ErrorKind::OtherParts { saved, wanted });
    let other = HeapOptions { version: 4, ..options(Parts::Two) };
    assert_eq!(kind_of(open(other)), ErrorKind::OtherProgram { saved: 3, wanted: 4 });
    let missing = SavedHeap::open_at(&repository, JOB, 7, options(Parts::Two));
    assert_eq!(kind_of(missing), ErrorKind::Core(pagemark::ErrorKind::NoCheckpoint));

    Region::new(PAGE_SIZE).unwrap().save(&repository, "region").unwrap();
    let region = SavedHeap::open(&repository, "region", options(Parts::Two));
    assert_eq!(kind_of(region), ErrorKind::NotAHeap);
    let heap = Region::open(&repository, JOB, Default::default()).map(drop);
    assert_eq!(heap.unwrap_err().kind(), pagemark::ErrorKind::NoRegion);
    // The capacity is that of the saved heap.
    let larger = HeapOptions { capacity: ByteCount::new(1 << 30), ..options(Parts::Two) };
    let heap = open(larger).unwrap();
    assert_eq!(heap.addresses().end - heap.addresses().start, ByteCount::new(64 << 20));
    assert_eq!(heap.root::<u64>(), number);
}

#[test]
fn tables_that_the_program_has_overwritten_are_noticed() {
    let (_, repository) = in_memory();
    let Some((heap, number)) = with_number(&repository) else { return };
    // SAFETY: the layout has a size.
    let large = unsafe { heap.alloc(Layout::from_size_align(3 * PAGE_SIZE, 1).unwrap()) };
    let view_bytes = 64 << 20;
    let page = |object: *const u8| (object.addr() - heap.addresses().start.get() as usize) % view_bytes / PAGE_SIZE;
    // The magic number, the version of the allocator, the number of parts, the used pages, and entries.
    let entry = |page: usize| PAGE_SIZE + 4 * page;
    let (number, large) = (page(number.cast()), page(large));
    let offsets = [0, 8, 32, 58, entry(number), entry(number) + 3, entry(large), entry(large) + 3, entry(large + 1)];
    let checkpoints = offsets.map(|offset| {
        // The part of the page in which the offset is decides on the view.
        let view = offset % PAGE_SIZE / (PAGE_SIZE / 2);
        let place: *mut u8 = (heap.addresses().start + ByteCount::from(offset + view * view_bytes)).as_mut_ptr();
        // SAFETY: the memory is mapped. What is there is put back before it is used.
        unsafe {
            let before = place.read();
            place.write(before ^ 0x55);
            let damaged = heap.checkpoint().unwrap().sequence;
            place.write(before);
            (offset, damaged, heap.checkpoint().unwrap().sequence)
        }
    });
    drop(heap);
    for (offset, damaged, sound) in checkpoints {
        let opened = |sequence| SavedHeap::open_at(&repository, JOB, sequence, options(Parts::Two));
        match kind_of(opened(damaged)) {
            ErrorKind::OtherAllocator { saved: 0x54, known: 1 } => assert_eq!(offset, 8),
            kind => assert_eq!(kind, ErrorKind::Damaged, "{offset}"),
        }
        drop(opened(sound).unwrap());
    }
}

/// A tree of a few nodes that names more pages than there is memory for their numbers.
#[test]
fn pages_behind_the_end_of_the_heap_are_refused_before_they_are_listed() {
    let (_, repository) = in_memory();
    let Some((heap, _)) = with_number(&repository) else { return };
    let sequence = heap.checkpoint().unwrap().sequence;
    drop(heap);
    let checkpoint = repository.read(JOB, sequence).unwrap();
    let mut manifest = checkpoint.manifest.clone();
    let tree = PageTree::load(manifest.spaces[0].root, &checkpoint).unwrap();
    let mut writer = repository.writer("a test", Duration::ZERO).unwrap();
    let mut id = tree.get(PageNumber::MIN);
    for level in 0..16 {
        let children = std::iter::repeat_n(id.0, 16).flatten();
        let node: Vec<u8> = [level, 0xff, 0xff].into_iter().chain(children).collect();
        id = writer.put(Kind::Node, &node).unwrap();
    }
    manifest.spaces[0].root = id;
    let sequence = writer.commit(manifest).unwrap().sequence;
    let opened = SavedHeap::open_at(&repository, JOB, sequence, options(Parts::Two));
    assert_eq!(kind_of(opened), ErrorKind::Damaged);
}

#[test]
fn nobody_else_can_save_to_the_job_unnoticed() {
    let (_, repository) = in_memory();
    let Some((heap, _)) = with_number(&repository) else { return };
    Region::new(PAGE_SIZE).unwrap().save(&repository, JOB).unwrap();
    assert_eq!(kind_of(heap.checkpoint()), ErrorKind::SavedElsewhere);
    drop(heap);

    let (_, repository) = in_memory();
    let Some((heap, number)) = with_number(&repository) else { return };
    drop(heap);
    let heap = SavedHeap::open(&repository, JOB, options(Parts::Two)).unwrap();
    heap.checkpoint().unwrap();
    drop(heap);
    // From the first checkpoint on, the heap is another one.
    let heap = SavedHeap::open_at(&repository, JOB, 1, options(Parts::Two)).unwrap();
    // SAFETY: the number is live.
    unsafe { number.write(5) };
    assert_eq!(heap.checkpoint().unwrap().sequence, 3);
    drop(heap);
    let heap = SavedHeap::open(&repository, JOB, options(Parts::Two)).unwrap();
    // SAFETY: the number is live.
    assert_oracle_eq!(unsafe { heap.root::<u64>().read() }, 5, "the saved number");
}

#[test]
fn a_checkpoint_stores_what_was_written_and_keeps_no_freed_memory() {
    let (_, repository) = in_memory();
    let Some((heap, number)) = with_number(&repository) else { return };
    let layout = Layout::from_size_align(16 << 20, 1).unwrap();
    // SAFETY: the layout has a size; the objects are live until they are freed.
    unsafe {
        let large = heap.alloc(layout);
        large.write_bytes(1, layout.size());
        assert!(heap.checkpoint().unwrap().cost.dirty_pages >= 4096);
        number.write(1);
        let cost = heap.checkpoint().unwrap().cost;
        assert!((1..=3).contains(&cost.dirty_pages) && cost.written_bytes < 8192, "{cost:?}");
        assert_eq!(heap.checkpoint().unwrap().cost.dirty_pages, 0);
        heap.dealloc(large, layout);
    }
    let sequence = heap.checkpoint().unwrap().sequence;
    let checkpoint = repository.read(JOB, sequence).unwrap();
    let space = &checkpoint.manifest.spaces[0];
    assert_eq!(space.kind, SpaceKind::Heap { bytes: ByteCount::new(64 << 20) });
    assert!(space.pages < 16, "{} pages", space.pages);
    drop(heap);

    // The first checkpoint of a heap that was opened stores what was written since.
    let heap = SavedHeap::open(&repository, JOB, options(Parts::Two)).unwrap();
    // SAFETY: the number is live.
    unsafe { number.write(2) };
    let cost = heap.checkpoint().unwrap().cost;
    assert!((1..=3).contains(&cost.dirty_pages), "{cost:?}");
}

#[test]
fn zeros_that_nobody_wrote_are_saved() {
    let (_, repository) = in_memory();
    let Some((heap, _)) = with_number(&repository) else { return };
    let layout = Layout::from_size_align(1 << 20, 1).unwrap();
    // SAFETY: the layout has a size; the objects are live until they are freed.
    let (first, second) = unsafe {
        let first = heap.alloc(layout);
        first.write_bytes(7, layout.size());
        heap.checkpoint().unwrap();
        heap.dealloc(first, layout);
        (first, heap.alloc_zeroed(layout))
    };
    assert_eq!(first, second, "the memory is used again");
    heap.checkpoint().unwrap();
    drop(heap);
    let heap = SavedHeap::open(&repository, JOB, options(Parts::Two)).unwrap();
    // SAFETY: the object is live, and nobody writes it.
    let content = unsafe { std::slice::from_raw_parts(second, layout.size()) };
    assert_oracle!(content.iter().all(|&byte| byte == 0), "zeros that were not saved");
    drop(heap);
}

#[test]
fn a_full_heap_returns_null_and_loses_nothing() {
    let (_, repository) = in_memory();
    for (job, parts) in [("one", Parts::One), ("eight", Parts::Eight)] {
        let small = HeapOptions { capacity: ByteCount::new(1), ..options(parts) };
        let Some(heap) = created(&repository, job, small) else { return };
        let mut objects = Objects::new();
        let sizes = [1 << 20, 100_000, 5000, 4096, 1000, 700, 100, 16, 1];
        for (size, fill) in sizes.into_iter().zip(1..) {
            let layout = Layout::from_size_align(size, 1).unwrap();
            // SAFETY: the layout has a size; the bytes are the object's.
            unsafe {
                while let object = heap.alloc(layout)
                    && !object.is_null()
                {
                    object.write_bytes(fill, size);
                    objects.insert(object.addr(), Object { layout, content: vec![fill; size] });
                }
                for impossible in [1 << 21, 1 << 40, isize::MAX as usize - 4096] {
                    let layout = Layout::from_size_align(impossible, 1).unwrap();
                    assert!(heap.alloc(layout).is_null() && heap.alloc_zeroed(layout).is_null());
                }
                assert!(heap.alloc(Layout::from_size_align(1, 1 << 40).unwrap()).is_null());
            }
        }
        assert!(objects.len() > 200, "{}", objects.len());
        let (&at, object) = objects.iter().next().unwrap();
        // SAFETY: the object is live.
        assert!(unsafe { heap.realloc(at as *mut u8, object.layout, 1 << 20) }.is_null());
        check(&heap, &objects);
        heap.checkpoint().unwrap();
        drop(heap);
        let heap = SavedHeap::open(&repository, job, small).unwrap();
        check(&heap, &objects);
        // SAFETY: the layout has a size.
        assert!(unsafe { heap.alloc(Layout::new::<u8>()) }.is_null());
    }
}

/// A checkpoint in the background has what the memory held when the call returned, whatever is
/// written and freed while it is stored.
#[test]
fn a_checkpoint_in_the_background_has_the_memory_of_its_call() {
    let (_, repository) = in_memory();
    let Some(heap) = created(&repository, JOB, options(Parts::Two)) else { return };
    let layout = Layout::from_size_align(4 << 20, 8).unwrap();
    // SAFETY: the layout has a size, and the object as many bytes.
    let object = unsafe { heap.alloc(layout) };
    heap.set_root(object).unwrap();
    let fill = |byte: u8| {
        // SAFETY: as above.
        unsafe { object.write_bytes(byte, layout.size()) }
    };
    let mut savings = Vec::new();
    for number in 1..=6u8 {
        fill(number);
        savings.push(heap.checkpoint_in_background().unwrap());
        fill(100 + number);
        // SAFETY: the layout has a size, and the object is freed once.
        unsafe {
            let other = heap.alloc_zeroed(layout);
            heap.dealloc(other, layout);
        }
    }
    fill(7);
    // After those in the background.
    assert_eq!(heap.checkpoint().unwrap().sequence, 7);
    for (saving, number) in savings.into_iter().zip(1..) {
        while !saving.is_done() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(saving.wait().unwrap().sequence, number);
    }
    // The heap is dropped while it is saved.
    fill(8);
    let last = heap.checkpoint_in_background().unwrap();
    drop(heap);
    assert_eq!(last.wait().unwrap().sequence, 8);
    for number in 1..=8u8 {
        let heap = SavedHeap::open_at(&repository, JOB, number.into(), options(Parts::Two)).unwrap();
        // SAFETY: the object was saved, and nobody writes it.
        let content = unsafe { std::slice::from_raw_parts(heap.root::<u8>(), layout.size()) };
        assert_oracle!(content.iter().all(|byte| *byte == number), "checkpoint {number} has other content");
    }
}

#[test]
fn a_checkpoint_in_the_background_that_fails_loses_nothing() {
    let backend: Arc<dyn Backend> = Arc::new(MemoryBackend::new());
    let repository = Repository::create_on(backend.clone()).unwrap();
    let Some(heap) = created(&repository, JOB, options(Parts::One)) else { return };
    let layout = Layout::from_size_align(100_000, 8).unwrap();
    // SAFETY: the layout has a size, and the object as many bytes.
    unsafe {
        let object = heap.alloc(layout);
        object.write_bytes(5, layout.size());
        heap.set_root(object).unwrap();
    }
    heap.checkpoint().unwrap();
    drop(heap);
    let mut failures = 0;
    for at in 1.. {
        let faulty = Arc::new(FaultyBackend::new(backend.clone(), Fault::Error { at }, 0));
        let heap =
            Repository::on(faulty.clone()).map(|repository| SavedHeap::open(&repository, JOB, options(Parts::One)));
        // The step is one of those that open it.
        let Ok(Ok(heap)) = heap else { continue };
        // SAFETY: the object was saved.
        unsafe { heap.root::<u8>().write_bytes(at as u8, layout.size()) };
        let saved = heap.checkpoint_in_background().unwrap().wait();
        if faulty.steps() < at {
            break;
        }
        if saved.is_err() {
            failures += 1;
            heap.checkpoint().unwrap();
        }
        drop(heap);
        let heap = SavedHeap::open(&repository, JOB, options(Parts::One)).unwrap();
        // SAFETY: the object was saved, and nobody writes it.
        let content = unsafe { std::slice::from_raw_parts(heap.root::<u8>(), layout.size()) };
        assert_oracle!(content.iter().all(|byte| *byte == at as u8), "other content after a failure at step {at}");
    }
    assert!(failures > 2, "{failures}");
}

#[test]
fn threads_allocate_while_checkpoints_are_taken() {
    let (_, repository) = in_memory();
    let Some(heap) = created(&repository, JOB, options(Parts::Four)) else { return };
    let (is_done, last) = (AtomicBool::new(false), AtomicU64::new(0));
    let objects: Vec<Objects> = std::thread::scope(|scope| {
        let (heap, is_done, last) = (&heap, &is_done, &last);
        let threads = (1..=3u8).map(|number| {
            scope.spawn(move || {
                let (mut random, mut objects) = (SplitMix(number.into()), Objects::new());
                for _ in 0..4000 {
                    // A third is freed by and by.
                    if random.below(3) == 0
                        && let Some((at, object)) = objects.pop_first()
                    {
                        // SAFETY: the object is live, and forgotten now.
                        unsafe { heap.dealloc(at as *mut u8, object.layout) };
                    }
                    let most = if random.below(10) == 0 { 20_000 } else { 600 };
                    let size = 1 + random.below(most) as usize;
                    let layout = Layout::from_size_align(size, 8).unwrap();
                    // SAFETY: the layout has a size; the bytes are the object's.
                    unsafe {
                        let object = heap.alloc(layout);
                        if object.is_null() {
                            continue;
                        }
                        object.write_bytes(number, size);
                        objects.insert(object.addr(), Object { layout, content: vec![number; size] });
                    }
                }
                // Checkpoints take longer on a busy host.
                while last.load(Ordering::Relaxed) < 2 {
                    // SAFETY: the layout has a size.
                    let object = unsafe { heap.alloc(Layout::new::<u64>()) };
                    assert!(!object.is_null());
                    // SAFETY: the object is live.
                    unsafe { heap.dealloc(object, Layout::new::<u64>()) };
                    std::thread::yield_now();
                }
                objects
            })
        });
        let threads: Vec<_> = threads.collect();
        let checkpoints = scope.spawn(move || {
            while !is_done.load(Ordering::Relaxed) {
                last.store(heap.checkpoint().unwrap().sequence, Ordering::Relaxed);
            }
        });
        let objects = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        is_done.store(true, Ordering::Relaxed);
        checkpoints.join().unwrap();
        objects
    });
    let objects = objects.into_iter().flatten().collect();
    check(&heap, &objects);
    let last = heap.checkpoint().unwrap().sequence;
    drop(heap);
    // The tables of each checkpoint are consistent, whatever the threads did.
    for sequence in 1..last {
        drop(SavedHeap::open_at(&repository, JOB, sequence, options(Parts::Four)).unwrap());
    }
    let heap = SavedHeap::open(&repository, JOB, options(Parts::Four)).unwrap();
    check(&heap, &objects);
}

#[test]
fn a_forked_child_does_not_have_the_heap() {
    let (_, repository) = in_memory();
    let Some((heap, number)) = with_number(&repository) else { return };
    let run = |child: &dyn Fn() -> i32| {
        // SAFETY: the child uses the heap only, and exits.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let status = child();
            // SAFETY: ends the child without its handlers.
            unsafe { libc::_exit(status) };
        }
        let mut status = 0;
        // SAFETY: waits for the child that was just made.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
        status
    };
    let refused = run(&|| {
        // SAFETY: the layout has a size.
        let is_null = unsafe { heap.alloc(Layout::new::<u64>()).is_null() };
        let is_error = heap.checkpoint().is_err_and(|error| error.kind() == ErrorKind::ForkedChild);
        let is_refused = heap.check_process().is_err_and(|error| error.kind() == ErrorKind::ForkedChild)
            && heap.set_root(number).is_err_and(|error| error.kind() == ErrorKind::ForkedChild);
        let is_nothing = heap.root::<u64>().is_null() && heap.object_bytes(number).is_none();
        i32::from(!(is_null && is_error && is_refused && is_nothing))
    });
    assert!(libc::WIFEXITED(refused) && libc::WEXITSTATUS(refused) == 0, "{refused:#x}");
    // SAFETY: the default action of the signal ends the child.
    let fault = run(&|| unsafe {
        libc::signal(libc::SIGSEGV, libc::SIG_DFL);
        number.write_volatile(1);
        0
    });
    assert!(libc::WIFSIGNALED(fault) && libc::WTERMSIG(fault) == libc::SIGSEGV, "{fault:#x}");
    // SAFETY: the number is live.
    assert_oracle_eq!(unsafe { number.read() }, 0, "the number beside children");
    assert!(heap.object_bytes(number).is_some_and(|bytes| (8..100).contains(&bytes)));
    assert_eq!(heap.object_bytes(number.wrapping_byte_add(8)), None);
    assert_eq!(heap.object_bytes(&0u64), None);
    heap.checkpoint().unwrap();
}

/// Runs checkpoints of random objects until the repository is dead, on a backend that fails, and
/// checks what is left. Returns false if the run ended before the fault.
fn survives(fault: Fault, seed: u64) -> Option<bool> {
    const CHECKPOINTS: u64 = 4;
    let (below, _) = in_memory();
    let faulty = FaultyBackend::new(below.clone(), fault, seed);
    let parts = Parts::ALL[seed as usize % 4];
    let (mut attempts, mut last) = (vec![Objects::new()], 0);
    {
        let repository = Repository::on(Arc::new(faulty.clone())).unwrap();
        let heap = created(&repository, JOB, options(parts))?;
        // SAFETY: the layout has a size.
        let number = unsafe { heap.alloc_zeroed(Layout::new::<u64>()).cast::<u64>() };
        heap.set_root(number).unwrap();
        let mut program = Program { heap, objects: Objects::new(), random: SplitMix(seed) };
        for attempt in 1..=CHECKPOINTS {
            (0..20).for_each(|_| program.step());
            // SAFETY: the number is live.
            unsafe { number.write(attempt) };
            attempts.push(program.objects.clone());
            match program.heap.checkpoint() {
                Ok(_) => last = attempt,
                Err(error) => {
                    assert!(matches!(error.kind(), ErrorKind::Core(_)), "{error}");
                    if faulty.is_dead() {
                        break;
                    }
                    // The next attempt includes what this one would have saved.
                    if matches!(fault, Fault::Error { .. }) {
                        program.heap.checkpoint().unwrap();
                        last = attempt;
                    }
                }
            }
        }
    }
    let (Fault::Kill { at } | Fault::Error { at } | Fault::DiskFull { from: at }) = fault else { return Some(false) };
    let is_reached = faulty.steps() >= at;
    faulty.lose_power().unwrap();
    let repository = Repository::on(below).unwrap();
    match SavedHeap::open(&repository, JOB, options(parts)) {
        Err(error) => assert_oracle!(
            error.kind() == ErrorKind::NeverSaved && last == 0,
            "{fault:?}: checkpoint {last} is lost: {error}"
        ),
        Ok(heap) => {
            // SAFETY: the root is the number.
            let attempt = unsafe { heap.root::<u64>().read() };
            assert_oracle!(
                attempt >= last && attempt < attempts.len() as u64,
                "{fault:?}: a checkpoint is lost: {attempt} after {last}"
            );
            check(&heap, &attempts[attempt as usize]);
            heap.checkpoint().unwrap();
        }
    }
    Some(is_reached)
}

#[test]
fn whatever_step_fails_the_last_whole_checkpoint_is_there() {
    for kind in 0..3 {
        for at in 1.. {
            let fault = match kind {
                0 => Fault::Kill { at },
                1 => Fault::Error { at },
                _ => Fault::DiskFull { from: at },
            };
            match survives(fault, at as u64) {
                None => return,
                Some(true) => {}
                Some(false) => break,
            }
        }
    }
}

/// Set in the process that is killed, to the path of its repository.
const ROLE: &str = "PAGEMARK_TEST_STORE";

/// The store in another process, which has said that it is ready.
struct Store {
    process: Child,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Store {
    fn start(path: &Path) -> Store {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["a_store_that_is_killed_has_what_it_saved", "--exact", "--nocapture"])
            .env(ROLE, path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut answers = BufReader::new(process.stdout.take().unwrap()).lines();
        assert!(answers.by_ref().map_while(Result::ok).any(|line| line == "ready"), "the store does not start");
        Store { process, answers }
    }

    fn send(&mut self, command: &str) {
        writeln!(self.process.stdin.as_mut().unwrap(), "{command}").unwrap();
    }

    fn ask(&mut self, command: &str) -> String {
        self.send(command);
        self.answers.next().expect("the store answers").unwrap()
    }

    fn list(&mut self) -> BTreeMap<String, String> {
        self.send("list");
        let lines = self.answers.by_ref().map(Result::unwrap).take_while(|line| line != "end");
        lines.map(|line| line.split_once(' ').map(|(key, value)| (key.into(), value.into())).unwrap()).collect()
    }

    fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

#[test]
fn a_store_that_is_killed_has_what_it_saved() {
    if let Some(path) = std::env::var_os(ROLE) {
        key_value_store::serve(Path::new(&path)).unwrap();
        return;
    }
    let (_, repository) = in_memory();
    if created(&repository, JOB, options(Parts::One)).is_none() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("repository");
    let mut random = SplitMix(1);
    let mut saved = BTreeMap::new();
    for round in 0..24u64 {
        let mut store = Store::start(&path);
        assert_oracle_eq!(store.list(), saved, "round {round}: what the store holds");
        let mut now = saved.clone();
        for _ in 0..1 + random.below(3) {
            for _ in 0..random.below(120) {
                let key = format!("key-{}", random.below(300));
                if random.below(4) == 0 {
                    let is_there = now.remove(&key).is_some();
                    assert_eq!(store.ask(&format!("delete {key}")), if is_there { "ok" } else { "none" });
                } else {
                    let most = if random.below(20) == 0 { 9000 } else { 60 };
                    let value = "v".repeat(1 + random.below(most) as usize);
                    assert_eq!(store.ask(&format!("set {key} {value}")), "ok");
                    now.insert(key, value);
                }
            }
            assert!(store.ask("save").starts_with("saved "));
            saved = now.clone();
        }
        // The store is killed in any step of a checkpoint that it has not reported, or before it.
        assert_eq!(store.ask(&format!("set round {round}")), "ok");
        now.insert("round".into(), round.to_string());
        store.send("save");
        std::thread::sleep(Duration::from_micros(random.below(6000)));
        store.kill();
        let mut store = Store::start(&path);
        let found = store.list();
        assert_oracle!(found == saved || found == now, "round {round}: neither the last state nor the one before it");
        saved = found;
        store.kill();
    }
    assert!(saved.len() > 100, "{}", saved.len());
}

/// Set in the process that frees what it must not.
const MISUSE: &str = "PAGEMARK_TEST_MISUSE";

#[test]
fn what_is_no_object_is_not_freed() {
    let (_, repository) = in_memory();
    if let Some(misuse) = std::env::var_os(MISUSE) {
        let Some((heap, number)) = with_number(&repository) else { return };
        let (small, large) = (Layout::new::<u64>(), Layout::from_size_align(9000, 1).unwrap());
        // SAFETY: none; that is what is tested.
        unsafe {
            let object = heap.alloc(large);
            match misuse.to_str().unwrap() {
                "small twice" => (0..2).for_each(|_| heap.dealloc(number.cast(), small)),
                "large twice" => (0..2).for_each(|_| heap.dealloc(object, large)),
                "inside small" => heap.dealloc(number.cast::<u8>().add(1), small),
                "inside large" => heap.dealloc(object.add(PAGE_SIZE), large),
                "elsewhere" => heap.dealloc((&raw const repository).cast_mut().cast(), small),
                "resized" => _ = heap.realloc(number.cast::<u8>().add(16), small, 100),
                misuse => panic!("{misuse}"),
            }
        }
        // Not reached.
        return;
    }
    if with_number(&repository).is_none() {
        return;
    }
    for misuse in ["small twice", "large twice", "inside small", "inside large", "elsewhere", "resized"] {
        let mut process = Command::new(std::env::current_exe().unwrap());
        process.args(["what_is_no_object_is_not_freed", "--exact", "--nocapture"]).env(MISUSE, misuse);
        let output = process.output().unwrap();
        assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{misuse}: {output:?}");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(text.contains("but there is no object of the heap"), "{misuse}: {text}");
    }
}
