//! A child made by `fork` has a heap of its own.

use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

use pagemark::ByteCount;
use pagemark_heap::{GlobalHeap, Heap, HeapTracker, Parts, grouping::Separate};
use pagemark_linux::at_fork::call_at_fork;
use pagemark_testing::{assert_oracle, assert_oracle_eq};

#[global_allocator]
static ALL: GlobalHeap = GlobalHeap::new(Parts::Four, ByteCount::new(4 << 30));

/// Runs a function in a child, and returns whether it returned true there.
fn in_child(function: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child is used as any process with one thread, and ends without its handlers.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::_exit(i32::from(!function()));
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
    }
}

#[test]
fn neither_process_sees_what_the_other_writes() {
    let heap = Heap::new(Parts::Eight, ByteCount::new(1 << 30)).unwrap();
    let layout = Layout::new::<[u64; 40]>();
    // SAFETY: the layout has a size.
    let objects: Vec<*mut u64> = (0..2000).map(|_| unsafe { heap.alloc_zeroed(layout).cast() }).collect();
    let mut words: Vec<String> = (0..1000).map(|number| format!("word {number}")).collect();
    let expected = words.clone();
    for (number, &object) in objects.iter().enumerate() {
        // SAFETY: the object has 40 numbers.
        unsafe { object.add(39).write(number as u64) };
    }
    // SAFETY: as above.
    let is_as_written =
        || objects.iter().enumerate().all(|(number, &object)| unsafe { object.add(39).read() } == number as u64);
    assert!(is_as_written());
    let is_right = in_child(|| {
        let was_right = is_as_written() && words == expected;
        words.iter_mut().for_each(|word| word.push_str(" of a child, which makes it long enough to move it"));
        // SAFETY: as above.
        objects.iter().for_each(|&object| unsafe { object.add(39).write(7) });
        let more: Vec<Vec<u8>> = (0..1000).map(|length| vec![1; length]).collect();
        let grandchild = in_child(|| {
            words[9].starts_with("word 9 of a child") && more.iter().map(Vec::len).sum::<usize>() == 499_500
        });
        was_right && grandchild
    });
    assert_oracle!(is_right, "a child has other content");
    assert_oracle!(is_as_written() && words == expected, "other content after a child has ended");
}

#[test]
fn a_tracker_goes_on_beside_children() {
    let heap = Heap::new(Parts::Four, ByteCount::new(1 << 30)).unwrap();
    let layout = Layout::new::<[u64; 4]>();
    // SAFETY: the layout has a size.
    let object: *mut u64 = unsafe { heap.alloc(layout).cast() };
    let Ok(mut tracker) = HeapTracker::new(&heap, Separate) else {
        pagemark_testing::skip!("no asynchronous write-protection");
    };
    let mut written = pagemark::RangeSet::new();
    tracker.collect_written(&mut written).unwrap();
    assert!(in_child(|| {
        // SAFETY: the object has four numbers.
        unsafe { object.write_volatile(1) };
        let error = tracker.collect_written(&mut pagemark::RangeSet::new()).err();
        let own = HeapTracker::new(&heap, Separate)
            .is_ok_and(|mut tracker| tracker.collect_written(&mut pagemark::RangeSet::new()).is_ok());
        error.is_some_and(|error| error.kind() == pagemark::ErrorKind::ForkedChild) && own
    }));
    written.clear();
    assert_eq!(tracker.collect_written(&mut written).unwrap().faults, 0);
    // SAFETY: as above.
    unsafe { object.write_volatile(1) };
    assert_eq!(tracker.collect_written(&mut written).unwrap().faults, 1);
    assert_oracle!(written.contains(heap.canonical(object)), "a write was missed");
}

#[test]
fn threads_that_fork_and_allocate_do_not_disturb_each_other() {
    std::thread::scope(|scope| {
        for thread in 0..4usize {
            scope.spawn(move || {
                for round in 0..6 {
                    let words: Vec<String> = (0..300).map(|number| format!("{thread} {round} {number}")).collect();
                    if thread < 2 {
                        assert_oracle!(
                            in_child(|| words
                                .iter()
                                .enumerate()
                                .all(|(number, word)| word.ends_with(&number.to_string()))),
                            "a child has other content"
                        );
                    }
                    drop(words);
                }
            });
        }
    });
}

#[test]
fn a_child_without_the_handlers_has_no_heap() {
    let heap = Heap::new(Parts::Two, ByteCount::new(1 << 24)).unwrap();
    let layout = Layout::new::<u64>();
    // SAFETY: the layout has a size. The child touches one object, and has no other thread.
    unsafe {
        let object: *mut u64 = heap.alloc(layout).cast();
        object.write_volatile(5);
        let child = libc::syscall(libc::SYS_fork) as i32;
        if child == 0 {
            let no_core = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            libc::setrlimit(libc::RLIMIT_CORE, &raw const no_core);
            libc::signal(libc::SIGSEGV, libc::SIG_DFL);
            object.write_volatile(6);
            libc::_exit(0);
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV, "{status:#x}");
        assert_oracle_eq!(object.read_volatile(), 5, "the content after a child has ended");
    }
}

/// The handlers of a program run before that of the heaps: what a lock of the program protects is
/// whole in the child's copy, also where its threads track the heap with the lock.
#[test]
fn a_child_has_what_a_lock_of_the_program_protects_as_it_was() {
    static PAIR: Mutex<Vec<u64>> = Mutex::new(Vec::new());
    thread_local! { static HELD: Cell<Option<MutexGuard<'static, Vec<u64>>>> = const { Cell::new(None) }; }
    extern "C" fn lock() {
        HELD.set(Some(PAIR.lock().unwrap()));
    }
    extern "C" fn unlock() {
        HELD.set(None);
    }
    let local = Heap::new(Parts::Two, ByteCount::new(1 << 24)).unwrap();
    // SAFETY: the handlers lock and unlock a mutex, by the thread that forks.
    unsafe { call_at_fork(lock, unlock, unlock).unwrap() };
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (stop, local) = (&stop, &local);
        for number in 0..2u64 {
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    // A thread of its own has caches of its own.
                    std::thread::scope(|scope| {
                        scope.spawn(|| {
                            let mut pair = PAIR.lock().unwrap();
                            *pair = vec![number; 2000];
                            let tracker = HeapTracker::new(local, Separate);
                            // SAFETY: the layout has a size, and the object is not used.
                            unsafe {
                                local.dealloc(local.alloc_zeroed(Layout::new::<[u64; 9]>()), Layout::new::<[u64; 9]>())
                            };
                            pair[1000..].fill(number + 2);
                            drop(tracker);
                            pair[..1000].fill(number + 2);
                        });
                    });
                }
            });
        }
        for _ in 0..100 {
            assert!(in_child(|| {
                let pair = PAIR.lock().unwrap();
                let mut words = vec![String::new(); 50];
                words.fill("a child uses the heap".to_owned());
                let is_usable = words.concat().len() == 50 * 21;
                pair.windows(2).all(|two| two[0] == two[1]) && is_usable
            }));
        }
        stop.store(true, Ordering::Relaxed);
    });
}
