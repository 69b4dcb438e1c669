//! Processor time of allocation, by number of parts, beside jemalloc alone and the system's
//! allocator, in one run: pairs of allocation and free, and a working set with random replacements.
//!
//! `cargo run --release -p pagemark-heap --example allocation_speed`

use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::black_box;
use std::time::Duration;

use pagemark::ByteCount;
use pagemark::repository::Repository;
use pagemark_heap::{GlobalHeap, Heap, HeapOptions, Parts, SavedHeap};

const CAPACITY: ByteCount = ByteCount::new(16 << 30);

/// jemalloc without views.
struct Jemalloc;

// SAFETY: these are the functions of jemalloc.
unsafe impl GlobalAlloc for Jemalloc {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller guarantees.
        unsafe { tikv_jemalloc_sys::malloc(layout.size()).cast() }
    }

    unsafe fn dealloc(&self, object: *mut u8, layout: Layout) {
        // SAFETY: as the caller guarantees.
        unsafe { tikv_jemalloc_sys::sdallocx(object.cast(), layout.size(), 0) }
    }
}

/// Processor time of this thread: other programs on the machine count less.
fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes the structure, which is borrowed for its time.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn pairs(heap: &dyn GlobalAlloc) -> Duration {
    let start = thread_time();
    for count in 0..2_000_000usize {
        let layout = Layout::from_size_align(16 + count % 8 * 16, 8).unwrap();
        // SAFETY: the object is freed with its layout.
        unsafe { heap.dealloc(black_box(heap.alloc(layout)), layout) };
    }
    (thread_time() - start) / 2_000_000
}

fn working_set(heap: &dyn GlobalAlloc) -> Duration {
    let (mut live, mut random) = (vec![(std::ptr::null_mut(), Layout::new::<u8>()); 100_000], 1u64);
    let steps = 1_000_000;
    let start = thread_time();
    for _ in 0..steps {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let size = 8 + (random >> 40) as usize % 400;
        let at = (random >> 20) as usize % live.len();
        let (object, layout) = live[at];
        // SAFETY: each object is freed once, with its layout, and has a byte.
        unsafe {
            if !<*mut u8>::is_null(object) {
                heap.dealloc(object, layout);
            }
            let layout = Layout::from_size_align(size, 8).unwrap();
            let object = heap.alloc(layout);
            object.write(1);
            live[at] = (object, layout);
        }
    }
    let time = (thread_time() - start) / steps;
    for (object, layout) in live.into_iter().filter(|(object, _)| !object.is_null()) {
        // SAFETY: as above.
        unsafe { heap.dealloc(object, layout) };
    }
    time
}

fn main() {
    static GLOBAL: [GlobalHeap; 1] = [GlobalHeap::new(Parts::Four, CAPACITY)];
    let own: Vec<(Parts, Heap)> =
        Parts::ALL.into_iter().map(|parts| (parts, Heap::new(parts, CAPACITY).unwrap())).collect();
    let directory = tempfile::tempdir().unwrap();
    let repository = Repository::create(&directory.path().join("repository")).unwrap();
    let saved = Parts::ALL.into_iter().map(|parts| {
        let options = HeapOptions { parts, capacity: CAPACITY, version: 0 };
        (parts, SavedHeap::create(&repository, &format!("{}-parts", parts.count()), options).unwrap())
    });
    let saved: Vec<(Parts, SavedHeap)> = saved.collect();
    println!("{:28} {:>12} {:>12}", "nanoseconds", "pair", "working set");
    for _ in 0..3 {
        let show = |name: &str, heap: &dyn GlobalAlloc| {
            println!("{name:28} {:>12} {:>12}", pairs(heap).as_nanos(), working_set(heap).as_nanos());
        };
        show("the system's allocator", &System);
        show("jemalloc alone", &Jemalloc);
        for (parts, heap) in &own {
            show(&format!("Heap, {} parts", parts.count()), heap);
        }
        for (parts, heap) in &saved {
            show(&format!("SavedHeap, {} parts", parts.count()), heap);
        }
        std::thread::scope(|scope| {
            // A thread that allocates from the global heap does not use jemalloc's own arenas any more.
            scope.spawn(|| show("GlobalHeap, 4 parts", &GLOBAL[0]));
        });
    }
}
