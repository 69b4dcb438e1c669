//! What programs rely on in an allocator, and what happens at its limits.

use std::alloc::{GlobalAlloc, Layout};

use pagemark::ByteCount;
use pagemark_heap::{ErrorKind, Heap, Parts};

fn layout(size: usize, align: usize) -> Layout {
    Layout::from_size_align(size, align).unwrap()
}

#[test]
fn objects_are_aligned_and_as_large_as_they_say() {
    for parts in Parts::ALL {
        let heap = Heap::new(parts, ByteCount::new(1 << 30)).unwrap();
        for align in (0..=16).map(|shift| 1 << shift) {
            for size in [0, 1, 7, 8, 9, 16, 17, 100, 512, 1000, 4095, 4096, 4097, 14336, 14337, 100_000] {
                // SAFETY: the bytes are those of the object.
                unsafe {
                    let object = heap.alloc(layout(size, align));
                    assert!(!object.is_null() && object.addr().is_multiple_of(align), "{size} {align} {object:?}");
                    let usable = heap.usable_size(object);
                    assert!(usable >= size);
                    object.write_bytes(0xab, usable);
                    let other = heap.alloc(layout(size, align));
                    assert!(other != object);
                    let moved = heap.realloc(object, layout(size, align), 3 * size + 1);
                    assert!(moved.addr().is_multiple_of(align));
                    assert!((0..size).all(|at| moved.add(at).read() == 0xab), "{size} {align}");
                    heap.dealloc(other, layout(size, align));
                    heap.dealloc(moved, layout(3 * size + 1, align));
                }
            }
        }
    }
}

#[test]
fn memory_is_in_the_view_of_the_part_in_which_it_begins() {
    for parts in Parts::ALL {
        let heap = Heap::new(parts, ByteCount::new(1 << 30)).unwrap();
        let view_bytes = heap.addresses().end - heap.addresses().start;
        for size in [8, 48, 64, 640, 1500, 5000, 20_000, 3 << 20] {
            for _ in 0..50 {
                // SAFETY: the layout has a size.
                let object = unsafe { heap.alloc(layout(size, 8)) };
                let canonical = heap.canonical(object);
                assert!(heap.addresses().contains(&canonical));
                let view = (pagemark::Address::of(object) - canonical).get() / view_bytes.get();
                assert_eq!(view, canonical.get() % 4096 / parts.part_bytes().get());
            }
        }
    }
}

#[test]
fn a_full_heap_returns_null_and_loses_nothing() {
    for parts in [Parts::One, Parts::Eight] {
        let heap = Heap::new(parts, ByteCount::new(32 << 20)).unwrap();
        let mut objects = Vec::new();
        for size in [200_000, 3000] {
            loop {
                // SAFETY: the layout has a size; the bytes are the object's.
                unsafe {
                    let object = heap.alloc(layout(size, 8));
                    if object.is_null() {
                        break;
                    }
                    object.write_bytes(objects.len() as u8, size);
                    objects.push((object, size));
                }
            }
        }
        let bytes: usize = objects.iter().map(|(_, size)| size).sum();
        assert!(bytes > 16 << 20, "{bytes}");
        // SAFETY: the objects are live.
        unsafe {
            let (first, size) = objects[0];
            assert!(heap.realloc(first, layout(size, 8), 64 << 20).is_null());
            assert!(heap.alloc_zeroed(layout(64 << 20, 8)).is_null());
            assert!(heap.alloc(layout(isize::MAX as usize - 4095, 8)).is_null());
            for (number, &(object, size)) in objects.iter().enumerate() {
                assert!((0..size).step_by(97).all(|at| object.add(at).read() == number as u8));
                heap.dealloc(object, layout(size, 8));
            }
            assert!(!heap.alloc(layout(200_000, 8)).is_null());
        }
    }
}

/// Runs a test in a child, in which a limit is set.
fn with_limit(resource: libc::__rlimit_resource_t, limit: u64, test: impl FnOnce()) {
    // SAFETY: the child has one thread, and ends without its handlers.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            let limit = libc::rlimit { rlim_cur: limit, rlim_max: limit };
            libc::setrlimit(resource, &raw const limit);
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(test));
            libc::_exit(i32::from(result.is_err()));
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{status:#x}");
    }
}

fn error(capacity: u64) -> Option<ErrorKind> {
    Heap::new(Parts::Eight, ByteCount::new(capacity)).err().map(|error| error.kind())
}

#[test]
fn a_limit_is_named_by_the_error() {
    assert_eq!(error(1 << 50), Some(ErrorKind::NoRoom));
    assert_eq!(error(u64::MAX), Some(ErrorKind::NoRoom));
    with_limit(libc::RLIMIT_AS, 8 << 30, || assert_eq!(error(16 << 30), Some(ErrorKind::NoRoom)));
    with_limit(libc::RLIMIT_FSIZE, 1 << 20, || assert_eq!(error(1 << 30), Some(ErrorKind::FileLimit)));
    with_limit(libc::RLIMIT_NOFILE, 3, || assert_eq!(error(1 << 30), Some(ErrorKind::NoDescriptors)));
    let text = Heap::new(Parts::Eight, ByteCount::new(1 << 50)).err().unwrap().to_string();
    assert!(text.contains("making a heap") && text.contains("vm.max_map_count"), "{text}");
}

#[test]
fn a_process_without_room_for_mappings_keeps_the_heap_that_it_has() {
    let heap = Heap::new(Parts::Eight, ByteCount::new(1 << 26)).unwrap();
    // SAFETY: the bytes are the object's.
    let object = unsafe {
        let object = heap.alloc(layout(1000, 8));
        object.write_bytes(5, 1000);
        object
    };
    with_limit(libc::RLIMIT_CORE, 0, || {
        // Neighbours with different protection are mappings of their own.
        let page = |protection| {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            // SAFETY: a new mapping at an address that the kernel chooses touches no other memory.
            unsafe { libc::mmap(std::ptr::null_mut(), 4096, protection, flags, -1, 0) }
        };
        let mut last = [std::ptr::null_mut(); 2];
        for count in 0.. {
            let mapped = page([libc::PROT_READ, libc::PROT_NONE][count % 2]);
            if mapped == libc::MAP_FAILED {
                break;
            }
            last[count % 2] = mapped;
        }
        let refused = Heap::new(Parts::Eight, ByteCount::new(1 << 30)).err().map(|error| error.kind());
        // SAFETY: nobody uses these pages; the objects are live, and have these bytes.
        unsafe {
            let is_kept = (0..1000).all(|at| object.add(at).read() == 5);
            for _ in 0..1000 {
                let other = heap.alloc(layout(1000, 8));
                assert!(!other.is_null());
                other.write_bytes(6, 1000);
            }
            last.iter().for_each(|&page| assert_eq!(libc::munmap(page, 4096), 0));
            assert!(is_kept && (0..1000).all(|at| object.add(at).read() == 5));
        }
        assert_eq!(refused, Some(ErrorKind::NoRoom));
    });
}

#[test]
fn heaps_come_and_go() {
    for round in 0..200 {
        let heap = Heap::new(Parts::Four, ByteCount::new(1 << 30)).unwrap_or_else(|error| panic!("{round}: {error}"));
        // SAFETY: the layout has a size.
        assert!((0..100).all(|size| !unsafe { heap.alloc(layout(size * 10 + 1, 8)) }.is_null()));
        std::thread::scope(|scope| {
            // SAFETY: as above.
            scope.spawn(|| assert!(!unsafe { heap.alloc(layout(99, 8)) }.is_null()));
        });
    }
}
