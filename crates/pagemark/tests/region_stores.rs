//! Real code, as a compiler makes it at each level of optimization, on a region: what it stores is there, and what is
//! emulated is told by the word.
#![cfg(feature = "emulate")]

use std::ffi::{CString, c_void};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use pagemark::sys::own_memory::Mapping;
use pagemark::sys::pagemap::Pagemap;
use pagemark::tracker::emulate::{Counts, Emulate};
use pagemark::{PAGE_SIZE, RangeSet, Tracker};
use pagemark_testing::skip;

const BYTES: usize = 64 * PAGE_SIZE;

type Stores = unsafe extern "C" fn(*mut u8, usize, u64);

/// The functions of a compiled `stores.c`; none where the compiler or the processor does not know the flags.
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

fn content(mapping: &Mapping) -> Vec<u8> {
    // SAFETY: the mapping is readable and nobody writes it now.
    unsafe { std::slice::from_raw_parts(mapping.start().as_ptr(), mapping.bytes()) }.to_vec()
}

/// Runs the function on both memories, and compares them and what is told.
fn is_exact(name: &str, stores: Stores, seed: u64) -> Counts {
    let (plain, tracked) = (Mapping::new(BYTES).unwrap(), Mapping::new(BYTES).unwrap());
    let mut tracker = Emulate::new(Arc::new(Pagemap::of_this_process().unwrap())).unwrap();
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
            panic!("{name}: byte {offset:#x} is {:#x} and not {:#x}", now[offset], expected[offset]);
        }
        let mut written = RangeSet::new();
        tracker.collect(&all, &mut written).unwrap();
        for offset in (0..BYTES).filter(|&offset| before[offset] != now[offset]) {
            assert!(
                written.contains(tracked.range().start + offset as u64),
                "{name}: a write to {offset:#x} was missed"
            );
        }
    }
    tracker.counts()
}

#[test]
fn what_compilers_emit_is_emulated() {
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
                // Those that repeat a pattern.
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
    let mut tracker = Emulate::new(Arc::new(Pagemap::of_this_process().unwrap())).unwrap();
    let all = RangeSet::from(mapping.range());
    tracker.collect(&all, &mut RangeSet::new()).unwrap();
    // SAFETY: the numbers lie in the mapping, which outlives the threads, and are accessed atomically by all.
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
    assert_eq!(sums, (THREADS * EACH, THREADS * EACH, (THREADS * EACH) as u8));
    assert_eq!(tracker.counts().opened_pages, 0);
}
