//! Heaps of programs in the machine, in both forms: this test binary is the program.

use std::alloc::{GlobalAlloc, Layout};
use std::process::Command;

use pagemark::track::view_log::ViewLog;
use pagemark::{ByteCount, ErrorKind, PAGE_SIZE, Range, RangeSet};
use pagemark_heap::grouping::{Grouping, Groups, PageGroups, Seen, Separate};
use pagemark_heap::{Form, Heap, HeapTracker, Parts};
use pagemark_kvm_protocol::machine_calls::{ARRANGE, CALL, FORGET, Means, Move, READ, Run, TRACK, VIEWS};
use pagemark_linux::views::Views;
use pagemark_testing::assert_oracle_eq;

/// Also tests of the heap, for the user-level form outside.
#[path = "../../pagemark-heap/tests/shadow.rs"]
mod shadow;

const MACHINE: &str = env!("CARGO_BIN_EXE_pagemark-kvm");

/// Runs tests of this binary in the machine, and returns what they print. `None` if there is no
/// machine here.
fn inside(tests: &[&str], variables: &[(&str, &str)]) -> Option<String> {
    let check = Command::new(MACHINE).arg("--check").output().expect("the program of this crate");
    if !check.status.success() {
        pagemark_testing::skipped(String::from_utf8_lossy(&check.stderr).trim());
        return None;
    }
    let itself = std::env::current_exe().expect("this test");
    let mut command = Command::new(MACHINE);
    command.arg(itself).args(tests).args(["--nocapture", "--test-threads=1"]).envs(variables.iter().copied());
    let output = command.output().expect("the program of this crate");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}\n{text}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    Some(text)
}

fn passes_inside(test: &str) {
    if let Some(text) = inside(&["--exact", test, "--ignored"], &[]) {
        assert!(text.contains("1 passed"), "{text}");
    }
}

/// Random programs beside a copy that is brought up to date with what is reported, and nothing
/// else; threads; exact parts.
#[test]
fn the_oracle_of_the_heap_in_the_machine() {
    for form in [&[][..], &[("PAGEMARK_TEST_TWO_LEVEL", "1")][..]] {
        let Some(text) = inside(&["shadow::"], form) else { return };
        assert!(text.contains("7 passed"), "{text}");
    }
}

#[test]
fn merged_parts_are_one_page() {
    passes_inside("two_level::merged_parts");
}

#[test]
fn a_child_has_its_own_heap_and_tracker() {
    passes_inside("two_level::fork");
}

#[test]
fn the_monitor_refuses_what_is_no_view() {
    passes_inside("two_level::refusals");
}

#[test]
fn views_that_are_mapped_anew_are_forgotten() {
    passes_inside("two_level::mapped_anew");
}

#[test]
fn outside_of_the_machine_the_form_is_refused() {
    let heap = Heap::new(Parts::Two, ByteCount::new(2 << 20)).expect("address space");
    let error = HeapTracker::with_form(&heap, Separate, Form::TwoLevel).err().expect("this is no machine");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("pagemark-kvm"), "{error}");
}

#[test]
fn a_machine_with_rings_has_no_such_form() {
    if let Some(text) = inside(&["--exact", "two_level::with_rings", "--ignored"], &[("PAGEMARK_KVM_DIRTY", "rings")]) {
        assert!(text.contains("1 passed"), "{text}");
    }
}

/// Run in the machine.
mod two_level {
    use super::*;

    /// Has the groups that it is told.
    struct Told(std::sync::Arc<std::sync::Mutex<Groups>>);

    impl Grouping for Told {
        fn decide(&mut self, seen: &[Seen], groups: &mut PageGroups) {
            let told = *self.0.lock().expect("no panic");
            seen.iter().for_each(|seen| _ = groups.insert(seen.page, told));
        }
    }

    fn write(object: *mut u8) {
        // SAFETY: a live object of the caller.
        unsafe { object.write_volatile(object.read_volatile().wrapping_add(1)) };
    }

    /// A heap, and an object in each part of one page.
    fn heap(parts: Parts) -> (Heap, Vec<*mut u8>) {
        let heap = Heap::new(parts, ByteCount::new(64 << 20)).expect("address space");
        let bytes = parts.part_bytes().to_usize();
        let layout = Layout::from_size_align(bytes, bytes).expect("a layout");
        // SAFETY: the layout has a size.
        let mut objects: Vec<*mut u8> = (0..4 * parts.count()).map(|_| unsafe { heap.alloc(layout) }).collect();
        let page = |object: *mut u8| heap.canonical(object).get() / PAGE_SIZE as u64;
        let of_page = page(objects[parts.count()]);
        objects.retain(|object| page(*object) == of_page);
        objects.sort_by_key(|object| heap.canonical(*object));
        assert_eq!(objects.len(), parts.count());
        (heap, objects)
    }

