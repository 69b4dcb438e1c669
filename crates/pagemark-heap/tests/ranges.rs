//! What is written of a heap's ranges while other threads write them.

use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use pagemark::{Address, ByteCount, RangeSet};
use pagemark_heap::{Heap, Parts};

/// More than two pages, and not a whole number of them.
const WORDS: usize = 1300;

#[test]
fn ranges_that_other_threads_write_are_written_word_for_word() {
    let heap = Heap::new(Parts::Four, ByteCount::new(64 << 20)).unwrap();
    let layout = Layout::array::<AtomicU64>(WORDS).unwrap();
    // SAFETY: the layout has a size.
    let object = unsafe { heap.alloc_zeroed(layout) };
    assert!(!object.is_null());
    // SAFETY: the object has so many words, which are zeros, and is never freed.
    let words: &[AtomicU64] = unsafe { std::slice::from_raw_parts(object.cast(), WORDS) };
    let start = heap.canonical(object);
    let ranges = RangeSet::from(start..start + ByteCount::from(layout.size()));
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let write = |step: u64| {
            let mut value = 0_u64;
            while !is_done.load(Ordering::Relaxed) {
                value = value.wrapping_add(step) & 0xff;
                words.iter().for_each(|word| word.store(value * 0x0101_0101_0101_0101, Ordering::Relaxed));
            }
        };
        scope.spawn(move || write(1));
        scope.spawn(move || write(7));
        for _ in 0..200 {
            let mut written = Vec::new();
            heap.write_ranges(&ranges, &mut written).unwrap();
            let (numbers, rest) = written.as_chunks::<8>();
            let numbers: Vec<u64> = numbers.iter().map(|bytes| u64::from_ne_bytes(*bytes)).collect();
            assert_eq!((numbers.len(), rest.len()), (2 + WORDS, 0));
            assert_eq!((Address::new(numbers[0]), numbers[1]), (start, layout.size() as u64));
            let is_whole = |word: &u64| *word == (word & 0xff) * 0x0101_0101_0101_0101;
            assert!(numbers[2..].iter().all(is_whole), "a word was written in parts");
        }
        is_done.store(true, Ordering::Relaxed);
    });
    let outside = RangeSet::from(start..start + ByteCount::new(1 << 30));
    assert!(heap.write_ranges(&outside, &mut Vec::new()).is_err());
}
