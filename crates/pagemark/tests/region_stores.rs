//! Compiled code, at each level of optimization, that stores to a region: the content is correct,
//! and emulated stores are reported by the word.
#![cfg(feature = "emulate")]

use std::ffi::{CString, c_void};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use pagemark::track::OwnMemory;
use pagemark::track::emulate::{Counts, Emulate, HOT_STORES};
use pagemark::{ByteCount, PAGE_SIZE, RangeSet, Tracker};
use pagemark_linux::own_memory::Mapping;
use pagemark_linux::pagemap::Pagemap;
use pagemark_testing::{assert_oracle, assert_oracle_eq, finding, skip};

const BYTES: usize = 64 * PAGE_SIZE;

type Stores = unsafe extern "C" fn(*mut u8, usize, u64);

/// The functions of a compiled `stores.c`; none where the compiler or the processor does not
/// support the flags.
fn compile(directory: &Path, flags: &[&str]) -> Option<Vec<(&'static str, Stores)>> {
    let library = directory.join(format!("stores{}.so", flags.concat()));
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/stores.c");
    let done = Command::new("cc")
        .args(["-shared", "-fPIC", "-Wno-psabi"])
        .args(flags)
        .arg("-o")
        .arg(&library)
        .arg(source)
        .status();
    if !done.is_ok_and(|status| status.success()) {
        return None;
    }
    let path = CString::new(library.to_str().unwrap()).unwrap();
    // SAFETY: the library has no code that runs when it is loaded.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
    assert!(!handle.is_null());
    let names = [
        "stores_integers",
        "stores_reals",
        "stores_vectors",
        "stores_blocks",
        "stores_atomics",
        "stores_strings",
        "stores_x87",
    ];
    let find = |name: &'static str| {
        let symbol = CString::new(name).unwrap();
        // SAFETY: the handle is that of a loaded library.
        let address = unsafe { libc::dlsym(handle, symbol.as_ptr()) };
        assert!(!address.is_null(), "{name}");
        // SAFETY: the function has this type.
        (name, unsafe { std::mem::transmute::<*mut c_void, Stores>(address) })
    };
    Some(names.map(find).to_vec())
}

/// A tracker of the mapping. It is dropped before the mapping.
fn emulate(mapping: &Mapping) -> Emulate {
    // SAFETY: the mapping is private anonymous memory, which no code accesses during a collect.
    let memory = unsafe { OwnMemory::new(mapping.range()) }.unwrap();
    Emulate::new(Arc::new(Pagemap::of_this_process().unwrap()), memory).unwrap()
}

fn content(mapping: &Mapping) -> Vec<u8> {
    // SAFETY: the mapping is readable, and no code writes it now.
    unsafe { std::slice::from_raw_parts(mapping.start().as_ptr(), mapping.bytes()) }.to_vec()
}

/// Runs the function on both memories, and compares the memories and the reported words.
fn is_exact(name: &str, stores: Stores, seed: u64) -> Counts {
    let (plain, tracked) = (Mapping::new(BYTES).unwrap(), Mapping::new(BYTES).unwrap());
    // Every store is emulated, regardless of the number of stores to a page.
    let mut tracker = emulate(&tracked).opening_after(None);
    let all = RangeSet::from(tracked.range());
    tracker.collect(&all, &mut RangeSet::new()).unwrap();
    for round in 0..3 {
        let before = content(&tracked);
        // SAFETY: the functions write to the memory that they are given, of this length.
        unsafe {
            stores(plain.start().as_ptr(), BYTES, seed + round);
            stores(tracked.start().as_ptr(), BYTES, seed + round);
        }
        let (expected, now) = (content(&plain), content(&tracked));
        if let Some(offset) = (0..BYTES).find(|&offset| expected[offset] != now[offset]) {
            let (is, not) = (now[offset], expected[offset]);
            finding(&format!("{name}: byte {offset:#x} is {is:#x} and not {not:#x}"));
        }
        let mut written = RangeSet::new();
        tracker.collect(&all, &mut written).unwrap();
        for offset in (0..BYTES).filter(|&offset| before[offset] != now[offset]) {
            assert_oracle!(
                written.contains(tracked.range().start + ByteCount::from(offset)),
                "{name}: a write to {offset:#x} was missed"
            );
        }
    }
    tracker.counts()
}