    #[test]
    #[ignore = "is run by merged_parts_are_one_page, in the machine"]
    fn merged_parts() {
        let parts = Parts::Four;
        let (heap, objects) = heap(parts);
        let told = std::sync::Arc::new(std::sync::Mutex::new(Groups::default()));
        let mut tracker =
            HeapTracker::with_form(&heap, Told(told.clone()), Form::TwoLevel).expect("the machine keeps a log");
        objects.iter().for_each(|object| write(*object));
        let mut collect = |next: Groups| {
            *told.lock().expect("no panic") = next;
            let mut written = RangeSet::new();
            let interval = tracker.collect_written(&mut written).expect("tracked views");
            let is_written = |object: &*mut u8| written.contains(heap.canonical(*object));
            let found: Vec<usize> = (0..4).filter(|part| is_written(&objects[*part])).collect();
            (found, interval.faults)
        };
        let separate = Groups::default();
        let merged = Groups { merged: 0b1110, released: 0 };
        collect(separate);
        // Each part by itself.
        for (part, object) in objects.iter().enumerate() {
            write(*object);
            assert_eq!(collect(separate), (vec![part], 1));
        }
        objects.iter().for_each(|object| write(*object));
        assert_eq!(collect(merged), ((0..4).collect(), 4));
        // What was logged under the parts before they were merged counts in the interval after.
        write(objects[2]);
        assert_eq!(collect(merged), (vec![1, 2, 3], 1));
        for written in [vec![1], vec![2], vec![3], vec![1, 2, 3]] {
            written.iter().for_each(|part| write(objects[*part]));
            assert_eq!(collect(merged), (vec![1, 2, 3], 1), "{written:?}");
            // Unlike at user level, a group that was not written is not reported.
            assert_eq!(collect(merged), (vec![], 0));
        }
        write(objects[0]);
        assert_eq!(collect(merged), (vec![0], 1));
        write(objects[0]);
        write(objects[3]);
        assert_eq!(collect(separate), (vec![0, 1, 2, 3], 2));
        for (part, object) in objects.iter().enumerate().rev() {
            write(*object);
            assert_eq!(collect(separate), (vec![part], 1));
        }
        // A released part is reported in each interval, at no fault from its next write on.
        write(objects[1]);
        assert_eq!(collect(Groups { merged: 0, released: 0b0010 }), (vec![1], 1));
        for _ in 0..3 {
            write(objects[1]);
            write(objects[2]);
            assert_eq!(collect(Groups { merged: 0, released: 0b0010 }), (vec![1, 2], 1));
        }
        assert_eq!(collect(separate), (vec![1], 0));
        assert_eq!(collect(separate), (vec![], 0));
        // The kernel writes without a fault, and only its part is reported.
        let file = std::fs::File::open("/dev/zero").expect("zeros");
        // SAFETY: the object has the bytes of a part.
        let bytes = unsafe { std::slice::from_raw_parts_mut(objects[2], 16) };
        std::io::Read::read_exact(&mut &file, bytes).expect("zeros");
        assert_eq!(collect(separate), (vec![2], 0));
    }

