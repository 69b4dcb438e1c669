//! A heap that is no static value, moved and dropped by safe code.
#![forbid(unsafe_code)]

use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::process::Command;

use pagemark::ByteCount;
use pagemark_heap::{GlobalHeap, Parts};

fn heap() -> GlobalHeap {
    GlobalHeap::new(Parts::One, ByteCount::new(1 << 24))
}

/// A program that is started by a fork: the standard library makes no other call with a user.
fn start_by_a_fork() {
    let user = std::fs::metadata("/proc/self").unwrap().uid();
    assert!(Command::new("true").uid(user).status().unwrap().success());
}

#[test]
fn a_heap_may_be_dropped() {
    let heap = Box::new(heap());
    assert!(!heap.allocate(100, 8).is_null());
    drop(heap);
    // Other objects get the memory.
    let others: Vec<Vec<u8>> = (0..50).map(|_| vec![0x41; size_of::<GlobalHeap>()]).collect();
    start_by_a_fork();
    assert!(others.iter().flatten().all(|&byte| byte == 0x41));
    let other = Box::new(self::heap());
    assert!(!other.allocate(100, 8).is_null());
}

#[test]
fn a_heap_may_be_moved() {
    let mut place = Box::new(heap());
    let first = place.allocate(100, 8);
    let moved = std::mem::replace(&mut *place, heap());
    let (second, other) = (moved.allocate(100, 8), place.allocate(100, 8));
    assert!(!first.is_null() && !second.is_null() && !other.is_null());
    // The heap has sixteen megabytes.
    assert!(first.addr().abs_diff(second.addr()) < 1 << 24);
    start_by_a_fork();
}