#[test]
fn the_stores_of_compilers_are_emulated() {
    let directory = tempfile::tempdir().unwrap();
    let Some(_) = compile(directory.path(), &["-O0"]) else { skip!("no C compiler") };
    let mut levels = vec![vec!["-O0"], vec!["-O1"], vec!["-O2"], vec!["-O3"], vec!["-Os"]];
    if std::arch::is_x86_feature_detected!("avx2") {
        levels.push(vec!["-O3", "-mavx2"]);
    }
    if std::arch::is_x86_feature_detected!("avx512vl") && std::arch::is_x86_feature_detected!("avx512bw") {
        levels.push(vec!["-O3", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]);
        levels.push(vec!["-O3", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mprefer-vector-width=256"]);
    }
    for flags in levels {
        let functions = compile(directory.path(), &flags).unwrap();
        for (name, stores) in functions {
            let counts = is_exact(name, stores, 0x1234_5678_9abc);
            println!("{:<40} {name:<16} {counts:?}", flags.join(" "));
            if name == "stores_x87" {
                assert!(counts.opened_pages > 0, "x87 stores are not emulated");
            } else if name == "stores_strings" {
                // These functions repeat a pattern.
                assert!(counts.opened_pages <= 3 * 80 && counts.emulated_stores > 100, "{flags:?} {counts:?}");
            } else {
                assert_eq!(counts.opened_pages, 0, "{name} {flags:?}: {counts:?}");
                assert!(counts.emulated_stores > 100, "{name} {flags:?}: {counts:?}");
            }
        }
    }
}

#[test]
fn atomics_are_atomic_between_threads() {
    use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
    const THREADS: u64 = 8;
    const EACH: u64 = 3000;
    let mapping = Mapping::new(PAGE_SIZE).unwrap();
    let mut tracker = emulate(&mapping).opening_after(None);
    let all = RangeSet::from(mapping.range());
    tracker.collect(&all, &mut RangeSet::new()).unwrap();
    // SAFETY: the numbers lie in the mapping, which outlives the threads, and are accessed
    // atomically by all.
    let (added, exchanged, small) = unsafe {
        let start = mapping.start().as_ptr();
        (&*start.cast::<AtomicU64>(), &*start.add(64).cast::<AtomicU64>(), &*start.add(128).cast::<AtomicU8>())
    };
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                for _ in 0..EACH {
                    added.fetch_add(1, Ordering::Relaxed);
                    small.fetch_add(1, Ordering::Relaxed);
                    let mut seen = exchanged.load(Ordering::Relaxed);
                    while let Err(now) =
                        exchanged.compare_exchange(seen, seen + 1, Ordering::Relaxed, Ordering::Relaxed)
                    {
                        seen = now;
                    }
                }
            });
        }
        for _ in 0..50 {
            tracker.collect(&all, &mut RangeSet::new()).unwrap();
            std::thread::yield_now();
        }
    });
    let sums = (added.load(Ordering::Relaxed), exchanged.load(Ordering::Relaxed), small.load(Ordering::Relaxed));
    assert_oracle_eq!(sums, (THREADS * EACH, THREADS * EACH, (THREADS * EACH) as u8), "the sums");
    assert_eq!(tracker.counts().opened_pages, 0);
}

#[test]
fn a_page_is_opened_after_a_few_stores_in_an_interval() {
    const STORES: usize = 10_000;
    let mapping = Mapping::new(4 * PAGE_SIZE).unwrap();
    let mut tracker = emulate(&mapping);
    let all = RangeSet::from(mapping.range());
    tracker.collect(&all, &mut RangeSet::new()).unwrap();
    let store = |page: usize, index: usize| {
        // SAFETY: the word lies in the mapping, which only this thread uses.
        unsafe { mapping.start().as_ptr().cast::<u64>().add(page * 512 + index % 512).write_volatile(index as u64) }
    };
    let range = |start: usize, bytes: usize| {
        let start = mapping.range().start + ByteCount::from(start);
        RangeSet::from(start..start + ByteCount::from(bytes))
    };
    for round in 1..=3 {
        (0..STORES).for_each(|index| store(1, index));
        store(3, 7);
        let counts = tracker.counts();
        assert_eq!(counts.opened_pages, round, "{counts:?}");
        assert_eq!(counts.emulated_stores, round * (u64::from(HOT_STORES) + 1), "{counts:?}");
        let mut written = RangeSet::new();
        tracker.collect(&all, &mut written).unwrap();
        let mut expected = range(PAGE_SIZE, PAGE_SIZE);
        expected.extend(&range(3 * PAGE_SIZE + 7 * 8, 8));
        assert_eq!(written, expected);
    }
    // The last store to each word, and nothing else.
    for index in 0..512 {
        // SAFETY: as for `store`.
        let found = unsafe { mapping.start().as_ptr().cast::<u64>().add(512 + index).read_volatile() };
        let last = (0..STORES).rev().find(|store| store % 512 == index).unwrap();
        assert_oracle_eq!(found, last as u64, "word {index}");
    }
}