    #[test]
    #[ignore = "is run by a_child_has_its_own_heap_and_tracker, in the machine"]
    fn fork() {
        let parts = Parts::Two;
        let (heap, objects) = heap(parts);
        let told = std::sync::Arc::new(std::sync::Mutex::new(Groups { merged: 0b11, released: 0 }));
        let tracker =
            |told: &std::sync::Arc<_>| HeapTracker::with_form(&heap, Told(Clone::clone(told)), Form::TwoLevel);
        let mut own = tracker(&told).expect("the machine keeps a log");
        let check = |own: &mut HeapTracker<Told>| {
            for _ in 0..3 {
                objects.iter().for_each(|object| write(*object));
                own.collect_written(&mut RangeSet::new()).expect("tracked views");
            }
            write(objects[1]);
            let mut written = RangeSet::new();
            let interval = own.collect_written(&mut written).expect("tracked views");
            let found = objects.iter().filter(|object| written.contains(heap.canonical(**object))).count();
            (found, interval.faults)
        };
        assert_eq!(check(&mut own), (2, 1));
        // SAFETY: the child is of one thread, and ends by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let is_refused = matches!(own.collect_written(&mut RangeSet::new()), Err(error) if error.kind() == ErrorKind::ForkedChild);
            // SAFETY: live objects.
            let before = unsafe { (objects[0].read_volatile(), objects[1].read_volatile()) };
            let is_same = before == (3, 4);
            let works = tracker(&told).is_ok_and(|mut own| check(&mut own) == (2, 1));
            // SAFETY: as above.
            let is_changed = unsafe { objects[0].read_volatile() == 6 };
            // SAFETY: ends the child.
            unsafe {
                libc::_exit(
                    i32::from(is_refused)
                        | i32::from(is_same) << 1
                        | i32::from(works) << 2
                        | i32::from(is_changed) << 3,
                )
            };
        }
        let mut status = 0;
        // SAFETY: waits for the child.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 15, "{status:#x}");
        // SAFETY: a live object: the child has not changed it.
        assert_eq!(unsafe { objects[0].read_volatile() }, 3);
        assert_eq!(check(&mut own), (2, 1));
    }

    #[test]
    #[ignore = "is run by a_machine_with_rings_has_no_such_form, in the machine"]
    fn with_rings() {
        let heap = Heap::new(Parts::Two, ByteCount::new(2 << 20)).expect("address space");
        let error = HeapTracker::with_form(&heap, Separate, Form::TwoLevel).err().expect("it keeps rings");
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.to_string().contains("PAGEMARK_KVM_DIRTY"), "{error}");
    }

    /// A call of the machine, with the errno as a negative result.
    fn call(operation: u64, arguments: [u64; 4]) -> i64 {
        let [start, end, to, len] = arguments;
        // SAFETY: what the monitor may write is memory of the caller, or no memory.
        let result = unsafe { libc::syscall(CALL as libc::c_long, operation, Means::Log as u64, start, end, to, len) };
        if result < 0 { -i64::from(std::io::Error::last_os_error().raw_os_error().unwrap_or(0)) } else { result }
    }

    const VIEW: u64 = 16 * PAGE_SIZE as u64;
    const INVALID: i64 = -libc::EINVAL as i64;

    fn of(range: &Range) -> (u64, u64) {
        (range.start.get(), range.end.get())
    }

    fn arrange(moves: &[Move], armed: &[Run]) -> i64 {
        call(ARRANGE, [moves.as_ptr() as u64, moves.len() as u64, armed.as_ptr() as u64, armed.len() as u64])
    }

    #[test]
    #[ignore = "is run by the_monitor_refuses_what_is_no_view, in the machine"]
    fn refusals() {
        let views = Views::new(ByteCount::new(VIEW), 2).expect("views");
        let (start, end) = (of(&views.view(0)).0, of(&views.view(1)).1);
        let private = vec![0u8; 4 * PAGE_SIZE];
        let page = PAGE_SIZE as u64;
        let private = (private.as_ptr() as u64).next_multiple_of(page);
        assert_eq!(call(ARRANGE, [0, 0, 0, 0]), 0, "nothing");
        let at = |view: u64, number: u64| start + view * VIEW + number * page;
        let one = |page, to| arrange(&[Move { page, to }], &[]);
        assert_eq!(one(at(1, 0), at(0, 0)), INVALID, "not declared");
        for (from, to, count) in [
            (start, end, 0),
            (start, end, 1),
            (start, end, 3),
            (start, end, 4),
            (start, end, u64::MAX),
            (start, end, 1 << 63),
            (start + page, end, 2),
            (start + 8, end, 2),
            (end, start, 2),
            (start, start, 1),
            (private, private + 2 * page, 2),
            // The monitor's addresses, and none.
            (0x5400_0000_0000, 0x5400_0000_2000, 2),
            (0, 2 * page, 2),
        ] {
            assert_eq!(call(VIEWS, [from, to, count, 0]), INVALID, "{from:#x} {to:#x} {count}");
        }
        assert_eq!(call(VIEWS, [start, end, 2, 0]), 0);
        assert_eq!(call(VIEWS, [start, end, 2, 0]), INVALID, "known");
        assert_eq!(one(at(1, 0), at(0, 0)), INVALID, "not tracked");
        let mut runs = [Run::default(); 8];
        let read = |runs: &mut [Run], from: u64, to: u64| call(READ, [from, to, runs.as_mut_ptr() as u64, 8]);
        assert_eq!(read(&mut runs, start, end), -i64::from(libc::ESTALE), "not tracked");
        assert_eq!(call(TRACK, [start, end, 0, 0]), 0);
        for (from, to) in [
            (at(1, 0), at(0, 1)),
            (at(1, 0) + 8, at(0, 0) + 8),
            (at(1, 0), private),
            (private, at(0, 0)),
            (at(1, 0), 0x1000),
            (at(1, 0), 0x5400_0000_0000),
            (at(1, 0), 0x6000_0000_0000),
            (at(1, 0), u64::MAX - page + 1),
            (at(1, 0), at(2, 0)),
        ] {
            assert_eq!(one(from, to), INVALID, "{from:#x} {to:#x}");
        }
        // One wrong step, and no step is made.
        let steps = [Move { page: at(1, 0), to: at(0, 0) }, Move { page: at(1, 1), to: at(0, 2) }];
        assert_eq!(arrange(&steps, &[]), INVALID);
        for (from, to) in [
            (at(0, 0), at(0, 0)),
            (at(0, 1), at(0, 0)),
            (at(0, 0) + 1, at(0, 1)),
            (at(1, 15), at(1, 17)),
            (private, private + page),
            (0, u64::MAX),
        ] {
            assert_eq!(arrange(&[], &[Run { start: from, end: to }]), INVALID, "{from:#x} {to:#x}");
        }
        assert_eq!(call(ARRANGE, [0x5400_0000_0000, 1, 0, 0]), -i64::from(libc::EFAULT));
        assert_eq!(call(ARRANGE, [private, 4097, 0, 0]), INVALID);
        assert_eq!(call(ARRANGE, [0, 0, private, u64::MAX]), INVALID);
        assert_eq!(call(77, [start, end, 0, 0]), INVALID);
        // The views still work: nothing was moved.
        let touch = |address: u64| write(address as *mut u8);
        touch(at(1, 0));
        assert_eq!((read(&mut runs, start, end), runs[0].start & !1), (1, at(1, 0)));
        assert_eq!(arrange(&[Move { page: at(1, 0), to: at(0, 0) }], &[Run { start: at(1, 0), end: at(1, 1) }]), 0);
        touch(at(1, 0));
        assert_eq!((read(&mut runs, start, end), runs[0].start & !1), (1, at(0, 0)));
        // A list that does not fit is read again.
        let no_memory = 0x1000;
        assert_eq!(call(READ, [start, end, no_memory, 8]), -i64::from(libc::EFAULT));
        assert_eq!((read(&mut runs, start, end), runs[0].start & !1), (1, at(0, 0)));
        assert_eq!(call(FORGET, [start, end, 0, 0]), 0);
        assert_eq!(read(&mut runs, start, end), -i64::from(libc::ESTALE));
        touch(at(1, 0));
        // SAFETY: mapped.
        assert_eq!(unsafe { *(at(0, 0) as *const u8) }, 3);
    }

    #[test]
    #[ignore = "is run by views_that_are_mapped_anew_are_forgotten, in the machine"]
    fn mapped_anew() {
        let views = Views::new(ByteCount::new(VIEW), 2).expect("views");
        // SAFETY: the value is dropped before the views.
        let mut log = unsafe { ViewLog::new(&views) }.expect("the machine keeps a log");
        log.track_up_to(ByteCount::new(VIEW)).expect("tracked");
        let at = |view: usize, page: u64| views.view(view).start.get() + page * PAGE_SIZE as u64;
        for page in 0..16 {
            write(at(1, page) as *mut u8);
            // SAFETY: mapped.
            assert_eq!(unsafe { *(at(0, page) as *const u8) }, 1);
        }
        let moves: Vec<Move> = (0..16).map(|page| Move { page: at(1, page), to: at(0, page) }).collect();
        log.arrange(&moves, &RangeSet::new()).expect("views");
        for page in 0..16 {
            write(at(1, page) as *mut u8);
        }
        // Other memory takes the place of some pages of the second view.
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED);
        let place = at(1, 4) as *mut libc::c_void;
        // SAFETY: pages of a view, which nobody uses.
        assert_eq!(unsafe { libc::mmap(place, 4 * PAGE_SIZE, protection, flags, -1, 0) }, place);
        for page in 0..16 {
            // SAFETY: mapped.
            let (first, second) = unsafe { (*(at(0, page) as *const u8), *(at(1, page) as *const u8)) };
            let is_new = (4..8).contains(&page);
            assert_oracle_eq!((first, second), (2, if is_new { 0 } else { 2 }), "page {page} of two views");
            write(at(1, page) as *mut u8);
            // SAFETY: mapped.
            let first = unsafe { *(at(0, page) as *const u8) };
            assert_oracle_eq!(first, if is_new { 2 } else { 3 }, "page {page} of the first view");
        }
        let error = log.read(0, |_, _| ()).expect_err("mapped anew");
        assert_eq!(error.kind(), ErrorKind::Remapped, "{error}");
    }
}
